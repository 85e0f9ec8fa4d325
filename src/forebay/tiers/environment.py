"""One LMDB environment of this process: the transactions of a tier, and all that must not meet one.

    PATH/data.mdb   the values
    PATH/lock.mdb   LMDB's own locks and its table of readers
    PATH/users      locked (shared) by every process that has the tier open, and alone by one that removes its files

LMDB forbids to open the same files twice in a process, to use them across a fork, and to resize the map while a
transaction is open; `Environment` sees to all three. A transaction lasts as long as some copying takes: none is left
open to hold old pages or a place in the table of readers.
"""

import fcntl
import os
import threading
import weakref
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from typing import Any

from forebay.errors import LibraryMissing, TierUnusable
from forebay.format.layout import FORMAT_VERSION
from forebay.recipe import canonical_json
from forebay.tiers.file_systems import refuse_network
from forebay.tiers.gate import Gate

try:
    import lmdb
except ModuleNotFoundError as missing:
    raise LibraryMissing("lmdb", "a tier on disk", "images") from missing

FIRST_MAP_BYTES = 64 << 20
MARK_KEY = b"forebay"  # shorter than any key of a value

_DATA, _LOCK, _USERS = "data.mdb", "lock.mdb", "users"
_LOCK_BYTES = 64 << 10  # a thousand readers
_BEGINNINGS = 8
_CLEAR = "choose another folder, or empty this one"


class Environment:
    """The LMDB environment in one folder; a process has no other on the same folder (`open_tier` sees to that)."""

    def __init__(self, path: str, map_bytes: int = FIRST_MAP_BYTES) -> None:
        self.path = path
        self.dead_readers = 0  # that were found when it was opened
        self._gate = Gate()
        os.makedirs(path, exist_ok=True)
        refuse_network(path)
        users = _lock_shared(path)
        try:
            self._lmdb = _open_lmdb(path, map_bytes)
        except BaseException:
            os.close(users)
            raise
        self.close = weakref.finalize(self, _close, self._lmdb, users)
        _environments.add(self)
        try:
            self._check()
        except BaseException:
            self.close()
            raise

    @property
    def map_bytes(self) -> int:
        """How large the tier may become before this process needs a larger map."""
        return int(self._asked(self._lmdb.info)["map_size"])

    @property
    def used_bytes(self) -> int:
        """The pages of the tier that are in use, or were once."""
        return (int(self._asked(self._lmdb.info)["last_pgno"]) + 1) * int(self._asked(self._lmdb.stat)["psize"])

    def read_each(self, keys: Sequence[bytes], take: Callable[[bytes, bytes], None]) -> None:
        """Give `take` every key that is there and a copy of its value, which is then still in the processor's cache."""
        with self.transaction() as transaction:
            for key in keys:
                value = transaction.get(key)
                if value is not None:
                    take(key, value)

    @contextmanager
    def transaction(self, *, write: bool = False, buffers: bool = False) -> Iterator[Any]:
        """A transaction, committed at the end unless something was raised; `buffers` give values without a copy."""
        begun = self._begin(write, buffers)
        try:
            with begun:
                yield begun
        finally:
            self._gate.leave()

    def values(self, after: bytes, most: int, head_bytes: int | None = None) -> list[tuple[bytes, int, bytes]]:
        """Some values in the order of their keys: key, size, and the content or its first bytes."""
        found: list[tuple[bytes, int, bytes]] = []
        with self.transaction(buffers=True) as transaction, transaction.cursor() as cursor:
            is_there = cursor.set_range(after + b"\0")
            while is_there and len(found) < most:
                key, content = bytes(cursor.key()), cursor.value()
                if key != MARK_KEY:
                    found.append((key, len(content), bytes(content[:head_bytes])))
                is_there = cursor.next()
        return found

    def figures(self) -> dict[str, int]:
        """Values, and bytes in the file: all, in use, and how far the map goes."""
        stat = self._asked(self._lmdb.stat)
        pages = stat["branch_pages"] + stat["leaf_pages"] + stat["overflow_pages"]
        return {
            "values": max(0, int(stat["entries"]) - 1),  # without the mark
            "file_bytes": file_bytes(self.path),
            "free_bytes": max(0, self.used_bytes - int(pages) * int(stat["psize"])),
            "map_bytes": self.map_bytes,
        }

    def empty(self) -> None:
        """Remove all values; the file keeps its size, and the room in it is used again."""
        with self.transaction(write=True) as transaction:
            transaction.drop(self._lmdb.open_db(txn=transaction), delete=False)
            transaction.put(MARK_KEY, _mark())

    def grow(self, most_bytes: int) -> bool:
        """Double the map, or as near to that as `most_bytes` allows; False where it is that large already."""
        with self._gate.alone():
            now = int(self._lmdb.info()["map_size"])
            wanted = min(most_bytes, 2 * now)
            if wanted <= now:
                return False
            self._lmdb.set_mapsize(wanted)
            return True

    def sync(self) -> None:
        self._lmdb.sync(True)

    def let_go_of_dead_readers(self) -> int:
        """How many places in the table of readers belonged to processes that are gone."""
        return int(self._lmdb.reader_check())

    def shut(self) -> None:
        """Wait until no transaction is open, and let none begin."""
        self._gate.shut()

    def reopen(self) -> None:
        """Let transactions begin again."""
        self._gate.open()

    def _asked(self, ask: Callable[[], Any]) -> Any:
        """What LMDB says of itself: it looks at the map, which must not be resized meanwhile."""
        self._gate.enter()
        try:
            return ask()
        finally:
            self._gate.leave()

    def _begin(self, write: bool, buffers: bool) -> Any:
        """A transaction inside the gate."""
        for _ in range(_BEGINNINGS):
            self._gate.enter()
            try:
                return self._lmdb.begin(write=write, buffers=buffers)
            except lmdb.MapResizedError:  # another process has a larger map, and pages beyond ours
                self._gate.leave()
                with self._gate.alone():
                    self._lmdb.set_mapsize(0)
            except lmdb.ReadersFullError:
                self._gate.leave()
                if not self.let_go_of_dead_readers():
                    raise
            except BaseException:
                self._gate.leave()
                raise
        raise lmdb.MapResizedError("the map is resized again and again")

    def _check(self) -> None:
        """Whether what is there is ours, and whole. What is new is marked as ours."""
        self.dead_readers = self.let_go_of_dead_readers()
        size = os.stat(os.path.join(self.path, _DATA)).st_size
        if size < self.used_bytes:
            raise TierUnusable(
                self.path, f"its file has {size:,} bytes of {self.used_bytes:,}", "remove it, what is read is kept anew"
            )
        with self.transaction() as transaction:
            if transaction.stat()["entries"]:
                self._check_mark(transaction.get(MARK_KEY))
                return
        with self.transaction(write=True) as transaction:
            if transaction.put(MARK_KEY, _mark(), overwrite=False):
                return
            self._check_mark(transaction.get(MARK_KEY))

    def _check_mark(self, mark: bytes | None) -> None:
        if mark is None:
            raise TierUnusable(
                self.path, "an LMDB database is there that forebay did not make", "choose another folder"
            )
        if mark != _mark():
            raise TierUnusable(self.path, f"another version of forebay made it ({mark[:80]!r})", _CLEAR)


def is_tier(path: str) -> bool:
    return os.path.isfile(os.path.join(path, _DATA))


def file_bytes(path: str) -> int:
    return os.stat(os.path.join(path, _DATA)).st_size


@contextmanager
def alone(path: str) -> Iterator[bool]:
    """Whether nobody has the tier open; while this lasts nobody can open it then."""
    descriptor = os.open(os.path.join(path, _USERS), os.O_RDWR | os.O_CREAT | os.O_CLOEXEC, 0o644)
    try:
        try:
            fcntl.flock(descriptor, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except BlockingIOError:
            yield False
        else:
            yield True
    finally:
        os.close(descriptor)


def remove_files(path: str) -> None:
    """Only for who is `alone` with a tier."""
    for name in (_DATA, _LOCK):
        os.unlink(os.path.join(path, name))


def _mark() -> bytes:
    return canonical_json({"format_version": FORMAT_VERSION, "type": "tier"})


def _lock_shared(path: str) -> int:
    descriptor = os.open(os.path.join(path, _USERS), os.O_RDWR | os.O_CREAT | os.O_CLOEXEC, 0o644)
    fcntl.flock(descriptor, fcntl.LOCK_SH)
    return descriptor


def _open_lmdb(path: str, map_bytes: int) -> Any:
    try:
        _reserve_lock_file(os.path.join(path, _LOCK))
        # Without metasync a power cut may take the last transaction with it, but never leaves half of one; `sync`
        # comes when there is nothing more to write.
        return lmdb.open(path, map_size=map_bytes, metasync=False, writemap=False, mode=0o644)
    except lmdb.Error as error:
        raise TierUnusable(path, str(error), _CLEAR) from error


def _reserve_lock_file(path: str) -> None:
    """Take the room of all readers now: on a full disk, the first use of a hole in a map would end the process.

    LMDB keeps a lock file that is larger than it asked for, and then has room for as many readers.
    """
    descriptor = os.open(path, os.O_RDWR | os.O_CREAT | os.O_CLOEXEC, 0o644)
    try:
        if os.fstat(descriptor).st_size < _LOCK_BYTES:
            os.posix_fallocate(descriptor, 0, _LOCK_BYTES)
    finally:
        os.close(descriptor)


def _close(environment: Any, users: int) -> None:
    environment.close()
    os.close(users)


_environments: "weakref.WeakSet[Environment]" = weakref.WeakSet()
_held: list[Environment] = []
_forking = threading.Lock()  # two threads that fork at once take turns


def _before_fork() -> None:
    """No transaction is open in a child: it would free the places that this process has in the table of readers."""
    _forking.acquire()
    _held.extend(_environments)
    for environment in _held:
        environment.shut()


def _after_fork_in_parent() -> None:
    while _held:
        _held.pop().reopen()
    _forking.release()


def _after_fork_in_child() -> None:
    while _held:
        _held.pop().close()
    _forking.release()


os.register_at_fork(before=_before_fork, after_in_parent=_after_fork_in_parent, after_in_child=_after_fork_in_child)
