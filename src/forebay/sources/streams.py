"""Compressed files as streams of bytes with a position.

A process keeps the last stream it read open, so that the parts of one file, read in order, decompress it once.
"""

import atexit
import gzip
import zlib
from collections.abc import Callable, Iterator
from contextlib import AbstractContextManager, contextmanager
from typing import IO, BinaryIO, cast

import zstandard

from forebay.errors import SourceUnreadable
from forebay.source import SourceFile
from forebay.sources.beginnings import StoredBytes, kept_beginning
from forebay.sources.zstd_frames import ends_whole

_BLOCK = 1 << 20
_last: "list[Stream]" = []

OpenStream = Callable[[str, SourceFile, int], "AbstractContextManager[Stream]"]


class Stream(AbstractContextManager["Stream"]):
    """Decompressed bytes of a file as it was when looked at, forward only.

    `position` and `newlines` count what was taken; what was appended to the file since is not seen. What is `kept` of
    its beginning is not read again.
    """

    def __init__(self, path: str, file: SourceFile, kept: bytearray | None = None) -> None:
        self.path = path
        self.file = file
        self.position = 0
        self.newlines = 0
        self._file: BinaryIO = open(path, "rb", buffering=0)  # noqa: SIM115 — closed by `close`
        self._plain = _decompressed(cast(BinaryIO, StoredBytes(self._file, file.size, kept)), path)
        self._peeked = b""

    def __exit__(self, *_: object) -> None:
        self.close()

    def close(self) -> None:
        self._plain.close()
        self._file.close()

    def read(self, count: int) -> bytes:
        """At most `count` bytes, none at the end."""
        data = self._peeked[:count] or self._decompress(count)
        self._peeked = self._peeked[len(data) :]
        self.position += len(data)
        self.newlines += data.count(b"\n")
        return data

    def skip(self, count: int) -> int:
        """Pass over bytes; how many there were."""
        left = count
        while left > 0 and (data := self.read(min(left, _BLOCK))):
            left -= len(data)
        return count - left

    def at_end(self) -> bool:
        self._peeked = self._peeked or self._decompress(1)
        return not self._peeked

    def _decompress(self, count: int) -> bytes:
        try:
            data = self._plain.read(count)
            if not data and self.path.endswith(".zst") and not ends_whole(self._file, self.file.size):
                raise EOFError("the file ends in the middle of a frame")
            return data
        except (EOFError, zlib.error, gzip.BadGzipFile, zstandard.ZstdError) as error:
            where = f"line {self.newlines + 1}, after {self.position:,} decompressed bytes"
            raise SourceUnreadable(self.path, f"{where}: {error}") from error


@contextmanager
def stream_at(path: str, file: SourceFile, position: int) -> Iterator[Stream]:
    """A stream that stands at a position: the last one of this process if it does, else one from the beginning.

    It is the caller's alone, and becomes the last one when the caller is done.
    """
    if _last and (_last[0].file, _last[0].path, _last[0].position) == (file, path, position):
        stream = _last.pop()
    else:
        _close_last()
        stream = Stream(path, file)
    try:
        stream.skip(position - stream.position)
        yield stream
    except BaseException:
        stream.close()
        raise
    _close_last()
    _last.append(stream)


@contextmanager
def judged_stream_at(path: str, file: SourceFile, position: int) -> Iterator[Stream]:
    """A stream of its own for judging: the beginning of the file is read from the disk once."""
    with Stream(path, file, kept_beginning(path, file)) as stream:
        stream.skip(position)
        yield stream


@atexit.register
def _close_last() -> None:
    while _last:
        _last.pop().close()


def _decompressed(file: BinaryIO, path: str) -> IO[bytes]:
    if path.endswith(".gz"):
        return cast(IO[bytes], gzip.GzipFile(fileobj=file, mode="rb"))
    reader: IO[bytes] = zstandard.ZstdDecompressor().stream_reader(file, read_across_frames=True, closefd=False)
    return reader
