"""Fetch the chunks that batches of remote caches need, ahead of them.

The order is a function, so the chunks of the next positions are known, also beyond the end of the epoch:

    position   ─────┬───────────────┬──────────┬─────────▶
                 batches          chunk 7    chunk 2
                 reached          needed     needed
                    └── at most `ahead_bytes` of chunks ─┘

A few threads open the chunks in that order, each file once; the threads that make batches find them open, or wait for
the same fetch. An error is raised by the batch that needs the chunk.
"""

import weakref
from collections.abc import Callable, Iterator, Sequence
from itertools import count
from typing import NamedTuple

import numpy as np
from numpy.typing import NDArray

from forebay.errors import TierUnusable
from forebay.feeding.ahead import Ahead, Slot
from forebay.feeding.mixture import Mixture
from forebay.feeding.stream import CacheStream, Ranks, Stream
from forebay.order.shuffle import Numbers
from forebay.store.base import Fetching

AHEAD_BYTES = 1 << 30
IN_MEMORY_BYTES = 4 << 30  # of chunks of a cache without a tier
THREADS = 32  # the chunks of a first batch are fetched in one round trip; `AHEAD_BYTES` bounds what they hold
_FIRST_ROWS, _LOCATED_ROWS = 64, 4096  # located at once: few at first, because a batch waits for them

Cursor = tuple[int, int]  # epoch, position


class Need(NamedTuple):
    """A chunk, and the first place of an epoch that needs it."""

    cursor: Cursor
    source: int  # index into `Stream.caches`
    chunk: int  # position of the chunk in its cache


def chunks_needed(stream: Stream, ranks: Ranks, start: Cursor, end: Callable[[int], int]) -> Iterator[Need]:
    """Yield the chunks that a rank needs from a position on, in order, each once per epoch.

    `end(epoch)` is the position at which an epoch ends; an epoch without positions ends the sequence.
    """
    epoch, position = start
    for number in count(epoch):
        if end(number) <= 0:
            return
        unseen = [np.ones(len(cache.chunk_numbers), np.bool_) for cache in stream.caches]
        left, first, rows = sum(map(len, unseen)), position, _FIRST_ROWS
        while first < end(number) and left:
            last = min(end(number), first + rows * ranks.world_size)
            mine = np.arange(first + (ranks.rank - first) % ranks.world_size, last, ranks.world_size)
            first, rows = last, min(2 * rows, _LOCATED_ROWS)
            for at, source, chunk in _first_uses(stream, number, mine, unseen):
                unseen[source][chunk] = False
                left -= 1
                yield Need((number, at), source, chunk)
        position = 0


def _first_uses(
    stream: Stream, epoch: int, positions: Numbers, unseen: Sequence[NDArray[np.bool_]]
) -> list[tuple[int, int, int]]:
    """(position, source, chunk) where each unseen chunk of some positions is needed first, in order of positions."""
    if not len(positions):
        return []
    located = stream.locate(epoch, positions)
    sources = np.zeros_like(positions) if located.sources is None else located.sources
    chunks, is_new = np.empty_like(positions), np.empty(len(positions), np.bool_)
    for source, cache in enumerate(stream.caches):
        here = sources == source
        chunks[here] = cache.chunk_positions(located.rows[here])
        is_new[here] = unseen[source][chunks[here]]
    positions, sources, chunks = positions[is_new], sources[is_new], chunks[is_new]
    _, firsts = np.unique(chunks * len(stream.caches) + sources, return_index=True)
    firsts.sort()
    uses = zip(positions[firsts].tolist(), sources[firsts].tolist(), chunks[firsts].tolist(), strict=True)
    return list(uses)


def allow_passing(stream: Stream, columns: Sequence[str], ranks: Ranks, ahead_bytes: int) -> None:
    """Let caches keep open the chunks that a rank mixes at a time: two groups of each of its lanes.

    Raises `TierUnusable` where they would fill the memory, because a cache has no tier.
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
            raise TierUnusable(
                f"a loader over '{one.cache.root}' mixes up to {chunks} chunks at a time ({needed:,} "
                f"bytes); without a tier it may hold {IN_MEMORY_BYTES:,} bytes in memory",
                hint="pass tier='/nvme/forebay', a folder on a local disk, to open_cache",
            )
        one.cache.allow_passing(needed, columns)


class ChunkAhead:
    """Opens the chunks that a rank needs next; `reached` records the position of its batches."""

    def __init__(
        self,
        stream: Stream,
        columns: Sequence[str],
        ranks: Ranks,
        start: Cursor,
        end: Callable[[int], int],
        ahead_bytes: int = AHEAD_BYTES,
    ) -> None:
        self.stream, self.cursor = stream, start
        self._columns, self._end, self._start, self._limit = columns, end, start, ahead_bytes
        self._sizes = [cache.chunk_bytes(columns) for cache in stream.caches]
        needs = chunks_needed(stream, ranks, start, end)
        self._queue = Ahead(needs, self._open, self._fits, THREADS, "fetch")

    def follows(self, stream: Stream, cursor: Cursor) -> bool:
        """True if prefetching has passed that position in this process."""
        if not self._queue.is_running or self.stream is not stream or cursor < self.cursor:
            return False
        return cursor[0] == self._start[0] or self._end(cursor[0]) > 0

    def reached(self, cursor: Cursor) -> None:
        """Record that batches are made up to a position."""
        self.cursor = cursor
        self._queue.release(lambda need: need.cursor < cursor)

    def stop(self) -> None:
        self._queue.stop(wait=False)  # a fetch under way ends by itself

    def _open(self, need: Need) -> Need:
        cache = self.stream.caches[need.source]
        if cache.is_remote:
            cache.open_chunk(need.chunk, self._columns)  # an error stays in the queue: the batch raises the same one
        return need

    def _fits(self, need: Need, pending: Sequence[Slot[Need, Need]]) -> bool:
        """Whether a chunk may be fetched now: in the next epoch at the latest, and within the limit, or alone."""
        if need.cursor[0] > self.cursor[0] + 1:
            return False
        ahead = [slot.task for slot in pending if slot.task.cursor > self.cursor]
        taken = sum(self._size(each) for each in ahead)
        return need.cursor <= self.cursor or not ahead or taken + self._size(need) <= self._limit

    def _size(self, need: Need) -> int:
        return int(self._sizes[need.source][need.chunk])


class Fetcher:
    """Keeps chunks fetched ahead of a loader."""

    def __init__(self, columns: Sequence[str], ranks: Ranks, ahead_bytes: int) -> None:
        self._columns, self._ranks, self._bytes = columns, ranks, ahead_bytes
        self._ahead: ChunkAhead | None = None
        self._stop: Callable[[], object] | None = None

    def reach(self, stream: Stream, cursor: Cursor, end: Callable[[int], int]) -> None:
        """Fetch the chunks that follow a place."""
        if not any(cache.is_remote for cache in stream.caches):
            return
        if self._ahead is not None and self._ahead.follows(stream, cursor):
            self._ahead.reached(cursor)
            return
        if self._stop is not None:
            self._stop()
        allow_passing(stream, self._columns, self._ranks, self._bytes)
        self._ahead = ChunkAhead(stream, self._columns, self._ranks, cursor, end, self._bytes)
        self._stop = weakref.finalize(self, self._ahead.stop)
