"""What a teacher said of the rows of a batch, and for which rows it said anything."""

from dataclasses import dataclass

import torch
from torch import Tensor


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
