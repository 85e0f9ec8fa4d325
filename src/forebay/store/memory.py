"""A store in the memory of this process."""

import threading
from collections.abc import Iterator, Mapping, Sequence

from forebay.store.base import Buffer, Entry, Expected, Missing, Store, check_key

_STAYS = "a MemoryStore lives in one process and cannot be sent to another; use a folder, or workers=0"


class MemoryStore(Store):
    """Values in a dictionary of this process: build into it with `workers=0`."""

    def __init__(self, address: str = "memory") -> None:
        self.address = address
        self._values: dict[str, bytes] = {}
        self._etags: dict[str, str] = {}
        self._written = 0
        self._lock = threading.Lock()

    def view(self, key: str, *, expect: Expected | None = None) -> memoryview:
        return memoryview(self._value(key))

    def read(self, key: str, start: int = 0, stop: int | None = None) -> bytes:
        return self._value(key)[start:stop]

    def create(self, key: str, data: Sequence[Buffer], *, durable: bool = True) -> bool:
        check_key(self.address, key)
        value = b"".join(data)
        with self._lock:
            if key in self._values:
                return False
            self._put(key, value)
            return True

    def replace(self, key: str, data: Sequence[Buffer], *, if_etag: str | None = None, durable: bool = True) -> bool:
        check_key(self.address, key)
        value = b"".join(data)
        with self._lock:
            if if_etag is not None and self._etags.get(key) != if_etag:
                return False
            self._put(key, value)
            return True

    def entries(self, prefix: str) -> Iterator[Entry]:
        with self._lock:
            keys = sorted(key for key in self._values if key.startswith(prefix))
            entries = [Entry(key, len(self._values[key]), self._etags[key]) for key in keys]
        yield from entries

    def head(self, key: str) -> Entry | None:
        check_key(self.address, key)
        with self._lock:
            return Entry(key, len(self._values[key]), self._etags[key]) if key in self._values else None

    def delete(self, key: str, *, if_etag: str | None = None) -> None:
        check_key(self.address, key)
        with self._lock:
            if if_etag in (None, self._etags.get(key)):
                self._values.pop(key, None)
                self._etags.pop(key, None)

    def _put(self, key: str, value: bytes) -> None:
        self._written += 1
        self._values[key], self._etags[key] = value, str(self._written)

    def _value(self, key: str) -> bytes:
        check_key(self.address, key)
        try:
            return self._values[key]
        except KeyError as error:
            raise Missing(key) from error

    def document(self) -> Mapping[str, object]:
        raise TypeError(_STAYS)

    def __reduce__(self) -> tuple[object, ...]:
        raise TypeError(_STAYS)
