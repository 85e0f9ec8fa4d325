"""The digest of some rows of a Parquet file: its footer, and the stored text of the row groups they are in.

    PAR1 │ group 0: id, text, date │ group 1: id, text, date │ … │ footer, its length, PAR1
                        ════                      ════             ════════════════════════

Many parts may lie in one row group, so what was hashed is remembered while the file is not touched.
"""

import os
import time
from functools import lru_cache

import xxhash

from forebay.source import settling_seconds
from forebay.sources.parquet_rows import open_any_parquet, open_parquet, row_group_ends, stored_spans, understood

_PIECE = 1 << 22
_TAIL_BYTES = 8  # the length of the footer and the magic bytes

Span = tuple[int, int]
State = tuple[int, ...]


def row_digest(path: str, column: str | None, start: int, stop: int) -> int:
    """A hash of all that the rows from `start` to `stop` of a column, or of every one, are read from."""
    status = os.stat(path)
    state: State = (status.st_dev, status.st_ino, status.st_size, status.st_mtime_ns, status.st_ctime_ns)
    if settling_seconds(status.st_ctime_ns, time.time_ns()):  # it may be touched again without a new time
        state = (*state, time.monotonic_ns())  # remembered for nobody
    running = xxhash.xxh3_64()
    for span in _spans(path, state, column, start, stop):
        running.update(_span_digest(path, state, span))
    value: int = running.intdigest()
    return value


def _spans(path: str, state: State, column: str | None, start: int, stop: int) -> list[Span]:
    ends, stored, footer = _layout(path, state, column)
    groups = zip(stored, [0, *ends], ends, strict=False)
    return [*(span for span, low, high in groups if low < stop and start < high), footer]


@lru_cache(maxsize=64)
def _layout(path: str, state: State, column: str | None) -> tuple[list[int], list[Span], Span]:
    """Where row groups end, in rows; where their text is stored; where the footer is."""
    with open_any_parquet(path, path) if column is None else open_parquet(path, path, column) as parquet:
        size = os.path.getsize(path)
        footer = (size - _TAIL_BYTES - parquet.metadata.serialized_size, size)
        with understood(path):
            return row_group_ends(parquet).tolist(), stored_spans(parquet, column), footer


@lru_cache(maxsize=256)
def _span_digest(path: str, state: State, span: Span) -> bytes:
    running = xxhash.xxh3_64()
    position, end = span
    with open(path, "rb", buffering=0) as raw:
        raw.seek(position)
        while position < end and (content := raw.read(min(_PIECE, end - position))):
            running.update(content)
            position += len(content)
    value: bytes = running.digest()
    return value
