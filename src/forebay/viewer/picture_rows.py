"""Rows that the page shows as pictures: images, and teacher outputs.

Teacher outputs of a row: over all timesteps as they are stored, and at any t as training interpolates them.

Rows of images for the page of images: pixels as PNG, boxes, ignored tokens, and masks, as training sees them.
"""

from collections.abc import Mapping, Sequence

import numpy as np
from numpy.typing import NDArray

from forebay.cache.catalog import presence_name
from forebay.cache.records import Record
from forebay.columns import Array
from forebay.errors import ForebayError, LayerNotTimed
from forebay.masks import rectangle
from forebay.masks.mask_html import encode_png
from forebay.preview.pictures import USUAL_PATCH, ImageReader, timed_layers
from forebay.preview.row_records import PeekedImage
from forebay.read.cache import Cache
from forebay.teachers import SOL_STATS, Features
from forebay.viewer.shown_cache import BadQuery, Query, ShownCache

SHOWN_VALUES = 1024  # of a column at one timestep; of more, every n-th is shown
SHOWN_ROWS = 4096  # whose presence is shown


class Statistics(Record, frozen=True, kw_only=True):
    mean: float
    deviation: float
    least: float
    most: float
    norm: float


class TaughtColumn(Record, frozen=True, kw_only=True):
    """A column of one row."""

    column: str
    shape: tuple[int, ...]  # at one timestep
    dtype: str
    values: list[list[float]]  # at t; one line, or the lines of a spatial map
    over: list[list[float]]  # a line of values per bucket; empty where the layer has no timesteps
    maps: list[list[list[float]]]  # a spatial map per bucket
    names: tuple[str, ...]  # of the values, where they have names
    step: int  # every n-th value is shown
    statistics: Statistics


class TaughtRow(Record, frozen=True, kw_only=True):
    layer: str
    row: int
    rows: int
    teacher: str
    t: float
    buckets: list[float]
    low: int  # the bucket below t
    alpha: float  # the weight of the bucket above
    present: bool
    columns: tuple[TaughtColumn, ...]
    presence: str  # one 0 or 1 per row of the sample
    presence_rows: list[int]  # the rows of that sample: the first, and every n-th
    present_share: float


def taught_row(shown: ShownCache, query: Query) -> TaughtRow:
    cache, layer = shown.at(query.some("generation")), query.text("layer")
    if layer not in cache.generation.recipes or layer == cache.generation.base:
        raise BadQuery(f"'layer' must be one of {', '.join(further_layers(cache)) or 'none'} (got {layer[:80]!r})")
    row, t = query.whole("row", 0), query.share("t", 0.5)
    if row >= len(cache):
        raise IndexError(f"there is no row {row}; '{cache.root}' has {len(cache):,} rows")
    bits = presence_name(layer)
    present = bool(np.asarray(cache.read([row], [bits])[bits])[0])
    columns, buckets, low, alpha = _columns(cache, layer, row, t, present)
    presence, rows = _presence(cache, bits)
    return TaughtRow(
        layer=layer,
        row=row,
        rows=len(cache),
        teacher=_teacher(cache, layer),
        t=t,
        buckets=buckets,
        low=low,
        alpha=alpha,
        present=present,
        columns=columns,
        presence="".join("1" if one else "0" for one in presence.tolist()),
        presence_rows=[int(rows[0]), int(rows[1] - rows[0])] if len(rows) > 1 else [0, 1],
        present_share=float(presence.mean()) if len(presence) else 0.0,
    )


def further_layers(cache: Cache) -> tuple[str, ...]:
    """The layers above the base, those over timesteps first."""
    timed = timed_layers(cache)
    rest = (layer for layer in cache.generation.recipes if layer not in timed and layer != cache.generation.base)
    return (*timed, *rest)


def _columns(
    cache: Cache, layer: str, row: int, t: float, present: bool
) -> tuple[tuple[TaughtColumn, ...], list[float], int, float]:
    stored = [column.name for column in cache.recipe(layer).columns]
    whole = {name: np.asarray(values[0]) for name, values in cache.read([row], stored).items()} if present else {}
    try:
        features = Features(cache, layer)
    except LayerNotTimed:
        plain = {name: whole[name] for name in stored if name in whole}
        return tuple(_column(cache, name, values, None) for name, values in plain.items()), [], 0, 0.0
    if not present:
        return (), features.buckets.tolist(), 0, 0.0
    direction = features.time_direction
    found = features.at([row], t, direction)
    between = features.between([row], t, direction)
    constants = cache.constants(layer)
    over = {name: whole.get(name, constants.get(name)) for name in features.columns}
    low = int(np.searchsorted(features.buckets, t, side="right")) - 1
    return (
        tuple(_column(cache, name, np.asarray(found[name])[0], over[name]) for name in features.columns),
        features.buckets.tolist(),
        max(0, min(low, len(features.buckets) - 2)),
        float(between.alpha[0]),
    )


def _column(cache: Cache, name: str, at_t: Array, over: Array | None) -> TaughtColumn:
    wide = np.asarray(at_t, np.float32)
    flat = wide.reshape(-1)
    step = max(1, -(-len(flat) // SHOWN_VALUES))
    ragged = name in cache.columns and cache.column(name).ragged  # a value per label, not a place in a picture
    is_map = wide.ndim == 2 and max(wide.shape) <= 128 and not ragged
    lines = np.asarray(over, np.float32) if over is not None else np.zeros((0, 1), np.float32)
    named = name.endswith("_stats") and wide.shape == (len(SOL_STATS),)
    return TaughtColumn(
        column=name,
        shape=wide.shape,
        dtype=cache.column(name).dtype if name in cache.columns else str(np.asarray(over).dtype),
        values=_rounded(wide if is_map else flat[None, ::step]),
        over=[] if is_map or over is None else _rounded(lines.reshape(len(lines), -1)[:, ::step]),
        maps=[_rounded(one) for one in lines] if is_map else [],
        names=SOL_STATS if named else (),
        step=step,
        statistics=Statistics(
            mean=float(flat.mean()) if len(flat) else 0.0,
            deviation=float(flat.std()) if len(flat) else 0.0,
            least=float(flat.min(initial=np.inf)) if len(flat) else 0.0,
            most=float(flat.max(initial=-np.inf)) if len(flat) else 0.0,
            norm=float(np.linalg.norm(flat.astype(np.float64))),
        ),
    )


def _rounded(values: Array) -> list[list[float]]:
    """Values with five digits, which a picture cannot tell from all of them."""
    found: list[list[float]] = [[float(f"{one:.5g}") for one in line] for line in values.tolist()]
    return found


def _presence(cache: Cache, bits: str) -> tuple[Array, Array]:
    rows = np.arange(0, len(cache), max(1, -(-len(cache) // SHOWN_ROWS)))
    try:
        return np.asarray(cache.read(rows, [bits])[bits]), rows
    except ForebayError:  # a chunk of the layer is missing or damaged
        return np.zeros(0, np.bool_), rows


def _teacher(cache: Cache, layer: str) -> str:
    fields: Mapping[str, object] = cache.recipe(layer).fields
    teacher = fields.get("teacher")
    return str(teacher.get("kind", "")) if isinstance(teacher, dict) else cache.recipe(layer).kind


MOST_IMAGES = 96
LATENT = 8  # pixels of a side of a latent cell


class ShownImage(Record, frozen=True, kw_only=True):
    row: int
    chunk: int
    row_in_chunk: int
    id: str
    original_size: tuple[int, int]  # width, height, as displayed
    box: tuple[int, int, int, int]  # left, top, width, height on the canvas
    flipped_box: tuple[int, int, int, int]  # after a left-right flip
    padding: float  # share of the canvas
    tags: tuple[str, ...]
    ignored: tuple[str, ...]  # a line of 0 and 1 per row of tokens; empty where no patch divides the canvas
    flipped_ignored: tuple[str, ...]


class ImagePage(Record, frozen=True, kw_only=True):
    rows: int
    generation: int
    size: int
    patch: int | None
    threshold: float  # share of padding from which a token is ignored
    images: tuple[ShownImage, ...]


class OneImage(Record, frozen=True, kw_only=True):
    """One image with its metadata and masks; grids are lines of shares from 0 to 1."""

    image: ShownImage
    rows: int
    size: int
    patch: int | None
    metadata: dict[str, object]
    token_padding: list[list[float]]  # share of padding in each token
    latent_weights: list[list[float]]  # share of content in each cell of 8 × 8 pixels


def image_page(shown: ShownCache, query: Query) -> ImagePage:
    cache = shown.at(query.some("generation"))
    reader = ImageReader(cache)
    patch = _patch(query, reader.recipe.size)
    first = query.whole("row", 0)
    rows = range(first, min(len(cache), first + query.whole("count", 24, MOST_IMAGES)))
    found = [_shown(image, reader.recipe.size, patch) for image, _ in reader.read(list(rows))]
    return ImagePage(
        rows=len(cache),
        generation=cache.generation.number,
        size=reader.recipe.size,
        patch=patch,
        threshold=rectangle.IGNORE_THRESHOLD,
        images=tuple(found),
    )


def one_image(shown: ShownCache, query: Query) -> OneImage:
    cache = shown.at(query.some("generation"))
    reader = ImageReader(cache)
    size, patch = reader.recipe.size, _patch(query, reader.recipe.size)
    ((image, _),) = reader.read([query.whole("row", 0)])
    box = np.array([image.box])
    cells = max(1, size // LATENT)
    return OneImage(
        image=_shown(image, size, patch),
        rows=len(cache),
        size=size,
        patch=patch,
        metadata=image.metadata,
        token_padding=rectangle.token_padding(box, (size, size), patch)[0].round(3).tolist() if patch else [],
        latent_weights=rectangle.latent_weights(box, (size, size), (cells, cells))[0].round(3).tolist(),
    )


def image_png(shown: ShownCache, query: Query) -> bytes:
    """The canvas of a row as a PNG, at most `side` pixels wide where that is passed."""
    cache = shown.at(query.some("generation"))
    ((_, canvas),) = ImageReader(cache).read([query.whole("row", 0)])
    side = query.whole("side", 0, 8192)
    return encode_png(_smaller(canvas, side) if side else canvas)


def _smaller(canvas: NDArray[np.uint8], side: int) -> Array:
    """Return a canvas at most `side` wide, whose pixels are means of squares."""
    step = -(-canvas.shape[1] // side)
    if step <= 1:
        return canvas
    kept = canvas.shape[1] // step
    squares = canvas[:, : kept * step, : kept * step].reshape(3, kept, step, kept, step)
    means: Array = squares.mean(axis=(2, 4)).round().astype(np.uint8)
    return means


def _patch(query: Query, size: int) -> int | None:
    chosen = query.some("patch")
    if chosen is None:
        return USUAL_PATCH if size % USUAL_PATCH == 0 else None
    if chosen < 1 or size % chosen:
        raise BadQuery(f"'patch' must divide the canvas size {size} (got {chosen})")
    return chosen


def _shown(image: PeekedImage, size: int, patch: int | None) -> ShownImage:
    flipped = rectangle.flip_rectangles(np.array([image.box]), (size, size))[0].tolist()
    return ShownImage(
        row=image.row,
        chunk=image.chunk,
        row_in_chunk=image.row_in_chunk,
        id=image.id,
        original_size=image.original_size,
        box=image.box,
        flipped_box=(flipped[0], flipped[1], flipped[2], flipped[3]),
        padding=image.padding,
        tags=image.tags,
        ignored=_ignored(image.box, size, patch),
        flipped_ignored=_ignored(flipped, size, patch),
    )


def _ignored(box: Sequence[int], size: int, patch: int | None) -> tuple[str, ...]:
    if patch is None:
        return ()
    ignored = rectangle.token_padding(np.array([box]), (size, size), patch)[0] >= rectangle.IGNORE_THRESHOLD
    return tuple("".join("1" if one else "0" for one in line) for line in ignored.tolist())
