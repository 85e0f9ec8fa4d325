"""Read a chunk back: untrusted input, checked before it is used.

`ChunkFile` rejects a header or an index that does not fit the file, so nothing outside the file is read; block contents
are only checked when they are read. `adopt_chunk` checks all of a chunk that no generation lists.
"""

import json
import re
import sys
from collections.abc import Iterable, Iterator, Mapping, Sequence
from functools import lru_cache
from itertools import islice, pairwise
from types import MappingProxyType
from typing import Any

import msgspec
import numpy as np
import xxhash

from forebay.columns import DTYPES, Array, Column, Ragged
from forebay.errors import FormatTooNew, RecipeInvalid
from forebay.format.chunk import (
    MAX_COLUMNS,
    MAX_COUNT,
    MAX_HEAD_BYTES,
    MAX_HEADER_BYTES,
    ChunkMeta,
    ChunkRecord,
    block_count,
    block_span,
    content_prefix,
    dictionary_problem,
    failure_counts,
    item_size,
    raw_bounds,
    record_of,
    sound_bools,
    sound_offsets,
)
from forebay.format.codecs import MAX_BLOCK_BYTES, BlockOverLimit, CodecError, decompress
from forebay.format.layout import CHUNK_VERSION
from forebay.format.tensors import Tensor, Tensors, as_bytes, encode_header, parse_header
from forebay.source import Failure
from forebay.store.base import PIECE_BYTES, Buffer, View, cut, not_forebay, sha256_of

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
        """Whether a block that is too large to read at once matches its checksum and type."""
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
        if problem := dictionary_problem(column, file.offsets(column.name), index):
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
