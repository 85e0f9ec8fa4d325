"""The identities that a plan keeps: checked, copied, put back, cleaned; needed for growth and for nothing else."""

import shutil
from pathlib import Path

import pytest
from tests.helpers.cache_files import layer_path
from tests.helpers.dedup_cases import DistinctRecipe, rows_of, write_file
from tests.helpers.layer_recipes import flip, tree

import forebay as fb
from forebay.errors import IndexCorrupt

RECIPE = DistinctRecipe(chunk_bytes=60)


def grown_cache(folder: Path) -> Path:
    """A cache of two segments, some chunks of which are duplicates in part, in whole, or not at all."""
    write_file(folder / "source/a.txt", [b"a", b"b", b"a", b"c"])
    fb.build(folder / "cache", fb.sources.lines(folder / "source"), RECIPE, workers=0)
    write_file(folder / "source/b.txt", [b"a", b"d", b"d", b"b", b"e"])
    grow(folder)
    return folder / "cache"


def grow(folder: Path, root: Path | None = None) -> None:
    fb.update(root or folder / "cache", fb.sources.lines(folder / "source"), recipe=RECIPE, workers=0)


def identity_files(root: Path) -> list[str]:
    return [f"identities/{path.name}" for path in sorted((root / "identities").iterdir())]


def damage(path: Path, how: str) -> None:
    match how:
        case "gone":
            path.unlink()
        case "empty":
            path.write_bytes(b"")
        case "another":
            shutil.copy(next(other for other in path.parent.iterdir() if other != path), path)
        case _:
            flip(path, int(how))


@pytest.mark.parametrize("segment", [0, 1])
@pytest.mark.parametrize("how", ["gone", "empty", "another", "0", "100", "4100"])
def test_damage_is_found_stops_growth_alone_and_is_mended_from_the_source(tmp_path, segment, how):
    root = grown_cache(tmp_path)
    key, before = identity_files(root)[segment], tree(root)
    damage(root / key, how)
    report = fb.verify(root, full=True)
    assert [bad.key for bad in report.bad] == [key]
    assert report.foreign == ()
    assert rows_of(root) == [b"a", b"b", b"c", b"d", b"e"]
    fb.build(root, fb.sources.lines(tmp_path / "source"), RECIPE, workers=0)
    write_file(tmp_path / "source/c.txt", [b"a", b"f"])
    with pytest.raises(IndexCorrupt, match=rf"(?s)'{key}'.*forebay repair") as caught:
        grow(tmp_path)
    assert caught.value.facts["key"] == key
    with pytest.raises(IndexCorrupt, match=key):
        fb.copy(root, tmp_path / "copy")
    assert not (tmp_path / "copy").exists()
    (tmp_path / "source/c.txt").unlink()
    mended = fb.repair(root, recipe=RECIPE, workers=0)
    assert (mended.restored, mended.failed) == ((key,), {})
    assert tree(root) == before


def test_every_flipped_byte_is_found(tmp_path):
    root = grown_cache(tmp_path)
    key = identity_files(root)[1]
    for position in [*range(0, 4096, 97), *range(4080, (root / key).stat().st_size)]:
        flip(root / key, position, 1 << position % 8)
        assert [bad.key for bad in fb.verify(root).bad] == [key], position
        flip(root / key, position, 1 << position % 8)
    assert fb.verify(root).sound


def test_a_copy_carries_them_can_be_grown_and_gives_them_back(tmp_path):
    root = grown_cache(tmp_path)
    before = tree(root)
    fb.copy(root, tmp_path / "copy")
    assert identity_files(tmp_path / "copy") == identity_files(root)
    for key in identity_files(root):
        damage(root / key, "gone")
    damage(root / "plan/000001.safetensors", "4100")
    (tmp_path / "source").rename(tmp_path / "away")
    without = fb.repair(root, recipe=RECIPE, workers=0)
    assert sorted(without.failed) == [identity_files(tmp_path / "copy")[0], "plan/000001.safetensors"]
    assert fb.repair(root, copy=tmp_path / "copy", workers=0).failed == {}
    assert tree(root) == before
    (tmp_path / "away").rename(tmp_path / "source")
    write_file(tmp_path / "source/c.txt", [b"e", b"f", b"a"])
    grow(tmp_path, tmp_path / "copy")
    assert rows_of(tmp_path / "copy") == [b"a", b"b", b"c", b"d", b"e", b"f"]
    assert rows_of(root) == [b"a", b"b", b"c", b"d", b"e"]


def test_one_that_is_corrupt_in_the_copy_too_is_taken_from_the_source_again(tmp_path):
    root = grown_cache(tmp_path)
    before = tree(root)
    fb.copy(root, tmp_path / "copy")
    key = identity_files(root)[0]
    for place in (root, tmp_path / "copy"):
        damage(place / key, "4100")
    (tmp_path / "source").rename(tmp_path / "away")
    assert key in fb.repair(root, copy=tmp_path / "copy", recipe=RECIPE, workers=0).failed
    (tmp_path / "away").rename(tmp_path / "source")
    report = fb.repair(root, copy=tmp_path / "copy", recipe=RECIPE, workers=0)
    assert (report.restored, report.failed) == ((key,), {})
    assert tree(root) == before


def test_a_source_with_other_samples_does_not_give_them_back(tmp_path):
    root = grown_cache(tmp_path)
    key = identity_files(root)[0]
    damage(root / key, "gone")
    write_file(tmp_path / "source/a.txt", [b"a", b"b", b"a", b"x"])
    report = fb.repair(root, recipe=RECIPE, workers=0)
    assert "the source is planned differently now" in report.failed[key]
    assert not (root / key).exists()


def test_a_plan_and_its_identities_are_put_back_together_from_the_source(tmp_path):
    write_file(tmp_path / "source/a.txt", [b"a", b"b", b"a", b"c"])
    root = tmp_path / "cache"
    fb.build(root, fb.sources.lines(tmp_path / "source"), RECIPE, workers=0)
    before = tree(root)
    (key,) = identity_files(root)
    damage(root / key, "4100")
    damage(root / "plan/000000.safetensors", "4100")
    report = fb.repair(root, source=fb.sources.lines(tmp_path / "source"), recipe=RECIPE, workers=0)
    assert report.restored == ("plan/000000.safetensors", key)
    assert tree(root) == before


def test_chunks_are_repaired_without_their_duplicates(tmp_path):
    root = grown_cache(tmp_path)
    before = tree(root)
    for path in (layer_path(root, "distinct")).glob("0*"):
        path.unlink()
    assert fb.repair(root, recipe=RECIPE, workers=0).failed == {}
    assert tree(root) == before


def test_those_that_no_segment_names_are_cleaned_but_not_what_a_planner_may_yet_name(tmp_path):
    root = grown_cache(tmp_path)
    before = tree(root)
    loser, unborn = (root / f"identities/{number:06d}.0123456789abcdef.safetensors" for number in (1, 2))
    loser.write_bytes(b"of a planner that was second and died")
    unborn.write_bytes(b"of a planner that may be at work")
    assert fb.verify(root).foreign == ()
    assert fb.clean(root).superseded == ("identities/000001.0123456789abcdef.safetensors",)
    assert unborn.exists()
    unborn.unlink()
    assert fb.clean(root).superseded == ()
    assert tree(root) == before
