"""Rows of Parquet files as documents or as images."""

import math
import os
from abc import abstractmethod
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from functools import lru_cache
from typing import Any, ClassVar

from forebay.errors import SourceUnreadable
from forebay.source import Annotated, Failure, Part, Sample, SourceFile, Unit
from forebay.sources.image_files import stamp
from forebay.sources.parquet_columns import holds_bytes, holds_json
from forebay.sources.parquet_rows import (
    ParquetFile,
    check_footer,
    every_batch,
    open_any_parquet,
    open_parquet,
    read_rows,
    row_batches,
    row_cuts,
    row_digest,
    row_group_ends,
    understood,
)
from forebay.sources.paths import (
    MAX_IMAGE_BYTES,
    MAX_SAMPLE_BYTES,
    LocalFiles,
    check_readable,
    checked_limit,
    full_path,
    named_below,
    too_large,
)

SUFFIXES = (".parquet",)


@dataclass(frozen=True, slots=True)
class _RowFiles(LocalFiles):
    """Parquet files that are cut between rows."""

    unit: ClassVar[Unit] = "samples"
    files_grow: ClassVar[bool] = False  # its footer stands at the end
    _decompressed: ClassVar[bool] = False

    @abstractmethod
    def _parquet(self, file: SourceFile) -> ParquetFile:
        """The file, open; a few are kept, so that what follows the rows read last is read without a new start."""

    def _suffixes(self) -> tuple[str, ...]:
        return SUFFIXES

    def weight(self, file: SourceFile) -> int:
        return int(self._parquet(file).metadata.num_rows)

    def cuts(self, file: SourceFile, start: int, first: int, every: int) -> Iterator[int]:
        return row_cuts(row_group_ends(self._parquet(file)), start, first, every)


@dataclass(frozen=True, slots=True)
class ParquetSource(_RowFiles):
    """The column `text` of every row of some files. A sample's id is `file#row`, counted from 0.

    A row that is null, not UTF-8 or longer than `max_sample_bytes` is a failure that names the row; a file without such
    a column is an error.
    """

    kind: ClassVar[str] = "parquet"
    read_by: ClassVar[tuple[str, ...]] = ("text", "max_sample_bytes")

    text: str = "text"
    max_sample_bytes: int = MAX_SAMPLE_BYTES

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
    opened = open_parquet(path, path, column)
    check_footer(opened, path)
    return opened


@dataclass(frozen=True, slots=True)
class ParquetImageSource(_RowFiles):
    """The images in the column `image` of some files: bytes, or a struct of `bytes` and `path` as Hugging Face has it.

    A sample's id is `file#row`, counted from 0. Columns of strings, numbers, lists and structs of these are its
    metadata; what JSON has no word for (dates, bytes) is left out, and a number that is none (NaN) is null. An image of
    more than `max_sample_bytes` is a failure.
    """

    kind: ClassVar[str] = "parquet_images"
    read_by: ClassVar[tuple[str, ...]] = ("image", "max_sample_bytes")

    image: str = "image"
    max_sample_bytes: int = MAX_IMAGE_BYTES

    def stamp(self, file: SourceFile) -> str:
        return stamp(self.root, file)

    def read(self, part: Part) -> Iterable[Sample | Failure]:
        parquet = self._parquet(part.file)
        said = _said_columns(parquet, self.image)
        for first_row, batch in row_batches(parquet, (*said, self.image), part, self.max_sample_bytes):
            metadata = batch.select(said).to_pylist() if said else [{}] * len(batch)
            for index, (value, facts) in enumerate(zip(batch.column(self.image), metadata, strict=True)):
                yield _sample(part.file.path, first_row + index, value.as_py(), facts, self.max_sample_bytes)

    def annotations(self, files: Sequence[SourceFile]) -> Iterator[Mapping[str, Any]]:
        for file in files:
            parquet = self._parquet(file)
            said = _said_columns(parquet, self.image)
            for batch in every_batch(parquet, tuple(said), self.max_sample_bytes) if said else ():
                yield from (_as_json(facts) for facts in batch.to_pylist())

    def digest(self, file: SourceFile, start: int, stop: int) -> int:
        return row_digest(full_path(self.root, file.path), None, start, stop)

    def _parquet(self, file: SourceFile) -> ParquetFile:
        check_readable(self.root, file)
        return _opened_images(full_path(self.root, file.path), file, self.image)


def parquet_images(
    *paths: str | os.PathLike[str],
    image: str = "image",
    root: str | None = None,
    max_sample_bytes: int = MAX_IMAGE_BYTES,
) -> ParquetImageSource:
    """The images of `.parquet` files, folders or globs: a row each, all other columns are metadata.

    >>> parquet_images("/data/shards/*.parquet", image="jpg").image
    'jpg'
    """
    return ParquetImageSource(*named_below(paths, root), image, checked_limit(max_sample_bytes))


@lru_cache(maxsize=4)
def _opened_images(path: str, file: SourceFile, column: str) -> ParquetFile:
    parquet = open_any_parquet(path, path)
    with understood(path):
        problem = _column_problem(parquet, column)
    if problem:
        parquet.close()
        raise SourceUnreadable(path, problem)
    check_footer(parquet, path)
    return parquet


def _column_problem(parquet: ParquetFile, column: str) -> str:
    names = parquet.schema_arrow.names
    if names.count(column) != 1:
        known, count = ", ".join(f"'{name}'" for name in names), names.count(column)
        found = f"{count} columns" if count else "no column"
        return f"it has {found} '{column}'; it has: {known}; name the one that holds the images (--image, image=)"
    twice = [name for name in names if names.count(name) > 1]
    if twice:
        return f"it has {names.count(twice[0])} columns '{twice[0]}'; metadata has each name once, rename one of them"
    kind = parquet.schema_arrow.field(column).type
    fields = [kind.field(index) for index in range(kind.num_fields)]
    in_struct = any(field.name == "bytes" and holds_bytes(field.type) for field in fields)
    return "" if holds_bytes(kind) or in_struct else f"its column '{column}' holds {kind}, not bytes of images"


def _said_columns(parquet: ParquetFile, image: str) -> list[str]:
    """The columns that are metadata."""
    return [field.name for field in parquet.schema_arrow if field.name != image and holds_json(field.type)]


def _sample(path: str, row: int, value: Any, facts: dict[str, Any], limit: int) -> Sample | Failure:
    name = f"{path}#{row}"
    content = value.get("bytes") if isinstance(value, dict) else value
    if content is None:
        return Failure(name, "null", "the row holds no bytes of an image; images that are only named are not fetched")
    if len(content) > limit:
        return too_large(name, len(content), limit, f"row {row}: ")
    return Sample(name, Annotated(content, _as_json(facts)))


def _as_json(value: Any) -> Any:
    """The same value, with null for numbers that JSON cannot write."""
    if isinstance(value, dict):
        return {name: _as_json(inner) for name, inner in value.items()}
    if isinstance(value, list):
        return [_as_json(inner) for inner in value]
    return None if isinstance(value, float) and not math.isfinite(value) else value
