"""L1: what was read last, kept in memory up to a number of bytes."""

import threading
from collections import OrderedDict
from typing import Generic, TypeVar

V = TypeVar("V")


class MemoryTier(Generic[V]):
    """Values by key; when they would take more than `max_bytes`, those not used for longest are let go.

    A value that is larger than the whole tier is not kept.
    """

    def __init__(self, max_bytes: int) -> None:
        self.max_bytes = max_bytes
        self.bytes = 0
        self.evicted = 0
        self._kept: OrderedDict[bytes, tuple[V, int]] = OrderedDict()
        self._lock = threading.Lock()

    def __len__(self) -> int:
        return len(self._kept)

    def get(self, key: bytes) -> V | None:
        with self._lock:
            found = self._kept.get(key)
            if found is None:
                return None
            self._kept.move_to_end(key)
            return found[0]

    def put(self, key: bytes, value: V, size_bytes: int) -> None:
        if size_bytes > self.max_bytes:
            return
        with self._lock:
            self._forget(key)
            while self.bytes + size_bytes > self.max_bytes:
                self._forget(next(iter(self._kept)))
                self.evicted += 1
            self._kept[key] = (value, size_bytes)
            self.bytes += size_bytes

    def _forget(self, key: bytes) -> None:
        _, size_bytes = self._kept.pop(key, (None, 0))
        self.bytes -= size_bytes
