"""A build computes what is missing and nothing else, and says what stands in its way."""

import gzip
import os
import shutil
import subprocess
import sys
import weakref
from pathlib import Path
from typing import ClassVar

import pytest
from tests.helpers.builders import (
    chunk_digests,
    ending,
    every_file,
    patient,
    script_environment,
    start_builder,
)
from tests.helpers.cache_files import chunk_path, layer_path, layer_status
from tests.helpers.dedup_cases import DistinctRecipe
from tests.helpers.forged_caches import put_together, take_apart
from tests.helpers.layer_recipes import LineRecipe, tree
from tests.helpers.obedient_recipes import (
    NOTES,
    ObedientRecipe,
    makes,
    order_line,
    orders,
    rewrite,
    write_orders,
)

import forebay as fb
from forebay.building.chunk_maker import ChunkSamples
from forebay.errors import (
    BuildFailed,
    BuildStopped,
    EngineUnusable,
    NotFound,
    SourceChanged,
    TooManyFailures,
)
from forebay.store.owners import Owner, this_host, this_process


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
    assert (first.built, first.present, first.rows) == (8, 0, 16)
    assert (second.built, second.present, second.generation) == (0, 8, first.generation)
    assert made(notes) == list(range(8))
    assert {name: (tmp_path / "cache" / name).read_bytes() for name in every_file(tmp_path / "cache")} == before


def test_inverse_adds_new_files_then_fills_gaps_from_the_far_end(tmp_path, notes):
    write_orders(tmp_path / "source/a.txt", orders(4))
    build(tmp_path / "cache", tmp_path / "source", start_chunk=1, end_chunk=2)
    before = chunk_digests(tmp_path / "cache")
    write_orders(tmp_path / "source/b.txt", orders(4))
    (notes / "makes").unlink()
    assert build(tmp_path / "cache", tmp_path / "source", mode="inverse").built == 6
    assert made(notes) == [3, 2, 1, 0, 3, 0]  # each file begins with its own chunk 0
    assert chunk_digests(tmp_path / "cache").items() >= before.items()


def test_build_reports_a_listed_chunk_whose_file_is_gone_and_leaves_it_to_repair(tmp_path, file):
    build(tmp_path / "cache", file, end_chunk=5)
    chunk_path(tmp_path / "cache", "obedient", 5).unlink()
    with pytest.raises(BuildFailed, match=r"(?s)chunk 5: its file is gone.*run `forebay repair"):
        build(tmp_path / "cache", file)
    assert layer_status(tmp_path / "cache").lost == (5,)
    assert layer_status(tmp_path / "cache").listed == 8


def test_a_range_is_inclusive_and_the_rest_can_follow(tmp_path, file, notes):
    report = build(tmp_path / "cache", file, start_chunk=2, end_chunk=4)
    assert (report.chunks, report.built) == (3, 3)
    assert made(notes) == [2, 3, 4]
    assert layer_status(tmp_path / "cache").missing == (0, 1, 5, 6, 7)
    assert len(fb.open_cache(tmp_path / "cache")) == 6
    assert build(tmp_path / "cache", file).built == 5


def test_an_interrupted_build_publishes_what_it_made_releases_its_claims_and_goes_on_from_there(tmp_path, file, notes):
    with pytest.raises(BuildStopped, match=r"(?s)3 of 8 chunks.*run the same command to resume") as caught:
        build(tmp_path / "cache", file, on_progress=stop_after(3))
    assert isinstance(caught.value, KeyboardInterrupt)
    assert len(fb.open_cache(tmp_path / "cache")) == 6
    assert fb.status(tmp_path / "cache").claims == ()
    assert build(tmp_path / "cache", file).built == 5
    assert made(notes) == list(range(8))


def test_what_a_dead_writer_left_is_gone_after_a_build_and_what_a_live_one_writes_is_not(tmp_path, file):
    build(tmp_path / "cache", file, end_chunk=3)
    folder = layer_path(tmp_path / "cache", "obedient")
    dead = folder / f".tmp-{Owner(this_host(), os.getpid(), 1)}-0123abcd"
    live = folder / f".tmp-{this_process()}-0123abcd"
    for path in (dead, live):
        path.write_bytes(b"half a chunk")
    build(tmp_path / "cache", file)
    assert (dead.exists(), live.exists()) == (False, True)


def test_what_another_builder_gave_up_during_the_run_is_not_waited_for(tmp_path, notes):
    file = write_orders(tmp_path / "source.txt", orders(30, c0="raise ValueError 99"))
    builders = [
        start_builder(tmp_path / "cache", file, notes, {"seconds": 0.05}, workers=1, lease_seconds=2) for _ in range(2)
    ]
    endings = [ending(builder) for builder in builders]
    assert "BuildFailed" in {one.get("error") for one in endings}
    assert all("chunk 0: ValueError" in one["text"] for one in endings if "error" in one)
    assert layer_status(tmp_path / "cache").missing == (0,)


def test_too_many_failed_samples_stop_the_build(tmp_path):
    (tmp_path / "source.txt").write_bytes(b"short\n" * 50 + b"much too long a line\n" * 3)
    recipe = fb.RawRecipe(chunk_bytes=100, max_sample_bytes=10)
    source = fb.sources.lines(tmp_path / "source.txt")
    for _ in range(2):  # the same command does not succeed the second time
        with pytest.raises(TooManyFailures, match=r"(?s)3 of 53 samples .* failed .*; 2 may fail") as caught:
            fb.build(tmp_path / "cache", source, recipe, workers=0, max_failures=2)
        assert caught.value.facts["failures"] == 3
    assert not list((tmp_path / "cache" / "generations").glob("*"))
    assert layer_status(tmp_path / "cache").missing == (), "chunks are kept"
    assert fb.build(tmp_path / "cache", source, recipe, workers=0, max_failures=3).failures == 3
    assert fb.build(tmp_path / "cache", source, recipe, workers=0).failures == 3, "the limit is remembered"


def test_failures_of_listed_and_new_chunks_of_a_segment_count_together(tmp_path):
    long = b"much too long a line\n" * 2
    (tmp_path / "source.txt").write_bytes(b"short\n" + long + b"short\n" * 50 + long)
    recipe = fb.RawRecipe(chunk_bytes=50, max_sample_bytes=10)
    source = fb.sources.lines(tmp_path / "source.txt")
    fb.build(tmp_path / "cache", source, recipe, workers=0, max_failures=2, end_chunk=1)
    listed = layer_status(tmp_path / "cache").listed
    with pytest.raises(TooManyFailures, match=r"4 of 55 samples"):
        fb.build(tmp_path / "cache", source, recipe, workers=0)
    assert layer_status(tmp_path / "cache").listed == listed, "a segment over its limit stays unpublished"


def test_by_default_ten_samples_of_a_segment_or_one_percent_may_fail(tmp_path):
    for failed, samples, is_built in ((10, 100, True), (11, 100, False), (19, 2000, True), (21, 2000, False)):
        folder = tmp_path / f"{failed}-{samples}"
        folder.mkdir()
        lines = [b"much too long a line\n"] * failed + [b"short\n"] * (samples - failed)
        (folder / "source.txt").write_bytes(b"".join(lines))
        source, recipe = fb.sources.lines(folder / "source.txt"), fb.RawRecipe(max_sample_bytes=10)
        if is_built:
            assert fb.build(folder / "cache", source, recipe, workers=0).failures == failed
        else:
            with pytest.raises(TooManyFailures):
                fb.build(folder / "cache", source, recipe, workers=0)


def test_a_chunk_of_few_large_bad_samples_counts_against_its_whole_segment(tmp_path):
    (tmp_path / "raw").mkdir()
    for number in range(12):
        (tmp_path / f"raw/a{number}.txt").write_bytes(b"x" * 1600 + b"\n")
    (tmp_path / "raw/b.txt").write_bytes(b"".join(b"%d\n" % (number % 10) for number in range(60_000)))
    source = fb.sources.lines(tmp_path / "raw")
    report = fb.build(tmp_path / "cache", source, LineRecipe(chunk_rows=8000), workers=0)
    assert (report.failures, report.rows) == (12, 60_000)


def test_a_share_of_failures_is_one_of_all_samples_and_not_of_the_first_chunk(tmp_path):
    (tmp_path / "source.txt").write_bytes(b"much too long a line\n" * 3 + b"short\n" * 97)
    recipe = fb.RawRecipe(chunk_bytes=50, max_sample_bytes=10)
    source = fb.sources.lines(tmp_path / "source.txt")
    assert fb.build(tmp_path / "enough", source, recipe, workers=0, max_failures=0.04).failures == 3
    with pytest.raises(TooManyFailures, match=r"(?s)3 of 100 samples .*; 2 may fail"):
        fb.build(tmp_path / "cache", source, recipe, workers=0, max_failures=0.02)


def test_progress_ends_with_everything_done(tmp_path, file):
    seen: list[fb.Progress] = []
    build(tmp_path / "cache", file, on_progress=seen.append)
    building = [progress for progress in seen if progress.phase == "building"]
    assert [progress.done for progress in building] == list(range(1, 9))
    assert {progress.total for progress in building} == {8}
    assert building[-1].rows == 16
    assert building[-1].read_bytes == file.stat().st_size
    chunks = (layer_path(tmp_path / "cache", "obedient")).glob("0*.safetensors")
    assert building[-1].written_bytes == sum(path.stat().st_size for path in chunks)


# The source, before and while it is read.


@pytest.mark.parametrize("same_size", [True, False])
def test_a_file_with_other_content_is_named_and_nothing_is_made_of_it(tmp_path, file, same_size):
    root = tmp_path / "cache"
    build(root, file, end_chunk=3)
    before = chunk_digests(root)
    changed = bytearray(file.read_bytes())
    changed[350] ^= 1
    file.write_bytes(changed if same_size else changed[:-200])
    os.utime(file, (1, 1))
    with pytest.raises(SourceChanged, match=r"source\.txt") as caught:
        build(root, file)
    assert set(caught.value.facts["files"]) == {"source.txt"}
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
    assert report.built == 4
    assert report.notes == (
        f"1 file(s) of the source grew; `forebay update {tmp_path / 'cache'} SOURCE` adds the new data",
    )


def test_a_file_that_came_later_is_reported(tmp_path):
    write_orders(tmp_path / "source/a.txt", orders(4))
    build(tmp_path / "cache", tmp_path / "source")
    write_orders(tmp_path / "source/b.txt", orders(4))
    report = build(tmp_path / "cache", tmp_path / "source")
    assert report.notes == (
        "1 file(s) of the source are not in the plan (the first is 'b.txt'); the same build in mode 'inverse', or "
        f"`forebay update {tmp_path / 'cache'} SOURCE`, adds them",
    )


@pytest.mark.parametrize("workers", [0, 1])
@pytest.mark.parametrize("change", ["truncate", "rewrite"])
def test_a_file_that_changes_while_it_is_read_leaves_no_chunk(tmp_path, notes, workers, change):
    file, root = tmp_path / "source.txt", tmp_path / "cache"
    write_orders(file, orders(8, c2=f"{change} {file} 1"))
    for _ in range(2):  # nor does the same command go on with it
        with pytest.raises(SourceChanged, match=r"(?s)source\.txt.*--reuse"):
            build(root, file, workers=workers)
    assert not (chunk_path(root, "obedient", 2)).exists()
    assert fb.status(root, source=fb.sources.lines(file)).claims == ()
    assert not fb.verify(root, source=fb.sources.lines(file), full=True).sound


@pytest.mark.parametrize("workers", [0, 1])
def test_a_build_continues_when_a_file_is_appended_to_while_it_is_read(tmp_path, notes, workers):
    file, root = tmp_path / "source.txt", tmp_path / "cache"
    write_orders(file, orders(8, c2=f"append {file} 1", c5=f"append {file} 1"))
    report = build(root, file, workers=workers)
    assert (report.built, report.rows) == (8, 16)
    assert fb.verify(root, source=fb.sources.lines(file), full=True).sound
    assert fb.update(root, fb.sources.lines(file), recipe=ObedientRecipe(), workers=0).rows == 18


def test_a_file_that_never_stops_changing_ends_the_build_with_a_sentence(tmp_path, notes):
    file = tmp_path / "source.txt"
    write_orders(file, orders(8, c2=f"append {file} 99"))
    with pytest.raises(BuildFailed, match=r"(?s)chunk 2: .*'source\.txt'.*5 tries.*when nothing writes to the source"):
        build(tmp_path / "cache", file, workers=0)
    assert fb.status(tmp_path / "cache", source=fb.sources.lines(file)).claims == ()


def test_a_file_that_is_rewritten_before_any_of_it_was_read_is_not_cut_inside_of_its_lines(tmp_path):
    file, root = tmp_path / "source.txt", tmp_path / "cache"
    write_orders(file, orders(8))
    with pytest.raises(KeyboardInterrupt):
        build(root, file, on_progress=_interrupt)
    for path in (layer_path(root, "obedient")).glob("0*.safetensors"):
        path.unlink()
    for path in (root / "generations").glob("*"):
        path.unlink()
    rewrite(file)
    with pytest.raises(SourceChanged, match=r"source\.txt"):
        build(root, file)
    shutil.rmtree(root)
    build(root, file)
    rows = fb.open_cache(root).read(range(len(fb.open_cache(root))), ["data"])["data"]
    assert [row.tobytes() for row in rows] == file.read_bytes().splitlines()


@pytest.mark.parametrize("workers", [0, 1])
def test_a_memory_limit_is_looked_at_before_a_build_of_one_chunk(tmp_path, notes, workers):
    write_orders(tmp_path / "source.txt", orders(1))
    with pytest.raises(EngineUnusable, match="raise --memory-limit"):
        build(tmp_path / "cache", tmp_path / "source.txt", workers=workers, memory_limit=1_000_000)
    assert makes(notes) == []


class GreedyRecipe(ObedientRecipe, frozen=True, kw_only=True):
    """Rows that take 128 MiB of memory to make, and longer than they are needed."""

    held: ClassVar[list[bytearray]] = []

    def make(self, samples):
        if not samples.is_preview:
            self.held.append(bytearray(b"x") * (128 << 20))
        return super().make(samples)


WITH_LITTLE_MEMORY = """
import sys
import psutil
from tests.building.test_build import GreedyRecipe, ObedientRecipe
import forebay as fb
from forebay.errors import EngineUnusable

bytearray(b"x") * (int(sys.argv[3]) << 20)
limit = psutil.Process().memory_info().rss + (64 << 20)
try:
    recipe = GreedyRecipe() if sys.argv[4] == "greedy" else ObedientRecipe()
    report = fb.build(sys.argv[1], fb.sources.lines(sys.argv[2]), recipe, workers=0, memory_limit=limit)
    print(*report.notes)
    print(any(f"the memory limit of {limit:,} bytes was passed" in note for note in report.notes))
except EngineUnusable as error:
    print(type(error).__name__)
"""


@pytest.mark.slow
@pytest.mark.parametrize("before", [0, 400])  # MiB that the process had taken and given back
@pytest.mark.parametrize(
    ("recipe", "chunks", "said"), [("greedy", 1, "True"), ("greedy", 3, "EngineUnusable"), ("modest", 3, "False")]
)
def test_a_memory_limit_holds_in_this_process_and_is_never_passed_without_a_word(
    tmp_path, recipe, chunks, said, before
):
    """In a fresh process: one that ran other tests may give back more memory than this one takes."""
    file = write_orders(tmp_path / "source.txt", orders(chunks))
    command = [sys.executable, "-c", WITH_LITTLE_MEMORY, str(tmp_path / "cache"), str(file), str(before), recipe]
    run = subprocess.run(command, env=script_environment(), capture_output=True, text=True, check=False)
    assert run.stdout.split()[-1:] == [said], run.stdout + run.stderr


@pytest.mark.parametrize("recipe", [ObedientRecipe(), DistinctRecipe()])
def test_a_range_beyond_the_plan_leaves_a_new_root_free_for_another_source_and_recipe(tmp_path, recipe):
    source = fb.sources.lines(write_orders(tmp_path / "source.txt", orders(3)))
    (tmp_path / "cache").mkdir()
    (tmp_path / "cache" / "README").write_text("mine")
    with pytest.raises(NotFound, match="start_chunk 99 is beyond the plan"):
        fb.build(tmp_path / "cache", source, recipe, workers=0, start_chunk=99)
    assert list(tree(tmp_path / "cache")) == ["README"]
    (tmp_path / "other.txt").write_text("other\n" * 9)
    fb.build(tmp_path / "cache", fb.sources.lines(tmp_path / "other.txt"), fb.RawRecipe(), workers=0)
    assert len(fb.open_cache(tmp_path / "cache")) == 9


def test_a_range_that_no_plan_can_have_is_refused_before_the_source_is_read(tmp_path):
    with pytest.raises(ValueError, match="start_chunk must be at most end_chunk"):
        build(tmp_path / "cache", tmp_path / "absent.txt", start_chunk=2, end_chunk=1)
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
    assert set(caught.value.facts["failed"]) == {3}


def zipped(lines: list[str]) -> bytes:
    return gzip.compress(b"".join(order_line(number, order) for number, order in enumerate(lines)), mtime=0)


@pytest.mark.parametrize(
    ("options", "problem"),
    [
        ({"recipe": 224}, "a recipe is needed, for instance .* not int"),
        ({"source": 224}, r"source must be paths, .* \(got int\)"),
    ],
)
def test_what_is_given_by_mistake_is_refused_before_anything_is_written(tmp_path, file, options, problem):
    given = {"source": fb.sources.lines(file), "recipe": ObedientRecipe()} | options
    with pytest.raises((TypeError, ValueError), match=problem):
        fb.build(tmp_path / "cache", **given)
    with pytest.raises((TypeError, ValueError), match=problem):
        fb.estimate(**given)
    assert not (tmp_path / "cache").exists()


@pytest.mark.parametrize(
    "what", ["one wrong byte", "garbage", "empty", "folder", "dangling link", "another chunk", "huge statistic"]
)
def test_an_unlisted_file_that_is_no_sound_chunk_does_not_stop_a_build(tmp_path, what):
    source = fb.sources.lines(write_orders(tmp_path / "source.txt", orders(4)))
    root = tmp_path / "cache"
    fb.build(root, source, ObedientRecipe(), workers=0, end_chunk=1)
    path = chunk_path(root, "obedient", 2)
    match what:
        case "folder":
            path.mkdir()
            (path / "mine").write_text("mine")
        case "dangling link":
            path.symlink_to("nowhere")
        case "one wrong byte":
            fb.build(tmp_path / "other", source, ObedientRecipe(), workers=0)
            content = bytearray(chunk_path(tmp_path / "other", "obedient", 2).read_bytes())
            content[-3] ^= 64
            path.write_bytes(content)
        case "another chunk":
            path.write_bytes((chunk_path(root, "obedient", 1)).read_bytes())
        case "huge statistic":
            path.write_bytes(chunk_with_a_huge_statistic(root))
        case _:
            path.write_bytes(b"" if what == "empty" else b"garbage" * 1000)
    if what == "folder":
        with pytest.raises(BuildFailed, match=r"(?s)chunk 2: .*move it away"):
            fb.build(root, source, ObedientRecipe(), workers=0)
        assert (path / "mine").read_text() == "mine"
        return
    report = fb.build(root, source, ObedientRecipe(), workers=0)
    assert report.rows == 8
    assert fb.verify(root, full=True).sound
    assert fb.status(root, source=source).complete
    ids = [bytes(row["id"]) for row in map(fb.open_cache(root).__getitem__, range(8))]
    fb.build(tmp_path / "alone", source, ObedientRecipe(), workers=0)
    assert ids == [bytes(row["id"]) for row in map(fb.open_cache(tmp_path / "alone").__getitem__, range(8))]
    assert fb.build(root, source, ObedientRecipe(), workers=0).built == 0


def chunk_with_a_huge_statistic(root: Path) -> bytes:
    """Chunk 2 as another writer may have written it: it proves itself, and no table of 64-bit numbers can list it."""
    draft = take_apart((chunk_path(root, "obedient", 1)).read_bytes())
    draft.metadata |= {"chunk": 2, "statistics": {"bytes": 1 << 70}}
    return put_together(draft)[0]


def test_a_chunk_of_another_source_that_appears_during_a_build_is_replaced(tmp_path):
    sources = {name: tmp_path / f"{name}.txt" for name in ("ours", "other")}
    write_orders(sources["ours"], orders(6))
    write_orders(sources["other"], orders(6, c4="keep it"))
    build(tmp_path / "other", sources["other"], workers=0)
    build(tmp_path / "same", sources["ours"], workers=0)

    def listen(progress):
        if progress.phase == "building" and progress.done == 1:
            strange = chunk_path(tmp_path / "cache", "obedient", 4)
            strange.write_bytes((chunk_path(tmp_path / "other", "obedient", 4)).read_bytes())

    assert build(tmp_path / "cache", sources["ours"], workers=0, on_progress=listen).built == 6
    assert chunk_digests(tmp_path / "cache") == chunk_digests(tmp_path / "same")


class Text(str):
    """A text that can be watched."""


class KeepsAll:
    def keeps(self, sample: object) -> bool:
        return True


@pytest.mark.parametrize("duplicates", [None, KeepsAll()])
def test_a_sample_that_was_taken_is_not_held_by_what_reads_the_next(duplicates):
    """It may be a document of 64 MiB, which is 256 MiB as text with one wide character in it."""

    class Texts:
        def read(self, part, *, digest=None, preview=False):
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
