"""Prepare an image for inference as in training.

`prepare` makes an image ready for inference as in training: with the same recipe, masks and numbers.

    prepared = prepare("cat.jpg", cache, normalize="imagenet", dtype=np.float32, patch=16)
    prepared.pixels, prepared.pixel_mask, prepared.token_mask       # bit-equal to those of an ImageBatch
    prepared.letterbox.boxes_to_image(found)                        # boxes on the canvas, back in the image

The image goes through the recipe's own code, up to the bytes that a cache would store. Decoded pixels, an array or a
Pillow image, are used as they are, except that a Pillow image's EXIF orientation and alpha are applied.
"""

from dataclasses import dataclass
from os import PathLike, fspath
from pathlib import Path
from typing import Any

import ml_dtypes
import numpy as np
from numpy.typing import DTypeLike, NDArray
from PIL import ExifTags, Image, ImageOps

from forebay.columns import Array
from forebay.images.decode import rgb, understood
from forebay.images.geometry import Letterbox, Normalize, Scaling
from forebay.images.recipe import ImageRecipe, KeepsRecipes, Row, image_recipe
from forebay.images.resize import Planes, letterbox, paste
from forebay.images.tags import ImageUnreadable
from forebay.images.token_masks import TokenMasks
from forebay.masks.rectangle import IGNORE_THRESHOLD, pixel_mask
from forebay.source import Sample

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
    """Return an image as an `ImageBatch` with the same options and masks="host" would.

    The image is a path, the bytes of a file, a Pillow image, or uint8 `[height, width]`, `[height, width, 3]` or, with
    alpha, `[height, width, 4]`. One that cannot be decoded raises `ImageUnreadable`, with the reason that a build would
    record.
    """
    resolved, wanted = image_recipe(recipe), _checked_dtype(dtype, normalize)
    row = prepared_row(image, resolved)
    width, height = row["original_size"].tolist()
    fitted = Letterbox((width, height), resolved.size, tuple(row["box"].tolist()))
    size = (resolved.size, resolved.size)
    tokens = None if patch is None else TokenMasks(resolved.size, patch, threshold)
    ignored = None if tokens is None else tokens.of_boxes([fitted.box], size, lambda _: _name(image))[0]
    pixels = _values(paste(resolved.unpacked(row), fitted, resolved.pad_color), normalize, wanted)
    return Prepared(pixels, pixel_mask([fitted.box], size)[0], ignored, fitted)


def prepared_row(image: ImageInput, recipe: ImageRecipe | KeepsRecipes) -> Row:
    """Return the row that a cache would store of an image, without tags; an `ImageBatch` makes batches of such rows.

    collate = ImageBatch(cache, normalize="imagenet", dtype=torch.float32, patch=16)
    batch = collate([prepared_row(path, cache) for path in paths])
    """
    resolved = image_recipe(recipe)
    if isinstance(image, np.ndarray | Image.Image):
        return _row_of_pixels(image, resolved)
    content = bytes(image) if isinstance(image, bytes | bytearray | memoryview) else Path(image).read_bytes()
    try:
        return resolved.make_row(Sample(_name(image), content))
    except ImageUnreadable as error:
        raise ImageUnreadable(error.reason, f"'{_name(image)}': {error.detail}") from error


def _row_of_pixels(image: NDArray[Any] | Image.Image, recipe: ImageRecipe) -> Row:
    upright = rgb(_as_displayed(image, recipe), recipe.policy)
    content, fitted = letterbox(upright, recipe.size, recipe.resample)
    return {
        recipe.stored_column: np.ascontiguousarray(recipe.packed(content)).reshape(-1),
        "box": np.array(fitted.box, np.int32),
        "original_size": np.array(fitted.image, np.int32),
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
