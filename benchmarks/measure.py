"""Timing two things side by side: interleaved, median of several rounds, so that noise disturbs both alike."""

import os
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
    left_out: int = 0  # rounds that other processes disturbed
    disturbed: int = 0  # rounds that count though they were

    @property
    def ratio(self) -> float:
        """How fast ours is, in units of theirs."""
        return self.theirs / self.ours

    def __str__(self) -> str:
        rates = f"{self.amount / self.ours:10,.2f} vs {self.amount / self.theirs:10,.2f} {self.unit}/s"
        verdict = "met" if self.ratio >= self.goal else "MISSED"
        found = f"{self.name:<62} {rates:<38} ratio {self.ratio:5.2f}  goal ≥ {self.goal:.2f}  {verdict}"
        noise = f"; {self.left_out} rounds left out, {self.disturbed} of those that count were disturbed"
        return found + noise if self.left_out or self.disturbed else found


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
    undisturbed: bool = False,
) -> Comparison:
    """Time two calls, one after the other, so many times; `before` runs before each, untimed.

    `chosen` says which of the times counts. With `undisturbed`, rounds beside which other processes computed are left
    out, up to five times as many as count.
    """
    times: dict[Callable[[], object], list[float]] = {ours: [], theirs: []}
    left_out = disturbed = 0
    for call in (ours, theirs):
        before()
        call()  # both warm
    while len(times[ours]) < rounds:
        spent = _by_others() if undisturbed else 0.0
        began, found = time.perf_counter(), {}
        for call in (ours, theirs) if len(times[ours]) % 2 else (theirs, ours):
            before()
            started = clock()
            call()
            found[call] = clock() - started
        is_disturbed = undisturbed and _by_others() - spent > 0.02 + 0.05 * (time.perf_counter() - began)
        if is_disturbed and left_out < 5 * rounds:
            left_out += 1
            continue
        disturbed += is_disturbed
        for call, seconds in found.items():
            times[call].append(seconds)
    return Comparison(name, chosen(times[ours]), chosen(times[theirs]), amount, unit, goal, left_out, disturbed)


def _by_others() -> float:
    """Seconds of CPU time that others than this process took since the machine was started; ticks of 10 ms."""
    with open("/proc/stat") as file:
        user, nice, system, _, _, *interrupts_and_stolen = map(int, file.readline().split()[1:9])
    own = os.times()
    return (user + nice + system + sum(interrupts_and_stolen)) / os.sysconf("SC_CLK_TCK") - own.user - own.system
