"""Chunks: what goes in comes out, every bit of it, and the file is one that others can open."""

from hashlib import sha256

import numpy as np
import pytest
import safetensors
import xxhash
from hypothesis import given, settings
from hypothesis import strategies as st
from made import CODECS, adopt, encode, joined, raw, rows_of, small_chunk, table
from tests.helpers.hypothesis_profiles import scaled

from forebay.columns import DTYPES, Column, Ragged
from forebay.errors import RecipeInvalid
from forebay.format.chunk import content_digest
from forebay.format.chunk_file import adopt_chunk
from forebay.source import Failure


@given(table())
@settings(max_examples=scaled(120), deadline=None)
def test_every_column_comes_back_to_the_last_bit(made):
    columns, declared = made
    file = adopt(joined(encode(columns, declared)))
    assert list(file.columns) == [column.name for column in declared]
    for name, rows in columns.items():
        assert raw(file.decode(name)) == raw(rows)


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("ragged", [False, True])
def test_every_type_comes_back_through_every_codec_and_level(dtype, ragged):
    for codec, level in CODECS:
        for rows in (0, 1, 5):
            column = Column(
                name="x", dtype=dtype, shape=(2,), ragged=ragged, codec=codec, level=level, rows_per_block=2
            )
            made = rows_of(column, rows, seed=rows)
            assert raw(adopt(joined(encode({"x": made}, [column]))).decode("x")) == raw(made)


def test_arrays_with_gaps_between_their_items_are_kept_by_value():
    every_other = np.arange(20, dtype=np.int32).reshape(10, 2)[::2, ::-1]
    chunk = encode({"x": every_other}, [Column(name="x", dtype="int32", shape=(2,))])
    assert adopt(joined(chunk)).decode("x").tolist() == every_other.tolist()


@given(table())
@settings(max_examples=scaled(40), deadline=None)
def test_the_safetensors_package_reads_every_tensor_as_we_do(made):
    columns, declared = made
    chunk = joined(encode(columns, declared))
    file = adopt(chunk)
    theirs = dict(safetensors.deserialize(chunk))
    assert theirs.keys() == file.tensors.keys()
    for name, tensor in file.tensors.items():
        assert (theirs[name]["dtype"], tuple(theirs[name]["shape"])) == (tensor.tag, tensor.shape)
        assert bytes(theirs[name]["data"]) == chunk[tensor.start : tensor.stop]


@given(table())
@settings(max_examples=scaled(40), deadline=None)
def test_data_starts_at_a_multiple_of_4096_and_every_tensor_is_aligned_without_gaps(made):
    file = adopt(joined(encode(*made)))
    tensors = list(file.tensors.values())
    assert tensors[0].start % 4096 == 0
    assert [tensor.start for tensor in tensors[1:]] == [tensor.stop for tensor in tensors[:-1]]
    sizes = {tag: dtype.itemsize for tag, dtype in DTYPES.values()}
    assert all(tensor.start % sizes[tensor.tag] == 0 for tensor in tensors)


@given(table(), st.sampled_from(CODECS), st.integers(0, 7))
@settings(max_examples=scaled(40), deadline=None)
def test_the_content_digest_does_not_depend_on_codec_or_blocks(made, codec, rows_per_block):
    columns, declared = made
    other = [
        Column(name=c.name, dtype=c.dtype, shape=c.shape, ragged=c.ragged, codec=codec[0], level=codec[1],
               rows_per_block=rows_per_block)
        for c in declared
    ]  # fmt: skip
    one, another = encode(columns, declared), encode(columns, other)
    assert one.meta.content == another.meta.content == content_digest(columns, declared)


@pytest.mark.parametrize(
    "other",
    [
        ({"x": np.array([1, 2, 3], np.int32)}, Column(name="x", dtype="int32")),
        ({"x": np.array([1, 2, 4], np.uint32)}, Column(name="x", dtype="uint32")),
        ({"y": np.array([1, 2, 3], np.uint32)}, Column(name="y", dtype="uint32")),
        ({"x": np.array([[1], [2], [3]], np.uint32)}, Column(name="x", dtype="uint32", shape=(1,))),
        ({"x": Ragged.of([np.array([1, 2, 3])], np.dtype("u4"))}, Column(name="x", dtype="uint32", ragged=True)),
    ],
)
def test_other_content_has_another_digest(other):
    columns, column = other
    same = content_digest({"x": np.array([1, 2, 3], np.uint32)}, [Column(name="x", dtype="uint32")])
    assert content_digest(columns, [column]) != same


@pytest.mark.parametrize("codec", ["none", "lz4", "zstd"])
def test_failures_statistics_and_source_sums_come_back(codec):
    encoded = small_chunk(codec)
    file = adopt(joined(encoded))
    assert file.failures() == [Failure("a.txt@17", "too-long", "9,000 bytes"), Failure("b", "empty")]
    assert file.source_sums() == [2**64 - 1, 12]
    assert file.meta.statistics == {"bytes": 12, "mean": 0.5, "histogram": [1, 2]}
    assert file.meta == encoded.meta


@pytest.mark.parametrize("codec", ["none", "lz4", "zstd"])
def test_the_record_of_a_chunk_is_the_same_from_its_writer_and_from_its_file(codec):
    encoded = small_chunk(codec)
    chunk = joined(encoded)
    record = encoded.record(encoded.sha256())
    assert record == adopt_chunk(memoryview(chunk), "a chunk", "base", 7, "f" * 64)
    assert record.sha256 == sha256(chunk).digest()
    assert record.size == encoded.size == len(chunk)
    assert record.head == xxhash.xxh3_128_digest(chunk[: record.head_size])


def test_the_ids_are_the_digest_of_the_column_of_sample_ids_alone():
    ids, tokens = Column(name="id", dtype="uint8", ragged=True), Column(name="t", dtype="uint8")
    rows = Ragged.of_bytes([b"a", b"b"])
    one = encode({"id": rows, "t": np.zeros(2, np.uint8)}, [ids, tokens], sample_ids="id")
    other = encode({"id": rows, "t": np.ones(2, np.uint8)}, [ids, tokens], sample_ids="id")
    assert one.meta.content != other.meta.content
    assert one.meta.ids == other.meta.ids == content_digest({"id": rows}, [ids])
    assert encode({"id": rows}, [ids]).meta.ids == encode({"id": rows}, [ids]).meta.content


X = Column(name="x", dtype="uint16", shape=(2,))
R = Column(name="r", dtype="uint16", ragged=True)


@pytest.mark.parametrize(
    ("columns", "declared", "problem"),
    [
        ({}, [X], r"declares the columns \['x'\] but returned \[\]"),
        ({"x": np.zeros((1, 2), "u2"), "y": np.zeros(1)}, [X], r"but returned \['x', 'y'\]"),
        ({"x": np.zeros((1, 2), "u2")}, [X, X], r"\['x', 'x'\]"),
        ({"x": np.zeros((1, 2), "i2")}, [X], "'x' is declared uint16 but the recipe made int16"),
        ({"x": np.zeros((1, 2), ">u2")}, [X], "'x' is declared uint16 but the recipe made >u2"),
        ({"x": np.zeros((1, 3), "u2")}, [X], r"rows of shape \(2,\) but the recipe made \(3,\)"),
        ({"x": np.zeros(2, "u2")}, [X], r"rows of shape \(2,\) but the recipe made \(\)"),
        ({"x": Ragged.of([np.zeros((1, 2), "u2")], np.dtype("u2"))}, [X], "'x' is declared fixed"),
        ({"r": np.zeros(2, "u2")}, [R], "'r' is declared ragged"),
        ({"x": [[1, 2]]}, [X], "'x' is a list, not an array of rows"),
        ({"x": np.uint16(3)}, [X], "'x' is a uint16, not an array of rows"),
        ({"x": np.array(3, "u2")}, [X], "not an array of rows"),
        ({"r": Ragged(np.zeros(3, "u2"), np.array([1, 3]))}, [R], "offsets that do not rise from 0 to 3"),
        ({"r": Ragged(np.zeros(3, "u2"), np.array([0, 2]))}, [R], "offsets that do not rise from 0 to 3"),
        ({"r": Ragged(np.zeros(3, "u2"), np.array([0, 2, 1, 3]))}, [R], "offsets that do not rise from 0 to 3"),
        ({"r": Ragged(np.zeros(0, "u2"), np.array([], "i8"))}, [R], "offsets that do not rise from 0 to 0"),
        (
            {"x": np.zeros((1, 2), "u2"), "r": Ragged.of([], np.dtype("u2"))},
            [X, R],
            r"different lengths: \{'x': 1, 'r': 0\}",
        ),
    ],
)  # fmt: skip
def test_rows_that_are_not_what_was_declared_are_refused(columns, declared, problem):
    with pytest.raises(RecipeInvalid, match=problem):
        encode(columns, declared)


def test_sample_ids_that_name_no_column_are_refused():
    with pytest.raises(RecipeInvalid, match="'nope' as its sample ids but does not declare that column"):
        encode({"x": np.zeros((1, 2), "u2")}, [X], sample_ids="nope")


@pytest.mark.parametrize(
    ("values", "problem"),
    [
        ([float("nan"), "text", None, {"a": 1}, [0.5], np.int64(3)], "statistics must map names to numbers"),
        ([2**63, -(2**63) - 1, [1, 2**63], [0] * 65_537], "the statistic 's' has an integer beyond 64 bits, a float"),
    ],
)
def test_statistics_that_no_generation_can_list_are_rejected(values, problem):
    for value in values:
        with pytest.raises(RecipeInvalid, match=problem):
            encode({"x": np.zeros((1, 2), "u2")}, [X], statistics={"s": value})


def test_a_block_that_no_reader_would_decompress_is_not_written():
    large = np.zeros((3, 100 << 20), np.uint8)  # never touched: it is refused before it is hashed or compressed
    column = Column(name="x", dtype="uint8", shape=(100 << 20,), codec="zstd", rows_per_block=3)
    with pytest.raises(
        RecipeInvalid, match=r"'x' has a block of 314,572,800 bytes.* 268,435,456\nhint: set rows_per_block"
    ):
        encode({"x": large}, [column])
    ragged = Column(name="x", dtype="uint8", ragged=True, codec="lz4", rows_per_block=2)
    rows = Ragged(large.reshape(-1), np.array([0, 0, 10, 300 << 20], np.int64))
    with pytest.raises(RecipeInvalid, match="'x' has a block of 314,572,790 bytes"):
        encode({"x": rows}, [ragged])


def test_booleans_are_zeros_and_ones():
    odd = np.array([0, 1, 5], np.uint8).view(np.bool_)
    with pytest.raises(RecipeInvalid, match="column 'x' is declared bool but has bytes other than 0 and 1"):
        encode({"x": odd}, [Column(name="x", dtype="bool")])


def test_statistics_longer_than_a_reader_takes_are_refused():
    long = {str(number): [10**9] * 60_000 for number in range(20)}
    with pytest.raises(RecipeInvalid, match=r"header of .* bytes .* most 8,388,608"):
        encode({"x": np.zeros(1, np.uint8)}, [Column(name="x", dtype="uint8")], statistics=long)
