"""Lines of files as samples; `.gz` and `.zst` are decompressed on the way."""

import os
from collections import deque
from collections.abc import Iterable, Iterator, Mapping
from dataclasses import dataclass, replace
from typing import Any, ClassVar

from forebay.source import Part, Sample, SourceFile, Unit
from forebay.sources.paths import find_files, look, named_below, renamed
from forebay.sources.reading import Reading, handed_out
from forebay.sources.separated import cut_between_pieces
from forebay.sources.separators import Block, piece_bounds
from forebay.sources.stored import digest, scanned, weigh
from forebay.sources.streams import judged_stream_at


@dataclass(frozen=True, slots=True)
class LineSource:
    """The lines of every file below some paths. A sample's id is `file@offset`, the offset of its line in bytes."""

    kind: ClassVar[str] = "lines"
    unit: ClassVar[Unit] = "bytes"

    root: str
    patterns: tuple[str, ...]

    def describe(self) -> Mapping[str, Any]:
        return {"kind": self.kind, "root": self.root, "patterns": list(self.patterns)}

    @classmethod
    def from_description(cls, description: Mapping[str, Any]) -> "LineSource":
        return cls(description["root"], tuple(description["patterns"]))

    def rebased(self, root: str) -> "LineSource":
        """The same files, named relative to another root."""
        return replace(self, root=root, patterns=renamed(self.root, self.patterns, root))

    def files(self) -> list[SourceFile]:
        return find_files(self.root, self.patterns)

    def look(self, path: str) -> SourceFile:
        return look(self.root, path)

    def weight(self, file: SourceFile) -> int:
        return weigh(self.root, file)

    def cuts(self, file: SourceFile, start: int, first: int, every: int) -> Iterator[int]:
        return cut_between_pieces(self.root, b"\n", file, start, first, every)

    def scanned(self, file: SourceFile) -> SourceFile:
        return scanned(self.root, file)

    def read(self, part: Part) -> Iterable[Sample]:
        return _lines(Reading(self.root, part, b"\n"), part.file.path)

    def glance(self, part: Part) -> Iterable[Sample]:
        return _lines(Reading(self.root, part, b"\n", judged_stream_at), part.file.path)

    def digest(self, file: SourceFile, start: int, stop: int) -> int:
        return digest(self.root, file, start, stop)


def lines(*paths: str | os.PathLike[str], root: str | None = None) -> LineSource:
    """Every line of some files, folders or globs."""
    return LineSource(*named_below(paths, root))


def _lines(reading: Reading, path: str) -> Iterator[Sample]:
    for block in reading:
        found = deque(_samples(block, path, reading.position))
        del block
        yield from handed_out(found)


def _samples(block: Block, path: str, position: int) -> Iterator[Sample]:
    for begin, end in piece_bounds(block, b"\n"):
        yield Sample(f"{path}@{position + begin}", bytes(memoryview(block)[begin:end]))
