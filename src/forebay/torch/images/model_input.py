"""Letterbox and normalize images inside a model, so that both are exported with it.

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
from functools import lru_cache
from typing import NamedTuple

import numpy as np
import torch
from torch import Tensor, nn

from forebay.images import ImageRecipe, KeepsRecipes, image_recipe
from forebay.images.geometry import Normalize, Scaling, fit
from forebay.masks.rectangle import IGNORE_THRESHOLD, Size
from forebay.torch.batches import Batch
from forebay.torch.images.canvas_maker import TokenMasks


def normalize_on_device(
    pixels: Tensor, normalize: Normalize = "imagenet", dtype: torch.dtype = torch.float32
) -> Tensor:
    """Return what `ImageBatch(normalize=…, dtype=…)` makes, from its uint8 pixels `[..., 3, height, width]`.

        batch = next(iter(Loader(cache, global_batch_size=64)))
        values = normalize_on_device(batch["pixels"].to("cuda", non_blocking=True), "imagenet", torch.bfloat16)

    It computes the same product and sum in float32, each rounded, then casts to `dtype`: equal bit by bit on any
    device. If a compiler fuses the two, values differ by at most an ulp of the larger one (5e-7 with "imagenet").
    """
    if pixels.dtype != torch.uint8 or pixels.ndim < 3 or pixels.shape[-3] != 3:
        raise ValueError(
            "pixels must be uint8 [..., 3, height, width], as an ImageBatch without `normalize` returns them "
            f"(got {pixels.dtype} {list(pixels.shape)})"
        )
    scaling = Scaling.of(normalize)
    # Tensors that an exporter traces must not be cached.
    planes = _channel_planes if type(pixels) is Tensor else _channel_planes.__wrapped__
    scale, shift = (planes(tuple(each.ravel().tolist()), pixels.device) for each in (scaling.scale, scaling.shift))
    return pixels.to(torch.float32).mul_(scale).add_(shift).to(dtype)


def masks_on_device(
    batch: Batch, patch: int | None = None, threshold: float = IGNORE_THRESHOLD, size: Size | None = None
) -> Batch:
    """Return a batch of an `ImageBatch` with `pixel_mask` and, with a `patch`, `token_mask`.

        sent = {name: values.to("cuda", non_blocking=True) for name, values in batch.items()}
        batch = masks_on_device(sent, patch=16)          # or torch.compile(masks_on_device)

    They are made from `box` on its device, equal to those of `ImageBatch(masks="host")` unless its transforms leave
    padding inside a box. `size` is (height, width) of the canvases, that of `pixels` unless you pass it.
    """
    height, width = batch["pixels"].shape[-2:] if size is None else size
    box = batch["box"].to(torch.int64)
    rows = _covered(height, 1, box[:, 1], box[:, 3])
    columns = _covered(width, 1, box[:, 0], box[:, 2])
    derived = batch | {"pixel_mask": (rows[:, :, None] * columns[:, None, :]) == 0}
    if patch is not None:
        if height % patch or width % patch:
            raise ValueError(f"patch must divide the canvas of {height} × {width} pixels (got {patch})")
        rows = _covered(height, patch, box[:, 1], box[:, 3])
        columns = _covered(width, patch, box[:, 0], box[:, 2])
        padded = (patch * patch - rows[:, :, None] * columns[:, None, :]).to(torch.float64) / (patch * patch)
        derived["token_mask"] = padded >= threshold
    return derived


def _covered(length: int, cell: int, start: Tensor, count: Tensor) -> Tensor:
    """Return how many pixels of each cell of a line the content from `start` on covers, `[images, length / cell]`."""
    edges = torch.arange(0, length, cell, device=start.device)
    stop = (start + count)[:, None]
    return (torch.minimum(edges + cell, stop) - torch.maximum(edges, start[:, None])).clamp(min=0)


@lru_cache(maxsize=64)
def _channel_planes(values: tuple[float, ...], device: torch.device) -> Tensor:
    """Return values as `[3, 1, 1]` on a device. Cached, since sending them for every batch would make it wait."""
    return torch.tensor(values, dtype=torch.float32, device=device)[:, None, None]


PRECISION_BITS = 22


class Kernel(NamedTuple):
    """The weight of a pixel by its distance in new pixels, and the distance from which on it is 0."""

    weight: Callable[[Tensor], Tensor]
    support: float


def resize_weights(
    length: int, fitted: Tensor, positions: Tensor, resample: str, precision: torch.dtype = torch.float64
) -> Tensor:
    """Return the weights `[positions, length]` of a line's pixels in the given pixels of it, resized to `fitted`.

    In float64 they are whole numbers that sum to about 2²², in float32 they sum to 1. A line becomes shorter or keeps
    its length.
    """
    scale = torch.scalar_tensor(length, dtype=precision, device=positions.device) / fitted
    pixels = torch.arange(length, device=positions.device)
    if resample == "nearest":
        return (pixels == _nearest(scale, positions)[:, None]).double() * float(1 << PRECISION_BITS)
    kernel = KERNELS[resample]
    centers = (positions.to(precision) + 0.5) * scale
    weights = kernel.weight((pixels - centers[:, None] + 0.5) * torch.reciprocal(scale))
    # Pillow rounds the position of the first pixel (a cast truncates, as in C). The kernel alone may include the one
    # before it at the edge of a box; at the other end they agree.
    first = (centers - kernel.support * scale + 0.5).long()[:, None]
    weights = torch.where(pixels >= first, weights, 0.0)
    weights = weights / weights.sum(dim=1, keepdim=True)
    return _in_fixed_point(weights) if precision == torch.float64 else weights


def resized_line(sums: Tensor) -> Tensor:
    """Return the pixels for sums of weighted pixels: rounded, and clamped to 0 … 255."""
    if sums.dtype != torch.float64:
        return torch.floor(sums + 0.5).clamp(0, 255)
    half = 1 << (PRECISION_BITS - 1)
    return torch.floor((sums + half) * 2.0**-PRECISION_BITS).clamp(0, 255)


def _nearest(scale: Tensor, positions: Tensor) -> Tensor:
    # Pillow accumulates the scale, with its rounding errors. So does this, else some pixels would be off by one.
    steps = torch.cat(((scale * 0.5)[None], scale.expand(len(positions) - 1)))
    return steps.cumsum(dim=0)[positions].long()


def _in_fixed_point(weights: Tensor) -> Tensor:
    rounding = torch.where(weights < 0, -0.5, 0.5)
    return (weights * float(1 << PRECISION_BITS) + rounding).long().double()


def _box(distance: Tensor) -> Tensor:  # float64 only
    return ((distance > -0.5) & (distance <= 0.5)).double()


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
    "box": Kernel(_box, 0.5),
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
    `ImageBatch`. The result has `pixels` `[images, 3, size, size]`, `pixel_mask` (True = PAD), `box`, `original_size`
    and, with a `patch`, `token_mask` (True = ignored).

    Apply EXIF orientation, alpha and 16-bit conversion before, as `forebay.images.prepare` does. The effects of "jpeg"
    storage and "fast" decoding on pixels are not reproduced. An image so small that all of its tokens are ignored is an
    error; an exported graph cannot raise, so there its whole `token_mask` is True. The products are dense:
    6 · size operations per pixel of the image, 2.7 · 10⁹ per megapixel at 448. They are in float64, which some runtimes
    do not have (TensorRT, WebGPU, Core ML): `precision=torch.float32` has no float64 in the graph, and pixels differ by
    at most 1 from those of training. The resamplers "nearest" and "box" need float64.
    """

    def __init__(
        self,
        recipe: ImageRecipe | KeepsRecipes,
        *,
        normalize: Normalize = None,
        dtype: torch.dtype = torch.uint8,
        patch: int | None = None,
        threshold: float = IGNORE_THRESHOLD,
        precision: torch.dtype = torch.float64,
    ) -> None:
        super().__init__()
        stored = image_recipe(recipe)
        _check_dtype(dtype, normalize)
        _check_precision(precision, stored.resample)
        self.precision = precision
        self.size, self.resample, self.pad_color = stored.size, stored.resample, stored.pad_color
        self.dtype, self.patch = dtype, patch
        self._tokens = None if patch is None else TokenMasks(stored.size, patch, threshold)
        self._least_padded = 0 if patch is None else _least_padded(patch, threshold)
        # Not registered as buffers: `model.half()` would round them.
        scaling = Scaling.of(normalize)
        self._scale, self._shift = scaling.scale.tolist(), scaling.shift.tolist()

    def forward(self, image: Tensor) -> Batch:
        planes = _planes(image)
        images, _, height, width = planes.shape
        if not torch.compiler.is_exporting():
            self._refuse(width, height)
        sides = torch.stack([torch.scalar_tensor(side, dtype=torch.int64) for side in (width, height)])
        sides = sides.to(planes.device)
        box = letterbox_box(sides, self.size)
        across, down = self._line(width, box[0], box[2]), self._line(height, box[1], box[3])
        content = down.inside[:, None] & across.inside[None, :]
        pixels = torch.where(content, _resized(planes, across.weights.mT, down.weights, box), self._pad(planes.device))
        batch = {
            "pixels": self._values(pixels),
            "pixel_mask": _for_each(images, ~content),
            "box": _for_each(images, box.int()),
            "original_size": _for_each(images, sides.int()),
        }
        if self.patch is not None:
            batch["token_mask"] = _for_each(images, self._ignored(across.inside, down.inside, self.patch))
        return batch

    def _line(self, length: int, start: Tensor, fitted: Tensor) -> "_Line":
        places = torch.arange(self.size, device=start.device) - start
        # Padding gets the weights of the nearest content, and is overwritten with the pad color.
        nearest = torch.minimum(places.clamp(min=0), fitted - 1)
        return _Line((places >= 0) & (places < fitted), self._weights(length, fitted, nearest))

    def _weights(self, length: int, fitted: Tensor, positions: Tensor) -> Tensor:
        return resize_weights(length, fitted, positions, self.resample, self.precision)

    def _values(self, pixels: Tensor) -> Tensor:
        if self.dtype == torch.uint8:
            return pixels.to(torch.uint8)
        scale, shift = (
            torch.tensor(values, dtype=torch.float32, device=pixels.device) for values in (self._scale, self._shift)
        )
        return (pixels.float() * scale + shift).to(self.dtype)

    def _ignored(self, across: Tensor, down: Tensor, patch: int) -> Tensor:
        columns, rows = (inside.reshape(-1, patch).sum(dim=1) for inside in (across, down))
        return patch * patch - rows[:, None] * columns[None, :] >= self._least_padded

    def _pad(self, device: torch.device) -> Tensor:
        return torch.tensor(self.pad_color, dtype=self.precision, device=device)[:, None, None]

    def _refuse(self, width: int, height: int) -> None:
        """Raise for an image that training refuses: without a pixel, or without a kept token."""
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


def _check_precision(precision: torch.dtype, resample: str) -> None:
    if precision not in (torch.float64, torch.float32):
        raise ValueError(f"precision must be torch.float64 or torch.float32 (got {precision})")
    if precision == torch.float32 and resample in ("nearest", "box"):
        raise ValueError(
            f"precision must be torch.float64 for resample={resample!r}, which takes a pixel or leaves it (got "
            f"{precision})"
        )


def _least_padded(patch: int, threshold: float) -> int:
    """Return the fewest padded pixels with which a patch is ignored; integers compare exactly on every device."""
    pixels = patch * patch
    return next(padded for padded in range(pixels + 1) if padded / pixels >= threshold)
