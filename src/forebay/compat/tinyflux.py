"""The class names of the TinyFlux teacher-cache document, as thin aliases: its examples run on forebay caches.

document                              here
DatasetCache, .build .save .load      a cache folder, with any name
EncodingCache                         its layers latents, t5, clip
LuneFeatureCache, SolFeatureCache     its layers lune, sol, through `forebay.torch.features`
MultiSourceCache                      caches by data set; rows are absent where one lacks the teacher
ModelZoo                              teachers, and `fb.build_layers`
compute_lune_loss, compute_sol_loss   `forebay.torch.distill`

`PromptCaches` builds caches from lists of prompts and images, with the models of a `ModelZoo`:

<folder>/3f2a…/            the cache: a row per prompt, with its image if there is one
<folder>/3f2a….samples/    the samples as files that can be read again: images with their prompts, or prompts only
"""

import hashlib
import io
import json
import os
import re
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from functools import cached_property
from itertools import count
from typing import Any, BinaryIO, ClassVar, Literal, Protocol, Self

import numpy as np
import torch
from numpy.typing import ArrayLike
from torch import Tensor

from forebay import api
from forebay.cache.catalog import newest_generation, read_cache_document
from forebay.cache.records import BuildReport
from forebay.columns import Array, Columns, Ragged
from forebay.compat.pt_import import PARTS, store_name, stored_name
from forebay.errors import ColumnNotFound, OldCacheInvalid, RecipeMismatch
from forebay.format import layout
from forebay.images import ImageRecipe
from forebay.raw import RawRecipe
from forebay.read.cache import Cache, open_cache
from forebay.sources import images as image_files
from forebay.sources import lines
from forebay.sources.image_files import ENDINGS
from forebay.store import open_store
from forebay.store.base import holds
from forebay.teachers.batched_forward import SharedColumn
from forebay.teachers.batched_forward import unload as unload_teacher
from forebay.teachers.built_in import T5, Clip, GeometricSol, Latents, Lune, Sol
from forebay.teachers.protocol import Teacher
from forebay.teachers.recipe import TeacherRecipe
from forebay.teachers.teacher_samples import SHARED_ROW_SUFFIX
from forebay.torch.batches import to_array, to_tensor
from forebay.torch.distill.flow import MIN_SNR_GAMMA, SHIFT
from forebay.torch.distill.losses import LossMode, Warmup, feature_loss, loss_weights
from forebay.torch.distill.timed_features import (
    MultiSourceCache,
    TeacherDropout,
    TeacherRows,
    TorchFeatures,
    at_flow_times,
)

__all__ = [
    "DatasetCache", "EncodingCache", "LuneFeatureCache", "ModelZoo", "MultiSourceCache", "SolFeatureCache",
    "TrainerConfig", "compute_lune_loss", "compute_sol_loss",
]  # fmt: skip
KEY = "caption"
_PROMPTS = "prompts.jsonl"
_PNG_MODES = ("1", "L", "LA", "I", "I;16", "P", "RGB", "RGBA")


class Savable(Protocol):
    """A Pillow image."""

    mode: str

    def getexif(self) -> Any: ...

    def save(self, file: BinaryIO, format: str, *, exif: Any) -> None: ...


Image = str | os.PathLike[str] | Savable


@dataclass(frozen=True, slots=True)
class PromptCaches:
    folder: str
    chunk_rows: int = 512

    def root(self, prompts: Sequence[str], number: int = 0) -> str:
        """Return the cache of some prompts, made now if it is new; `number` above 0 is another cache of them."""
        root = self._place(_checked(prompts)) + (f"-{number + 1}" if number else "")
        if newest_generation(open_store(root)) is None:
            os.makedirs(_samples(root), exist_ok=True)
            manifest = os.path.join(_samples(root), _PROMPTS)
            _write(manifest, "".join(json.dumps({KEY: prompt}) + "\n" for prompt in prompts).encode())
            api.build(root, lines(manifest), RawRecipe(chunk_rows=self.chunk_rows), workers=0)
        return root

    def root_of_images(self, images: Sequence[Image], prompts: Sequence[str], size: int) -> str:
        """Return the cache of some images with their prompts."""
        if len(images) != len(prompts):
            raise ValueError(f"pass one prompt per image (got {len(images)} images and {len(prompts)} prompts)")
        root = self._place(_checked(prompts))
        self._keep(root, images, prompts)
        api.build(root, image_files(_samples(root)), ImageRecipe(size=size, tags=()), workers=0, max_failures=0)
        return root

    def _keep(self, root: str, images: Sequence[Image], prompts: Sequence[str]) -> None:
        """Write images with their prompts beside a new cache; raise if they differ from those of an existing one."""
        os.makedirs(_samples(root), exist_ok=True)
        there = set(os.listdir(_samples(root)))
        is_begun = bool(there) and holds(open_store(root), layout.CACHE)
        for number, (image, prompt) in enumerate(zip(images, prompts, strict=True)):
            content, suffix = _content(image)
            facts = {KEY: prompt, **({"name": _name(image)} if _name(image) else {})}
            named = {f"{number:08d}{suffix}": content, f"{number:08d}.json": json.dumps(facts).encode()}
            for name, value in named.items():
                path = os.path.join(_samples(root), name)
                if is_begun and (name not in there or not _is_same(name, _read(path), value)):
                    raise ValueError(
                        f"image {number} is not the one that '{root}' was begun with; encode images before other "
                        "parts, and use a ModelZoo with a separate folder for each data set"
                    )
                if not is_begun:
                    _write(path, value)
            there -= named.keys()
        for name in filter(_OURS.fullmatch, there):  # left by an earlier list that never became a cache
            os.remove(os.path.join(_samples(root), name))

    def prompts_of(self, root: str) -> dict[str, Any]:
        """Return the recipe fields for the place of a cache's prompts."""
        base = read_cache_document(open_store(root)).base
        return {"prompt_column": "metadata" if base == ImageRecipe.kind else "data", "prompt_key": KEY}

    def _place(self, prompts: Sequence[str]) -> str:
        digest = hashlib.sha256(json.dumps(list(prompts)).encode()).hexdigest()[:16]
        return os.path.join(self.folder, digest)


def _checked(prompts: Sequence[str]) -> Sequence[str]:
    if isinstance(prompts, str) or not prompts:
        raise ValueError(f"prompts must be a list of one or more strings (got {prompts!r})")
    return prompts


def _samples(root: str) -> str:
    return f"{root}.samples"


def _write(path: str, content: bytes) -> None:
    """Write a file, never through a link, unless it has this content: rewriting would change its modification time."""
    if not os.path.islink(path) and os.path.exists(path) and _read(path) == content:
        return
    aside = f"{path}.{os.getpid()}.aside"
    with open(aside, "xb") as file:
        file.write(content)
    os.replace(aside, path)


def _content(image: Image) -> tuple[bytes, str]:
    if isinstance(image, str | os.PathLike):
        suffix = os.path.splitext(image)[1]
        if suffix.lower() not in ENDINGS:
            raise ValueError(f"'{os.fspath(image)}' must end in one of {', '.join(ENDINGS)}")
        return _read(image), suffix
    kind = "PNG" if image.mode in _PNG_MODES else "TIFF"  # either keeps pixels, mode and orientation
    buffer = io.BytesIO()
    try:
        image.save(buffer, format=kind, exif=image.getexif())
    except OSError as error:
        raise ValueError(f"an image of mode '{image.mode}' cannot be kept; convert it to RGB first") from error
    return buffer.getvalue(), f".{kind.lower()}"


def _name(image: Image) -> str:
    """Return the file name of an image; empty for a Pillow image that is not from a file."""
    path = image if isinstance(image, str | os.PathLike) else getattr(image, "filename", "")
    return os.path.basename(path)


def _is_same(name: str, stored: bytes, value: bytes) -> bool:
    """Return whether a file has some content; of prompts only the caption counts, earlier ones have no name."""
    if stored == value or not name.endswith(".json"):
        return stored == value
    try:
        return bool(json.loads(stored).get(KEY) == json.loads(value)[KEY])
    except (ValueError, AttributeError):
        return False


def _read(path: str | os.PathLike[str]) -> bytes:
    with open(path, "rb") as file:
        return file.read()


_OURS = re.compile(r"\d{8}\.[A-Za-z]+")  # the names of images and their prompts
ENCODINGS = ("latents", "t5", "clip")


@dataclass(frozen=True, kw_only=True)
class ModelZoo:
    """Teachers by the names that the old training code uses, and a folder for the caches built with them.

        zoo = ModelZoo(folder="caches", vae=Latents(vae="sd/vae"), t5=T5(model="t5"), clip=Clip(model="clip"),
                       lune=Lune(unet="sd/unet", weights="sd15-flow-lune-unet.safetensors"))

    `load_…` checks that the files of a model exist, and hashes them. The model itself is loaded when its layer is made,
    so that only one model is in memory at a time, whatever the order of calls.
    """

    folder: str | os.PathLike[str]
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
        models = dict(zip(ENCODINGS, (self.vae, self.t5, self.clip), strict=True))
        return tuple(layer for layer, model in models.items() if model is not None)

    def load_vae(self) -> Mapping[str, str]:
        return self.teacher("latents").files()

    def load_t5(self) -> Mapping[str, str]:
        return self.teacher("t5").files()

    def load_clip(self) -> Mapping[str, str]:
        return self.teacher("clip").files()

    def load_lune(self) -> Mapping[str, str]:
        return self.teacher("lune").files()

    def load_sol(self) -> Mapping[str, str]:
        return self.teacher("sol").files()

    def unload(self, name: str) -> None:
        """Release the loaded model, if any; building a layer already releases its own."""
        self.teacher("latents" if name == "vae" else name)
        unload_teacher()

    def offload(self) -> None:
        """Release the loaded model, if any."""
        unload_teacher()

    def teacher(self, layer: str) -> Teacher:
        known: dict[str, Teacher | None] = {
            "latents": self.vae, "t5": self.t5, "clip": self.clip, "lune": self.lune, "sol": self.sol,
        }  # fmt: skip
        if layer not in known:
            raise ValueError(f"the model must be one of vae, t5, clip, lune, sol (got {layer!r})")
        found = known[layer]
        if found is None:
            argument = "vae" if layer == "latents" else layer
            raise ValueError(f"this zoo has no '{argument}'; make it with ModelZoo({argument}=…)")
        return found

    def build_layers(self, root: str, *layers: str, batch_timesteps: bool = False) -> list[BuildReport]:
        """Make layers of a cache, one model after the other; chunks that already exist are skipped."""
        recipes = {}
        for layer in dict.fromkeys(needed for wanted in layers for needed in (*self._before(wanted), wanted)):
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

    def _before(self, layer: str) -> tuple[str, ...]:
        """Return the layers that a layer needs first: a UNet reads CLIP's states."""
        return ("clip",) if isinstance(self.teacher(layer), Lune | Sol) else ()


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
        """Copy the whole cache, with all of its layers, to a folder of this name."""
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


class EncodingCache:
    """The layers `latents`, `t5` and `clip` of a cache, as far as it has them."""

    # The document's names -> columns; the mask of T5's tokens is an addition.
    names: ClassVar[dict[str, str]] = {
        "latents": "latents", "t5_embeds": "t5_states", "t5_mask": "t5_mask", "clip_pooled": "clip_pooled",
    }  # fmt: skip

    def __init__(self, cache: Cache) -> None:
        self.cache = cache

    @classmethod
    def build(cls, zoo: ModelZoo, images: Sequence[Image], prompts: Sequence[str]) -> "EncodingCache":
        """Encode letterboxed images (paths or Pillow images) and prompts, with the models that the zoo has."""
        size = 512 if zoo.vae is None else zoo.vae.size
        root = zoo.prompt_caches.root_of_images(images, prompts, size)
        zoo.build_layers(root, *zoo.encodings)
        return cls(open_cache(root))

    @classmethod
    def load(cls, path: Path) -> "EncodingCache":
        return cls(open_cache(path))

    def save(self, path: Path) -> None:
        """Copy the whole cache, with all of its layers, to a folder of this name."""
        api.copy(self.cache.root, path)

    def __len__(self) -> int:
        return len(self.cache)

    @property
    def latents(self) -> StoredColumn:
        return self._column("latents")

    @property
    def t5_embeds(self) -> StoredColumn:
        return self._column("t5_embeds")

    @property
    def clip_pooled(self) -> StoredColumn:
        return self._column("clip_pooled")

    def get(self, indices: Tensor | ArrayLike) -> dict[str, Tensor]:
        """Return the encodings of some rows that the cache has, by the document's names."""
        return {
            name: StoredColumn(self.cache, column).read(indices)
            for name, column in self.names.items()
            if column in self.cache.columns
        }

    def _column(self, name: str) -> StoredColumn:
        if self.names[name] not in self.cache.columns:
            raise ColumnNotFound(self.cache.root, self.names[name], self.cache.columns)
        return StoredColumn(self.cache, self.names[name])


Part = EncodingCache | LuneFeatureCache | SolFeatureCache


class DatasetCache:
    """The encodings and teacher features of a data set; `lune` and `sol` are None without that teacher."""

    def __init__(
        self,
        encodings: EncodingCache | None,
        lune: LuneFeatureCache | None = None,
        sol: SolFeatureCache | None = None,
        *,
        name: str = "",
    ) -> None:
        parts: list[Part] = [part for part in (encodings, lune, sol) if part is not None]
        if not parts:
            raise ValueError("a DatasetCache needs encodings, Lune or Sol")
        roots = {part.cache.root for part in parts}
        if len(roots) > 1:
            raise ValueError(
                f"these are parts of different caches: {', '.join(sorted(roots))}; build all parts from the same "
                "prompts, with the same ModelZoo and settings"
            )
        # The part that was built last pins the generation with all of them.
        newest = max((part.cache for part in parts), key=lambda cache: cache.generation.number)
        self.cache: Cache = newest
        self.encodings = None if encodings is None else EncodingCache(newest)
        self.lune = None if lune is None else LuneFeatureCache(newest)
        self.sol = None if sol is None else SolFeatureCache(newest)
        self.name = name or stored_name(newest.store) or os.path.basename(os.path.normpath(newest.root))

    @classmethod
    def build(
        cls,
        zoo: ModelZoo,
        images: Sequence[Image],
        prompts: Sequence[str],
        *,
        name: str = "",
        batch_timesteps: bool = False,
    ) -> "DatasetCache":
        """Build everything that the zoo has a model for, one model at a time."""
        size = 512 if zoo.vae is None else zoo.vae.size
        root = zoo.prompt_caches.root_of_images(images, prompts, size)
        zoo.build_layers(root, *zoo.encodings)
        zoo.build_layers(root, *(() if zoo.lune is None else ("lune",)), "sol", batch_timesteps=batch_timesteps)
        if name:
            store_name(open_store(root), name)
        return cls.of(open_cache(root), name)

    @classmethod
    def load(cls, path: Path) -> "DatasetCache":
        """Open a cache that `save`, `build` or the command line made."""
        if os.path.isfile(path) or any(os.path.exists(os.path.join(path, f"{part}.pt")) for part in PARTS):
            raise OldCacheInvalid(
                os.fspath(path), "it has the old format; import it with `forebay import OLD --into CACHE`"
            )
        return cls.of(open_cache(path))

    @classmethod
    def of(cls, cache: Cache, name: str = "") -> "DatasetCache":
        """Return the data set of a cache, with the parts that it has."""
        layers = cache.generation.recipes
        encodings = EncodingCache(cache) if any(layer in layers for layer in ENCODINGS) else None
        lune = LuneFeatureCache(cache) if "lune" in layers else None
        sol = SolFeatureCache(cache) if "sol" in layers else None
        return cls(encodings, lune, sol, name=name)

    def save(self, path: Path) -> None:
        """Copy the cache to a folder of this name, every chunk checked on the way, with the data set's name."""
        api.copy(self.cache.root, path)
        store_name(open_store(path), self.name)

    def __len__(self) -> int:
        return len(self.cache)

    def get(self, indices: Tensor | ArrayLike) -> dict[str, Tensor]:
        """Return the encodings of some rows."""
        return {} if self.encodings is None else self.encodings.get(indices)


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
        self, spatial: TeacherRows | None, content: Tensor | None = None, size: tuple[int, int] = (64, 64)
    ) -> Tensor | None:
        """Return loss weights per position: 0 in padding, and Sol's maps with `use_spatial_weighting`."""
        return loss_weights(spatial if self.use_spatial_weighting else None, content, size)

    def dropout(self, teacher: str) -> TeacherDropout:
        rates = {"lune": self.lune_dropout, "sol": self.sol_dropout}
        if teacher not in rates:
            raise ValueError(f"teacher must be one of lune, sol (got {teacher!r})")
        return TeacherDropout(rates[teacher], self.seed)


Targets = Tensor | TeacherRows


def compute_lune_loss(predicted: Tensor, features: Targets, mode: LossMode = "cosine") -> Tensor:
    """Return the loss against Lune, over its present rows."""
    values, present = _parts(features)
    return feature_loss(predicted, values, mode, present=present)


def compute_sol_loss(stats_predicted: Tensor, spatial_predicted: Tensor, stats: Targets, spatial: Targets) -> Tensor:
    """Return the MSE of the statistics plus the MSE of the maps, each over its present rows."""
    (stats_values, stats_present), (maps, maps_present) = _parts(stats), _parts(spatial)
    of_stats = feature_loss(stats_predicted, stats_values, "mse", present=stats_present)
    return of_stats + feature_loss(spatial_predicted, maps, "mse", present=maps_present)


def _parts(targets: Targets) -> tuple[Tensor, Tensor | None]:
    return (targets.values, targets.present) if isinstance(targets, TeacherRows) else (targets, None)
