"""An image becomes what is kept of it: its content at the size it has on the canvas, and how it lies there.

The padding is never stored: `paste` puts it around the content where a whole canvas is wanted.
"""

from typing import Any, Literal

import numpy as np
from numpy.typing import NDArray
from PIL import Image

from forebay.images.colour import Bands, Color
from forebay.images.geometry import Letterbox, fit

Resample = Literal["bilinear", "bicubic", "lanczos", "box", "nearest"]
Planes = NDArray[np.uint8]  # (3, height, width)


def letterbox(
    image: Image.Image | Bands, size: int, resample: Resample = "bilinear", full: tuple[int, int] | None = None
) -> tuple[Image.Image, Letterbox]:
    """An RGB image at the size of its box, equal in every pixel to Pillow's `resize`, and the way to its canvas.

    `full` is how large the image is, where it was decoded smaller: a draft. The bands of a large image
    give the same pixels.
    """
    fitted = fit(*(full or image.size), size)
    wanted, method = fitted.box[2:], Image.Resampling[resample.upper()]
    if isinstance(image, Bands):
        return image.resized(wanted, method), fitted
    return (image if image.size == wanted else image.resize(wanted, method)), fitted


def as_planes(image: Image.Image) -> Planes:
    """The pixels of an RGB image, `[3, height, width]`."""
    return np.frombuffer(bytearray().join(bands_of(image)), np.uint8).reshape(3, image.height, image.width)


def bands_of(image: Image.Image) -> list[bytes]:
    """Red, green and blue of an RGB image. Pillow packs them one by one faster than they are picked from all."""
    return [image.tobytes("raw", band) for band in "RGB"]


def paste(content: NDArray[Any], fitted: Letterbox, pad_color: Color) -> Planes:
    """The whole canvas `[3, size, size]`: content in its box, padding around it."""
    left, top, width, height = fitted.box
    canvas = np.empty((3, fitted.size, fitted.size), np.uint8)
    canvas[:] = np.array(pad_color, np.uint8)[:, None, None]
    canvas[:, top : top + height, left : left + width] = content
    return canvas
