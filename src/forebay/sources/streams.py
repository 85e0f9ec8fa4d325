"""Compressed files as streams of bytes with a position.

A process keeps the last stream it read open, so that the parts of one file, read in order, decompress it once. A small
file that unpacks to an enormous one is refused on the way: nobody should wait for the end of it.
"""

import atexit
import gzip
import lzma
import zlib
from collections.abc import Callable, Iterator
from contextlib import AbstractContextManager, contextmanager
from typing import IO, BinaryIO, cast

import zstandard

from forebay.errors import SourceUnreadable
from forebay.source import SourceFile
from forebay.sources.beginnings import StoredBytes, kept_beginning
from forebay.sources.compressed import MOST_WINDOW, Members, format_of
from forebay.sources.zstd_frames import ends_whole

MOST_RATIO = 1000  # text that is compressed better than that holds nothing to learn from
LEAST_SAMPLES = 4  # so many samples of the largest size may be in any file
_BLOCK = 1 << 20
_last: "list[Stream]" = []

OpenStream = Callable[[str, SourceFile, int, int], "AbstractContextManager[Stream]"]


class Stream(AbstractContextManager["Stream"]):
    """Decompressed bytes of a file as it was when looked at, forward only.

    `position` and `newlines` count what was taken; what was appended to the file since is not seen. What is `kept` of
    its beginning is not read again. It may hold `MOST_RATIO` times what is stored, and `LEAST_SAMPLES` times
    `max_sample_bytes` where that is more.
    """

    def __init__(self, path: str, file: SourceFile, max_sample_bytes: int, kept: bytearray | None = None) -> None:
        self.path = path
        self.file = file
        self.most = most_unpacked(file, max_sample_bytes)
        self.position = 0
        self.newlines = 0
        self._file: BinaryIO = open(path, "rb", buffering=0)  # noqa: SIM115 — closed by `close`
        self._plain = _decompressed(cast(BinaryIO, StoredBytes(self._file, file.size, kept)), path)

    def __exit__(self, *_: object) -> None:
        self.close()

    def close(self) -> None:
        self._plain.close()
        self._file.close()

    def read(self, count: int) -> bytes:
        """At most `count` bytes, none at the end."""
        data = self._decompress(count)
        self.position += len(data)
        if self.position > self.most:
            stored = f"{self.file.size:,} stored bytes unpack to more than {self.most:,}"
            raise SourceUnreadable(self.path, f"its {stored}; unpack it first, or raise max_sample_bytes")
        self.newlines += data.count(b"\n")
        return data

    def skip(self, count: int) -> int:
        """Pass over bytes; how many there were."""
        left = count
        while left > 0 and (data := self.read(min(left, _BLOCK))):
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
                raise  # the disk's, not the content's
            where = f"line {self.newlines + 1}, after {self.position:,} decompressed bytes"
            raise SourceUnreadable(self.path, f"{where}: {error}") from error


@contextmanager
def stream_at(path: str, file: SourceFile, position: int, max_sample_bytes: int) -> Iterator[Stream]:
    """A stream that stands at a position: the last one of this process if it does, else one from the beginning.

    It is the caller's alone, and becomes the last one when the caller is done.
    """
    if _last and (_last[0].file, _last[0].path, _last[0].position) == (file, path, position):
        stream = _last.pop()
        stream.most = most_unpacked(file, max_sample_bytes)
    else:
        _close_last()
        stream = Stream(path, file, max_sample_bytes)
    try:
        stream.skip(position - stream.position)
        yield stream
    except BaseException:
        stream.close()
        raise
    _close_last()
    _last.append(stream)


@contextmanager
def judged_stream_at(path: str, file: SourceFile, position: int, max_sample_bytes: int) -> Iterator[Stream]:
    """A separate stream for judging: the beginning of the file is read from the disk once."""
    with Stream(path, file, max_sample_bytes, kept_beginning(path, file)) as stream:
        stream.skip(position)
        yield stream


@atexit.register
def _close_last() -> None:
    while _last:
        _last.pop().close()


def most_unpacked(file: SourceFile, max_sample_bytes: int) -> int:
    """How many bytes a compressed file may hold."""
    return max(MOST_RATIO * file.size, LEAST_SAMPLES * max_sample_bytes)


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
