"""Make batches ahead of the training step, in threads.

    tasks ─▶ thread ─▶ slot 0  ▯▯▯ end
          ─▶ thread ─▶ slot 1  ▯▯        ──▶ consumed slot by slot; an empty slot lets one more task begin
                                room for `queued` items each, then its thread waits

group     batches that are located, checked and decoded together, then copied and derived one by one
handoff   batches passed on together: waking a thread costs as much as copying 64 KiB; fewer where they take long
lane      every n-th handoff of a group, made by one of n threads, which so work side by side: few batches are in memory
helper    a thread of compiled code that copies rows for the one that makes batches: it needs no GIL

              lane 0   ▯▯    ▯▯    ▯▯        two lanes of a group, handoffs of two batches
              lane 1      ▯▯    ▯▯    ▯

positions    start ├─── batch ───┼─── batch ───┼─── batch ───┼─ … ─┤ stop
group 0            └──────── located, found and checked together ────────┘
rank r of w        takes the positions p with p % w == r
"""

import atexit
import os
import sys
import threading
import time
import weakref
from collections import deque
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from functools import lru_cache, partial
from queue import SimpleQueue
from typing import Any, Generic, NamedTuple, Protocol, TypeVar

import numpy as np

from forebay.columns import Array, Ragged
from forebay.feeding.chunk_ahead import sparse_cache
from forebay.feeding.statistics import Handoff, timed
from forebay.feeding.stream import Located, Ranks, Read, ReadThrough, RowSource, Stream, decoded_columns
from forebay.order.orders import Numbers
from forebay.read.cache import Cache
from forebay.read.chunk_maps import cut_batches
from forebay.read.gather import RowAddresses, batches_of_addresses, set_helpers

_AHEAD_BYTES = 32 * 1024 * 1024
_GROUP_BYTES = 8 * 1024 * 1024
_HANDOFF_BYTES = 4 * 1024 * 1024
_HANDOFF_SECONDS = 0.001  # a batch that is made does not wait longer for the others of its handoff
_MOST, _LEAST = 64, 4
_HELPED = 4  # times as many batches of a group, between which helpers have nothing to do


@dataclass(frozen=True, slots=True)
class PrefetchPlan:
    """`threads` make groups of `group` batches and queue up to `queued` handoffs of `handoff` batches of each lane."""

    threads: int
    group: int
    handoff: int
    queued: int
    lanes: int = 1  # of a group
    helpers: int = 0  # threads of compiled code, beside

    @classmethod
    def of(
        cls,
        threads: int,
        prefetch: int | None,
        *,
        read_bytes: int,
        batch_bytes: int,
        decoded: bool,
        compiled: bool = False,
    ) -> "PrefetchPlan":
        """Plan at most `prefetch` batches ahead; by default as many as fit in 32 MiB, at least 4 and at most 64.

        Every thread makes at least one, so no more threads are used than batches are asked for. Few slots are full at
        once: those of the next group fill up only while the last batches of a group are used.

        Where compiled code does nearly all of the work, one thread makes batches, and the others are its helpers: they
        need no GIL, and few batches are in memory, whose memory, still in the CPU's cache, is written again. Else
        threads share the copying and deriving of a group, a lane each; with blocks to decode, one thread decodes the
        next group while another copies.
        """
        if threads < 0:
            raise ValueError(f"threads must be at least 0 (got {threads})")
        if prefetch is not None and prefetch < 1:
            raise ValueError(f"prefetch must be at least 1 (got {prefetch})")
        threads = threads if prefetch is None else min(threads, prefetch)
        wanted = prefetch or _between(_LEAST, _AHEAD_BYTES // max(1, batch_bytes), _MOST)
        helpers = threads - 1 if compiled and threads and wanted >= _LEAST - 1 else 0
        threads = 1 if helpers else threads
        longer = _HELPED if helpers else 1
        group = _between(1, longer * _GROUP_BYTES // max(1, read_bytes), longer * _MOST)
        lanes = 1 if decoded or group == 1 else max(1, threads)
        is_exact = prefetch is not None and helpers > 0  # what helpers write is not queued yet
        each = max(1, wanted // (threads + lanes + is_exact))
        handoff = _between(1, _HANDOFF_BYTES // max(1, batch_bytes), min(max(1, each // 2), group)) if threads else 1
        return cls(threads, group, handoff, max(1, each // handoff), lanes, helpers)

    @property
    def batches(self) -> int:
        """The most batches that are being made or queued at once."""
        return ((self.threads + self.lanes) * (self.queued + 1) + (self.helpers > 0)) * self.handoff


def processor_count() -> int:
    """How many processors this process may use."""
    return len(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else os.cpu_count() or 1


def suitable_threads(caches: Sequence[Cache], columns: Sequence[str]) -> int:
    """Return 2 where columns are decoded, else 1: one thread keeps up with memory."""
    return 2 if any(decoded_columns(cache, columns) for cache in caches) else 1


def batch_bytes(cache: Cache, columns: Sequence[str], rows: int, derived: int = 0) -> int:
    """Bytes of a batch: its columns, and `derived` numbers of 8 bytes per token."""
    width = cache.column("tokens").shape[0] if derived else 0
    return rows * (cache.row_bytes(columns) + 8 * width * derived)


def _between(least: int, wanted: int, most: int) -> int:
    return max(least, min(wanted, most))


Batch = dict[str, Any]  # of tensors, or of whatever its BatchMaker makes


class BatchMaker(Protocol):
    def batches(self, stream: RowSource, epoch: int, located: Located, size: int) -> Iterator[Batch]:
        """Yield batches of `size` rows; an empty selection yields one empty batch."""
        ...


@dataclass(frozen=True, slots=True)
class FirstBatch:
    """Makes the batch that training waits for: of chunks that are far away, it reads only what the batch needs."""

    maker: BatchMaker
    columns: Sequence[str]

    def batches(self, stream: RowSource, epoch: int, located: Located, size: int) -> Iterator[Batch]:
        sources = np.zeros_like(located.rows) if located.sources is None else located.sources
        caches = [
            sparse_cache(cache, located.rows[sources == source], self.columns) or cache
            for source, cache in enumerate(stream.caches)
        ]
        return self.maker.batches(ReadThrough(caches, stream.seed), epoch, located, size)


_LOCATED_ROWS = 8192


class BatchGroups:
    """Positions `start` to `stop` of an epoch, in batches of `batch_size`, `plan.group` of them to a group.

    Rows are located for many groups at once: looking up one position costs about as much as a thousand. With `filled`,
    a last batch that does not divide among the ranks is filled up on those that lack a row, with a copy of its last row
    of weight 0: every rank has a batch of the same shape.
    """

    def __init__(
        self,
        stream: Stream,
        epoch: int,
        start: int,
        stop: int,
        batch_size: int,
        plan: PrefetchPlan,
        ranks: Ranks,
        maker: BatchMaker,
        *,
        filled: bool,
    ) -> None:
        self._stream, self._epoch, self._start, self._stop = stream, epoch, start, stop
        self._maker = maker
        self._local_size = max(1, batch_size // ranks.world_size)
        self._handoff, self._lanes = plan.handoff, plan.lanes
        self._group_positions = batch_size * plan.group
        self._group_rows = self._local_size * plan.group
        self._groups_at_once = max(1, _LOCATED_ROWS // self._group_rows)
        size = self._group_positions * self._groups_at_once
        # Not a method: a method's cache would keep this object alive in a cycle.
        self._stretch = lru_cache(maxsize=2)(partial(_located, stream, epoch, start, stop, size, ranks, filled))
        self._locating = threading.Lock()  # threads that begin groups at once would both locate their rows

    def __len__(self) -> int:
        return -(-(self._stop - self._start) // self._group_positions)

    def make(self, number: int, lane: int) -> Iterator[Handoff]:
        """Yield the batches of a lane of one group, a handoff at a time, up to the first error."""
        return timed(self._make(number, lane))

    def _make(self, number: int, lane: int) -> Iterator[list[Batch]]:
        """Yield the batches of a lane of one group, a handoff at a time, last batch first, up to the first error."""
        stretch, within = divmod(number, self._groups_at_once)
        rows = slice(within * self._group_rows, (within + 1) * self._group_rows)
        handoff: list[Batch] = []
        error = None
        clock, begun = time.perf_counter, time.perf_counter()
        try:
            with self._locating:
                whole = self._stretch(stretch)
            located = whole.part(rows)
            if self._lanes > 1:
                located = located.part(
                    _lane_rows(len(located.rows), self._handoff * self._local_size, lane, self._lanes)
                )
                if not len(located.rows):
                    return
            left = self._handoff
            for batch in self._maker.batches(self._stream, self._epoch, located, self._local_size):
                handoff.append(batch)
                del batch
                left -= 1
                if not left or clock() - begun > _HANDOFF_SECONDS:
                    yield handoff[::-1]
                    handoff, begun = [], clock()
                    left = (
                        left or self._handoff
                    )  # the rest of one that was cut short: lanes take turns after whole ones
        except Exception as raised:  # raised by one batch; the batches before it are good
            error = raised
        if handoff:
            yield handoff[::-1]
        if error is not None:
            raise error


def _lane_rows(rows: int, piece: int, lane: int, lanes: int) -> Numbers:
    """Return the rows of every `lanes`-th piece, from that of the lane on.

    >>> _lane_rows(9, 2, 1, 2).tolist()
    [2, 3, 6, 7]
    """
    return np.flatnonzero(np.arange(rows) // piece % lanes == lane)


def _located(
    stream: Stream, epoch: int, start: int, stop: int, size: int, ranks: Ranks, filled: bool, stretch: int
) -> Located:
    """Locate the rows of a rank in stretch number `stretch`, of `size` positions."""
    first = start + stretch * size
    last = min(stop, first + size)
    positions = np.arange(first + (ranks.rank - first) % ranks.world_size, last, ranks.world_size)
    if not filled:
        return stream.locate(epoch, positions)
    rows = -(-(last - first) // ranks.world_size)
    weights = np.zeros(rows, np.float32)
    weights[: len(positions)] = 1
    filling = np.full(rows - len(positions), last - 1)
    return stream.locate(epoch, np.concatenate([positions, filling]))._replace(weights=weights)


Ranges = list[tuple[int, int]]  # of positions of an epoch; all but the last have whole batches only


class BatchesAhead:
    """Batches from a position of an epoch on, made ahead in threads.

    They end with the `ranges` of that epoch, or continue with those that `following` returns for each later epoch: the
    first batches of an epoch are then made while the last ones of the epoch before it are used.

        epoch 0   position ├─ 1 batch ─┼─ group ─┼─ … ─┼─ incomplete batch ─┤
        epoch 1          0 ├─ group ─┼─ …

    The first batch is made alone, so that it does not wait for a whole group; the second follows at once.
    """

    def __init__(
        self,
        stream: Stream,
        epoch: int,
        ranges: Ranges,
        following: Callable[[int], Ranges] | None,
        batch_size: int,
        plan: PrefetchPlan,
        ranks: Ranks,
        maker: BatchMaker,
        columns: Sequence[str],
        *,
        filled: bool,
    ) -> None:
        self._stream, self._is_endless = stream, following is not None
        self._next = (epoch, ranges[0][0])
        (start, stop), *rest = ranges
        first = min(stop, start + batch_size)
        begun = [(start, first), *([(first, stop)] if first < stop else []), *rest]
        groups = partial(BatchGroups, stream, batch_size=batch_size, plan=plan, ranks=ranks, maker=maker, filled=filled)
        sequence = _GroupSequence(groups, epoch, begun, following, plan.threads, first=FirstBatch(maker, columns))
        lanes = Lanes(plan.lanes, plan.handoff, _count_batches)
        self._prefetcher = Prefetcher(
            sequence.make, sequence.count, threads=plan.threads, queued=plan.queued, lanes=lanes, helpers=plan.helpers
        )
        self.handoffs = self._prefetcher.items()

    @property
    def belongs_to_this_process(self) -> bool:
        return self._prefetcher.belongs_to_this_process

    def reached(self, epoch: int, position: int) -> None:
        """Note where its next batch begins."""
        self._next = (epoch, position)

    def continues_at(self, stream: Stream, epoch: int, position: int) -> bool:
        """Whether its next batch is the one at this position of a stream."""
        is_next = stream is self._stream and (epoch, position) == self._next
        return is_next and self._is_endless and self.belongs_to_this_process

    def stop(self) -> None:
        self._prefetcher.stop()


class _GroupSequence:
    """Numbers the groups of an epoch and of those after it. Threads may share it."""

    def __init__(
        self,
        groups: Callable[..., BatchGroups],
        epoch: int,
        begun: Ranges,
        following: Callable[[int], Ranges] | None,
        threads: int,
        first: BatchMaker,
    ) -> None:
        self._lock = threading.Lock()
        self._groups, self._epoch, self._following, self._threads = groups, epoch, following, threads
        self._parts: list[tuple[int, BatchGroups]] = []  # with the number of their first group
        self._end = 0
        self._append(begun[:1], maker=first)
        self._append(begun[1:])
        self.count = self._end if following is None else None

    def make(self, number: int, lane: int) -> Iterator[Handoff]:
        """Yield the batches of a lane of one group."""
        with self._lock:
            while number >= self._end:
                assert self._following is not None
                self._epoch += 1
                ranges = self._following(self._epoch)
                if not ranges:
                    raise ValueError(f"epoch {self._epoch} of this stream has no batch")
                self._append(ranges)
            first, groups = next(part for part in reversed(self._parts) if part[0] <= number)
            # Groups before these are made: each thread makes one at a time.
            self._parts = [part for part in self._parts if part[0] + len(part[1]) > number - self._threads]
        return groups.make(number - first, lane)

    def _append(self, ranges: Ranges, **options: BatchMaker) -> None:
        for start, stop in ranges:
            groups = self._groups(epoch=self._epoch, start=start, stop=stop, **options)
            self._parts.append((self._end, groups))
            self._end += len(groups)


def _count_batches(handoff: Handoff) -> int:
    return len(handoff.batches)


Made = TypeVar("Made")
_STOP_SECONDS = 2.0  # to wait for running tasks on stop(); a slower one is abandoned
_running: "weakref.WeakSet[Prefetcher[Any]]" = weakref.WeakSet()
_process = object()  # identifies this process without a getpid() per batch


class _End:
    """Follows the items of a task, with the error it raised, if any."""

    def __init__(self, error: BaseException | None = None) -> None:
        self.error = error


class _TaskSlot(Generic[Made]):
    """The items of one task, and a token for each further item that fits."""

    def __init__(self, queued: int) -> None:
        self.items: SimpleQueue[Made | _End] = SimpleQueue()
        self.room: SimpleQueue[None] = SimpleQueue()
        for _ in range(queued - 1):
            self.room.put(None)


class Lanes(NamedTuple, Generic[Made]):
    """How the lanes of a group take turns: each yields items that count `turn` together, then the next one does."""

    number: int
    turn: int
    count: Callable[[Made], int]


class Prefetcher(Generic[Made]):
    """`items()` yields the items of the groups 0, 1, … in that order, and raises what making them raises.

    The items of a group are those of `make(group, 0)`, `make(group, 1)`, …, an iterator for each of its lanes, which
    take turns. `count` is the number of groups, None for endlessly many.

    Threads are daemons and hold only the Prefetcher: an abandoned iteration or an exiting interpreter does not wait for
    them. A forked process has no threads; its copy reports so by `belongs_to_this_process`.
    """

    def __init__(
        self,
        make: Callable[[int, int], Iterator[Made]],
        count: int | None,
        *,
        threads: int,
        queued: int,
        lanes: Lanes[Made],
        helpers: int = 0,
    ) -> None:
        self._make, self._lanes, self._helpers = make, lanes, helpers
        self._count = sys.maxsize if count is None else count * lanes.number  # tasks: a lane of a group each
        self._process = _process
        self._stopped = False
        self._tasks: SimpleQueue[int | None] = SimpleQueue()
        self._slots: list[_TaskSlot[Made]] = [_TaskSlot(queued) for _ in range(threads + lanes.number)]
        for task in range(min(self._count, len(self._slots))):
            self._tasks.put(task)
        self._threads = [
            threading.Thread(target=self._work, name=f"forebay-feed-{number}", daemon=True) for number in range(threads)
        ]
        _running.add(self)
        for thread in self._threads:
            thread.start()

    @property
    def belongs_to_this_process(self) -> bool:
        """Whether the threads are threads of this process."""
        return self._process is _process

    def items(self) -> Iterator[Made]:
        """Yield all items, waiting for each; without threads, make each when it is asked for."""
        for task in range(0, self._count, self._lanes.number):
            yield from self._consume(task) if self._threads else self._make(task, 0)

    def stop(self) -> None:
        """End the threads: wait for an item that is being made, drop what is queued."""
        if not self.belongs_to_this_process or self._stopped:
            return
        self._stopped = True
        for _ in self._threads:
            self._tasks.put(None)
        for slot in self._slots:
            slot.room.put(None)
        end = time.monotonic() + _STOP_SECONDS
        for thread in self._threads:
            if thread is not threading.current_thread():  # a garbage collection may call this from one of them
                thread.join(max(0.0, end - time.monotonic()))
        _running.discard(self)

    def _consume(self, first: int) -> Iterator[Made]:
        """Yield the items of a group, whose first task is `first`, turn by turn."""
        tasks = deque(range(first, first + self._lanes.number))
        while tasks:
            task = tasks.popleft()
            slot, left = self._slots[task % len(self._slots)], self._lanes.turn
            while left > 0 and not isinstance(item := slot.items.get(), _End):
                left -= self._lanes.count(item)
                slot.room.put(None)
                yield item
                del item
            if left <= 0:
                tasks.append(task)
                continue
            assert isinstance(item, _End)
            if item.error is not None:
                raise item.error
            if task + len(self._slots) < self._count:  # of the next group but one: all of the next are begun before it
                self._tasks.put(task + len(self._slots))

    def _work(self) -> None:
        set_helpers(self._helpers)
        while (task := self._tasks.get()) is not None and not self._stopped:
            slot = self._slots[task % len(self._slots)]
            try:
                self._fill(slot, self._make(*divmod(task, self._lanes.number)))
            except BaseException as error:
                slot.items.put(_End(error))
            else:
                slot.items.put(_End())

    def _fill(self, slot: _TaskSlot[Made], items: Iterator[Made]) -> None:
        for item in items:
            slot.items.put(item)
            del item  # while this thread waits, only the consumer holds the item
            slot.room.get()
            if self._stopped:
                return


def _forked() -> None:
    global _process
    _process = object()


if hasattr(os, "register_at_fork"):
    os.register_at_fork(after_in_child=_forked)


@atexit.register
def _stop_all() -> None:
    for prefetcher in list(_running):
        prefetcher.stop()


def gather_batches(
    caches: Sequence[Cache], located: Located, size: int, columns: Sequence[str] | None
) -> Iterator[Read]:
    """Yield the located rows, `size` at a time."""
    if located.sources is None:
        return caches[0].read_batches(located.rows, size, columns)
    return _from_many(caches, located.rows, located.sources, size, columns)


def locate_batches(
    caches: Sequence[Cache], located: Located, size: int, columns: Sequence[str]
) -> Iterator[tuple[RowAddresses, ...]]:
    """Yield where the located rows are, `size` at a time; of several caches, whose columns are equal, in place."""
    if located.sources is None:
        yield from caches[0].locate_batches(located.rows, size, columns)
        return
    present, places = _places_by_source(located.sources)
    parts = [
        caches[source].locate_batches(located.rows[at], max(1, len(at)), columns)
        for source, at in zip(present, places, strict=True)
    ]
    found = [next(part) for part in parts]  # valid while `parts` wait
    merged = [
        batches_of_addresses(caches[0].column(name), *_merged_addresses(here, places, len(located.rows)), size)
        for name, here in zip(columns, zip(*found, strict=True), strict=True)
    ]
    yield from zip(*merged, strict=True)


def _places_by_source(sources: Numbers) -> tuple[list[int], list[Numbers]]:
    """Return the caches that rows come from, and the places of the rows of each."""
    present = np.unique(sources).tolist() or [0]
    return present, [np.flatnonzero(sources == source) for source in present]


def _merged_addresses(pieces: Sequence[RowAddresses], places: list[Numbers], count: int) -> tuple[Numbers, Numbers]:
    addresses, counts = np.empty(count, np.int64), np.empty(count, np.int64)
    for piece, at in zip(pieces, places, strict=True):
        addresses[at], counts[at] = piece.addresses, piece.counts
    return addresses, counts


@dataclass(frozen=True, slots=True, eq=False)
class RowViews:
    """The rows of a ragged column, iterable repeatedly: views of the cache, checked as they are read."""

    caches: Sequence[Cache]
    located: Located
    column: str

    def __len__(self) -> int:
        return len(self.located.rows)

    def __iter__(self) -> Iterator[Array]:
        rows, sources = self.located.rows, self.located.sources
        if sources is None:
            return self.caches[0].views(rows, self.column)
        views = {
            source: self.caches[source].views(rows[sources == source], self.column)
            for source in np.unique(sources).tolist()
        }
        return (next(views[source]) for source in sources.tolist())


def view_rows(caches: Sequence[Cache], located: Located, columns: Sequence[str]) -> dict[str, Array | RowViews]:
    """Return all located rows: fixed columns as arrays, ragged ones row by row."""
    fixed = [name for name in columns if not caches[0].column(name).ragged]
    (read,) = gather_batches(caches, located, max(1, len(located.rows)), fixed) if fixed else ({},)
    arrays = {name: values for name, values in read.items() if not isinstance(values, Ragged)}
    return arrays | {name: RowViews(caches, located, name) for name in columns if name not in fixed}


def _from_many(
    caches: Sequence[Cache], rows: Numbers, sources: Numbers, size: int, columns: Sequence[str] | None
) -> Iterator[Read]:
    present, places = _places_by_source(sources)
    read = [caches[source].read(rows[at], columns) for source, at in zip(present, places, strict=True)]
    names = [name for name in read[0] if all(name in one for one in read)]
    dtypes = {name: np.result_type(*(cache.column(name).array_dtype for cache in caches)) for name in names}
    merged = {name: merged_rows([one[name] for one in read], places, len(rows), dtypes[name]) for name in names}
    batches = [cut_batches(values, size) for values in merged.values()]
    yield from (dict(zip(merged, batch, strict=True)) for batch in zip(*batches, strict=True))


def merged_rows(
    pieces: list[Array | Ragged], places: list[Numbers], count: int, dtype: np.dtype[Any]
) -> Array | Ragged:
    """Put the rows of every piece in their places among `count` rows."""
    ragged = [piece for piece in pieces if isinstance(piece, Ragged)]
    if ragged:
        return _merged_ragged(ragged, places, count, dtype)
    fixed = [piece for piece in pieces if not isinstance(piece, Ragged)]
    merged = np.empty((count, *fixed[0].shape[1:]), dtype)
    for piece, at in zip(fixed, places, strict=True):
        merged[at] = piece
    return merged


def _merged_ragged(pieces: list[Ragged], places: list[Numbers], count: int, dtype: np.dtype[Any]) -> Ragged:
    """Put ragged rows in their places.

    >>> pieces = [Ragged.of_bytes([b"ab", b"c"]), Ragged.of_bytes([b"d"])]
    >>> merged = _merged_ragged(pieces, [np.array([0, 2]), np.array([1])], 3, np.dtype("u1"))
    >>> merged.values.tobytes(), merged.offsets.tolist()
    (b'abdc', [0, 2, 3, 4])
    """
    offsets = np.zeros(count + 1, np.int64)
    for piece, at in zip(pieces, places, strict=True):
        offsets[at + 1] = piece.lengths
    np.cumsum(offsets, out=offsets)
    values = np.empty((int(offsets[-1]), *pieces[0].values.shape[1:]), dtype)
    for piece, at in zip(pieces, places, strict=True):
        lengths = piece.lengths.astype(np.int64)
        # A value moves by as much as its row does.
        moves = np.repeat(offsets[at] - piece.offsets[:-1].astype(np.int64), lengths)
        first, last = int(piece.offsets[0]), int(piece.offsets[-1])
        values[np.arange(first, last) + moves] = piece.values[first:last]
    return Ragged(values, offsets)
