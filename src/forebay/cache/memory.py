"""Keeping a build within a memory limit: as many workers as fit, judged by what workers were seen to need."""

import os

import psutil

from forebay.cache.crew import Crew, Event, Made
from forebay.errors import MemoryTooSmall

_MARGIN = 1.15
_TYPICAL = 0.8
_ENOUGH = 2


class MemoryGovernor:
    """Begins with one worker, then allows as many as the measured peak of one leaves room for.

    Only a chunk that weighs about as much as the heaviest says what a worker needs, and the second one, for a worker
    writes one chunk while it makes the next; one worker works until then.
    """

    def __init__(self, limit: int | None, workers: int, heaviest: int) -> None:
        self._limit = limit
        self._workers = workers
        self._heaviest = heaviest
        self._peak = 0
        self._weighed = 0
        self._allowed: int | None = None
        self._warned = False

    def check_before(self, crew: Crew, heaviest_bytes: int) -> None:
        """Refuse a limit that cannot hold this process and a worker with the heaviest slice, before it is passed."""
        if self._limit is None or crew.pids() == [os.getpid()]:
            return
        needed = psutil.Process().memory_info().rss + heaviest_bytes
        if needed > self._limit:
            raise MemoryTooSmall(self._limit, needed)

    def warning(self, crew: Crew) -> str:
        """What to say, once, of a limit that was passed with no chunk left that could be refused."""
        if self._limit is None or not self._peak or self._warned or crew.pids() == [os.getpid()]:
            return ""
        own = psutil.Process().memory_info().rss
        if own + self._peak <= self._limit:
            return ""
        self._warned = True
        return f"the memory limit of {self._limit:,} bytes was passed: about {own + self._peak:,} were needed"

    def take(self, event: Event, weight: int) -> None:
        if isinstance(event, Made) and weight >= _TYPICAL * self._heaviest:
            self._peak = max(self._peak, event.peak_bytes)
            self._weighed += 1

    def steer(self, crew: Crew, left: int) -> None:
        """Resize the crew when a higher peak, or the first one, was seen."""
        if self._limit is None or not self._peak or not left or crew.pids() == [os.getpid()]:
            return
        own = psutil.Process().memory_info().rss
        allowed = int((self._limit - own) // (self._peak * _MARGIN))
        if allowed < 1:
            raise MemoryTooSmall(self._limit, own + int(self._peak * _MARGIN))
        if self._weighed < _ENOUGH:
            return
        wanted = max(1, min(allowed, self._workers, left))
        if wanted != self._allowed:
            crew.resize(wanted)
            self._allowed = wanted
