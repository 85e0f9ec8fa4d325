"""Transform pixels, pixel mask and box of letterboxed images together.

    def jitter(canvases: Canvases, coins: Coins) -> Canvases:
        return canvases.shifted(coins.integers("right", -16, 17), coins.integers("down", -16, 17))

    ImageBatch(cache, flip=0.5, transforms=[jitter])

Transforms run after the flip and before normalization, so they get uint8. A coin depends on sample, epoch and purpose
only, so the choice is the same with any number of threads or workers.
"""

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Protocol

import numpy as np
import torch
from numpy.typing import ArrayLike, NDArray
from torch import Tensor
from torch.nn.functional import interpolate

from forebay.images.token_masks import Name
from forebay.masks.rectangle import Size
from forebay.order.coins import Coins

Ints = NDArray[np.int64]


@dataclass(frozen=True, slots=True, eq=False)
class Canvases:
    """Images on canvases of one size, with their padding.

    pixels   uint8 [images, 3, height, width]
    mask     bool  [images, height, width], True = PAD
    box      int32 [images, 4], left, top, width, height; all content is inside
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
            value = getattr(self, name)
            if value.dtype != dtype or list(value.shape) != shape:
                raise ValueError(f"{name} must be {dtype} {shape} (got {value.dtype} {list(value.shape)})")

    @property
    def size(self) -> Size:
        height, width = self.mask.shape[-2:]
        return height, width

    def shifted(self, right: ArrayLike, down: ArrayLike) -> "Canvases":
        """Return every image moved by whole pixels, one number for all or one each; what leaves the canvas is lost.

        a b . .      right 1, down 0      . a b .
        c d . .                           . c d .
        """
        return self.seen_through(-_each(right, len(self.box)), -_each(down, len(self.box)), self.size)

    def seen_through(self, left: ArrayLike, top: ArrayLike, size: Size) -> "Canvases":
        """Return a window of this size of every canvas; beyond the canvas there is padding.

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

    def resized_from(self, rectangles: ArrayLike, size: Size) -> "Canvases":
        """Return a rectangle (left, top, width, height) of every canvas, resized to `size`; an empty one is padding.

        Pixels are resized bilinearly, each from all pixels it covers; a pixel of the mask is that of the nearest one.
        """
        crops = _on_canvas(rectangles, len(self.box), self.size)
        pixels = torch.empty((len(crops), 3, *size), dtype=torch.uint8)
        pixels[:] = torch.tensor(self.pad_color, dtype=torch.uint8)[:, None, None]
        mask = torch.ones((len(crops), *size), dtype=torch.bool)
        for image, (x, y, width, height) in enumerate(crops.tolist()):
            if width and height:
                part = self.pixels[image : image + 1, :, y : y + height, x : x + width]
                padded = self.mask[image, y : y + height, x : x + width]
                pixels[image] = interpolate(part, size, mode="bilinear", antialias=True, align_corners=False)[0]
                mask[image] = interpolate(padded[None, None].to(torch.uint8), size, mode="nearest-exact")[0, 0] > 0
        return Canvases(pixels, mask, bounds(mask), self.pad_color)

    def replaced_where(self, chosen: Tensor, others: "Canvases") -> "Canvases":
        """Return these canvases, with the `chosen` images of other ones of the same size."""
        pixels = torch.where(chosen[:, None, None, None], others.pixels, self.pixels)
        mask = torch.where(chosen[:, None, None], others.mask, self.mask)
        return Canvases(pixels, mask, torch.where(chosen[:, None], others.box, self.box), self.pad_color)


class JointTransform(Protocol):
    """Transforms canvases, with random draws per sample."""

    def __call__(self, canvases: Canvases, coins: Coins, /) -> Canvases: ...


def transformed(canvases: Canvases, transforms: Sequence[JointTransform], coins: Coins) -> Canvases:
    """Apply transforms in order; raise if one does not move image, mask and box together."""
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


def check_filled(canvases: Canvases, name: Name) -> None:
    """Raise if padding is inside a box: without a pixel mask, nothing in the batch would say where.

    `transformed` has checked that no content is outside its box, so it is enough to count.
    """
    content = (~canvases.mask).sum(dim=(1, 2))
    for image in torch.nonzero(content != canvases.box[:, 2:].to(torch.int64).prod(dim=1)).flatten().tolist():
        raise ValueError(
            f"transforms left padding inside the box {canvases.box[image].tolist()} of '{name(image)}', so its mask "
            "does not follow from the box; pass masks='host' to ImageBatch, or cut the box to the content"
        )


def _each(values: ArrayLike, count: int) -> Ints:
    numbers = np.asarray(values)
    if numbers.dtype.kind not in "iu" or numbers.shape not in ((), (count,)):
        raise ValueError(f"pass whole pixels, one number or {count} (got {numbers.dtype} {list(numbers.shape)})")
    return np.broadcast_to(numbers.astype(np.int64), (count,))


def _on_canvas(rectangles: ArrayLike, count: int, size: Size) -> Ints:
    crops = np.asarray(rectangles)
    if crops.dtype.kind not in "iu" or crops.shape != (count, 4):
        raise ValueError(f"pass whole pixels, [{count}, 4] (got {crops.dtype} {list(crops.shape)})")
    left, top, width, height = crops = crops.astype(np.int64).T
    if (crops < 0).any() or (left + width > size[1]).any() or (top + height > size[0]).any():
        raise ValueError(f"a rectangle is not on its canvas of {size[0]} × {size[1]} pixels; clip it to the canvas")
    return crops.T


def bounds(mask: Tensor) -> Tensor:
    """Return the boxes `[images, 4]` of what is not padding, empty ones where all is."""
    (left, width), (top, height) = (_extent((~mask).any(dim=axis).to(torch.int32)) for axis in (1, 2))
    return torch.stack((left, top, width, height), dim=1).to(torch.int32)


def _extent(lines: Tensor) -> tuple[Tensor, Tensor]:
    """Return the first of the lines `[images, lines]` that is 1, and how many there are up to the last."""
    first, behind = lines.argmax(dim=1), lines.flip(1).argmax(dim=1)
    return first, torch.where(lines.any(dim=1), lines.shape[1] - behind - first, 0)


def _overlap(start: int, length: int, available: int) -> tuple[slice, slice]:
    """Return the part of a window from `start` on that has content, and the part of the content it shows."""
    low, high = max(0, start), min(available, start + length)
    if high <= low:
        return slice(0, 0), slice(0, 0)
    return slice(low - start, high - start), slice(low, high)


def _boxes_through(box: Tensor, left: Ints, top: Ints, size: Size) -> Tensor:
    """Return boxes as seen in a window; empty ones for content outside it."""
    old = box.numpy().astype(np.int64)
    x0, y0 = np.clip(old[:, 0] - left, 0, size[1]), np.clip(old[:, 1] - top, 0, size[0])
    x1 = np.clip(old[:, 0] + old[:, 2] - left, 0, size[1])
    y1 = np.clip(old[:, 1] + old[:, 3] - top, 0, size[0])
    seen = np.stack((x0, y0, x1 - x0, y1 - y0), axis=1)
    seen[(seen[:, 2:] == 0).any(axis=1)] = 0
    return torch.from_numpy(seen.astype(np.int32))
