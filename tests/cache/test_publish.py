"""Generations: immutable, derived from chunks, consistent whoever publishes at the same time."""

import os
from pathlib import Path

import pytest
from tests.helpers.cache_files import chunk_path, digests
from tests.helpers.obedient_recipes import ObedientRecipe, orders, write_orders

import forebay as fb
from forebay.cache.catalog import newest_generation
from forebay.errors import BuildFailed, IndexCorrupt
from forebay.store import LocalStore

LAYER = "obedient"


def build(root: Path, chunks: int, **options):
    source = fb.sources.lines(write_orders(root.parent / "source.txt", orders(chunks)))
    os.utime(root.parent / "source.txt", (1, 1))
    return fb.build(root, source, ObedientRecipe(), workers=0, **options)


def bytes_of_generations(root: Path) -> dict[str, bytes]:
    return {path.name: path.read_bytes() for path in sorted((root / "generations").iterdir())}


def test_nothing_is_published_during_a_build_before_its_time(tmp_path):
    seen = []
    build(
        tmp_path / "cache",
        6,
        on_progress=lambda progress: seen.append(newest_generation(LocalStore(tmp_path / "cache"))),
    )
    assert seen
    assert set(seen) == {None}


def test_a_generation_never_changes_whatever_comes_after(tmp_path):
    root = tmp_path / "cache"
    before: dict[str, bytes] = {}
    for end in (1, 3, 5):
        build(root, 6, end_chunk=end)
        now = bytes_of_generations(root)
        assert now.items() >= before.items()
        assert len(now) == len(before) + 1
        before = now
    chunk_path(root, LAYER, 2).unlink()
    with pytest.raises(BuildFailed, match="repair"):
        build(root, 6)
    fb.clean(root)
    assert bytes_of_generations(root).items() >= before.items()


def test_a_generation_under_the_number_of_another_is_refused(tmp_path):
    build(tmp_path / "cache", 4)
    folder = tmp_path / "cache/generations"
    (folder / "000007.safetensors").write_bytes((folder / "000000.safetensors").read_bytes())
    with pytest.raises(IndexCorrupt, match="it is generation 0"):
        fb.open_cache(tmp_path / "cache")


def test_generations_appear_while_a_build_runs_and_can_be_opened(tmp_path, monkeypatch):
    monkeypatch.setattr("forebay.cache.publish.PUBLISH_SECONDS", 0.0)
    rows: list[int] = []

    def look(progress: fb.Progress) -> None:
        if progress.phase == "building" and progress.done:
            rows.append(len(fb.open_cache(tmp_path / "cache")))

    build(tmp_path / "cache", 6, on_progress=look)
    assert rows == sorted(rows)
    assert {2, 12} <= set(rows)


def test_chunks_that_no_generation_lists_are_adopted_with_the_record_of_their_maker(tmp_path):
    build(tmp_path / "cache", 4)
    first, files = newest_generation(LocalStore(tmp_path / "cache")), digests(tmp_path / "cache")
    for path in (tmp_path / "cache/generations").iterdir():
        path.unlink()
    assert build(tmp_path / "cache", 4).adopted == 4
    again = newest_generation(LocalStore(tmp_path / "cache"))
    assert first is not None
    assert again is not None
    assert again.table(LAYER).records() == first.table(LAYER).records()
    assert digests(tmp_path / "cache") == files
