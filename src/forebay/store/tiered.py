"""A store whose chunks are kept on a local disk: each fetched once by a machine, and verified before it gets its name.

    view(chunk) ──▶ in the tier? ── yes ──▶ map it
                        │ no
                        ▼
                 lock its part ──▶ fetched meanwhile by another process? ── yes ──▶ map it
                        │ no
                        ▼
                 room? ── yes ──▶ fetch into the part, hash, sync, rename ──▶ map it
                        │ no
                        ▼
                 fetch into a file without a name, hash ──▶ map it; the kernel frees it after its last use

The tier keeps what it has and admits nothing more when it is full: every chunk is used once an epoch, so replacing one
chunk by another gains nothing. Documents (generations, plans, recipes) are fetched once by each process and kept for
times when the far store does not answer.

Read a store from a forked process through the process that opened it.

Libraries that run their own threads hang in a forked process. So the process that opened the store answers for it: a
thread there listens on a socket, from the first fork on.

    forked process ── {"method": "read", "key": …} ──▶ socket ──▶ thread of the parent ──▶ store
                   ◀── {"size": n} and n bytes, or {"error": …} ──
"""

import atexit
import errno
import hashlib
import itertools
import json
import os
import shutil
import socket
import tempfile
import threading
import time
import weakref
from collections import Counter
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager, suppress
from typing import Any, Protocol

from forebay import errors
from forebay.errors import ForebayError, IndexCorrupt, StoreFull, StoreRefused, StoreUnavailable
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
    is_url,
    load_index,
)
from forebay.store.local import LocalStore, map_file
from forebay.store.tier_folder import TierFolder

RANGE_BYTES = 32 << 20  # of one request
_PAUSES = (0.5,)  # seconds before a range is asked for again; a store of objects has retried before
_AWAY_SECONDS = 60.0  # without asking a far store again that did not answer, where the tier has a document
_CACHE = "cache.json"
_open_stores: "weakref.WeakSet[TieredStore]" = weakref.WeakSet()


class TieredStore(Store):
    """The cache at `far`, with the chunks that it reads in the folder of `near`, at most `limit_bytes` of them.

    Without a limit, the tier grows until the disk has `reserve_bytes` left: by default 10 GiB or a twentieth of the
    disk, whichever is less.
    """

    def __init__(
        self, near: LocalStore, far: Store, *, limit_bytes: int | None = None, reserve_bytes: int | None = None
    ) -> None:
        self.address = far.address
        self._near, self._original = near, far
        self._options = {"limit_bytes": limit_bytes, "reserve_bytes": reserve_bytes}
        self._far: Store = ThroughParent(far) if is_url(far.address) else far
        self.tier = TierFolder(near.local_path(""), limit_bytes, reserve_bytes).begin()
        self._digests: dict[str, bytes] = {}  # key of a chunk -> SHA-256 that was expected of it
        self._known_id: str | None = None
        self._counts: Counter[str] = Counter()
        self._forget()
        _open_stores.add(self)

    def _forget(self) -> None:
        """Start with no locks and nothing passing through: in a new store or a forked process."""
        self._lock, self._identifying = threading.Lock(), threading.Lock()
        self._flights: dict[bytes, _Flight] = {}
        self._passing: weakref.WeakValueDictionary[bytes, memoryview] = weakref.WeakValueDictionary()
        self._current: set[str] = set()  # documents that this process has fetched
        self._away_until = 0.0

    def transfers(self) -> Transfers:
        return Transfers(**{name: self._counts[name] for name in Transfers.__struct_fields__})

    def view(self, key: str, *, expect: Expected | None = None) -> memoryview:
        if expect is None or expect.sha256 is None:
            return self._far.view(key) if _is_chunk(key) else self._document(key)
        self._digests[key] = expect.sha256
        view = self._kept(expect)
        if view is not None:
            self._count("hits")
            return view
        with self._flight(expect.sha256):
            view = self._passing.get(expect.sha256) or self._kept(expect)  # another thread has fetched it
            if view is None:
                self._count("misses")
                view = self._filled(key, expect, expect.sha256)
            return view

    def keep(self, key: str, expect: Expected) -> bool:
        """Fetch a chunk into the tier if it is not there; return False, and fetch nothing, if it is not admitted."""
        if expect.sha256 is None:
            raise ValueError("a tier keeps only what has a SHA-256")
        with self._flight(expect.sha256):
            view = self._kept(expect)
            if view is not None:
                self._count("hits")
                return True
            self._count("misses")
            return self._admitted(key, expect, expect.sha256) is not None

    def reject(self, key: str, reason: str) -> None:
        digest = self._digests.get(key)
        if digest is not None:
            self._passing.pop(digest, None)
            self.tier.drop(self._cache_id, digest)

    def read(self, key: str, start: int = 0, stop: int | None = None) -> bytes:
        if _is_chunk(key):
            piece = self._far.read(key, start, stop)
            self._count("bytes_fetched", len(piece))
            return piece
        return bytes(self._document(key)[start:stop])

    def entries(self, prefix: str) -> Iterator[Entry]:
        kept = []
        if self._is_away:
            kept = self._kept_entries(prefix)
        if not kept:
            try:
                kept = list(self._far.entries(prefix))
            except StoreUnavailable:
                self._note_away()
                kept = self._kept_entries(prefix)
                if not kept:
                    raise
        yield from kept

    def folders(self, prefix: str) -> list[str]:
        try:
            return super().folders(prefix) if self._is_away else self._far.folders(prefix)
        except StoreUnavailable:
            return super().folders(prefix)

    def head(self, key: str) -> Entry | None:
        try:
            return super().head(key) if self._is_away else self._far.head(key)
        except StoreUnavailable:
            return super().head(key)

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
        path = None if digest is None else os.path.join(self.tier.path, self.tier.chunk(self._cache_id, digest))
        return path if path is not None and os.path.exists(path) else None

    def document(self) -> Mapping[str, Any]:
        """That of the store behind: a worker that makes chunks reads each input once."""
        return self._original.document()

    def __reduce__(self) -> tuple[Any, ...]:
        return (_reopened, (self._near, self._original, self._options))

    @property
    def _cache_id(self) -> str:
        if self._known_id is None:
            with self._identifying:  # one thread asks, and those that fetch the first chunks wait for it
                if self._known_id is None:
                    self._known_id = self._read_id()
        return self._known_id

    def _read_id(self) -> str:
        try:
            found = str(json.loads(bytes(self._document(_CACHE)))["cache_id"])
        except Missing:
            raise
        except (ValueError, KeyError, TypeError, RecursionError) as error:
            raise IndexCorrupt(self.address, _CACHE, "it has no cache id") from error
        self.identify(found)
        return found

    def identify(self, cache_id: str) -> None:
        """Use the id that a generation has, instead of asking for `cache.json`."""
        known = {"address": self.address, "cache_id": cache_id}
        self.tier.keep_document(self.address, "address", json.dumps(known).encode())
        self._known_id = cache_id

    def has_copy(self, expect: Expected) -> bool:
        """Whether the tier keeps a chunk."""
        assert expect.sha256 is not None
        return os.path.exists(os.path.join(self.tier.path, self.tier.chunk(self._cache_id, expect.sha256)))

    def kept_digests(self) -> frozenset[str]:
        """The SHA-256 of the chunks that the tier keeps of this cache, by the names in its folder."""
        return self.tier.digests(self._cache_id)

    def _document(self, key: str) -> memoryview:
        if key in self._current or self._is_away:
            with suppress(Missing):
                return self.tier.document(self.address, key)
        try:
            value = self._fetched_document(key)
        except StoreUnavailable as error:
            self._note_away()
            try:
                return self.tier.document(self.address, key)
            except Missing:
                raise error from None
        if self.tier.keep_document(self.address, key, value):
            self._current.add(key)
        return value

    def _fetched_document(self, key: str) -> memoryview:
        """A document of the far store; a large one is an index, which is not held in memory."""
        if key.endswith(".json"):
            return memoryview(self._far.read(key, 0, MAX_DOCUMENT_BYTES + 1))
        return load_index(self._far, key)

    @property
    def _is_away(self) -> bool:
        return time.monotonic() < self._away_until

    def _note_away(self) -> None:
        self._away_until = time.monotonic() + _AWAY_SECONDS

    def _kept_entries(self, prefix: str) -> list[Entry]:
        return [Entry(name, size) for name, size in self.tier.documents(self.address) if name.startswith(prefix)]

    def _kept(self, expect: Expected) -> memoryview | None:
        """The chunk in the tier, None if it is not there; one of another size is dropped."""
        assert expect.sha256 is not None
        try:
            view = self.tier.files.view(self.tier.chunk(self._cache_id, expect.sha256))
        except Missing:
            return None
        if len(view) == expect.size:
            return view
        self.tier.drop(self._cache_id, expect.sha256)
        return None

    def _filled(self, key: str, expect: Expected, digest: bytes) -> memoryview:
        view = self._admitted(key, expect, digest)
        if view is None:
            view = self._passing[digest] = self._pass(key, expect)
        return view

    def _admitted(self, key: str, expect: Expected, digest: bytes) -> memoryview | None:
        """Fetch a chunk into the tier, unless another process does so first; None if there is no room."""
        with self.tier.filling(self._cache_id, digest) as part:
            view = self._kept(expect)
            if view is not None:  # another process has fetched it
                self.tier.discard_part(self._cache_id, digest)
                return view
            if self.tier.admit(part, expect.size):
                try:
                    self._fetch(key, expect, part)
                    os.fsync(part)
                except BaseException:
                    self.tier.discard_part(self._cache_id, digest)
                    raise
                self.tier.publish(self._cache_id, digest)
                return map_file(part)
            self.tier.discard_part(self._cache_id, digest)
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
                raise StoreFull(self.tier.path, key, problem) from error

    def _fetch(self, key: str, expect: Expected, descriptor: int) -> None:
        """Write a chunk into a file; fetch it a second time where its SHA-256 is wrong, then raise `BadCopy`."""
        found = b""
        for attempt in range(2):
            if attempt:
                self._count("retries")
            found = self._fetch_once(key, expect.size, descriptor)
            if found == expect.sha256:
                self._count("fetched")
                return
        assert expect.sha256 is not None
        problem = (
            f"'{self.address}/{key}' was fetched twice, and its SHA-256 is {found.hex()}, not {expect.sha256.hex()}"
        )
        raise BadCopy(key, problem)

    def _fetch_once(self, key: str, size: int, descriptor: int) -> bytes:
        digest = hashlib.sha256()
        os.ftruncate(descriptor, size)
        for start in range(0, size, RANGE_BYTES):
            piece = self._range(key, start, min(start + RANGE_BYTES, size))
            digest.update(piece)
            _write_at(descriptor, piece, start)
            if start + len(piece) < min(start + RANGE_BYTES, size):
                break  # the object ends here, and a forged size could ask for millions of ranges
        return digest.digest()

    def _range(self, key: str, start: int, stop: int) -> bytes:
        for pause in (*_PAUSES, None):
            try:
                piece = self._far.read(key, start, stop)
            except StoreUnavailable:
                if pause is None:
                    raise
                self._count("retries")
                time.sleep(pause)
            else:
                self._count("bytes_fetched", len(piece))
                return piece
        raise AssertionError("the last attempt returns or raises")

    def _count(self, name: str, more: int = 1) -> None:
        with self._lock:
            self._counts[name] += more

    @contextmanager
    def _flight(self, digest: bytes) -> Iterator[None]:
        """Let one thread of this process fetch a chunk; the others wait for it."""
        with self._lock:
            flight = self._flights.setdefault(digest, _Flight())
            flight.waiting += 1
        try:
            with flight.lock:
                yield
        finally:
            with self._lock:
                flight.waiting -= 1
                if not flight.waiting:
                    self._flights.pop(digest, None)


class _Flight:
    """A chunk that a thread fetches, and how many threads want it."""

    def __init__(self) -> None:
        self.lock = threading.Lock()
        self.waiting = 0


def _reopened(near: LocalStore, far: Store, options: dict[str, Any]) -> TieredStore:
    return TieredStore(near, far, **options)


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


if hasattr(os, "register_at_fork"):
    os.register_at_fork(after_in_child=_forked)


_process = object()  # identifies this process
_numbers = itertools.count()  # of stores; an `id` is used again, and a forked process would read another store
_stores: "weakref.WeakValueDictionary[int, ThroughParent]" = weakref.WeakValueDictionary()
_server: "_Server | None" = None
_SECONDS = 600.0  # to wait for an answer; a slow line may take long for one range


class ThroughParent(Store):
    """A store as its own process and the forked ones use it; forked ones cannot write."""

    def __init__(self, store: Store) -> None:
        self.address = store.address
        self._store = store
        self._process = _process
        self._server: str | None = None  # path of the socket, known to forked processes
        self._number = next(_numbers)
        _stores[self._number] = self

    def read(self, key: str, start: int = 0, stop: int | None = None) -> bytes:
        if self._is_here:
            return self._store.read(key, start, stop)
        return self._ask("read", key, start, stop)

    def view(self, key: str, *, expect: Expected | None = None) -> memoryview:
        return self._store.view(key, expect=expect) if self._is_here else super().view(key, expect=expect)

    def entries(self, prefix: str) -> Iterator[Entry]:
        if self._is_here:
            return self._store.entries(prefix)
        return (Entry(*each) for each in json.loads(self._ask("entries", prefix)))

    def folders(self, prefix: str) -> list[str]:
        return self._store.folders(prefix) if self._is_here else super().folders(prefix)

    def head(self, key: str) -> Entry | None:
        return self._store.head(key) if self._is_here else super().head(key)

    def create(self, key: str, data: Sequence[Buffer], *, durable: bool = True) -> bool:
        return self._writable().create(key, data, durable=durable)

    def replace(self, key: str, data: Sequence[Buffer], *, if_etag: str | None = None, durable: bool = True) -> bool:
        return self._writable().replace(key, data, if_etag=if_etag, durable=durable)

    def delete(self, key: str, *, if_etag: str | None = None) -> None:
        self._writable().delete(key, if_etag=if_etag)

    def leftovers(self) -> Iterator[Entry]:
        return self._store.leftovers() if self._is_here else iter(())

    def free_bytes(self) -> int | None:
        return self._store.free_bytes() if self._is_here else None

    @property
    def _is_here(self) -> bool:
        return self._process is _process

    def _writable(self) -> Store:
        if not self._is_here:
            problem = "this process was forked from the one that opened it, and can only read"
            raise StoreRefused(self.address, problem, "start the process with the method 'spawn', and open it there")
        return self._store

    def _ask(self, method: str, *arguments: Any) -> bytes:
        try:
            with socket.socket(socket.AF_UNIX, socket.SOCK_STREAM) as connection:
                connection.settimeout(_SECONDS)
                connection.connect(self._server or "")
                request = {"store": self._number, "method": method, "arguments": arguments}
                with connection.makefile("rwb") as file:
                    file.write(json.dumps(request).encode() + b"\n")
                    file.flush()
                    answer = json.loads(file.readline())
                    if "error" not in answer:
                        return _exactly(file, answer["size"])
        except (OSError, ValueError) as error:
            raise StoreUnavailable(
                self.address,
                "read",
                f"the process that opened it, and reads it for this forked one, has ended ({error})",
                "keep that process running, or start this one with the method 'spawn'",
            ) from error
        raise _raised(self.address, answer)


class _Server:
    """Answers forked processes, one thread for each request."""

    def __init__(self) -> None:
        self.folder = tempfile.mkdtemp(prefix="forebay-")
        self.path = os.path.join(self.folder, "store")
        self.process = os.getpid()
        self._socket = socket.socket(socket.AF_UNIX, socket.SOCK_STREAM)
        self._socket.bind(self.path)
        self._socket.listen(64)
        threading.Thread(target=self._listen, name="forebay-parent", daemon=True).start()
        atexit.register(self.close)

    def close(self) -> None:
        if os.getpid() == self.process:
            shutil.rmtree(self.folder, ignore_errors=True)

    def close_copy(self) -> None:
        """Close a forked process's copy of the socket."""
        self._socket.close()

    def _listen(self) -> None:
        while True:
            with suppress(OSError):
                connection, _ = self._socket.accept()
                threading.Thread(target=_answer, args=(connection,), name="forebay-answer", daemon=True).start()


def _answer(connection: socket.socket) -> None:
    with suppress(OSError, ValueError, KeyError), connection, connection.makefile("rwb") as file:
        request = json.loads(file.readline())
        store = _stores[request["store"]]
        try:
            value = _performed(store, request["method"], request["arguments"])
        except (ForebayError, Missing, OSError) as error:
            file.write(json.dumps(_described(error)).encode() + b"\n")
            return
        file.write(json.dumps({"size": len(value)}).encode() + b"\n")
        file.write(value)


def _performed(store: ThroughParent, method: str, arguments: list[Any]) -> bytes:
    if method == "entries":
        found = [[entry.key, entry.size, entry.etag, entry.written] for entry in store.entries(*arguments)]
        return json.dumps(found).encode()
    return store.read(*arguments)


def _described(error: BaseException) -> dict[str, Any]:
    if isinstance(error, StoreUnavailable):
        return {"error": "StoreUnavailable", "arguments": [error.address, error.what, error.cause, error.advice]}
    if isinstance(error, StoreRefused):
        return {"error": "StoreRefused", "arguments": [str(error)]}
    detail = error.args[0] if isinstance(error, Missing) else error  # a KeyError puts quotes around its text
    return {"error": type(error).__name__, "arguments": [str(detail)]}


def _raised(address: str, answer: dict[str, Any]) -> Exception:
    name, arguments = answer["error"], answer["arguments"]
    if name == "Missing":
        return Missing(*arguments)
    if name == "StoreUnavailable":
        return errors.StoreUnavailable(*arguments)
    return StoreRefused(address, f"{name}: {arguments[0]}", "see the message of the process that opened it")


class _Readable(Protocol):
    def read(self, size: int, /) -> bytes: ...


def _exactly(file: _Readable, size: int) -> bytes:
    value = file.read(size)
    if len(value) != size:
        raise OSError("the answer was cut short")
    return value


def _before_fork() -> None:
    global _server
    here = [store for store in list(_stores.values()) if store._is_here]
    if not here:
        return
    if _server is None:
        _server = _Server()
    for store in here:
        store._server = _server.path


def _after_fork() -> None:
    global _process, _server
    _process = object()
    if _server is not None:
        _server.close_copy()
    _server = None


if hasattr(os, "register_at_fork"):
    os.register_at_fork(before=_before_fork, after_in_child=_after_fork)
