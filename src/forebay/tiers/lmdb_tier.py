"""L2: values in an LMDB that many processes share. A process has one of these per folder, whoever asks for it."""

import os
import threading
from collections import Counter
from collections.abc import Callable, Sequence
from typing import Any
from weakref import WeakValueDictionary

import lmdb

from forebay.errors import TierNotFound, TierUnusable
from forebay.tiers.environment import FIRST_MAP_BYTES, Environment, file_bytes, is_tier
from forebay.tiers.writer import Item, WhenFull, Writer

MAX_BYTES = 100 * 10**9
QUEUE_BYTES = 64 * 10**6
_ADVICE = {
    "writing": "what it has is still read, the rest is made from the source each time; make room or raise max_bytes",
    "reading": "what it says cannot be read is made from the source; see `forebay tier verify`",
}


class LmdbTier:
    """Reads values, and writes them in the background; see `open_tier`."""

    def __init__(self, path: str, max_bytes: int, queue_bytes: int) -> None:
        self.path = path
        used = file_bytes(path) if is_tier(path) else 0
        self.environment = Environment(path, max(min(max_bytes, max(FIRST_MAP_BYTES, 2 * used)), used))
        self.writer = Writer(self.environment, max_bytes, queue_bytes, kept_open=self)
        self.users = 0
        self._told: set[str] = set()
        self.trouble: Counter[str] = Counter()  # what LMDB said instead of reading, and how often

    def read_each(self, keys: Sequence[bytes], take: Callable[[bytes, bytes], None]) -> None:
        """Give `take` every key that is there with its value; where LMDB cannot tell, that is counted."""
        try:
            self.environment.read_each(keys, take)
        except lmdb.Error as error:
            self.trouble[str(error)] += 1

    def put(self, key: bytes, value: bytes, *, replaces: bool, when_full: WhenFull) -> None:
        self.writer.offer(Item(key, value, replaces), when_full)

    def figures(self) -> dict[str, Any]:
        """What the writer did, and what waits for it, as `TierStatistics` has it."""
        values, queued = self.writer.waiting
        return {
            "written": self.writer.written,
            "written_bytes": self.writer.written_bytes,
            "present": self.writer.present,
            "dropped": dict(self.writer.dropped),
            "lmdb_errors": dict(self.trouble),
            "queue_values": values,
            "queue_bytes": queued,
            "writing_off": self.writer.off,
        }

    def news(self) -> list[str]:
        """What was not told yet: that nothing is written any more, or that LMDB cannot read."""
        found = {"writing": self.writer.off, "reading": next(iter(self.trouble), "")}
        news = {what: why for what, why in found.items() if why and what not in self._told}
        self._told |= news.keys()
        return [f"{what} fails in the tier '{self.path}': {why}; {_ADVICE[what]}" for what, why in news.items()]

    def close(self) -> None:
        """Wait until all is written and synced; the last user closes the files."""
        self.writer.flush()
        with _tiers.lock:
            self.users -= 1
            if self.users == 0:
                _tiers.open.pop(os.path.realpath(self.path), None)
                self.environment.close()


class _Tiers:
    """The tiers that this process has open, by folder."""

    def __init__(self) -> None:
        self.lock = threading.Lock()
        self.open: WeakValueDictionary[str, LmdbTier] = WeakValueDictionary()


_tiers = _Tiers()


def open_tier(
    path: str, *, max_bytes: int | None = None, queue_bytes: int | None = None, create: bool = True
) -> LmdbTier:
    """The tier in a folder: the one that this process has open there, else it is opened."""
    if not create and not is_tier(path):
        raise TierNotFound(path)
    place = os.path.realpath(path)
    with _tiers.lock:
        tier = _tiers.open.get(place)
        if tier is None:
            tier = LmdbTier(path, max_bytes or MAX_BYTES, queue_bytes or QUEUE_BYTES)
            _tiers.open[place] = tier
        else:
            _check_same(tier, max_bytes, queue_bytes)
        tier.users += 1
        return tier


def _check_same(tier: LmdbTier, max_bytes: int | None, queue_bytes: int | None) -> None:
    for name, wanted, found in (
        ("max_bytes", max_bytes, tier.writer.max_bytes),
        ("queue_bytes", queue_bytes, tier.writer.queue_bytes),
    ):
        if wanted is not None and wanted != found:
            raise TierUnusable(
                tier.path, f"this process has it open with {name}={found:,}, not {wanted:,}", "choose the same"
            )


def _forget() -> None:
    """A child has the tiers of its parent no more; it opens its own."""
    global _tiers
    _tiers = _Tiers()


os.register_at_fork(after_in_child=_forget)
