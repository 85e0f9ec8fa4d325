"""From located rows to batches: the collate that makes the main tensors, and the columns that come with them.

    BatchMaker(task) ──▶ Locator.batches      rows of several batches
                     ──▶ RowReader.read       one table for all of them
                     ──▶ Assembler.batch      Collate.collate(table, coins, buffers), further columns, transform

A `Transform` changes a finished batch. It draws from the coins of its rows, so its choices are the same with any number
of ranks, threads or workers, and after any resume:

    def mirror(batch: Batch, coins: Coins) -> Batch:
        flipped = torch.from_numpy(coins.flip("mirror"))
        return batch | {"pixels": torch.where(flipped[:, None, None], batch["pixels"].flip(-1), batch["pixels"])}
"""

import time
from collections.abc import Sequence
from dataclasses import dataclass, replace
from importlib import import_module
from typing import Any, Protocol

import torch

from forebay.feeding.choose_order import decoded_columns
from forebay.feeding.statistics import Handoff
from forebay.feeding.steps import BatchTask, Locator, Pace
from forebay.feeding.stream import PACKED_COLUMNS, Stream, checked_cache, checked_names
from forebay.order.coins import Coins
from forebay.order.selected_rows import Selection
from forebay.read.cache import Cache
from forebay.read.maps import take_opening_spans
from forebay.read.rows import Located, RowReader, Table, row_coins
from forebay.read.views import View
from forebay.torch.batches import Batch, Buffers, plain_batch, tensor_bytes


class Collate:
    """Turns rows into a batch. Called by many threads. Subclasses set `columns` and define `collate`."""

    columns: Sequence[str] = ()  # the columns that `collate` reads
    viewed: Sequence[str] = ()  # of these, ragged ones that are iterated without copying
    extra: Sequence[str] = ()  # columns that are added as they are stored
    makes: Sequence[str] = ()  # tensors whose names `columns` of a loader must not have
    by_row: bool = True  # whether its tensors can be split into rows, for a `CacheDataset`
    moves_pixels: bool = False  # whether it flips, crops or resizes: columns made from pixels would not fit

    def __repr__(self) -> str:
        return f"<{type(self).__name__} of {', '.join((*self.columns, *self.extra))}>"

    def check(self, caches: Sequence[Cache], selections: Sequence[Selection | None]) -> None:
        """Raise before the first batch where batches of these rows would be wrong."""

    def facts(self) -> dict[str, Any]:
        """Return what must be the same on every rank."""
        return {}

    def collate(self, table: Table, coins: Coins, buffers: Buffers) -> Batch:
        raise NotImplementedError


def caches_of(source: Cache | Stream) -> list[Cache]:
    """Return the caches of a cache or a mixture."""
    return list(source.caches) if isinstance(source, Stream) else [checked_cache(source)]


class StoredBatch(Collate):
    """Columns as they are stored: all of the opened layers, or those of `columns`."""

    def __init__(self, source: Cache | Stream, columns: Sequence[str] | None = None) -> None:
        caches = caches_of(source)
        self.extra = caches[0].default_columns if columns is None else checked_names("columns", columns)
        if not self.extra:
            raise ValueError("columns is empty; name columns of the cache, or leave it out")
        RowReader(caches, self.extra)  # raises for a column that no cache has

    def collate(self, table: Table, coins: Coins, buffers: Buffers) -> Batch:
        return {}


def checked_collate(collate: Collate) -> Collate:
    if not isinstance(collate, Collate):
        raise TypeError(f"collate is {collate!r}; pass a Collate, such as StoredBatch(cache) or TokenBatch(cache)")
    return collate


_USUAL = {
    "images": ("forebay.torch.images.image_batch", "ImageBatch"),
    "preferences": ("forebay.torch.preference_batch", "PreferenceBatch"),
}


def usual_collate(source: Cache | Stream) -> Collate:
    """Return the collate of a cache: the only function that maps kinds to batches."""
    caches = caches_of(source)
    kinds = {cache.recipe(cache.generation.base).kind for cache in caches}
    if all(set(PACKED_COLUMNS) <= set(cache.columns) for cache in caches):
        module, name = "forebay.torch.token_batch", "TokenBatch"
    elif len(kinds) == 1 and (kind := kinds.pop()) in _USUAL:
        module, name = _USUAL[kind]
    else:
        return StoredBatch(source)
    collate: Collate = getattr(import_module(module), name)(source)  # they import this module
    return collate


def _check_moved(collate: Collate, caches: Sequence[Cache], columns: Sequence[str]) -> None:
    """Raise for columns made from pixels that a collate moves."""
    for cache in caches if collate.moves_pixels else ():
        for name in columns:
            if name in cache.columns and (layer := cache.layer_of(name)) in pixel_bound_layers(cache):
                raise ValueError(
                    f"column '{name}' of layer '{layer}' was made from stored pixels, and this collate flips, crops or "
                    "resizes them: the two would not fit; leave out flip and transforms, or the column"
                )


def pixel_bound_layers(cache: Cache) -> set[str]:
    """Return the layers that were made from pixels or boxes, or from such a layer."""
    bound: set[str] = set()
    columns = {"pixels", "jpeg", "box"}
    while True:
        new_layers = {
            layer
            for layer in cache.generation.recipes
            if layer != cache.generation.base and columns & set(cache.recipe(layer).reads)
        } - bound
        if not new_layers:
            return bound
        bound |= new_layers
        columns |= {column.name for layer in new_layers for column in cache.recipe(layer).columns}


class Transform(Protocol):
    """Transforms a batch, with random draws per row."""

    def __call__(self, batch: Batch, coins: Coins, /) -> Batch: ...


@dataclass(frozen=True, slots=True)
class Assembler:
    """Makes a batch from a table: the tensors of a collate, further columns, then the transform."""

    collate: Collate
    reader: RowReader
    extra: tuple[str, ...]  # of the table's columns, those that become tensors as they are
    transform: Transform | None
    buffers: Buffers
    seed: int = 0

    @classmethod
    def of(
        cls,
        caches: Sequence[Cache],
        collate: Collate,
        columns: Sequence[str | View],
        transform: Transform | None,
        buffers: Buffers,
        seed: int = 0,
    ) -> "Assembler":
        if transform is not None and not callable(transform):
            raise TypeError(f"transform is {transform!r}; pass a function (batch, coins) -> batch")
        extra = (*collate.extra, *checked_names("columns", columns))
        main = [name for name in collate.columns if name not in collate.viewed]
        reader = RowReader(caches, list(dict.fromkeys([*main, *extra])), collate.viewed)
        alone = RowReader(caches, list(dict.fromkeys(extra)))
        for name in (name for name in alone.like if name in collate.makes):
            raise _taken(name)
        _check_moved(collate, caches, alone.stored)
        return cls(collate, reader, tuple(alone.like), transform, buffers, seed)

    @property
    def columns(self) -> list[str]:
        """The stored columns that are read of every cache."""
        names = dict.fromkeys([*self.collate.columns, *self.reader.stored])
        return [name for name in names if all(name in cache.columns for cache in self.reader.caches)]

    def check(self, selections: Sequence[Selection | None]) -> None:
        """Raise where batches of the selected rows would be wrong."""
        self.collate.check(self.reader.caches, selections)
        self.reader.check(selections)

    def reading(self, stream: Stream) -> "Assembler":
        """Return the batch maker of a stream, whose caches may have grown."""
        if all(one is other for one, other in zip(stream.caches, self.reader.caches, strict=True)):
            return replace(self, seed=stream.seed)
        reader = RowReader(stream.caches, self.reader.columns, self.reader.viewed)
        return replace(self, reader=reader, seed=stream.seed)

    def coins(self, epoch: int, located: Located) -> Coins:
        return row_coins(self.reader.caches, self.seed, epoch, located)

    def batch(self, table: Table, coins: Coins) -> Batch:
        """Return the batch of the rows of a table."""
        batch = self.collate.collate(table, coins, self.buffers)
        extra_tensors = plain_batch({name: table[name] for name in self.extra}, self.buffers)
        for name in extra_tensors.keys() & batch.keys():
            if not name.endswith(".present"):
                raise _taken(name)
        batch |= extra_tensors
        if table.located is not None:
            batch |= _tags(table.located)
        if self.transform is not None:
            batch = self.transform(batch, coins)
            if not isinstance(batch, dict):
                raise TypeError(f"the transform returned a {type(batch).__name__}; return the batch, a dict of tensors")
        return batch


def _taken(name: str) -> ValueError:
    return ValueError(
        f"'{name}' is already in the batch; leave it out of `columns`, or pass collate=StoredBatch(cache) for columns "
        "alone, as they are stored"
    )


def _tags(located: Located) -> Batch:
    tags = {name: torch.from_numpy(values.copy()) for name, values in located.tags.items()}
    return tags if located.weights is None else tags | {"row_weight": torch.from_numpy(located.weights.copy())}


@dataclass(frozen=True, slots=True)
class BatchMaker:
    """Makes the batches of a task, up to the first error. Threads may share it."""

    assembler: Assembler
    locator: Locator
    pace: Pace

    def __call__(self, task: BatchTask) -> Handoff:
        started, rows = time.perf_counter(), self.locator.rows
        take_opening_spans()
        batches, error, counts = list[Batch](), None, [task.batches]
        while counts:
            count = counts.pop()
            try:
                located = self.locator.batches(task, len(batches), count)
                coins = self.assembler.coins(task.epoch, located)
                table = self.assembler.reader.read(located, coins)
                edges = [(at, at + rows) for at in range(0, max(1, len(located.rows)), rows)]
                batches += [self.assembler.batch(table.part(*e), coins.part(slice(*e))) for e in edges]
            except Exception as raised:  # the top of a thread: the consumer raises it at its batch
                error = raised if count == 1 else None  # else the batches before it are made one by one
                counts = [] if count == 1 else [1] * task.batches
        seconds = time.perf_counter() - started
        self.pace.note(task.batches, sum(map(tensor_bytes, batches)), seconds)
        return Handoff(batches[::-1], seconds, take_opening_spans(), error)


def suitable_threads(assembler: Assembler) -> int:
    """Return 2 threads if columns are decoded or pixels are painted, else 1."""
    is_decoded = any(decoded_columns(cache, assembler.columns) for cache in assembler.reader.caches)
    return 2 if assembler.collate.viewed or is_decoded else 1
