"""A learning-rate schedule for a growing cache: a multiplier for `torch.optim.lr_scheduler.LambdaLR`.

    1 ┤    ╱‾‾╲                      a total is known from a step on: the pairs (0, T₀), (s, T₁), …
      │   ╱    ╲   ╱‾‾╲__            after a growth the multiplier moves from its value to that of a run which had
      │  ╱      ╲_╱      ╲____       the new total from its start, in equal parts over `rewarm` steps: it never jumps
floor ┤ ╱                     ╲__
      └─┴──┴──────┴──────────────┴─▶
      0 warm-up   s              T₁
"""

import warnings
from collections.abc import Mapping
from dataclasses import dataclass
from fractions import Fraction
from itertools import pairwise
from math import cos, floor, pi
from operator import index
from typing import Any, Literal, get_args

from forebay.read.cache import Cache
from forebay.torch.dataset import CacheDataset
from forebay.torch.loader import Loader

Decay = Literal["cosine", "linear"]
Totals = tuple[tuple[int, int], ...]  # (from this step on, total number of steps)


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
        last = max(at for at, (start, _) in enumerate(self.totals) if start <= step)
        return self._after(last, step)

    def _after(self, growth: int, step: int) -> float:
        """Return the multiplier as known after a growth; 0 is the first total."""
        start, total = self.totals[growth]
        fresh = self._fresh(total, step)
        if start <= self.warmup:
            return fresh
        share = min(1.0, (step - start) / max(1, min(self.rewarm, (total - start) // 2)))
        return share * fresh + (1 - share) * self._after(growth - 1, start)

    def _fresh(self, total: int, step: int) -> float:
        """Return the multiplier of a run that has this total from its start."""
        progress = 1.0 if step >= total else (step - self.warmup) / (total - self.warmup)
        share = (1 + cos(pi * progress)) / 2 if self.decay == "cosine" else 1 - progress
        return self.floor + (1 - self.floor) * share


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

        schedule = Schedule.for_loader(loader, epochs=5, full_estimate=2_500_000)
        scheduler = LambdaLR(optimizer, schedule)

    The warm-up is a share of the steps that the full data will have, and does not change as the cache grows. Its first
    step has the multiplier 0, as in other libraries. After growth the steps are counted again, and within `rewarm`
    steps, or half of the remaining ones if those are fewer, the multiplier moves to that of a run with the new total.

    `for_loader` does this by itself. Without a loader, pass the number of rows, or what has them, and call `update`
    after growth. A restored state has the steps that were known then, until they are counted with the current options.
    """

    # `LambdaLR` saves and restores `__dict__`, so only the state is there, not the options.
    __slots__ = ("__dict__", "_loader", "_options", "_warned")

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
        self._loader: Loader | None = None
        self._warned = False
        self.warmup = warmup_steps(self._options.steps(rows if full_rows is None else full_rows), warmup_share)
        self.totals = [[0, self._options.steps(rows)]]
        self.step = 0
        self.multiplier(0)  # checks the options
        self._warn_of_a_partial_cache(rows)

    @classmethod
    def for_loader(
        cls,
        loader: Loader,
        *,
        epochs: float,
        full_estimate: int | None = None,
        warmup_share: float = 0.025,
        floor: float = 0.1,
        decay: Decay = "cosine",
        rewarm: int = 100,
    ) -> "Schedule":
        """Return a schedule that counts the loader's rows again when they grow, and is saved in the loader's state.

        `full_estimate` are the rows that the loader will have when the data is complete.
        """
        schedule = cls(
            loader, epochs=epochs, effective_batch=loader.global_batch_size, full_rows=full_estimate,
            warmup_share=warmup_share, floor=floor, decay=decay, rewarm=rewarm,
        )  # fmt: skip
        schedule._loader = loader
        loader.schedule = schedule
        return schedule

    def __repr__(self) -> str:
        return f"<Schedule at step {self.step:,} of {self.total:,}, warm-up of {self.warmup:,}>"

    @property
    def total(self) -> int:
        """The number of steps, as known now."""
        return self.totals[-1][1]

    def __call__(self, step: int) -> float:
        """Return the multiplier at the step that training has now reached."""
        self.step = step
        if self._loader is not None and self._options.steps(self._loader) > self.total:
            self.update(self._loader)
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
        self._warn_of_a_partial_cache(rows)
        return total

    def state_dict(self) -> dict[str, Any]:
        return {"warmup": self.warmup, "totals": self.totals, "step": self.step}

    def load_state_dict(self, state: Mapping[str, Any]) -> None:
        self.warmup, self.step = int(state["warmup"]), int(state["step"])
        self.totals = [[int(start), int(total)] for start, total in state["totals"]]

    def _warn_of_a_partial_cache(self, rows: Counted) -> None:
        if self.warmup > self.total and not self._warned:
            self._warned = True
            warnings.warn(
                f"the cache is partial: the warm-up of {self.warmup:,} steps is longer than the {self.total:,} steps "
                f"of its {_count(rows):,} rows; the learning rate will not reach its peak before the cache has grown",
                stacklevel=3,
            )


def _count(rows: Counted) -> int:
    if isinstance(rows, Loader):  # its length counts batches; an epoch that has begun keeps its rows
        return max(rows.stream.size(rows.epoch), 0 if rows.grown is None else rows.grown.new_rows)
    if isinstance(rows, Cache | CacheDataset):
        return len(rows)
    try:
        return index(rows)  # numpy integers too
    except TypeError as error:
        what = type(rows).__name__
        raise TypeError(f"rows must be a number, a cache, a CacheDataset or a Loader (got a {what})") from error
