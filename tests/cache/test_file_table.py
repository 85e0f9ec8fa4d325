"""Files in columns: what a list of objects would say, in a fraction of the memory."""

import itertools
import json
import random
import zlib
from dataclasses import replace

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st
from tests.builders import start_python

from forebay.cache.plan import Plan, Segment
from forebay.source import FileTable, Numbers, Part, SourceFile, Texts

SOURCE = {"kind": "x", "root": "/"}
files_of_any_kind = st.builds(
    SourceFile,
    path=st.text(st.characters(exclude_characters="\0", exclude_categories=["Cs"]) | st.just("\udce9"), min_size=1),
    size=st.integers(0, 2**62 - 1),
    mtime_ns=st.integers(-(2**63), 2**63 - 1),
    etag=st.text(max_size=3),
    stream=st.booleans(),
    digest=st.none() | st.integers(0, 2**64 - 1),
    ctime_ns=st.integers(0, 2**63 - 1),
    inode=st.integers(0, 2**64 - 1),
)


@given(st.lists(files_of_any_kind, max_size=12))
def test_a_table_is_the_list_that_it_was_made_of(files: list[SourceFile]) -> None:
    table = FileTable.of(files)
    assert list(table) == [table[at] for at in range(len(files))] == files
    assert table == files
    assert table[1:5] == files[1:5]
    assert table[::-2] == files[::-2]
    assert list(table.paths()) == [file.path for file in files]
    assert list(table.by_path()) == sorted(files, key=lambda file: file.path)
    for file in files:
        at = table.find(file.path)
        assert at is not None
        assert at == max(place for place, other in enumerate(files) if other.path == file.path)
    assert table.find("no/such/file") is None


@given(st.lists(st.integers(-(2**63), 2**63 - 1) | st.sampled_from([0, 300]), max_size=8))
def test_numbers_are_those_that_were_appended(numbers: list[int]) -> None:
    column = Numbers()
    for number in numbers:
        column.append(number)
    assert (len(column), column.values().tolist()) == (len(numbers), numbers)


def test_equal_numbers_take_no_room_and_are_written_as_others() -> None:
    files = [SourceFile(f"{number:03d}", 5, etag="x") for number in range(300)]
    sizes = FileTable.of(files).tensors["file_size"]
    assert sizes.strides == (0,)
    segment = Segment.of([[Part(file, 0, 5) for file in files]], number=0, first_chunk=0, source=SOURCE, weight=5)
    copied = replace(segment, tensors={name: np.array(values) for name, values in segment.tensors.items()})
    assert b"".join(map(bytes, segment.encode())) == b"".join(map(bytes, copied.encode()))


def named(names: str, seen: int = 0) -> list[SourceFile]:
    return [SourceFile(name, 2, seen) for name in names]


def test_a_segment_of_files_in_order_is_that_of_any_files() -> None:
    """Also where some have no samples, or are scanned and so differ from what was listed."""
    listed = named("abcdef")
    for chosen in itertools.product((0, 1, 2), repeat=6):  # not cut, cut as listed, cut with a digest
        cut = [
            SourceFile(file.path, 2, digest=7 if how == 2 else None)
            for file, how in zip(listed, chosen, strict=True)
            if how
        ]
        parts = [Part(file, start, start + 1) for file in cut for start in (0, 1)]
        chunks = [parts[at : at + 3] for at in range(0, len(parts), 3)]
        made = Segment.planned(chunks, listed, number=0, first_chunk=0, source=SOURCE, weight=3)
        same = Segment.of(chunks, number=0, first_chunk=0, source=SOURCE, weight=3, empty=listed)
        assert made.digest() == same.digest()


@given(st.lists(st.tuples(st.text("abcd", max_size=4).map(set), st.text("abcd", max_size=2).map(set)), max_size=5))
def test_the_files_of_a_plan_are_those_of_the_last_segment_that_names_them(segments: list[tuple[set, set]]) -> None:
    expected: dict[str, SourceFile] = {}
    made: list[Segment] = []
    for number, (names, dropped) in enumerate(segments):
        files = named("".join(sorted(names)), number)
        segment = Segment.of([], number=number, first_chunk=0, source=SOURCE, weight=1, empty=files)
        if number:
            segment = segment.amending("x", [], {}, dropped)
        made.append(segment)
        expected |= {file.path: file for file in files}
        for path in segment.dropped:
            expected.pop(path, None)
    found = Plan(made, [""] * len(made)).files
    assert dict(found) == dict(found.items()) == expected
    assert (len(found), sorted(found)) == (len(expected), sorted(expected))
    assert all((name in found) == (name in expected) for name in "abcd")


MEASURE = """
import json, re, sys
from pathlib import Path
from forebay.cache.plan import Segment
from forebay.source import FileTable, Part, SourceFile
from forebay.store import LocalStore
import xxhash

def peak():
    return int(re.search(r"VmHWM:\\s+(\\d+) kB", Path("/proc/self/status").read_text())[1]) * 1000

def file(at):
    name, moment = f"{at // 1000:05d}/{at:010d}.jpg", 1_700_000_000_000_000_000 + 1_000_003 * at
    size, digest = 20_000 + at % 90_000, xxhash.xxh3_64_hexdigest(name.encode())
    return SourceFile(name, size, moment, digest, ctime_ns=moment + 7 * at, inode=at)

def plan(count, root):
    table = FileTable.of(map(file, range(count)))
    chunks = ([Part(file, 0, 1)] for file in table)
    segment = Segment.planned(chunks, table, number=0, first_chunk=0, source={"kind": "x"}, weight=1)
    LocalStore(root).create("plan/000000.safetensors", segment.encode(), durable=False)

plan(50_000, sys.argv[1] + "/small")
before = peak()
plan(200_000, sys.argv[1] + "/large")
print(json.dumps((peak() - before) / 150_000))
"""


def test_planning_takes_less_memory_than_the_plan_has_bytes(tmp_path) -> None:
    """An object for each file takes some 350 bytes, and lists of them as much again.

    Files of different sizes, touched after they were written, each with a digest: 103 bytes if texts were plain.
    """
    process = start_python(["-c", MEASURE, str(tmp_path)])
    out, err = process.communicate(timeout=120)
    assert process.returncode == 0, err
    assert json.loads(out) < 85


def test_numbers_are_stored_in_the_types_of_the_format_however_they_are_kept() -> None:
    segment = Segment.of([[Part(file, 0, 2)] for file in named("ab")], number=0, first_chunk=0, source=SOURCE, weight=1)
    assert segment.tensors["part_stop"].dtype == np.uint8
    header = bytes(segment.encode()[0])
    stored = json.loads(header[8:])["part_stop"]
    assert (stored["dtype"], stored["shape"]) == ("U64", [2])


@pytest.mark.parametrize("touched", [None, 0, 2, 4])
def test_files_that_were_touched_after_they_were_written_keep_both_times(touched):
    times = [(1_700_000_000_000_000_000 + at, 1_700_000_000_000_000_000 + at + 5 * (at == touched)) for at in range(5)]
    files = [SourceFile(f"{at}.jpg", 1, mtime, ctime_ns=ctime, inode=7) for at, (mtime, ctime) in enumerate(times)]
    assert list(FileTable.of(files)) == files


def long_names(count: int) -> list[SourceFile]:
    """Files whose paths and etags have many lengths."""
    names = (f"{at % 7}/é{'x' * (at % 300)}{at}.jpg" for at in range(count))
    return [SourceFile(name, at, etag="" if at % 3 else f"{at:016x}") for at, name in enumerate(names)]


@pytest.mark.parametrize("count", [4095, 4096, 4097, 8192, 9000])
def test_texts_of_many_files_are_read_and_written_as_those_of_a_few(count: int) -> None:
    """They are compressed, 4,096 at a time."""
    files = long_names(count)
    table = FileTable.of(files)
    assert list(table) == files
    assert table[4090:4100] == files[4090:4100]
    assert [table.find(files[at].path) for at in (0, 4094, count - 1)] == [0, 4094, count - 1]
    joined = "".join(file.path for file in files).encode()
    edges = [0, *itertools.accumulate(len(file.path.encode()) for file in files)]
    for start, stop in ((0, 0), (0, 5), (edges[4090], edges[4095]), (edges[4000] + 1, len(joined)), (0, len(joined))):
        assert table.tensors["file_path"][start:stop].tobytes() == joined[start:stop]
    for start, stop in ((0, 1), (4090, 4096), (4095, count + 1), (count, count + 1), (0, count + 1)):
        assert table.tensors["file_path_offsets"][start:stop].tolist() == edges[start:stop]
    segment = Segment.planned([], table, number=0, first_chunk=0, source=SOURCE, weight=1)
    plain = replace(segment, tensors={name: np.array(values[:]) for name, values in segment.tensors.items()})
    assert b"".join(map(bytes, segment.encode())) == b"".join(map(bytes, plain.encode()))
    assert segment.files.same_paths(plain.files)
    renamed = FileTable.of([*files[:-1], replace_path(files[-1], files[-1].path.replace("é", "è"))])
    assert not plain.files.same_paths(renamed)
    assert not renamed.same_paths(table)


def replace_path(file: SourceFile, path: str) -> SourceFile:
    return SourceFile(path, file.size, etag=file.etag)


@pytest.fixture
def unpacked(monkeypatch: pytest.MonkeyPatch) -> list[int]:
    """The sizes of what was decompressed."""
    sizes: list[int] = []
    decompress = zlib.decompress

    def counted(data: bytes) -> bytes:
        content = decompress(data)
        sizes.append(len(content))
        return content

    monkeypatch.setattr(zlib, "decompress", counted)
    return sizes


def test_files_in_any_order_are_sorted_and_each_block_of_texts_is_decompressed_a_few_times(unpacked) -> None:
    files = [SourceFile(f"{at:06d}.jpg", at, etag=f"{at:x}") for at in range(3 * 4096)]
    random.Random(1).shuffle(files)
    in_order = FileTable.of(files).by_path()
    assert len(unpacked) <= 4 * 2 * 3, "paths and etags, in three blocks each"
    assert list(in_order) == sorted(files, key=lambda file: file.path)


def test_paths_that_are_searched_for_in_any_order_are_decompressed_once(unpacked) -> None:
    files = [SourceFile(f"{at:06d}.jpg", at) for at in range(3 * 4096)]
    table = FileTable.of(files)
    asked = random.Random(1).sample(range(len(files)), 300)
    assert [table.find(files[at].path) for at in asked] == asked
    assert len(unpacked) <= 3


def test_few_texts_are_kept_decompressed(unpacked) -> None:
    table = FileTable.of(SourceFile(f"{at:06d}{'x' * 500}", at) for at in range(2 * 4096))
    for at in (0, 5000, 1, 5001):
        table.path(at)
    assert len(unpacked) == 4, "each block has two megabytes"


def test_texts_are_read_in_one_piece_and_nothing_is_added_after_that() -> None:
    texts = Texts()
    for at in range(5000):
        texts.append(str(at))
    joined, edges = texts.values()
    for column in (joined, edges):
        with pytest.raises(ValueError, match="in steps of 2"):
            column[::2]
    with pytest.raises(ValueError, match="no text can be added"):
        texts.append("more")
    assert edges[5000:5001].tolist() == [len(joined)]
