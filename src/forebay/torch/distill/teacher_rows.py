"""Teacher outputs as tensors, and teacher dropout.

rows = TeacherRows.of(batch["lune"])              # of a Loader with columns=[Timed("lune", t)]; absent rows are NaN
rows = rows.where(TeacherDropout().keep("lune", step, batch["row_id"][:, 0] << 32 | batch["row_id"][:, 1]))
"""

from dataclasses import dataclass

import numpy as np
import torch
from numpy.typing import ArrayLike, NDArray
from torch import Tensor

from forebay.fields import checked_whole
from forebay.order.coins import Coins
from forebay.torch.batches import to_array


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
        if isinstance(targets, TeacherRows):
            return targets
        return cls(targets, ~targets.unsqueeze(-1).flatten(1).isnan().any(dim=1))

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
        checked_whole("seed", self.seed)
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
