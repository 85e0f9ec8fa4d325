"""A chunk as bytes: columns in, buffers out, in blocks of rows. `chunk_decode` reads them back.

    header   metadata (canonical JSON) and the tensors below, padded to a multiple of 4096
    index    per column: name.offsets (ragged), name.blocks (compressed), name.sums; then .source     all uint64
    data     the columns, widest items first; then .failures                                         the rest

The bytes from the start to the end of the index are the *head*. Its digest is in the generation and is checked before
the head is used; each block of data is checked against its checksum in the index when it is first read.

rows      0 1 2 3 │ 4 5 6 7 │ 8 9          rows_per_block = 4, three blocks
fixed     block k is rows 4k … 4k+3
ragged    block k is the values from offsets[4k] to offsets[4k+4]

A block is compressed by itself, deterministically for one version of a library.
"""

import hashlib
import re
import threading
from collections import Counter
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass
from itertools import pairwise
from math import isfinite

import lz4.block
import msgspec
import numpy as np
import xxhash
import zstandard
from numpy.typing import NDArray

from forebay.columns import DTYPES, Array, Codec, Column, Columns, Level, Ragged
from forebay.errors import RecipeInvalid
from forebay.format import layout
from forebay.format.layout import FORMAT_VERSION
from forebay.format.tensors import as_bytes, encode_header
from forebay.recipe import canonical_json
from forebay.source import Failure
from forebay.store.base import Buffer

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
    """A block does not decompress to the expected size; the caller knows which block."""


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


def decompress(codec: Codec, block: Buffer, size: int, limit: int = MAX_BLOCK_BYTES) -> Buffer:
    """Decompress a block to `size` bytes; rejects an impossible size before allocating memory."""
    if not 0 <= size <= _MOST_BYTES[codec](len(block)):
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
MADE_BY = "made.by"  # which of the generation's sets of versions made a chunk, from 0; UNKNOWN: nobody can tell
UNKNOWN = -1
OTHER, MOST_REASONS = "other", 16
_REASON = re.compile(r"[a-z0-9-]{1,40}")


class ChunkMeta(msgspec.Struct, frozen=True, kw_only=True, forbid_unknown_fields=True):
    """The metadata in the header of a chunk."""

    format_version: int = FORMAT_VERSION
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
    revision: int = 0
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

    def key(self, layer: str) -> str:
        """Where the file of this chunk is."""
        return layout.chunk(layer, self.chunk, self.revision)


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

    def record(self, sha256: bytes, revision: int = 0) -> ChunkRecord:
        head, left = xxhash.xxh3_128(), self.head_size
        for buffer in self.buffers:
            head.update(buffer[:left])
            left -= min(left, len(buffer))
        return record_of(self.meta, self.size, self.head_size, head.digest(), sha256, revision, self.reasons)


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
    index: list[tuple[str, str, Sequence[int], Buffer]] = []
    data: list[tuple[str, str, Sequence[int], Buffer]] = []
    for column in declared:
        _encode_column(column, columns[column.name], rows, index, data)
    index.append((".source", "U64", [len(source_sums)], source))
    data.sort(key=lambda tensor: -item_size(tensor[1]))  # stable: keeps every tensor aligned to its items
    data.append((".failures", "U8", [len(failed)], failed))
    tensors = [*index, *data]
    header = encode_header(
        msgspec.to_builtins(meta), [(name, tag, shape, len(buffer)) for name, tag, shape, buffer in tensors]
    )
    head_size = len(header) + sum(len(buffer) for *_, buffer in index)
    if len(header) > MAX_HEADER_BYTES or head_size > MAX_HEAD_BYTES:
        raise RecipeInvalid(
            f"chunk {chunk} of layer '{layer}' has a header of {len(header):,} bytes and an index of {head_size:,}; at "
            f"most {MAX_HEADER_BYTES:,} and {MAX_HEAD_BYTES:,} are allowed: make shorter statistics or smaller chunks"
        )
    return EncodedChunk(meta, [header, *(buffer for *_, buffer in tensors)], head_size, failure_counts(failures))


def failure_counts(failures: Iterable[Failure]) -> dict[str, int]:
    """How many samples failed by reason; beyond a few reasons, or where one is not a short code, as `OTHER`.

    >>> failure_counts([Failure("a", "no-text"), Failure("b", "no-text"), Failure("c", "Something went wrong!")])
    {'no-text': 2, 'other': 1}
    """
    found = Counter(one.reason if _REASON.fullmatch(one.reason) else OTHER for one in failures)
    kept = dict(found.most_common(MOST_REASONS))
    left = found.total() - sum(kept.values())
    return {**kept, OTHER: kept.get(OTHER, 0) + left} if left else kept


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
    return next(iter(counts.values()), 0)


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
    revision: int,
    reasons: Mapping[str, int],
) -> ChunkRecord:
    return ChunkRecord(
        chunk=meta.chunk,
        revision=revision,
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
    if isinstance(rows, Ragged) != column.ragged:
        raise RecipeInvalid(f"{what} is declared {'ragged' if column.ragged else 'fixed'} but was made otherwise")
    if values.dtype != column.array_dtype:
        raise RecipeInvalid(f"{what} is declared {column.dtype} but was made {values.dtype}")
    if values.shape[1:] != column.shape:
        raise RecipeInvalid(f"{what} is declared with rows of shape {column.shape} but was made {values.shape[1:]}")
    if isinstance(rows, Ragged) and not sound_offsets(rows.offsets, len(values)):
        raise RecipeInvalid(f"{what} has offsets that do not rise from 0 to {len(values)}")
    if column.dtype == "bool" and not sound_bools(as_bytes(values)):
        raise RecipeInvalid(f"{what} is declared bool but has bytes other than 0 and 1")
    _check_block_sizes(column, rows)
    return len(rows)


def _check_block_sizes(column: Column, rows: Array | Ragged) -> None:
    """Reject a block that a reader would refuse to decompress."""
    if column.codec == "none" or values_of(rows).nbytes <= MAX_BLOCK_BYTES:
        return
    sizes = np.diff(raw_bounds(column, len(rows), rows.offsets if isinstance(rows, Ragged) else None))
    largest = int(sizes.max(initial=0))
    if largest > MAX_BLOCK_BYTES:
        raise RecipeInvalid(
            f"column '{column.name}' has a block of {largest:,} bytes, but a compressed block holds at most "
            f"{MAX_BLOCK_BYTES:,}; set rows_per_block below {column.block_rows}, or codec='none'"
        )


def _check_statistics(statistics: Statistics) -> None:
    try:
        canonical_json(msgspec.convert(statistics, dict[str, int | float | list[int]]))
    except (TypeError, ValueError, msgspec.ValidationError) as error:
        raise RecipeInvalid(f"statistics must map names to numbers or lists of integers: {error}") from error
    for name, value in statistics.items():
        if not can_be_listed(value):
            raise RecipeInvalid(
                f"the statistic '{name}' has an integer beyond 64 bits, a float that is not finite, or more than "
                f"{MAX_STATISTIC:,} numbers; store it as a finite float or as a column"
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
    index: list[tuple[str, str, Sequence[int], Buffer]],
    data: list[tuple[str, str, Sequence[int], Buffer]],
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
        blocks = _compressed(compressor(column.codec, column.level), raw, bounds)
        edges = np.cumsum([0, *map(len, blocks)], dtype=np.uint64)
        index.append((f"{column.name}.blocks", "U64", edges.shape, as_bytes(edges)))
        data.append((column.name, "U8", [int(edges[-1])], b"".join(blocks)))
    sums = np.array([xxhash.xxh3_64_intdigest(block) for block in blocks], np.uint64)
    index.append((f"{column.name}.sums", "U64", sums.shape, as_bytes(sums)))


def _compressed(pack: Callable[[Buffer], Buffer], raw: memoryview, bounds: list[int]) -> list[Buffer]:
    return [pack(raw[a:b]) for a, b in pairwise(bounds)]


def item_size(tag: str) -> int:
    return next(dtype.itemsize for known, dtype in DTYPES.values() if known == tag)
