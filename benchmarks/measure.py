"""Timing two things side by side: interleaved, median of several rounds, so that noise disturbs both alike."""

import statistics
import time
from collections.abc import Callable
from dataclasses import dataclass

ROUNDS = 10


@dataclass(frozen=True, slots=True)
class Comparison:
    name: str
    ours: float  # seconds, by default the median
    theirs: float
    amount: float  # of what `unit` counts, done in that time
    unit: str
    goal: float

    @property
    def ratio(self) -> float:
        """How fast ours is, in units of theirs."""
        return self.theirs / self.ours

    def __str__(self) -> str:
        rates = f"{self.amount / self.ours:10,.2f} vs {self.amount / self.theirs:10,.2f} {self.unit}/s"
        verdict = "met" if self.ratio >= self.goal else "MISSED"
        return f"{self.name:<62} {rates:<38} ratio {self.ratio:5.2f}  goal ≥ {self.goal:.2f}  {verdict}"


def compare(
    name: str,
    ours: Callable[[], object],
    theirs: Callable[[], object],
    *,
    amount: float,
    unit: str,
    goal: float,
    before: Callable[[], object] = lambda: None,
    rounds: int = ROUNDS,
    clock: Callable[[], float] = time.perf_counter,
    chosen: Callable[[list[float]], float] = statistics.median,
) -> Comparison:
    """Time two calls, one after the other, so many times; `before` runs before each, untimed.

    `chosen` says which of the times counts.
    """
    times: dict[Callable[[], object], list[float]] = {ours: [], theirs: []}
    for call in (ours, theirs):
        before()
        call()  # both warm
    for round_ in range(rounds):
        for call in (ours, theirs) if round_ % 2 else (theirs, ours):
            before()
            started = clock()
            call()
            times[call].append(clock() - started)
    return Comparison(name, chosen(times[ours]), chosen(times[theirs]), amount, unit, goal)
