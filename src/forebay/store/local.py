"""A store in a folder. Values are written beside their name, synced, and linked into place.

A temporary name says which process writes it, so that `leftovers` can tell what a dead one left behind.

A cache may come from a stranger, so a key never leads out of the folder: values are regular files, and no link is
followed below the root. One exception is for reading alone: `layers/<layer>` may be a link to a folder elsewhere.
"""

import errno
import os
import re
import secrets
import shutil
import stat
import time
from collections.abc import Iterator, Sequence
from contextlib import suppress
from pathlib import Path

from forebay.errors import NotForebay, StoreRefused
from forebay.store.base import MAX_KEY_PARTS, Buffer, Entry, Missing, check_key, is_key
from forebay.store.mapping import map_file
from forebay.store.owner import Owner, this_host, this_process

_TEMPORARY = ".tmp-"
_TEMPORARY_NAME = re.compile(r"\.tmp-([0-9a-f]{12}-[0-9]{1,10}-[0-9]{1,19})-[0-9a-f]{8}")
_MAY_BE_LINKS = re.compile(r"layers/[^/]+")  # folders that are read through a link
_NO_LINKS = (errno.EPERM, errno.ENOTSUP, errno.EOPNOTSUPP, errno.ENOSYS)
_NO_FOLDER_SYNC = (errno.EINVAL, errno.ENOTSUP, errno.ENOSYS)
_OPEN = os.O_RDONLY | os.O_CLOEXEC | os.O_NOFOLLOW | os.O_NONBLOCK  # a pipe is opened, and refused, without a wait
_BUFFERS_AT_ONCE = 512  # systems take 1,024
_LARGE_BUFFER = 1 << 20
_FOREIGN_LEFTOVER_SECONDS = 24 * 3600
_KINDS = {
    stat.S_IFLNK: "a symbolic link",
    stat.S_IFDIR: "a folder",
    stat.S_IFIFO: "a named pipe",
    stat.S_IFSOCK: "a socket",
    stat.S_IFCHR: "a device",
    stat.S_IFBLK: "a device",
}


class LocalStore:
    """Keys are paths below a folder, which may be shared between machines."""

    def __init__(self, path: str | os.PathLike[str]) -> None:
        self.address = os.fspath(path)
        self._root = os.path.abspath(self.address)

    def map(self, key: str) -> memoryview:
        descriptor = self._open(key)
        try:
            return map_file(descriptor)
        finally:
            os.close(descriptor)

    def read(self, key: str, start: int = 0, stop: int | None = None) -> bytes:
        descriptor = self._open(key)
        try:
            size = os.fstat(descriptor).st_size
            return _read_exactly(descriptor, start, size if stop is None else min(stop, size))
        finally:
            os.close(descriptor)

    def create(self, key: str, data: Sequence[Buffer]) -> bool:
        final = self._path_to_write(key)
        temporary = self._write_aside(final, data)
        try:
            created = self._link(temporary, final)
        finally:
            os.unlink(temporary)
        _sync_folder(os.path.dirname(final))
        if not created:
            self._check_file(key, os.lstat(final).st_mode)
        return created

    def replace(self, key: str, data: Sequence[Buffer]) -> None:
        final = self._path_to_write(key)
        with suppress(FileNotFoundError):
            if stat.S_ISDIR(mode := os.lstat(final).st_mode):  # anything else gives its name away
                self._check_file(key, mode)
        temporary = self._write_aside(final, data)
        try:
            os.replace(temporary, final)
        except OSError:
            os.unlink(temporary)
            raise
        _sync_folder(os.path.dirname(final))

    def keys(self, prefix: str) -> Iterator[Entry]:
        folder, _, _ = prefix.rpartition("/")
        if folder:
            check_key(self.address, folder)
            self._check_followed(f"{folder}/")
        for entry in self._walk(folder):
            if entry.key.startswith(prefix) and not _is_temporary(entry.key):
                yield entry

    def delete(self, key: str) -> None:
        """Remove a value; what else stands under its name is not ours, and stays."""
        check_key(self.address, key)
        with suppress(FileNotFoundError, NotADirectoryError):
            if stat.S_ISREG(os.lstat(os.path.join(self._root, key)).st_mode):
                os.unlink(self._path_to_write(key))

    def leftovers(self) -> Iterator[Entry]:
        for entry in self._walk("", through_links=False):
            if _is_temporary(entry.key) and self._is_leftover(entry.key):
                yield entry

    def free_bytes(self) -> int | None:
        folder = Path(self._root)
        while not folder.exists():
            folder = folder.parent
        return shutil.disk_usage(folder).free

    def _path(self, key: str) -> str:
        """The path of a value to read. No folder on the way may be a link, but for a layer's."""
        check_key(self.address, key)
        self._check_followed(key)
        return os.path.join(self._root, key)

    def _path_to_write(self, key: str) -> str:
        """The path of a value to write or remove. Nothing is written through a link, nor below what is no folder."""
        check_key(self.address, key)
        for folder in _folders(key):
            self._check_folder(folder, "write or delete")
        return os.path.join(self._root, key)

    def _check_followed(self, key: str) -> None:
        for folder in _folders(key):
            if not _MAY_BE_LINKS.fullmatch(folder):
                self._check_folder(folder, "read")

    def _check_folder(self, folder: str, doing: str) -> None:
        path = os.path.join(self._root, folder)
        try:
            mode = os.lstat(path).st_mode
        except (FileNotFoundError, NotADirectoryError):
            return
        if stat.S_ISLNK(mode):
            raise StoreRefused(
                self.address,
                f"'{folder}' is a symbolic link, and forebay does not {doing} through it",
                f"put the folder itself in its place, or mount it there (`mount --bind … {path}`)",
            )

    def _open(self, key: str) -> int:
        path = self._path(key)
        try:
            descriptor = os.open(path, _OPEN)
        except (FileNotFoundError, NotADirectoryError) as error:
            raise Missing(key) from error
        except OSError as error:
            if error.errno not in (errno.ELOOP, errno.ENXIO, errno.EMLINK):
                raise
            with suppress(OSError):
                self._check_file(key, os.lstat(path).st_mode)
            if error.errno == errno.ELOOP:  # a folder above it links to itself: nothing is there
                raise Missing(key) from error
            raise
        mode = os.fstat(descriptor).st_mode
        if not stat.S_ISREG(mode):
            os.close(descriptor)
            if stat.S_ISDIR(mode):  # the beginning of other keys
                raise Missing(key)
            self._check_file(key, mode)
        return descriptor

    def _check_file(self, key: str, mode: int) -> None:
        """Refuse what stands under a value's name and is not a regular file."""
        if not stat.S_ISREG(mode):
            kind = _KINDS.get(stat.S_IFMT(mode), "not a file")
            path = os.path.join(self.address, key)
            raise NotForebay(path, f"it is {kind}, and not a regular file; move it out of the way")

    def _write_aside(self, final: str, data: Sequence[Buffer]) -> str:
        folder = os.path.dirname(final)
        self._make_folder(folder)
        temporary = os.path.join(folder, f"{_TEMPORARY}{this_process()}-{secrets.token_hex(4)}")
        try:
            with open(temporary, "xb", buffering=0) as file:
                _write_all(file.fileno(), data)
                os.fsync(file.fileno())
        except BaseException:
            with suppress(FileNotFoundError):
                os.unlink(temporary)
            raise
        return temporary

    def _make_folder(self, folder: str) -> None:
        """Make a folder and those above it, each synced into its parent so that it survives a power cut."""
        if os.path.isdir(folder):
            return
        parent = os.path.dirname(folder)
        self._make_folder(parent)
        try:
            os.mkdir(folder)
        except FileExistsError as error:
            if not os.path.isdir(folder) and folder.startswith(self._root + os.sep):
                raise StoreRefused(
                    self.address, f"'{folder}' is not a folder", "move it out of the way, or choose another root"
                ) from error
        _sync_folder(parent)

    def _link(self, temporary: str, final: str) -> bool:
        """Give a file its name; False where the name is taken by another.

        A network file system may carry out a link, lose its answer and be asked again: a second name is success.
        """
        try:
            os.link(temporary, final)
        except FileExistsError:
            return os.stat(temporary).st_nlink > 1
        except OSError as error:
            if error.errno not in _NO_LINKS:
                raise
            raise StoreRefused(
                self.address,
                f"its file system makes no hard links ({error.strerror}), which keep two writers from overwriting "
                "each other",
                "choose a folder on another file system (ext4, XFS, Btrfs, ZFS, APFS, NFS)",
            ) from error
        return True

    def _walk(self, folder: str, through_links: bool = True) -> Iterator[Entry]:
        """Every regular file below a folder that a key can name, in order; links and what lies deeper are left out."""
        try:
            with os.scandir(os.path.join(self._root, folder)) as scan:
                found = {f"{item.name}/" if _is_folder(item) else item.name: item for item in scan}
        except (FileNotFoundError, NotADirectoryError):
            return
        for name, item in sorted(found.items()):
            key = f"{folder}/{item.name}" if folder else item.name
            if not is_key(key):
                continue
            if name.endswith("/"):
                is_followed = not item.is_symlink() or (through_links and _MAY_BE_LINKS.fullmatch(key))
                if is_followed and key.count("/") + 1 < MAX_KEY_PARTS:
                    yield from self._walk(key, through_links)
            elif item.is_file(follow_symlinks=False):
                with suppress(FileNotFoundError):
                    yield Entry(key, item.stat(follow_symlinks=False).st_size)

    def _is_leftover(self, key: str) -> bool:
        found = _TEMPORARY_NAME.fullmatch(key.rpartition("/")[2])
        owner = Owner.parse(found[1]) if found else None
        if owner is None:
            return False
        if owner.host == this_host():
            return owner.is_dead()
        with suppress(FileNotFoundError):
            return time.time() - os.lstat(self._path(key)).st_mtime > _FOREIGN_LEFTOVER_SECONDS
        return False


def _is_folder(item: os.DirEntry[str]) -> bool:
    try:
        return item.is_dir()
    except OSError:  # a link to itself
        return False


def _folders(key: str) -> list[str]:
    """The folders that a key lies in, the outermost first."""
    parts = key.split("/")
    return ["/".join(parts[:count]) for count in range(1, len(parts))]


def _is_temporary(key: str) -> bool:
    return _TEMPORARY_NAME.fullmatch(key.rpartition("/")[2]) is not None


def _read_exactly(descriptor: int, start: int, stop: int) -> bytes:
    pieces = []
    while start < stop:
        piece = os.pread(descriptor, stop - start, start)
        if not piece:
            break
        pieces.append(piece)
        start += len(piece)
    return b"".join(pieces)


def _write_all(descriptor: int, data: Sequence[Buffer]) -> None:
    """Write small buffers together with the large one behind them.

    What is written in one go is cached in large pieces, and is then mapped with few page faults.
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


def _sync_folder(folder: str) -> None:
    descriptor = os.open(folder, os.O_RDONLY)
    try:
        os.fsync(descriptor)
    except OSError as error:
        if error.errno not in _NO_FOLDER_SYNC:  # some network and user-space file systems keep no order of their own
            raise
    finally:
        os.close(descriptor)
