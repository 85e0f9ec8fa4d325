"""The moments that features are taken at, and where any other moment lies between them.

buckets   .05   .15   .25   .35   .45  …  .95
                             ├──────▲──┤             t = 0.42: low = 3, alpha = 0.7

A moment below the first bucket is the first, one above the last is the last. A bucket is exact at its node in any float
type: a moment that is, to one step of its type, the bucket as that type writes it, *is* that bucket.
"""

from collections.abc import Iterable
from itertools import pairwise
from typing import Any, NamedTuple

import numpy as np
from numpy.typing import ArrayLike, NDArray

from forebay.errors import RecipeInvalid

BUCKETS: tuple[float, ...] = tuple(round(0.05 + 0.1 * step, 2) for step in range(10))
_FURTHEST = 2.0  # a time somewhat outside is the nearest bucket; one beyond this counts a scheduler's steps


class Neighbours(NamedTuple):
    """Between which two buckets moments lie: `(1 - alpha) · bucket[low] + alpha · bucket[low + 1]`."""

    low: NDArray[np.int64]
    alpha: NDArray[np.float32]


def check_buckets(buckets: Iterable[float]) -> tuple[float, ...]:
    """A grid of moments as plain numbers; what is none is refused."""
    try:
        grid = tuple(float(moment) for moment in buckets)
    except (TypeError, ValueError) as error:
        raise RecipeInvalid(f"buckets are {buckets!r:.60}; a list of moments is expected") from error
    rises = all(one < other for one, other in pairwise(grid))
    if not grid or not rises or not all(0 <= moment <= 1 for moment in grid):
        shown = ", ".join(f"{moment:g}" for moment in grid[:4])
        raise RecipeInvalid(f"buckets are ({shown}…); one or more moments that rise from 0 to 1 are expected")
    return grid


def neighbours(buckets: ArrayLike, moments: ArrayLike) -> Neighbours:
    """Where moments lie in a grid, even or not.

    >>> neighbours(BUCKETS, [0.42, 0.0, 1.0, 0.15]).low.tolist()
    [3, 0, 8, 1]
    """
    return Grid(buckets).neighbours(moments)


class Grid:
    """Buckets made ready to be looked up in, for every type that moments come in."""

    def __init__(self, buckets: ArrayLike) -> None:
        self.buckets = np.asarray(buckets, np.float64)
        self._written: dict[np.dtype[Any], _Written] = {}

    def neighbours(self, moments: ArrayLike) -> Neighbours:
        """Lean, because small batches pass here."""
        times = np.asarray(moments)
        if times.ndim == 0:
            one = self.neighbours(times[None])
            return Neighbours(one.low.reshape(()), one.alpha.reshape(()))
        furthest = 1 if times.dtype.kind in "iu" else _FURTHEST
        if times.size and (times.min() < 1 - furthest or times.max() > furthest):
            raise ValueError(
                f"times range from {times.min():g} to {times.max():g}, and must lie between 0 and 1; divide the steps "
                f"of a scheduler by their count"
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
            raise _no_number(alpha)
        return Neighbours(low, alpha.astype(np.float32))

    def mirrored(self) -> "Grid":
        """The same buckets in time that runs the other way; bucket i is bucket n - 1 - i of this one."""
        # Rounded, so that 1 - 0.95 is the 0.05 that a caller writes: a bucket stays exact at its node.
        return Grid(np.round(1 - self.buckets[::-1], 12))

    def _alone(self, times: NDArray[Any]) -> Neighbours:
        """The only bucket is what every moment is."""
        if np.isnan(times).any():
            raise _no_number(times)
        return Neighbours(np.zeros(times.shape, np.int64), np.zeros(times.shape, np.float32))

    def _write(self, dtype: np.dtype[Any]) -> "_Written":
        return self._written.setdefault(dtype, _Written.of(self.buckets, dtype))


class _Written(NamedTuple):
    """A grid as a type of floats writes it, unless two nodes are one in it."""

    nodes: NDArray[np.float64]
    inner: NDArray[np.float64]  # without the ends: a moment among them has its lower node's number
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
        # Where nodes are a step apart, nothing lies between them: each is nearest to itself.
        near_low, near_high = np.minimum(steps[:-1] / gaps, 0.25), np.maximum(1 - steps[1:] / gaps, 0.75)
        return cls(nodes, nodes[1:-1].copy(), gaps, float(nodes[0]), float(nodes[-1]), near_low, near_high)


def _no_number(times: NDArray[Any]) -> ValueError:
    return ValueError(f"moment {int(np.isnan(times).argmax())} is not a number; times lie between 0 and 1")
