"""Buckets, the values of t at which features are stored, and where any t lies between them.

buckets   .05   .15   .25   .35   .45  …  .95
                             ├──────▲──┤             t = 0.42: low = 3, alpha = 0.7

A t below the first bucket counts as the first, one above the last as the last. Buckets are exact in any float type: a t
within one rounding step of a bucket in its type *is* that bucket.
"""

from collections.abc import Iterable
from itertools import pairwise
from typing import Any, NamedTuple

import numpy as np
from numpy.typing import ArrayLike, NDArray

from forebay.errors import RecipeInvalid

BUCKETS: tuple[float, ...] = tuple(round(0.05 + 0.1 * step, 2) for step in range(10))
_FURTHEST = 2.0  # a t slightly outside counts as the nearest bucket; one beyond this is a scheduler's step number


class Neighbours(NamedTuple):
    """The two buckets around each t: t = `(1 - alpha) · bucket[low] + alpha · bucket[low + 1]`."""

    low: NDArray[np.int64]
    alpha: NDArray[np.float32]


def check_buckets(buckets: Iterable[float]) -> tuple[float, ...]:
    """Return buckets as plain floats; raise RecipeInvalid unless they rise within [0, 1]."""
    try:
        grid = tuple(float(t) for t in buckets)
    except (TypeError, ValueError) as error:
        raise RecipeInvalid(f"buckets must be a list of numbers (got {buckets!r:.60})") from error
    rises = all(one < other for one, other in pairwise(grid))
    if not grid or not rises or not all(0 <= t <= 1 for t in grid):
        shown = ", ".join(f"{t:g}" for t in grid[:4])
        raise RecipeInvalid(f"buckets must be one or more rising numbers from 0 to 1 (got {shown}…)")
    return grid


def neighbours(buckets: ArrayLike, t: ArrayLike) -> Neighbours:
    """Return the buckets around each t, on an even or uneven grid.

    >>> neighbours(BUCKETS, [0.42, 0.0, 1.0, 0.15]).low.tolist()
    [3, 0, 8, 1]
    """
    return Grid(buckets).neighbours(t)


class Grid:
    """Buckets prepared for lookups of t in any float type."""

    def __init__(self, buckets: ArrayLike) -> None:
        self.buckets = np.asarray(buckets, np.float64)
        self._written: dict[np.dtype[Any], _Written] = {}

    def neighbours(self, t: ArrayLike) -> Neighbours:
        """Return the buckets around each t. Kept short, as it runs for every small batch."""
        times = np.asarray(t)
        if times.ndim == 0:
            one = self.neighbours(times[None])
            return Neighbours(one.low.reshape(()), one.alpha.reshape(()))
        furthest = 1 if times.dtype.kind in "iu" else _FURTHEST
        if times.size and (times.min() < 1 - furthest or times.max() > furthest):
            raise ValueError(
                f"t must be from 0 to 1 (got {times.min():g} to {times.max():g}); divide the steps of a scheduler by "
                "their number"
            )
        if len(self.buckets) == 1:
            return self._alone(times)
        written = self._written.get(times.dtype) or self._write(times.dtype)
        inside = np.maximum(np.minimum(times.astype(np.float64), written.last), written.first)
        low = written.inner.searchsorted(inside, side="right")
        alpha = (inside - written.nodes[low]) / written.gaps[low]
        alpha[alpha <= written.near_low[low]] = 0.0
        alpha[alpha >= written.near_high[low]] = 1.0
        if not alpha.max(initial=0.0) <= 1:
            raise _not_a_number(alpha)
        return Neighbours(low, alpha.astype(np.float32))

    def mirrored(self) -> "Grid":
        """Return the buckets for time that runs the other way; its bucket i is bucket n - 1 - i of this grid."""
        # Rounded, so that 1 - 0.95 is the 0.05 that a caller writes: a bucket stays exact at its node.
        return Grid(np.round(1 - self.buckets[::-1], 12))

    def _alone(self, times: NDArray[Any]) -> Neighbours:
        """Return the only bucket, whatever t is."""
        if np.isnan(times).any():
            raise _not_a_number(times)
        return Neighbours(np.zeros(times.shape, np.int64), np.zeros(times.shape, np.float32))

    def _write(self, dtype: np.dtype[Any]) -> "_Written":
        return self._written.setdefault(dtype, _Written.of(self.buckets, dtype))


class _Written(NamedTuple):
    """A grid rounded to a float type, unless two buckets would become equal in it."""

    nodes: NDArray[np.float64]
    inner: NDArray[np.float64]  # without the ends: a search in it gives the number of the lower node
    gaps: NDArray[np.float64]
    first: float
    last: float
    near_low: NDArray[np.float64]  # the share of a gap that is one step of the type at its lower node
    near_high: NDArray[np.float64]

    @classmethod
    def of(cls, buckets: NDArray[np.float64], dtype: np.dtype[Any]) -> "_Written":
        floats = np.dtype(np.float64) if dtype.kind in "biu" else dtype
        if not (np.diff(buckets.astype(floats).astype(np.float64)) > 0).all():
            floats = np.dtype(np.float64)
        nodes = buckets.astype(floats)
        steps = np.spacing(nodes).astype(np.float64)
        nodes = nodes.astype(np.float64)
        gaps = np.diff(nodes)
        # Where nodes are one step apart, no number lies between them: each is nearest to itself.
        near_low, near_high = np.minimum(steps[:-1] / gaps, 0.25), np.maximum(1 - steps[1:] / gaps, 0.75)
        return cls(nodes, nodes[1:-1].copy(), gaps, float(nodes[0]), float(nodes[-1]), near_low, near_high)


def _not_a_number(times: NDArray[Any]) -> ValueError:
    return ValueError(f"t[{int(np.isnan(times).argmax())}] is not a number; t must be from 0 to 1")
