"""Images as training sees them: pixels as PNG, boxes, ignored tokens, and masks."""

from collections.abc import Sequence
from importlib import import_module
from typing import Any, cast

import numpy as np

from forebay.masks import rectangle
from forebay.preview.pictures import ImageReader, chosen_patch
from forebay.preview.row_records import PeekedImage
from forebay.records import Record
from forebay.viewer.shown_cache import BadQuery, Query, ShownCache

MOST_IMAGES = 96
LATENT = 8  # pixels of a side of a latent cell


class ShownImage(Record, frozen=True, kw_only=True):
    row: int
    chunk: int
    row_in_chunk: int
    id: str
    original_size: tuple[int, int]  # width, height, as displayed
    box: tuple[int, int, int, int]  # left, top, width, height on the canvas
    padding: float  # share of the canvas
    tags: tuple[str, ...]
    ignored: tuple[str, ...]  # a line of 0 and 1 per row of tokens; empty where no patch divides the canvas


class ImagePage(Record, frozen=True, kw_only=True):
    size: int
    patch: int | None
    images: tuple[ShownImage, ...]


class OneImage(Record, frozen=True, kw_only=True):
    """One image with its metadata and masks; grids are lines of shares from 0 to 1."""

    image: ShownImage
    size: int
    patch: int | None
    metadata: dict[str, object]
    token_padding: list[list[float]]  # share of padding in each token
    latent_weights: list[list[float]]  # share of content in each cell of 8 × 8 pixels


def image_page(shown: ShownCache, query: Query) -> ImagePage:
    cache = shown.at()
    reader = ImageReader(cache)
    patch = _patch(query, reader.recipe.size)
    first = query.whole("row", 0)
    rows = range(first, min(len(cache), first + query.whole("count", 24, MOST_IMAGES)))
    images = [_shown(image, reader.recipe.size, patch) for image, _ in reader.read(list(rows))]
    return ImagePage(size=reader.recipe.size, patch=patch, images=tuple(images))


def one_image(shown: ShownCache, query: Query) -> OneImage:
    cache = shown.at()
    reader = ImageReader(cache)
    size, patch = reader.recipe.size, _patch(query, reader.recipe.size)
    ((image, _),) = reader.read([query.whole("row", 0)])
    box = np.array([image.box])
    cells = max(1, size // LATENT)
    return OneImage(
        image=_shown(image, size, patch),
        size=size,
        patch=patch,
        metadata=image.metadata,
        token_padding=rectangle.token_padding(box, (size, size), patch)[0].round(3).tolist() if patch else [],
        latent_weights=rectangle.latent_weights(box, (size, size), (cells, cells))[0].round(3).tolist(),
    )


def image_png(shown: ShownCache, query: Query) -> bytes:
    """The canvas of a row as a PNG, at most `side` pixels wide where that is passed."""
    cache = shown.at()
    ((_, canvas),) = ImageReader(cache).read([query.whole("row", 0)])
    sheets: Any = import_module("forebay.preview.sheets")  # needs pillow
    return cast(bytes, sheets.png_of(canvas, query.whole("side", 0, 8192)))


def _patch(query: Query, size: int) -> int | None:
    try:
        return chosen_patch(size, query.some("patch"))
    except ValueError as error:
        raise BadQuery(str(error)) from None


def _shown(image: PeekedImage, size: int, patch: int | None) -> ShownImage:
    return ShownImage(
        row=image.row,
        chunk=image.chunk,
        row_in_chunk=image.row_in_chunk,
        id=image.id,
        original_size=image.original_size,
        box=image.box,
        padding=image.padding,
        tags=image.tags,
        ignored=_ignored(image.box, size, patch),
    )


def _ignored(box: Sequence[int], size: int, patch: int | None) -> tuple[str, ...]:
    if patch is None:
        return ()
    ignored = rectangle.token_padding(np.array([box]), (size, size), patch)[0] >= rectangle.IGNORE_THRESHOLD
    return tuple("".join("1" if one else "0" for one in line) for line in ignored.tolist())
