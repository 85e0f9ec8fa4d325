"""Reading rows from a tier on disk against LMDB itself: `python -m benchmarks.image_tier --data FOLDER`.

Both read the same values, in whole batches and a shuffled order, in a process of their own, as the worker of a loader
is: what was allocated there before decides what new memory costs. With LMDB, what `get` gives is copied into an array;
or, quicker, a view of the value is. The tier also knows the samples by number, and checks every value from the first
byte to the last, whose row it is, and its columns; in the second line it looks at the file of every sample, too.
"""

import argparse
import random
import shutil
import subprocess
import sys
import tempfile
from collections.abc import Callable, Sequence
from functools import partial
from pathlib import Path

import lmdb
import numpy as np

import forebay as fb
from benchmarks.image_data import BATCH, RECIPE, Images
from benchmarks.measure import compare
from forebay.columns import Array
from forebay.tiers import CachedImages, warm
from forebay.tiers.environment import MARK_KEY
from forebay.tiers.tier_value import CheckSource

GOAL = 0.7


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.partition("\n")[0])
    parser.add_argument("--images", type=int, default=1000, help="how many; the photographs are repeated")
    parser.add_argument("--data", type=Path, help="a folder of photographs; without it, noise of their size")
    parser.add_argument("--filled", type=Path, nargs=3, help="read only: the images, a tier of them, and its copy")
    options = parser.parse_args()
    if options.filled:
        read_both(*options.filled)
        return
    with tempfile.TemporaryDirectory() as folder:
        measure_tier(Images(Path(folder), options.data, options.images, Path(folder)))


def measure_tier(images: Images) -> None:
    """Fill a tier with all images, then read it in another process."""
    tier, copy = images.folder / "tier", images.folder / "tier-copy"
    warm(images.source(), RECIPE, tier)
    shutil.copytree(tier, copy)  # a process cannot open the same files twice
    try:
        subprocess.run(
            [sys.executable, "-m", "benchmarks.image_tier", "--filled", images.files(), tier, copy], check=True
        )
    finally:
        shutil.rmtree(tier)
        shutil.rmtree(copy)


def read_both(files: Path, tier: Path, copy: Path) -> None:
    for check_source, take, how in (
        ("open", get_and_copy, "rows of a tier on disk / LMDB get and copy"),
        ("read", get_and_copy, "the same, each file looked at / LMDB get and copy"),
        ("open", view_and_copy, "rows of a tier on disk / LMDB view and copy"),
    ):
        _compare(fb.sources.images(files), tier, copy, check_source, take, how)


def _compare(source: fb.Source, tier: Path, copy: Path, check_source: CheckSource, take: "Take", name: str) -> None:
    with (
        CachedImages(source, RECIPE, l1=0, l2=tier, check_source=check_source) as rows,
        lmdb.open(str(copy), readonly=True, lock=False) as environment,
    ):
        batches = _shuffled_batches(range(len(rows)))
        with environment.begin() as transaction:
            keys = _shuffled_batches([bytes(key) for key, _ in transaction.cursor() if key != MARK_KEY])
        ours, theirs = partial(_each, rows.read, batches), partial(_each, partial(take, environment), keys)
        print(compare(name, ours, theirs, amount=len(rows), unit="images", goal=GOAL), flush=True)
        assert rows.statistics().misses == 0, "a row was made, not read"


def get_and_copy(environment: lmdb.Environment, keys: Sequence[bytes]) -> list[Array]:
    with environment.begin() as transaction:
        return [np.array(np.frombuffer(transaction.get(key), np.uint8)) for key in keys]


def view_and_copy(environment: lmdb.Environment, keys: Sequence[bytes]) -> list[Array]:
    with environment.begin(buffers=True) as transaction:
        return [np.array(np.frombuffer(transaction.get(key), np.uint8)) for key in keys]


Take = Callable[[lmdb.Environment, Sequence[bytes]], list[Array]]


def _each(read: Callable[[Sequence], object], batches: Sequence[Sequence]) -> None:
    for batch in batches:
        read(batch)


def _shuffled_batches(things: Sequence) -> list[Sequence]:
    order = random.Random(0).sample(things, len(things))
    return [order[start : start + BATCH] for start in range(0, len(order), BATCH)]


if __name__ == "__main__":
    main()
