"""Copying rows from many mapped files into one array in one call.

Rows of a fixed column lie in as many maps as there are chunks. numpy gathers from one array only; so the span of
addresses from the lowest row to the highest is looked at as one array of overlapping items, one item per byte, of
which only those that begin at a row are ever touched.

    map of chunk 7          map of chunk 2
    ├─row─┼─row─┤ ········· ├─row─┼─row─┤          item k of the span is the row_bytes at low + k
    ▲ low                         ▲ low + k
"""

import threading
from collections.abc import Iterator
from typing import Any

import numpy as np
from numpy.typing import NDArray

from forebay.columns import Array

SHORT_ROW = 64  # values, on average, up to which a ragged row is copied value by value
_TOGETHER = 1024 * 1024  # bytes up to which several batches are copied in one call
_LARGEST = 2**62  # bytes that numpy lets one array seem to have


class Window:
    """The span of addresses that items were found at, and the way to copy items out of it.

    The caller holds the maps that addresses point into, and has checked what it copies.
    """

    def __init__(self, item_bytes: int) -> None:
        self._item_bytes = item_bytes
        self._lock = threading.Lock()
        self._high = 0
        # One attribute, so that a thread that gathers sees a beginning and the items that belong to it.
        self._view: tuple[int, Array | None] = (0, None)

    def include(self, low: int, size: int) -> None:
        """Widen the window by a range that items lie in, before any address in it is used."""
        with self._lock:
            first = min(self._view[0], low) if self._high else low
            self._high = max(self._high, low + size)
            count = max(1, self._high - first)
            fits = count * max(1, self._item_bytes) < _LARGEST
            self._view = (first, _overlapping(first, count, self._item_bytes) if fits else None)

    def gather(self, addresses: NDArray[np.int64], dtype: np.dtype[Any], shape: tuple[int, ...]) -> Array:
        """The items at some addresses, each an array of this type and shape."""
        (copied,) = self.gather_batches(addresses, max(1, len(addresses)), dtype, shape)
        return copied

    def gather_batches(
        self, addresses: NDArray[np.int64], size: int, dtype: np.dtype[Any], shape: tuple[int, ...]
    ) -> Iterator[Array]:
        """The same, so many at a time; no addresses are one empty batch. Small batches are parts of one copy."""
        first, items = self._view
        if items is None or not len(addresses) or not self._item_bytes:
            for at in range(0, max(1, len(addresses)), size):
                yield self._singly(addresses[at : at + size], dtype, shape)
            return
        offsets = addresses - first
        step = size * max(1, _TOGETHER // (size * self._item_bytes))
        for start in range(0, len(offsets), step):
            copied = items[offsets[start : start + step]].view(dtype).reshape(-1, *shape)
            for at in range(0, len(copied), size):
                yield copied[at : at + size]

    def _singly(self, addresses: NDArray[np.int64], dtype: np.dtype[Any], shape: tuple[int, ...]) -> Array:
        """Where there is nothing to copy, or the window is wider than numpy lets an array be."""
        copied = np.empty((len(addresses), *shape), dtype)
        if self._item_bytes:
            for row, address in zip(copied, addresses.tolist(), strict=True):
                row[...] = _overlapping(address, 1, self._item_bytes).view(dtype).reshape(shape)
        return copied


class _Span:
    """Something numpy can look at as an array."""

    def __init__(self, low: int, count: int, item_bytes: int) -> None:
        self.__array_interface__ = {
            "version": 3,
            "data": (low, True),
            "shape": (count,),
            "strides": (1,),
            "typestr": f"|V{item_bytes}",
        }


def _overlapping(low: int, count: int, item_bytes: int) -> Array:
    return np.asarray(_Span(low, count, item_bytes))
