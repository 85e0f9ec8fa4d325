"""A learning-rate schedule for a growing cache: a multiplier for `torch.optim.lr_scheduler.LambdaLR`.

The number of steps of a training run, and the learning-rate multiplier at each, while the data grows.

    1 ┤    ╱‾‾╲                      a total is known from a step on: the pairs (0, T₀), (s, T₁), …
      │   ╱     ╲__                  progress goes from 0, after the warm-up, to 1 at the total; when the total
      │  ╱         ╲____             changes, progress continues from its value, so the multiplier never jumps
floor ┤ ╱               ╲__╱╲__      near the floor the multiplier first rises again, over `rewarm` steps
      └─┴──┴─────┴──────┴──┴────▶
      0 warm-up  s      T₁ grown

How far it rises depends on the progress at the growth: up to 0.8 not at all, from 0.9 on to the multiplier of a run
that had the new total from its start, and between the two in proportion. So growth one step later changes little.
"""

import warnings
from collections.abc import Mapping
from dataclasses import dataclass
from fractions import Fraction
from itertools import pairwise
from math import acos, cos, floor, pi
from operator import index
from typing import Any, Literal, get_args

from forebay.read.cache import Cache
from forebay.torch.dataset import CacheDataset
from forebay.torch.loader import Loader

Decay = Literal["cosine", "linear"]
Totals = tuple[tuple[int, int], ...]  # (from this step on, total number of steps)
RISES_FROM, RISES_FULLY_FROM = 0.8, 0.9  # progress at a growth


def training_steps(sequences: int, epochs: float, train_fraction: float, effective_batch: int) -> int:
    """Return the number of whole steps.

    >>> training_steps(352_217, epochs=5, train_fraction=0.8, effective_batch=72)
    19567
    """
    _require(sequences >= 0, f"the number of rows must be at least 0 (got {sequences})")
    _require(epochs > 0, f"epochs must be more than 0 (got {epochs})")
    _require(0 < train_fraction <= 1, f"train_fraction must be above 0 and up to 1 (got {train_fraction})")
    _require(effective_batch >= 1, f"effective_batch must be at least 1 (got {effective_batch})")
    return floor(sequences * _as_written(epochs) * _as_written(train_fraction) / effective_batch)


def warmup_steps(full_steps: int, share: float) -> int:
    """Return the number of whole warm-up steps.

    >>> warmup_steps(138_888, 0.025)
    3472
    """
    _require(0 <= share < 1, f"warmup_share must be at least 0 and below 1 (got {share})")
    return floor(full_steps * _as_written(share))


@dataclass(frozen=True, slots=True)
class Multiplier:
    """Returns the multiplier at every step: a pure function of the warm-up, the shape and the pairs (step, total)."""

    warmup: int
    totals: Totals
    floor: float = 0.1
    decay: Decay = "cosine"
    rewarm: int = 100

    def __post_init__(self) -> None:
        _require(self.warmup >= 0, f"warmup must be at least 0 (got {self.warmup})")
        _require(0 <= self.floor <= 1, f"floor must be from 0 to 1 (got {self.floor})")
        _require(self.rewarm >= 1, f"rewarm must be at least 1 (got {self.rewarm})")
        _require(self.decay in get_args(Decay), f"decay must be 'cosine' or 'linear' (got {self.decay!r})")
        _require(bool(self.totals) and self.totals[0][0] == 0, f"totals must begin at step 0 (got {self.totals})")
        rises = all(later >= earlier for pair in pairwise(self.totals) for earlier, later in zip(*pair, strict=True))
        _require(rises, f"neither steps nor totals may decrease (got {self.totals})")

    def __call__(self, step: int) -> float:
        if step < self.warmup:
            return step / self.warmup
        leg = self._first_leg(self.totals[0][1])
        for start, total in self.totals[1:]:
            if start > step:
                break
            leg = self._first_leg(total) if start <= self.warmup else self._next_leg(leg, start, total)
        return self._on(leg, step)

    def _first_leg(self, total: int) -> "_Leg":
        return _Leg(self.warmup, 0.0, total, 0.0, 1)

    def _next_leg(self, leg: "_Leg", step: int, total: int) -> "_Leg":
        progress = self._progress_of(self._on(leg, step)) if leg.rises else leg.progress_at(step)
        near_the_end = (progress - RISES_FROM) / (RISES_FULLY_FROM - RISES_FROM)
        not_risen_yet = leg.rises * (1 - leg.risen_at(step))
        rises = max(0.0, min(1.0, near_the_end), not_risen_yet)
        return _Leg(step, progress, total, rises, max(1, min(self.rewarm, (total - step) // 2)))

    def _on(self, leg: "_Leg", step: int) -> float:
        own = self._shaped(leg.progress_at(step))
        fresh = self._shaped(self._first_leg(leg.total).progress_at(step))
        return own + leg.rises * leg.risen_at(step) * (fresh - own)

    def _shaped(self, progress: float) -> float:
        share = (1 + cos(pi * progress)) / 2 if self.decay == "cosine" else 1 - progress
        return self.floor + (1 - self.floor) * share

    def _progress_of(self, value: float) -> float:
        """Return the progress at which the multiplier has this value."""
        if self.floor == 1:
            return 0.0
        share = max(0.0, min(1.0, (value - self.floor) / (1 - self.floor)))
        return acos(2 * share - 1) / pi if self.decay == "cosine" else 1 - share


@dataclass(frozen=True, slots=True)
class _Leg:
    """From `start` on, linear progress to 1 at the total, and meanwhile a rise towards a fresh run's multiplier."""

    start: int
    progress: float
    total: int
    rises: float  # how much of the way to a fresh run's multiplier
    over: int  # steps that the rise takes

    def progress_at(self, step: int) -> float:
        if step >= self.total:
            return 1.0
        return self.progress + (1 - self.progress) * (step - self.start) / (self.total - self.start)

    def risen_at(self, step: int) -> float:
        return min(1.0, (step - self.start) / self.over)


def _as_written(number: float) -> Fraction:
    """Return the decimal number as written: 0.8 is four fifths."""
    return Fraction(str(number))


def _require(holds: bool, problem: str) -> None:
    if not holds:
        raise ValueError(problem)


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
