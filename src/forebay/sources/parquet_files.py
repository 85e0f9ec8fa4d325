"""Rows of Parquet files as documents: row groups are what is cut and read, and only the text column of them."""

import os
from collections.abc import Iterable, Iterator, Mapping
from dataclasses import dataclass, replace
from functools import lru_cache
from typing import Any, ClassVar

from forebay.source import Failure, Part, Sample, Source, SourceFile, Unit
from forebay.sources.failures import MAX_SAMPLE_BYTES, checked_limit, limit_in, stated_limit
from forebay.sources.parquet_digest import row_digest
from forebay.sources.parquet_rows import ParquetFile, check_footer, open_parquet, read_rows, row_cuts, row_group_ends
from forebay.sources.paths import (
    check_readable,
    find_files,
    full_path,
    left_out,
    look,
    named_below,
    plain_file,
    renamed,
)

SUFFIXES = (".parquet",)


@dataclass(frozen=True, slots=True)
class ParquetSource(Source):
    """The column `text` of every row of some files. A sample's id is `file#row`, counted from 0.

    A row that is null, not UTF-8 or longer than `max_sample_bytes` is a failure that names the row; a file without such
    a column is an error.
    """

    kind: ClassVar[str] = "parquet"
    unit: ClassVar[Unit] = "samples"
    read_by: ClassVar[tuple[str, ...]] = ("text", "max_sample_bytes")
    files_grow: ClassVar[bool] = False  # its footer stands at the end

    root: str
    patterns: tuple[str, ...]
    text: str = "text"
    max_sample_bytes: int = MAX_SAMPLE_BYTES

    def describe(self) -> Mapping[str, Any]:
        described = {"kind": self.kind, "root": self.root, "patterns": list(self.patterns), "text": self.text}
        return described | stated_limit(self.max_sample_bytes)

    @classmethod
    def from_description(cls, description: Mapping[str, Any]) -> "ParquetSource":
        patterns = tuple(description["patterns"])
        return cls(description["root"], patterns, description["text"], limit_in(description))

    def rebased(self, root: str) -> "ParquetSource":
        """The same files, named relative to another root."""
        return replace(self, root=root, patterns=renamed(self.root, self.patterns, root))

    def files(self) -> list[SourceFile]:
        return [plain_file(file) for file in find_files(self.root, self.patterns, SUFFIXES)]

    def left_out(self, apart: str = "") -> Mapping[str, int]:
        return left_out(self.root, self.patterns, SUFFIXES, apart)

    def look(self, path: str) -> SourceFile:
        return plain_file(look(self.root, path))

    def weight(self, file: SourceFile) -> int:
        return int(self._parquet(file).metadata.num_rows)

    def cuts(self, file: SourceFile, start: int, first: int, every: int) -> Iterator[int]:
        return row_cuts(row_group_ends(self._parquet(file)), start, first, every)

    def scanned(self, file: SourceFile) -> SourceFile:
        return file

    def read(self, part: Part) -> Iterable[Sample | Failure]:
        return read_rows(self._parquet(part.file), self.text, part, self.max_sample_bytes)

    def digest(self, file: SourceFile, start: int, stop: int) -> int:
        return row_digest(full_path(self.root, file.path), self.text, start, stop)

    def _parquet(self, file: SourceFile) -> ParquetFile:
        check_readable(self.root, file)
        return _opened(full_path(self.root, file.path), file, self.text)


def parquet(
    *paths: str | os.PathLike[str],
    text: str = "text",
    root: str | None = None,
    max_sample_bytes: int = MAX_SAMPLE_BYTES,
) -> ParquetSource:
    """The documents of `.parquet` files, folders or globs: a row each, only the column `text` is read.

    >>> parquet("/data/shards/*.parquet", text="content").text
    'content'
    """
    return ParquetSource(*named_below(paths, root), text, checked_limit(max_sample_bytes))


@lru_cache(maxsize=4)
def _opened(path: str, file: SourceFile, column: str) -> ParquetFile:
    """An open file, kept so that what follows the rows read last is read without a new start."""
    opened = open_parquet(path, path, column)
    check_footer(opened, path)
    return opened
