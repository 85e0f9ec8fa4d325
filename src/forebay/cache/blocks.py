"""Decoded blocks kept in memory: least recently used go first, bounded by bytes."""

import threading
from collections import OrderedDict
from collections.abc import Callable, Hashable
from dataclasses import dataclass

from forebay.columns import Array


@dataclass(frozen=True, slots=True)
class BlockStatistics:
    hits: int
    misses: int
    blocks: int
    bytes: int
    limit_bytes: int


class BlockCache:
    """A dictionary of arrays that never holds more than `limit_bytes` of them. Safe to share between threads."""

    def __init__(self, limit_bytes: int) -> None:
        self._limit = limit_bytes
        self._blocks: OrderedDict[Hashable, Array] = OrderedDict()
        self._bytes = self._hits = self._misses = 0
        self._lock = threading.Lock()
        self._under_way: dict[Hashable, threading.Event] = {}  # being decoded by some thread

    def get(self, key: Hashable, decode: Callable[[], Array]) -> Array:
        """The block under a key, decoded if it is not here. A thread that wants what another decodes waits for it."""
        while True:
            with self._lock:
                block = self._blocks.get(key)
                if block is not None:
                    self._blocks.move_to_end(key)
                    self._hits += 1
                    return block
                decoded = self._under_way.get(key)
                if decoded is None:
                    decoded = self._under_way[key] = threading.Event()
                    self._misses += 1
                    break
            decoded.wait()
        try:
            block = decode()
            self._keep(key, block)
        finally:
            del self._under_way[key]
            decoded.set()
        return block

    def statistics(self) -> BlockStatistics:
        with self._lock:
            return BlockStatistics(self._hits, self._misses, len(self._blocks), self._bytes, self._limit)

    def _keep(self, key: Hashable, block: Array) -> None:
        with self._lock:
            if key in self._blocks or block.nbytes > self._limit:
                return
            self._blocks[key] = block
            self._bytes += block.nbytes
            while self._bytes > self._limit:
                _, dropped = self._blocks.popitem(last=False)
                self._bytes -= dropped.nbytes
