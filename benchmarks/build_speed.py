"""The speed of builds in one run, interleaved: text against parsing and tokenizing alone, images against Pillow alone.

    python -m benchmarks.build_speed --text FOLDER --images FOLDER --folder WORK

The text is repeated to `--megabytes`, the photographs to `--count`; the best of `--rounds` counts.
"""

import argparse
import os
import shutil
import tempfile
from pathlib import Path

from benchmarks import tokens_corpus
from benchmarks.image_build import measure_build
from benchmarks.image_data import Images
from benchmarks.measure import Comparison
from benchmarks.tokens_runs import run

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


def main() -> None:
    arguments = argparse.ArgumentParser(description=__doc__)
    arguments.add_argument("--text", type=Path)
    arguments.add_argument("--images", type=Path)
    arguments.add_argument("--folder", type=Path)
    arguments.add_argument("--megabytes", type=int, default=500)
    arguments.add_argument("--count", type=int, default=5000)
    arguments.add_argument("--rounds", type=int, default=3)
    given = arguments.parse_args()
    with tempfile.TemporaryDirectory(dir=given.folder) as folder:
        if given.text:
            measure_text(given, Path(folder))
        if given.images:
            measure_build(Images(Path(folder), given.images, given.count, Path(folder)), given.rounds)


if __name__ == "__main__":
    main()
