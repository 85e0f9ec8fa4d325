"""The document's names of the losses, for what `get_lune` and `get_sol` return."""

from torch import Tensor

from forebay.torch.distill.losses import LossMode, feature_loss
from forebay.torch.distill.rows import TeacherRows

Taught = Tensor | TeacherRows


def compute_lune_loss(predicted: Tensor, features: Taught, mode: LossMode = "cosine") -> Tensor:
    """The loss against Lune, over the rows it is present for."""
    values, present = _parts(features)
    return feature_loss(predicted, values, mode, present=present)


def compute_sol_loss(stats_predicted: Tensor, spatial_predicted: Tensor, stats: Taught, spatial: Taught) -> Tensor:
    """MSE of the statistics plus MSE of the maps, each over the rows it is present for."""
    (stats_values, stats_present), (maps, maps_present) = _parts(stats), _parts(spatial)
    of_stats = feature_loss(stats_predicted, stats_values, "mse", present=stats_present)
    return of_stats + feature_loss(spatial_predicted, maps, "mse", present=maps_present)


def _parts(taught: Taught) -> tuple[Tensor, Tensor | None]:
    return (taught.values, taught.present) if isinstance(taught, TeacherRows) else (taught, None)
