"""Repairing: exactly what is bad is put back, to the byte; nothing else is touched."""

import os
import shutil
from importlib.metadata import EntryPoint
from pathlib import Path
from typing import ClassVar

import msgspec
import numpy as np
import pytest
from tests.builders import chunk_digests
from tests.layer_recipes import (
    MOOD,
    LengthLayer,
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
from forebay.cache.catalog import load_generation
from forebay.errors import BuildStopped, FormatTooNew, IndexCorrupt, NothingPublished
from forebay.format.chunk import ChunkFile
from forebay.format.layout import FORMAT_VERSION
from forebay.format.tensors import seal
from forebay.kinds import RECIPES, own_kinds


@pytest.fixture
def mood():
    yield MOOD
    MOOD["add"] = 0


def moody_cache(folder: Path) -> tuple[Path, fb.Source]:
    write_lines(folder / "raw/a.txt", 0, 12)
    source = fb.sources.lines(folder / "raw")
    fb.build(folder / "cache", source, MoodyRecipe(), workers=0)
    return folder / "cache", source


def test_a_sound_cache_is_left_alone(tmp_path: Path) -> None:
    root = layered_cache(tmp_path)
    before = identities(root)
    report = fb.repair(root, recipe=LineRecipe(), workers=0)
    assert (report.restored, report.replaced, report.failed, report.generation) == ((), {}, {}, 2)
    assert identities(root) == before


def test_exactly_what_is_bad_or_missing_is_made_again_and_is_the_same_to_the_byte(tmp_path: Path) -> None:
    root = layered_cache(tmp_path)
    before, files = tree(root), identities(root)
    bad = {f"layers/numbers/{chunk:06d}.safetensors" for chunk in (0, 2, 4)}
    flip(root / "layers/numbers/000000.safetensors", 4300)
    (root / "layers/numbers/000002.safetensors").write_bytes(b"")
    (root / "layers/numbers/000004.safetensors").unlink()
    report = fb.repair(root, recipe=LineRecipe(), workers=0)
    assert set(report.restored) == bad
    assert (report.replaced, report.failed, report.generation) == ({}, {}, 2)
    assert tree(root) == before
    after = identities(root)
    assert {name for name in files if after[name] != files[name]} == bad
    assert fb.verify(root, full=True).sound


def test_chunks_of_a_layer_are_made_again_from_the_base(tmp_path: Path) -> None:
    root = layered_cache(tmp_path)
    before = tree(root)
    flip(root / "layers/length/000001.safetensors", 100)
    flip(root / "layers/numbers/000001.safetensors", 100)
    first = fb.repair(root, recipe=LineRecipe(), workers=0)
    assert first.restored == ("layers/numbers/000001.safetensors",)
    assert "no recipe of kind 'length' is installed" in first.failed["layers/length/000001.safetensors"]
    second = fb.repair(root, recipe=LengthLayer(), workers=0)
    assert second.restored == ("layers/length/000001.safetensors",)
    assert tree(root) == before


def test_a_cache_of_installed_kinds_needs_nothing_but_its_root(tmp_path: Path) -> None:
    write_lines(tmp_path / "raw/a.txt", 0, 100)
    root = tmp_path / "cache"
    fb.build(root, fb.sources.lines(tmp_path / "raw"), fb.RawRecipe(chunk_bytes=300), workers=0)
    before = tree(root)
    for path in sorted((root / "layers/raw").glob("0*"))[::2]:
        flip(path, 4200)
    report = fb.repair(root, workers=2)
    assert len(report.restored) > 1
    assert not report.failed
    assert tree(root) == before


def test_an_inverse_build_checks_what_is_there_and_mends_it(tmp_path: Path) -> None:
    root = number_cache(tmp_path)
    before = tree(root)
    flip(root / "layers/numbers/000003.safetensors", 4300)
    fb.build(root, fb.sources.lines(tmp_path / "raw"), LineRecipe(), workers=0, mode="inverse")
    assert tree(root) == before


def test_chunks_come_from_a_copy_when_the_source_is_gone(tmp_path: Path) -> None:
    root = layered_cache(tmp_path)
    fb.copy(root, tmp_path / "copy")
    before = tree(root)
    shutil.rmtree(tmp_path / "raw")
    bad = ["layers/length/000003.safetensors", "layers/numbers/000000.safetensors", "layers/numbers/000001.safetensors"]
    flip(root / bad[0], 4200)
    flip(root / bad[1], 4200)
    (root / bad[2]).unlink()
    without = fb.repair(root, recipe=LineRecipe(), workers=0)
    assert set(without.failed) == set(bad)
    assert sorted(fb.repair(root, copy=tmp_path / "copy", workers=0).restored) == bad
    assert tree(root) == before


def test_a_chunk_that_is_corrupt_in_the_copy_too_is_made_again(tmp_path: Path) -> None:
    root = number_cache(tmp_path)
    fb.copy(root, tmp_path / "copy")
    before = tree(root)
    for place in (root, tmp_path / "copy"):
        flip(place / "layers/numbers/000001.safetensors", 4300)
    report = fb.repair(root, copy=tmp_path / "copy", recipe=LineRecipe(), workers=0)
    assert report.restored == ("layers/numbers/000001.safetensors",)
    assert tree(root) == before


def test_a_source_that_changed_makes_no_chunk(tmp_path: Path) -> None:
    root = number_cache(tmp_path)
    (root / "layers/numbers/000000.safetensors").unlink()
    (tmp_path / "raw/a.txt").write_bytes(b"999999\n" * 10)
    report = fb.repair(root, recipe=LineRecipe(), workers=0)
    assert "a.txt" in report.failed["layers/numbers/000000.safetensors"]
    assert not list((root / "layers/numbers").glob("000000*"))


@pytest.mark.parametrize("gone", [False, True])
@pytest.mark.parametrize(
    "key",
    ["cache.json", "layers/numbers/recipe.json", "layers/numbers/constants.safetensors", "plan/000000.safetensors"],
)
def test_what_describes_the_cache_is_put_back_to_the_byte(tmp_path: Path, key: str, gone: bool) -> None:
    root = number_cache(tmp_path)
    before = tree(root)
    flip(root / key, 40)
    if gone:
        (root / key).unlink()
    source = fb.sources.lines(tmp_path / "raw")
    report = fb.repair(root, source=source, recipe=LineRecipe(), workers=0)
    assert (report.restored, report.replaced, report.failed) == ((key,), {}, {})
    assert tree(root) == before
    assert fb.verify(root).sound


def test_all_of_the_index_and_a_chunk_at_once(tmp_path: Path) -> None:
    root = number_cache(tmp_path)
    before = tree(root)
    for key in (
        "cache.json",
        "layers/numbers/recipe.json",
        "layers/numbers/constants.safetensors",
        "plan/000000.safetensors",
    ):
        (root / key).write_bytes(b"")
    flip(root / "layers/numbers/000002.safetensors", 4300)
    report = fb.repair(root, source=fb.sources.lines(tmp_path / "raw"), recipe=LineRecipe(), workers=0)
    assert len(report.restored) == 5
    assert tree(root) == before


def test_a_plan_without_its_source_says_what_would_help(tmp_path: Path) -> None:
    root = number_cache(tmp_path)
    fb.copy(root, tmp_path / "copy")
    before = tree(root)
    flip(root / "plan/000000.safetensors", 4200)
    shutil.rmtree(tmp_path / "raw")
    report = fb.repair(root, recipe=LineRecipe(), workers=0)
    assert "--from COPY" in report.failed["plan/000000.safetensors"]
    assert "source" in report.failed["plan/000000.safetensors"]
    assert fb.repair(root, copy=tmp_path / "copy", workers=0).restored == ("plan/000000.safetensors",)
    assert tree(root) == before


def test_a_plan_whose_source_was_touched_is_not_guessed(tmp_path: Path) -> None:
    root = number_cache(tmp_path)
    flip(root / "plan/000000.safetensors", 4200)
    os.utime(tmp_path / "raw/a.txt", ns=(1, 1))
    report = fb.repair(root, source=fb.sources.lines(tmp_path / "raw"), recipe=LineRecipe(), workers=0)
    assert "planning the source again gave another plan" in report.failed["plan/000000.safetensors"]


def test_a_plan_that_grew_comes_back_from_a_copy_only(tmp_path: Path) -> None:
    root = number_cache(tmp_path)
    source = fb.sources.lines(tmp_path / "raw")
    write_lines(tmp_path / "raw/c.txt", 20, 4)
    fb.grow(root, source, recipe=LineRecipe(), workers=0)
    fb.copy(root, tmp_path / "copy")
    before = tree(root)
    (root / "plan/000001.safetensors").unlink()
    report = fb.repair(root, source=source, recipe=LineRecipe(), workers=0)
    assert "--from COPY" in report.failed["plan/000001.safetensors"]
    assert fb.repair(root, copy=tmp_path / "copy", workers=0).restored == ("plan/000001.safetensors",)
    assert tree(root) == before


def test_constants_that_now_come_out_differently_are_not_put_back(tmp_path: Path) -> None:
    root = layered_cache(tmp_path)
    flip(root / "layers/length/constants.safetensors", 4100)
    report = fb.repair(root, recipe=LineRecipe(), workers=0)
    assert "no recipe of kind 'length'" in report.failed["layers/length/constants.safetensors"]
    assert fb.repair(root, recipe=LengthLayer(), workers=0).restored == ("layers/length/constants.safetensors",)


def test_a_damaged_newest_generation_is_published_again_under_a_new_number(tmp_path: Path) -> None:
    root = layered_cache(tmp_path)
    rows = fb.open_cache(root, layers=["length"]).read(range(20))
    flip(root / "generations/000002.safetensors", 5000)
    with pytest.raises(IndexCorrupt, match="forebay repair"):
        fb.open_cache(root)
    report = fb.repair(root, recipe=LineRecipe(), workers=0)
    assert "generation 3 stands in its place" in report.replaced["generations/000002.safetensors"]
    assert report.generation == 3
    again = fb.open_cache(root, layers=["length"]).read(range(20))
    assert again["times"].tolist() == rows["times"].tolist()
    assert fb.verify(root, full=True).sound
    assert not (root / "generations/000002.safetensors").exists()


def test_a_lost_growth_is_named_and_comes_back_by_growing_again(tmp_path: Path) -> None:
    root, recipe = tmp_path / "cache", fb.RawRecipe(chunk_bytes=200)
    for name in "ab":
        (tmp_path / f"{name}.txt").write_text("".join(f"{name}{at} is a line of some length\n" for at in range(20)))
    both = fb.sources.lines(tmp_path / "a.txt", tmp_path / "b.txt")
    fb.build(root, fb.sources.lines(tmp_path / "a.txt"), recipe, workers=0)
    fb.grow(root, both, workers=0)
    before = chunk_digests(root)
    shutil.copy(root / "generations/000000.safetensors", root / "generations/000001.safetensors")
    (root / "plan/000001.safetensors").unlink()
    (note,) = fb.repair(root, workers=0).notes
    assert "not in the plan" in note
    assert f"forebay grow {root} SOURCE" in note
    assert fb.grow(root, both, workers=0).rows == 40
    assert chunk_digests(root) == before


def test_a_growth_whose_plan_is_damaged_as_well_comes_back_by_growing_again(tmp_path: Path) -> None:
    root, recipe = tmp_path / "cache", fb.RawRecipe(chunk_bytes=200)
    for name in "ab":
        (tmp_path / f"{name}.txt").write_text("".join(f"{name}{at} is a line of some length\n" for at in range(20)))
    both = fb.sources.lines(tmp_path / "a.txt", tmp_path / "b.txt")
    fb.build(root, fb.sources.lines(tmp_path / "a.txt"), recipe, workers=0)
    fb.grow(root, both, workers=0)
    before = chunk_digests(root)
    newest, segment = root / "generations/000001.safetensors", root / "plan/000001.safetensors"
    newest.unlink()
    newest.mkdir()
    segment.write_bytes(segment.read_bytes() + b"more")
    why = fb.repair(root, workers=0).replaced["plan/000001.safetensors"]
    assert f"`forebay grow {root} SOURCE` with all files of the source if that was `grow`" in why
    newest.rmdir()  # the user does that
    fb.refresh(root, workers=0)
    assert chunk_digests(root) != before  # a refresh does not bring it back
    assert fb.grow(root, both, workers=0).rows == 40
    assert chunk_digests(root) == before


def test_a_refresh_whose_plan_is_damaged_as_well_comes_back_by_refreshing_again(tmp_path: Path) -> None:
    root, source = tmp_path / "cache", tmp_path / "a.txt"
    source.write_text("".join(f"a{at} is a line of some length\n" for at in range(20)))
    fb.build(root, fb.sources.lines(source), fb.RawRecipe(chunk_bytes=200), workers=0)
    source.write_text("".join(f"b{at} is another line of some length\n" for at in range(30)))
    fb.refresh(root, workers=0)
    before = fb.open_cache(root).read(range(30))["data"]
    segment = sorted((root / "plan").iterdir())[-1]
    newest = sorted((root / "generations").iterdir())[-1]
    newest.unlink()
    newest.mkdir()
    segment.write_bytes(segment.read_bytes() + b"more")
    why = fb.repair(root, workers=0).replaced[f"plan/{segment.name}"]
    assert f"`forebay refresh {root}` if it was `refresh`" in why
    newest.rmdir()  # the user does that
    assert fb.refresh(root, workers=0).rows == 30
    assert list(map(bytes, fb.open_cache(root).read(range(30))["data"])) == list(map(bytes, before))


def test_where_no_generation_is_left_sound_chunks_are_listed_again(tmp_path: Path) -> None:
    """A cache with one generation must not be lost with it: chunks prove themselves, or are made again."""
    root = number_cache(tmp_path)
    flip(root / "generations/000000.safetensors", 4500)
    flip(root / "layers/numbers/000002.safetensors", 4300)
    report = fb.repair(root, recipe=LineRecipe(), workers=0)
    assert list(report.replaced) == ["generations/000000.safetensors", "layers/numbers/000002.safetensors"]
    assert report.generation == 2
    assert fb.open_cache(root).read(range(20))["number"].tolist() == list(range(20))


def test_a_cache_without_any_generation_is_said_to_have_none(tmp_path: Path) -> None:
    root = number_cache(tmp_path)
    (root / "generations/000000.safetensors").unlink()
    with pytest.raises(NothingPublished):
        fb.repair(root, recipe=LineRecipe(), workers=0)


def test_other_bytes_are_published_as_a_revision_in_a_new_generation_that_says_why(
    tmp_path: Path, mood: dict[str, int]
) -> None:
    root, source = moody_cache(tmp_path)
    old = fb.open_cache(root)
    flip(root / "layers/moody/000001.safetensors", 4300)
    before = identities(root)
    mood["add"] = 100
    report = fb.repair(root, source=source, recipe=MoodyRecipe(), workers=0)
    assert report.restored == ()
    assert report.replaced == {
        "layers/moody/000001.r1.safetensors": "the source, the libraries or the device of now gave other content"
    }
    assert report.generation == 1
    assert {name: value for name, value in identities(root).items() if name in before} == before
    new = fb.open_cache(root)
    assert new.read(range(12))["number"].tolist() == [0, 1, 2, 3, 104, 105, 106, 107, 8, 9, 10, 11]
    assert new.generation.table("moody").numbers["revision"].tolist() == [0, 1, 0]
    assert fb.verify(root).sound
    assert old.generation.table("moody").numbers["revision"].tolist() == [0, 0, 0]
    with pytest.raises(fb.errors.ChunkCorrupt):
        fb.open_cache(root, generation=0).read([4, 5, 6, 7])


def test_a_revision_can_be_damaged_and_revised_again(tmp_path: Path, mood: dict[str, int]) -> None:
    root, source = moody_cache(tmp_path)
    for revision in (1, 2):
        name = f"000001.r{revision - 1}.safetensors" if revision > 1 else "000001.safetensors"
        flip(root / "layers/moody" / name, 4300)
        mood["add"] = revision
        report = fb.repair(root, source=source, recipe=MoodyRecipe(), workers=0)
        assert list(report.replaced) == [f"layers/moody/000001.r{revision}.safetensors"]
    (root / "layers/moody/000001.r2.safetensors").unlink()
    report = fb.repair(root, source=source, recipe=MoodyRecipe(), workers=0)
    assert report.restored == ("layers/moody/000001.r2.safetensors",)
    assert fb.open_cache(root).read([4])["number"].tolist() == [6]


def test_a_revision_that_is_gone_before_it_is_listed_is_not_reported_as_published(
    tmp_path: Path, mood: dict[str, int]
) -> None:
    root, source = moody_cache(tmp_path)
    flip(root / "layers/moody/000001.safetensors", 4300)
    mood["add"] = 100
    made: list[str] = []

    def remove(progress: fb.Progress) -> None:
        for path in root.glob("layers/moody/*.r1.safetensors"):
            made.append(path.name)
            path.unlink()

    report = fb.repair(root, source=source, recipe=MoodyRecipe(), workers=0, on_progress=remove)
    assert made == ["000001.r1.safetensors"]
    assert (report.restored, report.replaced, report.generation) == ((), {}, 0)
    assert list(report.failed) == ["layers/moody/000001.safetensors"]


@pytest.mark.parametrize("same", [True, False])
def test_a_revision_left_by_a_repair_that_died_is_no_obstacle(tmp_path: Path, mood: dict[str, int], same: bool) -> None:
    root, source = moody_cache(tmp_path)
    flip(root / "layers/moody/000001.safetensors", 4300)
    mood["add"] = 100
    fb.repair(root, source=source, recipe=MoodyRecipe(), workers=0)
    (root / "generations/000001.safetensors").unlink()  # as if the repair had died before it published
    mood["add"] = 100 if same else 200
    report = fb.repair(root, source=source, recipe=MoodyRecipe(), workers=0)
    assert list(report.replaced) == [f"layers/moody/000001.r{1 if same else 2}.safetensors"]
    assert fb.open_cache(root).read([4])["number"].tolist() == [104 if same else 204]


def test_same_content_in_other_bytes_says_so(tmp_path: Path) -> None:
    """A chunk that another version of a codec compressed differently: same rows, other file."""
    root = number_cache(tmp_path)
    path = root / "layers/numbers/000001.safetensors"
    whole = path.read_bytes()
    generation = fb.open_cache(root).generation
    record = generation.table("numbers").record(1)
    forged = msgspec.structs.replace(record, sha256=bytes(32), size=record.size + 1)
    layers = {"numbers": generation.table("numbers").with_records([forged])}
    newer = type(generation)(
        1, generation.cache, generation.recipes, generation.constants, generation.plan, generation.versions, layers
    )
    fb.LocalStore(root).create("generations/000001.safetensors", newer.encode(None))
    report = fb.repair(root, recipe=LineRecipe(), workers=0)
    assert report.replaced == {
        "layers/numbers/000001.r1.safetensors": "the same content came out as other bytes with the library versions "
        "installed now"
    }
    assert (root / "layers/numbers/000001.r1.safetensors").read_bytes() == whole
    assert fb.open_cache(root).read([4])["number"].tolist() == [4]


class VersionedRecipe(MoodyRecipe, frozen=True, kw_only=True):
    """A recipe that says which library shapes its bytes."""

    kind: ClassVar[str] = "versioned"

    def versions(self) -> dict[str, str]:
        return {"moodlib": f"1.{MOOD['add']}"}


def test_a_repair_records_the_libraries_of_the_recipe_that_the_cache_keeps(
    tmp_path: Path, mood: dict[str, int], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setitem(
        own_kinds(RECIPES), "versioned", EntryPoint("versioned", f"{__name__}:VersionedRecipe", RECIPES)
    )
    write_lines(tmp_path / "raw/a.txt", 0, 12)
    root = tmp_path / "cache"
    fb.build(root, fb.sources.lines(tmp_path / "raw"), VersionedRecipe(), workers=0)
    flip(root / "layers/versioned/000001.safetensors", 4300)
    mood["add"] = 7
    report = fb.repair(root, workers=0)
    assert "moodlib 1.7 (before: 1.0)" in report.replaced["layers/versioned/000001.r1.safetensors"]
    assert [versions["moodlib"] for versions in fb.summarize(root).versions] == ["1.0", "1.7"]
    newest = load_generation(fb.LocalStore(root))
    made = [[one["moodlib"] for one in newest.made_with("versioned", chunk)] for chunk in range(3)]
    assert made == [["1.0"], ["1.7"], ["1.0"]]
    assert "made.by" not in fb.summarize(root).layers[0].statistics


def test_chunks_that_were_only_found_are_not_said_to_be_made_with_the_libraries_of_now(tmp_path: Path) -> None:
    root = number_cache(tmp_path)
    shutil.rmtree(root / "generations")
    fb.build(root, fb.sources.lines(tmp_path / "raw"), LineRecipe(), workers=0)
    assert fb.summarize(root).versions == ()


@pytest.mark.parametrize("key", ["cache.json", "plan/000000.safetensors", "layers/numbers/recipe.json"])
def test_a_build_on_a_cache_that_lost_part_of_its_index_is_refused(tmp_path: Path, key: str) -> None:
    """Else it would be planned anew, or go on under another recipe, beside chunks of the old one."""
    root = number_cache(tmp_path)
    fields = {"scale": 0.25} if "recipe" in key else {}
    (root / key).unlink()
    write_lines(tmp_path / "raw/0.txt", 50, 6)
    with pytest.raises(IndexCorrupt, match=f"'{key}' of the cache at .* is corrupt: it is gone; run `forebay repair"):
        fb.build(root, fb.sources.lines(tmp_path / "raw"), LineRecipe(**fields), workers=0)
    assert not (root / key).exists()
    assert len(list((root / "generations").iterdir())) == 1


def test_a_layer_that_lost_its_recipe_is_not_continued_with_another(tmp_path: Path) -> None:
    root = layered_cache(tmp_path)
    (root / "layers/length/000001.safetensors").unlink()
    (root / "layers/length/recipe.json").unlink()
    with pytest.raises(IndexCorrupt, match=r"layers/length/(recipe\.json|constants).*forebay repair"):
        fb.build(root, None, LengthLayer(times=7), workers=0)
    fb.repair(root, recipe=LengthLayer(), workers=0)
    assert fb.verify(root).sound
    assert fb.open_cache(root).read([4], columns=["times"])["times"].tolist() == [8]


def test_what_repair_put_back_reads_as_before(tmp_path: Path) -> None:
    root = number_cache(tmp_path)
    path = root / "layers/numbers/000001.safetensors"
    start = ChunkFile(memoryview(path.read_bytes()), "").tensors["number"].start
    flip(path, start)
    with pytest.raises(fb.errors.ChunkCorrupt):
        fb.open_cache(root)[4]
    fb.repair(root, recipe=LineRecipe(), workers=0)
    assert fb.open_cache(root)[4]["number"] == 4


@pytest.mark.parametrize("key", [None, b"secret"])
def test_a_generation_of_a_newer_forebay_is_not_taken_for_damage(tmp_path: Path, key: bytes | None) -> None:
    """What it lists is unknown here, so nothing may be published over it, nor may it be removed."""
    root = number_cache(tmp_path)
    newer = {"format_version": FORMAT_VERSION + 1, "type": "generation", "number": 1}
    path = root / "generations/000001.safetensors"
    path.write_bytes(b"".join(seal(newer, {"new": np.arange(3)}, key)))
    before = tree(root)
    for call in (fb.verify, fb.repair, fb.clean, fb.open_cache):
        with pytest.raises(FormatTooNew, match="upgrade forebay"):
            call(root)
    assert tree(root) == before
    flip(path, path.stat().st_size - 100)
    assert list(fb.repair(root, recipe=LineRecipe(), workers=0).replaced) == ["generations/000001.safetensors"]


def test_a_repair_that_is_stopped_stops(tmp_path: Path) -> None:
    root, source = tmp_path / "cache", tmp_path / "data.txt"
    source.write_text("".join(f"line {number}\n" for number in range(100)))
    fb.build(root, fb.sources.lines(source), fb.RawRecipe(chunk_bytes=100), workers=0)
    chunks = sorted((root / "layers" / "raw").glob("*.safetensors"))
    assert len(chunks) > 3
    for path in chunks:
        path.unlink()

    def stop(progress: fb.Progress) -> None:
        if progress.phase == "building" and progress.done:
            raise KeyboardInterrupt

    with pytest.raises(BuildStopped):
        fb.repair(root, workers=0, on_progress=stop)
    assert 0 < len(list((root / "layers" / "raw").glob("*.safetensors"))) < len(chunks)
    assert not fb.repair(root, workers=0).failed
