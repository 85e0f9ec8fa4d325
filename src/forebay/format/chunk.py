"""A chunk as bytes: columns in, buffers out, in blocks of rows; and read back.

    header   metadata (canonical JSON) and the tensors below, padded to a multiple of 4096
    index    per column: name.offsets (ragged), name.blocks (compressed), name.sums; then .source     all uint64
    data     the columns, widest items first; then .failures                                         the rest

The bytes from the start to the end of the index are the *head*. Its digest is in the generation and is checked before
the head is used; each block of data is checked against its checksum in the index when it is first read.

rows      0 1 2 3 │ 4 5 6 7 │ 8 9          rows_per_block = 4, three blocks
fixed     block k is rows 4k … 4k+3
ragged    block k is the values from offsets[4k] to offsets[4k+4]

A block is compressed by itself, deterministically for one version of a library.

A chunk that is read is untrusted input. `ChunkFile` rejects a header or an index that does not fit the file, so that
nothing outside the file is read; block contents are only checked when they are read. `adopt_chunk` checks all of a
chunk that no generation lists.
"""

import hashlib
import json
import re
import sys
import threading
from collections import Counter
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from functools import lru_cache
from itertools import islice, pairwise
from math import isfinite
from types import MappingProxyType
from typing import Any

import lz4.block
import msgspec
import numpy as np
import xxhash
import zstandard
from numpy.typing import NDArray

from forebay.columns import DTYPES, Array, Codec, Column, Columns, Level, Ragged
from forebay.errors import ChunkCorrupt, ChunkMissing, FormatTooNew, RecipeInvalid
from forebay.format import layout
from forebay.format.layout import CHUNK_VERSION
from forebay.format.tensors import Tensor, Tensors, as_bytes, encode_header, parse_header
from forebay.recipe import canonical_json
from forebay.source import Failure
from forebay.store.base import PIECE_BYTES, Buffer, View, cut, not_forebay, sha256_of

_ZSTD_LEVELS: dict[Level, int] = {"fast": 1, "default": 3, "max": 19}
_LZ4_MODES: dict[Level, dict[str, object]] = {
    "fast": {"mode": "fast", "acceleration": 8},
    "default": {"mode": "default"},
    "max": {"mode": "high_compression", "compression": 12},
}
# The largest decoded size of a stored block, by codec and stored size.
_MOST_BYTES: dict[Codec, Callable[[int], int]] = {
    "none": lambda stored: stored,
    "lz4": lambda stored: min(255 * stored, 0x7E000000),
    "zstd": lambda stored: (stored // 4 + 1) * 128 * 1024,
}
MAX_BLOCK_BYTES = 256 << 20  # decoded size of one compressed block, unless the caller allows more
_thread = threading.local()  # a zstd context is not thread-safe


class CodecError(Exception):
    """A block does not decompress to the expected size. The caller adds which block."""


class BlockOverLimit(CodecError):
    """A block decompresses to more bytes than the caller allows."""

    def __init__(self, size: int, limit: int) -> None:
        self.size, self.limit = size, limit
        super().__init__(f"it decodes to {size:,} bytes, more than the limit of {limit:,}")


def compressor(codec: Codec, level: Level) -> Callable[[Buffer], Buffer]:
    """A function that compresses a block."""
    if codec == "zstd":
        return zstandard.ZstdCompressor(level=_ZSTD_LEVELS[level]).compress
    if codec == "lz4":
        return lambda block: lz4.block.compress(block, store_size=False, **_LZ4_MODES[level])
    return lambda block: block


def most_bytes(codec: Codec, stored: int) -> int:
    """How many bytes a block of `stored` bytes can hold."""
    return _MOST_BYTES[codec](stored)


def decompress(codec: Codec, block: Buffer, size: int, limit: int = MAX_BLOCK_BYTES) -> Buffer:
    """Decompress a block to `size` bytes; rejects an impossible size before allocating memory."""
    if not 0 <= size <= most_bytes(codec, len(block)):
        raise CodecError(f"{len(block):,} stored bytes cannot hold {size:,}")
    if codec != "none" and size > limit:
        raise BlockOverLimit(size, limit)
    try:
        raw = _decompress(codec, block, size)
    except (zstandard.ZstdError, lz4.block.LZ4BlockError) as error:
        raise CodecError(str(error)) from error
    if len(raw) != size:
        raise CodecError(f"it holds {len(raw):,} bytes, not {size:,}")
    return raw


def _decompress(codec: Codec, block: Buffer, size: int) -> Buffer:
    if codec == "none" or not size:
        return block if codec == "none" else b""
    if codec == "lz4":
        raw: bytes = lz4.block.decompress(block, uncompressed_size=size)
        return raw
    # The library allocates the size in the frame header, not `max_output_size`, so check it first.
    if zstandard.frame_content_size(block) != size:
        raise CodecError("its frame header states another size")
    if not hasattr(_thread, "zstd"):
        _thread.zstd = zstandard.ZstdDecompressor()
    unpacked: bytes = _thread.zstd.decompress(block, max_output_size=size)
    return unpacked


def library_versions() -> dict[str, str]:
    """The library versions that determine compressed bytes, recorded in a generation."""
    return {"zstd": ".".join(map(str, zstandard.ZSTD_VERSION)), "lz4": lz4.library_version_string()}


Bounds = NDArray[np.int64]


def block_count(column: Column, rows: int) -> int:
    return -(-rows // column.block_rows)


def block_rows(column: Column, rows: int) -> Bounds:
    """The first row of each block, and the end of the last block."""
    step = min(column.block_rows, max(1, rows))
    return np.minimum(np.arange(block_count(column, rows) + 1, dtype=np.int64) * step, rows)


def value_bounds(column: Column, rows: int, offsets: Array | None) -> Bounds:
    """The start of each block, in rows (ragged: in values), and the end of the last block."""
    edges = block_rows(column, rows)
    return edges if offsets is None else offsets[edges].astype(np.int64)


def block_span(column: Column, rows: int, block: int, offsets: Array | None) -> tuple[int, int]:
    """The start and end of one block, in the units of `value_bounds`."""
    low, high = (min(number * column.block_rows, rows) for number in (block, block + 1))
    return (low, high) if offsets is None else (int(offsets[low]), int(offsets[high]))


def raw_bounds(column: Column, rows: int, offsets: Array | None) -> Bounds:
    """The start of each block in bytes before compression, and the end of the last block."""
    return value_bounds(column, rows, offsets) * column.item_bytes


def values_of(rows: Array | Ragged) -> Array:
    return rows.values if isinstance(rows, Ragged) else rows


MAX_STATISTIC = 65_536  # numbers of one statistic of a chunk
Statistics = Mapping[str, int | float | list[int]]
# What a reader accepts: far above what recipes make, small enough that an untrusted chunk is harmless.
MAX_HEADER_BYTES = 8 << 20
MAX_HEAD_BYTES = 256 << 20
MAX_COLUMNS = 4096
SUM_BYTES = 8  # of one block in the index
MAX_COUNT = 1 << 40  # of rows, samples, failures
# Statistics that a generation has, and no chunk:
FAILED = "failed."  # and a reason: how many samples failed for it
MADE_BY = "made.by"  # index into the versions of the generation, or UNKNOWN
UNKNOWN = -1
OTHER, MOST_REASONS = "other", 16
_REASON = re.compile(r"[a-z0-9-]{1,40}")


class ChunkMeta(msgspec.Struct, frozen=True, kw_only=True, forbid_unknown_fields=True):
    """The metadata in the header of a chunk."""

    format_version: int = CHUNK_VERSION
    type: str = "chunk"
    layer: str
    chunk: int
    fingerprint: str
    rows: int
    samples: int
    columns: tuple[Column, ...]
    failures: int
    statistics: dict[str, int | float | list[int]]
    content: str  # xxh3-128 over the decoded columns
    ids: str  # xxh3-128 over the column of sample ids, or the content where there is none
    base: str = ""  # ids of the base chunk that a later layer was made from
    check: str = ""  # xxh3-64 over the fields above, the source checksums and the failures

    def sealed(self, source: Buffer, failures: Buffer) -> "ChunkMeta":
        text = canonical_json(msgspec.to_builtins(msgspec.structs.replace(self, check="")))
        return msgspec.structs.replace(self, check=xxhash.xxh3_64_hexdigest(text + bytes(source) + bytes(failures)))


class ChunkRecord(msgspec.Struct, frozen=True, kw_only=True):
    """The entry of a chunk in a generation."""

    chunk: int
    rows: int
    samples: int
    failures: int
    size: int
    head_size: int
    head: bytes
    sha256: bytes
    content: bytes
    ids: bytes
    base: bytes
    statistics: dict[str, int | float | list[int]]

    def key(self, folder: str) -> str:
        """The key of this chunk's file, in a layer folder."""
        return layout.chunk(folder, self.chunk)


_Written = tuple[str, str, Sequence[int], Buffer]  # name, tag, shape, bytes of a tensor


@dataclass(frozen=True, slots=True)
class EncodedChunk:
    """The bytes of a chunk before it is written, as buffers, and the size of its head."""

    meta: ChunkMeta
    buffers: Sequence[Buffer]
    head_size: int
    reasons: Mapping[str, int]  # why samples failed, and how many

    @property
    def size(self) -> int:
        return sum(len(buffer) for buffer in self.buffers)

    def sha256(self) -> bytes:
        digest = hashlib.sha256()
        for buffer in self.buffers:
            digest.update(buffer)
        return digest.digest()

    def record(self, sha256: bytes) -> ChunkRecord:
        head, left = xxhash.xxh3_128(), self.head_size
        for buffer in self.buffers:
            head.update(buffer[:left])
            left -= min(left, len(buffer))
        return record_of(self.meta, self.size, self.head_size, head.digest(), sha256, self.reasons)


def encode_chunk(
    columns: Columns,
    declared: Sequence[Column],
    *,
    layer: str,
    chunk: int,
    fingerprint: str,
    samples: int,
    failures: Sequence[Failure] = (),
    statistics: Statistics | None = None,
    sample_ids: str = "",
    base: str = "",
    source_sums: Sequence[int] = (),
) -> EncodedChunk:
    """Encode rows as a chunk. Equal rows and declarations give equal bytes."""
    rows = check_columns(columns, declared)
    _check_statistics(statistics or {})
    content = content_digest(columns, declared)
    ids = content_digest(columns, [_named(sample_ids, declared)]) if sample_ids else content
    source = as_bytes(np.array(source_sums, np.uint64))
    failed = b"\n".join(canonical_json(msgspec.to_builtins(failure)) for failure in failures)
    meta = ChunkMeta(
        layer=layer,
        chunk=chunk,
        fingerprint=fingerprint,
        rows=rows,
        samples=samples,
        columns=tuple(declared),
        failures=len(failures),
        statistics=dict(statistics or {}),
        content=content,
        ids=ids,
        base=base,
    ).sealed(source, failed)
    index, data = _encode_columns(columns, declared, rows)
    index.append((".source", "U64", [len(source_sums)], source))
    data.append((".failures", "U8", [len(failed)], failed))
    head = _encoded_head(meta, index, data)
    buffers = [*head, *(buffer for *_, buffer in data)]
    return EncodedChunk(meta, buffers, sum(map(len, head)), failure_counts(failures))


def _encode_columns(columns: Columns, declared: Sequence[Column], rows: int) -> tuple[list[_Written], list[_Written]]:
    """The tensors of the index and of the data, in the order of the file."""
    index: list[_Written] = []
    data: list[_Written] = []
    for column in declared:
        _encode_column(column, columns[column.name], rows, index, data)
    data.sort(key=lambda tensor: -item_size(tensor[1]))  # stable: keeps every tensor aligned to its items
    return index, data


def _encoded_head(meta: ChunkMeta, index: Sequence[_Written], data: Sequence[_Written]) -> list[Buffer]:
    """The header and the index of a chunk."""
    shapes = [(name, tag, shape, len(buffer)) for name, tag, shape, buffer in (*index, *data)]
    head = [encode_header(msgspec.to_builtins(meta), shapes), *(buffer for *_, buffer in index)]
    size = sum(map(len, head))
    if len(head[0]) > MAX_HEADER_BYTES or size > MAX_HEAD_BYTES:
        raise RecipeInvalid(
            f"chunk {meta.chunk} of layer '{meta.layer}' has a header of {len(head[0]):,} bytes and an index of "
            f"{size:,}; at most {MAX_HEADER_BYTES:,} and {MAX_HEAD_BYTES:,} are allowed: make "
            "shorter statistics or smaller chunks"
        )
    return head


def failure_counts(failures: Iterable[Failure]) -> dict[str, int]:
    """How many samples failed by reason; beyond a few reasons, or where one is not a short code, as `OTHER`.

    >>> failure_counts([Failure("a", "no-text"), Failure("b", "no-text"), Failure("c", "Something went wrong!")])
    {'no-text': 2, 'other': 1}
    """
    counts = Counter(one.reason if _REASON.fullmatch(one.reason) else OTHER for one in failures)
    listed = dict(counts.most_common(MOST_REASONS))
    left = counts.total() - sum(listed.values())
    return {**listed, OTHER: listed.get(OTHER, 0) + left} if left else listed


def check_columns(columns: Columns, declared: Sequence[Column]) -> int:
    """Check every column against its declaration and return the number of rows."""
    names = [column.name for column in declared]
    if sorted(columns) != sorted(names) or len(set(names)) != len(names):
        raise RecipeInvalid(f"the recipe declares the columns {names} but returned {sorted(columns)}")
    if len(names) > MAX_COLUMNS:
        raise RecipeInvalid(f"the recipe declares {len(names):,} columns; at most {MAX_COLUMNS:,} are allowed")
    counts = {column.name: _check_column(column, columns[column.name]) for column in declared}
    if len(set(counts.values())) > 1:
        raise RecipeInvalid(f"the recipe returned columns of different lengths: {counts}")
    for column in (column for column in declared if column.index):
        values, index = columns[column.name], columns.get(column.index)
        if isinstance(values, Ragged) and (problem := _dictionary_problem(column, values.offsets, index)):
            raise RecipeInvalid(problem)
    return next(iter(counts.values()), 0)


def _dictionary_problem(column: Column, offsets: Array, index: Array | Ragged | None) -> str | None:
    """What is wrong with the places of a dictionary's values, if anything."""
    name = f"the index '{column.index}' of column '{column.name}'"
    if not isinstance(index, np.ndarray) or index.dtype != np.uint32 or index.ndim != 1:
        return f"{name} is not a uint32 column"
    if len(index) and int(index.max()) >= len(offsets) - 1:
        return f"{name} reaches row {int(index.max()):,}, but the chunk has {len(offsets) - 1:,} rows"
    if not column.ragged and (np.diff(offsets)[index] > 1).any():
        return f"{name} reaches a row with several values"
    return None


def content_digest(columns: Columns, declared: Sequence[Column]) -> str:
    """xxh3-128 over names, types and decoded values; independent of codec and block size."""
    digest = xxhash.xxh3_128()
    for column in declared:
        rows = columns[column.name]
        digest.update(content_prefix(column, len(rows)))
        if isinstance(rows, Ragged):
            digest.update(as_bytes(rows.offsets.astype("<u8", copy=False)))
        digest.update(as_bytes(values_of(rows)))
    text: str = digest.hexdigest()
    return text


def content_prefix(column: Column, rows: int) -> bytes:
    """The bytes that the content digest hashes before the offsets and values of a column."""
    return canonical_json([column.name, column.dtype, list(column.shape), column.ragged, rows])


def record_of(
    meta: ChunkMeta,
    size: int,
    head_size: int,
    head: bytes,
    sha256: bytes,
    reasons: Mapping[str, int],
) -> ChunkRecord:
    return ChunkRecord(
        chunk=meta.chunk,
        rows=meta.rows,
        samples=meta.samples,
        failures=meta.failures,
        size=size,
        head_size=head_size,
        head=head,
        sha256=sha256,
        content=bytes.fromhex(meta.content),
        ids=bytes.fromhex(meta.ids),
        base=bytes.fromhex(meta.base or "00" * 16),
        statistics={
            **{name: value for name, value in meta.statistics.items() if is_counted_by_recipe(name)},
            **{f"{FAILED}{reason}": count for reason, count in reasons.items()},
        },
    )


def is_counted_by_recipe(statistic: str) -> bool:
    return statistic != MADE_BY and not statistic.startswith(FAILED)


def _check_column(column: Column, rows: Array | Ragged) -> int:
    what = f"column '{column.name}'"
    values = values_of(rows)
    if not isinstance(values, np.ndarray) or values.ndim == 0:
        raise RecipeInvalid(f"{what} is a {type(values).__name__}, not an array of rows")
    if isinstance(rows, Ragged) != column.has_offsets:
        raise RecipeInvalid(
            f"{what} is declared {'ragged' if column.has_offsets else 'fixed'} but the recipe made the other"
        )
    if values.dtype != column.array_dtype:
        raise RecipeInvalid(f"{what} is declared {column.dtype} but the recipe made {values.dtype}")
    if values.shape[1:] != column.shape:
        raise RecipeInvalid(
            f"{what} is declared with rows of shape {column.shape} but the recipe made {values.shape[1:]}"
        )
    if isinstance(rows, Ragged) and not sound_offsets(rows.offsets, len(values)):
        raise RecipeInvalid(f"{what} has offsets that do not rise from 0 to {len(values)}")
    if column.dtype == "bool" and not sound_bools(as_bytes(values)):
        raise RecipeInvalid(f"{what} is declared bool but has bytes other than 0 and 1")
    _check_block_sizes(column, rows)
    return len(rows)


def _check_block_sizes(column: Column, rows: Array | Ragged) -> None:
    """Reject a block that a reader would not decompress."""
    if column.codec == "none" or values_of(rows).nbytes <= MAX_BLOCK_BYTES:
        return
    sizes = np.diff(raw_bounds(column, len(rows), rows.offsets if isinstance(rows, Ragged) else None))
    largest = int(sizes.max(initial=0))
    if largest > MAX_BLOCK_BYTES:
        raise RecipeInvalid(
            f"column '{column.name}' has a block of {largest:,} bytes, but a compressed block holds "
            f"at most {MAX_BLOCK_BYTES:,}",
            hint=f"set rows_per_block below {column.block_rows}, or codec='none'",
        )


def _check_statistics(statistics: Statistics) -> None:
    try:
        canonical_json(msgspec.convert(statistics, dict[str, int | float | list[int]]))
    except (TypeError, ValueError, msgspec.ValidationError) as error:
        raise RecipeInvalid(f"statistics must map names to numbers or lists of integers: {error}") from error
    for name, value in statistics.items():
        if not can_be_listed(value):
            raise RecipeInvalid(
                f"the statistic '{name}' has an integer beyond 64 bits, a float that is not finite, or "
                f"more than {MAX_STATISTIC:,} numbers",
                hint="store it as a finite float or as a column",
            )


def can_be_listed(value: int | float | list[int]) -> bool:
    """Whether a generation can store a statistic: 64-bit integers, finite floats, at most `MAX_STATISTIC` of them."""
    numbers = value if isinstance(value, list) else [value]
    sound = all(isfinite(one) if isinstance(one, float) else -(1 << 63) <= one < 1 << 63 for one in numbers)
    return sound and len(numbers) <= MAX_STATISTIC


def _named(name: str, declared: Sequence[Column]) -> Column:
    for column in declared:
        if column.name == name:
            return column
    raise RecipeInvalid(f"the recipe names '{name}' as its sample ids but does not declare that column")


def sound_bools(raw: Buffer) -> bool:
    """Whether every byte is 0 or 1; numpy would miscount other values as booleans."""
    return not len(raw) or bool(np.frombuffer(raw, np.uint8).max() <= 1)


def sound_offsets(offsets: Array, end: int) -> bool:
    falls = np.count_nonzero(offsets[1:] < offsets[:-1])  # all in C, unlike `any`: this runs for every opened chunk
    return bool(len(offsets) and offsets[0] == 0 and offsets[-1] == end and not falls)


def _encode_column(
    column: Column,
    rows: Array | Ragged,
    count: int,
    index: list[_Written],
    data: list[_Written],
) -> None:
    offsets = rows.offsets.astype("<u8", copy=False) if isinstance(rows, Ragged) else None
    values = values_of(rows)
    raw = as_bytes(values)
    bounds = raw_bounds(column, count, offsets).tolist()
    if offsets is not None:
        index.append((f"{column.name}.offsets", "U64", offsets.shape, as_bytes(offsets)))
    if column.codec == "none":
        blocks: list[Buffer] = [raw[a:b] for a, b in pairwise(bounds)]
        data.append((column.name, DTYPES[column.dtype][0], values.shape, raw))
    else:
        pack = compressor(column.codec, column.level)
        blocks = [pack(raw[a:b]) for a, b in pairwise(bounds)]
        edges = np.cumsum([0, *map(len, blocks)], dtype=np.uint64)
        index.append((f"{column.name}.blocks", "U64", edges.shape, as_bytes(edges)))
        data.append((column.name, "U8", [int(edges[-1])], b"".join(blocks)))
    sums = np.array([xxhash.xxh3_64_intdigest(block) for block in blocks], np.uint64)
    index.append((f"{column.name}.sums", "U64", sums.shape, as_bytes(sums)))


def item_size(tag: str) -> int:
    return next(dtype.itemsize for known, dtype in DTYPES.values() if known == tag)


_MOST = 1 << 62  # limit for counts of values and bytes, so that no sum wraps around
_MOST_TIMES = 64  # largest ratio of decoded to stored size of a column that is decoded at once
_DIGEST = re.compile("[0-9a-f]{32}")
NOT_BOOL = "it has booleans that are neither 0 nor 1"
Shape = tuple[str, int | None, tuple[int, ...]]  # tag, first side (None: any), the other sides


class ChunkFile:
    """An open chunk: header and index are validated, data is not read.

    Thousands are open at once, so only the part of the header that reading needs is kept.
    """

    __slots__ = ("_checks", "chunk", "columns", "head_size", "layer", "rows", "tensors", "view", "where")

    def __init__(self, view: View, where: str) -> None:
        header = parse_header(view, where, MAX_HEADER_BYTES)
        meta = _meta(header.metadata, where)
        self.view = view
        self.where = where
        self.layer, self.chunk, self.rows = sys.intern(meta.layer), meta.chunk, meta.rows
        self.head_size = _check_tensors(meta, header.tensors, where)
        self.tensors = Tensors(header.tensors)
        self.columns = _by_name(meta.columns)
        self._checks: dict[str, BlockCheck] = {}
        for name, column in self.columns.items():
            _check_index(view, name, column, header.tensors, where)

    @property
    def meta(self) -> ChunkMeta:
        """The metadata, parsed again from the header."""
        return _meta(parse_header(self.view, self.where, MAX_HEADER_BYTES).metadata, self.where)

    def offsets(self, column: str) -> Array:
        return self.tensors[f"{column}.offsets"].array(self.view)

    def block_bounds(self, column: str) -> Array:
        """The file offset of each stored block of a column, and the end of the last block."""
        start = self.tensors[column].start
        if self.columns[column].codec == "none":
            return start + self.raw_bounds(column)
        return start + self.tensors[f"{column}.blocks"].array(self.view).astype(np.int64)

    def raw_bounds(self, column: str) -> Array:
        declared = self.columns[column]
        return raw_bounds(declared, self.rows, self.offsets(column) if declared.has_offsets else None)

    def check(self, column: str) -> "BlockCheck":
        """The `BlockCheck` of a column, created once."""
        check = self._checks.get(column)
        if check is None:
            check = self._checks.setdefault(column, BlockCheck(self, column))
        return check

    def sums(self, column: str) -> Array:
        return self.tensors[f"{column}.sums"].array(self.view)

    def flat(self, column: str) -> Array:
        """All values of an uncompressed column: a view of the file, not a copy."""
        return self.tensors[column].array(self.view)

    def bad_blocks(self, column: str) -> list[tuple[int, tuple[int, int]]]:
        """(block, byte range) of every block that does not match its checksum."""
        check, count = self.check(column), len(self.sums(column))
        if check.first_bad(range(count)) is None:
            return []
        return [(block, check.span(block)) for block in range(count) if check.first_bad([block]) is not None]

    def decode_block(self, column: str, block: int, limit: int = MAX_BLOCK_BYTES) -> Array:
        """The values of one stored block, flat along rows (and along values, where ragged). Raises `CodecError`.

        A compressed block of more than `limit` bytes raises `BlockOverLimit`.
        """
        declared = self.columns[column]
        stored, count = self.stored_block(column, block)
        raw = decompress(declared.codec, stored, count * declared.item_bytes, limit)
        if declared.dtype == "bool" and not sound_bools(raw):
            raise CodecError(NOT_BOOL)
        return np.frombuffer(raw, declared.array_dtype).reshape(count, *declared.shape)

    def stored_block(self, column: str, block: int) -> tuple[Buffer, int]:
        """The bytes of a block as they are stored, and how many rows (ragged: values) it has."""
        declared = self.columns[column]
        start, stop = self.check(column).span(block)
        low, high = block_span(declared, self.rows, block, self.offsets(column) if declared.has_offsets else None)
        return self.view[start:stop], high - low

    def decode(self, column: str, limit: int = MAX_BLOCK_BYTES) -> Array | Ragged:
        """All rows of a column. Raises `CodecError`, or `BlockOverLimit` if they would take too much memory."""
        declared = self.columns[column]
        values = self.flat(column) if declared.codec == "none" else self._decoded(column, limit)
        return Ragged(values, self.offsets(column)) if declared.has_offsets else values

    def _decoded(self, column: str, limit: int) -> Array:
        declared, tensor = self.columns[column], self.tensors[column]
        count = int(self.offsets(column)[-1]) if declared.has_offsets else self.rows
        size = count * declared.item_bytes
        # A forged chunk could decode a few stored megabytes to hundreds of gigabytes, block by block.
        if size > max(limit, _MOST_TIMES * (tensor.stop - tensor.start)):
            raise BlockOverLimit(size, limit)
        values = np.empty((count, *declared.shape), declared.array_dtype)
        flat, codec, is_bool = as_bytes(values), declared.codec, declared.dtype == "bool"
        stored, raw = self.block_bounds(column).tolist(), self.raw_bounds(column).tolist()
        for (start, stop), (low, high) in zip(pairwise(stored), pairwise(raw), strict=True):
            decoded = decompress(codec, self.view[start:stop], high - low, limit)
            if is_bool and not sound_bools(decoded):
                raise CodecError(NOT_BOOL)
            if high > low:  # an array without values has no writable view
                flat[low:high] = decoded
        return values

    def failures(self) -> list[Failure]:
        """The failed samples, checked against the header."""
        text = self._bytes(".failures")
        meta = self.meta
        if meta.sealed(self._bytes(".source"), text) != meta:
            raise not_forebay(self.where, "its list of failures does not match its checksum")
        try:
            return [msgspec.convert(json.loads(line), Failure) for line in text.split(b"\n")] if text else []
        except (ValueError, RecursionError) as error:  # ValidationError is a ValueError
            raise not_forebay(self.where, f"its list of failures cannot be read ({type(error).__name__})") from error

    def source_sums(self) -> list[int]:
        sums: list[int] = self.tensors[".source"].array(self.view).tolist()
        return sums

    def _bytes(self, tensor: str) -> bytes:
        return bytes(self.view[self.tensors[tensor].start : self.tensors[tensor].stop])


class BlockCheck:
    """Checks single blocks of one column against their checksums; fast, because a first epoch checks every block."""

    __slots__ = ("_bounds", "_end", "_is_plain_bool", "_size", "_start", "_sums", "_view")

    def __init__(self, file: ChunkFile, column: str) -> None:
        declared, tensor, sums = file.columns[column], file.tensors[column], file.tensors[f"{column}.sums"]
        self._view = file.view
        self._sums = file.view[sums.start : sums.stop].cast("Q") if sums.stop > sums.start else memoryview(b"")
        self._start, self._end = tensor.start, tensor.stop
        self._size = declared.block_rows * declared.item_bytes
        # Blocks of a plain fixed column have the same size; others have their bounds in the index.
        self._bounds = None if declared.codec == "none" and not declared.has_offsets else file.block_bounds(column)
        self._is_plain_bool = declared.dtype == "bool" and declared.codec == "none"

    def span(self, block: int) -> tuple[int, int]:
        """The start and end of a stored block in the file."""
        if self._bounds is not None:
            return int(self._bounds[block]), int(self._bounds[block + 1])
        start = self._start + block * self._size
        return start, min(start + self._size, self._end)

    def agrees(self, block: int, stored: Buffer) -> bool:
        """Whether bytes match the checksum of a block and are values of its type."""
        if xxhash.xxh3_64_intdigest(stored) != self._sums[block]:
            return False
        return not self._is_plain_bool or sound_bools(stored)

    def first_bad(self, blocks: Iterable[int]) -> int | None:
        """The first block that does not match its checksum or its type, None if all do."""
        view, sums, span, digest = self._view, self._sums, self.span, xxhash.xxh3_64_intdigest
        for block in blocks:
            start, stop = span(block)
            if stop - start > PIECE_BYTES:
                if not self._agrees_in_pieces(block):
                    return block
                continue
            stored = view[start:stop]
            if digest(stored) != sums[block] or (self._is_plain_bool and not sound_bools(stored)):
                return block
        return None

    def problem(self, block: int) -> str:
        """Why a bad block is bad."""
        return NOT_BOOL if self._sum_in_pieces(block) == self._sums[block] else "its bytes do not match their checksum"

    def _agrees_in_pieces(self, block: int) -> bool:
        """As `agrees`, for a block that is too large to read at once."""
        if self._sum_in_pieces(block) != self._sums[block]:
            return False
        return not self._is_plain_bool or all(sound_bools(piece) for piece in cut(self._view, *self.span(block)))

    def _sum_in_pieces(self, block: int) -> int:
        digest = xxhash.xxh3_64()
        for piece in cut(self._view, *self.span(block)):
            digest.update(piece)
        return digest.intdigest()


def adopt_chunk(
    view: View,
    where: str,
    layer: str,
    chunk: int,
    fingerprint: str,
    columns: Sequence[Column] | None = None,
) -> ChunkRecord:
    """Check all of a chunk that no generation lists, and return its record.

    Every byte is covered by the canonical header, the checksum over metadata and failures, the block checksums, or the
    content digest over the decoded values.
    """
    file = ChunkFile(view, where)
    meta = file.meta
    if (meta.layer, meta.chunk, meta.fingerprint) != (layer, chunk, fingerprint):
        raise not_forebay(where, f"it is chunk {meta.chunk} of layer '{meta.layer}', or was built by another recipe")
    if columns is not None and meta.columns != tuple(columns):
        raise not_forebay(where, "its columns are not those that the layer's recipe declares")
    check_content(file)
    head = xxhash.xxh3_128_digest(view[: file.head_size])
    reasons = failure_counts(file.failures())
    return record_of(meta, len(view), file.head_size, head, sha256_of(view), reasons)


def check_content(file: ChunkFile, limit: int = MAX_BLOCK_BYTES) -> None:
    """Check and decode every block, one at a time, and compare the content with the digests in the header."""
    where, meta = file.where, file.meta
    digest = xxhash.xxh3_128()
    indices = {column.index: bytearray() for column in meta.columns if column.index}
    for column in meta.columns:
        digest.update(content_prefix(column, file.rows))
        if column.has_offsets:
            digest.update(as_bytes(file.offsets(column.name)))
        for piece in _decoded_pieces(file, column, limit):
            digest.update(piece)
            if column.name in indices and column.dtype == "uint32" and not (column.shape or column.has_offsets):
                indices[column.name] += piece
    if digest.hexdigest() != meta.content:
        raise not_forebay(where, "its content does not match its content digest")
    for column in (column for column in meta.columns if column.index):
        index = np.frombuffer(indices[column.index], "<u4") if indices[column.index] or not file.rows else None
        if problem := _dictionary_problem(column, file.offsets(column.name), index):
            raise not_forebay(where, problem)
    if meta.sealed(file._bytes(".source"), file._bytes(".failures")) != meta:
        raise not_forebay(where, "its metadata does not match its checksum")
    entries = [(name, t.tag, t.shape, t.stop - t.start) for name, t in file.tensors.items()]
    header = encode_header(msgspec.to_builtins(meta), entries)
    if header != bytes(file.view[: len(header)]):
        raise not_forebay(where, "its header is not written as forebay writes it")


def _decoded_pieces(file: ChunkFile, column: Column, limit: int) -> Iterator[Buffer]:
    """The bytes of a column before compression, in order; each block is checked against its checksum."""
    bounds, sums = file.block_bounds(column.name), file.sums(column.name)
    sizes = np.diff(file.raw_bounds(column.name))
    for block, size in enumerate(sizes):
        start, stop = int(bounds[block]), int(bounds[block + 1])
        stored = xxhash.xxh3_64()
        for piece in cut(file.view, start, stop):
            stored.update(piece)
            if column.codec == "none":
                yield _checked_type(file, column, block, piece)
        if stored.intdigest() != sums[block]:
            where = f"block {block} of column '{column.name}' (bytes {start:,} to {stop:,})"
            raise not_forebay(file.where, f"{where} does not match its checksum")
        if column.codec != "none":
            yield _unpacked(file, column, block, file.view[start:stop], int(size), limit)


def _unpacked(file: ChunkFile, column: Column, block: int, stored: Buffer, size: int, limit: int) -> Buffer:
    try:
        return _checked_type(file, column, block, decompress(column.codec, stored, size, limit))
    except BlockOverLimit as error:
        problem = f"decodes to {error.size:,} bytes at once, but max_block_bytes is {error.limit:,}"
        advice = f"if you trust this cache, pass --max-block-bytes {error.size} (max_block_bytes={error.size})"
        raise not_forebay(file.where, f"block {block} of column '{column.name}' {problem}; {advice}") from error
    except CodecError as error:
        what = f"block {block} of column '{column.name}' does not decompress"
        raise not_forebay(file.where, f"{what}: {error}") from error


def _checked_type(file: ChunkFile, column: Column, block: int, piece: Buffer) -> Buffer:
    if column.dtype == "bool" and not sound_bools(piece):
        raise not_forebay(file.where, f"block {block} of column '{column.name}': {NOT_BOOL}")
    return piece


def _check_index(view: View, name: str, column: Column, tensors: Mapping[str, Tensor], where: str) -> None:
    """Check that offsets and block edges rise from 0 to the end of the data they point into."""
    end = tensors[name].shape[0]
    if column.codec != "none":
        edges = tensors[f"{name}.blocks"].array(view)
        if not sound_offsets(edges, end):
            raise not_forebay(where, f"the block edges of column '{name}' do not rise from 0 to {end:,}")
    if column.has_offsets:
        offsets = tensors[f"{name}.offsets"].array(view)
        last = int(offsets[-1])
        if last * max(1, column.item_bytes) >= _MOST:
            raise not_forebay(where, f"the offsets of column '{name}' rise to {last:,}")
        end = end if column.codec == "none" else last
        if not sound_offsets(offsets, end):
            raise not_forebay(where, f"the offsets of column '{name}' do not rise from 0 to {end:,}")


def _meta(metadata: dict[str, Any], where: str) -> ChunkMeta:
    if metadata.get("type") != "chunk":
        raise not_forebay(where, f"it is a {metadata.get('type')}, not a chunk")
    if metadata["format_version"] > CHUNK_VERSION:
        raise FormatTooNew(
            f"'{where}' has format version {metadata['format_version']}; this forebay reads up to {CHUNK_VERSION}",
            hint="upgrade forebay",
        )
    try:
        meta = msgspec.convert(metadata, ChunkMeta)
    except (msgspec.ValidationError, RecipeInvalid) as error:
        raise not_forebay(where, f"its metadata is not that of a chunk: {error}") from error
    except (UnicodeError, RecursionError) as error:
        raise not_forebay(where, f"its metadata is not that of a chunk ({type(error).__name__})") from error
    if len(meta.columns) > MAX_COLUMNS:
        raise not_forebay(where, f"it has {len(meta.columns):,} columns; at most {MAX_COLUMNS:,} are allowed")
    widest = max([1, *(column.item_bytes for column in meta.columns)])
    if not 0 <= meta.rows <= MAX_COUNT or meta.rows * widest >= _MOST:
        raise not_forebay(where, f"it cannot hold {meta.rows} rows of its columns")
    if not (0 <= meta.samples <= MAX_COUNT and 0 <= meta.failures <= MAX_COUNT):
        raise not_forebay(where, "its metadata has an impossible number of samples or failures")
    if not all(map(_DIGEST.fullmatch, (meta.content, meta.ids, meta.base or meta.content))):
        raise not_forebay(where, "its metadata contains a malformed digest")
    return meta


@lru_cache(maxsize=64)
def _by_name(columns: tuple[Column, ...]) -> Mapping[str, Column]:
    """Columns by name; shared, because all chunks of a layer have the same columns."""
    return MappingProxyType({column.name: column for column in columns})


def _check_tensors(meta: ChunkMeta, tensors: dict[str, Tensor], where: str) -> int:
    """Check that the tensors are those that the metadata declares, and return the end of the index."""
    index: dict[str, Shape] = {}
    data: dict[str, Shape] = {}
    for column in meta.columns:
        _expect_column(column, meta.rows, index, data)
    index[".source"] = ("U64", None, ())
    data = dict(sorted(data.items(), key=lambda item: -item_size(item[1][0])))
    expected = {**index, **data, ".failures": ("U8", None, ())}
    if list(expected) != list(tensors):
        raise not_forebay(where, f"it has the tensors {_shown(tensors)}, not {_shown(expected)}")
    for name, (tag, length, shape) in expected.items():
        tensor = tensors[name]
        wanted = (tensor.shape[:1] if length is None else (length,)) + shape
        if tensor.tag != tag or tensor.shape != wanted or not wanted or wanted[0] >= _MOST:
            raise not_forebay(where, f"tensor '{name}' is {tensor.tag} {list(tensor.shape)}, not {tag} {list(wanted)}")
    head_size = tensors[".source"].stop
    if head_size > MAX_HEAD_BYTES:
        raise not_forebay(where, f"its index ends at {head_size:,}; at most {MAX_HEAD_BYTES:,} bytes are allowed")
    return head_size


def _shown(names: Mapping[str, object]) -> str:
    shown = ", ".join(map(repr, islice(names, 40)))
    return f"[{shown}, …]" if len(names) > 40 else f"[{shown}]"


def _expect_column(column: Column, rows: int, index: dict[str, Shape], data: dict[str, Shape]) -> None:
    """Add the tensors that a column must have to the expected index and data."""
    blocks = block_count(column, rows)
    if column.has_offsets:
        index[f"{column.name}.offsets"] = ("U64", rows + 1, ())
    if column.codec == "none":
        data[column.name] = (DTYPES[column.dtype][0], None if column.has_offsets else rows, column.shape)
    else:
        index[f"{column.name}.blocks"] = ("U64", blocks + 1, ())
        data[column.name] = ("U8", None, ())
    index[f"{column.name}.sums"] = ("U64", blocks, ())


def chunk_corrupt(
    root: str,
    layer: str,
    chunk: int,
    problem: str,
    *,
    column: str | None = None,
    block: int | None = None,
    span: tuple[int, int] | None = None,
) -> ChunkCorrupt:
    where = f"chunk {chunk} of layer '{layer}' in '{root}'"
    if block is not None:
        where = f"block {block} of column '{column}' in {where}"
    if span is not None:
        where += f" (bytes {span[0]:,} to {span[1]:,})"
    facts: dict[str, object] = {"root": root, "layer": layer, "chunk": chunk, "problem": problem}
    facts |= {"column": column, "block": block, "span": span}
    return ChunkCorrupt(f"{where} is corrupt: {problem}", hint=f"run `forebay repair {root}`", **facts)


def chunk_missing(root: str, layer: str, chunk: int) -> ChunkMissing:
    message = f"the file of chunk {chunk} of layer '{layer}' in '{root}' is missing"
    return ChunkMissing(message, hint=f"run `forebay repair {root}`", root=root, layer=layer, chunk=chunk)
