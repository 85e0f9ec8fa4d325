"""Sort more records than memory holds: sorted runs in scratch files, then one merge.

samples ─▶ runs: as many as memory holds, sorted, each identity once ─▶ merged, a block of every run at a time

Runs and blocks are kept in the order of the source, and every sort is stable: of equal identities the earliest sample
comes first.
"""

import os
import tempfile
from array import array
from collections.abc import Iterator, Sequence
from contextlib import AbstractContextManager, ExitStack
from dataclasses import dataclass

import numpy as np
from numpy.typing import DTypeLike

from forebay.columns import Array
from forebay.format.tensors import as_bytes
from forebay.store.base import Store
from forebay.store.local import LocalStore


class Scratch(AbstractContextManager["Scratch"]):
    """A file that is appended to, then mapped. It has no name, so nothing of it is left, however the process ends.

    A map of it stays valid after it is closed.
    """

    def __init__(self, folder: str | None) -> None:
        self._file = tempfile.TemporaryFile(dir=folder)  # noqa: SIM115 — closed on exit

    def __exit__(self, *_: object) -> None:
        self._file.close()

    def append(self, values: Array) -> None:
        self._file.write(as_bytes(values))

    def mapped(self, dtype: DTypeLike) -> Array:
        """All that was appended, as one array that can be written to."""
        self._file.flush()
        if self._file.tell() == 0:
            return np.empty(0, dtype)
        return np.memmap(self._file, dtype, "r+").view(np.ndarray)


def scratch_folder(store: Store) -> str | None:
    """A folder on the disk that the cache is on, None (the system's choice) where it is on none.

    It is never made for the purpose: a cache that is not there yet will be made in the folder above it.
    """
    if not isinstance(store, LocalStore):
        return None
    folder = os.path.abspath(store.address)
    while not os.path.isdir(folder):
        folder = os.path.dirname(folder)
    return folder


RECORD_BYTES = 144  # what merging holds at a time for one record of 24 bytes: its block, its order, and copies


@dataclass(frozen=True, slots=True, eq=False)
class Run:
    """Sorted identities, each with the number of its earliest sample."""

    high: Array
    low: Array
    samples: Array

    def __len__(self) -> int:
        return len(self.high)

    def __getitem__(self, part: slice) -> "Run":
        return Run(self.high[part], self.low[part], self.samples[part])

    def key(self, position: int) -> tuple[int, int]:
        return int(self.high[position]), int(self.low[position])

    def count_up_to(self, key: tuple[int, int]) -> int:
        """How many come up to a key, itself counted."""
        high, low = (np.uint64(half) for half in key)
        first, last = (int(np.searchsorted(self.high, high, side=side)) for side in ("left", "right"))
        return first + int(np.searchsorted(self.low[first:last], low, side="right"))

    def repeats(self) -> Array:
        """Which have the identity of the one before."""
        same = (self.high[1:] == self.high[:-1]) & (self.low[1:] == self.low[:-1])
        return np.concatenate([np.zeros(min(1, len(self)), np.bool_), same])

    def sorted(self) -> "Run":
        order = np.lexsort((self.low, self.high))
        return Run(self.high[order], self.low[order], self.samples[order])

    def where(self, chosen: Array) -> "Run":
        return Run(self.high[chosen], self.low[chosen], self.samples[chosen])


class RunWriter(AbstractContextManager["RunWriter"]):
    """Takes samples in the order of the source; keeps sorted runs, and marks every sample that its own run repeats."""

    def __init__(self, capacity: int, folder: str | None) -> None:
        self.count = 0
        self._capacity = capacity
        self._lengths: list[int] = []
        with ExitStack() as opened:
            self._records = opened.enter_context(Scratch(folder))
            self._marks = opened.enter_context(Scratch(folder))
            self._opened = opened.pop_all()
        self._begin_run()

    def __exit__(self, *_: object) -> None:
        self._opened.close()

    def add(self, identity: bytes | None) -> None:
        """The next sample; one without an identity only counts."""
        if identity is not None:
            self._identities += identity
            self._samples.append(self.count)
        self.count += 1
        if self.count - self._begun == self._capacity:
            self._finish_run()

    def finish(self) -> tuple[list[Run], Array]:
        """The runs, and one mark per sample: 1 where it repeats an earlier one of its run."""
        self._finish_run()
        records, runs = self._records.mapped(np.uint64), []
        for length in self._lengths:
            runs.append(Run(*(records[start : start + length] for start in (0, length, 2 * length))))
            records = records[3 * length :]
        return runs, self._marks.mapped(np.uint8)

    def _begin_run(self) -> None:
        self._begun = self.count
        self._identities = bytearray()
        self._samples = array("Q")

    def _finish_run(self) -> None:
        halves = np.frombuffer(self._identities, ">u8").astype(np.uint64).reshape(-1, 2)
        run = Run(halves[:, 0], halves[:, 1], np.frombuffer(self._samples, np.uint64)).sorted()
        repeats = run.repeats()
        marks = np.zeros(self.count - self._begun, np.uint8)
        marks[run.samples[repeats] - np.uint64(self._begun)] = 1
        self._marks.append(marks)
        once = run.where(~repeats)
        for values in (once.high, once.low, once.samples):
            self._records.append(values)
        self._lengths.append(len(once))
        self._begin_run()


def merge_runs(runs: Sequence[Run], capacity: int) -> Iterator[Run]:
    """All records in order, at most `capacity` at a time (one of every run at least); equal ones come together."""
    left = [run for run in runs if len(run)]
    block = max(1, capacity // max(1, len(left)))
    while left:
        blocks = [run[:block] for run in left]
        # Everything up to the lowest end of a block is in these blocks.
        pivot = min(part.key(len(part) - 1) for part in blocks)
        counts = [part.count_up_to(pivot) for part in blocks]
        taken = [part[:count] for part, count in zip(blocks, counts, strict=True)]
        yield _joined(taken).sorted()
        left = [run[count:] for run, count in zip(left, counts, strict=True)]
        left = [run for run in left if len(run)]


def _joined(runs: Sequence[Run]) -> Run:
    columns = ([run.high for run in runs], [run.low for run in runs], [run.samples for run in runs])
    return Run(*map(np.concatenate, columns))
