"""Train a student with cached teachers: losses, weights, dropout and times.

batch of Timed("lune", t) ──TeacherRows.of──▶ values, present ──dropout──▶ TeacherRows
loss = velocity loss + warm-up · feature_loss(predicted, rows)
"""

from forebay.torch.distill.losses import (
    LossMode,
    Warmup,
    feature_loss,
    forward_kl_top_k,
    loss_weights,
    sol_loss,
    spatial_weights,
)
from forebay.torch.distill.teacher_rows import TeacherDropout, TeacherRows
from forebay.torch.distill.times import LogitNormalTimes

__all__ = [
    "LogitNormalTimes", "LossMode", "TeacherDropout", "TeacherRows", "Warmup", "feature_loss", "forward_kl_top_k",
    "loss_weights", "sol_loss", "spatial_weights",
]  # fmt: skip
