"""Reading what is stored once for equal prompts, as if every row had its own."""

import numpy as np
from numpy.typing import ArrayLike

from forebay.cache.reader import Cache
from forebay.columns import Array, Ragged
from forebay.errors import ColumnNotFound
from forebay.teachers.samples import HOLDER


class SharedColumn:
    """A column of prompts' encodings, row by row.

    >>> states = SharedColumn(cache, "t5_states")          # doctest: +SKIP
    >>> states.read([5, 3, 9]).shape                       # doctest: +SKIP
    (3, 128, 768)
    """

    def __init__(self, cache: Cache, column: str) -> None:
        if f"{column}{HOLDER}" not in cache.columns:
            shared = [name.removesuffix(HOLDER) for name in cache.columns if name.endswith(HOLDER)]
            raise ColumnNotFound(cache.root, f"{column}{HOLDER}", shared)
        self.cache, self.column = cache, column

    def read(self, rows: ArrayLike) -> Array:
        """`(rows, *shape)`; floats of rows that are absent are NaN: no zero stands for what is missing."""
        numbers = np.asarray(rows, np.int64)
        held = np.asarray(self.cache.read(numbers, [f"{self.column}{HOLDER}"])[f"{self.column}{HOLDER}"])
        starts = self.cache.chunk_starts
        first = starts[np.searchsorted(starts, numbers, side="right") - 1]
        found = self.cache.read(first + held.astype(np.int64), [self.column])[self.column]
        assert isinstance(found, Ragged)
        absent = np.nan if found.values.dtype.kind in "fV" else 0
        values = np.full((len(numbers), *found.values.shape[1:]), absent, found.values.dtype)
        values[found.lengths > 0] = found.values
        return values


def shared(cache: Cache, column: str) -> SharedColumn:
    """A column that is stored once for equal prompts."""
    return SharedColumn(cache, column)
