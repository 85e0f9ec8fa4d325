"""The one thread of a process that writes to a tier: a queue bounded by bytes, many values in a transaction.

    read ── offer ──▶ queue ──▶ batch ──▶ one transaction ──▶ commit          (up to 16 MB, or what a quarter of a
             │ full: wait, or a counted drop                                   second brings)
             └ writing is off: a counted drop

The thread begins with the first value and ends, all synced, when no more come. It is not a daemon: a process that ends
waits for it. What was committed survives a kill; what was not is not part of the tier.
"""

import shutil
import threading
from collections import Counter, deque
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Literal

from forebay.errors import TierDamaged
from forebay.tiers.environment import Environment
from forebay.tiers.tier_files import lmdb

WhenFull = Literal["wait", "drop"]
BATCH_BYTES = 16_000_000
BATCH_SECONDS = 0.25


@dataclass(frozen=True, slots=True)
class Item:
    """A value to be written; one that `replaces` what is there takes the place of a bad one."""

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
                self._environment.let_go_of_dead_readers()  # they may have held pages that nobody reads any more
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
