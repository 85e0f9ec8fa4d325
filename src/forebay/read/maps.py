"""Map the files of chunks: bounded in number, each checked when it is opened.

Rows are copied from plain addresses, so a map must stay open until every copy that started while it was open has ended:
`reading` counts them, and a closed file is freed after the last one.

Linux allows a process about 65,000 maps. All layers of all open caches share half of them: when a layer is added or is
full, every layer gets a new share and closes the maps above it.
"""

import os
import threading
import time
import weakref
from collections import deque
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager, suppress
from functools import partial
from pathlib import Path
from typing import NamedTuple

import numpy as np
from numpy.typing import NDArray

from forebay.columns import Array
from forebay.format.chunk_file import ChunkFile

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
    """The times in which this thread opened chunks or waited for a store, since `take_opening_spans`."""

    def __init__(self) -> None:
        self.spans: deque[tuple[float, float]] = deque(maxlen=_MAX_SPANS)


_MAX_SPANS = 4096  # of threads whose spans are never taken
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
                    return self._files.get(position) or self._keep(position, self._open(position))
                finally:
                    self._flights.pop(position, None)

    def _keep(self, position: int, opened: ChunkFile) -> ChunkFile:
        with self._lock:
            self._clock += 1
            self._touched[position] = self._clock
            file = self._files.setdefault(position, opened)  # a map that was closed meanwhile may be open again
            is_full = len(self._files) > self.limit
            if self._is_passing is not None and self._is_passing(position):
                self._passing[position] = len(file.view)
                self._close_passing(position)
        if is_full:
            self._budget.share()
        return file

    def while_open(self, position: int, file: ChunkFile, call: Callable[[], None]) -> None:
        """Call `call` unless another thread has closed the file; what it records is undone by `on_close`."""
        with self._lock:
            if self._files.get(position) is file:
                call()

    def touch(self, positions: Array) -> None:
        """Note that maps are used, if any are closed while others are opened."""
        if len(self._touched) > self.limit or self._passing:
            self._touched[positions] = self._clock

    @contextmanager
    def reading(self) -> Iterator[None]:
        """Keep all maps that are open, or are opened inside, until the end."""
        with self._lock:
            self._clock += 1
            ticket = self._clock
            self._readers.add(ticket)
        try:
            yield
        finally:
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


os.register_at_fork(after_in_child=PROCESS_BUDGET.forget)  # caches forget their maps themselves


class RowLocations(NamedTuple):
    """The locations of rows: the position of the chunk in the cache, and the row in the chunk."""

    positions: NDArray[np.int64]
    rows: NDArray[np.int64]

    def at(self, some: slice | NDArray[np.int64]) -> "RowLocations":
        return RowLocations(self.positions[some], self.rows[some])


class TensorTable:
    """The address and the bytes of one tensor in every chunk; 0 where the chunk is not mapped."""

    def __init__(self, maps: Maps, count: int, tensor: Callable[[ChunkFile], Array]) -> None:
        self._maps, self._tensor = maps, tensor
        self.bases = np.zeros(count, np.int64)
        self.sizes = np.zeros(count, np.int64)
        maps.on_close(partial(_forget, self.bases))  # keeps the array alive, not this object

    def mapped(self, positions: NDArray[np.int64]) -> NDArray[np.int64]:
        """The addresses in some chunks, mapped if necessary; valid inside `maps.reading()`."""
        addresses = self.bases[positions]
        if not addresses.all():
            unmapped = np.flatnonzero(addresses == 0)
            for position, chosen in by_position(positions[unmapped]):
                addresses[unmapped[chosen]] = self._map(position)
        self._maps.touch(positions)
        return addresses

    def _map(self, position: int) -> int:
        file = self._maps.get(position)
        items = self._tensor(file)
        address = int(items.__array_interface__["data"][0])
        self.sizes[position] = items.nbytes
        self._maps.while_open(position, file, partial(self.bases.__setitem__, position, address))
        return address


def _forget(bases: NDArray[np.int64], position: int) -> None:
    bases[position] = 0


def by_position(positions: NDArray[np.int64]) -> Iterator[tuple[int, NDArray[np.int64]]]:
    """(value, the indices that have it) for every distinct value."""
    if not len(positions):
        return
    order = np.argsort(positions, kind="stable")
    values, starts = np.unique(positions[order], return_index=True)
    yield from zip(values.tolist(), np.split(order, starts[1:]), strict=True)
