"""Whole files as samples: one file, one sample."""

import os
from collections.abc import Iterable, Iterator, Mapping
from dataclasses import dataclass, replace
from typing import Any, ClassVar

import xxhash

from forebay.errors import SourceChanged
from forebay.source import Part, Sample, SourceFile, Unit
from forebay.sources.paths import find_files, full_path, look, named_below, renamed


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
        return [_plain(file) for file in find_files(self.root, self.patterns, self.suffixes)]

    def look(self, path: str) -> SourceFile:
        return _plain(look(self.root, path))

    def weight(self, file: SourceFile) -> int:
        return file.size

    def cuts(self, file: SourceFile, start: int, first: int, every: int) -> Iterator[int]:
        if start:
            raise SourceChanged(self.root, {file.path: "grew, but it is one sample and cannot be appended to"})
        yield file.size

    def scanned(self, file: SourceFile) -> SourceFile:
        return file

    def read(self, part: Part) -> Iterable[Sample]:
        content = self._content(part.file.path)
        if len(content) != part.stop:
            how = f"has {len(content):,} bytes, {part.stop:,} were planned, and it is one sample"
            raise SourceChanged(self.root, {part.file.path: how})
        yield Sample(part.file.path, content)

    def digest(self, file: SourceFile, start: int, stop: int) -> int:
        value: int = xxhash.xxh3_64_intdigest(self._content(file.path)[start:stop])
        return value

    def _content(self, path: str) -> bytes:
        with open(full_path(self.root, path), "rb") as file:
            return file.read()


def files(*paths: str | os.PathLike[str], suffixes: Iterable[str] = (), root: str | None = None) -> FileSource:
    """Every file of some folders, globs or paths, as it is.

    >>> files("src", suffixes=[".py"]).patterns
    ('.',)
    """
    return FileSource(*named_below(paths, root), tuple(suffixes))


def _plain(file: SourceFile) -> SourceFile:
    return SourceFile(path=file.path, size=file.size, mtime_ns=file.mtime_ns)
