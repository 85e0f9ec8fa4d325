"""The contract of a store, and reading stored values in pieces."""

import errno
import hashlib
import time
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from typing import Protocol, runtime_checkable

from forebay.errors import IndexCorrupt, NotForebay, StoreRefused

Buffer = bytes | bytearray | memoryview
MAX_KEY_PARTS = 4  # a cache's own keys have at most three
MAX_PART_BYTES = 255  # what file systems take
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
    """Where bytes rest. A new backend implements these methods and passes `forebay.testing.StoreContract`.

    Keys are relative, with `/` between their parts; one that `check_key` refuses raises `StoreRefused` from every
    method. A missing key raises `Missing`. Creation is atomic, durable and happens once: a reader sees the whole value
    or no value, and the second creator of a key is told so.
    """

    address: str

    def map(self, key: str) -> memoryview:
        """The whole value, read-only, without a copy where there is a file."""

    def read(self, key: str, start: int = 0, stop: int | None = None) -> bytes:
        """Some of the value; a range past the end is cut short."""

    def create(self, key: str, data: Sequence[Buffer]) -> bool:
        """Publish the joined buffers under a new key; False, and nothing written, where the key exists."""

    def replace(self, key: str, data: Sequence[Buffer]) -> None:
        """Publish the joined buffers under a key, new or not, in one step."""

    def keys(self, prefix: str) -> Iterator[Entry]:
        """Every published key that starts with `prefix`, in order."""

    def delete(self, key: str) -> None:
        """Remove a key; one that is not there is no error."""

    def leftovers(self) -> Iterator[Entry]:
        """What dead writers left: values never published, whose writer is gone."""

    def free_bytes(self) -> int | None:
        """Room left, where the store knows it."""


def holds(store: Store, key: str) -> bool:
    """Whether a key is published."""
    try:
        store.read(key, 0, 1)
    except Missing:
        return False
    return True


def read_document(store: Store, key: str) -> bytes:
    """The whole of a value that is small wherever forebay wrote it: `cache.json`, a recipe, a claim."""
    value = store.read(key, 0, MAX_DOCUMENT_BYTES + 1)
    if len(value) > MAX_DOCUMENT_BYTES:
        raise NotForebay(key, f"it has more than {MAX_DOCUMENT_BYTES:,} bytes")
    return value


def wait_until_listed(store: Store, key: str) -> None:
    """After a creation found a key taken: wait until it is listed, so that whoever looks again sees it, or is gone.

    A network file system may list a folder as it was some seconds ago. What is never listed would be tried for ever.
    """
    for pause in _LISTING_PAUSES:
        if any(entry.key == key for entry in store.keys(key)) or not holds(store, key):
            return
        time.sleep(pause)
    problem = f"'{key}' is there, but is not listed among its folder's files"
    raise StoreRefused(store.address, problem, "see what it is, and move it out of the way")


def check_key(address: str, key: str) -> None:
    """Refuse a key that no store takes, whoever named it: it must stay below the root on every system."""
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
        return "holds a NUL or a backslash"
    if any(len(part.encode("utf-8", "surrogatepass")) > MAX_PART_BYTES for part in parts):
        return f"has a part of more than {MAX_PART_BYTES} bytes"
    return None


def is_full(error: OSError) -> bool:
    """Whether an error means that there is no room left."""
    return error.errno in (errno.ENOSPC, errno.EDQUOT)


PIECE_BYTES = 4 << 20
IN_MEMORY_BYTES = 64 << 20  # of an index file; a generation of 100,000 chunks has some 20 MB
_PAUSES = (0.1, 0.5)  # seconds, before what cannot be read is tried again


class View(Protocol):
    """Bytes that are read by slices: a `memoryview` of them all, or `Pieces` of a stored value."""

    def __len__(self) -> int: ...

    def __getitem__(self, part: slice, /) -> memoryview: ...


class Pieces:
    """A stored value as a `View` whose slices are read from the store, and its SHA-256.

    Making it reads the value once, from beginning to end. Small slices are cut from a piece that is kept until another
    is needed. Errors are the store's (`KeyError`, `OSError`). For one thread.
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
    """All of a generation or of a segment of the plan, read in pieces, so that a bad sector is an error.

    What is larger than `in_memory` is read through, and only then mapped.
    """
    for pause in (*_PAUSES, None):
        try:
            return _read_through(store, key, in_memory)
        except OSError as error:
            if error.errno != errno.EIO:
                raise
            if pause is None:
                raise IndexCorrupt(store.address, key, f"it cannot be read: {error.strerror}") from error
            time.sleep(pause)
    raise AssertionError("the last try returns or raises")


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
