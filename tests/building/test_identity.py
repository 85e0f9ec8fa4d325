"""A cache goes on with what it began with: the same recipe, kind of source, files and chunks."""

import shutil
from pathlib import Path

import pytest
from tests.helpers.cache_files import chunk_path, layer_path
from tests.helpers.layer_recipes import write_lines

import forebay as fb
from forebay.errors import ForebayError, RecipeInvalid, SourceChanged, StoreRefused
from forebay.format import layout


def text_cache(folder: Path, lines: int = 300) -> tuple[Path, fb.Source]:
    """A raw cache of a few chunks."""
    source = fb.sources.lines(write_lines(folder / "raw/a.txt", 0, lines))
    fb.build(folder / "cache", source, RECIPE, workers=0)
    return folder / "cache", source


RECIPE = fb.RawRecipe(chunk_bytes=800)


def test_a_kept_recipe_that_declares_other_columns_is_refused_even_without_a_generation(tmp_path):
    root, source = text_cache(tmp_path)
    shutil.rmtree(root / "generations")
    recipe = root / layout.recipe("raw")
    recipe.write_text(
        recipe.read_text().replace('"rows_per_block": 64,\n      "shape"', '"rows_per_block": 65,\n      "shape"')
    )
    text = recipe.read_text().replace('"rows_per_block": 64', '"rows_per_block": 65', 2)
    recipe.write_text(text)
    with pytest.raises(ForebayError):
        fb.build(root, source, RECIPE, workers=0)


def test_another_kind_of_source_is_refused(tmp_path):
    root, _ = text_cache(tmp_path)
    with pytest.raises(ForebayError, match="kind 'lines', and this one is of kind 'files'"):
        fb.build(root, fb.sources.files(tmp_path / "raw"), RECIPE, workers=0)


def test_another_source_of_the_same_kind_is_refused_and_named(tmp_path):
    root, _ = text_cache(tmp_path)
    other = fb.sources.lines(write_lines(tmp_path / "raw/b.txt", 0, 10))
    with pytest.raises(
        SourceChanged,
        match=r"(?s)'a\.txt' was planned and is not in the source passed.*pass the source .*forebay update",
    ):
        fb.build(root, other, RECIPE, workers=0)


def test_the_first_build_can_be_repeated_after_the_cache_grew_from_elsewhere(tmp_path):
    root, source = text_cache(tmp_path)
    fb.update(root, fb.sources.lines(write_lines(tmp_path / "more/b.txt", 300, 10)), workers=0)
    assert fb.build(root, source, RECIPE, workers=0).built == 0


def test_a_file_that_is_one_sample_is_stale_when_it_gets_longer(tmp_path):
    (tmp_path / "raw").mkdir()
    (tmp_path / "raw/a.txt").write_text("hello")
    (tmp_path / "raw/empty.txt").write_text("")
    source = fb.sources.files(tmp_path / "raw")
    fb.build(tmp_path / "cache", source, fb.RawRecipe(), workers=0)
    (tmp_path / "raw/a.txt").write_text("hello, quite different")
    (tmp_path / "raw/empty.txt").write_text("full")
    assert set(fb.status(tmp_path / "cache").stale) == {"a.txt", "empty.txt"}
    for call in (
        lambda: fb.build(tmp_path / "cache", source, fb.RawRecipe(), workers=0),
        lambda: fb.update(tmp_path / "cache", source),
    ):
        with pytest.raises(SourceChanged, match="22 bytes, 5 were planned"):
            call()


def test_raw_data_that_is_gone_makes_no_cache_unsound(tmp_path):
    root, _ = text_cache(tmp_path)
    shutil.rmtree(tmp_path / "raw")
    report = fb.verify(root)
    assert report.sound
    assert report.stale == {"a.txt": "is gone"}


def test_a_chunk_beyond_the_plan_is_not_adopted(tmp_path):
    root, source = text_cache(tmp_path, lines=40)
    other, _ = text_cache(tmp_path / "other", lines=300)
    planned = len(list((layer_path(root, "raw")).glob("0*")))
    shutil.copy(chunk_path(other, "raw", planned + 1), chunk_path(root, "raw", planned + 1))
    rows = len(fb.open_cache(root))
    fb.build(root, source, RECIPE, workers=0)
    assert len(fb.open_cache(root)) == rows


def test_a_layer_folder_that_is_a_link_is_an_error(tmp_path):
    root, source = text_cache(tmp_path)
    folder = layer_path(root, "raw")
    shutil.move(folder, tmp_path / "elsewhere")
    folder.symlink_to(tmp_path / "elsewhere")
    for act in (lambda: fb.build(root, source, RECIPE, workers=0), lambda: fb.open_cache(root)[0]):
        with pytest.raises(StoreRefused, match="is a symbolic link"):
            act()


def test_a_field_of_the_wrong_type_is_refused_before_anything_is_written(tmp_path):
    source = fb.sources.lines(write_lines(tmp_path / "raw/a.txt", 0, 10))
    with pytest.raises(RecipeInvalid, match="codec"):
        fb.build(tmp_path / "cache", source, fb.RawRecipe(codec="gzip"), workers=0)
    assert not (tmp_path / "cache").exists()


def test_a_cache_among_the_files_of_its_source_never_becomes_part_of_it(tmp_path):
    write_lines(tmp_path / "raw/a.txt", 0, 30)
    source, root = fb.sources.lines(tmp_path / "raw"), tmp_path / "raw/cache"
    assert fb.build(root, source, RECIPE, workers=0).rows == 30
    assert fb.build(root, source, RECIPE, workers=0).notes == ()
    assert fb.update(root, source, workers=0).built == 0
    write_lines(tmp_path / "raw/b.txt", 30, 10)
    fb.update(root, source, workers=0)
    assert len(fb.open_cache(root)) == 40


@pytest.mark.parametrize("name", [b"caf\xe9.txt"])
def test_names_that_are_not_utf_8_are_names_like_any_other(tmp_path, name):
    folder = bytes(tmp_path) + b"/r\xe9w"
    Path(folder.decode("utf-8", "surrogateescape")).mkdir()
    with open(folder + b"/" + name, "wb") as file:
        file.write(b"x" * 50 + b"\nshort\n")
    source = fb.sources.lines(folder.decode("utf-8", "surrogateescape"))
    root = tmp_path / "cache"
    fb.build(root, source, fb.RawRecipe(max_sample_bytes=20), workers=0)
    assert fb.status(root).failed_samples[0].reason == "too-long"
    assert bytes(fb.open_cache(root)[0]["data"]) == b"short"
    assert fb.verify(root, full=True).sound
