"""Which rows of an epoch come from one generation, numbered from 0, and where the reading cache has them.

    part 0    the rows of the generation that the epoch began with, all or the selected ones
    part 1    the rows of chunks that a newer generation added, if the epoch was let grow
    …

Rows are read through one cache, whose generation has the chunks of all parts.
"""

from functools import cached_property
from typing import NamedTuple

import numpy as np

from forebay.cache.reader import Cache
from forebay.columns import Array
from forebay.order.bijection import Numbers
from forebay.torch.stream import Rule


class Part:
    """`counts` says how many rows of each chunk of `pinned` are in; `rows` where they are in `reading`."""

    def __init__(self, pinned: Cache, older: Cache | None, reading: Cache, rule: Rule | None) -> None:
        self.pinned = pinned
        self.selection = None if rule is None else rule.of(pinned)
        starts = pinned.chunk_starts
        self._places = starts if self.selection is None else self.selection.before(starts)
        self.counts = np.diff(self._places)
        if older is not None:
            self.counts[np.isin(pinned.chunk_numbers, older.chunk_numbers)] = 0
        self._firsts = np.concatenate([[0], np.cumsum(self.counts)])
        self._whole = older is None
        self._reading = reading

    @cached_property
    def selected(self) -> str | None:
        """A digest of the selected rows, which a rule may know by a name alone; None where all are in."""
        return None if self.selection is None else self.selection.digest

    @cached_property
    def _shifts(self) -> Numbers | None:
        """By how much the rows of each chunk are moved in a newer generation, where gaps were filled."""
        if self._reading is self.pinned:
            return None
        at = np.searchsorted(self._reading.chunk_numbers, self.pinned.chunk_numbers)
        shifts: Numbers = self._reading.chunk_starts[at] - self.pinned.chunk_starts[:-1]
        return shifts

    @cached_property
    def replaced(self) -> "Replaced":
        """The chunks that the reading generation has otherwise."""
        return Replaced.between(self.pinned, self._reading)

    def rows(self, indices: Numbers) -> Numbers:
        """The row numbers in the reading cache."""
        if not self._whole:
            chunk = np.searchsorted(self._firsts, indices, side="right") - 1
            indices = indices - self._firsts[chunk] + self._places[chunk]
        rows = indices if self.selection is None else self.selection.rows(indices)
        if self._shifts is None:
            return rows
        return rows + self._shifts[np.searchsorted(self.pinned.chunk_starts, rows, side="right") - 1]


class Replaced(NamedTuple):
    """Chunks that were repaired or refreshed since a generation: with other rows, and with as many of other content."""

    rows: Numbers
    content: Numbers

    @classmethod
    def between(cls, pinned: Cache, reading: Cache) -> "Replaced":
        if reading is pinned:
            return cls(*(np.empty(0, np.int64),) * 2)
        chunks = pinned.chunk_numbers
        at = np.searchsorted(reading.chunk_numbers, chunks)
        there = np.append(reading.chunk_numbers, -1)[at] == chunks
        alike = there.copy()
        alike[there] = np.diff(reading.chunk_starts)[at[there]] == np.diff(pinned.chunk_starts)[there]
        same = alike.copy()
        for layer in pinned.layers:
            digests = [_content_digests(cache, layer, chunks[alike]) for cache in (pinned, reading)]
            same[alike] &= (digests[0] == digests[1]).all(axis=1)
        return cls(chunks[~alike], chunks[alike & ~same])


def _content_digests(cache: Cache, layer: str, chunks: Numbers) -> Array:
    table = cache.generation.table(layer)
    return table.digests["content"][np.searchsorted(table.chunks, chunks)]
