"""The canvases of a batch, as tensors of the type and memory format asked for, with their masks and boxes."""

from collections.abc import Callable, Iterable, Sequence
from typing import Literal

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from forebay.columns import Array
from forebay.images.normalize import Scaling
from forebay.images.recipe import ImageRecipe
from forebay.masks.rectangle import Size
from forebay.order.coins import Coins
from forebay.torch.batch import Batch
from forebay.torch.buffers import Buffers, tensor
from forebay.torch.image_joint import Canvases, JointTransform, transformed
from forebay.torch.image_masks import TokenMasks, fill_pixel_masks
from forebay.torch.image_paint import Box, BytePainter, InterleavingPainter, Planes, paint_canvas, painter

Channels = Literal["first", "last"]
Boxes = NDArray[np.int32]
Name = Callable[[int], str]  # of the sample that an image of the batch is


class CanvasMaker:
    """Content and boxes become `pixels`, `pixel_mask`, `token_mask` and `box`."""

    def __init__(
        self,
        recipe: ImageRecipe,
        scaling: Scaling,
        dtype: torch.dtype,
        channels: Channels,
        tokens: TokenMasks | None,
        transforms: Sequence[JointTransform],
    ) -> None:
        self._size, self._pad_color = (recipe.size, recipe.size), recipe.pad_color
        planar = painter(dtype, recipe.pad_color, scaling)
        self._painter = planar if channels == "first" else InterleavingPainter(planar)
        self._dtype, self._channels = dtype, channels
        self._tokens, self._transforms = tokens, tuple(transforms)

    @property
    def row_bytes(self) -> int:
        return self._size[0] * self._size[1] * (3 * self._painter.storage.itemsize + 1)

    def make(self, contents: Iterable[Planes], boxes: Boxes, coins: Coins, buffers: Buffers, name: Name) -> Batch:
        """`contents` and `boxes` are as the flip left them; one content is taken after the other."""
        if self._transforms:
            return self._transformed(contents, boxes, coins, buffers, name)
        pixels, canvases = self._canvases(len(boxes), self._size, buffers)
        places = _places(boxes)
        for canvas, content, box in zip(canvases, contents, places, strict=True):
            paint_canvas(canvas, content, box, self._painter)
        mask = buffers.empty((len(boxes), *self._size), np.dtype(np.bool_))
        fill_pixel_masks(mask, places)
        batch = {"pixels": pixels, "pixel_mask": tensor(mask)}
        if self._tokens is not None:
            batch["token_mask"] = tensor(buffers.hold(self._tokens.of_boxes(boxes, self._size, name)))
        return batch | {"box": tensor(buffers.hold(boxes))}

    def _transformed(
        self, contents: Iterable[Planes], boxes: Boxes, coins: Coins, buffers: Buffers, name: Name
    ) -> Batch:
        """By way of canvases of bytes, which the transforms are given."""
        changed = transformed(self._pasted(contents, boxes), self._transforms, coins)
        pixels, canvases = self._canvases(len(boxes), changed.size, buffers)
        for canvas, image in zip(canvases, changed.pixels.numpy(), strict=True):
            self._painter.paint(canvas, image, 0)
        mask, box = changed.mask.contiguous().numpy(), changed.box.contiguous().numpy()
        batch = {"pixels": pixels, "pixel_mask": tensor(buffers.hold(mask))}
        if self._tokens is not None:
            batch["token_mask"] = tensor(buffers.hold(self._tokens.of_masks(mask, box, name)))
        return batch | {"box": tensor(buffers.hold(box))}

    def _pasted(self, contents: Iterable[Planes], boxes: Boxes) -> Canvases:
        bytes_painter, places = BytePainter(self._pad_color), _places(boxes)
        pixels = np.empty((len(boxes), 3, *self._size), np.uint8)
        for canvas, content, box in zip(pixels, contents, places, strict=True):
            paint_canvas(canvas, content, box, bytes_painter)
        mask = np.empty((len(boxes), *self._size), np.bool_)
        fill_pixel_masks(mask, places)
        planes, padding, rectangles = map(torch.from_numpy, (pixels, mask, boxes))
        return Canvases(planes, padding, rectangles, self._pad_color)

    def _canvases(self, count: int, size: Size, buffers: Buffers) -> tuple[Tensor, Array]:
        """The tensor `[images, 3, height, width]`, and the arrays it rests in, to be painted on."""
        if self._channels == "first":
            memory = buffers.empty((count, 3, *size), self._painter.storage)
            return tensor(memory).view(self._dtype), memory
        memory = buffers.empty((count, *size, 3), self._painter.storage)
        return tensor(memory).view(self._dtype).permute(0, 3, 1, 2), memory.transpose(0, 3, 1, 2)


def _places(boxes: Boxes) -> list[Box]:
    return [(left, top, width, height) for left, top, width, height in boxes.tolist()]
