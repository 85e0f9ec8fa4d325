"""Which chunk comes next: in order, but the parts of one stream stay with one worker.

lane None       3 7 8          chunks that can be made anywhere, any time
lane a.gz       0 1 2          one worker reads a.gz from its beginning
lane b.gz       4 5 6          nobody else takes from its lane: that would decompress it again from the start
"""

from collections import deque
from collections.abc import Callable, Collection, Iterable, Mapping
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

    def keep(self, slots: Collection[int]) -> None:
        """Forget slots that are gone, so that another can go on with their lanes."""
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
