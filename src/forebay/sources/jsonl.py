"""One JSON object per line, one field of which is the text of a document."""

import os
from collections.abc import Iterable, Iterator, Mapping
from dataclasses import dataclass, replace
from typing import Any, ClassVar

from forebay.source import Failure, Part, Sample, Source, SourceFile, Unit
from forebay.sources.failures import MAX_SAMPLE_BYTES, checked_limit, limit_in, stated_limit
from forebay.sources.json_lines import check_field, read_documents
from forebay.sources.paths import find_files, left_out, look, named_below, renamed
from forebay.sources.reading import Reading
from forebay.sources.separated import cut_between_pieces
from forebay.sources.stored import digest, scanned, weigh
from forebay.sources.streams import judged_stream_at
from forebay.sources.walker import with_stream_suffixes

SUFFIXES = with_stream_suffixes([".jsonl", ".ndjson", ".json"])


@dataclass(frozen=True, slots=True)
class JsonlSource(Source):
    """The field `text` of every line of some files.

    A sample's id is `file@offset`, the offset of its line in bytes (after decompression). Blank lines are passed over.
    A line that is not such an object, or has more than `max_sample_bytes`, is a failure that names the line. Fields
    that are not asked for are skipped, not checked.
    """

    kind: ClassVar[str] = "jsonl"
    unit: ClassVar[Unit] = "bytes"
    read_by: ClassVar[tuple[str, ...]] = ("text", "max_sample_bytes")

    root: str
    patterns: tuple[str, ...]
    text: str = "text"
    max_sample_bytes: int = MAX_SAMPLE_BYTES

    def describe(self) -> Mapping[str, Any]:
        described = {"kind": self.kind, "root": self.root, "patterns": list(self.patterns), "text": self.text}
        return described | stated_limit(self.max_sample_bytes)

    @classmethod
    def from_description(cls, description: Mapping[str, Any]) -> "JsonlSource":
        patterns = tuple(description["patterns"])
        return cls(description["root"], patterns, description["text"], limit_in(description))

    def rebased(self, root: str) -> "JsonlSource":
        """The same files, named relative to another root."""
        return replace(self, root=root, patterns=renamed(self.root, self.patterns, root))

    def files(self) -> list[SourceFile]:
        return find_files(self.root, self.patterns, SUFFIXES)

    def left_out(self, apart: str = "") -> Mapping[str, int]:
        return left_out(self.root, self.patterns, SUFFIXES, apart)

    def look(self, path: str) -> SourceFile:
        return look(self.root, path)

    def weight(self, file: SourceFile) -> int:
        return weigh(self.root, file)

    def cuts(self, file: SourceFile, start: int, first: int, every: int) -> Iterator[int]:
        return cut_between_pieces(self.root, b"\n", file, start, first, every, self.max_sample_bytes)

    def scanned(self, file: SourceFile) -> SourceFile:
        return scanned(self.root, file)

    def read(self, part: Part) -> Iterable[Sample | Failure]:
        return read_documents(Reading(self.root, part, b"\n", self.max_sample_bytes), part.file.path, self.text)

    def glance(self, part: Part) -> Iterable[Sample | Failure]:
        reading = Reading(self.root, part, b"\n", self.max_sample_bytes, judged_stream_at)
        return read_documents(reading, part.file.path, self.text)

    def digest(self, file: SourceFile, start: int, stop: int) -> int:
        return digest(self.root, file, start, stop)


def jsonl(
    *paths: str | os.PathLike[str],
    text: str = "text",
    root: str | None = None,
    max_sample_bytes: int = MAX_SAMPLE_BYTES,
) -> JsonlSource:
    """The documents of `.jsonl`, `.ndjson` and line-wise `.json` files, folders or globs, compressed or not.

    Files that end in `.gz`, `.zst`, `.bz2` or `.xz` as well are decompressed while they are read.

    >>> jsonl("/data/*.jsonl.gz", text="content").patterns
    ('*.jsonl.gz',)
    """
    check_field(text)
    return JsonlSource(*named_below(paths, root), text, checked_limit(max_sample_bytes))
