"""The document's caches of several data sets: rows are routed to the cache that each comes from, and joined again.

    multi = MultiSourceCache()
    multi.add(DatasetCache.load("caches/portraits"), dataset_id=0)
    multi.get_lune(batch["local_index"], batch["dataset_id"], t)

A `Loader` over a `Mixture` does the same ahead of training: columns=[Timed("lune", t), "clip_pooled"].
"""

import warnings
from typing import Any

import numpy as np
import torch
from torch import Tensor

from forebay.cache.catalog import presence_name
from forebay.order.coins import Coins
from forebay.read.cache import Cache
from forebay.read.rows import Located, RowReader
from forebay.teachers.align import IMPORTED
from forebay.teachers.feature_reader import Features, Timed
from forebay.teachers.protocol import TimeDirection
from forebay.teachers.recipe import T_BUCKETS, TeacherRecipe
from forebay.torch.batches import to_array, to_tensor
from forebay.torch.distill.teacher_rows import Numbers, TeacherRows


class MultiSourceCache:
    """Caches by data set id; the `dataset_id` and `local_index` of a `Mixture` batch identify a sample.

    Rows of a data set without that teacher are absent; if no data set has it, the result is None. Adding a data set
    whose layer has other weights, buckets, time direction or types is an error.
    """

    def __init__(self) -> None:
        self._caches: dict[int, Cache] = {}

    def add(self, source: Any, dataset_id: int) -> None:
        """Add a `DatasetCache` or a cache, with the teachers that it has."""
        cache: Cache = source if isinstance(source, Cache) else source.cache
        if dataset_id in self._caches:
            raise ValueError(f"dataset_id {dataset_id} is already '{self._caches[dataset_id].root}'; choose another")
        others = list(self._caches.values())
        layers = [layer for layer in cache.generation.recipes if layer != cache.generation.base]
        pairs = [(layer, other) for other in others for layer in layers if layer in other.generation.recipes]
        unrecorded = dict.fromkeys(layer for layer, other in pairs if not _is_same_teacher(layer, cache, other))
        if unrecorded:
            names = ", ".join(f"'{layer}'" for layer in unrecorded)
            warnings.warn(
                f"an import does not record its teacher: {names} of '{cache.root}' and of earlier data sets agree in "
                "shapes, buckets and time direction; their weights, noise and prompts are not compared",
                stacklevel=2,
            )
        self._caches[dataset_id] = cache

    def get(
        self, layer: str, local_indices: Numbers, dataset_ids: Numbers, timesteps: Numbers
    ) -> dict[str, TeacherRows] | None:
        """Return the columns of a timed layer at t, where 0 is noise; None if no data set has the layer."""
        located, t = self._located(local_indices, dataset_ids), to_array(timesteps)
        timed = [Features(cache, layer) for cache in self._caches.values() if _is_timed(cache, layer)]
        if not timed:
            return None
        if t.shape not in ((), located.rows.shape):
            raise ValueError(f"pass one timestep for all, or one per sample: {len(located.rows)} (got shape {t.shape})")
        t = np.broadcast_to(t, located.rows.shape)
        direction: TimeDirection | None = "t0_noise" if all(each.time_direction for each in timed) else None
        view = Timed(layer, lambda coins: t[coins.rows.astype(np.int64)], direction)
        numbers = Coins(0, 0, np.arange(len(located.rows), dtype=np.uint64))  # the row of each coin is its sample
        columns = RowReader(list(self._caches.values()), [view]).read(located, numbers)
        present = torch.from_numpy(columns[presence_name(layer)])
        return {name: TeacherRows(to_tensor(columns[name]), present) for name in timed[0].columns}

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

    def _located(self, local_indices: Numbers, dataset_ids: Numbers) -> Located:
        rows, datasets = to_array(local_indices), to_array(dataset_ids)
        if rows.ndim != 1 or datasets.shape not in ((), rows.shape):
            raise ValueError(
                f"pass one local index and one dataset id per sample (got shapes {rows.shape} and {datasets.shape})"
            )
        order = {dataset: number for number, dataset in enumerate(self._caches)}
        unknown = set(datasets.reshape(-1).tolist()) - order.keys()
        if unknown:
            known = ", ".join(map(str, order)) or "none"
            raise KeyError(f"no cache was added for data set {min(unknown)}; known are: {known}")
        sources = np.array([order[each] for each in datasets.reshape(-1).tolist()], np.int64)
        return Located(rows, np.broadcast_to(sources, rows.shape))


def _is_timed(cache: Cache, layer: str) -> bool:
    return layer in cache.generation.recipes and T_BUCKETS in cache.constants(layer)


def _is_same_teacher(layer: str, cache: Cache, other: Cache) -> bool:
    """Raise if a layer of two caches has different teachers; return False if one of them does not record its teacher.

    Only shapes, buckets and time direction of features are compared then.
    """
    is_recorded = not any(each.recipe(layer).kind == IMPORTED for each in (cache, other))
    one, two = (_facts(each, layer) for each in (cache, other))
    # A built layer may have columns that an import lacks, such as the states of CLIP.
    names = one.keys() | two.keys() if is_recorded else one.keys() & two.keys()
    differing = [name for name in sorted(names) if one.get(name) != two.get(name)]
    if differing:
        shown = "; ".join(f"{name} is {one.get(name)!r:.60} and {two.get(name)!r:.60}" for name in differing[:4])
        raise ValueError(
            f"'{layer}' differs between '{cache.root}' and '{other.root}': {shown}; all data sets need the same teacher"
        )
    return is_recorded


def _facts(cache: Cache, layer: str) -> dict[str, object]:
    """Return a layer's types, its columns at one t, its buckets, and its teacher if recorded."""
    document = cache.recipe(layer)
    facts = TeacherRecipe.identity_of(document) if document.kind == TeacherRecipe.kind else dict[str, object]()
    if document.kind != IMPORTED:
        facts["types"] = {column.name: column.dtype for column in document.columns}
    if _is_timed(cache, layer):
        timed = Features(cache, layer)
        facts |= {f"column {name}": timed.shape(name) for name in timed.columns}
        facts["buckets"] = timed.buckets.tolist()
        facts["time direction"] = timed.time_direction or "t0_noise"  # a formula of t gets the t of `get`
    return facts
