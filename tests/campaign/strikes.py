"""Kills and errors at single system calls, races, moving sources, limits and clocks."""

import errno
import os
import resource
import shutil
import signal
import time
from collections.abc import Callable
from contextlib import suppress
from dataclasses import dataclass
from pathlib import Path

from tests.campaign.oracle import BUILD_SECONDS, Finding, Trial, pick_world, verb_call
from tests.campaign.syscalls import Strike, Traced, run_traced
from tests.campaign.trial import remove, run_call, run_verb
from tests.campaign.worlds import World, lines_of, raw_command, write_lines

import forebay as fb


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
        _flip_near_end(path)


def _hurt_generation(trial: Trial, world: World) -> None:
    """The newest generation and a chunk damaged."""
    world.copied(trial.root)
    _flip_near_end(max((trial.root / "generations").glob("*.safetensors")))
    _flip_near_end(min((trial.root / "layers").glob("*/[0-9]*.safetensors")))


def _hurt_index(trial: Trial, world: World) -> None:
    """The newest generation, the plan, a recipe and a chunk damaged."""
    _hurt_generation(trial, world)
    _flip_near_end(trial.root / "plan/000000.safetensors")
    _flip_near_end(next((trial.root / "recipes").iterdir()))


def _flip_near_end(path: Path) -> None:
    content = bytearray(path.read_bytes())
    content[-9] ^= 4
    path.write_bytes(content)


def _before_update(trial: Trial, world: World) -> None:
    shutil.copytree(world.folder / "before", trial.root)


_ALONE = ("--workers", "0")
JOBS = (
    Job("build", _nothing, lambda trial, world: world.build(trial.root)),
    Job("resume", _half, lambda trial, world: world.build(trial.root)),
    Job("inverse", _half, lambda trial, world: world.build(trial.root, "--mode", "inverse")),
    Job(
        "update", _before_update, lambda trial, world: ("update", str(trial.root), str(world.source / "*.txt"), *_ALONE)
    ),
    Job("repair", _hurt, lambda trial, world: ("repair", str(trial.root), *_ALONE)),
    Job(
        "repair from",
        _hurt_index,
        lambda trial, world: ("repair", str(trial.root), "--from", str(world.cache), *_ALONE),
    ),
    Job("repair index", _hurt_generation, lambda trial, world: ("repair", str(trial.root), *_ALONE)),
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
    return run_traced(verb_call(*job.command(trial, world)), trial.root, strike, seconds=BUILD_SECONDS)


def _chosen(trial: Trial) -> tuple[Job, World, int]:
    """A command, made ready, and one of the system calls it makes."""
    job, world = trial.draw.choice(JOBS), pick_world(trial)
    if job.name == "update":
        world = next(each for each in trial.worlds if each.name == "grown")
    elif job.name in ("resume", "inverse") and world.name == "grown":
        world = trial.worlds[0]
    calls = calls_of(trial, job, world)
    job.prepare(trial, world)
    return job, world, 1 + trial.draw.randrange(calls)


def calls_of(trial: Trial, job: Job, world: World) -> int:
    """How many system calls on the cache a command makes."""
    if (job.name, world.name) not in _CALLS_OF:
        job.prepare(trial, world)
        _CALLS_OF[job.name, world.name] = max(1, _traced(trial, job, world, None).calls)
        remove(trial.root)
    return _CALLS_OF[job.name, world.name]


def _finish(trial: Trial, job: Job, world: World) -> None:
    """The same command again ends well, and the cache is as if nothing had happened."""
    again = trial.verb(*job.command(trial, world))
    if again.code != 0:
        trial.find("rows lost", f"the same command ends with {again.code}: {again.last_line}")
        return
    if job.name in ("build", "resume") and world.name == "grown":
        trial.read(world)  # built in one segment: other chunks, the same lines
    else:
        trial.expect_whole(world, same_bytes=job.name != "repair from")


def kill(trial: Trial) -> None:
    """SIGKILL as a system call on the cache begins."""
    _killed(trial, *_chosen(trial))


def kill_at(trial: Trial) -> None:
    """SIGKILL as the system call begins that the seed names: `--sweep` names each in turn."""
    _, name, at = trial.seed.split("-")
    job, world = swept(trial, name)
    job.prepare(trial, world)
    trial.covered["call", job.name] += 1
    _killed(trial, job, world, int(at))


def swept(trial: Trial, name: str) -> tuple[Job, World]:
    """The command of a sweep and the cache it meets."""
    job = next(each for each in JOBS if each.name.replace(" ", "_") == name)
    return job, next(each for each in trial.worlds if each.name == ("grown" if name == "update" else "raw-zstd"))


def _killed(trial: Trial, job: Job, world: World, at: int) -> None:
    trial.covered["kill", job.name] += 1
    trial.guarded = world.files
    intact = trial.intact_chunks()
    struck = _traced(trial, job, world, Strike(at))
    trial.cause = f"kill {job.name} {world.name} at call {at} ({struck.struck})"
    trial.expect_intact(job.name, intact)
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


def _lines_world(trial: Trial, codec: str = "zstd") -> tuple[Path, list[bytes]]:
    """Lines of this trial's own, so that they may change under the build."""
    lines = lines_of(trial.draw.randrange(1 << 30), 60)
    write_lines(trial.folder / "source/a.txt", lines)
    return trial.folder / "source", lines


def texts_of(root: Path) -> list[str]:
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
    struck = run_traced(verb_call(*command), trial.folder, Strike(at, meanwhile=change), seconds=BUILD_SECONDS)
    trial.cause = f"source {how} at call {at} ({struck.struck})"
    trial.judge("build", struck.ending)
    if struck.struck is None or struck.ending.code != 0:
        return
    now = path.read_bytes().splitlines() if path.exists() else []
    rows = trial.judge("reading", run_call(lambda: texts_of(trial.root))).answer or []
    sides = ([line.decode() for line in lines], [line.decode() for line in now])
    if all(any(row not in side for row in rows) for side in sides):
        trial.find("wrong rows", "the rows are neither of the source as it was nor as it is")
    full = trial.verb("verify", "--full", str(trial.root))
    # Replaced by a longer one before it was read, the file is as one that grew: `update` makes rows of the rest.
    has_grown = (
        0 < len(rows) < len(now)
        and sorted(rows) == sorted(sides[1][: len(rows)])
        and trial.verb("update", str(trial.root), str(source), "--workers", "0").code == 0
    )
    if has_grown:
        rows = trial.judge("reading", run_call(lambda: texts_of(trial.root))).answer or []
    if full.code == 0 and sorted(rows) != sorted(sides[1]) and how != "append":
        trial.find("wrong rows", f"verify --full calls {len(rows)} rows sound, the source has {len(now)} lines")


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


def grow(trial: Trial) -> None:
    """While a build stands still at a system call, an update adds files: both end well, in either order."""
    source, lines = _lines_world(trial)
    into, pattern = ("--into", str(trial.root)), str(source / "*.txt")
    trial.verb("build", *raw_command(source), *into, *_ALONE, "--end-chunk", str(1 + trial.draw.randrange(3)))
    more = lines_of(trial.draw.randrange(1 << 30), 40)

    def update(pid: int) -> None:
        write_lines(source / "b.txt", more)
        trial.verb("update", str(trial.root), pattern, *_ALONE)

    at = 1 + trial.draw.randrange(400)
    trial.cause = f"update while a build is at call {at}"
    build = verb_call("build", *raw_command(source), *into, *_ALONE)
    struck = run_traced(build, trial.root, Strike(at, meanwhile=update), seconds=BUILD_SECONDS)
    trial.covered["verb", "build next to update"] += 1
    trial.judge("build", struck.ending)
    if struck.struck is None:
        update(0)
    if struck.ending.code != 0 or trial.verb("update", str(trial.root), pattern, *_ALONE).code != 0:
        trial.find("rows lost", f"build next to update: {struck.ending.last_line}")
        return
    rows = trial.judge("reading", run_call(lambda: texts_of(trial.root))).answer or []
    if sorted(rows) != sorted(line.decode() for line in lines + more):
        trial.find("wrong rows", f"{len(rows)} rows of {len(lines + more)} lines")
    trial.is_whole = True


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
        verb_call(*world.build(trial.root))()

    run_traced(call, trial.root, Strike(1 + trial.draw.randrange(300)), seconds=BUILD_SECONDS)
    again = trial.judge("build", run_verb(*world.build(trial.root), seconds=BUILD_SECONDS, first=second))
    if again.code != 0:
        trial.find("rows lost", f"the second builder: {again.last_line}")
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
