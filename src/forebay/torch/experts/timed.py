"""Lune and Sol as the document names them: a layer of a cache, read at any timestep."""

import os
from collections.abc import Sequence
from functools import cached_property
from itertools import count
from typing import ClassVar, Self

import torch
from numpy.typing import ArrayLike
from torch import Tensor

from forebay import api
from forebay.cache.reader import Cache, open_cache
from forebay.errors import RecipeMismatch
from forebay.torch.distill.rows import TeacherRows
from forebay.torch.experts.stored import StoredColumn
from forebay.torch.experts.zoo import ModelZoo
from forebay.torch.timed_features import TorchFeatures

Path = str | os.PathLike[str]


def at_flow_times(
    timed: TorchFeatures, indices: Tensor | ArrayLike, timesteps: Tensor | ArrayLike
) -> dict[str, TeacherRows]:
    """Features at the times of the document, where t = 0 is noise, whichever way the layer's own time runs."""
    return timed.at(indices, timesteps, None if timed.time_direction is None else "t0_noise")


class TimedCache:
    """A teacher's layer of a cache. `t_buckets` and the rest of the grid are named as in the document."""

    layer: ClassVar[str]

    def __init__(self, cache: Cache, device: torch.device | str = "cpu") -> None:
        self.cache = cache
        self.timed = TorchFeatures(cache, self.layer, device)

    @classmethod
    def build(cls, zoo: ModelZoo, prompts: Sequence[str], *, batch_timesteps: bool = False) -> Self:
        """Ask the teacher about every prompt. All timesteps in one batch take more memory, and less time."""
        for number in count():
            root = zoo.workplace.root(prompts, number)
            try:
                zoo.ask(root, cls.layer, batch_timesteps=batch_timesteps)
            except RecipeMismatch:
                continue  # asked with other settings before: these prompts get a further cache
            return cls(open_cache(root))
        raise AssertionError("there are always further caches")

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
        """Of an even grid; `get` reads uneven ones as well."""
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
        """(rows, 1280) float32 at the timesteps."""
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
        """(rows, 4) and (rows, 8, 8) float32 at the timesteps."""
        found = at_flow_times(self.timed, indices, timesteps)
        return found["sol_stats"], found["sol_spatial"]

    get_features = get
