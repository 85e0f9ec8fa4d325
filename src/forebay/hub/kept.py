"""Small facts about the hub, kept on disk by name: a commit behind a revision, the files of a commit."""

import errno
import hashlib
import os
import secrets
import stat


def kept_path(folder: str, *names: str) -> str:
    """Where a fact about these names is kept.

    >>> kept_path("/spool/listings", "HuggingFaceFW/fineweb-edu", "main")
    '/spool/listings/789d721ca3574786'
    """
    return os.path.join(folder, hashlib.sha256("\n".join(names).encode()).hexdigest()[:16])


def read_kept(path: str) -> bytes | None:
    """What is kept, None where nothing is. Only a regular file is read: a pipe would hang, a link lead elsewhere."""
    try:
        with open(path, "rb", opener=_without_waiting) as file:
            return file.read() if stat.S_ISREG(os.fstat(file.fileno()).st_mode) else None
    except (FileNotFoundError, IsADirectoryError):
        return None
    except OSError as error:
        if error.errno not in (errno.ELOOP, errno.ENXIO):  # a link, a socket
            raise
        return None


def _without_waiting(path: str, flags: int) -> int:
    return os.open(path, flags | os.O_NOFOLLOW | os.O_NONBLOCK)


def keep(path: str, content: bytes) -> None:
    """Write aside, then move: a reader sees the whole fact or none. Where a folder has the name, nothing is kept."""
    os.makedirs(os.path.dirname(path), exist_ok=True)
    aside = f"{path}.{secrets.token_hex(4)}"
    try:
        with open(aside, "xb") as file:
            file.write(content)
        os.replace(aside, path)
    except IsADirectoryError:
        os.unlink(aside)
    except BaseException:
        if os.path.exists(aside):
            os.unlink(aside)
        raise
