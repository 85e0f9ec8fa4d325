"""Packing: which pieces of which documents share a row. Pure functions over lengths.

documents   ├── 7 ──┤├─ 3 ─┤├ 2 ┤           capacity 5
pieces      ├ 5 ┤├2┤├─ 3 ─┤├ 2 ┤           a document longer than a row is split, nothing is lost
rows        ├ 5 ┤  ├─ 3 ─┤├2┤  ├ 2 ┤···   every piece goes where it leaves least room
"""

from collections import defaultdict
from dataclasses import dataclass

import numpy as np

from forebay.columns import Array


@dataclass(frozen=True, slots=True, eq=False)
class Pieces:
    """Runs of tokens that stay together, in the order of their documents."""

    document: Array  # (pieces,) int64, the position of the document among those given
    offset: Array  # (pieces,) int64, where in its document a piece begins
    length: Array  # (pieces,) int64


def split_documents(lengths: Array, capacity: int) -> Pieces:
    """Cut documents longer than `capacity` into full pieces and a rest.

    >>> split_documents(np.array([7, 3]), 5).length.tolist()
    [5, 2, 3]
    """
    lengths = np.asarray(lengths, np.int64)
    counts = -(-lengths // capacity)
    document = np.repeat(np.arange(len(lengths)), counts)
    first = np.cumsum(counts) - counts
    offset = (np.arange(len(document)) - first[document]) * capacity
    return Pieces(document, offset, np.minimum(lengths[document] - offset, capacity))


def pack_best_fit(lengths: Array, capacity: int) -> Array:
    """The bin of every item: longest first, each where it leaves least room; among equals, where that room is oldest.

    Bins are numbered by the first item they hold, in the order the items were given.

    >>> pack_best_fit(np.array([5, 2, 4, 3]), 7).tolist()
    [0, 0, 1, 1]
    """
    lengths = np.asarray(lengths, np.int64)
    if len(lengths) and not 0 < lengths.min() <= lengths.max() <= capacity:
        raise ValueError(f"lengths are {lengths.min()} to {lengths.max()}; they must be 1 to {capacity}")
    # Stable sorting of the smallest integers that hold the values is a radix sort: linear in the items.
    order = np.argsort((capacity - lengths).astype(np.min_scalar_type(capacity)), kind="stable")
    counts = np.bincount(lengths, minlength=capacity + 1)
    full = int(counts[capacity])  # each fills a bin of its own
    values = np.flatnonzero(counts[:capacity])[::-1]
    bins = np.empty(len(lengths), np.int64)
    bins[order[:full]] = np.arange(full)
    bins[order[full:]] = full + _fill(values.tolist(), counts[values].tolist(), capacity)
    return _numbered_by_first_item(bins)


def _fill(values: list[int], counts: list[int], capacity: int) -> Array:
    """The bin of every item of descending lengths.

    Items of one length are placed together: a bin with the least room that holds one takes as many of them as it can,
    because after each its room is less still. So the work grows with the kinds of room, not with the items.
    """
    rooms: defaultdict[int, list[int]] = defaultdict(list)  # room -> the bins that have it, oldest first
    open_rooms = 0  # bit r is set where rooms[r] holds a bin
    bins: list[int] = []
    takes: list[int] = []
    opened = 0
    for value, count in zip(values, counts, strict=True):
        while count:
            fitting = open_rooms >> value
            if fitting:
                room = value + (fitting & -fitting).bit_length() - 1
                here = rooms[room]
            else:
                room = capacity
                here = list(range(opened, opened - (-count // (capacity // value))))
                opened += len(here)
            each = room // value
            whole = min(len(here), count // each)
            rest = min(count - whole * each, each - 1) if whole < len(here) else 0
            used = whole + (rest > 0)
            bins += here[:used]
            takes += [each] * whole
            if rest:
                takes.append(rest)
            count -= whole * each + rest
            left = room - each * value
            if whole and left:
                rooms[left] += here[:whole]
                open_rooms |= 1 << left
            if rest:
                rooms[room - rest * value].append(here[whole])
                open_rooms |= 1 << (room - rest * value)
            if fitting:
                del here[:used]
                if not here:
                    del rooms[room]
                    open_rooms &= ~(1 << room)
    return np.repeat(np.array(bins, np.int64), np.array(takes, np.int64))


def _numbered_by_first_item(bins: Array) -> Array:
    """The same grouping, with bins numbered in the order in which their first items come."""
    first = np.empty(bins.max() + 1 if len(bins) else 0, np.int64)
    first[bins[::-1]] = np.arange(len(bins))[::-1]  # of several writes to one place the last one stays
    rank = np.empty(len(first), np.int64)
    rank[np.argsort(first)] = np.arange(len(first))
    numbered: Array = rank[bins]
    return numbered
