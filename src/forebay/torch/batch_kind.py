"""Which batches a loader makes: of tokens to train on, of columns as they are, or of what a collate makes of rows."""

from collections.abc import Callable, Sequence
from dataclasses import dataclass

from forebay import torch as names
from forebay.cache.reader import Cache
from forebay.masks.documents import LabelStyle
from forebay.torch.batch import (
    TRAINED_ON,
    Batch,
    Derived,
    Read,
    Training,
    Weights,
    plain_batch,
    refuse_without_training,
    training_batch,
)
from forebay.torch.buffers import Buffers
from forebay.torch.collate import Collate, check_caches
from forebay.torch.given import checked_names
from forebay.torch.making import Collating, Deriving, Making
from forebay.torch.pace import batch_bytes, suitable_threads
from forebay.torch.transform import Transform

_COLLATING_THREADS = 2  # a collate works on every value; reading alone keeps one thread busy


@dataclass(frozen=True, slots=True)
class BatchKind:
    """What is read, how many threads suit it, what a row of a batch takes, and how batches are made."""

    columns: tuple[str, ...]
    threads: int
    row_bytes: int
    collate: Collate | None
    making: Callable[[Buffers, Transform | None], Making]


def batch_kind(
    caches: Sequence[Cache],
    columns: Sequence[str] | None,
    collate: Collate | None,
    labels: LabelStyle | None,
    derive: Sequence[Derived],
) -> BatchKind:
    """The kind that was asked for; where nothing was, that of the caches."""
    columns = None if columns is None else checked_names("columns", columns)
    if columns == ():
        raise ValueError("columns is empty; name columns of the cache, or leave it out")
    derive = checked_names("derive", derive)
    if collate is None and columns is None:
        collate = _usual_collate(caches)
    if collate is not None:
        refuse_without_training(labels, derive)
        return _collated(collate, columns or (), caches)
    if columns is None and all(set(TRAINED_ON) <= set(cache.columns) for cache in caches):
        return _training(Training(labels, derive, _pad(caches[0])), caches)
    refuse_without_training(labels, derive)
    return _plain(columns or caches[0].default_columns, caches)


def _usual_collate(caches: Sequence[Cache]) -> Collate | None:
    kinds = {cache.recipe(cache.generation.base).kind for cache in caches}
    return names.ImageBatch(caches[0]) if kinds == {"images"} else None


def _pad(cache: Cache) -> int:
    """The token that the recipe pads with; 0 where it names none."""
    pad = cache.recipe(cache.generation.base).fields.get("pad", 0)
    return pad if isinstance(pad, int) else 0


def _collated(collate: Collate, further: tuple[str, ...], caches: Sequence[Cache]) -> BatchKind:
    check_caches(collate, caches)

    def making(buffers: Buffers, transform: Transform | None) -> Making:
        return Collating(collate, further, transform, buffers)

    row_bytes = collate.row_bytes + (batch_bytes(caches[0], further, 1) if further else 0)
    return BatchKind((*collate.columns, *further), _COLLATING_THREADS, row_bytes, collate, making)


def _training(training: Training, caches: Sequence[Cache]) -> BatchKind:
    def making(buffers: Buffers, transform: Transform | None) -> Making:
        def derive(read: Read, weights: Weights | None) -> Batch:
            return training_batch(read, training, buffers, weights)

        return Deriving(TRAINED_ON, derive, transform)

    row_bytes = batch_bytes(caches[0], TRAINED_ON, 1, derived=2 + len(training.derive))
    return BatchKind(TRAINED_ON, suitable_threads(caches, TRAINED_ON), row_bytes, None, making)


def _plain(columns: tuple[str, ...], caches: Sequence[Cache]) -> BatchKind:
    def making(buffers: Buffers, transform: Transform | None) -> Making:
        def derive(read: Read, weights: Weights | None) -> Batch:
            return plain_batch(read, buffers)

        return Deriving(columns, derive, transform)

    return BatchKind(columns, suitable_threads(caches, columns), batch_bytes(caches[0], columns, 1), None, making)
