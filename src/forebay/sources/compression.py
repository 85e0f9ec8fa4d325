"""Compressed files as streams of bytes with a position.

frame      header │ block │ block │ … │ last block │ checksum, if the header says so
block      3 bytes: last? 1 bit, type 2 bits, size 21 bits, then its content (one byte, if it is one byte repeated)
skippable  magic 0x184D2A5?, 4 bytes of size, content

Planning estimates the size of a file, finds cuts and previews samples, all from its beginning: `head_cache` keeps that
in memory, so that it is read from disk once. Data for a cache is always read from disk.

A process keeps its last stream open, so that consecutive parts of a file decompress it once. The stored bytes are
hashed while they are read: `take_digest` returns the digest of a file that a stream has read to its end, so that
planning does not read it again. A small file that expands beyond `MOST_RATIO` is rejected while it is read.
"""

import atexit
import bz2
import gzip
import io
import lzma
import zlib
from collections.abc import Callable, Iterator
from contextlib import AbstractContextManager, contextmanager, suppress
from functools import lru_cache
from typing import IO, BinaryIO, Literal, cast

import xxhash
import zstandard

from forebay.errors import SourceUnreadable
from forebay.source import SourceFile, open_regular
from forebay.sources.bucket_files import open_object, read_at
from forebay.store.base import is_url

Packing = Literal["gzip", "zstd", "bzip2", "xz"]
FORMATS: dict[str, Packing] = {
    ".gz": "gzip",
    ".gzip": "gzip",
    ".zst": "zstd",
    ".zstd": "zstd",
    ".bz2": "bzip2",
    ".xz": "xz",
}
# `zstd --long=31`. The window is reserved when a file is opened, but uses memory only as it fills.
MOST_WINDOW = 1 << 31
_MOST_XZ_MEMORY = 512 << 20  # `xz -9` needs 65 MiB
_BLOCK = 1 << 16


def format_of(path: str) -> Packing:
    """
    >>> format_of("a.jsonl.GZ"), format_of("c4.json.zstd")
    ('gzip', 'zstd')
    """
    return FORMATS["." + path.lower().rpartition(".")[2]]


class Members:
    """The decompressed bytes of all streams of a bzip2 or xz file."""

    def __init__(self, stored: BinaryIO, packing: Packing) -> None:
        self._stored, self._packing = stored, packing
        self._member: bz2.BZ2Decompressor | lzma.LZMADecompressor | None = None
        self._ahead = b""

    def read(self, count: int) -> bytes:
        """At most `count` bytes; empty at the end."""
        while self._member is not None or self._begins_another():
            assert self._member is not None
            if self._member.needs_input and not self._ahead:
                self._ahead = self._stored.read(_BLOCK)
                if not self._ahead:
                    raise EOFError("the file ends in the middle of a stream")
            data = self._member.decompress(self._ahead if self._member.needs_input else b"", count)
            self._ahead = b""
            if self._member.eof:
                self._ahead, self._member = self._member.unused_data, None
            if data:
                return data
        return b""

    def close(self) -> None:
        self._member = None

    def _begins_another(self) -> bool:
        """Start the next stream; False if only padding is left."""
        while not self._ahead.lstrip(b"\0"):
            self._ahead = self._stored.read(_BLOCK)
            if not self._ahead:
                return False
        self._ahead = self._ahead.lstrip(b"\0")
        self._member = _new_member(self._packing)
        return True


def _new_member(packing: Packing) -> bz2.BZ2Decompressor | lzma.LZMADecompressor:
    if packing == "bzip2":
        return bz2.BZ2Decompressor()
    return lzma.LZMADecompressor(lzma.FORMAT_XZ, memlimit=_MOST_XZ_MEMORY)


_HEADER_BYTES = 18  # the longest there is
_LEAST_FRAME = 8
_MAGIC = 0xFD2FB528
_SKIPPABLE = 0x184D2A50
_REPEATED_BYTE = 1


def ends_whole(file: BinaryIO, size: int) -> bool:
    """Whether the first `size` bytes of a file are complete frames."""
    end, whole = 0, True
    for end, whole in _boundaries(file, size):  # noqa: B007 — the last one is what counts
        pass
    return end == size and whole


def whole_blocks(head: bytes) -> int:
    """The number of bytes of complete blocks at the beginning of a file."""
    return max((end for end, _ in _boundaries(io.BytesIO(head), len(head))), default=0)


def _boundaries(file: BinaryIO, size: int) -> Iterator[tuple[int, bool]]:
    """The ends of complete blocks, and whether the frame ends there too."""
    position = 0
    while position + _LEAST_FRAME <= size:
        file.seek(position)
        header = file.read(min(_HEADER_BYTES, size - position))
        magic = int.from_bytes(header[:4], "little")
        if magic & ~0xF == _SKIPPABLE:
            ends = iter([(position + 8 + int.from_bytes(header[4:8], "little"), True)])
        elif magic == _MAGIC:
            ends = _block_ends(file, position, header, size)
        else:
            return
        last = False
        for position, last in ends:
            if position > size:
                return
            yield position, last
        if not last:
            return


def _block_ends(file: BinaryIO, position: int, header: bytes, size: int) -> Iterator[tuple[int, bool]]:
    try:
        checksum = 4 if zstandard.get_frame_parameters(header).has_checksum else 0
        position += zstandard.frame_header_size(header)
    except zstandard.ZstdError:
        return  # not even the header is whole
    last = False
    while not last and position + 3 <= size:
        file.seek(position)
        block = int.from_bytes(file.read(3), "little")
        last, kind, content = bool(block & 1), block >> 1 & 3, block >> 3
        position += 3 + (1 if kind == _REPEATED_BYTE else content) + (checksum if last else 0)
        yield position, last


_MOST_KEPT = 8 * 1024 * 1024  # bytes of one file, and about the total
_kept: dict[tuple[str, SourceFile], bytearray] = {}  # least recently used first


def head_cache(path: str, file: SourceFile) -> bytearray:
    """The cached beginning of a file, which readers may extend."""
    beginning = _kept.pop((path, file), bytearray())
    while _kept and sum(map(len, _kept.values())) + len(beginning) > _MOST_KEPT:
        del _kept[next(iter(_kept))]
    _kept[path, file] = beginning
    return beginning


class StoredBytes:
    """The first `size` bytes of a file, hashed while they are read; the cached beginning is read from memory."""

    def __init__(self, file: BinaryIO, size: int, kept: bytearray | None = None) -> None:
        self._file, self._size, self._kept = file, size, kept
        self._position, self._running = 0, xxhash.xxh3_64()

    def read(self, count: int = -1) -> bytes:
        left = self._size - self._position
        data = self._take(min(count, left) if count >= 0 else left)
        self._position += len(data)
        self._running.update(data)
        return data

    def digest(self) -> int | None:
        """The hash of all bytes; None unless all were read."""
        return self._running.intdigest() if self._position == self._size else None

    def _take(self, count: int) -> bytes:
        if self._kept is None:
            return read_at(self._file, count, self._position)
        known = bytes(memoryview(self._kept)[self._position : self._position + count])
        if len(known) == count:
            return known
        further = self._position + len(known)
        data = read_at(self._file, count - len(known), further)
        if further == len(self._kept) and further + len(data) <= _MOST_KEPT:
            self._kept += data
        return known + data


MOST_RATIO = 1000  # text that compresses better is useless for training
LEAST_SAMPLES = 4  # samples of the largest size that any file may contain
_READ_BYTES = 1 << 20
_last: "list[DecompressedStream]" = []
OpenStream = Callable[[str, SourceFile, int, int], "AbstractContextManager[DecompressedStream]"]


class DecompressedStream(AbstractContextManager["DecompressedStream"]):
    """Decompressed bytes of a file, forward only, up to the size that it had when it was listed.

    `position` and `newlines` count what was read. `kept` is the cached beginning. The decompressed size may be
    `MOST_RATIO` times the stored size, or `LEAST_SAMPLES` times `max_sample_bytes` if that is more.
    """

    def __init__(self, path: str, file: SourceFile, max_sample_bytes: int, kept: bytearray | None = None) -> None:
        self.path = path
        self.file = file
        self.most = most_unpacked(file, max_sample_bytes)
        self.position = 0
        self.newlines = 0
        take_digest(path, file)  # of another pass
        self._file = _stored_file(path)
        self._stored = StoredBytes(self._file, file.size, kept)
        self._plain = _decompressed(cast(BinaryIO, self._stored), path)

    def __exit__(self, *_: object) -> None:
        self.close()

    def close(self) -> None:
        self._plain.close()
        self._file.close()
        _keep_digest(self.path, self.file, self._stored.digest())

    def read(self, count: int) -> bytes:
        """At most `count` bytes; empty at the end."""
        data = self._decompress(count)
        self.position += len(data)
        if self.position > self.most:
            stored = f"{self.file.size:,} stored bytes unpack to more than {self.most:,}"
            raise SourceUnreadable(self.path, f"its {stored}; unpack it first, or raise max_sample_bytes")
        self.newlines += data.count(b"\n")
        return data

    def skip(self, count: int) -> int:
        """Skip bytes; returns how many were skipped."""
        left = count
        while left > 0 and (data := self.read(min(left, _READ_BYTES))):
            left -= len(data)
        return count - left

    def _decompress(self, count: int) -> bytes:
        try:
            data = self._plain.read(count)
            if not data and format_of(self.path) == "zstd" and not ends_whole(self._file, self.file.size):
                raise EOFError("the file ends in the middle of a frame")
            return data
        except (EOFError, OSError, zlib.error, lzma.LZMAError, zstandard.ZstdError) as error:
            if isinstance(error, OSError) and error.errno is not None:
                raise  # an error of the disk, not of the content
            where = f"line {self.newlines + 1}, after {self.position:,} decompressed bytes"
            raise SourceUnreadable(self.path, f"{where}: {error}") from error


_MOST_DIGESTS = 64
_digests: dict[tuple[str, SourceFile], int] = {}  # of files that were read to their end, the oldest first


def take_digest(path: str, file: SourceFile) -> int | None:
    """The digest of the bytes that the last stream of a file read to its end, once; None where there is none."""
    return _digests.pop((path, file), None)


def _keep_digest(path: str, file: SourceFile, digest: int | None) -> None:
    if digest is None:
        return
    _digests[path, file] = digest
    for oldest in list(_digests)[:-_MOST_DIGESTS]:
        _digests.pop(oldest, None)


@contextmanager
def stream_at(path: str, file: SourceFile, position: int, max_sample_bytes: int) -> Iterator[DecompressedStream]:
    """A stream at a position: the last stream of this process if it is there, otherwise a new one.

    It is kept open as the last stream afterwards.
    """
    if _last and (_last[0].file, _last[0].path, _last[0].position) == (file, path, position):
        stream = _last.pop()
        stream.most = most_unpacked(file, max_sample_bytes)
    else:
        _close_last()
        stream = DecompressedStream(path, file, max_sample_bytes)
    try:
        stream.skip(position - stream.position)
        yield stream
    except BaseException:
        stream.close()
        raise
    _close_last()
    _last.append(stream)


@contextmanager
def preview_stream(path: str, file: SourceFile, position: int, max_sample_bytes: int) -> Iterator[DecompressedStream]:
    """A separate stream for planning, which uses the cached beginning of the file."""
    with DecompressedStream(path, file, max_sample_bytes, head_cache(path, file)) as stream:
        stream.skip(position)
        yield stream


@atexit.register
def _close_last() -> None:
    while _last:
        _last.pop().close()


def most_unpacked(file: SourceFile, max_sample_bytes: int) -> int:
    """The largest decompressed size that is accepted."""
    return max(MOST_RATIO * file.size, LEAST_SAMPLES * max_sample_bytes)


def _stored_file(path: str) -> BinaryIO:
    return open_object(path) if is_url(path) else open(path, "rb", buffering=0, opener=open_regular)


def _decompressed(file: BinaryIO, path: str) -> IO[bytes]:
    match format_of(path):
        case "gzip":
            return cast(IO[bytes], gzip.GzipFile(fileobj=file, mode="rb"))
        case "zstd":
            decompressor = zstandard.ZstdDecompressor(max_window_size=MOST_WINDOW)
            reader: IO[bytes] = decompressor.stream_reader(file, read_across_frames=True, closefd=False)
            return reader
        case packed:
            return cast(IO[bytes], Members(file, packed))


_ESTIMATED_SHARE = 100  # 1/100 of a file is read
_LEAST_ESTIMATED = 16 * 1024
_MOST_ESTIMATED = 256 * 1024  # contains the first block of any file
_FITS = 1.6  # two equal members, one of which is stated, differ by a factor of 2
_DEFLATE_RATIO = 1032  # the limit of deflate; more is not a size
_BLOCK_SORTED = 1 << 20  # contains the first block of a bzip2 file
_USUAL_RATIO = 4.0  # if the beginning is too short
_PIECE = 1 << 20
_MOST_MADE = 1 << 26  # limit for a beginning that expands very much
_GZIP = 31  # to zlib: with gzip's header and trailer


@lru_cache(maxsize=1 << 16)
def estimated_size(path: str, file: SourceFile) -> int:
    """The estimated decompressed size of a compressed file; it depends on the file only.

    A gzip file states the size of its last member at its end, a Zstandard file may state that of its first frame at its
    beginning. That is used unless it is far less than the compression ratio of the beginning suggests.
    """
    with _stored_file(path) as raw:
        stored = StoredBytes(raw, file.size, head_cache(path, file))
        head = stored.read(min(max(file.size // _ESTIMATED_SHARE, _LEAST_ESTIMATED), _MOST_ESTIMATED))
        try:
            ratio, stated = _estimate(format_of(path), raw, stored, head, file)
        except (OSError, zlib.error, lzma.LZMAError, zstandard.ZstdError) as error:
            if isinstance(error, OSError) and error.errno is not None:
                raise  # an error of the disk, not of the content
            raise SourceUnreadable(path, str(error)) from error
    estimated = ratio * file.size
    return stated if estimated / _FITS < stated <= file.size * _DEFLATE_RATIO else int(estimated)


def _estimate(packing: Packing, raw: BinaryIO, stored: StoredBytes, head: bytes, file: SourceFile) -> tuple[float, int]:
    match packing:
        case "gzip":
            return _estimate_gzip(raw, head, file)
        case "zstd":
            return _estimate_zstd(stored, head, file)
        case _:
            return _members_ratio(head + stored.read(max(0, _BLOCK_SORTED - len(head))), packing), 0


def _estimate_gzip(raw: BinaryIO, head: bytes, file: SourceFile) -> tuple[float, int]:
    """The compression ratio of the beginning, and the stated size."""
    raw.seek(max(0, file.size - 4))
    return _gzip_ratio(head), int.from_bytes(raw.read(4), "little")


def _estimate_zstd(stored: StoredBytes, head: bytes, file: SourceFile) -> tuple[float, int]:
    stated: int = zstandard.frame_content_size(head) if head else 0
    whole = whole_blocks(head)
    if not whole and stated < file.size:  # no size is stated, or only that of a part
        head += stored.read(_MOST_ESTIMATED)
        whole = whole_blocks(head)
    return _zstd_ratio(head[:whole]), stated


def _gzip_ratio(head: bytes) -> float:
    """Decompressed bytes per stored byte."""
    taken, made = len(head), 0
    inflate = zlib.decompressobj(_GZIP)
    while head and made < _MOST_MADE:
        made += len(inflate.decompress(head, _PIECE))
        head = inflate.unconsumed_tail
        if inflate.eof and inflate.unused_data:
            head, inflate = inflate.unused_data.lstrip(b"\0"), zlib.decompressobj(_GZIP)
    return made / max(1, taken)


def _zstd_ratio(blocks: bytes) -> float:
    made, decompressor = 0, zstandard.ZstdDecompressor(max_window_size=MOST_WINDOW)
    with decompressor.stream_reader(io.BytesIO(blocks), read_across_frames=True) as reader:
        while made < _MOST_MADE and (piece := reader.read(_PIECE)):
            made += len(piece)
    return made / max(1, len(blocks))


def _members_ratio(head: bytes, packing: Packing) -> float:
    reader, made = Members(cast(BinaryIO, io.BytesIO(head)), packing), 0
    with suppress(EOFError):  # the beginning ends anywhere
        while made < _MOST_MADE and (piece := reader.read(_PIECE)):
            made += len(piece)
    return made / len(head) if made else _USUAL_RATIO
