"""Rows of Parquet files as documents or as images."""

import math
import os
from abc import abstractmethod
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from functools import lru_cache
from typing import Any, ClassVar

from forebay.source import Annotated, Failure, Part, PartDigest, Sample, Samples, SourceFile, Unit, source_unreadable
from forebay.sources.image_files import stamp
from forebay.sources.opening import full_path
from forebay.sources.parquet_columns import holds_bytes, holds_json
from forebay.sources.parquet_rows import ParquetRows, open_parquet, read_rows, row_cuts, row_digest
from forebay.sources.paths import (
    MAX_IMAGE_BYTES,
    MAX_SAMPLE_BYTES,
    LocalFiles,
    check_readable,
    checked_limit,
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
    def _checked(self, rows: ParquetRows) -> ParquetRows:
        """The file itself, if it has the columns; closed otherwise."""

    def _suffixes(self) -> tuple[str, ...]:
        return SUFFIXES

    def _rows(self, file: SourceFile) -> ParquetRows:
        check_readable(self.root, file)
        rows = _opened(self, file)
        rows.check_planned()
        return rows

    def weight(self, file: SourceFile) -> int:
        return int(self._rows(file).parquet.metadata.num_rows)

    def cuts(self, file: SourceFile, start: int, first: int, every: int) -> Iterator[int]:
        return row_cuts(self._rows(file).ends, start, first, every)


@lru_cache(maxsize=4)
def _opened(source: _RowFiles, file: SourceFile) -> ParquetRows:
    """A file, open; a few are cached, so that consecutive parts of a row group decode it once."""
    return source._checked(open_parquet(full_path(source.root, file.path), file))


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

    def read(self, part: Part, *, digest: PartDigest | None = None, preview: bool = False) -> Samples:
        return read_rows(self._rows(part.file), self.text, part, self.max_sample_bytes)

    def digest(self, file: SourceFile, start: int, stop: int) -> int:
        return row_digest(full_path(self.root, file.path), self.look(file.path), self.text, start, stop)

    def _checked(self, rows: ParquetRows) -> ParquetRows:
        return rows.check_text(self.text)


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

    def read(self, part: Part, *, digest: PartDigest | None = None, preview: bool = False) -> Samples:
        rows = self._rows(part.file)
        names = _metadata_columns(rows.schema, self.image)
        for first_row, batch in rows.batches((*names, self.image), part.start, part.stop, self.max_sample_bytes):
            metadata = batch.select(names).to_pylist() if names else [{}] * len(batch)
            for index, (value, facts) in enumerate(zip(batch.column(self.image), metadata, strict=True)):
                yield _sample(part.file.path, first_row + index, value.as_py(), facts, self.max_sample_bytes)

    def annotations(self, files: Sequence[SourceFile]) -> Iterator[Mapping[str, Any]]:
        for file in files:
            rows = self._rows(file)
            names = _metadata_columns(rows.schema, self.image)
            if names and len(rows.ends):
                for _, batch in rows.batches(tuple(names), 0, int(rows.ends[-1]), self.max_sample_bytes):
                    yield from (_as_json(facts) for facts in batch.to_pylist())

    def digest(self, file: SourceFile, start: int, stop: int) -> int:
        return row_digest(full_path(self.root, file.path), self.look(file.path), None, start, stop)

    def _checked(self, rows: ParquetRows) -> ParquetRows:
        names = rows.check_column(self.image, _holds_images, "bytes of images", "--image, image=").schema.names
        repeated = next((name for name in names if names.count(name) > 1), None)
        if repeated is not None:
            rows.close()
            problem = f"it has {names.count(repeated)} columns '{repeated}'; metadata has each name once"
            raise source_unreadable(rows.path, f"{problem}, rename one of them")
        return rows


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


def _holds_images(kind: Any) -> bool:
    """Whether values of a type are bytes, or structs with bytes."""
    fields = [kind.field(index) for index in range(kind.num_fields)]
    return holds_bytes(kind) or any(field.name == "bytes" and holds_bytes(field.type) for field in fields)


def _metadata_columns(schema: Any, image: str) -> list[str]:
    return [field.name for field in schema if field.name != image and holds_json(field.type)]


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
