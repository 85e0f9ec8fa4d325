"""What a batch has beside its main tensors: the names of its rows, encodings of prompts, and teacher features at t.

    loader = Loader(cache, global_batch_size=64, columns=["latents", "clip_pooled"], identify=["row_id"],
                    features={"lune": LogitNormalTimes()})

    row           int64 [rows], the row number in the pinned generation
    row_id        int64 [rows, 2], chunk and row in it: permanent
    clip_pooled   [rows, …], of every row, although equal prompts are stored once; NaN where it is absent
    lune          float32 [rows, …], interpolated at `lune.t`, float32 [rows]; NaN where it is absent
    lune.present  bool [rows], beside every column of a layer above the base

All of it is read in the threads of a loader. A cache of a mixture that lacks a layer has absent rows.
"""

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import Literal, get_args

import numpy as np
from numpy.typing import ArrayLike, NDArray

from forebay.cache.catalog import presence_name
from forebay.columns import Array, Column
from forebay.errors import ColumnNotFound, LayerNotFound, choice_error
from forebay.feeding.stream import Located, checked_names
from forebay.order.orders import Coins, Numbers
from forebay.read.cache import Cache
from forebay.teachers.batched_forward import SharedColumn
from forebay.teachers.feature_reader import Features
from forebay.teachers.protocol import TimeDirection
from forebay.teachers.teacher_samples import SHARED_ROW_SUFFIX
from forebay.torch.batches import Batch, Buffers, to_tensor

Name = Literal["row", "row_id"]
Times = float | Callable[[Coins], ArrayLike]


@dataclass(frozen=True, slots=True)
class FeaturesAt:
    """The times at which a batch has the features of a layer: one for all rows, or a function of their coins.

    `direction` is the end of t that is noise, as in `forebay.teachers.Features.at`.
    """

    t: Times
    direction: TimeDirection | None = None

    def times(self, coins: Callable[[], Coins], rows: int) -> NDArray[np.float32]:
        drawn = np.asarray(self.t(coins()) if callable(self.t) else self.t, np.float32)
        if drawn.shape not in ((), (rows,)):
            raise ValueError(f"the function of times returned shape {drawn.shape} for {rows} rows; return one per row")
        return np.array(np.broadcast_to(drawn, (rows,)))


class SharedColumns:
    """A column that is stored once for equal prompts, in the caches that have it."""

    def __init__(self, caches: Sequence[Cache], column: str) -> None:
        self._column = column
        self._readers = [SharedColumn(cache, column) if column in cache.columns else None for cache in caches]
        found = [reader for reader in self._readers if reader is not None]
        if not found:
            raise ColumnNotFound(caches[0].root, column, caches[0].columns)
        declared = found[0].cache.column(column)
        self.stored = (column, f"{column}{SHARED_ROW_SUFFIX}")
        self.row_bytes = declared.item_bytes
        self._shape, self._dtype = declared.shape, declared.array_dtype
        self._bits = presence_name(_layer_of(found[0].cache, column))

    def read(self, located: Located, coins: Callable[[], Coins]) -> dict[str, Array]:
        count = len(located.rows)
        values = np.full((count, *self._shape), np.nan if self._dtype.kind in "fV" else 0, self._dtype)
        present = np.zeros(count, np.bool_)
        for source, at in _by_source(located):
            reader = self._readers[source]
            if reader is not None:
                values[at] = reader.read(located.rows[at])
                present[at] = np.asarray(reader.cache.read(located.rows[at], [self._bits])[self._bits])
        return {self._column: values, self._bits: present}


class TimedFeatures:
    """The features of a layer at times that are drawn for each batch, in the caches that have the layer."""

    def __init__(self, caches: Sequence[Cache], layer: str, at: FeaturesAt) -> None:
        self._readers = [Features(cache, layer) if layer in cache.generation.recipes else None for cache in caches]
        found = [reader for reader in self._readers if reader is not None]
        if not found:
            raise LayerNotFound(caches[0].root, layer, sorted(caches[0].generation.recipes))
        self._at, self._layer, self._bits = at, layer, presence_name(layer)
        self._shapes = {name: found[0].shape(name) for name in found[0].columns}
        self.stored = (*(column.name for column in found[0].cache.recipe(layer).columns), self._bits)
        self.row_bytes = sum(4 * int(np.prod(shape)) for shape in self._shapes.values())

    def read(self, located: Located, coins: Callable[[], Coins]) -> dict[str, Array]:
        count = len(located.rows)
        t = self._at.times(coins, count)
        batch: dict[str, Array] = {
            name: np.full((count, *shape), np.nan, np.float32) for name, shape in self._shapes.items()
        }
        batch[self._bits] = np.zeros(count, np.bool_)
        for source, at in _by_source(located):
            reader = self._readers[source]
            if reader is not None:
                for name, values in reader.at(located.rows[at], t[at], self._at.direction).items():
                    batch[name][at] = values
        return batch | {f"{self._layer}.t": t}


@dataclass(frozen=True, slots=True)
class Beside:
    """Everything that is read beside the main tensors of a batch."""

    identify: tuple[Name, ...] = ()
    readers: tuple[SharedColumns | TimedFeatures, ...] = ()

    @property
    def is_empty(self) -> bool:
        return not self.identify and not self.readers

    @property
    def row_bytes(self) -> int:
        return sum(reader.row_bytes for reader in self.readers) + 16 * len(self.identify)

    def columns(self, caches: Sequence[Cache]) -> list[str]:
        """Return the stored columns that are read of every cache."""
        names = dict.fromkeys(name for reader in self.readers for name in reader.stored)
        return [name for name in names if all(name in cache.columns for cache in caches)]

    def batch(self, caches: Sequence[Cache], located: Located, coins: Callable[[], Coins], buffers: Buffers) -> Batch:
        found: dict[str, Array] = {}
        for reader in self.readers:
            found |= reader.read(located, coins)
        if "row" in self.identify:
            found["row"] = np.array(located.rows, np.int64)
        if "row_id" in self.identify:
            found["row_id"] = _row_ids(caches, located)
        return {name: to_tensor(values, buffers) for name, values in found.items()}


def beside(
    caches: Sequence[Cache],
    columns: Sequence[str],
    identify: Sequence[Name],
    features: Mapping[str, Times | FeaturesAt] | None,
) -> tuple[tuple[str, ...], Beside]:
    """Return the columns that are read as they are stored, and what is read otherwise."""
    names = checked_names("identify", identify)
    unknown = [name for name in names if name not in get_args(Name)]
    if unknown:
        raise choice_error("each name of identify", unknown[0], get_args(Name))
    if features is not None and not isinstance(features, Mapping):
        raise TypeError(f"features is {features!r}; pass a dict from layers to times: {{'lune': 0.5}}")
    shared = [name for name in columns if any(_is_shared(cache, name) for cache in caches)]
    timed = {layer: at if isinstance(at, FeaturesAt) else FeaturesAt(at) for layer, at in (features or {}).items()}
    readers: list[SharedColumns | TimedFeatures] = [SharedColumns(caches, name) for name in shared]
    readers += [TimedFeatures(caches, layer, at) for layer, at in timed.items()]
    return tuple(name for name in columns if name not in shared), Beside(names, tuple(readers))


def default_columns(cache: Cache) -> tuple[str, ...]:
    """Return the columns of the opened layers, without the places where equal prompts are stored."""
    pointers = {f"{name}{SHARED_ROW_SUFFIX}" for name in cache.default_columns if _is_shared(cache, name)}
    return tuple(name for name in cache.default_columns if name not in pointers)


def _is_shared(cache: Cache, name: str) -> bool:
    return name in cache.columns and f"{name}{SHARED_ROW_SUFFIX}" in cache.columns


def _layer_of(cache: Cache, column: str) -> str:
    def has(layer: str) -> bool:
        declared: Sequence[Column] = cache.recipe(layer).columns
        return any(each.name == column for each in declared)

    return next(layer for layer in cache.generation.recipes if has(layer))


def _by_source(located: Located) -> list[tuple[int, Numbers]]:
    """Return each cache that rows come from, and the places of these rows in the batch."""
    if located.sources is None:
        return [(0, np.arange(len(located.rows)))]
    return [(source, np.flatnonzero(located.sources == source)) for source in np.unique(located.sources).tolist()]


def _row_ids(caches: Sequence[Cache], located: Located) -> Numbers:
    ids = np.empty((len(located.rows), 2), np.int64)
    for source, at in _by_source(located):
        cache, rows = caches[source], located.rows[at]
        position = cache.chunk_positions(rows)
        ids[at, 0], ids[at, 1] = cache.chunk_numbers[position], rows - cache.chunk_starts[position]
    return ids
