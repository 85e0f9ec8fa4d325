"""What a loader feeds from: rows of one or several caches, in an order that is a function of the position.

    position of the epoch ──locate──▶ (which cache, row number there, tags)

A loader over one cache and a mixture of many differ in nothing but their stream.
"""

from collections.abc import Mapping, Sequence
from typing import Any, NamedTuple, Protocol, runtime_checkable

import numpy as np
from numpy.typing import NDArray

from forebay.cache.reader import Cache
from forebay.order.bijection import Numbers
from forebay.order.selection import Selection

Weights = NDArray[np.float32]


class Located(NamedTuple):
    """Rows by cache and number, and what else a batch says of each."""

    rows: Numbers
    sources: Numbers | None = None  # index into `Stream.caches`; None where there is one cache
    tags: Mapping[str, Numbers] = {}  # further entries of the batch, one number per row: dataset_id, local_index
    epochs: Numbers | None = None  # how often each row's cache was gone through before; None where it is the epoch
    weights: Weights | None = (
        None  # 0 for a row that only fills the batch of a rank; None where batches are never filled
    )

    def part(self, some: slice) -> "Located":
        """Some of the rows."""
        tags = {name: values[some] for name, values in self.tags.items()}
        sources, epochs = (None if each is None else each[some] for each in (self.sources, self.epochs))
        weights = None if self.weights is None else self.weights[some]
        return Located(self.rows[some], sources, tags, epochs, weights)


@runtime_checkable
class Stream(Protocol):
    """Epochs of rows. Immutable: growing or changing weights makes another stream."""

    @property
    def caches(self) -> Sequence[Cache]:
        """The caches that rows come from; all of them have the columns that are asked for."""
        ...

    @property
    def selections(self) -> Sequence[Selection | None]:
        """The rows of each cache that are in, as far as is known when an epoch begins; None where all are."""
        ...

    @property
    def seed(self) -> int: ...

    def size(self, epoch: int) -> int:
        """How many positions an epoch has."""
        ...

    def locate(self, epoch: int, positions: Numbers) -> Located:
        """The rows at some positions of an epoch."""
        ...

    def state(self) -> dict[str, Any]:
        """What identifies the sequence of rows: a few hundred bytes of JSON."""
        ...

    def resumed(self, state: Mapping[str, Any], epoch: int, position: int) -> "Stream":
        """The stream that a state was taken from, at this position, on the caches of this one.

        `StateMismatch` where it cannot be.
        """
        ...


@runtime_checkable
class Rule(Protocol):
    """Which rows are in, said for every generation of a cache: a split. What was in stays in when the cache grows."""

    @property
    def digest(self) -> str:
        """A digest of the rule, the same for every generation."""
        ...

    def of(self, cache: Cache) -> Selection:
        """The rows of the generation that this cache pins."""
        ...
