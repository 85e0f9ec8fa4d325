"""Teacher features at any t as tensors, and teacher dropout.

    features = forebay.torch.features(cache, "lune", device="cuda")
    features.at([5, 3, 9], t)["lune"].values          # (rows, 1280) float32

Rows are row numbers of the cache; batches of a `Mixture`, even of one cache, have them as `local_index`. Only the two
buckets around each t are read; they are sent to the device as stored, and interpolated there.

Teachers of several data sets: a batch's rows are routed to the cache that each comes from, and joined again.

sources = MultiSourceCache(device="cuda")
sources.add(fb.open_cache("caches/portraits"), dataset_id=0)
sources.add(fb.open_cache("caches/art"), dataset_id=1)
sources.get("lune", batch["local_index"], batch["dataset_id"], t)        # a timed layer, or None
sources.read("clip_pooled", batch["local_index"], batch["dataset_id"])   # a column without timesteps
"""

from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import Protocol

import numpy as np
import torch
from numpy.typing import ArrayLike, NDArray
from torch import Tensor

from forebay.cache.catalog import presence_name
from forebay.columns import Ragged
from forebay.order.orders import Coins, row_keys
from forebay.read.cache import Cache
from forebay.recipe import RecipeDocument
from forebay.teachers.batched_forward import SharedColumn
from forebay.teachers.feature_reader import Between, Features
from forebay.teachers.protocol import TimeDirection
from forebay.teachers.recipe import T_BUCKETS, TeacherRecipe
from forebay.teachers.teacher_samples import SHARED_ROW_SUFFIX
from forebay.torch.batches import to_array, to_tensor


@dataclass(frozen=True, slots=True, eq=False)
class TeacherRows:
    """Teacher outputs: values (rows, …), and `present` (rows,), True where a row has them.

    Absent rows hold NaN, never zeros, so that code that ignores `present` fails early.
    """

    values: Tensor
    present: Tensor

    def __post_init__(self) -> None:
        if self.present.dtype != torch.bool or self.present.shape != self.values.shape[:1]:
            raise ValueError(
                f"present must be bool ({len(self.values)},), one per row "
                f"(got {self.present.dtype} {tuple(self.present.shape)})"
            )

    def __len__(self) -> int:
        return len(self.values)

    def where(self, kept: Tensor) -> "TeacherRows":
        """Return the rows, absent also where `kept` (rows,) is False: teacher dropout."""
        present = self.present & kept.to(self.present.device)
        return TeacherRows(_absent(self.values, present), present)

    def filled(self, other: Tensor) -> Tensor:
        """Return the teacher's values, with those of `other` in absent rows."""
        return torch.where(_wide(self.present, self.values), self.values.to(other.dtype), other)

    def to(self, device: torch.device | str) -> "TeacherRows":
        return TeacherRows(self.values.to(device), self.present.to(device))


def _absent(values: Tensor, present: Tensor) -> Tensor:
    return values.masked_fill(~_wide(present, values), torch.nan)


def _wide(present: Tensor, values: Tensor) -> Tensor:
    return present.view(-1, *[1] * (values.dim() - 1))


class TorchFeatures:
    """The columns of a timed layer; `numpy` is the same without torch."""

    def __init__(self, cache: Cache, layer: str, device: torch.device | str = "cpu") -> None:
        self.numpy = Features(cache, layer)
        self.device = torch.device(device)

    def __repr__(self) -> str:
        return f"{repr(self.numpy)[:-1]}, on {self.device}>"

    def _repr_html_(self) -> str:
        return self.numpy._repr_html_()

    @property
    def buckets(self) -> Tensor:
        return torch.tensor(self.numpy.buckets)

    @property
    def columns(self) -> tuple[str, ...]:
        return self.numpy.columns

    def shape(self, column: str) -> tuple[int, ...]:
        """Return the shape of a column at one t."""
        return self.numpy.shape(column)

    @property
    def time_direction(self) -> TimeDirection | None:
        """The end of the layer's t that is noise, from its recipe; None if it does not record it."""
        return self.numpy.time_direction

    def at(
        self, indices: Tensor | ArrayLike, t: Tensor | ArrayLike, direction: TimeDirection | None = None
    ) -> dict[str, TeacherRows]:
        """Return every column at t, one per row or one for all, in float32; absent rows are NaN.

        `direction` is the end of `t` that is noise; see `forebay.teachers.Features.at`.
        """
        found = self.numpy.between(to_array(indices), to_array(t), direction)
        return interpolate(found, self.device)


def at_flow_times(
    timed: TorchFeatures, indices: Tensor | ArrayLike, timesteps: Tensor | ArrayLike
) -> dict[str, TeacherRows]:
    """Return features at a t whose 0 is noise, whichever way the layer's own time runs."""
    return timed.at(indices, timesteps, None if timed.time_direction is None else "t0_noise")


def features(cache: Cache, layer: str, device: torch.device | str = "cpu") -> TorchFeatures:
    """Return a reader of the features in a layer of a cache."""
    return TorchFeatures(cache, layer, device)


def interpolate(found: Between, device: torch.device) -> dict[str, TeacherRows]:
    """Interpolate between two buckets on a device, in float32."""
    alpha, present = torch.from_numpy(found.alpha), torch.from_numpy(found.present)
    is_whole = bool(found.present.all())
    if device.type != "cpu":
        alpha, present = alpha.to(device), present.to(device)
    rows = {}
    for name, values in found.values.items():
        targets = TeacherRows(_lerp(to_tensor(values).to(device).float(), alpha), present)
        rows[name] = targets if is_whole else targets.where(present)
    return rows


def _lerp(values: Tensor, alpha: Tensor) -> Tensor:
    """Interpolate; `torch.lerp` returns either end exactly where alpha is 0 or 1."""
    low = values[:, 0]
    if values.shape[1] == 1:
        return low.clone()
    return torch.lerp(low, values[:, 1], alpha.view(-1, *[1] * (low.dim() - 1)))


Numbers = Tensor | ArrayLike


@dataclass(frozen=True, slots=True)
class TeacherDropout:
    """Decides which samples keep their teacher, as a function of (seed, step, sample, teacher).

    The choice is the same on any rank, in any order and after any resume. Samples are permanent numbers, for instance
    `sample_keys` of a `MultiSourceCache`.

    >>> TeacherDropout(rate=0.5).kept("lune", step=3, samples=[7, 8, 9, 10]).tolist()
    [True, True, False, False]
    """

    rate: float = 0.1
    seed: int = 0

    def __post_init__(self) -> None:
        if not 0 <= self.rate <= 1:
            raise ValueError(f"rate must be from 0 to 1 (got {self.rate})")

    def kept(self, teacher: str, step: int, samples: Numbers, dataset_ids: Numbers = 0) -> Tensor:
        """Return bool (samples,), True where a sample learns from this teacher at this step."""
        keys = to_array(samples).astype(np.uint64)
        datasets = np.broadcast_to(to_array(dataset_ids), keys.shape)
        kept = np.empty(keys.shape, np.bool_)
        for dataset in np.unique(datasets).tolist():
            here = datasets == dataset
            kept[here] = ~self._dropped(keys[here], f"{teacher} of {dataset}", step)
        return torch.from_numpy(kept)

    def _dropped(self, keys: NDArray[np.uint64], of: str, step: int) -> NDArray[np.bool_]:
        return Coins(self.seed, step, keys).flip(f"drop the teacher {of}", self.rate)


_NOT_COMPARED = {"batch_size", "batch_timesteps", "device", "memory_limit", "memo_bytes", "halved_from", "dtype", "ids",
                 "prompt_column", "prompt_key", "seed"}  # fmt: skip


class HasCache(Protocol):
    """What holds a cache, such as a `DatasetCache`."""

    @property
    def cache(self) -> Cache: ...


class MultiSourceCache:
    """Caches by data set id; the `dataset_id` and `local_index` of a `Mixture` batch identify a sample.

    Rows of a data set without that teacher are absent; if none has it, the result is None. A layer that another data
    set has from other weights, at other buckets, in another direction or type is refused with what differs.
    """

    def __init__(self, device: torch.device | str = "cpu") -> None:
        self.device = torch.device(device)
        self._caches: dict[int, Cache] = {}
        self._timed: dict[str, dict[int, TorchFeatures]] = {}

    def add(self, source: Cache | HasCache, dataset_id: int) -> None:
        """Add a cache, with the teachers that it has."""
        cache = source if isinstance(source, Cache) else source.cache
        if dataset_id in self._caches:
            raise ValueError(f"dataset_id {dataset_id} is already '{self._caches[dataset_id].root}'; choose another")
        layers = [layer for layer in cache.generation.recipes if layer != cache.generation.base]
        for other in self._caches.values():
            for layer in layers:
                if layer in other.generation.recipes:
                    _check_same(layer, cache, other)
        for layer in layers:
            if T_BUCKETS in cache.constants(layer):
                self._timed.setdefault(layer, {})[dataset_id] = TorchFeatures(cache, layer, self.device)
        self._caches[dataset_id] = cache

    def get(
        self, layer: str, local_indices: Numbers, dataset_ids: Numbers, timesteps: Numbers
    ) -> dict[str, TeacherRows] | None:
        """Return the columns of a timed layer at t, where 0 is noise; None if no data set has the layer."""
        known = self._timed.get(layer, {})
        rows, datasets = _routed(local_indices, dataset_ids)
        routes = self._by_dataset(datasets)
        if not known:
            return None
        t = to_array(timesteps)
        if t.shape not in ((), rows.shape):
            raise ValueError(f"pass one timestep for all, or one per sample: {len(rows)} (got shape {t.shape})")
        t = np.broadcast_to(t, rows.shape)
        like = next(iter(known.values()))
        shapes = {column: like.shape(column) for column in like.columns}

        def read(dataset: int, here: NDArray[np.int64]) -> dict[str, TeacherRows] | None:
            return at_flow_times(known[dataset], rows[here], t[here]) if dataset in known else None

        return self._joined(shapes, torch.float32, routes, len(rows), read)

    def get_lune(self, local_indices: Numbers, dataset_ids: Numbers, timesteps: Numbers) -> TeacherRows | None:
        """Return the layer `lune` at t, (rows, 1280)."""
        found = self.get("lune", local_indices, dataset_ids, timesteps)
        return None if found is None else found["lune"]

    def get_sol(
        self, local_indices: Numbers, dataset_ids: Numbers, timesteps: Numbers
    ) -> tuple[TeacherRows, TeacherRows] | tuple[None, None]:
        """Return the layer `sol` at t: statistics (rows, 4) and maps (rows, 8, 8)."""
        found = self.get("sol", local_indices, dataset_ids, timesteps)
        return (None, None) if found is None else (found["sol_stats"], found["sol_spatial"])

    def read(self, column: str, local_indices: Numbers, dataset_ids: Numbers) -> TeacherRows | None:
        """Return a column without timesteps, such as text states or latents; None if no data set has it."""
        rows, datasets = _routed(local_indices, dataset_ids)
        routes = self._by_dataset(datasets)
        homes = {dataset: home for dataset, cache in self._caches.items() if (home := _home(cache, column))}
        if not homes:
            return None

        def found(dataset: int, here: NDArray[np.int64]) -> dict[str, TeacherRows] | None:
            return {column: _column(*homes[dataset], column, rows[here])} if dataset in homes else None

        like = _column(*next(iter(homes.values())), column, np.zeros(1, np.int64)).values
        shapes = {column: tuple(like.shape[1:])}
        return self._joined(shapes, like.dtype, routes, len(rows), found)[column]

    def sample_keys(self, local_indices: Numbers, dataset_ids: Numbers) -> NDArray[np.uint64]:
        """Return the permanent numbers of samples, from their row ids, for `TeacherDropout.kept(…, dataset_ids)`."""
        rows, datasets = _routed(local_indices, dataset_ids)
        keys = np.empty(len(rows), np.uint64)
        for dataset, here in self._by_dataset(datasets):
            ids = self._caches[dataset].row_ids(rows[here])
            keys[here] = row_keys([name.chunk for name in ids], [name.row for name in ids])
        return keys

    def _joined(
        self,
        shapes: Mapping[str, tuple[int, ...]],
        dtype: torch.dtype,
        routes: list[tuple[int, NDArray[np.int64]]],
        count: int,
        read: Callable[[int, NDArray[np.int64]], dict[str, TeacherRows] | None],
    ) -> dict[str, TeacherRows]:
        """Return the rows of all data sets in the order of the batch; absent floats are NaN."""
        fill = torch.nan if dtype.is_floating_point else 0
        present = torch.zeros(count, dtype=torch.bool, device=self.device)
        values = {
            column: torch.full((count, *shape), fill, dtype=dtype, device=self.device)
            for column, shape in shapes.items()
        }
        for dataset, here in routes:
            places = torch.from_numpy(here).to(self.device)
            for column, rows in (read(dataset, here) or {}).items():
                values[column][places] = rows.values.to(self.device)
                present[places] = rows.present.to(self.device)
        return {column: TeacherRows(found, present) for column, found in values.items()}

    def _by_dataset(self, datasets: NDArray[np.int64]) -> list[tuple[int, NDArray[np.int64]]]:
        routes = [(dataset, np.flatnonzero(datasets == dataset)) for dataset in np.unique(datasets).tolist()]
        for dataset, _ in routes:
            if dataset not in self._caches:
                known = ", ".join(map(str, self._caches)) or "none"
                raise KeyError(f"no cache was added for data set {dataset}; known are: {known}")
        return routes


def _home(cache: Cache, column: str) -> tuple[Cache, str] | None:
    """The layer of a column, None where the cache has none."""
    recipes = ((layer, cache.recipe(layer)) for layer in cache.generation.recipes)
    return next(((cache, layer) for layer, kept in recipes if column in {one.name for one in kept.columns}), None)


def _column(cache: Cache, layer: str, column: str, rows: NDArray[np.int64]) -> TeacherRows:
    is_shared = f"{column}{SHARED_ROW_SUFFIX}" in cache.columns
    names = [f"{column}{SHARED_ROW_SUFFIX}" if is_shared else column]
    names += [presence_name(layer)] if layer != cache.generation.base else []
    read = cache.read(rows, names)
    values = SharedColumn(cache, column).read(rows) if is_shared else read[column]
    if isinstance(values, Ragged):
        raise TypeError(f"'{column}' is ragged; its rows are not one tensor")
    present = np.asarray(read[names[-1]], np.bool_) if len(names) > 1 else np.ones(len(rows), np.bool_)
    found = TeacherRows(to_tensor(np.asarray(values)), torch.from_numpy(present))
    return found.where(found.present) if found.values.is_floating_point() and not present.all() else found


def _check_same(layer: str, cache: Cache, other: Cache) -> None:
    """Raise unless a layer of two caches has the same teacher, buckets, direction, columns and types."""
    one, two = (_identity(each.recipe(layer)) for each in (cache, other))
    differ = [name for name in sorted(one.keys() | two.keys()) if one.get(name) != two.get(name)]
    if differ:
        shown = "; ".join(f"{name} is {one.get(name)!r:.60} and {two.get(name)!r:.60}" for name in differ[:4])
        raise ValueError(
            f"'{layer}' differs between '{cache.root}' and '{other.root}': {shown}; all data sets need the same teacher"
        )


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


def _routed(local_indices: Numbers, dataset_ids: Numbers) -> tuple[NDArray[np.int64], NDArray[np.int64]]:
    rows, datasets = _whole("local_indices", local_indices), _whole("dataset_ids", dataset_ids)
    if rows.ndim != 1 or datasets.shape not in ((), rows.shape):
        raise ValueError(
            f"pass one local index and one dataset id per sample (got shapes {rows.shape} and {datasets.shape})"
        )
    return rows, np.broadcast_to(datasets, rows.shape)


def _whole(name: str, numbers: Numbers) -> NDArray[np.int64]:
    found = to_array(numbers)
    if found.size and found.dtype.kind not in "iu":
        raise TypeError(f"{name} must be whole numbers (got {found.dtype})")
    return found.astype(np.int64)
