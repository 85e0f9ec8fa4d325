"""An image becomes what is kept of it: its content at the size it has on the canvas, and how it lies there.

The padding is never stored: `paste` puts it around the content where a whole canvas is wanted.
"""

from typing import Any, Literal

import numpy as np
from numpy.typing import NDArray
from PIL import Image

from forebay.images.colour import Color
from forebay.images.geometry import Letterbox, fit

Resample = Literal["bilinear", "bicubic", "lanczos", "box", "nearest"]
Planes = NDArray[np.uint8]  # (3, height, width)


def letterbox(image: Image.Image, size: int, resample: Resample) -> tuple[Planes, Letterbox]:
    """The content of an RGB image, planar, equal in every pixel to Pillow's `resize`; and the letterbox it is in."""
    fitted = fit(*image.size, size)
    return np.ascontiguousarray(resized(image, fitted, resample)), fitted


def resized(image: Image.Image, fitted: Letterbox, resample: Resample) -> Planes:
    """An RGB image at the size of its box: planes, as a view of the interleaved pixels.

    It may come smaller than `fitted` says, from a decoder that scales.
    """
    wanted = fitted.box[2:]
    small = image if image.size == wanted else image.resize(wanted, Image.Resampling[resample.upper()])
    return np.asarray(small).transpose(2, 0, 1)


def paste(content: NDArray[Any], fitted: Letterbox, pad_color: Color) -> Planes:
    """The whole canvas `[3, size, size]`: content in its box, padding around it."""
    left, top, width, height = fitted.box
    canvas = np.empty((3, fitted.size, fitted.size), np.uint8)
    canvas[:] = np.array(pad_color, np.uint8)[:, None, None]
    canvas[:, top : top + height, left : left + width] = content
    return canvas
