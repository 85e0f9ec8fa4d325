"""L2: values in an LMDB that many processes share. A process has one of these per folder, whoever asks for it.

The one thread of a process that writes to a tier: a queue bounded by bytes, many values in a transaction.

    read ── offer ──▶ queue ──▶ batch ──▶ one transaction ──▶ commit          (up to 16 MB, or what a quarter of a
             │ full: wait, or a counted drop                                   second brings)
             └ writing is off: a counted drop

The thread begins with the first value and ends, all synced, when no more come. It is not a daemon: a process that ends
waits for it. What was committed survives a kill; what was not is not part of the tier.
"""

import os
import shutil
import threading
from collections import Counter, deque
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any, Literal
from weakref import WeakValueDictionary

from forebay.errors import TierDamaged, TierNotFound, TierUnusable
from forebay.format.tensors import VARIABLE, same_tag, tag
from forebay.tiers.environment import FIRST_MAP_BYTES, Environment, Kept, file_bytes, is_tier, lmdb
from forebay.tiers.tier_value import BadValue, decode_value, peek_value

WhenFull = Literal["wait", "drop"]
BATCH_BYTES = 16_000_000
BATCH_SECONDS = 0.25


@dataclass(frozen=True, slots=True)
class Item:
    """A value to be written; one that `replaces` takes the place of a bad one."""

    key: bytes
    value: bytes
    replaces: bool = False


class Writer:
    """Writes what it is offered, in the background; `flush` waits for it."""

    def __init__(self, environment: Environment, max_bytes: int, queue_bytes: int, kept_open: object) -> None:
        self.max_bytes = max_bytes
        self.queue_bytes = queue_bytes
        self.off = ""  # why nothing is written any more
        self.damage = ""  # what is damaged, whether found here or in reading
        self.written = self.written_bytes = self.present = 0
        self.dropped: Counter[str] = Counter()
        self._environment = environment
        self._kept_open = kept_open  # while the thread runs: the same files could not be opened a second time
        self._queue: deque[Item] = deque()
        self._waiting_bytes = 0  # in the queue, or in the batch that is being written
        self._offered = self._finished = self._settled = 0  # values: taken, then written or dropped, then synced
        self._thread: threading.Thread | None = None
        self._hurried = 0
        self._changed = threading.Condition()

    @property
    def waiting(self) -> tuple[int, int]:
        """Values and bytes that are not written yet; of the batch that is being written, the bytes only."""
        return len(self._queue), self._waiting_bytes

    def offer(self, item: Item, when_full: WhenFull) -> None:
        """Take a value to be written; where there is no room in the queue, wait for some or drop it."""
        size = len(item.value)
        with self._changed:
            while not self.off and self._waiting_bytes and self._waiting_bytes + size > self.queue_bytes:
                if when_full == "drop":
                    self.dropped["queue full"] += 1
                    return
                self._changed.wait()
            if self.off:
                self.dropped[self.off] += 1
                return
            self._queue.append(item)
            self._offered += 1
            self._waiting_bytes += size
            self._changed.notify_all()
            if self._thread is None:
                thread = threading.Thread(target=self._work, name="forebay-tier-writer")
                thread.start()
                self._thread = thread

    def flush(self) -> None:
        """Wait until all that was offered so far is written and synced, or dropped, whatever is offered meanwhile."""
        offered = self._offered
        self._wait_for(lambda: self._settled >= offered)

    def finish(self) -> None:
        """Wait until there is nothing more to write."""
        self._wait_for(lambda: False)

    def _wait_for(self, reached: Callable[[], bool]) -> None:
        """Hurry the thread until something is reached, or it ends, which it does when all is synced."""
        with self._changed:
            self._hurried += 1
            self._changed.notify_all()
            try:
                self._changed.wait_for(lambda: self._thread is None or reached())
            finally:
                self._hurried -= 1

    def _work(self) -> None:
        try:
            while not self._ended():
                while batch := self._take():
                    self._write(batch)
                    self._finish(batch)
                    if self._hurried:
                        self._sync()
                self._sync()
        except BaseException as error:
            self._give_up(f"{type(error).__name__}: {error}")
            raise

    def _take(self) -> list[Item]:
        """The next batch, once it is worth a transaction; nothing where none came for a while."""
        enough = min(BATCH_BYTES, self.queue_bytes // 2)
        with self._changed:
            self._changed.wait_for(lambda: self._waiting_bytes >= enough or self._hurried, BATCH_SECONDS)
            batch: list[Item] = []
            size = 0
            while self._queue and size < BATCH_BYTES:
                batch.append(self._queue.popleft())
                size += len(batch[-1].value)
            return batch

    def _finish(self, batch: Sequence[Item]) -> None:
        with self._changed:
            self._waiting_bytes -= sum(len(item.value) for item in batch)
            self._finished += len(batch)
            self._changed.notify_all()

    def _ended(self) -> bool:
        """Whether nothing came since all was synced: then this thread is done, and the next value begins another."""
        with self._changed:
            if self._queue or self._thread is None:
                return False
            self._thread = None
            self._changed.notify_all()
            return True

    def _write(self, batch: Sequence[Item]) -> None:
        if self.off:
            self.dropped[self.off] += len(batch)
            return
        try:
            self._commit_growing(batch)
        except TierDamaged as error:
            self.stop_on_damage(error, batch)
        except (lmdb.Error, OSError):
            self._commit_what_fits(batch)

    def _commit_growing(self, batch: Sequence[Item]) -> None:
        while True:
            try:
                return self._commit(batch)
            except lmdb.MapFullError:
                self._environment.clear_dead_readers()  # they may have held pages that nobody reads any more
                if not self._environment.grow(self.max_bytes):
                    raise

    def _commit_what_fits(self, batch: Sequence[Item]) -> None:
        """The last values before there is no more room."""
        for position, item in enumerate(batch):
            try:
                self._commit([item])
            except TierDamaged as error:
                self.stop_on_damage(error, batch[position:])
                return
            except (lmdb.Error, OSError) as error:
                self.turn_off(self._why(error, item), batch[position:])
                return

    def _why(self, error: Exception, item: Item) -> str:
        """Why a value could not be written; LMDB calls a disk that fills up in the middle of it a faulty one."""
        if isinstance(error, lmdb.MapFullError):
            return f"the tier has reached {self.max_bytes:,} bytes"
        free = shutil.disk_usage(self._environment.path).free
        return f"the disk is full ({free:,} bytes free)" if free < 2 * len(item.value) else f"writing failed ({error})"

    def _commit(self, batch: Sequence[Item]) -> None:
        if not self._has_room(batch):
            raise lmdb.MapFullError("another process has a larger map")
        written = [False] * len(batch)
        with self._environment.writing([item.key for item in batch]) as transaction:
            seen: set[bytes] = set()
            for position, item in enumerate(batch):
                if item.key in seen:
                    continue  # LMDB would write a second value in place, onto as many pages as the first one has
                seen.add(item.key)
                # What another process wrote meanwhile under the same key has the same pixels; readers check the rest.
                written[position] = transaction.put(item.key, item.value, overwrite=item.replaces)
        self.written += sum(written)
        self.present += len(batch) - sum(written)
        self.written_bytes += sum(len(item.value) for item, new in zip(batch, written, strict=True) if new)

    def _has_room(self, batch: Sequence[Item]) -> bool:
        """A map of `max_bytes` at most tells by itself; one that another process made larger does not."""
        if self._environment.map_bytes <= self.max_bytes:
            return True
        return self._environment.used_bytes + sum(len(item.value) for item in batch) <= self.max_bytes

    def _sync(self) -> None:
        finished = self._finished
        try:
            self._environment.sync()
        except TierDamaged as error:
            self.stop_on_damage(error)
        except (lmdb.Error, OSError) as error:
            self.turn_off(f"syncing failed ({error})")
        with self._changed:
            self._settled = finished
            self._changed.notify_all()

    def stop_on_damage(self, error: TierDamaged, lost: Sequence[Item] = ()) -> None:
        """Write nothing any more, as LMDB does not survive damage."""
        self.damage = self.damage or str(error)
        self.turn_off(str(error), lost)

    def turn_off(self, why: str, lost: Sequence[Item] = ()) -> None:
        """Write nothing any more."""
        with self._changed:
            self.off = self.off or why
            if lost:
                self.dropped[self.off] += len(lost)
            self._changed.notify_all()

    def _give_up(self, why: str) -> None:
        """Something went wrong that should not: nobody may wait for this thread any more."""
        with self._changed:
            self.off = self.off or why
            self.dropped[self.off] += len(self._queue)
            self._queue.clear()
            self._waiting_bytes = 0
            self._thread = None
            self._changed.notify_all()


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
    """Drop the tiers of the parent; a child opens its own."""
    global _tiers
    _tiers = _Tiers()


os.register_at_fork(before=_before_fork, after_in_parent=_after_fork_in_parent, after_in_child=_after_fork_in_child)
