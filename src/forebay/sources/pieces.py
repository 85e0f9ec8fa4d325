"""Files of pieces that end with a separator, like lines: find cuts, and read parts.

Separators are those that `bytes.split` finds from the beginning of the file, left to right. A separator may overlap
itself, as three newlines do in a run of four; so a search from the middle first goes back to where nothing overlaps:

    text        a \\n \\n \\n \\n b        separator \\n\\n\\n
    split       a └──────────┘ \\n b      the one that counts
    not         a \\n └──────────┘ b      what a search from the second newline would find

A plain file is cut by searching for the separator near each cut; nothing else is read. A compressed file is a stream:
it is decompressed once to find the cuts, and its parts are then read in order without starting again.
"""

import sys
from collections import deque
from collections.abc import Callable, Iterable, Iterator, Sequence
from dataclasses import dataclass
from functools import lru_cache
from typing import BinaryIO, TypeVar

import numpy as np
from numpy.typing import NDArray

from forebay.errors import SourceChanged
from forebay.source import Failure, Part, PartDigest, SourceFile, files_changed
from forebay.sources.compression import DecompressedStream, HashedBytes, stream_at
from forebay.sources.opening import full_path, open_file, open_planned
from forebay.sources.paths import check_readable, too_large

Block = bytes | bytearray
_BLOCK = 128 * 1024  # decoding is fastest while a block and what is made of it stay in the processor's cache
_LOOK = 4 * 1024  # the least that is read to find a separator; after a while, a fourth of what was read in vain
_MOST_LOOK = 1024 * 1024


@dataclass(frozen=True, slots=True)
class LongPiece:
    """A skipped piece: its length and newlines include the separator, its size does not."""

    length: int
    newlines: int
    size: int

    def __len__(self) -> int:
        return self.length


def whole_pieces(
    read: Callable[[int], bytes], length: int, separator: bytes, limit: int = sys.maxsize
) -> Iterator[Block | LongPiece]:
    """The next `length` bytes in blocks that end after a separator, then the rest.

    A piece of up to `limit` bytes is returned whole; a longer one is skipped while it is read. Yielded blocks are not
    kept here, so that a long one is in memory once.
    """
    reach = len(separator) - 1
    begun = bytearray()  # the beginning of a piece: no separator in it,
    seam = b""  # but perhaps the beginning of one at its end
    passed = newlines = 0  # of a piece that is too long, in place of `begun`
    while length > 0 and (content := read(min(_BLOCK, length))):
        length -= len(content)
        if passed:
            end = (seam + content).find(separator) + len(separator) - len(seam)
            if end < len(separator) - len(seam):
                passed, newlines = passed + len(content), newlines + content.count(b"\n")
                seam = (seam + content)[-reach:] if reach else b""
                continue
            passed, newlines = passed + end, newlines + content.count(b"\n", 0, end)
            yield LongPiece(passed, newlines, passed - len(separator))
            content, seam, passed = content[end:], b"", 0
        end = last_end(seam + content, separator) - len(seam)
        if end > 0:
            full = [_joined(begun, memoryview(content)[:end])]
            begun, content, seam = bytearray(), content[end:], b""
            yield from _within(full, separator, limit)
        begun += content
        seam = (seam + content)[-reach:] if reach else b""
        if len(begun) > limit + len(separator):
            passed, newlines, begun = len(begun), begun.count(b"\n"), bytearray()
    if passed:
        yield LongPiece(passed, newlines, passed)
    if begun:
        full, begun = [begun], bytearray()
        yield from _within(full, separator, limit)


def _joined(begun: bytearray, content: memoryview) -> Block:
    if len(begun) <= _BLOCK:
        return b"".join((begun, content))
    begun += content  # in its place: a copy would take as much again
    return begun


def _within(full: list[Block], separator: bytes, limit: int) -> Iterator[Block | LongPiece]:
    """The one block in a list, without pieces that are longer than the limit."""
    if len(full[0]) <= limit:
        yield full.pop()
        return
    block, begin = full.pop(), 0
    for start, stop in piece_bounds(block, separator):
        if stop - start > limit:
            if begin < start:
                yield block[begin:start]
            begin = min(stop + len(separator), len(block))
            yield LongPiece(begin - start, block.count(b"\n", start, begin), stop - start)
    if begin == 0:
        full.append(block)
        del block
        yield full.pop()
    elif begin < len(block):
        yield block[begin:]


def piece_bounds(block: Block, separator: bytes) -> Iterator[tuple[int, int]]:
    """Where the pieces of a block begin and end, their separators left out.

    >>> list(piece_bounds(b"one||two||", b"||"))
    [(0, 3), (5, 8)]
    """
    begin = 0
    while begin < len(block):
        end = block.find(separator, begin)
        end = end if end >= 0 else len(block)
        yield begin, end
        begin = end + len(separator)


def end_after(plain: BinaryIO, separator: bytes, start: int, position: int) -> int:
    """The first end of a separator of a file at `position` or later; beyond the file if there is none.

    A piece begins at `start`.
    """
    at = position - len(separator)
    cursor = _overlap_start_in(plain, separator, start, at)
    plain.seek(cursor)
    ahead = b""  # from `cursor` on
    while content := plain.read(min(max(_LOOK, (cursor - at) // 4), _MOST_LOOK)):
        ahead += content
        while (at_separator := ahead.find(separator)) >= 0:
            cursor += at_separator + len(separator)
            if cursor - len(separator) >= at:
                return cursor
            ahead = ahead[at_separator + len(separator) :]
        passed = max(0, len(ahead) - len(separator) + 1)
        cursor, ahead = cursor + passed, ahead[passed:]
    return sys.maxsize


def _overlap_start_in(plain: BinaryIO, separator: bytes, start: int, at: int) -> int:
    """`overlap_start` for a place in a file, in which a piece begins at `start`."""
    if len(separator) == 1:
        return max(start, at)
    behind = _LOOK
    while True:
        low = max(start, at - behind)
        plain.seek(low)
        content = plain.read(max(0, at - low) + len(separator) - 1)
        start_in_content = overlap_start(content, separator, max(0, at - low))
        if low == start or start_in_content >= len(separator):
            return low + start_in_content
        behind *= 2


def first_end(content: Block, separator: bytes, at: int) -> int:
    """The end of the first separator that begins at `at` or later; -1 if there is none.

    >>> first_end(b"a----b", b"---", 2)
    -1
    """
    cursor = overlap_start(content, separator, at)
    while 0 <= (at_separator := content.find(separator, cursor)) < at:
        cursor = at_separator + len(separator)
    return -1 if at_separator < 0 else at_separator + len(separator)


def last_end(content: bytes, separator: bytes) -> int:
    """The end of the last separator; 0 if there is none.

    >>> last_end(b"a----b", b"---")
    4
    """
    at_separator = content.rfind(separator)
    if at_separator < 0:
        return 0
    cursor = overlap_start(content, separator, at_separator)
    while (at_separator := content.find(separator, cursor)) >= 0:
        cursor = at_separator + len(separator)
    return cursor


def overlap_start(content: Block, separator: bytes, at: int) -> int:
    """The last place up to `at` that no separator, real or not, reaches across."""
    reach = len(separator) - 1
    while (at_separator := content.find(separator, max(0, at - reach), at + reach)) >= 0 and at_separator < at:
        at = at_separator
    return at


_COUNTED_BYTES = 1 << 20
T = TypeVar("T")


class Reading(Iterator[Block | LongPiece]):
    """The blocks of one part; `position` is the offset in the file at which the current one begins.

    A piece of more than `max_sample_bytes` is skipped and yields a `LongPiece`.
    """

    def __init__(
        self,
        root: str,
        part: Part,
        separator: bytes,
        max_sample_bytes: int,
        digest: PartDigest | None = None,
    ) -> None:
        self._root, self._part, self._separator, self._digest = root, part, separator, digest
        self.max_sample_bytes = max_sample_bytes
        self._path = full_path(root, part.file.path)
        self._stream: DecompressedStream | None = None
        self._newlines = 0  # before the current block of a stream
        self._blocks = self._stream_blocks() if part.file.stream else self._plain_blocks()
        self._passed = (0, 0)  # bytes and newlines of the current block
        self.position = part.start

    def __next__(self) -> Block | LongPiece:
        size, newlines = self._passed
        self.position, self._newlines = self.position + size, self._newlines + newlines
        self._passed = (0, 0)
        block = next(self._blocks)
        self._passed = (len(block), self._newlines_in(block))
        return block

    def samples(self, decode: Callable[[Block], Iterable[T]]) -> Iterator[T | Failure]:
        """What `decode` returns for each block, one by one, and a failure for each skipped piece."""
        for block in self:
            if isinstance(block, LongPiece):
                sample, where = f"{self._part.file.path}@{self.position}", f"line {self.first_line()}: "
                yield too_large(sample, block.size, self.max_sample_bytes, where)
                continue
            samples = deque(decode(block))
            del block  # large, like the samples: none stays in memory here
            while samples:
                yield samples.popleft()

    def _newlines_in(self, block: Block | LongPiece) -> int:
        if not self._part.file.stream:
            return 0
        return block.newlines if isinstance(block, LongPiece) else block.count(b"\n")

    def first_line(self) -> int:
        """The number, from 1, of the line in which the current block begins."""
        if self._part.file.stream:
            return 1 + self._newlines
        counter = _line_counter(self._path, self._part.file.size, self._part.file.mtime_ns)
        return 1 + counter.before(self.position)

    def _stream_blocks(self) -> Iterator[Block | LongPiece]:
        position = (self._path, self._part.file, self._part.start)
        with stream_at(*position, self.max_sample_bytes) as self._stream:
            self._newlines = self._stream.newlines
            yield from whole_pieces(self._stream.read, self._part.weight, self._separator, self.max_sample_bytes)

    def _plain_blocks(self) -> Iterator[Block | LongPiece]:
        with open_planned(self._path, self._part.file) as plain:
            check_piece_start(plain, self._root, self._part.file.path, self._part.start, self._separator)
            plain.seek(self._part.start)
            stored = HashedBytes(plain, self._part.weight)
            yield from whole_pieces(stored.read, self._part.weight, self._separator, self.max_sample_bytes)
            if self._digest is not None:
                self._digest.value = stored.digest()


def check_piece_start(plain: BinaryIO, root: str, path: str, start: int, separator: bytes) -> None:
    """Raise `SourceChanged` unless a planned piece still begins at `start`."""
    plain.seek(max(0, start - len(separator)))
    if start and plain.read(len(separator)) != separator:
        raise piece_moved(root, path, start, separator)


def piece_moved(root: str, path: str, start: int, separator: bytes) -> SourceChanged:
    what = "line" if separator == b"\n" else "document"
    return files_changed(root, {path: f"has no {what} that starts at byte {start:,} any more"})


class _LineCounter:
    """Counts the newlines of a plain file, starting from its last position."""

    def __init__(self, path: str) -> None:
        self._path = path
        self._position = self._newlines = 0

    def before(self, position: int) -> int:
        if position == self._position:
            return self._newlines
        if position < self._position:
            self._position = self._newlines = 0
        with open_file(self._path) as plain:
            plain.seek(self._position)
            while self._position < position and (content := plain.read(min(_COUNTED_BYTES, position - self._position))):
                self._position += len(content)
                self._newlines += content.count(b"\n")
        return self._newlines


@lru_cache(maxsize=4)
def _line_counter(path: str, size: int, mtime_ns: int) -> _LineCounter:
    """One counter for a planned file: its failures mostly come in order."""
    return _LineCounter(path)


def line_numbers(
    root: str, file: SourceFile, offsets: Sequence[int], max_sample_bytes: int
) -> Iterator[tuple[int, int]]:
    """Rising offsets in a file, each with its line number, from 1."""
    path = full_path(root, file.path)
    if not file.stream:
        counter = _line_counter(path, file.size, file.mtime_ns)
        yield from ((offset, 1 + counter.before(offset)) for offset in offsets)
        return
    with DecompressedStream(path, file, max_sample_bytes) as stream:
        for offset in offsets:
            stream.skip(offset - stream.position)
            yield offset, 1 + stream.newlines


_LONG_PIECE = 1024 * 1024
_MOST_LONG_PIECES = 64


def cut_between_pieces(
    root: str, separator: bytes, file: SourceFile, start: int, first: int, every: int, max_sample_bytes: int
) -> Iterator[int]:
    """Where parts of a file may end: after a separator. Positions count bytes, after decompression for a stream."""
    check_readable(root, file)
    path = full_path(root, file.path)
    if file.stream:
        with DecompressedStream(path, file, max_sample_bytes) as stream:
            stream.skip(start - len(separator))
            if start and stream.read(len(separator)) != separator:
                raise piece_moved(root, file.path, start, separator)
            yield from _cuts_in_order(stream.read, stream.position, separator, first, every)
        return
    with open_file(path) as plain:
        check_piece_start(plain, root, file.path, start, separator)
        step, long_pieces = first, _long_pieces(path, file, separator)
        while (position := start + step) < file.size:
            known = (end for begin, end in long_pieces if begin <= position <= end)
            cut = next(known, None) or end_after(plain, separator, start, position)
            if cut - position >= _LONG_PIECE:
                long_pieces.append((position, cut))
            if cut >= file.size:
                break
            yield cut
            start, step = cut, every
    if file.size > start:
        yield file.size


@lru_cache(maxsize=256)
def _long_pieces(path: str, file: SourceFile, separator: bytes) -> deque[tuple[int, int]]:
    """(start, end) of long pieces that were searched: planning looks for cuts at many places, and at each once."""
    return deque(maxlen=_MOST_LONG_PIECES)


MOST_ENDS = 4_000_000  # of pieces, begun for one stream: 32 MB


def piece_ends(root: str, separator: bytes, file: SourceFile, max_sample_bytes: int) -> NDArray[np.uint64] | None:
    """The ends of all pieces of a stream; None for a plain file, or too many pieces."""
    check_readable(root, file)
    if not file.stream:
        return None
    ends, count, begin = [np.empty(0, np.uint64)], 0, 0
    with DecompressedStream(full_path(root, file.path), file, max_sample_bytes) as stream:
        for block in whole_pieces(stream.read, sys.maxsize, separator, _LONG_PIECE):
            ends.append(np.uint64(begin) + _ends_in(block, separator))
            begin, count = begin + len(block), count + len(ends[-1])
            if count > MOST_ENDS:
                return None
    return np.concatenate(ends)


def _ends_in(block: Block | LongPiece, separator: bytes) -> NDArray[np.uint64]:
    """Where the pieces of a block end, separators counted; the last one ends with the block."""
    if isinstance(block, LongPiece):
        return np.array([len(block)], np.uint64)
    if len(separator) == 1:
        ends = np.flatnonzero(np.frombuffer(block, np.uint8) == separator[0]).astype(np.uint64) + np.uint64(1)
    else:
        stops = (end + len(separator) for _, end in piece_bounds(block, separator))
        ends = np.array([min(stop, len(block)) for stop in stops], np.uint64)
    return ends if len(ends) and ends[-1] == len(block) else np.append(ends, np.uint64(len(block)))


def _cuts_in_order(read: Callable[[int], bytes], start: int, separator: bytes, first: int, every: int) -> Iterator[int]:
    """Cuts found by one pass that starts at the piece at `start`."""
    cut, end, step = start, start, first
    for block in whole_pieces(read, sys.maxsize, separator, _LONG_PIECE):
        if start < cut == end:  # the cut at the end of the last block is not the end of the file
            yield cut
        begin, end = end, end + len(block)
        while cut + step <= end:
            # An end behind it is a step away or more; a step may be shorter than the separator.
            at = max(0, cut - begin, cut + step - begin - len(separator))
            piece_end = len(block) if isinstance(block, LongPiece) else first_end(block, separator, at)
            if piece_end < 0:
                break
            cut, step = begin + piece_end, every
            if cut < end:
                yield cut
    if end > start:
        yield end
