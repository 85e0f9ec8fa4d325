"""Mapped chunks of a layer, bounded in number, each checked when it is opened.

A gather reads plain addresses, so a map must stay open until every gather that started while it was open has ended:
`begin_reading` and `end_reading` count them, and a closed file is freed after the last one.

Linux allows a process about 65,000 maps. All layers of all open caches share half of them: when a layer is added or is
full, every layer gets a new share and closes the maps above it.
"""

import os
import threading
import weakref
from collections.abc import Callable
from contextlib import suppress
from pathlib import Path

import numpy as np

from forebay.columns import Array
from forebay.format.chunk_decode import ChunkFile

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


class Maps:
    """Open chunk files by position; the least recently used are closed when there are more than `limit`.

    `limit` is the requested number of maps, or the layer's share of the budget if that is less.
    """

    def __init__(
        self,
        count: int,
        open_chunk: Callable[[int], ChunkFile],
        limit: int = MAX_MAPS,
        budget: MapBudget | None = None,
    ) -> None:
        self.limit = limit
        self.wanted = min(limit, max(1, count))
        self._budget = PROCESS_BUDGET if budget is None else budget
        self._open = open_chunk
        self._files: dict[int, ChunkFile] = {}
        self._touched = np.zeros(count, np.int64)
        self._clock = 0
        self._lock = threading.Lock()
        self._readers: set[int] = set()  # tickets: the clock when each began
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
        opened = self._open(position)
        with self._lock:
            self._clock += 1
            self._touched[position] = self._clock
            kept = self._files.setdefault(position, opened)
            is_full = len(self._files) > self.limit
        if is_full:
            self._budget.share()
        return kept

    def while_open(self, position: int, file: ChunkFile, call: Callable[[], None]) -> None:
        """Call `call` unless another thread has closed the file; what it records is undone by `on_close`."""
        with self._lock:
            if self._files.get(position) is file:
                call()

    def touch(self, positions: Array) -> None:
        if len(self._touched) > self.limit:
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
            for position in oldest[: max(surplus, surplus - 1 + self.limit // 8)].tolist():
                for call in self._on_close:
                    call(position)
                self._closed.append((self._clock, self._files.pop(position)))
            if not self._readers:
                self._closed.clear()


if hasattr(os, "register_at_fork"):
    os.register_at_fork(after_in_child=PROCESS_BUDGET.forget)
