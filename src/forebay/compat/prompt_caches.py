"""Caches built from lists of prompts and images, as the TinyFlux document's classes take them.

<folder>/3f2a…/            the cache: a row per prompt, with its image if there is one
<folder>/3f2a….samples/    the samples as files that can be read again: images with their prompts, or prompts only
"""

import hashlib
import io
import json
import os
import re
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

from forebay import api
from forebay.cache.catalog import newest_generation, read_cache_document
from forebay.format import layout
from forebay.images import ImageRecipe
from forebay.raw import RawRecipe
from forebay.sources import images as image_files
from forebay.sources import lines
from forebay.sources.image_files import ENDINGS
from forebay.store import open_store
from forebay.store.base import holds

KEY = "caption"
_PNG_MODES = ("1", "L", "LA", "I", "I;16", "P", "RGB", "RGBA")
_OURS = re.compile(r"\d{8}\.[A-Za-z]+")  # the names of images and their prompts


Image = Any  # a path, or an image of Pillow


@dataclass(frozen=True, slots=True)
class PromptCaches:
    folder: str
    chunk_rows: int = 512

    def root(self, prompts: Sequence[str], number: int = 0) -> str:
        """Return the cache of some prompts, built now if it is new; `number` above 0 is another cache of them."""
        root = self._root(prompts) + (f"-{number + 1}" if number else "")
        if newest_generation(open_store(root)) is None:
            manifest = os.path.join(_samples(root), "prompts.jsonl")
            _write(manifest, "".join(json.dumps({KEY: prompt}) + "\n" for prompt in prompts).encode())
            api.build(root, lines(manifest), RawRecipe(chunk_rows=self.chunk_rows), workers=0)
        return root

    def root_of_images(self, images: Sequence[Image], prompts: Sequence[str], size: int) -> str:
        """Return the cache of some images with their prompts."""
        if len(images) != len(prompts):
            raise ValueError(f"pass one prompt per image (got {len(images)} images and {len(prompts)} prompts)")
        root = self._root(prompts)
        self._keep(root, images, prompts)
        api.build(root, image_files(_samples(root)), ImageRecipe(size=size, tags=()), workers=0, max_failures=0)
        return root

    def prompts_of(self, root: str) -> dict[str, Any]:
        """Return the recipe fields that locate a cache's prompts."""
        base = read_cache_document(open_store(root)).base
        return {"prompt_column": "metadata" if base == ImageRecipe.kind else "data", "prompt_key": KEY}

    def _keep(self, root: str, images: Sequence[Image], prompts: Sequence[str]) -> None:
        """Write images with their prompts next to a new cache; raise if they differ from those of an existing one."""
        os.makedirs(_samples(root), exist_ok=True)
        is_begun = holds(open_store(root), layout.CACHE)
        names: set[str] = set()
        for number, (image, prompt) in enumerate(zip(images, prompts, strict=True)):
            content, suffix = _content(image)
            named = {f"{number:08d}{suffix}": content, f"{number:08d}.json": json.dumps({KEY: prompt}).encode()}
            for name, value in named.items():
                if not is_begun:
                    _write(os.path.join(_samples(root), name), value)
                elif _read(os.path.join(_samples(root), name)) != value:
                    raise ValueError(
                        f"image {number} is not the one that '{root}' was begun with; encode images before other "
                        "parts, and use a ModelZoo with a separate folder for each data set"
                    )
            names |= named.keys()
        for name in set(filter(_OURS.fullmatch, os.listdir(_samples(root)))) - names:
            os.remove(os.path.join(_samples(root), name))  # of an earlier list that never became a cache

    def _root(self, prompts: Sequence[str]) -> str:
        if isinstance(prompts, str) or not prompts:
            raise ValueError(f"prompts must be a list of one or more strings (got {prompts!r})")
        return os.path.join(self.folder, hashlib.sha256(json.dumps(list(prompts)).encode()).hexdigest()[:16])


def _samples(root: str) -> str:
    return f"{root}.samples"


def _write(path: str, content: bytes) -> None:
    """Write a file, never through a link, unless it has this content: rewriting would change its modification time."""
    if not os.path.islink(path) and _read(path) == content:
        return
    os.makedirs(os.path.dirname(path), exist_ok=True)
    temporary = f"{path}.{os.getpid()}.tmp"
    with open(temporary, "xb") as file:
        file.write(content)
    os.replace(temporary, path)


def _read(path: str) -> bytes | None:
    try:
        with open(path, "rb") as file:
            return file.read()
    except FileNotFoundError:
        return None


def _content(image: Image) -> tuple[bytes, str]:
    if isinstance(image, str | os.PathLike):
        suffix = os.path.splitext(image)[1]
        if suffix.lower() not in ENDINGS:
            raise ValueError(f"'{os.fspath(image)}' must end in one of {', '.join(ENDINGS)}")
        with open(image, "rb") as file:
            return file.read(), suffix
    kind = "PNG" if image.mode in _PNG_MODES else "TIFF"  # either keeps pixels, mode and orientation
    buffer = io.BytesIO()
    try:
        image.save(buffer, format=kind, exif=image.getexif())
    except OSError as error:
        raise ValueError(f"an image of mode '{image.mode}' cannot be kept; convert it to RGB first") from error
    return buffer.getvalue(), f".{kind.lower()}"
