"""Cutting files of pieces that end with a separator, as lines end with a newline.

A plain file is cut by looking for the separator after each cut, nothing else of it is read. A compressed file is a
stream: it is decompressed once to find the cuts; its parts are then read one after the other without a new start.
"""

import sys
from collections.abc import Iterator
from typing import BinaryIO

from forebay.source import SourceFile
from forebay.sources.paths import full_path
from forebay.sources.reading import check_piece_start, piece_moved
from forebay.sources.separators import end_after, first_end, whole_pieces
from forebay.sources.streams import Stream


def cut_between_pieces(
    root: str, separator: bytes, file: SourceFile, start: int, first: int, every: int
) -> Iterator[int]:
    """Where parts of a file may end: behind a separator. Positions count bytes, of a stream after decompression."""
    path = full_path(root, file.path)
    if file.stream:
        with Stream(path, file) as stream:
            stream.skip(start - len(separator))
            if start and stream.read(len(separator)) != separator:
                raise piece_moved(root, file.path, start, separator)
            yield from _stream_cuts(stream, separator, first, every)
        return
    with open(path, "rb", buffering=0) as plain:
        check_piece_start(plain, root, file.path, start, separator)
        yield from _plain_cuts(plain, separator, start, file.size, first, every)


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
