"""Letterbox and normalize images inside a model, to export both with it.

    uint8 image, any height and width ──▶ box ──▶ resized ──▶ padded ──▶ normalized, with its masks

The box is computed in int64 and equals that of `forebay.images.fit`. The pixels equal Pillow's to the last bit: two
matrix products with rounding after each, horizontal first, but vertical first if an image loses more than twice as much
height as width, as Pillow does since 13.0 (earlier versions always began horizontally, and may differ by 1).

    6 pixels resized to 3, bilinear         0    1    2    3    4    5
                                       0   .43  .43  .14              the triangle is as wide as two new pixels,
                                       1        .12  .38  .38  .12    cut off at the ends of the line,
                                       2                  .14  .43  .43      and each row sums to 1

Pillow's weights are integers, in units of 2⁻²², and so are these: products of integers are exact in float64. All
operations exist in torch and ONNX, for lengths that are known only when the graph runs.
"""

import math
from collections.abc import Callable
from typing import NamedTuple

import numpy as np
import torch
from torch import Tensor, nn

from forebay.errors import choice_error
from forebay.images import ImageRecipe
from forebay.images.geometry import Normalize, Scaling, fit
from forebay.images.recipe import KeepsRecipes, image_recipe
from forebay.images.token_masks import TokenMasks
from forebay.masks.rectangle import IGNORE_THRESHOLD
from forebay.torch.batches import Batch
from forebay.torch.images.device_pixels import masks_on_device, normalize_on_device

PRECISION_BITS = 22


class Kernel(NamedTuple):
    """The weight of a pixel by its distance in new pixels, and the distance from which on it is 0."""

    weight: Callable[[Tensor], Tensor]
    support: float


def resize_weights(length: int, fitted: Tensor, positions: Tensor, resample: str) -> Tensor:
    """Return the weights `[positions, length]` of a line's pixels in the given pixels of it, resized to `fitted`.

    They are whole numbers in float64 that sum to about 2²². A line becomes shorter or keeps its length.
    """
    scale = torch.scalar_tensor(length, dtype=torch.float64, device=positions.device) / fitted
    pixels = torch.arange(length, device=positions.device)
    kernel = KERNELS[resample]
    centers = (positions.double() + 0.5) * scale
    weights = kernel.weight((pixels - centers[:, None] + 0.5) * torch.reciprocal(scale))
    # Pillow rounds the position of the first pixel (a cast truncates, as in C). The kernel alone may include the one
    # before it at the edge of a box; at the other end they agree.
    first = (centers - kernel.support * scale + 0.5).long()[:, None]
    weights = torch.where(pixels >= first, weights, 0.0)
    weights = weights / weights.sum(dim=1, keepdim=True)
    rounding = torch.where(weights < 0, -0.5, 0.5)
    return (weights * float(1 << PRECISION_BITS) + rounding).long().double()


def resized_line(sums: Tensor) -> Tensor:
    """Return the pixels for sums of weighted pixels: rounded, and clamped to 0 … 255."""
    half = 1 << (PRECISION_BITS - 1)
    return torch.floor((sums + half) * 2.0**-PRECISION_BITS).clamp(0, 255)


def _triangle(distance: Tensor) -> Tensor:
    return (1.0 - distance.abs()).clamp(min=0.0)


def _cubic(distance: Tensor) -> Tensor:
    x = distance.abs()
    near = (1.5 * x - 2.5) * x * x + 1.0
    far = (((x - 5.0) * x + 8.0) * x - 4.0) * -0.5
    return torch.where(x < 1.0, near, torch.where(x < 2.0, far, 0.0))


def _lanczos(distance: Tensor) -> Tensor:
    inside = (distance >= -3.0) & (distance < 3.0)
    return torch.where(inside, _sinc(distance) * _sinc(distance / 3.0), 0.0)


def _sinc(x: Tensor) -> Tensor:
    # A tensor, because the exporter writes a plain number as float32, which rounds π.
    turned = torch.where(x == 0.0, 1.0, x) * torch.tensor(math.pi, dtype=x.dtype, device=x.device)
    return torch.where(x == 0.0, 1.0, torch.sin(turned) / turned)


KERNELS = {
    "bilinear": Kernel(_triangle, 1.0),
    "bicubic": Kernel(_cubic, 2.0),
    "lanczos": Kernel(_lanczos, 3.0),
}


class LetterboxModule(nn.Module):
    """Turns upright RGB images into the tensors of an `ImageBatch(masks="host")`.

        class Tagger(nn.Module):
            def forward(self, image):                      # uint8 [height, width, 3], as np.asarray(picture) is
                batch = self.letterbox(image)
                return self.model(batch["pixels"], batch["token_mask"]).sigmoid()

        dynamic = {"image": {0: torch.export.Dim.DYNAMIC, 1: torch.export.Dim.DYNAMIC}}
        torch.onnx.export(Tagger(), (example,), "tagger.onnx", dynamo=True, dynamic_shapes=dynamic)

    Images are uint8 `[height, width, 3]`, or `[images, 3, height, width]` of one size. The options are those of an
    `ImageBatch`. The result has `pixels` `[images, 3, size, size]`, `box`, `original_size`, `pixel_mask` (True = PAD)
    and, with a `patch`, `token_mask` (True = ignored).

    Apply EXIF orientation, alpha and 16-bit conversion before, as `forebay.images.prepare` does. The effects of "jpeg"
    storage and "fast" decoding on pixels are not reproduced. An image so small that all of its tokens are ignored is an
    error; an exported graph cannot raise, so there its whole `token_mask` is True. The products are dense:
    6 · size operations per pixel of the image, 2.7 · 10⁹ per megapixel at 448, in float64. The resamplers "nearest" and
    "box" cannot be exported.
    """

    def __init__(
        self,
        recipe: ImageRecipe | KeepsRecipes,
        *,
        normalize: Normalize = None,
        dtype: torch.dtype = torch.uint8,
        patch: int | None = None,
        threshold: float = IGNORE_THRESHOLD,
    ) -> None:
        super().__init__()
        stored = image_recipe(recipe)
        _check_dtype(dtype, normalize)
        if stored.resample not in KERNELS:
            raise choice_error("resample of a LetterboxModule", stored.resample, list(KERNELS))
        self.size, self.resample, self.pad_color = stored.size, stored.resample, stored.pad_color
        self.dtype, self.patch = dtype, patch
        self._tokens = None if patch is None else TokenMasks(stored.size, patch, threshold)
        self.normalize, self.threshold = normalize, threshold
        Scaling.of(normalize)  # raises for a wrong one

    def forward(self, image: Tensor) -> Batch:
        planes = _planes(image)
        images, _, height, width = planes.shape
        if not torch.compiler.is_exporting():
            self._check_size(width, height)
        sides = torch.stack([torch.scalar_tensor(side, dtype=torch.int64) for side in (width, height)])
        sides = sides.to(planes.device)
        box = letterbox_box(sides, self.size)
        across, down = self._line(width, box[0], box[2]), self._line(height, box[1], box[3])
        content = down.inside[:, None] & across.inside[None, :]
        pixels = torch.where(content, _resized(planes, across.weights.mT, down.weights, box), self._pad(planes.device))
        batch = {
            "pixels": self._values(pixels.to(torch.uint8)),
            "box": _for_each(images, box.int()),
            "original_size": _for_each(images, sides.int()),
        }
        return masks_on_device(batch, self.patch, self.threshold)

    def _line(self, length: int, start: Tensor, fitted: Tensor) -> "_Line":
        offsets = torch.arange(self.size, device=start.device) - start
        # Padding gets the weights of the nearest content, and is overwritten with the pad color.
        nearest = torch.minimum(offsets.clamp(min=0), fitted - 1)
        return _Line((offsets >= 0) & (offsets < fitted), resize_weights(length, fitted, nearest, self.resample))

    def _values(self, pixels: Tensor) -> Tensor:
        return pixels if self.dtype == torch.uint8 else normalize_on_device(pixels, self.normalize, self.dtype)

    def _pad(self, device: torch.device) -> Tensor:
        return torch.tensor(self.pad_color, dtype=torch.float64, device=device)[:, None, None]

    def _check_size(self, width: int, height: int) -> None:
        """Raise for an image that training rejects: without a pixel, or without a kept token."""
        box = fit(width, height, self.size).box
        if self._tokens is not None:
            self._tokens.of_boxes(np.array([box], np.int32), (self.size, self.size), lambda _: "<an image>")


class _Line(NamedTuple):
    """One axis of the canvas: which of its pixels are content, and their weights."""

    inside: Tensor  # (size,)
    weights: Tensor  # (size, length)


def letterbox_box(sides: Tensor, size: int) -> Tensor:
    """Return the box `[..., 4]` (left, top, width, height) of an image `[..., 2]` (width, height), all int64."""
    m = sides.amax(dim=-1, keepdim=True).clamp(min=size)
    fitted = ((2 * sides * size + m) // (2 * m)).clamp(min=1)
    return torch.cat(((size - fitted) // 2, fitted), dim=-1)


def _resized(planes: Tensor, across: Tensor, down: Tensor, box: Tensor) -> Tensor:
    """Return the planes times `across` `[width, size]` and `down` `[size, height]`, in Pillow's order."""
    height, width = planes.shape[-2:]
    vertical_first = height - box[3] > 2 * (width - box[2])
    operands = (planes.to(across.dtype), across.contiguous(), down)
    if torch.compiler.is_exporting():  # eager `cond` would compile
        both_ways: Tensor = torch.cond(vertical_first, _down_then_across, _across_then_down, operands)
        return both_ways
    return _down_then_across(*operands) if bool(vertical_first) else _across_then_down(*operands)


def _across_then_down(planes: Tensor, across: Tensor, down: Tensor) -> Tensor:
    return resized_line(down @ resized_line(planes @ across))


def _down_then_across(planes: Tensor, across: Tensor, down: Tensor) -> Tensor:
    return resized_line(resized_line(down @ planes) @ across)


def _for_each(images: int, shared: Tensor) -> Tensor:
    return shared.expand(images, *shared.shape)


def _planes(image: Tensor) -> Tensor:
    """`[images, 3, height, width]`."""
    planes = image.permute(2, 0, 1)[None] if image.dim() == 3 else image
    if planes.dim() != 4 or planes.shape[1] != 3 or planes.dtype != torch.uint8:
        raise ValueError(
            "the image must be torch.uint8 [height, width, 3] or [images, 3, height, width] "
            f"(got {image.dtype} {tuple(image.shape)}); pass RGB pixels as decoded"
        )
    return planes


def _check_dtype(dtype: torch.dtype, normalize: Normalize) -> None:
    if dtype != torch.uint8 and not dtype.is_floating_point:
        raise ValueError(f"dtype must be torch.uint8 or a float type (got {dtype})")
    if dtype == torch.uint8 and normalize is not None:
        raise ValueError(f"normalize needs a float dtype (got {normalize!r} with uint8)")
