"""A lock per file between processes, given up by the kernel when its holder dies."""

import errno
import fcntl
import os
import stat

_NOT_OURS = "it is a link or not a regular file, and forebay did not make it; remove it"

_NO_LOCKS = "its file system has no locks; name a folder on another one with --spool, or move HF_HOME there"


class FileLock:
    """A lock on a path, shared by many or held alone. Who is alone may remove its file."""

    def __init__(self, path: str, descriptor: int) -> None:
        self.path = path
        self._descriptor = descriptor

    @classmethod
    def shared(cls, path: str) -> "FileLock":
        """The lock together with others, once nobody has it alone."""
        while True:
            descriptor = _open_locked(path, fcntl.LOCK_SH)
            if _is_at(descriptor, path):
                return cls(path, descriptor)
            os.close(descriptor)  # removed while we waited; another may have made a new one

    @classmethod
    def if_free(cls, path: str) -> "FileLock | None":
        """The lock, if nobody has it now."""
        try:
            descriptor = _open_locked(path, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except BlockingIOError:
            return None
        if _is_at(descriptor, path):
            return cls(path, descriptor)
        os.close(descriptor)
        return None

    def share(self) -> None:
        """Let others share it. For a moment it may be nobody's."""
        fcntl.flock(self._descriptor, fcntl.LOCK_SH)

    def alone(self) -> bool:
        """Have it for oneself, if nobody else holds it; else it is given up.

        Of two that ask at once, the second question of the later one succeeds: by then the other has given up.
        """
        for _ in range(2):
            try:
                fcntl.flock(self._descriptor, fcntl.LOCK_EX | fcntl.LOCK_NB)
            except BlockingIOError:
                fcntl.flock(self._descriptor, fcntl.LOCK_UN)
            else:
                return _is_at(self._descriptor, self.path)
        return False

    def remove(self) -> None:
        os.unlink(self.path)

    def close(self) -> None:
        os.close(self._descriptor)


def open_own(path: str, flags: int) -> int:
    """A descriptor of a regular file, made where there is none; a link or anything else there is refused."""
    try:
        descriptor = os.open(path, flags | os.O_CREAT | os.O_CLOEXEC | os.O_NOFOLLOW | os.O_NONBLOCK, 0o666)
    except OSError as error:
        if error.errno not in (errno.ELOOP, errno.EISDIR, errno.ENXIO):
            raise
        raise FileExistsError(errno.EEXIST, _NOT_OURS, path) from error
    if stat.S_ISREG(os.fstat(descriptor).st_mode):
        return descriptor
    os.close(descriptor)
    raise FileExistsError(errno.EEXIST, _NOT_OURS, path)


def _open_locked(path: str, how: int) -> int:
    descriptor = open_own(path, os.O_RDWR)
    try:
        fcntl.flock(descriptor, how)
    except OSError as error:
        os.close(descriptor)
        if error.errno not in (errno.ENOLCK, errno.ENOSYS, errno.EOPNOTSUPP):
            raise
        raise OSError(error.errno, _NO_LOCKS, path) from error
    except BaseException:
        os.close(descriptor)
        raise
    return descriptor


def _is_at(descriptor: int, path: str) -> bool:
    try:
        return os.path.samestat(os.fstat(descriptor), os.lstat(path))
    except FileNotFoundError:
        return False
