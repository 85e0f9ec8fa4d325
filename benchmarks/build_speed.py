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
from benchmarks.tokens_runs import RECIPE as TEXT
from benchmarks.tokens_runs import bare, run

ENVIRONMENT = {**os.environ, "RAYON_NUM_THREADS": "1"}


def measure_text(given: argparse.Namespace, folder: Path) -> None:
    """The bare work, one worker and two, in turn, each in a separate process."""
    once = tokens_corpus.decompress(given.text, folder / "text")
    files = tokens_corpus.repeat(once, folder / "repeated", given.megabytes)
    amount, root = tokens_corpus.size(files), folder / "cache"
    best: dict[str, float] = {}
    for _ in range(given.rounds):
        for name, where in (("bare", ()), ("one", (root, 1)), ("two", (root, 2))):
            seconds = run("build" if where else "bare", *where, *files, environment=ENVIRONMENT)["seconds"]
            best[name] = min(seconds, best.get(name, seconds))
            shutil.rmtree(root, ignore_errors=True)
    one, two, bare = best["one"], best["two"], best["bare"]
    print(Comparison("text: build, one worker / JSON parsing + fastokens", one, bare, amount, "MB", 0.55))
    print(Comparison("text: build, two workers / one", two, one, amount, "MB", 1.7), flush=True)


def measure_processor_time(given: argparse.Namespace, folder: Path) -> None:
    """Whole builds in this process, with planning, hashing and writing, against the bare work in it."""
    kinds: dict[str, tuple[fb.Source, Any, Callable[[], object]]] = {}
    if given.text:
        once = tokens_corpus.decompress(given.text, folder / "text")
        files = tokens_corpus.repeat(once, folder / "repeated", given.megabytes)
        kinds["text"] = (fb.sources.jsonl(*files), TEXT, partial(bare, *map(str, files)))
    if given.images:
        images = Images(folder, given.images, given.count, folder)
        paths = sorted(images.files().iterdir())
        kinds["images"] = (images.source(), IMAGES, partial(timed_bare, paths))
    for name, (source, recipe, alone) in kinds.items():
        best = [float("inf")] * 2
        for _ in range(given.rounds):
            for at, work in enumerate((alone, partial(fb.build, folder / "cache", source, recipe, workers=0))):
                started = time.process_time()
                work()
                best[at] = min(best[at], time.process_time() - started)
            shutil.rmtree(folder / "cache")
        print(f"{name}: processor seconds of the bare work {best[0]:.2f}, of a build {best[1]:.2f}", end=" ")
        print(f"ratio {best[0] / best[1]:.2f}", flush=True)


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
