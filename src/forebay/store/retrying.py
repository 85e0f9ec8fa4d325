"""A store that retries operations after transient I/O errors."""

from collections.abc import Iterator, Mapping, Sequence
from typing import Any

from forebay.store.base import Buffer, Entry, Expected, Missing, Store
from forebay.store.retries import with_retries


class RetryingStore(Store):
    """Wraps a store: transient I/O errors are retried for three seconds, then raised.

    A `create` whose first attempt failed may have written its value; it then returns True for a key with this content.
    """

    def __init__(self, store: Store) -> None:
        self.address = store.address
        self._store: Store = store._store if isinstance(store, RetryingStore) else store

    def read(self, key: str, start: int = 0, stop: int | None = None) -> bytes:
        return with_retries(lambda: self._store.read(key, start, stop))

    def view(self, key: str, *, expect: Expected | None = None) -> memoryview:
        return with_retries(lambda: self._store.view(key, expect=expect))

    def reject(self, key: str, reason: str) -> None:
        self._store.reject(key, reason)

    def create(self, key: str, data: Sequence[Buffer], *, durable: bool = True) -> bool:
        attempts = 0

        def attempt() -> bool:
            nonlocal attempts
            attempts += 1
            return self._store.create(key, data, durable=durable)

        return with_retries(attempt) or (attempts > 1 and self._has_content(key, data))

    def link(self, key: str, other: Store) -> bool:
        plain = other._store if isinstance(other, RetryingStore) else other
        return with_retries(lambda: self._store.link(key, plain))

    def replace(self, key: str, data: Sequence[Buffer], *, if_etag: str | None = None, durable: bool = True) -> bool:
        return with_retries(lambda: self._store.replace(key, data, if_etag=if_etag, durable=durable))

    def entries(self, prefix: str) -> Iterator[Entry]:
        return iter(with_retries(lambda: list(self._store.entries(prefix))))

    def folders(self, prefix: str) -> list[str]:
        return with_retries(lambda: self._store.folders(prefix))

    def head(self, key: str) -> Entry | None:
        return with_retries(lambda: self._store.head(key))

    def delete(self, key: str, *, if_etag: str | None = None) -> None:
        with_retries(lambda: self._store.delete(key, if_etag=if_etag))

    def leftovers(self) -> Iterator[Entry]:
        return iter(with_retries(lambda: list(self._store.leftovers())))

    def document(self) -> Mapping[str, Any]:
        return self._store.document()

    def free_bytes(self) -> int | None:
        return self._store.free_bytes()

    def local_path(self, key: str) -> str | None:
        return self._store.local_path(key)

    def _has_content(self, key: str, data: Sequence[Buffer]) -> bool:
        try:
            return self.read(key) == b"".join(data)
        except Missing:
            return False
