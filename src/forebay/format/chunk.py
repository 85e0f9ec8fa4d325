"""A chunk as bytes: columns in, buffers out, in blocks of rows. `forebay.format.chunk_file` reads it back.

    header   metadata (canonical JSON) and the tensors below, padded to a multiple of 4096
    index    per column: name.offsets (ragged), name.blocks (compressed), name.sums; then .source     all uint64
    data     the columns, widest items first; then .failures                                         the rest

The bytes from the start to the end of the index are the *head*. Its digest is in the generation and is checked before
the head is used; each block of data is checked against its checksum in the index when it is first read.

rows      0 1 2 3 │ 4 5 6 7 │ 8 9          rows_per_block = 4, three blocks
fixed     block k is rows 4k … 4k+3
ragged    block k is the values from offsets[4k] to offsets[4k+4]

A block is compressed by itself.
"""

import re
from collections import Counter
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from itertools import pairwise
from math import isfinite

import msgspec
import numpy as np
import xxhash
from numpy.typing import NDArray

from forebay.columns import DTYPES, Array, Column, Columns, Ragged
from forebay.errors import ChunkCorrupt, ChunkMissing, RecipeInvalid
from forebay.format import layout
from forebay.format.codecs import MAX_BLOCK_BYTES, compressor
from forebay.format.layout import CHUNK_VERSION
from forebay.format.tensors import as_bytes, encode_header, sha256_of_all
from forebay.recipe import canonical_json
from forebay.source import Failure
from forebay.store.base import Buffer

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
        return sha256_of_all(self.buffers)

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
        if isinstance(values, Ragged) and (problem := dictionary_problem(column, values.offsets, index)):
            raise RecipeInvalid(problem)
    return next(iter(counts.values()), 0)


def dictionary_problem(column: Column, offsets: Array, index: Array | Ragged | None) -> str | None:
    """Describe invalid positions of dictionary values; None if they are valid."""
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
