"""Teacher features at any t as tensors, and teacher dropout.

    features = forebay.torch.features(cache, "lune", device="cuda")
    features.at([5, 3, 9], t)["lune"].values          # (rows, 1280) float32

Rows are row numbers of the cache; batches of a `Mixture`, even of one cache, have them as `local_index`. Only the two
buckets around each t are read; they are sent to the device as stored, and interpolated there.
"""

from dataclasses import dataclass

import numpy as np
import torch
from numpy.typing import ArrayLike, NDArray
from torch import Tensor

from forebay.order.coins import Coins
from forebay.read.cache import Cache
from forebay.teachers.feature_reader import Between, Features
from forebay.teachers.protocol import TimeDirection
from forebay.torch.batches import to_array, to_tensor


@dataclass(frozen=True, slots=True, eq=False)
class TeacherRows:
    """Teacher outputs: values (rows, …), and `present` (rows,), True where a row has them.

    Absent rows hold NaN, never zeros, so that code that ignores `present` fails early.
    """

    values: Tensor
    present: Tensor

    def __post_init__(self) -> None:
        if self.present.dtype != torch.bool or self.present.shape != self.values.shape[:1]:
            raise ValueError(
                f"present must be bool ({len(self.values)},), one per row "
                f"(got {self.present.dtype} {tuple(self.present.shape)})"
            )

    def __len__(self) -> int:
        return len(self.values)

    @classmethod
    def of(cls, targets: "Targets") -> "TeacherRows":
        """Return rows as they are, or those of a tensor whose absent rows are NaN."""
        return targets if isinstance(targets, TeacherRows) else cls(targets, ~targets.flatten(1).isnan().any(dim=1))

    def where(self, mask: Tensor) -> "TeacherRows":
        """Return the rows, absent also where `mask` (rows,) is False: teacher dropout."""
        present = self.present & mask.to(self.present.device)
        return TeacherRows(_absent(self.values, present), present)

    def filled(self, other: Tensor) -> Tensor:
        """Return the teacher's values, with those of `other` in absent rows."""
        return torch.where(_wide(self.present, self.values), self.values.to(other.dtype), other)

    def to(self, device: torch.device | str) -> "TeacherRows":
        return TeacherRows(self.values.to(device), self.present.to(device))


Targets = Tensor | TeacherRows


def _absent(values: Tensor, present: Tensor) -> Tensor:
    return values.masked_fill(~_wide(present, values), torch.nan)


def _wide(present: Tensor, values: Tensor) -> Tensor:
    return present.view(-1, *[1] * (values.dim() - 1))


class TorchFeatures:
    """The columns of a timed layer; `numpy` is the same without torch."""

    def __init__(self, cache: Cache, layer: str, device: torch.device | str = "cpu") -> None:
        self.numpy = Features(cache, layer)
        self.device = torch.device(device)

    def __repr__(self) -> str:
        return f"{repr(self.numpy)[:-1]}, on {self.device}>"

    def _repr_html_(self) -> str:
        return self.numpy._repr_html_()

    @property
    def buckets(self) -> Tensor:
        return torch.tensor(self.numpy.buckets)

    @property
    def time_direction(self) -> TimeDirection | None:
        """The end of the layer's t that is noise, from its recipe; None if it does not record it."""
        return self.numpy.time_direction

    def at(
        self, indices: Tensor | ArrayLike, t: Tensor | ArrayLike, direction: TimeDirection | None = None
    ) -> dict[str, TeacherRows]:
        """Return every column at t, one per row or one for all, in float32; absent rows are NaN.

        `direction` is the end of `t` that is noise; see `forebay.teachers.Features.at`.
        """
        between = self.numpy.between(to_array(indices), to_array(t), direction)
        return interpolate(between, self.device)


def at_flow_times(
    timed: TorchFeatures, indices: Tensor | ArrayLike, timesteps: Tensor | ArrayLike
) -> dict[str, TeacherRows]:
    """Return features at a t whose 0 is noise, whichever way the layer's own time runs."""
    return timed.at(indices, timesteps, None if timed.time_direction is None else "t0_noise")


def features(cache: Cache, layer: str, device: torch.device | str = "cpu") -> TorchFeatures:
    """Return a reader of the features in a layer of a cache."""
    return TorchFeatures(cache, layer, device)


def interpolate(between: Between, device: torch.device) -> dict[str, TeacherRows]:
    """Interpolate between two buckets on a device, in float32."""
    alpha, present = torch.from_numpy(between.alpha), torch.from_numpy(between.present)
    is_whole = bool(between.present.all())
    if device.type != "cpu":
        alpha, present = alpha.to(device), present.to(device)
    rows = {}
    for name, values in between.values.items():
        targets = TeacherRows(_lerp(to_tensor(values).to(device).float(), alpha), present)
        rows[name] = targets if is_whole else targets.where(present)
    return rows


def _lerp(values: Tensor, alpha: Tensor) -> Tensor:
    """Interpolate; `torch.lerp` returns either end exactly where alpha is 0 or 1."""
    low = values[:, 0]
    if values.shape[1] == 1:
        return low.clone()
    return torch.lerp(low, values[:, 1], alpha.view(-1, *[1] * (low.dim() - 1)))


Numbers = Tensor | ArrayLike


@dataclass(frozen=True, slots=True)
class TeacherDropout:
    """Decides which samples keep their teacher, as a function of (seed, step, sample, teacher).

    The choice is the same on any rank, in any order and after any resume. Samples are permanent numbers, for instance
    `row_id` of a batch.

    >>> TeacherDropout(rate=0.5).keep("lune", step=3, samples=[7, 8, 9, 10]).tolist()
    [True, True, False, False]
    """

    rate: float = 0.1
    seed: int = 0

    def __post_init__(self) -> None:
        if not 0 <= self.rate <= 1:
            raise ValueError(f"rate must be from 0 to 1 (got {self.rate})")

    def keep(self, teacher: str, step: int, samples: Numbers, dataset_ids: Numbers = 0) -> Tensor:
        """Return bool (samples,), True where a sample learns from this teacher at this step."""
        keys = to_array(samples).astype(np.uint64)
        datasets = np.broadcast_to(to_array(dataset_ids), keys.shape)
        mask = np.empty(keys.shape, np.bool_)
        for dataset in np.unique(datasets).tolist():
            here = datasets == dataset
            mask[here] = ~self._dropped(keys[here], f"{teacher} of {dataset}", step)
        return torch.from_numpy(mask)

    def _dropped(self, keys: NDArray[np.uint64], of: str, step: int) -> NDArray[np.bool_]:
        return Coins(self.seed, step, keys).flip(f"drop the teacher {of}", self.rate)
