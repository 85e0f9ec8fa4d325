"""How many steps a training run has, and the learning rate's multiplier at each, while the data grows under it.

    1 ┤    ╱‾‾╲                      a total is known from a step on: the pairs (0, T₀), (s, T₁), …
      │   ╱     ╲__                  progress goes from 0, after the warm-up, to 1 at the total; when the total
      │  ╱         ╲____             moves, progress goes on from where it is, so the multiplier never jumps
floor ┤ ╱               ╲__╱╲__      near the floor the multiplier first rises again, over `rewarm` steps
      └─┴──┴─────┴──────┴──┴────▶
      0 warm-up  s      T₁ grown

How far it rises depends on where the growth finds it: up to a progress of 0.8 not at all, from 0.9 on all the way to
what a run with the new total from its beginning would have, and between the two in proportion. So a growth one step
later makes a little difference, never a large one.
"""

from dataclasses import dataclass
from fractions import Fraction
from itertools import pairwise
from math import acos, cos, floor, pi
from typing import Literal

Decay = Literal["cosine", "linear"]
Totals = tuple[tuple[int, int], ...]  # (from this step on, so many steps in all)
RISES_FROM, RISES_FULLY_FROM = 0.8, 0.9  # progress at a growth


def training_steps(sequences: int, epochs: float, train_fraction: float, effective_batch: int) -> int:
    """
    >>> training_steps(352_217, epochs=5, train_fraction=0.8, effective_batch=72)
    19567
    """
    if sequences < 0 or epochs <= 0 or not 0 < train_fraction <= 1 or effective_batch < 1:
        raise ValueError(
            f"{sequences} sequences, {epochs} epochs, a train_fraction of {train_fraction} and an effective_batch of "
            f"{effective_batch} make no schedule; give 0 or more, more than 0, up to 1, and 1 or more"
        )
    return floor(sequences * _as_written(epochs) * _as_written(train_fraction) / effective_batch)


def warmup_steps(full_steps: int, share: float) -> int:
    """
    >>> warmup_steps(138_888, 0.025)
    3472
    """
    if not 0 <= share < 1:
        raise ValueError(f"the warm-up is a share of {share}; it is 0 or more and below 1")
    return floor(full_steps * _as_written(share))


@dataclass(frozen=True, slots=True)
class Multiplier:
    """The multiplier at every step: a pure function of the warm-up, the shape and the pairs (step, total)."""

    warmup: int
    totals: Totals
    floor: float = 0.1
    decay: Decay = "cosine"
    rewarm: int = 100

    def __post_init__(self) -> None:
        if self.warmup < 0 or not 0 <= self.floor <= 1 or self.rewarm < 1 or self.decay not in ("cosine", "linear"):
            raise ValueError(
                f"a warm-up of {self.warmup}, floor {self.floor}, decay {self.decay!r} and rewarm {self.rewarm} make "
                "no schedule; give 0 or more, a share, 'cosine' or 'linear', and 1 or more"
            )
        if not self.totals or self.totals[0][0] != 0:
            raise ValueError(f"totals are {self.totals}; the first one counts from step 0")
        if any(later < earlier for pair in pairwise(self.totals) for earlier, later in zip(*pair, strict=True)):
            raise ValueError(f"totals are {self.totals}; neither the steps nor the totals become less")

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
        """The progress that has this value."""
        if self.floor == 1:
            return 0.0
        share = max(0.0, min(1.0, (value - self.floor) / (1 - self.floor)))
        return acos(2 * share - 1) / pi if self.decay == "cosine" else 1 - share


@dataclass(frozen=True, slots=True)
class _Leg:
    """From `start` on, progress in equal steps to 1 at the total; meanwhile a rise towards a fresh run's multiplier."""

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
    """A number as it is written: 0.8 is four fifths."""
    return Fraction(str(number))
