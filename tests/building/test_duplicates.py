"""Duplicates: found once, at planning; left out by the plan; counted; and nothing is left of a planner that failed."""

import os
import shutil
import signal
from collections.abc import Iterator
from pathlib import Path

import pytest
from tests.helpers.builders import every_file, wait_until
from tests.helpers.dedup_cases import CountingSource, CountRecipe, DistinctRecipe, NoisyRecipe, rows_of, write_file
from tests.helpers.layer_recipes import tree
from tests.helpers.processes import PythonProcess

import forebay as fb
from forebay.cache.plan import load_plan
from forebay.errors import RecipeInvalid, SourceChanged
from forebay.source import Failure, Part, PartDigest, Sample
from forebay.store import LocalStore

LINES = [b"a", b"b", b"a", b"c", b"b", b"d", b"a", b"e"]
RECIPE = DistinctRecipe(chunk_bytes=60)

PLAN_IN_LITTLE_MEMORY = """
import resource, sys
from pathlib import Path
import forebay as fb
from forebay.building import dedup
from tests.helpers.dedup_cases import CountingSource, CountRecipe

MIB = 1 << 20
dedup.SORT_BYTES = 8 * MIB
count, distinct, room = map(int, sys.argv[2:])
recipe = CountRecipe(period=distinct, chunk_bytes=800_000)

def build(name, count):
    source = CountingSource(count)
    return fb.build(Path(sys.argv[1], name), source, recipe, workers=0, end_chunk=0)

build("small", 20_000)  # whatever a process takes once
status = Path("/proc/self/status").read_text()
held = int(status.partition("VmData:")[2].split()[0]) * 1024
resource.setrlimit(resource.RLIMIT_DATA, (held + room * MIB, held + room * MIB))
print(build("large", count).notes[0])
"""

STOP_WHILE_PLANNING = """
import sys, time
from pathlib import Path
import forebay as fb
from forebay.building import dedup
from tests.helpers.dedup_cases import CountingSource, CountRecipe

dedup.SORT_BYTES = 250_000

class StoppingRecipe(CountRecipe, frozen=True, kw_only=True):
    def identity(self, sample):
        if sample.data == 90_500:
            Path(sys.argv[1]).touch()
            time.sleep(600)
        return CountRecipe.identity(self, sample)

recipe = StoppingRecipe(period=1000, chunk_bytes=8000)
fb.build(sys.argv[2], CountingSource(100_000), recipe, workers=0)
"""


def source_of(folder: Path, lines: list[bytes] = LINES) -> fb.Source:
    return fb.sources.lines(write_file(folder / "source.txt", lines))


def test_duplicates_are_left_out_counted_and_told(tmp_path):
    report = fb.build(tmp_path / "cache", source_of(tmp_path), RECIPE, workers=0)
    assert rows_of(tmp_path / "cache") == [b"a", b"b", b"c", b"d", b"e"]
    ids = fb.open_cache(tmp_path / "cache").read(range(5))["id"]
    assert [bytes(ids[row]).decode() for row in range(5)] == [f"source.txt@{at}" for at in (0, 2, 6, 10, 14)]
    assert (report.rows, report.samples, report.failures) == (5, 8, 0)
    assert report.notes == ("3 sample(s) are duplicates of earlier ones and are left out",)
    (layer,) = fb.info(tmp_path / "cache").layers
    assert layer.statistics == {"bytes": 5, "duplicates": 3}
    assert fb.status(tmp_path / "cache").layers[0].samples == 8
    assert fb.verify(tmp_path / "cache", full=True).sound


def test_a_chunk_of_duplicates_alone_has_no_rows_and_stands_in_the_plan(tmp_path):
    report = fb.build(tmp_path / "cache", source_of(tmp_path, [b"a"] * 20), RECIPE, workers=0)
    assert report.chunks > 2
    assert (report.built, report.rows, rows_of(tmp_path / "cache")) == (report.chunks, 1, [b"a"])
    assert fb.verify(tmp_path / "cache", full=True).sound


class GappySource(CountingSource):
    """Numbers, every third of which cannot be read."""

    def read(
        self, part: Part, *, digest: PartDigest | None = None, preview: bool = False
    ) -> Iterator[Sample | Failure]:
        for sample in CountingSource.read(self, part):
            yield Failure(sample.id, "third") if sample.data % 3 == 0 else sample


def test_samples_that_the_source_could_not_read_are_no_duplicates_and_shift_nothing(tmp_path):
    recipe = CountRecipe(period=1000, chunk_bytes=8 * 500)
    report = fb.build(tmp_path / "cache", GappySource(3000), recipe, workers=0, max_failures=1.0)
    cache = fb.open_cache(tmp_path / "cache")
    expected: dict[int, int] = {}
    for number in range(3000):
        if number % 3:
            expected.setdefault(number % 1000, number)
    assert cache.read(range(len(cache)))["number"].tolist() == list(expected.values())
    assert (report.samples, report.failures) == (3000, 1000)
    assert fb.info(tmp_path / "cache").layers[0].statistics["duplicates"] == 2000 - len(expected)


def test_a_plan_that_is_there_is_not_made_again(tmp_path):
    source, recipe = source_of(tmp_path, [b"%d" % number for number in range(40)]), NoisyRecipe(chunk_bytes=100)
    fb.build(tmp_path / "cache", source, recipe, workers=0, end_chunk=0)
    plan, identities = (every_file(tmp_path / "cache" / name) for name in ("plan", "identities"))
    NoisyRecipe.asked.clear()
    fb.build(tmp_path / "cache", source, recipe, workers=0)
    assert 0 < len(NoisyRecipe.asked) < 40, "only what is made is looked at again, once"
    assert len(NoisyRecipe.asked) == len(set(NoisyRecipe.asked))
    NoisyRecipe.asked.clear()
    fb.build(tmp_path / "cache", source, recipe, workers=0)
    assert NoisyRecipe.asked == []
    assert plan == every_file(tmp_path / "cache/plan")
    assert identities == every_file(tmp_path / "cache/identities")


def while_planning(action):
    """A listener that does something once, at the last moment of planning."""
    moments = []

    def listen(progress: fb.Progress) -> None:
        if progress.phase == "planning" and progress.done == progress.total:
            moments.append(progress)
            if len(moments) == 2:  # cut, and every sample read
                action()

    return listen


def without_claim(files: dict[str, bytes]) -> dict[str, bytes]:
    """All but what the planner that is still at work has there."""
    return {name: content for name, content in files.items() if not name.startswith(("claims/", "builders/"))}


def test_a_planner_that_comes_second_leaves_nothing_of_its_own(tmp_path):
    source, root = source_of(tmp_path), tmp_path / "cache"
    other = fb.sources.lines(write_file(tmp_path / "other.txt", [b"x", b"x", b"y"]))
    states = []

    def first() -> None:
        fb.build(root, source, RECIPE, workers=0)
        states.append(without_claim(tree(root)))

    with pytest.raises(SourceChanged):
        fb.build(root, other, RECIPE, workers=0, on_progress=while_planning(first))
    assert states == [tree(root)]
    shutil.rmtree(root)
    assert fb.build(root, source, RECIPE, workers=0, on_progress=while_planning(first)).built == 0
    assert states[1:] == [tree(root)]


def test_of_two_that_grow_at_once_the_second_leaves_out_what_the_first_brought(tmp_path):
    root, folder = tmp_path / "cache", tmp_path / "source"
    write_file(folder / "a.txt", LINES)
    fb.build(root, fb.sources.lines(folder), RECIPE, workers=0)
    one = fb.sources.lines(write_file(folder / "b.txt", [b"new", b"a", b"one"]), root=folder)
    two = fb.sources.lines(write_file(folder / "c.txt", [b"two", b"new", b"b"]), root=folder)
    first = while_planning(lambda: fb.update(root, one, recipe=RECIPE, workers=0))
    fb.update(root, two, recipe=RECIPE, workers=0, on_progress=first)
    assert rows_of(root) == [b"a", b"b", b"c", b"d", b"e", b"new", b"one", b"two"]
    assert len(every_file(root / "identities")) == len(every_file(root / "plan")) == 3


@pytest.mark.parametrize("trouble", [OSError("the disk is tired"), KeyboardInterrupt()])
def test_trouble_while_samples_are_read_leaves_nothing_behind(tmp_path, trouble):
    root, folder = tmp_path / "work/cache", tmp_path / "work/source"
    write_file(folder / "a.txt", LINES)

    def fail() -> None:
        raise trouble

    with pytest.raises(type(trouble)):
        fb.build(root, fb.sources.lines(folder), RECIPE, workers=0, on_progress=while_planning(fail))
    assert every_file(tmp_path) == ["work/source/a.txt"]
    assert not root.exists()
    fb.build(root, fb.sources.lines(folder), RECIPE, workers=0)
    before = tree(root)
    write_file(folder / "b.txt", [b"f", b"a"])
    with pytest.raises(type(trouble)):
        fb.update(root, fb.sources.lines(folder), recipe=RECIPE, workers=0, on_progress=while_planning(fail))
    assert tree(root) == before


def test_a_planner_that_is_killed_leaves_nothing_but_what_it_found(tmp_path):
    (tmp_path / "work").mkdir()
    process = PythonProcess("-c", STOP_WHILE_PLANNING, str(tmp_path / "sign"), str(tmp_path / "work/cache"))
    try:
        wait_until((tmp_path / "sign").exists)
        scratch = [os.readlink(entry) for entry in Path(f"/proc/{process.pid}/fd").iterdir()]
        assert any(name.startswith(str(tmp_path / "work")) for name in scratch), "it sorts where the cache will be"
    finally:
        process.kill()
        process.communicate()
    assert process.returncode == -signal.SIGKILL
    left = [path for path in (tmp_path / "work").rglob("*") if path.is_file()]
    assert {path.parent.name for path in left if path.name[0] != "."} <= {"claims", "builders"}


def test_a_file_that_changed_after_planning_makes_no_chunk_even_if_nothing_was_made_of_it(tmp_path):
    source = source_of(tmp_path)
    fb.build(tmp_path / "cache", source, RECIPE, workers=0, end_chunk=0)
    changed = list(LINES)
    changed[-1] = b"a"
    write_file(tmp_path / "source.txt", changed)
    os.utime(tmp_path / "source.txt", ns=(1, 1))
    with pytest.raises(SourceChanged, match=r"'source\.txt' has other samples than were planned"):
        fb.build(tmp_path / "cache", source, RECIPE, workers=0)
    write_file(tmp_path / "source.txt", LINES)
    fb.build(tmp_path / "cache", source, RECIPE, workers=0)
    assert rows_of(tmp_path / "cache") == [b"a", b"b", b"c", b"d", b"e"]


@pytest.mark.parametrize("wrong", [b"short", "0123456789abcdef", 7, ValueError("no idea")])
def test_an_identity_that_is_none_is_refused_with_the_sample_and_leaves_nothing_behind(tmp_path, wrong):
    class WrongRecipe(DistinctRecipe, frozen=True, kw_only=True):
        def identity(self, sample: Sample) -> bytes | None:
            if sample.data == b"d" and isinstance(wrong, Exception):
                raise wrong
            return wrong if sample.data == b"d" else DistinctRecipe.identity(self, sample)

    with pytest.raises(RecipeInvalid, match=r"(?s)sample 'source\.txt@10'.*(16 bytes|no idea)"):
        fb.build(tmp_path / "cache", source_of(tmp_path), WrongRecipe(chunk_bytes=60), workers=0)
    assert every_file(tmp_path) == ["source.txt"]


class MaybeRecipe(DistinctRecipe, frozen=True, kw_only=True):
    """A recipe whose field says whether it deduplicates."""

    deduplicate: bool = False

    @property
    def identity(self):  # type: ignore[override]
        return (lambda sample: DistinctRecipe.identity(self, sample)) if self.deduplicate else None


def test_a_recipe_may_say_by_a_field_whether_it_deduplicates(tmp_path):
    source = source_of(tmp_path)
    fb.build(tmp_path / "all", source, MaybeRecipe(chunk_bytes=60), workers=0)
    assert rows_of(tmp_path / "all") == LINES
    assert not (tmp_path / "all/identities").exists()
    assert "duplicates" not in fb.info(tmp_path / "all").layers[0].statistics
    assert load_plan(LocalStore(tmp_path / "all")).left_out(0) is None
    fb.build(tmp_path / "distinct", source, MaybeRecipe(chunk_bytes=60, deduplicate=True), workers=0)
    assert rows_of(tmp_path / "distinct") == [b"a", b"b", b"c", b"d", b"e"]


class Careless(DistinctRecipe, frozen=True, kw_only=True):
    """The same recipe before it could tell equal samples, or after: with the same fingerprint."""

    identity = None


@pytest.mark.parametrize(("began", "goes_on"), [(RECIPE, Careless(chunk_bytes=60)), (Careless(chunk_bytes=60), RECIPE)])
def test_growing_otherwise_than_planned_is_refused(tmp_path, began, goes_on):
    root, folder = tmp_path / "cache", tmp_path / "source"
    write_file(folder / "a.txt", LINES)
    fb.build(root, fb.sources.lines(folder), began, workers=0)
    before = tree(root)
    write_file(folder / "b.txt", [b"f"])
    with pytest.raises(RecipeInvalid, match=r"(?s)'distinct'.*build a new cache"):
        fb.update(root, fb.sources.lines(folder), recipe=goes_on, workers=0)
    assert tree(root) == before


@pytest.mark.slow
@pytest.mark.parametrize(
    ("samples", "distinct"),
    [(1_000_000, 500_000), (1_000_000, 1), pytest.param(3_000_000, 1_500_000, marks=pytest.mark.long)],
)
def test_planning_millions_of_samples_takes_no_more_memory_than_thousands(tmp_path, samples, distinct):
    """16 MB of identities and 8 MB of numbers a million, sorted with 8 MB; the kernel allows 16 MB, no page more."""
    process = PythonProcess("-c", PLAN_IN_LITTLE_MEMORY, str(tmp_path), str(samples), str(distinct), "16")
    out, err = process.communicate(timeout=600)
    assert process.returncode == 0, err
    assert out.startswith(f"{samples - distinct:,} sample(s)"), out
