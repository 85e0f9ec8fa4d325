"""The remaining chunks of a builder: assigned to slots, held by other builders, or waiting for a retry.

stream None     3 7 8          chunks that any slot can make at any time
stream a.gz     0 1 2          one slot reads a.gz from its beginning
stream b.gz     4 5 6          no other slot takes from it: that would decompress it again from the start
"""

import time
from collections import deque
from collections.abc import Callable, Collection, Iterable, Mapping, Sequence

from forebay.cache.claims import Claim, Claims
from forebay.format import layout

TRIES = 3  # of a chunk
MOVES = 5  # of the source files of one chunk, while it is read
SICK = 3  # chunks in a row that fail on a slot, until it gets no more
FIRST_PAUSE, MOST_PAUSE = 0.2, 12.8  # seconds before a chunk is tried again


class ChunkQueue:
    """Chunks in order, each claimed before it is made. A claim is kept until the publisher has listed the chunk."""

    def __init__(
        self,
        chunks: Iterable[int],
        streams: Mapping[int, str],
        folder: str,
        claims: Claims,
        is_listed: Callable[[int], bool],
    ) -> None:
        self._streams, self._folder, self._claims, self._is_listed = streams, folder, claims, is_listed
        self._waiting = _Streams(chunks, streams)
        self._running: dict[int, int] = {}  # chunk -> slot
        self._again: dict[int, float] = {}  # chunk -> when to try it again
        self._tried: dict[int, int] = {}  # chunk -> failures
        self._moved: dict[int, int] = {}  # chunk -> how often its source files changed while it was read
        self._slots: dict[int, int] = {}  # slot -> failures in a row
        self._held: dict[int, Claim] = {}  # chunks that other builders hold
        self.elsewhere: set[int] = set()  # chunks that living builders make; they list them
        self.listed_elsewhere = 0  # chunks that other builders listed meanwhile
        self.failed: dict[int, str] = {}  # chunk -> why it could not be made

    @property
    def is_empty(self) -> bool:
        return not (self._waiting.count or self._running or self._again or self._held)

    @property
    def left(self) -> int:
        """Chunks that this builder makes or may make."""
        return self._waiting.count + len(self._running) + len(self._again)

    @property
    def running(self) -> Mapping[int, int]:
        return self._running

    @property
    def holders(self) -> tuple[str, ...]:
        """The hosts of builders that hold the remaining chunks."""
        return tuple(sorted({claim.host for claim in self._held.values()}))

    def claim_next(self, slot: int, slots: Collection[int]) -> int | None:
        """Claim a chunk for a slot, None if there is none for it now; `slots` are all that can work.

        The claim comes first, then the look at the newest generation: no chunk can be listed between them unseen.
        """
        if self._is_sick(slot, slots):
            return None
        self._waiting.keep({*slots, *self._running.values()})
        while (chunk := self._pick(slot)) is not None:
            key = layout.claim(self._folder, chunk)
            if not self._claims.take(key):
                holder = self._claims.holder(key)
                if holder is not None:
                    self._held[chunk] = holder
                else:
                    self._again[chunk] = time.monotonic() + FIRST_PAUSE
            elif self._is_listed(chunk):
                self._claims.release(key, is_listed=True)
                self.listed_elsewhere += 1
            else:
                self._running[chunk] = slot
                return chunk
        return None

    def done(self, chunk: int) -> None:
        """A chunk is made; the publisher releases its claim."""
        self._slots[self._running.pop(chunk, -1)] = 0
        self._tried.pop(chunk, None)

    def retry(self, chunk: int, reason: str) -> None:
        """A chunk could not be made: try it again after a pause, or give it up after some tries."""
        slot = self._running.pop(chunk, -1)
        self._slots[slot] = self._slots.get(slot, 0) + 1
        self._tried[chunk] = self._tried.get(chunk, 0) + 1
        if self._tried[chunk] >= TRIES:
            self.give_up(chunk, f"{reason} ({TRIES} tries)")
        else:
            self._again[chunk] = time.monotonic() + min(MOST_PAUSE, FIRST_PAUSE * 4.0 ** (self._tried[chunk] - 1))

    def retry_moved(self, chunk: int, reason: str) -> None:
        """A source file of a chunk changed while it was read, and its planned part did not: try the chunk again."""
        self._running.pop(chunk, None)
        self._moved[chunk] = self._moved.get(chunk, 0) + 1
        if self._moved[chunk] >= MOVES:
            self.give_up(chunk, f"{reason} ({MOVES} tries); run the same command when nothing writes to the source")
        else:
            self._again[chunk] = time.monotonic() + FIRST_PAUSE

    def requeue(self, chunks: Iterable[int]) -> None:
        """The workers of some chunks are gone, through no fault of the chunks: make them again, at once."""
        for chunk in list(chunks):
            self._running.pop(chunk, None)
            self._again[chunk] = time.monotonic()

    def give_up(self, chunk: int, reason: str) -> None:
        """A chunk cannot be made by this builder; others may try."""
        self._running.pop(chunk, None)
        self.failed[chunk] = reason
        self._claims.release(layout.claim(self._folder, chunk))

    def look_at_held(self) -> None:
        """Check chunks that other builders hold: drop listed ones, take over expired claims, leave the rest."""
        for chunk, claim in list(self._held.items()):
            if self._claims.watch.is_alive(claim.owner):
                self.elsewhere.add(chunk)
            elif self._claims.holder(layout.claim(self._folder, chunk)) is None:
                self._waiting.add(chunk)
            else:
                continue
            del self._held[chunk]

    def _pick(self, slot: int) -> int | None:
        chunk = min(self._again, key=self._again.__getitem__, default=None)
        if chunk is not None and self._again[chunk] <= time.monotonic():
            del self._again[chunk]
            return chunk
        return self._waiting.pop(slot)

    def _is_sick(self, slot: int, slots: Collection[int]) -> bool:
        """True if the last chunks all failed on this slot, but not on others."""
        sick = self._slots.get(slot, 0) >= SICK
        return sick and any(self._slots.get(one, 0) < SICK for one in slots)


class _Streams:
    """Chunks in order, by the compressed file that they are read from."""

    def __init__(self, chunks: Iterable[int], streams: Mapping[int, str]) -> None:
        self._stream_of = streams
        self._chunks: dict[str | None, deque[int]] = {}
        self._free: deque[str | None] = deque()  # streams with chunks that no slot reads; None stays while it has some
        self._read_by: dict[int, str] = {}  # slot -> the stream it reads
        self.count = 0
        for chunk in chunks:
            self.add(chunk)

    def add(self, chunk: int) -> None:
        """Add a chunk; in a stream it keeps its order."""
        stream = self._stream_of.get(chunk)
        queue = self._chunks.setdefault(stream, deque())
        if not queue and stream not in self._read_by.values():
            self._free.append(stream)
        queue.append(chunk)
        if stream is not None and len(queue) > 1 and queue[-2] > chunk:
            self._chunks[stream] = deque(sorted(queue))
        self.count += 1

    def pop(self, slot: int) -> int | None:
        """The next chunk for a slot, from the slot's own stream first; None if the queue is empty."""
        stream: str | None = self._read_by.get(slot)
        if stream is None or not self._chunks[stream]:
            self._read_by.pop(slot, None)
            while self._free and not self._chunks[self._free[0]]:
                self._free.popleft()
            if not self._free:
                return None
            stream = self._free[0]
            if stream is not None:
                self._free.popleft()
                self._read_by[slot] = stream
        self.count -= 1
        return self._chunks[stream].popleft()

    def keep(self, slots: Collection[int]) -> None:
        """Free the streams of slots that are gone."""
        for slot in [slot for slot in self._read_by if slot not in slots]:
            stream = self._read_by.pop(slot)
            if self._chunks[stream]:
                self._free.appendleft(stream)


def in_order(chunks: Sequence[int], mode: str, start: int | None = None, end: int | None = None) -> list[int]:
    """The chunks of an inclusive range, from the near or the far end.

    >>> in_order([0, 1, 2, 3], "inverse", start=1, end=2)
    [2, 1]
    """
    first = 0 if start is None else start
    last = max(chunks, default=0) if end is None else end
    chosen = [chunk for chunk in chunks if first <= chunk <= last]
    return chosen[::-1] if mode == "inverse" else chosen
