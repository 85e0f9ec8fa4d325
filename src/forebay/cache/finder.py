"""From row numbers to chunks, faster than a binary search.

Rows are sorted into buckets of a power of two; a table says in which chunk each bucket begins. Chunks are of much the
same size, so a row is in that chunk or in one of the next few.

    starts   0      900      1800     2700
    bucket   │0    │512  │1024 │1536 │2048 │2560
    table     0     0     1     1     2     2        row 1000: bucket 1 begins in chunk 0; 1000 ≥ 900, so chunk 1
"""

import numpy as np
from numpy.typing import NDArray

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
        """The chunk of every row; the rows are known to be there."""
        chunks: NDArray[np.int64] = self._table[rows >> self._shift]
        for _ in range(_STEPS):
            later = rows >= self._ends[chunks]
            if not later.any():
                return chunks
            chunks += later
        return self._starts.searchsorted(rows, side="right") - 1
