"""The contract of a store."""

import errno
import time
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from typing import Protocol, runtime_checkable

from forebay.errors import NotForebay, StoreRefused

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
