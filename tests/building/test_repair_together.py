"""Several damages at once: a repair gets through all of them, or says exactly what is lost and what to do instead."""

import json
import os
import shutil
from collections.abc import Callable
from itertools import combinations
from pathlib import Path

import pytest
from tests.cli.running import run
from tests.layer_recipes import flip, tree, write_lines

import forebay as fb
from forebay.errors import Damaged, ForebayError

CHUNK = "layers/raw/000001.safetensors"


def spoil(path: Path) -> None:
    """The end of a text becomes something that is not UTF-8."""
    path.write_bytes(path.read_bytes()[:-5] + b"\xb7\xff\xfe")


DAMAGES: dict[str, Callable[[Path], None]] = {
    "generation": lambda root: flip(root / "generations/000000.safetensors", 4500),
    "chunk": lambda root: flip(root / CHUNK, 4300),
    "lost chunk": lambda root: (root / "layers/raw/000000.safetensors").unlink(),
    "cache.json": lambda root: spoil(root / "cache.json"),
    "plan": lambda root: flip(root / "plan/000000.safetensors", 4200),
    "recipe": lambda root: spoil(root / "layers/raw/recipe.json"),
}
TOGETHER = [names for count in (1, 2, 6) for names in combinations(DAMAGES, count)]
TOGETHER += [pytest.param(names, marks=pytest.mark.long) for names in combinations(DAMAGES, 3)]
HOPELESS = {"plan", "recipe"}  # without a copy, once no generation says what they were


@pytest.fixture(scope="module")
def pristine(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A folder with a source, a cache of an installed kind, and a copy of the cache."""
    folder = tmp_path_factory.mktemp("pristine")
    write_lines(folder / "raw/a.txt", 0, 120)
    fb.build(folder / "cache", fb.sources.lines(folder / "raw"), fb.RawRecipe(chunk_bytes=300), workers=0)
    fb.copy(folder / "cache", folder / "copy")
    return folder


@pytest.fixture
def root(pristine: Path) -> Path:
    """The cache, as it was; the source that it names stays where it is."""
    shutil.rmtree(pristine / "cache")
    shutil.copytree(pristine / "copy", pristine / "cache")
    return pristine / "cache"


def rows(root: Path) -> list[bytes]:
    cache = fb.open_cache(root)
    return [bytes(row) for row in cache.read(range(len(cache)), ["data"])["data"]]


@pytest.mark.parametrize("names", TOGETHER, ids=" + ".join)
def test_a_copy_brings_everything_back(root: Path, names: tuple[str, ...]) -> None:
    before, whole = rows(root), tree(root)
    for name in names:
        DAMAGES[name](root)
    report = fb.repair(root, copy=root.parent / "copy", workers=0)
    assert report.failed == {}
    assert fb.verify(root, full=True).sound
    assert rows(root) == before
    after = tree(root)
    assert all(after[key] == value for key, value in whole.items() if not key.startswith("generations/"))
    assert fb.build(root, fb.sources.lines(root.parent / "raw"), fb.RawRecipe(chunk_bytes=300), workers=0).made == 0


@pytest.mark.parametrize("names", TOGETHER, ids=" + ".join)
def test_the_source_alone_brings_back_what_a_generation_still_describes(root: Path, names: tuple[str, ...]) -> None:
    before = rows(root)
    for name in names:
        DAMAGES[name](root)
    if "generation" in names and HOPELESS.intersection(names):
        with pytest.raises(Damaged) as lost:
            fb.repair(root, workers=0)
        assert "--from COPY" in str(lost.value)
        assert "run `forebay repair" not in str(lost.value)
        assert all(word in str(lost.value) for word in HOPELESS.intersection(names))
        return
    report = fb.repair(root, workers=0)
    assert report.failed == {}
    assert fb.verify(root, full=True).sound
    if {"generation", "lost chunk"} <= {*names}:  # nothing says any more that this chunk was ever built
        assert [one.missing for one in fb.gaps(root)] == [(0,)]
        assert "1 planned chunk(s) of layer 'raw' have no file" in str(report.replaced)
    else:
        assert rows(root) == before
    fb.build(root, fb.sources.lines(root.parent / "raw"), fb.RawRecipe(chunk_bytes=300), workers=0)
    assert rows(root) == before
    assert fb.verify(root, full=True).sound


def other_cache(folder: Path) -> Path:
    write_lines(folder / "raw/a.txt", 500, 90)
    fb.build(folder / "cache", fb.sources.lines(folder / "raw"), fb.RawRecipe(chunk_bytes=200), workers=0)
    return folder / "cache"


@pytest.mark.parametrize("key", ["generations/000000.safetensors", "plan/000000.safetensors", "cache.json"])
@pytest.mark.parametrize("with_copy", [False, True])
def test_a_part_of_another_cache_is_found_and_put_right(root: Path, tmp_path: Path, key: str, with_copy: bool) -> None:
    before, texts = rows(root), [(root / "cache.json").read_bytes(), (root / "layers/raw/recipe.json").read_bytes()]
    shutil.copyfile(other_cache(tmp_path) / key, root / key)
    report = fb.repair(root, copy=root.parent / "copy" if with_copy else None, workers=0)
    assert report.failed == {}
    assert fb.verify(root, full=True).sound
    assert rows(root) == before
    assert [(root / "cache.json").read_bytes(), (root / "layers/raw/recipe.json").read_bytes()] == texts


def test_a_generation_of_another_cache_is_not_believed_for_one_chunk_that_came_with_it(
    root: Path, tmp_path: Path
) -> None:
    before, other = rows(root), other_cache(tmp_path)
    for key in ("generations/000000.safetensors", CHUNK):
        shutil.copyfile(other / key, root / key)
    assert fb.repair(root, workers=0).failed == {}
    fb.build(root, fb.sources.lines(root.parent / "raw"), fb.RawRecipe(chunk_bytes=300), workers=0)
    assert rows(root) == before
    assert fb.verify(root, full=True).sound


def test_a_cache_with_another_plan_does_not_grow(root: Path, tmp_path: Path) -> None:
    """What continues another plan would give wrong rows once the right one is back."""
    source = fb.sources.lines(root.parent / "raw")
    shutil.copyfile(other_cache(tmp_path) / "plan/000000.safetensors", root / "plan/000000.safetensors")
    with pytest.raises(Damaged, match="it is not the segment that was published"):
        fb.grow(root, source, workers=0)
    assert [path.name for path in (root / "plan").iterdir()] == ["000000.safetensors"]


def test_a_segment_that_continues_another_plan_is_removed_with_what_it_made(root: Path, tmp_path: Path) -> None:
    other = other_cache(tmp_path)
    write_lines(tmp_path / "raw/b.txt", 900, 50)
    fb.grow(other, fb.sources.lines(tmp_path / "raw"), workers=0)
    planned = len(list((root / "layers/raw").glob("0*")))
    shutil.copyfile(other / "plan/000001.safetensors", root / "plan/000001.safetensors")
    stray = root / f"layers/raw/{planned:06d}.safetensors"
    shutil.copyfile(other / "layers/raw/000001.safetensors", stray)
    report = fb.repair(root, workers=0)
    assert list(report.replaced) == ["plan/000001.safetensors"]
    assert report.failed == {}
    assert not stray.exists()
    assert fb.verify(root).sound


def test_a_copy_of_another_cache_is_refused(root: Path, tmp_path: Path) -> None:
    other = other_cache(tmp_path)
    DAMAGES["generation"](root)
    before = tree(root)
    with pytest.raises(ForebayError, match=r"the copy at .* is of another cache \(id .*, here .*\)"):
        fb.repair(root, copy=other, workers=0)
    assert tree(root) == before


def test_where_nothing_is_published_a_repair_does_not_send_the_user_round_in_circles(root: Path) -> None:
    (root / "generations/000000.safetensors").unlink()
    DAMAGES["recipe"](root)
    with pytest.raises(Damaged, match=r"nothing of the cache .* is published, and 'layers/raw/recipe.json' cannot be"):
        fb.repair(root, workers=0)


def test_what_a_repair_cannot_put_back_is_a_failure_as_long_as_verify_finds_it(root: Path) -> None:
    path = root.parent / "raw/a.txt"
    whole, times = path.read_bytes(), path.stat()
    flip(root / CHUNK, 4300)
    try:
        path.write_bytes(whole.replace(b"000007", b"999999"))
        report = fb.repair(root, workers=0)
        assert CHUNK in report.failed
        assert "has other content than was planned" in report.failed["a.txt"]
        assert not fb.verify(root).sound
    finally:
        path.write_bytes(whole)
        os.utime(path, ns=(times.st_atime_ns, times.st_mtime_ns))


@pytest.mark.parametrize("name", ["0000001.safetensors", "٠٠٠٠٠١.safetensors", "000001.safetensors.bak"])
def test_a_file_whose_name_only_resembles_a_generation_does_not_count(root: Path, name: str) -> None:
    before = rows(root)
    (root / "generations" / name).write_bytes(b"mine")
    assert rows(root) == before
    assert fb.repair(root, workers=0).failed == {}
    assert fb.verify(root).sound
    assert (root / "generations" / name).read_bytes() == b"mine"


@pytest.mark.parametrize("what", ["folder", "dangling link"])
def test_what_has_the_name_of_the_next_generation_does_not_stop_a_build(root: Path, what: str) -> None:
    taken = root / "generations/000001.safetensors"
    taken.mkdir() if what == "folder" else taken.symlink_to("nowhere")
    flip(root / CHUNK, 4300)
    write_lines(root.parent / "raw/zz.txt", 700, 40)
    try:
        report = fb.grow(root, fb.sources.lines(root.parent / "raw"), workers=0)
    finally:
        (root.parent / "raw/zz.txt").unlink()
    assert report.generation is not None
    assert report.generation > 1
    assert taken.is_symlink() or taken.is_dir()


def test_a_chunk_whose_slice_is_lost_with_the_plan_of_a_grown_cache_says_so(tmp_path: Path) -> None:
    root, source = other_cache(tmp_path), fb.sources.lines(tmp_path / "raw")
    write_lines(tmp_path / "raw/b.txt", 900, 50)
    fb.grow(root, source, workers=0)
    (root / "plan/000000.safetensors").unlink()
    (root / "plan/000001.safetensors").write_bytes(b"")
    flip(root / CHUNK, 4300)
    report = fb.repair(root, workers=0)
    assert "--from COPY (the cache has grown" in report.failed["plan/000000.safetensors"]
    assert "'plan/000000.safetensors' of the cache" in report.failed[CHUNK]
    assert not any("run `forebay repair" in reason for reason in report.failed.values())


def test_a_generation_of_another_cache_is_found_without_a_cache_json_too(root: Path, tmp_path: Path) -> None:
    before = rows(root)
    key = "generations/000000.safetensors"
    shutil.copyfile(other_cache(tmp_path) / key, root / key)
    DAMAGES["cache.json"](root)
    report = fb.repair(root, copy=root.parent / "copy", workers=0)
    assert report.failed == {}
    assert rows(root) == before


@pytest.mark.parametrize("all_generations", [False, True])
def test_a_sound_chunk_of_another_source_is_not_taken_for_one_of_this_cache(
    root: Path, tmp_path: Path, all_generations: bool
) -> None:
    """Same recipe, same number, right by all its sums: only the source can tell, so it is asked."""
    before = rows(root)
    write_lines(tmp_path / "raw/a.txt", 500, 120)
    fb.build(tmp_path / "cache", fb.sources.lines(tmp_path / "raw"), fb.RawRecipe(chunk_bytes=300), workers=0)
    shutil.copyfile(tmp_path / "cache" / CHUNK, root / CHUNK)
    if all_generations:
        shutil.rmtree(root / "generations")
    else:
        flip(root / "generations/000000.safetensors", 4500)
        report = fb.repair(root, workers=0)
        assert "it was made from the source" in report.replaced["layers/raw/000001.r1.safetensors"]
        assert rows(root) == before
    source = fb.sources.lines(root.parent / "raw")
    build = fb.build(root, source, fb.RawRecipe(chunk_bytes=300), workers=0)
    assert any("or not of this source, and were made again" in note for note in build.notes) == all_generations
    assert rows(root) == before
    assert fb.verify(root, full=True).sound


def test_a_damaged_chunk_that_no_readable_generation_lists_is_made_again_in_the_same_repair(root: Path) -> None:
    before = rows(root)
    DAMAGES["generation"](root)
    DAMAGES["chunk"](root)
    report = fb.repair(root, workers=0)
    assert report.failed == {}
    assert "it was made from the source" in report.replaced[CHUNK]
    assert rows(root) == before
    assert [one.missing for one in fb.gaps(root)] == [()]
    assert fb.verify(root).gaps == {}


def test_a_damaged_chunk_that_cannot_be_made_again_is_a_failure_with_a_way_out_every_time(root: Path) -> None:
    before = rows(root)
    DAMAGES["generation"](root)
    DAMAGES["chunk"](root)
    away = root.parent / "away"
    (root.parent / "raw").rename(away)
    try:
        for _ in range(2):
            report = fb.repair(root, workers=0)
            assert list(report.failed) == [CHUNK]
            assert f"run `forebay build {root}`" in report.failed[CHUNK]
        layer = fb.status(root).layers[0]
        assert (layer.present - layer.listed, layer.unlisted) == (1, (1,))
        assert [(one.missing, one.unlisted) for one in fb.gaps(root)] == [((), (1,))]
    finally:
        away.rename(root.parent / "raw")
    assert list(fb.repair(root, workers=0).replaced) == [CHUNK]
    assert rows(root) == before


def test_what_is_not_a_copy_of_a_cache_is_refused_before_anything_is_written(root: Path, tmp_path: Path) -> None:
    (tmp_path / "pictures").mkdir()
    (tmp_path / "pictures/notes.txt").write_text("mine")
    for damage in (lambda root: None, DAMAGES["generation"], DAMAGES["chunk"]):
        damage(root)
        before = tree(root)
        for copy in (tmp_path / "pictures", tmp_path / "absent"):
            with pytest.raises(ForebayError, match=rf"'{copy}' is not a cache.*name a copy made with `forebay copy"):
                fb.repair(root, copy=copy, workers=0)
        with pytest.raises(ForebayError, match="is the cache itself; name a copy"):
            fb.repair(root, copy=root, workers=0)
        assert tree(root) == before
    assert not (tmp_path / "absent").exists()


def test_generations_that_come_back_from_a_copy_are_reported(root: Path) -> None:
    before = rows(root)
    shutil.rmtree(root / "generations")
    report = fb.repair(root, copy=root.parent / "copy", workers=0)
    key = f"generations/{report.generation:06d}.safetensors"
    assert f"generation 0 of the copy at '{root.parent / 'copy'}'" in report.replaced[key]
    assert rows(root) == before
    shutil.rmtree(root / "generations")
    assert key in run("repair", root, "--from", root.parent / "copy", "--workers", 0).out


def test_a_recipe_that_is_gone_with_every_generation_is_lost_and_nothing_is_published(root: Path) -> None:
    before = rows(root)
    DAMAGES["generation"](root)
    (root / "layers/raw/recipe.json").unlink()
    for _ in range(2):
        with pytest.raises(Damaged, match=r"'layers/raw/recipe.json' cannot be restored without one; name a copy"):
            fb.repair(root, workers=0)
    assert [path.name for path in (root / "generations").iterdir()] == ["000000.safetensors"]
    assert fb.repair(root, copy=root.parent / "copy", workers=0).failed == {}
    assert rows(root) == before


def test_a_plan_that_made_none_of_the_chunks_is_refused_and_a_copy_still_helps(root: Path, tmp_path: Path) -> None:
    before = rows(root)
    write_lines(tmp_path / "raw/a.txt", 500, 40)
    fb.build(tmp_path / "cache", fb.sources.lines(tmp_path / "raw"), fb.RawRecipe(chunk_bytes=300), workers=0)
    shutil.copyfile(tmp_path / "cache/plan/000000.safetensors", root / "plan/000000.safetensors")
    DAMAGES["generation"](root)
    with pytest.raises(Damaged, match="the plan is of another cache, or the source has changed; name a copy"):
        fb.repair(root, workers=0)
    assert fb.repair(root, copy=root.parent / "copy", workers=0).failed == {}
    assert rows(root) == before


def test_a_repair_that_fails_gives_the_cache_no_new_id(root: Path) -> None:
    """The copy would then be refused as that of another cache."""
    before = rows(root)
    for name in ("generation", "cache.json", "plan"):
        DAMAGES[name](root)
    with pytest.raises(Damaged, match=r"'cache.json', 'plan/000000.safetensors' cannot be restored without one"):
        fb.repair(root, workers=0)
    assert fb.repair(root, copy=root.parent / "copy", workers=0).failed == {}
    assert rows(root) == before


@pytest.mark.parametrize("what", ["a named pipe", "a folder"])
def test_what_is_not_a_file_in_place_of_cache_json_is_to_be_moved_before_repairing_again(root: Path, what: str) -> None:
    before = rows(root)
    DAMAGES["generation"](root)
    (root / "cache.json").unlink()
    (os.mkfifo if what == "a named pipe" else os.mkdir)(root / "cache.json")
    if what == "a named pipe":
        (root / "generations/000000.safetensors").unlink()
    with pytest.raises(Damaged, match=f"{what}, not a regular file; move it away, and run the repair again"):
        fb.repair(root, workers=0)
    if what == "a folder":
        (root / "cache.json").rmdir()
    assert fb.repair(root, copy=root.parent / "copy", workers=0).failed == {}
    assert rows(root) == before


def test_a_flipped_id_without_a_generation_says_how_the_copy_can_help(root: Path) -> None:
    before = rows(root)
    document = (root / "cache.json").read_text()
    (root / "generations/000000.safetensors").unlink()
    cache_id = json.loads(document)["cache_id"]
    (root / "cache.json").write_text(document.replace(cache_id, ("0" if cache_id[0] != "0" else "1") + cache_id[1:]))
    with pytest.raises(ForebayError, match=r"is of another cache .*move it away and run the same command again"):
        fb.repair(root, copy=root.parent / "copy", workers=0)
    (root / "cache.json").unlink()
    assert fb.repair(root, copy=root.parent / "copy", workers=0).failed == {}
    assert rows(root) == before
