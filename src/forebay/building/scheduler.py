"""Which chunk a worker gets next, and how many workers memory allows.

lane None       3 7 8          chunks that can be made anywhere, any time
lane a.gz       0 1 2          one worker reads a.gz from its beginning
lane b.gz       4 5 6          nobody else takes from its lane: that would decompress it again from the start
"""

import os
from collections import deque
from collections.abc import Callable, Collection, Iterable, Mapping
from typing import Literal

import psutil

from forebay.engine.base import Crew, Event, Made
from forebay.errors import MemoryTooSmall

Answer = Literal["mine", "done", "busy"]


class Schedule:
    """The chunks still to do, handed to slots.

    `ask` claims a chunk: "mine" hands it out, "done" drops it, "busy" sets it aside until `look_again`.
    """

    def __init__(self, chunks: Iterable[int], streams: Mapping[int, str], ask: Callable[[int], Answer]) -> None:
        self._streams = streams
        self._ask = ask
        self._lanes: dict[str | None, deque[int]] = {}
        self._open: dict[int, str | None] = {}  # slot -> the lane it is in
        self.elsewhere: list[int] = []  # what other builders hold
        self._fill(chunks)

    @property
    def pending(self) -> int:
        return sum(map(len, self._lanes.values()))

    def next_for(self, slot: int) -> int | None:
        """A claimed chunk for a slot, None where nothing can be had now."""
        while (chunk := self._pick(slot)) is not None:
            answer = self._ask(chunk)
            if answer == "mine":
                return chunk
            if answer == "busy":
                self.elsewhere.append(chunk)
        return None

    def look_again(self) -> None:
        """Reconsider what other builders held when last asked."""
        chunks, self.elsewhere = self.elsewhere, []
        self._fill(chunks)

    def keep(self, slots: Collection[int]) -> None:
        """Forget slots that are gone, so that another slot can take over their lanes."""
        self._open = {slot: lane for slot, lane in self._open.items() if slot in slots}

    def _fill(self, chunks: Iterable[int]) -> None:
        for chunk in chunks:
            self._lanes.setdefault(self._streams.get(chunk), deque()).append(chunk)
        for lane in self._lanes.keys() - {None}:
            self._lanes[lane] = deque(sorted(self._lanes[lane]))

    def _pick(self, slot: int) -> int | None:
        mine = self._open.get(slot)
        if mine is not None and self._lanes.get(mine):
            return self._lanes[mine].popleft()
        taken = {lane for other, lane in self._open.items() if other != slot} - {None}
        free = [lane for lane, chunks in self._lanes.items() if chunks and lane not in taken]
        if not free:
            return None
        self._open[slot] = free[0]
        return self._lanes[free[0]].popleft()


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
