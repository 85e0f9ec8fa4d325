"""Compressed files are scanned several at a time, cut as if one after the other, and not again after a kill."""

import bz2
import gzip
import lzma
import random
from pathlib import Path

import pytest
import xxhash
import zstandard
from hypothesis import example, given
from hypothesis import strategies as st

import forebay as fb
from forebay.building.cutting import StreamScan
from forebay.building.listing import SourceListing
from forebay.building.segments import Planner
from forebay.cache.segment import Segment
from forebay.source import SourceFile
from forebay.sources import opening
from forebay.sources.jsonl import LineSource
from forebay.store import MemoryStore

RECIPE = fb.RawRecipe(chunk_bytes=300)


class CountedLines(LineSource):
    """Notes which files are scanned."""

    scanned_paths: list[str] = []  # noqa: RUF012, shared by all copies of the source

    def sample_ends(self, file: SourceFile):
        self.scanned_paths.append(file.path)
        return super().sample_ends(file)


class LinesWithoutScans(LineSource):
    def sample_ends(self, file: SourceFile):
        return None


@pytest.fixture
def lines(tmp_path: Path) -> CountedLines:
    folder = tmp_path / "source"
    folder.mkdir()
    for number in range(12):
        text = b"".join(b"line %d of %d\n" % (at, number) for at in range(7 * number))
        (folder / f"{number:02d}.txt.gz").write_bytes(gzip.compress(text + b"end" * (number % 2), mtime=0))
    CountedLines.scanned_paths.clear()
    return CountedLines(str(folder), (".",))


def first_segment(source: fb.Source) -> Segment:
    planner = Planner(MemoryStore(), SourceListing(source), RECIPE, lambda *_: None, lambda _: None)
    return planner.first().segment


def planned(source: fb.Source) -> bytes:
    return b"".join(map(bytes, first_segment(source).encode()))


@example([b"--", b"a"], b"--", 1, 1)  # steps that are shorter than the separator
@given(
    st.lists(st.sampled_from([b"", b"a", b"-", b"--", b"---", b"ab-", b"\n"]), max_size=40),
    st.sampled_from([b"-", b"--", b"---", b"\n"]),
    st.integers(1, 30),
    st.integers(1, 30),
)
def test_cuts_by_the_ends_of_all_samples_are_those_of_the_source(tmp_path_factory, words, separator, first, every):
    path = tmp_path_factory.mktemp("one") / "one.txt.gz"
    path.write_bytes(gzip.compress(b"".join(words)))
    source = fb.sources.text(path, separator=separator.decode())
    (file,) = source.files()
    ends = source.sample_ends(file)
    assert ends is not None
    assert list(StreamScan(file, ends).cuts(first, every)) == list(source.cuts(file, 0, first, every))


def test_a_source_of_compressed_files_is_planned_as_if_they_were_cut_one_by_one(lines):
    at_once = planned(lines)
    assert sorted(CountedLines.scanned_paths) == [file.path for file in lines.files()]
    assert planned(LinesWithoutScans(lines.root, lines.patterns)) == at_once


@pytest.mark.parametrize("count", [1, 3])  # cut while it is decompressed; scanned by several threads
def test_a_compressed_file_is_hashed_while_it_is_scanned_and_not_read_again(tmp_path, monkeypatch, count):
    for number in range(count):
        text = b"".join(b"line %d of %d\n" % (at, number) for at in range(500))
        (tmp_path / f"{number}.txt.gz").write_bytes(gzip.compress(text, mtime=0))
    source = fb.sources.lines(tmp_path)
    expected = {file.path: source.digest(file, 0, file.size) for file in source.files()}
    monkeypatch.setattr(opening, "hashed_range", lambda *_: pytest.fail("a file was read a second time"))
    segment = first_segment(source)
    assert {
        part.file.path: part.file.digest for chunk in range(len(segment)) for part in segment.parts(chunk)
    } == expected


@pytest.mark.slow
@pytest.mark.parametrize(
    ("suffix", "pack"),
    [(".gz", gzip.compress), (".zst", zstandard.compress), (".bz2", bz2.compress), (".xz", lzma.compress)],
)
def test_the_digest_of_a_stream_that_was_not_read_to_its_end_is_not_that_of_its_beginning(tmp_path, suffix, pack):
    (tmp_path / f"a.txt{suffix}").write_bytes(pack(random.Random(0).randbytes(3_000_000)))
    source = fb.sources.lines(tmp_path)
    (file,) = source.files()
    begun = source.cuts(file, 0, 1, 1)
    next(begun)
    begun.close()
    assert source.scanned(file).digest == source.digest(file, 0, file.size)
    assert list(source.cuts(file, 0, 1 << 20, 1 << 20))
    assert source.scanned(file).digest == source.digest(file, 0, file.size)


def test_a_pass_that_was_broken_off_forgets_the_digest_of_the_one_before(tmp_path):
    name, packed = (
        tmp_path / "a.txt.gz",
        [gzip.compress(random.Random(seed).randbytes(300_000), 0, mtime=0) for seed in (1, 2)],
    )
    name.write_bytes(packed[0])
    source = fb.sources.lines(tmp_path)
    (file,) = source.files()
    assert list(source.cuts(file, 0, 1 << 20, 1 << 20))
    name.write_bytes(packed[1])  # `file` is how it was listed before
    begun = source.cuts(file, 0, 1, 1)
    next(begun)
    begun.close()
    assert source.scanned(file).digest == xxhash.xxh3_64_intdigest(packed[1][: file.size])
