"""A learning-rate schedule for a growing cache: a multiplier for `torch.optim.lr_scheduler.LambdaLR`."""

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
class ScheduleOptions:
    """What turns rows into steps, and steps into a multiplier."""

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

    The warm-up is a share of the steps that the full data will have, and does not change as the cache grows. Its first
    step has the multiplier 0, as in other libraries. After growth, `update` counts the steps again; the multiplier
    continues from its value, and near its floor it first rises again over `rewarm` steps, or over half of the remaining
    steps if those are fewer.

        schedule = Schedule(cache, epochs=5, effective_batch=72, train_fraction=0.8, full_rows=2_500_000)
        scheduler = LambdaLR(optimizer, schedule)            # saves and restores the schedule's state with its own
        schedule.update(grown_cache)

    A restored state has the steps that were known then, until `update` counts them with the current epochs and batch
    size. A `Loader` and a `CacheDataset` count only their selected rows, so pass `train_fraction=1` with them; a loader
    counts the rows of its current epoch.
    """

    # `LambdaLR` saves and restores `__dict__`, so only the state is there, not the options.
    __slots__ = ("__dict__", "_options")

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
        self._options = ScheduleOptions(epochs, effective_batch, train_fraction, floor, decay, rewarm)
        self.warmup = warmup_steps(self._options.steps(rows if full_rows is None else full_rows), warmup_share)
        self.totals = [[0, self._options.steps(rows)]]
        self.step = 0
        self.multiplier(0)  # checks the options
        self._warn_of_a_long_warmup()

    def __repr__(self) -> str:
        return f"<Schedule at step {self.step:,} of {self.total:,}, warm-up of {self.warmup:,}>"

    @property
    def total(self) -> int:
        """The number of steps, as known now."""
        return self.totals[-1][1]

    def __call__(self, step: int) -> float:
        """Return the multiplier at the step that training has now reached."""
        self.step = step
        return self.multiplier(step)

    def multiplier(self, step: int) -> float:
        """Return the multiplier at any step, as known now."""
        options = self._options
        totals = tuple((start, total) for start, total in self.totals)
        return Multiplier(self.warmup, totals, options.floor, options.decay, options.rewarm)(step)

    def update(self, rows: Counted) -> int:
        """Count the steps again, from the step that training has reached, and return them; they never become fewer."""
        total = self._options.steps(rows)
        if total < self.total:
            raise ValueError(
                f"{_count(rows):,} rows make {total:,} steps, fewer than the {self.total:,} before; a cache does not "
                "shrink: pass all its rows, or make a new Schedule for fewer epochs or a larger batch"
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
                f"the warm-up of {self.warmup:,} steps is longer than the {self.total:,} steps of the current rows; "
                "the learning rate will not reach its peak before the cache has grown",
                stacklevel=3,
            )


def _count(rows: Counted) -> int:
    if isinstance(rows, Loader):  # its length counts batches
        return rows.stream.size(rows.epoch)
    if isinstance(rows, Cache | CacheDataset):
        return len(rows)
    try:
        return index(rows)  # numpy integers too
    except TypeError as error:
        what = type(rows).__name__
        raise TypeError(f"rows must be a number, a cache, a CacheDataset or a Loader (got a {what})") from error
