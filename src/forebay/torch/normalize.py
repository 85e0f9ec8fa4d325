"""Normalising where the model is: pixels travel as uint8, a quarter of float32, and become values on the device."""

from functools import lru_cache

import torch
from torch import Tensor

from forebay.images.normalize import Normalize, Scaling


def normalize_on_device(
    pixels: Tensor, normalize: Normalize = "imagenet", dtype: torch.dtype = torch.float32
) -> Tensor:
    """What `ImageBatch(normalize=…, dtype=…)` makes, from its uint8 pixels `[..., 3, height, width]` on any device.

        batch = next(iter(Loader(cache, global_batch_size=64)))
        values = normalize_on_device(batch["pixels"].to("cuda", non_blocking=True), "imagenet", torch.bfloat16)

    The same product and sum in float32, each rounded, then the type asked for: equal bit by bit. Where a compiler
    rounds both at once, values differ by at most an ulp of the larger of product and shift (5e-7 with "imagenet").
    """
    if pixels.dtype != torch.uint8 or pixels.ndim < 3 or pixels.shape[-3] != 3:
        raise ValueError(
            f"pixels are {pixels.dtype} of shape {list(pixels.shape)}; uint8 [..., 3, height, width] is expected, as "
            "an ImageBatch gives them without `normalize`"
        )
    scaling = Scaling.of(normalize)
    scale, shift = (_planes(tuple(each.ravel().tolist()), pixels.device) for each in (scaling.scale, scaling.shift))
    return pixels.to(torch.float32).mul_(scale).add_(shift).to(dtype)


@lru_cache(maxsize=64)
def _planes(values: tuple[float, ...], device: torch.device) -> Tensor:
    """`[3, 1, 1]`, on a device for good: sending three numbers there for every batch would make it wait."""
    return torch.tensor(values, dtype=torch.float32, device=device)[:, None, None]
