"""Objects of a bucket as the files of a source: names, listings, identities and a reader that seeks.

A source in a bucket has a URL as its root and names every object relative to it, as a source in a folder does: the same
files make the same bytes wherever they are. An object is identified by its size and its etag.
"""

import posixpath
from collections.abc import Iterator, Sequence
from concurrent.futures import ThreadPoolExecutor
from functools import lru_cache
from typing import TYPE_CHECKING, Any

from forebay.errors import SourceNotFound
from forebay.source import SourceFile
from forebay.store.base import SCHEMES, Entry, Missing
from forebay.store.seekable_file import SeekableFile

if TYPE_CHECKING:
    from forebay.store.object_store import ObjectStore

_FIRST_BYTES = 256 << 10  # fetched at a seek; doubled while reading goes on
_MOST_BYTES = 8 << 20


def split_url(url: str) -> tuple[str, str]:
    """(bucket, key) of a URL, also of one from which a `Path` has taken a slash; the key may be a glob.

    >>> split_url("s3://bucket/data/*.jsonl"), split_url("S3:/bucket")
    (('s3://bucket', 'data/*.jsonl'), ('s3://bucket', ''))
    """
    scheme, _, rest = url.partition(":")
    bucket, _, key = rest.lstrip("/").partition("/")
    if scheme.lower() not in SCHEMES:
        known = ", ".join(f"{name}://" for name in SCHEMES)
        problem = f"its scheme is not one of {known}; data sets on the Hugging Face hub are named hub:org/name"
        raise SourceNotFound(f"no source at '{url}': {problem}", hint="check the path")
    if not bucket or "@" in bucket:
        raise SourceNotFound(
            f"no source at '{scheme.lower()}://…': it names no bucket", hint="write it as s3://bucket/path"
        )
    return f"{scheme.lower()}://{bucket}", key


def join_url(root: str, name: str) -> str:
    """
    >>> join_url("s3://bucket/text", "../more/a.jsonl")
    's3://bucket/more/a.jsonl'
    """
    bucket, key = split_url(root)
    path = posixpath.normpath(f"/{key}/{name}").lstrip("/")
    return f"{bucket}/{path}" if path else bucket


def relative_url(url: str, root: str) -> str:
    """The name of an object or a pattern below a root, which may be outside it."""
    (bucket, key), (at, below) = split_url(url), split_url(root)
    if bucket != at:
        raise SourceNotFound(f"no source at '{url}': it is in another bucket than '{root}'; a source has one root")
    return posixpath.relpath(f"/{key}", f"/{below}")


def common_url(urls: Sequence[str], has_magic: Any) -> str:
    """The deepest folder that all URLs share: a folder itself, the folder of an object, the fixed part of a glob."""
    parts = [split_url(url) for url in urls]
    shared = posixpath.commonpath([f"/{_folder_of(bucket, key, has_magic)}" for bucket, key in parts])
    return join_url(parts[0][0], shared)


def _folder_of(bucket: str, key: str, has_magic: Any) -> str:
    if has_magic(key):
        names = key.split("/")
        return "/".join(names[: next(at for at, name in enumerate(names) if has_magic(name))])
    return posixpath.dirname(key) if key and _bucket(bucket).stat(key.rstrip("/")) is not None else key


@lru_cache(maxsize=8)
def _bucket(url: str) -> "ObjectStore":
    """The store of a whole bucket; imported when it is needed, because its library is optional."""
    from forebay.store.object_store import ObjectStore  # noqa: PLC0415

    return ObjectStore(url)


def entry_of(url: str) -> Entry:
    """Size and etag of an object; `FileNotFoundError` if it does not exist."""
    entry = _entry_or_none(url)
    if entry is None:
        raise FileNotFoundError(2, "there is no such object", url)
    return entry


def entries_of(urls: Sequence[str]) -> list[Entry | None]:
    """Size and etag of some objects, requested concurrently; None for an object that does not exist."""
    with ThreadPoolExecutor(len(urls)) as pool:
        return list(pool.map(_entry_or_none, urls))


def _entry_or_none(url: str) -> Entry | None:
    bucket, key = split_url(url)
    return _bucket(bucket).stat(key)


def read_object(url: str, count: int) -> tuple[bytes, str]:
    """The first bytes and the etag of an object, by one request; `FileNotFoundError` if it does not exist."""
    bucket, key = split_url(url)
    try:
        return _bucket(bucket).fetch(key, 0, count)
    except Missing as error:
        raise FileNotFoundError(2, "there is no such object", url) from error


def as_file(name: str, entry: Entry, stream: bool) -> SourceFile:
    return SourceFile(path=name, size=entry.size, etag=entry.etag, stream=stream)


def objects_below(url: str) -> Iterator[tuple[str, Entry]]:
    """The URL and the entry of every object below a folder, or of the object itself, as the listing arrives."""
    bucket, key = split_url(url)
    exact = _bucket(bucket).stat(key) if key else None
    if exact is not None:
        yield url, exact
        return
    for entry in _bucket(bucket).walk(key.rstrip("/")):
        yield f"{bucket}/{entry.key}", entry


class ObjectReader(SeekableFile):
    """Reads an object by ranges: a small one after a seek, larger ones while reading continues."""

    def __init__(self, url: str) -> None:
        super().__init__(entry_of(url).size)
        bucket, self._key = split_url(url)
        self._store = _bucket(bucket)
        self._start, self._block, self._step = 0, b"", _FIRST_BYTES

    def readinto(self, buffer: Any) -> int:
        wanted = memoryview(buffer).cast("B")
        if not len(wanted) or self.position >= self.size:
            return 0
        at = self.position - self._start
        if not 0 <= at < len(self._block):
            self._fetch(len(wanted))
            at = 0
        count = min(len(wanted), len(self._block) - at)
        wanted[:count] = self._block[at : at + count]
        self.position += count
        return count

    def _fetch(self, wanted: int) -> None:
        goes_on = self._block and self.position == self._start + len(self._block)
        self._step = min(2 * self._step, _MOST_BYTES) if goes_on else _FIRST_BYTES
        stop = min(self.position + max(wanted, self._step), self.size)
        try:
            block, _ = self._store.fetch(self._key, self.position, stop)
        except Missing as error:
            raise FileNotFoundError(2, "the object was deleted while it was read", self._key) from error
        self._start, self._block = self.position, block
        if not self._block:
            raise OSError(5, "the object became shorter while it was read", self._key)
