"""The files of a tier, and one LMDB environment of them in this process: its transactions, and what must not meet one.

PATH/data.mdb   the values
PATH/lock.mdb   LMDB's own locks and its table of readers
PATH/users      locked (shared) by every process that has the tier open, and alone by one that removes its files

LMDB forbids to open the same files twice in a process, to use them across a fork, and to resize the map while a
transaction is open; `Environment` sees to all three. A transaction lasts as long as some copying takes: none is left
open to hold old pages or a place in the table of readers.
"""

import errno
import fcntl
import os
import stat
import threading
import weakref
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager, suppress
from functools import partial
from typing import Any, NamedTuple

import psutil

from forebay.errors import LibraryMissing, TierDamaged, TierUnusable
from forebay.format.layout import FORMAT_VERSION
from forebay.recipe import canonical_json
from forebay.tiers.lmdb_pages import LmdbSnapshot, Outdated, PageDamaged, read_metas
from forebay.tiers.tier_value import KEY_BYTES

try:
    import lmdb as lmdb  # for the rest of the room, too: so whatever is imported first says how to install it
except ModuleNotFoundError as missing:
    raise LibraryMissing("lmdb", "a tier on disk", "images") from missing
EMPTY_IT = "choose another folder, or empty this one"
WRITABLE = "its locks are files, also for readers: make it writable, or choose another folder"
MARK_KEY = b"forebay"
KEY_CHECK = b"forebay.key"  # what the FOREBAY_HMAC_KEY of the tier makes of a constant
_BEGIN = b'{"__metadata__":{"forebay"'  # of a value of forebay
_DATA, _LOCK, _USERS = "data.mdb", "lock.mdb", "users"
_LOCK_BYTES = 64 << 10  # a thousand readers


class Handle:
    """LMDB's environment on the files of a tier. A forked child must not use it, not even to close it.

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
        """Close LMDB but keep the lock: nobody else may open or remove the files."""
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


class Gate:
    def __init__(self) -> None:
        self._changed = threading.Condition()
        self._inside = 0
        self._shut = False

    def enter(self) -> None:
        with self._changed:
            while self._shut:
                self._changed.wait()
            self._inside += 1

    def leave(self) -> None:
        with self._changed:
            self._inside -= 1
            if not self._inside:
                self._changed.notify_all()

    def shut(self) -> None:
        """Let nobody in, and wait until nobody is inside."""
        with self._changed:
            while self._shut:
                self._changed.wait()
            self._shut = True
            while self._inside:
                self._changed.wait()

    def open(self) -> None:
        with self._changed:
            self._shut = False
            self._changed.notify_all()

    @contextmanager
    def alone(self) -> Iterator[None]:
        self.shut()
        try:
            yield
        finally:
            self.open()


FIRST_MAP_BYTES = 64 << 20
_BEGINNINGS = 8
_COPIED_BYTES = 16 << 20  # of values in one go, and one more


class Kept(NamedTuple):
    """A value: its key, its size, its content or the first bytes of it; or why it cannot be read."""

    key: bytes
    size: int
    content: bytes
    problem: str = ""


class Environment:
    """The LMDB environment in one folder; a process has no other on the same folder (`open_tier` sees to that)."""

    def __init__(self, path: str, map_bytes: int = FIRST_MAP_BYTES) -> None:
        self.path = path
        self.dead_readers = 0  # that were found when it was opened
        self._gate = Gate()
        self._checked = False
        self._checking = threading.Lock()
        make_folder(path)
        refuse_network(path)
        try:
            self._handle = Handle(path, map_bytes)
        except (lmdb.Error, OSError) as error:
            raise unusable(path, error) from error
        self.close = weakref.finalize(self, self._handle.close)
        _environments.add(self)
        try:
            self._check()
        except (lmdb.Error, OSError) as error:
            self.close()
            raise unusable(path, error) from error
        except BaseException:
            self.close()
            raise

    @property
    def map_bytes(self) -> int:
        """How large the tier may become before this process needs a larger map."""
        return int(self._asked(lmdb.Environment.info)["map_size"])

    @property
    def used_bytes(self) -> int:
        """The pages of the tier that are in use, or were once."""
        pages = int(self._asked(lmdb.Environment.info)["last_pgno"]) + 1
        return pages * int(self._asked(lmdb.Environment.stat)["psize"])

    def read_each(self, keys: Sequence[bytes], take: Callable[[bytes, bytes], None]) -> dict[bytes, str]:
        """Pass every key that is there and a copy of its value to `take`; return the keys whose pages are damaged."""
        damaged: dict[bytes, str] = {}
        with self.snapshot() as snapshot:
            for key in keys:
                try:
                    value = snapshot.get(key)
                except PageDamaged as error:
                    damaged[key] = str(error)
                    continue
                if value is not None:
                    take(key, value)
        return damaged

    @contextmanager
    def snapshot(self) -> Iterator[LmdbSnapshot]:
        """The pages as the newest transaction left them; LMDB reuses none of them until the end of the block.

        `TierDamaged` where a page that the block reads is damaged.
        """
        with self._naming_damage():
            for _ in range(_BEGINNINGS):
                with self._transaction(write=False) as transaction:
                    try:
                        found = LmdbSnapshot(self._handle.data, self._handle.page_size, transaction.id())
                    except Outdated as error:
                        outdated = error
                        continue
                    yield found
                    return
            raise outdated

    def check(self) -> None:
        """`TierDamaged` unless LMDB can read and write every page but those of large values."""
        with self.snapshot() as snapshot:
            snapshot.check()

    @contextmanager
    def writing(self, keys: Sequence[bytes]) -> Iterator[Any]:
        """A transaction that puts or deletes some keys, committed at the end unless something was raised.

        On damaged pages LMDB ends the process. So all are checked before the first transaction, and in each one the
        pages that it is about to touch: `TierDamaged` where damage came later.
        """
        self._check_once()
        with self._transaction(write=True) as transaction:
            with self._naming_damage():
                before = LmdbSnapshot(self._handle.data, self._handle.page_size, transaction.id() - 1)
                before.check_writable(keys)
            yield transaction

    @contextmanager
    def _naming_damage(self) -> Iterator[None]:
        try:
            yield
        except PageDamaged as error:
            raise TierDamaged(self.path, str(error)) from error

    @contextmanager
    def _transaction(self, *, write: bool) -> Iterator[Any]:
        begun = self._begin(write)
        try:
            with begun:
                yield begun
        finally:
            self._gate.leave()

    def values(self, after: bytes, most: int, head_bytes: int | None = None) -> list[Kept]:
        """Some values in the order of their keys, not too many bytes at once."""
        found: list[Kept] = []
        room = _COPIED_BYTES
        with self.snapshot() as snapshot:
            for entry in snapshot.entries(after + b"\0"):
                if len(entry.key) != KEY_BYTES:
                    continue
                try:
                    found.append(Kept(entry.key, entry.size, snapshot.content(entry, head_bytes)))
                except PageDamaged as error:
                    found.append(Kept(entry.key, entry.size, b"", str(error)))
                room -= len(found[-1].content)
                if len(found) == most or room <= 0:
                    break
        return found

    def figures(self) -> dict[str, int]:
        """Values, and bytes in the file: all, in use, and how far the map goes."""
        stat = self._asked(lmdb.Environment.stat)
        pages = stat["branch_pages"] + stat["leaf_pages"] + stat["overflow_pages"]
        with self.snapshot() as snapshot:
            marks = sum(snapshot.get(key) is not None for key in (MARK_KEY, KEY_CHECK))
        return {
            "values": max(0, int(stat["entries"]) - marks),
            "file_bytes": file_bytes(self.path),
            "free_bytes": max(0, self.used_bytes - int(pages) * int(stat["psize"])),
            "map_bytes": self.map_bytes,
        }

    def empty(self) -> None:
        """Remove all values; the file keeps its size, and the room in it is used again."""
        with self.snapshot() as snapshot:
            try:
                for entry in snapshot.entries():
                    snapshot.content(entry, 0)
            except PageDamaged as error:
                raise TierUnusable(
                    self.path,
                    f"it is damaged ({error}) and in use",
                    "end the processes that use it, then clear it again",
                ) from error
        with self.writing([]) as transaction:
            transaction.drop(self._handle.lmdb.open_db(txn=transaction), delete=False)  # and the check of a key
            transaction.put(MARK_KEY, _mark())

    def remove(self, keys: Sequence[bytes]) -> int:
        """Remove some values, whose pages were read before; how many were there. The room is used again."""
        with self.writing(keys) as transaction:
            return sum(transaction.delete(key) for key in keys)

    def key_check(self) -> bytes | None:
        """What `keep_key_check` kept."""
        with self.snapshot() as snapshot:
            return snapshot.get(KEY_CHECK)

    def keep_key_check(self, check: bytes) -> None:
        """Keep what tells the key of this tier from others, unless there is one already."""
        with self.writing([KEY_CHECK]) as transaction:
            transaction.put(KEY_CHECK, check, overwrite=False)

    def grow(self, most_bytes: int) -> bool:
        """Double the map, or as near to that as `most_bytes` allows; False where it is that large already."""
        with self._gate.alone():
            self._handle.check_length()
            now = int(self._handle.lmdb.info()["map_size"])
            wanted = min(most_bytes, 2 * now)
            if wanted <= now:
                return False
            self._handle.lmdb.set_mapsize(wanted)
            return True

    def sync(self) -> None:
        self._asked(partial(lmdb.Environment.sync, force=True))

    def clear_dead_readers(self) -> int:
        """How many places in the table of readers belonged to processes that are gone."""
        return int(self._asked(lmdb.Environment.reader_check))

    def release(self) -> None:
        """Before a fork: wait until no transaction is open, let none begin, and have nothing of LMDB's open."""
        self._gate.shut()
        self._handle.release()

    def resume(self) -> None:
        """After a fork, in the parent."""
        self._handle.resume()
        self._gate.open()

    def forget(self) -> None:
        """Close this in the child of a fork, with a new gate: another thread may have held the old one at the fork."""
        self.close.detach()
        self._handle.forget()
        self._gate = Gate()
        self._checking = threading.Lock()

    def _asked(self, ask: Callable[[Any], Any]) -> Any:
        """Ask LMDB about its file: it looks at the map, which must not be resized meanwhile."""
        self._gate.enter()
        try:
            self._handle.check_length()
            return ask(self._handle.lmdb)
        finally:
            self._gate.leave()

    def _check_once(self) -> None:
        with self._checking:
            if not self._checked:
                self.check()
                self._checked = True

    def _begin(self, write: bool) -> Any:
        """A transaction inside the gate."""
        for _ in range(_BEGINNINGS):
            self._gate.enter()
            try:
                self._handle.check_length()
                return self._handle.lmdb.begin(write=write)
            except lmdb.MapResizedError:  # another process has a larger map, and pages beyond ours
                self._gate.leave()
                with self._gate.alone():
                    self._handle.lmdb.set_mapsize(0)
            except lmdb.ReadersFullError:
                self._gate.leave()
                if not self.clear_dead_readers():
                    raise
            except BaseException:
                self._gate.leave()
                raise
        raise lmdb.MapResizedError("the map is resized again and again")

    def _check(self) -> None:
        """Whether the file is one that forebay made, and whole. A new one is labelled as such."""
        self.dead_readers = self.clear_dead_readers()
        used, size = self.used_bytes, file_bytes(self.path)  # in this order: another process may be adding pages
        if size < used:
            raise TierDamaged(self.path, f"its file has {size:,} bytes of {used:,}")
        if self._is_marked():
            return
        with self.writing([MARK_KEY]) as transaction:
            if transaction.put(MARK_KEY, _mark(), overwrite=False):
                return
        self._is_marked()  # another process was first

    def _is_marked(self) -> bool:
        """Whether forebay made this LMDB; False if it is empty. Raises `TierUnusable` if it has other content."""
        with self.snapshot() as snapshot:
            if not snapshot.meta.main.entries:
                return False
            mark = snapshot.get(MARK_KEY)
            if mark is None:
                snapshot.check()  # it may be a tier, and damaged
                raise not_ours(self.path)
            if mark != _mark():
                raise TierUnusable(self.path, f"another version of forebay made it ({mark[:80]!r})", EMPTY_IT)
            return True


def _mark() -> bytes:
    return canonical_json({"format_version": FORMAT_VERSION, "type": "tier"})


_environments: "weakref.WeakSet[Environment]" = weakref.WeakSet()
_held: list[Environment] = []
_forking = threading.Lock()  # two threads that fork at once take turns


def _before_fork() -> None:
    _forking.acquire()
    _held.extend(environment for environment in _environments if environment.close.alive)
    for environment in _held:
        environment.release()


def _after_fork_in_parent() -> None:
    while _held:
        _held.pop().resume()
    _forking.release()


def _after_fork_in_child() -> None:
    while _held:
        _held.pop().forget()
    _forking.release()


os.register_at_fork(before=_before_fork, after_in_parent=_after_fork_in_parent, after_in_child=_after_fork_in_child)
