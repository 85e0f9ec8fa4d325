"""Where samples that are given as lists become caches: one folder for each list of prompts.

<folder>/3f2a…/            the cache: a row per prompt, with its image where there is one
<folder>/3f2a….samples/    what was given, as files that can be read again: images, and a line of JSON for each
"""

import hashlib
import io
import json
import os
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any, BinaryIO, Protocol

from forebay import api
from forebay.cache.publish import newest_generation, read_cache_document
from forebay.images import ImageRecipe
from forebay.raw import RawRecipe
from forebay.sources import image_manifest, lines
from forebay.store import open_store

KEY = "caption"
_MANIFEST = "samples.jsonl"


class Savable(Protocol):
    """An image of pillow."""

    def save(self, file: BinaryIO, format: str) -> None: ...


Image = str | os.PathLike[str] | Savable


@dataclass(frozen=True, slots=True)
class Workplace:
    folder: str

    def root(self, prompts: Sequence[str]) -> str:
        """The cache of some prompts; without images, unless it was begun with them."""
        root = self._place(prompts)
        if newest_generation(open_store(root)) is None:
            self._write(root, [{KEY: prompt} for prompt in prompts])
            api.build(root, lines(os.path.join(_samples(root), _MANIFEST)), RawRecipe(), workers=0)
        return root

    def root_of_images(self, images: Sequence[Image], prompts: Sequence[str], size: int) -> str:
        """The cache of some images with their prompts."""
        if len(images) != len(prompts):
            raise ValueError(f"{len(images)} images and {len(prompts)} prompts; every image has its own")
        root = self._place(prompts)
        os.makedirs(_samples(root), exist_ok=True)
        names = [_kept(image, _samples(root), number) for number, image in enumerate(images)]
        self._write(root, [{"path": name, KEY: prompt} for name, prompt in zip(names, prompts, strict=True)])
        source = image_manifest(os.path.join(_samples(root), _MANIFEST))
        api.build(root, source, ImageRecipe(size=size, tags=()), workers=0, max_failures=0)
        return root

    def prompts_of(self, root: str) -> dict[str, Any]:
        """Where the prompts of a cache are, as a recipe's fields say it."""
        base = read_cache_document(open_store(root)).base
        return {"prompt_column": "metadata" if base == ImageRecipe.kind else "data", "prompt_key": KEY}

    def _place(self, prompts: Sequence[str]) -> str:
        mark = hashlib.sha256(json.dumps(list(prompts)).encode()).hexdigest()[:16]
        return os.path.join(self.folder, mark)

    def _write(self, root: str, samples: Sequence[dict[str, str]]) -> None:
        """Only where it would change: a source file that is written again has changed."""
        path = os.path.join(_samples(root), _MANIFEST)
        text = "".join(json.dumps(sample) + "\n" for sample in samples)
        os.makedirs(_samples(root), exist_ok=True)
        if not os.path.exists(path) or _read(path) != text.encode():
            with open(path, "w", encoding="utf-8") as file:
                file.write(text)


def _samples(root: str) -> str:
    return f"{root}.samples"


def _kept(image: Image, folder: str, number: int) -> str:
    """An image among the samples; the same one given again is left as it is."""
    content, suffix = _content(image)
    name = f"{number:08d}{suffix}"
    path = os.path.join(folder, name)
    if not os.path.exists(path) or _read(path) != content:
        with open(path, "wb") as file:
            file.write(content)
    return name


def _content(image: Image) -> tuple[bytes, str]:
    if isinstance(image, str | os.PathLike):
        return _read(image), os.path.splitext(image)[1]
    buffer = io.BytesIO()
    image.save(buffer, format="PNG")
    return buffer.getvalue(), ".png"


def _read(path: str | os.PathLike[str]) -> bytes:
    with open(path, "rb") as file:
        return file.read()
