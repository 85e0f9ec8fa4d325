"""Layers that are made of other layers: their columns, their presence, and what becomes of them when those change."""

import shutil
from pathlib import Path

import numpy as np
import pytest
from tests.helpers.cache_files import chunk_key, chunk_path, layer_path
from tests.helpers.layer_recipes import LengthLayer, LineRecipe, SumLayer, flip, layered_cache, number_cache, tree

import forebay as fb
from forebay.building.layers import bind_layer
from forebay.errors import NotFound, RecipeMismatch
from forebay.store import LocalStore


def chunks_of(root: Path, layer: str) -> dict[str, bytes]:
    return {name: value for name, value in tree(layer_path(root, layer)).items() if name.startswith("0")}


def test_a_layer_reads_columns_of_the_base_and_of_another_layer(tmp_path: Path) -> None:
    root = layered_cache(tmp_path)
    fb.build(root, None, SumLayer(), workers=0)
    read = fb.open_cache(root).read(np.arange(20), ["number", "times", "sum", "seen"])
    assert np.array_equal(read["sum"], read["number"] + read["times"])
    assert np.array_equal(read["seen"], read["length.present"])


def test_a_row_that_a_layer_which_is_read_lacks_is_absent_too(tmp_path: Path) -> None:
    root = layered_cache(tmp_path)
    fb.build(root, None, SumLayer(), workers=0)
    read = fb.open_cache(root).read(np.arange(8), ["sum.present", "length.present"])
    assert read["sum.present"].tolist() == [True, True, True, False] * 2
    assert np.array_equal(read["sum.present"], read["length.present"])


def test_what_a_layer_that_is_read_lacks_is_told_before_any_work(tmp_path: Path) -> None:
    root = number_cache(tmp_path)
    fb.build(root, None, LengthLayer(), workers=0, end_chunk=1)
    with pytest.raises(NotFound, match=r"(?s)'sum' .*reads layer 'length'.* no chunk 2 and 2 more.*finish") as told:
        fb.build(root, None, SumLayer(), workers=0)
    assert told.value.facts["chunks"] == (2, 3, 4)
    assert chunks_of(root, "sum") == {}
    assert fb.build(root, None, SumLayer(), workers=0, end_chunk=1).built == 2
    fb.build(root, None, LengthLayer(), workers=0)
    assert fb.build(root, None, SumLayer(), workers=0).built == 3


def test_a_layer_that_was_begun_and_has_no_chunk_yet_lacks_them_all(tmp_path: Path) -> None:
    root = number_cache(tmp_path)
    bind_layer(LocalStore(root), LengthLayer(), "length")
    with pytest.raises(NotFound, match=r"reads layer 'length', which has no chunk 0 and 4 more"):
        fb.build(root, None, SumLayer(), workers=0)


def test_the_fingerprint_knows_the_layer_that_is_read(tmp_path: Path) -> None:
    marks = []
    for times in (2, 3):
        root = number_cache(tmp_path / str(times))
        fb.build(root, None, LengthLayer(times=times), workers=0)
        fb.build(root, None, SumLayer(), workers=0)
        cache = fb.open_cache(root)
        assert cache.recipe("sum").dependencies == {"layer length": cache.recipe("length").fingerprint}
        marks.append(cache.recipe("sum").fingerprint)
    assert marks[0] != marks[1]


def test_a_layer_made_of_what_another_recipe_made_is_not_continued(tmp_path: Path) -> None:
    root = layered_cache(tmp_path)
    fb.build(root, None, SumLayer(), workers=0)
    shutil.rmtree(root / "generations")
    (root / "recipes/length.json").unlink()
    fb.build(root, fb.sources.lines(tmp_path / "raw"), LineRecipe(), workers=0)
    fb.build(root, None, LengthLayer(times=3), workers=0)
    with pytest.raises(RecipeMismatch, match=r"(?s)layer 'sum' .*differs in: layer length: "):
        fb.build(root, None, SumLayer(), workers=0)


def test_repair_mends_a_layer_after_those_it_reads_whatever_their_names(tmp_path: Path) -> None:
    root = number_cache(tmp_path)
    fb.build(root, None, LengthLayer(), layer="z", workers=0)
    fb.build(root, None, SumLayer(), layer="a", workers=0)
    before = {layer: chunks_of(root, layer) for layer in ("z", "a")}
    for layer in before:
        path = chunk_path(root, layer, 1)
        flip(path, path.stat().st_size - 1)
    report = fb.repair(root, recipe=LengthLayer(), workers=0)
    assert report.failed.keys() == {chunk_key(root, "a", 1)}  # nobody knows its kind
    report = fb.repair(root, recipe=SumLayer(), workers=0)
    assert not report.failed
    assert {layer: chunks_of(root, layer) for layer in ("z", "a")} == before
