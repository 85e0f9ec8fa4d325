"""A published chunk, checked before it is believed."""

import hashlib
from collections.abc import Sequence

import xxhash

from forebay.columns import Array, Column, Ragged
from forebay.errors import BlockTooLarge, ChunkCorrupt, ChunkMissing, ForebayError, NotForebay
from forebay.format import layout
from forebay.format.chunk import MAX_HEAD_BYTES, ChunkRecord
from forebay.format.chunk_file import ChunkFile
from forebay.format.codec import MAX_BLOCK_BYTES, BlockOverLimit, CodecError
from forebay.format.generation import Generation
from forebay.store.base import Missing, Store
from forebay.store.pieces import View


def published_record(generation: Generation, layer: str, chunk: int) -> ChunkRecord | None:
    table = generation.table(layer)
    at = table.position(chunk)
    return None if at is None else table.record(at)


def open_chunk(
    store: Store, layer: str, record: ChunkRecord, *, columns: Sequence[Column] | None = None, keyed: bool = False
) -> ChunkFile:
    """Map a chunk whose size and head, and with a key whose SHA-256, are what the generation says.

    Its header and index are compared with each other and with the record, whoever wrote them: a digest says only that
    they are what was published. `columns` are those that the layer's recipe declares.
    """
    key = layout.chunk(layer, record.chunk, record.revision)
    try:
        view = store.map(key)
    except Missing as error:
        raise ChunkMissing(store.address, layer, record.chunk) from error
    except NotForebay as error:  # a pipe, a device or a link in its place
        raise ChunkCorrupt(store.address, layer, record.chunk, error.problem) from error
    problem = head_problem(view, record)
    if problem is None and keyed and hashlib.sha256(view).digest() != record.sha256:
        problem = "its SHA-256 is not the one the tagged generation lists"
    if problem is not None:
        raise ChunkCorrupt(store.address, layer, record.chunk, problem)
    try:
        file = ChunkFile(view, key)
    except ForebayError as error:
        problem = error.problem if isinstance(error, NotForebay) else str(error)
        raise ChunkCorrupt(store.address, layer, record.chunk, problem) from error
    if file.head_size != record.head_size:
        problem = f"its index ends at {file.head_size:,}, not at {record.head_size:,} as was published"
        raise ChunkCorrupt(store.address, layer, record.chunk, problem)
    if (file.layer, file.chunk, file.rows) != (layer, record.chunk, record.rows):
        found = f"chunk {file.chunk} of layer '{file.layer}' with {file.rows:,} rows"
        raise ChunkCorrupt(store.address, layer, record.chunk, f"its file is {found}; {record.rows:,} were published")
    if columns is not None and tuple(file.columns.values()) != tuple(columns):
        problem = "its columns are not those that the layer's recipe declares"
        raise ChunkCorrupt(store.address, layer, record.chunk, problem)
    return file


def head_problem(view: View, record: ChunkRecord) -> str | None:
    """What is wrong with the size or the head of a chunk, None where nothing is."""
    if len(view) == 0:
        return f"its file is empty, {record.size:,} bytes were published"
    if len(view) != record.size:
        return f"its file has {len(view):,} bytes, {record.size:,} were published"
    if not 0 < record.head_size <= min(record.size, MAX_HEAD_BYTES):
        return f"its header and index cannot have the {record.head_size:,} bytes that were published"
    if xxhash.xxh3_128_digest(view[: record.head_size]) != record.head:
        return f"its header or index (bytes 0 to {record.head_size:,}) disagrees with its digest"
    return None


def read_column(
    store: Store, layer: str, file: ChunkFile, column: str, max_block_bytes: int = MAX_BLOCK_BYTES
) -> Array | Ragged:
    """All rows of a column, every block checked."""
    for block, _ in file.bad_blocks(column):
        raise corrupt_block(store.address, layer, file, column, block)
    try:
        return file.decode(column, max_block_bytes)
    except BlockOverLimit as error:
        raise BlockTooLarge(store.address, layer, file.chunk, column, error.size, error.limit) from error
    except CodecError as error:
        raise ChunkCorrupt(store.address, layer, file.chunk, f"column '{column}': {error}") from error


def corrupt_block(root: str, layer: str, file: ChunkFile, column: str, block: int) -> ChunkCorrupt:
    check = file.check(column)
    return ChunkCorrupt(
        root, layer, file.chunk, check.problem(block), column=column, block=block, span=check.span(block)
    )
