"""Compressed files as streams of lines with a position.

A process keeps the last stream it read open, so that the parts of one file, read in order, decompress it once.
"""

import atexit
import gzip
import zlib
from collections.abc import Iterator
from contextlib import AbstractContextManager
from typing import IO, BinaryIO, cast

import zstandard

from forebay.errors import SourceUnreadable
from forebay.source import SourceFile

_BLOCK = 1 << 20
_last: "list[Stream]" = []


class Stream(AbstractContextManager["Stream"]):
    """Decompressed bytes, forward only. `position` counts what was taken."""

    def __init__(self, path: str, file: SourceFile | None = None) -> None:
        self.path = path
        self.file = file
        self.position = 0
        self._file: BinaryIO = open(path, "rb")  # noqa: SIM115 — closed by `close`
        self._plain: IO[bytes] = _decompressed(self._file, path)
        self._buffer = b""
        self._at = 0

    def __exit__(self, *_: object) -> None:
        self.close()

    def close(self) -> None:
        self._plain.close()
        self._file.close()

    @property
    def consumed(self) -> int:
        """How much of the compressed file was read for what was taken."""
        return self._file.tell()

    def at_end(self) -> bool:
        return not self._ready()

    def skip(self, count: int) -> int:
        """Pass over bytes; how many there were."""
        left = count
        while left > 0 and self._ready():
            left -= self._take(min(left, len(self._buffer) - self._at))
        return count - left

    def skip_line(self) -> bool:
        """Pass over the rest of a line; False at the end of the file."""
        passed = False
        while self._ready():
            passed = True
            found = self._buffer.find(b"\n", self._at)
            self._take((found + 1 if found >= 0 else len(self._buffer)) - self._at)
            if found >= 0:
                break
        return passed

    def lines(self, stop: int) -> Iterator[bytes]:
        """Whole lines up to a position."""
        while self.position < stop and self._ready():
            start, pieces = self.position, []
            while self._ready():
                found = self._buffer.find(b"\n", self._at)
                end = found + 1 if found >= 0 else len(self._buffer)
                pieces.append(self._buffer[self._at : end])
                self._take(end - self._at)
                if found >= 0:
                    break
            if self.position > start:
                yield b"".join(pieces)

    def _ready(self) -> bool:
        if self._at == len(self._buffer):
            self._buffer, self._at = self._read_block(), 0
        return bool(self._buffer)

    def _read_block(self) -> bytes:
        try:
            return self._plain.read(_BLOCK)
        except (EOFError, zlib.error, gzip.BadGzipFile, zstandard.ZstdError) as error:
            raise SourceUnreadable(self.path, f"after {self.position:,} decompressed bytes: {error}") from error

    def _take(self, count: int) -> int:
        self._at += count
        self.position += count
        return count


def open_stream(path: str) -> Stream:
    return Stream(path)


def stream_at(path: str, file: SourceFile, position: int) -> Stream:
    """A stream of this process that stands at a position: the last one if it does, else one from the beginning."""
    if _last and (_last[0].file, _last[0].path, _last[0].position) != (file, path, position):
        _last.pop().close()
    if not _last:
        _last.append(Stream(path, file))
        _last[0].skip(position)
    return _last[0]


@atexit.register
def _close_last() -> None:
    while _last:
        _last.pop().close()


def _decompressed(file: BinaryIO, path: str) -> IO[bytes]:
    if path.endswith(".gz"):
        return cast(IO[bytes], gzip.GzipFile(fileobj=file, mode="rb"))
    reader: IO[bytes] = zstandard.ZstdDecompressor().stream_reader(file, read_across_frames=True)
    return reader
