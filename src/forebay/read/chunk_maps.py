"""Find the chunks of row numbers, and map their files: bounded in number, each checked when it is opened.

A gather reads plain addresses, so a map must stay open until every gather that started while it was open has ended:
`begin_reading` and `end_reading` count them, and a closed file is freed after the last one.

Linux allows a process about 65,000 maps. All layers of all open caches share half of them: when a layer is added or is
full, every layer gets a new share and closes the maps above it.

Row numbers are divided into buckets of a power of two; a table has the chunk in which each bucket starts. Chunks have
similar sizes, so a row is in that chunk or in one of the next few.

    starts   0      900      1800     2700
    bucket   │0    │512  │1024 │1536 │2048 │2560
    table     0     0     1     1     2     2        row 1000: bucket 1 begins in chunk 0; 1000 ≥ 900, so chunk 1
"""

import os
import threading
import time
import weakref
from collections import deque
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager, suppress
from itertools import pairwise
from pathlib import Path
from typing import NamedTuple

import numpy as np
from numpy.typing import NDArray

from forebay import compiled
from forebay.columns import Array, Ragged
from forebay.format.chunk import ChunkFile

PASSING_BYTES = 4 << 30  # of chunks that are in no file: they passed through a full tier, or have none
MAX_MAPS = 8192  # per layer; an eighth of the maps that Linux grants a process by default
_MAX_PROCESS_MAPS = 32_768


class MapBudget:
    """The number of maps that all layers of all open caches in this process may have together."""

    def __init__(self, limit: int) -> None:
        self.limit = limit
        self.forget()

    def forget(self) -> None:
        """Start with no layers, in a forked process: another thread of the parent may have held the lock."""
        self._lock = threading.Lock()
        self._layers: weakref.WeakSet[Maps] = weakref.WeakSet()

    def forked(self) -> None:
        for maps in list(self._layers):
            maps.forget_threads()
        self.forget()

    def add(self, maps: "Maps") -> None:
        with self._lock:
            self._layers.add(maps)
        self.share()

    def share(self) -> None:
        """Give every layer the maps it wants; layers that want more than their share get equal parts of the rest."""
        with self._lock:
            layers = sorted(self._layers, key=lambda maps: maps.wanted)
            left = self.limit
            for number, maps in enumerate(layers):
                maps.limit = max(1, min(maps.wanted, left // (len(layers) - number)))
                left -= maps.limit
            # A layer never takes this lock while it holds its own.
            for maps in layers:
                maps.close_surplus()


def _process_maps() -> int:
    """Half of the system limit; the rest is for libraries and other maps."""
    with suppress(OSError, ValueError):
        return min(_MAX_PROCESS_MAPS, int(Path("/proc/sys/vm/max_map_count").read_text()) // 2)
    return _MAX_PROCESS_MAPS


PROCESS_BUDGET = MapBudget(_process_maps())


Spans = Sequence[tuple[float, float]]  # of `time.perf_counter`


class _Opening(threading.local):
    """When this thread opened chunks, or waited for a store to fetch them, since `take_opening_spans`."""

    def __init__(self) -> None:
        self.spans: deque[tuple[float, float]] = deque(maxlen=_MAX_SPANS)


_MAX_SPANS = 4096  # of threads that nobody asks
_opening = _Opening()


@contextmanager
def opening() -> Iterator[None]:
    """Record that this thread waits for a store, while inside."""
    started = time.perf_counter()
    try:
        yield
    finally:
        _opening.spans.append((started, time.perf_counter()))


def take_opening_spans() -> Spans:
    """The spans in which this thread opened chunks since the last call."""
    if not _opening.spans:
        return ()
    spans = tuple(_opening.spans)
    _opening.spans.clear()
    return spans


class Maps:
    """Open chunk files by position; the least recently used are closed when there are more than `limit`.

    `limit` is the requested number of maps, or the layer's share of the budget if that is less. Chunks of which
    `is_passing` is True take memory or disk space while they are open: at most `passing_bytes` of them stay open.
    """

    def __init__(
        self,
        count: int,
        open_chunk: Callable[[int], ChunkFile],
        limit: int = MAX_MAPS,
        budget: MapBudget | None = None,
        is_passing: Callable[[int], bool] | None = None,
    ) -> None:
        self.passing_bytes = PASSING_BYTES
        self._is_passing = is_passing
        self._passing: dict[int, int] = {}  # position -> bytes
        self.limit = limit
        self.wanted = min(limit, max(1, count))
        self._budget = PROCESS_BUDGET if budget is None else budget
        self._open = open_chunk
        self._files: dict[int, ChunkFile] = {}
        self._touched = np.zeros(count, np.int64)
        self._clock = 0
        self._lock = threading.Lock()
        self._readers: set[int] = set()  # tickets: the clock when each began
        self._flights: dict[int, threading.Lock] = {}  # positions that threads are opening
        self._closed: list[tuple[int, ChunkFile]] = []  # clock when it was closed
        self._on_close: list[Callable[[int], None]] = []
        self._budget.add(self)

    def __len__(self) -> int:
        return len(self._files)

    def on_close(self, call: Callable[[int], None]) -> None:
        self._on_close.append(call)

    def get(self, position: int) -> ChunkFile:
        file = self._files.get(position)
        if file is not None:
            self._touched[position] = self._clock
            return file
        with opening():
            with self._lock:
                flight = self._flights.setdefault(position, threading.Lock())
            with flight:  # another thread may have opened it meanwhile
                try:
                    return self._files.get(position) or self.put(position, self._open(position))
                finally:
                    self._flights.pop(position, None)

    def put(self, position: int, opened: ChunkFile) -> ChunkFile:
        """Keep an open file, and return the one that is kept: another thread may have been faster."""
        with self._lock:
            self._clock += 1
            self._touched[position] = self._clock
            kept = self._files.setdefault(position, opened)
            is_full = len(self._files) > self.limit
            if self._is_passing is not None and self._is_passing(position):
                self._passing[position] = len(kept.view)
                self._close_passing(position)
        if is_full:
            self._budget.share()
        return kept

    def forget_threads(self) -> None:
        """Free the locks that threads of the parent of a forked process may have held."""
        self._lock = threading.Lock()
        self._flights = {}

    def while_open(self, position: int, file: ChunkFile, call: Callable[[], None]) -> None:
        """Call `call` unless another thread has closed the file; what it records is undone by `on_close`."""
        with self._lock:
            if self._files.get(position) is file:
                call()

    @property
    def may_close(self) -> bool:
        """Whether maps are closed while others are opened: then `touch` those that are used."""
        return len(self._touched) > self.limit or bool(self._passing)

    def touch(self, positions: Array) -> None:
        if self.may_close:
            self._touched[positions] = self._clock

    def begin_reading(self) -> int:
        """Pin all maps open from now until `end_reading(ticket)`."""
        with self._lock:
            self._clock += 1
            self._readers.add(self._clock)
            return self._clock

    def end_reading(self, ticket: int) -> None:
        with self._lock:
            self._readers.remove(ticket)
            if self._closed:
                oldest = min(self._readers, default=self._clock + 1)
                self._closed = [(when, file) for when, file in self._closed if when >= oldest]

    def close_surplus(self) -> None:
        """Close the maps above the limit, and an eighth of the limit more, so that this runs rarely."""
        with self._lock:
            surplus = len(self._files) - self.limit
            if surplus <= 0:
                return
            positions = np.fromiter(self._files, np.int64, len(self._files))
            oldest = positions[np.argsort(self._touched[positions], kind="stable")]
            self._close(oldest[: max(surplus, surplus - 1 + self.limit // 8)].tolist())

    def opened(self) -> list[tuple[int, ChunkFile]]:
        with self._lock:
            return list(self._files.items())

    def close(self, position: int) -> None:
        """Close one file, so that it is opened again at its next use."""
        with self._lock:
            if position in self._files:
                self._close([position])

    def _close_passing(self, but: int) -> None:
        """Close the least recently used chunks that are in no file, while there are too many bytes of them."""
        taken = sum(self._passing.values())
        for position in sorted(self._passing, key=lambda each: int(self._touched[each])):
            if taken <= self.passing_bytes:
                return
            if position != but:
                taken -= self._passing[position]
                self._close([position])

    def _close(self, positions: Sequence[int]) -> None:
        for position in positions:
            for call in self._on_close:
                call(position)
            self._passing.pop(position, None)
            self._closed.append((self._clock, self._files.pop(position)))
        if not self._readers:
            self._closed.clear()


if hasattr(os, "register_at_fork"):
    os.register_at_fork(after_in_child=PROCESS_BUDGET.forked)
_STEPS = 3
_FEW = 64


class ChunkFinder:
    """`find(rows)[i]` is the chunk whose rows, from `starts[chunk]` to `starts[chunk + 1]`, hold `rows[i]`."""

    def __init__(self, starts: NDArray[np.int64]) -> None:
        self._starts = starts
        self._ends = starts[1:]
        rows, chunks = int(starts[-1]), len(starts) - 1
        self._shift = max(0, (rows // max(1, 4 * chunks)).bit_length())
        edges = np.arange((rows >> self._shift) + 1, dtype=np.int64) << self._shift
        self._table: NDArray[np.int64] = np.searchsorted(starts, edges, side="right") - 1

    def locate(self, rows: NDArray[np.int64]) -> "RowLocations | None":
        """Where rows are; None if there is no such row."""
        if compiled.native is not None:
            numbers = np.ascontiguousarray(rows)
            place = RowLocations(np.empty_like(numbers), np.empty_like(numbers))
            return place if compiled.native.locate_rows(*place, numbers, self._starts) else None
        # As unsigned, a negative number is larger than any row.
        if len(rows) and rows.view(np.uint64).max() >= self._starts[-1]:
            return None
        chunks = self.find(rows)
        return RowLocations(chunks, rows - self._starts[chunks])

    def find(self, rows: NDArray[np.int64]) -> NDArray[np.int64]:
        """The chunk of every row; the row numbers must be valid."""
        if len(rows) <= _FEW:  # one call of numpy costs more than the search
            return self._starts.searchsorted(rows, side="right") - 1
        chunks: NDArray[np.int64] = self._table[rows >> self._shift]
        for _ in range(_STEPS):
            later = rows >= self._ends[chunks]
            if not later.any():
                return chunks
            chunks += later
        return self._starts.searchsorted(rows, side="right") - 1


class RowLocations(NamedTuple):
    """The locations of rows: the position of the chunk in the cache, and the row in the chunk."""

    positions: NDArray[np.int64]
    rows: NDArray[np.int64]

    def part(self, some: slice) -> "RowLocations":
        return RowLocations(self.positions[some], self.rows[some])


def cut_batches(rows: Array | Ragged, size: int) -> Iterator[Array | Ragged]:
    """Rows in batches of `size`, as views."""
    for some in slices(len(rows), size):
        if isinstance(rows, Ragged):
            offsets = rows.offsets[some.start : some.stop + 1]
            yield Ragged(rows.values[int(offsets[0]) : int(offsets[-1])], offsets - offsets[0])
        else:
            yield rows[some]


def reorder(rows: Array | Ragged, order: NDArray[np.int64]) -> Array | Ragged:
    """The same rows in another order."""
    if isinstance(rows, Ragged):
        return Ragged.of([rows[row] for row in order.tolist()], rows.values.dtype, rows.values.shape[1:])
    return rows[order]


def slices(count: int, size: int) -> Iterator[slice]:
    """Slices of `size` up to `count`; at least one, so that no rows give one empty batch."""
    return (slice(start, min(start + size, count)) for start in range(0, max(1, count), size))


def runs(values: NDArray[np.int64]) -> Iterator[tuple[int, slice]]:
    """(value, where it stands) for every run of equal values in a sorted array."""
    edges = [0, *(np.flatnonzero(values[1:] != values[:-1]) + 1).tolist(), len(values)]
    for start, stop in pairwise(edges):
        yield int(values[start]), slice(start, stop)


def by_position(positions: NDArray[np.int64]) -> Iterator[tuple[int, NDArray[np.int64]]]:
    """(value, the indices that have it) for every distinct value."""
    if not len(positions):
        return
    order = np.argsort(positions, kind="stable")
    values, starts = np.unique(positions[order], return_index=True)
    yield from zip(values.tolist(), np.split(order, starts[1:]), strict=True)
