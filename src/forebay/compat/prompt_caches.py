"""Build caches from lists of prompts and images, with the models of a `ModelZoo`.

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
    """Teachers under the document's names, and a folder for the caches built with them.

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
