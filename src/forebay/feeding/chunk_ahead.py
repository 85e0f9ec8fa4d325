"""Fetch what batches need of remote caches: chunks ahead of them, and the blocks of a first batch.

The order is a function, so the chunks of the next positions are known, also beyond the end of the epoch:

    position   ─────┬───────────────┬──────────┬─────────▶
                 batches          chunk 7    chunk 2
                 reached          needed     needed
                    └── at most `ahead_bytes` of chunks ─┘

A few threads open the chunks in that order, each file once; the threads that make batches find them open, or wait for
the same fetch. Errors are left to them: they meet the same one. Where the tier keeps every chunk that a rank needs,
nothing runs ahead: its rows would be located twice, for nothing.

What training from a remote cache will fetch, exact because the order is a function; and fetching it beforehand.

`sparse_cache` reads a few blocks of chunks that are far away: heads and blocks are fetched, the rest is not.

    chunk     │ head │ block 0 │ block 1 │ block 2 │ … │ block 63 │
    fetched    ██████           █████████                               what was not fetched is zero, takes no memory
                                                                        and does not match its checksum

A first batch takes its rows from many chunks. It need not wait until all of them have arrived.
"""

import atexit
import os
import threading
import time
import weakref
from collections import deque
from collections.abc import Callable, Iterator, Sequence
from concurrent.futures import ThreadPoolExecutor
from itertools import count
from typing import NamedTuple

import numpy as np
from numpy.typing import NDArray

from forebay.cache.catalog import checked_chunk, expected
from forebay.cache.records import OnProgress, Progress, RemoteEstimate, TierFill
from forebay.columns import Column
from forebay.errors import ForebayError, LaneMissing, TierNeeded
from forebay.feeding.mixture import Mixture
from forebay.feeding.stream import CacheStream, Ranks, Stream, choose_ordering
from forebay.format.chunk import ChunkFile, ChunkRecord
from forebay.order.orders import Numbers, Ordering, Window, WindowOrder, lanes_of
from forebay.read.cache import Cache
from forebay.read.chunk_maps import by_position, opening
from forebay.store.base import Fetching, Missing, Store
from forebay.store.tiered import RANGE_BYTES, TieredStore

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
    found = zip(positions[firsts].tolist(), sources[firsts].tolist(), chunks[firsts].tolist(), strict=True)
    return list(found)


def _is_all_here(stream: Stream, columns: Sequence[str], ranks: Ranks) -> bool:
    """Whether tiers keep the chunks that a rank needs of every remote cache, in all epochs."""

    def lanes(count: int) -> Sequence[int]:
        return lanes_of(ranks.rank, ranks.world_size, count)

    for cache in (cache for cache in stream.caches if cache.is_remote):
        kept = cache.kept_digests()
        if not kept:  # the chunks of a rank need not be known
            return False
        chunks = stream.chunks_of_lanes(lanes) if isinstance(stream, CacheStream) else None
        needed = np.arange(len(cache.chunk_numbers)) if chunks is None else chunks
        if not all(digest in kept for digest in cache.file_digests(needed, columns)):
            return False
    return True


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
        self.stream, self._columns, self._ranks, self._process = stream, columns, ranks, _process
        self._end, self._start = end, start
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
        self._is_idle: bool | None = None  # until the tier was asked
        self._threads = threads
        _running.add(self)
        self._start_thread(0, self._begin)

    def follows(self, stream: Stream, place: Place) -> bool:
        """Whether this runs ahead of that place, in this process.

        It does not where the rows of that epoch were not known, or where nothing had to be fetched in one before it:
        what the tier keeps is asked once an epoch.
        """
        if self._stopped or self._process is not _process or self.stream is not stream or place < self.place:
            return False
        return place[0] == self._start[0] or (not self._is_idle and self._end(place[0]) > 0)

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

    def _start_thread(self, number: int, work: Callable[[], None]) -> None:
        threading.Thread(target=work, name=f"forebay-fetch-{number}", daemon=True).start()

    def _begin(self) -> None:
        """Fetch with all threads, unless everything is here."""
        try:
            self._is_idle = _is_all_here(self.stream, self._columns, self._ranks)
        except Exception:  # whoever needs a chunk raises it, at its batch
            self._is_idle = False
        if self._is_idle:
            return
        for number in range(1, self._threads):
            self._start_thread(number, self._work)
        self._work()

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


OPEN_TRIPS = 2  # list the generations, read the newest; then chunks


def estimate_remote(
    cache: Cache,
    *,
    nodes: int = 1,
    ranks_per_node: int = 1,
    tier_bytes: int | None = None,
    bandwidth: float = 125e6,
    latency: float = 0.02,
    batch_size: int = 32,
    seed: int = 0,
    window: Window | None = None,
) -> RemoteEstimate:
    """Return what the node that needs most fetches, with window shuffle, in the first epoch and in later ones."""
    names = list(cache.default_columns)
    ordering, window = _window_ordering(cache, names, seed, window)
    order, sizes, world = WindowOrder(_counts(cache), seed, window), cache.chunk_bytes(names), nodes * ranks_per_node
    needs = [_chunks_of_node(order, window, node, ranks_per_node, world) for node in range(nodes)]
    most = int(np.argmax([sizes[chunks].sum() for chunks in needs]))
    chunks, node_bytes = needs[most], int(sizes[needs[most]].sum())
    kept = _kept(cache, ordering, most, ranks_per_node, world, sizes, tier_bytes, node_bytes, chunks)
    passed = np.setdiff1d(chunks, kept)
    first = _first_batch(cache, ordering, most, ranks_per_node, world, batch_size)
    first_bytes, later = int(sizes[first].sum()), int(sizes[passed].sum())
    mixed = min(node_bytes, 2 * window.chunks * -(-window.lanes // nodes) * int(sizes.max(initial=0)))
    return RemoteEstimate(
        root=cache.root,
        generation=cache.generation.number,
        chunks=len(sizes),
        bytes=int(sizes.sum()),
        nodes=nodes,
        ranks_per_node=ranks_per_node,
        lanes=window.lanes,
        node_chunks=len(chunks),
        node_bytes=node_bytes,
        mixed_bytes=mixed,
        tier_bytes=tier_bytes,
        first_epoch_bytes=node_bytes,
        first_epoch_requests=_requests(cache, names, chunks),
        later_epoch_bytes=later,
        later_epoch_requests=_requests(cache, names, passed),
        hit_rate=len(kept) / max(1, len(chunks)),
        bandwidth=bandwidth,
        latency=latency,
        batch_size=batch_size,
        first_batch_chunks=len(first),
        first_batch_bytes=first_bytes,
        first_batch_seconds=(OPEN_TRIPS + 1) * latency + first_bytes / bandwidth,
        first_epoch_seconds=node_bytes / bandwidth,
        later_epoch_seconds=later / bandwidth,
    )


def warm_tier(
    cache: Cache,
    *,
    lanes: Sequence[int] | None = None,
    node: int | None = None,
    nodes: int = 1,
    ranks_per_node: int = 1,
    seed: int = 0,
    window: Window | None = None,
    on_progress: OnProgress | None = None,
) -> TierFill:
    """Fetch the chunks of a cache into its tier: all, or those that some lanes of the window shuffle need.

    `node` stands for the lanes of one of several nodes, counted from 0, that train together.
    """
    store = cache.store
    if not isinstance(store, TieredStore):
        raise ValueError(f"'{cache.root}' was opened without a tier; pass tier= to open_cache")
    names, started = list(cache.default_columns), time.monotonic()
    chunks = np.arange(len(cache.chunk_numbers))
    if node is None and nodes > 1:
        raise ValueError(f"nodes={nodes} needs node=, from 0 to {nodes - 1}; leave out both to fetch all chunks")
    if node is not None:
        if lanes is not None:
            raise ValueError("pass lanes or node, not both")
        if not 0 <= node < nodes:
            raise ValueError(f"node must be from 0 to {nodes - 1} (got {node}); pass nodes=, the number of them")
        _, window = _window_ordering(cache, names, seed, window)
        order = WindowOrder(_counts(cache), seed, window)
        chunks = _chunks_of_node(order, window, node, ranks_per_node, nodes * ranks_per_node)
    if lanes is not None:
        _, window = _window_ordering(cache, names, seed, window)
        wrong = [lane for lane in lanes if not 0 <= lane < window.lanes]
        if wrong:
            raise LaneMissing(cache.root, wrong[0], window.lanes)
        chunks = WindowOrder(_counts(cache), seed, window).chunks_of(lanes)
    kept: list[bool] = []
    with ThreadPoolExecutor(THREADS) as pool:
        for is_kept in pool.map(lambda chunk: cache.keep_chunk(chunk, names), chunks.tolist()):
            kept.append(is_kept)
            if on_progress is not None:
                spent, fetched = time.monotonic() - started, store.transfers().bytes_fetched
                on_progress(
                    Progress(phase="warming", done=len(kept), total=len(chunks), read_bytes=fetched, seconds=spent)
                )
    found, sizes = store.transfers(), cache.chunk_bytes(names)
    return TierFill(
        root=cache.root,
        tier=store.tier.path,
        chunks=len(chunks),
        bytes=int(sizes[chunks].sum()),
        fetched_chunks=found.fetched,
        fetched_bytes=found.bytes_fetched,
        refused_chunks=kept.count(False),
        seconds=time.monotonic() - started,
    )


def _counts(cache: Cache) -> Numbers:
    counts: Numbers = np.diff(cache.chunk_starts)
    return counts


def _window_ordering(cache: Cache, columns: Sequence[str], seed: int, window: Window | None) -> tuple[Ordering, Window]:
    ordering = choose_ordering(cache, columns, "window", seed, window)
    assert ordering.window is not None
    return ordering, ordering.window


def _chunks_of_node(order: WindowOrder, window: Window, node: int, ranks: int, world: int) -> Numbers:
    own = range(node * ranks, (node + 1) * ranks)
    return order.chunks_of(sorted({lane for rank in own for lane in lanes_of(rank, world, window.lanes)}))


def _kept(
    cache: Cache,
    ordering: Ordering,
    node: int,
    ranks: int,
    world: int,
    sizes: Numbers,
    tier_bytes: int | None,
    node_bytes: int,
    chunks: Numbers,
) -> Numbers:
    """Return the chunks that a tier of this size admits in the first epoch: in order of their first use."""
    if tier_bytes is None or tier_bytes >= node_bytes:
        return chunks
    kept, left = [], tier_bytes
    for chunk in _order_of_use(cache, ordering, node, ranks, world):
        if sizes[chunk] <= left:
            kept.append(chunk)
            left -= int(sizes[chunk])
    return np.unique(np.array(kept, np.int64))


def _order_of_use(cache: Cache, ordering: Ordering, node: int, ranks: int, world: int) -> list[int]:
    """Return the chunks of a node in the order in which its ranks need them in the first epoch."""
    stream = _stream(cache, ordering)
    found: dict[int, int] = {}
    for rank in range(node * ranks, (node + 1) * ranks):
        for need in chunks_needed(stream, Ranks(rank, world), (0, 0), lambda epoch: 0 if epoch else len(cache)):
            found[need.chunk] = min(need.place[1], found.get(need.chunk, need.place[1]))
    return sorted(found, key=found.__getitem__)


def _first_batch(cache: Cache, ordering: Ordering, node: int, ranks: int, world: int, batch_size: int) -> Numbers:
    positions = np.arange(min(len(cache), batch_size))
    mine = positions[(positions % world) // ranks == node]
    return np.unique(cache.chunk_positions(_stream(cache, ordering).locate(0, mine).rows))


def _stream(cache: Cache, ordering: Ordering) -> CacheStream:
    return CacheStream(cache, lambda _: ordering)


def _requests(cache: Cache, columns: Sequence[str], chunks: Numbers) -> int:
    return sum(int((-(-sizes[chunks] // RANGE_BYTES)).sum()) for sizes in cache.file_bytes(columns))


LEAST_BYTES = 8 << 20  # of chunks; fewer arrive as soon
MOST_BYTES = 8 << 30  # of chunks, as a generation says: so much address space is reserved
MOST_SHARE = 1 / 8  # of their bytes: so much is fetched, and takes memory
_BLOCK_THREADS = 32
_NEAR_BYTES = 64 << 10  # between two ranges that are fetched as one


class _Wanted(NamedTuple):
    """A chunk that is not here, and what is wanted of it."""

    layer: str
    position: int
    record: ChunkRecord
    blocks: list[tuple[Column, list[int]]]

    @property
    def estimated_bytes(self) -> int:
        shares = [len(blocks) * column.block_rows / max(1, self.record.rows) for column, blocks in self.blocks]
        return self.record.head_size + int(max(shares) * self.record.size)

    def ranges(self, file: ChunkFile) -> list[tuple[int, int]]:
        """The ranges of the wanted blocks; those near each other are one."""
        spans: list[tuple[int, int]] = []
        for column, blocks in self.blocks:
            bounds = file.block_bounds(column.name)
            spans += [(int(bounds[block]), int(bounds[block + 1])) for block in blocks]
        merged: list[tuple[int, int]] = []
        for start, stop in sorted(spans):
            if merged and start - merged[-1][1] <= _NEAR_BYTES:
                merged[-1] = (merged[-1][0], max(stop, merged[-1][1]))
            else:
                merged.append((start, stop))
        return merged


class _Sparse:
    """A chunk in memory of which some ranges are there."""

    def __init__(self, store: Store, wanted: _Wanted) -> None:
        self._store, self.wanted = store, wanted
        self._memory = np.zeros(wanted.record.size, np.uint8)

    def fetch(self, span: tuple[int, int]) -> None:
        piece = np.frombuffer(self._store.read(self.wanted.record.key(self.wanted.layer), *span), np.uint8)
        self._memory[span[0] : span[0] + len(piece)] = piece

    def opened(self, cache: Cache) -> ChunkFile:
        """The chunk, once its head was fetched."""
        layer, view = self.wanted.layer, self._memory.data.toreadonly()
        return checked_chunk(view, cache.root, layer, self.wanted.record, columns=cache.declared(layer))


def sparse_cache(cache: Cache, rows: NDArray[np.int64], columns: Sequence[str]) -> Cache | None:
    """The same cache, to read these rows and columns of it without fetching whole chunks; None if that is not faster.

    Blocks are checked as everywhere. A chunk of which a range is bad, and rows that were not asked for, are read
    from the whole chunk.
    """
    wanted = _wanted(cache, rows, columns)
    total = sum(each.record.size for each in wanted)
    most = int(MOST_SHARE * total)
    if not LEAST_BYTES <= total <= MOST_BYTES or sum(each.estimated_bytes for each in wanted) > most:
        return None
    try:
        with opening():
            files = _fetched(cache, wanted, most)
            return None if files is None else cache.with_files(files)
    except (ForebayError, Missing, OSError):
        return None  # whoever reads the whole chunk meets the error, or does not


def _fetched(cache: Cache, wanted: list[_Wanted], most: int) -> dict[tuple[str, int], ChunkFile] | None:
    """Chunks with their heads and wanted blocks, in two round trips; None where these have more than `most` bytes."""
    chunks = [_Sparse(cache.store, each) for each in wanted]
    with ThreadPoolExecutor(_BLOCK_THREADS) as pool:
        list(pool.map(lambda chunk: chunk.fetch((0, chunk.wanted.record.head_size)), chunks))
        files = [chunk.opened(cache) for chunk in chunks]
        ranges = [
            (chunk, each) for chunk, file in zip(chunks, files, strict=True) for each in chunk.wanted.ranges(file)
        ]
        if sum(stop - start for _, (start, stop) in ranges) > most:
            return None
        list(pool.map(lambda each: each[0].fetch(each[1]), ranges))
    return {(each.layer, each.position): file for each, file in zip(wanted, files, strict=True)}


def _wanted(cache: Cache, rows: NDArray[np.int64], columns: Sequence[str]) -> list[_Wanted]:
    """The chunks of some rows that are not on this machine; none where a key asks for the whole of a chunk."""
    if not cache.is_remote or cache.generation.tagged:
        return []
    positions, found = cache.chunk_positions(rows), []
    for layer, read in cache.columns_by_layer(columns).items():
        for position, here in by_position(positions):
            record, places = cache.record(layer, position), rows[here] - cache.chunk_starts[position]
            if record.head_size <= record.size and not _is_here(cache.store, record):
                blocks = [(column, np.unique(places // column.block_rows).tolist()) for column in read]
                found.append(_Wanted(layer, position, record, blocks))
    return found


def _is_here(store: Store, record: ChunkRecord) -> bool:
    return isinstance(store, TieredStore) and store.has_copy(expected(record))
