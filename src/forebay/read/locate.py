"""Find the chunks of row numbers, and helpers for batches of rows.

Row numbers are divided into buckets of a power of two; a table has the chunk in which each bucket starts. Chunks have
similar sizes, so a row is in that chunk or in one of the next few.

    starts   0      900      1800     2700
    bucket   │0    │512  │1024 │1536 │2048 │2560
    table     0     0     1     1     2     2        row 1000: bucket 1 begins in chunk 0; 1000 ≥ 900, so chunk 1
"""

from collections.abc import Iterator
from itertools import pairwise
from typing import NamedTuple

import numpy as np
from numpy.typing import NDArray

from forebay.columns import Array, Ragged

_STEPS = 3


class ChunkFinder:
    """`find(rows)[i]` is the chunk whose rows, from `starts[chunk]` to `starts[chunk + 1]`, hold `rows[i]`."""

    def __init__(self, starts: NDArray[np.int64]) -> None:
        self._starts = starts
        self._ends = starts[1:]
        rows, chunks = int(starts[-1]), len(starts) - 1
        self._shift = max(0, (rows // max(1, 4 * chunks)).bit_length())
        edges = np.arange((rows >> self._shift) + 1, dtype=np.int64) << self._shift
        self._table: NDArray[np.int64] = np.searchsorted(starts, edges, side="right") - 1

    def find(self, rows: NDArray[np.int64]) -> NDArray[np.int64]:
        """The chunk of every row; the row numbers must be valid."""
        chunks: NDArray[np.int64] = self._table[rows >> self._shift]
        for _ in range(_STEPS):
            later = rows >= self._ends[chunks]
            if not later.any():
                return chunks
            chunks += later
        return self._starts.searchsorted(rows, side="right") - 1


class RowLocations(NamedTuple):
    """The locations of rows: the position of the chunk in the cache, and the row in the chunk."""

    positions: NDArray[np.int64]
    rows: NDArray[np.int64]

    def part(self, some: slice) -> "RowLocations":
        return RowLocations(self.positions[some], self.rows[some])


def cut_batches(rows: Array | Ragged, size: int) -> Iterator[Array | Ragged]:
    """Rows in batches of `size`, as views."""
    for some in slices(len(rows), size):
        if isinstance(rows, Ragged):
            offsets = rows.offsets[some.start : some.stop + 1]
            yield Ragged(rows.values[int(offsets[0]) : int(offsets[-1])], offsets - offsets[0])
        else:
            yield rows[some]


def reorder(rows: Array | Ragged, order: NDArray[np.int64]) -> Array | Ragged:
    """The same rows in another order."""
    if isinstance(rows, Ragged):
        return Ragged.of([rows[row] for row in order.tolist()], rows.values.dtype, rows.values.shape[1:])
    return rows[order]


def slices(count: int, size: int) -> Iterator[slice]:
    """Slices of `size` up to `count`; at least one, so that no rows give one empty batch."""
    return (slice(start, min(start + size, count)) for start in range(0, max(1, count), size))


def runs(values: NDArray[np.int64]) -> Iterator[tuple[int, slice]]:
    """(value, where it stands) for every run of equal values in a sorted array."""
    edges = [0, *(np.flatnonzero(values[1:] != values[:-1]) + 1).tolist(), len(values)]
    for start, stop in pairwise(edges):
        yield int(values[start]), slice(start, stop)


def by_position(positions: NDArray[np.int64]) -> Iterator[tuple[int, NDArray[np.int64]]]:
    """(value, the indices that have it) for every distinct value."""
    if not len(positions):
        return
    order = np.argsort(positions, kind="stable")
    values, starts = np.unique(positions[order], return_index=True)
    yield from zip(values.tolist(), np.split(order, starts[1:]), strict=True)
