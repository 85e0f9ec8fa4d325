"""A chunk at rest: its header read and held against itself, its blocks checked and decoded.

Reading trusts nothing: a chunk whose head passed its digest is opened with `ChunkFile`, one that no generation lists
goes through `adopt_chunk`, which looks at all of it.
"""

import hashlib
import json
import re
import sys
from collections.abc import Mapping, Sequence
from functools import lru_cache
from itertools import pairwise
from types import MappingProxyType
from typing import Any

import msgspec
import numpy as np
import xxhash

from forebay.columns import DTYPES, Array, Column, Ragged
from forebay.errors import NotForebay, RecipeInvalid
from forebay.format.blocks import block_count, block_span, raw_bounds
from forebay.format.chunk import ChunkMeta, ChunkRecord, content_digest, item_size, record_of, sound_offsets
from forebay.format.codec import CodecError, decompress
from forebay.format.tensors import Tensor, Tensors, encode_header, parse_header
from forebay.source import Failure
from forebay.store.base import Buffer

_MOST = 1 << 62  # no count of rows, values or bytes comes near it, and none may wrap around
_DIGEST = re.compile("[0-9a-f]{32}")

Shape = tuple[str, int | None, tuple[int, ...]]  # tag, first side (None: any), the other sides


class ChunkFile:
    """A chunk at rest: header parsed, data untouched.

    `view` must have passed its head digest, or be on its way through `adopt_chunk`. Thousands are open at once, so no
    more of the header is kept than reading needs.
    """

    __slots__ = ("_checks", "chunk", "columns", "head_size", "layer", "rows", "tensors", "view", "where")

    def __init__(self, view: memoryview, where: str) -> None:
        header = parse_header(view, where)
        meta = _meta(header.metadata, where)
        self.view = view
        self.where = where
        self.layer, self.chunk, self.rows = sys.intern(meta.layer), meta.chunk, meta.rows
        self.head_size = _check_tensors(meta, header.tensors, header.data_start, where)
        self.tensors = Tensors(header.tensors)
        self.columns = _by_name(meta.columns)
        self._checks: dict[str, BlockCheck] = {}

    @property
    def meta(self) -> ChunkMeta:
        """All that the chunk says of itself, read again from its header."""
        return _meta(parse_header(self.view, self.where).metadata, self.where)

    def offsets(self, column: str) -> Array:
        return self.tensors[f"{column}.offsets"].array(self.view)

    def block_bounds(self, column: str) -> Array:
        """Where each stored block of a column begins in the file, and the end of the last."""
        start = self.tensors[column].start
        if self.columns[column].codec == "none":
            return start + self.raw_bounds(column)
        return start + self.tensors[f"{column}.blocks"].array(self.view).astype(np.int64)

    def raw_bounds(self, column: str) -> Array:
        declared = self.columns[column]
        return raw_bounds(declared, self.rows, self.offsets(column) if declared.ragged else None)

    def check(self, column: str) -> "BlockCheck":
        """What it takes to check single blocks of a column, made once."""
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
        """(block, byte range) of every block that disagrees with its sum."""
        bounds, sums = self.block_bounds(column).tolist(), self.sums(column).tolist()
        spans = list(pairwise(bounds))
        view = self.view
        return [(k, span) for k, span in enumerate(spans) if xxhash.xxh3_64_intdigest(view[slice(*span)]) != sums[k]]

    def decode_block(self, column: str, block: int) -> Array:
        """The values of one stored block, flat along rows (and along values, where ragged). Raises `CodecError`."""
        declared = self.columns[column]
        start, stop = self.check(column).span(block)
        low, high = block_span(declared, self.rows, block, self.offsets(column) if declared.ragged else None)
        raw = decompress(declared.codec, self.view[start:stop], (high - low) * declared.item_bytes)
        return np.frombuffer(raw, declared.array_dtype).reshape(high - low, *declared.shape)

    def decode(self, column: str) -> Array | Ragged:
        """All rows of a column. Raises `CodecError`."""
        declared = self.columns[column]
        if declared.codec == "none":
            values = self.flat(column)
        else:
            blocks = [self.decode_block(column, k) for k in range(block_count(declared, self.rows))]
            values = np.concatenate(blocks) if blocks else np.empty((0, *declared.shape), declared.array_dtype)
        return Ragged(values, self.offsets(column)) if declared.ragged else values

    def failures(self) -> list[Failure]:
        """What could not be made, once it is what the header was sealed with."""
        text = self._bytes(".failures")
        meta = self.meta
        if meta.sealed(self._bytes(".source"), text) != meta:
            raise NotForebay(self.where, "its list of failures disagrees with its check")
        return [msgspec.convert(json.loads(line), Failure) for line in text.split(b"\n")] if text else []

    def source_sums(self) -> list[int]:
        sums: list[int] = self.tensors[".source"].array(self.view).tolist()
        return sums

    def _bytes(self, tensor: str) -> bytes:
        return bytes(self.view[self.tensors[tensor].start : self.tensors[tensor].stop])


class BlockCheck:
    """Checks single blocks of one column against their sums; lean, because a first epoch passes here per block."""

    __slots__ = ("_bounds", "_end", "_size", "_start", "_sums", "_view")

    def __init__(self, file: ChunkFile, column: str) -> None:
        declared, tensor, sums = file.columns[column], file.tensors[column], file.tensors[f"{column}.sums"]
        self._view = file.view
        self._sums = file.view[sums.start : sums.stop].cast("Q") if sums.stop > sums.start else memoryview(b"")
        self._start, self._end = tensor.start, tensor.stop
        self._size = declared.block_rows * declared.item_bytes
        # Blocks of a plain fixed column are all of one size; the others have their bounds in the index.
        self._bounds = None if declared.codec == "none" and not declared.ragged else file.block_bounds(column)

    def span(self, block: int) -> tuple[int, int]:
        """Where a stored block is in the file."""
        if self._bounds is not None:
            return int(self._bounds[block]), int(self._bounds[block + 1])
        start = self._start + block * self._size
        return start, min(start + self._size, self._end)

    def agrees(self, block: int, stored: Buffer) -> bool:
        """Whether these bytes are what was stored as a block."""
        return bool(xxhash.xxh3_64_intdigest(stored) == self._sums[block])

    def first_bad(self, blocks: list[int]) -> int | None:
        """The first of some blocks that disagrees with its sum, None where all agree."""
        view, sums, span, digest = self._view, self._sums, self.span, xxhash.xxh3_64_intdigest
        for block in blocks:
            start, stop = span(block)
            if digest(view[start:stop]) != sums[block]:
                return block
        return None


def adopt_chunk(
    view: memoryview,
    where: str,
    layer: str,
    chunk: int,
    fingerprint: str,
    revision: int = 0,
    columns: Sequence[Column] | None = None,
) -> ChunkRecord:
    """The record of a chunk that no generation lists yet, once all of it is found sound.

    Whatever byte is wrong, one of these disagrees: the canonical header, the check over metadata and failures, the
    sums, or the content digest over what decodes.
    """
    file = ChunkFile(view, where)
    meta = file.meta
    if (meta.layer, meta.chunk, meta.fingerprint) != (layer, chunk, fingerprint):
        raise NotForebay(where, f"it is chunk {meta.chunk} of layer '{meta.layer}', or of another recipe")
    if columns is not None and meta.columns != tuple(columns):
        raise NotForebay(where, "its columns are not those that the layer's recipe declares")
    _check_index(file)
    for name in file.columns:
        for block, span in file.bad_blocks(name):
            raise NotForebay(
                where, f"block {block} of column '{name}' (bytes {span[0]:,} to {span[1]:,}) fails its sum"
            )
    check_content(file)
    head = xxhash.xxh3_128_digest(view[: file.head_size])
    return record_of(meta, len(view), file.head_size, head, hashlib.sha256(view).digest(), revision)


def check_content(file: ChunkFile) -> None:
    """Decode everything and hold it against the digests in the header."""
    where, meta = file.where, file.meta
    try:
        columns = {name: file.decode(name) for name in file.columns}
    except CodecError as error:
        raise NotForebay(where, f"a block does not decompress: {error}") from error
    if content_digest(columns, meta.columns) != meta.content:
        raise NotForebay(where, "its content disagrees with its content digest")
    if meta.sealed(file._bytes(".source"), file._bytes(".failures")) != meta:
        raise NotForebay(where, "its metadata disagrees with its check")
    entries = [(name, t.tag, t.shape, t.stop - t.start) for name, t in file.tensors.items()]
    header = encode_header(msgspec.to_builtins(meta), entries)
    if header != bytes(file.view[: len(header)]):
        raise NotForebay(where, "its header is not written as forebay writes it")


def _check_index(file: ChunkFile) -> None:
    """Offsets and block edges rise from 0 to the end of what they point into."""
    for name, column in file.columns.items():
        end = file.tensors[name].shape[0]
        if column.codec != "none":
            edges = file.tensors[f"{name}.blocks"].array(file.view)
            if not sound_offsets(edges, end):
                raise NotForebay(file.where, f"the block edges of column '{name}' do not rise from 0 to {end}")
        if column.ragged:
            offsets = file.offsets(name)
            last = int(offsets[-1])
            if not sound_offsets(offsets, end if column.codec == "none" else last):
                raise NotForebay(file.where, f"the offsets of column '{name}' do not rise from 0 to {end}")
            if last * max(1, column.item_bytes) >= _MOST:
                raise NotForebay(file.where, f"the offsets of column '{name}' rise to {last:,}")


def _meta(metadata: dict[str, Any], where: str) -> ChunkMeta:
    if metadata.get("type") != "chunk":
        raise NotForebay(where, f"it is a {metadata.get('type')}, not a chunk")
    try:
        meta = msgspec.convert(metadata, ChunkMeta)
    except (msgspec.ValidationError, RecipeInvalid) as error:
        raise NotForebay(where, f"its metadata is not a chunk's: {error}") from error
    if not 0 <= meta.rows * max([1, *(column.item_bytes for column in meta.columns)]) < _MOST:
        raise NotForebay(where, f"it cannot hold {meta.rows} rows of its columns")
    if not all(map(_DIGEST.fullmatch, (meta.content, meta.ids, meta.base or meta.content))):
        raise NotForebay(where, "its metadata holds a digest that is none")
    return meta


@lru_cache(maxsize=64)
def _by_name(columns: tuple[Column, ...]) -> Mapping[str, Column]:
    """The chunks of a layer all have the same columns: they are kept once."""
    return MappingProxyType({column.name: column for column in columns})


def _check_tensors(meta: ChunkMeta, tensors: dict[str, Tensor], data_start: int, where: str) -> int:
    """Where the index ends, once every tensor that the metadata calls for is there with the right shape."""
    index: dict[str, Shape] = {}
    data: dict[str, Shape] = {}
    for column in meta.columns:
        _expect_column(column, meta.rows, index, data)
    index[".source"] = ("U64", None, ())
    data = dict(sorted(data.items(), key=lambda item: -item_size(item[1][0])))
    expected = {**index, **data, ".failures": ("U8", None, ())}
    if list(expected) != list(tensors):
        raise NotForebay(where, f"it holds the tensors {list(tensors)}, not {list(expected)}")
    for name, (tag, length, shape) in expected.items():
        tensor = tensors[name]
        wanted = (tensor.shape[:1] if length is None else (length,)) + shape
        if tensor.tag != tag or tensor.shape != wanted or not wanted:
            raise NotForebay(where, f"tensor '{name}' is {tensor.tag} {list(tensor.shape)}, not {tag} {list(wanted)}")
    return tensors[".source"].stop


def _expect_column(column: Column, rows: int, index: dict[str, Shape], data: dict[str, Shape]) -> None:
    """What the index and the data must hold of a column."""
    blocks = block_count(column, rows)
    if column.ragged:
        index[f"{column.name}.offsets"] = ("U64", rows + 1, ())
    if column.codec == "none":
        data[column.name] = (DTYPES[column.dtype][0], None if column.ragged else rows, column.shape)
    else:
        index[f"{column.name}.blocks"] = ("U64", blocks + 1, ())
        data[column.name] = ("U8", None, ())
    index[f"{column.name}.sums"] = ("U64", blocks, ())
