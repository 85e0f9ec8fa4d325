"""A lock per file between processes, given up by the kernel when its holder dies."""

import fcntl
import os


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


def _open_locked(path: str, how: int) -> int:
    descriptor = os.open(path, os.O_RDWR | os.O_CREAT | os.O_CLOEXEC, 0o666)
    try:
        fcntl.flock(descriptor, how)
    except BaseException:
        os.close(descriptor)
        raise
    return descriptor


def _is_at(descriptor: int, path: str) -> bool:
    try:
        return os.path.samestat(os.fstat(descriptor), os.stat(path))
    except FileNotFoundError:
        return False
