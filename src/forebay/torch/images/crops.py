"""Crops of letterboxed images that leave no padding inside: random ones, and those of aspect buckets.

    RandomResizedCrop(224)      a random part of the content, resized to a square
    AspectBucket                the content, cropped in the middle and reduced to the nearest of several shapes

Like every transform, they draw from the coins of a sample and move image, mask and box together.
"""

from collections.abc import Sequence
from dataclasses import dataclass
from math import log

import numpy as np
import torch
from numpy.typing import NDArray

from forebay.columns import Columns
from forebay.feeding.selection import Where
from forebay.feeding.stream import SelectionRule
from forebay.fields import checked_whole
from forebay.masks.rectangle import Size
from forebay.order.coins import Coins
from forebay.torch.images.canvases import Canvases

Range = tuple[float, float]
Ints = NDArray[np.int64]


@dataclass(frozen=True, slots=True)
class RandomResizedCrop:
    """A random rectangle of the content of every image, resized to `size`: a side, or (height, width).

    `scale` is the range of its share of the content's area, `ratio` that of width / height, drawn evenly in logarithms.
    A rectangle that does not fit is cut to the content. Pass another `purpose` to a second crop of the same images.

        ImageBatch(cache, flip=0.5, transforms=[RandomResizedCrop(224)])
    """

    size: int | Size
    scale: Range = (0.08, 1.0)
    ratio: Range = (3 / 4, 4 / 3)
    purpose: str = "crop"

    def __post_init__(self) -> None:
        sides = [checked_whole("size", side, 1) for side in _size(self.size)]
        if len(sides) != 2:
            raise ValueError(f"size must be a side or (height, width), at least 1 (got {self.size})")
        for name, (low, high) in (("scale", self.scale), ("ratio", self.ratio)):
            if not 0 < low <= high or (name == "scale" and high > 1):
                allowed = "0 < low <= high <= 1" if name == "scale" else "0 < low <= high"
                raise ValueError(f"{name} must be (low, high) with {allowed} (got {(low, high)})")

    def __call__(self, canvases: Canvases, coins: Coins, /) -> Canvases:
        return canvases.resized_from(self.rectangles(canvases.box.numpy(), coins), _size(self.size))

    def rectangles(self, boxes: NDArray[np.int32], coins: Coins) -> Ints:
        """Return left, top, width, height of every crop, `[images, 4]`, inside its box."""
        left, top, width, height = boxes.astype(np.int64).T
        area, shape, right, down = coins.uniform(self.purpose, (4,)).T
        pixels = width * height * (self.scale[0] + area * (self.scale[1] - self.scale[0]))
        ratio = np.exp(log(self.ratio[0]) + shape * (log(self.ratio[1]) - log(self.ratio[0])))
        wide = np.clip(np.round(np.sqrt(pixels * ratio)).astype(np.int64), np.minimum(1, width), width)
        high = np.clip(np.round(np.sqrt(pixels / ratio)).astype(np.int64), np.minimum(1, height), height)
        x = left + (right * (width - wide + 1)).astype(np.int64)
        y = top + (down * (height - high + 1)).astype(np.int64)
        return np.stack((x, y, wide, high), axis=1)


@dataclass(frozen=True, slots=True)
class AspectBucket:
    """The images whose shape is nearest to (height, width) among all buckets, and the transform that fills it."""

    size: Size
    among: tuple[Size, ...]

    def selection(self, within: SelectionRule | None = None) -> Where:
        """Return a `selection` of the images of this bucket, optionally within another rule."""
        shapes = ", ".join(f"{height} × {width}" for height, width in self.among)
        name = f"nearest to {self.size[0]} × {self.size[1]} of {shapes}"
        return Where(name, self._holds, columns=["original_size"], within=within)

    def _holds(self, columns: Columns) -> NDArray[np.bool_]:
        width, height = np.asarray(columns["original_size"]).astype(np.float64).T
        shapes = np.log([width / height for height, width in self.among])
        nearest = np.abs(np.log(width / height)[:, None] - shapes).argmin(axis=1)
        here: NDArray[np.bool_] = nearest == self.among.index(self.size)
        return here

    def __call__(self, canvases: Canvases, coins: Coins, /) -> Canvases:
        left, top, width, height = canvases.box.numpy().astype(np.int64).T
        wide = np.minimum(width, np.maximum(1, np.round(height * self.size[1] / self.size[0]))).astype(np.int64)
        high = np.minimum(height, np.maximum(1, np.round(width * self.size[0] / self.size[1]))).astype(np.int64)
        crops = (left + (width - wide) // 2, top + (height - high) // 2, wide, high)
        filled = canvases.resized_from(np.stack(crops, axis=1), self.size)
        is_small = torch.from_numpy((wide < self.size[1]) | (high < self.size[0]))
        if not is_small.any():
            return filled
        # Content that does not fill the bucket keeps its size: it is padded, never enlarged.
        middle = (left + (width - self.size[1]) // 2, top + (height - self.size[0]) // 2)
        return filled.replaced_where(is_small, canvases.seen_through(*middle, self.size))


def aspect_buckets(sizes: Sequence[Size]) -> list[AspectBucket]:
    """Return a bucket for each (height, width); every image belongs to exactly one, the first of equally near ones."""
    among = tuple((checked_whole("sizes", height), checked_whole("sizes", width)) for height, width in sizes)
    if len(set(among)) != len(among) or not among or min(map(min, among)) < 1:
        raise ValueError(f"sizes must be different pairs (height, width) of at least 1 (got {list(sizes)})")
    return [AspectBucket(size, among) for size in among]


def _size(size: int | Size) -> Size:
    return size if isinstance(size, tuple | list) else (size, size)
