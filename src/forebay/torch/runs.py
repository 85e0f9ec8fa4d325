"""The batches that a rank takes of a stretch of an epoch, in runs that are made at once.

positions    start ├─── batch ───┼─── batch ───┼─── batch ───┼─ … ─┤ stop
run 0              └──────── located, found and checked together ────────┘
rank r of w        takes the positions p with p % w == r
"""

from collections.abc import Callable, Iterator
from dataclasses import dataclass

import numpy as np
import torch

from forebay.order.bijection import Numbers
from forebay.order.coins import Coins
from forebay.torch.batch import Batch, Read
from forebay.torch.gather import gather_batches
from forebay.torch.ranks import Ranks
from forebay.torch.stream import Located, Stream
from forebay.torch.transform import Transform, row_coins


@dataclass(frozen=True, slots=True)
class Making:
    """How located rows become a batch."""

    columns: tuple[str, ...] | None
    derive: Callable[[Read], Batch]
    transform: Transform | None


@dataclass(frozen=True, slots=True)
class Run:
    """The batches of a run, the last one first, so that each is taken off the end; then what the next one raised."""

    batches: list[Batch]
    error: Exception | None = None


@dataclass(frozen=True, slots=True)
class Runs:
    """Positions `start` to `stop` of an epoch, in batches of `batch_size`, `length` of them to a run."""

    stream: Stream
    epoch: int
    start: int
    stop: int
    batch_size: int
    length: int
    ranks: Ranks
    making: Making

    def __len__(self) -> int:
        return -(-(self.stop - self.start) // (self.batch_size * self.length))

    def make(self, number: int) -> Run:
        """One run, up to the first error in it."""
        start = self.start + number * self.batch_size * self.length
        stop = min(self.stop, start + self.batch_size * self.length)
        located = self.stream.locate(self.epoch, self._positions(start, stop))
        batches, error = [], None
        try:
            for batch in self._batches(located):
                batches.append(batch)
        except Exception as raised:  # it belongs to one batch: those before it are good
            error = raised
        batches.reverse()
        return Run(batches, error)

    def _positions(self, start: int, stop: int) -> Numbers:
        rank, world = self.ranks.rank, self.ranks.world_size
        return np.arange(start + (rank - start) % world, stop, world)

    def _batches(self, located: Located) -> Iterator[Batch]:
        making, size = self.making, max(1, self.batch_size // self.ranks.world_size)
        for at, read in enumerate(gather_batches(self.stream.caches, located, size, making.columns)):
            some = slice(at * size, (at + 1) * size)
            batch = making.derive(read)
            for name, values in located.tags.items():
                batch[name] = torch.from_numpy(values[some].copy())
            yield batch if making.transform is None else making.transform(batch, self._coins(located, some))

    def _coins(self, located: Located, some: slice) -> Coins:
        sources = None if located.sources is None else located.sources[some]
        epoch = self.epoch if located.epochs is None else located.epochs[some]
        return row_coins(self.stream.caches, self.stream.seed, epoch, located.rows[some], sources)
