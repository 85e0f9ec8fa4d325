"""Paint the content of images onto the canvases of a batch, and make their masks.

    pad ··························
    pad ···│ content [3, h, w] │···       painted at its box, flipped or not; all around it the color of padding
    pad ··························

The compiled loops paint planes of uint8 or float32. Canvases of 16-bit floats and those with channels last are painted
as such planes, image by image, and then copied: one more pass over memory.
"""

from collections.abc import Callable, Iterable, Sequence
from typing import Any, Literal

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from forebay import kernels
from forebay.columns import Array
from forebay.fields import checked_whole
from forebay.images import ImageRecipe
from forebay.images.geometry import Scaling
from forebay.images.recipe import all_tokens_ignored
from forebay.masks.documents import Bools
from forebay.masks.rectangle import IGNORE_THRESHOLD, Size, token_ignore_mask, token_padding
from forebay.order.coins import Coins
from forebay.torch.batches import Batch, Buffers, to_tensor, wrap
from forebay.torch.images.canvases import Canvases, JointTransform, transformed

Planes = NDArray[np.uint8]  # (3, height, width)
Boxes = NDArray[np.int32]  # (images, 4)
Shares = NDArray[np.float64]
Color = tuple[int, int, int]
Channels = Literal["first", "last"]
Name = Callable[[int], str]  # image of the batch -> sample id
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


def fill_pixel_masks(out: Bools, boxes: Boxes) -> None:
    """Write masks `[images, height, width]`, True = PAD."""
    for mask, (left, top, width, height) in zip(out, boxes.tolist(), strict=True):
        mask[:] = True
        mask[top : top + height, left : left + width] = False


class TokenMasks:
    """Masks of tokens: patches of `patch` × `patch` pixels, ignored where the padded share reaches `threshold`."""

    def __init__(self, size: int, patch: int, threshold: float = IGNORE_THRESHOLD) -> None:
        self.patch, self.threshold = checked_whole("patch", patch), threshold
        token_ignore_mask(np.empty((0, 4), np.int64), (size, size), patch, threshold)  # checks both

    def of_boxes(self, boxes: Boxes, size: Size, name: Name) -> Bools:
        """Return masks `[images, height/patch, width/patch]`, True = ignored; `name` names an image in an error."""
        return self._ignored(token_padding(boxes, size, self.patch), boxes, name)

    def all_ignored(self, boxes: Boxes, size: Size) -> Bools:
        """Return for each image whether all its tokens are ignored, `[images]`; equal boxes are computed once."""
        some, member = np.unique(boxes, axis=0, return_inverse=True)
        ignored = (token_padding(some, size, self.patch) >= self.threshold).all(axis=(1, 2))
        by_image: Bools = np.asarray(ignored)[member.reshape(-1)]
        return by_image

    def of_masks(self, masks: Bools, boxes: Boxes, name: Name) -> Bools:
        """Return token masks as `of_boxes`, from pixel masks that need not be rectangles."""
        patch, (count, height, width) = self.patch, masks.shape
        if height % patch or width % patch:
            raise ValueError(
                f"transforms made canvases of {height} × {width} pixels, which do not divide into patches of {patch}; "
                "crop to a multiple of the patch"
            )
        cells = masks.reshape(count, height // patch, patch, width // patch, patch)
        return self._ignored(cells.sum(axis=(2, 4), dtype=np.int64) / (patch * patch), boxes, name)

    def _ignored(self, padding: Shares, boxes: Boxes, name: Name) -> Bools:
        ignored: Bools = padding >= self.threshold
        for image in np.flatnonzero(ignored.all(axis=(1, 2))).tolist():
            raise all_tokens_ignored(name(image), boxes[image].tolist(), self.patch, self.threshold)
        return ignored


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
            mask = buffers.empty((len(boxes), *self._size), np.dtype(np.bool_))
            fill_pixel_masks(mask, boxes)
            batch["pixel_mask"] = wrap(mask)
        if self._tokens is not None:
            batch["token_mask"] = to_tensor(self._tokens.of_boxes(boxes, self._size, name), buffers)
        return batch | {"box": to_tensor(boxes, buffers)}

    def _transformed(
        self, contents: Iterable[Planes], boxes: Boxes, coins: Coins, buffers: Buffers, name: Name
    ) -> Batch:
        """Paint canvases of bytes, apply the transforms to them, and paint the result."""
        pixels = self._bytes.paint(contents, boxes, self._size, Buffers(0, pinned=False))
        mask = np.empty((len(boxes), *self._size), np.bool_)
        fill_pixel_masks(mask, boxes)
        canvases = Canvases(pixels, torch.from_numpy(mask), torch.from_numpy(boxes), self._pad_color)
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
