"""The class names of the TinyFlux teacher-cache document, as thin aliases: its training code runs on forebay caches.

document                              here
DatasetCache, .load .save             a cache folder of any name; `load` also reads the document's own `cache.pt`
EncodingCache                         its layers latents, t5, clip
LuneFeatureCache, SolFeatureCache     its layers lune, sol
MultiSourceCache                      caches by data set; rows are NaN where one lacks the teacher
compute_lune_loss, compute_sol_loss   `forebay.torch.distill`; rows that are NaN do not count

`examples/tinyflux_build.py` has its ModelZoo and the `build` methods, on top of `fb.build_layers`.
"""

import os
from typing import ClassVar, Self

import numpy as np
import torch
from torch import Tensor

from forebay import api
from forebay.compat.multi_source import MultiSourceCache
from forebay.compat.pt_import import import_pt_cache, read_parts
from forebay.order.coins import Coins
from forebay.read.cache import Cache
from forebay.read.opening import open_cache
from forebay.read.rows import Located, RowReader
from forebay.read.views import Padded, View
from forebay.store.memory import MemoryStore
from forebay.teachers.feature_reader import Features
from forebay.teachers.protocol import TimeDirection
from forebay.torch.batches import to_array, to_tensor
from forebay.torch.distill.losses import feature_loss as compute_lune_loss
from forebay.torch.distill.losses import sol_loss as compute_sol_loss
from forebay.torch.distill.teacher_rows import Numbers

__all__ = [
    "DatasetCache", "EncodingCache", "LuneFeatureCache", "MultiSourceCache", "SolFeatureCache",
    "compute_lune_loss", "compute_sol_loss",
]  # fmt: skip
Path = str | os.PathLike[str]


class StoredColumn:
    """A column that is read on indexing: `column[rows]`, or `column[rows, buckets]`. Absent rows are NaN."""

    def __init__(self, cache: Cache, name: str) -> None:
        self._cache = cache
        self._reader = RowReader([cache], [_whole_rows(cache, name)])
        empty = to_tensor(np.asarray(self._reader.like[name]))
        self.shape, self.dtype = torch.Size((len(cache), *empty.shape[1:])), empty.dtype
        self._name = name

    def __getitem__(self, index: Numbers | slice | tuple[Numbers, Numbers]) -> Tensor:
        rows, buckets = index if isinstance(index, tuple) else (index, None)
        numbers = np.arange(len(self._cache))[rows if isinstance(rows, slice) else to_array(rows)]
        located = Located(np.atleast_1d(numbers))
        coins = Coins(0, 0, np.zeros(len(located.rows), np.uint64))
        values = to_tensor(self._reader.read(located, coins)[self._name])
        if buckets is not None:
            values = values[torch.arange(len(values)), torch.as_tensor(buckets)]
        return values if np.ndim(numbers) else values[0]


def _whole_rows(cache: Cache, column: str) -> str | View:
    """Return how a column is read as one tensor: states of real tokens are padded to their teacher's length."""
    teacher = cache.recipe(cache.layer_of(column)).fields.get("teacher")
    if cache.column(column).ragged and isinstance(teacher, dict) and "max_length" in teacher:
        return Padded(column, int(teacher["max_length"]))
    return column


class _Part:
    """Some layers of a cache, read under the document's names."""

    layers: ClassVar[tuple[str, ...]]
    columns: ClassVar[dict[str, str]]  # the document's name -> the column

    def __init__(self, cache: Cache) -> None:
        self.cache = cache

    @classmethod
    def of(cls, cache: Cache) -> Self | None:
        """Return this part of a cache; None if it has none of the layers."""
        return cls(cache) if any(layer in cache.generation.recipes for layer in cls.layers) else None

    def __len__(self) -> int:
        return len(self.cache)

    def __getattr__(self, name: str) -> Tensor | StoredColumn:
        if name not in self.columns:
            raise AttributeError(f"this {type(self).__name__} has {', '.join(self.columns)} (got {name!r})")
        column = self.columns[name]
        if column in self.cache.columns:
            return StoredColumn(self.cache, column)
        constant = torch.tensor(self.cache.constants(self.layers[0])[column])
        return constant.expand(len(self.cache), *constant.shape)  # one copy for any number of rows


class EncodingCache(_Part):
    """The layers `latents`, `t5` and `clip` of a cache. The mask of T5's tokens is an addition to the document."""

    layers: ClassVar[tuple[str, ...]] = ("latents", "t5", "clip")
    columns: ClassVar[dict[str, str]] = {
        "latents": "latents", "t5_embeds": "t5_states", "t5_mask": "t5_mask", "clip_pooled": "clip_pooled",
    }  # fmt: skip


class _TimedPart(_Part):
    """A teacher layer. The attributes of its grid have the document's names."""

    def __init__(self, cache: Cache) -> None:
        super().__init__(cache)
        self._features = Features(cache, self.layers[0])
        self.t_buckets = torch.tensor(self._features.buckets).float()
        self.t_min, self.t_max = (float(self._features.buckets[end]) for end in (0, -1))
        self.n_buckets = len(self.t_buckets)
        self.t_step = (self.t_max - self.t_min) / max(1, self.n_buckets - 1)  # for an even grid

    def _at(self, indices: Numbers, timesteps: Numbers) -> list[Tensor]:
        """Return the columns at a t whose 0 is noise, whichever way the layer's own time runs."""
        direction: TimeDirection | None = None if self._features.time_direction is None else "t0_noise"
        columns = self._features.at(to_array(indices), to_array(timesteps), direction)
        return [to_tensor(columns[name]) for name in self.columns.values()]


class LuneFeatureCache(_TimedPart):
    """Mid-block features: `features` is (rows, buckets, 1280)."""

    layers: ClassVar[tuple[str, ...]] = ("lune",)
    columns: ClassVar[dict[str, str]] = {"features": "lune"}

    def get(self, indices: Numbers, timesteps: Numbers) -> Tensor:
        """Return (rows, 1280) float32 at the timesteps; absent rows are NaN."""
        return self._at(indices, timesteps)[0]

    get_features = get


class SolFeatureCache(_TimedPart):
    """Attention: `stats` are (rows, buckets, 4), `spatial` are maps, (rows, buckets, 8, 8)."""

    layers: ClassVar[tuple[str, ...]] = ("sol",)
    columns: ClassVar[dict[str, str]] = {"stats": "sol_stats", "spatial": "sol_spatial"}

    def get(self, indices: Numbers, timesteps: Numbers) -> tuple[Tensor, Tensor]:
        """Return (rows, 4) and (rows, 8, 8) float32 at the timesteps; absent rows are NaN."""
        stats, spatial = self._at(indices, timesteps)
        return stats, spatial

    get_features = get


class DatasetCache:
    """The encodings and teacher features of a data set; `lune` and `sol` are None without that teacher."""

    def __init__(
        self, encodings: EncodingCache | None, lune: LuneFeatureCache | None = None, sol: SolFeatureCache | None = None,
        *, name: str = "",
    ) -> None:  # fmt: skip
        caches = [part.cache for part in (encodings, lune, sol) if part is not None]
        roots = sorted({cache.root for cache in caches})
        if len(roots) != 1:
            parts = f"parts of different caches: {', '.join(roots)}" if roots else "no parts"
            raise ValueError(f"a DatasetCache takes encodings, Lune and Sol of one cache (got {parts})")
        # The part that was built last pins the generation with all of them.
        self.cache = max(caches, key=lambda cache: cache.generation.number)
        self.encodings = None if encodings is None else EncodingCache(self.cache)
        self.lune = None if lune is None else LuneFeatureCache(self.cache)
        self.sol = None if sol is None else SolFeatureCache(self.cache)
        self.name = name or os.path.basename(os.path.normpath(self.cache.root))

    @classmethod
    def load(cls, path: Path, *, name: str = "") -> "DatasetCache":
        """Open a cache, or the document's own `cache.pt`, which is held in memory: `forebay import` copies it once."""
        if not os.path.isfile(path):
            cache = open_cache(path)
        else:
            store = MemoryStore(os.fspath(path))
            import_pt_cache(path, store)
            cache, name = open_cache(store), name or read_parts(os.fspath(path))[0]
        return cls(EncodingCache.of(cache), LuneFeatureCache.of(cache), SolFeatureCache.of(cache), name=name)

    def save(self, path: Path) -> None:
        """Copy the cache to a folder of this name, every chunk checked on the way."""
        api.copy(self.cache.store, path)

    def __len__(self) -> int:
        return len(self.cache)
