"""L1: rows in memory, bounded by bytes, least recently used dropped first."""

import threading
from collections import OrderedDict
from typing import Generic, TypeVar

V = TypeVar("V")


class MemoryRows(Generic[V]):
    """Values by key. A value larger than `max_bytes` is not cached."""

    def __init__(self, max_bytes: int) -> None:
        self.max_bytes = max_bytes
        self.bytes = 0
        self.evicted = 0
        self._values: OrderedDict[bytes, tuple[V, int]] = OrderedDict()
        self._lock = threading.Lock()

    def __len__(self) -> int:
        return len(self._values)

    def get(self, key: bytes) -> V | None:
        with self._lock:
            if key not in self._values:
                return None
            self._values.move_to_end(key)
            return self._values[key][0]

    def put(self, key: bytes, value: V, size_bytes: int) -> None:
        if size_bytes > self.max_bytes:
            return
        with self._lock:
            self._drop(key)
            while self.bytes + size_bytes > self.max_bytes:
                self._drop(next(iter(self._values)))
                self.evicted += 1
            self._values[key] = (value, size_bytes)
            self.bytes += size_bytes

    def _drop(self, key: bytes) -> None:
        _, size_bytes = self._values.pop(key, (None, 0))
        self.bytes -= size_bytes
