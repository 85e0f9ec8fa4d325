"""One JSON object per line, one field of which is the text of a document."""

import os
from collections.abc import Iterable, Iterator, Mapping
from dataclasses import dataclass, replace
from typing import Any, ClassVar

from forebay.source import Failure, Part, Sample, SourceFile, Unit
from forebay.sources.json_lines import check_field, read_documents
from forebay.sources.paths import find_files, look, named_below, renamed
from forebay.sources.reading import Reading
from forebay.sources.separated import cut_between_pieces
from forebay.sources.stored import digest, scanned, weigh
from forebay.sources.streams import judged_stream_at

SUFFIXES = (".jsonl", ".jsonl.gz", ".jsonl.zst", ".json")


@dataclass(frozen=True, slots=True)
class JsonlSource:
    """The field `text` of every line of some files.

    A sample's id is `file@offset`, the offset of its line in bytes (after decompression). A line that is no such
    object is a failure that names the line; only a blank last line is nothing. Fields that are not asked for are
    skipped, not checked.
    """

    kind: ClassVar[str] = "jsonl"
    unit: ClassVar[Unit] = "bytes"
    read_by: ClassVar[tuple[str, ...]] = ("text",)

    root: str
    patterns: tuple[str, ...]
    text: str = "text"

    def describe(self) -> Mapping[str, Any]:
        return {"kind": self.kind, "root": self.root, "patterns": list(self.patterns), "text": self.text}

    @classmethod
    def from_description(cls, description: Mapping[str, Any]) -> "JsonlSource":
        return cls(description["root"], tuple(description["patterns"]), description["text"])

    def rebased(self, root: str) -> "JsonlSource":
        """The same files, named relative to another root."""
        return replace(self, root=root, patterns=renamed(self.root, self.patterns, root))

    def files(self) -> list[SourceFile]:
        return find_files(self.root, self.patterns, SUFFIXES)

    def look(self, path: str) -> SourceFile:
        return look(self.root, path)

    def weight(self, file: SourceFile) -> int:
        return weigh(self.root, file)

    def cuts(self, file: SourceFile, start: int, first: int, every: int) -> Iterator[int]:
        return cut_between_pieces(self.root, b"\n", file, start, first, every)

    def scanned(self, file: SourceFile) -> SourceFile:
        return scanned(self.root, file)

    def read(self, part: Part) -> Iterable[Sample | Failure]:
        return read_documents(Reading(self.root, part, b"\n"), part.file.path, self.text)

    def glance(self, part: Part) -> Iterable[Sample | Failure]:
        return read_documents(Reading(self.root, part, b"\n", judged_stream_at), part.file.path, self.text)

    def digest(self, file: SourceFile, start: int, stop: int) -> int:
        return digest(self.root, file, start, stop)


def jsonl(*paths: str | os.PathLike[str], text: str = "text", root: str | None = None) -> JsonlSource:
    """The documents of `.jsonl`, `.jsonl.gz`, `.jsonl.zst` and line-wise `.json` files, folders or globs.

    >>> jsonl("/data/*.jsonl.gz", text="content").patterns
    ('*.jsonl.gz',)
    """
    check_field(text)
    return JsonlSource(*named_below(paths, root), text)
