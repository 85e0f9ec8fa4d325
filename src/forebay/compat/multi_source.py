"""The document's caches of several data sets: rows are routed to the cache that each comes from, and joined again.

    multi = MultiSourceCache(device="cuda")
    multi.add(DatasetCache.load("caches/portraits"), dataset_id=0)
    multi.get_lune(batch["local_index"], batch["dataset_id"], t)

A `Loader` over a `Mixture` does the same ahead of training: columns=[Timed("lune", t), "clip_pooled"].
"""

import warnings
from collections.abc import Mapping
from typing import Protocol

import numpy as np
import torch
from numpy.typing import ArrayLike, NDArray
from torch import Tensor

from forebay.cache.catalog import presence_name
from forebay.columns import Ragged
from forebay.order.coins import Coins, row_keys
from forebay.read.cache import Cache
from forebay.read.rows import Located, RowReader
from forebay.read.views import Padded, View
from forebay.recipe import RecipeDocument
from forebay.teachers.align import IMPORTED
from forebay.teachers.feature_reader import Features, Timed
from forebay.teachers.protocol import TimeDirection
from forebay.teachers.recipe import T_BUCKETS, TeacherRecipe
from forebay.torch.batches import to_array, to_tensor
from forebay.torch.distill.timed_features import TeacherRows

Numbers = Tensor | ArrayLike
_NOT_COMPARED = {"batch_size", "batch_timesteps", "device", "memory_limit", "requested_batch_size", "dtype", "ids",
                 "prompt_column", "prompt_key", "seed"}  # fmt: skip


class HasCache(Protocol):
    """What holds a cache, such as a `DatasetCache`."""

    @property
    def cache(self) -> Cache: ...


class MultiSourceCache:
    """Caches by data set id; the `dataset_id` and `local_index` of a `Mixture` batch identify a sample.

    Rows of a data set without that teacher are absent; if none has it, the result is None. A layer that another data
    set has from other weights, at other buckets, in another direction or type is an error.
    """

    def __init__(self, device: torch.device | str = "cpu") -> None:
        self.device = torch.device(device)
        self._caches: dict[int, Cache] = {}

    def add(self, source: Cache | HasCache, dataset_id: int) -> None:
        """Add a cache, with the teachers that it has."""
        cache = source if isinstance(source, Cache) else source.cache
        if dataset_id in self._caches:
            raise ValueError(f"dataset_id {dataset_id} is already '{self._caches[dataset_id].root}'; choose another")
        _warn_unrecorded(cache, list(self._caches.values()))
        self._caches[dataset_id] = cache

    def get(
        self, layer: str, local_indices: Numbers, dataset_ids: Numbers, timesteps: Numbers
    ) -> dict[str, TeacherRows] | None:
        """Return the columns of a timed layer at t, where 0 is noise; None if no data set has the layer."""
        located, t = self._located(local_indices, dataset_ids), to_array(timesteps)
        timed = [Features(cache, layer) for cache in self._caches.values() if T_BUCKETS in _constants(cache, layer)]
        if not timed:
            return None
        if t.shape not in ((), located.rows.shape):
            raise ValueError(f"pass one timestep for all, or one per sample: {len(located.rows)} (got shape {t.shape})")
        t = np.broadcast_to(t, located.rows.shape)
        direction: TimeDirection | None = None if timed[0].time_direction is None else "t0_noise"
        view = Timed(layer, lambda coins: t[coins.rows.astype(np.int64)], direction)
        columns = RowReader(list(self._caches.values()), [view]).read(located, _places(located))
        present = columns[presence_name(layer)]
        return {name: self._rows(columns[name], present) for name in timed[0].columns}

    def get_lune(self, local_indices: Numbers, dataset_ids: Numbers, timesteps: Numbers) -> Tensor | None:
        """Return the layer `lune` at t, (rows, 1280) float32; absent rows are NaN. `get` also returns the mask."""
        columns = self.get("lune", local_indices, dataset_ids, timesteps)
        return None if columns is None else columns["lune"].values

    def get_sol(
        self, local_indices: Numbers, dataset_ids: Numbers, timesteps: Numbers
    ) -> tuple[Tensor, Tensor] | tuple[None, None]:
        """Return the layer `sol` at t: statistics (rows, 4) and maps (rows, 8, 8); absent rows are NaN."""
        columns = self.get("sol", local_indices, dataset_ids, timesteps)
        return (None, None) if columns is None else (columns["sol_stats"].values, columns["sol_spatial"].values)

    def read(self, column: str, local_indices: Numbers, dataset_ids: Numbers) -> TeacherRows | None:
        """Return a column without timesteps, such as text states or latents; None if no data set has it."""
        located, homes = self._located(local_indices, dataset_ids), list(self._caches.values())
        home = next((cache for cache in homes if column in cache.columns), None)
        if home is None:
            return None
        table = RowReader(homes, [whole_rows(home, column)]).read(located, _places(located))
        layer = home.layer_of(column)
        present = np.asarray(table.get(presence_name(layer), np.ones(len(located.rows), np.bool_)))
        return self._rows(table[column], present)

    def sample_keys(self, local_indices: Numbers, dataset_ids: Numbers) -> NDArray[np.uint64]:
        """Return the permanent numbers of samples, from their row ids, for `TeacherDropout.kept(…, dataset_ids)`."""
        located, caches = self._located(local_indices, dataset_ids), list(self._caches.values())
        names = RowReader(caches, ["row_id"]).read(located, _places(located))["row_id"]
        return row_keys(names[:, 0], names[:, 1])

    def _rows(self, values: NDArray[np.generic], present: NDArray[np.bool_]) -> TeacherRows:
        return TeacherRows(to_tensor(values), torch.from_numpy(present)).to(self.device)

    def _located(self, local_indices: Numbers, dataset_ids: Numbers) -> Located:
        rows, datasets = _whole("local_indices", local_indices), _whole("dataset_ids", dataset_ids)
        if rows.ndim != 1 or datasets.shape not in ((), rows.shape):
            raise ValueError(
                f"pass one local index and one dataset id per sample (got shapes {rows.shape} and {datasets.shape})"
            )
        order = {dataset: number for number, dataset in enumerate(self._caches)}
        for dataset in np.unique(datasets).tolist():
            if dataset not in order:
                known = ", ".join(map(str, self._caches)) or "none"
                raise KeyError(f"no cache was added for data set {dataset}; known are: {known}")
        sources = np.array([order[each] for each in datasets.reshape(-1).tolist()], np.int64)
        return Located(rows, np.broadcast_to(sources, rows.shape))


def _places(located: Located) -> Coins:
    """Return coins of which the row of each is its place among the samples."""
    return Coins(0, 0, np.arange(len(located.rows), dtype=np.uint64))


def whole_rows(cache: Cache, column: str) -> str | View:
    """Return how a column is read as one tensor: states of real tokens are filled up to their teacher's length."""
    teacher = cache.recipe(cache.layer_of(column)).fields.get("teacher")
    if cache.column(column).ragged and isinstance(teacher, dict) and "max_length" in teacher:
        return Padded(column, int(teacher["max_length"]))
    return column


def _constants(cache: Cache, layer: str) -> Mapping[str, object]:
    return cache.constants(layer) if layer in cache.generation.recipes else {}


def _whole(name: str, numbers: Numbers) -> NDArray[np.int64]:
    found = to_array(numbers)
    if found.size and found.dtype.kind not in "iu":
        raise TypeError(f"{name} must be whole numbers (got {found.dtype})")
    return found.astype(np.int64)


def _warn_unrecorded(cache: Cache, others: list[Cache]) -> None:
    """Raise where a layer has another teacher in another cache; warn where its teacher is not recorded."""
    layers = [layer for layer in cache.generation.recipes if layer != cache.generation.base]
    pairs = [(layer, other) for other in others for layer in layers if layer in other.generation.recipes]
    unrecorded = [layer for layer, other in pairs if not _check_same(layer, cache, other)]
    if unrecorded:
        names = ", ".join(f"'{layer}'" for layer in dict.fromkeys(unrecorded))
        warnings.warn(
            f"an import does not record its teacher: {names} of '{cache.root}' and of earlier data sets agree in "
            "shapes, buckets and time direction; their weights, noise and prompts are not compared",
            stacklevel=3,
        )


def _check_same(layer: str, cache: Cache, other: Cache) -> bool:
    """Raise unless a layer of two caches has the same teacher; False if one of them does not record its teacher.

    Then only what an import records is compared: shapes, buckets and time direction.
    """
    kept = [each.recipe(layer) for each in (cache, other)]
    is_recorded = not any(one.kind == IMPORTED for one in kept)
    if is_recorded:
        one, two = map(_identity, kept)
    else:
        one, two = (_recorded(each, layer) for each in (cache, other))
        common = one.keys() & two.keys()  # a built layer may have further columns, such as the states of CLIP
        one, two = ({name: facts[name] for name in common} for facts in (one, two))
    differ = [name for name in sorted(one.keys() | two.keys()) if one.get(name) != two.get(name)]
    if differ:
        shown = "; ".join(f"{name} is {one.get(name)!r:.60} and {two.get(name)!r:.60}" for name in differ[:4])
        raise ValueError(
            f"'{layer}' differs between '{cache.root}' and '{other.root}': {shown}; all data sets need the same teacher"
        )
    return is_recorded


def _recorded(cache: Cache, layer: str) -> dict[str, object]:
    """What is known of a layer without its teacher: the shapes of rows as they are read, and its t."""
    if T_BUCKETS not in cache.constants(layer):
        names = [column.name for column in cache.recipe(layer).columns]
        return {f"column {name}": _row_shape(cache, name) for name in names}
    timed = Features(cache, layer)
    facts: dict[str, object] = {f"column {name}": timed.shape(name) for name in timed.columns}
    facts["buckets"] = tuple(timed.buckets.tolist())
    return facts | ({} if timed.time_direction is None else {"time direction": timed.time_direction})


def _identity(kept: RecipeDocument) -> dict[str, object]:
    """What makes a teacher's features comparable: columns, fields and the hashes of its files, not their places."""
    columns: dict[str, object] = {f"column {one.name}": (one.dtype, one.shape) for one in kept.columns}
    if kept.kind != TeacherRecipe.kind:
        return columns | {"buckets": kept.fields.get("buckets")}
    fields = {name: value for name, value in kept.fields.items() if name not in {*_NOT_COMPARED, "teacher"}}
    teacher = dict(kept.fields["teacher"])
    places = {"vae", "model", "tokenizer", "unet", "weights", "pad_color"}
    inner = {f"teacher {name}": value for name, value in teacher.items() if name not in places}
    files = sorted(mark for name, mark in kept.dependencies.items() if not name.startswith("layer "))
    return {**columns, **fields, **inner, "weights": files}


def _row_shape(cache: Cache, column: str) -> tuple[int, ...]:
    """Return the shape of the rows of a column as they are read."""
    like = RowReader([cache], [whole_rows(cache, column)]).like[column]
    return tuple(np.asarray(like.values if isinstance(like, Ragged) else like).shape[1:])
