"""One LMDB environment of this process: its transactions, and what must not meet one.

LMDB forbids to open the same files twice in a process, to use them across a fork, and to resize the map while a
transaction is open; `Environment` sees to all three. A transaction lasts as long as some copying takes: none is left
open to hold old pages or a place in the table of readers.
"""

import os
import threading
import weakref
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from functools import partial
from typing import Any, NamedTuple

from forebay.errors import TierDamaged, TierUnusable
from forebay.format.layout import FORMAT_VERSION
from forebay.recipe import canonical_json
from forebay.tiers.lmdb_pages import LmdbSnapshot, Outdated, PageDamaged
from forebay.tiers.tier_files import (
    EMPTY_IT,
    KEY_BYTES,
    KEY_CHECK,
    MARK_KEY,
    Handle,
    file_bytes,
    lmdb,
    make_folder,
    not_ours,
    refuse_network,
    unusable,
)


class Gate:
    def __init__(self) -> None:
        self._changed = threading.Condition()
        self._inside = 0
        self._shut = False

    def enter(self) -> None:
        with self._changed:
            while self._shut:
                self._changed.wait()
            self._inside += 1

    def leave(self) -> None:
        with self._changed:
            self._inside -= 1
            if not self._inside:
                self._changed.notify_all()

    def shut(self) -> None:
        """Let nobody in, and wait until nobody is inside."""
        with self._changed:
            while self._shut:
                self._changed.wait()
            self._shut = True
            while self._inside:
                self._changed.wait()

    def open(self) -> None:
        with self._changed:
            self._shut = False
            self._changed.notify_all()

    @contextmanager
    def alone(self) -> Iterator[None]:
        self.shut()
        try:
            yield
        finally:
            self.open()


FIRST_MAP_BYTES = 64 << 20
_BEGINNINGS = 8
_COPIED_BYTES = 16 << 20  # of values in one go, and one more


class Kept(NamedTuple):
    """A value: its key, its size, its content or the first bytes of it; or why it cannot be read."""

    key: bytes
    size: int
    content: bytes
    problem: str = ""


class Environment:
    """The LMDB environment in one folder; a process has no other on the same folder (`open_tier` sees to that)."""

    def __init__(self, path: str, map_bytes: int = FIRST_MAP_BYTES) -> None:
        self.path = path
        self.dead_readers = 0  # that were found when it was opened
        self._gate = Gate()
        self._checked = False
        self._checking = threading.Lock()
        make_folder(path)
        refuse_network(path)
        try:
            self._handle = Handle(path, map_bytes)
        except (lmdb.Error, OSError) as error:
            raise unusable(path, error) from error
        self.close = weakref.finalize(self, self._handle.close)
        _environments.add(self)
        try:
            self._check()
        except (lmdb.Error, OSError) as error:
            self.close()
            raise unusable(path, error) from error
        except BaseException:
            self.close()
            raise

    @property
    def map_bytes(self) -> int:
        """How large the tier may become before this process needs a larger map."""
        return int(self._asked(lmdb.Environment.info)["map_size"])

    @property
    def used_bytes(self) -> int:
        """The pages of the tier that are in use, or were once."""
        pages = int(self._asked(lmdb.Environment.info)["last_pgno"]) + 1
        return pages * int(self._asked(lmdb.Environment.stat)["psize"])

    def read_each(self, keys: Sequence[bytes], take: Callable[[bytes, bytes], None]) -> dict[bytes, str]:
        """Pass every key that is there and a copy of its value to `take`; return the keys whose pages are damaged."""
        damaged: dict[bytes, str] = {}
        with self.snapshot() as snapshot:
            for key in keys:
                try:
                    value = snapshot.get(key)
                except PageDamaged as error:
                    damaged[key] = str(error)
                    continue
                if value is not None:
                    take(key, value)
        return damaged

    @contextmanager
    def snapshot(self) -> Iterator[LmdbSnapshot]:
        """The pages as the newest transaction left them; LMDB reuses none of them until the end of the block.

        `TierDamaged` where a page that the block reads is damaged.
        """
        with self._naming_damage():
            for _ in range(_BEGINNINGS):
                with self._transaction(write=False) as transaction:
                    try:
                        found = LmdbSnapshot(self._handle.data, self._handle.page_size, transaction.id())
                    except Outdated as error:
                        outdated = error
                        continue
                    yield found
                    return
            raise outdated

    def check(self) -> None:
        """`TierDamaged` unless LMDB can read and write every page but those of large values."""
        with self.snapshot() as snapshot:
            snapshot.check()

    @contextmanager
    def writing(self, keys: Sequence[bytes]) -> Iterator[Any]:
        """A transaction that puts or deletes some keys, committed at the end unless something was raised.

        On damaged pages LMDB ends the process. So all are checked before the first transaction, and in each one the
        pages that it is about to touch: `TierDamaged` where damage came later.
        """
        self._check_once()
        with self._transaction(write=True) as transaction:
            with self._naming_damage():
                before = LmdbSnapshot(self._handle.data, self._handle.page_size, transaction.id() - 1)
                before.check_writable(keys)
            yield transaction

    @contextmanager
    def _naming_damage(self) -> Iterator[None]:
        try:
            yield
        except PageDamaged as error:
            raise TierDamaged(self.path, str(error)) from error

    @contextmanager
    def _transaction(self, *, write: bool) -> Iterator[Any]:
        begun = self._begin(write)
        try:
            with begun:
                yield begun
        finally:
            self._gate.leave()

    def values(self, after: bytes, most: int, head_bytes: int | None = None) -> list[Kept]:
        """Some values in the order of their keys, not too many bytes at once."""
        found: list[Kept] = []
        room = _COPIED_BYTES
        with self.snapshot() as snapshot:
            for entry in snapshot.entries(after + b"\0"):
                if len(entry.key) != KEY_BYTES:
                    continue
                try:
                    found.append(Kept(entry.key, entry.size, snapshot.content(entry, head_bytes)))
                except PageDamaged as error:
                    found.append(Kept(entry.key, entry.size, b"", str(error)))
                room -= len(found[-1].content)
                if len(found) == most or room <= 0:
                    break
        return found

    def figures(self) -> dict[str, int]:
        """Values, and bytes in the file: all, in use, and how far the map goes."""
        stat = self._asked(lmdb.Environment.stat)
        pages = stat["branch_pages"] + stat["leaf_pages"] + stat["overflow_pages"]
        with self.snapshot() as snapshot:
            marks = sum(snapshot.get(key) is not None for key in (MARK_KEY, KEY_CHECK))
        return {
            "values": max(0, int(stat["entries"]) - marks),
            "file_bytes": file_bytes(self.path),
            "free_bytes": max(0, self.used_bytes - int(pages) * int(stat["psize"])),
            "map_bytes": self.map_bytes,
        }

    def empty(self) -> None:
        """Remove all values; the file keeps its size, and the room in it is used again."""
        with self.snapshot() as snapshot:
            try:
                for entry in snapshot.entries():
                    snapshot.content(entry, 0)
            except PageDamaged as error:
                raise TierUnusable(
                    self.path,
                    f"it is damaged ({error}) and in use",
                    "end the processes that use it, then clear it again",
                ) from error
        with self.writing([]) as transaction:
            transaction.drop(self._handle.lmdb.open_db(txn=transaction), delete=False)  # and the check of a key
            transaction.put(MARK_KEY, _mark())

    def remove(self, keys: Sequence[bytes]) -> int:
        """Remove some values, whose pages were read before; how many were there. The room is used again."""
        with self.writing(keys) as transaction:
            return sum(transaction.delete(key) for key in keys)

    def key_check(self) -> bytes | None:
        """What `keep_key_check` kept."""
        with self.snapshot() as snapshot:
            return snapshot.get(KEY_CHECK)

    def keep_key_check(self, check: bytes) -> None:
        """Keep what tells the key of this tier from others, unless there is one already."""
        with self.writing([KEY_CHECK]) as transaction:
            transaction.put(KEY_CHECK, check, overwrite=False)

    def grow(self, most_bytes: int) -> bool:
        """Double the map, or as near to that as `most_bytes` allows; False where it is that large already."""
        with self._gate.alone():
            self._handle.check_length()
            now = int(self._handle.lmdb.info()["map_size"])
            wanted = min(most_bytes, 2 * now)
            if wanted <= now:
                return False
            self._handle.lmdb.set_mapsize(wanted)
            return True

    def sync(self) -> None:
        self._asked(partial(lmdb.Environment.sync, force=True))

    def let_go_of_dead_readers(self) -> int:
        """How many places in the table of readers belonged to processes that are gone."""
        return int(self._asked(lmdb.Environment.reader_check))

    def release(self) -> None:
        """Before a fork: wait until no transaction is open, let none begin, and have nothing of LMDB's open."""
        self._gate.shut()
        self._handle.release()

    def resume(self) -> None:
        """After a fork, in the parent."""
        self._handle.resume()
        self._gate.open()

    def forget(self) -> None:
        """After a fork, in the child: this is closed. A thread that is not here may have had the gate in its hands."""
        self.close.detach()
        self._handle.forget()
        self._gate = Gate()
        self._checking = threading.Lock()

    def _asked(self, ask: Callable[[Any], Any]) -> Any:
        """Ask LMDB about its file: it looks at the map, which must not be resized meanwhile."""
        self._gate.enter()
        try:
            self._handle.check_length()
            return ask(self._handle.lmdb)
        finally:
            self._gate.leave()

    def _check_once(self) -> None:
        with self._checking:
            if not self._checked:
                self.check()
                self._checked = True

    def _begin(self, write: bool) -> Any:
        """A transaction inside the gate."""
        for _ in range(_BEGINNINGS):
            self._gate.enter()
            try:
                self._handle.check_length()
                return self._handle.lmdb.begin(write=write)
            except lmdb.MapResizedError:  # another process has a larger map, and pages beyond ours
                self._gate.leave()
                with self._gate.alone():
                    self._handle.lmdb.set_mapsize(0)
            except lmdb.ReadersFullError:
                self._gate.leave()
                if not self.let_go_of_dead_readers():
                    raise
            except BaseException:
                self._gate.leave()
                raise
        raise lmdb.MapResizedError("the map is resized again and again")

    def _check(self) -> None:
        """Whether the file is one that forebay made, and whole. A new one is labelled as such."""
        self.dead_readers = self.let_go_of_dead_readers()
        used, size = self.used_bytes, file_bytes(self.path)  # in this order: another process may be adding pages
        if size < used:
            raise TierDamaged(self.path, f"its file has {size:,} bytes of {used:,}")
        if self._is_marked():
            return
        with self.writing([MARK_KEY]) as transaction:
            if transaction.put(MARK_KEY, _mark(), overwrite=False):
                return
        self._is_marked()  # another process was first

    def _is_marked(self) -> bool:
        """Whether the tier is ours, or empty; `TierUnusable` where it is somebody else's."""
        with self.snapshot() as snapshot:
            if not snapshot.meta.main.entries:
                return False
            mark = snapshot.get(MARK_KEY)
            if mark is None:
                snapshot.check()  # it may be ours, and damaged
                raise not_ours(self.path)
            if mark != _mark():
                raise TierUnusable(self.path, f"another version of forebay made it ({mark[:80]!r})", EMPTY_IT)
            return True


def _mark() -> bytes:
    return canonical_json({"format_version": FORMAT_VERSION, "type": "tier"})


_environments: "weakref.WeakSet[Environment]" = weakref.WeakSet()
_held: list[Environment] = []
_forking = threading.Lock()  # two threads that fork at once take turns


def _before_fork() -> None:
    _forking.acquire()
    _held.extend(environment for environment in _environments if environment.close.alive)
    for environment in _held:
        environment.release()


def _after_fork_in_parent() -> None:
    while _held:
        _held.pop().resume()
    _forking.release()


def _after_fork_in_child() -> None:
    while _held:
        _held.pop().forget()
    _forking.release()


os.register_at_fork(before=_before_fork, after_in_parent=_after_fork_in_parent, after_in_child=_after_fork_in_child)
