"""File operations relative to an open folder descriptor, so that no path is resolved twice.

Another process could replace a part of a path by a link between a check and its use; an open descriptor cannot change.
"""

import errno
import os
import re
from collections.abc import Iterator, Sequence
from contextlib import suppress

from forebay.store.base import MAX_KEY_PARTS, Buffer, Entry, is_key
from forebay.store.owner import temporary_name

FOLDER = (os.O_PATH if hasattr(os, "O_PATH") else os.O_RDONLY) | os.O_DIRECTORY | os.O_CLOEXEC  # to traverse
LISTED = os.O_RDONLY | os.O_DIRECTORY | os.O_CLOEXEC
NOT_THERE = (FileNotFoundError, NotADirectoryError)
_ASIDE = os.O_WRONLY | os.O_CREAT | os.O_EXCL | os.O_NOFOLLOW | os.O_CLOEXEC
_NO_FOLDER_SYNC = (errno.EINVAL, errno.ENOTSUP, errno.ENOSYS)
_BUFFERS_AT_ONCE = 512  # IOV_MAX is 1,024
_LARGE_BUFFER = 1 << 20


def entries(descriptor: int, folder: str, links: re.Pattern[str], is_link: bool = False) -> Iterator[Entry]:
    """Every regular file below an open folder, except through links. Closes the descriptor.

    Of a folder that was opened through a link, only its own files: what is below it may be a whole disk.
    """
    try:
        with os.scandir(descriptor) as scan:
            found = {f"{item.name}/" if _is_folder(item) else item.name: item for item in scan}
        for name, item in sorted(found.items()):
            key = f"{folder}/{item.name}" if folder else item.name
            if not is_key(key):
                continue
            if name.endswith("/"):
                if key.count("/") + 1 < MAX_KEY_PARTS and not is_link:
                    with suppress(*NOT_THERE):  # a link, or removed meanwhile
                        below = os.open(item.name, LISTED | no_follow(key, links), dir_fd=descriptor)
                        yield from entries(below, key, links, item.is_symlink())
            elif item.is_file(follow_symlinks=False):
                with suppress(FileNotFoundError):
                    status = item.stat(follow_symlinks=False)
                    yield Entry(key, status.st_size, etag_of(status), status.st_mtime)
    finally:
        os.close(descriptor)


def subfolders(descriptor: int | None, folder: str, links: re.Pattern[str]) -> list[str]:
    """The names of the folders in an open folder, links only if they match. Closes the descriptor."""
    if descriptor is None:
        return []
    try:
        with os.scandir(descriptor) as scan:
            found = [item.name for item in scan if _is_folder(item) and not _is_forbidden(item, folder, links)]
        return sorted(name for name in found if is_key(f"{folder}/{name}" if folder else name))
    finally:
        os.close(descriptor)


def _is_forbidden(item: os.DirEntry[str], folder: str, links: re.Pattern[str]) -> bool:
    return item.is_symlink() and not links.fullmatch(f"{folder}/{item.name}" if folder else item.name)


def etag_of(found: os.stat_result) -> str:
    """What changes when a file is replaced: every value is a new file."""
    return f"{found.st_ino:x}-{found.st_size:x}-{found.st_mtime_ns:x}"


def no_follow(folder: str, links: re.Pattern[str]) -> int:
    return 0 if links.fullmatch(folder) else os.O_NOFOLLOW


def _is_folder(item: os.DirEntry[str]) -> bool:
    try:
        return item.is_dir()
    except OSError:  # a link to itself
        return False


def mode_of(folder: int, name: str) -> int:
    return os.stat(name, dir_fd=folder, follow_symlinks=False).st_mode


def write_aside(folder: int, data: Sequence[Buffer], durable: bool = True) -> str:
    """Write the data to a temporary file in an open folder, sync it if it must be durable, and return its name."""
    temporary = temporary_name()
    try:
        descriptor = os.open(temporary, _ASIDE, 0o666, dir_fd=folder)
        try:
            _write_all(descriptor, data)
            if durable:
                os.fsync(descriptor)
        finally:
            os.close(descriptor)
    except BaseException:
        with suppress(FileNotFoundError):
            os.unlink(temporary, dir_fd=folder)
        raise
    return temporary


def make_folder(path: str) -> None:
    """Make a folder and its missing parents, each synced into its own parent."""
    if os.path.isdir(path):
        return
    parent = os.path.dirname(path)
    make_folder(parent)
    with suppress(FileExistsError):
        os.mkdir(path)
    descriptor = os.open(parent, FOLDER)
    try:
        sync_folder(descriptor)
    finally:
        os.close(descriptor)


def sync_folder(folder: int) -> None:
    descriptor = os.open(".", LISTED, dir_fd=folder)  # an O_PATH descriptor cannot be synced
    try:
        os.fsync(descriptor)
    except OSError as error:
        if error.errno not in _NO_FOLDER_SYNC:  # some network and user-space file systems do not support it
            raise
    finally:
        os.close(descriptor)


def _write_all(descriptor: int, data: Sequence[Buffer]) -> None:
    """Write small buffers together with the large one that follows.

    One large write is cached in large pages, so that mapping the file later causes few page faults.
    """
    waiting: list[memoryview] = []
    for buffer in data:
        if len(buffer):
            waiting.append(memoryview(buffer).cast("B"))
        if len(waiting) == _BUFFERS_AT_ONCE or sum(map(len, waiting[-1:])) >= _LARGE_BUFFER:
            _write_together(descriptor, waiting)
            waiting = []
    _write_together(descriptor, waiting)


def _write_together(descriptor: int, rest: list[memoryview]) -> None:
    while rest:
        written = os.writev(descriptor, rest)
        while rest and written >= len(rest[0]):
            written -= len(rest.pop(0))
        if written:
            rest[0] = rest[0][written:]
