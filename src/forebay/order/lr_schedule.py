"""The number of steps of a training run, and the learning-rate multiplier at each, while the data grows.

    1 ┤    ╱‾‾╲                      a total is known from a step on: the pairs (0, T₀), (s, T₁), …
      │   ╱     ╲__                  progress goes from 0, after the warm-up, to 1 at the total; when the total
      │  ╱         ╲____             changes, progress continues from its value, so the multiplier never jumps
floor ┤ ╱               ╲__╱╲__      near the floor the multiplier first rises again, over `rewarm` steps
      └─┴──┴─────┴──────┴──┴────▶
      0 warm-up  s      T₁ grown

How far it rises depends on the progress at the growth: up to 0.8 not at all, from 0.9 on to the multiplier of a run
that had the new total from its start, and between the two in proportion. So growth one step later changes little.
"""

from dataclasses import dataclass
from fractions import Fraction
from itertools import pairwise
from math import acos, cos, floor, pi
from typing import Literal, get_args

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
