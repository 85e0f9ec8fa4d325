"""How reading through the row cache went."""

import threading
import warnings
from collections import Counter

import msgspec


class RowCacheWarning(UserWarning):
    """A problem of the row cache that changes no row but costs time."""


class RowCacheStatistics(msgspec.Struct, frozen=True, kw_only=True):
    """Counts of one process since it began to read."""

    l1_hits: int
    l2_hits: int
    misses: int  # made from the source
    l1_rows: int
    l1_bytes: int
    l1_evicted: int
    l2_read_bytes: int
    l2_written: int
    l2_written_bytes: int
    stale: int  # L2 rows of samples that have changed; each is also a miss
    bad: dict[str, int]  # L2 rows that were not served, by reason; each is also a miss
    failures: dict[str, int]  # samples without a row, by reason
    l2_off: str  # why L2 is no longer read or written; empty while it works

    @property
    def hit_rate(self) -> float:
        hits = self.l1_hits + self.l2_hits
        return hits / (hits + self.misses) if hits + self.misses else 0.0

    def __repr__(self) -> str:
        return (
            f"RowCacheStatistics({self.l1_hits:,} L1 hits, {self.l2_hits:,} L2 hits, {self.misses:,} misses; "
            f"L1 {self.l1_rows:,} rows, {self.l1_bytes:,} bytes)"
        )


class LookupCounts:
    """Counters that the threads of one process share; warns once per problem."""

    def __init__(self) -> None:
        self.numbers: Counter[str] = Counter()
        self.bad: Counter[str] = Counter()
        self.failures: Counter[str] = Counter()
        self._warned: set[str] = set()
        self._lock = threading.Lock()

    def add(self, **numbers: int) -> None:
        with self._lock:
            self.numbers.update(numbers)

    def add_bad(self, reason: str, message: str) -> None:
        with self._lock:
            self.bad[reason] += 1
        self.warn_once(reason, f"{message}; it is made again and replaced (`statistics().bad` counts such rows)")

    def add_failure(self, reason: str) -> None:
        with self._lock:
            self.failures[reason] += 1

    def warn_once(self, problem: str, message: str) -> None:
        with self._lock:
            if problem in self._warned:
                return
            self._warned.add(problem)
        warnings.warn(message, RowCacheWarning, stacklevel=5)
