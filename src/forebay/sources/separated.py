"""Cutting files of pieces that end with a separator, as lines end with a newline.

A plain file is cut by looking for the separator after each cut, nothing else of it is read. A compressed file is a
stream: it is decompressed once to find the cuts; its parts are then read one after the other without a new start.
"""

import sys
from collections import deque
from collections.abc import Iterator
from functools import lru_cache
from typing import BinaryIO

from forebay.source import SourceFile
from forebay.sources.paths import check_readable, full_path
from forebay.sources.reading import check_piece_start, piece_moved
from forebay.sources.separators import Block, LongPiece, end_after, first_end, whole_pieces
from forebay.sources.streams import Stream, judged_stream_at

_LONG_PIECE = 1024 * 1024
_MOST_SEARCHED = 64


def cut_between_pieces(
    root: str, separator: bytes, file: SourceFile, start: int, first: int, every: int, max_sample_bytes: int
) -> Iterator[int]:
    """Where parts of a file may end: behind a separator. Positions count bytes, of a stream after decompression."""
    check_readable(root, file)
    path = full_path(root, file.path)
    if file.stream:
        with judged_stream_at(path, file, max(0, start - len(separator)), max_sample_bytes) as stream:
            if start and stream.read(len(separator)) != separator:
                raise piece_moved(root, file.path, start, separator)
            yield from _stream_cuts(stream, separator, first, every)
        return
    with open(path, "rb", buffering=0) as plain:
        check_piece_start(plain, root, file.path, start, separator)
        search = _Search(plain, separator, _searched(path, file, separator))
        yield from _plain_cuts(search, start, file.size, first, every)


def _plain_cuts(search: "_Search", start: int, size: int, first: int, every: int) -> Iterator[int]:
    cut, step = start, first
    while cut + step < size:
        found = search.end_after(cut, cut + step)
        if found >= size:
            break
        yield (cut := found)
        step = every
    if size > start:
        yield size


class _Search:
    """Looks for separators in a plain file, but never twice through a long piece."""

    def __init__(self, plain: BinaryIO, separator: bytes, searched: deque[tuple[int, int]]) -> None:
        self._plain, self._separator, self._searched = plain, separator, searched

    def end_after(self, start: int, position: int) -> int:
        """The first end of a separator at `position` or later, beyond any file where there is none.

        A piece begins at `start`.
        """
        at = position - len(self._separator)
        known = next((end for begin, end in self._searched if begin <= at and position <= end), None)
        if known is not None:
            return known
        limit, behind = min((stretch for stretch in self._searched if stretch[0] > at), default=(sys.maxsize,) * 2)
        found = end_after(self._plain, self._separator, start, at, limit)
        end = behind if found is None else found
        if end - at >= _LONG_PIECE:
            self._searched.append((at, end))
        return end


@lru_cache(maxsize=256)
def _searched(path: str, file: SourceFile, separator: bytes) -> deque[tuple[int, int]]:
    """Stretches of a file in which no separator begins but the one that ends there: of long pieces, the last few."""
    return deque(maxlen=_MOST_SEARCHED)


def _stream_cuts(stream: Stream, separator: bytes, first: int, every: int) -> Iterator[int]:
    start = end = stream.position
    cut, step = start, first
    for block in whole_pieces(stream.read, sys.maxsize, separator, _LONG_PIECE):
        if start < cut == end:  # the cut at the end of the last block is not the end of the file
            yield cut
        begin, end = end, end + len(block)
        while cut + step <= end:
            found = len(block) if isinstance(block, LongPiece) else _end_in(block, separator, cut + step - begin)
            if found < 0:
                break
            cut, step = begin + found, every
            if cut < end:
                yield cut
    if end > start:
        yield end


def _end_in(block: Block, separator: bytes, position: int) -> int:
    """The first end of a separator at `position` or later, -1 where there is none."""
    return first_end(block, separator, position - len(separator))
