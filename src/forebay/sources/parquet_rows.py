"""Rows of a Parquet file as documents: only the column asked for is read, a few rows at a time."""

from collections.abc import Iterator
from typing import IO, Any

import numpy as np

from forebay.columns import Array
from forebay.errors import LibraryMissing, SourceUnreadable
from forebay.source import Failure, Part, Sample

try:
    import pyarrow as pa
    from pyarrow.parquet import ParquetFile
except ModuleNotFoundError as missing:
    raise LibraryMissing("pyarrow", "reading Parquet files", "remote") from missing

__all__ = ["ParquetFile", "check_footer", "open_parquet", "read_rows", "row_cuts", "row_group_ends"]

_BUFFER = 1 << 22
_BATCH_ROWS = 64
_EVEN_PARTS = 8
_SLACK = 8


def open_parquet(place: "str | IO[bytes]", path: str, column: str) -> ParquetFile:
    """A Parquet file that has the column; `path` is its name in errors."""
    try:
        parquet = ParquetFile(place, buffer_size=_BUFFER, pre_buffer=False)
    except pa.ArrowInvalid as error:
        raise SourceUnreadable(path, f"it is no Parquet file: {error}") from error
    if column not in parquet.schema_arrow.names:
        known = ", ".join(f"'{name}'" for name in parquet.schema_arrow.names)
        parquet.close()
        raise SourceUnreadable(path, f"it has no column '{column}'; it has: {known}")
    return parquet


def row_group_ends(parquet: ParquetFile) -> Array:
    """Where each row group ends, in rows."""
    groups = parquet.metadata.num_row_groups
    return np.cumsum([parquet.metadata.row_group(group).num_rows for group in range(groups)], dtype=np.int64)


def check_footer(parquet: ParquetFile, path: str) -> None:
    """A footer read in pieces is held against no hash; what it says twice must agree."""
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


def read_rows(parquet: ParquetFile, column: str, part: Part) -> Iterator[Sample | Failure]:
    """The documents of some rows; memory holds a few rows at a time."""
    ends = row_group_ends(parquet)
    group = int(np.searchsorted(ends, part.start, side="right"))
    while group < len(ends) and (begin := int(ends[group - 1]) if group else 0) < part.stop:
        yield from _group_rows(parquet, column, part, group, begin)
        group += 1


def _group_rows(parquet: ParquetFile, column: str, part: Part, group: int, row: int) -> Iterator[Sample | Failure]:
    for batch in parquet.iter_batches(_BATCH_ROWS, row_groups=[group], columns=[column], use_threads=False):
        for offset, value in enumerate(batch.column(0).to_pylist()):
            if part.start <= row + offset < part.stop:
                yield _document(f"{part.file.path}#{row + offset}", row + offset, value)
        row += len(batch)
        if row >= part.stop:
            return


def _document(name: str, row: int, value: Any) -> Sample | Failure:
    if value is None:
        return Failure(name, "null", f"row {row}: it is null")
    return Sample(name, value)
