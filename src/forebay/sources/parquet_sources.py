"""Rows of Parquet files as documents or as images: only the requested columns, a few rows at a time.

The number of rows per batch depends on their memory, from the headers of their pages. A page is decompressed as a
whole, so a page larger than a few samples is rejected, and so is a row group that expands too much.

    PAR1 │ group 0: id, text, date │ group 1: id, text, date │ … │ footer, its length, PAR1
                        ════                      ════             ════════════════════════

Several parts may be in one row group, so digests are cached while the file is unchanged.
"""

import math
import os
import time
from abc import abstractmethod
from collections.abc import Iterable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from functools import lru_cache
from io import RawIOBase
from typing import Any, ClassVar
from weakref import WeakKeyDictionary

import numpy as np
import xxhash

from forebay.columns import Array
from forebay.errors import LibraryMissing, SourceUnreadable
from forebay.source import Annotated, Failure, Part, Sample, SourceFile, Unit, open_regular, settling_seconds
from forebay.sources.bucket_files import ObjectReader, entry_of
from forebay.sources.compression import most_unpacked
from forebay.sources.image_files import stamp
from forebay.sources.parquet_columns import holds_bytes, holds_json
from forebay.sources.paths import (
    MAX_IMAGE_BYTES,
    MAX_SAMPLE_BYTES,
    LocalFiles,
    check_readable,
    checked_limit,
    full_path,
    hashed_range,
    named_below,
    too_large,
)
from forebay.store.base import is_url

try:
    import pyarrow as pa
    import pyarrow.compute as pc
    from pyarrow.parquet import ParquetFile as ParquetFile
except ModuleNotFoundError as missing:
    raise LibraryMissing("pyarrow", "reading Parquet files", "tokens") from missing

from forebay.sources.parquet_columns import (
    DICTIONARY_PAGE,
    FooterColumn,
    Page,
    RowGroup,
    documents,
    holds_text,
    page_headers,
    row_groups,
)

MAX_FOOTER_BYTES = 1 << 28
_BUFFER = 1 << 22
_MAGIC_BYTES, _TAIL_BYTES = 4, 8  # at the beginning; at the end, after the length of the footer
_BATCH_BYTES = 1 << 18
_MOST_BATCH_ROWS = 1024
_MOST_REPEATED_ROWS = 64  # a text that is stored once may be in every row: the mean says nothing of that
_REPEATED_BYTES = 1 << 26  # which such rows may take together
_REPEATING = 7  # the encoding DELTA_BYTE_ARRAY: a value repeats the beginning of the one before
_EVEN_PARTS = 8
_SLACK = 8


def open_parquet(place: str | RawIOBase, path: str, column: str) -> ParquetFile:
    """A Parquet file that has a text column of this name; `path` is its name in errors."""
    parquet = open_any_parquet(place, path)
    with understood(path):
        problem = _type_problem(parquet.schema_arrow, column)
    if problem:
        parquet.close()
        raise SourceUnreadable(path, problem)
    return parquet


def open_any_parquet(place: str | RawIOBase, path: str) -> ParquetFile:
    """A Parquet file, whatever its columns are."""
    if isinstance(place, str) and is_url(place):
        place = ObjectReader(place)
    if isinstance(place, str):
        _check_footer_size(place, path)
    with understood(path):
        parquet = ParquetFile(place, buffer_size=_BUFFER, pre_buffer=False, page_checksum_verification=True)
        _groups[parquet] = _described_groups(parquet)
    if isinstance(place, str):
        _places[parquet] = place
    return parquet


def _check_footer_size(place: str, path: str) -> None:
    """Refuse a footer that pyarrow would read into memory, and expand, whatever its length is."""
    with open(place, "rb", opener=open_regular) as file:
        file.seek(-min(_TAIL_BYTES, os.fstat(file.fileno()).st_size), os.SEEK_END)
        size = int.from_bytes(file.read()[:4], "little")
    if size > MAX_FOOTER_BYTES:
        problem = f"its footer has {size:,} bytes, more than the {MAX_FOOTER_BYTES:,} that are read"
        raise SourceUnreadable(path, f"it is not a sound Parquet file: {problem}")


def row_group_ends(parquet: ParquetFile) -> Array:
    """Where each row group ends, in rows."""
    return np.cumsum([group.rows for group in _groups[parquet]], dtype=np.int64)


def _described_groups(parquet: ParquetFile) -> list[RowGroup]:
    """What the footer says of the row groups, as pyarrow writes it again.

    `metadata.row_group(0).column(0)` is not asked: where a footer is damaged, pyarrow ends the process there.
    """
    sink = pa.BufferOutputStream()
    parquet.metadata.write_metadata_file(sink)
    return row_groups(sink.getvalue().to_pybytes()[_MAGIC_BYTES:-_TAIL_BYTES])


def check_footer(parquet: ParquetFile, path: str) -> None:
    """Check that the row counts in a footer agree: a footer from range reads is not hashed."""
    ends = row_group_ends(parquet)
    rows = int(ends[-1]) if len(ends) else 0
    if parquet.metadata.num_rows != rows:
        raise SourceUnreadable(path, f"its footer says {parquet.metadata.num_rows:,} rows, its row groups {rows:,}")


def row_cuts(ends: Array, start: int, first: int, every: int) -> Iterator[int]:
    """Where parts may end: at the end of a row group where one is close behind, else inside of it.

    A file of many parts is cut evenly, so that no small rest has to share a chunk with the next file.
    """
    total = int(ends[-1]) if len(ends) else 0
    count = (total - start) // every
    if count >= _EVEN_PARTS and first <= every:
        step = -(-(total - start) // count)
        cuts = (_near_end(ends, position, every // _SLACK) for position in range(start + step, total, step))
        yield from (cut for cut in cuts if cut < total)
    else:
        yield from _plain_cuts(ends, start + first, total, every)
    if total > start:
        yield total


def _plain_cuts(ends: Array, position: int, total: int, every: int) -> Iterator[int]:
    while position < total and (cut := _near_end(ends, position, every // _SLACK)) < total:
        yield cut
        position = cut + every


def _near_end(ends: Array, position: int, slack: int) -> int:
    end = int(ends[np.searchsorted(ends, position)])
    return end if end - position <= slack else position


def read_rows(
    parquet: ParquetFile, column: str, part: Part, max_sample_bytes: int = MAX_SAMPLE_BYTES
) -> Iterator[Sample | Failure]:
    """The documents of some rows; memory holds a few rows at a time."""
    for first_row, batch in row_batches(parquet, (column,), part, max_sample_bytes):
        values = [batch.column(column)]
        del batch
        yield from documents(values.pop(), part.file.path, first_row, max_sample_bytes)


def row_batches(
    parquet: ParquetFile, columns: tuple[str, ...], part: Part, max_sample_bytes: int
) -> Iterator[tuple[int, pa.RecordBatch]]:
    """Some rows, a few at a time, each time with the number of the first.

    A row group is read from its beginning, so earlier rows are decoded and skipped, unless the last read of this file
    ended before these rows in the same group.
    """
    ends = row_group_ends(parquet)
    rows = int(ends[-1]) if len(ends) else 0
    path = _places.get(parquet, part.file.path)
    if part.stop > rows:
        raise SourceUnreadable(path, f"it has {rows:,} rows, {part.stop:,} were planned")
    group = int(np.searchsorted(ends, part.start, side="right"))
    group_start = int(ends[group - 1]) if group else 0
    cursor = _cursors.pop(parquet, None)
    if cursor is None or cursor.columns != columns or not group_start <= cursor.row <= part.start:
        cursor = _Cursor(columns, group_start, _batches(parquet, columns, group, path, max_sample_bytes))
    while cursor.row < part.stop:
        with understood(path):
            taken = [cursor.take(part.start, part.stop)]
        yield taken.pop()  # no reference to the rows stays here
    _cursors[parquet] = cursor


def every_batch(parquet: ParquetFile, columns: tuple[str, ...], max_sample_bytes: int) -> Iterator[pa.RecordBatch]:
    """All rows of some columns, a few at a time."""
    path = _places.get(parquet, "")
    batches = _batches(parquet, columns, 0, path, max_sample_bytes)
    while True:
        with understood(path):
            batch = next(batches, None)
        if batch is None:
            return
        yield batch


class _Cursor:
    """The rows of some columns from the beginning of a row group on."""

    def __init__(self, columns: tuple[str, ...], row: int, batches: Iterator[pa.RecordBatch]) -> None:
        self.columns = columns
        self.row = row  # the next to be taken
        self._batches = batches
        self._left: pa.RecordBatch | None = None

    def take(self, start: int, stop: int) -> tuple[int, pa.RecordBatch]:
        """Some of the rows from `start` to `stop`: the number of the first, and their values."""
        self._pass(max(0, start - self.row))
        while self._left is None or not len(self._left):
            self._left = next(self._batches)
            self._pass(max(0, start - self.row))
        first_row, taken = self.row, self._left.slice(0, stop - self.row)
        self._pass(len(taken))
        return first_row, taken

    def _pass(self, count: int) -> None:
        if self._left is not None:
            passed = min(count, len(self._left))
            self._left = self._left.slice(passed) if passed < len(self._left) else None  # no row holds all the others
            self.row += passed


_cursors: "WeakKeyDictionary[ParquetFile, _Cursor]" = WeakKeyDictionary()
_groups: "WeakKeyDictionary[ParquetFile, list[RowGroup]]" = WeakKeyDictionary()
_places: "WeakKeyDictionary[ParquetFile, str]" = WeakKeyDictionary()  # where files of this machine are


LARGE_BATCH = 16 * 1024 * 1024
# A large page need not be a bomb: pyarrow writes 1,024 rows into one, whatever their size.
PAGE_RATIO = 8  # of what its column takes in the file
LEAST_IN_PAGE, MOST_IN_PAGE = 2, 16  # samples of the largest size


def _batches(
    parquet: ParquetFile, columns: tuple[str, ...], first: int, path: str, max_sample_bytes: int
) -> Iterator[pa.RecordBatch]:
    """Yield a few rows at a time, from a row group on; the number is chosen for each group."""
    local = _places.get(parquet)
    most = most_unpacked(SourceFile(path, os.path.getsize(local)), max_sample_bytes) if local else None
    for group in range(first, parquet.metadata.num_row_groups):
        made, rows = 0, _batch_rows(parquet, columns, group, path, max_sample_bytes)
        for batch in parquet.iter_batches(rows, row_groups=[group], columns=list(columns), use_threads=False):
            made += sum(map(_unpacked_bytes, batch.columns)) if most is not None else 0
            if most is not None and made > most:
                problem = f"the rows of its row group {group} unpack to more than {most:,} bytes"
                raise SourceUnreadable(path, f"{problem}; raise max_sample_bytes if that is meant")
            if batch.nbytes > LARGE_BATCH:
                pa.default_memory_pool().release_unused()  # decoding a page takes as much again, which the pool keeps
            given = [batch]
            del batch
            yield given.pop()


def _unpacked_bytes(column: pa.Array) -> int:
    """The bytes of all values of a column, also where equal ones are stored once."""
    if not pa.types.is_dictionary(column.type):
        return int(column.nbytes)
    if not holds_text(column.type.value_type):
        return int(column.dictionary_decode().nbytes)  # a batch of repeated values has few rows
    sizes = pc.binary_length(column.dictionary.cast(pa.large_binary()))
    return int(pc.sum(pc.take(sizes, column.indices)).as_py() or 0) + 8 * len(column)


def _batch_rows(parquet: ParquetFile, columns: tuple[str, ...], group: int, path: str, max_sample_bytes: int) -> int:
    """How many rows are read at once so that a batch stays small."""
    rows = _groups[parquet][group].rows
    mean, most = 0.0, _MOST_BATCH_ROWS
    for chunk in _leaves(parquet, columns, group):
        pages = _pages(parquet, chunk, path)
        largest = max((page.unpacked for page in pages), default=0)
        in_the_file = min(PAGE_RATIO * chunk.stored, MOST_IN_PAGE * max_sample_bytes)
        if largest > max(LEAST_IN_PAGE * max_sample_bytes, in_the_file):
            problem = f"its row group {group} has a page of {largest:,} bytes, which is unpacked as a whole"
            raise SourceUnreadable(path, f"{problem}; raise max_sample_bytes to half of that, or write it anew")
        mean += (sum(page.unpacked for page in pages) or chunk.unpacked) / max(1, rows)
        if chunk.dictionary_page is not None or _REPEATING in chunk.encodings:
            shared = [page.unpacked for page in pages if page.kind == DICTIONARY_PAGE] or [largest]
            most = min(most, max(1, min(_MOST_REPEATED_ROWS, _REPEATED_BYTES // max(1, *shared))))
    return int(min(max(_BATCH_BYTES / max(1, mean), 1), most))


def _pages(parquet: ParquetFile, chunk: FooterColumn, path: str) -> list[Page]:
    """The pages of a column in a row group; none of a file that is not on this machine."""
    place = _places.get(parquet)
    if place is None:
        return []
    descriptor = open_regular(place, os.O_RDONLY)
    try:
        if (stop := chunk.start + chunk.stored) > os.fstat(descriptor).st_size:
            raise SourceUnreadable(
                path, f"it is not a sound Parquet file: column '{chunk.path}' ends after the end of the file"
            )
        return list(page_headers(descriptor, path, chunk.start, stop))
    finally:
        os.close(descriptor)


def _leaves(parquet: ParquetFile, columns: tuple[str, ...], group: int) -> list[FooterColumn]:
    """What the footer says of all that some columns are stored in; a struct has a leaf for each field."""
    chunks = _groups[parquet][group].columns
    if [parquet.schema.column(index).path for index in range(len(parquet.schema))] != [chunk.path for chunk in chunks]:
        raise pa.ArrowInvalid(f"row group {group} has other columns than the schema")
    return [chunk for chunk in chunks if chunk.path in columns or chunk.path.split(".")[0] in columns]


def stored_spans(parquet: ParquetFile, column: str | None) -> list[tuple[int, int]]:
    """Which bytes of the file hold a column, or all of them, for every row group."""
    return [_stored_span(group, number, column) for number, group in enumerate(_groups[parquet])]


def _stored_span(group: RowGroup, number: int, column: str | None) -> tuple[int, int]:
    chunks = [chunk for chunk in group.columns if column in (None, chunk.path)]
    if not chunks:
        raise pa.ArrowInvalid(f"row group {number} has no column '{column}'")
    begins = [chunk.dictionary_page or chunk.data_page for chunk in chunks]
    return min(begins), max(begin + chunk.stored for begin, chunk in zip(begins, chunks, strict=True))


@contextmanager
def understood(path: str) -> Iterator[None]:
    """Raise `SourceUnreadable` for errors of pyarrow; errors of the disk propagate."""
    try:
        yield
    except (pa.ArrowException, OSError, StopIteration, UnicodeDecodeError) as error:
        if isinstance(error, OSError) and error.errno is not None:
            raise
        raise SourceUnreadable(path, f"it is not a sound Parquet file: {error or 'rows are missing'}") from error


def _type_problem(schema: pa.Schema, column: str) -> str:
    if column not in schema.names:
        known = ", ".join(f"'{name}'" for name in schema.names)
        named = "a build names the one that holds the text (--text, text=)"
        return f"it has no column '{column}'; it has: {known}; {named}"
    if schema.names.count(column) > 1:
        return f"it has {schema.names.count(column)} columns '{column}'"
    kind = schema.field(column).type
    return "" if holds_text(kind) else f"its column '{column}' holds {kind}, not text"


Span = tuple[int, int]
State = tuple[int, ...]


def row_digest(path: str, column: str | None, start: int, stop: int) -> int:
    """A hash of all that the rows from `start` to `stop` of a column, or of every one, are read from."""
    state = _object_state(path) if is_url(path) else _file_state(path)
    running = xxhash.xxh3_64()
    for span in _spans(path, state, column, start, stop):
        running.update(_span_digest(path, state, span))
    value: int = running.intdigest()
    return value


def _file_state(path: str) -> State:
    status = os.stat(path)
    state: State = (status.st_size, status.st_dev, status.st_ino, status.st_mtime_ns, status.st_ctime_ns)
    if settling_seconds(status.st_ctime_ns, time.time_ns()):  # it may be touched again without a new time
        state = (*state, time.monotonic_ns())  # remembered for nobody
    return state


def _object_state(url: str) -> State:
    entry = entry_of(url)
    return (entry.size, xxhash.xxh3_64_intdigest(entry.etag.encode()))


def _spans(path: str, state: State, column: str | None, start: int, stop: int) -> list[Span]:
    ends, stored, footer = _layout(path, state, column)
    groups = zip(stored, [0, *ends], ends, strict=False)
    return [*(span for span, low, high in groups if low < stop and start < high), footer]


@lru_cache(maxsize=64)
def _layout(path: str, state: State, column: str | None) -> tuple[list[int], list[Span], Span]:
    """Where row groups end, in rows; where their text is stored; where the footer is."""
    with open_any_parquet(path, path) if column is None else open_parquet(path, path, column) as parquet:
        size = state[0]
        footer = (size - _TAIL_BYTES - parquet.metadata.serialized_size, size)
        with understood(path):
            return row_group_ends(parquet).tolist(), stored_spans(parquet, column), footer


@lru_cache(maxsize=256)
def _span_digest(path: str, state: State, span: Span) -> bytes:
    value: bytes = hashed_range(path, *span).digest()
    return value


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
