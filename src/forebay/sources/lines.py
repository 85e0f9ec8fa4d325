"""Lines of files as samples; `.gz`, `.zst`, `.bz2` and `.xz` files are decompressed."""

import os
from collections import deque
from collections.abc import Iterable, Iterator, Mapping
from dataclasses import dataclass, replace
from typing import Any, ClassVar

from forebay.source import Failure, Part, Sample, Source, SourceFile, Unit
from forebay.sources.compression import preview_stream
from forebay.sources.estimated_size import digest, estimated_size, scanned
from forebay.sources.failures import MAX_SAMPLE_BYTES, checked_limit, limit_in, stated_limit
from forebay.sources.paths import find_files, look, named_below, renamed
from forebay.sources.pieces import Block, LongPiece, Reading, cut_between_pieces, handed_out, piece_bounds


@dataclass(frozen=True, slots=True)
class LineSource(Source):
    """The lines of every file below some paths. A sample's id is `file@offset`, the offset of its line in bytes.

    A line of more than `max_sample_bytes` is a failure.
    """

    kind: ClassVar[str] = "lines"
    unit: ClassVar[Unit] = "bytes"
    read_by: ClassVar[tuple[str, ...]] = ("max_sample_bytes",)

    root: str
    patterns: tuple[str, ...]
    max_sample_bytes: int = MAX_SAMPLE_BYTES

    def describe(self) -> Mapping[str, Any]:
        described = {"kind": self.kind, "root": self.root, "patterns": list(self.patterns)}
        return described | stated_limit(self.max_sample_bytes)

    @classmethod
    def from_description(cls, description: Mapping[str, Any]) -> "LineSource":
        return cls(description["root"], tuple(description["patterns"]), limit_in(description))

    def rebased(self, root: str) -> "LineSource":
        """The same files, named relative to another root."""
        return replace(self, root=root, patterns=renamed(self.root, self.patterns, root))

    def files(self) -> list[SourceFile]:
        return find_files(self.root, self.patterns)

    def look(self, path: str) -> SourceFile:
        return look(self.root, path)

    def weight(self, file: SourceFile) -> int:
        return estimated_size(self.root, file)

    def cuts(self, file: SourceFile, start: int, first: int, every: int) -> Iterator[int]:
        return cut_between_pieces(self.root, b"\n", file, start, first, every, self.max_sample_bytes)

    def scanned(self, file: SourceFile) -> SourceFile:
        return scanned(self.root, file)

    def read(self, part: Part) -> Iterable[Sample | Failure]:
        return _lines(Reading(self.root, part, b"\n", self.max_sample_bytes), part.file.path)

    def glance(self, part: Part) -> Iterable[Sample | Failure]:
        return _lines(Reading(self.root, part, b"\n", self.max_sample_bytes, preview_stream), part.file.path)

    def digest(self, file: SourceFile, start: int, stop: int) -> int:
        return digest(self.root, file, start, stop)


def lines(
    *paths: str | os.PathLike[str], root: str | None = None, max_sample_bytes: int = MAX_SAMPLE_BYTES
) -> LineSource:
    """Every line of some files, folders or globs."""
    return LineSource(*named_below(paths, root), checked_limit(max_sample_bytes))


def _lines(reading: Reading, path: str) -> Iterator[Sample | Failure]:
    for block in reading:
        if isinstance(block, LongPiece):
            yield reading.long_piece(block)
            continue
        found = deque(_samples(block, path, reading.position))
        del block
        yield from handed_out(found)


def _samples(block: Block, path: str, position: int) -> Iterator[Sample]:
    for begin, end in piece_bounds(block, b"\n"):
        yield Sample(f"{path}@{position + begin}", bytes(memoryview(block)[begin:end]))
