"""Lune and Sol under the document's names, and columns that index like the tensors it kept in memory."""

import os
from collections.abc import Sequence
from functools import cached_property
from itertools import count
from typing import ClassVar, Self

import numpy as np
import torch
from numpy.typing import ArrayLike
from torch import Tensor

from forebay import api
from forebay.columns import Array, Columns, Ragged
from forebay.compat.tinyflux.prompt_caches import ModelZoo
from forebay.errors import RecipeMismatch
from forebay.read.cache import Cache, open_cache
from forebay.teachers.shared_prompts import SharedColumn
from forebay.teachers.teacher_samples import SHARED_ROW_SUFFIX
from forebay.torch.batches import to_array, to_tensor
from forebay.torch.distill.timed_features import TeacherRows, TorchFeatures

Index = Tensor | ArrayLike | slice


class StoredColumn:
    """Reads rows on indexing: `column[rows]`, or `column[rows, buckets]` of a timed column.

    `rows` is a tensor or list of numbers, one number, or a slice. Absent rows are NaN.
    """

    def __init__(self, cache: Cache, name: str) -> None:
        self._cache, self._name = cache, name

    @property
    def shape(self) -> torch.Size:
        return torch.Size((len(self._cache), *self._cache.column(self._name).shape))

    @property
    def dtype(self) -> torch.dtype:
        return to_tensor(np.empty(0, self._cache.column(self._name).array_dtype)).dtype

    def __len__(self) -> int:
        return len(self._cache)

    def __getitem__(self, index: Index | tuple[Index, Tensor | ArrayLike]) -> Tensor:
        rows, buckets = index if isinstance(index, tuple) else (index, None)
        numbers = np.arange(len(self))[rows] if isinstance(rows, slice) else to_array(rows)
        if numbers.ndim == 0:
            return self[(numbers[None], buckets)][0]
        return self.read(numbers) if buckets is None else self._at(numbers, to_array(buckets))

    def _at(self, rows: Array, buckets: Array) -> Tensor:
        starts = np.broadcast_to(buckets, rows.shape).astype(np.int64)
        read = self._cache.read_slices(rows, [self._name], starts, 1)
        return self._marked(to_tensor(np.asarray(read.pop(self._name))[:, 0]), read)

    def read(self, rows: Tensor | ArrayLike) -> Tensor:
        """Return some rows, each with its own values, even if equal ones are stored once."""
        numbers = to_array(rows)
        holder = f"{self._name}{SHARED_ROW_SUFFIX}"
        is_shared = holder in self._cache.columns
        read = self._cache.read(numbers, [holder if is_shared else self._name])
        found = SharedColumn(self._cache, self._name).read(numbers) if is_shared else read[self._name]
        if isinstance(found, Ragged):
            raise TypeError(f"'{self._name}' is ragged; its rows are not one tensor")
        return self._marked(to_tensor(found), {name: read[name] for name in read.keys() - {holder, self._name}})

    def _marked(self, values: Tensor, bits: Columns) -> Tensor:
        """Return floats with NaN in rows that are absent by the presence bits of the layer."""
        if values.is_floating_point():
            for present in bits.values():
                values[~torch.from_numpy(np.asarray(present))] = torch.nan
        return values


Path = str | os.PathLike[str]


def at_flow_times(
    timed: TorchFeatures, indices: Tensor | ArrayLike, timesteps: Tensor | ArrayLike
) -> dict[str, TeacherRows]:
    """Return features at the document's t, where 0 is noise, whichever way the layer's own time runs."""
    return timed.at(indices, timesteps, None if timed.time_direction is None else "t0_noise")


class TimedCache:
    """A teacher layer of a cache. The attributes of its grid have the document's names."""

    layer: ClassVar[str]

    def __init__(self, cache: Cache, device: torch.device | str = "cpu") -> None:
        self.cache = cache
        self.timed = TorchFeatures(cache, self.layer, device)

    @classmethod
    def build(cls, zoo: ModelZoo, prompts: Sequence[str], *, batch_timesteps: bool = False) -> Self:
        """Run the teacher on every prompt. `batch_timesteps` takes more memory and less time."""
        for number in count():
            root = zoo.prompt_caches.root(prompts, number)
            try:
                zoo.build_layers(root, cls.layer, batch_timesteps=batch_timesteps)
            except RecipeMismatch:
                continue  # built with other settings before: these prompts get another cache
            return cls(open_cache(root))
        raise AssertionError("unreachable: count() is infinite")

    @classmethod
    def load(cls, path: Path, device: torch.device | str = "cpu") -> Self:
        return cls(open_cache(path), device)

    def save(self, path: Path) -> None:
        """Copy the cache to a folder of this name."""
        api.copy(self.cache.root, path)

    def __len__(self) -> int:
        return len(self.cache)

    @cached_property
    def t_buckets(self) -> Tensor:
        return self.timed.buckets.float()

    @property
    def t_min(self) -> float:
        return float(self.timed.buckets[0])

    @property
    def t_max(self) -> float:
        return float(self.timed.buckets[-1])

    @property
    def t_step(self) -> float:
        """The step of an even grid; `get` also reads uneven ones."""
        return (self.t_max - self.t_min) / max(1, self.n_buckets - 1)

    @property
    def n_buckets(self) -> int:
        return len(self.timed.buckets)

    def _column(self, name: str) -> Tensor | StoredColumn:
        if name in self.cache.columns:
            return StoredColumn(self.cache, name)
        constant = torch.tensor(self.cache.constants(self.layer)[name])
        return constant.expand(len(self.cache), *constant.shape)  # one copy, whatever the number of rows


class LuneFeatureCache(TimedCache):
    """Mid-block features, (rows, buckets, 1280)."""

    layer: ClassVar[str] = "lune"

    @property
    def features(self) -> Tensor | StoredColumn:
        return self._column("lune")

    def get(self, indices: Tensor | ArrayLike, timesteps: Tensor | ArrayLike) -> TeacherRows:
        """Return (rows, 1280) float32 at the timesteps."""
        return at_flow_times(self.timed, indices, timesteps)["lune"]

    get_features = get


class SolFeatureCache(TimedCache):
    """Attention statistics, (rows, buckets, 4), and maps, (rows, buckets, 8, 8)."""

    layer: ClassVar[str] = "sol"

    @property
    def stats(self) -> Tensor | StoredColumn:
        return self._column("sol_stats")

    @property
    def spatial(self) -> Tensor | StoredColumn:
        return self._column("sol_spatial")

    def get(self, indices: Tensor | ArrayLike, timesteps: Tensor | ArrayLike) -> tuple[TeacherRows, TeacherRows]:
        """Return (rows, 4) and (rows, 8, 8) float32 at the timesteps."""
        found = at_flow_times(self.timed, indices, timesteps)
        return found["sol_stats"], found["sol_spatial"]

    get_features = get
