"""Which rows of an epoch come from one generation, numbered from 0, and where the reading cache has them.

    part 0    the rows of the generation that the epoch began with, all or the selected ones
    part 1    the rows of chunks that a newer generation added, if the epoch was let grow
    …

Rows are read through one cache, whose generation has the chunks of all parts.
"""

from functools import cached_property

import numpy as np

from forebay.cache.reader import Cache
from forebay.errors import StateMismatch
from forebay.order.bijection import Numbers
from forebay.torch.stream import Rule


class Part:
    """`counts` says how many rows of each chunk of `pinned` are in; `rows` where they are in `reading`."""

    def __init__(self, pinned: Cache, older: Cache | None, reading: Cache, rule: Rule | None) -> None:
        self.pinned = pinned
        self._selection = None if rule is None else rule.of(pinned)
        starts = pinned.chunk_starts
        self._places = starts if self._selection is None else self._selection.before(starts)
        self.counts = np.diff(self._places)
        if older is not None:
            self.counts[np.isin(pinned.chunk_numbers, older.chunk_numbers)] = 0
        self._firsts = np.concatenate([[0], np.cumsum(self.counts)])
        self._whole = older is None
        self._shifts = None if reading is pinned else _shifts(pinned, reading)

    @cached_property
    def selected(self) -> str | None:
        """A digest of the selected rows, which a rule may know by a name alone; None where all are in."""
        return None if self._selection is None else self._selection.digest

    def rows(self, indices: Numbers) -> Numbers:
        """The row numbers in the reading cache."""
        if not self._whole:
            chunk = np.searchsorted(self._firsts, indices, side="right") - 1
            indices = indices - self._firsts[chunk] + self._places[chunk]
        rows = indices if self._selection is None else self._selection.rows(indices)
        if self._shifts is None:
            return rows
        return rows + self._shifts[np.searchsorted(self.pinned.chunk_starts, rows, side="right") - 1]


def _shifts(pinned: Cache, reading: Cache) -> Numbers:
    """By how much the rows of each chunk are moved in a newer generation, where gaps were filled."""
    at = np.searchsorted(reading.chunk_numbers, pinned.chunk_numbers)
    there = np.append(reading.chunk_numbers, -1)[at] == pinned.chunk_numbers
    same = there.copy()
    same[there] = np.diff(reading.chunk_starts)[at[there]] == np.diff(pinned.chunk_starts)[there]
    if not same.all():
        chunk = int(pinned.chunk_numbers[~same][0])
        old, new = pinned.generation.number, reading.generation.number
        differs = {f"the rows of chunk {chunk}": (f"of generation {old}", f"others in generation {new}")}
        raise StateMismatch(pinned.root, differs)
    shifts: Numbers = reading.chunk_starts[at] - pinned.chunk_starts[:-1]
    return shifts
