"""The contract of a store, and reading stored values in pieces."""

import errno
import hashlib
import time
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from typing import Protocol, runtime_checkable

from forebay.errors import IndexCorrupt, NotForebay, StoreRefused

Buffer = bytes | bytearray | memoryview
MAX_KEY_PARTS = 4  # keys of a cache have at most three
MAX_PART_BYTES = 255  # the limit of common file systems
MAX_DOCUMENT_BYTES = 64 << 20
_LISTING_PAUSES = (0.01, 0.1, 0.5, 1.0, 2.0, 4.0, 8.0, 16.0)


class Missing(KeyError):
    """A store has no value under a key. A `KeyError` that is not one of these is a bug, and never means "missing"."""


@dataclass(frozen=True, slots=True)
class Entry:
    key: str
    size: int


@runtime_checkable
class Store(Protocol):
    """A key-value store. A new backend implements these methods and passes `forebay.testing.StoreContract`.

    Keys are relative paths with `/` between their parts; every method raises `StoreRefused` for a key that `check_key`
    rejects, and `Missing` for a key that does not exist. Creation is atomic and durable: a reader sees the whole value
    or none, and creating an existing key returns False.
    """

    address: str

    def map(self, key: str) -> memoryview:
        """The whole value, read-only; a memory map if the store has files."""

    def read(self, key: str, start: int = 0, stop: int | None = None) -> bytes:
        """A range of the value, cut short at its end."""

    def create(self, key: str, data: Sequence[Buffer]) -> bool:
        """Publish the joined buffers under a new key; return False and write nothing if the key exists."""

    def replace(self, key: str, data: Sequence[Buffer]) -> None:
        """Publish the joined buffers under a new or existing key, atomically."""

    def keys(self, prefix: str) -> Iterator[Entry]:
        """Every published key that starts with `prefix`, in order."""

    def delete(self, key: str) -> None:
        """Remove a key; deleting a missing key is a no-op."""

    def leftovers(self) -> Iterator[Entry]:
        """Temporary files of writers that are dead."""

    def free_bytes(self) -> int | None:
        """Free space, None if the store does not know it."""


def holds(store: Store, key: str) -> bool:
    """Whether a key is published."""
    try:
        store.read(key, 0, 1)
    except Missing:
        return False
    return True


def read_document(store: Store, key: str) -> bytes:
    """The value of a small document: `cache.json`, a recipe, a claim. A huge one raises `NotForebay`."""
    value = store.read(key, 0, MAX_DOCUMENT_BYTES + 1)
    if len(value) > MAX_DOCUMENT_BYTES:
        raise NotForebay(key, f"it has more than {MAX_DOCUMENT_BYTES:,} bytes")
    return value


def wait_until_listed(store: Store, key: str) -> None:
    """After `create` returned False: wait until the key is listed or deleted, so that the next listing is current.

    A network file system may return a listing that is some seconds old. Raises `StoreRefused` after half a minute,
    because callers would retry forever.
    """
    for pause in _LISTING_PAUSES:
        if any(entry.key == key for entry in store.keys(key)) or not holds(store, key):
            return
        time.sleep(pause)
    problem = f"'{key}' exists but is not in the listing of its folder"
    raise StoreRefused(store.address, problem, "check what it is and move it away")


def check_key(address: str, key: str) -> None:
    """Reject a key that could leave the root on some system."""
    problem = _key_problem(key)
    if problem is not None:
        raise StoreRefused(address, f"the key {key[:80]!r} {problem}", "keys are relative names with / between them")


def is_key(key: str) -> bool:
    return _key_problem(key) is None


def _key_problem(key: str) -> str | None:
    parts = key.split("/")
    if len(parts) > MAX_KEY_PARTS:
        return f"has more than {MAX_KEY_PARTS} parts"
    if any(part in ("", ".", "..") for part in parts):
        return "is absolute, or has a part that is empty, '.' or '..'"
    if "\0" in key or "\\" in key:
        return "contains a NUL or a backslash"
    if any(len(part.encode("utf-8", "surrogatepass")) > MAX_PART_BYTES for part in parts):
        return f"has a part of more than {MAX_PART_BYTES} bytes"
    return None


def is_full(error: OSError) -> bool:
    """Whether an error means that the disk is full."""
    return error.errno in (errno.ENOSPC, errno.EDQUOT)


PIECE_BYTES = 4 << 20
IN_MEMORY_BYTES = 4 << 20  # of an index file; planning millions of samples must not hold their numbers
_PAUSES = (0.1, 0.5)  # seconds between attempts to read


class View(Protocol):
    """Bytes that are read in slices: a `memoryview`, or `Pieces` of a stored value."""

    def __len__(self) -> int: ...

    def __getitem__(self, part: slice, /) -> memoryview: ...


class Pieces:
    """A stored value as a `View` whose slices are read on demand, with its SHA-256.

    The constructor reads the value once to hash it. Small slices come from the last piece read. Raises what the store
    raises (`Missing`, `OSError`). Not thread-safe.
    """

    def __init__(self, store: Store, key: str) -> None:
        self._store, self._key = store, key
        digest, size = hashlib.sha256(), 0
        while piece := store.read(key, size, size + PIECE_BYTES):
            digest.update(piece)
            size += len(piece)
        self._size, self.sha256 = size, digest.digest()
        self._start, self._piece = 0, b""

    def __len__(self) -> int:
        return self._size

    def __getitem__(self, part: slice, /) -> memoryview:
        start, stop, _ = part.indices(self._size)
        if start >= stop:
            return memoryview(b"")
        if stop - start > PIECE_BYTES:
            return memoryview(self._read(start, stop))
        if not self._start <= start < stop <= self._start + len(self._piece):
            self._start, self._piece = start, self._read(start, min(start + PIECE_BYTES, self._size))
        return memoryview(self._piece)[start - self._start : stop - self._start]

    def _read(self, start: int, stop: int) -> bytes:
        read = self._store.read(self._key, start, stop)
        if len(read) != stop - start:
            raise OSError(f"'{self._key}' became shorter while it was read")
        return read


def load_index(store: Store, key: str, in_memory: int = IN_MEMORY_BYTES) -> memoryview:
    """The whole of an index file, read in pieces so that a bad sector raises an error instead of a fault.

    A file larger than `in_memory` is read to the end once, then mapped.
    """
    for pause in (*_PAUSES, None):
        try:
            return _read_through(store, key, in_memory)
        except OSError as error:
            if error.errno not in (errno.EIO, errno.ESTALE, errno.EBUSY) or (
                pause is None and error.errno != errno.EIO
            ):
                raise
            if pause is None:
                raise IndexCorrupt(store.address, key, f"it cannot be read: {error.strerror}") from error
            time.sleep(pause)
    raise AssertionError("the last attempt returns or raises")


def _read_through(store: Store, key: str, in_memory: int) -> memoryview:
    pieces: list[bytes] = []
    size = 0
    while piece := store.read(key, size, size + PIECE_BYTES):
        size += len(piece)
        pieces = [*pieces, piece] if size <= in_memory else []
    return memoryview(b"".join(pieces)) if size <= in_memory else store.map(key)


def sha256_of(view: View) -> bytes:
    if isinstance(view, Pieces):
        return view.sha256
    digest = hashlib.sha256()
    for piece in cut(view, 0, len(view)):
        digest.update(piece)
    return digest.digest()


def cut(view: View, start: int, stop: int) -> Iterator[Buffer]:
    """A range of bytes in pieces of a few megabytes."""
    return (view[at : min(at + PIECE_BYTES, stop)] for at in range(start, stop, PIECE_BYTES))
