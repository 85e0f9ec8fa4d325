"""The stored beginnings of compressed files, kept while a source is judged.

Judging weighs a file, looks for a place to cut it, and glances at what comes before: all from its beginning, which is
read from the disk once. What goes into a cache is never taken from here.
"""

import os
from typing import BinaryIO

from forebay.source import SourceFile

_MOST_KEPT = 8 * 1024 * 1024  # of one file, and about so much of all

_kept: dict[tuple[str, SourceFile], bytearray] = {}  # the one asked for last comes last


def kept_beginning(path: str, file: SourceFile) -> bytearray:
    """What is kept of a file; whoever reads on may add to it."""
    beginning = _kept.pop((path, file), bytearray())
    while _kept and sum(map(len, _kept.values())) + len(beginning) > _MOST_KEPT:
        del _kept[next(iter(_kept))]
    _kept[path, file] = beginning
    return beginning


class StoredBytes:
    """The first `size` bytes of a file, those that are kept from memory."""

    def __init__(self, file: BinaryIO, size: int, kept: bytearray | None = None) -> None:
        self._file, self._size, self._kept = file, size, kept
        self._position = 0

    def read(self, count: int = -1) -> bytes:
        left = self._size - self._position
        data = self._take(min(count, left) if count >= 0 else left)
        self._position += len(data)
        return data

    def _take(self, count: int) -> bytes:
        if self._kept is None:
            return os.pread(self._file.fileno(), count, self._position)
        known = bytes(memoryview(self._kept)[self._position : self._position + count])
        if len(known) == count:
            return known
        further = self._position + len(known)
        data = os.pread(self._file.fileno(), count - len(known), further)
        if further == len(self._kept) and further + len(data) <= _MOST_KEPT:
            self._kept += data
        return known + data
