"""Rates of several things that take turns, so that noise disturbs all of them alike."""

import time
from collections.abc import Callable, Iterator, Mapping

Rates = dict[str, list[float]]


def in_turn(works: Mapping[str, Callable[[], float]], rounds: int) -> Rates:
    """Call each once per round, in an order that alternates; each returns its rate."""
    rates: Rates = {name: [] for name in works}
    for turn in range(rounds):
        names = list(works) if turn % 2 == 0 else list(reversed(works))
        for name in names:
            rates[name].append(works[name]())
    return rates


def rate_of(work: Callable[[], object], amount: float) -> float:
    """How much of `amount` per second one call does."""
    started = time.perf_counter()
    work()
    return amount / (time.perf_counter() - started)


def rate_for(batches: Iterator[object], amount: float, seconds: float) -> float:
    """Amount per second over batches for about so long; each batch counts `amount`."""
    count, started = 0, time.perf_counter()
    while (spent := time.perf_counter() - started) < seconds:
        next(batches)
        count += 1
    return count * amount / spent


def forever(epoch: Callable[[], Iterator[object]]) -> Iterator[object]:
    while True:
        yield from epoch()
