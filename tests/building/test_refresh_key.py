"""Refreshing under a key: an amended plan is signed only by whoever planned it, or compared it with the source."""

import os
import shutil
from pathlib import Path

import pytest
from tests.cache.test_key import forge
from tests.layer_recipes import LengthLayer, LineRecipe, layered_cache, number_cache

import forebay as fb
from forebay.building.refresh_cache import amend_plan
from forebay.cache.catalog import Snapshot
from forebay.errors import KeyRefused
from forebay.format.tensors import VARIABLE

AMENDMENT = "plan/000001.safetensors"


@pytest.fixture(autouse=True)
def key(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv(VARIABLE, "a secret")


def source(root: Path) -> fb.Source:
    return fb.sources.lines(root.parent / "raw")


def refresh(root: Path, **options):
    recipes = {"numbers": LineRecipe(), "length": LengthLayer()}
    return fb.refresh(root, source=source(root), recipes=recipes, workers=0, **options)


def numbers(root: Path) -> list[int]:
    cache = fb.open_cache(root, layers=["numbers"])
    return cache.read(range(len(cache)), ["number"])["number"].tolist()


def expected(root: Path) -> list[int]:
    paths = sorted((root.parent / "raw").iterdir())
    return [int(line) for path in paths for line in path.read_bytes().splitlines()]


def edit(root: Path) -> None:
    path = root.parent / "raw/a.txt"
    path.write_bytes(path.read_bytes().replace(b"000004\n", b"000777\n"))


def forge_amendment(root: Path) -> None:
    """Put an amendment into a plan that says what the source never held when it was the user's."""
    path = root.parent / "raw/a.txt"
    before, times = path.read_bytes(), path.stat()
    edit(root)
    amend_plan(Snapshot.take(fb.LocalStore(root)), source(root))
    path.write_bytes(before)
    os.utime(path, ns=(times.st_atime_ns, times.st_mtime_ns))


def assert_whole(root: Path) -> None:
    assert numbers(root) == expected(root)
    report = fb.verify(root, source=source(root), full=True)
    assert report.sound
    assert (report.stale, report.gaps) == ({}, {})
    assert fb.build(root, source(root), LineRecipe(), workers=0).made == 0
    assert refresh(root).chunks == ()


def test_an_edited_file_is_refreshed_and_signed_with_the_layers_above(tmp_path: Path) -> None:
    root = layered_cache(tmp_path)
    edit(root)
    report = refresh(root)
    assert list(report.changed) == ["a.txt"]
    assert (report.missing, list(report.layers)) == ({}, ["length"])
    assert fb.open_cache(root).generation.tagged
    assert len(fb.open_cache(root).generation.plan) == 2
    assert_whole(root)


def test_an_amendment_that_no_tag_covers_is_neither_worked_by_nor_signed(tmp_path: Path) -> None:
    root = number_cache(tmp_path)
    before = numbers(root)
    forge_amendment(root)
    for call, advice in (
        (lambda: fb.build(root, source(root), LineRecipe(), workers=0), "run `forebay refresh"),
        (lambda: fb.grow(root, source(root), recipe=LineRecipe(), workers=0), "run `forebay refresh"),
        (lambda: refresh(root), "delete it if nobody runs `forebay refresh` now"),
    ):
        with pytest.raises(KeyRefused, match=rf"{AMENDMENT}.*no tagged generation covers it.*{advice}"):
            call()
    fb.build(root, None, LengthLayer(), workers=0)  # a layer stands on what is published
    assert len(fb.open_cache(root).generation.plan) == 1
    assert numbers(root) == before
    assert fb.verify(root, source=source(root)).stale == {}
    fb.copy(root, tmp_path / "copy")
    assert not (tmp_path / "copy" / AMENDMENT).exists()
    (root / AMENDMENT).unlink()
    refresh(root)
    assert_whole(root)


def test_a_refresh_that_died_before_it_published_is_resumed_by_a_refresh(tmp_path: Path) -> None:
    root = number_cache(tmp_path)
    edit(root)
    amend_plan(Snapshot.take(fb.LocalStore(root)), source(root))
    with pytest.raises(KeyRefused, match="run `forebay refresh"):
        fb.build(root, source(root), LineRecipe(), workers=0)
    assert len(refresh(root).chunks) == 1
    assert_whole(root)


def test_a_revision_that_somebody_put_there_is_made_again(tmp_path: Path) -> None:
    root = number_cache(tmp_path)
    edit(root)
    published = len(list((root / "generations").iterdir()))
    (chunk,) = refresh(root).chunks
    for path in sorted((root / "generations").iterdir())[published:]:
        path.unlink()
    forge(root / f"layers/numbers/{chunk:06d}.r1.safetensors")
    refresh(root)
    assert_whole(root)


def test_what_a_refresh_did_is_copied_rekeyed_cleaned_and_repaired(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    root = layered_cache(tmp_path)
    edit(root)
    (chunk,) = refresh(root).chunks
    superseded = fb.clean(root, keep_generations=1).superseded
    assert sorted(superseded) == [f"layers/{layer}/{chunk:06d}.safetensors" for layer in ("length", "numbers")]
    fb.copy(root, tmp_path / "copy")
    (root / AMENDMENT).unlink()
    assert "or was refreshed" in fb.repair(root, source=source(root), recipe=LineRecipe(), workers=0).failed[AMENDMENT]
    assert fb.repair(root, copy=tmp_path / "copy", workers=0).failed == {}
    fb.rekey(root, old_key=b"a secret", new_key=b"another key of 16 bytes")
    monkeypatch.setenv(VARIABLE, "another key of 16 bytes")
    assert_whole(root)


def test_with_every_generation_gone_an_amended_plan_is_not_believed(tmp_path: Path) -> None:
    root = number_cache(tmp_path)
    edit(root)
    refresh(root)
    shutil.rmtree(root / "generations")
    with pytest.raises(KeyRefused):
        refresh(root)
    with pytest.raises(KeyRefused):
        fb.build(root, source(root), LineRecipe(), workers=0)
