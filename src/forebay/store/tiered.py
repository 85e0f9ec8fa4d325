"""A store whose chunks are kept on a local disk: each fetched once by a machine, and verified before it gets its name.

    view(chunk) ──▶ in the tier? ── yes ──▶ map it
                        │ no
                        ▼
                 lock its part ──▶ fetched meanwhile by another process? ── yes ──▶ map it
                        │ no
                        ▼
                space? ── yes ──▶ fetch into the part, hash, sync, rename ──▶ map it
                        │ no
                        ▼
                 fetch into a file without a name, hash ──▶ map it; the kernel frees it after its last use

The tier keeps what it has and admits nothing more when it is full: every chunk is used once an epoch, so replacing one
chunk by another gains nothing. Documents (generations, plans, recipes) are fetched once by each process and kept for
times when the far store does not answer.
"""

import errno
import hashlib
import os
import tempfile
import threading
import time
import weakref
from collections import Counter
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import suppress
from typing import Any, TypeVar

from forebay.errors import StoreFull, StoreUnavailable
from forebay.store.base import (
    MAX_DOCUMENT_BYTES,
    BadCopy,
    Buffer,
    Entry,
    Expected,
    Missing,
    Store,
    Transfers,
    is_full,
    load_index,
)
from forebay.store.file_map import map_file
from forebay.store.local import LocalStore
from forebay.store.tier_folder import ADDRESS, TierFolder, cache_name, chunk_key, full_address

RANGE_BYTES = 32 << 20  # of one request
_AWAY_SECONDS = 60.0  # without asking a far store again that did not answer, where the tier has a document
T = TypeVar("T")
_open_stores: "weakref.WeakSet[TieredStore]" = weakref.WeakSet()


class TieredStore(Store):
    """The cache at `far`, with the chunks that it reads in the folder of `near`, at most `limit_bytes` of them.

    Also without a limit, the tier leaves 10 GiB or a twentieth of the disk free, whichever is less.
    """

    def __init__(self, near: LocalStore, far: Store, limit_bytes: int | None = None) -> None:
        self.address = far.address
        self._near, self._far = near, far
        self.tier = TierFolder(near.local_path(""), limit_bytes).begin()
        self._digests: dict[str, bytes] = {}  # key of a chunk -> SHA-256 that was expected of it
        self._cache = cache_name(full_address(far))
        self.tier.store_document(self._cache, ADDRESS, os.fsencode(full_address(far)))
        self._current: set[str] = set()  # documents that this process, or the one that it was forked from, has fetched
        self._counts: Counter[str] = Counter()
        self._forget()
        _open_stores.add(self)

    def _forget(self) -> None:
        """Start with no locks and nothing passing through: in a new store or a forked process."""
        self._lock = threading.Lock()
        self._fetching: weakref.WeakValueDictionary[bytes, threading.Lock] = weakref.WeakValueDictionary()
        self._passing: weakref.WeakValueDictionary[bytes, memoryview] = weakref.WeakValueDictionary()
        self._away_until = 0.0

    def transfers(self) -> Transfers:
        return Transfers(**{name: self._counts[name] for name in Transfers.__struct_fields__})

    def view(self, key: str, *, expect: Expected | None = None) -> memoryview:
        if expect is None:
            return self._far.view(key) if _is_chunk(key) else self._document(key)
        self._digests[key] = expect.sha256
        view = self._local_copy(expect)
        if view is not None:
            self._count("hits")
            return view
        with self._fetching_lock(expect):
            view = self._passing.get(expect.sha256) or self._local_copy(expect)  # another thread has fetched it
            if view is None:
                self._count("misses")
                view = self._admitted(key, expect)
            if view is None:
                view = self._passing[expect.sha256] = self._pass(key, expect)
            return view

    def _fetching_lock(self, expect: Expected) -> threading.Lock:
        """The lock of one chunk; it lives while a thread holds it or waits for it."""
        with self._lock:
            return self._fetching.setdefault(expect.sha256, threading.Lock())

    def keep(self, key: str, expect: Expected) -> bool:
        """Fetch a chunk into the tier if it is not there; return False, and fetch nothing, if it is not admitted."""
        with self._fetching_lock(expect):
            view = self._local_copy(expect)
            if view is not None:
                self._count("hits")
                return True
            self._count("misses")
            return self._admitted(key, expect) is not None

    def reject(self, key: str, reason: str) -> None:
        digest = self._digests.get(key)
        if digest is not None:
            self._passing.pop(digest, None)
            self.tier.drop(self._cache, digest)

    def read(self, key: str, start: int = 0, stop: int | None = None) -> bytes:
        if _is_chunk(key):
            piece = self._far.read(key, start, stop)
            self._count("bytes_fetched", len(piece))
            return piece
        return bytes(self._document(key)[start:stop])

    def entries(self, prefix: str) -> Iterator[Entry]:
        yield from self._asked(lambda: self._far_entries(prefix), lambda: self._stored_entries(prefix))

    def folders(self, prefix: str) -> list[str]:
        return self._asked(lambda: self._far.folders(prefix), lambda: super(TieredStore, self).folders(prefix))

    def head(self, key: str) -> Entry | None:
        return self._asked(lambda: self._far.head(key), lambda: super(TieredStore, self).head(key))

    def _asked(self, ask: Callable[[], T], recall: Callable[[], T]) -> T:
        """Return the answer of the far store, or the tier's copy while the far store does not answer."""
        if time.monotonic() < self._away_until:
            with suppress(Missing):
                return recall()
        try:
            return ask()
        except StoreUnavailable:
            self._away_until = time.monotonic() + _AWAY_SECONDS
            with suppress(Missing):
                return recall()
            raise

    def create(self, key: str, data: Sequence[Buffer], *, durable: bool = True) -> bool:
        return self._far.create(key, data, durable=durable)

    def replace(self, key: str, data: Sequence[Buffer], *, if_etag: str | None = None, durable: bool = True) -> bool:
        self._current.discard(key)
        return self._far.replace(key, data, if_etag=if_etag, durable=durable)

    def delete(self, key: str, *, if_etag: str | None = None) -> None:
        self._current.discard(key)
        self._far.delete(key, if_etag=if_etag)

    def leftovers(self) -> Iterator[Entry]:
        return self._far.leftovers()

    def free_bytes(self) -> int | None:
        return self._far.free_bytes()

    def local_path(self, key: str) -> str | None:
        """The path of a chunk that the tier keeps."""
        digest = self._digests.get(key)
        path = None if digest is None else os.path.join(self.tier.path, chunk_key(self._cache, digest))
        return path if path is not None and os.path.exists(path) else None

    def document(self) -> Mapping[str, Any]:
        """That of the store behind: a worker that makes chunks reads each input once."""
        return self._far.document()

    def __reduce__(self) -> tuple[Any, ...]:
        return (TieredStore, (self._near, self._far, self.tier.limit_bytes))

    def _document(self, key: str) -> memoryview:
        if key in self._current:
            with suppress(Missing):
                return self.tier.document(self._cache, key)
        return self._asked(lambda: self._fetched_document(key), lambda: self.tier.document(self._cache, key))

    def _fetched_document(self, key: str) -> memoryview:
        """A document of the far store; a large one is an index, which is not held in memory."""
        is_small = key.endswith(".json")
        value = memoryview(self._far.read(key, 0, MAX_DOCUMENT_BYTES + 1)) if is_small else load_index(self._far, key)
        if self.tier.store_document(self._cache, key, value):
            self._current.add(key)
        return value

    def _far_entries(self, prefix: str) -> list[Entry]:
        """The entries of the far store; the tier forgets documents that are gone there, as of an earlier cache."""
        entries = list(self._far.entries(prefix))
        if entries:
            self.tier.forget_documents(self._cache, prefix, {entry.key for entry in entries})
        return entries

    def _stored_entries(self, prefix: str) -> list[Entry]:
        names = self.tier.documents(self._cache)
        entries = [Entry(name, size) for name, size in names if name.startswith(prefix)]
        if not entries:
            raise Missing(prefix)
        return entries

    def _local_copy(self, expect: Expected) -> memoryview | None:
        """The chunk in the tier, None if it is not there; one of another size is dropped."""
        try:
            view = self.tier.files.view(chunk_key(self._cache, expect.sha256))
        except Missing:
            return None
        if len(view) == expect.size:
            return view
        self.tier.drop(self._cache, expect.sha256)
        return None

    def _admitted(self, key: str, expect: Expected) -> memoryview | None:
        """Fetch a chunk into the tier, unless another process does so first; None if there is no space."""
        with self.tier.filling(self._cache, expect.sha256) as part:
            view = self._local_copy(expect)
            if view is not None:  # another process has fetched it
                self.tier.discard_part(self._cache, expect.sha256)
                return view
            if self.tier.admit(part, expect.size):
                try:
                    self._fetch(key, expect, part)
                    os.fsync(part)
                except BaseException:  # cleaned up also on Ctrl+C
                    self.tier.discard_part(self._cache, expect.sha256)
                    raise
                self.tier.publish(self._cache, expect.sha256)
                return map_file(part)
            self.tier.discard_part(self._cache, expect.sha256)
            return None

    def _pass(self, key: str, expect: Expected) -> memoryview:
        """Fetch a chunk that the tier does not admit into a file that has no name."""
        with tempfile.TemporaryFile(prefix="passing-", dir=self.tier.path) as file:
            try:
                self._fetch(key, expect, file.fileno())
                return map_file(file.fileno())
            except OSError as error:
                if not is_full(error) and error.errno != errno.EFBIG:
                    raise
                problem = f"the disk of the tier is full, and {expect.size:,} bytes must pass through it"
                raise StoreFull(
                    f"'{self.tier.path}' has no space for '{key}': {problem}", hint="free some space and try again"
                ) from error

    def _fetch(self, key: str, expect: Expected, descriptor: int) -> None:
        """Write a chunk into a file; fetch it a second time where its SHA-256 is wrong, then raise `BadCopy`."""
        digest = b""
        for attempt in range(2):
            if attempt:
                self._count("retries")
            digest = self._fetch_once(key, expect.size, descriptor)
            if digest == expect.sha256:
                self._count("fetched")
                return
        problem = (
            f"'{self.address}/{key}' was fetched twice, and its SHA-256 is {digest.hex()}, not {expect.sha256.hex()}"
        )
        raise BadCopy(key, problem)

    def _fetch_once(self, key: str, size: int, descriptor: int) -> bytes:
        digest = hashlib.sha256()
        os.ftruncate(descriptor, size)
        for start in range(0, size, RANGE_BYTES):
            piece = self._far.read(key, start, min(start + RANGE_BYTES, size))
            self._count("bytes_fetched", len(piece))
            digest.update(piece)
            _write_at(descriptor, piece, start)
            if start + len(piece) < min(start + RANGE_BYTES, size):
                break  # the object ends here, and a forged size could ask for millions of ranges
        return digest.digest()

    def _count(self, name: str, more: int = 1) -> None:
        with self._lock:
            self._counts[name] += more


def _is_chunk(key: str) -> bool:
    """Whether a key names rows of a layer: `layers/tokens/000035.safetensors`, not its recipe or constants."""
    parts = key.split("/")
    return len(parts) == 3 and parts[0] == "layers" and parts[2][:1].isdigit()


def _write_at(descriptor: int, data: bytes, start: int) -> None:
    rest = memoryview(data)
    while rest:
        written = os.pwrite(descriptor, rest, start)
        start += written
        rest = rest[written:]


def _forked() -> None:
    for store in list(_open_stores):
        store._forget()


os.register_at_fork(after_in_child=_forked)
