"""One part of a file of separated pieces while it is read: its blocks, and where in the file they stand."""

from collections import deque
from collections.abc import Iterator
from functools import lru_cache
from typing import BinaryIO, TypeVar

from forebay.errors import SourceChanged
from forebay.source import Failure, Part
from forebay.sources.failures import too_large
from forebay.sources.paths import full_path
from forebay.sources.separators import Block, LongPiece, whole_pieces
from forebay.sources.streams import OpenStream, Stream, stream_at

_COUNTED_BYTES = 1 << 20

T = TypeVar("T")


class Reading(Iterator[Block | LongPiece]):
    """The blocks of one part; `position` is the offset in the file at which the current one begins.

    A piece of more than `max_sample_bytes` is passed over, and comes as a `LongPiece`.
    """

    def __init__(
        self, root: str, part: Part, separator: bytes, max_sample_bytes: int, stream_at: OpenStream = stream_at
    ) -> None:
        self._root, self._part, self._separator = root, part, separator
        self.max_sample_bytes = max_sample_bytes
        self._stream_at = stream_at
        self._path = full_path(root, part.file.path)
        self._stream: Stream | None = None
        self._newlines = 0  # before the current block, known where it is a stream
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

    def long_piece(self, piece: LongPiece) -> Failure:
        """The failure that a piece is which was passed over."""
        sample = f"{self._part.file.path}@{self.position}"
        return too_large(sample, piece.size, self.max_sample_bytes, f"line {self.first_line()}: ")

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
        place = (self._path, self._part.file, self._part.start)
        with self._stream_at(*place, self.max_sample_bytes) as self._stream:
            self._newlines = self._stream.newlines
            yield from whole_pieces(self._stream.read, self._part.weight, self._separator, self.max_sample_bytes)

    def _plain_blocks(self) -> Iterator[Block | LongPiece]:
        with open(self._path, "rb", buffering=0) as plain:
            check_piece_start(plain, self._root, self._part.file.path, self._part.start, self._separator)
            plain.seek(self._part.start)
            yield from whole_pieces(plain.read, self._part.weight, self._separator, self.max_sample_bytes)


def handed_out(found: deque[T]) -> Iterator[T]:
    """What was found in a block, which itself can be let go by then; nothing is held that was handed out."""
    while found:
        yield found.popleft()


def check_piece_start(plain: BinaryIO, root: str, path: str, start: int, separator: bytes) -> None:
    """A piece that was planned must still begin where it did."""
    plain.seek(max(0, start - len(separator)))
    if start and plain.read(len(separator)) != separator:
        raise piece_moved(root, path, start, separator)


def piece_moved(root: str, path: str, start: int, separator: bytes) -> SourceChanged:
    what = "line" if separator == b"\n" else "document"
    return SourceChanged(root, {path: f"has no {what} that starts at byte {start:,} any more"})


class _LineCounter:
    """Counts the newlines of a plain file, on from where it last stood."""

    def __init__(self, path: str) -> None:
        self._path = path
        self._position = self._newlines = 0

    def before(self, position: int) -> int:
        if position == self._position:
            return self._newlines
        if position < self._position:
            self._position = self._newlines = 0
        with open(self._path, "rb", buffering=0) as plain:
            plain.seek(self._position)
            while self._position < position and (content := plain.read(min(_COUNTED_BYTES, position - self._position))):
                self._position += len(content)
                self._newlines += content.count(b"\n")
        return self._newlines


@lru_cache(maxsize=4)
def _line_counter(path: str, size: int, mtime_ns: int) -> _LineCounter:
    """One counter for a file as it was planned: its failures come in order, mostly."""
    return _LineCounter(path)
