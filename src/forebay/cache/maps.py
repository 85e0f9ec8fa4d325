"""Mapped chunks of one layer, bounded in number, each checked when it is mapped.

A gather works on plain addresses, so a map must outlive every gather that began while it was open: what is closed
meanwhile is kept until the last of those has ended.
"""

import threading
from collections.abc import Callable

import numpy as np

from forebay.columns import Array
from forebay.format.chunk_file import ChunkFile

MAX_MAPS = 8192  # per layer; an eighth of the maps that Linux grants a process by default


class Maps:
    """Open chunk files by position; the least recently touched are closed when there are too many."""

    def __init__(self, count: int, open_chunk: Callable[[int], ChunkFile], limit: int = MAX_MAPS) -> None:
        self.limit = limit
        self._open = open_chunk
        self._files: dict[int, ChunkFile] = {}
        self._touched = np.zeros(count, np.int64)
        self._clock = 0
        self._lock = threading.Lock()
        self._readers: set[int] = set()  # tickets: the clock when each began
        self._closed: list[tuple[int, ChunkFile]] = []  # clock when it was closed
        self._on_close: list[Callable[[int], None]] = []

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
            self._close_oldest()
        return kept

    def while_open(self, position: int, file: ChunkFile, call: Callable[[], None]) -> None:
        """Note something that `on_close` takes back, unless another thread has closed the file meanwhile."""
        with self._lock:
            if self._files.get(position) is file:
                call()

    def touch(self, positions: Array) -> None:
        if len(self._touched) > self.limit:
            self._touched[positions] = self._clock

    def begin_reading(self) -> int:
        """A ticket; until it is given back, no map that was open since goes away."""
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

    def _close_oldest(self) -> None:
        """Called under the lock. Closes an eighth at a time, so that looking for them is rare."""
        if len(self._files) <= self.limit:
            return
        positions = np.fromiter(self._files, np.int64, len(self._files))
        oldest = positions[np.argsort(self._touched[positions], kind="stable")]
        for position in oldest[: max(1, self.limit // 8)].tolist():
            for call in self._on_close:
                call(position)
            self._closed.append((self._clock, self._files.pop(position)))
        if not self._readers:
            self._closed.clear()
