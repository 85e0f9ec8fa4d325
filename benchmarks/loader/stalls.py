"""How long a training thread that takes a batch every 2 ms waits for the interpreter lock while loader threads work.

A thread also loses its core to other processes. Only gaps in which the thread gave up its core itself count as stalls
(it waited for the lock), without the time in which it was ready to run and had no core.
"""

import os
import resource
import statistics
import time
from collections.abc import Callable, Iterator

from benchmarks.lib.options import Options
from benchmarks.lib.result import Result
from benchmarks.lib.timing import forever
from benchmarks.lib.token_rows import TokenRows
from forebay.torch import Loader

CASE = "loader.stalls"
STEP_SECONDS = 0.002
SHORTEST_GAP = 1e-4
BATCH = 32


def measure(options: Options) -> Iterator[Result]:
    loader = Loader(TokenRows.of(options).cache("none"), global_batch_size=BATCH, seed=0, threads=2)
    batches = forever(lambda: iter(loader))
    for _ in range(2 * len(loader)):
        next(batches)  # every block is checked by now
    seconds = 1.0 if options.is_quick else 10.0
    with_loader = [longest_stall(seconds, lambda: next(batches)) for _ in range(options.rounds)]
    alone = [longest_stall(seconds, lambda: None) for _ in range(options.rounds)]
    work = f"longest stall of a training thread in {seconds:.0f} s, two loader threads, batches of 32 x 2,048"
    yield Result(case=CASE, work=f"{work}: median round", unit="ms", ours=statistics.median(with_loader), at_most=1.0)
    yield Result(case=CASE, work=f"{work}: worst round", unit="ms", ours=max(with_loader))
    yield Result(case=CASE, work="the same without a loader: worst round", unit="ms", ours=max(alone))


def longest_stall(seconds: float, step: Callable[[], object]) -> float:
    """The longest wait for the interpreter lock, in milliseconds; a step comes every 2 ms and does not count."""
    schedstat = os.open("/proc/thread-self/schedstat", os.O_RDONLY)

    def look() -> tuple[float, int, float]:
        queued = int(os.pread(schedstat, 100, 0).split()[1]) * 1e-9
        return time.perf_counter(), resource.getrusage(resource.RUSAGE_THREAD).ru_nvcsw, queued

    longest, (now, waits, queued) = 0.0, look()
    end, due = now + seconds, now + STEP_SECONDS
    while now < end:
        if now > due:
            step()
            now, waits, queued = look()
            due = now + STEP_SECONDS
        later, waits_later, queued_later = look()
        gap = later - now
        if gap > SHORTEST_GAP and waits_later != waits:
            longest = max(longest, gap - (queued_later - queued))
        now, waits, queued = later, waits_later, queued_later
    os.close(schedstat)
    return 1000 * longest
