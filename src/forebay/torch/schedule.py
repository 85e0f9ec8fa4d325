"""A learning-rate schedule for a growing cache: a multiplier for `torch.optim.lr_scheduler.LambdaLR`.

    1 ┤    ╱‾‾╲               ╭──╮     after a growth it is that of a run which had the new total from its start;
      │   ╱    ╲              │   ╲    the warm-up is that of the full data, and stays
      │  ╱      ╲             │    ╲____
floor ┤ ╱        ╲____________╯         ╲__
      └─┴──┴───────┴──────────┴───────────┴─▶
      0 warm-up    total      growth      new total
"""

import warnings
from collections.abc import Mapping
from dataclasses import dataclass
from fractions import Fraction
from math import cos, floor, pi
from typing import Any, Literal, get_args

from forebay.fields import checked_number, checked_whole
from forebay.torch.loader import Loader

Decay = Literal["cosine", "linear"]


@dataclass(frozen=True, slots=True)
class ScheduleOptions:
    """Options that turn rows into steps, and steps into a multiplier."""

    epochs: float
    effective_batch: int
    train_fraction: float
    warmup_share: float
    floor: float
    decay: Decay

    def __post_init__(self) -> None:
        checked_whole("effective_batch", self.effective_batch, 1)
        checked_number("epochs", self.epochs)
        allowed = {
            "train_fraction": (0 < self.train_fraction <= 1, "above 0 and up to 1"),
            "warmup_share": (0 <= self.warmup_share < 1, "at least 0 and below 1"),
            "floor": (0 <= self.floor <= 1, "from 0 to 1"),
            "decay": (self.decay in get_args(Decay), "'cosine' or 'linear'"),
        }
        for name, (is_allowed, values) in allowed.items():
            if not is_allowed:
                raise ValueError(f"{name} must be {values} (got {getattr(self, name)!r})")

    def steps(self, rows: int | Loader) -> int:
        count = _count(rows)
        if count < 0:
            raise ValueError(f"rows must be at least 0 (got {count})")
        return floor(count * _as_written(self.epochs) * _as_written(self.train_fraction) / self.effective_batch)

    def warmup(self, full_rows: int | Loader) -> int:
        return floor(self.steps(full_rows) * _as_written(self.warmup_share))


class Schedule:
    """`steps = floor(rows · epochs · train_fraction / effective_batch)`, warm-up, then decay to a floor.

        schedule = Schedule.for_loader(loader, epochs=5, full_estimate=2_500_000)
        scheduler = LambdaLR(optimizer, schedule)

    The warm-up is a share of the steps that the full data will have, and does not change as the cache grows. Its first
    step has the multiplier 0, as in other libraries. After growth the steps are counted again, and the multiplier is
    that of a run with the new total: it rises where training had decayed further.

    `for_loader` does this by itself. Without a loader, pass the number of rows, and call `update` after growth. A
    restored state has the steps that were known then, until they are counted with the current options.
    """

    # `LambdaLR` saves and restores `__dict__`, so only the state is there, not the options.
    __slots__ = ("__dict__", "_loader", "_options", "_warned")

    warmup: int
    total: int
    step: int

    def __init__(
        self,
        rows: int | Loader,
        *,
        epochs: float,
        effective_batch: int,
        train_fraction: float = 1.0,
        full_rows: int | None = None,
        warmup_share: float = 0.025,
        floor: float = 0.1,
        decay: Decay = "cosine",
    ) -> None:
        self._options = ScheduleOptions(epochs, effective_batch, train_fraction, warmup_share, floor, decay)
        self._loader: Loader | None = None
        self._warned = False
        self.warmup = self._options.warmup(rows if full_rows is None else full_rows)
        self.total, self.step = self._options.steps(rows), 0
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
    ) -> "Schedule":
        """Return a schedule that counts the loader's rows again when they grow, and is saved in the loader's state.

        `full_estimate` are the rows that the loader will have when the data is complete.
        """
        schedule = cls(
            loader, epochs=epochs, effective_batch=loader.global_batch_size, full_rows=full_estimate,
            warmup_share=warmup_share, floor=floor, decay=decay,
        )  # fmt: skip
        schedule._loader = loader
        loader.schedule = schedule
        return schedule

    def __repr__(self) -> str:
        return f"<Schedule at step {self.step:,} of {self.total:,}, warm-up of {self.warmup:,}>"

    def __call__(self, step: int) -> float:
        """Return the multiplier at the step that training has now reached."""
        self.step = step
        if self._loader is not None and self._options.steps(self._loader) > self.total:
            self.update(self._loader)
        return self.multiplier(step)

    def multiplier(self, step: int) -> float:
        """Return the multiplier at any step, as known now."""
        if step < self.warmup:
            return step / self.warmup
        progress = 1.0 if step >= self.total else (step - self.warmup) / (self.total - self.warmup)
        share = (1 + cos(pi * progress)) / 2 if self._options.decay == "cosine" else 1 - progress
        return self._options.floor + (1 - self._options.floor) * share

    def update(self, rows: int | Loader) -> int:
        """Count the steps again and return them; they never become fewer."""
        total = self._options.steps(rows)
        if total < self.total:
            raise ValueError(
                f"{_count(rows):,} rows make {total:,} steps, fewer than the {self.total:,} before; pass all rows of "
                "the cache, or make a new Schedule for fewer epochs or a larger batch"
            )
        self.total = total
        self._warn_of_a_partial_cache(rows)
        return total

    def state_dict(self) -> dict[str, Any]:
        return {"warmup": self.warmup, "total": self.total, "step": self.step}

    def load_state_dict(self, state: Mapping[str, Any]) -> None:
        self.warmup, self.total, self.step = (int(state[name]) for name in ("warmup", "total", "step"))

    def _warn_of_a_partial_cache(self, rows: int | Loader) -> None:
        if self.warmup > self.total and not self._warned:
            self._warned = True
            warnings.warn(
                f"the cache is partial: the warm-up of {self.warmup:,} steps is longer than the {self.total:,} steps "
                f"of its {_count(rows):,} rows; the learning rate will not reach its peak before the cache has grown",
                stacklevel=3,
            )


def _as_written(number: float) -> Fraction:
    """Return the decimal number as written: 0.8 is four fifths."""
    return Fraction(str(number))


def _count(rows: int | Loader) -> int:
    if not isinstance(rows, Loader):
        return checked_whole("rows", rows)
    # The length of a loader counts batches; an epoch that has begun keeps its rows.
    return max(rows.stream.size(rows.epoch), 0 if rows.grown is None else rows.grown.new_rows)
