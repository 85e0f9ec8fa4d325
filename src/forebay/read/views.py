"""Columns that are computed as rows are read, from stored columns and the coins of the rows.

    Dequantized("latents", values="latents_int8", scale="latents_scale")      float32
    Padded("t5_states", 512)                                                  a ragged column as one tensor
    Filled("label", -100)                                                     a value for absent rows

A view of your own is a subclass of `View`; `forebay.teachers.Timed` reads features at any t.
"""

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any, NamedTuple

import numpy as np
from numpy.typing import NDArray

from forebay.cache.catalog import presence_name
from forebay.columns import Array, Columns, Ragged
from forebay.order.coins import Coins
from forebay.read.cache import Cache
from forebay.read.columns import Slices


class Plan(NamedTuple):
    """A view's decisions before it reads: the required part of each row, and its random draws."""

    slices: Mapping[str, Slices] = {}
    drawn: Any = None


class View:
    """Columns that are computed as rows are read. Subclasses set `name`, may set `reads`, and define `make`."""

    name: str

    @property
    def reads(self) -> tuple[str, ...]:
        """The columns that are read: stored ones, or those that earlier views make, which come first."""
        return (self.name,)

    def reads_of(self, cache: Cache) -> tuple[str, ...]:
        """Return the columns to read from a cache; without one of them, the view has no rows there."""
        return self.reads

    def plan(self, cache: Cache, coins: Coins) -> Plan:
        """Decide what to read of some rows."""
        return Plan()

    def make(self, cache: Cache, columns: Columns, plan: Plan) -> dict[str, Array | Ragged]:
        """Return the columns of this view, by name."""
        raise NotImplementedError

    def lacking(self, coins: Coins, like: Columns) -> dict[str, Array | Ragged]:
        """Return columns for rows of a cache that lacks the view's columns. `like` has their types."""
        return {}


@dataclass(frozen=True)
class Filled(View):
    """A stored column with `value` in absent rows."""

    name: str
    value: float

    def make(self, cache: Cache, columns: Columns, plan: Plan) -> dict[str, Array | Ragged]:
        values = np.array(_fixed(self.name, columns[self.name]))
        _check_value(self.name, self.value, values.dtype)
        values[~_present(cache, self.name, columns, len(values))] = self.value
        return {self.name: values}

    def lacking(self, coins: Coins, like: Columns) -> dict[str, Array | Ragged]:
        stored = _fixed(self.name, like[self.name])
        return {self.name: np.full((len(coins), *stored.shape[1:]), self.value, stored.dtype)}


@dataclass(frozen=True)
class Dequantized(View):
    """`values · scale` as float32, with one scale per row, or one for each of its first sides."""

    name: str
    values: str
    scale: str

    @property
    def reads(self) -> tuple[str, ...]:
        return (self.values, self.scale)

    def make(self, cache: Cache, columns: Columns, plan: Plan) -> dict[str, Array | Ragged]:
        values, scale = (_fixed(name, columns[name]).astype(np.float32) for name in self.reads)
        return {self.name: values * scale.reshape(*scale.shape, *(1,) * (values.ndim - scale.ndim))}


@dataclass(frozen=True)
class Padded(View):
    """A ragged column as `[rows, length, …]`, filled up with `value`; absent rows of floats are NaN."""

    name: str
    length: int
    value: float = 0

    def make(self, cache: Cache, columns: Columns, plan: Plan) -> dict[str, Array | Ragged]:
        rows = columns[self.name]
        if not isinstance(rows, Ragged):
            raise TypeError(f"rows of '{self.name}' have one shape; Padded needs a ragged column")
        if (most := int(rows.lengths.max(initial=0))) > self.length:
            raise ValueError(f"a row of '{self.name}' has {most:,} values, more than length={self.length:,}; raise it")
        _check_value(self.name, self.value, rows.values.dtype)
        padded = np.full((len(rows), self.length, *rows.values.shape[1:]), self.value, rows.values.dtype)
        padded[np.arange(self.length) < rows.lengths[:, None]] = rows.values
        if padded.dtype.kind in "fV":
            padded[~_present(cache, self.name, columns, len(rows))] = np.nan
        return {self.name: padded}

    def lacking(self, coins: Coins, like: Columns) -> dict[str, Array | Ragged]:
        stored = _fixed(self.name, like[self.name])
        value = np.nan if stored.dtype.kind in "fV" else self.value
        return {self.name: np.full((len(coins), *stored.shape[1:]), value, stored.dtype)}


def _fixed(name: str, values: Array | Ragged) -> Array:
    if isinstance(values, Ragged):
        raise TypeError(f"'{name}' is ragged; this view needs rows of one shape")
    return values


def _check_value(name: str, value: float, dtype: np.dtype[Any]) -> None:
    """Raise for a value that integers or bools would wrap around or round."""
    if dtype.kind not in "biu":
        return
    low, high = (0, 1) if dtype.kind == "b" else (np.iinfo(dtype).min, np.iinfo(dtype).max)
    if not (low <= value <= high and value == int(value)):
        raise ValueError(f"value is {value!r}, but '{name}' is {dtype}; pass a whole number from {low:,} to {high:,}")


def _present(cache: Cache, name: str, columns: Columns, rows: int) -> NDArray[np.bool_]:
    """Return which rows of a column are present; an earlier view fills absent rows of its column itself."""
    if name not in cache.columns or (layer := cache.layer_of(name)) == cache.generation.base:
        return np.ones(rows, np.bool_)
    return np.asarray(columns[presence_name(layer)])
