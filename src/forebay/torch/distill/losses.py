"""Losses of a student: against teachers and against velocity, weighted over space and time.

    cosine   1 − cos(p, t)               by direction, the default
    mse      (p − t)²
    huber    ½·min(|d|, δ)² + δ·(|d| − min(|d|, δ))      δ = 0.1

Every loss is a mean over the rows that are present, each row counting alike; with none present it is 0, and so is its
gradient. All arithmetic is float32, whatever autocast or the cache's type.

Sol 8×8 ──bilinear──▶ 64×64 ──÷ mean──▶ weights        latent_weights 64×64 (share of real pixels) ──× ──÷ mean──▶
"""

from collections.abc import Callable
from dataclasses import dataclass
from typing import Literal

import torch
from torch import Tensor
from torch.nn.functional import cosine_similarity, huber_loss, interpolate, mse_loss

from forebay.torch.distill.timed_features import TeacherRows

LossMode = Literal["cosine", "mse", "huber"]
HUBER_DELTA = 0.1


def feature_loss(
    predicted: Tensor, target: Tensor, mode: LossMode = "cosine", *, present: Tensor | None = None
) -> Tensor:
    """The mean loss over the present rows. Of values with more than one axis, cosines are taken along the last.

    >>> feature_loss(torch.tensor([[1.0, 0.0], [2.0, 2.0]]), torch.tensor([[0.0, 1.0], [1.0, 1.0]])).item()
    0.5
    """
    if mode not in _ROW_LOSSES:
        raise ValueError(f"the loss mode is {mode!r}; known are: {', '.join(_ROW_LOSSES)}")
    _check_shapes(predicted, target, present)
    if present is None:
        return _ROW_LOSSES[mode](predicted.float(), target.float()).mean()
    # What stands in an absent row, NaN as a rule, must not reach the arithmetic: its gradient would be NaN, times 0.
    known = torch.where(present.view(-1, *[1] * (target.dim() - 1)), target.float(), 0.0)
    losses = _ROW_LOSSES[mode](predicted.float(), known)
    return torch.where(present, losses, 0.0).sum() / present.sum().clamp(min=1)


def sol_loss(
    stats_predicted: Tensor, spatial_predicted: Tensor, stats: Tensor, spatial: Tensor, *, present: Tensor | None = None
) -> Tensor:
    """MSE of the statistics plus MSE of the maps."""
    of_stats = feature_loss(stats_predicted, stats, "mse", present=present)
    return of_stats + feature_loss(spatial_predicted, spatial, "mse", present=present)


def flow_loss(
    predicted: Tensor, target: Tensor, *, weights: Tensor | None = None, row_weights: Tensor | None = None
) -> Tensor:
    """Mean square error of velocities, (rows, channels, height, width) as a rule.

    `weights` (rows, height, width) weigh places, as `loss_weights` makes them; `row_weights` (rows,) weigh rows, as
    `min_snr_weight` does.
    """
    _check_shapes(predicted, target, None)
    errors = (predicted.float() - target.float()).square().mean(dim=1)  # (rows, height, width)
    if weights is not None:
        if weights.shape != errors.shape:
            raise ValueError(f"weights are {tuple(weights.shape)}; {tuple(errors.shape)} is expected")
        errors = errors * weights
    losses = _row_means(errors)
    if row_weights is None:
        return losses.mean()
    if row_weights.shape != losses.shape:
        raise ValueError(f"row_weights are {tuple(row_weights.shape)}; {tuple(losses.shape)} is expected")
    return (losses * row_weights).mean()


def _cosine(predicted: Tensor, target: Tensor) -> Tensor:
    return _row_means(1 - cosine_similarity(predicted, target, dim=-1))


def _mse(predicted: Tensor, target: Tensor) -> Tensor:
    return _row_means(mse_loss(predicted, target, reduction="none"))


def _huber(predicted: Tensor, target: Tensor) -> Tensor:
    return _row_means(huber_loss(predicted, target, reduction="none", delta=HUBER_DELTA))


_ROW_LOSSES: dict[str, Callable[[Tensor, Tensor], Tensor]] = {"cosine": _cosine, "mse": _mse, "huber": _huber}


def _row_means(losses: Tensor) -> Tensor:
    return losses.reshape(len(losses), -1).mean(dim=1)


def _check_shapes(predicted: Tensor, target: Tensor, present: Tensor | None) -> None:
    """Broadcasting would make a number of what does not belong together."""
    if predicted.shape != target.shape:
        raise ValueError(f"predicted is {tuple(predicted.shape)}, the target {tuple(target.shape)}; they must be equal")
    if present is not None and (present.dtype != torch.bool or present.shape != target.shape[:1]):
        raise ValueError(f"present is {present.dtype} {tuple(present.shape)}; bool ({len(target)},) is expected")


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


@dataclass(frozen=True, slots=True)
class Warmup:
    """`weight · min(1, step / steps)`.

    >>> lune = Warmup(0.1, steps=1000)
    >>> lune(0), lune(500), lune(5000)
    (0.0, 0.05, 0.1)
    """

    weight: float
    steps: int

    def __post_init__(self) -> None:
        if self.steps < 0:
            raise ValueError(f"a warm-up of {self.steps} steps; 0 means none")

    def __call__(self, step: int) -> float:
        return self.weight * min(1.0, step / self.steps) if self.steps else self.weight
