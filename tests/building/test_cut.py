"""Cutting: every byte once, in order, into chunks of the size that the recipe wants, capped."""

from pathlib import Path
from typing import ClassVar

import pytest
from hypothesis import given
from hypothesis import strategies as st
from tests.helpers.cache_files import layer_path

import forebay as fb
from forebay.building.cutting import cut_source
from forebay.building.trial import CAP_BYTES, Trial, chunk_weight, sample_probes, try_recipe
from forebay.recipe import ChunkTarget
from forebay.source import Part, SourceFile


class Cuttable:
    """Files of known sizes; where a unit is given, a part ends only at its multiples, as at the ends of lines."""

    unit: ClassVar[str] = "bytes"

    def __init__(self, grain: int | None) -> None:
        self._grain = grain

    def cuts(self, file: SourceFile, start: int, first: int, every: int):
        step, grain = first, self._grain or file.size
        while file.size and start + step < file.size:
            start = min(-(-(start + step) // grain) * grain, file.size)
            if start == file.size:
                break
            yield start
            step = every
        if file.size:
            yield file.size

    def scanned(self, file: SourceFile) -> SourceFile:
        return file

    def weight(self, file: SourceFile) -> int:
        return file.size


def quiet(done: int, total: int, size: int, total_bytes: int) -> None:
    pass


def files_of(sizes: list[int]) -> list[SourceFile]:
    return [SourceFile(f"{number:03d}", size) for number, size in enumerate(sizes)]


def weight_of(parts: list[Part]) -> int:
    return sum(part.weight for part in parts)


@given(
    sizes=st.lists(st.integers(0, 500), max_size=12), weight=st.integers(1, 300), grain=st.none() | st.integers(1, 40)
)
def test_every_byte_is_in_one_chunk_in_order_and_chunks_weigh_what_they_should(sizes, weight, grain):
    files = files_of(sizes)
    chunks = list(cut_source(Cuttable(grain), files, weight, {}, quiet))
    positions = [(part.file.path, at) for parts in chunks for part in parts for at in range(part.start, part.stop)]
    assert positions == [(file.path, at) for file in files for at in range(file.size)]
    assert all(chunks)
    for parts in chunks:
        assert weight_of(parts) <= 1.25 * weight or len(parts) == 1
    if grain is not None and 4 * grain <= weight:
        assert all(weight <= weight_of(parts) < weight + grain for parts in chunks[:-1])


@given(sizes=st.lists(st.integers(1, 100), min_size=1, max_size=8), planned=st.integers(0, 100))
def test_what_is_planned_already_is_left_out(sizes, planned):
    files = files_of(sizes)
    start = min(planned, sizes[0])
    chunks = list(cut_source(Cuttable(1), files, 30, {"000": start}, quiet))
    positions = [(part.file.path, at) for parts in chunks for part in parts for at in range(part.start, part.stop)]
    expected = [(file.path, at) for file in files for at in range(file.size)]
    assert positions == expected[start:]


def test_progress_counts_the_files_that_are_cut():
    seen = []
    list(cut_source(Cuttable(1), files_of([10, 20, 30]), 15, {}, lambda *progress: seen.append(progress)))
    assert seen[0] == (0, 3, 0, 60)
    assert seen[-1] == (3, 3, 60, 60)
    assert (1, 3, 10 + 20, 60) in seen
    assert seen == sorted(seen)


def trial(rows: float = 0.01, raw_bytes: float = 1.0) -> Trial:
    return Trial(1000, 0.0, 10, 0, 1000 * rows, round(1000 * raw_bytes), 4096, round(1000 * raw_bytes))


@pytest.mark.parametrize(
    ("target", "tried", "weight"),
    [
        (ChunkTarget(bytes=1_000_000), trial(raw_bytes=2.0), 500_000),
        (ChunkTarget(bytes=1_000_000), trial(raw_bytes=0.5), 2_000_000),
        (ChunkTarget(rows=50), trial(rows=0.01), 5000),
        (ChunkTarget(bytes=1), trial(raw_bytes=100.0), 1),
    ],
)
def test_a_slice_weighs_what_makes_the_chunk_that_the_recipe_wants(target, tried, weight):
    assert chunk_weight(target, tried) == weight


@pytest.mark.parametrize("target", [ChunkTarget(bytes=1 << 40), ChunkTarget(rows=1 << 40)])
@pytest.mark.parametrize("raw_bytes", [0.25, 1.0, 8.0])
def test_no_target_makes_chunks_of_more_than_128_mib(target, raw_bytes):
    weight = chunk_weight(target, trial(raw_bytes=raw_bytes))
    assert 0.75 * CAP_BYTES < weight * raw_bytes <= CAP_BYTES == 128 * 1024 * 1024


def test_files_that_cannot_be_cut_do_not_push_a_chunk_over_the_cap():
    tried = trial(raw_bytes=1.0)
    weight = chunk_weight(ChunkTarget(bytes=1 << 40), tried)
    sizes = [50 << 20] * 10 + [100 << 20] * 3 + [300 << 20, 1 << 20]
    chunks = list(cut_source(Cuttable(None), files_of(sizes), weight, {}, quiet))
    assert [size for size in map(weight_of, chunks) if size > CAP_BYTES] == [300 << 20]
    assert sum(map(weight_of, chunks)) == sum(sizes)


def test_chunks_come_out_about_as_large_as_asked(tmp_path: Path):
    (tmp_path / "source.txt").write_bytes(b"".join(b"%d " % number * (number % 17) + b"\n" for number in range(20_000)))
    source = fb.sources.lines(tmp_path / "source.txt")
    recipe = fb.RawRecipe(chunk_bytes=100_000, codec="none")
    fb.build(tmp_path / "cache", source, recipe, workers=0)
    sizes = [path.stat().st_size for path in sorted((layer_path(tmp_path / "cache", "raw")).glob("0*.safetensors"))]
    assert len(sizes) > 8
    assert all(70_000 < size < 140_000 for size in sizes[:-1])


def test_a_trial_takes_a_small_share_of_a_large_source_and_repeats_itself(tmp_path: Path):
    (tmp_path / "source.txt").write_bytes(b"".join(b"%0100d\n" % number for number in range(70_000)))
    source = fb.sources.lines(tmp_path / "source.txt")
    first, second = (try_recipe(source, source.files(), fb.RawRecipe()) for _ in range(2))
    assert first.weight < 5 * 1024 * 1024 < source.files()[0].size
    assert (first.rows, first.raw_bytes, first.weight) == (second.rows, second.raw_bytes, second.weight)


def test_a_trial_of_files_that_cannot_be_cut_takes_a_few_of_them():
    files = files_of([900_000] * 20)
    probes = sample_probes(Cuttable(None), files, 512_000)
    assert [part.file.path for parts in probes for part in parts] == ["005", "015"]
    assert len(sample_probes(Cuttable(None), files_of([100_000] * 20), 512_000)) == 20
    assert len(sample_probes(Cuttable(None), files_of([900] * 20), 512)) == 20  # so little that all of it is tried
