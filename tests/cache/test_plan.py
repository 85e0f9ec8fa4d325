"""The plan: which slice makes which chunk, known before any work, append-only, believed only while it is sound."""

import gzip
import json
import random
import shutil
from pathlib import Path

import pytest
from tests.helpers.builders import chunk_digests, every_file
from tests.helpers.cache_files import segment_of
from tests.helpers.obedient_recipes import NOTES, ObedientRecipe, order_line, orders, write_orders
from tests.helpers.processes import PythonProcess

import forebay as fb
from forebay.cache.plan import Plan, load_plan
from forebay.cache.segment import Segment
from forebay.errors import Damaged, IndexCorrupt
from forebay.source import Part, SourceFile
from forebay.store import LocalStore, MemoryStore

MIB = 1 << 20

COUNT_READ_BYTES = """
import json, sys
from pathlib import Path
import forebay as fb
from forebay.building.listing import SourceListing
from forebay.building.segments import Planner
from forebay.store import MemoryStore

def first_segment(source, recipe):
    return Planner(MemoryStore(), SourceListing(source), recipe, lambda *progress: None, print).first().segment

def read_bytes():
    return int(Path("/proc/self/io").read_text().split()[1])

source, small = fb.sources.lines(sys.argv[1]), fb.sources.lines(sys.argv[3])
recipe = fb.RawRecipe(chunk_bytes=int(sys.argv[2]))
first_segment(small, recipe)  # what is imported late, is by now
before = read_bytes()
segment = first_segment(source, recipe)
print(json.dumps({"read": read_bytes() - before, "chunks": len(segment), "weight": segment.weight}))
"""


def planning(tmp_path: Path, source: Path, chunk_bytes: int) -> dict[str, int]:
    """What planning a source reads, measured by the kernel in a process of its own."""
    (tmp_path / "small.txt").write_bytes(b"small\n")
    (tmp_path / "small.txt.gz").write_bytes(gzip.compress(b"small\n"))
    small = tmp_path / ("small.txt.gz" if source.suffix == ".gz" else "small.txt")
    process = PythonProcess("-c", COUNT_READ_BYTES, str(source), str(chunk_bytes), str(small))
    out, err = process.communicate(timeout=600)
    assert process.returncode == 0, err
    answer: dict[str, int] = json.loads(out)
    return answer


def sparse_lines(path: Path, size: int, every: int) -> Path:
    """A file of `size` bytes that takes no room: zeros, with a newline after each `every`."""
    with open(path, "wb") as file:
        for position in range(every - 1, size, every):
            file.seek(position)
            file.write(b"\n")
        file.truncate(size)
    return path


def test_planning_a_plain_file_reads_only_near_the_cuts(tmp_path):
    source = sparse_lines(tmp_path / "large.txt", 3 << 30, (1 << 18) - 5)
    asked = planning(tmp_path, source, 64 * MIB)
    assert asked["chunks"] > 40
    assert asked["read"] < 64 * MIB


@pytest.mark.slow
def test_planning_a_stream_decompresses_it_once_and_reads_it_once_more_for_its_digest(tmp_path):
    content = random.Random(0).randbytes(24 * MIB).hex().encode()
    lines = b"\n".join(content[start : start + 999] for start in range(0, len(content), 999))
    source = tmp_path / "large.txt.gz"
    source.write_bytes(gzip.compress(lines, 1))
    asked = planning(tmp_path, source, 4 * MIB)
    assert asked["chunks"] > 8
    beginnings = 16 * MIB  # judged and tried, whatever the size of the file
    assert asked["read"] < 2.2 * source.stat().st_size + beginnings


def test_every_slice_says_which_range_of_which_file_and_what_the_file_was(tmp_path):
    first = write_orders(tmp_path / "source/a.txt", orders(3))
    second = write_orders(tmp_path / "source/b.txt", orders(2))
    fb.build(tmp_path / "cache", fb.sources.lines(tmp_path / "source"), ObedientRecipe(rows=4), workers=0)
    plan = load_plan(LocalStore(tmp_path / "cache"))
    assert [[(part.file.path, part.start, part.stop) for part in plan.parts(chunk)] for chunk in range(len(plan))] == [
        [("a.txt", 0, 800)],
        [("a.txt", 800, 1200), ("b.txt", 0, 400)],
        [("b.txt", 400, 800)],
    ]
    for chunk in range(len(plan)):
        for part in plan.parts(chunk):
            status = {"a.txt": first, "b.txt": second}[part.file.path].stat()
            assert (part.file.size, part.file.mtime_ns) == (status.st_size, status.st_mtime_ns)


def test_a_plan_is_made_once_and_only_appended_to(tmp_path):
    file = write_orders(tmp_path / "source.txt", orders(4))
    source = fb.sources.lines(file)
    fb.build(tmp_path / "cache", source, ObedientRecipe(), workers=0)
    first = (tmp_path / "cache/plan/000000.safetensors").read_bytes()
    with open(file, "ab") as more:
        more.write(b"".join(order_line(number, "keep") for number in range(3)))
    fb.build(tmp_path / "cache", source, ObedientRecipe(), workers=0)
    assert [name for name in every_file(tmp_path / "cache") if name.startswith("plan/")] == ["plan/000000.safetensors"]
    fb.update(tmp_path / "cache", source, recipe=ObedientRecipe(), workers=0)
    assert (tmp_path / "cache/plan/000000.safetensors").read_bytes() == first
    plan = load_plan(LocalStore(tmp_path / "cache"))
    assert [(len(segment), segment.first_chunk) for segment in plan.segments] == [(4, 0), (2, 4)]
    assert [(part.start, part.stop) for part in plan.parts(4)] == [(1600, 2000)]


@pytest.mark.parametrize("kind", ["flipped", "truncated", "empty", "garbage"])
def test_a_corrupt_plan_is_refused_and_nothing_is_built_by_it(tmp_path, kind):
    source = fb.sources.lines(write_orders(tmp_path / "source.txt", orders(4)))
    fb.build(tmp_path / "cache", source, ObedientRecipe(), workers=0, end_chunk=1)
    file = tmp_path / "cache/plan/000000.safetensors"
    content = file.read_bytes()
    flipped = content[:-60] + bytes([content[-60] ^ 1]) + content[-59:]
    file.write_bytes({"flipped": flipped, "truncated": content[:-9], "empty": b"", "garbage": b"x" * 9999}[kind])
    before = chunk_digests(tmp_path / "cache")
    with pytest.raises(Damaged, match=r"plan/000000\.safetensors"):
        fb.build(tmp_path / "cache", source, ObedientRecipe(), workers=0)
    assert chunk_digests(tmp_path / "cache") == before


@pytest.mark.parametrize("kind", ["gone", "another"])
def test_a_plan_other_than_the_published_one_is_refused(tmp_path, kind):
    file = write_orders(tmp_path / "source.txt", orders(4))
    source = fb.sources.lines(file)
    fb.build(tmp_path / "cache", source, ObedientRecipe(), workers=0, end_chunk=1)
    with open(file, "ab") as more:
        more.write(order_line(9, "keep"))
    if kind == "gone":
        (tmp_path / "cache/plan/000000.safetensors").unlink()
    else:
        fb.build(tmp_path / "other", source, ObedientRecipe(), workers=0)
        shutil.copy(tmp_path / "other/plan/000000.safetensors", tmp_path / "cache/plan/000000.safetensors")
    with pytest.raises(IndexCorrupt, match=r"(?s)plan/000000\.safetensors.*repair"):
        fb.build(tmp_path / "cache", source, ObedientRecipe(), workers=0)


@pytest.mark.parametrize("verb", [fb.build, fb.update])
def test_an_unlisted_segment_of_another_cache_is_rejected_before_anything_is_written(tmp_path, verb):
    root, recipe = tmp_path / "cache", ObedientRecipe()
    fb.build(root, fb.sources.lines(write_orders(tmp_path / "source.txt", orders(4))), recipe, workers=0)
    other = fb.sources.lines(write_orders(tmp_path / "other.txt", orders(7)[3:]))
    fb.build(tmp_path / "other", other, recipe, workers=0)
    shutil.rmtree(root / "generations")
    shutil.copy(tmp_path / "other/plan/000000.safetensors", root / "plan/000000.safetensors")
    before = (every_file(root), chunk_digests(root))
    with pytest.raises(IndexCorrupt, match=r"plan/000000\.safetensors.*of another cache"):
        verb(root, other, recipe=recipe, workers=0)
    assert (every_file(root), chunk_digests(root)) == before


@pytest.mark.parametrize("has_generation", [False, True])
def test_repair_plans_again_what_another_cache_planned(tmp_path, has_generation):
    root, recipe = tmp_path / "cache", ObedientRecipe()
    source = fb.sources.lines(write_orders(tmp_path / "source.txt", orders(4)))
    fb.build(root, source, recipe, workers=0)
    before, digest = chunk_digests(root), load_plan(LocalStore(root)).last_digest
    other = fb.sources.lines(write_orders(tmp_path / "other.txt", orders(7)[3:]))
    fb.build(tmp_path / "other", other, recipe, workers=0)
    if not has_generation:
        shutil.rmtree(root / "generations")
    shutil.copy(tmp_path / "other/plan/000000.safetensors", root / "plan/000000.safetensors")
    fb.repair(root, source=source, recipe=recipe, workers=0)
    assert (chunk_digests(root), load_plan(LocalStore(root)).last_digest) == (before, digest)
    assert fb.verify(root).sound


def segment(number: int, first_chunk: int) -> Segment:
    file = SourceFile("a", 9, 1)
    return segment_of([[Part(file, 0, 9)]], number=number, first_chunk=first_chunk, source={"kind": "x"}, weight=9)


def test_a_segment_that_does_not_continue_the_plan_is_refused():
    store = MemoryStore()
    store.create("plan/000000.safetensors", segment(0, 0).encode())
    store.create("plan/000001.safetensors", segment(1, 7).encode())
    with pytest.raises(IndexCorrupt, match="does not continue the plan at chunk 1"):
        load_plan(store)


def test_a_segment_reads_back_as_it_was(tmp_path):
    files = [
        SourceFile("a", 2**40, -5, "etag", False, None),
        SourceFile("b/\udce9ü.gz", 7, 2**62, "", True, 2**64 - 1),
    ]
    chunks = [[Part(files[0], 0, 2**39)], [Part(files[0], 2**39, 2**40), Part(files[1], 0, 3)], [Part(files[1], 3, 70)]]
    made = segment_of(chunks, number=0, first_chunk=0, source={"kind": "x", "root": "/"}, weight=2**39)
    store = LocalStore(tmp_path)
    store.create("plan/000000.safetensors", made.encode())
    plan = load_plan(store)
    assert [plan.parts(chunk) for chunk in range(3)] == chunks
    assert plan.files == {file.path: file for file in files}
    assert plan.streams() == {1: "b/\udce9ü.gz", 2: "b/\udce9ü.gz"}
    assert plan.ends() == {"a": 2**40, "b/\udce9ü.gz": 70}
    assert list(plan.parts_of_file("b/\udce9ü.gz")) == [(1, 1, 0, 3), (2, 0, 3, 70)]
    with pytest.raises(Damaged, match="is not in the plan"):
        plan.parts(3)
    assert isinstance(plan, Plan)
    assert plan.weight == 2**39


def test_two_streams_are_read_at_once_each_by_its_worker(tmp_path, monkeypatch):
    notes = tmp_path / "notes"
    notes.mkdir()
    monkeypatch.setenv(NOTES, str(notes))
    for name in ("a", "b"):
        content = write_orders(tmp_path / "plain", orders(10)).read_bytes()
        (tmp_path / "source").mkdir(exist_ok=True)
        (tmp_path / f"source/{name}.gz").write_bytes(gzip.compress(content))
    fb.build(tmp_path / "cache", fb.sources.lines(tmp_path / "source"), ObedientRecipe(seconds=0.05), workers=3)
    pairs = [line.split() for line in (notes / "makes").read_text().splitlines()]
    readers = {name: {pid for pid, sample in pairs if sample.startswith(name)} for name in ("a.gz", "b.gz")}
    assert [len(readers["a.gz"]), len(readers["b.gz"])] == [1, 1]
    assert readers["a.gz"] != readers["b.gz"]


def test_a_recipe_that_fails_on_all_it_is_tried_on_is_refused_and_leaves_nothing_behind(tmp_path):
    source = fb.sources.lines(write_orders(tmp_path / "source.txt", orders(4)))
    with pytest.raises(fb.errors.RecipeInvalid, match="not today"):
        fb.build(tmp_path / "cache", source, Grumpy(), workers=0)
    assert not (tmp_path / "cache").exists()


class Grumpy(fb.RawRecipe, frozen=True):
    def make(self, samples):
        raise ValueError("not today")
