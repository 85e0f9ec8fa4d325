"""The moments that features are taken at, and where any other moment lies between them.

buckets   .05   .15   .25   .35   .45  …  .95
                             ├──────▲──┤             t = 0.42: low = 3, alpha = 0.7

A moment below the first bucket is the first, one above the last is the last. A bucket is exact at its node in any float
type: a moment that is, to one step of its type, the bucket as that type writes it, *is* that bucket.
"""

from itertools import pairwise
from typing import Any, NamedTuple

import numpy as np
from numpy.typing import ArrayLike, NDArray

from forebay.errors import RecipeInvalid

BUCKETS: tuple[float, ...] = tuple(round(0.05 + 0.1 * step, 2) for step in range(10))


class Neighbours(NamedTuple):
    """Between which two buckets moments lie: `(1 - alpha) · bucket[low] + alpha · bucket[low + 1]`."""

    low: NDArray[np.int64]
    alpha: NDArray[np.float32]


def check_buckets(buckets: tuple[float, ...]) -> None:
    """Refuse what is no grid of moments."""
    rises = all(one < other for one, other in pairwise(buckets))
    if not buckets or not rises or not all(0 <= moment <= 1 for moment in buckets):
        shown = ", ".join(f"{moment:g}" for moment in buckets[:4])
        raise RecipeInvalid(f"buckets are ({shown}…); one or more moments that rise from 0 to 1 are expected")


def neighbours(buckets: ArrayLike, moments: ArrayLike) -> Neighbours:
    """Where moments lie in a grid, even or not.

    >>> neighbours(BUCKETS, [0.42, 0.0, 1.0, 0.15]).low.tolist()
    [3, 0, 8, 1]
    """
    times = np.asarray(moments)
    if times.dtype.kind in "iu":
        times = times.astype(np.float64)
    exact = times.astype(np.float64)
    if np.isnan(exact).any():
        raise ValueError(f"moment {int(np.isnan(exact).argmax())} is not a number; times lie between 0 and 1")
    nodes = _as_written(np.asarray(buckets, np.float64), times.dtype)
    if len(nodes) == 1:
        return Neighbours(np.zeros(exact.shape, np.int64), np.zeros(exact.shape, np.float32))
    inside = np.clip(exact, nodes[0], nodes[-1])
    low = np.clip(np.searchsorted(nodes, inside, side="right") - 1, 0, len(nodes) - 2)
    below, above = inside - nodes[low], nodes[low + 1] - inside
    alpha = below / (below + above)
    step = np.spacing(np.abs(times)).astype(np.float64)
    alpha = np.where(below <= step, 0.0, np.where(above <= step, 1.0, alpha))
    return Neighbours(low, alpha.astype(np.float32))


def _as_written(nodes: NDArray[np.float64], dtype: np.dtype[Any]) -> NDArray[np.float64]:
    """The grid as a type of floats knows it, unless two nodes are one in it."""
    rounded: NDArray[np.float64] = nodes.astype(dtype).astype(np.float64)
    return rounded if (np.diff(rounded) > 0).all() else nodes
