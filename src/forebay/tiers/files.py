"""The files of a tier, and LMDB's handle of them.

PATH/data.mdb   the values
PATH/lock.mdb   LMDB's own locks and its table of readers
PATH/users      locked (shared) by every process that has the tier open, and alone by one that removes its files
"""

import fcntl
import os
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from typing import Any

from forebay.errors import LibraryMissing, TierUnusable

try:
    import lmdb as lmdb  # for the rest of the room, too: so whatever is imported first says how to install it
except ModuleNotFoundError as missing:
    raise LibraryMissing("lmdb", "a tier on disk", "images") from missing

EMPTY_IT = "choose another folder, or empty this one"

_DATA, _LOCK, _USERS = "data.mdb", "lock.mdb", "users"
_LOCK_BYTES = 64 << 10  # a thousand readers


class Handle:
    """LMDB's environment on the files of a tier. A child that is forked must not have it, not even to close it.

    LMDB knows the readers of a process by its number, and what a child closes frees the places of its parent: nobody
    would see what that reads, and pages could change under it. So the parent lets go before a fork and resumes after.
    """

    def __init__(self, path: str, map_bytes: int) -> None:
        self._path, self._map_bytes = path, map_bytes
        self._users = _lock_shared(path)
        try:
            self.lmdb = _opened(path, map_bytes, create=True)
        except BaseException:
            os.close(self._users)
            raise

    def let_go(self) -> None:
        """Have nothing of LMDB's open; nobody else may open or remove the files for all that."""
        self._map_bytes = int(self.lmdb.info()["map_size"])
        self.lmdb.close()

    def resume(self) -> None:
        """Open again what was let go of. Where that fails, every use of it says that it is closed."""
        with suppress(lmdb.Error, OSError):
            self.lmdb = _opened(self._path, self._map_bytes, create=False)

    def forget(self) -> None:
        """In the child of a fork: the handle is its parent's."""
        os.close(self._users)

    def close(self) -> None:
        self.lmdb.close()
        os.close(self._users)


def is_tier(path: str) -> bool:
    return os.path.isfile(os.path.join(path, _DATA))


def file_bytes(path: str) -> int:
    return os.stat(os.path.join(path, _DATA)).st_size


@contextmanager
def alone(path: str) -> Iterator[bool]:
    """Whether nobody has the tier open; while this lasts nobody can open it then."""
    descriptor = _users_file(path)
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


def make_folder(path: str) -> None:
    try:
        os.makedirs(path, exist_ok=True)
    except OSError as error:
        raise unusable(path, error) from error


def unusable(path: str, error: Exception) -> TierUnusable:
    """What the system or LMDB says of a folder, as an error of ours."""
    problem = error.strerror if isinstance(error, OSError) else None
    return TierUnusable(path, problem or str(error), EMPTY_IT)


def _users_file(path: str) -> int:
    return os.open(os.path.join(path, _USERS), os.O_RDWR | os.O_CREAT | os.O_CLOEXEC, 0o644)


def _lock_shared(path: str) -> int:
    descriptor = _users_file(path)
    fcntl.flock(descriptor, fcntl.LOCK_SH)
    return descriptor


def _opened(path: str, map_bytes: int, *, create: bool) -> Any:
    _reserve_lock_file(os.path.join(path, _LOCK))
    # Without metasync a power cut may take the last transaction with it, but never leaves half of one; `sync` comes
    # when there is nothing more to write.
    return lmdb.open(path, map_size=map_bytes, metasync=False, writemap=False, mode=0o644, create=create)


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
