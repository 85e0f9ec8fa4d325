"""L2: values in an LMDB that many processes share. A process has one of these per folder, whoever asks for it."""

import os
import threading
from collections import Counter
from collections.abc import Callable, Sequence
from typing import Any
from weakref import WeakValueDictionary

from forebay.errors import TierDamaged, TierNotFound, TierUnusable
from forebay.format.tensors import VARIABLE, same_tag, tag
from forebay.tiers.environment import FIRST_MAP_BYTES, Environment, Kept
from forebay.tiers.tier_files import file_bytes, is_tier, lmdb
from forebay.tiers.tier_value import BadValue, decode_value, peek_value
from forebay.tiers.tier_writer import Item, WhenFull, Writer

MAX_BYTES = 100 * 10**9
LEAST_BYTES = 1 << 15
QUEUE_BYTES = 64 * 10**6
_CHECKED = b"forebay tier"
_ADVICE = {
    "writing": "what it has is still read, the rest is made from the source each time; make room or raise max_bytes",
    "reading": "what it says cannot be read is made from the source; see `forebay tier verify`",
}


class LmdbTier:
    """Reads values, and writes them in the background; see `open_tier`."""

    def __init__(self, path: str, max_bytes: int, queue_bytes: int) -> None:
        self.path, self.place = path, os.path.realpath(path)
        used = file_bytes(path) if is_tier(path) else 0
        self.environment = Environment(path, max(min(max_bytes, max(FIRST_MAP_BYTES, 2 * used)), used))
        self.writer = Writer(self.environment, max_bytes, queue_bytes, kept_open=self)
        self.users = 0
        self._told: set[str] = set()
        self.trouble: Counter[str] = Counter()  # what LMDB said instead of reading, and how often

    def read_each(self, keys: Sequence[bytes], take: Callable[[bytes, bytes], None]) -> None:
        """Pass every key that is there with its value to `take`; what cannot be read is counted.

        LMDB does not survive damage, so nothing is written any more once some is found.
        """
        try:
            damaged = self.environment.read_each(keys, take)
        except lmdb.Error as error:
            self.trouble[str(error)] += 1
        except TierDamaged as error:
            self._stop_writing(error, len(keys))
        else:
            for problem in damaged.values():
                self._stop_writing(TierDamaged(self.path, problem), 1)

    def _stop_writing(self, error: TierDamaged, count: int) -> None:
        self.trouble[str(error)] += count
        self.writer.stop_on_damage(error)

    def require_key(self, key: bytes | None) -> None:
        """Refuse to fill a tier whose rows are tagged without a key: nobody who has its key would take the rows."""
        if key is None and (self.environment.key_check() or any(map(_is_tagged, self.environment.values(b"", 16)))):
            raise TierUnusable(
                self.path,
                f"its rows are tagged with a key, and {VARIABLE} is not set",
                f"set {VARIABLE} to the key of the tier, or choose another folder",
            )
        self.check_key(key)

    def check_key(self, key: bytes | None) -> None:
        """Refuse a FOREBAY_HMAC_KEY that is not that of this tier: it would replace every row that the other reads."""
        if key is None:
            return
        check = tag(key, [_CHECKED])
        if self._known_check(key) is None:
            self.environment.keep_key_check(check)
        if not same_tag(self.environment.key_check() or b"", check):
            raise TierUnusable(
                self.path,
                f"its rows are tagged with another {VARIABLE}",
                f"set {VARIABLE} to that key, choose another folder, or run `forebay tier clear {self.path}`",
            )

    def _known_check(self, key: bytes) -> bytes | None:
        """The check of the tier's key; where it has none, its first values tell whether they are of another key."""
        found = self.environment.key_check()
        if found is None and any(_is_of_another(kept.content, key) for kept in self.environment.values(b"", 16)):
            return b""
        return found

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
        """What was not reported yet: that the tier is damaged, that it takes no more, that LMDB cannot read."""
        off, damage = self.writer.off, self.writer.damage
        found = {
            "damage": damage,
            "writing": "" if damage else off,
            "reading": "" if damage or off else next(iter(self.trouble), ""),
        }
        news = {what: why for what, why in found.items() if why and what not in self._told}
        self._told |= news.keys()
        return [
            why if what == "damage" else f"{what} fails in the tier '{self.path}': {why}; {_ADVICE[what]}"
            for what, why in news.items()
        ]

    def close(self) -> None:
        """Wait until all is written and synced; the last user closes the files."""
        self.writer.flush()
        with _tiers.lock:
            self.users -= 1
            if self.users == 0:
                self.writer.finish()
                _tiers.open.pop(self.place, None)
                self.environment.close()


def _is_tagged(kept: Kept) -> bool:
    try:
        return peek_value(kept.content)[1]
    except BadValue:
        return False


def _is_of_another(value: bytes, key: bytes) -> bool:
    try:
        decode_value(value, key)
    except BadValue as error:
        return error.reason == "tag"
    return False


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
    if max_bytes is not None and max_bytes < LEAST_BYTES:
        raise TierUnusable(path, f"max_bytes is {max_bytes:,}, too little for a row", f"give {LEAST_BYTES:,} or more")
    place = os.path.realpath(path)
    with _tiers.lock:
        tier = _tiers.open.get(place)
        if tier is None:
            most = MAX_BYTES if max_bytes is None else max_bytes
            tier = LmdbTier(path, most, QUEUE_BYTES if queue_bytes is None else queue_bytes)
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


def _before_fork() -> None:
    """None is half open then: nobody in the child would know of it."""
    _tiers.lock.acquire()


def _after_fork_in_parent() -> None:
    _tiers.lock.release()


def _after_fork_in_child() -> None:
    """A child has the tiers of its parent no more; it opens its own."""
    global _tiers
    _tiers = _Tiers()


os.register_at_fork(before=_before_fork, after_in_parent=_after_fork_in_parent, after_in_child=_after_fork_in_child)
