"""Where rows are, and ways to take some of them at a time."""

from collections.abc import Iterator
from itertools import pairwise
from typing import NamedTuple

import numpy as np
from numpy.typing import NDArray

from forebay.columns import Array, Ragged


class Place(NamedTuple):
    """Where some rows are: the position of their chunk among the cache's chunks, and their row in it."""

    positions: NDArray[np.int64]
    rows: NDArray[np.int64]

    def part(self, some: slice) -> "Place":
        return Place(self.positions[some], self.rows[some])


def cut_batches(rows: Array | Ragged, size: int) -> Iterator[Array | Ragged]:
    """So many rows at a time, as views."""
    for some in slices(len(rows), size):
        if isinstance(rows, Ragged):
            offsets = rows.offsets[some.start : some.stop + 1]
            yield Ragged(rows.values[int(offsets[0]) : int(offsets[-1])], offsets - offsets[0])
        else:
            yield rows[some]


def taken(rows: Array | Ragged, order: NDArray[np.int64]) -> Array | Ragged:
    """The same rows in another order."""
    if isinstance(rows, Ragged):
        return Ragged.of([rows[row] for row in order.tolist()], rows.values.dtype, rows.values.shape[1:])
    return rows[order]


def slices(count: int, size: int) -> Iterator[slice]:
    """At least one, so that no rows are an empty batch."""
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
