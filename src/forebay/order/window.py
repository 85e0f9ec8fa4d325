"""Window shuffle: close to a global one, while stored blocks are decoded once and every rank keeps its chunks.

The seed lays chunks end to end; equal stretches of them are the lanes, the same in every epoch. An epoch shuffles the
chunks inside each lane. Lanes take turns, one row each, and rank r of w takes the positions with p % w == r: if w
divides the number of lanes, a rank reads the same lanes in every epoch, and no other rank reads them. So with P nodes,
each needs its P-th part of the chunks, and those at the edges of its lanes.

    chunks, by seed    7 7 7 7 2 2 2 2 2 9 9 9 4 4 4 4 4 4 0 0 0 0 5 5 …
    lanes              ├──── lane 0 ────┼──── lane 1 ────┼──── lane 2 …     of equal length, to within a row
    lane 0, by epoch   9 9 2 2 2 2 2 7 7 7 7
    groups             ├─ g0 ─┤─ g1 ─┤  of `chunks` chunks each: the units of a group are shuffled
    windows            ├ w0 ┤── w1 ──┤  of `rows` rows each: the rows of a window are shuffled

A unit is `unit` rows of a chunk, a multiple of a block, so that no block is in two units. Only the block at the edge of
two lanes is decoded in both. Windows begin at a different phase in each lane, so that not all lanes need new blocks at
once. Neighbouring lanes may share a chunk, so turns jump (0, 32, 16, 48, …): successive positions are far apart.
A chunk keeps its place between the others when a cache grows, so most chunks stay in their lane.
"""

import math
import operator
from collections.abc import Sequence
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
        self._seed, self._part = seed, part
        self._lanes = _lane_edges(self.size, window.lanes)
        self._cuts = _cut(counts, self._lanes, window.unit, key_of("lanes", seed, part))
        self._deal = lru_cache(maxsize=2)(self._dealt)

    def rows_at(self, epoch: int, positions: Numbers) -> Numbers:
        return self._deal(epoch).rows_at(positions)

    def chunks_of(self, lanes: Sequence[int]) -> Numbers:
        """Return the chunks that some lanes have rows of, in all epochs the same."""
        return np.unique(self._cuts.chunks[np.isin(self._cuts.lanes, np.asarray(lanes, np.int64))])

    def _dealt(self, epoch: int) -> "_Deal":
        return _Deal(self._cuts, self._lanes, self.window, key_of("window", self._seed, epoch, self._part))


def lanes_of(rank: int, world_size: int, lanes: int = LANES) -> list[int]:
    """Return the lanes that a rank reads: its own if the world size divides the lanes, else shared ones.

    >>> lanes_of(0, 4, 8), lanes_of(1, 4, 8), lanes_of(0, 3, 4)
    ([0, 1], [4, 5], [0, 1, 2, 3])
    """
    turns = np.arange(lanes)
    shared = math.gcd(world_size, lanes)
    return sorted(_turns(lanes)[turns % shared == rank % shared].tolist())


class _Cuts(NamedTuple):
    """Parts of chunks, each within one lane, in order of lanes."""

    lanes: Numbers
    chunks: Numbers
    bases: Numbers  # number of the first row
    sizes: Numbers


def _cut(counts: Numbers, lanes: Numbers, unit: int, key: int) -> _Cuts:
    """Lay chunks end to end in the order of their hashes, and cut them where lanes begin.

    A unit that lanes share is cut off, so that every other part begins with a whole unit.
    """
    bases, chunks = np.cumsum(counts) - counts, np.flatnonzero(counts)
    laid = chunks[np.argsort(_hashes(chunks, key), kind="stable")]
    counts, bases = counts[laid], bases[laid]
    ends = np.cumsum(counts)
    firsts = ends - counts
    edges = lanes[:-1][lanes[:-1] < lanes[-1]]
    shared = np.searchsorted(ends, edges, side="right")
    whole = np.minimum(firsts[shared] - (firsts[shared] - edges) // unit * unit, ends[shared])
    starts = np.sort(np.concatenate([firsts, edges, whole[whole < lanes[-1]]]), kind="stable")  # nearly sorted: merged
    starts = starts[np.append(True, starts[1:] != starts[:-1])[: len(starts)]]
    chunk = np.searchsorted(ends, starts, side="right")
    sizes = np.diff(np.append(starts, lanes[-1]))
    lane = np.searchsorted(lanes, starts, side="right") - 1
    return _Cuts(lane, laid[chunk], bases[chunk] + starts - firsts[chunk], sizes)


class _Pieces(NamedTuple):
    """The parts of chunks in the order of an epoch; cumulative arrays have one more entry."""

    bases: Numbers  # number of the first row
    units: Numbers  # whole units before each
    rests: Numbers  # rows before each that fill no unit
    full: Numbers  # whole units of each


class _Deal:
    """The groups and windows of one epoch; takes memory per chunk and lane, none per row."""

    def __init__(self, cuts: _Cuts, lanes: Numbers, window: Window, key: int) -> None:
        self._window, self._key, self._turns, self._lanes = window, key, _turns(window.lanes), lanes
        order = np.lexsort((_hashes(cuts.chunks, key), cuts.lanes))  # stable: parts of a chunk stay together
        lane, chunk, bases, sizes = (each[order] for each in cuts)
        starts = np.cumsum(sizes) - sizes
        self._pieces = _Pieces(
            bases=bases,
            units=np.concatenate([[0], np.cumsum(sizes // window.unit)]),
            rests=np.concatenate([[0], np.cumsum(sizes % window.unit)]),
            full=sizes // window.unit,
        )
        begins = np.append(True, (np.diff(lane) != 0) | (np.diff(chunk) != 0))[: len(lane)]
        count = np.cumsum(begins)
        within = count - count[np.searchsorted(lane, lane, side="left")]  # chunks before it in its lane
        self._first = np.flatnonzero(begins & (within % window.chunks == 0))  # first piece of each group
        self._groups = starts[self._first]  # where each group begins
        self._group_units = np.diff(self._pieces.units[np.append(self._first, len(starts))])

    def rows_at(self, positions: Numbers) -> Numbers:
        lane = self._turns[positions % self._window.lanes]
        return self._rows(self._mixed(lane, self._lanes[lane] + positions // self._window.lanes))

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


def _hashes(numbers: Numbers, key: int) -> Words:
    """Return distinct words for distinct numbers."""
    return mix(mix(numbers.astype(np.uint64)) ^ mix(np.full(1, key, np.uint64)))


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


def _lane_edges(rows: int, lanes: int) -> Numbers:
    """Return where lanes begin, and the end. Lanes that have an earlier turn have one row more where rows are left.

    >>> _lane_edges(11, 4).tolist()
    [0, 3, 6, 9, 11]
    """
    sizes = np.full(lanes, rows // lanes)
    sizes[_turns(lanes)[: rows % lanes]] += 1
    return np.concatenate([[0], np.cumsum(sizes)])
