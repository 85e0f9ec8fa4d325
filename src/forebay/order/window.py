"""Window shuffle: close to a global one, while every stored block is decoded once, by one rank.

Chunks are shuffled and laid end to end; equal stretches of them are the lanes. Lanes take turns, one row each, and
rank r of w takes the positions with p % w == r, so if w divides the number of lanes, no two ranks read the same lane.
Neighbouring lanes may share a chunk, so turns jump (0, 32, 16, 48, …): successive positions are far apart.

    chunks, shuffled   7 7 7 7 2 2 2 2 2 9 9 9 4 4 4 4 4 4 0 0 0 0 5 5 …
    lanes              ├──── lane 0 ────┼──── lane 1 ────┼──── lane 2 …     cut between units, not through them
    groups             ├─ g0 ─┤─ g1 ─┤  of `chunks` chunks each: the units of a group are shuffled
    windows            ├ w0 ┤── w1 ──┤  of `rows` rows each: the rows of a window are shuffled

A unit is `unit` rows of a chunk, a multiple of a block, so that no block is in two units. Windows begin at a different
phase in each lane, so that not all lanes need new blocks at once. Lanes differ in length by less than a unit each; the
excess rows follow at the end, shuffled.
"""

import operator
from dataclasses import dataclass
from functools import lru_cache
from typing import NamedTuple

import numpy as np

from forebay.order.bijection import Numbers, Words, key_of, mix, permute

LANES = 64


@dataclass(frozen=True, slots=True)
class Window:
    """The dimensions of a window shuffle; part of the identity of an order."""

    rows: int  # of one lane that are mixed, and stay decoded, at a time
    unit: int = 1
    chunks: int = 16
    lanes: int = LANES

    def __post_init__(self) -> None:
        for name in ("rows", "unit", "chunks", "lanes"):  # numpy integers are not JSON
            object.__setattr__(self, name, operator.index(getattr(self, name)))
        if min(self.unit, self.chunks, self.lanes) < 1 or self.rows < self.unit:
            raise ValueError(f"unit, chunks and lanes must be at least 1, and rows at least unit (got {self})")


class WindowOrder:
    """The window shuffle of chunks of `counts` rows each, whose rows are numbered chunk by chunk."""

    def __init__(self, counts: Numbers, seed: int, window: Window, part: int = 0) -> None:
        self.window = window
        self.size = int(counts.sum())
        self._counts = counts[counts > 0]
        self._bases = (np.cumsum(counts) - counts)[counts > 0]
        self._seed, self._part = seed, part
        self._deal = lru_cache(maxsize=2)(self._dealt)

    def rows_at(self, epoch: int, positions: Numbers) -> Numbers:
        return self._deal(epoch).rows_at(positions)

    def _dealt(self, epoch: int) -> "_Deal":
        return _Deal(self._counts, self._bases, self.window, key_of("window", self._seed, epoch, self._part))


class _Pieces(NamedTuple):
    """Parts of one chunk in one lane, in order of lanes; cumulative arrays have one more entry."""

    bases: Numbers  # number of the first row
    units: Numbers  # whole units before each
    rests: Numbers  # rows before each that fill no unit
    full: Numbers  # whole units of each


class _Deal:
    """The lanes, groups and windows of one epoch; takes memory per chunk and lane, none per row."""

    def __init__(self, counts: Numbers, bases: Numbers, window: Window, key: int) -> None:
        self._window, self._key, self._turns = window, key, _turns(window.lanes)
        shuffled = permute(np.arange(len(counts)), len(counts), key)
        counts, bases = counts[shuffled], bases[shuffled]
        ends = np.cumsum(counts)
        self._lanes = _lane_edges(ends, counts, window)
        self._even = int(np.diff(self._lanes).min(initial=int(ends[-1]) if len(ends) else 0))
        rest = np.diff(self._lanes) - self._even
        self._rests = np.concatenate([[0], np.cumsum(rest)])
        self._cut(counts, bases, ends)

    def _cut(self, counts: Numbers, bases: Numbers, ends: Numbers) -> None:
        """Cut chunks where lanes begin, and collect the pieces into groups."""
        starts = np.unique(np.concatenate([ends - counts, self._lanes[:-1]]))
        sizes = np.diff(np.append(starts, self._lanes[-1]))
        chunk = np.searchsorted(ends, starts, side="right")
        starts, sizes, chunk = starts[sizes > 0], sizes[sizes > 0], chunk[sizes > 0]
        unit = self._window.unit
        self._pieces = _Pieces(
            bases=bases[chunk] + starts - (ends - counts)[chunk],
            units=np.concatenate([[0], np.cumsum(sizes // unit)]),
            rests=np.concatenate([[0], np.cumsum(sizes % unit)]),
            full=sizes // unit,
        )
        lane = np.searchsorted(self._lanes, starts, side="right") - 1
        first_of_lane = np.searchsorted(starts, self._lanes[lane], side="left")
        within = np.arange(len(starts)) - first_of_lane
        self._first = np.flatnonzero(within % self._window.chunks == 0)  # first piece of each group
        self._groups = starts[self._first]  # where each group begins
        self._group_units = np.diff(self._pieces.units[np.append(self._first, len(starts))])

    def rows_at(self, positions: Numbers) -> Numbers:
        lanes = self._window.lanes
        lane, index = self._turns[positions % lanes], positions // lanes
        tail = np.flatnonzero(positions >= lanes * self._even)
        if len(tail):
            left = permute(positions[tail] - lanes * self._even, int(self._rests[-1]), key_of("tail", self._key))
            lane[tail] = np.searchsorted(self._rests, left, side="right") - 1
            index[tail] = self._even + left - self._rests[lane[tail]]
        return self._rows(self._mixed(lane, self._lanes[lane] + index))

    def _mixed(self, lane: Numbers, places: Numbers) -> Numbers:
        """Return where the shuffle of its window puts each place."""
        size, lanes = self._window.rows, self._window.lanes
        phase = self._lanes[lane] + (lane + 1) * size // lanes
        number = (places - phase) // size + 1
        number += places >= self._border(lane, phase + number * size)
        low, high = (self._border(lane, phase + (number - 1 + step) * size) for step in (0, 1))
        keys = mix(mix(np.full(1, self._key, np.uint64) ^ lane.astype(np.uint64)) ^ number.astype(np.uint64))
        return low + permute(places - low, high - low, keys)

    def _border(self, lane: Numbers, places: Numbers) -> Numbers:
        """Return the last place up to `places` where no unit is cut, within the lane."""
        group, offset = self._in_group(np.clip(places, self._lanes[lane], self._lanes[lane + 1] - 1))
        unit, whole = self._window.unit, self._group_units[group] * self._window.unit
        rest = self._pieces.rests
        first = rest[self._first[group]]
        piece = np.searchsorted(rest, first + np.maximum(0, offset - whole), side="right") - 1
        border = self._groups[group] + np.where(offset < whole, offset // unit * unit, whole + rest[piece] - first)
        return np.where(places >= self._lanes[lane + 1], self._lanes[lane + 1], border)

    def _rows(self, places: Numbers) -> Numbers:
        """Return the rows at some places, after shuffling the units of each group."""
        group, offset = self._in_group(places)
        unit, pieces, first = self._window.unit, self._pieces, self._first[group]
        whole = self._group_units[group]
        keys: Words = mix(np.full(1, self._key, np.uint64) + group.astype(np.uint64))
        turned = permute(np.minimum(offset // unit, np.maximum(0, whole - 1)), np.maximum(1, whole), keys)
        target = pieces.units[first] + turned
        by_unit = np.minimum(np.searchsorted(pieces.units, target, side="right") - 1, len(pieces.full) - 1)
        unit_rows = pieces.bases[by_unit] + (target - pieces.units[by_unit]) * unit + offset % unit
        left = pieces.rests[first] + np.maximum(0, offset - whole * unit)
        by_rest = np.minimum(np.searchsorted(pieces.rests, left, side="right") - 1, len(pieces.full) - 1)
        rest_rows = pieces.bases[by_rest] + pieces.full[by_rest] * unit + left - pieces.rests[by_rest]
        return np.where(offset < whole * unit, unit_rows, rest_rows)

    def _in_group(self, places: Numbers) -> tuple[Numbers, Numbers]:
        group = np.searchsorted(self._groups, places, side="right") - 1
        return group, places - self._groups[group]


def _turns(lanes: int) -> Numbers:
    """Return all lanes in bit-reversed order, so that any few consecutive ones are spread out.

    >>> _turns(8).tolist(), _turns(5).tolist()
    ([0, 4, 2, 6, 1, 5, 3, 7], [0, 4, 2, 1, 3])
    """
    bits = (lanes - 1).bit_length()
    numbers = np.arange(1 << bits)
    turned = np.zeros_like(numbers)
    for bit in range(bits):
        turned |= (numbers >> bit & 1) << (bits - 1 - bit)
    found: Numbers = turned[turned < lanes]
    return found


def _lane_edges(ends: Numbers, counts: Numbers, window: Window) -> Numbers:
    """Return where lanes begin, and the end: equal shares, moved to the nearest edge of a unit."""
    total = int(ends[-1]) if len(ends) else 0
    edges = np.arange(window.lanes + 1) * total // window.lanes
    inner = edges[1:-1]
    chunk = np.searchsorted(ends, inner, side="right")
    start = (ends - counts)[chunk]
    rounded = start + (inner - start + window.unit // 2) // window.unit * window.unit
    edges[1:-1] = np.minimum(rounded, ends[chunk])
    return edges
