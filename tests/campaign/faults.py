"""The classes of faults, and the oracle that judges what forebay does after each."""

import errno
import os
import random
import resource
import shutil
import signal
import time
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager, suppress
from dataclasses import dataclass, field
from functools import cache, partial
from pathlib import Path
from typing import Any, Literal

from tests.campaign.beside import build_from_hub, make_tier, read_tier, start_hub
from tests.campaign.damage import Done, damage_file, damage_one, leave_behind
from tests.campaign.hostile import CHANGING, CRAFTED, LOOKING, chunks, craft
from tests.campaign.syscalls import SUPPORTED, Strike, Traced, run_traced
from tests.campaign.trial import SECONDS, Ending, Verdict, command_line, remove, run_call, run_verb
from tests.campaign.worlds import (
    READ_SECONDS,
    Canary,
    World,
    chunk_digests,
    doorbell,
    lines_of,
    raw_command,
    read_rows,
    write_lines,
)

import forebay as fb

BUILD_SECONDS = 20.0
Outcome = Literal["right", "restored", "refused", "finding"]
OUTCOMES: tuple[Outcome, ...] = ("right", "restored", "refused", "finding")


@dataclass(frozen=True, slots=True)
class Finding:
    """A fault that forebay did not take as it should."""

    cause: str
    verdict: Verdict
    seen: str


@dataclass
class Trial:
    """One fault: a folder to work in, a canary beside it, and what was found."""

    folder: Path
    draw: random.Random
    worlds: Sequence[World]
    cause: str = ""
    findings: list[Finding] = field(default_factory=list)
    was_refused: bool = False  # a verb or a reader ended in an error
    is_whole: bool = False  # all rows were there at the end

    def __post_init__(self) -> None:
        self.canary = Canary(self.folder / "outside")
        self.root = self.folder / "cache"

    @property
    def outcome(self) -> Outcome:
        """What came of the fault: every row right throughout, right again at the end, a clear error, or a finding."""
        if self.findings:
            return "finding"
        if not self.was_refused:
            return "right"
        return "restored" if self.is_whole else "refused"

    def find(self, verdict: Verdict, seen: str) -> None:
        self.findings.append(Finding(self.cause, verdict, seen.replace(str(self.folder), "…")))

    def judge(self, what: str, ending: Ending, *, may_die: bool = False) -> Ending:
        for verdict, seen in ending.faults(may_die=may_die):
            self.find(verdict, f"{what}: {seen}")
        self.was_refused |= ending.code != 0
        return ending

    def verb(self, *arguments: str, seconds: float = BUILD_SECONDS) -> Ending:
        return self.judge(arguments[0], run_verb(*arguments, seconds=seconds))

    def read(self, world: World, root: Path | None = None) -> tuple[int, list[str]]:
        """How many rows can be read, and the errors met. A wrong row is found."""
        ending = run_call(lambda: read_rows(root or self.root), seconds=READ_SECONDS)
        self.judge("reading", ending)
        if ending.answer is None:
            return 0, []
        rows, errors = ending.answer["rows"], ending.answer["errors"]
        wrong = [row for row in rows if row not in world.rows]
        if wrong or len(set(rows)) != len(rows):
            self.find("silent", f"reading gives {len(wrong)} wrong and {len(rows) - len(set(rows))} double rows")
        self.was_refused |= bool(errors)
        return len(rows), errors

    def expect_whole(self, world: World, *, same_bytes: bool) -> None:
        """All rows, a sound cache, and the chunks of an undisturbed build."""
        rows, errors = self.read(world)
        if errors or rows != len(world.rows):
            self.find("lost", f"{rows} of {len(world.rows)} rows can be read; {sorted(set(errors))}")
        verified = self.verb("verify", str(self.root))
        if verified.code != 0:
            self.find("lost", f"verify ends with {verified.code}: {verified.last_line}")
        if same_bytes and chunk_digests(self.root) != world.files:
            self.find("silent", "the chunks are not those of an undisturbed build")
        self.is_whole = True

    def expect_untouched(self) -> None:
        changed = self.canary.changes()
        if changed:
            self.find("outside", f"files beside the cache changed: {changed}")
        for sent in doorbell().calls():
            self.find("outside", f"a host that only the cache names was contacted: {sent.splitlines()[:1]}")


def _pick(trial: Trial) -> World:
    # Raw lines more often: their verbs take less time, and their rows are known from the source.
    return trial.draw.choice([*trial.worlds, *trial.worlds[:4], *trial.worlds[:4]])


def _verb_call(*arguments: str) -> Callable[[], None]:
    return partial(command_line, arguments)


# --- kills and errors at single system calls ------------------------------------------------------------------------


@dataclass(frozen=True, slots=True)
class Job:
    """A command to strike, what must be there before, and whether it ends in the whole cache at the trial's root."""

    name: str
    prepare: Callable[[Trial, World], None]
    command: Callable[[Trial, World], tuple[str, ...]]


def _nothing(trial: Trial, world: World) -> None:
    """A build from the beginning."""


def _half(trial: Trial, world: World) -> None:
    run_verb(*world.build(trial.root, "--end-chunk", "1"), seconds=BUILD_SECONDS)


def _whole(trial: Trial, world: World) -> None:
    world.copied(trial.root)


def _hurt(trial: Trial, world: World) -> None:
    """Two chunks damaged, one gone."""
    world.copied(trial.root)
    chunks = sorted((trial.root / "layers").glob("*/[0-9]*.safetensors"))
    chunks[0].unlink()
    for path in chunks[1:3]:
        with path.open("r+b") as file:
            file.seek(-9, os.SEEK_END)
            byte = file.read(1)
            file.seek(-9, os.SEEK_END)
            file.write(bytes([byte[0] ^ 4]))


JOBS = (
    Job("build", _nothing, lambda trial, world: world.build(trial.root)),
    Job("resume", _half, lambda trial, world: world.build(trial.root)),
    Job("inverse", _hurt, lambda trial, world: world.build(trial.root, "--mode", "inverse")),
    Job("repair", _hurt, lambda trial, world: ("repair", str(trial.root), "--workers", "0")),
    Job("repair --from", _hurt, lambda trial, world: ("repair", str(trial.root), "--from", str(world.cache))),
    Job("copy", _nothing, lambda trial, world: ("copy", str(world.cache), str(trial.root))),
    Job("clean", _whole, lambda trial, world: ("clean", str(trial.root), "--keep-generations", "1")),
    Job("verify", _whole, lambda trial, world: ("verify", "--full", str(trial.root))),
)
_CALLS_OF: dict[tuple[str, str], int] = {}
ERRORS = {
    name: getattr(errno, name)
    for name in ("EIO", "ENOSPC", "EACCES", "EMFILE", "ENOMEM", "ESTALE", "EBUSY", "EINTR", "EROFS", "EDQUOT")
}


def _traced(trial: Trial, job: Job, world: World, strike: Strike | None) -> Traced:
    return run_traced(_verb_call(*job.command(trial, world)), trial.root, strike, seconds=BUILD_SECONDS)


def _chosen(trial: Trial) -> tuple[Job, World, int]:
    """A command, made ready, and one of the system calls it makes."""
    job, world = trial.draw.choice(JOBS), _pick(trial)
    if job.name in ("resume",) and world.name == "grown":
        world = trial.worlds[0]
    if (job.name, world.name) not in _CALLS_OF:
        job.prepare(trial, world)
        _CALLS_OF[job.name, world.name] = max(1, _traced(trial, job, world, None).calls)
        remove(trial.root)
    job.prepare(trial, world)
    return job, world, 1 + trial.draw.randrange(_CALLS_OF[job.name, world.name])


def _finish(trial: Trial, job: Job, world: World) -> None:
    """The same command again ends well, and the cache is as if nothing had happened."""
    again = trial.verb(*job.command(trial, world))
    if again.code != 0:
        trial.find("lost", f"the same command ends with {again.code}: {again.last_line}")
        return
    if job.name in ("build", "resume") and world.name == "grown":
        trial.read(world)  # built in one segment: other chunks, the same lines
    else:
        trial.expect_whole(world, same_bytes="--from" not in job.name)


def kill(trial: Trial) -> None:
    """SIGKILL as a system call on the cache begins."""
    job, world, at = _chosen(trial)
    struck = _traced(trial, job, world, Strike(at))
    trial.cause = f"kill {job.name} {world.name} at call {at} ({struck.struck})"
    if struck.ending.signal not in (signal.SIGKILL, None):
        trial.judge(job.name, struck.ending)
    trial.read(world)
    _finish(trial, job, world)


def fail_call(trial: Trial) -> None:
    """A system call on the cache fails, once or from then on."""
    job, world, at = _chosen(trial)
    name = trial.draw.choice(sorted(ERRORS))
    lasting = trial.draw.random() < 0.4 and name != "EINTR"  # Python repeats a call that EINTR ends, for ever
    struck = _traced(trial, job, world, Strike(at, error=ERRORS[name], lasting=lasting))
    trial.cause = f"{name}{' lasting' if lasting else ''} in {job.name} {world.name} at call {at} ({struck.struck})"
    trial.judge(job.name, struck.ending)
    trial.read(world)
    _finish(trial, job, world)


# --- damage ----------------------------------------------------------------------------------------------------------

_BEFORE = (("status",), ("gaps",), ("info",), ("verify", "--full"), ("clean",), ("peek",), ("build",))


def damage(trial: Trial) -> None:
    """One to four files are damaged; a reader, `verify`, `repair` and a build meet that in turn."""
    world = _pick(trial)
    other = trial.draw.choice([each for each in trial.worlds if each is not world])
    world.copied(trial.root)
    if trial.draw.random() < 0.3:
        leave_behind(trial.draw, trial.root)
    count = trial.draw.choice((1, 1, 1, 2, 3, 4))
    done = [damage_file(trial.draw, trial.root, other.cache) for _ in range(count)]
    trial.cause = f"damage {world.name}: {', '.join(map(str, done))}"
    rows, errors = trial.read(world)
    _expect_found(trial, world, done, rows, errors)
    for name, *more in trial.draw.sample(_BEFORE, trial.draw.randrange(3)):
        trial.verb(name, *more, str(trial.root), *(["--workers", "0"] if name == "build" else []))
    _repaired(trial, world, done)


def _expect_found(trial: Trial, world: World, done: Sequence[Done], rows: int, errors: list[str]) -> None:
    """`verify` finds what a reader stumbles over, and rows that are gone.

    A newest generation that is lost leaves the one before it, whole: only a pin tells that there was a newer one.
    """
    verified = trial.verb("verify", str(trial.root))
    is_older = any(each.key.startswith("generations/") for each in done)
    if verified.code == 0 and (errors or (rows != len(world.rows) and not is_older)):
        trial.find("silent", f"verify calls sound what reads as {rows} rows and {sorted(set(errors))}")


def _repaired(trial: Trial, world: World, done: Sequence[Done]) -> None:
    copied = trial.draw.random() < 0.5
    command = ["repair", str(trial.root), *(["--from", str(world.cache)] if copied else []), "--workers", "0"]
    ending = trial.verb(*command)
    if ending.code != 0:
        trial.judge("repair", _advice_checked(ending, trial))
        _clear_the_way(trial, done)
        ending = trial.verb(*command)
    if ending.code != 0 and not copied:  # what only the source and a plan could bring back is in the copy
        command += ["--from", str(world.cache)]
        ending = trial.verb(*command)
    if ending.code != 0:
        if not _says_newer(done, ending) and not _says_other(done, ending):
            trial.find("lost", f"repair{' --from a pristine copy' if '--from' in command else ''}: {ending.last_line}")
        return
    rows, errors = trial.read(world)
    if rows != len(world.rows) and not errors:
        _clear_the_way(trial, done)
        again = ("grow", str(trial.root), str(world.source / "*.txt")) if "forebay grow" in ending.output else ()
        built = trial.verb(*(again or ("build", str(trial.root))), "--workers", "0")
        if built.code != 0:
            trial.find("lost", f"after repair, build: {built.last_line}")
            return
    trial.expect_whole(world, same_bytes=False)


def _advice_checked(ending: Ending, trial: Trial) -> Ending:
    if "forebay repair" in ending.output and "--from" not in ending.output and "--source" not in ending.output:
        trial.find("unclear", f"repair fails and advises to run repair: {ending.last_line}")
    return ending


def _clear_the_way(trial: Trial, done: Sequence[Done]) -> None:
    """What is not a file where one should be is not forebay's to remove: the user does, as the error says."""
    for each in done:
        path = trial.root / each.key
        if each.name == "directory" and path.is_dir():
            path.rmdir()
        elif each.name in ("dangling", "fifo") and (path.is_symlink() or path.is_fifo()):  # not what a repair put there
            path.unlink()


def _says_newer(done: Sequence[Done], ending: Ending) -> bool:
    """A document that says it is of a newer format is refused as that: nothing else in it says that it is damaged."""
    return any(each.name == "newer" for each in done) and "upgrade forebay" in ending.output


def _says_other(done: Sequence[Done], ending: Ending) -> bool:
    """Where `cache.json` has another id and no generation is left, nothing says that the copy is of this cache."""
    other = any(each.name in ("other-cache", "flip") and each.key == "cache.json" for each in done)
    return other and "is of another cache (id" in ending.output


def flip(trial: Trial) -> None:
    """One damage, met by a reader and by `verify` alone: many of these, since they take little time."""
    world = _pick(trial)
    other = trial.draw.choice([each for each in trial.worlds if each is not world])
    world.copied(trial.root)
    if trial.draw.random() < 0.2:
        leave_behind(trial.draw, trial.root)
    done = damage_file(trial.draw, trial.root, other.cache)
    trial.cause = f"flip {world.name}: {done}"
    rows, errors = trial.read(world)
    _expect_found(trial, world, [done], rows, errors)


# --- what lies beside a cache -----------------------------------------------------------------------------------------


def damage_tier(trial: Trial) -> None:
    """A tier's files are damaged: rows stay right or are refused, no verb dies, and clearing it brings it back."""
    world = next(each for each in trial.worlds if each.name == "images")
    right = _untiered_rows(world.source)
    tier = trial.folder / "tier"
    shutil.copytree(make_tier(world), tier)
    done = [damage_one(trial.draw, tier, trial.draw.choice(sorted(tier.iterdir())), world.cache)]
    trial.cause = f"tier: {done[0]}"
    _read_tier(trial, world, tier, right)
    warm = ("warm", str(world.source), "--size", "32", "--l2", str(tier), "--workers", "0", "--max-bytes", "64MB")
    verbs = [("tier", "stats", str(tier)), ("tier", "verify", str(tier)), warm]
    for verb in trial.draw.sample(verbs, 3):
        trial.judge(" ".join(verb[:2]), run_verb(*verb, seconds=BUILD_SECONDS))
    _read_tier(trial, world, tier, right)
    cleared = trial.judge("tier clear", run_verb("tier", "clear", str(tier), seconds=BUILD_SECONDS))
    if cleared.code != 0:
        trial.root = tier
        _clear_the_way(trial, done)
        cleared = trial.judge("tier clear", run_verb("tier", "clear", str(tier), seconds=BUILD_SECONDS))
    warmed = trial.judge("warm", run_verb(*warm, seconds=BUILD_SECONDS))
    if warmed.code != 0 and any(words in warmed.output for words in ("choose another folder", "new or empty")):
        return  # files that forebay cannot know as its own stay where they are, and it says so
    if warmed.code != 0:
        trial.find("lost", f"clear: {cleared.last_line}; warm: {warmed.last_line}")
        return
    verified = trial.judge("tier verify", run_verb("tier", "verify", str(tier), seconds=BUILD_SECONDS))
    if verified.code != 0 or _read_tier(trial, world, tier, right):
        trial.find("lost", f"cleared and warmed, verify says: {verified.last_line}")
    trial.is_whole = True


def _read_tier(trial: Trial, world: World, tier: Path, right: list[str]) -> list[str]:
    ending = trial.judge("reading a tier", run_call(lambda: read_tier(world.source, tier), seconds=READ_SECONDS))
    answer = ending.answer or {"rows": [], "errors": []}
    if answer["rows"] and answer["rows"] != right:
        trial.find("silent", "a tier gives other rows than the images")
    trial.was_refused |= bool(answer["errors"])
    return list(answer["errors"])


@cache
def _untiered_rows(source: Path) -> list[str]:
    rows: list[str] = run_call(lambda: read_tier(source, None)).answer["rows"]
    return rows


def download(trial: Trial) -> None:
    """A build from a hub that misbehaves dies, what it downloaded is damaged, and the same build ends as it should."""
    draw, place = trial.draw, trial.folder / "downloads"
    vocabulary = str(next(each for each in trial.worlds if each.name == "tokens").folder / "tokenizer.json")
    start_hub()  # before a child, which would start one by itself
    right = _undisturbed_download(trial.worlds[0].folder.parent / "from-hub", vocabulary)
    seed = str(draw.randrange(1, 1 << 30))

    def build() -> None:
        build_from_hub(trial.root, place, seed, vocabulary)

    at = 1 + draw.randrange(300)
    struck = run_traced(build, trial.folder, Strike(at), seconds=BUILD_SECONDS)
    files = sorted(path for path in place.rglob("*") if path.is_file()) if place.exists() else []
    done = [damage_one(draw, place, draw.choice(files), place / "none") for _ in range(draw.choice((0, 1))) if files]
    trial.cause = f"download seed {seed} killed at call {at} ({struck.struck}), {', '.join(map(str, done))}"
    if struck.ending.signal is None:
        trial.judge("build", struck.ending)
    trial.was_refused |= struck.ending.code != 0
    again = trial.judge("build", run_call(build, seconds=BUILD_SECONDS))
    if again.code != 0 and done:  # what is not a file is not forebay's to remove
        here, trial.root = trial.root, place
        _clear_the_way(trial, done)
        trial.root = here
        again = trial.judge("build", run_call(build, seconds=BUILD_SECONDS))
    for _ in range(5):  # a bit flipped in a footer that is read by range has no hash to fail: the sentence names it
        if again.code != 0 and "not a sound Parquet file" in again.last_line:
            again = trial.judge("build", run_call(build, seconds=BUILD_SECONDS))
    if again.code != 0:
        trial.find("lost", f"the same build ends with {again.code}: {again.last_line}")
    elif chunk_digests(trial.root) != right:
        trial.find("silent", "the chunks are not those of an undisturbed build")
    trial.is_whole = True


@cache
def _undisturbed_download(folder: Path, vocabulary: str) -> dict[str, str]:
    place = folder / str(os.getpid())
    ending = run_call(lambda: build_from_hub(place / "cache", place / "downloads", "0", vocabulary), seconds=60)
    assert ending.code == 0, ending.output
    return chunk_digests(place / "cache")


# --- races, clocks, limits -------------------------------------------------------------------------------------------


def _lines_world(trial: Trial, codec: str = "zstd") -> tuple[Path, list[bytes]]:
    """Lines of this trial's own, so that they may change under the build."""
    lines = lines_of(trial.draw.randrange(1 << 30), 60)
    write_lines(trial.folder / "source/a.txt", lines)
    return trial.folder / "source", lines


def _texts(root: Path) -> list[str]:
    cache = fb.open_cache(root)
    data = cache.read(range(len(cache)), columns=["data"])["data"]
    return sorted(bytes(data[row]).decode("utf-8", "replace") for row in range(len(data)))


def move_source(trial: Trial) -> None:
    """The source is truncated, rewritten, appended to or replaced in the middle of a build."""
    source, lines = _lines_world(trial)
    path = source / "a.txt"
    how = trial.draw.choice(("truncate", "rewrite", "append", "replace", "same-mtime", "delete"))
    changed = [line.swapcase() + b"!" if how != "same-mtime" else line[::-1] for line in lines]

    def change(pid: int) -> None:
        before = path.stat()
        if how == "truncate":
            os.truncate(path, before.st_size // 2)
        elif how == "append":
            with path.open("ab") as file:
                file.write(b"a new line\n" * 3)
        elif how == "delete":
            path.unlink()
        elif how == "replace":
            write_lines(source / "b", changed)
            os.replace(source / "b", path)
        else:
            write_lines(path, changed)
            if how == "same-mtime":
                os.utime(path, ns=(before.st_atime_ns, before.st_mtime_ns))

    command = ("build", *raw_command(source), "--into", str(trial.root), "--workers", "0")
    at = 1 + trial.draw.randrange(400)
    struck = run_traced(_verb_call(*command), trial.folder, Strike(at, meanwhile=change), seconds=BUILD_SECONDS)
    trial.cause = f"source {how} at call {at} ({struck.struck})"
    trial.judge("build", struck.ending)
    if struck.struck is None or struck.ending.code != 0:
        return
    now = path.read_bytes().splitlines() if path.exists() else []
    rows = trial.judge("reading", run_call(lambda: _texts(trial.root))).answer or []
    sides = ([line.decode() for line in lines], [line.decode() for line in now])
    if all(any(row not in side for row in rows) for side in sides):
        trial.find("silent", "the rows are neither of the source as it was nor as it is")
    full = trial.verb("verify", "--full", str(trial.root))
    # Replaced by a longer one before it was read, the file is as one that grew: `grow` makes rows of the rest.
    has_grown = (
        0 < len(rows) < len(now)
        and sorted(rows) == sorted(sides[1][: len(rows)])
        and trial.verb("grow", str(trial.root), str(source), "--workers", "0").code == 0
    )
    if has_grown:
        rows = trial.judge("reading", run_call(lambda: _texts(trial.root))).answer or []
    if full.code == 0 and sorted(rows) != sorted(sides[1]) and how != "append":
        trial.find("silent", f"verify --full calls {len(rows)} rows sound, the source has {len(now)} lines")


def race(trial: Trial) -> None:
    """While a builder stands still at a system call, another process does its whole work on the same cache."""
    world = trial.draw.choice(trial.worlds[:3])
    root, between = trial.root, trial.draw.choice(("builder", "clean", "repair", "verify", "status", "copy", "builder"))

    def meanwhile(pid: int) -> None:
        if between == "builder":
            trial.judge("the other builder", run_call(lambda: _other_builder(world, root), seconds=BUILD_SECONDS))
        elif between == "copy":
            trial.judge("copy", run_verb("copy", str(root), str(trial.folder / "copied"), seconds=BUILD_SECONDS))
        else:
            trial.judge(between, run_verb(between, str(root), seconds=BUILD_SECONDS))
        trial.read(world)

    job = trial.draw.choice([each for each in JOBS if each.name in ("build", "resume", "repair", "inverse", "clean")])
    if between == "clean" and job.name == "clean":
        job = JOBS[0]
    job.prepare(trial, world)
    at = 1 + trial.draw.randrange(300)
    struck = _traced(trial, job, world, Strike(at, meanwhile=meanwhile))
    trial.cause = f"{between} while {job.name} {world.name} is at call {at} ({struck.struck})"
    trial.judge(job.name, struck.ending)
    trial.findings = [Finding(trial.cause, each.verdict, each.seen) for each in trial.findings]
    _finish(trial, job, world)


def _other_builder(world: World, root: Path) -> None:
    """A second builder, whose patience with the first is short."""
    source = fb.sources.lines(str(world.source / "*.txt"))
    recipe = fb.RawRecipe(chunk_bytes=600, rows_per_block=3, codec=world.name.removeprefix("raw-"))  # type: ignore[arg-type]  # one of the three
    with suppress(fb.errors.ForebayError):
        fb.build(root, source, recipe, workers=0, lease_seconds=0.3)


def clock(trial: Trial) -> None:
    """A builder whose clock is days off dies, and one with another clock takes over."""
    world = trial.draw.choice(trial.worlds[:3])
    offsets = [trial.draw.choice((-3e5, -3600.0, 0.0, 3600.0, 3e5, 3e9)) for _ in range(2)]
    trial.cause = f"clock {world.name}: {offsets[0]:+.0f} s, then {offsets[1]:+.0f} s"
    first, second = (_shifted(offset) for offset in offsets)

    def call() -> None:
        first()
        _verb_call(*world.build(trial.root))()

    run_traced(call, trial.root, Strike(1 + trial.draw.randrange(300)), seconds=BUILD_SECONDS)
    again = trial.judge("build", run_verb(*world.build(trial.root), seconds=BUILD_SECONDS, first=second))
    if again.code != 0:
        trial.find("lost", f"the second builder: {again.last_line}")
        return
    trial.expect_whole(world, same_bytes=True)
    trial.judge("clean", run_verb("clean", str(trial.root), first=second))
    trial.expect_whole(world, same_bytes=True)


def _shifted(offset: float) -> Callable[[], None]:
    real, real_ns = time.time, time.time_ns

    def shift() -> None:
        time.time = lambda: max(0.0, real() + offset)
        time.time_ns = lambda: max(0, real_ns() + int(offset * 1e9))

    return shift


def limit(trial: Trial) -> None:
    """Few descriptors, small files, closed streams, odd names, signals."""
    world = trial.draw.choice(trial.worlds[:3])
    kind = trial.draw.choice(("descriptors", "file-size", "streams", "odd-path", "signal", "signal"))
    if kind == "signal":
        _signalled(trial, world)
        return
    if kind == "odd-path":
        trial.root = trial.folder / trial.draw.choice(
            ("\x1b[31mRED", "a b'c\"d", "ünïcødé", "x" * 200, "-rf", "new\nline")
        )
    first, name = _limited(trial, kind)
    trial.cause = f"limit {world.name}: {name}"
    ending = run_verb(*world.build(trial.root), seconds=BUILD_SECONDS, first=first)
    if kind != "streams" or ending.hung or ending.signal is not None:
        trial.judge("build", ending)
    _finish(trial, JOBS[0], world)


def _limited(trial: Trial, kind: str) -> tuple[Callable[[], None] | None, str]:
    if kind == "descriptors":
        number = trial.draw.choice((12, 16, 24, 40))
        return lambda: resource.setrlimit(resource.RLIMIT_NOFILE, (number, number)), f"{number} descriptors"
    if kind == "file-size":
        number = trial.draw.choice((100, 5000, 9000))

        def small_files() -> None:
            signal.signal(signal.SIGXFSZ, signal.SIG_IGN)
            resource.setrlimit(resource.RLIMIT_FSIZE, (number, number))

        return small_files, f"files of {number} bytes"
    if kind == "streams":
        closed = trial.draw.choice(((1,), (2,), (1, 2), (0, 1, 2)))

        def close_streams() -> None:
            for descriptor in closed:
                os.close(descriptor)

        return close_streams, f"closed streams {closed}"
    return None, f"the path {trial.root.name!r}"


def _signalled(trial: Trial, world: World) -> None:
    number = trial.draw.choice((signal.SIGINT, signal.SIGTERM))
    job = trial.draw.choice([each for each in JOBS if each.name in ("build", "repair", "inverse", "verify", "copy")])
    job.prepare(trial, world)
    at = 1 + trial.draw.randrange(300)
    strike = Strike(at, meanwhile=lambda pid: os.kill(pid, number))
    struck = _traced(trial, job, world, strike)
    trial.cause = f"{number.name} to {job.name} {world.name} at call {at} ({struck.struck})"
    trial.judge(job.name, struck.ending)
    if struck.struck is not None and struck.ending.code not in (0, 1, 130):
        trial.find("unclear", f"{number.name}: exit code {struck.ending.code}: {struck.ending.last_line}")
    _finish(trial, job, world)


# --- strangers, and long walks ---------------------------------------------------------------------------------------


def stranger(trial: Trial) -> None:
    """A crafted cache meets a verb: a clear error or rows, within bounds, and nothing outside is touched.

    Which rows is not judged: whoever crafts a cache with right digests may put any into it.
    """
    world = trial.draw.choice(trial.worlds)
    name = trial.draw.choice(sorted(CRAFTED))
    world.copied(trial.root)
    cause = craft(name, trial.draw, trial.root, trial.canary.folder)
    trial.cause = f"hostile {world.name}: {cause}"
    trial.judge("reading", run_call(lambda: read_rows(trial.root), seconds=READ_SECONDS))
    for verb in trial.draw.sample((*LOOKING, *CHANGING), 3):
        meet(trial, world, verb)


def meet(trial: Trial, world: World, verb: Sequence[str], seconds: float = SECONDS) -> None:
    """Run a verb on the crafted cache of a trial. {mine} is a sound copy of the same cache that lost a chunk."""
    mine = trial.folder / "mine"
    if "{mine}" in verb:
        if mine.exists():
            remove(mine)
        lost = chunks(world.copied(mine))[0]
        lost.unlink()
    places = {"root": trial.root, "copy": trial.folder / "copied", "mine": mine, "tier": trial.folder / "tier"}
    arguments = [part.format(pristine=world.cache, source=_source_pattern(world), **places) for part in verb]
    trial.judge(" ".join(verb), run_verb(*arguments, seconds=seconds))
    trial.expect_untouched()
    if "{mine}" in verb:
        trial.read(world, mine)


def _source_pattern(world: World) -> str:
    return world.command[1]


def soak(trial: Trial) -> None:
    """A walk of verbs over one growing cache, compared with a model after every step."""
    draw, source = trial.draw, trial.folder / "source"
    model: list[str] = []
    steps: list[str] = []

    def append() -> Ending:
        lines = lines_of(draw.randrange(1 << 30), draw.randrange(1, 30))
        write_lines(source / f"{len(list(source.glob('*'))):03d}.txt", lines)
        model.extend(line.decode() for line in lines)
        if not trial.root.exists():
            return trial.verb("build", *raw_command(source), "--into", str(trial.root), "--workers", "0")
        return trial.verb("grow", str(trial.root), str(source / "*.txt"), "--workers", "0")

    def hurt() -> Ending:
        chunks = sorted((trial.root / "layers/raw").glob("[0-9]*.safetensors"))
        os.truncate(draw.choice(chunks), draw.randrange(4000))
        return trial.verb("repair", str(trial.root), "--workers", "0")

    def move() -> Ending:
        place = trial.folder / f"moved-{len(steps)}"
        ending = trial.verb("copy", str(trial.root), str(place))
        trial.root = place
        return ending

    def tidy() -> Ending:
        return trial.verb("clean", str(trial.root), "--keep-generations", "1")

    def again() -> Ending:
        return trial.verb("build", str(trial.root), "--workers", "0")

    source.mkdir()
    for step in (append, *draw.choices((append, append, hurt, move, tidy, again), k=7)):
        steps.append(step.__name__)
        trial.cause = f"soak: {', '.join(steps)}"
        ending = step()
        if ending.code != 0:
            trial.find("lost", f"{step.__name__}: {ending.last_line}")
            return
        rows = trial.judge("reading", run_call(lambda: _texts(trial.root))).answer
        if rows != sorted(model):
            trial.find("silent", f"{len(rows or [])} rows, the model has {len(model)}")
            return


CLASSES: dict[str, tuple[Callable[[Trial], None], int]] = {  # and how often, among the others
    "flip": (flip, 130),
    "hostile": (stranger, 30),
    "damage": (damage, 20),
    "kill": (kill, 8),
    "error": (fail_call, 8),
    "race": (race, 2),
    "moving-source": (move_source, 2),
    "limit": (limit, 2),
    "clock": (clock, 1),
    "soak": (soak, 1),
    "tier": (damage_tier, 3),
    "download": (download, 2),
}
if not SUPPORTED:
    CLASSES = {name: CLASSES[name] for name in ("damage", "flip", "hostile", "soak", "tier")}


@contextmanager
def trial_in(folder: Path, seed: str, worlds: Sequence[World]) -> Iterator[Trial]:
    """A folder for one fault, gone afterwards."""
    folder.mkdir(parents=True)
    try:
        yield Trial(folder, random.Random(seed), worlds)
    finally:
        remove(folder)


def run_fault(name: str, seed: str, folder: Path, worlds: Sequence[World]) -> tuple[Outcome, list[Finding]]:
    """Do one fault of a class and judge it."""
    call, _ = CLASSES[name]
    with trial_in(folder, seed, worlds) as trial:
        call(trial)
        trial.expect_untouched()
        return trial.outcome, trial.findings


def as_record(finding: Finding, name: str, seed: str) -> dict[str, Any]:
    return {"class": name, "seed": seed, "cause": finding.cause, "verdict": finding.verdict, "seen": finding.seen}
