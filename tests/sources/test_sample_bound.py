"""One sample is bounded while it is read: a longer one is passed over and recorded, wherever the file is cut."""

import json
import os
import subprocess
import sys

import numpy as np
import pyarrow as pa
import pytest
from hypothesis import example, given, settings
from hypothesis import strategies as st
from tests.helpers.hypothesis_profiles import scaled
from tests.sources.written import parquet_of, read_all, write

import forebay as fb
from forebay.errors import ForebayError, SourceUnreadable
from forebay.source import Failure, Sample
from forebay.sources.pieces import LongPiece, whole_pieces

SEPARATORS = st.sampled_from([b"\n", b"--", b"---", b"ab", b"aba"])
KINDS = {
    "lines": lambda path, limit: fb.sources.lines(path, max_sample_bytes=limit),
    "text": lambda path, limit: fb.sources.text(path, separator="\n", max_sample_bytes=limit),
    "jsonl": lambda path, limit: fb.sources.jsonl(path, max_sample_bytes=limit),
}


@given(
    content=st.binary(max_size=60).map(lambda raw: bytes(b"a-b\n"[byte % 4] for byte in raw)),
    separator=SEPARATORS,
    limit=st.integers(1, 12),
    sizes=st.lists(st.integers(1, 7), min_size=1, max_size=8),
)
@example(content=b"a" * 9 + b"--" + b"b", separator=b"--", limit=9, sizes=[1])
@settings(max_examples=scaled(400), deadline=None)
def test_pieces_within_the_limit_come_whole_and_others_are_measured(content, separator, limit, sizes):
    position = 0

    def read(count: int) -> bytes:
        nonlocal position
        size = min(count, sizes[position % len(sizes)])
        position += size
        return content[position - size : position]

    expected = content.split(separator)
    expected = expected if expected[-1] else expected[:-1]
    seen: list[bytes | int] = []
    passed = newlines = 0
    for block in whole_pieces(read, len(content), separator, limit):
        passed += len(block)
        if isinstance(block, LongPiece):
            seen.append(block.size)
            newlines += block.newlines
        else:
            newlines += block.count(b"\n")
            pieces = bytes(block).split(separator)
            seen += pieces if pieces[-1] else pieces[:-1]
    assert seen == [piece if len(piece) <= limit else len(piece) for piece in expected]
    assert (passed, newlines) == (len(content), content.count(b"\n"))


@pytest.mark.parametrize("ending", ["", ".gz", ".zst", ".bz2", ".xz"])
@pytest.mark.parametrize("kind", KINDS)
def test_a_line_that_is_too_long_is_a_failure_with_its_place_and_the_others_are_read(tmp_path, kind, ending):
    documents = ("one", os.urandom(300_000).hex(), "two", os.urandom(150_000).hex())
    lines = [json.dumps({"text": text}).encode() for text in documents]
    path = write(tmp_path, f"a.jsonl{ending}", b"\n".join(lines))
    expected = [
        (Sample, 0),
        (Failure, f"line 2: it has {len(lines[1]):,} bytes, more than max_sample_bytes 1,000"),
        (Sample, 2),
        (Failure, f"line 4: it has {len(lines[3]):,} bytes, more than max_sample_bytes 1,000"),
    ]
    source = KINDS[kind](path, 1000)
    for cut in (1, 100_000, 1 << 40):
        seen = read_all(source, cut, cut)
        assert [type(one) for one in seen] == [kind for kind, _ in expected]
        assert [one.detail for one in seen if isinstance(one, Failure)] == [expected[1][1], expected[3][1]]
        assert [one.reason for one in seen if isinstance(one, Failure)] == ["too-large"] * 2
        begin = len(lines[0]) + 1
        assert (getattr(seen[1], "sample", "")) == f"a.jsonl{ending}@{begin}"


def test_the_limit_is_to_the_byte(tmp_path):
    path = write(tmp_path, "a.txt", b"12345\n123456\n")
    assert [type(one) for one in read_all(fb.sources.lines(path, max_sample_bytes=5))] == [Sample, Failure]
    assert [type(one) for one in read_all(fb.sources.lines(path, max_sample_bytes=6))] == [Sample, Sample]


@pytest.mark.parametrize("ending", ["", ".zst"])
def test_a_file_that_is_one_sample_is_not_read_if_it_is_too_long(tmp_path, ending):
    path = write(tmp_path, f"a.txt{ending}", b"x" * 5000)
    for limit, kind in ((4999, Failure), (5000, Sample)):
        (one,) = read_all(fb.sources.text(path, max_sample_bytes=limit))
        assert isinstance(one, kind)
    sparse = tmp_path / "sparse.bin"
    with sparse.open("wb") as file:
        file.truncate(1 << 40)
    (one,) = read_all(fb.sources.files(sparse))
    assert (one.reason, one.sample) == ("too-large", "sparse.bin")


def test_cells_of_parquet_that_are_too_long_are_failures_with_their_row(tmp_path):
    values = ["one", "x" * 5000, "two", None, "y" * 5001, "z" * 4000]
    (tmp_path / "a.parquet").write_bytes(parquet_of(pa.array(values)))
    seen = read_all(fb.sources.parquet(tmp_path, max_sample_bytes=4000))
    assert [one.data if isinstance(one, Sample) else one.reason for one in seen] == [
        "one", "too-large", "two", "null", "too-large", "z" * 4000,
    ]  # fmt: skip
    assert seen[4].detail == "row 4: it has 5,001 bytes, more than max_sample_bytes 4,000"


@pytest.mark.parametrize("encoding", ["dictionary", "DELTA_BYTE_ARRAY"])
def test_a_text_that_is_stored_once_for_very_many_rows_is_refused_on_the_way(tmp_path, encoding):
    options = {} if encoding == "dictionary" else {"use_dictionary": False, "column_encoding": {"text": encoding}}
    values = pa.array(["b" * 100_000] * 1000)
    (tmp_path / "a.parquet").write_bytes(parquet_of(values, compression="zstd", **options))
    assert os.path.getsize(tmp_path / "a.parquet") < 50_000
    source = fb.sources.parquet(tmp_path, max_sample_bytes=200_000)
    with pytest.raises(SourceUnreadable, match=r"row group 0 unpack to more than"):
        read_all(source)


def test_a_limit_is_part_of_what_a_cache_is_made_of(tmp_path):
    path = write(tmp_path, "a.txt", b"12345\n123456\n")
    source = fb.sources.lines(path, max_sample_bytes=5)
    assert "max_sample_bytes" not in fb.sources.lines(path).describe()
    assert fb.sources.LineSource.from_description(source.describe()) == source
    report = fb.build(tmp_path / "cache", source, fb.RawRecipe(), workers=0)
    assert (report.rows, report.failures) == (1, 1)
    with pytest.raises(ForebayError, match="max_sample_bytes=5"):
        fb.build(tmp_path / "cache", fb.sources.lines(path), fb.RawRecipe(), workers=0)
    for wrong in (0, "1MB", True):
        with pytest.raises(ValueError, match=r"max_sample_bytes must be a whole number of at least 1 \(got"):
            fb.sources.lines(path, max_sample_bytes=wrong)
    assert fb.sources.lines(path, max_sample_bytes=np.int64(5)).describe() == source.describe()
    assert type(fb.sources.lines(path, max_sample_bytes=np.int64(5)).max_sample_bytes) is int


BUILD = """
import sys
import forebay as fb
report = fb.build(sys.argv[1] + "/cache", eval(sys.argv[2]), fb.RawRecipe(), workers=0)
peak = next(line.split()[1] for line in open("/proc/self/status") if line.startswith("VmHWM"))
print(report.rows, report.failures, peak)
"""


@pytest.mark.slow
def test_a_line_of_half_a_gigabyte_is_passed_over_in_little_memory(tmp_path):
    with (tmp_path / "a.txt").open("wb") as file:
        file.write(b"one\n")
        file.seek(1 << 29, os.SEEK_CUR)
        file.write(b"\ntwo\n")
    source = f"fb.sources.lines({str(tmp_path / 'a.txt')!r})"
    ran = subprocess.run(
        [sys.executable, "-c", BUILD, str(tmp_path), source], capture_output=True, text=True, check=True
    )
    rows, failures, peak = map(int, ran.stdout.split())
    assert (rows, failures) == (2, 1)
    assert peak < 300_000  # KiB
