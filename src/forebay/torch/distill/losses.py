"""Losses of a student against teacher targets, and weights from their maps.

    cosine   1 − cos(p, t)               the default
    mse      (p − t)²
    huber    ½·min(|d|, δ)² + δ·(|d| − min(|d|, δ))      δ = 0.1

Every loss is a mean over the present rows, with equal weight; with none present, it and its gradient are 0. Targets are
`TeacherRows`, or a tensor whose absent rows are NaN. All arithmetic is float32, whatever autocast or the cache's type.

Sol 8×8 ──bilinear──▶ 64×64 ──÷ mean──▶ weights        latent_weights 64×64 (share of real pixels) ──× ──÷ mean──▶

The loss of a language model against the most likely tokens of a teacher.

The teacher's k tokens and the rest of the vocabulary are k + 1 classes:

    KL(p ‖ q) = Σ_k p_k · (log p_k − log q_k)  +  p_rest · (log p_rest − log q_rest)        p_rest = 1 − Σ_k p_k

It is at most the KL divergence over the whole vocabulary, and 0 only if the student has the teacher's probabilities.
Without the rest, a student would be free to move mass between the k tokens and all others.
"""

from collections.abc import Callable
from dataclasses import dataclass
from typing import Literal

import torch
from torch import Tensor
from torch.nn.functional import cosine_similarity, huber_loss, interpolate, mse_loss

from forebay.fields import checked_number, checked_whole
from forebay.torch.distill.teacher_rows import Targets, TeacherRows

LossMode = Literal["cosine", "mse", "huber"]
HUBER_DELTA = 0.1


def feature_loss(predicted: Tensor, target: Targets, mode: LossMode = "cosine") -> Tensor:
    """Return the mean loss over the present rows; with more than one axis, cosines are along the last.

    >>> feature_loss(torch.tensor([[1.0, 0.0], [2.0, 2.0]]), torch.tensor([[0.0, 1.0], [1.0, 1.0]])).item()
    0.5
    """
    if mode not in _ROW_LOSSES:
        raise ValueError(f"mode must be one of {', '.join(_ROW_LOSSES)} (got {mode!r})")
    rows = TeacherRows.of(target)
    if predicted.shape != rows.values.shape:  # which broadcasting would hide
        shapes = f"{tuple(predicted.shape)} and {tuple(rows.values.shape)}"
        raise ValueError(f"predicted and target must have the same shape (got {shapes})")
    # Values of absent rows, usually NaN, must not enter the arithmetic: their gradient would be NaN · 0 = NaN.
    losses = _ROW_LOSSES[mode](predicted.float(), rows.filled(torch.zeros_like(rows.values, dtype=torch.float32)))
    return torch.where(rows.present, losses, 0.0).sum() / rows.present.sum().clamp(min=1)


def sol_loss(stats_predicted: Tensor, spatial_predicted: Tensor, stats: Targets, spatial: Targets) -> Tensor:
    """Return the MSE of the statistics plus the MSE of the maps, each over its present rows."""
    return feature_loss(stats_predicted, stats, "mse") + feature_loss(spatial_predicted, spatial, "mse")


def _cosine(predicted: Tensor, target: Tensor) -> Tensor:
    return _row_means(1 - cosine_similarity(predicted, target, dim=-1))


def _mse(predicted: Tensor, target: Tensor) -> Tensor:
    return _row_means(mse_loss(predicted, target, reduction="none"))


def _huber(predicted: Tensor, target: Tensor) -> Tensor:
    return _row_means(huber_loss(predicted, target, reduction="none", delta=HUBER_DELTA))


_ROW_LOSSES: dict[str, Callable[[Tensor, Tensor], Tensor]] = {"cosine": _cosine, "mse": _mse, "huber": _huber}


def _row_means(losses: Tensor) -> Tensor:
    return losses.reshape(len(losses), -1).mean(dim=1)


def spatial_weights(maps: Tensor, size: tuple[int, int] = (64, 64)) -> Tensor:
    """Return maps (rows, 8, 8) as weights (rows, *size) with mean 1, which keep the scale of the loss.

    Negative values count as 0: a negative weight would reward errors. A map without a positive value has equal weights.
    """
    resized = interpolate(
        maps.float().clamp(min=0).unsqueeze(1), size=size, mode="bilinear", align_corners=False
    ).squeeze(1)
    return _mean_one(resized)


def loss_weights(
    spatial: Targets | None = None,
    content: Tensor | None = None,
    size: tuple[int, int] = (64, 64),
) -> Tensor | None:
    """Return one weight per position: Sol's map times `content` (rows, *size), the share of real pixels.

    Positions of a row without a map have equal weights. No weight is negative.
    """
    if content is not None and (content < 0).any():
        raise ValueError(f"content must be at least 0 (got {content.min().item():g})")
    weights = content.float() if content is not None else None
    if spatial is not None:
        rows = TeacherRows.of(spatial)
        maps = spatial_weights(rows.filled(torch.ones_like(rows.values)), size)
        weights = maps if weights is None else maps * weights
    return None if weights is None else _mean_one(weights)


def _mean_one(weights: Tensor) -> Tensor:
    mean = weights.mean(dim=(-2, -1), keepdim=True)
    return torch.where(mean == 0, torch.ones_like(weights), weights / mean)


@dataclass(frozen=True, slots=True)
class Warmup:
    """Returns `weight · min(1, step / steps)` at a step.

    >>> lune = Warmup(0.1, steps=1000)
    >>> lune(0), lune(500), lune(5000)
    (0.0, 0.05, 0.1)
    """

    weight: float
    steps: int

    def __post_init__(self) -> None:
        checked_number("weight", self.weight, least=0)
        checked_whole("steps", self.steps)

    def __call__(self, step: int) -> float:
        return self.weight * min(1.0, step / self.steps) if self.steps else self.weight


def forward_kl_top_k(
    logits: Tensor, top_ids: Tensor, top_logps: Tensor, *, labels: Tensor | None = None, tail: bool = True
) -> Tensor:
    """Return the mean KL divergence of a student from a teacher, over the places that have the teacher's log-probs.

    `logits` are `[…, vocabulary]`; `top_ids` and `top_logps` `[…, k]`, as batches of `forebay.torch.TokenBatch` have
    them: NaN where there is none, also behind the last token of a place that has fewer than `k`. Places where `labels`
    is −100 do not count. `tail=False` leaves out the rest of the vocabulary. With no place at all, the loss and its
    gradient are 0.

    >>> teacher = torch.tensor([[0.7, 0.2, 0.1]]).log()
    >>> top = teacher.topk(2)
    >>> round(forward_kl_top_k(teacher, top.indices, top.values).item(), 6)
    0.0
    """
    _check(logits, top_ids, top_logps, labels)
    present = ~top_logps.isnan().all(dim=-1)
    if labels is not None:
        present = present & (labels != -100)
    # Absent values must not enter the arithmetic: their gradient would be NaN · 0 = NaN.
    logits, top_ids, log_p = logits[present].float(), top_ids[present].long(), top_logps[present].float()
    absent = log_p.isnan()
    top_ids = torch.where(absent, top_ids[:, :1], top_ids)  # the most likely token, which every place has
    log_q = logits.log_softmax(dim=-1)
    log_p = log_p.masked_fill(absent, 0)
    p = log_p.exp().masked_fill(absent, 0)
    losses = (p * (log_p - log_q.gather(-1, top_ids))).sum(dim=-1)
    if tail and top_ids.shape[-1] < logits.shape[-1]:
        p_rest = (1 - p.sum(dim=-1)).clamp(min=0)  # stored values are rounded
        log_q_rest = log_q.scatter(-1, top_ids, -torch.inf).logsumexp(dim=-1)
        losses = losses + torch.special.xlogy(p_rest, p_rest) - p_rest * log_q_rest
    return losses.sum() / max(1, len(losses))


def _check(logits: Tensor, top_ids: Tensor, top_logps: Tensor, labels: Tensor | None) -> None:
    if top_ids.shape != top_logps.shape or logits.shape[:-1] != top_ids.shape[:-1]:
        raise ValueError(
            f"logits, top_ids and top_logps must agree in all axes but the last, and the latter two in all (got "
            f"{tuple(logits.shape)}, {tuple(top_ids.shape)} and {tuple(top_logps.shape)})"
        )
    if labels is not None and labels.shape != logits.shape[:-1]:
        raise ValueError(f"labels must have the shape {tuple(logits.shape[:-1])} (got {tuple(labels.shape)})")
