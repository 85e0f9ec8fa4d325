"""Read the rows of a Parquet file: only the requested columns, a few rows at a time.

The number of rows per batch depends on their memory, from the headers of their pages. A page is decompressed as a
whole, so a page larger than a few samples is rejected, and so is a row group that expands too much.

    PAR1 │ group 0: id, text, date │ group 1: id, text, date │ … │ footer, its length, PAR1
                        ════                      ════             ════════════════════════

Several parts may be in one row group, so digests are cached while the file is unchanged.
"""

import os
import time
from collections.abc import Iterator
from contextlib import contextmanager
from functools import lru_cache
from io import RawIOBase
from weakref import WeakKeyDictionary

import numpy as np
import xxhash

from forebay.columns import Array
from forebay.errors import LibraryMissing, SourceUnreadable, is_url
from forebay.source import Failure, Part, Sample, SourceFile, settling_seconds
from forebay.sources.bucket_files import ObjectReader, entry_of, open_file
from forebay.sources.compression import LEAST_SAMPLES, most_unpacked
from forebay.sources.paths import MAX_SAMPLE_BYTES

try:
    import pyarrow as pa
    from pyarrow.parquet import ParquetFile
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

__all__ = [
    "ParquetFile", "check_footer", "every_batch", "open_any_parquet", "open_parquet", "read_rows", "row_batches",
    "row_cuts", "row_group_ends", "stored_spans", "understood",
]  # fmt: skip
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
        problem = _column_problem(parquet.schema_arrow, column)
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
    with open(place, "rb") as file:
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
        yield from documents(batch.column(column), part.file.path, first_row, max_sample_bytes)


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
            taken = cursor.take(part.start, part.stop)
        yield taken
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
            self._left = self._left.slice(passed)
            self.row += passed


_cursors: "WeakKeyDictionary[ParquetFile, _Cursor]" = WeakKeyDictionary()
_groups: "WeakKeyDictionary[ParquetFile, list[RowGroup]]" = WeakKeyDictionary()
_places: "WeakKeyDictionary[ParquetFile, str]" = WeakKeyDictionary()  # where files of this machine are


def _batches(
    parquet: ParquetFile, columns: tuple[str, ...], first: int, path: str, max_sample_bytes: int
) -> Iterator[pa.RecordBatch]:
    """A few rows at a time from a row group on; how many is decided for each group by itself."""
    local = _places.get(parquet)
    most = most_unpacked(SourceFile(path, os.path.getsize(local)), max_sample_bytes) if local else None
    for group in range(first, parquet.metadata.num_row_groups):
        made, rows = 0, _batch_rows(parquet, columns, group, path, max_sample_bytes)
        for batch in parquet.iter_batches(rows, row_groups=[group], columns=list(columns), use_threads=False):
            made += sum(map(_unpacked_bytes, batch.columns)) if most is not None else 0
            if most is not None and made > most:
                problem = f"the rows of its row group {group} unpack to more than {most:,} bytes"
                raise SourceUnreadable(path, f"{problem}; raise max_sample_bytes if that is meant")
            yield batch


def _unpacked_bytes(column: pa.Array) -> int:
    """The bytes of all values of a column, also where equal ones are stored once."""
    if pa.types.is_dictionary(column.type):
        column = column.dictionary_decode()  # a batch of repeated values has few rows
    return int(column.nbytes)


def _batch_rows(parquet: ParquetFile, columns: tuple[str, ...], group: int, path: str, max_sample_bytes: int) -> int:
    """How many rows are read at once so that a batch stays small."""
    rows = _groups[parquet][group].rows
    mean, most = 0.0, _MOST_BATCH_ROWS
    for chunk in _leaves(parquet, columns, group):
        pages = _pages(parquet, chunk, path)
        largest = max((page.unpacked for page in pages), default=0)
        if largest > LEAST_SAMPLES * max_sample_bytes:
            problem = f"its row group {group} has a page of {largest:,} bytes, which is unpacked as a whole"
            raise SourceUnreadable(path, f"{problem}; raise max_sample_bytes to a fourth of that, or write it anew")
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
    descriptor = os.open(place, os.O_RDONLY)
    try:
        if (stop := chunk.start + chunk.stored) > os.fstat(descriptor).st_size:
            raise SourceUnreadable(path, f"it is not a sound Parquet file: column '{chunk.path}' ends behind its end")
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


def _column_problem(schema: pa.Schema, column: str) -> str:
    if column not in schema.names:
        known = ", ".join(f"'{name}'" for name in schema.names)
        named = "a build names the one that holds the text (--text, text=)"
        return f"it has no column '{column}'; it has: {known}; {named}"
    if schema.names.count(column) > 1:
        return f"it has {schema.names.count(column)} columns '{column}'"
    kind = schema.field(column).type
    return "" if holds_text(kind) else f"its column '{column}' holds {kind}, not text"


_PIECE = 1 << 22
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
    running = xxhash.xxh3_64()
    position, end = span
    with open_file(path) as raw:
        raw.seek(position)
        while position < end and (content := raw.read(min(_PIECE, end - position))):
            running.update(content)
            position += len(content)
    value: bytes = running.digest()
    return value
