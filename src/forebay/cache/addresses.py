"""Where tensors begin in memory, chunk by chunk, so that rows of many chunks are copied in one gather."""

from collections.abc import Callable
from functools import partial

import numpy as np
from numpy.typing import NDArray

from forebay.cache.gather import Window
from forebay.cache.maps import Maps
from forebay.cache.place import Place, by_position
from forebay.columns import Array
from forebay.format.chunk_file import ChunkFile

_EDGE_BYTES = 8  # of one offset


class Addresses:
    """Where one tensor begins in every chunk, as far as chunks are mapped."""

    def __init__(self, maps: Maps, count: int, tensor: Callable[[ChunkFile], Array], item_bytes: int) -> None:
        self._maps = maps
        self._tensor = tensor
        self._window = Window(item_bytes)
        self._known = np.zeros(count, np.int64)  # 0 where a chunk is not mapped
        self.gather, self.gather_batches = self._window.gather, self._window.gather_batches
        maps.on_close(self._closed)

    def of(self, positions: NDArray[np.int64]) -> NDArray[np.int64]:
        """The addresses in some chunks, mapped now if they are not. The caller has begun reading."""
        found = self._known[positions]
        if not found.all():
            unmapped = np.flatnonzero(found == 0)
            for position, chosen in by_position(positions[unmapped]):
                found[unmapped[chosen]] = self._map(position)
        self._maps.touch(positions)
        return found

    def _map(self, position: int) -> int:
        file = self._maps.get(position)
        items = self._tensor(file)
        address = int(items.ctypes.data)
        self._window.include(address, items.nbytes)
        self._maps.while_open(position, file, partial(self._opened, position, address))
        return address

    def _opened(self, position: int, address: int) -> None:
        self._known[position] = address

    def _closed(self, position: int) -> None:
        self._known[position] = 0


class Edges:
    """Where the values of rows begin and end: the offsets of a ragged column, gathered."""

    def __init__(self, maps: Maps, count: int, column: str) -> None:
        self._maps = maps
        self._pairs = Addresses(maps, count, lambda file: file.offsets(column), 2 * _EDGE_BYTES)

    def of(self, place: Place) -> tuple[NDArray[np.int64], NDArray[np.int64]]:
        ticket = self._maps.begin_reading()
        try:
            pairs = self._pairs.of(place.positions) + place.rows * _EDGE_BYTES
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
