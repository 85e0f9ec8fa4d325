"""Make batches ahead of the training step: how far, in which groups, by which threads.

    tasks ─▶ thread ─▶ slot 0  ▯▯▯ end
          ─▶ thread ─▶ slot 1  ▯▯        ──▶ taken slot by slot; an emptied slot lets one more task begin
                                room for `ahead` items each, then its thread waits

Threads are daemons and hold nothing but the feed, so neither an iteration that is dropped half way nor an
interpreter that exits waits for them: both tell them to stop first. A forked process has no threads; its copy of a
feed is left alone, and says so by `is_mine`.

run     batches that are found, checked and decoded together; by one thread, copied and derived one after the other
piece   batches that are handed over together: waking a thread costs as much as copying 64 KiB

positions    start ├─── batch ───┼─── batch ───┼─── batch ───┼─ … ─┤ stop
run 0              └──────── located, found and checked together ────────┘
rank r of w        takes the positions p with p % w == r

With `filled`, a last batch whose rows do not go round is filled up on the ranks that lack one: with a copy of its last
row, whose weight is 0. So every rank has a batch of the same shape.
"""

import atexit
import os
import threading
import time
import weakref
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from functools import lru_cache, partial
from queue import SimpleQueue
from typing import Any, Generic, Protocol, TypeVar

import numpy as np

from forebay.columns import Array, Ragged
from forebay.feeding.shuffle import Ranks, decoded_columns
from forebay.feeding.stream import Located, Read, Stream
from forebay.order.bijection import Numbers
from forebay.read.cache import Cache
from forebay.read.locate import cut_batches


def gather_batches(
    caches: Sequence[Cache], located: Located, size: int, columns: Sequence[str] | None
) -> Iterator[Read]:
    """So many of the located rows at a time."""
    if located.sources is None:
        return caches[0].read_batches(located.rows, size, columns)
    return _from_many(caches, located.rows, located.sources, size, columns)


@dataclass(frozen=True, slots=True, eq=False)
class RowViews:
    """The rows of a ragged column, to be gone through as often as needed: views of the cache, checked as they come."""

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
    """All located rows: of fixed columns an array, of ragged ones row by row."""
    fixed = [name for name in columns if not caches[0].column(name).ragged]
    (read,) = gather_batches(caches, located, max(1, len(located.rows)), fixed) if fixed else ({},)
    arrays = {name: values for name, values in read.items() if not isinstance(values, Ragged)}
    return arrays | {name: RowViews(caches, located, name) for name in columns if name not in fixed}


def _from_many(
    caches: Sequence[Cache], rows: Numbers, sources: Numbers, size: int, columns: Sequence[str] | None
) -> Iterator[Read]:
    present = np.unique(sources).tolist() or [0]
    read = [caches[source].read(rows[sources == source], columns) for source in present]
    at = np.argsort(np.argsort(sources, kind="stable"), kind="stable")  # where each row stands in what was read
    names = [name for name in read[0] if all(name in one for one in read)]
    dtypes = {name: np.result_type(*(cache.column(name).array_dtype for cache in caches)) for name in names}
    merged = {name: _merged([one[name] for one in read], at, dtypes[name]) for name in names}
    batches = [cut_batches(values, size) for values in merged.values()]
    yield from (dict(zip(merged, batch, strict=True)) for batch in zip(*batches, strict=True))


def _merged(pieces: list[Array | Ragged], at: Numbers, dtype: np.dtype[Any]) -> Array | Ragged:
    """Pieces one after the other, then in the order of the batch, of the type that holds the values of any cache."""
    if isinstance(pieces[0], Ragged):
        rows = [piece[row] for piece in pieces if isinstance(piece, Ragged) for row in range(len(piece))]
        return Ragged.of([rows[index] for index in at.tolist()], dtype, pieces[0].values.shape[1:])
    return np.concatenate([piece for piece in pieces if not isinstance(piece, Ragged)], dtype=dtype)[at]


Batch = dict[str, Any]  # of tensors, or of whatever its maker makes


class BatchMaker(Protocol):
    def batches(self, stream: Stream, epoch: int, located: Located, size: int) -> Iterator[Batch]:
        """So many of the located rows at a time; no rows are one empty batch."""
        ...


Made = TypeVar("Made")
_PATIENCE_SECONDS = 2.0  # for tasks under way, when a feed is stopped; what takes longer is left behind
_running: "weakref.WeakSet[Prefetcher[Any]]" = weakref.WeakSet()
_process = object()  # stands for this process; its number would be asked of the system with every batch


class _End:
    """Comes after the items of a task: with what it raised, if it did."""

    def __init__(self, error: BaseException | None = None) -> None:
        self.error = error


class _Slot(Generic[Made]):
    """The items of one task, and a token for each further one that there is room for."""

    def __init__(self, ahead: int) -> None:
        self.items: SimpleQueue[Made | _End] = SimpleQueue()
        self.room: SimpleQueue[None] = SimpleQueue()
        for _ in range(ahead - 1):
            self.room.put(None)


class Prefetcher(Generic[Made]):
    """`items()` gives what the iterators `make(0)`, `make(1)`, … give, one after the other, and raises what they do."""

    def __init__(self, make: Callable[[int], Iterator[Made]], count: int, *, threads: int, ahead: int) -> None:
        self._make = make
        self._count = count
        self._process = _process
        self._stopped = False
        self._tasks: SimpleQueue[int | None] = SimpleQueue()
        self._slots: list[_Slot[Made]] = [_Slot(ahead) for _ in range(threads + 1)]
        for task in range(min(count, len(self._slots))):
            self._tasks.put(task)
        self._threads = [
            threading.Thread(target=self._work, name=f"forebay-feed-{number}", daemon=True) for number in range(threads)
        ]
        _running.add(self)
        for thread in self._threads:
            thread.start()

    @property
    def is_mine(self) -> bool:
        """Whether the threads of this feed are threads of this process."""
        return self._process is _process

    def items(self) -> Iterator[Made]:
        """All items; waits for each. Without threads, it is made now."""
        for task in range(self._count):
            yield from self._taken(task) if self._threads else self._make(task)

    def stop(self) -> None:
        """End the threads; an item under way is waited for, what was made ahead is dropped."""
        if not self.is_mine or self._stopped:
            return
        self._stopped = True
        for _ in self._threads:
            self._tasks.put(None)
        for slot in self._slots:
            slot.room.put(None)
        end = time.monotonic() + _PATIENCE_SECONDS
        for thread in self._threads:
            if thread is not threading.current_thread():  # the garbage collector may run in one of them
                thread.join(max(0.0, end - time.monotonic()))
        _running.discard(self)

    def _taken(self, task: int) -> Iterator[Made]:
        slot = self._slots[task % len(self._slots)]
        while not isinstance(item := slot.items.get(), _End):
            slot.room.put(None)
            yield item
        if item.error is not None:
            raise item.error
        if task + len(self._slots) < self._count:
            self._tasks.put(task + len(self._slots))

    def _work(self) -> None:
        while (task := self._tasks.get()) is not None and not self._stopped:
            slot = self._slots[task % len(self._slots)]
            try:
                self._fill(slot, self._make(task))
            except BaseException as error:
                slot.items.put(_End(error))
            else:
                slot.items.put(_End())

    def _fill(self, slot: _Slot[Made], items: Iterator[Made]) -> None:
        for item in items:
            slot.items.put(item)
            del item  # while this thread waits, the item belongs to whoever takes it
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
    for feed in list(_running):
        feed.stop()


_AHEAD_BYTES = 16 * 1024 * 1024
_RUN_BYTES = 8 * 1024 * 1024
_PIECE_BYTES = 1024 * 1024
_MOST, _LEAST = 64, 4


@dataclass(frozen=True, slots=True)
class PrefetchPlan:
    """`threads` make runs of `run` batches, at most `ahead` pieces of `piece` batches of each before they are taken."""

    threads: int
    run: int
    piece: int
    ahead: int

    @classmethod
    def of(
        cls, threads: int, prefetch: int | None, *, read_bytes: int, batch_bytes: int, decoded: bool
    ) -> "PrefetchPlan":
        """At most `prefetch` batches ahead, or as many as 16 MiB hold.

        Where little is to be found, many threads share the copying and deriving: a run is as long as one of them may go
        ahead. Where blocks are decoded, runs are long, and one thread decodes the next while another copies.
        """
        if threads < 0:
            raise ValueError(f"threads is {threads}; it must be at least 0")
        if prefetch is not None and prefetch < 1:
            raise ValueError(f"prefetch is {prefetch}; it must be at least 1")
        wanted = prefetch or _between(_LEAST, _AHEAD_BYTES // max(1, batch_bytes), _MOST)
        each = max(1, wanted // (threads + 1))
        run = each if threads > 1 and not decoded else _between(1, _RUN_BYTES // max(1, read_bytes), _MOST)
        piece = _between(1, _PIECE_BYTES // max(1, batch_bytes), min(each, run)) if threads else 1
        return cls(threads, run, piece, max(1, each // piece))

    @property
    def batches(self) -> int:
        """Batches that are under way or made at most."""
        return (self.threads + 1) * (self.ahead + 1) * self.piece


def suitable_threads(caches: Sequence[Cache], columns: Sequence[str]) -> int:
    """One thread keeps up with memory; decoding is shared by two."""
    return 2 if any(decoded_columns(cache, columns) for cache in caches) else 1


def batch_bytes(cache: Cache, columns: Sequence[str], rows: int, derived: int = 0) -> int:
    """What a batch takes: its columns, and so many numbers of 8 bytes for every token."""
    width = cache.column("tokens").shape[0] if derived else 0
    return rows * (cache.row_bytes(columns) + 8 * width * derived)


def _between(least: int, wanted: int, most: int) -> int:
    return max(least, min(wanted, most))


_LOCATED_ROWS = 4096


class BatchGroups:
    """Positions `start` to `stop` of an epoch, in batches of `batch_size`, `pace.run` of them to a run.

    Rows are located for many runs at once: looking up one position costs about as much as a thousand.
    """

    def __init__(
        self,
        stream: Stream,
        epoch: int,
        start: int,
        stop: int,
        batch_size: int,
        pace: PrefetchPlan,
        ranks: Ranks,
        making: BatchMaker,
        *,
        filled: bool,
    ) -> None:
        self._stream, self._epoch, self._start, self._stop = stream, epoch, start, stop
        self._making = making
        self._local_size = max(1, batch_size // ranks.world_size)
        self._piece = pace.piece
        self._run_positions = batch_size * pace.run
        self._run_rows = self._local_size * pace.run
        self._runs_at_once = max(1, _LOCATED_ROWS // self._run_rows)
        size = self._run_positions * self._runs_at_once
        # No method: the cache goes with the loader, not when a collector finds it in a circle.
        self._stretch = lru_cache(maxsize=2)(partial(_located, stream, epoch, start, stop, size, ranks, filled))

    def __len__(self) -> int:
        return -(-(self._stop - self._start) // self._run_positions)

    def make(self, number: int) -> Iterator[list[Batch]]:
        """The batches of one run, a piece at a time, each with its last batch first; up to the first error in it."""
        stretch, within = divmod(number, self._runs_at_once)
        rows = slice(within * self._run_rows, (within + 1) * self._run_rows)
        piece: list[Batch] = []
        error = None
        try:
            located = self._stretch(stretch).part(rows)
            for batch in self._making.batches(self._stream, self._epoch, located, self._local_size):
                piece.append(batch)
                del batch
                if len(piece) == self._piece:
                    yield piece[::-1]
                    piece = []
        except Exception as raised:  # it belongs to one batch: those before it are good
            error = raised
        if piece:
            yield piece[::-1]
        if error is not None:
            raise error


def _located(
    stream: Stream, epoch: int, start: int, stop: int, size: int, ranks: Ranks, filled: bool, stretch: int
) -> Located:
    """The rows of a rank in one of the stretches of `size` positions."""
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
