"""Which chunk comes next: in order, but the parts of one stream stay with one worker.

lane None       3 7 8          chunks that can be made anywhere, any time
lane a.gz       0 1 2          one worker reads a.gz from its beginning; who runs out of lanes takes from an end
lane b.gz       4 5 6
"""

from collections import deque
from collections.abc import Callable, Iterable, Mapping
from typing import Literal

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

    def _fill(self, chunks: Iterable[int]) -> None:
        for chunk in chunks:
            self._lanes.setdefault(self._streams.get(chunk), deque()).append(chunk)
        for lane in self._lanes.keys() - {None}:
            self._lanes[lane] = deque(sorted(self._lanes[lane]))

    def _pick(self, slot: int) -> int | None:
        lanes = [lane for lane, chunks in self._lanes.items() if chunks]
        if not lanes:
            return None
        others = {lane for other, lane in self._open.items() if other != slot} - {None}
        mine = self._open.get(slot)
        free = [lane for lane in lanes if lane not in others]
        if mine is not None and mine in free:
            return self._lanes[mine].popleft()
        if free:
            self._open[slot] = free[0]
            return self._lanes[free[0]].popleft()
        return self._lanes[max(lanes, key=lambda lane: len(self._lanes[lane]))].pop()
