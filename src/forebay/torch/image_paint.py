"""Putting the content of images onto their canvases: from the stored bytes to the tensor, with no copy in between.

    pad ··························        lines above and below the content are padding
    pad ···│ content [3, h, w] │···       lines of content are worked on at full width, so many at once as a core's
    pad ···│ flipped or not    │···       cache holds: they lie in memory one after the other, and are fast to scale
    pad ··························

A canvas is an array of what a tensor rests in: uint8, float32, or int16 for the two floats of 16 bits, which numpy
either lacks or is slow at.
"""

from collections.abc import Iterator
from typing import Any, Protocol

import numpy as np
import torch
from numpy.typing import NDArray

from forebay.columns import Array
from forebay.images.normalize import Scaling

Planes = NDArray[np.uint8]  # (3, height, width)
Box = tuple[int, int, int, int]  # left, top, width, height
Color = tuple[int, int, int]

_CACHED_VALUES = 1 << 16  # float32 values that stay in a core's cache between two operations
_SERIAL_VALUES = 1 << 15  # as many as torch copies without threads of its own, which would fight with the loader's


class Painter(Protocol):
    """Fills canvases `[3, height, width]` of one type; `pad` is what padding is on each of their planes."""

    @property
    def storage(self) -> np.dtype[Any]: ...

    @property
    def pad(self) -> Array: ...  # (3,)

    def paint(self, lines: Array, content: Planes, left: int) -> None:
        """Fill lines of a canvas with content that begins at `left`, and with padding beside it."""
        ...


class BytePainter:
    """Pixels as they are stored."""

    storage = np.dtype(np.uint8)

    def __init__(self, pad_color: Color) -> None:
        self.pad: Array = np.array(pad_color, np.uint8)

    def paint(self, lines: Array, content: Planes, left: int) -> None:
        right = left + content.shape[2]
        for plane, pad in zip(lines, self.pad, strict=True):
            plane[:, :left] = plane[:, right:] = pad
        np.copyto(lines[:, :, left:right], content)


class FloatPainter:
    """Scaled values of 32 bits."""

    storage = np.dtype(np.float32)

    def __init__(self, pad_color: Color, scaling: Scaling) -> None:
        self._pad_color, self._scaling = pad_color, scaling
        self.pad: Array = _scaled_pad(pad_color, scaling)

    def paint(self, lines: Array, content: Planes, left: int) -> None:
        for rows, pixels in _whole_lines(content, left, lines.shape[2], self._pad_color, _CACHED_VALUES):
            self._scaling.apply(pixels, out=lines[:, rows])


class HalfPainter:
    """Scaled values, rounded to 16 bits."""

    storage = np.dtype(np.int16)

    def __init__(self, pad_color: Color, scaling: Scaling, dtype: torch.dtype) -> None:
        self._pad_color, self._scaling, self._dtype = pad_color, scaling, dtype
        self.pad: Array = torch.from_numpy(_scaled_pad(pad_color, scaling)).to(dtype).view(torch.int16).numpy()

    def paint(self, lines: Array, content: Planes, left: int) -> None:
        for rows, pixels in _whole_lines(content, left, lines.shape[2], self._pad_color, _SERIAL_VALUES):
            values = torch.from_numpy(self._scaling.apply(pixels))
            torch.from_numpy(lines[:, rows]).view(self._dtype).copy_(values)


class InterleavingPainter:
    """Of canvases whose channels lie next to each other: painted apart, a few lines at a time, then put between."""

    def __init__(self, planar: Painter) -> None:
        self._planar = planar
        self.storage, self.pad = planar.storage, planar.pad

    def paint(self, lines: Array, content: Planes, left: int) -> None:
        for rows in _strips(content.shape[1], lines.shape[2], _CACHED_VALUES):
            planes = np.empty(lines[:, rows].shape, self.storage)
            self._planar.paint(planes, content[:, rows], left)
            for between, plane in zip(lines[:, rows], planes, strict=True):
                np.copyto(between, plane)


def painter(dtype: torch.dtype, pad_color: Color, scaling: Scaling) -> Painter:
    if dtype == torch.uint8:
        return BytePainter(pad_color)
    return FloatPainter(pad_color, scaling) if dtype == torch.float32 else HalfPainter(pad_color, scaling, dtype)


def paint_canvas(canvas: Array, content: Planes, box: Box, painter: Painter) -> None:
    """Content in its box, padding around it."""
    left, top, _, height = box
    for plane, pad in zip(canvas, painter.pad, strict=True):
        plane[:top] = plane[top + height :] = pad
    painter.paint(canvas[:, top : top + height], content, left)


def mirrored(content: Planes) -> Planes:
    """Content flipped left–right, eight bytes at a time: all bytes backwards, then planes and lines back in order."""
    flat = np.ascontiguousarray(content).reshape(-1)
    odd = len(flat) % 8
    backwards = np.empty_like(flat)
    words = backwards[: len(flat) - odd].view(np.uint64)
    np.copyto(words, flat[odd:].view(np.uint64)[::-1])
    words.byteswap(inplace=True)
    backwards[len(flat) - odd :] = flat[:odd][::-1]
    return backwards.reshape(content.shape)[::-1, ::-1]


def _whole_lines(
    content: Planes, left: int, width: int, pad_color: Color, values: int
) -> Iterator[tuple[slice, Planes]]:
    """A few lines of content at a time, with padding on both sides where it is narrower than the canvas."""
    strips = _strips(content.shape[1], width, values)
    if content.shape[2] == width:
        yield from ((rows, content[:, rows]) for rows in strips)
        return
    padded = np.empty((3, strips[0].stop if strips else 0, width), np.uint8)
    padded[:] = np.array(pad_color, np.uint8)[:, None, None]
    for rows in strips:
        lines = padded[:, : rows.stop - rows.start]
        np.copyto(lines[:, :, left : left + content.shape[2]], content[:, rows])
        yield rows, lines


def _scaled_pad(pad_color: Color, scaling: Scaling) -> Array:
    return scaling.apply(np.array(pad_color, np.uint8)[:, None, None]).ravel()


def _strips(height: int, width: int, values: int) -> list[slice]:
    """Lines of three planes, so many that they have about this number of values."""
    step = max(1, values // max(1, 3 * width))
    return [slice(start, min(start + step, height)) for start in range(0, height, step)]
