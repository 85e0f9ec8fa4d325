"""The batches of an epoch as tasks, and how many of them are made ahead.

positions    start ├─── batch ───┼─── batch ───┼─── batch ───┼─ … ─┤ stop
task               └─ a few batches, read together ─┘
stretch            └─ some thousand positions, located together ───┘
rank r of w        takes the positions p with p % w == r

A task has as many batches as take about 4 ms, or 8 MiB: handing over a task costs as much as making two batches of
tokens. While more than half of what may be ahead is done, a task is one batch, so that the training thread never waits
long for the interpreter lock.
"""

import threading
from collections.abc import Callable, Iterator, Sequence
from functools import lru_cache, partial
from typing import NamedTuple

import numpy as np

from forebay.feeding.ahead import Slot
from forebay.feeding.statistics import Handoff
from forebay.feeding.stream import Ranks, Stream
from forebay.read.rows import Located

AHEAD_BYTES = 32 * 1024 * 1024
_TASK_BYTES = 8 * 1024 * 1024
_TASK_SECONDS = 0.004
_MOST = 64  # batches ahead, and of a task
_LOCATED_ROWS = 8192
Ranges = list[tuple[int, int]]  # of positions of an epoch; all but the last have whole batches only


class BatchTask(NamedTuple):
    """Some batches of an epoch, within a stretch of positions whose rows are located together."""

    epoch: int
    start: int
    batches: int
    stretch: tuple[int, int]


class Pace:
    """The number of batches per task, and whether another task may begin, from measurements."""

    def __init__(self, threads: int, most: int | None) -> None:
        self.most = _MOST if most is None else most
        self._least = 1 if most is not None else 2  # batches ahead, however large they are
        self._per_task = max(1, self.most // (threads + 1))
        self.batches = 1  # of a task
        self._largest = 0  # bytes of a batch
        self._is_half_full = False

    def note(self, count: int, size_bytes: int, seconds: float) -> None:
        """Learn from a task."""
        self._largest = max(self._largest, size_bytes // max(1, count))
        suitable = count * min(_TASK_SECONDS / max(seconds, 1e-9), _TASK_BYTES / max(1, size_bytes))
        self.batches = max(1, min(int(suitable), 2 * count, self._per_task))

    def next_batches(self) -> int:
        """Return how many batches the next task has."""
        return 1 if self._is_half_full else self.batches

    def fits(self, task: BatchTask, pending: Sequence[Slot[BatchTask, Handoff]]) -> bool:
        ahead = sum(slot.task.batches for slot in pending) + task.batches
        done = sum(slot.task.batches for slot in pending if slot.is_done)
        self._is_half_full = 2 * done > self.most or 2 * done * self._largest > AHEAD_BYTES
        if not pending or ahead <= self._least:
            return True
        return ahead <= self.most and ahead * self._largest <= AHEAD_BYTES


def tasks(
    epoch: int, ranges: Ranges, following: Callable[[int], Ranges] | None, batch_size: int, ranks: Ranks, pace: Pace
) -> Iterator[BatchTask]:
    """Yield the batches of an epoch, and of those after it, if `following` returns them."""
    while True:
        for start, stop in ranges:
            stretch = max(1, _LOCATED_ROWS * ranks.world_size // batch_size) * batch_size
            for first in range(start, stop, stretch):
                last, at = min(stop, first + stretch), first
                while at < last:
                    count = min(pace.next_batches(), -(-(last - at) // batch_size))
                    yield BatchTask(epoch, at, count, (first, last))
                    at += count * batch_size
        if following is None:
            return
        epoch += 1
        ranges = following(epoch)
        if not ranges:
            raise ValueError(f"epoch {epoch} of this stream has no batch")


class Locator:
    """Finds the rows of a rank in the batches of tasks, a stretch of positions at a time. Threads may share it.

    With `filled`, a last batch that does not divide among the ranks is filled up on those that lack a row, with a copy
    of its last row of weight 0: every rank has a batch of the same shape.
    """

    def __init__(self, stream: Stream, batch_size: int, ranks: Ranks, *, filled: bool) -> None:
        self._stream, self._ranks, self._filled = stream, ranks, filled
        self.rows = max(1, batch_size // ranks.world_size)  # of a rank in a batch
        self._located = lru_cache(maxsize=2)(partial(_located, stream, ranks, filled))
        self._locating = threading.Lock()  # threads that begin tasks at once would both locate their rows

    def batches(self, task: BatchTask, first: int, count: int) -> Located:
        """Return the rows of some batches of a task."""
        with self._locating:
            stretch = self._located(task.epoch, task.stretch)
        start = (task.start - task.stretch[0]) // self._ranks.world_size + first * self.rows
        return stretch.part(slice(start, start + count * self.rows))


def _located(stream: Stream, ranks: Ranks, filled: bool, epoch: int, stretch: tuple[int, int]) -> Located:
    """Locate the rows of a rank in a stretch of positions."""
    first, last = stretch
    positions = np.arange(first + (ranks.rank - first) % ranks.world_size, last, ranks.world_size)
    if not filled:
        return stream.locate(epoch, positions)
    rows = -(-(last - first) // ranks.world_size)
    weights = np.zeros(rows, np.float32)
    weights[: len(positions)] = 1
    filling = np.full(rows - len(positions), last - 1)
    return stream.locate(epoch, np.concatenate([positions, filling]))._replace(weights=weights)


def epoch_ranges(stream: Stream, batch_size: int, drop_last: bool, epoch: int, position: int = 0) -> Ranges:
    """Return the positions of an epoch's whole batches from one on, then those of an incomplete last batch."""
    size = stream.size(epoch)
    end = size - (size - position) % batch_size
    ranges = [(position, end)] if drop_last else [(position, end), (end, size)]
    return [(start, stop) for start, stop in ranges if start < stop]
