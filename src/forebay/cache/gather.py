"""Copying rows from many mapped files into one array in one call.

Rows of a fixed column lie in as many maps as there are chunks. numpy gathers from one array only; so the span of
addresses from the lowest row to the highest is looked at as one array of overlapping items, one item per byte, of
which only those that begin at a row are ever touched.

    map of chunk 7          map of chunk 2
    ├─row─┼─row─┤ ········· ├─row─┼─row─┤          item k of the span is the row_bytes at low + k
    ▲ low                         ▲ low + k
"""

import numpy as np
from numpy.typing import NDArray

from forebay.columns import Array

_LARGEST = 2**62


class _Span:
    """Something numpy can look at as an array: overlapping items from an address on."""

    def __init__(self, low: int, count: int, item_bytes: int) -> None:
        self.__array_interface__ = {
            "version": 3,
            "data": (low, True),
            "shape": (count,),
            "strides": (1,),
            "typestr": f"|V{item_bytes}",
        }


def gather(addresses: NDArray[np.int64], item_bytes: int) -> Array:
    """The items at some addresses, as one array of `(items, item_bytes)` bytes.

    The caller holds the maps that the addresses point into, and has checked what it copies.
    """
    if not len(addresses) or not item_bytes:
        return np.empty((len(addresses), item_bytes), np.uint8)
    low = int(addresses.min())
    count = int(addresses.max()) - low + 1
    if count * item_bytes >= _LARGEST:  # maps too far apart for one array
        return np.concatenate([np.asarray(_Span(one, 1, item_bytes)) for one in addresses.tolist()])
    return np.asarray(_Span(low, count, item_bytes))[addresses - low].view(np.uint8).reshape(-1, item_bytes)
