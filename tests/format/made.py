"""Columns and chunks for the tests of the format."""

from typing import Any

import numpy as np
from hypothesis import strategies as st

from forebay.columns import DTYPES, Array, Column, Columns, Ragged
from forebay.format.chunk import EncodedChunk, encode_chunk
from forebay.format.chunk_file import ChunkFile, adopt_chunk
from forebay.source import Failure

FINGERPRINT = "f" * 64
SHAPES = [(), (1,), (3,), (2, 2), (0,), (2, 0)]
CODECS = [("none", "default"), *((codec, level) for codec in ("lz4", "zstd") for level in ("fast", "default", "max"))]


def bits(column: Column, count: int, seed: int) -> Array:
    """Values of every bit pattern, NaN payloads and negative zeros among them; some runs, so that codecs find some."""
    random = np.random.default_rng(seed)
    raw = random.integers(0, 2 if column.dtype == "bool" else 256, count * column.item_bytes, np.uint8)
    raw[: len(raw) // 2] = raw[: len(raw) // 2] // 64 * (column.dtype != "bool")
    return np.frombuffer(raw.tobytes(), column.array_dtype).reshape(count, *column.shape)


def rows_of(column: Column, rows: int, seed: int) -> Array | Ragged:
    if not column.ragged:
        return bits(column, rows, seed)
    lengths = np.random.default_rng(seed + 1).integers(0, 5, rows)
    offsets = np.concatenate([[0], np.cumsum(lengths)]).astype(np.int64)
    return Ragged(bits(column, int(offsets[-1]), seed), offsets)


def encode(columns: Columns, declared: list[Column], **facts: Any) -> EncodedChunk:
    given = {"layer": "base", "chunk": 7, "fingerprint": FINGERPRINT, "samples": 3}
    return encode_chunk(columns, declared, **{**given, **facts})


def joined(encoded: EncodedChunk) -> bytes:
    return b"".join(encoded.buffers)


def adopt(chunk: bytes) -> ChunkFile:
    """The chunk, once all of it is found sound."""
    adopt_chunk(memoryview(chunk), "a chunk", "base", 7, FINGERPRINT)
    return ChunkFile(memoryview(chunk), "a chunk")


def raw(rows: Array | Ragged) -> tuple[Any, ...]:
    """Everything that makes rows equal to the last bit."""
    values = rows.values if isinstance(rows, Ragged) else rows
    offsets = rows.offsets.tolist() if isinstance(rows, Ragged) else None
    return values.dtype, values.shape, values.tobytes(), offsets


@st.composite
def column_declared(draw: st.DrawFn, name: str = "x") -> Column:
    codec, level = draw(st.sampled_from(CODECS))
    return Column(
        name=name,
        dtype=draw(st.sampled_from(list(DTYPES))),  # type: ignore[arg-type]
        shape=draw(st.sampled_from(SHAPES)),
        ragged=draw(st.booleans()),
        codec=codec,  # type: ignore[arg-type]
        level=level,  # type: ignore[arg-type]
        rows_per_block=draw(st.integers(0, 5)),
    )


@st.composite
def table(draw: st.DrawFn) -> tuple[dict[str, Array | Ragged], list[Column]]:
    """Up to four columns of equally many rows, and their declarations."""
    rows, seed = draw(st.integers(0, 11)), draw(st.integers(0, 2**32))
    names = draw(st.lists(st.sampled_from(["a", "b", "tokens", "ü", "with space", "_"]), max_size=4, unique=True))
    declared = [draw(column_declared(name)) for name in names]
    return {c.name: rows_of(c, rows, seed + number) for number, c in enumerate(declared)}, declared


def small_chunk(codec: str) -> EncodedChunk:
    """A chunk with something of everything."""
    declared = [
        Column(name="flag", dtype="bool"),
        Column(name="text", dtype="uint8", ragged=True, codec=codec, rows_per_block=2),  # type: ignore[arg-type]
        Column(name="vector", dtype="float32", shape=(2,), codec=codec, rows_per_block=2),  # type: ignore[arg-type]
    ]
    columns = {column.name: rows_of(column, 5, seed) for seed, column in enumerate(declared)}
    return encode(
        columns,
        declared,
        failures=[Failure("a.txt@17", "too-long", "9,000 bytes"), Failure("b", "empty")],
        statistics={"bytes": 12, "mean": 0.5, "histogram": [1, 2]},
        sample_ids="text",
        source_sums=[2**64 - 1, 12],
    )
