"""The learning rate's schedule while the cache grows: a multiplier for `torch.optim.lr_scheduler.LambdaLR`."""

import warnings
from collections.abc import Mapping
from dataclasses import dataclass
from operator import index
from typing import Any

from forebay.order.lr_schedule import Decay, Multiplier, training_steps, warmup_steps
from forebay.read.cache import Cache
from forebay.torch.dataset import CacheDataset
from forebay.torch.loader import Loader

Counted = int | Cache | CacheDataset | Loader


@dataclass(frozen=True, slots=True)
class Terms:
    """What makes steps of sequences, and a multiplier of steps."""

    epochs: float
    effective_batch: int
    train_fraction: float
    floor: float
    decay: Decay
    rewarm: int

    def steps(self, rows: Counted) -> int:
        return training_steps(_count(rows), self.epochs, self.train_fraction, self.effective_batch)


class Schedule:
    """`steps = floor(rows · epochs · train_fraction / effective_batch)`, warm-up, then decay to a floor.

    The warm-up is a share of the steps that the full data will have, and stays as it is while the cache grows. Its
    first step has a multiplier of 0, as in other libraries. After a growth, `update` counts the steps anew; the
    multiplier goes on from where it is, and near its floor it first rises again over `rewarm` steps, or over half of
    the steps that are left where those are fewer.

        schedule = Schedule(cache, epochs=5, effective_batch=72, train_fraction=0.8, full_rows=2_500_000)
        scheduler = LambdaLR(optimizer, schedule)            # saves and restores the schedule's state with its own
        schedule.update(grown_cache)

    A restored state has the steps that were known then, until `update` counts them with the epochs and the batch that
    are asked for now. A `Loader` and a `CacheDataset` have their selected rows only: count them with a
    `train_fraction` of 1. Those of a loader are the rows of the epoch it is in.
    """

    # `LambdaLR` keeps and restores `__dict__`: the state alone lies there, not what was asked for.
    __slots__ = ("__dict__", "_terms")

    warmup: int
    totals: list[list[int]]
    step: int

    def __init__(
        self,
        rows: Counted,
        *,
        epochs: float,
        effective_batch: int,
        train_fraction: float = 1.0,
        full_rows: Counted | None = None,
        warmup_share: float = 0.025,
        floor: float = 0.1,
        decay: Decay = "cosine",
        rewarm: int = 100,
    ) -> None:
        self._terms = Terms(epochs, effective_batch, train_fraction, floor, decay, rewarm)
        self.warmup = warmup_steps(self._terms.steps(rows if full_rows is None else full_rows), warmup_share)
        self.totals = [[0, self._terms.steps(rows)]]
        self.step = 0
        self.multiplier(0)  # refuses terms that make no schedule
        self._warn_of_a_long_warmup()

    def __repr__(self) -> str:
        return f"<Schedule at step {self.step:,} of {self.total:,}, warm-up of {self.warmup:,}>"

    @property
    def total(self) -> int:
        """Steps in all, as known now."""
        return self.totals[-1][1]

    def __call__(self, step: int) -> float:
        """The multiplier at a step, which training has now reached."""
        self.step = step
        return self.multiplier(step)

    def multiplier(self, step: int) -> float:
        """The multiplier at any step, as known now."""
        terms = self._terms
        totals = tuple((start, total) for start, total in self.totals)
        return Multiplier(self.warmup, totals, terms.floor, terms.decay, terms.rewarm)(step)

    def update(self, rows: Counted) -> int:
        """Count the steps anew, from the step that training has reached; the steps in all, which never become less."""
        total = self._terms.steps(rows)
        if total < self.total:
            raise ValueError(
                f"{_count(rows):,} rows make {total:,} steps, but {self.total:,} were known; a cache does not shrink: "
                "give all its rows, or make a new Schedule for fewer epochs or a larger batch"
            )
        if total != self.total:
            self.totals = [*(pair for pair in self.totals if pair[0] < self.step), [self.step, total]]
        self._warn_of_a_long_warmup()
        return total

    def state_dict(self) -> dict[str, Any]:
        return {"warmup": self.warmup, "totals": self.totals, "step": self.step}

    def load_state_dict(self, state: Mapping[str, Any]) -> None:
        self.warmup, self.step = int(state["warmup"]), int(state["step"])
        self.totals = [[int(start), int(total)] for start, total in state["totals"]]

    def _warn_of_a_long_warmup(self) -> None:
        if self.warmup > self.total:
            warnings.warn(
                f"the warm-up of {self.warmup:,} steps is longer than the {self.total:,} steps that the rows give now; "
                "the learning rate will not reach its peak before the cache has grown",
                stacklevel=3,
            )


def _count(rows: Counted) -> int:
    if isinstance(rows, Loader):  # its length counts batches
        return rows.stream.size(rows.epoch)
    if isinstance(rows, Cache | CacheDataset):
        return len(rows)
    try:
        return index(rows)  # numbers of numpy too
    except TypeError as error:
        what = type(rows).__name__
        raise TypeError(f"rows are a number, a cache, a CacheDataset or a Loader, not a {what}") from error
