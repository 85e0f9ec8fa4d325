"""Paint the content of images onto the canvases of a batch.

    pad ··························
    pad ···│ content [3, h, w] │···       painted at its box, flipped or not; all around it the color of padding
    pad ··························

The compiled loops paint planes of uint8 or float32. Canvases of 16-bit floats and those with channels last are painted
as such planes, image by image, and then copied: one more pass over memory.
"""

from collections.abc import Iterable
from typing import Any, Literal

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from forebay import kernels
from forebay.columns import Array
from forebay.images.geometry import Scaling
from forebay.masks.rectangle import Size
from forebay.torch.batches import Buffers, wrap

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
