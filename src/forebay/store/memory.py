"""A store in memory, for tests and temporary caches."""

import threading
from collections.abc import Iterator, Sequence

from forebay.store.base import Buffer, Entry, Missing, check_key


class MemoryStore:
    """Values in a dictionary of this process: build into it with `workers=0`."""

    def __init__(self, address: str = "memory") -> None:
        self.address = address
        self._values: dict[str, bytes] = {}
        self._lock = threading.Lock()

    def map(self, key: str) -> memoryview:
        return memoryview(self._value(key))

    def read(self, key: str, start: int = 0, stop: int | None = None) -> bytes:
        return self._value(key)[start:stop]

    def create(self, key: str, data: Sequence[Buffer]) -> bool:
        check_key(self.address, key)
        value = b"".join(data)
        with self._lock:
            if key in self._values:
                return False
            self._values[key] = value
            return True

    def replace(self, key: str, data: Sequence[Buffer]) -> None:
        check_key(self.address, key)
        value = b"".join(data)
        with self._lock:
            self._values[key] = value

    def keys(self, prefix: str) -> Iterator[Entry]:
        with self._lock:
            found = sorted(key for key in self._values if key.startswith(prefix))
            entries = [Entry(key, len(self._values[key])) for key in found]
        yield from entries

    def delete(self, key: str) -> None:
        check_key(self.address, key)
        with self._lock:
            self._values.pop(key, None)

    def leftovers(self) -> Iterator[Entry]:
        return iter(())

    def free_bytes(self) -> int | None:
        return None

    def _value(self, key: str) -> bytes:
        check_key(self.address, key)
        try:
            return self._values[key]
        except KeyError as error:
            raise Missing(key) from error

    def __reduce__(self) -> tuple[object, ...]:
        raise TypeError("a MemoryStore lives in one process and cannot be sent to another; use a folder, or workers=0")
