"""Shares: the source at each position, and the position within that source.

Sources are joined two by two, the two lightest first, into one tree. In a node with weights a and b, the first p
positions have round(a · p / (a + b)) of the left branch: known for any p without computing those before it.

    weights 5 3 2            position   0 1 2 3 4 5 6 7 8 9
          ╱ ╲                in 3 + 2   0   1   2   3   4      positions of the node below
         5   ╲               source     1   2   1   2   1      which of its sources
            3 2              source       0   0   0   0   0

A node is off by at most half a row, of which a source below inherits its share. In such a tree, two steps down pass on
at most half of an error, so in any prefix every source is off by less than two rows.
"""

import heapq
from collections.abc import Sequence
from dataclasses import dataclass
from fractions import Fraction
from itertools import pairwise
from math import gcd, isfinite, lcm

import numpy as np
from numpy.typing import NDArray

Numbers = NDArray[np.int64]
LARGEST = 2**31  # sum of all weights; products of two such numbers fit in 64 bits


@dataclass(frozen=True, slots=True, eq=False)
class Shares:
    """An endless sequence of positions that is shared by sources according to their weights."""

    weights: tuple[int, ...]  # in lowest terms
    _left: Numbers  # (nodes,): weight of the left branch
    _both: Numbers  # (nodes,): weight of both
    _branches: Numbers  # (nodes, 2): a node, or ~source

    @classmethod
    def of(cls, weights: Sequence[float | Fraction]) -> "Shares":
        """Make the tree of some weights.

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
        if not both:  # one source has all positions
            left, both, branches = [1], [1], [(heap[0][2], heap[0][2])]
        return cls(whole, np.array(left), np.array(both), np.array(branches))

    def locate(self, positions: Numbers) -> tuple[Numbers, Numbers]:
        """(source, position in the source) of every position."""
        numbers = np.array(positions, np.int64)
        nodes = np.full_like(numbers, len(self._both) - 1)
        going = np.flatnonzero(nodes >= 0)
        while len(going):
            node, number = nodes[going], numbers[going]
            before = self._on_the_left(node, number)
            right = (self._on_the_left(node, number + 1) == before).astype(np.int64)
            numbers[going] = np.where(right, number - before, before)
            nodes[going] = self._branches[node, right]
            going = going[nodes[going] >= 0]
        return ~nodes, numbers

    def counts(self, position: int) -> Numbers:
        """How many of the positions before this one each source has."""
        counts = np.zeros(len(self.weights), np.int64)
        ahead = [(len(self._both) - 1, position)]
        while ahead:
            node, number = ahead.pop()
            if node < 0:
                counts[~node] += number
                continue
            before = int(self._on_the_left(np.array([node]), np.array([number]))[0])
            ahead += zip(self._branches[node].tolist(), (before, number - before), strict=True)
        return counts

    def _on_the_left(self, nodes: Numbers, numbers: Numbers) -> Numbers:
        left, both = self._left[nodes], self._both[nodes]
        rounds, rest = np.divmod(numbers, both)
        before: Numbers = rounds * left + (rest * left * 2 + both) // (both * 2)
        return before


@dataclass(frozen=True, slots=True)
class Phase:
    """Weights that apply from a position on."""

    start: int
    weights: tuple[float, ...]


class ChangingShares:
    """Shares whose weights change at some positions; each source continues where it was.

    In every phase, the shares are exact to within two rows.
    """

    def __init__(self, phases: Sequence[Phase]) -> None:
        _check_phases(phases)
        self._starts = np.array([phase.start for phase in phases], np.int64)
        self._shares = [Shares.of(phase.weights) for phase in phases]
        lengths = np.diff(self._starts).tolist()
        passed = [shares.counts(length) for shares, length in zip(self._shares, lengths, strict=False)]
        self._before = np.cumsum([np.zeros(len(phases[0].weights), np.int64), *passed], axis=0)

    def locate(self, positions: Numbers) -> tuple[Numbers, Numbers]:
        """(source, position in the source) of every position."""
        sources, numbers = np.empty_like(positions), np.empty_like(positions)
        phases = np.searchsorted(self._starts, positions, side="right") - 1
        for phase in np.unique(phases).tolist():
            here = phases == phase
            sources[here], within = self._shares[phase].locate(positions[here] - self._starts[phase])
            numbers[here] = within + self._before[phase, sources[here]]
        return sources, numbers

    def counts(self, position: int) -> Numbers:
        """How many of the positions before this one each source has."""
        phase = int(np.searchsorted(self._starts, position, side="right")) - 1
        counts: Numbers = self._before[phase] + self._shares[phase].counts(position - int(self._starts[phase]))
        return counts


def whole_weights(weights: Sequence[float | Fraction]) -> tuple[int, ...]:
    """Return weights as whole numbers in the same proportion, rounded to one part in 2³¹ if they are finer.

    >>> whole_weights([0.7, 0.2, 0.1])
    (7, 2, 1)
    """
    if not all(map(isfinite, weights)):
        raise ValueError(f"weights must be finite (got {list(weights)})")
    exact = [_exact(weight) for weight in weights]
    if not exact or min(exact) < 0 or not sum(exact):
        raise ValueError(f"weights must be at least 0, and one of them more than 0 (got {list(weights)})")
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
    """Return the decimal number as written: 0.1 is a tenth."""
    return weight if isinstance(weight, Fraction) else Fraction(str(weight))


def _check_phases(phases: Sequence[Phase]) -> None:
    starts = [phase.start for phase in phases]
    if not starts or starts[0] != 0 or any(later <= start for start, later in pairwise(starts)):
        raise ValueError(f"phases must start at 0 and each later than the one before (got {starts})")
    if len({len(phase.weights) for phase in phases}) > 1:
        raise ValueError("phases must have weights for the same number of sources; use weight 0 to leave one out")
