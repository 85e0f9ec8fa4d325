"""Read the features of a timed teacher at any t, interpolated between the two buckets around it.

features = fb.teachers.features(cache, "lune")
features.at([5, 3, 9], t=[0.42, 0.15, 0.99])["lune"]      # (3, 1280) float32
"""

from collections.abc import Callable, Mapping
from dataclasses import dataclass, field

import numpy as np
from numpy.typing import ArrayLike, NDArray

from forebay.cache.catalog import presence_name
from forebay.columns import Array, Columns, Ragged
from forebay.errors import NotFound, RecipeInvalid, choice_error
from forebay.masks import rectangle
from forebay.order.coins import Coins
from forebay.read.cache import Cache
from forebay.read.columns import Slices
from forebay.read.views import Plan, View
from forebay.records import html_table
from forebay.teachers.protocol import TimeDirection
from forebay.teachers.recipe import T_BUCKETS
from forebay.teachers.teacher_samples import Grid, Neighbors


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
            raise NotFound(
                f"layer '{layer}' of '{cache.root}' holds no features at timesteps",
                hint="read its columns with `cache.read`, or name the layer of a timed teacher",
                layer=layer,
            )
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
        near = self.neighbors(rows, t, direction)
        slices = self.slices(near)
        return self.around(near, self.cache.read(rows, [*slices, self._bits], slices))

    def at(self, indices: ArrayLike, t: ArrayLike, direction: TimeDirection | None = None) -> dict[str, Array]:
        """Return every column at t, float32, and the presence bits of the rows as `<layer>.present`.

        `direction` is the end of `t` that is noise: `"t0_noise"`, as in `forebay.torch.distill`, or `"t0_data"`. It may
        be left out if the layer was made with `"t0_noise"`, or does not record it. Absent rows are NaN, so that code
        that ignores the presence bits fails early.
        """
        return self.interpolated(self.between(indices, t, direction))

    def slices(self, near: Neighbors) -> dict[str, Slices]:
        """Return the part of every stored column that is read."""
        return dict.fromkeys(self._stored, Slices(near.low, self._width))

    def around(self, near: Neighbors, read: Columns) -> Between:
        """Return the values read around t, including those of constant columns."""
        steps = near.low[:, None] + np.arange(self._width)
        values = {name: np.asarray(read[name]) for name in self._stored}
        values |= {name: constant[steps] for name, constant in self._constant.items()}
        return Between(values, near.alpha, np.asarray(read[self._bits]))

    def interpolated(self, between: Between) -> dict[str, Array]:
        """Return every column at t, and the presence bits."""
        columns = {name: _interpolated(values, between.alpha) for name, values in between.values.items()}
        for values in columns.values():
            values[~between.present] = np.nan
        return {**columns, self._bits: between.present}

    def neighbors(self, rows: Array, t: ArrayLike, direction: TimeDirection | None) -> Neighbors:
        """Return the lower of the two buckets around t, for every row, and how far t is above it."""
        if not self._runs_backwards(direction):
            return self._located(self._grid, rows, t)
        low, alpha = self._located(self._mirrored, rows, t)
        return Neighbors(len(self.buckets) - self._width - low, 1 - alpha if self._width > 1 else alpha)

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

    def _located(self, grid: Grid, rows: Array, t: ArrayLike) -> Neighbors:
        times = np.asarray(t)
        if rows.ndim != 1:
            raise TypeError(f"rows must be a list of whole numbers (got {rows.dtype} of shape {rows.shape})")
        if times.shape == rows.shape:
            return grid.neighbors(times)
        if times.shape != ():
            raise ValueError(f"t must be one number or one per row: {len(rows)} (got shape {times.shape})")
        return grid.neighbors(np.broadcast_to(times, rows.shape))


Times = float | Callable[[Coins], ArrayLike]


@dataclass(frozen=True, eq=False)
class Timed(View):
    """The features of a layer at times: one for all rows, or a function of their coins.

    `direction` is the end of t that is noise, as in `Features.at`. A batch has the columns of the layer, float32,
    `<layer>.t` and `<layer>.present`; rows of a cache without the layer are absent.
    """

    layer: str
    t: Times
    direction: TimeDirection | None = None
    _features: dict[str, Features] = field(default_factory=dict, repr=False)  # by root: older generations are freed

    def __post_init__(self) -> None:
        if callable(self.t):
            return
        if isinstance(self.t, bool) or not isinstance(self.t, int | float):
            raise TypeError(f"t of Timed is {self.t!r}; pass one number from 0 to 1, or a function of coins")
        if not 0 <= self.t <= 1:
            raise ValueError(f"t of Timed must be from 0 to 1 (got {self.t!r})")

    @property
    def name(self) -> str:  # type: ignore[override]
        return self.layer

    def reads_of(self, cache: Cache) -> tuple[str, ...]:
        if self.layer not in cache.generation.recipes:
            return (presence_name(self.layer),)
        return (*(column.name for column in cache.recipe(self.layer).columns), presence_name(self.layer))

    def plan(self, cache: Cache, coins: Coins) -> Plan:
        features = self._features_of(cache)
        t = self._times(coins)
        near = features.neighbors(t, t, self.direction)
        return Plan(features.slices(near), (t, near))

    def make(self, cache: Cache, columns: Columns, plan: Plan) -> dict[str, Array | Ragged]:
        features, (t, near) = self._features_of(cache), plan.drawn
        return {**features.interpolated(features.around(near, columns)), f"{self.layer}.t": t}

    def lacking(self, coins: Coins, like: Columns) -> dict[str, Array | Ragged]:
        return {f"{self.layer}.t": self._times(coins)}

    def _features_of(self, cache: Cache) -> Features:
        features = self._features.get(cache.root)
        if features is None or features.cache is not cache:
            features = self._features[cache.root] = Features(cache, self.layer)
        return features

    def _times(self, coins: Coins) -> NDArray[np.float32]:
        rows = len(coins)
        if not rows:
            return np.empty(0, np.float32)
        drawn = np.asarray(self.t(coins) if callable(self.t) else self.t, np.float32)
        if drawn.shape not in ((), (rows,)):
            raise ValueError(f"the function of times returned shape {drawn.shape} for {rows} rows; return one per row")
        return np.array(np.broadcast_to(drawn, (rows,)))


def features(cache: Cache, layer: str) -> Features:
    """Return a reader of the features in a layer of a cache."""
    return Features(cache, layer)


def _time_direction(cache: Cache, layer: str) -> TimeDirection | None:
    """Return the end of a layer's t that is noise, from its recipe; None if it does not record it."""
    fields = cache.recipe(layer).fields
    teacher = fields.get("teacher", fields)  # an import has no teacher, and records the direction itself
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
    recipe = cache.recipe(layer)
    teacher = recipe.fields.get("teacher")
    if not isinstance(teacher, dict) or teacher.get("kind") != "latents":
        raise RecipeInvalid(
            f"layer '{layer}' of '{cache.root}' does not hold image latents", hint="name the layer that does"
        )
    size = int(teacher["size"])
    _, height, width = cache.column(recipe.columns[0].name).shape
    boxes = np.asarray(cache.read(rows, ["box"])["box"])
    return rectangle.latent_weights(boxes, (size, size), (height, width))
