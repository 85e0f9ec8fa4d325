"""Reading presence bits: most chunks have all their rows, and are looked through only once.

A chunk never changes, so what was seen of it holds until the cache is closed.
"""

from collections.abc import Iterator

import numpy as np
from numpy.typing import NDArray

from forebay.cache.column import ColumnReader
from forebay.cache.place import Place, slices
from forebay.columns import Array, Ragged

_PIECE_ROWS = 65_536
_WHOLE, _PARTIAL, _UNSEEN = range(3)  # the most of some chunks says what is to be done


class PresenceReader:
    """A reader of presence bits over the reader of their column."""

    def __init__(self, bits: ColumnReader, rows: NDArray[np.int64]) -> None:
        self._bits = bits
        self._rows = rows
        self._seen = np.full(len(rows), _UNSEEN, np.uint8)

    def read(self, place: Place) -> Array | Ragged:
        most = self._seen[place.positions].max(initial=_WHOLE)
        if most == _UNSEEN:
            self._look_through(place.positions)
            most = self._seen[place.positions].max()
        return self._bits.read(place) if most == _PARTIAL else np.ones(len(place.rows), np.bool_)

    def read_slices(self, place: Place, starts: NDArray[np.int64], length: int) -> Array:
        return self._bits.read_slices(place, starts, length)

    def read_batches(self, place: Place, size: int) -> Iterator[Array | Ragged]:
        return (self.read(place.part(some)) for some in slices(len(place.rows), size))

    def views(self, place: Place) -> Iterator[Array]:
        return self._bits.views(place)

    def _look_through(self, positions: NDArray[np.int64]) -> None:
        for position in np.unique(positions[self._seen[positions] == _UNSEEN]).tolist():
            self._seen[position] = _WHOLE if self._is_whole(position) else _PARTIAL

    def _is_whole(self, position: int) -> bool:
        """Some rows at a time: how many there are is only believed once the first of them open the chunk."""
        count = int(self._rows[position])
        pieces = (np.arange(at, min(at + _PIECE_ROWS, count)) for at in range(0, count, _PIECE_ROWS))
        return all(np.asarray(self._bits.read(Place(np.full(len(rows), position), rows))).all() for rows in pieces)
