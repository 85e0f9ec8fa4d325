"""Pillow's resampling as matrices: how much every pixel of a line counts in every pixel of the resized line.

    6 pixels resized to 3, bilinear         0    1    2    3    4    5
                                       0   .43  .43  .14              the triangle is as wide as two new pixels,
                                       1        .12  .38  .38  .12    cut off at the ends of the line,
                                       2                  .14  .43  .43      and each row sums to 1

Pillow resizes images of 8 bits in two passes and rounds after each. Its weights are integers, in units of 2⁻²², and so
are these: the products of integers are exact in float64, and the pixels are Pillow's to the last bit. All of it is made
of operations that torch and ONNX have, for lines whose length is known when the graph runs.
"""

import math
from collections.abc import Callable
from typing import NamedTuple

import torch
from torch import Tensor

PRECISION_BITS = 22


class Kernel(NamedTuple):
    """How much a pixel counts at a distance, in new pixels, and the distance from which on it does not."""

    weight: Callable[[Tensor], Tensor]
    support: float


def resize_weights(length: int, fitted: Tensor, positions: Tensor, resample: str) -> Tensor:
    """The weights `[positions, length]` of a line of `length` pixels in some pixels of it, resized to `fitted`.

    They are whole numbers in float64, 2²² for all of a pixel. A line gets shorter, or stays as it is.
    """
    scale = torch.scalar_tensor(length, dtype=torch.float64, device=positions.device) / fitted
    pixels = torch.arange(length, device=positions.device)
    if resample == "nearest":
        return (pixels == _nearest(scale, positions)[:, None]).double() * float(1 << PRECISION_BITS)
    kernel = KERNELS[resample]
    centers = (positions.double() + 0.5) * scale
    weights = kernel.weight((pixels - centers[:, None] + 0.5) * torch.reciprocal(scale))
    # The first pixel that counts is one by Pillow's rounding (a cast cuts off, as in C). The kernel's own may see the
    # one before it at the edge of a box; at the other end they agree.
    first = (centers - kernel.support * scale + 0.5).long()[:, None]
    weights = torch.where(pixels >= first, weights, 0.0)
    return _in_fixed_point(weights / weights.sum(dim=1, keepdim=True))


def resized_line(sums: Tensor) -> Tensor:
    """The pixels that sums of weighted pixels stand for: rounded, and no less than 0 nor more than 255."""
    half = 1 << (PRECISION_BITS - 1)
    return torch.floor((sums + half) * 2.0**-PRECISION_BITS).clamp(0, 255)


def _nearest(scale: Tensor, positions: Tensor) -> Tensor:
    # Pillow adds the scale up, with the errors that come of it; so do we, or some pixels would be the next ones.
    steps = torch.cat(((scale * 0.5)[None], scale.expand(len(positions) - 1)))
    return steps.cumsum(dim=0)[positions].long()


def _in_fixed_point(weights: Tensor) -> Tensor:
    rounding = torch.where(weights < 0, -0.5, 0.5)
    return (weights * float(1 << PRECISION_BITS) + rounding).long().double()


def _box(distance: Tensor) -> Tensor:
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
    # A tensor, because the exporter writes a plain number as float32, and π is not one.
    turned = torch.where(x == 0.0, 1.0, x) * torch.tensor(math.pi, dtype=torch.float64, device=x.device)
    return torch.where(x == 0.0, 1.0, torch.sin(turned) / turned)


KERNELS = {
    "box": Kernel(_box, 0.5),
    "bilinear": Kernel(_triangle, 1.0),
    "bicubic": Kernel(_cubic, 2.0),
    "lanczos": Kernel(_lanczos, 3.0),
}
