"""Batches of several loaders, each of one shape, in random order."""

from collections.abc import Iterator, Mapping, Sequence
from typing import Annotated, Any

import msgspec
import numpy as np
from torch import Tensor

from forebay.feeding.stream import state_mismatch
from forebay.fields import checked_whole
from forebay.order.shuffle import Numbers, key_of, permute
from forebay.torch.batches import Batch
from forebay.torch.loader import Loader, compare_together, repeated


class BucketLoader:
    """Batches of several loaders, in random order: an epoch has every batch of each once.

        buckets = aspect_buckets([(448, 448), (512, 384), (384, 512)])
        loader = BucketLoader([
            Loader(cache, global_batch_size=32, selection=bucket.selection(),
                   collate=ImageBatch(cache, transforms=[bucket]))
            for bucket in buckets
        ])

    All ranks take the same loader in each step, and compare seed, position and all loaders before the first batch. It
    stops and resumes as a `Loader` does, at the same batch; in the middle of an epoch, with the same batch sizes.
    """

    def __init__(self, loaders: Sequence[Loader], seed: int = 0) -> None:
        self.loaders, self.seed = _checked_loaders(loaders), checked_whole("seed", seed)
        self.epoch = self.position = 0
        self._agreed = False
        self._counts: list[int] = []
        self._begin_epoch()

    def __len__(self) -> int:
        """Return the number of batches of a whole epoch."""
        return sum(self._counts)

    def __repr__(self) -> str:
        return (
            f"<BucketLoader of {len(self.loaders)} loaders, seed {self.seed}, at batch {self.position:,} of "
            f"{len(self):,} of epoch {self.epoch}>"
        )

    def __iter__(self) -> Iterator[Batch]:
        """Yield the rest of the epoch."""
        if self.loaders[0].restarts:
            self.epoch = self.position = 0
        if not self._agreed:
            facts = {"seed": self.seed, "epoch": self.epoch, "position": self.position, "batches": self._counts}
            compare_together(self.loaders, {"BucketLoader": facts})
            self._agreed = True
        streams: list[Iterator[Any]] = [iter(loader) for loader in self.loaders]
        for chosen in self._turns()[self.position :].tolist():
            batch = next(streams[chosen], None)
            if batch is None:
                raise RuntimeError(
                    f"loader {chosen} of this BucketLoader has fewer batches left than its turns; iterate it and load "
                    "its state through the BucketLoader only"
                )
            self._advance()
            yield batch

    def forever(self, max_steps: int | None = None) -> Iterator[Any]:
        """Yield the batches of this epoch and of all that follow, at most `max_steps`, as `Loader.forever` does."""
        return repeated(self, max_steps)

    def sum_over_ranks(self, value: Tensor) -> Tensor:
        """Return the sum of a tensor over the ranks that share batches: a collective, which every rank calls."""
        return self.loaders[0].sum_over_ranks(value)

    def state_dict(self) -> dict[str, Any]:
        restarts = self.loaders[0].restarts
        return {
            "epoch": 0 if restarts else self.epoch,
            "position": 0 if restarts else self.position,
            "batches": self._counts,
            "loaders": [loader.state_dict() for loader in self.loaders],
            "seed": self.seed,
            "batch_sizes": [loader.global_batch_size for loader in self.loaders],
        }

    def load_state_dict(self, state: Mapping[str, Any]) -> None:
        try:
            saved = msgspec.convert(state, _BucketState)
        except msgspec.ValidationError as error:
            raise ValueError(
                f"not the state of a BucketLoader: {error}; pass what its state_dict() returned"
            ) from error
        then_and_now: dict[str, tuple[object, object]] = {
            "loaders": (len(saved.loaders), len(self.loaders)),
            "seed": (saved.seed, self.seed),
        }
        if saved.position:
            then_and_now["batch sizes"] = (saved.batch_sizes, [loader.global_batch_size for loader in self.loaders])
        if differs := {name: pair for name, pair in then_and_now.items() if pair[0] != pair[1]}:
            raise state_mismatch("the loaders of a BucketLoader", differs)
        for loader, each in zip(self.loaders, saved.loaders, strict=True):
            loader.load_state_dict(each)
        self._agreed = False
        if not self.loaders[0].restarts:
            self.epoch, self.position = saved.epoch, saved.position
            self._begin_epoch()
            if self.position:
                self._counts = saved.batches

    def _turns(self) -> Numbers:
        """Return the number of the loader of every batch of the epoch."""
        total = sum(self._counts)
        order = permute(np.arange(total), total, key_of("buckets", self.seed, self.epoch))
        return np.repeat(np.arange(len(self._counts)), self._counts)[order]

    def _advance(self) -> None:
        self.position += 1
        if self.position == len(self):
            self.epoch, self.position = self.epoch + 1, 0
            self._begin_epoch()

    def _begin_epoch(self) -> None:
        """Count the batches that every loader has left of its epoch, usually all of them."""
        self._counts = [_batches_left(loader) for loader in self.loaders]


class _BucketState(msgspec.Struct, frozen=True):
    epoch: Annotated[int, msgspec.Meta(ge=0)]
    position: Annotated[int, msgspec.Meta(ge=0)]
    batches: list[int]
    loaders: list[dict[str, Any]]
    seed: int
    batch_sizes: list[int]


def _checked_loaders(loaders: Sequence[Loader]) -> list[Loader]:
    checked = list(loaders)
    if not checked:
        raise ValueError("loaders is empty; pass one Loader for each bucket")
    for other in (each for each in checked if not isinstance(each, Loader)):
        raise TypeError(f"loaders has a {type(other).__name__}; pass one Loader for each bucket")
    if len({(loader.ranks, loader.restarts) for loader in checked}) > 1:
        raise ValueError("loaders must have the same ranks, and all or none of them restart=True")
    return checked


def _batches_left(loader: Loader) -> int:
    rows = loader.stream.size(loader.epoch) - loader.position
    return rows // loader.global_batch_size if loader.drop_last else -(-rows // loader.global_batch_size)
