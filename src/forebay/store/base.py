"""The contract of a store, the store of a path or URL, and reading a value in pieces."""

import errno
import hashlib
import os
import re
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field
from difflib import get_close_matches
from functools import cached_property
from importlib.metadata import entry_points
from pkgutil import resolve_name
from typing import Any, Protocol, runtime_checkable

import msgspec

from forebay.errors import CacheNotFound, Damaged, IndexCorrupt, KeyRefused, StoreFull, StoreRefused
from forebay.store.retries import with_retries

Buffer = bytes | bytearray | memoryview
MAX_KEY_PARTS = 4  # keys of a cache have at most three
MAX_PART_BYTES = 255  # the limit of common file systems
MAX_DOCUMENT_BYTES = 64 << 20
_LISTING_PAUSES = (0.01, 0.1, 0.5, 1.0, 2.0, 4.0, 8.0, 16.0)


class Missing(KeyError):
    """A store has no value under a key. A `KeyError` that is not one of these is a bug, and never means "missing"."""


class BadCopy(ValueError):
    """Every copy that a store has or can fetch of a value differs from what the caller expects."""

    def __init__(self, key: str, problem: str) -> None:
        self.key, self.problem = key, problem
        super().__init__(key, problem)


@dataclass(frozen=True, slots=True)
class Entry:
    """A published key. Its etag changes with the value and has no other meaning; entries compare by key and size."""

    key: str
    size: int
    etag: str = field(default="", compare=False)
    written: float | None = field(default=None, compare=False)  # seconds since 1970; None: unknown


@dataclass(frozen=True, slots=True)
class Expected:
    """The expected size and digest of a value."""

    size: int
    sha256: bytes


@runtime_checkable
class Store(Protocol):
    """A key-value store. A new backend inherits this class and passes `forebay.testing.StoreContract`.

    It implements at least `read`, `create`, `replace`, `entries` and `delete`.

    Keys are relative paths with `/` between their parts; every method raises `StoreRefused` for a key that `check_key`
    rejects, and `Missing` for a key that does not exist. Creation is atomic and durable: a reader sees the whole value
    or none, and creating an existing key returns False.

    Every method raises `StoreRefused` if the store cannot be used at all (permissions, a missing bucket),
    `StoreUnavailable` if a retry may succeed, and `StoreFull` if it is full. All but the first are `OSError`s.
    """

    address: str

    def __repr__(self) -> str:
        return f"<{type(self).__name__} at {self.address!r}>"

    def read(self, key: str, start: int = 0, stop: int | None = None) -> bytes:
        """A range of the value, cut short at its end."""

    def view(self, key: str, *, expect: Expected | None = None) -> memoryview:
        """The whole value, read-only; a memory map if the store has files.

        A store that fetches the value compares it with `expect`, fetches it once more if it differs, then raises
        `BadCopy`. One that maps the original does not look at it: callers check what they read.
        """
        return memoryview(self.read(key))

    def reject(self, key: str, reason: str) -> None:
        """Report a value as bad: a store of copies drops its copy; others do nothing."""
        return None

    def create(self, key: str, data: Sequence[Buffer], *, durable: bool = True) -> bool:
        """Publish the joined buffers under a new key; return False and write nothing if the key exists.

        A value that this call wrote counts as created even if the store's reply was lost. One that is not `durable` may
        be lost in a power cut, but is never half-written.
        """

    def link(self, key: str, other: "Store") -> bool:
        """Create a key as a hard link to the value that another store has under it.

        Returns False and writes nothing if the store cannot, or the key exists.
        """
        return False

    def replace(self, key: str, data: Sequence[Buffer], *, if_etag: str | None = None, durable: bool = True) -> bool:
        """Publish the joined buffers under a new or existing key, atomically.

        With `if_etag`, return False and write nothing unless the key has the value of that etag.
        """

    def entries(self, prefix: str) -> Iterator[Entry]:
        """Every published key that starts with `prefix`, in order."""

    def folders(self, prefix: str) -> list[str]:
        """The next part of every key that continues `prefix` with a part and a `/`, in order.

        `prefix` is empty or ends in `/`. A store with folders may also return empty ones.
        """
        below = (entry.key.removeprefix(prefix).partition("/") for entry in self.entries(prefix))
        return sorted({name for name, slash, _ in below if slash})

    def head(self, key: str) -> Entry | None:
        """Size and etag of a value, None if the key does not exist."""
        check_key(self.address, key)
        return next((entry for entry in self.entries(key) if entry.key == key), None)

    def delete(self, key: str, *, if_etag: str | None = None) -> None:
        """Remove a key, with `if_etag` only if its value has that etag; deleting a missing key is a no-op.

        The comparison and the removal may be two steps.
        """

    def leftovers(self) -> Iterator[Entry]:
        """Temporary files of writers that are dead."""
        return iter(())

    def document(self) -> Mapping[str, Any]:
        """JSON by which a worker opens this store: the import path of its class, and the arguments of the class."""
        kind = type(self)
        return {"class": f"{kind.__module__}:{kind.__qualname__}", "arguments": [self.address]}

    def free_bytes(self) -> int | None:
        """Free space, None if the store does not know it."""
        return None

    def local_path(self, key: str) -> str | None:
        """The path that a value has, or would have, as a file of this machine; None if the store has no files.

        The empty key names the folder of the store.
        """
        return None


def holds(store: Store, key: str) -> bool:
    """Whether a key is published."""
    return store.head(key) is not None


def read_document(store: Store, key: str) -> bytes:
    """The value of a small document: `cache.json`, a recipe, a claim. A huge one raises `Damaged`."""
    value = store.read(key, 0, MAX_DOCUMENT_BYTES + 1)
    if len(value) > MAX_DOCUMENT_BYTES:
        raise not_forebay(key, f"it has more than {MAX_DOCUMENT_BYTES:,} bytes")
    return value


def wait_until_listed(store: Store, key: str) -> None:
    """After `create` returned False: wait until the key is listed or deleted, so that the next listing is current.

    A network file system may return a listing that is some seconds old. Raises `StoreRefused` after half a minute,
    because callers would retry forever.
    """
    for pause in _LISTING_PAUSES:
        if any(entry.key == key for entry in store.entries(key)) or not holds(store, key):
            return
        time.sleep(pause)
    problem = f"'{key}' exists but is not in the listing of its folder"
    raise StoreRefused(
        f"'{store.address}' cannot be used as a store: {problem}", hint="check what it is and move it away"
    )


def check_key(address: str, key: str) -> None:
    """Reject a key that could leave the root on some system."""
    problem = _key_problem(key)
    if problem is not None:
        raise StoreRefused(
            f"'{address}' cannot be used as a store: the key {key[:80]!r} {problem}; keys are "
            "relative names with / between them"
        )


def is_key(key: str) -> bool:
    return _key_problem(key) is None


_PLAIN_KEY = re.compile(r"(?:\w[\w.-]{0,99}/){0,3}(?:\.tmp-)?\w[\w.-]{0,99}", re.ASCII)  # nearly every key


def _key_problem(key: str) -> str | None:
    if _PLAIN_KEY.fullmatch(key):
        return None
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
    """True if an error means that the store is full."""
    return isinstance(error, StoreFull) or error.errno in (errno.ENOSPC, errno.EDQUOT)


@contextmanager
def naming_full_disk(store: Store, needed: Callable[[], int]) -> Iterator[None]:
    """Raise `StoreFull` with the bytes that are needed and free, if the disk is full."""
    try:
        yield
    except OSError as error:
        if not is_full(error):
            raise
        raise disk_full(store.address, needed(), store.free_bytes() or 0) from error


PIECE_BYTES = 4 << 20
IN_MEMORY_BYTES = 4 << 20  # of an index file; planning millions of samples must not hold their numbers
MAX_INDEX_BYTES = 8 << 30  # of an index file: a hundred million source files; a sparse file can have any size


class View(Protocol):
    """Bytes that are read in slices: a `memoryview`, or `Pieces` of a stored value."""

    def __len__(self) -> int: ...

    def __getitem__(self, part: slice, /) -> memoryview: ...


class Pieces:
    """A stored value as a `View` whose slices are read on demand, with its SHA-256.

    Its size is known before any of it is read, and asking for the digest reads all of it. Small slices come from the
    last piece read; a value that is not a file is fetched once, whole. Raises what the store raises (`Missing`,
    `OSError`). Not thread-safe.
    """

    def __init__(self, store: Store, key: str) -> None:
        self._store, self._key = store, key
        if (entry := store.head(key)) is None:
            raise Missing(key)
        self._size = entry.size
        self._start, self._piece = 0, b""

    @cached_property
    def _whole(self) -> memoryview | None:
        if self._store.local_path(self._key) is not None:
            return None
        whole = self._store.view(self._key)
        if len(whole) != self._size:
            raise OSError(f"'{self._key}' was replaced while it was read")
        return whole

    @cached_property
    def sha256(self) -> bytes:
        if self._whole is not None:
            return hashlib.sha256(self._whole).digest()
        digest = hashlib.sha256()
        for start in range(0, max(1, self._size), PIECE_BYTES):
            stop = min(start + PIECE_BYTES, self._size)
            piece = self._store.read(self._key, start, stop + (stop == self._size))  # at the end, one byte more
            if len(piece) != stop - start:
                how = "longer" if len(piece) > stop - start else "shorter"
                raise OSError(f"'{self._key}' became {how} while it was read")
            digest.update(piece)
        return digest.digest()

    def __len__(self) -> int:
        return self._size

    def __getitem__(self, part: slice, /) -> memoryview:
        start, stop, _ = part.indices(self._size)
        if start >= stop:
            return memoryview(b"")
        if self._whole is not None:
            return self._whole[start:stop]
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

    A file larger than `in_memory` is read to the end once, then mapped. A value that is not a file is fetched whole.
    """
    if store.local_path(key) is None:
        return store.view(key)
    try:
        return with_retries(lambda: _read_through(store, key, in_memory))
    except OSError as error:
        if error.errno != errno.EIO:
            raise
        raise index_corrupt(store.address, key, f"it cannot be read: {error.strerror}") from error


def _read_through(store: Store, key: str, in_memory: int) -> memoryview:
    entry = store.head(key)
    if entry is not None and entry.size > MAX_INDEX_BYTES:
        return store.view(key)  # its decoder rejects it by its size
    pieces: list[bytes] = []
    size = 0
    while piece := store.read(key, size, size + PIECE_BYTES):
        size += len(piece)
        pieces = [*pieces, piece] if size <= in_memory else []
    return memoryview(b"".join(pieces)) if size <= in_memory else store.view(key)


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


class Transfers(msgspec.Struct, frozen=True, kw_only=True):
    """Counts since a store was opened by this process."""

    hits: int = 0  # chunks that were in the tier when they were needed
    misses: int = 0  # chunks that were not
    fetched: int = 0  # chunks that this process fetched; another process may have fetched the other misses
    bytes_fetched: int = 0
    retries: int = 0  # fetches that were repeated after an error or wrong bytes

    def __add__(self, other: "Transfers") -> "Transfers":
        return Transfers(**{name: getattr(self, name) + getattr(other, name) for name in self.__struct_fields__})


@runtime_checkable
class Fetching(Protocol):
    """A store that fetches values from another one on request."""

    def transfers(self) -> Transfers:
        """Counts of fetches so far."""
        ...


Root = str | os.PathLike[str] | Store
_LOCAL = "forebay.store.local:LocalStore"  # named, not imported: stores import this module
SCHEMES = dict.fromkeys(("s3", "gs", "az", "memory"), "forebay.store.object_store:ObjectStore")
_ALIASES = {"s3a": "s3", "s3n": "s3", "gcs": "gs", "azure": "az", "abfs": "az", "abfss": "az", "wasb": "az"}

_SCHEME = re.compile(r"[A-Za-z][A-Za-z0-9+.-]+:/")
_PASSWORD = re.compile(r"(?<=/)[^/@]*:[^/@]*@")  # and its user, of a URL that an error shows


def is_url(name: str) -> bool:
    """Whether a name has a scheme, also where a `Path` has taken one of its slashes.

    >>> is_url("s3://bucket/cache"), is_url("s3:/bucket/cache"), is_url("./s3:/x"), is_url("C:/x")
    (True, True, False, False)
    """
    return _SCHEME.match(name) is not None


def meant_url(name: object) -> str:
    """The URL that a text with one slash was meant to be, else "". A `Path` is not a text: it takes the other slash.

    >>> meant_url("s3:/bucket/cache"), meant_url("s3://bucket/cache")
    ('s3://bucket/cache', '')
    """
    if not isinstance(name, str) or not is_url(name) or "://" in name:
        return ""
    return name.replace(":/", "://", 1)


def open_store(root: Root) -> Store:
    """The store at a path or a URL; a store is returned unchanged.

    Schemes are those of `SCHEMES` and of the entry points in the group `forebay.stores`: callables that take the URL.
    """
    if isinstance(root, Store) and not isinstance(root, (str, os.PathLike)):
        return root
    if not isinstance(root, (str, os.PathLike)):
        raise TypeError(
            f"expected a path, a URL or a store, not {type(root).__name__}; of an open cache, pass its root"
        )
    path = os.fspath(root)
    if not is_url(path):
        return _opened(_LOCAL, path)
    scheme = path.partition(":/")[0]
    known = SCHEMES if scheme.lower() in SCHEMES else _schemes_of_others() | SCHEMES
    if scheme.lower() not in known:
        shown = _PASSWORD.sub("", path.partition("?")[0])
        rest = shown.partition(":/")[2]
        raise StoreRefused(
            f"'{shown}' cannot be used as a store: no store has the scheme '{scheme}'",
            hint=_advice(scheme.lower(), rest, list(known)),
        )
    if meant := meant_url(root):
        raise StoreRefused(
            f"'{path}' cannot be used as a store: a URL has two slashes",
            hint=f"did you mean {meant}? (a folder of that name is ./{path})",
        )
    return _opened(known[scheme.lower()], path)


def _schemes_of_others() -> dict[str, str]:
    return {point.name: point.value for point in entry_points(group="forebay.stores")}


def _opened(named: str, path: str) -> Store:
    store: Store = resolve_name(named)(path)
    return store


def _advice(scheme: str, rest: str, known: list[str]) -> str:
    if scheme == "file":
        return f"pass the path '/{rest.lstrip('/')}'"
    meant = [_ALIASES[scheme]] if scheme in _ALIASES else get_close_matches(scheme, known, 1, 0.5)
    if meant:
        return f"did you mean {meant[0]}://{rest.lstrip('/')}?"
    return f"use a path, or one of {', '.join(f'{name}://' for name in sorted(known))}"


def cache_not_found(root: str) -> CacheNotFound:
    hint = f"build one with `forebay build … --into {root}`"
    if os.path.isfile(root):
        hint = "it is a file; pass the folder that `forebay build … --into` created"
    if root.startswith("memory://"):
        hint = "memory:// only holds what this process built; pass a folder or a bucket"
    return CacheNotFound(f"there is no cache at '{root}'", hint=hint, root=root)


def nothing_published(root: str, generation: int | None = None) -> CacheNotFound:
    what = "no generation" if generation is None else f"no generation {generation}"
    return CacheNotFound(
        f"the cache at '{root}' has {what}",
        hint=f"finish its build, or run `forebay repair {root} --from COPY`",
        root=root,
    )


def not_forebay(where: str, problem: str, hint: str = "run `forebay repair` on the cache") -> Damaged:
    return Damaged(f"'{where}' is not a file forebay wrote: {problem}", hint=hint, problem=problem)


def index_corrupt(root: str, key: str, problem: str) -> IndexCorrupt:
    message = f"'{key}' of the cache at '{root}' is corrupt: {problem}"
    return IndexCorrupt(message, hint=f"run `forebay repair {root}`", root=root, key=key, problem=problem)


def key_refused(root: str, key: str, problem: str) -> KeyRefused:
    message = f"'{key}' of the cache at '{root}' is rejected: {problem}"
    return KeyRefused(message, root=root, key=key, problem=problem)


def disk_full(root: str, needed: int, free: int) -> StoreFull:
    why = f"about {needed:,} bytes are needed, {free:,} are free"
    if free >= needed:  # a quota, no free inodes, or files that take whole blocks
        why = f"a write failed although {free:,} bytes are free (check the quota and `df -i`)"
    hint = "free some space and run the same command to resume; published chunks stay valid"
    return StoreFull(f"not enough disk space at '{root}': {why}", hint=hint, root=root, needed=needed, free=free)
