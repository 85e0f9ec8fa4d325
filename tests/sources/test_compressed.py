"""Compressed files of every common name are read as streams, in bounded memory."""

import bz2
import gzip
import json
import lzma

import pytest
import zstandard
from tests.sources.written import read_all, texts

import forebay as fb
from forebay.errors import SourceUnreadable
from forebay.source import Failure
from forebay.testing.kind_contracts import parts_of

PACKED = {
    ".gz": gzip.compress,
    ".gzip": gzip.compress,
    ".GZ": gzip.compress,
    ".zst": zstandard.compress,
    ".zstd": zstandard.compress,
    ".Zst": zstandard.compress,
    ".bz2": bz2.compress,
    ".BZ2": bz2.compress,
    ".xz": lzma.compress,
    ".XZ": lzma.compress,
}
DOCUMENTS = [f"document {number} " + "some words " * (number % 7) for number in range(3000)]
LINES = b"".join(json.dumps({"text": text}).encode() + b"\n" for text in DOCUMENTS)


@pytest.mark.parametrize("stem", ["a.jsonl", "a.json", "a.ndjson", "A.JSONL"])
@pytest.mark.parametrize("suffix", PACKED)
def test_json_lines_are_read_under_the_names_that_corpora_have(tmp_path, stem, suffix):
    (tmp_path / f"{stem}{suffix}").write_bytes(PACKED[suffix](LINES[:2000].rpartition(b"\n")[0]))
    source = fb.sources.jsonl(tmp_path)
    found = texts(source, 500, 500)
    assert found == DOCUMENTS[: len(found)]
    assert len(found) > 20


@pytest.mark.parametrize("suffix", [".gz", ".zst", ".bz2", ".xz"])
def test_a_file_of_several_members_is_read_to_its_end(tmp_path, suffix):
    pack, middle = PACKED[suffix], LINES.index(b"\n", len(LINES) // 2) - 7
    padding = b"\0" * 8 if suffix in (".xz", ".gz") else b""
    packed = pack(LINES[:middle]) + padding + pack(b"") + pack(LINES[middle:]) + padding
    (tmp_path / f"a.jsonl{suffix}").write_bytes(packed)
    source = fb.sources.jsonl(tmp_path)
    assert texts(source, 20_000, 20_000) == DOCUMENTS
    (file,) = source.files()
    assert source.weight(file) > 1000


@pytest.mark.parametrize("suffix", [".gz", ".zst", ".bz2", ".xz"])
@pytest.mark.parametrize("damage", ["cut", "flip", "garbage behind", "not compressed"])
def test_a_damaged_file_is_one_error_that_names_it(tmp_path, suffix, damage):
    packed = bytearray(PACKED[suffix](LINES))
    if damage == "flip":
        packed[len(packed) // 2] ^= 16
    stored = {
        "cut": packed[: len(packed) * 2 // 3],
        "flip": packed,
        "garbage behind": packed + b"garbage that is no member",
        "not compressed": LINES,
    }
    (tmp_path / f"a.jsonl{suffix}").write_bytes(stored[damage])
    source = fb.sources.jsonl(tmp_path)
    if (suffix, damage) == (".zst", "flip"):  # this library writes no checksum unless asked to
        return
    with pytest.raises(SourceUnreadable, match=rf"a\.jsonl{suffix}"):
        read_all(source, 1000, 1000)


def test_one_damaged_file_does_not_keep_others_from_being_planned(tmp_path):
    for name in "abcd":
        packed = gzip.compress(LINES)
        (tmp_path / f"{name}.jsonl.gz").write_bytes(packed[: len(packed) // 2] if name in "bd" else packed)
    source = fb.sources.jsonl(tmp_path)
    bad = []
    for file in source.files():
        try:
            list(source.cuts(file, 0, 1000, 1000))
        except SourceUnreadable as error:
            bad.append(error.facts["path"])
    assert bad == [str(tmp_path / "b.jsonl.gz"), str(tmp_path / "d.jsonl.gz")]


def test_files_of_a_long_window_are_read(tmp_path):
    """As `zstd --long=31` writes them, in a stream whose size it does not know."""
    parameters = zstandard.ZstdCompressionParameters(window_log=31, enable_ldm=True, compression_level=1)
    packer = zstandard.ZstdCompressor(compression_params=parameters).compressobj()
    packed = packer.compress(LINES) + packer.flush()
    assert zstandard.get_frame_parameters(packed).window_size == 1 << 31
    (tmp_path / "a.jsonl.zst").write_bytes(packed)
    source = fb.sources.jsonl(tmp_path)
    assert texts(source, 20_000, 20_000) == DOCUMENTS
    assert source.weight(source.files()[0]) == pytest.approx(len(LINES), rel=0.1)


@pytest.mark.parametrize("suffix", [".gz", ".zst", ".bz2", ".xz"])
def test_a_small_file_that_unpacks_to_an_enormous_one_is_refused(tmp_path, suffix):
    (tmp_path / f"a.jsonl{suffix}").write_bytes(PACKED[suffix](b'{"text": "a"}\n' + b" " * 3_000_000 + b"\n"))
    small = fb.sources.jsonl(tmp_path, max_sample_bytes=1000)
    (file,) = small.files()
    if 1000 * file.size > 3_000_000:  # no bomb: deflate cannot do more
        assert [one.reason for one in read_all(small) if isinstance(one, Failure)] == ["too-large"]
        return
    with pytest.raises(SourceUnreadable, match=r"unpack to more than .* raise max_sample_bytes"):
        list(small.cuts(file, 0, 1000, 1000))
    assert len(read_all(fb.sources.jsonl(tmp_path, max_sample_bytes=1_000_000))) == 2


@pytest.mark.slow
def test_estimating_a_bomb_does_not_unpack_it(tmp_path):
    with (tmp_path / "a.txt.zst").open("wb") as file, zstandard.ZstdCompressor().stream_writer(file) as writer:
        for _ in range(2048):
            writer.write(b"x" * (1 << 20))
    source = fb.sources.text(tmp_path)
    (file,) = source.files()
    assert source.weight(file) >= 1 << 26
    with pytest.raises(SourceUnreadable, match="unpack to more than 268,435,456"):
        parts_of(source, 1 << 20, 1 << 20)
