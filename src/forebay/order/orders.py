"""The order of an epoch as a function: which of `size` rows stands at a position.

sequential   0 1 2 3 4 5 6 7      position and row are the same
global       5 0 7 2 6 1 3 4      one shuffle over all rows, computed row by row
window                            see `forebay.order.window`

Nothing here knows a rank, a thread, a batch size or where training was resumed.
"""

from dataclasses import dataclass
from typing import Protocol

from forebay.order.bijection import Numbers, key_of, permute


class Order(Protocol):
    """Rows, numbered from 0, in another order every epoch."""

    @property
    def size(self) -> int: ...

    def rows_at(self, epoch: int, positions: Numbers) -> Numbers:
        """The rows at some positions of an epoch, each from 0 to `size`."""
        ...


@dataclass(frozen=True, slots=True)
class SequentialOrder:
    """Rows as they are stored, every epoch alike."""

    size: int

    def rows_at(self, epoch: int, positions: Numbers) -> Numbers:
        return positions


@dataclass(frozen=True, slots=True)
class GlobalOrder:
    """All rows shuffled together, anew every epoch."""

    size: int
    seed: int
    part: int = 0  # of an epoch that grew: each part has a shuffle of its own

    def rows_at(self, epoch: int, positions: Numbers) -> Numbers:
        return permute(positions, self.size, key_of("order", self.seed, epoch, self.part))
