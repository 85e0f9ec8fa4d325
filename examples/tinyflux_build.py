"""The building code of the TinyFlux document, on top of forebay: one model is in memory at a time.

    zoo = ModelZoo(folder="caches", vae=Latents(vae="sd/vae"), t5=T5(model="t5"), clip=Clip(model="clip"),
                   lune=Lune(unet="sd/unet", weights="sd15-flow-lune-unet.safetensors"))
    cache = DatasetCache.build(zoo, images, prompts, name="my_data")

Without the document's class names this is `fb.build` of the images, then `fb.build_layers` with one recipe per model.
A list of prompts is one cache in the zoo's folder:

    <folder>/3f2a…/          the cache: a row per prompt, with its image if there is one
    <folder>/3f2a….source/   prompts.jsonl, or images and their prompts, as files
"""

import hashlib
import json
import os
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from functools import partialmethod
from pathlib import Path
from typing import Any, Literal, Self

from PIL import Image

import forebay as fb
from forebay.compat import tinyflux
from forebay.teachers import T5, Clip, GeometricSol, Latents, Lune, Sol, Teacher, TeacherRecipe, unload

MODELS = {"latents": "vae", "t5": "t5", "clip": "clip", "lune": "lune", "sol": "sol"}  # layer -> model of a zoo
Picture = str | os.PathLike[str] | Image.Image


@dataclass(frozen=True, kw_only=True)
class ModelZoo:
    """Teachers by the document's names, and a folder for the caches. `load_…` checks that a model's files exist."""

    folder: str | os.PathLike[str]
    vae: Latents | None = None
    t5: T5 | None = None
    clip: Clip | None = None
    lune: Lune | None = None
    sol: Sol | GeometricSol = field(default_factory=GeometricSol)
    device: str = "auto"
    dtype: Literal["float32", "float16", "bfloat16"] = "float32"
    batch_size: int = 8
    chunk_rows: int = 512  # prompts per chunk, for caches without images

    def files(self, layer: str) -> Mapping[str, str]:
        return self.teacher(layer).files()

    load_vae = partialmethod(files, "latents")
    load_t5 = partialmethod(files, "t5")
    load_clip = partialmethod(files, "clip")
    load_lune = partialmethod(files, "lune")
    load_sol = partialmethod(files, "sol")

    def unload(self, name: str = "") -> None:
        """Release the loaded model, if any; building a layer already releases its own."""
        unload()

    offload = unload

    def teacher(self, layer: str) -> Teacher:
        teacher: Teacher | None = getattr(self, MODELS[layer])
        if teacher is None:
            raise ValueError(f"this zoo has no '{MODELS[layer]}'; pass ModelZoo({MODELS[layer]}=…)")
        return teacher

    def root(self, prompts: Sequence[str], variant: str = "") -> str:
        """Return the cache of some prompts, built now unless it has images; each `variant` is a separate cache."""
        root = self._root(prompts) + variant
        spool = f"{root}.source/prompts.jsonl"
        if os.path.exists(spool) or not os.path.exists(root):
            fb.sources.documents(prompts, spool)
            fb.build(root, fb.sources.lines(spool), fb.RawRecipe(chunk_rows=self.chunk_rows), workers=0)
        return root

    def root_of_images(self, images: Sequence[Picture], prompts: Sequence[str]) -> str:
        """Return the cache of some images with their prompts. Other images for the same prompts are an error."""
        if len(images) != len(prompts):
            raise ValueError(f"pass one prompt per image (got {len(images)} images and {len(prompts)} prompts)")
        root = self._root(prompts)
        if os.path.exists(f"{root}.source/prompts.jsonl"):
            raise ValueError(f"'{root}' has these prompts without images; encode images before other parts")
        folder = write_samples(f"{root}.source", images, prompts)
        size = 512 if self.vae is None else self.vae.size
        fb.build(root, fb.sources.images(folder), fb.ImageRecipe(size=size, tags=()), workers=0, max_failures=0)
        return root

    def build_layers(self, root: str, *layers: str, batch_timesteps: bool = False) -> list[Any]:
        """Build layers of a cache, one model after the other; a UNet needs the states of CLIP first."""
        needed = [("clip", layer) if isinstance(self.teacher(layer), Lune | Sol) else (layer,) for layer in layers]
        has_images = "pixels" in fb.open_cache(root).columns
        recipes = {
            layer: TeacherRecipe(
                teacher=self.teacher(layer),
                batch_size=self.batch_size,
                batch_timesteps=batch_timesteps and self.teacher(layer).timed,
                dtype=self.dtype,
                device=self.device,
                prompt_column="metadata" if has_images else "data",
                prompt_key="text",
            )
            for layer in dict.fromkeys(name for names in needed for name in names)
        }
        return fb.build_layers(root, recipes)

    def _root(self, prompts: Sequence[str]) -> str:
        if isinstance(prompts, str) or not prompts:
            raise ValueError(f"prompts must be a list of one or more strings (got {prompts!r})")
        return os.path.join(self.folder, hashlib.sha256(json.dumps(list(prompts)).encode()).hexdigest()[:16])


def write_samples(folder: str, images: Sequence[Picture], prompts: Sequence[str]) -> str:
    """Write images with their prompts as files; raise if the folder has another image under a name."""
    os.makedirs(folder, exist_ok=True)
    for number, (image, prompt) in enumerate(zip(images, prompts, strict=True)):
        path = Path(folder, f"{number:08d}")
        copy = path.with_suffix(".new.png")
        opened = image if isinstance(image, Image.Image) else Image.open(image)
        opened.save(copy, exif=opened.getexif())
        named = path.with_suffix(".png")
        if named.exists() and named.read_bytes() != copy.read_bytes():
            copy.unlink()
            raise ValueError(f"'{folder}' has another image {number}; use a ModelZoo with another folder")
        copy.unlink() if named.exists() else copy.rename(named)
        path.with_suffix(".json").write_text(json.dumps({"text": prompt}))
    return folder


class EncodingCache(tinyflux.EncodingCache):
    @classmethod
    def build(cls, zoo: ModelZoo, images: Sequence[Picture], prompts: Sequence[str]) -> Self:
        """Encode letterboxed images and prompts with the models of the zoo."""
        root = zoo.root_of_images(images, prompts)
        zoo.build_layers(root, *(layer for layer in cls.layers if getattr(zoo, MODELS[layer]) is not None))
        return cls(fb.open_cache(root))


def build_timed(zoo: ModelZoo, layer: str, prompts: Sequence[str], batch_timesteps: bool) -> fb.Cache:
    """Run a teacher on every prompt. `batch_timesteps` takes more memory and less time."""
    root = zoo.root(prompts)
    try:
        zoo.build_layers(root, layer, batch_timesteps=batch_timesteps)
    except fb.errors.RecipeMismatch:  # this cache has the layer with the other setting
        root = zoo.root(prompts, "-batched" if batch_timesteps else "-single")
        zoo.build_layers(root, layer, batch_timesteps=batch_timesteps)
    return fb.open_cache(root)


class LuneFeatureCache(tinyflux.LuneFeatureCache):
    @classmethod
    def build(cls, zoo: ModelZoo, prompts: Sequence[str], *, batch_timesteps: bool = False) -> Self:
        return cls(build_timed(zoo, "lune", prompts, batch_timesteps))


class SolFeatureCache(tinyflux.SolFeatureCache):
    @classmethod
    def build(cls, zoo: ModelZoo, prompts: Sequence[str], *, batch_timesteps: bool = False) -> Self:
        return cls(build_timed(zoo, "sol", prompts, batch_timesteps))


class DatasetCache(tinyflux.DatasetCache):
    @classmethod
    def build(
        cls, zoo: ModelZoo, images: Sequence[Picture], prompts: Sequence[str], *, name: str = ""
    ) -> "DatasetCache":
        """Build the parts that the zoo has a model for."""
        encodings = EncodingCache.build(zoo, images, prompts)
        lune = None if zoo.lune is None else LuneFeatureCache.build(zoo, prompts)
        return cls(encodings, lune, SolFeatureCache.build(zoo, prompts), name=name)


@dataclass(frozen=True, kw_only=True)
class TrainerConfig:
    """A switch of a trainer: whether Sol's maps weight the velocity loss, by `forebay.torch.distill.loss_weights`."""

    use_spatial_weighting: bool = False
