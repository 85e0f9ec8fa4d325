"""The files of a tier, LMDB's handle of them, and the file system they are on.

PATH/data.mdb   the values
PATH/lock.mdb   LMDB's own locks and its table of readers
PATH/users      locked (shared) by every process that has the tier open, and alone by one that removes its files
"""

import errno
import fcntl
import os
import stat
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from typing import Any

import psutil

from forebay.errors import LibraryMissing, TierDamaged, TierUnusable
from forebay.tiers.lmdb_pages import LmdbSnapshot, PageDamaged, read_metas
from forebay.tiers.tier_value import KEY_BYTES as KEY_BYTES

try:
    import lmdb as lmdb  # for the rest of the room, too: so whatever is imported first says how to install it
except ModuleNotFoundError as missing:
    raise LibraryMissing("lmdb", "a tier on disk", "images") from missing
EMPTY_IT = "choose another folder, or empty this one"
WRITABLE = "its locks are files, also for readers: make it writable, or choose another folder"
MARK_KEY = b"forebay"
KEY_CHECK = b"forebay.key"  # what the FOREBAY_HMAC_KEY of the tier makes of a constant
_BEGIN = b'{"__metadata__":{"forebay"'  # of a value of ours
_DATA, _LOCK, _USERS = "data.mdb", "lock.mdb", "users"
_LOCK_BYTES = 64 << 10  # a thousand readers


class Handle:
    """LMDB's environment on the files of a tier. A child that is forked must not have it, not even to close it.

    LMDB knows the readers of a process by its number, and what a child closes frees the places of its parent: nobody
    would see what that reads, and pages could change under it. So the parent closes it
    before a fork and opens it again after.
    """

    def __init__(self, path: str, map_bytes: int) -> None:
        self._path, self._map_bytes = path, map_bytes
        check_folder(path)
        self._users = _lock_shared(path)
        try:
            self.lmdb = _opened(path, map_bytes, create=True)
            self.data = os.open(os.path.join(path, _DATA), os.O_RDONLY | os.O_CLOEXEC | os.O_NOFOLLOW)
            self.page_size = read_metas(self.data)[0].page_size
        except PageDamaged as error:
            self.close()
            raise TierDamaged(path, str(error)) from error
        except BaseException:
            os.close(self._users)
            raise

    def check_length(self) -> None:
        """LMDB reads the meta pages through its map, where a file that was cut short ends the process."""
        size = os.fstat(self.data).st_size
        if size < 2 * self.page_size:
            raise TierDamaged(self._path, f"its file has {size:,} bytes")

    def release(self) -> None:
        """Have nothing of LMDB's open; nobody else may open or remove the files for all that."""
        with suppress(TierDamaged):
            self.check_length()
            self._map_bytes = int(self.lmdb.info()["map_size"])
        self.lmdb.close()

    def resume(self) -> None:
        """Open again what was closed. Where that fails, every use of it says that it is closed."""
        with suppress(lmdb.Error, OSError, TierUnusable):
            self.lmdb = _opened(self._path, self._map_bytes, create=False)

    def forget(self) -> None:
        """In the child of a fork: the handle is its parent's."""
        os.close(self.data)
        os.close(self._users)

    def close(self) -> None:
        self.lmdb.close()
        os.close(self.data)
        os.close(self._users)


def is_tier(path: str) -> bool:
    return os.path.isfile(os.path.join(path, _DATA))


def check_folder(path: str) -> None:
    """Refuse a folder that holds other files and no tier, a file that is not ours, and damaged meta pages."""
    names = os.listdir(path)
    if _DATA not in names:
        others = sorted(name for name in names if name not in (_LOCK, _USERS, "lost+found") and name[0] != ".")
        if others:
            raise TierUnusable(path, f"it holds other files ('{others[0]}')", "choose a folder that is new or empty")
        return
    check_made_here(path)
    if os.path.islink(os.path.join(path, _DATA)):
        raise _not_a_file(path, _DATA)
    try:
        with suppress(FileNotFoundError), _data_file(path) as descriptor:  # another process may be removing it
            if os.fstat(descriptor).st_size:  # LMDB fills an empty file as it does a new one
                read_metas(descriptor)
    except PageDamaged as error:
        raise TierDamaged(path, str(error)) from error


def count_values(path: str) -> int:
    """How many values a tier holds, read without LMDB; 0 where that cannot be known, as its pages are damaged.

    `TierUnusable` where forebay did not make it.
    """
    check_made_here(path)
    with _data_file(path) as descriptor, suppress(PageDamaged):
        meta = max(read_metas(descriptor), key=lambda meta: meta.transaction)
        snapshot = LmdbSnapshot(descriptor, meta.page_size, meta.transaction)
        snapshot.check()
        values = [entry for entry in snapshot.entries() if len(entry.key) == KEY_BYTES]
        is_ours = snapshot.get(MARK_KEY) is not None or any(_BEGIN in snapshot.content(entry, 200) for entry in values)
        if meta.main.entries and not is_ours:
            raise not_ours(path)
        return len(values)
    return 0


def check_made_here(path: str) -> None:
    if not os.path.lexists(os.path.join(path, _USERS)):
        raise not_ours(path)


def not_ours(path: str) -> TierUnusable:
    return TierUnusable(path, f"it holds a '{_DATA}' that forebay did not make", "choose another folder")


@contextmanager
def _data_file(path: str) -> Iterator[int]:
    descriptor = os.open(os.path.join(path, _DATA), os.O_RDONLY | os.O_CLOEXEC | os.O_NONBLOCK)
    try:
        if not stat.S_ISREG(os.fstat(descriptor).st_mode):
            raise _not_a_file(path, _DATA)
        yield descriptor
    finally:
        os.close(descriptor)


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
    """Remove the files that LMDB made, while `alone` with a tier; of a link, the link itself."""
    for name in (_DATA, _LOCK):
        try:
            os.unlink(os.path.join(path, name))
        except FileNotFoundError:
            continue
        except (IsADirectoryError, PermissionError) as error:  # macOS says the second of a folder
            raise unusable(path, error) from error


def make_folder(path: str) -> None:
    try:
        os.makedirs(path, exist_ok=True)
    except OSError as error:
        raise unusable(path, error) from error


def unusable(path: str, error: Exception) -> TierUnusable:
    """An error of the system or of LMDB about a folder, as one of forebay."""
    if isinstance(error, lmdb.InvalidError | lmdb.CorruptedError | lmdb.PageNotFoundError | lmdb.PanicError):
        return TierDamaged(path, str(error))
    problem = error.strerror if isinstance(error, OSError) else None
    if isinstance(error, OSError) and error.errno in (errno.EROFS, errno.EACCES, errno.EPERM):
        return TierUnusable(path, problem or str(error), WRITABLE)
    return TierUnusable(path, problem or str(error), EMPTY_IT)


def _users_file(path: str) -> int:
    return _open_own(path, _USERS)


def _open_own(path: str, name: str) -> int:
    """A file of the tier to write to, made if missing; a link could lead to a file that is not forebay's."""
    try:
        flags = os.O_RDWR | os.O_CREAT | os.O_CLOEXEC | os.O_NOFOLLOW | os.O_NONBLOCK
        descriptor = os.open(os.path.join(path, name), flags, 0o644)
    except OSError as error:
        if error.errno not in (errno.ELOOP, errno.EISDIR, errno.ENXIO):
            raise
        raise _not_a_file(path, name) from error
    if stat.S_ISREG(os.fstat(descriptor).st_mode):
        return descriptor
    os.close(descriptor)
    raise _not_a_file(path, name)


def _not_a_file(path: str, name: str) -> TierUnusable:
    return TierUnusable(path, f"its '{name}' is a link or not a regular file", "choose another folder")


def _lock_shared(path: str) -> int:
    descriptor = _users_file(path)
    fcntl.flock(descriptor, fcntl.LOCK_SH)
    return descriptor


def _opened(path: str, map_bytes: int, *, create: bool) -> Any:
    _reserve_lock_file(path)
    # Without metasync a power cut may take the last transaction with it, but never leaves half of one; `sync` comes
    # when there is nothing more to write.
    # Rows are read in any order, by `pread`: reading ahead of LMDB's own map would read in vain.
    return lmdb.open(
        path, map_size=map_bytes, metasync=False, writemap=False, readahead=False, mode=0o644, create=create
    )


def _reserve_lock_file(path: str) -> None:
    """Take the room of all readers now: on a full disk, the first use of a hole in a map would end the process.

    LMDB keeps a lock file that is larger than it asked for, and then has room for as many readers.
    """
    descriptor = _open_own(path, _LOCK)
    try:
        if os.fstat(descriptor).st_size < _LOCK_BYTES:
            _reserve(descriptor, _LOCK_BYTES)
    finally:
        os.close(descriptor)


def _reserve(descriptor: int, size: int) -> None:
    if hasattr(os, "posix_fallocate"):
        os.posix_fallocate(descriptor, 0, size)
        return
    start = os.fstat(descriptor).st_size  # macOS has no such call: what is not there yet is written
    os.pwrite(descriptor, bytes(size - start), start)


NETWORK = frozenset((
    "9p", "acfs", "afpfs", "afs", "beegfs", "ceph", "cifs", "coda", "cvmfs", "davfs", "gfs", "gfs2", "glusterfs",
    "gpfs", "lustre", "nfs", "nfs3", "nfs4", "ocfs2", "orangefs", "panfs", "pvfs2", "quobyte", "smb2", "smb3", "smbfs",
    "vboxsf", "virtiofs", "vmhgfs", "webdav", "wekafs",
))  # fmt: skip
# Programs serve these; most of them stand for something remote (sshfs, s3fs, gcsfuse, juicefs), a few for a disk.
_SERVED = ("fuse", "macfuse", "osxfuse")
_LOCAL_DISKS = frozenset(("fuseblk", "fuse.fuse-overlayfs", "fuse.ntfs", "fuse.ntfs-3g", "fuse.exfat", "fuse.ext2"))


def file_system_of(path: str) -> tuple[str, str]:
    """The type of the file system that holds a path, and where it is mounted; both empty where nobody tells."""
    where = os.path.realpath(path)
    mounts = [(len(mount.mountpoint), number, mount) for number, mount in enumerate(psutil.disk_partitions(all=True))]
    holding = [mount for mount in mounts if _is_below(where, mount[2].mountpoint)]
    if not holding:
        return "", ""
    _, _, mount = max(holding, key=lambda found: found[:2])  # of two at one place, the later hides the earlier
    return mount.fstype.lower(), mount.mountpoint


def is_network(kind: str) -> bool:
    """
    >>> is_network("nfs4"), is_network("fuse.sshfs"), is_network("fuseblk"), is_network("ext4")
    (True, True, False, False)
    """
    return kind in NETWORK or (kind.startswith(_SERVED) and kind not in _LOCAL_DISKS)


def refuse_network(path: str) -> None:
    """Refuse a folder in which two machines, or even two processes, would not see each other's locks."""
    kind, mounted_at = file_system_of(path)
    if is_network(kind):
        raise TierUnusable(
            path,
            f"it is on a network file system ({kind}, mounted at '{mounted_at}'), where LMDB's locks do not hold",
            "choose a folder on a disk of this machine; every machine needs its own tier",
        )


def _is_below(path: str, folder: str) -> bool:
    return path == folder or path.startswith(folder.rstrip("/") + "/")
