"""Layers: further columns over the same rows, joined when they are read."""

import shutil
import threading
from pathlib import Path

import numpy as np
import pytest
from tests.helpers.cache_files import chunk_path, constants_path, layer_path, recipe_key
from tests.helpers.layer_recipes import (
    MOOD,
    AdditionLayer,
    LengthLayer,
    LineRecipe,
    LongingLayer,
    MoodyLayer,
    ShortLayer,
    flip,
    layered_cache,
    number_cache,
    tree,
    write_lines,
)

import forebay as fb
from forebay.building import layers
from forebay.building.layers import bind_layer
from forebay.errors import (
    BuildFailed,
    CacheNotFound,
    ChunkMissing,
    IndexCorrupt,
    NotFound,
    RecipeInvalid,
)
from forebay.store import LocalStore


def test_a_layer_adds_columns_row_by_row_with_presence_bits(tmp_path: Path) -> None:
    cache = fb.open_cache(layered_cache(tmp_path), layers=["length"])
    assert len(cache) == 20
    read = cache.read([19, 0, 7, 7, 4])
    assert list(read) == ["number", "vector", "text", "length", "times", "length.present"]
    assert read["number"].tolist() == [19, 0, 7, 7, 4]
    assert read["times"].tolist() == [0, 0, 0, 0, 8]
    assert read["length.present"].tolist() == [False, True, False, False, True]
    assert [cache[row]["times"] for row in range(6)] == [0, 2, 4, 0, 8, 10]
    for chunk in cache.chunks(["number", "times"]):
        present = chunk["length.present"]
        assert np.array_equal(chunk["times"][present], chunk["number"][present] * 2)


def test_a_layers_column_brings_its_presence_bits_and_only_them(tmp_path: Path) -> None:
    cache = fb.open_cache(layered_cache(tmp_path))
    assert list(cache[3]) == ["number", "vector", "text"]
    assert list(cache.read([3], columns=["times"])) == ["times", "length.present"]
    assert list(cache.read([3], columns=["length.present"])) == ["length.present"]
    assert cache.column("length.present").dtype == "bool"
    assert cache.recipe("length").fields == {"times": 2}


def test_rows_of_the_base_need_nothing_of_the_layer(tmp_path: Path) -> None:
    root = layered_cache(tmp_path)
    shutil.rmtree(layer_path(root, "length"))
    cache = fb.open_cache(root)
    assert cache.read(np.arange(20))["number"].tolist() == list(range(20))
    with pytest.raises(ChunkMissing):
        cache.read([0], columns=["times"])


def test_a_layer_needs_nothing_of_base_columns_that_are_not_asked_for(tmp_path: Path) -> None:
    root = layered_cache(tmp_path)
    for path in (layer_path(root, "numbers")).glob("0*.safetensors"):
        path.unlink()
    assert fb.open_cache(root).read([1, 2], columns=["times"])["times"].tolist() == [2, 4]


def test_constants_of_each_layer_are_kept_once_and_checked(tmp_path: Path) -> None:
    root = layered_cache(tmp_path)
    cache = fb.open_cache(root)
    assert cache.constants("length")["factor"].tolist() == [2]
    assert cache.constants("numbers")["scale"].tolist() == [0.5]
    shutil.copy(constants_path(root, "numbers"), constants_path(root, "length"))
    with pytest.raises(IndexCorrupt, match="not the one this generation was published with"):
        cache.constants("length")
    (constants_path(root, "length")).unlink()
    with pytest.raises(IndexCorrupt, match="it is gone"):
        cache.constants("length")


def test_constants_left_by_a_layer_that_never_began_do_not_survive(tmp_path: Path) -> None:
    """A build killed between the two files of a layer leaves constants without a recipe."""
    root = number_cache(tmp_path)
    stray = constants_path(root, "length")
    stray.parent.mkdir()
    stray.write_bytes((constants_path(root, "numbers")).read_bytes())
    fb.build(root, None, LengthLayer(times=5), workers=0)
    assert fb.open_cache(root).constants("length")["factor"].tolist() == [5]


def test_constants_that_a_killed_builder_did_not_come_to_are_kept_by_the_next(tmp_path: Path) -> None:
    root = number_cache(tmp_path)
    bind_layer(LocalStore(root), LengthLayer(times=5), "length")
    (constants_path(root, "length")).unlink()
    fb.build(root, None, LengthLayer(times=5), workers=0)
    assert fb.open_cache(root).constants("length")["factor"].tolist() == [5]


def test_a_layer_that_loses_a_row_is_an_error_and_publishes_nothing(tmp_path: Path) -> None:
    root = number_cache(tmp_path)
    with pytest.raises(BuildFailed, match=r"layer 'short' made 3 rows of 'length' for 4 base rows"):
        fb.build(root, None, ShortLayer(), workers=0)
    assert not list((layer_path(root, "short")).glob("0*"))
    assert len(fb.open_cache(root, layers=["short"])) == 0


def test_an_unfinished_layer_says_which_chunk_it_lacks_or_shows_what_it_has(tmp_path: Path) -> None:
    root = number_cache(tmp_path)
    fb.build(root, None, LengthLayer(), workers=0, start_chunk=1, end_chunk=2)
    whole = fb.open_cache(root)
    assert whole.read([4, 11], columns=["times"])["times"].tolist() == [8, 0]
    with pytest.raises(NotFound, match=r"(?s)layer 'length' of .* has no chunk 0 .* layers=\['length'\]"):
        whole.read([4, 0], columns=["times"])
    some = fb.open_cache(root, layers=["length"])
    assert some.read(np.arange(len(some)))["number"].tolist() == list(range(4, 12))
    assert some.row_ids([0, 7]) == [fb.RowId(1, 0), fb.RowId(2, 3)]
    assert [len(chunk["times"]) for chunk in some.chunks()] == [4, 4]
    fb.build(root, None, LengthLayer(), workers=0)
    assert len(fb.open_cache(root, layers=["length"])) == 20
    assert len(some) == 8, "what was opened stays as it was"


def test_two_layers_give_the_rows_that_both_have(tmp_path: Path) -> None:
    root = number_cache(tmp_path)
    fb.build(root, None, LengthLayer(), workers=0, start_chunk=0, end_chunk=2)
    fb.build(root, None, AdditionLayer(name="more"), layer="add", workers=0, start_chunk=2, end_chunk=4)
    cache = fb.open_cache(root, layers=["length", "add"])
    assert cache.read(np.arange(len(cache)))["more"].tolist() == [9, 10, 11, 12]


def test_a_chunk_of_another_cache_with_other_base_rows_is_not_adopted(tmp_path: Path) -> None:
    """Put under the same name and sound in itself, it says which rows it was made for."""
    layered_cache(tmp_path / "other", rows=24)
    write_lines(tmp_path / "raw/a.txt", 100, 10)
    root = tmp_path / "cache"
    fb.build(root, fb.sources.lines(tmp_path / "raw"), LineRecipe(), workers=0)
    fb.build(root, None, LengthLayer(), workers=0, start_chunk=1, end_chunk=1)
    shutil.copy(chunk_path(tmp_path / "other/cache", "length", 0), chunk_path(root, "length", 0))
    report = fb.build(root, None, LengthLayer(), workers=0)
    assert report.adopted == 0
    assert fb.open_cache(root).read([0], columns=["times"])["times"].tolist() == [200]
    assert fb.verify(root, full=True).sound


@pytest.mark.parametrize("name", ["number", "text"])
def test_a_column_name_that_another_layer_has_is_refused(tmp_path: Path, name: str) -> None:
    root = number_cache(tmp_path)
    before = tree(root)
    with pytest.raises(RecipeInvalid, match=f"layer 'numbers' has a column '{name}' already; choose another"):
        fb.build(root, None, AdditionLayer(name=name), workers=0)
    assert tree(root) == before


def test_of_two_layers_with_one_column_name_that_begin_at_once_at_most_one_stays(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    root = number_cache(tmp_path)
    both, check, said = threading.Barrier(2, timeout=60), layers._check_names, {}

    def check_together(*asked: object) -> None:
        check(*asked)
        if threading.current_thread().name not in said:
            said[threading.current_thread().name] = ""
            both.wait()  # both have checked, and neither has kept its recipe

    def build(layer: str, times: int) -> None:
        try:
            fb.build(root, None, LengthLayer(times=times), workers=0, layer=layer)
        except Exception as error:  # shown where it is another one
            said[layer] = f"{type(error).__name__}: {error}"

    monkeypatch.setattr(layers, "_check_names", check_together)
    threads = [threading.Thread(target=build, args=asked, name=asked[0]) for asked in (("a", 2), ("b", 7))]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    refused = [layer for layer, message in said.items() if "has a column" in message]
    assert refused, said
    kept = sorted({"a", "b"} - set(refused))
    assert sorted(path.stem for path in (root / "recipes").glob("[ab].json")) == kept
    for layer in kept:
        times = 2 if layer == "a" else 7
        assert fb.open_cache(root, layers=[layer]).read([5])["times"].tolist() == [5 * times]


def test_a_cache_whose_layers_share_a_column_name_is_not_read_until_one_is_dropped(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    root = number_cache(tmp_path)
    with monkeypatch.context() as without_check:
        without_check.setattr(layers, "_check_names", lambda *_: None)
        for layer, times in (("a", 2), ("b", 7)):
            fb.build(root, None, LengthLayer(times=times), workers=0, layer=layer)
    with pytest.raises(IndexCorrupt, match=r"(?s)'a' and 'b' .* both have a column 'length'.* `forebay drop .* b`"):
        fb.open_cache(root)
    report = fb.verify(root)
    assert not report.sound
    assert [problem.key for problem in report.bad] == [recipe_key(root, "b")]
    assert "forebay drop" in next(iter(fb.repair(root, recipe=LineRecipe(), workers=0).failed.values()))
    fb.drop(root, "b")
    assert fb.open_cache(root, layers=["a"]).read([5])["times"].tolist() == [10]


def test_presence_bits_have_a_name_of_their_own(tmp_path: Path) -> None:
    root = number_cache(tmp_path)
    with pytest.raises(RecipeInvalid, match="presence bits are called 'present'"):
        fb.build(root, None, AdditionLayer(name="present"), workers=0)


def test_a_layer_on_no_cache_is_an_error_that_leaves_nothing(tmp_path: Path) -> None:
    with pytest.raises(CacheNotFound):
        fb.build(tmp_path / "nowhere", None, LengthLayer(), workers=0)
    assert not (tmp_path / "nowhere").exists()


def test_a_layer_that_reads_a_column_the_base_has_not_is_refused_before_it_begins(tmp_path: Path) -> None:
    root = number_cache(tmp_path)
    before = tree(root)
    with pytest.raises(RecipeInvalid, match=r"(?s)'weight'.*number, vector, text"):
        fb.build(root, None, LongingLayer(name="x"), workers=0)
    assert tree(root) == before


def test_a_base_recipe_without_a_source_and_a_second_base_are_refused(tmp_path: Path) -> None:
    root = number_cache(tmp_path)
    with pytest.raises(RecipeInvalid, match="makes base rows and needs a source"):
        fb.build(root, None, LineRecipe(), workers=0)
    with pytest.raises(RecipeInvalid, match="has the base layer 'numbers'"):
        fb.build(root, fb.sources.lines(tmp_path / "raw"), fb.RawRecipe(), workers=0)


def test_an_interrupted_layer_goes_on_and_has_the_same_bytes(tmp_path: Path) -> None:
    whole = layered_cache(tmp_path / "whole")
    root = number_cache(tmp_path / "broken")
    fb.build(root, None, LengthLayer(), workers=0, mode="inverse", start_chunk=2)
    report = fb.build(root, None, LengthLayer(), workers=2)
    assert (report.built, report.present) == (2, 3)
    chunks = {name: value for name, value in tree(layer_path(whole, "length")).items() if name.startswith("0")}
    assert len(chunks) == 5
    assert {name: value for name, value in tree(layer_path(root, "length")).items() if name.startswith("0")} == chunks


def test_a_layer_that_fails_on_one_chunk_publishes_the_others_and_retries(tmp_path: Path) -> None:
    root = number_cache(tmp_path)
    MOOD["add"] = 9
    try:
        with pytest.raises(BuildFailed, match="chunk 2: ValueError: in no mood"):
            fb.build(root, None, MoodyLayer(), workers=0)
    finally:
        MOOD["add"] = 0
    assert len(fb.open_cache(root, layers=["moody-layer"])) == 16
    MOOD["add"] = -1
    try:
        assert fb.build(root, None, MoodyLayer(), workers=0).built == 1
    finally:
        MOOD["add"] = 0
    assert len(fb.open_cache(root, layers=["moody-layer"])) == 20


def test_a_layer_is_never_made_from_a_base_chunk_that_is_corrupt(tmp_path: Path) -> None:
    root = number_cache(tmp_path)
    path = chunk_path(root, "numbers", 1)
    flip(path, path.stat().st_size - 1)
    with pytest.raises(BuildFailed, match="chunk 1: ChunkCorrupt"):
        fb.build(root, None, LengthLayer(), workers=0)
    assert len(fb.open_cache(root, layers=["length"])) == 16


def test_a_layer_follows_the_base_as_it_grows(tmp_path: Path) -> None:
    root = layered_cache(tmp_path)
    write_lines(tmp_path / "raw/c.txt", 20, 4)
    fb.update(root, fb.sources.lines(tmp_path / "raw"), recipe=LineRecipe(), workers=0)
    with pytest.raises(NotFound):
        fb.open_cache(root).read([20], columns=["times"])
    assert fb.build(root, None, LengthLayer(), workers=0).built == 1
    assert fb.open_cache(root).read([22], columns=["times"])["times"].tolist() == [44]
