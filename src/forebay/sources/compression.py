"""Compressed files as streams of bytes with a position.

A process keeps its last stream open, so that consecutive parts of a file decompress it once. The stored bytes are
hashed while they are read: `take_digest` returns the digest of a file that was read to its end, so that planning does
not fetch it again from a bucket. A small file that expands beyond `MOST_RATIO` is rejected while it is read.
"""

import atexit
import bz2
import gzip
import lzma
import sys
import zlib
from collections.abc import Iterator
from contextlib import AbstractContextManager, contextmanager, suppress
from functools import lru_cache
from io import BufferedReader, BytesIO, RawIOBase
from typing import BinaryIO, Literal, Protocol, cast

import xxhash

from forebay.source import SourceFile, source_unreadable
from forebay.sources.opening import open_file, open_planned

if sys.version_info >= (3, 14):
    from compression import zstd as zstd
else:
    from backports import zstd as zstd

Packing = Literal["gzip", "zstd", "bzip2", "xz"]
FORMATS: dict[str, Packing] = {
    ".gz": "gzip",
    ".gzip": "gzip",
    ".zst": "zstd",
    ".zstd": "zstd",
    ".bz2": "bzip2",
    ".xz": "xz",
}
_MOST_WINDOW_LOG = 31  # `zstd --long=31`: the window is reserved at once, but uses memory only as it fills
_MOST_XZ_MEMORY = 512 << 20  # `xz -9` needs 65 MiB
_STORED_STEP = 1 << 16
MOST_RATIO = 1000  # text that compresses better is useless for training
LEAST_SAMPLES = 4  # samples of the largest size that any file may contain
_READ_BYTES = 1 << 20
_BUFFER = 1 << 16
_ERRORS = (EOFError, OSError, zlib.error, lzma.LZMAError, zstd.ZstdError)


def format_of(path: str) -> Packing:
    """
    >>> format_of("a.jsonl.GZ"), format_of("c4.json.zstd")
    ('gzip', 'zstd')
    """
    return FORMATS["." + path.lower().rpartition(".")[2]]


class _Readable(Protocol):
    def read(self, count: int, /) -> bytes: ...


class _Decompressor(Protocol):
    """The common interface of `BZ2Decompressor`, `LZMADecompressor` and `ZstdDecompressor`."""

    @property
    def eof(self) -> bool: ...
    @property
    def needs_input(self) -> bool: ...
    @property
    def unused_data(self) -> bytes: ...
    def decompress(self, data: bytes, max_length: int) -> bytes: ...


class Members:
    """The decompressed bytes of all members or frames of a bzip2, xz or Zstandard file.

    `BZ2File` and `LZMAFile` drop everything after a damaged second member without an error; this raises.
    """

    def __init__(self, stored: _Readable, packing: Packing) -> None:
        self._stored, self._packing = stored, packing
        self._member: _Decompressor | None = None
        self._input = b""

    def read(self, count: int) -> bytes:
        """At most `count` bytes; empty at the end."""
        while member := self._member or self._next_member():
            if member.needs_input and not self._input:
                self._input = self._stored.read(_STORED_STEP)
                if not self._input:
                    raise EOFError("the file ends in the middle of a stream")
            data = member.decompress(self._input if member.needs_input else b"", count)
            self._input = member.unused_data if member.eof else b""
            self._member = None if member.eof else member
            if data:
                return data
        return b""

    def _next_member(self) -> _Decompressor | None:
        """Start the next member; None if only padding is left."""
        while not (rest := self._input.lstrip(b"\0")):
            self._input = self._stored.read(_STORED_STEP)
            if not self._input:
                return None
        self._input = rest
        if self._packing == "bzip2":
            return bz2.BZ2Decompressor()
        if self._packing == "zstd":
            return zstd.ZstdDecompressor(options={zstd.DecompressionParameter.window_log_max: _MOST_WINDOW_LOG})
        return lzma.LZMADecompressor(lzma.FORMAT_XZ, _MOST_XZ_MEMORY)


def _decompressed(stored: _Readable, path: str) -> _Readable:
    packing = format_of(path)
    return gzip.GzipFile(fileobj=cast(BinaryIO, stored)) if packing == "gzip" else Members(stored, packing)


class HashedBytes:
    """The next `size` bytes of a file, hashed while they are read."""

    def __init__(self, file: BinaryIO, size: int) -> None:
        self._file, self._left, self._running = file, size, xxhash.xxh3_64()

    def read(self, count: int) -> bytes:
        data = self._file.read(min(count, self._left))
        self._left -= len(data)
        self._running.update(data)
        return data

    def digest(self) -> int | None:
        """The hash of all bytes; None unless all were read."""
        return self._running.intdigest() if not self._left else None


class DecompressedStream(AbstractContextManager["DecompressedStream"]):
    """Decompressed bytes of a file, forward only, up to the size that it had when it was listed.

    `position` and `newlines` count what was read. The decompressed size may be `MOST_RATIO` times the stored size, or
    `LEAST_SAMPLES` times `max_sample_bytes` if that is more. With `is_planned`, a changed file raises `SourceChanged`.
    """

    def __init__(self, path: str, file: SourceFile, max_sample_bytes: int, is_planned: bool = False) -> None:
        self.path = path
        self.file = file
        self.most = most_unpacked(file, max_sample_bytes)
        self.position = 0
        self.newlines = 0
        take_digest(path, file)  # of another pass
        raw = open_planned(path, file) if is_planned else open_file(path)
        self._file = BufferedReader(cast(RawIOBase, raw), _BUFFER)
        self._stored = HashedBytes(cast(BinaryIO, self._file), file.size)
        self._plain = _decompressed(self._stored, path)

    def __exit__(self, *_: object) -> None:
        self.close()

    def close(self) -> None:
        self._file.close()
        _keep_digest(self.path, self.file, self._stored.digest())

    def read(self, count: int) -> bytes:
        """At most `count` bytes; empty at the end."""
        with _named_errors(self.path, self):
            data = self._plain.read(count)
        self.position += len(data)
        if self.position > self.most:
            stored = f"{self.file.size:,} stored bytes unpack to more than {self.most:,}"
            raise source_unreadable(self.path, f"its {stored}; unpack it first, or raise max_sample_bytes")
        self.newlines += data.count(b"\n")
        return data

    def skip(self, count: int) -> int:
        """Skip bytes; returns how many were skipped."""
        left = count
        while left > 0 and (data := self.read(min(left, _READ_BYTES))):
            left -= len(data)
        return count - left


@contextmanager
def _named_errors(path: str, stream: DecompressedStream | None = None) -> Iterator[None]:
    """Raise `SourceUnreadable` for invalid content; errors of the disk propagate."""
    try:
        yield
    except _ERRORS as error:
        if isinstance(error, OSError) and error.errno is not None:
            raise
        where = f"line {stream.newlines + 1}, after {stream.position:,} decompressed bytes: " if stream else ""
        raise source_unreadable(path, f"{where}{error}") from error


_MOST_DIGESTS = 64
_digests: dict[tuple[str, SourceFile], int] = {}  # of files that were read to their end, oldest first


def take_digest(path: str, file: SourceFile) -> int | None:
    """The digest of the bytes that the last stream of a file read to its end, once; None if there is none."""
    return _digests.pop((path, file), None)


def _keep_digest(path: str, file: SourceFile, digest: int | None) -> None:
    if digest is not None:
        _digests[path, file] = digest
        for oldest in list(_digests)[:-_MOST_DIGESTS]:
            _digests.pop(oldest, None)


_last: list[DecompressedStream] = []


@contextmanager
def stream_at(path: str, file: SourceFile, position: int, max_sample_bytes: int) -> Iterator[DecompressedStream]:
    """A stream at a position: the last stream of this process if it is not past it, otherwise a new one.

    It is kept open as the last stream afterwards.
    """
    if _last and (_last[0].file, _last[0].path) == (file, path) and _last[0].position <= position:
        stream = _last.pop()
        stream.most = most_unpacked(file, max_sample_bytes)
    else:
        _close_last()
        stream = DecompressedStream(path, file, max_sample_bytes, is_planned=True)
    try:
        stream.skip(position - stream.position)
        yield stream
    except BaseException:  # cleaned up also on Ctrl+C
        stream.close()
        raise
    _close_last()
    _last.append(stream)


@atexit.register
def _close_last() -> None:
    while _last:
        _last.pop().close()


def most_unpacked(file: SourceFile, max_sample_bytes: int) -> int:
    """The largest decompressed size that is accepted."""
    return max(MOST_RATIO * file.size, LEAST_SAMPLES * max_sample_bytes)


_ESTIMATED_SHARE = 100  # 1/100 of a file is read
_LEAST_ESTIMATED = 16 * 1024
_MOST_ESTIMATED = 256 * 1024
_FIRST_BLOCK = 1 << 20  # contains the first block of any file
_USUAL_RATIO = 4.0  # if the beginning is too short
_MOST_UNPACKED = 1 << 26  # limit for a beginning that expands very much


@lru_cache(maxsize=1 << 16)
def estimated_size(path: str, file: SourceFile) -> int:
    """The decompressed size of a compressed file, estimated from its beginning; it depends on the file only."""
    with open_file(path) as raw, _named_errors(path):
        least = _LEAST_ESTIMATED if format_of(path) in ("gzip", "zstd") else _FIRST_BLOCK
        head = raw.read(min(max(least, min(file.size // _ESTIMATED_SHARE, _MOST_ESTIMATED)), file.size))
        ratio = _ratio(head, path)
        if not ratio and len(head) < file.size:  # no block ends there
            raw.seek(0)
            ratio = _ratio(raw.read(min(_FIRST_BLOCK, file.size)), path) or _USUAL_RATIO
    return int(ratio * file.size)


def _ratio(head: bytes, path: str) -> float:
    """Decompressed bytes per stored byte at the beginning of a file, up to the last byte that can be decompressed."""
    stored, unpacked, ratio = BytesIO(head), 0, 0.0
    plain = _decompressed(stored, path)
    read = plain.read1 if isinstance(plain, gzip.GzipFile) else plain.read
    with suppress(EOFError):  # the beginning ends anywhere
        while unpacked < _MOST_UNPACKED and (piece := read(_READ_BYTES)):
            unpacked += len(piece)
            ratio = unpacked / stored.tell()
    return ratio
