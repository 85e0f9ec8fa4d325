"""A stored value read in pieces. Nothing is mapped: a bad sector or a file that shrinks is an error, not a signal."""

import errno
import hashlib
import time
from collections.abc import Iterator
from typing import Protocol

from forebay.errors import IndexCorrupt
from forebay.store.base import Buffer, Store

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
