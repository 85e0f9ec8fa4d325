"""Paint the content of images onto the canvases of a batch, and make their masks.

    pad ··························
    pad ···│ content [3, h, w] │···       painted at its box, flipped or not; all around it the color of padding
    pad ··························

The compiled loops paint planes of uint8 or float32. Canvases of 16-bit floats and those with channels last are painted
as such planes, image by image, and then copied: one more pass over memory.
"""

from collections.abc import Iterable, Sequence
from typing import Any, Literal

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from forebay import kernels
from forebay.columns import Array
from forebay.images import ImageRecipe
from forebay.images.geometry import Scaling
from forebay.images.token_masks import Name, TokenMasks
from forebay.masks.rectangle import Size, pixel_mask
from forebay.order.coins import Coins
from forebay.torch.batches import Batch, Buffers, to_tensor, wrap
from forebay.torch.images.canvases import Canvases, JointTransform, transformed

Planes = NDArray[np.uint8]  # (3, height, width)
Boxes = NDArray[np.int32]  # (images, 4)
Color = tuple[int, int, int]
Channels = Literal["first", "last"]
_SERIAL_VALUES = 1 << 15  # as many as torch copies without its own threads, which would compete with the loader's


def mirrored(content: Planes) -> Planes:
    """Flip content left–right."""
    lines = np.ascontiguousarray(content)
    flipped = np.empty_like(lines)
    if lines.size:
        kernels.mirror(flipped, lines, content.shape[2])
    return flipped


class Painter:
    """Paints canvases of one type, `[images, 3, height, width]`, in either memory format."""

    def __init__(self, pad_color: Color, scaling: Scaling, dtype: torch.dtype, channels: Channels) -> None:
        self._pad_color, self._dtype, self._channels = list(pad_color), dtype, channels
        self._planes = np.dtype(np.uint8 if dtype == torch.uint8 else np.float32)  # what the loops paint
        storage = torch.int16 if dtype.itemsize == 2 else dtype  # numpy has no bfloat16
        self._storage: np.dtype[Any] = torch.empty(0, dtype=storage).numpy().dtype
        pad = scaling.apply(np.array(pad_color, np.uint8)[:, None, None])
        self._values = [each.ravel().tolist() for each in (pad, scaling.scale, scaling.shift)]

    def paint(self, contents: Iterable[Planes], boxes: Boxes, size: Size, buffers: Buffers) -> Tensor:
        """Return canvases with each content in its box; contents are consumed one by one."""
        is_direct = self._channels == "first" and self._planes == self._storage
        shape = (3, *size) if self._channels == "first" else (*size, 3)
        memory = buffers.empty((len(boxes), *shape), self._storage)
        canvases = wrap(memory).view(self._dtype)
        if self._channels == "last":
            canvases = canvases.permute(0, 3, 1, 2)
        scratch = np.empty((3, *size), self._planes)
        for image, (content, box) in enumerate(zip(contents, boxes.tolist(), strict=True)):
            self._paint_planes(memory[image] if is_direct else scratch, content, tuple(box))
            if not is_direct:
                _copy(canvases[image], torch.from_numpy(scratch))
        return canvases

    def _paint_planes(self, planes: Array, content: Planes, box: tuple[int, int, int, int]) -> None:
        size, content = (planes.shape[1], planes.shape[2]), np.ascontiguousarray(content)
        if planes.dtype == np.uint8:
            kernels.paint(planes, size, content, box, self._pad_color)
        else:
            kernels.paint_scaled(planes, size, content, box, *self._values)


def _copy(canvas: Tensor, planes: Tensor) -> None:
    step = max(1, _SERIAL_VALUES // max(1, 3 * planes.shape[2]))
    for start in range(0, planes.shape[1], step):
        canvas[:, start : start + step].copy_(planes[:, start : start + step])


class CanvasMaker:
    """Makes `pixels`, `box` and the masks that were asked for, from content and boxes."""

    def __init__(
        self,
        recipe: ImageRecipe,
        scaling: Scaling,
        dtype: torch.dtype,
        channels: Channels,
        tokens: TokenMasks | None,
        transforms: Sequence[JointTransform],
        with_pixel_mask: bool,
    ) -> None:
        self._size, self._pad_color = (recipe.size, recipe.size), recipe.pad_color
        self._painter = Painter(recipe.pad_color, scaling, dtype, channels)
        self._bytes = Painter(recipe.pad_color, scaling, torch.uint8, "first")
        self._tokens, self._transforms, self._with_pixel_mask = tokens, tuple(transforms), with_pixel_mask

    def make(self, contents: Iterable[Planes], boxes: Boxes, coins: Coins, buffers: Buffers, name: Name) -> Batch:
        """Make the tensors; `contents`, consumed one by one, and `boxes` are already flipped."""
        if self._transforms:
            return self._transformed(contents, boxes, coins, buffers, name)
        batch: Batch = {"pixels": self._painter.paint(contents, boxes, self._size, buffers)}
        if self._with_pixel_mask:
            batch["pixel_mask"] = to_tensor(pixel_mask(boxes, self._size), buffers)
        if self._tokens is not None:
            batch["token_mask"] = to_tensor(self._tokens.of_boxes(boxes, self._size, name), buffers)
        return batch | {"box": to_tensor(boxes, buffers)}

    def _transformed(
        self, contents: Iterable[Planes], boxes: Boxes, coins: Coins, buffers: Buffers, name: Name
    ) -> Batch:
        """Paint canvases of bytes, apply the transforms to them, and paint the result."""
        pixels = self._bytes.paint(contents, boxes, self._size, Buffers(0, pinned=False))
        mask = torch.from_numpy(pixel_mask(boxes, self._size))
        canvases = Canvases(pixels, mask, torch.from_numpy(boxes), self._pad_color)
        changed = transformed(canvases, self._transforms, coins)
        if not self._with_pixel_mask:
            _check_filled(changed, name)
        whole = np.array([[0, 0, changed.size[1], changed.size[0]]] * len(boxes), np.int32).reshape(-1, 4)
        padded, box = changed.mask.contiguous().numpy(), changed.box.contiguous().numpy()
        batch: Batch = {"pixels": self._painter.paint(changed.pixels.numpy(), whole, changed.size, buffers)}
        if self._with_pixel_mask:
            batch["pixel_mask"] = to_tensor(padded, buffers)
        if self._tokens is not None:
            batch["token_mask"] = to_tensor(self._tokens.of_masks(padded, box, name), buffers)
        return batch | {"box": to_tensor(box, buffers)}


def _check_filled(canvases: Canvases, name: Name) -> None:
    """Raise if padding is inside a box: without a pixel mask, nothing in the batch would say where.

    `transformed` has checked that no content is outside its box, so it is enough to count.
    """
    content = (~canvases.mask).sum(dim=(1, 2))
    for image in torch.nonzero(content != canvases.box[:, 2:].to(torch.int64).prod(dim=1)).flatten().tolist():
        raise ValueError(
            f"transforms left padding inside the box {canvases.box[image].tolist()} of '{name(image)}', so its mask "
            "does not follow from the box; pass masks='host' to ImageBatch, or cut the box to the content"
        )
