"""Rows of Parquet files as documents or as images: only the requested columns, a few rows at a time.

The number of rows per batch depends on their memory, as the footer states it. pyarrow decompresses a page as a whole
and limits what a footer may contain; a row group that expands too much is rejected while it is read.

    PAR1 │ group 0: id, text, date │ group 1: id, text, date │ … │ footer, its length, PAR1
                        ════                      ════             ════════════════════════

Several parts may be in one row group, so digests are cached while the file is unchanged.
"""

import os
import time
import weakref
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from functools import cached_property, lru_cache
from io import FileIO, RawIOBase
from typing import Any, cast

import numpy as np
import xxhash

from forebay.columns import Array
from forebay.errors import SourceUnreadable
from forebay.source import Failure, Part, Sample, SourceFile, settling_seconds, source_unreadable
from forebay.sources.compression import most_unpacked
from forebay.sources.opening import check_planned, hashed_range, open_planned
from forebay.sources.parquet_columns import ParquetFile, documents, holds_text, pa, pc
from forebay.sources.paths import MAX_SAMPLE_BYTES

Span = tuple[int, int]
MAX_FOOTER_BYTES = 1 << 28
_BUFFER = 1 << 22
_READ_WHOLE = 1 << 24  # a smaller file is not streamed: that takes the memory which a page claims, up to 2 GiB
_TAIL_BYTES = 8  # at the end: the length of the footer, and a magic number
_BATCH_BYTES = 1 << 18
_MOST_BATCH_ROWS = 1024
# Equal texts are stored once, in a dictionary or as DELTA_BYTE_ARRAY, and unpacked in every row of a batch.
_REPEATED_ROWS = 16, 64  # at least and at most
_REPEATED_BYTES = 1 << 26  # of such rows together, if each were as large as the column
_EVEN_PARTS = 8
_SLACK = 8


class ParquetRows:
    """An open Parquet file: the ends of its row groups, and the rows of some columns in small batches.

    `path` is its name in errors. Reading continues where it stopped, without decoding earlier rows of the group again.
    """

    def __init__(self, content: RawIOBase, file: SourceFile, path: str) -> None:
        self.file, self.path = file, path
        self._content = content
        self._cursor: _Cursor | None = None
        weakref.finalize(self, content.close)  # a few are cached, and closed when they are forgotten
        with understood(path):
            _check_footer_size(content, file.size)
            buffer = 0 if isinstance(content, FileIO) and file.size <= _READ_WHOLE else _BUFFER
            self.parquet = ParquetFile(content, buffer_size=buffer, pre_buffer=False, page_checksum_verification=True)

    def close(self) -> None:
        self.parquet.close()
        self._content.close()

    @property
    def schema(self) -> pa.Schema:
        with understood(self.path):
            return self.parquet.schema_arrow

    @cached_property
    def ends(self) -> Array:
        """Where each row group ends, in rows. Raises if the row counts in the footer disagree."""
        footer = self.parquet.metadata
        groups = range(footer.num_row_groups)
        ends = np.cumsum([footer.row_group(group).num_rows for group in groups], dtype=np.int64)
        rows = int(ends[-1]) if len(ends) else 0
        if footer.num_rows != rows:
            raise source_unreadable(self.path, f"its footer says {footer.num_rows:,} rows, its row groups {rows:,}")
        return ends

    def check_planned(self) -> None:
        """Raise `SourceChanged` if the open file was edited since it was planned."""
        if isinstance(self._content, FileIO):
            check_planned(self.path, self.file, os.fstat(self._content.fileno()))

    def check_text(self, column: str) -> "ParquetRows":
        """The file itself, if it has a text column of this name."""
        return self.check_column(column, holds_text, "text", "--text, text=")

    def check_column(
        self, column: str, is_usable: Callable[[pa.DataType], bool], content: str, option: str
    ) -> "ParquetRows":
        """The file itself, if it has one column of this name with usable values; closed otherwise."""
        try:
            names = self.schema.names
            if names.count(column) != 1:
                known = ", ".join(f"'{name}'" for name in names)
                count = f"{names.count(column)} columns" if column in names else "no column"
                problem = f"it has {count} '{column}'; it has: {known}; name the one with the {content} ({option})"
                raise source_unreadable(self.path, problem)
            kind = self.schema.field(column).type
            if not is_usable(kind):
                raise source_unreadable(self.path, f"its column '{column}' holds {kind}, not {content}")
        except SourceUnreadable:
            self.close()
            raise
        return self

    def batches(
        self, columns: tuple[str, ...], start: int, stop: int, max_sample_bytes: int
    ) -> Iterator[tuple[int, pa.RecordBatch]]:
        """Yield batches of rows with the number of their first row.

        A row group is read from its beginning, so earlier rows are decoded and skipped, unless the last read of this
        file ended before these rows in the same group.
        """
        rows = int(self.ends[-1]) if len(self.ends) else 0
        if stop > rows:
            raise source_unreadable(self.path, f"it has {rows:,} rows, {stop:,} were planned")
        group = int(np.searchsorted(self.ends, start, side="right"))
        group_start = int(self.ends[group - 1]) if group else 0
        cursor, self._cursor = self._cursor, None
        if cursor is None or cursor.columns != columns or not group_start <= cursor.row <= start:
            cursor = _Cursor(columns, group_start, self._decoded(columns, group, max_sample_bytes))
        while cursor.row < stop:
            with understood(self.path):
                taken = [cursor.take(start, stop)]
            yield taken.pop()  # no reference to the rows stays here
        self._cursor = cursor

    def _decoded(self, columns: tuple[str, ...], first: int, max_sample_bytes: int) -> Iterator[pa.RecordBatch]:
        """Yield a few rows at a time, from a row group on; the number is chosen for each group."""
        most = most_unpacked(self.file, max_sample_bytes)
        for group in range(first, self.parquet.metadata.num_row_groups):
            unpacked, rows = 0, _batch_rows(self.parquet, columns, group)
            for batch in self.parquet.iter_batches(rows, row_groups=[group], columns=list(columns), use_threads=False):
                unpacked += sum(map(_unpacked_bytes, batch.columns))
                if unpacked > most:
                    problem = f"the rows of its row group {group} unpack to more than {most:,} bytes"
                    raise source_unreadable(self.path, f"{problem}; raise max_sample_bytes if that is meant")
                if batch.nbytes > LARGE_BATCH:
                    pa.default_memory_pool().release_unused()  # decoding a page takes as much again
                returned = [batch]
                del batch
                yield returned.pop()


def open_parquet(path: str, file: SourceFile) -> ParquetRows:
    """A planned Parquet file; `SourceChanged` if what was opened is another one or was edited."""
    return ParquetRows(cast(RawIOBase, open_planned(path, file)), file, path)


def _check_footer_size(content: RawIOBase, size: int) -> None:
    """Reject a long footer: pyarrow would read and expand all of it in memory."""
    if not isinstance(content, FileIO):
        return  # each request is bounded
    content.seek(max(0, size - _TAIL_BYTES))
    footer = int.from_bytes((content.read(_TAIL_BYTES) or b"")[:4], "little")
    if footer > MAX_FOOTER_BYTES:
        raise pa.ArrowInvalid(f"its footer has {footer:,} bytes, more than the {MAX_FOOTER_BYTES:,} that are read")


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
    rows: ParquetRows, column: str, part: Part, max_sample_bytes: int = MAX_SAMPLE_BYTES
) -> Iterator[Sample | Failure]:
    """The documents of some rows; memory holds a few rows at a time."""
    for first_row, batch in rows.batches((column,), part.start, part.stop, max_sample_bytes):
        values = [batch.column(column)]
        del batch
        yield from documents(values.pop(), part.file.path, first_row, max_sample_bytes)


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


LARGE_BATCH = 16 * 1024 * 1024


def _unpacked_bytes(column: pa.Array) -> int:
    """The bytes of all values of a column, also if equal ones are stored once."""
    if not pa.types.is_dictionary(column.type):
        return int(column.nbytes)
    if not holds_text(column.type.value_type):
        return int(column.dictionary_decode().nbytes)  # a batch of repeated values has few rows
    sizes = pc.binary_length(column.dictionary.cast(pa.large_binary()))
    return int(pc.sum(pc.take(sizes, column.indices)).as_py() or 0) + 8 * len(column)


def _batch_rows(parquet: ParquetFile, columns: tuple[str, ...], group: int) -> int:
    """How many rows are read at once so that a batch stays small."""
    chunks = _column_chunks(parquet, columns, group).values()
    size, rows = sum(chunk.total_uncompressed_size for chunk in chunks), parquet.metadata.row_group(group).num_rows
    most = _MOST_BATCH_ROWS
    if any(chunk.has_dictionary_page or "DELTA_BYTE_ARRAY" in chunk.encodings for chunk in chunks):
        least, most = _REPEATED_ROWS
        most = min(max(_REPEATED_BYTES // max(1, size), least), most)
    return int(min(max(_BATCH_BYTES * rows / max(1, size), 1), most))


def _column_chunks(parquet: ParquetFile, columns: tuple[str, ...] | None, group: int) -> dict[str, Any]:
    """The footer's entries for some columns, or all, by path; a struct has one for each field."""
    names = None if columns is None else list(columns)
    # pyarrow raises here if an entry is invalid; `column` below would end the process.
    next(parquet.iter_batches(1, row_groups=[group], columns=names, use_threads=False), None)
    paths = [parquet.schema.column(index).path for index in range(len(parquet.schema))]
    entries = parquet.metadata.row_group(group)
    return {
        path: entries.column(index)
        for index, path in enumerate(paths)
        if columns is None or path in columns or path.split(".")[0] in columns
    }


def _stored_span(parquet: ParquetFile, group: int, column: str | None, size: int) -> Span:
    """Which bytes of the file hold a column of a row group, or every column; all bytes if the group is damaged."""
    try:
        chunks = _column_chunks(parquet, None if column is None else (column,), group)
    except (pa.ArrowException, OSError) as error:
        if isinstance(error, OSError) and error.errno is not None:
            raise
        return 0, size
    stored = [chunk for path, chunk in chunks.items() if column in (None, path)]
    begins = [chunk.dictionary_page_offset or chunk.data_page_offset for chunk in stored]
    return min(begins), max(begin + chunk.total_compressed_size for begin, chunk in zip(begins, stored, strict=True))


@contextmanager
def understood(path: str) -> Iterator[None]:
    """Raise `SourceUnreadable` for errors of pyarrow; errors of the disk propagate."""
    try:
        yield
    except (pa.ArrowException, OSError, StopIteration, UnicodeDecodeError) as error:
        if isinstance(error, OSError) and error.errno is not None:
            raise
        raise source_unreadable(path, f"it is not a sound Parquet file: {error or 'rows are missing'}") from error


def row_digest(path: str, file: SourceFile, column: str | None, start: int, stop: int) -> int:
    """A hash of all that the rows from `start` to `stop` of a column, or of every one, are read from.

    `file` is the file as it looks now.
    """
    time.sleep(settling_seconds(file.ctime_ns, time.time_ns()))  # any later edit gives it another time
    running = xxhash.xxh3_64()
    for span in _spans(path, file, column, start, stop):
        running.update(_span_digest(path, file, span))
    value: int = running.intdigest()
    return value


def _spans(path: str, file: SourceFile, column: str | None, start: int, stop: int) -> list[Span]:
    """Where the rows are stored, by row group, and where the footer is."""
    rows, size = _digested(path, file, column), file.size
    with understood(path):
        ends = rows.ends.tolist()
        groups = enumerate(zip([0, *ends], ends, strict=False))
        inside = [group for group, (low, high) in groups if low < stop and start < high]
        stored = [_stored_span(rows.parquet, group, column, size) for group in inside]
        return [*stored, (size - _TAIL_BYTES - rows.parquet.metadata.serialized_size, size)]


@lru_cache(maxsize=4)
def _digested(path: str, file: SourceFile, column: str | None) -> ParquetRows:
    rows = open_parquet(path, file)
    return rows if column is None else rows.check_text(column)


@lru_cache(maxsize=256)
def _span_digest(path: str, file: SourceFile, span: Span) -> bytes:
    value: bytes = hashed_range(path, *span).digest()
    return value
