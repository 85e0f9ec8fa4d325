"""The speed of builds in one run, interleaved: text against parsing and tokenizing alone, images against Pillow alone.

    python -m benchmarks.build_speed --text FOLDER --images FOLDER --folder WORK

The text is repeated to `--megabytes`, the photographs to `--count`; the best of `--rounds` counts. `--processor-time`
counts the processor seconds of one process that builds without workers instead: it needs no quiet machine.
"""

import argparse
import os
import shutil
import tempfile
import time
from collections.abc import Callable
from functools import partial
from pathlib import Path
from typing import Any

import forebay as fb
from benchmarks import tokens_corpus
from benchmarks.image_build import measure_build, timed_bare
from benchmarks.image_data import RECIPE as IMAGES
from benchmarks.image_data import Images
from benchmarks.measure import Comparison
from benchmarks.prepared import prepared
from benchmarks.tokens_runs import RECIPE as TEXT
from benchmarks.tokens_runs import bare, run, run_together
from forebay.building.begin import resolve_recipe
from forebay.building.chunk_maker import BaseJob, BuildJob
from forebay.cache.catalog import layers_of
from forebay.cache.plan import load_plan
from forebay.engine.base import THREADS
from forebay.store.local import LocalStore

ENVIRONMENT = {**os.environ, **dict.fromkeys(THREADS, "1")}


def measure_text(given: argparse.Namespace, folder: Path) -> None:
    """The bare work, in one process and in two at once, one worker and two, in turn, each in a separate process."""
    files = _repeated(given, folder)
    amount, root = tokens_corpus.size(files), folder / "cache"
    best: dict[str, dict[str, Any]] = {}
    for _ in range(given.rounds):
        halves = run_together([("bare", *files[::2]), ("bare", *files[1::2])], ENVIRONMENT)
        found = {"bare": run("bare", *files, environment=ENVIRONMENT), "both": max(halves, key=_seconds)}
        for name, workers in (("one", 1), ("two", 2)):
            found[name] = run("build", root, workers, *files, environment=ENVIRONMENT)
            shutil.rmtree(root)
        best = {name: min(one, best.get(name, one), key=_seconds) for name, one in found.items()}
    bare, both, one, two = (best[name]["seconds"] for name in ("bare", "both", "one", "two"))
    print(Comparison("text: build, one worker / JSON parsing + fastokens", one, bare, amount, "MB", 0.55))
    print(Comparison("text: build, two workers / one", two, one, amount, "MB", 1.7))
    print(Comparison("text: the bare work, two processes / one, the ceiling", both, bare, amount, "MB", 1.7))
    for name in ("one", "two"):
        first, chunks = best[name]["first"], best[name]["chunks"]
        later = 1000 * (best[name]["seconds"] - first) / (chunks - 1)
        print(f"text: {name}: first chunk of {chunks} after {first:.2f} s, then one every {later:.1f} ms; {best[name]}")
    print(f"text: the bare work on a chunk takes {1000 * bare / chunks:.1f} ms", flush=True)


def _seconds(found: dict[str, Any]) -> float:
    return float(found["seconds"])


def _repeated(given: argparse.Namespace, folder: Path) -> list[Path]:
    """The text, made again only if a former run with the same `--folder` did not leave it."""
    kept = (given.folder or folder) / f"text-{given.megabytes}"

    def write(place: Path) -> None:
        tokens_corpus.repeat(tokens_corpus.decompress(given.text, folder / "text"), place, given.megabytes)

    return sorted(prepared(kept, f"{given.megabytes} MB of {given.text}", write).iterdir())


def measure_processor_time(given: argparse.Namespace, folder: Path) -> None:
    """Whole builds in this process, with planning, hashing and writing, against the bare work in it."""
    kinds: dict[str, tuple[fb.Source, Any, Callable[[], float]]] = {}
    if given.text:
        files = _repeated(given, folder)
        kinds["text"] = (fb.sources.jsonl(*files), TEXT, lambda: bare(*map(str, files))["processor"])
    if given.images:
        images = Images(folder, given.images, given.count, folder)
        paths = sorted(images.files().iterdir())
        kinds["images"] = (images.source(), IMAGES, partial(_processor_seconds, partial(timed_bare, paths)))
    for name, (source, recipe, alone) in kinds.items():
        build = partial(fb.build, folder / "cache", source, recipe, workers=0)
        bares, builds, steps = list[float](), list[float](), list[tuple[float, float, int]]()
        for _ in range(given.rounds):
            bares.append(alone())
            builds.append(_processor_seconds(build))
            shutil.rmtree(folder / "cache")
            steps.append(_by_step(folder / "cache", source, recipe))
        made, written, chunks = min(steps)
        each = 1000 * min(bares) / chunks
        print(f"{name}: processor seconds of the bare work {min(bares):.2f}, of a build {min(builds):.2f}", end=", ")
        print(f"ratio {min(bares) / min(builds):.2f}")
        print(f"{name}: of a chunk, milliseconds: bare {each:.1f}, made {made:.1f}, written {written:.1f}", end=", ")
        print(f"bare / made {each / made:.2f}", flush=True)


def _processor_seconds(work: Callable[[], object]) -> float:
    started = time.process_time()
    work()
    return time.process_time() - started


def _by_step(root: Path, source: fb.Source, recipe: Any) -> tuple[float, float, int]:
    """Processor milliseconds of making a chunk, and of hashing and writing it beside the next; how many there are."""
    fb.build(root, source, recipe, workers=0, end_chunk=0)
    store = LocalStore(root)
    plan, (layer,) = load_plan(store), layers_of(store)
    settled, _ = resolve_recipe(store, None, recipe, layer)
    job = BuildJob(BaseJob(store, layer, settled, source, planned=plan.digests))
    made, written, chunks = 0.0, 0.0, len(plan)
    for chunk in range(1, chunks):
        started = time.process_time()
        write = job.begin(chunk)
        computed = time.process_time()
        write()
        made, written = made + computed - started, written + time.process_time() - computed
    shutil.rmtree(root)
    return 1000 * made / max(1, chunks - 1), 1000 * written / max(1, chunks - 1), chunks


def main() -> None:
    arguments = argparse.ArgumentParser(description=__doc__)
    arguments.add_argument("--text", type=Path)
    arguments.add_argument("--images", type=Path)
    arguments.add_argument("--folder", type=Path)
    arguments.add_argument("--megabytes", type=int, default=500)
    arguments.add_argument("--count", type=int, default=5000)
    arguments.add_argument("--rounds", type=int, default=3)
    arguments.add_argument("--processor-time", action="store_true")
    given = arguments.parse_args()
    with tempfile.TemporaryDirectory(dir=given.folder) as folder:
        if given.processor_time:
            return measure_processor_time(given, Path(folder))
        if given.text:
            measure_text(given, Path(folder))
        if given.images:
            measure_build(Images(Path(folder), given.images, given.count, Path(folder)), given.rounds)


if __name__ == "__main__":
    main()
