"""The class names of the TinyFlux teacher-cache document, as thin aliases: its code runs on forebay caches.

document                              here
DatasetCache, .build .save .load      a cache folder of any name; `load` also reads the document's own `cache.pt`
EncodingCache                         its layers latents, t5, clip
LuneFeatureCache, SolFeatureCache     its layers lune, sol
MultiSourceCache                      caches by data set; rows are NaN where one lacks the teacher
ModelZoo                              teachers, and `fb.build_layers`
compute_lune_loss, compute_sol_loss   `forebay.torch.distill`; rows that are NaN do not count
"""

import os
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from functools import partialmethod
from itertools import count
from typing import ClassVar, Literal, Self

import numpy as np
import torch
from numpy.typing import ArrayLike, NDArray
from torch import Tensor

from forebay import api
from forebay.cache.reports import BuildReport
from forebay.compat.multi_source import MultiSourceCache, whole_rows
from forebay.compat.prompt_caches import Image, PromptCaches
from forebay.compat.pt_import import import_pt_cache, store_name, stored_name
from forebay.errors import RecipeMismatch
from forebay.order.coins import Coins
from forebay.read.cache import Cache
from forebay.read.opening import open_cache
from forebay.read.rows import Located, RowReader
from forebay.store import open_store
from forebay.store.memory import MemoryStore
from forebay.teachers.batched_forward import unload as unload_teacher
from forebay.teachers.built_in import T5, Clip, GeometricSol, Latents, Lune, Sol
from forebay.teachers.protocol import Teacher
from forebay.teachers.recipe import TeacherRecipe
from forebay.torch.batches import to_array, to_tensor
from forebay.torch.distill.flow import MIN_SNR_GAMMA, SHIFT
from forebay.torch.distill.losses import LossMode, Warmup, feature_loss, loss_weights
from forebay.torch.distill.timed_features import (
    Targets,
    TeacherDropout,
    TeacherRows,
    TorchFeatures,
    at_flow_times,
)

__all__ = [
    "DatasetCache", "EncodingCache", "LuneFeatureCache", "ModelZoo", "MultiSourceCache", "SolFeatureCache",
    "TrainerConfig", "compute_lune_loss", "compute_sol_loss",
]  # fmt: skip
Path = str | os.PathLike[str]
Numbers = Tensor | ArrayLike
_MODELS = {"latents": "vae", "t5": "t5", "clip": "clip", "lune": "lune", "sol": "sol"}  # layer -> model of a zoo


@dataclass(frozen=True, kw_only=True)
class ModelZoo:
    """Teachers by the names that the document's training code uses, and a folder for the caches built with them.

        zoo = ModelZoo(folder="caches", vae=Latents(vae="sd/vae"), t5=T5(model="t5"), clip=Clip(model="clip"),
                       lune=Lune(unet="sd/unet", weights="sd15-flow-lune-unet.safetensors"))

    `load_…` checks that the files of a model exist, and hashes them. A model is loaded when its layer is built, so that
    only one is in memory at a time.
    """

    folder: Path
    vae: Latents | None = None
    t5: T5 | None = None
    clip: Clip | None = None
    lune: Lune | None = None
    sol: Sol | GeometricSol = field(default_factory=GeometricSol)
    device: str = "auto"
    dtype: Literal["float32", "float16", "bfloat16"] = "float32"
    batch_size: int = 8
    chunk_rows: int = 512  # prompts of a chunk, of caches without images: what a build holds in memory, or loses

    @property
    def prompt_caches(self) -> PromptCaches:
        return PromptCaches(os.fspath(self.folder), self.chunk_rows)

    @property
    def encodings(self) -> tuple[str, ...]:
        """The encoding layers that the zoo has a model for."""
        return tuple(layer for layer in EncodingCache.layers if getattr(self, _MODELS[layer]) is not None)

    def files(self, layer: str) -> Mapping[str, str]:
        return self.teacher(layer).files()

    load_vae = partialmethod(files, "latents")
    load_t5 = partialmethod(files, "t5")
    load_clip = partialmethod(files, "clip")
    load_lune = partialmethod(files, "lune")
    load_sol = partialmethod(files, "sol")

    def unload(self, name: str = "") -> None:
        """Release the loaded model, if any; building a layer already releases its own."""
        unload_teacher()

    offload = unload

    def teacher(self, layer: str) -> Teacher:
        teacher: Teacher | None = getattr(self, _MODELS[layer])
        if teacher is None:
            raise ValueError(f"this zoo has no '{_MODELS[layer]}'; pass ModelZoo({_MODELS[layer]}=…)")
        return teacher

    def build_layers(self, root: str, *layers: str, batch_timesteps: bool = False) -> list[BuildReport]:
        """Build layers of a cache, one model after the other; a UNet needs the states of CLIP first."""
        needed = [("clip", layer) if isinstance(self.teacher(layer), Lune | Sol) else (layer,) for layer in layers]
        recipes = {}
        for layer in dict.fromkeys(name for names in needed for name in names):
            teacher = self.teacher(layer)
            recipes[layer] = TeacherRecipe(
                teacher=teacher,
                batch_size=self.batch_size,
                batch_timesteps=batch_timesteps and teacher.timed,
                dtype=self.dtype,
                device=self.device,
                **self.prompt_caches.prompts_of(root),
            )
        return api.build_layers(root, recipes)


class StoredColumn:
    """A column that is read on indexing: `column[rows]`, or `column[rows, buckets]`. Absent rows are NaN."""

    def __init__(self, cache: Cache, layer: str, name: str) -> None:
        self._cache, self._layer, self._name = cache, layer, name

    @property
    def shape(self) -> torch.Size:
        return torch.Size((len(self._cache), *self._read(np.empty(0, np.int64)).shape[1:]))

    @property
    def dtype(self) -> torch.dtype:
        return self[:1].dtype

    def __getitem__(self, index: Numbers | slice | tuple[Numbers, Numbers]) -> Tensor:
        rows, buckets = index if isinstance(index, tuple) else (index, None)
        numbers = np.arange(len(self._cache))[rows if isinstance(rows, slice) else to_array(rows)]
        values = self._read(np.atleast_1d(numbers))
        if buckets is not None:
            values = values[torch.arange(len(values)), torch.as_tensor(buckets)]
        return values if np.ndim(numbers) else values[0]

    def _read(self, rows: NDArray[np.int64]) -> Tensor:
        reader = RowReader([self._cache], [whole_rows(self._cache, self._name)])
        return to_tensor(reader.read(Located(rows), Coins(0, 0, np.zeros(len(rows), np.uint64)))[self._name])


class _Part:
    """Some layers of a cache."""

    layers: ClassVar[tuple[str, ...]]

    def __init__(self, cache: Cache) -> None:
        self.cache = cache

    @classmethod
    def of(cls, cache: Cache) -> Self | None:
        """Return this part of a cache; None if it has none of the layers."""
        return cls(cache) if any(layer in cache.generation.recipes for layer in cls.layers) else None

    def __len__(self) -> int:
        return len(self.cache)


class _TimedPart(_Part):
    """A teacher layer. The attributes of its grid have the document's names."""

    def __init__(self, cache: Cache) -> None:
        super().__init__(cache)
        self.timed = TorchFeatures(cache, self.layers[0])
        self.t_buckets = self.timed.buckets.float()
        self.t_min, self.t_max = (float(self.timed.buckets[end]) for end in (0, -1))
        self.n_buckets = len(self.t_buckets)
        self.t_step = (self.t_max - self.t_min) / max(1, self.n_buckets - 1)  # of an even grid; others are read as well

    @classmethod
    def build(cls, zoo: ModelZoo, prompts: Sequence[str], *, batch_timesteps: bool = False) -> Self:
        """Run the teacher on every prompt. `batch_timesteps` takes more memory and less time."""
        for number in count():
            root = zoo.prompt_caches.root(prompts, number)
            try:
                zoo.build_layers(root, cls.layers[0], batch_timesteps=batch_timesteps)
            except RecipeMismatch:
                continue  # built with other settings before: these prompts get another cache
            return cls(open_cache(root))
        raise AssertionError("unreachable: count() is infinite")

    def _column(self, name: str) -> Tensor | StoredColumn:
        if name in self.cache.columns:
            return StoredColumn(self.cache, self.layers[0], name)
        constant = torch.tensor(self.cache.constants(self.layers[0])[name])
        return constant.expand(len(self.cache), *constant.shape)  # one copy for any number of rows


class LuneFeatureCache(_TimedPart):
    """Mid-block features: `features` is (rows, buckets, 1280)."""

    layers: ClassVar[tuple[str, ...]] = ("lune",)

    @property
    def features(self) -> Tensor | StoredColumn:
        return self._column("lune")

    def get(self, indices: Numbers, timesteps: Numbers) -> Tensor:
        """Return (rows, 1280) float32 at the timesteps; absent rows are NaN."""
        return at_flow_times(self.timed, indices, timesteps)["lune"].values

    get_features = get


class SolFeatureCache(_TimedPart):
    """Attention: `stats` are (rows, buckets, 4), `spatial` are maps, (rows, buckets, 8, 8)."""

    layers: ClassVar[tuple[str, ...]] = ("sol",)

    @property
    def stats(self) -> Tensor | StoredColumn:
        return self._column("sol_stats")

    @property
    def spatial(self) -> Tensor | StoredColumn:
        return self._column("sol_spatial")

    def get(self, indices: Numbers, timesteps: Numbers) -> tuple[Tensor, Tensor]:
        """Return (rows, 4) and (rows, 8, 8) float32 at the timesteps; absent rows are NaN."""
        columns = at_flow_times(self.timed, indices, timesteps)
        return columns["sol_stats"].values, columns["sol_spatial"].values

    get_features = get


class EncodingCache(_Part):
    """The layers `latents`, `t5` and `clip` of a cache, as far as it has them."""

    layers: ClassVar[tuple[str, ...]] = ("latents", "t5", "clip")
    # The document's names -> layers and columns; the mask of T5's tokens is an addition.
    names: ClassVar[dict[str, tuple[str, str]]] = {
        "latents": ("latents", "latents"), "t5_embeds": ("t5", "t5_states"), "t5_mask": ("t5", "t5_mask"),
        "clip_pooled": ("clip", "clip_pooled"),
    }  # fmt: skip

    @classmethod
    def build(cls, zoo: ModelZoo, images: Sequence[Image], prompts: Sequence[str]) -> Self:
        """Encode letterboxed images (paths or Pillow images) and prompts, with the models that the zoo has."""
        root = zoo.prompt_caches.root_of_images(images, prompts, 512 if zoo.vae is None else zoo.vae.size)
        zoo.build_layers(root, *zoo.encodings)
        return cls(open_cache(root))

    def __getattr__(self, name: str) -> StoredColumn:
        if name not in self.names:
            raise AttributeError(f"an EncodingCache has {', '.join(self.names)} (got {name!r})")
        return StoredColumn(self.cache, *self.names[name])

    def get(self, indices: Numbers) -> dict[str, Tensor]:
        """Return the encodings of some rows that the cache has, by the document's names."""
        columns = {name: home for name, home in self.names.items() if home[1] in self.cache.columns}
        return {name: StoredColumn(self.cache, *home)[indices] for name, home in columns.items()}


class DatasetCache:
    """The encodings and teacher features of a data set; `lune` and `sol` are None without that teacher."""

    def __init__(
        self, encodings: EncodingCache | None, lune: LuneFeatureCache | None = None, sol: SolFeatureCache | None = None,
        *, name: str = "",
    ) -> None:  # fmt: skip
        caches = [part.cache for part in (encodings, lune, sol) if part is not None]
        if not caches:
            raise ValueError("a DatasetCache needs encodings, Lune or Sol")
        roots = {cache.root for cache in caches}
        if len(roots) > 1:
            raise ValueError(
                f"these are parts of different caches: {', '.join(sorted(roots))}; build all parts from the same "
                "prompts, with the same ModelZoo and settings"
            )
        # The part that was built last pins the generation with all of them.
        self.cache = max(caches, key=lambda cache: cache.generation.number)
        self.encodings = None if encodings is None else EncodingCache(self.cache)
        self.lune = None if lune is None else LuneFeatureCache(self.cache)
        self.sol = None if sol is None else SolFeatureCache(self.cache)
        self.name = name or stored_name(self.cache.store) or os.path.basename(os.path.normpath(self.cache.root))

    @classmethod
    def build(
        cls, zoo: ModelZoo, images: Sequence[Image], prompts: Sequence[str], *, name: str = "",
        batch_timesteps: bool = False,
    ) -> "DatasetCache":  # fmt: skip
        """Build everything that the zoo has a model for, one model at a time."""
        root = EncodingCache.build(zoo, images, prompts).cache.root
        zoo.build_layers(root, *(() if zoo.lune is None else ("lune",)), "sol", batch_timesteps=batch_timesteps)
        if name:
            store_name(open_store(root), name)
        return cls.load(root, name=name)

    @classmethod
    def load(cls, path: Path, *, name: str = "") -> "DatasetCache":
        """Open a cache, or the document's own `cache.pt`, which is held in memory: `forebay import` copies it once."""
        cache = _opened(path)
        return cls(EncodingCache.of(cache), LuneFeatureCache.of(cache), SolFeatureCache.of(cache), name=name)

    def save(self, path: Path) -> None:
        """Copy the cache to a folder of this name, every chunk checked on the way, with the data set's name."""
        api.copy(self.cache.store, path)
        store_name(open_store(path), self.name)

    def __len__(self) -> int:
        return len(self.cache)

    def get(self, indices: Numbers) -> dict[str, Tensor]:
        """Return the encodings of some rows."""
        return {} if self.encodings is None else self.encodings.get(indices)


def _opened(path: Path) -> Cache:
    """Open a cache; a `cache.pt` is imported into memory."""
    if not os.path.isfile(path):
        return open_cache(path)
    store = MemoryStore(os.fspath(path))
    import_pt_cache(path, store)
    return open_cache(store)


@dataclass(frozen=True, slots=True, kw_only=True)
class TrainerConfig:
    """Weights, warm-ups and dropout of both teachers.

    >>> config = TrainerConfig(use_spatial_weighting=True)
    >>> config.lune(500), config.sol(500)
    (0.05, 0.0125)
    """

    lune_weight: float = 0.1
    lune_warmup_steps: int = 1000
    lune_dropout: float = 0.1
    lune_loss_mode: LossMode = "cosine"
    sol_weight: float = 0.05
    sol_warmup_steps: int = 2000
    sol_dropout: float = 0.1
    use_spatial_weighting: bool = False
    min_snr_gamma: float = MIN_SNR_GAMMA
    shift: float = SHIFT
    seed: int = 0

    def lune(self, step: int) -> float:
        """Return the weight of Lune's loss at a step."""
        return Warmup(self.lune_weight, self.lune_warmup_steps)(step)

    def sol(self, step: int) -> float:
        """Return the weight of Sol's loss at a step."""
        return Warmup(self.sol_weight, self.sol_warmup_steps)(step)

    def loss_weights(
        self, spatial: Targets | None, content: Tensor | None = None, size: tuple[int, int] = (64, 64)
    ) -> Tensor | None:
        """Return loss weights per position: 0 in padding, and Sol's maps with `use_spatial_weighting`."""
        return loss_weights(spatial if self.use_spatial_weighting else None, content, size)

    def dropout(self, teacher: Literal["lune", "sol"]) -> TeacherDropout:
        return TeacherDropout({"lune": self.lune_dropout, "sol": self.sol_dropout}[teacher], self.seed)


def compute_lune_loss(predicted: Tensor, features: Targets, mode: LossMode = "cosine") -> Tensor:
    """Return the loss against Lune, over its present rows."""
    rows = TeacherRows.of(features)
    return feature_loss(predicted, rows.values, mode, present=rows.present)


def compute_sol_loss(stats_predicted: Tensor, spatial_predicted: Tensor, stats: Targets, spatial: Targets) -> Tensor:
    """Return the MSE of the statistics plus the MSE of the maps, each over its present rows."""
    return compute_lune_loss(stats_predicted, stats, "mse") + compute_lune_loss(spatial_predicted, spatial, "mse")
