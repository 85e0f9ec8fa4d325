"""Generations: immutable, derived from chunks, consistent whoever publishes at the same time."""

import os
from pathlib import Path

import pytest
from tests.helpers.cache_files import chunk_path, digests
from tests.helpers.obedient_recipes import ObedientRecipe, orders, write_orders

import forebay as fb
from forebay.cache.catalog import newest_generation
from forebay.cache.publish import Publisher
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


def test_a_pinned_generation_shows_the_same_rows_after_the_build_went_on(tmp_path):
    build(tmp_path / "cache", 6, start_chunk=3, end_chunk=4)
    pinned = fb.open_cache(tmp_path / "cache")
    before = [bytes(pinned[row]["id"]) for row in range(len(pinned))]
    build(tmp_path / "cache", 6)
    assert len(fb.open_cache(tmp_path / "cache")) == 12
    for cache in (pinned, fb.open_cache(tmp_path / "cache", generation=pinned.generation.number)):
        assert [bytes(cache[row]["id"]) for row in range(len(cache))] == before


def test_a_generation_under_the_number_of_another_is_refused(tmp_path):
    build(tmp_path / "cache", 4)
    folder = tmp_path / "cache/generations"
    (folder / "000007.safetensors").write_bytes((folder / "000000.safetensors").read_bytes())
    with pytest.raises(IndexCorrupt, match="it is generation 0"):
        fb.open_cache(tmp_path / "cache")


def test_a_generation_says_which_library_versions_made_its_chunks(tmp_path):
    build(tmp_path / "cache", 4)
    newest = newest_generation(LocalStore(tmp_path / "cache"))
    assert newest is not None
    assert {"python", "numpy", "zstd", "lz4"} <= set(newest.versions[0])


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


@pytest.mark.parametrize("content", [b"", b"not a chunk", bytes(8192), None])
def test_an_unlisted_file_that_is_not_the_chunk_is_made_again(tmp_path, content):
    build(tmp_path / "cache", 4, end_chunk=1)
    root = tmp_path / "cache"
    other = chunk_path(root, LAYER, 0).read_bytes() if content is None else content
    chunk_path(root, LAYER, 3).write_bytes(other)
    report = build(root, 4)
    assert (report.built, report.adopted) == (2, 0)
    assert fb.verify(root, full=True).sound


def test_a_chunk_that_is_listed_already_is_not_listed_again(tmp_path):
    build(tmp_path / "cache", 3)
    before = bytes_of_generations(tmp_path / "cache")
    assert build(tmp_path / "cache", 3).present == 3
    assert bytes_of_generations(tmp_path / "cache") == before


def test_chunks_made_before_an_interrupt_are_listed(tmp_path, monkeypatch):
    add = Publisher.add

    def interrupted(self, record, waits=False):
        add(self, record, waits)
        if record.chunk == 2:
            raise KeyboardInterrupt

    monkeypatch.setattr(Publisher, "add", interrupted)
    with pytest.raises(fb.errors.BuildStopped):
        build(tmp_path / "cache", 5)
    status = fb.status(tmp_path / "cache")
    assert (status.claims, status.layers[0].listed) == ((), 3)
