"""The contract of a store."""

import errno
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from typing import Protocol, runtime_checkable

Buffer = bytes | bytearray | memoryview


@dataclass(frozen=True, slots=True)
class Entry:
    key: str
    size: int


@runtime_checkable
class Store(Protocol):
    """Where bytes rest. A new backend implements these methods and passes `forebay.testing.StoreContract`.

    Keys are relative, with `/` between their parts. A missing key raises `KeyError`. Creation is atomic, durable and
    happens once: a reader sees the whole value or no value, and the second creator of a key is told so.
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
    except KeyError:
        return False
    return True


def is_full(error: OSError) -> bool:
    """Whether an error means that there is no room left."""
    return error.errno in (errno.ENOSPC, errno.EDQUOT)
