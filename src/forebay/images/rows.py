"""Rows on their way into columns.

The content of an image is most of its row. It is laid end to end in one array as it comes: a list of them all, joined
at the end, would take the memory twice, and new memory takes longer to get than a copy.
"""

from collections.abc import Mapping, Sequence

import numpy as np

from forebay.columns import Array, Column, Ragged

Row = dict[str, Array]

_FIRST_ROOM = 1 << 22


class Pile:
    """The values of a ragged uint8 column, growing. Room that is never written to takes no memory."""

    def __init__(self, room: int = _FIRST_ROOM) -> None:
        self._values = np.empty(max(room, 1), np.uint8)
        self._ends = [0]

    def add(self, pieces: Sequence[bytes]) -> None:
        """One row more, of one piece or several."""
        start = stop = self._ends[-1]
        self._make_room(start + sum(map(len, pieces)))
        for piece in pieces:
            start, stop = stop, stop + len(piece)
            self._values[start:stop] = np.frombuffer(piece, np.uint8)
        self._ends.append(stop)

    def _make_room(self, stop: int) -> None:
        if stop > len(self._values):
            larger = np.empty(max(stop, 2 * len(self._values)), np.uint8)
            larger[: self._ends[-1]] = self._values[: self._ends[-1]]
            self._values = larger

    def column(self) -> Ragged:
        return Ragged(self._values[: self._ends[-1]], np.array(self._ends, np.int64))


def as_columns(rows: Sequence[Mapping[str, Array]], declared: Sequence[Column]) -> dict[str, Array | Ragged]:
    """Rows of few values each, column by column."""
    made: dict[str, Array | Ragged] = {}
    for column in declared:
        values = [row[column.name] for row in rows]
        if column.ragged:
            made[column.name] = Ragged.of(values, column.array_dtype)
        else:
            made[column.name] = np.array(values, column.array_dtype).reshape(len(rows), *column.shape)
    return made
