"""Letterboxed images as they are changed together: pixels, pixel mask and box move as one.

    def jitter(canvases: Canvases, coins: Coins) -> Canvases:
        return canvases.shifted(coins.integers("right", -16, 17), coins.integers("down", -16, 17))

    ImageBatch(cache, flip=0.5, transforms=[jitter])

Transforms come after the flip and before normalisation, so they see uint8. A coin belongs to a sample, an epoch and a
purpose, so the choice is the same with any number of threads or workers.
"""

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Protocol

import numpy as np
import torch
from numpy.typing import ArrayLike, NDArray
from torch import Tensor

from forebay.order.coins import Coins

Size = tuple[int, int]  # height, width
Ints = NDArray[np.int64]


@dataclass(frozen=True, slots=True, eq=False)
class Canvases:
    """Images on canvases of one size, with what is padding on each.

    pixels   uint8 [images, 3, height, width]
    mask     bool  [images, height, width], True = PAD
    box      int32 [images, 4], left, top, width, height; nothing outside of it is content
    """

    pixels: Tensor
    mask: Tensor
    box: Tensor
    pad_color: tuple[int, int, int]

    def __post_init__(self) -> None:
        count, height, width = len(self.pixels), *self.pixels.shape[-2:]
        expected = {
            "pixels": (torch.uint8, [count, 3, height, width]),
            "mask": (torch.bool, [count, height, width]),
            "box": (torch.int32, [count, 4]),
        }
        for name, (dtype, shape) in expected.items():
            given = getattr(self, name)
            if given.dtype != dtype or list(given.shape) != shape:
                raise ValueError(f"{name} is {given.dtype} {list(given.shape)}; {dtype} {shape} is expected")

    @property
    def size(self) -> Size:
        height, width = self.mask.shape[-2:]
        return height, width

    def shifted(self, right: ArrayLike, down: ArrayLike) -> "Canvases":
        """Every image moved by so many pixels, one number for all or one each; what leaves the canvas is lost.

        a b . .      right 1, down 0      . a b .
        c d . .                           . c d .
        """
        return self.seen_through(-_each(right, len(self.box)), -_each(down, len(self.box)), self.size)

    def seen_through(self, left: ArrayLike, top: ArrayLike, size: Size) -> "Canvases":
        """What a window of this size shows of every canvas; beyond its edges there is padding.

        a b . .      left 1, top 0,       b .
        c d . .      size (2, 2)          d .
        """
        count = len(self.box)
        lefts, tops = _each(left, count), _each(top, count)
        pixels = torch.empty((count, 3, *size), dtype=torch.uint8)
        pixels[:] = torch.tensor(self.pad_color, dtype=torch.uint8)[:, None, None]
        mask = torch.ones((count, *size), dtype=torch.bool)
        for image, (x, y) in enumerate(zip(lefts.tolist(), tops.tolist(), strict=True)):
            here, there = _overlap(y, size[0], self.size[0]), _overlap(x, size[1], self.size[1])
            pixels[image, :, here[0], there[0]] = self.pixels[image, :, here[1], there[1]]
            mask[image, here[0], there[0]] = self.mask[image, here[1], there[1]]
        return Canvases(pixels, mask, _boxes_through(self.box, lefts, tops, size), self.pad_color)


class JointTransform(Protocol):
    """Canvases made of canvases, with the coins of their samples."""

    def __call__(self, canvases: Canvases, coins: Coins, /) -> Canvases: ...


def transformed(canvases: Canvases, transforms: Sequence[JointTransform], coins: Coins) -> Canvases:
    """One transform after the other, each held to moving image, mask and box together."""
    for transform in transforms:
        count = len(canvases.box)
        canvases = transform(canvases, coins)
        _check(canvases, count, getattr(transform, "__name__", type(transform).__name__))
    return canvases


def _check(canvases: Canvases, count: int, name: str) -> None:
    if len(canvases.box) != count:
        raise ValueError(f"the transform {name} made {len(canvases.box)} images of {count}; each must stay one")
    height, width = canvases.size
    left, top, wide, high = canvases.box.to(torch.int64).T[:, :, None]
    beyond = (canvases.box < 0).any(dim=1) | ((left + wide > width) | (top + high > height)).any(dim=1)
    if beyond.any():
        image = int(beyond.int().argmax())
        raise ValueError(
            f"the transform {name} gave image {image} the box {canvases.box[image].tolist()}, which is not on a canvas "
            f"of {height} × {width} pixels; cut it where the canvas ends"
        )
    y, x = torch.arange(height), torch.arange(width)
    rows = (~canvases.mask).any(dim=2) & ((y < top) | (y >= top + high))
    columns = (~canvases.mask).any(dim=1) & ((x < left) | (x >= left + wide))
    outside = rows.any(dim=1) | columns.any(dim=1)
    if outside.any():
        image = int(outside.int().argmax())
        raise ValueError(
            f"the transform {name} left content of image {image} outside its box {canvases.box[image].tolist()}; "
            "move pixels, mask and box together: use the methods of Canvases, or change all three"
        )


def _each(values: ArrayLike, count: int) -> Ints:
    given = np.asarray(values)
    if given.dtype.kind not in "iu" or given.shape not in ((), (count,)):
        raise ValueError(f"{given.dtype} {list(given.shape)} was given; whole pixels, one or {count}, are expected")
    return np.broadcast_to(given.astype(np.int64), (count,))


def _overlap(start: int, length: int, available: int) -> tuple[slice, slice]:
    """Where a window from `start` on has content, and which of what is available that is."""
    low, high = max(0, start), min(available, start + length)
    if high <= low:
        return slice(0, 0), slice(0, 0)
    return slice(low - start, high - start), slice(low, high)


def _boxes_through(box: Tensor, left: Ints, top: Ints, size: Size) -> Tensor:
    """Boxes as a window shows them; of what it does not show, empty ones."""
    old = box.numpy().astype(np.int64)
    x0, y0 = np.clip(old[:, 0] - left, 0, size[1]), np.clip(old[:, 1] - top, 0, size[0])
    x1 = np.clip(old[:, 0] + old[:, 2] - left, 0, size[1])
    y1 = np.clip(old[:, 1] + old[:, 3] - top, 0, size[0])
    seen = np.stack((x0, y0, x1 - x0, y1 - y0), axis=1)
    seen[(seen[:, 2:] == 0).any(axis=1)] = 0
    return torch.from_numpy(seen.astype(np.int32))
