"""Where tensors begin in memory, chunk by chunk, so that rows of many chunks are copied in one gather.

A gather does not know where a tensor ends. So every address that is handed out here was compared with the tensor it
points into, although a chunk is checked when it is opened: a mapped file may change under the reader.
"""

from collections.abc import Callable
from functools import partial

import numpy as np
from numpy.typing import NDArray

from forebay.cache.gather import Window
from forebay.cache.maps import Maps
from forebay.cache.place import Place, by_position
from forebay.columns import Array
from forebay.errors import ChunkCorrupt
from forebay.format.chunk_file import ChunkFile

Outside = Callable[[int], ChunkCorrupt]  # what to raise for a position whose row is not in its chunk
_EDGE_BYTES = 8  # of one offset


class Addresses:
    """Where one tensor begins in every chunk, as far as chunks are mapped."""

    def __init__(
        self, maps: Maps, count: int, tensor: Callable[[ChunkFile], Array], outside: Outside, item_bytes: int
    ) -> None:
        self._maps = maps
        self._tensor = tensor
        self._outside = outside
        self._item_bytes = item_bytes
        self._window = Window(item_bytes)
        self._known = np.zeros(count, np.int64)  # 0 where a chunk is not mapped
        self._starts = np.zeros(count, np.uint64)  # bytes at which an item can begin, once a chunk was mapped
        self._counts = np.zeros(count, np.uint64)  # values of the tensor, likewise
        self.gather, self.gather_batches = self._window.gather, self._window.gather_batches
        maps.on_close(partial(_forget, self._known))  # the maps hold the numbers, not what reads through them

    def of(self, positions: NDArray[np.int64]) -> NDArray[np.int64]:
        """The addresses in some chunks, mapped now if they are not. The caller has begun reading."""
        found = self._known[positions]
        if not found.all():
            unmapped = np.flatnonzero(found == 0)
            for position, chosen in by_position(positions[unmapped]):
                found[unmapped[chosen]] = self._map(position)
        self._maps.touch(positions)
        return found

    def at(self, positions: NDArray[np.int64], offsets: NDArray[np.int64]) -> NDArray[np.int64]:
        """The addresses of items `offsets` bytes after the beginning, all inside. The caller has begun reading."""
        addresses = self.of(positions)
        # Seen as unsigned, a negative number is larger than any.
        inside = offsets.view(np.uint64) < self._starts[positions]
        if not inside.all():
            raise self._outside(int(positions[~inside][0]))
        addresses += offsets
        return addresses

    def of_values(
        self, positions: NDArray[np.int64], starts: NDArray[np.int64], stops: NDArray[np.int64]
    ) -> NDArray[np.int64]:
        """As `of`, once the values of every row, from its start to its stop, are found to be inside."""
        addresses = self.of(positions)
        lows, highs = starts.view(np.uint64), stops.view(np.uint64)
        inside = (lows <= highs) & (highs <= self._counts[positions])
        if not inside.all():
            raise self._outside(int(positions[~inside][0]))
        return addresses

    def _map(self, position: int) -> int:
        file = self._maps.get(position)
        items = self._tensor(file)
        address = int(items.ctypes.data)
        self._starts[position] = max(0, items.nbytes - self._item_bytes + 1)
        self._counts[position] = len(items)
        self._window.include(address, items.nbytes)
        self._maps.while_open(position, file, partial(self._opened, position, address))
        return address

    def _opened(self, position: int, address: int) -> None:
        self._known[position] = address


def _forget(known: NDArray[np.int64], position: int) -> None:
    known[position] = 0


class Edges:
    """Where the values of rows begin and end: the offsets of a ragged column, gathered."""

    def __init__(self, maps: Maps, count: int, column: str, outside: Outside) -> None:
        self._maps = maps
        self._pairs = Addresses(maps, count, lambda file: file.offsets(column), outside, 2 * _EDGE_BYTES)

    def of(self, place: Place) -> tuple[NDArray[np.int64], NDArray[np.int64]]:
        ticket = self._maps.begin_reading()
        try:
            pairs = self._pairs.at(place.positions, place.rows * _EDGE_BYTES)
            starts, stops = self._pairs.gather(pairs, np.dtype(np.int64), (2,)).T
            return starts, stops
        finally:
            self._maps.end_reading(ticket)


def value_addresses(
    bases: NDArray[np.int64], starts: NDArray[np.int64], ends: NDArray[np.int64], item_bytes: int
) -> NDArray[np.int64]:
    """The address of every value of some rows: those of a row go on from `starts`, counted from its base."""
    lengths = np.diff(ends)
    numbers = np.arange(ends[-1]) + np.repeat(starts - ends[:-1], lengths)
    addresses: NDArray[np.int64] = np.repeat(bases, lengths) + numbers * item_bytes
    return addresses
