"""Student modules that predict teacher features, and replace absent ones.

    time ──┬── predictor ──▶ predicted ──────────┬──▶ loss against the teacher, where it is present
    text ──┘                                     ├──▶ where(present, teacher, predicted): the student's input
             teacher (in training, not dropped) ─┘

At inference there is no teacher, and the student uses the prediction for every row. examples/distill_flow.py trains a
student with them. Run it: python examples/teacher_predictors.py
"""

import math
from dataclasses import dataclass

import torch
from torch import Tensor, nn

from forebay.torch.distill import TeacherRows

Targets = Tensor | TeacherRows
SOL_STATS = 4
SOL_SIDE = 8


@dataclass(frozen=True, slots=True, eq=False)
class LuneSignal:
    predicted: Tensor  # (rows, feature_dim), for the loss
    signal: Tensor  # (rows, signal_dim), for the student


@dataclass(frozen=True, slots=True, eq=False)
class SolSignal:
    stats_predicted: Tensor  # (rows, 4), each from 0 to 1
    spatial_predicted: Tensor  # (rows, 8, 8), each map sums to 1
    stats: Tensor  # for the student: the teacher's where present
    spatial: Tensor


class LunePredictor(nn.Module):
    """Predicts the teacher's features from time and text, and projects them to a signal for the student."""

    def __init__(
        self, time_dim: int, text_dim: int, *, feature_dim: int = 1280, hidden_dim: int = 512, signal_dim: int = 256
    ) -> None:
        super().__init__()
        self.predict = _perceptron(time_dim + text_dim, hidden_dim, feature_dim)
        self.project = nn.Sequential(nn.LayerNorm(feature_dim), nn.Linear(feature_dim, signal_dim))

    def forward(self, time: Tensor, text: Tensor, teacher: Targets | None = None) -> LuneSignal:
        """Predict from time (rows, time_dim) and pooled text (rows, text_dim)."""
        predicted = self.predict(torch.cat([time, text], dim=-1))
        used = predicted if teacher is None else TeacherRows.of(teacher).filled(predicted)
        return LuneSignal(predicted, self.project(used))


class SolPrior(nn.Module):
    """Predicts the teacher's statistics and map from time and text; a map sums to 1."""

    def __init__(
        self, time_dim: int, text_dim: int, *, hidden_dim: int = 256, stats: int = SOL_STATS, side: int = SOL_SIDE
    ) -> None:
        super().__init__()
        self.side = side
        self.predict_stats = _perceptron(time_dim + text_dim, hidden_dim, stats)
        self.predict_spatial = _perceptron(time_dim + text_dim, hidden_dim, side * side)

    def forward(
        self, time: Tensor, text: Tensor, stats: Targets | None = None, spatial: Targets | None = None
    ) -> SolSignal:
        inputs = torch.cat([time, text], dim=-1)
        # In float32 even under autocast: rounded shares would no longer sum to 1.
        own_stats = self.predict_stats(inputs).float().sigmoid()
        own_spatial = self.predict_spatial(inputs).float().softmax(dim=-1).view(-1, self.side, self.side)
        return SolSignal(
            own_stats,
            own_spatial,
            own_stats if stats is None else TeacherRows.of(stats).filled(own_stats),
            own_spatial if spatial is None else TeacherRows.of(spatial).filled(own_spatial),
        )


def embed_times(times: Tensor, dim: int) -> Tensor:
    """Return times (rows,) from 0 to 1 as sines and cosines of many periods, (rows, dim)."""
    if dim % 2:
        raise ValueError(f"dim must be even (got {dim}): sines and cosines come in pairs")
    periods = torch.exp(-math.log(10_000) * torch.arange(dim // 2, device=times.device) / (dim // 2))
    angles = 1000 * times.float()[:, None] * periods
    return torch.cat([angles.sin(), angles.cos()], dim=-1)


def _perceptron(inputs: int, hidden: int, out: int) -> nn.Sequential:
    return nn.Sequential(
        nn.Linear(inputs, hidden), nn.SiLU(), nn.Linear(hidden, hidden), nn.SiLU(), nn.Linear(hidden, out)
    )


def main() -> None:
    torch.manual_seed(0)
    signal = SolPrior(8, 6)(embed_times(torch.tensor([0.1, 0.9]), 8), torch.randn(2, 6))
    print("predicted maps sum to", signal.spatial_predicted.sum(dim=(1, 2)).tolist())


if __name__ == "__main__":
    main()
