"""Teacher features at any time as tensors, for which rows they exist, and teacher dropout.

    features = forebay.torch.features(cache, "lune", device="cuda")
    features.at([5, 3, 9], t)["lune"].values          # (rows, 1280) float32

Rows are row numbers of the cache. A batch of a `Mixture`, of one cache too, has them as `local_index`.

Only the two buckets around each time are read, and sent to the device as they are stored; they are interpolated there.

Whether a sample has its teacher is a function of (seed, step, sample, teacher): the same on any rank, in any order,
after any resume. Samples go by permanent numbers, for instance `sample_keys` of a `MultiSourceCache`.
"""

from dataclasses import dataclass

import numpy as np
import torch
from numpy.typing import ArrayLike, NDArray
from torch import Tensor

from forebay.order.coins import Coins
from forebay.read.cache import Cache
from forebay.teachers.built_in import TimeDirection
from forebay.teachers.feature_reader import Between, Features
from forebay.torch.batches import to_array, to_tensor


@dataclass(frozen=True, slots=True, eq=False)
class TeacherRows:
    """Values (rows, …), and `present` (rows,): True where there is a teacher's word.

    Absent rows hold NaN, never zeros: whoever forgets the mask sees it at once.
    """

    values: Tensor
    present: Tensor

    def __post_init__(self) -> None:
        if self.present.dtype != torch.bool or self.present.shape != self.values.shape[:1]:
            raise ValueError(
                f"present is {self.present.dtype} {tuple(self.present.shape)}; "
                f"one bool for each of {len(self.values)} rows is expected"
            )

    def __len__(self) -> int:
        return len(self.values)

    def where(self, kept: Tensor) -> "TeacherRows":
        """The same, absent also where `kept` (rows,) is False: teacher dropout."""
        present = self.present & kept.to(self.present.device)
        return TeacherRows(_absent(self.values, present), present)

    def filled(self, other: Tensor) -> Tensor:
        """The teacher's values, and those of `other` in absent rows."""
        return torch.where(_wide(self.present, self.values), self.values.to(other.dtype), other)

    def to(self, device: torch.device | str) -> "TeacherRows":
        return TeacherRows(self.values.to(device), self.present.to(device))


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


Numbers = Tensor | ArrayLike


@dataclass(frozen=True, slots=True)
class TeacherDropout:
    """Which samples keep their teacher.

    >>> TeacherDropout(rate=0.5).kept("lune", step=3, samples=[7, 8, 9, 10]).tolist()
    [True, True, False, False]
    """

    rate: float = 0.1
    seed: int = 0

    def __post_init__(self) -> None:
        if not 0 <= self.rate <= 1:
            raise ValueError(f"the dropout rate is {self.rate}; it is a share from 0 to 1")

    def kept(self, teacher: str, step: int, samples: Numbers, dataset_ids: Numbers = 0) -> Tensor:
        """bool (samples,), True where a sample learns from this teacher at this step."""
        keys = to_array(samples).astype(np.uint64)
        datasets = np.broadcast_to(to_array(dataset_ids), keys.shape)
        kept = np.empty(keys.shape, np.bool_)
        for dataset in np.unique(datasets).tolist():
            here = datasets == dataset
            kept[here] = ~self._dropped(keys[here], f"{teacher} of {dataset}", step)
        return torch.from_numpy(kept)

    def _dropped(self, keys: NDArray[np.uint64], of: str, step: int) -> NDArray[np.bool_]:
        return Coins(self.seed, step, keys).flip(f"drop the teacher {of}", self.rate)
