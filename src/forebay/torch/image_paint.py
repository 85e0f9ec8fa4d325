"""Putting the content of images onto their canvases: one pass over memory, from the stored bytes to the tensor.

    content [3, h, w] uint8 ──mirrored?──▶ scaled ──▶ canvas[:, top : top + h, left : left + w]
    pad colour, scaled likewise          ──▶ the four strips around it, and nothing else

A canvas is an array of what a tensor rests in: uint8, float32, or int16 for the two floats of 16 bits, which numpy
either lacks or is slow at.
"""

from typing import Any, Protocol

import numpy as np
import torch
from numpy.typing import NDArray

from forebay.columns import Array
from forebay.images.normalize import Scaling

Planes = NDArray[np.uint8]  # (3, height, width)
Box = tuple[int, int, int, int]  # left, top, width, height

_CACHED_VALUES = 1 << 16  # float32 values that stay in a core's cache between two operations
_SERIAL_VALUES = 1 << 15  # as many as torch copies without threads of its own, which would fight with the loader's


class Painter(Protocol):
    """Fills canvases `[3, height, width]` of one type; `pad` is what padding is on each of their planes."""

    @property
    def storage(self) -> np.dtype[Any]: ...

    @property
    def pad(self) -> Array: ...  # (3,)

    def paint(self, target: Array, content: Planes) -> None:
        """Write content over a part of a canvas that has its shape."""
        ...


class BytePainter:
    """Pixels as they are stored."""

    storage = np.dtype(np.uint8)

    def __init__(self, pad_color: tuple[int, int, int]) -> None:
        self.pad: Array = np.array(pad_color, np.uint8)

    def paint(self, target: Array, content: Planes) -> None:
        np.copyto(target, content)


class FloatPainter:
    """Scaled values of 32 bits."""

    storage = np.dtype(np.float32)

    def __init__(self, pad_color: tuple[int, int, int], scaling: Scaling) -> None:
        self._scaling = scaling
        self.pad: Array = _scaled_pad(pad_color, scaling)

    def paint(self, target: Array, content: Planes) -> None:
        for rows in _strips(content, _CACHED_VALUES):
            self._scaling.apply(content[:, rows], out=target[:, rows])


class HalfPainter:
    """Scaled values, rounded to 16 bits."""

    storage = np.dtype(np.int16)

    def __init__(self, pad_color: tuple[int, int, int], scaling: Scaling, dtype: torch.dtype) -> None:
        self._scaling, self._dtype = scaling, dtype
        self.pad: Array = torch.from_numpy(_scaled_pad(pad_color, scaling)).to(dtype).view(torch.int16).numpy()

    def paint(self, target: Array, content: Planes) -> None:
        for rows in _strips(content, _SERIAL_VALUES):
            values = torch.from_numpy(self._scaling.apply(content[:, rows]))
            torch.from_numpy(target[:, rows]).view(self._dtype).copy_(values)


class InterleavingPainter:
    """Of canvases whose channels lie next to each other: painted apart, a strip at a time, then put between."""

    def __init__(self, planar: Painter) -> None:
        self._planar = planar
        self.storage, self.pad = planar.storage, planar.pad

    def paint(self, target: Array, content: Planes) -> None:
        for rows in _strips(content, _CACHED_VALUES):
            planes = np.empty(content[:, rows].shape, self.storage)
            self._planar.paint(planes, content[:, rows])
            for between, plane in zip(target[:, rows], planes, strict=True):
                np.copyto(between, plane)


def painter(dtype: torch.dtype, pad_color: tuple[int, int, int], scaling: Scaling) -> Painter:
    if dtype == torch.uint8:
        return BytePainter(pad_color)
    return FloatPainter(pad_color, scaling) if dtype == torch.float32 else HalfPainter(pad_color, scaling, dtype)


def paint_canvas(canvas: Array, content: Planes, box: Box, painter: Painter) -> None:
    """Content in its box, padding around it."""
    left, top, width, height = box
    right, bottom = left + width, top + height
    for plane, pad in zip(canvas, painter.pad, strict=True):
        plane[:top] = plane[bottom:] = pad
        plane[top:bottom, :left] = plane[top:bottom, right:] = pad
    painter.paint(canvas[:, top:bottom, left:right], content)


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


def _scaled_pad(pad_color: tuple[int, int, int], scaling: Scaling) -> Array:
    return scaling.apply(np.array(pad_color, np.uint8)[:, None, None]).ravel()


def _strips(content: Planes, values: int) -> list[slice]:
    """Lines of the content, so many that they have about this number of values."""
    step = max(1, values // max(1, content.shape[0] * content.shape[2]))
    return [slice(start, start + step) for start in range(0, content.shape[1], step)]
