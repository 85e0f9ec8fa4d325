"""Same bytes: whatever the workers, the order, the ranges and the interruptions, the chunks are the same files.

reference     one build, forward, in this process
another way   some runs cut short at random moments, over random ranges, either way round; then one to the end
"""

import gzip
from collections.abc import Callable
from dataclasses import dataclass, replace
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import Literal

import pytest
import zstandard
from hypothesis import HealthCheck, given, reject, settings
from hypothesis import strategies as st
from tests.helpers.builders import chunk_digests
from tests.helpers.hypothesis_profiles import scaled

import forebay as fb
from forebay.cache.segment import decode_segment
from forebay.errors import BuildFailed, NotFound, TooManyFailures

STORED: dict[str, Callable[[bytes], bytes]] = {
    ".txt": bytes,
    ".txt.gz": lambda content: gzip.compress(content, 1, mtime=0),
    ".txt.zst": zstandard.ZstdCompressor(level=1).compress,
}


@dataclass(frozen=True)
class Run:
    """One run of a builder: which chunks, from which end, and after how many signs of life it is interrupted."""

    mode: Literal["forward", "inverse"]
    start: int | None
    end: int | None
    signs: int | None

    def carry_out(self, root: Path, source: fb.Source, recipe: fb.RawRecipe, workers: int) -> None:
        left = self.signs

        def listen(progress: fb.Progress) -> None:
            nonlocal left
            if left is not None:
                left -= 1
                if left < 0:
                    raise KeyboardInterrupt

        try:
            fb.build(
                root,
                source,
                recipe,
                workers=workers,
                mode=self.mode,
                start_chunk=self.start,
                end_chunk=self.end,
                on_progress=listen,
            )
        except KeyboardInterrupt:
            assert left is not None
            assert left < 0
        except NotFound:
            assert self.start  # beyond the plan, which is refused before anything is made
        except ValueError:
            assert self.start is not None
            assert self.end is not None
            assert self.start > self.end
        except TooManyFailures:
            assert (self.start, self.end) != (None, None)  # no sample of this range makes a row


LINES = st.lists(st.binary(max_size=90).map(lambda line: line.replace(b"\n", b" ") + b"\n"), max_size=40).map(b"".join)
FILES = st.lists(st.tuples(LINES | st.binary(max_size=300), st.sampled_from(list(STORED))), min_size=1, max_size=5)
RECIPES = st.builds(
    fb.RawRecipe,
    codec=st.sampled_from(["none", "lz4", "zstd"]),
    level=st.sampled_from(["fast", "default", "max"]),
    rows_per_block=st.integers(1, 9),
    chunk_bytes=st.integers(60, 1500),
    max_sample_bytes=st.sampled_from([40, 1000]),
)
MODES = st.sampled_from(["forward", "inverse"])
BOUNDS = st.none() | st.integers(0, 12)
PARTIAL_RUNS = st.lists(st.builds(Run, MODES, BOUNDS, BOUNDS, st.integers(0, 12)), max_size=4)
LAST_RUNS = st.builds(Run, MODES, st.none(), st.none(), st.none())
KINDS = st.sampled_from([fb.sources.lines, fb.sources.files])


def assert_same_bytes(contents, kind, recipe, runs, workers):
    with TemporaryDirectory() as name:
        folder = Path(name)
        (folder / "source").mkdir()
        for number, (content, suffix) in enumerate(contents):
            (folder / "source" / f"{number}{suffix}").write_bytes(STORED[suffix](content))
        source = kind(folder / "source")
        try:
            report = fb.build(folder / "reference", source, recipe, workers=0)
        except BuildFailed:  # no sample makes a row: that binds nothing, as tests/cache/test_nothing_made.py shows
            reject()
        for run in runs:
            run.carry_out(folder / "cache", source, recipe, workers)

        expected = chunk_digests(folder / "reference")
        assert chunk_digests(folder / "cache") == expected
        assert len(expected) == report.chunks
        assert plan_without_id(folder / "cache") == plan_without_id(folder / "reference")
        assert listed(folder / "cache") == listed(folder / "reference")
        assert not list((folder / "cache").rglob(".tmp-*"))
        assert not list((folder / "cache").rglob("claims/*/*"))


def plan_without_id(root: Path) -> bytes:
    """The first segment, but for the random id of the cache."""
    segment = decode_segment(memoryview((root / "plan/000000.safetensors").read_bytes()), str(root), "plan")
    return b"".join(replace(segment, cache_id="").encode())


def listed(root: Path) -> list[tuple[str, int, bytes]]:
    """What the newest generation says of every chunk."""
    if not list(root.glob("generations/*")):
        return []
    layers = fb.open_cache(root).generation.layers
    return [(name, record.rows, record.sha256) for name, table in layers.items() for record in table.records()]


@given(contents=FILES, kind=KINDS, recipe=RECIPES, partial=PARTIAL_RUNS, last=LAST_RUNS)
@settings(max_examples=scaled(60), deadline=None, suppress_health_check=[HealthCheck.too_slow])
def test_however_a_build_is_interrupted_ordered_and_split_its_chunks_are_the_same(
    contents, kind, recipe, partial, last
):
    assert_same_bytes(contents, kind, recipe, [*partial, last], workers=0)


@pytest.mark.slow
@pytest.mark.parametrize("workers", [1, 2, 4])
@given(
    contents=FILES, kind=KINDS, recipe=RECIPES, partial=PARTIAL_RUNS.filter(lambda runs: len(runs) < 3), last=LAST_RUNS
)
@settings(max_examples=3, deadline=None, suppress_health_check=list(HealthCheck))
def test_however_many_workers_make_them_the_chunks_are_the_same(workers, contents, kind, recipe, partial, last):
    assert_same_bytes(contents, kind, recipe, [*partial, last], workers)


@pytest.mark.long
@given(contents=FILES, kind=KINDS, recipe=RECIPES, partial=PARTIAL_RUNS, last=LAST_RUNS)
@settings(max_examples=2000, deadline=None, suppress_health_check=list(HealthCheck))
def test_two_thousand_builds_give_the_same_chunks(contents, kind, recipe, partial, last):
    assert_same_bytes(contents, kind, recipe, [*partial, last], workers=0)
