"""Decoded blocks kept in memory: least recently used go first, bounded by bytes."""

import threading
from collections import OrderedDict
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from functools import partial
from typing import Generic, Protocol, TypeVar


@dataclass(frozen=True, slots=True)
class BlockStatistics:
    hits: int
    misses: int
    blocks: int
    bytes: int
    limit_bytes: int


class Block(Protocol):
    @property
    def nbytes(self) -> int: ...


Kept = TypeVar("Kept", bound=Block)
Key = tuple[str, int]  # column, number of the block


class BlockCache(Generic[Kept]):
    """A dictionary of blocks that never holds more than `limit_bytes` of them. Safe to share between threads."""

    def __init__(self, limit_bytes: int) -> None:
        self.limit = limit_bytes
        self._blocks: OrderedDict[Key, Kept] = OrderedDict()
        self._bytes = self._hits = self._misses = 0
        self._lock = threading.Lock()
        self._under_way: dict[Key, threading.Event] = {}  # being decoded by some thread

    def get_all(self, keys: Sequence[Key], decode: Callable[[Key], Kept]) -> list[Kept]:
        """The blocks under some keys; those that are here are found in one go."""
        with self._lock:
            found = [self._blocks.get(key) for key in keys]
            for key, block in zip(keys, found, strict=True):
                if block is not None:
                    self._blocks.move_to_end(key)
                    self._hits += 1
        pairs = zip(keys, found, strict=True)
        return [self.get(key, partial(decode, key)) if block is None else block for key, block in pairs]

    def get(self, key: Key, decode: Callable[[], Kept]) -> Kept:
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
            return BlockStatistics(self._hits, self._misses, len(self._blocks), self._bytes, self.limit)

    def _keep(self, key: Key, block: Kept) -> None:
        with self._lock:
            if key in self._blocks or block.nbytes > self.limit:
                return
            self._blocks[key] = block
            self._bytes += block.nbytes
            while self._bytes > self.limit:
                _, dropped = self._blocks.popitem(last=False)
                self._bytes -= dropped.nbytes
