"""Mixtures: which source stands at a position, and at which of its own positions, such that every share holds.

Sources are joined two by two, the two lightest first, until one tree holds all. In a node with weights a and b, the
first p positions have round(a · p / (a + b)) of the left branch: whole numbers, known for any p without looking at
those before.

    weights 5 3 2            position   0 1 2 3 4 5 6 7 8 9
          ╱ ╲                in 3 + 2   0   1   2   3   4      positions of the node below
         5   ╲               source     1   2   1   2   1      which of its sources
            3 2              source       0   0   0   0   0

A node is off by at most half a row, of which a source below inherits its part; no two steps down a tree built so keep
more than half of what they are given, hence at any prefix every source is off by less than two rows.
"""

import heapq
from collections.abc import Sequence
from dataclasses import dataclass
from fractions import Fraction
from itertools import pairwise
from math import gcd, isfinite, lcm

import numpy as np
from numpy.typing import NDArray

Places = NDArray[np.int64]
LARGEST = 2**31  # all weights together; products of two such numbers are whole numbers of 64 bits


@dataclass(frozen=True, slots=True, eq=False)
class Shares:
    """Sources with weights, as an endless sequence of positions."""

    weights: tuple[int, ...]  # in lowest terms
    _left: Places  # (nodes,): weight of the left branch
    _both: Places  # (nodes,): weight of both
    _branches: Places  # (nodes, 2): a node, or ~source

    @classmethod
    def of(cls, weights: Sequence[float | Fraction]) -> "Shares":
        """
        >>> Shares.of([0.5, 0.3, 0.2]).locate(np.arange(10))[0].tolist()
        [1, 0, 2, 0, 1, 0, 2, 0, 1, 0]
        """
        whole = whole_weights(weights)
        heap = [(weight, ~source, ~source) for source, weight in enumerate(whole) if weight]
        heapq.heapify(heap)
        left, both, branches = [], [], []
        while len(heap) > 1:
            light, heavy = heapq.heappop(heap), heapq.heappop(heap)
            left.append(heavy[0])
            both.append(light[0] + heavy[0])
            branches.append((heavy[2], light[2]))
            heapq.heappush(heap, (both[-1], len(both) - 1, len(both) - 1))
        if not both:  # one source has it all
            left, both, branches = [1], [1], [(heap[0][2], heap[0][2])]
        return cls(whole, np.array(left), np.array(both), np.array(branches))

    def locate(self, positions: Places) -> tuple[Places, Places]:
        """(source, position in the source) of every position."""
        places = np.array(positions, np.int64)
        nodes = np.full_like(places, len(self._both) - 1)
        going = np.flatnonzero(nodes >= 0)
        while len(going):
            node, place = nodes[going], places[going]
            before = self._on_the_left(node, place)
            right = (self._on_the_left(node, place + 1) == before).astype(np.int64)
            places[going] = np.where(right, place - before, before)
            nodes[going] = self._branches[node, right]
            going = going[nodes[going] >= 0]
        return ~nodes, places

    def counts(self, position: int) -> Places:
        """How many of the positions before this one each source has."""
        counts = np.zeros(len(self.weights), np.int64)
        ahead = [(len(self._both) - 1, position)]
        while ahead:
            node, place = ahead.pop()
            if node < 0:
                counts[~node] += place
                continue
            before = int(self._on_the_left(np.array([node]), np.array([place]))[0])
            ahead += zip(self._branches[node].tolist(), (before, place - before), strict=True)
        return counts

    def _on_the_left(self, nodes: Places, places: Places) -> Places:
        left, both = self._left[nodes], self._both[nodes]
        rounds, rest = np.divmod(places, both)
        found: Places = rounds * left + (rest * left * 2 + both) // (both * 2)
        return found


@dataclass(frozen=True, slots=True)
class Phase:
    """From this position on, these weights."""

    start: int
    weights: tuple[float, ...]


class ChangingShares:
    """Shares whose weights change at some positions; a source goes on where it was when they do.

    Every phase keeps its own shares to less than two rows.
    """

    def __init__(self, phases: Sequence[Phase]) -> None:
        _check_phases(phases)
        self.phases = tuple(phases)
        self._starts = np.array([phase.start for phase in phases], np.int64)
        self._shares = [Shares.of(phase.weights) for phase in phases]
        lengths = np.diff(self._starts).tolist()
        passed = [shares.counts(length) for shares, length in zip(self._shares, lengths, strict=False)]
        self._before = np.cumsum([np.zeros(len(phases[0].weights), np.int64), *passed], axis=0)

    def locate(self, positions: Places) -> tuple[Places, Places]:
        """(source, position in the source) of every position."""
        sources, places = np.empty_like(positions), np.empty_like(positions)
        phases = np.searchsorted(self._starts, positions, side="right") - 1
        for phase in np.unique(phases).tolist():
            here = phases == phase
            sources[here], within = self._shares[phase].locate(positions[here] - self._starts[phase])
            places[here] = within + self._before[phase, sources[here]]
        return sources, places

    def counts(self, position: int) -> Places:
        """How many of the positions before this one each source has."""
        phase = int(np.searchsorted(self._starts, position, side="right")) - 1
        counts: Places = self._before[phase] + self._shares[phase].counts(position - int(self._starts[phase]))
        return counts


def whole_weights(weights: Sequence[float | Fraction]) -> tuple[int, ...]:
    """Weights as whole numbers in the same proportion; to one part in 2³¹ where they are too fine for that.

    >>> whole_weights([0.7, 0.2, 0.1])
    (7, 2, 1)
    """
    if not all(map(isfinite, weights)):
        raise ValueError(f"weights are {list(weights)}; give finite numbers")
    exact = [_exact(weight) for weight in weights]
    if not exact or min(exact) < 0 or not sum(exact):
        raise ValueError(f"weights are {list(weights)}; they are 0 or more, and one at least is more")
    scale = lcm(*(weight.denominator for weight in exact))
    whole = [int(weight * scale) for weight in exact]
    divisor = gcd(*whole)
    whole = [weight // divisor for weight in whole]
    total = sum(whole)
    if total <= LARGEST:
        return tuple(whole)
    room = LARGEST - len(whole)
    return tuple(max(1, round(Fraction(weight * room, total))) if weight else 0 for weight in whole)


def _exact(weight: float | Fraction) -> Fraction:
    """A number as it is written: 0.1 is a tenth."""
    return weight if isinstance(weight, Fraction) else Fraction(str(weight))


def _check_phases(phases: Sequence[Phase]) -> None:
    starts = [phase.start for phase in phases]
    if not starts or starts[0] != 0 or any(later <= start for start, later in pairwise(starts)):
        raise ValueError(f"phases start at {starts}; the first starts at 0 and each later than the one before")
    if len({len(phase.weights) for phase in phases}) > 1:
        raise ValueError("phases have weights for different numbers of sources; a source that is left out has weight 0")
