"""The folder of a tier: chunks of remote caches that a machine keeps, shared by all its processes and caches.

    tier/
      forebay-tier.json                     says that this folder is a tier
      tier.lock                             locked while space is reserved; holds the bytes reserved
      caches/<hash of address>/…            what is kept of the cache at an address
        chunks/<sha256>                     a chunk whose SHA-256 was right when it was linked here
        parts/<sha256>                      one being fetched, locked by the process that fetches it
        documents/<name>                    a document after its own SHA-256; `address` is the address

A part has the size of its chunk from the start, so the bytes taken are those of all chunks and parts, at any moment and
after any crash. The kernel unlocks the part of a process that died, and the next process starts it again. Only names of
this form are ever removed.
"""

import errno
import fcntl
import hashlib
import json
import os
import re
import shutil
import stat
from collections.abc import Container, Iterator
from contextlib import contextmanager, suppress
from dataclasses import dataclass
from pathlib import Path

import psutil

from forebay.errors import StoreFull, TierUnusable
from forebay.store.base import Buffer, Missing, Store, is_url
from forebay.store.local import LocalStore, sync_folder
from forebay.store.owners import is_temporary

MARKER = "forebay-tier.json"
LOCK = "tier.lock"
RESERVE_BYTES = 10 << 30
RESERVE_SHARE = 0.05  # of the disk, where that is less
_DIGEST = re.compile(r"[0-9a-f]{64}")
_CACHE = re.compile(r"[0-9a-f]{32}")
ADDRESS = "address"
_NETWORK = re.compile(
    r"nfs\d?|cifs|smb\d?|smbfs|lustre|ceph|gpfs|gfs2|ocfs2|beegfs|9p|virtiofs|glusterfs|afs|davfs|wekafs|orangefs|"
    r"fuse\.(?:sshfs|s3fs|gcsfuse|juicefs|rclone|goofys|.*mount.*)"
)
_NO_ALLOCATION = (errno.EOPNOTSUPP, errno.ENOTSUP, errno.EINVAL, errno.ENOSYS)
_MOST_ADDRESS_BYTES = 64 << 10
_locked: set[int] = set()  # locked descriptors; a forked process closes its copies, which would keep them locked


@dataclass(frozen=True, slots=True)
class TierCache:
    """What a tier keeps of one cache. Its address is empty if it cannot be read."""

    name: str
    address: str
    chunks: int
    bytes: int


class TierFolder:
    """Chunks by SHA-256 and documents by name, for each cache: `cache` is the `cache_name` of its address."""

    def __init__(self, path: str | os.PathLike[str], limit_bytes: int | None = None) -> None:
        if is_url(os.fspath(path)):
            raise TierUnusable(
                f"'{os.fspath(path)}' cannot be used as a tier: it is a URL, and a tier is a folder",
                hint="pass the path of a folder",
                path=os.fspath(path),
            )
        self.path = os.path.abspath(os.fspath(path))
        self.limit_bytes = limit_bytes
        self.files = LocalStore(self.path)

    def begin(self) -> "TierFolder":
        """Make a new folder a tier, and count its chunks."""
        _refuse_network(self.path)
        names = os.listdir(self.path) if os.path.isdir(self.path) else []
        if self.files.head(MARKER) is None:  # nothing is written into a tier that is one: its disk may be full
            if not all(map(is_temporary, names)):  # another process may be writing the marker now, aside
                raise TierUnusable(
                    f"'{self.path}' cannot be used as a tier: it has files and is not a tier",
                    hint="choose an empty folder, or one that does not exist",
                    path=self.path,
                )
            self.files.create(MARKER, [json.dumps({"tier": 1}).encode() + b"\n"])
        with self._taken() as taken:
            taken.write(self._count())
        return self

    def opened(self) -> "TierFolder":
        """The tier, if the folder is one."""
        if not os.path.isfile(os.path.join(self.path, MARKER)):
            raise TierUnusable(
                f"'{self.path}' cannot be used as a tier: it is not a tier of chunks",
                hint="pass the folder of a tier, which `forebay tier fill` makes",
                path=self.path,
            )
        return self

    @contextmanager
    def filling(self, cache: str, sha256: bytes) -> Iterator[int]:
        """A descriptor of the part of a chunk, once no other process or thread has it."""
        descriptor = self._open_locked(_part_key(cache, sha256))
        _locked.add(descriptor)
        try:
            yield descriptor
        finally:
            _unlock(descriptor)

    def admit(self, part: int, size: int) -> bool:
        """Reserve space for a part, unless the tier or the disk is too full."""
        with self._taken() as taken:
            had = os.fstat(part).st_size  # counted before, for a process that died
            wanted = taken.read() - had + size
            if self.limit_bytes is not None and wanted > self.limit_bytes:
                return False
            if not self._allocate(part, size, had):
                return False
            taken.write(wanted)
            return True

    def publish(self, cache: str, sha256: bytes) -> None:
        """Give a verified part its final name; its lock is held."""
        part, chunk = _part_key(cache, sha256), chunk_key(cache, sha256)
        with self.files.writing(part) as part_path, self.files.writing(chunk) as chunk_path:
            with self._taken():  # not while another process counts: it would be in neither folder
                try:
                    os.replace(part_path, chunk_path)
                except IsADirectoryError as error:
                    raise self._not_ours(chunk) from error
            sync_folder(os.path.dirname(chunk_path))

    def discard_part(self, cache: str, sha256: bytes) -> None:
        """Remove a part and free its space; its lock is held."""
        with self._taken() as taken:
            self._remove(_part_key(cache, sha256), taken)

    def drop(self, cache: str, sha256: bytes) -> bool:
        """Remove a chunk; processes that have it mapped keep their map. Return whether it was there."""
        with self._taken() as taken:
            return self._remove(chunk_key(cache, sha256), taken)

    def _remove(self, key: str, taken: "_Taken") -> bool:
        """Remove a file, if it exists, and count its bytes as free; a link itself is removed, not its target."""
        with self.files.writing(key) as path:
            try:
                size = os.lstat(path).st_size
                os.unlink(path)
            except FileNotFoundError:
                return False
            taken.write(max(0, taken.read() - size))
            return True

    def store_document(self, cache: str, name: str, value: Buffer) -> bool:
        """Store a document for use while the far store is away; return False if the disk is full."""
        key, digest = _document_key(cache, name), hashlib.sha256(value).digest()
        with suppress(Missing):
            if self.files.read(key, 0, len(digest)) == digest:
                return True
        with suppress(StoreFull):
            return self.files.replace(key, [digest, value], durable=False)
        return False

    def document(self, cache: str, name: str) -> memoryview:
        """A kept document; raises `Missing` where there is none or it is damaged."""
        stored = self.files.view(_document_key(cache, name))
        if hashlib.sha256(stored[32:]).digest() != stored[:32]:
            raise Missing(name)
        return stored[32:]

    def documents(self, cache: str) -> list[tuple[str, int]]:
        """(name, size) of the kept documents of a cache."""
        folder = _document_key(cache, "")
        entries = self.files.entries(folder)
        return sorted((entry.key.removeprefix(folder).replace("~", "/"), entry.size - 32) for entry in entries)

    def forget_documents(self, cache: str, prefix: str, listed: Container[str]) -> None:
        """Remove the kept documents below a prefix that are not listed."""
        for name, _ in self.documents(cache):
            if name.startswith(prefix) and name not in listed and name != ADDRESS:
                self.files.delete(_document_key(cache, name))

    def caches(self) -> list[TierCache]:
        """The stored chunks, cache by cache."""
        caches = []
        for name in filter(_CACHE.fullmatch, self.files.folders("caches/")):
            sizes = [entry.size for entry in self.files.entries(f"caches/{name}/chunks/")]
            caches.append(TierCache(name, self._address_of(name), len(sizes), sum(sizes)))
        return caches

    def clean(self, cache: str) -> int:
        """Remove the chunks, dead parts and documents of a cache; return the bytes of the chunks."""
        freed = 0
        for entry in list(self.files.entries(f"caches/{cache}/chunks/")):
            name = entry.key.rpartition("/")[2]
            if _DIGEST.fullmatch(name) and self.drop(cache, bytes.fromhex(name)):
                freed += entry.size
        self._clean_parts(cache)
        for entry in list(self.files.entries(_document_key(cache, ""))):
            self.files.delete(entry.key)
        for folder in ("chunks", "parts", "documents", ""):
            with suppress(OSError):  # it has other files, or is not there
                os.rmdir(os.path.join(self.path, "caches", cache, folder))
        return freed

    def used_bytes(self) -> int:
        with self._taken() as taken:
            return taken.read()

    def _clean_parts(self, cache: str) -> None:
        for entry in list(self.files.entries(f"caches/{cache}/parts/")):
            name = entry.key.rpartition("/")[2]
            if not _DIGEST.fullmatch(name):
                continue
            with suppress(OSError):
                descriptor = os.open(os.path.join(self.path, entry.key), os.O_RDWR | os.O_CLOEXEC | os.O_NOFOLLOW)
                try:
                    fcntl.flock(descriptor, fcntl.LOCK_EX | fcntl.LOCK_NB)  # else another process is fetching it
                    self.discard_part(cache, bytes.fromhex(name))
                finally:
                    os.close(descriptor)

    def _address_of(self, cache: str) -> str:
        with suppress(Missing):
            address = os.fsdecode(self.files.read(_document_key(cache, ADDRESS), 32, _MOST_ADDRESS_BYTES))
            return address if cache_name(address) == cache else ""
        return ""

    def _allocate(self, part: int, size: int, had: int) -> bool:
        disk = shutil.disk_usage(self.path)
        if disk.free - max(0, size - had) < min(RESERVE_BYTES, int(disk.total * RESERVE_SHARE)):
            return False
        try:
            if hasattr(os, "posix_fallocate"):
                os.posix_fallocate(part, 0, size)
        except OSError as error:
            if error.errno in (errno.ENOSPC, errno.EDQUOT, errno.EFBIG):
                os.ftruncate(part, had)
                return False
            if error.errno not in _NO_ALLOCATION:
                raise
        os.ftruncate(part, size)
        return True

    def _count(self) -> int:
        files = ((entry.key.split("/"), entry.size) for entry in self.files.entries("caches/"))
        return sum(size for parts, size in files if len(parts) == 4 and parts[2] in ("chunks", "parts"))

    @contextmanager
    def _taken(self) -> Iterator["_Taken"]:
        descriptor = self._open_own(LOCK)
        _locked.add(descriptor)
        try:
            fcntl.flock(descriptor, fcntl.LOCK_EX)
            yield _Taken(descriptor)
        finally:
            _unlock(descriptor)

    def _open_locked(self, key: str) -> int:
        """Open a file, make it if missing, and lock it; again where another process renamed or removed it meanwhile."""
        while True:
            descriptor = self._open_own(key)
            try:
                fcntl.flock(descriptor, fcntl.LOCK_EX)
                with suppress(FileNotFoundError):
                    if os.path.samestat(os.fstat(descriptor), os.lstat(os.path.join(self.path, key))):
                        return descriptor
            except BaseException:  # cleaned up also on Ctrl+C
                os.close(descriptor)
                raise
            os.close(descriptor)

    def _open_own(self, key: str) -> int:
        """A file of the tier to write to, made if missing; nothing is written through a link."""
        with self.files.writing(key) as path:
            try:
                flags = os.O_RDWR | os.O_CREAT | os.O_CLOEXEC | os.O_NOFOLLOW | os.O_NONBLOCK
                descriptor = os.open(path, flags, 0o666)
            except OSError as error:
                if error.errno not in (errno.ELOOP, errno.EISDIR, errno.ENXIO):
                    raise
                raise self._not_ours(key) from error
        status = os.fstat(descriptor)
        if stat.S_ISREG(status.st_mode) and status.st_nlink <= 1:  # by another name it may be a file that is not ours
            return descriptor
        os.close(descriptor)
        raise self._not_ours(key)

    def _not_ours(self, key: str) -> TierUnusable:
        problem = f"'{key}' is a link or not a regular file"
        return TierUnusable(
            f"'{self.path}' cannot be used as a tier: {problem}",
            hint="remove it, or choose another folder",
            path=self.path,
        )


@dataclass(frozen=True, slots=True)
class _Taken:
    """The bytes that chunks and parts take, in a locked file."""

    descriptor: int

    def read(self) -> int:
        text = os.pread(self.descriptor, 32, 0).strip(b"\0\n ")
        return int(text) if text.isdigit() else 0

    def write(self, count: int) -> None:
        os.pwrite(self.descriptor, f"{count:<31}\n".encode(), 0)


def _unlock(descriptor: int) -> None:
    """Unlock and close a file; closing alone would leave it locked by a process that was forked meanwhile."""
    _locked.discard(descriptor)
    fcntl.flock(descriptor, fcntl.LOCK_UN)
    os.close(descriptor)


def full_address(store: Store) -> str:
    """The address of a cache from any working directory."""
    return store.local_path("") or store.address


def cache_name(address: str) -> str:
    """The folder of the cache at a full address."""
    return hashlib.sha256(os.fsencode(address)).hexdigest()[:32]


def chunk_key(cache: str, sha256: bytes) -> str:
    """The key of a chunk in the files of a tier."""
    return f"caches/{cache}/chunks/{sha256.hex()}"


def _part_key(cache: str, sha256: bytes) -> str:
    return f"caches/{cache}/parts/{sha256.hex()}"


def _document_key(cache: str, name: str) -> str:
    return f"caches/{cache}/documents/{name.replace('/', '~')}"


def _refuse_network(path: str) -> None:
    kind = network_file_system(path)
    if kind:
        raise TierUnusable(
            f"'{path}' cannot be used as a tier: it is on a network file system ({kind}), and a tier is a local disk",
            hint="choose a folder on a local disk",
            path=path,
        )


def network_file_system(path: str) -> str:
    """Return the type of the network file system that a path is on, empty if it is on a local disk."""
    kind = file_system(path)
    return kind if _NETWORK.fullmatch(kind) else ""


def file_system(path: str) -> str:
    """The type of the file system that a path is, or would be, on; empty if unknown."""
    real = Path(os.path.realpath(path))
    mounts = [part for part in psutil.disk_partitions(all=True) if real.is_relative_to(part.mountpoint)]
    return str(max(mounts, key=lambda part: len(part.mountpoint)).fstype) if mounts else ""


def _forked() -> None:
    for descriptor in _locked:
        with suppress(OSError):
            os.close(descriptor)
    _locked.clear()


os.register_at_fork(after_in_child=_forked)
