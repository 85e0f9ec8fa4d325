"""Feeding training: batches of a cache, in an order that is a function of the position."""

from collections.abc import Iterator, Mapping, Sequence
from typing import Any, Literal

import numpy as np
import torch

from forebay.cache.reader import Cache
from forebay.columns import Ragged
from forebay.errors import StateMismatch
from forebay.masks.documents import LabelStyle
from forebay.torch.batch import Batch, Extra, token_batch
from forebay.torch.cache_stream import cache_stream
from forebay.torch.ranks import current_ranks
from forebay.torch.stream import Stream

STATE_VERSION = 1

Shuffle = Literal["auto", "global", "window"]


class Loader:
    """Batches of a cache, or of any stream.

    `iter(loader)` yields the batches of one epoch from where the loader stands, then moves on to the next epoch.
    """

    def __init__(
        self,
        source: Cache | Stream,
        *,
        global_batch_size: int,
        seed: int = 0,
        shuffle: Shuffle | None = "auto",
        drop_last: bool = True,
        columns: Sequence[str] | None = None,
        labels: LabelStyle | None = "next",
        derive: Sequence[Extra] = ("positions",),
        rank: int | None = None,
        world_size: int | None = None,
    ) -> None:
        self.ranks = current_ranks(rank, world_size)
        self.stream: Stream = cache_stream(source, shuffle, seed) if isinstance(source, Cache) else source
        self.global_batch_size = global_batch_size
        self.drop_last = drop_last
        self.epoch = self.position = 0
        self._columns, self._labels, self._derive = columns, labels, tuple(derive)
        if global_batch_size < 1 or global_batch_size % self.ranks.world_size:
            raise ValueError(
                f"global_batch_size {global_batch_size} cannot be shared by {self.ranks.world_size} ranks evenly; "
                "choose a multiple"
            )

    def __len__(self) -> int:
        """Batches of a whole epoch."""
        size = self.stream.size(self.epoch)
        return size // self.global_batch_size if self.drop_last else -(-size // self.global_batch_size)

    def __iter__(self) -> Iterator[Batch]:
        size = self.stream.size(self.epoch)
        while self.position < size:
            stop = min(size, self.position + self.global_batch_size)
            if stop - self.position < self.global_batch_size and self.drop_last:
                break
            batch = self._batch(self.epoch, self.position, stop)
            self.position = stop
            yield batch
        self.epoch, self.position = self.epoch + 1, 0

    def state_dict(self) -> dict[str, Any]:
        return {
            "version": STATE_VERSION,
            "epoch": self.epoch,
            "position": self.position,
            "stream": self.stream.state(),
        }

    def load_state_dict(self, state: Mapping[str, Any]) -> None:
        if state.get("version") != STATE_VERSION:
            raise StateMismatch("loader", {"version": (state.get("version"), STATE_VERSION)})
        self.stream = self.stream.resumed(state["stream"])
        self.epoch, self.position = int(state["epoch"]), int(state["position"])

    def _batch(self, epoch: int, start: int, stop: int) -> Batch:
        first = start + (self.ranks.rank - start) % self.ranks.world_size
        located = self.stream.locate(epoch, np.arange(first, stop, self.ranks.world_size))
        cache = self.stream.caches[0]
        read = cache.read(located.rows, self._columns)
        if self._columns is None and {"tokens", "seq_lens"} <= read.keys():
            batch = token_batch(read, self._labels, self._derive)
        else:
            batch = {name: torch.from_numpy(values) for name, values in read.items() if not isinstance(values, Ragged)}
        return batch | {name: torch.from_numpy(values) for name, values in located.tags.items()}
