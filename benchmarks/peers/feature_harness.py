"""What the peers of teacher features do alike: write their own format from one plain file, then read pairs of buckets.

    peer.py write FEATURES FOLDER   FEATURES holds float16 [rows, 10, 1280], nothing else
    peer.py read FOLDER SECONDS     one line of JSON per layout

A layout gives the two buckets around each timestep of 64 random rows, float16 [64, 2, 1280]; interpolated in float32.
"""

import json
import sys
import time
from collections.abc import Callable, Mapping

import numpy as np

BUCKETS, DIM, BATCH = 10, 1280, 64
LOW, STEP = 0.05, 0.1

Pairs = Callable[[np.ndarray, np.ndarray], np.ndarray]  # rows, lower buckets -> [64, 2, 1280]


def main(write: Callable[[np.ndarray, str], None], layouts: Callable[[str], Mapping[str, Pairs]]) -> None:
    match sys.argv[1:]:
        case ["write", features, folder]:
            write(np.memmap(features, np.float16, "r").reshape(-1, BUCKETS, DIM), folder)
        case ["read", folder, rows, seconds]:
            for name, pairs in layouts(folder).items():
                rate = _batches_per_second(pairs, int(rows), float(seconds))
                print(json.dumps({"layout": name, "batches_per_second": rate}), flush=True)
        case _:
            sys.exit(__doc__)


def interpolated(pairs: Pairs, rows: np.ndarray, times: np.ndarray) -> np.ndarray:
    place = (np.clip(times, LOW, LOW + STEP * (BUCKETS - 1)) - LOW) / STEP
    lower = np.clip(place.astype(np.int64), 0, BUCKETS - 2)
    found = pairs(rows, lower)
    if found.shape != (BATCH, 2, DIM) or found.dtype != np.float16:
        raise AssertionError(f"a batch is {found.dtype} {found.shape}: this is not what is compared")
    share = (place - lower).astype(np.float32)[:, None]
    return (1 - share) * found[:, 0] + share * found[:, 1]


def _batches_per_second(pairs: Pairs, rows: int, seconds: float) -> float:
    generator = np.random.default_rng(0)
    count, started = 0, 0.0
    for warm in (True, False):
        count, started = 0, time.perf_counter()
        while time.perf_counter() - started < (seconds / 4 if warm else seconds):
            interpolated(pairs, generator.integers(0, rows, BATCH), generator.random(BATCH).astype(np.float32))
            count += 1
    return count / (time.perf_counter() - started)


def pair_index(rows: np.ndarray, lower: np.ndarray) -> tuple[np.ndarray, np.ndarray]:
    """Rows and buckets as two index arrays [64, 2]."""
    return np.repeat(rows[:, None], 2, axis=1), lower[:, None] + np.arange(2)


if __name__ == "__main__":
    sys.exit(__doc__)
