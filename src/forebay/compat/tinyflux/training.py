"""Training with teachers under the document's names: `TrainerConfig` and losses."""

from dataclasses import dataclass

from torch import Tensor

from forebay.torch.distill.flow import MIN_SNR_GAMMA, SHIFT
from forebay.torch.distill.losses import LossMode, Warmup, feature_loss, loss_weights
from forebay.torch.distill.timed_features import TeacherDropout, TeacherRows


@dataclass(frozen=True, slots=True, kw_only=True)
class TrainerConfig:
    """Weights, warm-ups and dropout of both teachers.

    >>> config = TrainerConfig(use_spatial_weighting=True)
    >>> config.lune(500), config.sol(500)
    (0.05, 0.0125)
    """

    lune_weight: float = 0.1
    lune_warmup_steps: int = 1000
    lune_dropout: float = 0.1
    lune_loss_mode: LossMode = "cosine"
    sol_weight: float = 0.05
    sol_warmup_steps: int = 2000
    sol_dropout: float = 0.1
    use_spatial_weighting: bool = False
    min_snr_gamma: float = MIN_SNR_GAMMA
    shift: float = SHIFT
    seed: int = 0

    def lune(self, step: int) -> float:
        """Return the weight of Lune's loss at a step."""
        return Warmup(self.lune_weight, self.lune_warmup_steps)(step)

    def sol(self, step: int) -> float:
        """Return the weight of Sol's loss at a step."""
        return Warmup(self.sol_weight, self.sol_warmup_steps)(step)

    def loss_weights(
        self, spatial: TeacherRows | None, content: Tensor | None = None, size: tuple[int, int] = (64, 64)
    ) -> Tensor | None:
        """Return loss weights per position: 0 in padding, and Sol's maps with `use_spatial_weighting`."""
        return loss_weights(spatial if self.use_spatial_weighting else None, content, size)

    def dropout(self, teacher: str) -> TeacherDropout:
        rates = {"lune": self.lune_dropout, "sol": self.sol_dropout}
        if teacher not in rates:
            raise ValueError(f"teacher must be one of lune, sol (got {teacher!r})")
        return TeacherDropout(rates[teacher], self.seed)


Targets = Tensor | TeacherRows


def compute_lune_loss(predicted: Tensor, features: Targets, mode: LossMode = "cosine") -> Tensor:
    """Return the loss against Lune, over its present rows."""
    values, present = _parts(features)
    return feature_loss(predicted, values, mode, present=present)


def compute_sol_loss(stats_predicted: Tensor, spatial_predicted: Tensor, stats: Targets, spatial: Targets) -> Tensor:
    """Return the MSE of the statistics plus the MSE of the maps, each over its present rows."""
    (stats_values, stats_present), (maps, maps_present) = _parts(stats), _parts(spatial)
    of_stats = feature_loss(stats_predicted, stats_values, "mse", present=stats_present)
    return of_stats + feature_loss(spatial_predicted, maps, "mse", present=maps_present)


def _parts(targets: Targets) -> tuple[Tensor, Tensor | None]:
    return (targets.values, targets.present) if isinstance(targets, TeacherRows) else (targets, None)
