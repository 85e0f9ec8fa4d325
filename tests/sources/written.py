"""Files for sources to read, and all that a source gives."""

import bz2
import gzip
import io
import lzma
from collections.abc import Callable
from pathlib import Path

import pyarrow as pa
import pyarrow.parquet as pq
import zstandard

from forebay.source import Failure, Sample, Source, samples_of
from forebay.testing.kind_contracts import as_sample, parts_of

STORED: dict[str, Callable[[bytes], bytes]] = {
    "": bytes,
    ".gz": lambda content: gzip.compress(content, 1, mtime=0),
    ".zst": lambda content: zstandard.compress(content, 1),
    ".bz2": lambda content: bz2.compress(content, 1),
    ".xz": lambda content: lzma.compress(content, preset=0),
}


def write(folder: Path, name: str, content: bytes) -> Path:
    """A file whose name says how it is stored."""
    path = folder / name
    path.write_bytes(STORED[path.suffix if path.suffix in STORED else ""](content))
    return path


def parquet_of(texts: pa.Array, rows_per_group: int = 1 << 20, **options: object) -> bytes:
    """A Parquet file with a column `text` between two others."""
    numbers = list(range(len(texts)))
    table = pa.table({"id": numbers, "text": texts, "title": [f"no {number}" for number in numbers]})
    file = io.BytesIO()
    pq.write_table(table, file, row_group_size=rows_per_group, **options)
    return file.getvalue()


def read_all(source: Source, first: int = 1 << 40, every: int = 1 << 40) -> list[Sample | Failure]:
    return [one for part in parts_of(source, first, every) for one in samples_of(source, part)]


def texts(source: Source, first: int = 1 << 40, every: int = 1 << 40) -> list[str]:
    """The documents of a source that has no bad ones; those without text come as failures."""
    return [as_sample(one).data for one in read_all(source, first, every)]
