"""Chunks that are not what was written are refused, each with its own words, and none takes the process down."""

import tracemalloc
from collections.abc import Callable
from typing import Any

import lz4.block
import msgspec
import numpy as np
import pytest
import xxhash
import zstandard
from hypothesis import given
from hypothesis import strategies as st
from made import FINGERPRINT, adopt, encode, joined, small_chunk

from forebay.columns import Column, Ragged
from forebay.errors import Damaged, FormatTooNew
from forebay.format.chunk import ChunkMeta
from forebay.format.chunk_file import ChunkFile, adopt_chunk
from forebay.format.tensors import encode_header, parse_header, seal

CODECS = ["none", "lz4", "zstd"]


def refusal(chunk: bytes) -> Damaged:
    with pytest.raises(Damaged) as refused:
        adopt(chunk)
    return refused.value


@pytest.mark.parametrize("codec", CODECS)
@pytest.mark.parametrize("flip", [0x01, 0x20, 0xFF])
def test_every_flipped_byte_is_refused(codec, flip):
    chunk = bytearray(joined(small_chunk(codec)))
    adopt(bytes(chunk))
    for position in range(len(chunk)):
        chunk[position] ^= flip
        try:
            adopt_chunk(memoryview(chunk), "a chunk", "base", 7, FINGERPRINT)
        except Damaged:
            chunk[position] ^= flip
        else:
            pytest.fail(f"byte {position} of {len(chunk)} flipped by {flip:#x} went unseen")


@pytest.mark.parametrize("codec", CODECS)
def test_every_truncation_is_refused(codec):
    chunk = memoryview(joined(small_chunk(codec)))
    for length in range(len(chunk)):
        with pytest.raises(Damaged):
            adopt_chunk(chunk[:length], "a chunk", "base", 7, FINGERPRINT)
    assert "header describes" in refusal(bytes(chunk) + b"\0").facts["problem"]


def test_padding_of_anything_but_spaces_is_refused():
    chunk = joined(small_chunk("none"))
    padding = range(chunk.index(b"  "), 4096, 101)
    for position in padding:
        for white in b"\t\n\r":
            changed = chunk[:position] + bytes([white]) + chunk[position + 1 :]
            assert refusal(changed).facts["problem"] == "its header is not written as forebay writes it"


@given(st.binary(max_size=300))
def test_bytes_of_any_kind_are_refused(content):
    assert isinstance(refusal(content), Damaged)


def test_each_kind_of_damage_has_its_own_words():
    chunk = joined(small_chunk("zstd"))
    newer = chunk.replace(rb"\"format_version\":1", rb"\"format_version\":2")
    plan = b"".join(seal({"format_version": 1, "type": "plan"}, {}))
    said = {
        "data": refusal(chunk[:-1]),
        "plan": refusal(plan),
        "newer": refusal(newer),
    }
    assert {name: getattr(error, "facts", {}).get("problem", str(error)) for name, error in said.items()} == {
        "data": f"it has {len(chunk) - 1:,} bytes but its header describes {len(chunk):,}",
        "plan": "it is a plan, not a chunk",
        "newer": "'a chunk' has format version 2; this forebay reads up to 1\nhint: upgrade forebay",
    }
    assert isinstance(said["newer"], FormatTooNew)
    assert all("'a chunk'" in str(error) for error in said.values())


@pytest.mark.parametrize(
    ("layer", "chunk", "fingerprint"), [("other", 7, FINGERPRINT), ("base", 8, FINGERPRINT), ("base", 7, "0" * 64)]
)
def test_a_chunk_in_the_wrong_place_is_refused(layer, chunk, fingerprint):
    view = memoryview(joined(small_chunk("none")))
    with pytest.raises(Damaged, match="it is chunk 7 of layer 'base', or was built by another recipe"):
        adopt_chunk(view, "a chunk", layer, chunk, fingerprint)


def test_a_bad_block_is_named_with_its_column_and_bytes():
    chunk = bytearray(joined(small_chunk("lz4")))
    file = ChunkFile(memoryview(bytes(chunk)), "a chunk")
    start, stop = file.block_bounds("vector").tolist()[1:3]
    chunk[start] ^= 1
    assert (
        refusal(bytes(chunk)).facts["problem"]
        == f"block 1 of column 'vector' (bytes {start:,} to {stop:,}) does not match its checksum"
    )
    assert ChunkFile(memoryview(chunk), "a chunk").bad_blocks("vector") == [(1, (start, stop))]


def crafted(
    column: Column, rows: int, stored: bytes, index: dict[str, list[int]], change: Callable[[Any], Any] = lambda x: x
) -> bytes:
    """A chunk of one column in which every sum is right, made by somebody who means harm."""
    tag = "U8" if column.codec != "none" else "U16"
    tensors: list[tuple[str, str, list[int], bytes]] = [
        (name, "U64", [len(values)], np.array(values, np.uint64).tobytes()) for name, values in index.items()
    ]
    tensors.append((".source", "U64", [0], b""))
    tensors.append((column.name, tag, [len(stored) // (1 if tag == "U8" else 2)], stored))
    tensors.append((".failures", "U8", [0], b""))
    meta = ChunkMeta(
        layer="base", chunk=7, fingerprint=FINGERPRINT, rows=rows, samples=1, columns=(column,), failures=0,
        statistics={}, content="0" * 32, ids="0" * 32,
    )  # fmt: skip
    tensors = change(tensors)
    header = encode_header(
        msgspec.to_builtins(meta.sealed(b"", b"")),
        [(name, tag, shape, len(data)) for name, tag, shape, data in tensors],
    )
    return header + b"".join(data for *_, data in tensors)


def one_block(codec: str, stored: bytes, rows: int, dtype: str = "uint8") -> bytes:
    column = Column(name="x", dtype=dtype, codec=codec, rows_per_block=rows)  # type: ignore[arg-type]
    return crafted(column, rows, stored, {"x.blocks": [0, len(stored)], "x.sums": [xxhash.xxh3_64_intdigest(stored)]})


def zstd_frame_of_zeros(announced: int) -> bytes:
    """A frame that announces a size and holds one run of 128 KiB."""
    return (
        b"\x28\xb5\x2f\xfd\xe0" + announced.to_bytes(8, "little") + (1 << 17 << 3 | 0b011).to_bytes(3, "little") + b"\0"
    )


@pytest.mark.parametrize(
    ("codec", "stored"),
    [
        ("lz4", lz4.block.compress(bytes(1000), store_size=False)),
        ("zstd", zstandard.compress(bytes(1000))),
        ("zstd", zstd_frame_of_zeros(1 << 40)),
    ],
)
def test_a_block_that_would_need_more_memory_than_it_can_hold_is_refused_before_it_takes_any(codec, stored):
    chunk = one_block(codec, stored, rows=1 << 40)
    tracemalloc.start()
    try:
        assert "stored bytes cannot hold 1,099,511,627,776" in refusal(chunk).facts["problem"]
        assert tracemalloc.get_traced_memory()[1] < 4 << 20
    finally:
        tracemalloc.stop()


@pytest.mark.parametrize(
    ("codec", "stored", "problem"),
    [
        ("lz4", b"\xff" * 40, "does not decompress"),
        ("lz4", lz4.block.compress(bytes(99), store_size=False), "does not decompress"),
        ("lz4", lz4.block.compress(bytes(101), store_size=False), "does not decompress"),
        ("zstd", b"\xff" * 40, "does not decompress"),
        ("zstd", zstandard.compress(bytes(101)), "its frame header states another size"),
        ("zstd", zstd_frame_of_zeros(100), "does not decompress"),
        ("zstd", zstandard.ZstdCompressor(write_content_size=False).compress(bytes(100)), "states another size"),
    ],
)
def test_a_block_that_holds_something_else_is_refused(codec, stored, problem):
    assert problem in refusal(one_block(codec, stored, rows=100)).facts["problem"]


@pytest.mark.parametrize("rows", [-1, -(2**70), 2**62, 2**64, 2**90])
def test_counts_that_would_wrap_around_are_refused(rows):
    ragged = Column(name="x", dtype="uint16", ragged=True, codec="lz4", rows_per_block=2**100)
    index = {"x.offsets": [0] * max(0, min(rows + 1, 3)), "x.blocks": [0], "x.sums": []}
    assert "it cannot hold" in refusal(crafted(ragged, rows, b"", index)).facts["problem"]


@pytest.mark.parametrize("last", [2**61, 2**63, 2**64 - 1])
@pytest.mark.parametrize("codec", ["lz4", "zstd"])
def test_offsets_that_would_wrap_around_are_refused(codec, last):
    ragged = Column(name="x", dtype="uint16", ragged=True, codec=codec)
    stored = lz4.block.compress(b"abcd", store_size=False)
    index = {"x.offsets": [0, last], "x.blocks": [0, len(stored)], "x.sums": [xxhash.xxh3_64_intdigest(stored)]}
    assert f"rise to {last:,}" in refusal(crafted(ragged, 1, stored, index)).facts["problem"]


def test_tensors_in_another_order_or_shape_are_refused():
    column = Column(name="x", dtype="uint16", shape=(2,))
    plain = np.arange(8, dtype=np.uint16)
    sums = {"x.sums": [xxhash.xxh3_64_intdigest(plain)]}

    def shaped(*shape):
        return lambda tensors: [(n, t, list(shape) if n == "x" else s, d) for n, t, s, d in tensors]

    assert refusal(crafted(column, 4, plain.tobytes(), sums, shaped(4, 2))).facts["problem"] == (
        "its content does not match its content digest"
    )
    for shape in ((8,), (2, 4), (4, 2, 1), (4, 1, 2)):
        assert refusal(crafted(column, 4, plain.tobytes(), sums, shaped(*shape))).facts["problem"] == (
            f"tensor 'x' is U16 {list(shape)}, not U16 [4, 2]"
        )
    assert (
        "it has the tensors" in refusal(crafted(column, 4, plain.tobytes(), sums, lambda t: t[::-1])).facts["problem"]
    )
    assert "it has the tensors" in refusal(crafted(column, 4, plain.tobytes(), sums, lambda t: t[:-1])).facts["problem"]


def test_a_digest_that_is_none_is_refused():
    encoded = encode({"x": Ragged.of_bytes([b"ab"])}, [Column(name="x", dtype="uint8", ragged=True)])
    for name, value in (("ids", "zz" * 16), ("content", "00"), ("base", "0" * 31), ("base", "x")):
        wrong = msgspec.structs.replace(encoded.meta, **{name: value}).sealed(b"", b"")
        tensors = ChunkFile(memoryview(joined(encoded)), "a chunk").tensors
        entries = [(name, t.tag, t.shape, t.stop - t.start) for name, t in tensors.items()]
        chunk = encode_header(msgspec.to_builtins(wrong), entries) + joined(encoded)[4096:]
        assert refusal(chunk).facts["problem"] == "its metadata contains a malformed digest"


@pytest.mark.parametrize(
    "header",
    [
        b"[]", b"1", b"null", b'"text"', b"{}", b'{"__metadata__":1}', b'{"__metadata__":{"forebay":1}}',
        b'{"__metadata__":{"forebay":"[]"}}', b'{"__metadata__":{"forebay":"{}"}}', b"[" * 4000, b"\xff\xfe" * 10,
        b'{"__metadata__":{"forebay":"{\\"format_version\\":1}"},"x":1}',
        b'{"__metadata__":{"forebay":"{\\"format_version\\":1}"},"x":{"dtype":"U8"}}',
        b'{"__metadata__":{"forebay":"{\\"format_version\\":1}"},"x":{"dtype":"U8","shape":["a"],"data_offsets":[0,0]}}',
        b'{"__metadata__":{"forebay":"{\\"format_version\\":1}"},"x":{"dtype":[],"shape":[0],"data_offsets":[0,0]}}',
        b'{"__metadata__":{"forebay":"{\\"format_version\\":1}"},"x":{"dtype":"U8","shape":[-1],"data_offsets":[0,-1]}}',
        b'{"__metadata__":{"forebay":"{\\"format_version\\":1}"},"x":{"dtype":"U8","shape":[1],"data_offsets":[0,1]}}',
        b'{"__metadata__":{"forebay":"{\\"format_version\\":1}"},"x":{"dtype":"U8","shape":[0],"data_offsets":[1,1]}}',
    ],
)  # fmt: skip
def test_a_header_that_makes_no_sense_is_refused(header):
    chunk = (4088).to_bytes(8, "little") + header.ljust(4088)
    assert isinstance(refusal(chunk), Damaged)


@pytest.mark.parametrize(
    "entry",
    [
        '{"dtype":"U8","shape":[0],"data_offsets":[0,1]}', '{"dtype":"U8","shape":[2],"data_offsets":[0,1]}',
        '{"dtype":"U8","shape":[1],"data_offsets":[1,2]}', '{"dtype":"U8","shape":[1.0],"data_offsets":[0,1]}',
        '{"dtype":"U8","shape":[true],"data_offsets":[0,1]}', '{"dtype":"U7","shape":[1],"data_offsets":[0,1]}',
        '{"dtype":"U8","shape":[1],"data_offsets":[0]}', '{"dtype":"U8","shape":1,"data_offsets":[0,1]}',
        '{"dtype":"U8","shape":[-1,-1],"data_offsets":[0,1]}', '{"shape":[1],"data_offsets":[0,1]}',
    ],
)  # fmt: skip
def test_a_tensor_that_is_described_wrongly_is_named(entry):
    header = '{"__metadata__":{"forebay":"{\\"format_version\\":1}"},"x":' + entry + "}"
    chunk = (4088).to_bytes(8, "little") + header.encode().ljust(4088) + b"x"
    with pytest.raises(Damaged, match="the entry of tensor 'x' is invalid"):
        parse_header(memoryview(chunk), "a chunk")


def test_a_list_of_failures_that_cannot_be_read_is_refused():
    for text in (b"{", b"[]", b'{"sample":1}', b"\xff", b"[" * 100_000):
        encoded = encode({"x": Ragged.of_bytes([b"ab"])}, [Column(name="x", dtype="uint8", ragged=True)])
        tensors = ChunkFile(memoryview(joined(encoded)), "a chunk").tensors
        sealed = encoded.meta.sealed(b"", text)
        entries = [(name, t.tag, t.shape, t.stop - t.start) for name, t in tensors.items()]
        entries[-1] = (".failures", "U8", (len(text),), len(text))
        chunk = encode_header(msgspec.to_builtins(sealed), entries) + joined(encoded)[4096:] + text
        with pytest.raises(Damaged, match="its list of failures cannot be read"):
            ChunkFile(memoryview(chunk), "a chunk").failures()


def test_content_is_decoded_block_by_block():
    """Sixteen blocks of 8 MB from a few kilobytes take the memory of one or two."""
    rows = np.zeros((16, 8 << 20), np.uint8)
    column = Column(name="x", dtype="uint8", shape=(8 << 20,), codec="zstd", rows_per_block=1)
    chunk = joined(encode({"x": rows}, [column]))
    del rows
    tracemalloc.start()
    try:
        adopt_chunk(memoryview(chunk), "a chunk", "base", 7, FINGERPRINT)
        assert tracemalloc.get_traced_memory()[1] < 30 << 20
    finally:
        tracemalloc.stop()
