"""Whole files as samples: one file, one sample."""

import os
from collections.abc import Iterable, Iterator, Mapping
from dataclasses import dataclass, replace
from typing import Any, ClassVar

from forebay.source import Failure, Part, Sample, Source, SourceFile, Unit
from forebay.sources.failures import MAX_SAMPLE_BYTES, checked_limit, limit_in, stated_limit
from forebay.sources.paths import find_files, left_out, look, named_below, plain_file, renamed
from forebay.sources.stored import digest
from forebay.sources.whole import cut_whole, read_whole


@dataclass(frozen=True, slots=True)
class FileSource(Source):
    """The bytes of every file below some paths, named relative to `root`; one of more than `max_sample_bytes` fails."""

    kind: ClassVar[str] = "files"
    unit: ClassVar[Unit] = "bytes"
    read_by: ClassVar[tuple[str, ...]] = ("max_sample_bytes",)
    files_grow: ClassVar[bool] = False  # a file is one sample: with more bytes it is another one

    root: str
    patterns: tuple[str, ...]
    suffixes: tuple[str, ...] = ()
    max_sample_bytes: int = MAX_SAMPLE_BYTES

    def describe(self) -> Mapping[str, Any]:
        return {
            "kind": self.kind,
            "root": self.root,
            "patterns": list(self.patterns),
            "suffixes": list(self.suffixes),
            **stated_limit(self.max_sample_bytes),
        }

    @classmethod
    def from_description(cls, description: Mapping[str, Any]) -> "FileSource":
        patterns, suffixes = tuple(description["patterns"]), tuple(description["suffixes"])
        return cls(description["root"], patterns, suffixes, limit_in(description))

    def rebased(self, root: str) -> "FileSource":
        """The same files, named relative to another root."""
        return replace(self, root=root, patterns=renamed(self.root, self.patterns, root))

    def files(self) -> list[SourceFile]:
        return [plain_file(file) for file in find_files(self.root, self.patterns, self.suffixes)]

    def left_out(self, apart: str = "") -> Mapping[str, int]:
        return left_out(self.root, self.patterns, self.suffixes, apart)

    def look(self, path: str) -> SourceFile:
        return plain_file(look(self.root, path))

    def weight(self, file: SourceFile) -> int:
        return file.size

    def cuts(self, file: SourceFile, start: int, first: int, every: int) -> Iterator[int]:
        return cut_whole(self.root, file, start, self.max_sample_bytes)

    def scanned(self, file: SourceFile) -> SourceFile:
        return file

    def read(self, part: Part) -> Iterable[Sample | Failure]:
        content = read_whole(self.root, part, self.max_sample_bytes)
        yield content if isinstance(content, Failure) else Sample(part.file.path, content)

    def digest(self, file: SourceFile, start: int, stop: int) -> int:
        return digest(self.root, file, start, stop)


def files(
    *paths: str | os.PathLike[str],
    suffixes: Iterable[str] = (),
    root: str | None = None,
    max_sample_bytes: int = MAX_SAMPLE_BYTES,
) -> FileSource:
    """Every file of some folders, globs or paths, as it is.

    >>> files("src", suffixes=[".py"]).patterns
    ('.',)
    """
    return FileSource(*named_below(paths, root), tuple(suffixes), checked_limit(max_sample_bytes))
