"""Index files: every byte is under their digest, and under the key where there is one."""

import hashlib
import hmac
import json

import numpy as np
import pytest
import safetensors
from hypothesis import given
from hypothesis import strategies as st
from made import joined, small_chunk

from forebay.columns import DTYPES
from forebay.errors import Damaged, ForebayError, FormatTooNew, IndexCorrupt, KeyRefused, RecipeInvalid
from forebay.format.chunk_file import ChunkFile
from forebay.format.tensors import VARIABLE, hmac_key, seal, unseal
from forebay.source import MOST_LEVELS, TOO_DEEP
from forebay.store import LocalStore
from forebay.store.base import MAX_INDEX_BYTES

KEY, OTHER_KEY = b"a key", b"another key"
TENSORS = {
    "names": np.frombuffer(b"abc", np.uint8),
    "sizes": np.array([1, 2**63], np.uint64),
    "share": np.array([[0.5], [0.25]], np.float32),
    "nothing": np.empty((0, 3), np.int16),
    "single": np.array(7, np.int64),
}


def sealed(key: bytes | None = None, **metadata: object) -> bytes:
    return b"".join(seal({"format_version": 2, "type": "plan", **metadata}, TENSORS, key))


def unsealed(content: bytes, key: bytes | None = None, kind: str = "plan"):
    return unseal(memoryview(content), "root", "plan/000000.safetensors", kind, key)


def refusal(content: bytes, key: bytes | None = None, kind: str = "plan") -> Damaged | KeyRefused:
    with pytest.raises((Damaged, KeyRefused)) as refused:
        unsealed(content, key, kind)
    return refused.value


@pytest.mark.parametrize("key", [None, KEY])
def test_what_is_sealed_comes_back(key):
    metadata, tensors = unsealed(sealed(key, text="ü", number=3), key)
    assert metadata == {"format_version": 2, "type": "plan", "text": "ü", "number": 3}
    assert tensors.keys() == TENSORS.keys()
    for name, array in TENSORS.items():
        assert (tensors[name].dtype, tensors[name].shape) == (array.dtype, array.shape)
        assert tensors[name].tobytes() == array.tobytes()


def test_the_safetensors_package_opens_it():
    theirs = dict(safetensors.deserialize(sealed(KEY)))
    assert bytes(theirs["sizes"]["data"]) == TENSORS["sizes"].tobytes()
    assert len(theirs[".digest"]["data"]) == len(theirs[".hmac"]["data"]) == 32


def test_the_digest_and_the_tag_cover_every_byte_before_them():
    tagged = sealed(KEY)
    assert tagged[-64:-32] == hashlib.sha256(tagged[:-64]).digest()
    assert tagged[-32:] == hmac.digest(KEY, tagged[:-32], "sha256")


@given(st.permutations(list(DTYPES)), st.integers(0, 3))
def test_every_tensor_is_aligned_whatever_the_order_of_the_given_ones(names, rows):
    tensors = {name: np.zeros(rows, DTYPES[name][1]) for name in names}
    content = b"".join(seal({"format_version": 2, "type": "plan"}, tensors))
    _, found = unsealed(content)
    start = np.frombuffer(content, np.uint8).ctypes.data
    assert all((array.ctypes.data - start) % array.dtype.itemsize == 0 for array in found.values() if array.size)
    assert content == b"".join(seal({"format_version": 2, "type": "plan"}, dict(sorted(tensors.items()))))


@pytest.mark.parametrize("key", [None, KEY])
@pytest.mark.parametrize("flip", [0x01, 0x20, 0xFF])
def test_every_flipped_byte_is_refused(key, flip):
    content = bytearray(sealed(key))
    for position in range(len(content)):
        content[position] ^= flip
        try:
            unsealed(content, key)
        except (Damaged, KeyRefused):
            content[position] ^= flip
        else:
            pytest.fail(f"byte {position} of {len(content)} flipped by {flip:#x} went unseen")


@pytest.mark.parametrize("key", [None, KEY])
def test_every_truncation_is_refused(key):
    content = sealed(key)
    for length in range(len(content)):
        with pytest.raises(IndexCorrupt):
            unsealed(content[:length], key)
    assert isinstance(refusal(content + b"\0", key), IndexCorrupt)


@given(st.binary(max_size=200))
def test_bytes_of_any_kind_are_refused(content):
    assert isinstance(refusal(content), IndexCorrupt)


def test_each_kind_of_damage_has_its_own_words():
    content = sealed()
    chunk = joined(small_chunk("none"))
    assert refusal(b"").facts["problem"] == "it is empty"
    assert refusal(b"{}").facts["problem"] == "it has only 2 bytes"
    assert refusal(b'{"json": "but no safetensors"}').facts["problem"] == "it is not a forebay safetensors file"
    assert "it ends inside its header" in refusal(content[:100]).facts["problem"]
    assert "bytes but its header describes" in refusal(content[:-5]).facts["problem"]
    assert refusal(content[:-1] + b"!").facts["problem"] == "its bytes do not match its digest"
    assert refusal(content, kind="generation").facts["problem"] == "it is a plan, not a generation"
    assert refusal(chunk).facts["problem"] == "it does not end with a digest"
    newer = refusal(sealed(format_version=3))
    assert isinstance(newer, FormatTooNew)
    assert "format version 3; this forebay reads up to 2" in newer.message
    assert "'plan/000000.safetensors' of the cache at 'root' is corrupt: it is empty" in str(refusal(b""))


def test_a_key_and_a_tag_are_refused_without_each_other():
    assert "it is tagged" in refusal(sealed(KEY)).message
    assert "has no tag, but FOREBAY_HMAC_KEY is set" in refusal(sealed(), KEY).message
    assert "its tag was not made with the key" in refusal(sealed(OTHER_KEY), KEY).message
    forged = bytearray(sealed(KEY))
    forged[-1] ^= 1
    assert "its tag was not made with the key" in refusal(bytes(forged), KEY).message
    assert all(isinstance(refusal(content, KEY), KeyRefused) for content in (sealed(), sealed(OTHER_KEY)))


def test_a_changed_file_with_a_new_digest_is_refused_by_the_key():
    """Who has no key can make a digest, not a tag."""
    content = bytearray(sealed(KEY))
    content[-65] ^= 1
    content[-64:-32] = hashlib.sha256(content[:-64]).digest()
    assert "its tag was not made with the key" in refusal(bytes(content), KEY).message


@pytest.mark.parametrize(
    ("value", "key"), [(None, None), ("secret", b"secret"), (b"\xff\xfe", b"\xff\xfe"), ("ü", "ü".encode())]
)
def test_the_key_comes_from_the_environment_as_it_is(monkeypatch, value, key):
    monkeypatch.delenv(VARIABLE, raising=False)
    if value is not None:
        monkeypatch.setenv(VARIABLE, value if isinstance(value, str) else value.decode("utf-8", "surrogateescape"))
    assert hmac_key() == key


def test_an_empty_key_does_not_pass_for_none(monkeypatch):
    monkeypatch.setenv(VARIABLE, "")
    with pytest.raises(ForebayError, match=rf"{VARIABLE} is set but empty\nhint: set it to the key, or unset it"):
        hmac_key()


@pytest.mark.parametrize("array", [np.array(["text"]), np.array([1j]), np.array([1], ">i4"), np.array([None])])
def test_arrays_of_other_types_are_refused(array):
    with pytest.raises(RecipeInvalid, match="cannot be stored\nhint: use one of: bool, uint8"):
        seal({"format_version": 2, "type": "constants"}, {"x": array})


def with_header(text: bytes) -> bytes:
    """A file of nothing but this header."""
    padded = -(-(8 + len(text)) // 4096) * 4096 - 8
    return padded.to_bytes(8, "little") + text.ljust(padded)


def header_of(metadata: object, **tensors: object) -> bytes:
    return with_header(json.dumps({"__metadata__": {"forebay": json.dumps(metadata)}, **tensors}).encode())


@pytest.mark.parametrize(
    "header",
    [
        header_of({"format_version": True, "type": "plan"}),
        header_of({"format_version": 0, "type": "plan"}),
        header_of({"format_version": [], "type": "plan"}),
        header_of([]),
        header_of({"format_version": 2, "type": "plan", "deep": json.loads("[" * 100 + "]" * 100)}),
        with_header(b'{"__metadata__":{"forebay":"' + b"[" * 100_000 + b'"}}'),
        with_header(b"[" * 100_000),
        with_header(b'{"__metadata__":{"forebay":{}}}'),
        header_of({"format_version": 1}, x={"dtype": "U8", "shape": [0, 10**30], "data_offsets": [0, 0]}),
        header_of({"format_version": 1}, x={"dtype": "U8", "shape": [0] * 100, "data_offsets": [0, 0]}),
        header_of({"format_version": 1}, x={"dtype": ["U8"], "shape": [0], "data_offsets": [0, 0]}),
        header_of({"format_version": 1}, x={"dtype": "U8", "shape": [-1], "data_offsets": [0, -1]}),
        header_of({"format_version": 1}, x=[]),
    ],
    ids=str,
)
def test_a_header_that_could_not_be_ours_is_refused(header):
    assert isinstance(refusal(header), IndexCorrupt)


def test_a_header_has_a_largest_size_and_number_of_tensors():
    entry = {"dtype": "U8", "shape": [0], "data_offsets": [0, 0]}
    many = header_of({"format_version": 2, "type": "plan"}, **{f"t{number}": entry for number in range(20_001)})
    assert "describes over 20,000 tensors" in refusal(many).facts["problem"]
    unparsed = with_header(b'{"data_offsets"' * 20_002)  # counted before the text is parsed, or this is not JSON
    assert "describes over 20,000 tensors" in refusal(unparsed).facts["problem"]
    assert "more than the limit of 33,554,432" in refusal(with_header(b" " * (32 << 20))).facts["problem"]
    with pytest.raises(Damaged, match="more than the limit of 8,388,608"):
        ChunkFile(memoryview(with_header(b" " * (8 << 20))), "a chunk")
    with pytest.raises(RecipeInvalid, match="is too large"):
        seal({"format_version": 2, "type": "plan", "text": "x" * (32 << 20)}, {})
    with pytest.raises(RecipeInvalid, match="is too large"):
        seal({"format_version": 2, "type": "plan"}, {f"t{number}": np.zeros(0, np.uint8) for number in range(20_001)})


@pytest.mark.parametrize("brackets", ["[]", "{}"])
def test_metadata_is_nested_up_to_a_number_of_levels(brackets):
    def nested(levels):
        inner = [] if brackets == "[]" else {}
        for _ in range(levels - 1):
            inner = [inner] if brackets == "[]" else {"a": inner}
        return {"format_version": 2, "type": "plan", "deep": inner}

    wide = {"format_version": 2, "type": "plan", "wide": [[] for _ in range(1000)]}
    for fine in (nested(MOST_LEVELS - 1), wide):
        assert unseal(memoryview(b"".join(seal(fine, {}))), "root", "p", "plan")[0] == fine
    assert TOO_DEEP in refusal(b"".join(seal(nested(MOST_LEVELS), {}))).facts["problem"]


@pytest.mark.parametrize(("shape", "size"), [([1] * 33, 1), ([0, 2**62], 0), ([2**40, 0, 2**40], 0)])
def test_a_tensor_has_a_largest_number_and_length_of_sides(shape, size):
    header = header_of({"format_version": 1}, x={"dtype": "U8", "shape": shape, "data_offsets": [0, size]})
    assert "the entry of tensor 'x' is invalid" in refusal(header + b"0" * size).facts["problem"]


def test_an_index_file_has_a_largest_size(tmp_path):
    """One with holes takes no room on the disk, and hashing it would take minutes."""
    with open(tmp_path / "plan", "wb") as file:
        file.truncate(MAX_INDEX_BYTES + 1)
    with pytest.raises(IndexCorrupt, match="an index file has at most"):
        unseal(LocalStore(tmp_path).view("plan"), "root", "plan", "plan")
