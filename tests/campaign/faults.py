"""The classes of faults, and what each expects of forebay afterwards."""

import os
import re
import shutil
from collections.abc import Callable, Sequence
from functools import cache
from pathlib import Path

from tests.campaign.beside import build_from_hub, start_hub
from tests.campaign.damage import Done, cache_files, damage_file, damage_one, leave_behind
from tests.campaign.hostile import CHANGING, CRAFTED, LOOKING, chunks, craft
from tests.campaign.oracle import BUILD_SECONDS, Trial, pick_world, trial_in
from tests.campaign.repairs import (
    LayeredWorld,
    call_layered,
    layered_world,
    read_layered,
    repair_both,
    strike_layered,
    verify_layered,
)
from tests.campaign.strikes import clock, fail_call, grow, kill, kill_at, limit, move_source, race, texts_of
from tests.campaign.syscalls import SUPPORTED, Strike, run_traced
from tests.campaign.trial import SECONDS, Ending, remove, run_call, run_verb
from tests.campaign.worlds import READ_SECONDS, World, chunk_digests, lines_of, raw_command, read_rows, write_lines

# --- damage ----------------------------------------------------------------------------------------------------------

VERBS = (  # that meet a damaged cache before it is repaired; {copy} and {tier} are new folders
    *(("status", "{root}"), ("status", "{root}", "--json"), ("info", "{root}"), ("peek", "{root}")),
    *(("verify", "{root}", "--full"), ("clean", "{root}"), ("clean", "{root}", "--keep-generations", "1")),
    *(("build", "{root}", "--workers", "0"), ("build", "{root}", "--mode", "inverse", "--workers", "0")),
    *(("update", "{root}", "{source}", "--workers", "0"), ("drop", "{root}", "{layer}"), ("copy", "{root}", "{copy}")),
    *(("tier", "fill", "{root}", "{tier}"), ("view", "{root}", "--bundle", "{copy}.html"), ("doctor", "{root}")),
    *(("estimate", "{root}"), ("repair", "{root}", "--workers", "0")),
    ("build", "{command}", "--into", "{copy}-reused", "--reuse", "{root}", "--workers", "0"),
)


def _words(world: World, verb: Sequence[str], **places: object) -> list[str]:
    """A command with its places filled in; {command} is the recipe and source of a world."""
    parts = [part for word in verb for part in (world.command if word == "{command}" else (word,))]
    return [part.format(source=world.command[1], **places) for part in parts]


def damage(trial: Trial) -> None:
    """One to four files are damaged; a reader, `verify`, some verbs, `repair` and a build meet that in turn."""
    world = pick_world(trial)
    other = trial.draw.choice([each for each in trial.worlds if each is not world])
    world.copied(trial.root)
    if trial.draw.random() < 0.3:
        leave_behind(trial.draw, trial.root)
    count = trial.draw.choice((1, 1, 2, 2, 3, 4))
    done = [damage_file(trial.draw, trial.root, other.cache) for _ in range(count)]
    trial.cause = f"damage {world.name}: {trial.damaged(done)}"
    trial.guarded = world.files
    rows, errors = trial.read(world)
    _expect_found(trial, world, done, rows, errors)
    layer = min(world.files).split("/")[1].partition(".")[0]
    places = {"root": trial.root, "copy": trial.folder / "copied", "tier": trial.folder / "tier", "layer": layer}
    for verb in trial.draw.sample(VERBS, trial.draw.randrange(3)):
        trial.cause += f"; {' '.join(verb)}"
        trial.verb(*_words(world, verb, **places))
    for made in trial.folder.glob("copied*/cache.json"):
        trial.read(world, made.parent)
    _repaired(trial, world, done)


def _expect_found(trial: Trial, world: World, done: Sequence[Done], rows: int, errors: list[str]) -> None:
    """`verify` finds what a reader stumbles over, and rows that are gone.

    A newest generation that is lost leaves the one before it, whole: only a pin tells that there was a newer one.
    """
    verified = trial.verb("verify", str(trial.root))
    is_older = any(each.key.startswith("generations/") for each in done)
    if verified.code == 0 and (errors or (rows != len(world.rows) and not is_older)):
        trial.find("wrong rows", f"verify calls sound what reads as {rows} rows and {sorted(set(errors))}")


def _repaired(trial: Trial, world: World, done: Sequence[Done]) -> None:
    copied = trial.draw.random() < 0.5
    command = ["repair", str(trial.root), *(["--from", str(world.cache)] if copied else []), "--workers", "0"]
    ending = trial.verb(*command)
    if ending.code != 0:
        _clear_the_way(trial, done)
        ending = trial.verb(*command)
    if ending.code != 0 and not copied:  # what only the source and a plan could bring back is in the copy
        command += ["--from", str(world.cache)]
        ending = trial.verb(*command)
    if ending.code != 0:
        if not _says_newer(done, ending) and not _says_other(done, ending):
            copied_from = " --from a pristine copy" if "--from" in command else ""
            trial.find("rows lost", f"repair{copied_from}: {ending.output[-400:]}")
        return
    rows, errors = trial.read(world)
    if rows != len(world.rows) and not errors:
        _clear_the_way(trial, done)
        again = ("update", str(trial.root), str(world.source / "*.txt")) if "forebay update" in ending.output else ()
        built = trial.verb(*(again or ("build", str(trial.root))), "--workers", "0")
        if built.code != 0:
            trial.find("rows lost", f"after repair, build: {built.last_line}")
            return
    trial.expect_whole(world, same_bytes=False)


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
    other = any(each.key == "cache.json" for each in done)
    return other and "is of another cache (id" in ending.output


def flip(trial: Trial) -> None:
    """One damage, met by a reader and by `verify` alone: many of these, since they take little time."""
    world = pick_world(trial)
    other = trial.draw.choice([each for each in trial.worlds if each is not world])
    world.copied(trial.root)
    if trial.draw.random() < 0.2:
        leave_behind(trial.draw, trial.root)
    done = damage_file(trial.draw, trial.root, other.cache)
    trial.cause = f"flip {world.name}: {trial.damaged([done])}"
    rows, errors = trial.read(world)
    _expect_found(trial, world, [done], rows, errors)


def tier(trial: Trial) -> None:
    """Files of a tier are damaged: rows read through it are right, and it can be filled again."""
    world, place = pick_world(trial), trial.folder / "tier"
    trial.verb("tier", "fill", str(world.cache), str(place))
    damages = range(trial.draw.choice((1, 2, 3)))
    done = [damage_one(trial.draw, place, trial.draw.choice(cache_files(place)), world.cache) for _ in damages]
    trial.cause = f"tier of {world.name}: {trial.damaged(done)}"
    trial.read(world, world.cache, place)
    filled = trial.verb("tier", "fill", str(world.cache), str(place))
    rows, errors = trial.read(world, world.cache, place)
    if filled.code == 0 and (errors or rows != len(world.rows)):
        trial.find(
            "rows lost", f"{rows} of {len(world.rows)} rows through a tier that was filled; {sorted(set(errors))}"
        )
    trial.is_whole = rows == len(world.rows)


# --- repairs ---------------------------------------------------------------------------------------------------------


def repairs(trial: Trial) -> None:
    """One to three damages of a layered cache, repaired with and without copies; the last repair has a fresh copy."""
    draw = trial.draw
    world = layered_world(trial.folder.parent / "layers", draw.random() < 0.3)
    shutil.copytree(world.cache, trial.root)
    done = [damage_file(draw, trial.root, draw.choice(trial.worlds).cache) for _ in range(draw.choice((1, 2, 2, 3)))]
    kind = draw.choice(("none", "fresh", "older", "diverged", "damaged"))
    copy = world.copies.get(kind)
    if kind == "damaged":
        copy = trial.folder / "copy"
        shutil.copytree(world.copies["fresh"], copy)
        done_there = [damage_file(draw, copy, world.cache) for _ in range(draw.choice((1, 2)))]
        trial.cause = f" (in the copy {', '.join(map(str, done_there))})"
    key = " keyed" if world.keyed else ""
    trial.covered["copy", f"{kind}{key}"] += 1
    trial.cause = f"repairs{key} from {kind}{trial.cause}: {trial.damaged(done)}"
    _read_right(trial, world)
    _repair_once(trial, world, done, copy)
    _clear_the_way(trial, done)
    failed = _repair_once(trial, world, done, world.copies["fresh"])
    if failed and not _is_newer(done, failed) and "of another cache (id" not in str(failed):
        trial.find("rows lost", f"repair from a fresh copy: {failed}"[:400])
    elif not failed:
        rows = _read_right(trial, world)
        if rows != len(world.rows):
            trial.find("rows lost", f"{rows} of {len(world.rows)} rows after a repair from a fresh copy")
        trial.is_whole = True


def _is_newer(done: Sequence[Done], failed: object) -> bool:
    return any(each.name == "newer" for each in done) and "upgrade forebay" in str(failed)


def _read_right(trial: Trial, world: LayeredWorld) -> int:
    """How many rows can be read; a wrong row is a finding."""
    ending = trial.judge("reading", read_layered(world, trial.root))
    answer = ending.answer or {"rows": [], "errors": []}
    wrong = [row for row in answer["rows"] if row not in world.rows]
    if wrong and not all("without its layer" in row for row in wrong):
        trial.find("wrong rows", f"{len(wrong)} wrong rows, as {wrong[0][:200]}")
    trial.was_refused |= bool(answer["errors"])
    return len(set(answer["rows"]) & world.rows)


# Why a repair may fail where `verify` finds nothing: the copy cannot be used, or the user has to move something.
EXCUSES = "diverged|move it away|not a regular file|upgrade forebay|it is gone, and chunk files"


def _repair_once(trial: Trial, world: LayeredWorld, done: Sequence[Done], copy: Path | None) -> dict[str, str]:
    """Repair; no intact chunk file may change, and the cache must not be called sound with rows missing."""
    trial.covered["verb", "repair"] += 1
    trial.guarded = world.files
    intact, rows = trial.intact_chunks(), _read_right(trial, world)
    ending = trial.judge("repair", repair_both(world, trial.root, copy))
    failed: dict[str, str] = ending.answer or {}
    trial.expect_intact("repair", intact)
    if _read_right(trial, world) < rows:
        trial.find("rows lost", f"fewer than {rows} rows after repair")
    advice = (
        (f"`forebay repair {trial.root}`",) if copy is None else ("pass a copy (--from", f"{trial.root} --from COPY`")
    )
    if any(one in reason for one in advice for reason in failed.values()):
        trial.find("circular", f"repair advises repair: {failed}"[:300])
    checked = verify_layered(world, trial.root).answer or {"sound": False}
    if checked["sound"] and failed and not re.search(EXCUSES, str(failed)):
        trial.find("unclear", f"verify finds nothing, repair fails: {failed}"[:300])
    return failed


def layers(trial: Trial) -> None:
    """A build of a layer, a drop or a repair of both layers is killed; the same call again ends as it should."""
    draw = trial.draw
    world = layered_world(trial.folder.parent / "layers", draw.random() < 0.3)
    name = draw.choice(("build", "drop", "repair"))
    shutil.copytree(world.base if name == "build" else world.cache, trial.root)
    if name == "repair":
        for layer in ("numbers", "length"):
            draw.choice(sorted(trial.root.glob(f"layers/{layer}.*/[0-9]*"))).write_bytes(b"damaged")
        max(trial.root.glob("generations/*")).write_bytes(draw.choice((b"damaged", b"")))
    trial.guarded = world.files
    intact, at = trial.intact_chunks(), 1 + draw.randrange(600)
    struck = strike_layered(world, name, trial.root, at)
    trial.covered["kill", f"{name} of layers"] += 1
    trial.cause = f"{name}{' keyed' if world.keyed else ''} of layers killed at call {at} ({struck.struck})"
    trial.was_refused |= struck.ending.code != 0
    trial.expect_intact(name, intact)
    _read_right(trial, world)
    again = trial.judge(name, call_layered(world, name, trial.root))
    checked = verify_layered(world, trial.root).answer or {"sound": False, "error": "no answer"}
    if again.code != 0 or not checked["sound"]:
        trial.find("rows lost", f"{name} again: {again.last_line} {again.answer}; verify: {checked}"[:400])
    elif name != "drop" and _read_right(trial, world) != len(world.rows):
        trial.find("rows lost", f"rows are gone after {name} again")
    trial.is_whole = True


# --- what lies beside a cache -----------------------------------------------------------------------------------------


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
    for _ in range(20):  # a bit flipped in a footer that is read by range has no hash to fail: the sentence names it
        if again.code != 0 and "not a sound Parquet file" in again.output:
            again = trial.judge("build", run_call(build, seconds=BUILD_SECONDS))
    if again.code != 0:
        trial.find("rows lost", f"the same build ends with {again.code}: {again.last_line}")
    elif chunk_digests(trial.root) != right:
        trial.find("wrong rows", "the chunks are not those of an undisturbed build")
    trial.is_whole = True


@cache
def _undisturbed_download(folder: Path, vocabulary: str) -> dict[str, str]:
    place = folder / str(os.getpid())
    ending = run_call(lambda: build_from_hub(place / "cache", place / "downloads", "0", vocabulary), seconds=60)
    assert ending.code == 0, ending.output
    return chunk_digests(place / "cache")


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
    arguments = _words(world, verb, pristine=world.cache, **places)
    trial.judge(" ".join(verb), run_verb(*arguments, seconds=seconds))
    trial.expect_untouched()
    if "{mine}" in verb:
        trial.read(world, mine)


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
        return trial.verb("update", str(trial.root), str(source / "*.txt"), "--workers", "0")

    def hurt() -> Ending:
        chunks = sorted((trial.root / "layers").glob("raw.*/[0-9]*.safetensors"))
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
            trial.find("rows lost", f"{step.__name__}: {ending.last_line}")
            return
        rows = trial.judge("reading", run_call(lambda: texts_of(trial.root))).answer
        if rows != sorted(model):
            trial.find("wrong rows", f"{len(rows or [])} rows, the model has {len(model)}")
            return


CLASSES: dict[str, tuple[Callable[[Trial], None], int]] = {  # and how often, among the others
    "flip": (flip, 60),
    "tier": (tier, 6),
    "hostile": (stranger, 30),
    "damage": (damage, 60),
    "repairs": (repairs, 60),
    "layers": (layers, 20),
    "kill": (kill, 20),
    "each-call": (kill_at, 0),  # by `--sweep`
    "error": (fail_call, 20),
    "race": (race, 6),
    "growth": (grow, 4),
    "moving-source": (move_source, 4),
    "limit": (limit, 4),
    "clock": (clock, 2),
    "soak": (soak, 2),
    "download": (download, 4),
}
if not SUPPORTED:
    CLASSES = {name: CLASSES[name] for name in ("damage", "repairs", "flip", "hostile", "soak")}


def run_fault(name: str, seed: str, folder: Path, worlds: Sequence[World]) -> Trial:
    """Do one fault of a class and judge it."""
    call, _ = CLASSES[name]
    with trial_in(folder, seed, worlds) as trial:
        call(trial)
        trial.expect_untouched()
        return trial
