"""A build computes what is missing and nothing else, and says what stands in its way."""

import gzip
import os
import re
import shutil
import subprocess
import sys
import weakref
from pathlib import Path
from typing import ClassVar

import pytest
from tests import layer_recipes
from tests.builders import (
    chunk_count,
    chunk_digests,
    ending,
    every_file,
    patient,
    script_environment,
    start_builder,
    wait_until,
)
from tests.distinct import DistinctRecipe
from tests.forged import put_together, take_apart
from tests.layer_recipes import LineRecipe, flip, number_cache, tree
from tests.recipes import NOTES, LengthLayer, ObedientRecipe, makes, order_line, orders, rewrite, write_orders

import forebay as fb
from forebay.building.chunk_maker import ChunkSamples
from forebay.errors import (
    BuildFailed,
    BuildStopped,
    MemoryTooSmall,
    RangeInvalid,
    SourceChanged,
    SourceMoving,
    TooManyFailures,
)
from forebay.store.base import Owner, this_host, this_process


@pytest.fixture
def notes(tmp_path, monkeypatch) -> Path:
    folder = tmp_path / "notes"
    folder.mkdir()
    monkeypatch.setenv(NOTES, str(folder))
    return folder


@pytest.fixture
def file(tmp_path) -> Path:
    return write_orders(tmp_path / "source.txt", orders(8))


def build(root: Path, file: Path, **options):
    return fb.build(
        root, fb.sources.lines(file), ObedientRecipe(), **{"workers": 0, "on_progress": patient()} | options
    )


def stop_after(chunks: int):
    def listen(progress: fb.Progress) -> None:
        if progress.phase == "building" and progress.done >= chunks:
            raise KeyboardInterrupt

    return listen


def made(notes: Path) -> list[int]:
    return [chunk for _, chunk in makes(notes)]


def test_building_again_makes_nothing_and_publishes_nothing(tmp_path, file, notes):
    first = build(tmp_path / "cache", file)
    before = {name: (tmp_path / "cache" / name).read_bytes() for name in every_file(tmp_path / "cache")}
    second = build(tmp_path / "cache", file)
    assert (first.made, first.present, first.rows) == (8, 0, 16)
    assert (second.made, second.present, second.generation) == (0, 8, first.generation)
    assert made(notes) == list(range(8))
    assert {name: (tmp_path / "cache" / name).read_bytes() for name in every_file(tmp_path / "cache")} == before


def test_inverse_goes_from_the_far_end(tmp_path, file, notes):
    build(tmp_path / "cache", file, mode="inverse")
    assert made(notes) == list(range(8))[::-1]


def test_inverse_first_puts_right_what_is_there_then_fills_gaps(tmp_path, file, notes):
    build(tmp_path / "cache", file, start_chunk=2, end_chunk=4)
    before = chunk_digests(tmp_path / "cache")
    damaged = tmp_path / "cache/layers/obedient/000003.safetensors"
    content = bytearray(damaged.read_bytes())
    content[-1] ^= 1
    damaged.write_bytes(content)
    (notes / "makes").unlink()
    build(tmp_path / "cache", file, mode="inverse")
    assert made(notes) == [3, 7, 6, 5, 1, 0]
    assert chunk_digests(tmp_path / "cache").items() >= before.items()


def test_a_range_is_inclusive_and_the_rest_can_follow(tmp_path, file, notes):
    report = build(tmp_path / "cache", file, start_chunk=2, end_chunk=4)
    assert (report.chunks, report.made) == (3, 3)
    assert made(notes) == [2, 3, 4]
    assert fb.gaps(tmp_path / "cache")[0].missing == (0, 1, 5, 6, 7)
    assert len(fb.open_cache(tmp_path / "cache")) == 6
    assert build(tmp_path / "cache", file).made == 5


def test_an_interrupted_build_publishes_what_it_made_releases_its_claims_and_goes_on_from_there(tmp_path, file, notes):
    with pytest.raises(BuildStopped, match=r"3 of 8 chunks.*run the same command to resume") as caught:
        build(tmp_path / "cache", file, on_progress=stop_after(3))
    assert isinstance(caught.value, KeyboardInterrupt)
    assert len(fb.open_cache(tmp_path / "cache")) == 6
    assert fb.status(tmp_path / "cache").claims == ()
    assert build(tmp_path / "cache", file).made == 5
    assert made(notes) == list(range(8))


def test_chunks_of_a_killed_build_are_adopted(tmp_path, notes):
    file = write_orders(tmp_path / "source.txt", orders(60))
    root = tmp_path / "cache"
    builder = start_builder(root, file, notes, {"seconds": 0.02}, workers=1)
    wait_until(lambda: chunk_count(root) >= 5)
    builder.kill()
    builder.communicate()
    present = chunk_count(root)
    assert not list(root.glob("generations/*"))
    report = fb.build(root, fb.sources.lines(file), ObedientRecipe(seconds=0.02), workers=0)
    assert (report.made, report.present, report.rows) == (60 - present, present, 120)
    assert len(made(notes)) <= 61
    assert fb.verify(root, full=True).sound


def test_what_a_dead_writer_left_is_gone_after_a_build_and_what_a_live_one_writes_is_not(tmp_path, file):
    folder = tmp_path / "cache/layers/obedient"
    folder.mkdir(parents=True)
    dead = folder / f".tmp-{Owner(this_host(), os.getpid(), 1)}-0123abcd"
    live = folder / f".tmp-{this_process()}-0123abcd"
    for path in (dead, live):
        path.write_bytes(b"half a chunk")
    build(tmp_path / "cache", file)
    assert (dead.exists(), live.exists()) == (False, True)


@pytest.mark.parametrize("garbage", [b"", b"garbage", bytes(10_000)], ids=["empty", "short", "zeros"])
def test_an_unlisted_file_that_is_no_sound_chunk_is_removed_and_made(tmp_path, file, garbage):
    build(tmp_path / "other", file)
    build(tmp_path / "cache", file, end_chunk=3)
    (tmp_path / "cache/layers/obedient/000005.safetensors").write_bytes(garbage)
    assert build(tmp_path / "cache", file).made == 4
    assert chunk_digests(tmp_path / "cache") == chunk_digests(tmp_path / "other")


def test_an_unlisted_chunk_with_one_wrong_byte_is_removed_and_made(tmp_path, file):
    build(tmp_path / "other", file)
    build(tmp_path / "cache", file, end_chunk=3)
    content = bytearray((tmp_path / "other/layers/obedient/000005.safetensors").read_bytes())
    content[-3] ^= 64
    (tmp_path / "cache/layers/obedient/000005.safetensors").write_bytes(content)
    build(tmp_path / "cache", file)
    assert chunk_digests(tmp_path / "cache") == chunk_digests(tmp_path / "other")


def test_a_published_chunk_that_lost_its_file_is_made_again_in_place(tmp_path, file, notes):
    build(tmp_path / "cache", file)
    before = chunk_digests(tmp_path / "cache")
    (tmp_path / "cache/layers/obedient/000005.safetensors").unlink()
    report = build(tmp_path / "cache", file)
    assert "1 published chunk(s) had lost their files and were made again" in report.notes
    assert chunk_digests(tmp_path / "cache") == before


def test_a_published_chunk_that_lost_its_file_and_cannot_be_made_again_is_an_error(tmp_path, notes):
    file = write_orders(tmp_path / "source.txt", orders(4))
    build(tmp_path / "cache", file)
    (tmp_path / "cache/layers/obedient/000002.safetensors").unlink()
    stamp = file.stat()
    write_orders(file, orders(4, c2="raise ValueError 9"))
    os.utime(file, ns=(stamp.st_atime_ns, stamp.st_mtime_ns))
    with pytest.raises(BuildFailed, match=r"chunk 2: ValueError"):
        build(tmp_path / "cache", file)


def test_what_another_builder_gave_up_during_the_run_is_not_waited_for(tmp_path, notes):
    file = write_orders(tmp_path / "source.txt", orders(30, c0="raise ValueError 99"))
    builders = [
        start_builder(tmp_path / "cache", file, notes, {"seconds": 0.05}, workers=1, lease_seconds=2) for _ in range(2)
    ]
    endings = [ending(builder) for builder in builders]
    assert "BuildFailed" in {one.get("error") for one in endings}
    assert all("chunk 0: ValueError" in one["text"] for one in endings if "error" in one)
    assert fb.gaps(tmp_path / "cache")[0].missing == (0,)


def test_too_many_failed_samples_stop_the_build(tmp_path):
    (tmp_path / "source.txt").write_bytes(b"short\n" * 50 + b"much too long a line\n" * 3)
    recipe = fb.RawRecipe(chunk_bytes=100, max_sample_bytes=10)
    source = fb.sources.lines(tmp_path / "source.txt")
    for _ in range(2):  # nor does it help to ask again
        with pytest.raises(TooManyFailures, match="the limit is 2"):
            fb.build(tmp_path / "cache", source, recipe, workers=0, max_failures=2)
    assert fb.build(tmp_path / "cache", source, recipe, workers=0, max_failures=3).failures == 3
    with pytest.raises(TooManyFailures, match=r"3 of 53 samples failed; the limit is 5\.00%"):
        fb.build(tmp_path / "cache", source, recipe, workers=0, max_failures=0.05)


def test_a_share_of_failures_is_one_of_all_samples_and_not_of_the_first_chunk(tmp_path):
    (tmp_path / "source.txt").write_bytes(b"much too long a line\n" * 3 + b"short\n" * 97)
    recipe = fb.RawRecipe(chunk_bytes=50, max_sample_bytes=10)
    source = fb.sources.lines(tmp_path / "source.txt")
    assert fb.build(tmp_path / "enough", source, recipe, workers=0, max_failures=0.04).failures == 3
    with pytest.raises(TooManyFailures, match=r"the limit is 2\.00%"):
        fb.build(tmp_path / "cache", source, recipe, workers=0, max_failures=0.02)
    assert fb.gaps(tmp_path / "cache")[0].missing, "it was told at the end only"


def test_progress_ends_with_everything_done(tmp_path, file):
    seen: list[fb.Progress] = []
    build(tmp_path / "cache", file, on_progress=seen.append)
    building = [progress for progress in seen if progress.phase == "building"]
    assert [progress.done for progress in building] == list(range(1, 9))
    assert {progress.total for progress in building} == {8}
    assert building[-1].rows == 16
    assert building[-1].read_bytes == file.stat().st_size
    chunks = (tmp_path / "cache/layers/obedient").glob("0*.safetensors")
    assert building[-1].written_bytes == sum(path.stat().st_size for path in chunks)


# The source, before and while it is read.


def test_a_chunk_that_runs_for_long_is_named_in_a_note(tmp_path, monkeypatch):
    monkeypatch.setattr("forebay.building.builder.SLOW_SECONDS", 0.2)
    source, seen = write_orders(tmp_path / "orders.txt", ["ok", "ok"]), list[fb.Progress]()
    fb.build(
        tmp_path / "cache", fb.sources.lines(source), ObedientRecipe(seconds=2), workers=1, on_progress=seen.append
    )
    notes = [progress.note for progress in seen if progress.note]
    assert re.fullmatch(r"chunk 0 has been running for \d+ s; Ctrl-C stops the build safely", notes[0])


def test_a_file_that_was_only_touched_is_still_the_same(tmp_path, file):
    build(tmp_path / "cache", file, end_chunk=3)
    os.utime(file, (1, 1))
    report = build(tmp_path / "cache", file)
    assert report.made == 4
    build(tmp_path / "other", file)
    assert chunk_digests(tmp_path / "cache") == chunk_digests(tmp_path / "other")


@pytest.mark.parametrize("published", [True, False], ids=["listed", "not-yet-listed"])
@pytest.mark.parametrize("same_size", [True, False])
def test_a_file_with_other_content_is_named_and_nothing_is_made_of_it(tmp_path, file, same_size, published):
    root = tmp_path / "cache"
    build(root, file, end_chunk=3)
    if not published:  # as a killed build leaves it
        shutil.rmtree(root / "generations")
    before = chunk_digests(root)
    changed = bytearray(file.read_bytes())
    changed[350] ^= 1
    file.write_bytes(changed if same_size else changed[:-200])
    os.utime(file, (1, 1))
    with pytest.raises(SourceChanged, match=r"source\.txt") as caught:
        build(root, file)
    assert set(caught.value.files) == {"source.txt"}
    assert chunk_digests(root) == before


def test_a_stream_with_other_content_is_named_even_where_nothing_was_made_of_it(tmp_path):
    file = tmp_path / "source.txt.gz"
    file.write_bytes(zipped(orders(8)))
    build(tmp_path / "cache", file, end_chunk=0)
    file.write_bytes(zipped(orders(8, c7="keep this")))
    os.utime(file, (1, 1))
    with pytest.raises(SourceChanged, match=r"source\.txt\.gz"):
        build(tmp_path / "cache", file)


def test_a_file_that_grew_is_reported_and_what_was_planned_is_built(tmp_path, file):
    build(tmp_path / "cache", file, end_chunk=3)
    with open(file, "ab") as more:
        more.write(order_line(99, "keep"))
    report = build(tmp_path / "cache", file)
    assert report.made == 4
    assert report.notes == ("1 file(s) of the source grew; `forebay grow` appends what is new",)


def test_a_file_that_came_later_is_reported(tmp_path):
    write_orders(tmp_path / "source/a.txt", orders(4))
    build(tmp_path / "cache", tmp_path / "source")
    write_orders(tmp_path / "source/b.txt", orders(4))
    report = build(tmp_path / "cache", tmp_path / "source")
    assert report.notes == ("1 file(s) of the source are not in the plan; `forebay grow` appends them",)


@pytest.mark.parametrize("workers", [0, 1])
@pytest.mark.parametrize("change", ["truncate", "rewrite"])
def test_a_file_that_changes_while_it_is_read_leaves_no_chunk(tmp_path, notes, workers, change):
    file, root = tmp_path / "source.txt", tmp_path / "cache"
    write_orders(file, orders(8, c2=f"{change} {file} 1"))
    for _ in range(2):  # nor does the same command go on with it
        with pytest.raises(SourceChanged, match=r"source\.txt.*forebay refresh"):
            build(root, file, workers=workers)
    assert not (root / "layers/obedient/000002.safetensors").exists()
    assert fb.status(root, source=fb.sources.lines(file)).claims == ()
    assert not fb.verify(root, source=fb.sources.lines(file), full=True).sound
    fb.refresh(root, source=fb.sources.lines(file), recipes={"obedient": ObedientRecipe()}, workers=0)
    build(root, file, workers=workers)
    assert fb.verify(root, source=fb.sources.lines(file), full=True).sound
    cache = fb.open_cache(root)
    rows = cache.read(range(len(cache)), ["data"])["data"]
    assert [row.tobytes() for row in rows] == file.read_bytes().splitlines()


@pytest.mark.parametrize("workers", [0, 1])
def test_a_build_continues_when_a_file_is_appended_to_while_it_is_read(tmp_path, notes, workers):
    file, root = tmp_path / "source.txt", tmp_path / "cache"
    write_orders(file, orders(8, c2=f"append {file} 1", c5=f"append {file} 1"))
    report = build(root, file, workers=workers)
    assert (report.made, report.rows) == (8, 16)
    assert fb.verify(root, source=fb.sources.lines(file), full=True).sound
    assert fb.grow(root, fb.sources.lines(file), recipe=ObedientRecipe(), workers=0).rows == 18


def test_a_file_that_never_stops_changing_ends_the_build_with_a_sentence(tmp_path, notes):
    file = tmp_path / "source.txt"
    write_orders(file, orders(8, c2=f"append {file} 99"))
    with pytest.raises(SourceMoving, match=r"'source\.txt' kept changing.*run the same command again"):
        build(tmp_path / "cache", file, workers=0)
    assert fb.status(tmp_path / "cache", source=fb.sources.lines(file)).claims == ()


def test_a_file_that_is_rewritten_before_any_of_it_was_read_is_not_cut_inside_of_its_lines(tmp_path):
    file, root = tmp_path / "source.txt", tmp_path / "cache"
    write_orders(file, orders(8))
    with pytest.raises(KeyboardInterrupt):
        build(root, file, on_progress=_interrupt)
    for path in (root / "layers/obedient").glob("0*.safetensors"):
        path.unlink()
    for path in (root / "generations").glob("*"):
        path.unlink()
    rewrite(file)
    with pytest.raises(SourceChanged, match=r"nothing is left at .*: build it again as it is now"):
        build(root, file)
    build(root, file)
    rows = fb.open_cache(root).read(range(len(fb.open_cache(root))), ["data"])["data"]
    assert [row.tobytes() for row in rows] == file.read_bytes().splitlines()


@pytest.mark.parametrize("workers", [0, 1])
def test_a_memory_limit_is_looked_at_before_a_build_of_one_chunk(tmp_path, notes, workers):
    write_orders(tmp_path / "source.txt", orders(1))
    with pytest.raises(MemoryTooSmall, match="raise --memory-limit"):
        build(tmp_path / "cache", tmp_path / "source.txt", workers=workers, memory_limit=1_000_000)
    assert makes(notes) == []


class GreedyRecipe(ObedientRecipe, frozen=True, kw_only=True):
    """Rows that take 128 MiB of memory to make, and longer than they are needed."""

    held: ClassVar[list[bytearray]] = []

    def make(self, samples):
        if isinstance(samples, ChunkSamples):
            self.held.append(bytearray(b"x") * (128 << 20))
        return super().make(samples)


WITH_LITTLE_MEMORY = """
import sys
import psutil
from tests.building.test_build import GreedyRecipe, ObedientRecipe
import forebay as fb
from forebay.errors import MemoryTooSmall

bytearray(b"x") * (int(sys.argv[3]) << 20)
limit = psutil.Process().memory_info().rss + (64 << 20)
try:
    recipe = GreedyRecipe() if sys.argv[4] == "greedy" else ObedientRecipe()
    report = fb.build(sys.argv[1], fb.sources.lines(sys.argv[2]), recipe, workers=0, memory_limit=limit)
    print(*report.notes)
    print(any(f"the memory limit of {limit:,} bytes was passed" in note for note in report.notes))
except MemoryTooSmall as error:
    print(type(error).__name__)
"""


@pytest.mark.parametrize("before", [0, 400])  # MiB that the process had taken and given back
@pytest.mark.parametrize(
    ("recipe", "chunks", "said"), [("greedy", 1, "True"), ("greedy", 3, "MemoryTooSmall"), ("modest", 3, "False")]
)
def test_a_memory_limit_holds_in_this_process_and_is_never_passed_without_a_word(
    tmp_path, recipe, chunks, said, before
):
    """In a fresh process: one that ran other tests may give back more memory than this one takes."""
    file = write_orders(tmp_path / "source.txt", orders(chunks))
    command = [sys.executable, "-c", WITH_LITTLE_MEMORY, str(tmp_path / "cache"), str(file), str(before), recipe]
    run = subprocess.run(command, env=script_environment(), capture_output=True, text=True, check=False)
    assert run.stdout.split()[-1:] == [said], run.stdout + run.stderr


def test_a_range_beyond_the_plan_is_refused_before_anything_is_made(tmp_path, notes):
    write_orders(tmp_path / "source.txt", orders(3))
    with pytest.raises(RangeInvalid, match=r"start_chunk 3 is beyond the plan.* has 3 chunks"):
        build(tmp_path / "cache", tmp_path / "source.txt", start_chunk=3)
    assert makes(notes) == []
    assert not (tmp_path / "cache").exists()


@pytest.mark.parametrize("recipe", [ObedientRecipe(), DistinctRecipe()])
def test_a_range_beyond_the_plan_leaves_a_new_root_free_for_another_source_and_recipe(tmp_path, recipe):
    source = fb.sources.lines(write_orders(tmp_path / "source.txt", orders(3)))
    (tmp_path / "cache").mkdir()
    (tmp_path / "cache" / "README").write_text("mine")
    with pytest.raises(RangeInvalid):
        fb.build(tmp_path / "cache", source, recipe, workers=0, start_chunk=99)
    assert list(tree(tmp_path / "cache")) == ["README"]
    (tmp_path / "other.txt").write_text("other\n" * 9)
    fb.build(tmp_path / "cache", fb.sources.lines(tmp_path / "other.txt"), fb.RawRecipe(), workers=0)
    assert len(fb.open_cache(tmp_path / "cache")) == 9


def test_a_range_beyond_the_plan_repairs_nothing_and_begins_no_layer(tmp_path):
    root = number_cache(tmp_path)
    flip(next(root.glob("layers/*/000000.safetensors")), 100)
    before = tree(root)
    with pytest.raises(RangeInvalid):
        fb.build(root, None, layer_recipes.LengthLayer(), workers=0, start_chunk=99)
    with pytest.raises(RangeInvalid):
        fb.build(root, fb.sources.lines(tmp_path / "raw"), LineRecipe(), workers=0, mode="inverse", start_chunk=99)
    assert tree(root) == before


@pytest.mark.parametrize("range_", [{"start_chunk": 2, "end_chunk": 1}, {"start_chunk": -1}, {"end_chunk": -1}])
def test_a_range_that_no_plan_can_have_is_refused_before_the_source_is_read(tmp_path, range_):
    with pytest.raises(ValueError, match=r"start_chunk|end_chunk"):
        build(tmp_path / "cache", tmp_path / "absent.txt", **range_)
    assert not (tmp_path / "cache").exists()


def test_a_disk_that_is_too_small_is_said_before_the_work_starts(tmp_path):
    class Small(fb.LocalStore):
        def free_bytes(self):
            return 300

    seen = []
    source = fb.sources.lines(write_orders(tmp_path / "source.txt", orders(8)))
    fb.build(Small(tmp_path / "cache"), source, ObedientRecipe(), workers=0, on_progress=seen.append)
    assert "bytes are needed" in seen[0].note
    assert "300 are free" in seen[0].note


def _interrupt(progress):
    if progress.phase == "building":
        raise KeyboardInterrupt


def test_a_file_that_is_gone_fails_only_the_chunks_that_need_it(tmp_path):
    write_orders(tmp_path / "source/a.txt", orders(3))
    write_orders(tmp_path / "source/b.txt", orders(1))
    build(tmp_path / "cache", tmp_path / "source", end_chunk=0)
    (tmp_path / "source/b.txt").unlink()
    with pytest.raises(BuildFailed, match="FileNotFoundError") as caught:
        build(tmp_path / "cache", tmp_path / "source")
    assert set(caught.value.failed) == {3}


def test_a_layer_over_rows_that_are_there_needs_no_source(tmp_path, file):
    build(tmp_path / "cache", file, end_chunk=3)
    file.unlink()
    report = fb.build(tmp_path / "cache", None, LengthLayer(), workers=0)
    assert (report.made, report.rows, report.failures) == (4, 8, 4)


def zipped(lines: list[str]) -> bytes:
    return gzip.compress(b"".join(order_line(number, order) for number, order in enumerate(lines)), mtime=0)


@pytest.mark.parametrize(
    ("options", "problem"),
    [
        ({"recipe": 224}, "a recipe is needed, for instance .* not int"),
        ({"source": "photos"}, "a source is needed, for instance .* not str"),
        ({"workers": -1}, r"workers must be 0 \(this process\), a positive number, or None \(one per core\); got -1"),
        ({"workers": "2"}, r"or None \(one per core\); got '2'"),
    ],
)
def test_what_is_given_by_mistake_is_refused_before_anything_is_written(tmp_path, file, options, problem):
    given = {"source": fb.sources.lines(file), "recipe": ObedientRecipe()} | options
    with pytest.raises((TypeError, ValueError), match=problem):
        fb.build(tmp_path / "cache", **given)
    with pytest.raises((TypeError, ValueError), match=problem):
        fb.estimate(**given)
    assert not (tmp_path / "cache").exists()


@pytest.mark.parametrize("progress", ["yes", 1, []])
def test_progress_that_is_neither_a_choice_nor_a_function_is_refused(tmp_path, file, progress):
    with pytest.raises(TypeError, match=r"progress must be True, False, None or a function \(got "):
        fb.build(tmp_path / "cache", fb.sources.lines(file), ObedientRecipe(), progress=progress)
    assert not (tmp_path / "cache").exists()


@pytest.mark.parametrize("what", ["garbage", "empty", "folder", "dangling link", "another chunk", "huge statistic"])
def test_an_unlisted_file_that_is_no_sound_chunk_does_not_stop_a_build(tmp_path, what):
    source = fb.sources.lines(write_orders(tmp_path / "source.txt", orders(4)))
    root = tmp_path / "cache"
    fb.build(root, source, ObedientRecipe(), workers=0, end_chunk=1)
    path = root / "layers/obedient/000002.safetensors"
    match what:
        case "folder":
            path.mkdir()
            (path / "mine").write_text("mine")
        case "dangling link":
            path.symlink_to("nowhere")
        case "another chunk":
            path.write_bytes((root / "layers/obedient/000001.safetensors").read_bytes())
        case "huge statistic":
            path.write_bytes(chunk_with_a_huge_statistic(root))
        case _:
            path.write_bytes(b"" if what == "empty" else b"garbage" * 1000)
    report = fb.build(root, source, ObedientRecipe(), workers=0)
    assert report.rows == 8
    assert fb.verify(root, full=True).sound
    assert fb.status(root, source=source).complete
    ids = [bytes(row["id"]) for row in map(fb.open_cache(root).__getitem__, range(8))]
    fb.build(tmp_path / "alone", source, ObedientRecipe(), workers=0)
    assert ids == [bytes(row["id"]) for row in map(fb.open_cache(tmp_path / "alone").__getitem__, range(8))]
    if what == "folder":
        assert (path / "mine").read_text() == "mine"
    assert fb.build(root, source, ObedientRecipe(), workers=0).made == 0


def chunk_with_a_huge_statistic(root: Path) -> bytes:
    """Chunk 2 as another writer may have written it: it proves itself, and no table of 64-bit numbers can list it."""
    draft = take_apart((root / "layers/obedient/000001.safetensors").read_bytes())
    draft.metadata |= {"chunk": 2, "statistics": {"bytes": 1 << 70}}
    return put_together(draft)[0]


def test_a_chunk_of_another_source_that_appears_during_a_build_is_not_counted_as_made(tmp_path):
    sources = {name: tmp_path / f"{name}.txt" for name in ("ours", "other")}
    write_orders(sources["ours"], orders(6))
    write_orders(sources["other"], orders(6, c4="keep it"))
    build(tmp_path / "other", sources["other"], workers=0)
    strange = tmp_path / "cache/layers/obedient/000004.safetensors"

    def listen(progress):
        if progress.phase == "building" and not strange.exists():
            strange.write_bytes((tmp_path / "other/layers/obedient/000004.safetensors").read_bytes())

    with pytest.raises(BuildFailed, match=r"chunk 4.*run the same command again"):
        build(tmp_path / "cache", sources["ours"], workers=0, on_progress=listen)
    assert build(tmp_path / "cache", sources["ours"], workers=0).made == 1
    assert len(fb.open_cache(tmp_path / "cache")) == 12


class Text(str):
    """A text that can be watched."""


class KeepsAll:
    def keeps(self, sample: object) -> bool:
        return True


@pytest.mark.parametrize("duplicates", [None, KeepsAll()])
def test_a_sample_that_was_taken_is_not_held_by_what_reads_the_next(duplicates):
    """It may be a document of 64 MiB, which is 256 MiB as text with one wide character in it."""

    class Texts:
        def read_hashed(self, part, digest):
            yield fb.Failure("first", "bad", "not a text")
            for name in "ab":
                yield fb.Sample(name, Text(name))

    samples = ChunkSamples(Texts(), [None], duplicates)
    taken = samples.batches()
    for name in "ab":
        sample = next(taken)
        watched = weakref.ref(sample.data)
        assert watched() == name
        del sample
        assert watched() is None
    assert next(taken, None) is None
    assert (samples.count, len(samples.failures)) == (3, 1)
