"""Whole files as samples: one file, one sample."""

import os
from collections.abc import Iterable, Iterator, Mapping
from dataclasses import dataclass, replace
from typing import Any, ClassVar

from forebay.source import Part, Sample, SourceFile, Unit
from forebay.sources.paths import find_files, look, named_below, plain_file, renamed
from forebay.sources.stored import digest
from forebay.sources.whole import cut_whole, read_whole


@dataclass(frozen=True, slots=True)
class FileSource:
    """The bytes of every file below some paths, named relative to `root`."""

    kind: ClassVar[str] = "files"
    unit: ClassVar[Unit] = "bytes"
    files_grow: ClassVar[bool] = False  # a file is one sample: with more bytes it is another one

    root: str
    patterns: tuple[str, ...]
    suffixes: tuple[str, ...] = ()

    def describe(self) -> Mapping[str, Any]:
        return {
            "kind": self.kind,
            "root": self.root,
            "patterns": list(self.patterns),
            "suffixes": list(self.suffixes),
        }

    @classmethod
    def from_description(cls, description: Mapping[str, Any]) -> "FileSource":
        return cls(description["root"], tuple(description["patterns"]), tuple(description["suffixes"]))

    def rebased(self, root: str) -> "FileSource":
        """The same files, named relative to another root."""
        return replace(self, root=root, patterns=renamed(self.root, self.patterns, root))

    def files(self) -> list[SourceFile]:
        return [plain_file(file) for file in find_files(self.root, self.patterns, self.suffixes)]

    def look(self, path: str) -> SourceFile:
        return plain_file(look(self.root, path))

    def weight(self, file: SourceFile) -> int:
        return file.size

    def cuts(self, file: SourceFile, start: int, first: int, every: int) -> Iterator[int]:
        return cut_whole(self.root, file, start)

    def scanned(self, file: SourceFile) -> SourceFile:
        return file

    def read(self, part: Part) -> Iterable[Sample]:
        yield Sample(part.file.path, read_whole(self.root, part))

    def digest(self, file: SourceFile, start: int, stop: int) -> int:
        return digest(self.root, file, start, stop)


def files(*paths: str | os.PathLike[str], suffixes: Iterable[str] = (), root: str | None = None) -> FileSource:
    """Every file of some folders, globs or paths, as it is.

    >>> files("src", suffixes=[".py"]).patterns
    ('.',)
    """
    return FileSource(*named_below(paths, root), tuple(suffixes))
