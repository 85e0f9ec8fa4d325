"""How many steps a training run has, and the learning rate's multiplier at each, while the data grows under it.

    1 ┤    ╱‾‾╲                      a total is known from a step on: the pairs (0, T₀), (s, T₁), …
      │   ╱     ╲__                  progress goes from 0, after the warm-up, to 1 at the total; when the total
      │  ╱         ╲____             moves, progress goes on from where it is, so the multiplier never jumps
floor ┤ ╱               ╲__╱╲__      near the floor the multiplier first rises again, over `rewarm` steps
      └─┴──┴─────┴──────┴──┴────▶
      0 warm-up  s      T₁ grown
"""

from dataclasses import dataclass
from fractions import Fraction
from math import cos, floor, pi
from typing import Literal

NEAR_ITS_END = 0.9  # progress from which on a growth makes the multiplier rise again: else it would stay where it is

Decay = Literal["cosine", "linear"]
Totals = tuple[tuple[int, int], ...]  # (from this step on, so many steps in all)


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

    def __call__(self, step: int) -> float:
        if step < self.warmup:
            return step / self.warmup
        leg = _Leg(self.warmup, 1.0, self.warmup, 0.0, self.totals[0][1])
        for start, total in self.totals[1:]:
            if start > step:
                break
            leg = self._next_leg(leg, start, total)
        return self._on(leg, step)

    def _next_leg(self, leg: "_Leg", step: int, total: int) -> "_Leg":
        if step <= self.warmup:
            return _Leg(self.warmup, 1.0, self.warmup, 0.0, total)
        if leg.start <= step and leg.progress_at(step) < NEAR_ITS_END:
            return _Leg(step, self._on(leg, step), step, leg.progress_at(step), total)
        # Near its floor, or still rising from there: it rises for `rewarm` steps from now, so that it is never steep.
        return _Leg(step, self._on(leg, step), step + self.rewarm, self._fresh(step + self.rewarm, total), total)

    def _on(self, leg: "_Leg", step: int) -> float:
        if step < leg.start:
            rise = (step - leg.rises_from) / (leg.start - leg.rises_from)
            return leg.value + (self._shaped(leg.progress) - leg.value) * rise
        return self._shaped(leg.progress_at(step))

    def _fresh(self, step: int, total: int) -> float:
        """The progress of a run that had this total from its beginning."""
        return _Leg(self.warmup, 1.0, self.warmup, 0.0, total).progress_at(step)

    def _shaped(self, progress: float) -> float:
        share = (1 + cos(pi * progress)) / 2 if self.decay == "cosine" else 1 - progress
        return self.floor + (1 - self.floor) * share


@dataclass(frozen=True, slots=True)
class _Leg:
    """From `value` at `rises_from` straight to `start`; from there, progress in equal steps to 1 at the total."""

    rises_from: int
    value: float
    start: int
    progress: float
    total: int

    def progress_at(self, step: int) -> float:
        if step >= self.total:
            return 1.0
        return self.progress + (1 - self.progress) * (step - self.start) / (self.total - self.start)


def _as_written(number: float) -> Fraction:
    """A number as it is written: 0.8 is four fifths."""
    return Fraction(str(number))
