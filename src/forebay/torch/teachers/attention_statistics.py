"""What attention over a square grid is like: four numbers and a map.

Attention is p[query, key] ≥ 0 with sum 1 over keys; positions lie on a grid of side s, N = s².
"""

from functools import lru_cache
from math import isqrt, log

import torch
from torch import Tensor
from torch.nn.functional import adaptive_avg_pool2d, interpolate


def attention_statistics(attention: Tensor) -> Tensor:
    """Locality, entropy, clustering, sparsity, each from 0 to 1: `(samples, heads, N, N)` → `(samples, 4)`."""
    count = attention.shape[-1]
    side = grid_side(count)
    entropy = -(attention * attention.clamp_min(1e-30).log()).sum(-1) / log(count)
    apart = (attention * _distances(side).to(attention)).sum(-1) / _distances(side).max().item()
    sparsity = (count - 1 / attention.square().sum(-1)) / (count - 1)
    found = torch.stack([_mean(1 - apart), _mean(entropy), _clustering(attention, side), _mean(sparsity)], dim=-1)
    return found.clamp(0.0, 1.0)


def attention_received(attention: Tensor, side: int) -> Tensor:
    """How much each place is looked at, resampled to a grid, with sum 1: `(samples, side, side)`."""
    received = attention.mean(dim=(1, 2))
    own = grid_side(received.shape[-1])
    map_ = received.reshape(-1, 1, own, own)
    resampled = adaptive_avg_pool2d(map_, side) if own >= side else interpolate(map_, size=(side, side), mode="nearest")
    return (resampled / resampled.sum(dim=(2, 3), keepdim=True))[:, 0]


def grid_side(positions: int) -> int:
    side = isqrt(positions)
    if side * side != positions or side < 2:
        raise ValueError(f"{positions} positions are no square grid of at least 2 × 2")
    return side


def _clustering(attention: Tensor, side: int) -> Tensor:
    """How much queries that lie side by side share what they look at."""
    grid = attention.reshape(*attention.shape[:2], side, side, -1)
    across = torch.minimum(grid[:, :, :, 1:], grid[:, :, :, :-1]).sum(-1)
    down = torch.minimum(grid[:, :, 1:], grid[:, :, :-1]).sum(-1)
    return (_mean(across.flatten(2)) + _mean(down.flatten(2))) / 2


def _mean(values: Tensor) -> Tensor:
    """Over heads and queries."""
    return values.mean(dim=(1, 2))


@lru_cache(maxsize=8)
def _distances(side: int) -> Tensor:
    """How far positions lie apart, `(N, N)`."""
    places = torch.cartesian_prod(torch.arange(side), torch.arange(side)).double()
    return torch.cdist(places, places)
