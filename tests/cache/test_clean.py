"""Cleaning: what dead processes left and what was replaced goes; nothing in use does."""

import os
import subprocess
import sys
import time
from pathlib import Path

import msgspec
import pytest
from tests.cache.test_status import put_claim
from tests.layer_recipes import (
    MOOD,
    LineRecipe,
    MoodyRecipe,
    flip,
    identities,
    layered_cache,
    number_cache,
    tree,
    write_lines,
)

import forebay as fb
from forebay.cache import clean as clean_module
from forebay.cache.claims import BuilderBeat, Claims
from forebay.errors import CacheNotFound, IndexCorrupt
from forebay.format import layout
from forebay.store.base import Owner, this_host, this_process


def dead_owner() -> Owner:
    """A process that lived on this host and is gone."""
    code = "from forebay.store.base import this_process; print(this_process())"
    said = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True).stdout
    owner = Owner.parse(said.strip())
    assert owner is not None
    return owner


def temporary(root: Path, folder: str, owner: object) -> Path:
    path = root / folder / f".tmp-{owner}-0123abcd"
    path.write_bytes(b"half a chunk")
    return path


def revised_cache(folder: Path) -> Path:
    """A cache whose chunk 1 was replaced by a revision in its second generation."""
    write_lines(folder / "raw/a.txt", 0, 12)
    root, source = folder / "cache", fb.sources.lines(folder / "raw")
    fb.build(root, source, MoodyRecipe(), workers=0)
    flip(root / "layers/moody/000001.safetensors", 4300)
    MOOD["add"] = 1
    try:
        fb.repair(root, source=source, recipe=MoodyRecipe(), workers=0)
    finally:
        MOOD["add"] = 0
    return root


def test_a_clean_cache_is_left_as_it_is(tmp_path: Path) -> None:
    root = number_cache(tmp_path)
    before = identities(root)
    report = fb.clean(root)
    assert (report.temporary, report.claims, report.superseded, report.generations, report.freed_bytes) == (
        (),
        (),
        (),
        (),
        0,
    )
    assert identities(root) == before


def test_temporary_files_of_dead_writers_go_and_those_of_live_ones_stay(tmp_path: Path) -> None:
    root = number_cache(tmp_path)
    gone = [temporary(root, "layers/numbers", dead_owner()), temporary(root, "generations", dead_owner())]
    live = temporary(root, "layers/numbers", this_process())
    remote = temporary(root, "layers/numbers", "0123456789ab-17-4")
    old = temporary(root, "plan", "0123456789ab-17-5")
    os.utime(old, (1, 1))
    report = fb.clean(root)
    assert set(report.temporary) == {str(path.relative_to(root)) for path in [*gone, old]}
    assert report.freed_bytes == 36
    assert live.exists()
    assert remote.exists()
    assert not any(path.exists() for path in [*gone, old])
    assert fb.verify(root).foreign == ()


def test_claims_of_dead_builders_and_of_chunks_that_are_there_go(tmp_path: Path) -> None:
    write_lines(tmp_path / "raw/a.txt", 0, 20)
    root = tmp_path / "cache"
    fb.build(root, fb.sources.lines(tmp_path / "raw"), LineRecipe(), workers=0, end_chunk=2)
    dead = put_claim(root, "numbers/000003.1.json", dead_owner())
    failed = put_claim(root, "numbers/000003.2.json", dead_owner(), state="failed", reason="no mood")
    done = put_claim(root, "numbers/000000.1.json", "0123456789ab-17-4")
    live = put_claim(root, "numbers/000004.1.json", this_process())
    report = fb.clean(root, lease_seconds=0.2)
    assert set(report.claims) == {str(path.relative_to(root)) for path in (dead, failed, done)}
    assert live.exists()
    assert not any(path.exists() for path in (dead, failed, done))


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
    kept = put_claim(root, "numbers/000003.1.json", "0123456789ab-18-4")
    monkeypatch.setattr(time, "sleep", lambda seconds: beating.write_bytes(text.replace(b"3", b"4", 1)))
    report = fb.clean(root, lease_seconds=30)
    assert set(report.claims) == {str(path.relative_to(root)) for path in (dead, silent)}
    assert all(path.exists() for path in (beating, own, kept, root / "builders/notes.json"))


def test_claims_of_other_hosts_go_only_when_they_stay_silent_for_a_lease(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    write_lines(tmp_path / "raw/a.txt", 0, 20)
    root = tmp_path / "cache"
    fb.build(root, fb.sources.lines(tmp_path / "raw"), LineRecipe(), workers=0, end_chunk=0)
    silent = put_claim(root, "numbers/000003.1.json", "0123456789ab-17-4", beat=5)
    beating = put_claim(root, "numbers/000004.1.json", "0123456789ab-18-4", beat=1)

    def beat_meanwhile(seconds: float) -> None:
        assert seconds == 30
        put_claim(root, "numbers/000004.1.json", "0123456789ab-18-4", beat=2)

    monkeypatch.setattr(time, "sleep", beat_meanwhile)
    report = fb.clean(root, lease_seconds=30)
    assert report.claims == ("claims/numbers/000003.1.json",)
    assert not silent.exists()
    assert beating.exists()


def test_a_name_that_another_builder_has_taken_while_clean_waited_stays(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    root = number_cache(tmp_path)
    taken = put_claim(root, "numbers/000007.1.json", dead_owner())
    silent = put_claim(root, "numbers/000008.1.json", "0123456789ab-1-1")  # to be waited for
    monkeypatch.setattr(time, "sleep", lambda seconds: put_claim(root, "numbers/000007.1.json", "ba9876543210-2-2"))
    assert fb.clean(root, lease_seconds=30).claims == ("claims/numbers/000008.1.json",)
    assert (taken.exists(), silent.exists()) == (True, False)


def test_a_claim_that_was_given_back_goes_unless_the_next_one_is_in_use(tmp_path: Path) -> None:
    root, mine = number_cache(tmp_path), Claims(fb.LocalStore(tmp_path / "cache"), "numbers", "here")
    for chunk in (7, 8):
        assert mine.take(chunk)
        mine.give_back(chunk)
    assert fb.status(root).claims == ()
    assert mine.take(8)
    assert fb.clean(root, lease_seconds=30).claims == (layout.claim("numbers", 7, 1),)
    mine.release_all()
    assert not list((root / "claims").rglob("*.json"))


def test_what_any_generation_lists_stays(tmp_path: Path) -> None:
    root = revised_cache(tmp_path)
    before = tree(root)
    report = fb.clean(root)
    assert report.superseded == ()
    assert tree(root) == before


def test_with_its_generation_the_replaced_chunk_goes(tmp_path: Path) -> None:
    root = revised_cache(tmp_path)
    rows = fb.open_cache(root).read(range(12))["number"].tolist()
    size = (root / "layers/moody/000001.safetensors").stat().st_size
    old = (root / "generations/000000.safetensors").stat().st_size
    report = fb.clean(root, keep_generations=1)
    assert report.generations == (0,)
    assert report.superseded == ("layers/moody/000001.safetensors",)
    assert report.freed_bytes == size + old
    assert fb.open_cache(root).read(range(12))["number"].tolist() == rows
    assert fb.verify(root, full=True).sound
    assert fb.status(root).complete
    assert fb.build(root, fb.sources.lines(tmp_path / "raw"), MoodyRecipe(), workers=0).made == 0


@pytest.mark.parametrize(("keep", "left"), [(1, 1), (2, 2), (99, 7), (0, 1), (-3, 1)])
def test_the_newest_so_many_generations_are_kept_and_always_one(tmp_path: Path, keep: int, left: int) -> None:
    root = number_cache(tmp_path)
    for number in range(3):
        write_lines(tmp_path / f"raw/c{number}.txt", 20 + 4 * number, 4)
        fb.grow(root, fb.sources.lines(tmp_path / "raw"), recipe=LineRecipe(), workers=0)
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


def test_a_revision_that_no_generation_lists_goes(tmp_path: Path) -> None:
    root = number_cache(tmp_path)
    (root / "layers/numbers/000001.r1.safetensors").write_bytes(b"left by a repair that died")
    assert fb.clean(root).superseded == ("layers/numbers/000001.r1.safetensors",)
    assert fb.verify(root).sound


def test_nothing_is_removed_where_a_generation_cannot_be_read(tmp_path: Path) -> None:
    """What it lists is unknown, so everything might be in use."""
    root = revised_cache(tmp_path)
    flip(root / "generations/000000.safetensors", 4500)
    before = tree(root)
    with pytest.raises(IndexCorrupt):
        fb.clean(root)
    assert tree(root) == before


def test_foreign_files_are_not_ours_to_remove(tmp_path: Path) -> None:
    root = number_cache(tmp_path)
    (root / "notes.txt").write_text("mine")
    (root / "layers/numbers/mine.safetensors").write_text("mine")
    fb.clean(root, keep_generations=1)
    assert fb.verify(root).foreign == ("layers/numbers/mine.safetensors", "notes.txt")


def test_only_what_is_a_claim_to_the_letter_is_taken_for_one(tmp_path: Path) -> None:
    root = number_cache(tmp_path)
    strays = ["notes.txt", ".DS_Store", "000001.json", "0000001.1.json", "000001.1.json.bak", "000001.1.txt"]
    strays += ["deep/000001.1.json", f"000001.{10**9}.json", "000001.01.json"]
    for name in strays:
        path = root / "claims/numbers" / name
        path.parent.mkdir(parents=True, exist_ok=True)
        path.write_text("mine")
    report = fb.clean(root, lease_seconds=0.1)
    assert report.claims == ()
    assert all((root / "claims/numbers" / name).read_text() == "mine" for name in strays)


@pytest.mark.parametrize("name", ["0000001.r1.safetensors", "old/000001.r1.safetensors", "000001.r01.safetensors"])
def test_only_what_is_a_chunk_to_the_letter_is_superseded(tmp_path: Path, name: str) -> None:
    root = number_cache(tmp_path)
    path = root / "layers/numbers" / name
    path.parent.mkdir(exist_ok=True)
    path.write_text("mine")
    assert fb.clean(root).superseded == ()
    assert path.read_text() == "mine"


def test_one_lease_is_waited_for_all_layers_together(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    root = layered_cache(tmp_path)
    claims = [put_claim(root, f"{layer}/000009.1.json", "0123456789ab-17-4") for layer in ("numbers", "length")]
    slept: list[float] = []
    monkeypatch.setattr(time, "sleep", slept.append)
    assert len(fb.clean(root, lease_seconds=30).claims) == 2
    assert slept == [30]
    assert not any(path.exists() for path in claims)


@pytest.mark.parametrize("text", ["", "{", "[" * 100_000, '{"owner": "²-²-²", "host": [], "pid": 1}', "\xff"])
def test_a_claim_that_cannot_be_read_expires_after_one_lease(tmp_path: Path, text: str) -> None:
    root = number_cache(tmp_path)
    path = root / "claims/numbers/000009.1.json"
    path.parent.mkdir(parents=True, exist_ok=True)
    path.write_bytes(text.encode("latin-1", "replace"))
    assert fb.clean(root, lease_seconds=0.1).claims == ("claims/numbers/000009.1.json",)


def test_a_revision_that_is_about_to_be_listed_stays(tmp_path: Path) -> None:
    """Its claim is held until a generation lists it, however often somebody cleans meanwhile."""
    write_lines(tmp_path / "raw/a.txt", 0, 40)
    root, source = tmp_path / "cache", fb.sources.lines(tmp_path / "raw")
    fb.build(root, source, MoodyRecipe(), workers=0)
    bad = [1, 4, 7]
    for chunk in bad:
        flip(root / f"layers/moody/{chunk:06d}.safetensors", 4300)
    cleaned: list[str] = []

    def clean(progress: fb.Progress) -> None:
        cleaned.extend(fb.clean(root, lease_seconds=0).superseded)

    MOOD["add"] = 1
    try:
        report = fb.repair(root, source=source, recipe=MoodyRecipe(), workers=0, on_progress=clean)
    finally:
        MOOD["add"] = 0
    assert sorted(report.replaced) == [f"layers/moody/{chunk:06d}.r1.safetensors" for chunk in bad]
    assert cleaned == []
    assert fb.verify(root, full=True).sound
    assert not list((root / "claims").rglob("*.json"))


def test_there_must_be_a_cache(tmp_path: Path) -> None:
    with pytest.raises(CacheNotFound):
        fb.clean(tmp_path)
    assert this_host() in str(this_process())


def test_what_is_refreshed_while_clean_looks_around_stays(tmp_path, monkeypatch):
    """A refresh that publishes between two looks of `clean` must not lose its new revisions."""
    root, source = tmp_path / "cache", tmp_path / "source"
    source.mkdir()
    for number in range(3):
        (source / f"{number}.txt").write_text("".join(f"{number}{line}\n" for line in range(8)))
    files = fb.sources.lines(str(source / "*.txt"))
    fb.build(root, files, LineRecipe(), workers=0)
    (source / "1.txt").write_text("".join(f"9{line}\n" for line in range(8)))
    looked = clean_module.read_claims
    calls = []

    def refresh_first(store, layer):
        if not calls:
            calls.append(layer)
            fb.refresh(root, recipes={"numbers": LineRecipe()}, source=files, workers=0)
        return looked(store, layer)

    monkeypatch.setattr(clean_module, "read_claims", refresh_first)
    fb.clean(root, lease_seconds=0)
    assert calls
    assert fb.verify(root, source=files, full=True).sound


def test_no_generation_is_removed_before_those_that_stay_are_read(tmp_path):
    root = tmp_path / "cache"
    source = tmp_path / "a.txt"
    source.write_text("1\n2\n3\n4\n")
    fb.build(root, fb.sources.lines(source), LineRecipe(), workers=0)
    source.write_text("1\n2\n3\n4\n5\n6\n7\n8\n9\n")
    fb.grow(root, fb.sources.lines(source), recipe=LineRecipe(), workers=0)
    generations = sorted((root / "generations").iterdir())
    assert len(generations) > 1
    flip(generations[-1], generations[-1].stat().st_size - 40)
    with pytest.raises(IndexCorrupt):
        fb.clean(root, keep_generations=1)
    assert sorted((root / "generations").iterdir()) == generations
