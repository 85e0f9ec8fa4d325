"""Normalize the pixels of a batch, and derive its masks from boxes, on the device that trains."""

from functools import lru_cache

import torch
from torch import Tensor

from forebay.images.geometry import Normalize, Scaling
from forebay.masks.rectangle import IGNORE_THRESHOLD, Size
from forebay.torch.batches import Batch


def normalize_on_device(
    pixels: Tensor, normalize: Normalize = "imagenet", dtype: torch.dtype = torch.float32
) -> Tensor:
    """Return the pixels of `ImageBatch(normalize=…, dtype=…)` from its uint8 pixels `[..., 3, height, width]`.

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
        if not 0 < threshold <= 1:
            raise ValueError(f"threshold must be above 0 and up to 1 (got {threshold})")
        if patch < 1 or height % patch or width % patch:
            raise ValueError(
                f"patch must be at least 1 and divide the canvas of {height} × {width} pixels (got {patch})"
            )
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
