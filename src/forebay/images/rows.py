"""Rows on their way into columns.

The content of an image is most of its row. It is laid end to end in one array as it comes, and so copied once: from the
interleaved pixels of the decoder to the planes that are stored.
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

    def add(self, values: Array) -> None:
        """One row more, of any shape, in the order of its elements."""
        start, stop = self._ends[-1], self._ends[-1] + values.size
        if stop > len(self._values):
            larger = np.empty(max(stop, 2 * len(self._values)), np.uint8)
            larger[:start] = self._values[:start]
            self._values = larger
        self._values[start:stop].reshape(values.shape)[...] = values
        self._ends.append(stop)

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
