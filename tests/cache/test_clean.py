"""Cleaning: what dead processes left and what was replaced goes; nothing in use does."""

import os
import subprocess
import sys
import time
from pathlib import Path

import msgspec
import pytest
from tests.cache.test_status import put_claim
from tests.helpers.cache_files import layer_path
from tests.helpers.layer_recipes import (
    LineRecipe,
    flip,
    layered_cache,
    number_cache,
    tree,
    write_lines,
)

import forebay as fb
from forebay.cache.heartbeat import BuilderBeat
from forebay.errors import CacheNotFound, IndexCorrupt, TooManyFailures
from forebay.format import layout
from forebay.store.owners import Owner, this_host, this_process


def dead_owner() -> Owner:
    """A process that lived on this host and is gone."""
    code = "from forebay.store.owners import this_process; print(this_process())"
    said = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True).stdout
    owner = Owner.parse(said.strip())
    assert owner is not None
    return owner


def claim_name(root: Path, chunk: int) -> str:
    return f"{layer_path(root, 'numbers').name}/{chunk:06d}.json"


def temporary(root: Path, folder: str, owner: object) -> Path:
    path = root / folder / f".tmp-{owner}-0123abcd"
    path.write_bytes(b"half a chunk")
    return path


def test_temporary_files_of_dead_writers_go_and_those_of_live_ones_stay(tmp_path: Path) -> None:
    root = number_cache(tmp_path)
    gone = [temporary(root, layer_path(root, "numbers"), dead_owner()), temporary(root, "generations", dead_owner())]
    live = temporary(root, layer_path(root, "numbers"), this_process())
    remote = temporary(root, layer_path(root, "numbers"), "0123456789ab-17-4")
    old = temporary(root, "plan", "0123456789ab-17-5")
    os.utime(old, (1, 1))
    report = fb.clean(root)
    assert set(report.temporary) == {str(path.relative_to(root)) for path in [*gone, old]}
    assert report.freed_bytes == 36
    assert live.exists()
    assert remote.exists()
    assert not any(path.exists() for path in [*gone, old])
    assert fb.verify(root).foreign == ()


def test_heartbeats_of_dead_and_silent_builders_go_and_those_that_beat_keep_their_claims(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    root = number_cache(tmp_path)
    text = msgspec.json.encode(BuilderBeat(beat=3, host="there", pid=17))
    owners = [dead_owner(), "0123456789ab-17-4", "0123456789ab-18-4", this_process()]
    (root / "builders").mkdir(exist_ok=True)
    dead, silent, beating, own = (root / layout.builder(str(owner)) for owner in owners)
    for path in (dead, silent, beating, own, root / "builders/notes.json"):
        path.write_bytes(text)
    kept = put_claim(root, claim_name(root, 3), "0123456789ab-18-4")
    monkeypatch.setattr(time, "sleep", lambda seconds: beating.write_bytes(text.replace(b"3", b"4", 1)))
    report = fb.clean(root, lease_seconds=30)
    assert set(report.claims) == {str(path.relative_to(root)) for path in (dead, silent)}
    assert all(path.exists() for path in (beating, own, kept, root / "builders/notes.json"))


def test_a_name_that_another_builder_has_taken_while_clean_waited_stays(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    root = number_cache(tmp_path)
    taken = put_claim(root, claim_name(root, 7), dead_owner())
    silent = put_claim(root, claim_name(root, 8), "0123456789ab-1-1")  # to be waited for
    monkeypatch.setattr(time, "sleep", lambda seconds: put_claim(root, claim_name(root, 7), "ba9876543210-2-2"))
    assert fb.clean(root, lease_seconds=30).claims == (f"claims/{claim_name(root, 8)}",)
    assert (taken.exists(), silent.exists()) == (True, False)


@pytest.mark.parametrize(("keep", "left"), [(1, 1), (2, 2), (99, 7)])
def test_the_newest_so_many_generations_are_kept_and_always_one(tmp_path: Path, keep: int, left: int) -> None:
    root = number_cache(tmp_path)
    for number in range(3):
        write_lines(tmp_path / f"raw/c{number}.txt", 20 + 4 * number, 4)
        fb.update(root, fb.sources.lines(tmp_path / "raw"), recipe=LineRecipe(), workers=0)
    there = sorted((root / "generations").iterdir())
    report = fb.clean(root, keep_generations=keep)
    assert sorted((root / "generations").iterdir()) == there[-left:]
    assert report.generations == tuple(int(path.stem) for path in there[:-left])
    assert len(fb.open_cache(root)) == 32
    assert fb.verify(root).sound


def test_a_chunk_that_is_not_listed_yet_stays_for_the_next_build(tmp_path: Path) -> None:
    root = number_cache(tmp_path)
    (root / "generations/000000.safetensors").unlink()
    before = tree(root)
    assert fb.clean(root).superseded == ()
    assert tree(root) == before


def test_nothing_is_removed_where_a_generation_cannot_be_read(tmp_path: Path) -> None:
    """What it lists is unknown, so everything might be in use."""
    root = layered_cache(tmp_path)
    flip(root / "generations/000000.safetensors", 4500)
    before = tree(root)
    with pytest.raises(IndexCorrupt):
        fb.clean(root)
    assert tree(root) == before


def test_there_must_be_a_cache(tmp_path: Path) -> None:
    with pytest.raises(CacheNotFound):
        fb.clean(tmp_path)
    assert this_host() in str(this_process())


def test_no_generation_is_removed_before_those_that_stay_are_read(tmp_path):
    root = tmp_path / "cache"
    source = tmp_path / "a.txt"
    source.write_text("1\n2\n3\n4\n")
    fb.build(root, fb.sources.lines(source), LineRecipe(), workers=0)
    source.write_text("1\n2\n3\n4\n5\n6\n7\n8\n9\n")
    fb.update(root, fb.sources.lines(source), recipe=LineRecipe(), workers=0)
    generations = sorted((root / "generations").iterdir())
    assert len(generations) > 1
    flip(generations[-1], generations[-1].stat().st_size - 40)
    with pytest.raises(IndexCorrupt):
        fb.clean(root, keep_generations=1)
    assert sorted((root / "generations").iterdir()) == generations


def test_unpublished_segments_at_the_end_of_the_plan_are_all_given_up(tmp_path: Path) -> None:
    root = number_cache(tmp_path)
    source, recipe = fb.sources.lines(tmp_path / "raw"), LineRecipe()
    for name in ("x", "y"):
        (tmp_path / f"raw/{name}.txt").write_text("no number\n" * 8)
        with pytest.raises(TooManyFailures):
            fb.build(root, source, recipe, mode="inverse", workers=0, max_failures=0)
    assert fb.clean(root, unpublished=True).withdrawn == (1, 2)
    assert fb.clean(root, unpublished=True).withdrawn == ()
    for name in ("x", "y"):
        (tmp_path / f"raw/{name}.txt").write_text("7\n" * 8)
    fb.update(root, source, recipe=recipe, workers=0)
    assert len(fb.open_cache(root)) == 20 + 16
    assert fb.verify(root, full=True).sound
