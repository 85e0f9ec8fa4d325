"""Fetch the chunks of remote caches before batches need them.

The order is a function, so the chunks of the next positions are known, also beyond the end of the epoch:

    position   ─────┬───────────────┬──────────┬─────────▶
                 batches          chunk 7    chunk 2
                 reached          needed     needed
                    └── at most `ahead_bytes` of chunks ─┘

A few threads open the chunks in that order, each file once; the threads that make batches find them open, or wait for
the same fetch. Errors are left to them: they meet the same one.
"""

import atexit
import os
import threading
import weakref
from collections import deque
from collections.abc import Callable, Iterator, Sequence
from itertools import count
from typing import NamedTuple

import numpy as np

from forebay.errors import TierNeeded
from forebay.feeding.mixture import Mixture
from forebay.feeding.shuffle import Ranks
from forebay.feeding.stream import CacheStream, Stream
from forebay.order.bijection import Numbers
from forebay.read.cache import Cache
from forebay.store.base import Fetching

AHEAD_BYTES = 1 << 30
IN_MEMORY_BYTES = 4 << 30  # of chunks of a cache without a tier
THREADS = 32  # the chunks of a first batch are fetched in one round trip; `AHEAD_BYTES` bounds what they hold
_FIRST_ROWS, _LOCATED_ROWS = 64, 4096  # located at once: few at first, because a batch waits for them
_process = object()
_running: "weakref.WeakSet[ChunkAhead]" = weakref.WeakSet()

Place = tuple[int, int]  # epoch, position


class Need(NamedTuple):
    """A chunk, and the first place of an epoch that needs it."""

    place: Place
    source: int  # index into `Stream.caches`
    chunk: int  # position of the chunk in its cache


def chunks_needed(stream: Stream, ranks: Ranks, start: Place, end: Callable[[int], int]) -> Iterator[Need]:
    """Yield the chunks that a rank needs from a place on, in order, each once in an epoch.

    `end(epoch)` is the position at which an epoch ends; an epoch without positions ends the sequence.
    """
    epoch, position = start
    for number in count(epoch):
        if end(number) <= 0:
            return
        seen: set[tuple[int, int]] = set()
        first, rows = position, _FIRST_ROWS
        while first < end(number):
            last = min(end(number), first + rows * ranks.world_size)
            mine = np.arange(first + (ranks.rank - first) % ranks.world_size, last, ranks.world_size)
            first, rows = last, min(2 * rows, _LOCATED_ROWS)
            for at, source, chunk in _first_uses(stream, number, mine):
                if (source, chunk) not in seen:
                    seen.add((source, chunk))
                    yield Need((number, at), source, chunk)
        position = 0


def _first_uses(stream: Stream, epoch: int, positions: Numbers) -> list[tuple[int, int, int]]:
    """(position, source, chunk) where each chunk of some positions is needed first, in order of positions."""
    if not len(positions):
        return []
    located = stream.locate(epoch, positions)
    sources = np.zeros_like(positions) if located.sources is None else located.sources
    chunks = np.empty_like(positions)
    for source, cache in enumerate(stream.caches):
        here = sources == source
        chunks[here] = cache.chunk_positions(located.rows[here])
    _, firsts = np.unique(chunks * len(stream.caches) + sources, return_index=True)
    firsts.sort()
    found = zip(positions[firsts].tolist(), sources[firsts].tolist(), chunks[firsts].tolist(), strict=True)
    return list(found)


def allow_passing(stream: Stream, columns: Sequence[str], ranks: Ranks, ahead_bytes: int) -> None:
    """Let caches keep open what a rank mixes at a time: the chunks of two groups of each of its lanes.

    Raises `TierNeeded` where they would fill the memory, because a cache has no tier.
    """
    streams = stream.streams if isinstance(stream, Mixture) else [stream]
    for one in streams:
        if not isinstance(one, CacheStream) or not one.cache.is_remote or one.ordering.window is None:
            continue
        window = one.ordering.window
        chunks = 2 * window.chunks * -(-window.lanes // ranks.world_size)
        largest = int(one.cache.chunk_bytes(columns).max(initial=0))
        needed = chunks * largest + ahead_bytes
        if needed > IN_MEMORY_BYTES and not isinstance(one.cache.store, Fetching):
            raise TierNeeded(one.cache.root, chunks, needed, IN_MEMORY_BYTES)
        one.cache.allow_passing(needed, columns)


class ChunkAhead:
    """Opens the chunks that a rank needs next; `reached` says how far its batches are."""

    def __init__(
        self,
        stream: Stream,
        columns: Sequence[str],
        ranks: Ranks,
        start: Place,
        end: Callable[[int], int],
        ahead_bytes: int = AHEAD_BYTES,
        threads: int = THREADS,
    ) -> None:
        self.stream, self._columns, self._process = stream, columns, _process
        self._caches: list[Cache] = list(stream.caches)
        self._sizes = [cache.chunk_bytes(columns) for cache in self._caches]
        self._needs = chunks_needed(stream, ranks, start, end)
        self._limit = ahead_bytes
        self._finding = threading.Lock()  # of the next chunk; batches do not wait for it
        self._changed = threading.Condition()
        self._ahead: deque[tuple[Place, int]] = deque()  # place and size of chunks that no batch needs yet
        self._bytes = 0
        self.place = start
        self._stopped = False
        self._threads = [
            threading.Thread(target=self._work, name=f"forebay-fetch-{number}", daemon=True)
            for number in range(threads)
        ]
        _running.add(self)
        for thread in self._threads:
            thread.start()

    def follows(self, stream: Stream, place: Place) -> bool:
        """Whether this runs ahead of that place, in this process."""
        return not self._stopped and self._process is _process and self.stream is stream and self.place <= place

    def reached(self, place: Place) -> None:
        """Batches are made up to a place: chunks needed later are ahead of them."""
        with self._changed:
            self.place = place
            while self._ahead and self._ahead[0][0] < place:
                self._bytes -= self._ahead.popleft()[1]
            self._changed.notify_all()

    def stop(self) -> None:
        """End the threads; a fetch under way ends by itself."""
        if self._process is not _process:
            return
        with self._changed:
            self._stopped = True
            self._changed.notify_all()

    def _work(self) -> None:
        while (need := self._take()) is not None:
            try:
                if self._caches[need.source].is_remote:
                    self._caches[need.source].open_chunk(need.chunk, self._columns)
            except Exception:  # whoever needs the chunk raises it, at its batch
                continue

    def _take(self) -> Need | None:
        """Return the next chunk once there is room for it; None at the end."""
        with self._finding:
            need = None if self._stopped else next(self._needs, None)
            if need is None:
                return None
            size = int(self._sizes[need.source][need.chunk])
            with self._changed:
                while not self._stopped and not self._has_room(need, size):
                    self._changed.wait()
                if need.place > self.place:
                    self._ahead.append((need.place, size))
                    self._bytes += size
                return None if self._stopped else need

    def _has_room(self, need: Need, size: int) -> bool:
        """Whether a chunk may be fetched now: in the next epoch at the latest, and within the limit, or alone."""
        if need.place[0] > self.place[0] + 1:
            return False
        return need.place <= self.place or not self._ahead or self._bytes + size <= self._limit


def _forked() -> None:
    global _process
    _process = object()


if hasattr(os, "register_at_fork"):
    os.register_at_fork(after_in_child=_forked)


@atexit.register
def _stop_all() -> None:
    for each in list(_running):
        each.stop()
