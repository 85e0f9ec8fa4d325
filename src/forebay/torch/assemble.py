"""Assemble batches from located rows: read columns, collate, transform.

    loader = Loader(cache, global_batch_size=64, collate=ImageBatch(cache, flip=0.5))

A coin is a random choice that depends only on row, epoch and purpose. It is the same in a `Loader` and in a
`CacheDataset`, with any number of ranks, threads or workers, and after any resume:

    def mirror(batch: Batch, coins: Coins) -> Batch:
        flipped = torch.from_numpy(coins.flip("mirror"))
        return batch | {"pixels": torch.where(flipped[:, None, None], batch["pixels"].flip(-1), batch["pixels"])}

A batch may have, beside its main tensors, the names of its rows, encodings of prompts, and teacher features at t.

    loader = Loader(cache, global_batch_size=64, columns=["latents", "clip_pooled"], identify=["row_id"],
                    features={"lune": LogitNormalTimes()})

    latents       [rows, …], as they are stored; zeros where `latents.present` is False
    row           int64 [rows], the row number in the pinned generation
    row_id        int64 [rows, 2], chunk and row in it: permanent
    clip_pooled   [rows, …], of every row, although equal prompts are stored once; NaN where it is absent
    lune          float32 [rows, …], interpolated at `lune.t`, float32 [rows]; NaN where it is absent
    lune.present  bool [rows], beside every column of a layer above the base

All of it is read in the threads of a loader. A cache of a mixture that lacks a layer has absent rows.
"""

import itertools
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field, replace
from functools import partial
from importlib import import_module
from itertools import pairwise
from typing import Any, Generic, Literal, Protocol, TypeVar, get_args, runtime_checkable

import numpy as np
import torch
from numpy.typing import ArrayLike, NDArray

from forebay import compiled
from forebay.cache.catalog import presence_name
from forebay.columns import Array, Ragged
from forebay.errors import ColumnNotFound, LayerNotFound, choice_error, closest
from forebay.feeding.prefetch import (
    BatchMaker,
    batch_bytes,
    gather_batches,
    locate_batches,
    merged_rows,
    processor_count,
    suitable_threads,
    view_rows,
)
from forebay.feeding.stream import CHAT_COLUMNS, PACKED_COLUMNS, Located, RowSource, checked_names, decoded_columns
from forebay.masks.documents import LabelStyle, checked_label_style
from forebay.masks.train_on import Kind, TrainOn
from forebay.order.orders import Coins, Numbers, Words, key_of, row_keys, sample_keys
from forebay.order.selected_rows import Selection
from forebay.read.cache import Cache
from forebay.read.column_readers import decodes_without_lock
from forebay.teachers.batched_forward import SharedColumn
from forebay.teachers.feature_reader import Features
from forebay.teachers.protocol import TimeDirection
from forebay.teachers.teacher_samples import SHARED_ROW_SUFFIX
from forebay.torch.batches import Batch, Buffers, LoadedBatch, plain_batch
from forebay.torch.packed_batch import (
    Derived,
    PackedTargets,
    batches_in_place,
    can_be_in_place,
    refuse_without_training,
    training_batch,
)

Name = Literal["row", "row_id"]
Times = float | Callable[[Coins], ArrayLike]
Found = dict[str, Array | Ragged]


@dataclass(frozen=True, slots=True)
class FeaturesAt:
    """The times at which a batch has the features of a layer: one for all rows, or a function of their coins.

    `direction` is the end of t that is noise, as in `forebay.teachers.Features.at`.
    """

    t: Times
    direction: TimeDirection | None = None

    def __post_init__(self) -> None:
        if callable(self.t):
            return
        times = np.asarray(self.t)
        if times.dtype.kind not in "fiu":
            raise TypeError(f"t of features is {self.t!r}; pass a number from 0 to 1, or a function of coins")
        if not ((times >= 0) & (times <= 1)).all():
            raise ValueError(f"t of features must be from 0 to 1 (got {self.t!r})")

    def times(self, coins: Callable[[], Coins], rows: int) -> NDArray[np.float32]:
        drawn = np.asarray(self.t(coins()) if callable(self.t) else self.t, np.float32)
        if drawn.shape not in ((), (rows,)):
            raise ValueError(f"the function of times returned shape {drawn.shape} for {rows} rows; return one per row")
        return np.array(np.broadcast_to(drawn, (rows,)))


Reader = TypeVar("Reader")


class Readers(Generic[Reader]):
    """What reads each cache, at the generation that batches are made of; None for a cache that has nothing to read."""

    def __init__(self, caches: Sequence[Cache], make: Callable[[Cache], Reader | None]) -> None:
        self._caches, self._make = list(caches), make
        self._made = {(source, cache.generation.number): make(cache) for source, cache in enumerate(caches)}

    def found(self) -> list[Reader]:
        return [reader for reader in self._made.values() if reader is not None]

    def of(self, source: int, cache: Cache) -> Reader | None:
        """Return the reader of a cache, which may have grown."""
        key = (source, cache.generation.number)
        if key not in self._made:
            self._made[key] = self._make(self._caches[source].at_generation(cache.generation.number))
        return self._made[key]


def _shared_reader(column: str, cache: Cache) -> SharedColumn | None:
    return SharedColumn(cache, column) if column in cache.columns else None


def _features_reader(layer: str, cache: Cache) -> Features | None:
    return Features(cache, layer) if layer in cache.generation.recipes else None


class SharedColumns:
    """A column that is stored once for equal prompts, in the caches that have it."""

    def __init__(self, caches: Sequence[Cache], column: str) -> None:
        self._column = column
        self._readers = Readers(caches, partial(_shared_reader, column))
        found = self._readers.found()
        if not found:
            raise ColumnNotFound(caches[0].root, column, caches[0].columns)
        self._shape, self._dtype = _same_rows(found)
        self.stored = (column, f"{column}{SHARED_ROW_SUFFIX}")
        self.row_bytes = int(np.prod(self._shape)) * self._dtype.itemsize
        self._bits = presence_name(_layer_of(found[0].cache, column))

    def read(self, caches: Sequence[Cache], located: Located, coins: Callable[[], Coins]) -> Found:
        count = len(located.rows)
        values = np.full((count, *self._shape), np.nan if self._dtype.kind in "fV" else 0, self._dtype)
        present = np.zeros(count, np.bool_)
        for source, at in _by_source(located):
            reader = self._readers.of(source, caches[source])
            if reader is not None:
                values[at] = reader.read(located.rows[at])
                present[at] = np.asarray(reader.cache.read(located.rows[at], [self._bits])[self._bits])
        return {self._column: values, self._bits: present}


class LayerColumn:
    """A column of a layer that some caches of a mixture lack: rows of these are zero, or empty if ragged."""

    def __init__(self, caches: Sequence[Cache], column: str) -> None:
        first = next(cache for cache in caches if column in cache.columns)
        self._column, self._declared = column, first.column(column)
        self._bits = presence_name(_layer_of(first, column))
        self.stored = (column,)
        self.row_bytes = first.row_bytes([column])

    def read(self, caches: Sequence[Cache], located: Located, coins: Callable[[], Coins]) -> Found:
        count, places = len(located.rows), _by_source(located)
        present, pieces = np.zeros(count, np.bool_), []
        for source, at in places:
            if self._column not in caches[source].columns:
                pieces.append(self._absent(len(at)))
                continue
            read = caches[source].read(located.rows[at], [self._column])
            pieces.append(read[self._column])
            present[at] = np.asarray(read[self._bits])
        values = merged_rows(pieces, [at for _, at in places], count, self._declared.array_dtype)
        return {self._column: values, self._bits: present}

    def _absent(self, count: int) -> Array | Ragged:
        shape, dtype = self._declared.shape, self._declared.array_dtype
        if self._declared.ragged:
            return Ragged(np.empty((0, *shape), dtype), np.zeros(count + 1, np.int64))
        return np.zeros((count, *shape), dtype)


def _same_rows(readers: Sequence[SharedColumn]) -> tuple[tuple[int, ...], np.dtype[Any]]:
    """Return the shape and type of the rows of a column; raise if it has others in another cache."""
    first = readers[0]
    for other in readers:
        if (other.shape, other.dtype) != (first.shape, first.dtype):
            raise ValueError(
                f"rows of '{first.column}' are {first.dtype} {first.shape} in '{first.cache.root}' and {other.dtype} "
                f"{other.shape} in '{other.cache.root}'; build the layer with the same options in both caches"
            )
    return first.shape, first.dtype


class TimedFeatures:
    """The features of a layer at times that are drawn for each batch, in the caches that have the layer."""

    def __init__(self, caches: Sequence[Cache], layer: str, at: FeaturesAt) -> None:
        self._readers = Readers(caches, partial(_features_reader, layer))
        found = self._readers.found()
        if not found:
            raise LayerNotFound(caches[0].root, layer, sorted(caches[0].generation.recipes))
        self._at, self._layer, self._bits = at, layer, presence_name(layer)
        self._shapes = {name: found[0].shape(name) for name in found[0].columns}
        self.stored = (*(column.name for column in found[0].cache.recipe(layer).columns), self._bits)
        self.row_bytes = sum(4 * int(np.prod(shape)) for shape in self._shapes.values())

    def read(self, caches: Sequence[Cache], located: Located, coins: Callable[[], Coins]) -> Found:
        count = len(located.rows)
        t = self._at.times(coins, count)
        batch = {name: np.full((count, *shape), np.nan, np.float32) for name, shape in self._shapes.items()}
        batch[self._bits] = np.zeros(count, np.bool_)
        for source, at in _by_source(located):
            reader = self._readers.of(source, caches[source])
            if reader is not None:
                for name, values in reader.at(located.rows[at], t[at], self._at.direction).items():
                    batch[name][at] = values
        return {**batch, f"{self._layer}.t": t}


@dataclass(frozen=True, slots=True)
class Beside:
    """Everything that is read beside the main tensors of a batch."""

    identify: tuple[Name, ...] = ()
    readers: tuple[SharedColumns | LayerColumn | TimedFeatures, ...] = ()

    @property
    def is_empty(self) -> bool:
        return not self.identify and not self.readers

    @property
    def row_bytes(self) -> int:
        return sum(reader.row_bytes for reader in self.readers) + 16 * len(self.identify)

    def columns(self, caches: Sequence[Cache]) -> list[str]:
        """Return the stored columns that are read of every cache."""
        names = dict.fromkeys(name for reader in self.readers for name in reader.stored)
        return [name for name in names if all(name in cache.columns for cache in caches)]

    def batch(self, caches: Sequence[Cache], located: Located, coins: Callable[[], Coins], buffers: Buffers) -> Batch:
        found: Found = {}
        for reader in self.readers:
            found |= reader.read(caches, located, coins)
        if "row" in self.identify:
            found["row"] = np.array(located.rows, np.int64)
        if "row_id" in self.identify:
            found["row_id"] = _row_ids(caches, located)
        return plain_batch(found, buffers)


def beside(
    caches: Sequence[Cache],
    columns: Sequence[str],
    identify: Sequence[Name],
    features: Mapping[str, Times | FeaturesAt] | None,
) -> tuple[tuple[str, ...], Beside]:
    """Return the columns that are read as they are stored, and what is read otherwise."""
    names = checked_names("identify", identify)
    unknown = [name for name in names if name not in get_args(Name)]
    if unknown:
        raise choice_error("each name of identify", unknown[0], get_args(Name))
    if features is not None and not isinstance(features, Mapping):
        raise TypeError(f"features is {features!r}; pass a dict from layers to times: {{'lune': 0.5}}")
    shared = [name for name in columns if any(_is_shared(cache, name) for cache in caches)]
    partly = [name for name in columns if name not in shared and _is_partly_there(caches, name)]
    timed = {layer: at if isinstance(at, FeaturesAt) else FeaturesAt(at) for layer, at in (features or {}).items()}
    readers: list[SharedColumns | LayerColumn | TimedFeatures] = [SharedColumns(caches, name) for name in shared]
    readers += [LayerColumn(caches, name) for name in partly]
    readers += [TimedFeatures(caches, layer, at) for layer, at in timed.items()]
    apart = {*shared, *partly}
    return tuple(name for name in columns if name not in apart), Beside(names, tuple(readers))


def default_columns(cache: Cache) -> tuple[str, ...]:
    """Return the columns of the opened layers, without the places where equal prompts are stored."""
    pointers = {f"{name}{SHARED_ROW_SUFFIX}" for name in cache.default_columns if _is_shared(cache, name)}
    return tuple(name for name in cache.default_columns if name not in pointers)


def _is_shared(cache: Cache, name: str) -> bool:
    return name in cache.columns and f"{name}{SHARED_ROW_SUFFIX}" in cache.columns


def _is_partly_there(caches: Sequence[Cache], name: str) -> bool:
    """Whether a layer above the base has the column in some of the caches, but not in all."""
    found = [cache for cache in caches if name in cache.columns]
    return 0 < len(found) < len(caches) and _layer_of(found[0], name) != found[0].generation.base


def _layer_of(cache: Cache, column: str) -> str:
    return next(iter(cache.columns_by_layer([column])))


def _by_source(located: Located) -> list[tuple[int, Numbers]]:
    """Return each cache that rows come from, and the places of these rows in the batch."""
    if located.sources is None:
        return [(0, np.arange(len(located.rows)))]
    return [(source, np.flatnonzero(located.sources == source)) for source in np.unique(located.sources).tolist()]


def _row_ids(caches: Sequence[Cache], located: Located) -> Numbers:
    ids = np.empty((len(located.rows), 2), np.int64)
    for source, at in _by_source(located):
        cache, rows = caches[source], located.rows[at]
        position = cache.chunk_positions(rows)
        ids[at, 0], ids[at, 1] = cache.chunk_numbers[position], rows - cache.chunk_starts[position]
    return ids


Rows = Mapping[str, Array | Iterable[Array]]


class Collate(Protocol):
    """Makes a batch of rows, with the coins of their samples, in memory from `buffers`. Called by many threads.

    Fixed columns come as arrays; ragged ones row by row, each a view of the cache that is checked as it is read.

    One that is also a `ChecksCache` or a `ChecksRows` is asked before the first batch.
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


@runtime_checkable
class ChecksCache(Protocol):
    """A collate that raises where batches of a cache's rows would be wrong."""

    def check_cache(self, cache: Cache) -> None: ...


@runtime_checkable
class ChecksRows(Protocol):
    """A collate that raises where no batch can hold some of the selected rows (None: all rows)."""

    def check_rows(self, cache: Cache, selection: Selection | None) -> None: ...


@runtime_checkable
class PaintsCompiled(Protocol):
    """A collate that may leave nearly all of its work to compiled code, which threads can share call by call."""

    @property
    def is_compiled(self) -> bool: ...


def check_rows(collate: Collate, cache: Cache, selection: Selection | None) -> None:
    """Let a collate refuse rows that it cannot use, before they come up in the middle of an epoch."""
    if isinstance(collate, ChecksRows):
        collate.check_rows(cache, selection)


def check_caches(collate: Collate, caches: Sequence[Cache]) -> None:
    """Let a collate refuse caches that it was not made for."""
    if isinstance(collate, ChecksCache):
        for cache in caches:
            collate.check_cache(cache)


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
    if not column:
        return by_row(cache, rows)
    ids = cache.read(rows, [column])[column]
    if not isinstance(ids, Ragged):
        return sample_keys(each.tobytes() for each in ids)
    content, offsets = ids.values.tobytes(), (ids.offsets * (ids.values.nbytes // max(1, len(ids.values)))).tolist()
    return sample_keys(content[start:stop] for start, stop in pairwise(offsets))


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

    main: Callable[[Sequence[Cache], Located, int], Iterator[Batch]]  # batches without what is beside
    beside: Beside
    transform: Transform | None
    buffers: Buffers

    def batches(self, stream: RowSource, epoch: int, located: Located, size: int) -> Iterator[Batch]:
        made = self.main(stream.caches, located, size)
        if self.beside.is_empty and self.transform is None and located.is_plain:
            yield from (batch if type(batch) is LoadedBatch else LoadedBatch(batch) for batch in made)
            return
        for at, batch in enumerate(made):
            part = located.part(slice(at * size, (at + 1) * size))
            coins = DrawnOnce(partial(_coins, stream, epoch, part, by_row))
            add_tensors(batch, self.beside.batch(stream.caches, part, coins, self.buffers))
            yield _completed(batch, part, self.transform, coins)


@dataclass(frozen=True, slots=True)
class CollatedBatches:
    """Makes batches with a collate, and adds `columns` as they are stored."""

    collate: Collate
    columns: tuple[str, ...]
    beside: Beside
    transform: Transform | None
    buffers: Buffers

    def batches(self, stream: RowSource, epoch: int, located: Located, size: int) -> Iterator[Batch]:
        for at in range(0, max(1, len(located.rows)), size):
            yield self._batch(stream, epoch, located.part(slice(at, at + size)))

    def _batch(self, stream: RowSource, epoch: int, located: Located) -> Batch:
        coins = DrawnOnce(partial(_coins, stream, epoch, located, by_sample))
        rows = view_rows(stream.caches, located, self.collate.columns)
        batch = self.collate.collate(rows, coins(), self.buffers)
        if self.columns:
            (read,) = gather_batches(stream.caches, located, max(1, len(located.rows)), self.columns)
            add_tensors(batch, plain_batch(read, self.buffers))
        add_tensors(batch, self.beside.batch(stream.caches, located, coins, self.buffers))
        return _completed(batch, located, self.transform, coins)


class DrawnOnce:
    """The coins of a batch, drawn when they are first asked for; most batches need none."""

    __slots__ = ("_coins", "_draw")

    def __init__(self, draw: Callable[[], Coins]) -> None:
        self._draw = draw
        self._coins: Coins | None = None

    def __call__(self) -> Coins:
        if self._coins is None:
            self._coins = self._draw()
        return self._coins


def _completed(batch: Batch, located: Located, transform: Transform | None, coins: Callable[[], Coins]) -> Batch:
    batch |= _tags(located)
    if transform is not None:
        batch = checked_batch(transform(batch, coins()))
    return LoadedBatch(batch) if type(batch) is dict else batch


def _coins(stream: RowSource, epoch: int, located: Located, naming: Naming) -> Coins:
    epochs = epoch if located.epochs is None else located.epochs
    return row_coins(stream.caches, stream.seed, epochs, located.rows, located.sources, naming)


def add_tensors(batch: Batch, further: Batch) -> None:
    """Add tensors to a batch; presence bits may be there already."""
    for name in further.keys() & batch.keys():
        if not name.endswith(".present"):
            raise ValueError(_already_there(name))
    batch |= further


def _tags(located: Located) -> Batch:
    tags = {name: torch.from_numpy(values.copy()) for name, values in located.tags.items()}
    return tags if located.weights is None else tags | {"row_weight": torch.from_numpy(located.weights.copy())}


MakerFactory = Callable[[Buffers, Transform | None, int], BatchMaker]  # the number: batches to write in one call
_LOCATED_ROWS = 1024  # of columns that need not be decoded
_HELPED_ROWS = 8192  # helpers have nothing to do while rows are located
_SHARING_THREADS = 2  # one makes batches, and one helps it without the GIL
_COLLATING_THREADS = 2  # a collate touches every value; reading alone keeps one thread busy


@dataclass(frozen=True, slots=True)
class BatchKind:
    """The columns to read, the default number of threads, the bytes of a row, and how to make batches."""

    targets: PackedTargets | None = field(default=None, kw_only=True)  # of packed tokens
    columns: tuple[str, ...]
    threads: int
    row_bytes: int
    collate: Collate | None
    maker: MakerFactory
    compiled: bool = False  # whether compiled code does nearly all of the work


def batch_kind(
    caches: Sequence[Cache],
    columns: Sequence[str] | None,
    collate: Collate | Literal["stored"] | None,
    labels: LabelStyle | Literal["auto"] | None,
    derive: Sequence[Derived] | Literal["device"] | None,
    train_on: "TrainOn | Sequence[Kind] | Mapping[Kind, float] | None" = None,
    *,
    loss_mask: str | None = None,
    max_documents: int | None = None,
    identify: Sequence[Name] = (),
    features: Mapping[str, Times | FeaturesAt] | None = None,
) -> BatchKind:
    """Return the kind of batch that the arguments ask for, by default the one that suits the caches."""
    columns = None if columns is None else checked_names("columns", columns)
    if columns == ():
        raise ValueError("columns is empty; name columns of the cache, or leave it out")
    labels = labels if labels == "auto" else checked_label_style("labels", labels)
    on_device, derive = derive == "device", checked_derive(derive)
    is_packed = all(set(PACKED_COLUMNS) <= set(cache.columns) for cache in caches)
    trains = collate is None and is_packed
    collate = _usual_collate(caches) if collate is None else checked_collate(collate)
    if trains:
        refuse_packed(columns or ())
        policy = label_policy(caches, train_on, loss_mask)
        if on_device:
            _refuse_on_device(labels, policy, loss_mask)
            stored = PackedTargets(None, (), pad_token(caches[0]), max_documents=max_documents, as_stored=True)
            kind = _training(stored, caches, *beside(caches, columns or (), identify, features))
            return replace(kind, targets=stored)
        usual = PackedTargets()
        targets = PackedTargets(
            usual.labels if labels == "auto" else labels,
            usual.derive if derive is None else derive,
            pad_token(caches[0]),
            policy,
            loss_mask,
            max_documents,
        )
        kind = _training(targets, caches, *beside(caches, columns or (), identify, features))
        return replace(kind, targets=targets)
    if on_device:
        raise ValueError("derive='device' applies to packed-token batches only; leave `collate` out")
    refuse_without_training(labels, derive, train_on, loss_mask, max_documents)
    if collate is not None:
        return _collated(collate, caches, *beside(caches, columns or (), identify, features))
    return _plain(caches, *beside(caches, columns or default_columns(caches[0]), identify, features))


def rank_facts(
    targets: PackedTargets | None, columns: Sequence[str] | None, features: Mapping[str, Any] | None
) -> dict[str, Any]:
    """Return what batches have, as far as all ranks must agree on it."""
    facts: dict[str, Any] = {"columns": sorted(columns or ()), "features": sorted(features or ())}
    if targets is None:
        return facts
    derive = "device" if targets.as_stored else sorted(targets.derive)
    train_on = None if targets.train_on is None else str(targets.train_on)
    facts |= {"labels": targets.labels, "derive": derive, "max_documents": targets.max_documents}
    return facts | {"train_on": train_on, "loss_mask": targets.loss_mask}


def checked_derive(derive: Sequence[Derived] | Literal["device"] | None) -> tuple[Derived, ...] | None:
    """Return the names of derived tensors; None where none are named, or "device" is."""
    if derive is None or derive == "device":
        return None
    if isinstance(derive, str) and closest(derive, ("device",)):
        raise choice_error("derive", derive, (*get_args(Derived), "device"))
    return checked_names("derive", derive)


def _refuse_on_device(
    labels: LabelStyle | Literal["auto"] | None, policy: TrainOn | None, loss_mask: str | None
) -> None:
    if policy is not None or loss_mask is not None:
        raise ValueError(
            "derive='device' makes labels of whole documents; rows with spans or a loss_mask need those of the loader: "
            "leave derive out"
        )
    if labels not in (None, "auto"):
        raise ValueError(f"pass labels={labels!r} to derive_on_device; with derive='device' the loader makes no labels")


def _usual_collate(caches: Sequence[Cache]) -> Collate | None:
    kinds = {cache.recipe(cache.generation.base).kind for cache in caches}
    homes = {
        "images": ("forebay.torch.images.image_batch", "ImageBatch"),
        "preferences": ("forebay.torch.preference_batch", "PreferenceBatch"),
    }
    if len(kinds) != 1 or (kind := kinds.pop()) not in homes:
        return None
    module, name = homes[kind]  # they import this module
    collate: Collate = getattr(import_module(module), name)(caches[0])
    return collate


def checked_collate(collate: Collate | Literal["stored"]) -> Collate | None:
    """Return a collate; None where columns come as they are stored."""
    if isinstance(collate, str):
        if collate != "stored":
            raise choice_error("collate", collate, ("stored",))
        return None
    return collate


def refuse_packed(columns: Sequence[str]) -> None:
    """Raise if columns that a packed batch is made of are to be added to it."""
    for name in columns:
        if name in PACKED_COLUMNS:
            raise ValueError(_already_there(name))


def _already_there(name: str) -> str:
    return (
        f"'{name}' is already in the batch; leave it out of `columns` and `identify`, or pass collate='stored' for "
        "columns alone, as they are stored"
    )


def pad_token(cache: Cache) -> int:
    """Return the token that the recipe pads with; 0 if it names none."""
    pad = cache.recipe(cache.generation.base).fields.get("pad", 0)
    return pad if isinstance(pad, int) else 0


def _collated(collate: Collate, caches: Sequence[Cache], further: tuple[str, ...], more: Beside) -> BatchKind:
    check_caches(collate, caches)

    def maker(buffers: Buffers, transform: Transform | None, together: int) -> BatchMaker:
        return CollatedBatches(collate, further, more, transform, buffers)

    row_bytes = collate.row_bytes + (batch_bytes(caches[0], further, 1) if further else 0) + more.row_bytes
    columns = (*collate.columns, *further, *more.columns(caches))
    by_compiled = isinstance(collate, PaintsCompiled) and collate.is_compiled and not further and more.is_empty
    return BatchKind(columns, _COLLATING_THREADS, row_bytes, collate, maker, by_compiled)


def _training(training: PackedTargets, caches: Sequence[Cache], further: tuple[str, ...], more: Beside) -> BatchKind:
    columns = tuple(dict.fromkeys((*training.columns, *further)))
    training = replace(training, further=further)

    def maker(buffers: Buffers, transform: Transform | None, together: int) -> BatchMaker:
        copied = partial(_copied, columns, training, buffers)
        main = partial(_in_place, columns, training, buffers, together) if can_be_in_place(caches) else copied
        return ColumnBatches(main, more, transform, buffers)

    derived = 0 if training.as_stored else 1 + (training.labels is not None) + len(training.derive)
    row_bytes = batch_bytes(caches[0], (*PACKED_COLUMNS, *further), 1, derived=derived)
    in_place = can_be_in_place(caches) and not training.needs_arrays and not further and more.is_empty
    return _of_columns((*columns, *more.columns(caches)), caches, row_bytes + more.row_bytes, maker, in_place)


def _in_place(
    columns: tuple[str, ...],
    training: PackedTargets,
    buffers: Buffers,
    together: int,
    caches: Sequence[Cache],
    located: Located,
    size: int,
) -> Iterator[Batch]:
    """Yield batches of rows that are read where they are."""
    if located.weights is not None and not located.weights.all():  # some rows become padding
        yield from _copied(columns, training, buffers, caches, located, size)
        return
    rest = tuple(name for name in columns if name not in PACKED_COLUMNS)
    reads = gather_batches(caches, located, size, rest) if rest else itertools.repeat({})
    is_decoded = any(decoded_columns(cache, PACKED_COLUMNS) for cache in caches)
    # Blocks of many rows would be decoded before the first batch is made of them.
    rows = _HELPED_ROWS if compiled.native.count_helpers() else _LOCATED_ROWS
    many = together if is_decoded else max(1, rows // (size * together)) * together
    for tokens, lengths in locate_batches(caches, located, size * many, PACKED_COLUMNS):
        yield from batches_in_place(tokens, lengths, size, together, reads, training, buffers)


def _copied(
    columns: tuple[str, ...],
    training: PackedTargets,
    buffers: Buffers,
    caches: Sequence[Cache],
    located: Located,
    size: int,
) -> Iterator[Batch]:
    """Yield batches of copies of rows."""
    for at, read in enumerate(gather_batches(caches, located, size, columns)):
        weights = None if located.weights is None else located.weights[at * size : (at + 1) * size]
        yield training_batch(read, training, buffers, weights)


def _as_stored(
    columns: tuple[str, ...], buffers: Buffers, caches: Sequence[Cache], located: Located, size: int
) -> Iterator[Batch]:
    """Yield batches of columns as they are stored."""
    count = -(-max(1, len(located.rows)) // size)
    reads = gather_batches(caches, located, size, columns) if columns else iter([{}] * count)
    return (plain_batch(read, buffers) for read in reads)


def _of_columns(
    columns: tuple[str, ...],
    caches: Sequence[Cache],
    row_bytes: int,
    maker: MakerFactory,
    by_compiled: bool,
) -> BatchKind:
    decoded = [cache.column(name) for cache in caches for name in decoded_columns(cache, columns)]
    by_compiled = by_compiled and all(map(decodes_without_lock, decoded))
    threads = min(_SHARING_THREADS, processor_count()) if by_compiled else suitable_threads(caches, columns)
    return BatchKind(columns, threads, row_bytes, None, maker, by_compiled)


def label_policy(
    caches: Sequence[Cache],
    train_on: "TrainOn | Sequence[Kind] | Mapping[Kind, float] | None",
    loss_mask: str | None,
) -> TrainOn | None:
    """Return which tokens of conversations are trained; None where they are all, or a checked `loss_mask` says it."""
    if loss_mask is None:
        return spans_policy(caches, train_on)
    if train_on is not None:
        raise ValueError("pass train_on or loss_mask, not both: each says which labels the loss counts")
    if loss_mask in PACKED_COLUMNS:
        raise ValueError(f"loss_mask is '{loss_mask}', which has no weights; name a column with one number per token")
    for cache in caches:
        column, shape = cache.column(loss_mask), cache.column("tokens").shape
        if column.ragged or column.shape != shape:
            found = "ragged" if column.ragged else f"of shape {column.shape}"
            raise ValueError(f"rows of '{loss_mask}' are {found}; a loss_mask has one number per token, {shape}")
    return None


def spans_policy(
    caches: Sequence[Cache], train_on: "TrainOn | Sequence[Kind] | Mapping[Kind, float] | None"
) -> TrainOn | None:
    """Return which tokens of conversations are trained: by default all that a model generates."""
    with_spans = [set(CHAT_COLUMNS) <= set(cache.columns) for cache in caches]
    if all(with_spans):
        return TrainOn() if train_on is None else TrainOn.of(train_on)
    if train_on is not None or any(with_spans):
        without = caches[with_spans.index(False)]
        raise ValueError(
            f"'{without.root}' has no spans, so nothing says which of its tokens are responses; "
            "build it with `forebay build chat`, or load chat caches and others apart"
        )
    return None


def _plain(caches: Sequence[Cache], columns: tuple[str, ...], more: Beside) -> BatchKind:
    def maker(buffers: Buffers, transform: Transform | None, together: int) -> BatchMaker:
        return ColumnBatches(partial(_as_stored, columns, buffers), more, transform, buffers)

    row_bytes = batch_bytes(caches[0], columns, 1) + more.row_bytes
    fixed = not any(cache.column(name).ragged for cache in caches for name in columns)
    # Rows of several caches are read and merged a group at a time, which helpers would make larger and have no part in.
    by_compiled = compiled.native is not None and fixed and more.is_empty and len(caches) == 1
    return _of_columns((*columns, *more.columns(caches)), caches, row_bytes, maker, by_compiled)
