"""Prepare an image for inference as in training: with the same recipe, masks and numbers.

    prepared = prepare("cat.jpg", cache, normalize="imagenet", dtype=np.float32, patch=16)
    prepared.pixels, prepared.pixel_mask, prepared.token_mask       # bit-equal to those of an ImageBatch
    prepared.letterbox.boxes_to_image(found)                        # boxes on the canvas, back in the image

The image goes through the recipe's own code, up to the bytes that a cache would store. Decoded pixels, an array or a
Pillow image, are used as they are, except that a Pillow image's EXIF orientation and alpha are applied.

Show images as a contact sheet, or as a few lines of text.

┌────────────┐     the padding, red where a token is ignored
│▒▒▒▒▒▒▒▒▒▒▒▒│
┢━━━━━━━━━━━━┪     the box, outlined
┃  content   ┃
┡━━━━━━━━━━━━┩
│▒▒▒▒▒▒▒▒▒▒▒▒│
└────────────┘
cats/a.jpg         the caption: lines of any text
cat, outdoors

································
▒▒▒▒▒▒▓▓▓▓████████▓▓▓▓▒▒▒▒▒▒░░░░
▒▒▒▒▓▓▓▓██████████▓▓▓▓▒▒▒▒░░░░░░
································
"""

from collections.abc import Iterable
from dataclasses import dataclass
from os import PathLike, fspath
from pathlib import Path
from typing import Any, Protocol

import ml_dtypes
import msgspec
import numpy as np
from numpy.typing import DTypeLike, NDArray
from PIL import ExifTags, Image, ImageDraw, ImageFont, ImageOps

from forebay.columns import Array
from forebay.errors import AllTokensIgnored, ImageUnreadable, RecipeInvalid
from forebay.images.decode import paste, understood
from forebay.images.geometry import Box, Letterbox, Normalize, Planes, Scaling
from forebay.images.recipe import ImageRecipe, Row
from forebay.masks.draw import IGNORED, Picture
from forebay.masks.rectangle import IGNORE_THRESHOLD, latent_weights, pixel_mask, token_ignore_mask, token_padding
from forebay.recipe import RecipeDocument, differing_fields, fingerprint
from forebay.source import Sample


class KeepsRecipes(Protocol):
    """The methods used of an open cache."""

    @property
    def layers(self) -> tuple[str, ...]: ...

    def recipe(self, layer: str) -> RecipeDocument: ...


def image_recipe(source: ImageRecipe | KeepsRecipes) -> ImageRecipe:
    """Return the recipe itself, or that of the image layer of a cache."""
    if isinstance(source, ImageRecipe):
        return source
    if not hasattr(source, "layers"):
        raise TypeError(f"pass an ImageRecipe or an open cache of images, not a {type(source).__name__}")
    kept = _kept(source)
    recipe = msgspec.convert(kept.fields, ImageRecipe)
    if fingerprint(recipe) != kept.fingerprint:
        changed = ", ".join(differing_fields(kept, recipe))
        raise RecipeInvalid(f"the recipe of layer '{kept.layer}' has changed (differs in: {changed})")
    return recipe


def _kept(cache: KeepsRecipes) -> RecipeDocument:
    documents = [cache.recipe(layer) for layer in cache.layers]
    found = next((document for document in documents if document.kind == ImageRecipe.kind), None)
    if found is None:
        kinds = ", ".join(document.kind for document in documents)
        raise ValueError(
            f"{cache!r} holds no images, only: {kinds}; pass a cache built by an ImageRecipe, or the recipe"
        )
    return found


ImageInput = str | PathLike[str] | bytes | NDArray[np.uint8] | Image.Image
_FLOATS = tuple(np.dtype(each) for each in (np.float32, np.float16, ml_dtypes.bfloat16))


@dataclass(frozen=True, slots=True, eq=False)
class Prepared:
    """One image on its canvas."""

    pixels: Array  # (3, size, size)
    pixel_mask: NDArray[np.bool_]  # (size, size), True = PAD
    token_mask: NDArray[np.bool_] | None  # (size / patch, size / patch), True = ignored
    letterbox: Letterbox


def prepare(
    image: ImageInput,
    recipe: ImageRecipe | KeepsRecipes,
    *,
    normalize: Normalize = None,
    dtype: DTypeLike = np.uint8,
    patch: int | None = None,
    threshold: float = IGNORE_THRESHOLD,
) -> Prepared:
    """Return an image as an `ImageBatch` with the same options would.

    The image is a path, the bytes of a file, a Pillow image, or uint8 `[height, width]`, `[height, width, 3]` or, with
    alpha, `[height, width, 4]`. One that cannot be decoded raises `ImageUnreadable`, with the reason that a build would
    record.
    """
    kept, wanted = image_recipe(recipe), _checked_dtype(dtype, normalize)
    row = prepared_row(image, kept)
    width, height = row["original_size"].tolist()
    letterbox = Letterbox((width, height), kept.size, tuple(row["box"].tolist()))
    ignored = None if patch is None else _ignored(letterbox, patch, threshold, _name(image))
    pixels = _values(paste(kept.unpacked(row), letterbox, kept.pad_color), normalize, wanted)
    return Prepared(pixels, pixel_mask([letterbox.box], (kept.size, kept.size))[0], ignored, letterbox)


def prepared_row(image: ImageInput, recipe: ImageRecipe | KeepsRecipes) -> Row:
    """Return the row that a cache would store of an image, without tags; an `ImageBatch` makes batches of such rows.

    collate = ImageBatch(cache, normalize="imagenet", dtype=torch.float32, patch=16)
    batch = collate([prepared_row(path, cache) for path in paths])
    """
    kept = image_recipe(recipe)
    if isinstance(image, np.ndarray | Image.Image):
        return _row_of_pixels(image, kept)
    content = bytes(image) if isinstance(image, bytes | bytearray | memoryview) else Path(image).read_bytes()
    try:
        return kept.make_row(Sample(_name(image), content))
    except ImageUnreadable as error:
        raise ImageUnreadable(error.reason, f"'{_name(image)}': {error.detail}") from error


def _row_of_pixels(image: NDArray[Any] | Image.Image, recipe: ImageRecipe) -> Row:
    content, letterbox = recipe.letterboxed_image(_as_displayed(image, recipe))
    return {
        recipe.stored_column: np.ascontiguousarray(recipe.packed(content)).reshape(-1),
        "box": np.array(letterbox.box, np.int32),
        "original_size": np.array(letterbox.image, np.int32),
        "id": np.frombuffer(_name(image).encode(), np.uint8),
        "tags": np.empty(0, np.uint32),
        "metadata": np.frombuffer(b"{}", np.uint8),
    }


def _as_displayed(image: NDArray[Any] | Image.Image, recipe: ImageRecipe) -> Image.Image:
    if isinstance(image, np.ndarray):
        return Image.fromarray(_checked_array(image))
    with understood(recipe.max_pixels):
        image.load()
        is_turned = recipe.exif == "apply" and image.getexif().get(ExifTags.Base.Orientation, 1) != 1
        return ImageOps.exif_transpose(image) if is_turned else image


def _ignored(letterbox: Letterbox, patch: int, threshold: float, name: str) -> NDArray[np.bool_]:
    size = (letterbox.size, letterbox.size)
    token_ignore_mask(np.empty((0, 4), np.int64), size, patch, threshold)  # checks both
    ignored: NDArray[np.bool_] = token_padding([letterbox.box], size, patch)[0] >= threshold
    if ignored.all():
        raise AllTokensIgnored(name, letterbox.box, patch, threshold)
    return ignored


def _values(canvas: Planes, normalize: Normalize, dtype: np.dtype[Any]) -> Array:
    return canvas if dtype == np.uint8 else Scaling.of(normalize).apply(canvas).astype(dtype, copy=False)


def _name(image: ImageInput) -> str:
    """Return the name of the image in an error."""
    if isinstance(image, str | PathLike):
        return fspath(image)
    return "<an array>" if isinstance(image, np.ndarray) else f"<{type(image).__name__}>"


def _checked_array(image: NDArray[Any]) -> NDArray[np.uint8]:
    if image.dtype != np.uint8 or image.ndim not in (2, 3) or (image.ndim == 3 and image.shape[2] not in (3, 4)):
        raise ValueError(
            "the image must be uint8 [height, width], [height, width, 3] or, with alpha, [height, width, 4] "
            f"(got {image.dtype} {image.shape}); pass pixels as decoded, channels last"
        )
    if not image.size:
        raise ValueError(f"the image must have at least one pixel (got shape {image.shape})")
    return image


def _checked_dtype(dtype: DTypeLike, normalize: Normalize) -> np.dtype[Any]:
    wanted = np.dtype(dtype)
    if wanted not in (np.dtype(np.uint8), *_FLOATS):
        names = ", ".join(each.name for each in _FLOATS)
        raise ValueError(f"dtype must be one of uint8, {names} (got {wanted})")
    if wanted == np.uint8 and normalize is not None:
        raise ValueError(f"normalize needs a float dtype (got {normalize!r} with uint8)")
    return wanted


CELL = 224
MARGIN = 10
LINE = 15
TEXT = 11  # height of letters
PAPER = (250, 250, 248)
INK = (40, 40, 40)
OUTLINE = (30, 120, 220)
TINT = 0.45  # of the red over an ignored token
SEEN_APART = 4  # the least pixels of a token for a line between it and the next


@dataclass(frozen=True, slots=True)
class Framed:
    """One image of a sheet: its whole canvas `[3, size, size]`, the box in it, and its caption."""

    canvas: Planes
    box: Box
    caption: tuple[str, ...] = ()  # without line ends


def contact_sheet(
    images: Iterable[Framed], *, patch: int | None, threshold: float = IGNORE_THRESHOLD, columns: int = 6
) -> Picture:
    """Draw images side by side, `columns` in a row; without a `patch`, no tokens are drawn."""
    cells = [(_drawn(image, patch, threshold), image.caption) for image in images]
    columns = min(columns, max(1, len(cells)))
    rows, lines = -(-len(cells) // columns), max((len(caption) for _, caption in cells), default=0)
    wide, high = CELL + MARGIN, CELL + MARGIN + LINE * lines
    sheet = Image.new("RGB", (columns * wide + MARGIN, rows * high + MARGIN), PAPER)
    pen, font = ImageDraw.Draw(sheet), ImageFont.load_default(TEXT)
    for number, (drawn, caption) in enumerate(cells):
        left, top = MARGIN + number % columns * wide, MARGIN + number // columns * high
        sheet.paste(drawn, (left, top))
        for line, text in enumerate(caption):
            pen.text((left, top + CELL + 1 + line * LINE), _fitting(text, font), fill=INK, font=font)
    return Picture(sheet)


def _drawn(image: Framed, patch: int | None, threshold: float) -> Image.Image:
    """Draw one canvas at the size of a cell; small ones are enlarged without smoothing."""
    size = image.canvas.shape[1]
    way = Image.Resampling.NEAREST if size < CELL else Image.Resampling.BILINEAR
    drawn = Image.fromarray(np.ascontiguousarray(image.canvas.transpose(1, 2, 0))).resize((CELL, CELL), way)
    if patch is not None:
        drawn = _tinted(drawn, token_padding([image.box], (size, size), patch)[0] >= threshold)
    left, top, width, height = (side * CELL / size for side in image.box)
    right, bottom = max(left, left + width - 1), max(top, top + height - 1)  # content may be thinner than a pixel here
    ImageDraw.Draw(drawn).rectangle((left, top, right, bottom), outline=OUTLINE, width=2)
    return drawn


def _tinted(drawn: Image.Image, ignored: NDArray[np.bool_]) -> Image.Image:
    """Tint ignored tokens red, with lines between them unless they are too small."""
    tokens = Image.fromarray(np.where(ignored, round(255 * TINT), 0).astype(np.uint8))
    tint = np.array(tokens.resize(drawn.size, Image.Resampling.NEAREST))
    if len(ignored) <= CELL // SEEN_APART:
        edges = np.arange(len(ignored)) * CELL // len(ignored)
        tint[edges], tint[:, edges] = 0, 0
    return Image.composite(Image.new("RGB", drawn.size, IGNORED), drawn, Image.fromarray(tint))


def _fitting(text: str, font: ImageFont.FreeTypeFont | ImageFont.ImageFont) -> str:
    """Return a line, or as much of its beginning and end as fits below an image."""
    if len(text) <= CELL and font.getlength(text) <= CELL:
        return text
    kept = min(len(text) - 1, CELL)
    while kept > 2 and font.getlength(_shortened(text, kept)) > CELL:
        kept -= 1
    return _shortened(text, kept)


def _shortened(text: str, kept: int) -> str:
    """Return `kept` characters of a text, half from each end.

    >>> _shortened("photographs/cat.jpg", 9)
    'photo….jpg'
    """
    return f"{text[: kept - kept // 2]}…{text[-(kept // 2) :]}"


LINES, CHARS = 16, 32  # a character is about twice as high as it is wide
SHADES = " ░▒▓█"  # from dark to bright
PADDING = "·"
MOSTLY = 0.1  # a character with a smaller share of content is padding


def shaded(canvas: Planes, box: Box) -> tuple[str, ...]:
    """Return a canvas `[3, size, size]` as `LINES` of `CHARS` characters."""
    size = canvas.shape[1]
    grey = Image.fromarray(np.ascontiguousarray(canvas.transpose(1, 2, 0))).convert("L")
    levels = np.asarray(grey.resize((CHARS, LINES), Image.Resampling.BOX)).astype(np.int64) * len(SHADES) // 256
    content = latent_weights([box], (size, size), (LINES, CHARS))[0]
    characters = np.where(content < MOSTLY, PADDING, np.array(list(SHADES))[levels])
    return tuple("".join(line) for line in characters)
