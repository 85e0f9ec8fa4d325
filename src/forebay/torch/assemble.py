"""Assemble batches from located rows: read columns, collate, transform.

    loader = Loader(cache, global_batch_size=64, collate=ImageBatch(cache, flip=0.5))

A coin is a random choice that depends only on row, epoch and purpose. It is the same in a `Loader` and in a
`CacheDataset`, with any number of ranks, threads or workers, and after any resume:

    def mirror(batch: Batch, coins: Coins) -> Batch:
        flipped = torch.from_numpy(coins.flip("mirror"))
        return batch | {"pixels": torch.where(flipped[:, None, None], batch["pixels"].flip(-1), batch["pixels"])}
"""

from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from importlib import import_module
from typing import Protocol

import numpy as np
import torch

from forebay.columns import Array
from forebay.feeding.arguments import checked_names
from forebay.feeding.prefetch import BatchMaker, batch_bytes, gather_batches, suitable_threads, view_rows
from forebay.feeding.stream import PACKED_COLUMNS, Located, Read, Stream, Weights
from forebay.masks.documents import LabelStyle, checked_label_style
from forebay.order.bijection import Numbers, key_of
from forebay.order.coins import Coins, Words, row_keys, sample_keys
from forebay.order.selected_rows import Selection
from forebay.read.cache import Cache
from forebay.torch.batches import (
    Batch,
    Buffers,
    Derived,
    PackedTargets,
    plain_batch,
    refuse_without_training,
    training_batch,
)

Rows = Mapping[str, Array | Iterable[Array]]


class Collate(Protocol):
    """Makes a batch of rows, with the coins of their samples, in memory from `buffers`. Called by many threads.

    Fixed columns come as arrays; ragged ones row by row, each a view of the cache that is checked as it is read.

    Optional: `check_cache(cache)`, which raises where batches of that cache's rows would be wrong, and
    `check_rows(cache, selection)`, which raises where no batch can hold some of the selected rows (None: all rows).
    """

    @property
    def columns(self) -> Sequence[str]:
        """The columns it reads."""
        ...

    @property
    def row_bytes(self) -> int:
        """Bytes of a row of its batches, which decide how many are made ahead."""
        ...

    def collate(self, rows: Rows, coins: Coins, buffers: Buffers) -> Batch: ...


def check_rows(collate: Collate, cache: Cache, selection: Selection | None) -> None:
    """Let a collate refuse rows that it cannot use, before they come up in the middle of an epoch."""
    check = getattr(collate, "check_rows", None)
    if check is not None:
        check(cache, selection)


def check_caches(collate: Collate, caches: Sequence[Cache]) -> None:
    """Let a collate refuse caches that it was not made for."""
    check = getattr(collate, "check_cache", None)
    if check is not None:
        for cache in caches:
            check(cache)


Naming = Callable[[Cache, Numbers], Words]


class Transform(Protocol):
    """Makes a batch of a batch, with the coins of its rows."""

    def __call__(self, batch: Batch, coins: Coins, /) -> Batch: ...


def by_row(cache: Cache, rows: Numbers) -> Words:
    """Return a permanent number per row."""
    chunks = np.searchsorted(cache.chunk_starts, rows, side="right") - 1
    return row_keys(cache.chunk_numbers[chunks], rows - cache.chunk_starts[chunks])


def by_sample(cache: Cache, rows: Numbers) -> Words:
    """Return a number per row from its sample id, or from the row if the recipe names no column of sample ids."""
    column = cache.recipe(cache.generation.base).sample_ids
    return sample_keys(each.tobytes() for each in cache.views(rows, column)) if column else by_row(cache, rows)


def row_coins(
    caches: Sequence[Cache],
    seed: int,
    epoch: int | Numbers,
    rows: Numbers,
    sources: Numbers | None = None,
    naming: Naming = by_row,
) -> Coins:
    """Return the coins of some rows, each of the cache that `sources` names (the first if None).

    `epoch` is one for all rows or one each. Rows with the same name in two caches of a mixture have different coins.
    """
    if sources is None:
        return Coins(seed, epoch, naming(caches[0], rows))
    names = np.empty(len(rows), np.uint64)
    for source in np.unique(sources).tolist():
        here = sources == source
        names[here] = naming(caches[source], rows[here]) ^ np.uint64(key_of("source", source) if source else 0)
    return Coins(seed, epoch, names)


def checked_batch(batch: Batch) -> Batch:
    """Return what a transform returned; raise if it is not a dict."""
    if not isinstance(batch, dict):
        raise TypeError(f"the transform returned a {type(batch).__name__}; return the batch, a dict of tensors")
    return batch


@dataclass(frozen=True, slots=True)
class ColumnBatches:
    """Makes batches of columns as they are read."""

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
class CollatedBatches:
    """Makes batches with a collate, and adds `columns` as they are stored."""

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


_COLLATING_THREADS = 2  # a collate touches every value; reading alone keeps one thread busy


@dataclass(frozen=True, slots=True)
class BatchKind:
    """The columns to read, the default number of threads, the bytes of a row, and how to make batches."""

    columns: tuple[str, ...]
    threads: int
    row_bytes: int
    collate: Collate | None
    maker: Callable[[Buffers, Transform | None], BatchMaker]


def batch_kind(
    caches: Sequence[Cache],
    columns: Sequence[str] | None,
    collate: Collate | None,
    labels: LabelStyle | None,
    derive: Sequence[Derived],
) -> BatchKind:
    """Return the kind of batch that the arguments ask for, by default the one that suits the caches."""
    columns = None if columns is None else checked_names("columns", columns)
    if columns == ():
        raise ValueError("columns is empty; name columns of the cache, or leave it out")
    derive, labels = checked_names("derive", derive), checked_label_style("labels", labels)
    if collate is None and columns is None:
        collate = _usual_collate(caches)
    if collate is not None:
        refuse_without_training(labels, derive)
        return _collated(collate, columns or (), caches)
    if columns is None and all(set(PACKED_COLUMNS) <= set(cache.columns) for cache in caches):
        return _training(PackedTargets(labels, derive, _pad(caches[0])), caches)
    refuse_without_training(labels, derive)
    return _plain(columns or caches[0].default_columns, caches)


def _usual_collate(caches: Sequence[Cache]) -> Collate | None:
    kinds = {cache.recipe(cache.generation.base).kind for cache in caches}
    if kinds != {"images"}:
        return None
    collate: Collate = import_module("forebay.torch.images.image_batch").ImageBatch(caches[0])  # imports this module
    return collate


def _pad(cache: Cache) -> int:
    """Return the token that the recipe pads with; 0 if it names none."""
    pad = cache.recipe(cache.generation.base).fields.get("pad", 0)
    return pad if isinstance(pad, int) else 0


def _collated(collate: Collate, further: tuple[str, ...], caches: Sequence[Cache]) -> BatchKind:
    check_caches(collate, caches)

    def maker(buffers: Buffers, transform: Transform | None) -> BatchMaker:
        return CollatedBatches(collate, further, transform, buffers)

    row_bytes = collate.row_bytes + (batch_bytes(caches[0], further, 1) if further else 0)
    return BatchKind((*collate.columns, *further), _COLLATING_THREADS, row_bytes, collate, maker)


def _training(training: PackedTargets, caches: Sequence[Cache]) -> BatchKind:
    def maker(buffers: Buffers, transform: Transform | None) -> BatchMaker:
        def derive(read: Read, weights: Weights | None) -> Batch:
            return training_batch(read, training, buffers, weights)

        return ColumnBatches(PACKED_COLUMNS, derive, transform)

    row_bytes = batch_bytes(caches[0], PACKED_COLUMNS, 1, derived=2 + len(training.derive))
    return BatchKind(PACKED_COLUMNS, suitable_threads(caches, PACKED_COLUMNS), row_bytes, None, maker)


def _plain(columns: tuple[str, ...], caches: Sequence[Cache]) -> BatchKind:
    def maker(buffers: Buffers, transform: Transform | None) -> BatchMaker:
        def derive(read: Read, weights: Weights | None) -> Batch:
            return plain_batch(read, buffers)

        return ColumnBatches(columns, derive, transform)

    return BatchKind(columns, suitable_threads(caches, columns), batch_bytes(caches[0], columns, 1), None, maker)
