"""Read the features of a timed teacher at any t, interpolated between the two buckets around it.

features = fb.teachers.features(cache, "lune")
features.at([5, 3, 9], t=[0.42, 0.15, 0.99])["lune"]      # (3, 1280) float32
"""

from collections.abc import Mapping
from dataclasses import dataclass

import numpy as np
from numpy.typing import ArrayLike, NDArray

from forebay.cache.catalog import presence_name
from forebay.cache.records import html_table
from forebay.columns import Array
from forebay.errors import LayerNotTimed, RecipeInvalid, choice_error
from forebay.masks import rectangle
from forebay.read.cache import Cache
from forebay.teachers.protocol import TimeDirection
from forebay.teachers.recipe import T_BUCKETS
from forebay.teachers.teacher_samples import Grid, Neighbours


@dataclass(frozen=True, slots=True, eq=False)
class Between:
    """The stored values at the buckets around each t: `(1 - alpha) · values[:, 0] + alpha · values[:, 1]`.

    With a grid of one bucket, `values` are `(rows, 1, …)` and `alpha` is 0.
    """

    values: Mapping[str, Array]  # by column, (rows, 2, …)
    alpha: NDArray[np.float32]  # (rows,)
    present: NDArray[np.bool_]  # (rows,); values of absent rows are meaningless


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
        self._mirrored = self._grid.mirrored()
        self.time_direction = _time_direction(cache, layer)
        self._constant = constants  # (buckets, …) each
        self._stored = tuple(column.name for column in cache.recipe(layer).columns)
        self._width = min(2, len(self.buckets))
        self._bits = presence_name(layer)

    def __repr__(self) -> str:
        columns = ", ".join(self.columns)
        return f"<Features of layer '{self.layer}' in '{self.cache.root}', {len(self.buckets)} buckets: {columns}>"

    def _repr_html_(self) -> str:
        shapes = {name: self.shape(name) for name in self.columns}
        facts = {"cache": self.cache.root, "layer": self.layer, "buckets": self.buckets.tolist(), "columns": shapes}
        return html_table("Features", facts)

    @property
    def columns(self) -> tuple[str, ...]:
        return (*self._stored, *self._constant)

    def shape(self, column: str) -> tuple[int, ...]:
        """Return the shape of a column at one t."""
        if column in self._constant:
            return tuple(self._constant[column].shape[1:])
        return self.cache.column(column).shape[1:]

    def between(self, indices: ArrayLike, t: ArrayLike, direction: TimeDirection | None = None) -> Between:
        """Return the values at the buckets around t, one per row or one for all. For `direction` see `at`."""
        rows = np.asarray(indices)
        low, alpha = self._neighbours(rows, t, direction)
        values = self.cache.read_slices(rows, self._stored, low, self._width) if self._stored else {}
        if self._constant:
            steps = low[:, None] + np.arange(self._width)
            values |= {name: constant[steps] for name, constant in self._constant.items()}
        present = values.pop(self._bits, None)
        if present is None:
            present = self.cache.read(rows, [self._bits])[self._bits]
        return Between({name: np.asarray(found) for name, found in values.items()}, alpha, np.asarray(present))

    def at(self, indices: ArrayLike, t: ArrayLike, direction: TimeDirection | None = None) -> dict[str, Array]:
        """Return every column at t, float32, and the presence bits of the rows as `<layer>.present`.

        `direction` is the end of `t` that is noise: `"t0_noise"`, as in `forebay.torch.distill`, or `"t0_data"`. It may
        be left out if the layer was made with `"t0_noise"`, or does not record it. Absent rows are NaN, so that code
        that ignores the presence bits fails early.
        """
        found = self.between(indices, t, direction)
        columns = {name: _interpolated(values, found.alpha) for name, values in found.values.items()}
        for values in columns.values():
            values[~found.present] = np.nan
        return {**columns, self._bits: found.present}

    def _neighbours(self, rows: Array, t: ArrayLike, direction: TimeDirection | None) -> Neighbours:
        if not self._runs_backwards(direction):
            return self._located(self._grid, rows, t)
        low, alpha = self._located(self._mirrored, rows, t)
        return Neighbours(len(self.buckets) - self._width - low, 1 - alpha if self._width > 1 else alpha)

    def _runs_backwards(self, direction: TimeDirection | None) -> bool:
        """Return whether the caller's t and the layer's run in opposite directions."""
        if direction not in (None, "t0_noise", "t0_data"):
            raise choice_error("direction", direction, ("t0_noise", "t0_data"))
        if direction is not None and self.time_direction is None:
            raise ValueError(
                f"direction is {direction!r}, but layer '{self.layer}' does not record which end of its time is noise; "
                f"leave direction out and pass times as the teacher got them"
            )
        if direction is None and self.time_direction == "t0_data":
            raise ValueError(
                f"layer '{self.layer}' was made with time_direction='t0_data'; pass direction='t0_noise' where t = 0 "
                f"is noise, as in forebay.torch.distill, or direction='t0_data' where t = 0 is data"
            )
        return direction is not None and direction != self.time_direction

    def _located(self, grid: Grid, rows: Array, t: ArrayLike) -> Neighbours:
        times = np.asarray(t)
        if rows.ndim != 1:
            raise TypeError(f"rows must be a list of whole numbers (got {rows.dtype} of shape {rows.shape})")
        if times.shape == rows.shape:
            return grid.neighbours(times)
        if times.shape != ():
            raise ValueError(f"t must be one number or one per row: {len(rows)} (got shape {times.shape})")
        return grid.neighbours(np.broadcast_to(times, rows.shape))


def features(cache: Cache, layer: str) -> Features:
    """Return a reader of the features in a layer of a cache."""
    return Features(cache, layer)


def _time_direction(cache: Cache, layer: str) -> TimeDirection | None:
    """Return the end of a layer's t that is noise, from its recipe; None if it does not record it."""
    teacher = cache.recipe(layer).fields.get("teacher")
    recorded = teacher.get("time_direction") if isinstance(teacher, dict) else None
    return recorded if recorded in ("t0_noise", "t0_data") else None


def _interpolated(values: Array, alpha: NDArray[np.float32]) -> Array:
    wide = values.astype(np.float32)
    if wide.shape[1] == 1:
        return wide[:, 0]
    weight = alpha.reshape(-1, *(1,) * (wide.ndim - 2))
    blended: Array = (1 - weight) * wide[:, 0] + weight * wide[:, 1]
    return blended


def weights_of_latents(cache: Cache, rows: ArrayLike, layer: str = "latents") -> NDArray[np.float32]:
    """Return the share of content in every cell of the latents of some rows, `(rows, height, width)`."""
    kept = cache.recipe(layer)
    teacher = kept.fields.get("teacher")
    if not isinstance(teacher, dict) or teacher.get("kind") != "latents":
        raise RecipeInvalid(f"layer '{layer}' of '{cache.root}' does not hold image latents; name the layer that does")
    size = int(teacher["size"])
    _, height, width = cache.column(kept.columns[0].name).shape
    boxes = np.asarray(cache.read(rows, ["box"])["box"])
    return rectangle.latent_weights(boxes, (size, size), (height, width))
