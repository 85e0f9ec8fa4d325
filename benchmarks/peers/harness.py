"""What every peer does alike: write its own format from one plain file of rows, then read it in its configurations.

A peer is a script of its own, run by the python of its own environment, so it imports nothing of forebay:

    peer.py write ROWS FOLDER      ROWS holds uint16 rows of 2048 tokens, nothing else
    peer.py read FOLDER SECONDS    one line of JSON per configuration

A configuration yields torch.int64 tokens [32, 2048], shuffled, epoch after epoch; that is checked as it is timed.
"""

import itertools
import json
import os
import sys
import time
from collections.abc import Callable, Iterable, Iterator, Mapping

import numpy as np
import torch

LENGTH = 2048
BATCH = 32
WORKERS = tuple(range((os.cpu_count() or 1) + 1))

Epoch = Callable[[], Iterable[torch.Tensor]]


def main(write: Callable[[np.ndarray, str], None], configurations: Callable[[str], Mapping[str, Epoch]]) -> None:
    match sys.argv[1:]:
        case ["write", rows, folder]:
            write(rows_of(rows), folder)
        case ["read", folder, seconds]:
            for name, epoch in configurations(folder).items():
                print(json.dumps({"configuration": name, **timed(epoch, float(seconds))}), flush=True)
        case _:
            sys.exit(__doc__)


def rows_of(path: str) -> np.ndarray:
    return np.memmap(path, np.uint16, "r").reshape(-1, LENGTH)


def widened(tokens: torch.Tensor | np.ndarray) -> torch.Tensor:
    """uint16 from a worker process become int64 here: a quarter of the bytes passes between processes."""
    array = tokens.numpy() if isinstance(tokens, torch.Tensor) else tokens
    return torch.from_numpy(array.astype(np.int64))


def timed(epoch: Epoch, seconds: float) -> dict[str, float]:
    """Rows per second once warm, and how long the first batch takes."""
    started = time.perf_counter()
    batches = _forever(epoch)
    _check(next(batches))
    first = time.perf_counter() - started
    _count(batches, seconds / 4)
    count, spent = _count(batches, seconds)
    return {"rows_per_second": count * BATCH / spent, "first_batch_seconds": first}


def _forever(epoch: Epoch) -> Iterator[torch.Tensor]:
    return itertools.chain.from_iterable(iter(epoch, None))


def _count(batches: Iterator[torch.Tensor], seconds: float) -> tuple[int, float]:
    started = time.perf_counter()
    count, spent = 0, 0.0
    while spent < seconds:
        batch = next(batches)
        count, spent = count + 1, time.perf_counter() - started
    _check(batch)
    return count, spent


def _check(batch: torch.Tensor) -> None:
    """Token ids of whole batches as int64, of more than one row, inside the vocabulary."""
    found = (batch.dtype, tuple(batch.shape))
    if found != (torch.int64, (BATCH, LENGTH)):
        raise AssertionError(f"a batch is {found}, not int64 {(BATCH, LENGTH)}: this is not what is compared")
    if not 0 <= int(batch.min()) <= int(batch.max()) < 50_257 or torch.equal(batch[0], batch[1]):
        raise AssertionError("a batch does not hold rows of GPT-2 tokens")
