"""Where in an image the velocity's loss counts: Sol's maps and the letterbox, each with mean 1.

Sol 8×8 ──bilinear──▶ 64×64 ──÷ mean──▶ weights        latent_weights 64×64 (share of real pixels) ──× ──÷ mean──▶
"""

import torch
from torch import Tensor
from torch.nn.functional import interpolate

from forebay.torch.distill.rows import TeacherRows


def spatial_weights(maps: Tensor, size: tuple[int, int] = (64, 64)) -> Tensor:
    """Maps (rows, 8, 8), resized and divided by their means: weights (rows, *size) that leave the loss its scale."""
    resized = interpolate(maps.float().unsqueeze(1), size=size, mode="bilinear", align_corners=False).squeeze(1)
    return _mean_one(resized)


def loss_weights(
    spatial: TeacherRows | None = None,
    content: Tensor | None = None,
    size: tuple[int, int] = (64, 64),
) -> Tensor | None:
    """One weight for each place: where Sol looks, and no padding. `content` (rows, *size) is the share of real pixels.

    A row without a map weighs all its places alike.
    """
    weights = content.float() if content is not None else None
    if spatial is not None:
        maps = spatial_weights(spatial.filled(torch.ones_like(spatial.values)), size)
        weights = maps if weights is None else maps * weights
    return None if weights is None else _mean_one(weights)


def _mean_one(weights: Tensor) -> Tensor:
    return weights / weights.mean(dim=(-2, -1), keepdim=True)
