"""Resize RGB images to planes, equal to Pillow's `resize` to the last bit, and place them on a canvas.

`_resize.c` resizes where a compiler built it and this version of Pillow gives the same; elsewhere Pillow does. Bytes of
a cache do not depend on which of the two was used. Padding is never stored; `paste` adds it where a whole canvas is
needed.
"""

from functools import cache
from typing import Any, Literal

import numpy as np
from numpy.typing import NDArray
from PIL import Image
from PIL import __version__ as pillow_version

from forebay.images.color import Bands, Color
from forebay.images.geometry import Letterbox, fit

try:
    from forebay.images import _resize as compiled
except ImportError:  # installed without a compiler
    compiled = None  # type: ignore[assignment]

Resample = Literal["bilinear", "bicubic", "lanczos", "box", "nearest"]
Planes = NDArray[np.uint8]  # (3, height, width)
_KERNELS = {"bilinear": 0, "bicubic": 1, "lanczos": 2}
_FROM_THE_TALL_SIDE = int(pillow_version.split(".")[0]) >= 13  # earlier versions always begin across
_CHECKED = ((64, 20), (20, 64), (37, 41))


def resized_planes(image: Image.Image, size: tuple[int, int], resample: Resample) -> Planes:
    """Return the pixels `[3, height, width]` of an RGB image after `image.resize(size)`."""
    is_smaller = size[0] <= image.width and size[1] <= image.height
    if compiled is not None and is_smaller and resample in _KERNELS and _is_equal(resample):
        planes = compiled_planes(image, size, resample)
        if planes is not None:
            return planes
    return pillow_planes(image, size, resample)


def compiled_planes(image: Image.Image, size: tuple[int, int], resample: Resample, fast: bool = True) -> Planes | None:
    """Return what `resized_planes` returns, without Pillow; None where Pillow does not lend its pixels."""
    try:
        _, lent = image.__arrow_c_array__()
    except (AttributeError, ValueError):  # before 11.2; or an image that lies in several blocks of memory
        return None
    planes = np.empty((3, size[1], size[0]), np.uint8)
    down_first = _FROM_THE_TALL_SIDE and image.height - size[1] > 2 * (image.width - size[0])
    compiled.resize_planes(planes, lent, image.size, size, _KERNELS[resample], down_first, fast)
    return planes


def pillow_planes(image: Image.Image, size: tuple[int, int], resample: Resample) -> Planes:
    return as_planes(image if image.size == size else image.resize(size, Image.Resampling[resample.upper()]))


def as_planes(image: Image.Image) -> Planes:
    """Return the pixels of an RGB image, `[3, height, width]`. Pillow packs single bands faster than numpy does."""
    bands = (image.tobytes("raw", band) for band in "RGB")
    return np.frombuffer(bytearray().join(bands), np.uint8).reshape(3, image.height, image.width)


@cache
def _is_equal(resample: Resample) -> bool:
    """Return whether this version of Pillow computes as `_resize.c` does, tried once in each process."""
    return all(_agree(*_noise(size), resample) for size in _CHECKED)


def _noise(size: tuple[int, int]) -> tuple[Image.Image, tuple[int, int]]:
    """Return an image and the size that it is tried with; noise shows a difference of one weight."""
    pixels = np.random.default_rng(0).integers(0, 256, (size[1], size[0], 3), np.uint8)
    return Image.fromarray(pixels), (size[0] * 2 // 3, size[1] * 2 // 3)


def _agree(image: Image.Image, size: tuple[int, int], resample: Resample) -> bool:
    ours: Any = compiled_planes(image, size, resample)
    return ours is None or np.array_equal(ours, pillow_planes(image, size, resample))


def letterbox(
    image: Image.Image | Bands, size: int, resample: Resample = "bilinear", full: tuple[int, int] | None = None
) -> tuple[Planes, Letterbox]:
    """Return an RGB image at the size of its box, `[3, height, width]`, equal to Pillow's `resize`, and its letterbox.

    `full` is the size of the original, if the image was decoded smaller (a draft). The bands of a large image give the
    same pixels.
    """
    fitted = fit(*(full or image.size), size)
    if isinstance(image, Bands):
        return as_planes(image.resized(fitted.box[2:], Image.Resampling[resample.upper()])), fitted
    return resized_planes(image, fitted.box[2:], resample), fitted


def paste(content: NDArray[Any], fitted: Letterbox, pad_color: Color) -> Planes:
    """Return the whole canvas `[3, size, size]`: content in its box, padding around it."""
    left, top, width, height = fitted.box
    canvas = np.empty((3, fitted.size, fitted.size), np.uint8)
    canvas[:] = np.array(pad_color, np.uint8)[:, None, None]
    canvas[:, top : top + height, left : left + width] = content
    return canvas


def model_planes(
    content: Planes, size: int, how: Literal["letterbox", "crop"], resample: Resample, pad_color: Color
) -> Planes:
    """Return an image `[3, height, width]` as a model's square `[3, size, size]`.

    "letterbox" is the canvas of an image recipe of that size; "crop" is the center, with the shorter side resized to
    `size`.
    """
    image = Image.fromarray(np.ascontiguousarray(content.transpose(1, 2, 0)))
    if how == "letterbox":
        return paste(*letterbox(image, size, resample), pad_color)
    shorter = min(image.size)
    width, height = (max(size, side * size // shorter) for side in image.size)
    resized = image.resize((width, height), Image.Resampling[resample.upper()])
    left, top = (width - size) // 2, (height - size) // 2
    return as_planes(resized.crop((left, top, left + size, top + size)))
