"""Rows of images as pictures, and the files that they are written to."""

import json
import os
from collections.abc import Iterator
from dataclasses import dataclass
from functools import cached_property
from importlib import import_module
from typing import TYPE_CHECKING, Any, cast

import numpy as np

from forebay import images
from forebay.columns import Array
from forebay.errors import Damaged, ForebayError
from forebay.kinds import reopen_recipe
from forebay.preview.row_records import ImagePeek, ImageSheet, PeekedImage
from forebay.preview.words import printable
from forebay.read.cache import Cache

if TYPE_CHECKING:
    from PIL.Image import Image

KIND = "images"
USUAL_PATCH = 16
READ_AT_ONCE = 32
MOST_ON_A_SHEET = 600  # a sheet is drawn in memory


def peek_images(cache: Cache, rows: list[int]) -> ImagePeek:
    """Rows of an image cache: names, sizes, tags and metadata."""
    reader = ImageReader(cache)
    shown = tuple(image for image, _ in reader.read(rows))
    return ImagePeek(**cache_rows(cache), size=reader.recipe.size, shown=shown)


def cache_rows(cache: Cache) -> dict[str, Any]:
    """The fields of `CacheRows`."""
    return {"root": cache.root, "generation": cache.generation.number, "rows": len(cache)}


def draw_sheet(cache: Cache, rows: list[int], path: str, patch: int | None) -> ImageSheet:
    """Draw rows of an image cache to a PNG, with the tokens that a model with this patch size ignores."""
    check_output(path, PNG)
    picture, drawn = sheet_of(cache, rows, patch)
    picture.save(path, "PNG")
    return ImageSheet(**cache_rows(cache), path=path, patch=drawn, drawn=tuple(rows))


def sheet_of(cache: Cache, rows: list[int], patch: int | None) -> tuple["Image", int | None]:
    """The contact sheet of some rows, and the patch whose tokens are drawn on it."""
    if (kind := cache.recipe(cache.generation.base).kind) != KIND:
        raise ValueError(f"'{cache.root}' holds {kind}, not images; fb.peek shows its rows")
    if len(rows) > MOST_ON_A_SHEET:
        raise ValueError(
            f"a sheet has room for {MOST_ON_A_SHEET:,} images (got {len(rows):,}); choose fewer (--rows, --row)"
        )
    reader = ImageReader(cache)
    drawn = chosen_patch(reader.recipe.size, patch)
    sheets: Any = import_module("forebay.preview.sheets")  # needs pillow
    framed = (sheets.Framed(canvas, image.box, _caption(image)) for image, canvas in reader.read(rows))
    return cast("Image", sheets.contact_sheet(framed, patch=drawn)), drawn


@dataclass(frozen=True)
class ImageReader:
    """Reads rows as whole canvases with their metadata."""

    cache: Cache

    @cached_property
    def recipe(self) -> "images.ImageRecipe":
        return cast("images.ImageRecipe", reopen_recipe(self.cache.recipe(self.cache.generation.base)))

    def read(self, rows: list[int]) -> Iterator[tuple[PeekedImage, Array]]:
        """Images one by one, with few in memory at once."""
        names = (self.recipe.stored_column, "box", "original_size", "id", "tags", "metadata")
        for start in range(0, len(rows), READ_AT_ONCE):
            some = rows[start : start + READ_AT_ONCE]
            numbers = np.array(some, np.int64)
            read = self.cache.read(numbers, names)
            for at, (row, name) in enumerate(zip(some, self.cache.row_ids(numbers), strict=True)):
                yield self._image(row, name.chunk, name.row, {column: read[column][at] for column in names})

    def _image(self, row: int, chunk: int, row_in_chunk: int, columns: dict[str, Array]) -> tuple[PeekedImage, Array]:
        left, top, width, height = columns["box"].tolist()
        original = columns["original_size"].tolist()
        letterbox = images.Letterbox((original[0], original[1]), self.recipe.size, (left, top, width, height))
        try:
            pixels = self.recipe.unpacked(columns)
        except ValueError as error:  # a row that somebody crafted
            raise Damaged(f"row {row} of the cache at '{self.cache.root}' cannot be drawn: {error}") from error
        canvas = images.paste(pixels, letterbox, self.recipe.pad_color)
        metadata = _read_metadata(columns["metadata"].tobytes())
        keys = self.recipe.tag_key
        for key in (keys,) if isinstance(keys, str) else keys:
            metadata.pop(key, None)
        return PeekedImage(
            row=row,
            chunk=chunk,
            row_in_chunk=row_in_chunk,
            id=columns["id"].tobytes().decode(errors="backslashreplace"),
            original_size=letterbox.image,
            box=letterbox.box,
            padding=1 - width * height / self.recipe.size**2,
            tags=self._tags.named(columns["tags"].tolist()),
            metadata=metadata,
        ), canvas

    @cached_property
    def _tags(self) -> images.Tags:
        return self.recipe.vocabulary()


def _read_metadata(stored: bytes) -> dict[str, Any]:
    """The metadata of an image, cut if it is longer than any that a recipe stores."""
    try:
        metadata = json.loads(stored)
    except (ValueError, RecursionError):
        metadata = None
    return (
        metadata if isinstance(metadata, dict) else {"not an object": stored[:80].decode("utf-8", "backslashreplace")}
    )


def chosen_patch(size: int, patch: int | None) -> int | None:
    """The requested patch size, or the usual one if it divides the canvas."""
    if patch is None:
        return USUAL_PATCH if size % USUAL_PATCH == 0 else None
    if patch < 1 or size % patch:
        raise ValueError(f"patch (--patch) must divide the canvas size {size} (got {patch})")
    return patch


def _caption(image: PeekedImage) -> tuple[str, ...]:
    (width, height), box = image.original_size, image.box
    # Pillow's default font has no × or →.
    sizes = f"row {image.row}: {width} x {height}, here {box[2]} x {box[3]}"
    return printable(image.id), sizes, printable(", ".join(image.tags))


PNG, HTML = b"\x89PNG", b"<!doctype html>"


def check_output(path: str, begins: bytes) -> None:
    """Raise where a file of another kind, or anything but a file, has this name: it is not ours to overwrite."""
    if not os.path.lexists(path):
        return
    if os.path.isfile(path) and not os.path.islink(path):
        with open(path, "rb") as file:
            if file.read(len(begins)) == begins:
                return
    kind = "PNG" if begins == PNG else "HTML page"
    raise ForebayError(f"'{path}' exists and is not a {kind}, so it is not overwritten", hint="name another file")
