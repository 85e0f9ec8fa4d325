"""A large manifest is indexed once for all processes of a machine, and by nobody else's index."""

import json
import os
import re
import subprocess
import sys
import tempfile
import time
from pathlib import Path

import numpy as np
import pytest
import xxhash
from tests.builders import script_environment

import forebay as fb
from forebay.sources import manifests
from forebay.sources.manifests import KEPT_SECONDS, open_lines, shared_arrays


@pytest.fixture(autouse=True)
def folder(tmp_path: Path, monkeypatch) -> Path:
    """Where the arrays are: the temporary folder of this test."""
    monkeypatch.setattr(tempfile, "tempdir", str(tmp_path))
    monkeypatch.setattr(manifests, "SHARED_BYTES", 1)
    open_lines.cache_clear()
    return tmp_path / f"forebay-{os.getuid()}"


def test_arrays_are_made_once_and_mapped_by_others(folder):
    made = [np.arange(7, dtype=np.uint32), np.arange(3, dtype=np.uint64)]
    first = shared_arrays("these", (np.uint32, np.uint64), lambda: made)
    again = shared_arrays("these", (np.uint32, np.uint64), lambda: pytest.fail("they are there"))
    for one in (first, again):
        assert [values.tolist() for values in one] == [values.tolist() for values in made]
    assert len(list(folder.iterdir())) == 1
    del first, one
    assert list(folder.iterdir()) == [], "who made it removes it"
    assert again[0].tolist() == list(range(7)), "a map stays"


@pytest.mark.parametrize("damage", [lambda text: b"", lambda text: text[:-9] + text[-8:], lambda text: text[::-1]])
def test_a_damaged_file_is_made_again(folder, damage):
    kept = shared_arrays("these", (np.uint32,), lambda: [np.arange(9, dtype=np.uint32)])
    (path,) = folder.iterdir()
    path.write_bytes(damage(path.read_bytes()))
    (again,) = shared_arrays("these", (np.uint32,), lambda: [np.arange(2, dtype=np.uint32)])
    assert again.tolist() == [0, 1]
    del kept


def test_what_nobody_has_used_for_a_day_is_removed_when_arrays_are_made(folder):
    used, left = (shared_arrays(name, (np.uint32,), lambda: [np.arange(9, dtype=np.uint32)]) for name in ("a", "b"))
    (folder / "notes.txt").write_text("of somebody else")
    (folder / "tmpabcdef12").write_text("of a process that was killed")
    for path in folder.iterdir():
        os.utime(path, (0, time.time() - KEPT_SECONDS - 60))
    again = shared_arrays("a", (np.uint32,), lambda: pytest.fail("it is there, however old"))
    made = shared_arrays("c", (np.uint32,), lambda: [np.arange(9, dtype=np.uint32)])
    names = {xxhash.xxh3_128_hexdigest(name) for name in (b"a", b"c")}
    assert {path.stem for path in folder.iterdir()} == names | {"notes"}
    assert used[0].tolist() == left[0].tolist() == again[0].tolist() == made[0].tolist(), "a map stays"


def test_a_folder_that_others_can_write_to_is_not_used(folder):
    folder.mkdir()
    folder.chmod(0o777)
    (one,) = shared_arrays("these", (np.uint32,), lambda: [np.arange(2, dtype=np.uint32)])
    assert one.tolist() == [0, 1]
    assert list(folder.iterdir()) == []


def test_another_process_reads_a_manifest_by_the_index_of_the_first(tmp_path, folder):
    lines = [json.dumps({"path": f"{number % 40}.png", "tags": [str(number)]}) for number in range(60)]
    (tmp_path / "list.jsonl").write_text("\n".join([*lines, "", "not json"]))
    for number in range(30):
        (tmp_path / f"{number}.png").write_bytes(b"png")
    source = fb.sources.image_manifest(tmp_path / "list.jsonl")
    files = [(file.path, file.etag) for file in source.files()]
    (shared,) = folder.iterdir()
    script = f"""
import tempfile; tempfile.tempdir = {str(tmp_path)!r}
from forebay.sources import manifests
import forebay as fb
manifests.SHARED_BYTES = 1
manifests.ImageLines._indexed = None  # it would fail
print([(file.path, file.etag) for file in fb.sources.image_manifest({str(tmp_path / "list.jsonl")!r}).files()])
"""
    ended = subprocess.run([sys.executable, "-c", script], env=script_environment(), capture_output=True, text=True)
    assert ended.stdout.strip() == str(files), ended.stderr
    assert shared.exists(), "only who made it removes it"
    os.utime(tmp_path / "list.jsonl", ns=(1, 1))
    open_lines.cache_clear()
    assert not shared.exists()
    source.files()
    (other,) = folder.iterdir()
    assert other != shared
    open_lines.cache_clear()


def resident_bytes(path: Path) -> int:
    """The memory that the pages of a mapped file take in this process."""
    maps, found, is_here = Path("/proc/self/smaps").read_text().splitlines(), 0, False
    for line in maps:
        if re.match(r"[0-9a-f]+-[0-9a-f]+ ", line):
            is_here = line.endswith(str(path))
        elif is_here and line.startswith("Rss:"):
            found += 1024 * int(line.split()[1])
    return found


@pytest.mark.skipif(sys.platform != "linux", reason="reads /proc")
def test_a_manifest_that_was_listed_keeps_no_memory_of_its_index(tmp_path, folder):
    lines = (f'{{"path": "{number}.jpg"}}\n' for number in range(5000))
    (tmp_path / "list.jsonl").write_text("".join(lines))
    source = fb.sources.image_manifest(tmp_path / "list.jsonl")
    assert len(source.files()) == 5000
    (shared,) = folder.iterdir()
    assert resident_bytes(shared) == 0
    assert source.look("list.jsonl@0").etag.endswith("!not-found")
    assert resident_bytes(shared) > 0, "what is asked for is read again"
    open_lines.cache_clear()
