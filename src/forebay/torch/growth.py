"""What became more while a loader ran, or between a checkpoint and its resumption."""

from dataclasses import dataclass
from typing import Literal

Policy = Literal["pinned", "epoch", "within"]


@dataclass(frozen=True, slots=True)
class Growth:
    """
    >>> print(Growth(3, 5, 352_217, 472_240))
    352,217 → 472,240 rows (generation 3 → 5)
    """

    old_generation: int
    new_generation: int
    old_rows: int
    new_rows: int

    def __str__(self) -> str:
        return f"{self.old_rows:,} → {self.new_rows:,} rows (generation {self.old_generation} → {self.new_generation})"
