"""A store in a local or shared folder: one file per key, written aside and linked into place.

Files are mapped without keeping a descriptor. The `mmap` module keeps one per map (until Python 3.13), so a cache of
thousands of chunks would exceed `ulimit -n`; on Linux and macOS the C function is called directly instead.

File operations relative to an open folder descriptor, so that no path is resolved twice.

Another process could replace a part of a path by a link between a check and its use; an open descriptor cannot change.
"""

import ctypes
import errno
import fcntl
import mmap
import os
import re
import shutil
import stat
import sys
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager, suppress
from pathlib import Path
from typing import Any

import numpy as np

from forebay.errors import NotForebay, StoreFull, StoreRefused
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
    is_left_behind,
    is_temporary,
    temporary_name,
)

_FAILED = ctypes.c_void_p(-1).value
_libc = ctypes.CDLL(None, use_errno=True) if os.name == "posix" else None
if _libc is not None:
    _libc.mmap.restype = ctypes.c_void_p
    _libc.mmap.argtypes = [
        ctypes.c_void_p, ctypes.c_size_t, ctypes.c_int, ctypes.c_int, ctypes.c_int, ctypes.c_int64,
    ]  # fmt: skip
    _libc.munmap.argtypes = [ctypes.c_void_p, ctypes.c_size_t]


def map_file(descriptor: int) -> memoryview:
    """A read-only view of a file; the descriptor may be closed afterwards."""
    size = os.fstat(descriptor).st_size
    if size == 0:
        return memoryview(b"")
    if _libc is None or sys.platform not in ("linux", "darwin"):
        return memoryview(mmap.mmap(descriptor, 0, access=mmap.ACCESS_READ))
    address = _libc.mmap(None, size, mmap.PROT_READ, mmap.MAP_SHARED, descriptor, 0)
    if address == _FAILED:
        code = ctypes.get_errno()
        raise OSError(code, f"cannot map a file of {size:,} bytes: {os.strerror(code)}")
    return np.asarray(_Map(address, size)).data


class _Map:
    """A read-only mapping exposed through the array interface; unmapped when the last view is freed.

    A ctypes array would create and keep a class for every size, and take three times the memory.
    """

    __slots__ = ("_address", "_size")

    def __init__(self, address: int, size: int) -> None:
        self._address, self._size = address, size

    @property
    def __array_interface__(self) -> dict[str, Any]:
        return {"version": 3, "typestr": "|u1", "shape": (self._size,), "data": (self._address, True)}

    def __del__(self, ending: Callable[[], bool] = sys.is_finalizing) -> None:
        # While the interpreter exits, a thread may still be copying; the kernel unmaps when the process ends.
        if _libc is not None and not ending():
            _libc.munmap(self._address, self._size)


_MAY_BE_LINKS = re.compile(r"layers/[^/]+")  # folders that may be read through a link
_NO_LINK = re.compile(r"(?!)")  # nothing is written through a link
_NO_LINKS = (errno.EPERM, errno.ENOTSUP, errno.EOPNOTSUPP, errno.ENOSYS)
_OPEN = os.O_RDONLY | os.O_CLOEXEC | os.O_NOFOLLOW | os.O_NONBLOCK  # a pipe is opened and rejected without blocking
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

    def create(self, key: str, data: Sequence[Buffer], *, durable: bool = True) -> bool:
        with self.writing(key) as (folder, name):
            temporary = write_aside(folder, data, durable)
            try:
                created = self._link(folder, temporary, name)
            finally:
                os.unlink(temporary, dir_fd=folder)
            if durable:
                sync_folder(folder)
            if not created:
                with suppress(FileNotFoundError):  # it was taken, and its owner has removed it since
                    self._check_file(key, mode_of(folder, name))
            return created

    def replace(self, key: str, data: Sequence[Buffer], *, if_etag: str | None = None, durable: bool = True) -> bool:
        with self.writing(key) as (folder, name), _locked(folder, if_etag is not None):
            with suppress(FileNotFoundError):
                if stat.S_ISDIR(mode := mode_of(folder, name)):  # anything else is replaced
                    self._check_file(key, mode)
            if if_etag is not None and not _has_etag(folder, name, if_etag):
                return False
            temporary = write_aside(folder, data, durable)
            try:
                os.replace(temporary, name, src_dir_fd=folder, dst_dir_fd=folder)
            except OSError:
                os.unlink(temporary, dir_fd=folder)
                raise
            if durable:
                sync_folder(folder)
            return True

    def entries(self, prefix: str) -> Iterator[Entry]:
        folder, _, _ = prefix.rpartition("/")
        if folder:
            check_key(self.address, folder)
        for entry in self._walk(folder, _MAY_BE_LINKS):
            if entry.key.startswith(prefix) and not is_temporary(entry.key):
                yield entry

    def folders(self, prefix: str) -> list[str]:
        folder = prefix.rstrip("/")
        if folder:
            check_key(self.address, folder)
        return subfolders(self._open_listed(folder, _MAY_BE_LINKS), folder, _MAY_BE_LINKS)

    def head(self, key: str) -> Entry | None:
        try:
            descriptor = self._open(key)
        except Missing:
            return None
        try:
            found = os.fstat(descriptor)
        finally:
            os.close(descriptor)
        return Entry(key, found.st_size, etag_of(found), found.st_mtime)

    def delete(self, key: str, *, if_etag: str | None = None) -> None:
        """Remove a value; anything but a regular file is left alone."""
        check_key(self.address, key)
        path, _, name = key.rpartition("/")
        try:
            folder = self._open_folder(path, _NO_LINK)
        except NOT_THERE:
            self._check_folders(key, _NO_LINK)
            return
        try:
            with suppress(FileNotFoundError):
                if stat.S_ISREG(mode_of(folder, name)) and (if_etag is None or _has_etag(folder, name, if_etag)):
                    os.unlink(name, dir_fd=folder)
        except OSError as error:
            raise self._named(error, key) from error
        finally:
            os.close(folder)

    def leftovers(self) -> Iterator[Entry]:
        for entry in self._walk("", _NO_LINK):
            if is_left_behind(entry.key, entry.written):
                yield entry

    def free_bytes(self) -> int | None:
        folder = Path(self._root)
        while not folder.exists():
            folder = folder.parent
        return shutil.disk_usage(folder).free

    def local_path(self, key: str) -> str:
        return os.path.join(self.address, key) if key else self.address

    def _open_folder(self, folder: str, links: re.Pattern[str]) -> int:
        """A descriptor of a folder below the root; only folders that match `links` may be symbolic links."""
        first, *further = folder.split("/")
        if not first:
            return os.open(self._root, FOLDER)
        descriptor = os.open(os.path.join(self._root, first), FOLDER | os.O_NOFOLLOW)
        path = first
        for part in further:
            path = f"{path}/{part}"
            try:
                below = os.open(part, FOLDER | no_follow(path, links), dir_fd=descriptor)
            finally:
                os.close(descriptor)
            descriptor = below
        return descriptor

    def _open(self, key: str) -> int:
        """A descriptor for reading a value."""
        check_key(self.address, key)
        folder, _, name = key.rpartition("/")
        if _MAY_BE_LINKS.fullmatch(folder):  # a layer: saves one open
            folder, _, layer = folder.rpartition("/")
            name = f"{layer}/{name}"
        try:
            return self._checked(key, self._open_in(folder, name))
        except NOT_THERE as error:
            self._check_folders(key, _MAY_BE_LINKS)
            raise Missing(key) from error
        except OSError as error:
            if error.errno not in (errno.ELOOP, errno.ENXIO, errno.EMLINK):
                raise self._named(error, key) from error
            with suppress(OSError):
                self._check_file(key, os.lstat(os.path.join(self._root, key)).st_mode)
            if error.errno == errno.ELOOP:  # a folder above it links to itself
                raise Missing(key) from error
            raise self._named(error, key) from error

    def _open_in(self, folder: str, name: str) -> int:
        if not folder:
            return os.open(os.path.join(self._root, name), _OPEN)
        below = self._open_folder(folder, _MAY_BE_LINKS)
        try:
            return os.open(name, _OPEN, dir_fd=below)
        finally:
            os.close(below)

    def _checked(self, key: str, descriptor: int) -> int:
        """The descriptor, if it is a regular file."""
        mode = os.fstat(descriptor).st_mode
        if not stat.S_ISREG(mode):
            os.close(descriptor)
            if stat.S_ISDIR(mode):  # a prefix of other keys
                raise Missing(key)
            self._check_file(key, mode)
        return descriptor

    @contextmanager
    def writing(self, key: str) -> Iterator[tuple[int, str]]:
        """The descriptor of the folder to write a value into, created if missing, and the file name of the value.

        Never writes through a link. `OSError`s name the path of the value.
        """
        check_key(self.address, key)
        path, _, name = key.rpartition("/")
        try:
            try:
                folder = self._open_folder(path, _NO_LINK)
            except NOT_THERE:
                folder = self._make_folders(path)
            try:
                yield folder, name
            finally:
                os.close(folder)
        except OSError as error:
            raise self._named(error, key) from error

    def _make_folders(self, path: str) -> int:
        """As `_open_folder`, but create missing folders, each synced into its parent to survive a power cut."""
        make_folder(self._root)
        descriptor, parts = os.open(self._root, FOLDER), path.split("/") if path else []
        for count, part in enumerate(parts, 1):
            try:
                with suppress(FileExistsError):
                    os.mkdir(part, dir_fd=descriptor)
                below = os.open(part, FOLDER | os.O_NOFOLLOW, dir_fd=descriptor)
                sync_folder(descriptor)
            except NotADirectoryError as error:
                folder = "/".join(parts[:count])
                self._check_folders(f"{folder}/", _NO_LINK)
                problem = f"'{os.path.join(self._root, folder)}' is not a folder"
                raise StoreRefused(self.address, problem, "move it away or choose another root") from error
            finally:
                os.close(descriptor)
            descriptor = below
        return descriptor

    def _check_folders(self, key: str, links: re.Pattern[str]) -> None:
        """Raise `StoreRefused` if a folder of a key is a forbidden link."""
        for folder in _folders(key):
            path = os.path.join(self._root, folder)
            if not links.fullmatch(folder) and os.path.islink(path):
                doing = "write or delete" if links is _NO_LINK else "read"
                raise StoreRefused(
                    self.address,
                    f"'{folder}' is a symbolic link, and forebay does not {doing} through it",
                    f"replace it by the folder itself, or mount the folder there (`mount --bind … {path}`)",
                )

    def _named(self, error: OSError, key: str) -> OSError:
        """The same error with the path of the value, not of a temporary file or a part of the path."""
        if is_full(error):
            return StoreFull(self.address, key, error.strerror or "the disk is full")
        if error.errno is None or os.path.isabs(str(error.filename or "")):
            return error
        return OSError(error.errno, error.strerror, os.path.join(self._root, key))

    def _check_file(self, key: str, mode: int) -> None:
        """Raise `NotForebay` unless the mode is that of a regular file."""
        if not stat.S_ISREG(mode):
            kind = _KINDS.get(stat.S_IFMT(mode), "not a file")
            path = os.path.join(self.address, key)
            raise NotForebay(path, f"it is {kind}, not a regular file; move it away")

    def _link(self, folder: int, temporary: str, name: str) -> bool:
        """Link a temporary file to its name; return False if the name is taken by another file.

        NFS may execute a link, lose the reply and repeat the request: a link count of two means success.
        """
        try:
            os.link(temporary, name, src_dir_fd=folder, dst_dir_fd=folder, follow_symlinks=False)
        except FileExistsError:
            return os.stat(temporary, dir_fd=folder, follow_symlinks=False).st_nlink > 1
        except OSError as error:
            if error.errno not in _NO_LINKS:
                raise
            raise StoreRefused(
                self.address,
                f"its file system does not support hard links ({error.strerror}), which keep two writers from "
                "overwriting each other",
                "choose a folder on another file system (ext4, XFS, Btrfs, ZFS, APFS, NFS)",
            ) from error
        return True

    def _walk(self, folder: str, links: re.Pattern[str]) -> Iterator[Entry]:
        """Every regular file below a folder that a key can name, in order."""
        descriptor = self._open_listed(folder, links)
        is_link = os.path.islink(os.path.join(self._root, folder)) if folder else False
        return iter(()) if descriptor is None else entries(descriptor, folder, links, is_link)

    def _open_listed(self, folder: str, links: re.Pattern[str]) -> int | None:
        """A descriptor to list a folder with, None if it does not exist."""
        try:
            below = self._open_folder(folder, links)
        except NOT_THERE:
            self._check_folders(f"{folder}/", links)
            return None
        except OSError as error:
            if error.errno != errno.ELOOP:  # a layer that links to itself is empty
                raise
            return None
        try:
            return os.open(".", LISTED, dir_fd=below)
        finally:
            os.close(below)


@contextmanager
def _locked(folder: int, is_needed: bool) -> Iterator[None]:
    """Keep other conditional replacements out of a folder, so that comparing and replacing are one step for them."""
    if not is_needed:
        yield
        return
    descriptor = os.open(".", LISTED, dir_fd=folder)
    try:
        fcntl.flock(descriptor, fcntl.LOCK_EX)
        yield
    finally:
        os.close(descriptor)


def _has_etag(folder: int, name: str, etag: str) -> bool:
    try:
        return etag_of(os.stat(name, dir_fd=folder, follow_symlinks=False)) == etag
    except FileNotFoundError:
        return False


def _folders(key: str) -> list[str]:
    """The folders that contain a key, outermost first."""
    parts = key.split("/")
    return ["/".join(parts[:count]) for count in range(1, len(parts))]


def _read_exactly(descriptor: int, start: int, stop: int) -> bytes:
    pieces = []
    while start < stop:
        piece = os.pread(descriptor, stop - start, start)
        if not piece:
            break
        pieces.append(piece)
        start += len(piece)
    return b"".join(pieces)


FOLDER = (os.O_PATH if hasattr(os, "O_PATH") else os.O_RDONLY) | os.O_DIRECTORY | os.O_CLOEXEC  # to traverse
LISTED = os.O_RDONLY | os.O_DIRECTORY | os.O_CLOEXEC
NOT_THERE = (FileNotFoundError, NotADirectoryError)
_ASIDE = os.O_WRONLY | os.O_CREAT | os.O_EXCL | os.O_NOFOLLOW | os.O_CLOEXEC
_NO_FOLDER_SYNC = (errno.EINVAL, errno.ENOTSUP, errno.ENOSYS)
_BUFFERS_AT_ONCE = 512  # IOV_MAX is 1,024
_AT_ONCE = 1 << 20


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
    """Write small buffers together with the large one that follows, to a multiple of `_AT_ONCE` bytes in each call.

    So much is cached in large pages, and mapping the file later causes few page faults. For more in one call, Linux
    takes still larger pages, mostly of memory that was never used: on a virtual machine, 62 MB took 130 ms of
    processor time instead of 13.
    """
    waiting, room = list[memoryview](), _AT_ONCE
    for buffer in data:
        left = memoryview(buffer).cast("B") if len(buffer) else memoryview(b"")
        while left:
            waiting.append(left[:room])
            left, room = left[room:], room - len(waiting[-1])
            if not room or len(waiting) == _BUFFERS_AT_ONCE or (not left and len(buffer) >= _AT_ONCE):
                _write_together(descriptor, waiting)
                waiting, room = [], room or _AT_ONCE
    _write_together(descriptor, waiting)


def _write_together(descriptor: int, rest: list[memoryview]) -> None:
    while rest:
        written = os.writev(descriptor, rest)
        while rest and written >= len(rest[0]):
            written -= len(rest.pop(0))
        if written:
            rest[0] = rest[0][written:]
