"""Train a student with cached teachers: losses, weights, dropout and flow matching.

x_t, v ← flow          teacher rows ← Features.at(rows, t) ──dropout──▶ TeacherRows (values, present)
loss = flow_loss(v_pred, v) + warm-up · feature_loss(predicted, rows.values, present=rows.present)
"""

from forebay.torch.distill.flow import (
    LogitNormalTimes,
    interpolate,
    min_snr_weight,
    sample_times,
    shift_times,
    velocity,
)
from forebay.torch.distill.losses import (
    LossMode,
    Warmup,
    feature_loss,
    flow_loss,
    forward_kl_top_k,
    loss_weights,
    sol_loss,
    spatial_weights,
)
from forebay.torch.distill.timed_features import TeacherDropout, TeacherRows

__all__ = [
    "LogitNormalTimes", "LossMode", "TeacherDropout", "TeacherRows", "Warmup", "feature_loss",
    "flow_loss", "forward_kl_top_k", "interpolate", "loss_weights", "min_snr_weight", "sample_times", "shift_times",
    "sol_loss", "spatial_weights", "velocity",
]  # fmt: skip
