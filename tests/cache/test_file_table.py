"""Files in columns: what a list of objects would say, in a fraction of the memory."""

import json

import pytest
from hypothesis import given
from hypothesis import strategies as st
from tests.helpers.cache_files import segment_of
from tests.helpers.processes import PythonProcess

from forebay.cache.plan import Plan
from forebay.cache.segment import Segment
from forebay.file_table import FileTable
from forebay.source import SourceFile

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


@pytest.mark.slow
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


def named(names: str, seen: int = 0) -> list[SourceFile]:
    return [SourceFile(name, 2, seen) for name in names]


@given(st.lists(st.text("abcd", max_size=4).map(set), max_size=5))
def test_the_files_of_a_plan_are_those_of_the_last_segment_that_has_them(segments: list[set]) -> None:
    expected: dict[str, SourceFile] = {}
    planned: list[Segment] = []
    for number, names in enumerate(segments):
        files = named("".join(sorted(names)), number)
        planned.append(segment_of([], number=number, first_chunk=0, source=SOURCE, weight=1, empty=files))
        expected |= {file.path: file for file in files}
    files = Plan(planned).files
    assert dict(files) == dict(files.items()) == expected
    assert (len(files), sorted(files)) == (len(expected), sorted(expected))
    assert all((name in files) == (name in expected) for name in "abcd")


MEASURE = """
import json, re, sys
from pathlib import Path
from forebay.cache.segment import Segment
from forebay.file_table import FileTable
from forebay.source import Part, SourceFile
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


@pytest.mark.slow
def test_planning_five_million_files_takes_at_most_a_gigabyte(tmp_path) -> None:
    """200 bytes per file; an object for each would take some 350."""
    process = PythonProcess("-c", MEASURE, str(tmp_path))
    out, err = process.communicate(timeout=120)
    assert process.returncode == 0, err
    assert json.loads(out) < 1e9 / 5e6


@pytest.mark.parametrize("touched", [None, 0, 2, 4])
def test_files_that_were_touched_after_they_were_written_keep_both_times(touched):
    times = [(1_700_000_000_000_000_000 + at, 1_700_000_000_000_000_000 + at + 5 * (at == touched)) for at in range(5)]
    files = [SourceFile(f"{at}.jpg", 1, mtime, ctime_ns=ctime, inode=7) for at, (mtime, ctime) in enumerate(times)]
    assert list(FileTable.of(files)) == files
