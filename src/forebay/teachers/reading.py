"""What a timed teacher said, at any moment: the two buckets around it are read, and weighed.

features = fb.teachers.features(cache, "lune")
features.at([5, 3, 9], t=[0.42, 0.15, 0.99])["lune"]      # (3, 1280) float32
"""

from collections.abc import Mapping
from dataclasses import dataclass

import numpy as np
from numpy.typing import ArrayLike, NDArray

from forebay.cache.presence import presence_name
from forebay.cache.reader import Cache
from forebay.columns import Array
from forebay.errors import LayerNotTimed
from forebay.teachers.recipe import T_BUCKETS
from forebay.teachers.timesteps import Grid, Neighbours


@dataclass(frozen=True, slots=True, eq=False)
class Between:
    """The values at the buckets around some moments: `(1 - alpha) · values[:, 0] + alpha · values[:, 1]`.

    A grid of one bucket has one: `values` are `(rows, 1, …)` and `alpha` is 0. Values are as stored.
    """

    values: Mapping[str, Array]  # by column, (rows, 2, …)
    alpha: NDArray[np.float32]  # (rows,)
    present: NDArray[np.bool_]  # (rows,); values of absent rows mean nothing


class Features:
    """The columns of a timed layer of a cache, and its constants."""

    def __init__(self, cache: Cache, layer: str) -> None:
        self.cache = cache
        self.layer = layer
        constants = cache.constants(layer)
        if T_BUCKETS not in constants:
            raise LayerNotTimed(cache.root, layer)
        self.buckets: NDArray[np.float64] = constants.pop(T_BUCKETS)
        self._grid = Grid(self.buckets)
        self._constant = constants  # (buckets, …) each
        self._stored = tuple(column.name for column in cache.recipe(layer).columns)
        self._width = min(2, len(self.buckets))
        self._bits = presence_name(layer)

    @property
    def columns(self) -> tuple[str, ...]:
        return (*self._stored, *self._constant)

    def shape(self, column: str) -> tuple[int, ...]:
        """The shape of a column at one moment."""
        if column in self._constant:
            return tuple(self._constant[column].shape[1:])
        return self.cache.column(column).shape[1:]

    def between(self, indices: ArrayLike, t: ArrayLike) -> Between:
        """What lies around the moments of some rows; one moment stands for all."""
        rows = np.asarray(indices)
        low, alpha = self._neighbours(rows, t)
        values = self.cache.read_slices(rows, self._stored, low, self._width) if self._stored else {}
        if self._constant:
            steps = low[:, None] + np.arange(self._width)
            values |= {name: constant[steps] for name, constant in self._constant.items()}
        present = values.pop(self._bits, None)
        if present is None:
            present = self.cache.read(rows, [self._bits])[self._bits]
        return Between({name: np.asarray(found) for name, found in values.items()}, alpha, np.asarray(present))

    def at(self, indices: ArrayLike, t: ArrayLike) -> dict[str, Array]:
        """Every column at the moments, float32, and the presence bits of the rows under `<layer>.present`.

        Absent rows are NaN: whoever forgets the bits sees it at once.
        """
        found = self.between(indices, t)
        weighed = {name: _weighed(values, found.alpha) for name, values in found.values.items()}
        for values in weighed.values():
            values[~found.present] = np.nan
        return {**weighed, self._bits: found.present}

    def _neighbours(self, rows: Array, t: ArrayLike) -> Neighbours:
        moments = np.asarray(t)
        if rows.ndim != 1:
            raise TypeError(f"rows are a list of whole numbers, not {rows.dtype} of shape {rows.shape}")
        if moments.shape == rows.shape:
            return self._grid.neighbours(moments)
        if moments.shape != ():
            raise ValueError(f"{len(rows)} rows need {len(rows)} moments, or one for all, not shape {moments.shape}")
        return self._grid.neighbours(np.broadcast_to(moments, rows.shape))


def features(cache: Cache, layer: str) -> Features:
    """The features that a layer of a cache holds."""
    return Features(cache, layer)


def _weighed(values: Array, alpha: NDArray[np.float32]) -> Array:
    wide = values.astype(np.float32)
    if wide.shape[1] == 1:
        return wide[:, 0]
    weight = alpha.reshape(-1, *(1,) * (wide.ndim - 2))
    blended: Array = (1 - weight) * wide[:, 0] + weight * wide[:, 1]
    return blended
