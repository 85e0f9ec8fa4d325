"""How located rows become batches: their columns as they are read, or what a collate makes of their rows."""

from collections.abc import Callable, Iterator
from dataclasses import dataclass
from typing import Protocol

import torch

from forebay.order.coins import Coins
from forebay.torch.batch import Batch, Read, plain_batch
from forebay.torch.buffers import Buffers
from forebay.torch.collate import Collate
from forebay.torch.gather import gather_batches, view_rows
from forebay.torch.given import checked_batch
from forebay.torch.stream import Located, Stream, Weights
from forebay.torch.transform import Naming, Transform, by_row, by_sample, row_coins


class Making(Protocol):
    def batches(self, stream: Stream, epoch: int, located: Located, size: int) -> Iterator[Batch]:
        """So many of the located rows at a time; no rows are one empty batch."""
        ...


@dataclass(frozen=True, slots=True)
class Deriving:
    """Batches of columns."""

    columns: tuple[str, ...] | None
    derive: Callable[[Read, Weights | None], Batch]
    transform: Transform | None

    def batches(self, stream: Stream, epoch: int, located: Located, size: int) -> Iterator[Batch]:
        for at, read in enumerate(gather_batches(stream.caches, located, size, self.columns)):
            part = located.part(slice(at * size, (at + 1) * size))
            batch = self.derive(read, part.weights)
            yield self._completed(batch, stream, epoch, part)

    def _completed(self, batch: Batch, stream: Stream, epoch: int, located: Located) -> Batch:
        batch |= _tags(located)
        if self.transform is None:
            return batch
        return checked_batch(self.transform(batch, _coins(stream, epoch, located, by_row)))


@dataclass(frozen=True, slots=True)
class Collating:
    """Batches that a collate makes, and further columns as they are stored."""

    collate: Collate
    columns: tuple[str, ...]
    transform: Transform | None
    buffers: Buffers

    def batches(self, stream: Stream, epoch: int, located: Located, size: int) -> Iterator[Batch]:
        for at in range(0, max(1, len(located.rows)), size):
            yield self._batch(stream, epoch, located.part(slice(at, at + size)))

    def _batch(self, stream: Stream, epoch: int, located: Located) -> Batch:
        coins = _coins(stream, epoch, located, by_sample)
        rows = view_rows(stream.caches, located, self.collate.columns)
        batch = self.collate.collate(rows, coins, self.buffers) | _tags(located)
        if self.columns:
            (read,) = gather_batches(stream.caches, located, max(1, len(located.rows)), self.columns)
            further = plain_batch(read, self.buffers)
            _refuse_twice(batch, further)
            batch |= further
        return batch if self.transform is None else checked_batch(self.transform(batch, coins))


def _coins(stream: Stream, epoch: int, located: Located, naming: Naming) -> Coins:
    epochs = epoch if located.epochs is None else located.epochs
    return row_coins(stream.caches, stream.seed, epochs, located.rows, located.sources, naming)


def _refuse_twice(batch: Batch, further: Batch) -> None:
    for name in further.keys() & batch.keys():
        raise ValueError(f"'{name}' is already in the batch that the collate makes; leave that column out of `columns`")


def _tags(located: Located) -> Batch:
    tags = {name: torch.from_numpy(values.copy()) for name, values in located.tags.items()}
    return tags if located.weights is None else tags | {"row_weight": torch.from_numpy(located.weights.copy())}
