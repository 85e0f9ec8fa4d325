"""Samples that are passed as lists become caches, built with the models of the document.

<folder>/3f2a…/            the cache: a row per prompt, with its image where there is one
<folder>/3f2a….samples/    what was given, as files that can be read again: images with their prompts, or prompts alone
"""

import hashlib
import io
import json
import os
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any, BinaryIO, Literal, Protocol

from forebay import api
from forebay.cache.catalog import newest_generation, read_cache_document
from forebay.cache.records import BuildReport
from forebay.format import layout
from forebay.images import ImageRecipe
from forebay.raw import RawRecipe
from forebay.sources import images as image_files
from forebay.sources import lines
from forebay.sources.image_files import ENDINGS
from forebay.store import open_store
from forebay.store.base import holds
from forebay.teachers.batched_forward import unload as unload_teacher
from forebay.teachers.built_in import T5, Clip, GeometricSol, Latents, Lune, Sol
from forebay.teachers.protocol import Teacher
from forebay.teachers.recipe import TeacherRecipe

KEY = "caption"
_PROMPTS = "prompts.jsonl"


class Savable(Protocol):
    """An image of pillow."""

    def save(self, file: BinaryIO, format: str) -> None: ...


Image = str | os.PathLike[str] | Savable


@dataclass(frozen=True, slots=True)
class PromptCaches:
    folder: str

    def root(self, prompts: Sequence[str], number: int = 0) -> str:
        """A cache of some prompts; without images, unless it was begun with them. Numbers above 0 are further ones."""
        root = self._place(_checked(prompts)) + (f"-{number + 1}" if number else "")
        if newest_generation(open_store(root)) is None:
            os.makedirs(_samples(root), exist_ok=True)
            manifest = os.path.join(_samples(root), _PROMPTS)
            _write(manifest, "".join(json.dumps({KEY: prompt}) + "\n" for prompt in prompts).encode())
            api.build(root, lines(manifest), RawRecipe(), workers=0)
        return root

    def root_of_images(self, images: Sequence[Image], prompts: Sequence[str], size: int) -> str:
        """The cache of some images with their prompts."""
        if len(images) != len(prompts):
            raise ValueError(f"{len(images)} images and {len(prompts)} prompts; every image has its own")
        root = self._place(_checked(prompts))
        self._keep(root, images, prompts)
        api.build(root, image_files(_samples(root)), ImageRecipe(size=size, tags=()), workers=0, max_failures=0)
        return root

    def _keep(self, root: str, images: Sequence[Image], prompts: Sequence[str]) -> None:
        """Write images with their prompts beside a cache to be; beside one that was begun, they must be there."""
        os.makedirs(_samples(root), exist_ok=True)
        there = set(os.listdir(_samples(root)))
        is_begun = bool(there) and holds(open_store(root), layout.CACHE)
        for number, (image, prompt) in enumerate(zip(images, prompts, strict=True)):
            content, suffix = _content(image)
            named = {f"{number:08d}{suffix}": content, f"{number:08d}.json": json.dumps({KEY: prompt}).encode()}
            for name, value in named.items():
                path = os.path.join(_samples(root), name)
                if is_begun and (name not in there or _read(path) != value):
                    raise ValueError(
                        f"image {number} is not the one that '{root}' was begun with; encode images before other "
                        "parts, and give each data set a ModelZoo with a folder of its own"
                    )
                _write(path, value)
            there -= named.keys()
        for name in there:  # of a list that was given before, and never became a cache
            os.remove(os.path.join(_samples(root), name))

    def prompts_of(self, root: str) -> dict[str, Any]:
        """Where the prompts of a cache are, as a recipe's fields say it."""
        base = read_cache_document(open_store(root)).base
        return {"prompt_column": "metadata" if base == ImageRecipe.kind else "data", "prompt_key": KEY}

    def _place(self, prompts: Sequence[str]) -> str:
        mark = hashlib.sha256(json.dumps(list(prompts)).encode()).hexdigest()[:16]
        return os.path.join(self.folder, mark)


def _checked(prompts: Sequence[str]) -> Sequence[str]:
    if isinstance(prompts, str) or not prompts:
        raise ValueError(f"prompts are {prompts!r}; one or more texts in a list are expected")
    return prompts


def _samples(root: str) -> str:
    return f"{root}.samples"


def _write(path: str, content: bytes) -> None:
    """Only what differs: a file that is written again has changed."""
    if not os.path.exists(path) or _read(path) != content:
        with open(path, "wb") as file:
            file.write(content)


def _content(image: Image) -> tuple[bytes, str]:
    if isinstance(image, str | os.PathLike):
        suffix = os.path.splitext(image)[1]
        if suffix.lower() not in ENDINGS:
            raise ValueError(f"'{os.fspath(image)}' is not named as an image; names end in {', '.join(ENDINGS)}")
        return _read(image), suffix
    buffer = io.BytesIO()
    image.save(buffer, format="PNG")
    return buffer.getvalue(), ".png"


def _read(path: str | os.PathLike[str]) -> bytes:
    with open(path, "rb") as file:
        return file.read()


ENCODINGS = ("latents", "t5", "clip")


@dataclass(frozen=True, kw_only=True)
class ModelZoo:
    """Teachers by the document's names, and a folder that caches are built in.

        zoo = ModelZoo(folder="caches", vae=Latents(vae="sd/vae"), t5=T5(model="t5"), clip=Clip(model="clip"),
                       lune=Lune(unet="sd/unet", weights="sd15-flow-lune-unet.safetensors"))

    `load_…` checks that the files of a model are there and hashes them. The model itself is brought to the device when
    its layer is made, so that the most memory ever held is one model, in whatever order these are called.
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

    @property
    def workplace(self) -> PromptCaches:
        return PromptCaches(os.fspath(self.folder))

    @property
    def encodings(self) -> tuple[str, ...]:
        """The layers of encodings that there is a model for."""
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
        """Let go of what is loaded. It is one model at most, and a layer that is made has let its own go."""
        self.teacher("latents" if name == "vae" else name)
        unload_teacher()

    def offload(self) -> None:
        """Let go of whatever is loaded."""
        unload_teacher()

    def teacher(self, layer: str) -> Teacher:
        known: dict[str, Teacher | None] = {
            "latents": self.vae, "t5": self.t5, "clip": self.clip, "lune": self.lune, "sol": self.sol,
        }  # fmt: skip
        if layer not in known:
            raise ValueError(f"the model is {layer!r}; known are: vae, t5, clip, lune, sol")
        found = known[layer]
        if found is None:
            argument = "vae" if layer == "latents" else layer
            raise ValueError(f"this zoo has no '{argument}'; make it with ModelZoo({argument}=…)")
        return found

    def ask(self, root: str, *layers: str, batch_timesteps: bool = False) -> list[BuildReport]:
        """Make layers of a cache of the workplace, one model after the other; what is there is passed over."""
        recipes = {}
        for layer in dict.fromkeys(needed for wanted in layers for needed in (*self._before(wanted), wanted)):
            teacher = self.teacher(layer)
            recipes[layer] = TeacherRecipe(
                teacher=teacher,
                batch_size=self.batch_size,
                batch_timesteps=batch_timesteps and teacher.timed,
                dtype=self.dtype,
                device=self.device,
                **self.workplace.prompts_of(root),
            )
        return api.build_layers(root, recipes)

    def _before(self, layer: str) -> tuple[str, ...]:
        """A UNet is told the prompt by CLIP's states."""
        return ("clip",) if isinstance(self.teacher(layer), Lune | Sol) else ()
