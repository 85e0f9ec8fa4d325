"""L2: rows in an LMDB that the processes of one machine share.

    PATH/data.mdb   the rows
    PATH/lock.mdb   LMDB's locks and reader table
    PATH/users      flock: shared while a process has the file open, exclusive to check or delete it; holds the boot id

LMDB survives killed processes, and commits are not synced: after a power cut the file may be damaged. It is therefore
walked once per boot in a child process and deleted if the child dies; its rows are made again. LMDB must not be opened
twice in a process, used across a fork, or resized during a transaction: the registry, the fork hooks and the gate at
the end of this module see to that.
"""

import errno
import fcntl
import os
import stat
import subprocess
import sys
import threading
from collections.abc import Collection, Iterator, Mapping, Sequence
from contextlib import contextmanager, suppress
from pathlib import Path
from typing import Any

import psutil

from forebay.errors import LibraryMissing, StoreRefused
from forebay.store.tier_folder import network_file_system

try:
    import lmdb
except ModuleNotFoundError as missing:
    raise LibraryMissing(
        "a row cache on disk needs lmdb", hint="pip install 'forebay[images]'", extra="images"
    ) from missing

DEFAULT_MAX_BYTES = 100 * 10**9
SMALLEST_MAX_BYTES = 1 << 15
FIRST_MAP_BYTES = 64 << 20
_DATA, _LOCK, _USERS = "data.mdb", "lock.mdb", "users"
_LOCK_FILE_BYTES = 64 << 10  # a thousand readers
_WALK_SECONDS = 600
_BEGIN_TRIES = 8
_WALK = """
import lmdb, sys
with lmdb.open(sys.argv[1], readonly=True, lock=False) as environment, environment.begin() as transaction:
    for key in transaction.cursor().iternext(values=False):
        pass
"""


class RowFileUnusable(Exception):
    """Why L2 can no longer be read or written in this process."""


L2_ERRORS = (lmdb.Error, RowFileUnusable, OSError)


class RowFile:
    """The LMDB of one folder; a process opens a folder once (`open_row_file`)."""

    def __init__(self, path: str, max_bytes: int) -> None:
        self.path, self.max_bytes, self.users = path, max_bytes, 1
        self._gate = Gate()
        self._lock_descriptor = _prepare_folder(path)
        try:
            self._open(min(max_bytes, FIRST_MAP_BYTES))
        except BaseException:
            os.close(self._lock_descriptor)
            raise

    def get_many(self, keys: Sequence[bytes]) -> dict[bytes, bytes]:
        """Return copies of the values that exist, by key."""
        with self._transaction(write=False) as transaction:
            return {key: value for key in keys if (value := transaction.get(key)) is not None}

    def put_many(self, values: Mapping[bytes, bytes], replace: Collection[bytes]) -> int:
        """Write values in one transaction and return how many are new; keys in `replace` are overwritten."""
        while True:
            try:
                self._check_limit(values)
                with self._transaction(write=True) as transaction:
                    return sum(transaction.put(key, value, overwrite=key in replace) for key, value in values.items())
            except lmdb.MapFullError as error:
                if not self._grow():
                    raise RowFileUnusable(f"it has reached {self.max_bytes:,} bytes; raise max_bytes") from error

    def sync(self) -> None:
        with self._gate.entered(), suppress(lmdb.Error):
            self._environment.sync(True)

    def close(self) -> None:
        """Close the file once every user of it in this process has closed it."""
        with _registry.lock:
            self.users -= 1
            if self.users == 0:
                _registry.files.pop(os.path.realpath(self.path), None)
                self._environment.close()
                os.close(self._data)
                os.close(self._lock_descriptor)

    def before_fork(self) -> None:
        self._gate.shut()
        self._map_bytes = int(self._environment.info()["map_size"])
        self._environment.close()
        os.close(self._data)

    def after_fork_in_parent(self) -> None:
        # If this fails, every later use raises lmdb.Error: the environment is closed.
        with suppress(lmdb.Error, OSError):
            self._open(self._map_bytes)
        self._gate.open()

    def after_fork_in_child(self) -> None:
        os.close(self._lock_descriptor)

    def _open(self, map_bytes: int) -> None:
        _reserve_lock_file(self.path)
        data = os.path.join(self.path, _DATA)
        size = os.path.getsize(data) if os.path.exists(data) else 0
        self._environment = lmdb.open(
            self.path, map_size=max(map_bytes, size), sync=False, readahead=False, mode=0o644, max_dbs=0
        )
        self._environment.reader_check()  # frees slots of killed readers
        self._data = os.open(data, os.O_RDONLY | os.O_CLOEXEC | os.O_NOFOLLOW)
        self._page_bytes = int(self._environment.stat()["psize"])

    def _check_length(self) -> None:
        # Accessing a mapped file beyond its end kills the process, also in `info`, which reads the meta pages.
        length = os.fstat(self._data).st_size
        if length < 2 * self._page_bytes or length < self._used_bytes():
            raise RowFileUnusable(f"its file was cut to {length:,} bytes while it was open")

    def _used_bytes(self) -> int:
        return (int(self._environment.info()["last_pgno"]) + 1) * self._page_bytes

    def _check_limit(self, values: Mapping[bytes, bytes]) -> None:
        """Raise `MapFullError` if another process has a larger map and the values would exceed our own limit."""
        with self._gate.entered():
            map_bytes, used = int(self._environment.info()["map_size"]), self._used_bytes()
        if map_bytes > self.max_bytes and used + sum(map(len, values.values())) > self.max_bytes:
            raise lmdb.MapFullError("another process has a larger map")

    def _grow(self) -> bool:
        """Double the map, within `max_bytes`; return False if it cannot grow."""
        with self._gate.alone():
            self._environment.reader_check()
            current = int(self._environment.info()["map_size"])
            wanted = min(self.max_bytes, 2 * current)
            if wanted > current:
                self._environment.set_mapsize(wanted)
        return wanted > current

    @contextmanager
    def _transaction(self, *, write: bool) -> Iterator[Any]:
        opened = self._begin(write)
        try:
            with opened as transaction:
                yield transaction
        finally:
            self._gate.leave()

    def _begin(self, write: bool) -> Any:
        """Enter the gate and begin a transaction."""
        for _ in range(_BEGIN_TRIES):
            self._gate.enter()
            try:
                self._check_length()
                return self._environment.begin(write=write)
            except lmdb.MapResizedError:  # another process has a larger map
                self._gate.leave()
                with self._gate.alone():
                    self._environment.set_mapsize(0)
            except lmdb.ReadersFullError:
                self._gate.leave()
                if not self._environment.reader_check():
                    raise
            except BaseException:
                self._gate.leave()
                raise
        raise RowFileUnusable("its map is resized again and again")


class Gate:
    """Lets transactions in together, or one caller alone."""

    def __init__(self) -> None:
        self._changed = threading.Condition()
        self._inside = 0
        self._is_shut = False

    def enter(self) -> None:
        with self._changed:
            self._changed.wait_for(lambda: not self._is_shut)
            self._inside += 1

    def leave(self) -> None:
        with self._changed:
            self._inside -= 1
            self._changed.notify_all()

    @contextmanager
    def entered(self) -> Iterator[None]:
        self.enter()
        try:
            yield
        finally:
            self.leave()

    def shut(self) -> None:
        with self._changed:
            self._changed.wait_for(lambda: not self._is_shut)
            self._is_shut = True
            self._changed.wait_for(lambda: not self._inside)

    def open(self) -> None:
        with self._changed:
            self._is_shut = False
            self._changed.notify_all()

    @contextmanager
    def alone(self) -> Iterator[None]:
        self.shut()
        try:
            yield
        finally:
            self.open()


class _Registry:
    def __init__(self) -> None:
        self.lock = threading.RLock()
        self.files: dict[str, RowFile] = {}


_registry = _Registry()


def open_row_file(path: str, max_bytes: int) -> RowFile:
    """Return this process's `RowFile` of a folder, opening it if needed. Close it after use."""
    if max_bytes < SMALLEST_MAX_BYTES:
        raise ValueError(f"max_bytes must be at least {SMALLEST_MAX_BYTES:,} (got {max_bytes:,})")
    with _registry.lock:
        real_path = os.path.realpath(path)
        if real_path in _registry.files:
            _registry.files[real_path].users += 1
        else:
            try:
                _registry.files[real_path] = RowFile(path, max_bytes)
            except (lmdb.Error, OSError) as error:
                raise StoreRefused(f"'{path}' cannot be used as a row cache: {error}", path=path) from error
        return _registry.files[real_path]


def clear(path: str | os.PathLike[str]) -> int:
    """Delete the rows of a row cache that no process has open; return the bytes freed."""
    path = os.fspath(path)
    if not os.path.lexists(os.path.join(path, _USERS)):
        raise StoreRefused(f"'{path}' is not a row cache", path=path)
    descriptor = _open_own_file(path, _USERS)
    try:
        fcntl.flock(descriptor, fcntl.LOCK_EX | fcntl.LOCK_NB)
        data = os.path.join(path, _DATA)
        size = os.lstat(data).st_size if os.path.lexists(data) else 0
        _delete_rows(path)
        return size
    except BlockingIOError as error:
        raise StoreRefused(f"the row cache '{path}' is in use", hint="stop its readers, then clear it") from error
    finally:
        os.close(descriptor)


def _prepare_folder(path: str) -> int:
    """Check the folder, delete a damaged file, and return the descriptor that holds the shared lock."""
    os.makedirs(path, exist_ok=True)
    kind = network_file_system(path)
    if kind:
        raise StoreRefused(
            f"'{path}' is on a network file system ({kind}), where LMDB's locks do not work",
            hint="choose a folder on a local disk; every machine needs its own row cache",
        )
    names = set(os.listdir(path)) - {"lost+found"}
    if names and _USERS not in names:
        raise StoreRefused(f"'{path}' is not empty (it contains '{min(names)}')", hint="choose an empty folder")
    for name in (_DATA, _LOCK):
        if name in names and not stat.S_ISREG(os.lstat(os.path.join(path, name)).st_mode):
            raise _not_regular(path, name)
    descriptor = _open_own_file(path, _USERS)
    try:
        with suppress(BlockingIOError):  # another process has it open, so it was checked since the last boot
            fcntl.flock(descriptor, fcntl.LOCK_EX | fcntl.LOCK_NB)
            _check_once_per_boot(path, descriptor)
        fcntl.flock(descriptor, fcntl.LOCK_SH)
    except BaseException:
        os.close(descriptor)
        raise
    return descriptor


def _check_once_per_boot(path: str, users: int) -> None:
    boot = _boot_id()
    data = os.path.join(path, _DATA)
    if os.path.exists(data):
        checked = os.pread(users, len(boot) + 1, 0) == boot
        if not _is_whole(data) or not (checked or _can_be_walked(path)):
            _delete_rows(path)
    os.ftruncate(users, 0)
    os.pwrite(users, boot, 0)


def _is_whole(data: str) -> bool:
    """Return whether the file has the pages that its newest meta page counts."""
    size = os.path.getsize(data)
    try:
        with lmdb.open(os.path.dirname(data), readonly=True, lock=False, map_size=max(size, 1 << 20)) as environment:
            return size >= (int(environment.info()["last_pgno"]) + 1) * int(environment.stat()["psize"])
    except lmdb.Error:
        return False


def _can_be_walked(path: str) -> bool:
    # A damaged B-tree page kills the process that reads it, so another one goes first.
    command = [sys.executable, "-c", _WALK, path]
    try:
        return subprocess.run(command, capture_output=True, timeout=_WALK_SECONDS, check=False).returncode == 0
    except (OSError, subprocess.TimeoutExpired):
        return False


def _boot_id() -> bytes:
    with suppress(OSError):
        return Path("/proc/sys/kernel/random/boot_id").read_bytes().strip()
    return str(int(psutil.boot_time())).encode()


def _delete_rows(path: str) -> None:
    for name in (_DATA, _LOCK):
        with suppress(FileNotFoundError):
            os.unlink(os.path.join(path, name))


def _open_own_file(path: str, name: str) -> int:
    """Open or create a file of the folder for writing; a link is an error."""
    flags = os.O_RDWR | os.O_CREAT | os.O_CLOEXEC | os.O_NOFOLLOW | os.O_NONBLOCK
    try:
        descriptor = os.open(os.path.join(path, name), flags, 0o644)
    except OSError as error:
        if error.errno in (errno.ELOOP, errno.EISDIR, errno.ENXIO):
            raise _not_regular(path, name) from error
        raise
    if stat.S_ISREG(os.fstat(descriptor).st_mode):
        return descriptor
    os.close(descriptor)
    raise _not_regular(path, name)


def _not_regular(path: str, name: str) -> StoreRefused:
    return StoreRefused(f"'{name}' in the row cache '{path}' is not a regular file", hint="choose another folder")


def _reserve_lock_file(path: str) -> None:
    # On a full disk, the first use of a hole in the mapped lock file would kill the process.
    descriptor = _open_own_file(path, _LOCK)
    try:
        length = os.fstat(descriptor).st_size
        if length < _LOCK_FILE_BYTES:
            os.pwrite(descriptor, bytes(_LOCK_FILE_BYTES - length), length)
    finally:
        os.close(descriptor)


def _before_fork() -> None:
    _registry.lock.acquire()
    for file in _registry.files.values():
        file.before_fork()


def _after_fork_in_parent() -> None:
    for file in _registry.files.values():
        file.after_fork_in_parent()
    _registry.lock.release()


def _after_fork_in_child() -> None:
    global _registry
    for file in _registry.files.values():
        file.after_fork_in_child()
    _registry = _Registry()


os.register_at_fork(before=_before_fork, after_in_parent=_after_fork_in_parent, after_in_child=_after_fork_in_child)
