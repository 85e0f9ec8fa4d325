"""The features of a timed teacher at any time, as tensors on the device that trains.

    features = forebay.torch.features(cache, "lune", device="cuda")
    features.at([5, 3, 9], t)["lune"].values          # (rows, 1280) float32

Rows are row numbers of the cache. A batch of a `Mixture`, of one cache too, has them as `local_index`.

Only the two buckets around each time are read, and sent to the device as they are stored; they are interpolated there.
"""

import torch
from numpy.typing import ArrayLike
from torch import Tensor

from forebay.cache.reader import Cache
from forebay.teachers.reading import Between, Features
from forebay.teachers.unet import TimeDirection
from forebay.torch.arrays import to_array, to_tensor
from forebay.torch.distill.rows import TeacherRows


class TorchFeatures:
    """The columns of a timed layer; `numpy` is the same without torch."""

    def __init__(self, cache: Cache, layer: str, device: torch.device | str = "cpu") -> None:
        self.numpy = Features(cache, layer)
        self.device = torch.device(device)

    @property
    def buckets(self) -> Tensor:
        return torch.tensor(self.numpy.buckets)

    @property
    def columns(self) -> tuple[str, ...]:
        return self.numpy.columns

    def shape(self, column: str) -> tuple[int, ...]:
        """The shape of a column at one moment."""
        return self.numpy.shape(column)

    @property
    def time_direction(self) -> TimeDirection | None:
        """Which end of the layer's time is noise, as its recipe says; None where it does not."""
        return self.numpy.time_direction

    def at(
        self, indices: Tensor | ArrayLike, t: Tensor | ArrayLike, direction: TimeDirection | None = None
    ) -> dict[str, TeacherRows]:
        """Every column at the times of some rows, float32; absent rows are NaN. One time stands for all rows.

        `direction` says which end of `t` is noise; see `forebay.teachers.Features.at`.
        """
        found = self.numpy.between(to_array(indices), to_array(t), direction)
        return weigh(found, self.device)


def features(cache: Cache, layer: str, device: torch.device | str = "cpu") -> TorchFeatures:
    """The features that a layer of a cache holds."""
    return TorchFeatures(cache, layer, device)


def weigh(found: Between, device: torch.device) -> dict[str, TeacherRows]:
    """What lies between two buckets, in float32."""
    alpha, present = torch.from_numpy(found.alpha), torch.from_numpy(found.present)
    is_whole = bool(found.present.all())
    if device.type != "cpu":
        alpha, present = alpha.to(device), present.to(device)
    rows = {}
    for name, values in found.values.items():
        weighed = _weighed(to_tensor(values).to(device).float(), alpha)
        taught = TeacherRows(weighed, present)
        rows[name] = taught if is_whole else taught.where(present)
    return rows


def _weighed(values: Tensor, alpha: Tensor) -> Tensor:
    """`lerp` gives either end exactly where alpha is 0 or 1."""
    low = values[:, 0]
    if values.shape[1] == 1:
        return low.clone()
    return torch.lerp(low, values[:, 1], alpha.view(-1, *[1] * (low.dim() - 1)))
