"""A value is served whole, as it was written and to whom it was written, or not at all."""

import hmac
import json
import pickle

import numpy as np
import pytest
import safetensors.numpy
import xxhash
from hypothesis import given
from hypothesis import strategies as st

from forebay.columns import DTYPES, Column
from forebay.format.tensors import encode_header
from forebay.tiers.tier_value import BadValue, RowShape, decode_value, encode_value, identity_bytes

WHOSE = {"fingerprint": "f" * 64, "made_with": {}, "sample": "a\udcffb.jpg", "size": 3}
IDENTITY = identity_bytes(WHOSE, {})
ROW = {
    "pixels": np.arange(48, dtype=np.uint8),
    "box": np.array([0, 1, 4, 4], np.int32),
    "tags": np.array([], np.uint32),
    "id": np.frombuffer(b"a.jpg", np.uint8),
}
COLUMNS = (
    Column(name="pixels", dtype="uint8", ragged=True),
    Column(name="box", dtype="int32", shape=(4,)),
    Column(name="tags", dtype="uint32", ragged=True),
    Column(name="id", dtype="uint8", ragged=True),
)
KEY = b"a key"


@pytest.mark.parametrize("key", [None, KEY])
def test_a_row_comes_back_as_it_was_with_arrays_that_cannot_be_written_to(key: bytes | None) -> None:
    identity, row = decode_value(encode_value(IDENTITY, ROW, key), key, RowShape(COLUMNS))
    assert [json.loads(line) for line in identity.splitlines()] == [WHOSE, {}]
    for name, array in ROW.items():
        np.testing.assert_array_equal(row[name], array)
        assert row[name].dtype == array.dtype
        with pytest.raises(ValueError, match="read-only"):
            row[name][:] = 0


def test_a_value_is_a_safetensors_file() -> None:
    tensors = safetensors.numpy.load(encode_value(IDENTITY, ROW))
    np.testing.assert_array_equal(tensors["pixels"], ROW["pixels"])
    assert tensors[".checksum"].shape == (16,)


@pytest.mark.parametrize("key", [None, KEY])
def test_a_flip_of_any_bit_of_a_value_is_found(key: bytes | None) -> None:
    value = encode_value(IDENTITY, ROW, key)
    for position in range(len(value)):
        for bit in range(8):
            flipped = bytearray(value)
            flipped[position] ^= 1 << bit
            with pytest.raises(BadValue):
                decode_value(bytes(flipped), key)


def test_a_value_that_is_cut_short_or_has_more_behind_it_is_found() -> None:
    value = encode_value(IDENTITY, ROW)
    for cut in range(len(value)):
        with pytest.raises(BadValue):
            decode_value(value[:cut])
    with pytest.raises(BadValue):
        decode_value(value + b"\0")


@given(st.binary(max_size=200), st.integers(0, 300))
def test_bytes_of_any_kind_are_refused_and_nothing_else_happens(content: bytes, length: int) -> None:
    for made in (content, length.to_bytes(8, "little") + content, pickle.dumps({"pixels": content})):
        with pytest.raises(BadValue):
            decode_value(made)


@given(st.dictionaries(st.text(max_size=6), st.recursive(
    st.none() | st.integers(-9, 1 << 70) | st.text(max_size=4), lambda inner: st.lists(inner, max_size=3)
    | st.dictionaries(st.sampled_from(["dtype", "shape", "data_offsets"]), inner, max_size=3), max_leaves=8
), max_size=4))  # fmt: skip
def test_headers_of_any_kind_are_refused(header: dict[str, object]) -> None:
    text = json.dumps(header).encode()
    text += b" " * (-len(text) % 8)
    with pytest.raises(BadValue):
        decode_value(len(text).to_bytes(8, "little") + text + bytes(48))


@pytest.mark.parametrize("shape", [(1,) * 70, (0, 2**62, 2**62), (0, 2**63)])
def test_a_shape_that_no_array_can_have_is_refused(shape: tuple[int, ...]) -> None:
    size = 0 if 0 in shape else 1
    entries = [(".identity", "U8", (8,), 8), ("a", "U8", shape, size), (".checksum", "U8", (16,), 16)]
    content = encode_header({"format_version": 1, "type": "row"}, entries, 8) + b"[]\n{}   " + bytes(size)
    with pytest.raises(BadValue, match="its tensor 'a' is described wrongly"):
        decode_value(content + xxhash.xxh3_128_digest(content))


@pytest.mark.parametrize(
    ("written", "read", "reason"),
    [(None, KEY, "untagged"), (KEY, None, "key-needed"), (KEY, b"another key", "tag")],
)
def test_a_tag_must_be_there_exactly_where_a_key_is_and_made_with_it(written, read, reason) -> None:
    with pytest.raises(BadValue) as caught:
        decode_value(encode_value(IDENTITY, ROW, written), read)
    assert caught.value.reason == reason


@pytest.mark.parametrize(
    "wrong",
    [
        {"box": np.zeros(5, np.int32)},
        {"box": np.zeros(4, np.int64)},
        {"pixels": np.zeros((3, 4, 4), np.uint8)},
        {"more": np.zeros(1, np.uint8)},
        {"id": np.zeros((), np.uint8)},
    ],
)
def test_a_row_of_other_columns_types_or_shapes_is_no_row_of_the_recipe(wrong: dict[str, np.ndarray]) -> None:
    for row in ({**ROW, **wrong}, {name: array for name, array in ROW.items() if name != "tags"}):
        for _ in range(2):
            with pytest.raises(BadValue) as caught:
                decode_value(encode_value(IDENTITY, row), None, RowShape(COLUMNS))
            assert caught.value.reason == "shape"


@given(st.sampled_from(sorted(DTYPES)), st.lists(st.integers(0, 4), max_size=3))
def test_arrays_of_every_type_and_shape_come_back(dtype: str, shape: list[int]) -> None:
    array = np.arange(np.prod(shape, dtype=int)).astype(DTYPES[dtype][1]).reshape(shape)
    _, row = decode_value(encode_value(IDENTITY, {"a": array, **ROW}))
    assert row["a"].shape == tuple(shape)
    assert row["a"].tobytes() == array.tobytes()


def test_the_head_of_a_value_takes_less_than_a_page_so_that_a_full_page_of_pixels_takes_no_further_two() -> None:
    for pages in (1, 2, 147):  # 147 pages are the pixels of 448 × 448
        value = encode_value(IDENTITY, {**ROW, "pixels": np.zeros(4096 * pages, np.uint8)})
        assert -(-(len(value) + 16) // 4096) == pages + 1  # LMDB puts 16 bytes before it


def test_a_value_is_laid_out_as_the_format_says() -> None:
    """Typed from docs/format.md, without our reader."""
    value = encode_value(IDENTITY, ROW, KEY)
    length = int.from_bytes(value[:8], "little")
    header = json.loads(value[8 : 8 + length])
    assert length % 8 == 0
    assert json.loads(header.pop("__metadata__")["forebay"]) == {"format_version": 1, "type": "row"}
    assert list(header) == [".identity", "box", "tags", "id", "pixels", ".checksum", ".hmac"]
    content = {
        name: value[8 + length + entry["data_offsets"][0] : 8 + length + entry["data_offsets"][1]]
        for name, entry in header.items()
    }
    assert len(content[".identity"]) % 8 == 0
    assert [json.loads(line) for line in content[".identity"].splitlines()] == [WHOSE, {}]
    assert content["pixels"] == bytes(range(48))
    assert content[".checksum"] == xxhash.xxh3_128_digest(value[:-48])
    assert content[".hmac"] == hmac.digest(KEY, value[:-32], "sha256")
