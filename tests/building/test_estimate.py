"""Estimating: what a build will take, from a small sample."""

import gzip
from pathlib import Path
from typing import ClassVar

import pytest
from tests.helpers.layer_recipes import LineRecipe, write_lines

import forebay as fb
from forebay.building.estimate import SAMPLED_SHARE
from forebay.errors import SourceNotFound


@pytest.mark.slow
@pytest.mark.parametrize("files", [pytest.param(1, marks=pytest.mark.long), 7])
def test_an_estimate_of_even_data_is_close_and_reads_little(tmp_path: Path, files: int) -> None:
    for number in range(files):
        write_lines(tmp_path / f"raw/{number}.txt", 0, 140_000 // files)
    source, recipe = fb.sources.lines(tmp_path / "raw"), LineRecipe(chunk_rows=10_000)
    estimate = fb.estimate(source, recipe, into=tmp_path / "cache", workers=2)
    assert not (tmp_path / "cache").exists()
    assert (estimate.files, estimate.unit, estimate.workers) == (files, "bytes", 2)
    assert estimate.source_weight == sum(path.stat().st_size for path in (tmp_path / "raw").iterdir())
    assert estimate.sampled_weight <= estimate.source_weight * SAMPLED_SHARE * 1.05
    report = fb.build(tmp_path / "cache", source, recipe, workers=0)
    stored = sum(path.stat().st_size for path in (tmp_path / "cache/layers").rglob("0*"))
    assert estimate.rows == pytest.approx(report.rows, rel=0.05)
    assert estimate.chunks == pytest.approx(report.chunks, abs=1)
    assert estimate.stored_bytes == pytest.approx(stored, rel=0.15)
    assert estimate.seconds > 0
    assert estimate.fits
    assert estimate.free_bytes


def test_no_more_workers_are_counted_on_than_there_are_chunks(tmp_path: Path) -> None:
    write_lines(tmp_path / "raw/a.txt", 0, 100)
    source = fb.sources.lines(tmp_path / "raw")
    assert fb.estimate(source, LineRecipe(chunk_rows=10_000), workers=8).workers == 1
    assert fb.estimate(source, LineRecipe(chunk_rows=10), workers=8).workers == 8


def test_failures_are_expected_in_proportion(tmp_path: Path) -> None:
    (tmp_path / "raw").mkdir()
    (tmp_path / "raw/a.txt").write_bytes(b"000001\n------\n000002\n000003\n" * 5000)
    estimate = fb.estimate(fb.sources.lines(tmp_path / "raw"), LineRecipe())
    assert estimate.failures == pytest.approx(5000, rel=0.1)
    assert estimate.rows == pytest.approx(15_000, rel=0.1)


def test_a_compressed_file_is_judged_by_what_it_holds(tmp_path: Path) -> None:
    (tmp_path / "raw").mkdir()
    text = b"".join(b"%06d\n" % number for number in range(50_000))
    (tmp_path / "raw/a.txt.gz").write_bytes(gzip.compress(text))
    estimate = fb.estimate(fb.sources.lines(tmp_path / "raw"), LineRecipe(chunk_rows=1000))
    assert estimate.rows == pytest.approx(50_000, rel=0.1)
    assert estimate.source_weight == pytest.approx(len(text), rel=0.1)


def test_what_does_not_fit_is_said(tmp_path: Path) -> None:
    class SmallStore(fb.MemoryStore):
        def free_bytes(self) -> int:
            return 1000

    write_lines(tmp_path / "raw/a.txt", 0, 1000)
    estimate = fb.estimate(fb.sources.lines(tmp_path / "raw"), LineRecipe(chunk_rows=100), into=SmallStore())
    assert (estimate.fits, estimate.free_bytes) == (False, 1000)
    assert estimate.stored_bytes > 1000


def test_no_files_are_no_source(tmp_path: Path) -> None:
    with pytest.raises(SourceNotFound, match="no file matches"):
        fb.estimate(fb.sources.lines(tmp_path / "*.txt"), LineRecipe())


def test_an_estimate_of_an_unfinished_cache_is_of_what_is_missing(tmp_path: Path) -> None:
    write_lines(tmp_path / "raw/a.txt", 0, 20_000)
    source, recipe, root = fb.sources.lines(tmp_path / "raw"), LineRecipe(chunk_rows=1_000), tmp_path / "cache"
    planned = fb.build(root, source, recipe, workers=0, end_chunk=4).chunks
    whole, left = fb.estimate(source, recipe), fb.estimate(source, recipe, into=root)
    total = left.chunks + planned
    assert left.rows == pytest.approx(whole.rows * left.chunks / total, rel=0.1)
    assert left.notes == (f"{left.chunks} of {total} planned chunk(s) are missing; these figures cover them",)
    last = fb.estimate(source, recipe, into=root, end_chunk=5, workers=8)
    assert (last.chunks, last.workers) == (1, 1)
    assert fb.estimate(source, LineRecipe(chunk_rows=500), into=root).chunks == pytest.approx(40, abs=2)
    fb.build(root, source, recipe, workers=0)
    done = fb.estimate(source, recipe, into=root)
    assert (done.chunks, done.rows, done.stored_bytes) == (0, 0, 0)
    assert done.notes == (f"nothing is missing: all {total} planned chunk(s) are present",)


def test_a_recipe_that_no_worker_can_open_is_estimated_as_well(tmp_path: Path) -> None:
    class Local(LineRecipe, frozen=True, kw_only=True):
        kind: ClassVar[str] = "local"

    write_lines(tmp_path / "raw/a.txt", 0, 100)
    assert fb.estimate(fb.sources.lines(tmp_path / "raw"), Local(), workers=2).rows == 100
