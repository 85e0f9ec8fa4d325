"""What every peer does alike: write its own format from one plain file of rows, then read it in its configurations.

A peer is a script of its own, run by the python of its own environment, so it imports nothing of forebay:

    peer.py write ROWS FOLDER      ROWS holds the rows one after the other, nothing else
    peer.py read FOLDER SECONDS CONFIGURATION    one line of JSON; for every configuration if it is empty

A configuration yields batches, shuffled, epoch after epoch. Those of tokens are torch.int64 [32, 2048]; images have a
`Compared` of their own in `image_harness`. What is yielded is checked as it is timed.
"""

import itertools
import json
import os
import sys
import time
from collections.abc import Callable, Iterable, Iterator, Mapping
from dataclasses import dataclass

import numpy as np
import torch

LENGTH = 2048
BATCH = 32
WORKERS = tuple(range((os.cpu_count() or 1) + 1))

Epoch = Callable[[], Iterable[torch.Tensor]]


@dataclass(frozen=True)
class Compared:
    """What is read, by all peers alike."""

    rows_of: Callable[[str], np.ndarray]
    check: Callable[[torch.Tensor], None]


def rows_of(path: str) -> np.ndarray:
    return np.memmap(path, np.uint16, "r").reshape(-1, LENGTH)


def check_tokens(batch: torch.Tensor) -> None:
    """Token ids of whole batches as int64, of more than one row, inside the vocabulary."""
    found = (batch.dtype, tuple(batch.shape))
    if found != (torch.int64, (BATCH, LENGTH)):
        raise AssertionError(f"a batch is {found}, not int64 {(BATCH, LENGTH)}: this is not what is compared")
    if not 0 <= int(batch.min()) <= int(batch.max()) < 50_257 or torch.equal(batch[0], batch[1]):
        raise AssertionError("a batch does not hold rows of GPT-2 tokens")


TOKENS = Compared(rows_of, check_tokens)


def main(
    write: Callable[[np.ndarray, str], None],
    configurations: Callable[[str], Mapping[str, Epoch]],
    compared: Compared = TOKENS,
) -> None:
    match sys.argv[1:]:
        case ["write", rows, folder]:
            write(compared.rows_of(rows), folder)
        case ["read", folder, seconds, chosen]:
            everything = configurations(folder)
            for name, epoch in everything.items() if not chosen else [(chosen, everything[chosen])]:
                found = timed(epoch, float(seconds), compared.check)
                print(json.dumps({"configuration": name, **found}), flush=True)
        case _:
            sys.exit(__doc__)


def widened(tokens: torch.Tensor | np.ndarray) -> torch.Tensor:
    """uint16 from a worker process become int64 here: a quarter of the bytes passes between processes."""
    array = tokens.numpy() if isinstance(tokens, torch.Tensor) else tokens
    return torch.from_numpy(array.astype(np.int64))


def timed(epoch: Epoch, seconds: float, check: Callable[[torch.Tensor], None]) -> dict[str, float]:
    """Rows per second once warm, and how long the first batch takes."""
    started = time.perf_counter()
    batches = _forever(epoch)
    check(next(batches))
    first = time.perf_counter() - started
    _count(batches, seconds / 4, check)
    count, spent = _count(batches, seconds, check)
    return {"rows_per_second": count * BATCH / spent, "first_batch_seconds": first}


def _forever(epoch: Epoch) -> Iterator[torch.Tensor]:
    return itertools.chain.from_iterable(iter(epoch, None))


def _count(batches: Iterator[torch.Tensor], seconds: float, check: Callable[[torch.Tensor], None]) -> tuple[int, float]:
    started = time.perf_counter()
    count, spent = 0, 0.0
    while spent < seconds:
        batch = next(batches)
        count, spent = count + 1, time.perf_counter() - started
    check(batch)
    return count, spent
