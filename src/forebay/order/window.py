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
once. Neighboring lanes may share a chunk, so turns jump (0, 32, 16, 48, …): successive positions are far apart.
A chunk keeps its place between the others when a cache grows, so most chunks stay in their lane.
"""

import math
import operator
from collections.abc import Mapping, Sequence
from dataclasses import asdict, dataclass
from functools import lru_cache
from typing import Any, Literal, NamedTuple

import numpy as np

from forebay.order.shuffle import (
    GlobalOrder,
    Numbers,
    Order,
    SequentialOrder,
    Words,
    distinct,
    key_of,
    mix,
    permute_each,
)

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
        self._of_epoch = lru_cache(maxsize=2)(self._ordered)

    def rows_at(self, epoch: int, positions: Numbers) -> Numbers:
        return self._of_epoch(epoch).rows_at(positions)

    def chunks_of(self, lanes: Sequence[int]) -> Numbers:
        """Return the chunks that some lanes have rows of, in all epochs the same."""
        return np.unique(self._cuts.chunks[np.isin(self._cuts.lanes, np.asarray(lanes, np.int64))])

    def _ordered(self, epoch: int) -> "_EpochOrder":
        return _EpochOrder(self._cuts, self._lanes, self.window, key_of("window", self._seed, epoch, self._part))


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


class _EpochOrder:
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
        self._group_keys: Words = mix(np.uint64(key) + np.arange(len(self._groups), dtype=np.uint64))

    def rows_at(self, positions: Numbers) -> Numbers:
        lane = self._turns[positions % self._window.lanes]
        return self._rows(self._mixed(lane, self._lanes[lane] + positions // self._window.lanes))

    def _mixed(self, lane: Numbers, positions: Numbers) -> Numbers:
        """Return where the shuffle of its window puts each position.

        Many positions share a window: its borders and its shuffle are computed once for all of them.
        """
        size, lanes = self._window.rows, self._window.lanes
        number = (positions - self._lanes[lane] - (lane + 1) * size // lanes) // size + 1
        first, last = (int(number.min()) - 1, int(number.max()) + 2) if number.size else (-1, 2)
        edge = lane * (last - first) + number - first  # of a table of lanes and numbers
        edges, where = distinct(edge, lanes * (last - first))
        lane_of, number_of = edges // (last - first), edges % (last - first) + first
        starts = self._lanes[lane_of] + (lane_of + 1) * size // lanes + number_of * size
        steps = np.array([[-1], [0], [1]]) * size
        before, border, after = self._border(np.tile(lane_of, 3), (starts + steps).ravel()).reshape(3, -1)
        is_later = positions >= border[where]
        which = 2 * where + is_later  # windows: of each edge, the one that ends there and the one that begins there
        low, high = np.stack([before, border], axis=1).ravel(), np.stack([border, after], axis=1).ravel()
        names = mix(
            mix(np.full(1, self._key, np.uint64) ^ lane_of.astype(np.uint64)).repeat(2)
            ^ (number_of.repeat(2) + np.tile([0, 1], len(edges))).astype(np.uint64)
        )
        return low[which] + permute_each(positions - low[which], which, high - low, names)

    def _border(self, lane: Numbers, positions: Numbers) -> Numbers:
        """Return the last position up to `positions` where no unit is cut, within the lane."""
        group, offset = self._in_group(np.clip(positions, self._lanes[lane], self._lanes[lane + 1] - 1))
        unit, whole = self._window.unit, self._group_units[group] * self._window.unit
        rest = self._pieces.rests
        first = rest[self._first[group]]
        piece = np.searchsorted(rest, first + np.maximum(0, offset - whole), side="right") - 1
        border = self._groups[group] + np.where(offset < whole, offset // unit * unit, whole + rest[piece] - first)
        return np.where(positions >= self._lanes[lane + 1], self._lanes[lane + 1], border)

    def _rows(self, positions: Numbers) -> Numbers:
        """Return the rows at some positions, after shuffling the units of each group."""
        group, offset = self._in_group(positions)
        unit, pieces, first = self._window.unit, self._pieces, self._first[group]
        whole = self._group_units[group]
        within = np.minimum(offset // unit, np.maximum(0, whole - 1))
        turned = permute_each(within, group, np.maximum(1, self._group_units), self._group_keys)
        target = pieces.units[first] + turned
        by_unit = np.minimum(np.searchsorted(pieces.units, target, side="right") - 1, len(pieces.full) - 1)
        unit_rows = pieces.bases[by_unit] + (target - pieces.units[by_unit]) * unit + offset % unit
        left = pieces.rests[first] + np.maximum(0, offset - whole * unit)
        by_rest = np.minimum(np.searchsorted(pieces.rests, left, side="right") - 1, len(pieces.full) - 1)
        rest_rows = pieces.bases[by_rest] + pieces.full[by_rest] * unit + left - pieces.rests[by_rest]
        return np.where(offset < whole * unit, unit_rows, rest_rows)

    def _in_group(self, positions: Numbers) -> tuple[Numbers, Numbers]:
        group = np.searchsorted(self._groups, positions, side="right") - 1
        return group, positions - self._groups[group]


def _hashes(numbers: Numbers, key: int) -> Words:
    """Return distinct words for distinct numbers."""
    return mix(mix(numbers.astype(np.uint64)) ^ mix(np.full(1, key, np.uint64)))


def _turns(lanes: int) -> Numbers:
    """Return all lanes in bit-reversed order, which spreads out any few consecutive ones.

    >>> _turns(8).tolist(), _turns(5).tolist()
    ([0, 4, 2, 6, 1, 5, 3, 7], [0, 4, 2, 1, 3])
    """
    bits = (lanes - 1).bit_length()
    numbers = np.arange(1 << bits)
    turned = np.zeros_like(numbers)
    for bit in range(bits):
        turned |= (numbers >> bit & 1) << (bits - 1 - bit)
    order: Numbers = turned[turned < lanes]
    return order


def _lane_edges(rows: int, lanes: int) -> Numbers:
    """Return the starts of lanes, and the end. Remaining rows go to the lanes with earlier turns.

    >>> _lane_edges(11, 4).tolist()
    [0, 3, 6, 9, 11]
    """
    sizes = np.full(lanes, rows // lanes)
    sizes[_turns(lanes)[: rows % lanes]] += 1
    return np.concatenate([[0], np.cumsum(sizes)])


Kind = Literal["global", "window", "sequential"]


@dataclass(frozen=True, slots=True)
class Ordering:
    """An order before its rows are known. Only a window shuffle has a `window`."""

    kind: Kind
    seed: int
    window: Window | None = None
    automatic: bool = False  # chosen by how the rows are stored: a grown cache may get another kind

    def __post_init__(self) -> None:
        if (self.kind == "window") != (self.window is not None):
            raise ValueError(
                f"shuffle 'window' needs a window, and no other shuffle has one (got {self.kind!r}, {self.window})"
            )

    def of(self, counts: Numbers, part: int = 0) -> Order:
        """Return the order of chunks with `counts` rows each; each segment (`part`) of an epoch has its own order."""
        if self.window is not None:
            return WindowOrder(counts, self.seed, self.window, part)
        size = int(counts.sum())
        return SequentialOrder(size) if self.kind == "sequential" else GlobalOrder(size, self.seed, part)

    def state(self) -> dict[str, Any]:
        window = None if self.window is None else asdict(self.window)
        return {"shuffle": self.kind, "seed": self.seed, "window": window, "automatic": self.automatic}

    @classmethod
    def of_state(cls, state: Mapping[str, Any]) -> "Ordering":
        window = None if state["window"] is None else Window(**state["window"])
        return cls(state["shuffle"], state["seed"], window, state["automatic"])


_BATCHES = 64


@dataclass(frozen=True, slots=True)
class ShuffleQuality:
    """How close an order is to a global shuffle, measured on batches spread over an epoch; 1 is equal."""

    chunks: float  # distinct chunks in a batch, relative to the mean of a global shuffle
    units: float  # the same for units: rows that are stored, and decoded, together
    travel: float  # distance between the rows at successive positions, likewise

    def __str__(self) -> str:
        return (
            f"of a global shuffle: {self.chunks:.1%} of the chunks in a batch, {self.units:.1%} of the units, "
            f"{self.travel:.1%} of the distance between successive rows"
        )


def shuffle_quality(order: Order, counts: Numbers, unit: int, batch_size: int, epoch: int = 0) -> ShuffleQuality:
    """Measure an order over chunks of `counts` rows each."""
    size = min(batch_size, order.size)
    starts = np.linspace(0, order.size - size, _BATCHES).astype(np.int64)
    batches = [order.rows_at(epoch, np.arange(start, start + size)) for start in starts.tolist()]
    edges = np.concatenate([[0], np.cumsum(counts)])
    units = -(-counts // unit)
    first_unit = np.cumsum(units) - units

    def chunk_of(rows: Numbers) -> Numbers:
        return np.searchsorted(edges, rows, side="right") - 1

    def unit_of(rows: Numbers) -> Numbers:
        chunk = chunk_of(rows)
        number: Numbers = first_unit[chunk] + (rows - edges[chunk]) // unit
        return number

    return ShuffleQuality(
        chunks=_mean([len(np.unique(chunk_of(rows))) for rows in batches]) / _expected_distinct(counts, size),
        units=_mean([len(np.unique(unit_of(rows))) for rows in batches]) / _expected_distinct_units(counts, unit, size),
        travel=_mean([np.abs(np.diff(rows)).mean() for rows in batches if size > 1]) / (order.size / 3),
    )


def _expected_distinct(counts: Numbers, size: int) -> float:
    """Return the expected number of groups, of `counts` rows each, that a random batch touches."""
    return float((1 - (1 - counts / counts.sum()) ** size).sum())


def _expected_distinct_units(counts: Numbers, unit: int, size: int) -> float:
    total, rest = counts.sum(), counts % unit
    whole = (counts // unit).sum() * (1 - (1 - unit / total) ** size)
    return float(whole + (1 - (1 - rest / total) ** size).sum())


def _mean(values: list[float]) -> float:
    return float(np.mean(values)) if values else float("nan")
