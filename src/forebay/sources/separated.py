"""Files of pieces that end with a separator, as lines end with a newline: how they are cut, read and hashed.

A plain file is cut by looking for the separator after each cut, nothing else of it is read. A compressed file is a
stream: it is decompressed once to find the cuts; its parts are then read one after the other without a new start.
"""

import sys
from collections.abc import Iterator
from dataclasses import dataclass
from typing import BinaryIO

import msgspec
import xxhash

from forebay.source import Part, SourceFile
from forebay.sources.paths import full_path
from forebay.sources.reading import Reading, check_piece_start, piece_moved
from forebay.sources.separators import end_after, first_end, whole_pieces
from forebay.sources.streams import Stream

_HASH_BYTES = 1 << 22
_JUDGED_BYTES = 1 << 22


@dataclass(frozen=True, slots=True)
class SeparatedFiles:
    """What sources of separated pieces share. Positions count bytes, of a stream after decompression."""

    root: str
    separator: bytes = b"\n"

    def weight(self, file: SourceFile) -> int:
        if not file.stream:
            return file.size
        with self._open(file) as stream:
            return int(stream.skip(_JUDGED_BYTES) * max(1.0, file.size / max(1, stream.consumed)))

    def cuts(self, file: SourceFile, start: int, first: int, every: int) -> Iterator[int]:
        if file.stream:
            with self._open(file) as stream:
                self._pass_planned(stream, file, start)
                yield from _stream_cuts(stream, self.separator, first, every)
            return
        with open(full_path(self.root, file.path), "rb", buffering=0) as plain:
            check_piece_start(plain, self.root, file.path, start, self.separator)
            yield from _plain_cuts(plain, self.separator, start, file.size, first, every)

    def scanned(self, file: SourceFile) -> SourceFile:
        if not file.stream:
            return file
        return msgspec.structs.replace(file, digest=self.digest(file, 0, file.size))

    def reading(self, part: Part) -> Reading:
        return Reading(self.root, part, self.separator)

    def digest(self, file: SourceFile, start: int, stop: int) -> int:
        """A hash of the stored bytes, whatever they are cut into."""
        running = xxhash.xxh3_64()
        with open(full_path(self.root, file.path), "rb", buffering=0) as raw:
            raw.seek(start)
            while start < stop and (content := raw.read(min(_HASH_BYTES, stop - start))):
                running.update(content)
                start += len(content)
        value: int = running.intdigest()
        return value

    def _open(self, file: SourceFile) -> Stream:
        return Stream(full_path(self.root, file.path), file)

    def _pass_planned(self, stream: Stream, file: SourceFile, start: int) -> None:
        """Stand at a position that must be the end of a piece, or the beginning."""
        stream.skip(start - len(self.separator))
        if start and stream.read(len(self.separator)) != self.separator:
            raise piece_moved(self.root, file.path, start, self.separator)


def _plain_cuts(plain: BinaryIO, separator: bytes, start: int, size: int, first: int, every: int) -> Iterator[int]:
    cut, step = start, first
    while cut + step < size:
        found = end_after(plain, separator, cut, cut + step - len(separator))
        if found is None or found >= size:
            break
        yield (cut := found)
        step = every
    if size > start:
        yield size


def _stream_cuts(stream: Stream, separator: bytes, first: int, every: int) -> Iterator[int]:
    start = end = stream.position
    cut, step = start, first
    for block in whole_pieces(stream.read, sys.maxsize, separator):
        if start < cut == end:  # the cut at the end of the last block is not the end of the file
            yield cut
        begin, end = end, end + len(block)
        while cut + step <= end:
            found = first_end(block, separator, cut + step - len(separator) - begin)
            if found < 0:
                break
            cut, step = begin + found, every
            if cut < end:
                yield cut
    if end > start:
        yield end
