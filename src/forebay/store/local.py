"""A store in a local or shared folder: one file per key, linked into place from a temporary file.

A folder of a cache may not be a symbolic link; the root itself may be one. Each call checks this once: a local user who
exchanges folders during a call could write chunks anyway.
"""

import errno
import fcntl
import os
import shutil
import stat
from collections.abc import Iterable, Iterator, Mapping, Sequence
from contextlib import contextmanager, suppress
from pathlib import Path
from typing import Any

from forebay.errors import StoreFull, StoreRefused
from forebay.store.base import (
    MAX_KEY_PARTS,
    Buffer,
    Entry,
    Expected,
    Missing,
    Store,
    check_key,
    is_full,
    is_key,
    not_forebay,
)
from forebay.store.file_map import map_file
from forebay.store.owners import is_left_behind, is_temporary, temporary_name

_NO_LINKS = (errno.EPERM, errno.ENOTSUP, errno.EOPNOTSUPP, errno.ENOSYS)
_NO_FOLDER_SYNC = (errno.EINVAL, errno.ENOTSUP, errno.ENOSYS)
_NOT_THERE = (FileNotFoundError, NotADirectoryError)
_OPEN = os.O_RDONLY | os.O_CLOEXEC | os.O_NOFOLLOW | os.O_NONBLOCK  # a pipe is opened and rejected without blocking
_ASIDE = os.O_WRONLY | os.O_CREAT | os.O_EXCL | os.O_NOFOLLOW | os.O_CLOEXEC
_FOLDER = os.O_RDONLY | os.O_DIRECTORY | os.O_CLOEXEC
_AT_ONCE = 1 << 20
_KINDS = {
    stat.S_IFLNK: "a symbolic link",
    stat.S_IFDIR: "a folder",
    stat.S_IFIFO: "a named pipe",
    stat.S_IFSOCK: "a socket",
    stat.S_IFCHR: "a device",
    stat.S_IFBLK: "a device",
}


class LocalStore(Store):
    """Keys are paths below a folder, which several machines may share."""

    def __init__(self, path: str | os.PathLike[str]) -> None:
        self.address = os.fspath(path)
        self._root = os.path.abspath(self.address)

    def document(self) -> Mapping[str, Any]:
        return {**super().document(), "arguments": [self._root]}

    def view(self, key: str, *, expect: Expected | None = None) -> memoryview:
        with self._reading(key) as descriptor:
            return map_file(descriptor)

    def read(self, key: str, start: int = 0, stop: int | None = None) -> bytes:
        with self._reading(key) as descriptor:
            size = os.fstat(descriptor).st_size
            return _read_exactly(descriptor, start, size if stop is None else min(stop, size))

    def head(self, key: str) -> Entry | None:
        try:
            with self._reading(key) as descriptor:
                return _entry(key, os.fstat(descriptor))
        except Missing:
            return None

    def create(self, key: str, data: Sequence[Buffer], *, durable: bool = True) -> bool:
        with self.writing(key) as path:
            temporary = write_aside(os.path.dirname(path), data, durable)
            try:
                created = self._link(temporary, path)
            finally:
                os.unlink(temporary)
            if durable:
                sync_folder(os.path.dirname(path))
            if not created:
                with suppress(FileNotFoundError):  # it was taken, and its owner has removed it since
                    self._check_file(key, os.lstat(path).st_mode)
            return created

    def link(self, key: str, other: Store) -> bool:
        source = other.local_path(key)
        if source is None:
            return False
        with self.writing(key) as path:
            try:
                os.link(source, path, follow_symlinks=False)
            except OSError as error:
                if error.errno not in (errno.EEXIST, errno.EXDEV, errno.EMLINK, *_NO_LINKS):
                    raise
                return False
            sync_folder(os.path.dirname(path))
        return True

    def replace(self, key: str, data: Sequence[Buffer], *, if_etag: str | None = None, durable: bool = True) -> bool:
        with self.writing(key) as path, _locked(os.path.dirname(path), if_etag is not None):
            if os.path.isdir(path) and not os.path.islink(path):  # anything else is replaced
                self._check_file(key, stat.S_IFDIR)
            if if_etag is not None and not _has_etag(path, if_etag):
                return False
            temporary = write_aside(os.path.dirname(path), data, durable)
            try:
                os.replace(temporary, path)
            except OSError:
                os.unlink(temporary)
                raise
            if durable:
                sync_folder(os.path.dirname(path))
            return True

    def delete(self, key: str, *, if_etag: str | None = None) -> None:
        """Remove a value; anything but a regular file is left alone."""
        path = self._path(key)
        try:
            with suppress(*_NOT_THERE):
                if stat.S_ISREG(os.lstat(path).st_mode) and (if_etag is None or _has_etag(path, if_etag)):
                    os.unlink(path)
        except OSError as error:
            raise self._named(error, key) from error

    def entries(self, prefix: str) -> Iterator[Entry]:
        folder = prefix.rpartition("/")[0]
        self._refuse_folder(folder)
        for entry in self._walk(folder):
            if entry.key.startswith(prefix) and not is_temporary(entry.key):
                yield entry

    def leftovers(self) -> Iterator[Entry]:
        for entry in self._walk(""):
            if is_left_behind(entry.key, entry.written):
                yield entry

    def folders(self, prefix: str) -> list[str]:
        self._refuse_folder(prefix.rstrip("/"))
        items = _listed(os.path.join(self._root, prefix))
        return sorted(one.name for one in items if is_key(f"{prefix}{one.name}") and one.is_dir(follow_symlinks=False))

    def free_bytes(self) -> int | None:
        folder = Path(self._root)
        while not folder.exists():
            folder = folder.parent
        return shutil.disk_usage(folder).free

    def local_path(self, key: str) -> str:
        return os.path.join(self._root, key) if key else self._root

    def _path(self, key: str) -> str:
        """The path of a value; raises `StoreRefused` if one of its folders is a link."""
        check_key(self.address, key)
        self._refuse_links(key.rpartition("/")[0])
        return os.path.join(self._root, key)

    def _refuse_folder(self, folder: str) -> None:
        if folder:
            check_key(self.address, folder)
            self._refuse_links(folder)

    def _refuse_links(self, folder: str) -> None:
        parts = folder.split("/") if folder else []
        for count in range(1, len(parts) + 1):
            name = "/".join(parts[:count])
            path = os.path.join(self._root, name)
            if os.path.islink(path):
                raise StoreRefused(
                    f"'{self.address}' cannot be used as a store: '{name}' is a symbolic link, and forebay follows no "
                    "link in a cache",
                    hint=f"replace it by the folder itself, or mount the folder there (`mount --bind … {path}`)",
                )

    @contextmanager
    def _reading(self, key: str) -> Iterator[int]:
        """A descriptor for reading a value."""
        path = self._path(key)
        try:
            descriptor = os.open(path, _OPEN)
        except _NOT_THERE as error:
            raise Missing(key) from error
        except OSError as error:
            if error.errno in (errno.ELOOP, errno.ENXIO, errno.EMLINK):
                with suppress(OSError):
                    self._check_file(key, os.lstat(path).st_mode)
            raise self._named(error, key) from error
        try:
            mode = os.fstat(descriptor).st_mode
            if stat.S_ISDIR(mode):  # a prefix of other keys
                raise Missing(key)
            self._check_file(key, mode)
            yield descriptor
        finally:
            os.close(descriptor)

    @contextmanager
    def writing(self, key: str) -> Iterator[str]:
        """The path to write a value to, in a folder that exists. `OSError`s name this path."""
        path = self._path(key)
        try:
            make_folder(os.path.dirname(path))
            yield path
        except NotADirectoryError as error:
            folder = os.path.dirname(path)
            while not os.path.lexists(folder):
                folder = os.path.dirname(folder)
            raise StoreRefused(
                f"'{self.address}' cannot be used as a store: '{folder}' is not a folder",
                hint="move it away or choose another root",
            ) from error
        except OSError as error:
            raise self._named(error, key) from error

    def _named(self, error: OSError, key: str) -> OSError:
        """The same error with the path of the value, not of a temporary file."""
        if is_full(error):
            return StoreFull(
                f"'{self.address}' has no space for '{key}': {error.strerror or 'the disk is full'}",
                hint="free some space and try again",
            )
        if error.errno is None:
            return error
        return OSError(error.errno, error.strerror, os.path.join(self._root, key))

    def _check_file(self, key: str, mode: int) -> None:
        """Raise `Damaged` unless the mode is that of a regular file."""
        if not stat.S_ISREG(mode):
            kind = _KINDS.get(stat.S_IFMT(mode), "not a file")
            path = os.path.join(self.address, key)
            hint = "move it away, then run `forebay repair` on the cache"
            raise not_forebay(path, f"it is {kind}, not a regular file", hint)

    def _link(self, temporary: str, path: str) -> bool:
        """Link a temporary file to its name; return False if the name is taken by another file.

        NFS may execute a link, lose the reply and repeat the request: a link count of two means success.
        """
        try:
            os.link(temporary, path, follow_symlinks=False)
        except FileExistsError:
            return os.lstat(temporary).st_nlink > 1
        except OSError as error:
            if error.errno not in _NO_LINKS:
                raise
            raise StoreRefused(
                f"'{self.address}' cannot be used as a store: its file system does not support hard links "
                f"({error.strerror}), which keep two writers from overwriting each other",
                hint="choose a folder on another file system (ext4, XFS, Btrfs, ZFS, APFS, NFS)",
            ) from error
        return True

    def _walk(self, folder: str) -> Iterator[Entry]:
        """Every regular file below a folder that a key can name, in order."""
        items = _listed(os.path.join(self._root, folder))
        named = {f"{item.name}/" if item.is_dir(follow_symlinks=False) else item.name: item for item in items}
        for name, item in sorted(named.items()):
            key = f"{folder}/{item.name}" if folder else item.name
            if not is_key(key):
                continue
            if name.endswith("/"):
                if key.count("/") + 1 < MAX_KEY_PARTS:
                    yield from self._walk(key)
            elif item.is_file(follow_symlinks=False):
                with suppress(FileNotFoundError):
                    yield _entry(key, item.stat(follow_symlinks=False))


def _listed(path: str) -> list["os.DirEntry[str]"]:
    try:
        with os.scandir(path) as scan:
            return list(scan)
    except _NOT_THERE:
        return []


@contextmanager
def _locked(folder: str, is_needed: bool) -> Iterator[None]:
    """Lock a folder against other conditional replacements, which makes comparing and replacing atomic."""
    if not is_needed:
        yield
        return
    descriptor = os.open(folder, _FOLDER)
    try:
        fcntl.flock(descriptor, fcntl.LOCK_EX)
        yield
    finally:
        os.close(descriptor)


def _entry(key: str, status: os.stat_result) -> Entry:
    return Entry(key, status.st_size, _etag(status), status.st_mtime)


def _etag(status: os.stat_result) -> str:
    """An etag that changes when a file is replaced: every value is a new file."""
    return f"{status.st_ino:x}-{status.st_size:x}-{status.st_mtime_ns:x}"


def _has_etag(path: str, etag: str) -> bool:
    try:
        return _etag(os.lstat(path)) == etag
    except FileNotFoundError:
        return False


def _read_exactly(descriptor: int, start: int, stop: int) -> bytes:
    pieces = []
    while start < stop:
        piece = os.pread(descriptor, stop - start, start)
        if not piece:
            break
        pieces.append(piece)
        start += len(piece)
    return b"".join(pieces)


def write_aside(folder: str, data: Iterable[Buffer], durable: bool = True) -> str:
    """Write the data to a temporary file in a folder, sync it if it must be durable, and return its path."""
    temporary = os.path.join(folder, temporary_name())
    try:
        descriptor = os.open(temporary, _ASIDE, 0o666)
        try:
            _write_all(descriptor, data)
            if durable:
                os.fsync(descriptor)
        finally:
            os.close(descriptor)
    except BaseException:  # cleaned up also on Ctrl+C
        with suppress(FileNotFoundError):
            os.unlink(temporary)
        raise
    return temporary


def make_folder(path: str) -> None:
    """Make a folder and its missing parents, each synced into its own parent to survive a power cut."""
    if os.path.isdir(path):
        return
    parent = os.path.dirname(path)
    make_folder(parent)
    with suppress(FileExistsError):
        os.mkdir(path)
    sync_folder(parent)


def sync_folder(path: str) -> None:
    descriptor = os.open(path, _FOLDER)
    try:
        os.fsync(descriptor)
    except OSError as error:
        if error.errno not in _NO_FOLDER_SYNC:  # some network and user-space file systems do not support it
            raise
    finally:
        os.close(descriptor)


def _write_all(descriptor: int, data: Iterable[Buffer]) -> None:
    """Write to a multiple of `_AT_ONCE` bytes in each call.

    So much is cached in large pages, and mapping the file later causes few page faults. For more in one call, Linux
    takes still larger pages, mostly of memory that was never used: on a virtual machine, 62 MB took 130 ms of
    processor time instead of 13.
    """
    written = 0
    with open(descriptor, "wb", _AT_ONCE, closefd=False) as file:
        for buffer in data:
            rest = memoryview(buffer).cast("B") if len(buffer) else memoryview(b"")
            while rest:
                size = file.write(rest[: _AT_ONCE - written % _AT_ONCE])
                rest, written = rest[size:], written + size
