"""The document's names of the losses, for what `get_lune` and `get_sol` return."""

from torch import Tensor

from forebay.torch.distill.losses import LossMode, feature_loss, sol_loss
from forebay.torch.distill.rows import TeacherRows

Taught = Tensor | TeacherRows


def compute_lune_loss(predicted: Tensor, features: Taught, mode: LossMode = "cosine") -> Tensor:
    """The loss against Lune, over the rows it is present for."""
    values, present = _parts(features)
    return feature_loss(predicted, values, mode, present=present)


def compute_sol_loss(stats_predicted: Tensor, spatial_predicted: Tensor, stats: Taught, spatial: Taught) -> Tensor:
    """MSE of the statistics plus MSE of the maps, over the rows Sol is present for."""
    (stats_values, present), (spatial_values, _) = _parts(stats), _parts(spatial)
    return sol_loss(stats_predicted, spatial_predicted, stats_values, spatial_values, present=present)


def _parts(taught: Taught) -> tuple[Tensor, Tensor | None]:
    return (taught.values, taught.present) if isinstance(taught, TeacherRows) else (taught, None)
