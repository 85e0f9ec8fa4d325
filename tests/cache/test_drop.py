"""Dropped and replaced layers: a new generation without them or with others, and the old one as it was."""

import subprocess
import sys
from pathlib import Path

import pytest
from tests.helpers.cache_files import layer_path
from tests.helpers.layer_recipes import AdditionLayer, LengthLayer, LineRecipe, layered_cache, number_cache

import forebay as fb
from forebay.errors import ForebayError, NotFound, RecipeMismatch


class OnLength(LengthLayer, frozen=True, kw_only=True):
    """A layer that reads another one."""

    kind = "on-length"
    reads = ("text", "number", "times")

    def columns(self):
        return tuple(fb.Column(name=f"{column.name}_again", dtype=column.dtype) for column in super().columns())

    def make(self, rows):
        made = LengthLayer.make(self, rows)
        return fb.Rows({f"{name}_again": values for name, values in made.columns.items()}, present=made.present)


def build(root: Path, times: int, **terms: object) -> fb.Cache:
    fb.build(root, None, LengthLayer(times=times), layer="length", workers=0, **terms)
    return fb.open_cache(root, layers=["length"])


def test_a_dropped_layer_is_gone_and_stays_for_who_pinned_it(tmp_path):
    root = layered_cache(tmp_path)
    pinned = fb.open_cache(root, layers=["length"])
    before = pinned.generation.number
    report = fb.drop(root, "length")
    assert (report.layers, report.chunks, report.generation) == (("length",), 5, before + 1)
    assert fb.open_cache(root).layers == ("numbers",)
    for cache in (pinned, fb.open_cache(root, generation=before, layers=["length"])):
        assert cache.read([4], ["times"])["times"].tolist() == [8]
        assert cache.constants("length")["factor"].tolist() == [2]
    assert fb.verify(root).sound
    assert fb.verify(root).foreign == ()
    assert fb.status(root).complete
    fb.build(root, fb.sources.lines(tmp_path / "raw"), LineRecipe(), workers=0)  # another publish does not list it
    assert fb.open_cache(root).layers == ("numbers",)


def test_clean_frees_a_dropped_layer_once_no_generation_lists_it(tmp_path):
    root = layered_cache(tmp_path)
    fb.drop(root, "length")
    assert fb.clean(root, lease_seconds=0).freed_bytes == 0
    freed = fb.clean(root, keep_generations=1, lease_seconds=0)
    assert len(freed.superseded) == 6  # five chunks, and its constants under two names
    assert [path.name for path in (layer_path(root, "length")).iterdir()] == []
    assert fb.clean(root, keep_generations=1, lease_seconds=0).freed_bytes == 0
    assert fb.verify(root).sound
    assert build(root, 3).read([4], ["times"])["times"].tolist() == [12]
    assert fb.verify(root, full=True).sound


def test_a_replaced_layer_is_another_folder(tmp_path):
    root = layered_cache(tmp_path)
    pinned = fb.open_cache(root, layers=["length"])
    with pytest.raises(RecipeMismatch, match="--replace length"):
        build(root, 3)
    cache = build(root, 3, replace=True)
    assert cache.read([4], ["times"])["times"].tolist() == [12]
    assert cache.constants("length")["factor"].tolist() == [3]
    assert pinned.read([4], ["times"])["times"].tolist() == [8]
    assert pinned.constants("length")["factor"].tolist() == [2]
    assert len(list(root.glob("layers/length.*"))) == 2
    assert fb.status(root).complete
    generation = cache.generation.number
    assert build(root, 3, replace=True).generation.number == generation  # the same recipe: nothing is dropped
    fb.clean(root, keep_generations=1, lease_seconds=0)
    assert len(list(root.glob("layers/length.*/0*"))) == 5
    assert fb.verify(root, full=True).sound
    assert build(root, 2, replace=True).read([4], ["times"])["times"].tolist() == [8]


def test_a_layer_that_others_read_is_replaced_with_them_or_not_at_all(tmp_path):
    root = layered_cache(tmp_path)
    fb.build(root, None, OnLength(), layer="above", workers=0)
    with pytest.raises(ForebayError, match="'above' was made from it"):
        fb.drop(root, "length")
    with pytest.raises(ForebayError, match="base layer"):
        fb.drop(root, "numbers")
    with pytest.raises(NotFound):
        fb.drop(root, "lune")
    recipes = {"length": LengthLayer(times=3), "above": OnLength(times=2)}
    with pytest.raises(ForebayError):
        fb.build_layers(root, recipes, replace=["length"], workers=0)
    reports = fb.build_layers(root, recipes, replace=["length", "above"], workers=0)
    assert [report.built for report in reports] == [5, 5]
    assert fb.verify(root, full=True).sound
    assert fb.drop(root, "above", "length").layers == ("above", "length")


def test_a_tower_of_layers_is_replaced_together(tmp_path):
    def tower(add: int) -> dict[str, AdditionLayer]:
        both = {name: AdditionLayer(name=f"{name}_sum", add=add) for name in ("left", "right")}
        return {
            **both,
            "middle": AdditionLayer(name="middle_sum", reads=("left_sum", "right_sum"), add=0),
            "top": AdditionLayer(name="top_sum", reads=("middle_sum",), add=0),
        }

    root = number_cache(tmp_path)
    fb.build_layers(root, tower(0), workers=0)
    reports = fb.build_layers(root, tower(1), replace=tuple(tower(1)), workers=0)
    assert [report.built for report in reports] == [5, 5, 5, 5]
    assert fb.open_cache(root, layers=["top"]).read([4], ["top_sum"])["top_sum"].tolist() == [10]


@pytest.mark.parametrize("stop", ["delete", "generation"])
def test_a_drop_that_was_killed_is_completed_by_another(tmp_path, stop):
    root = layered_cache(tmp_path)
    code = f"""
import os
import forebay as fb
from forebay.store import LocalStore
from forebay.store.local import LocalStore as Local
create, delete = Local.create, Local.delete
def created(self, key, data, **options):
    if "{stop}" == "generation" and key.startswith("generations"):
        os._exit(9)
    return create(self, key, data)
def deleted(self, key):
    delete(self, key)
    if "{stop}" == "delete":
        os._exit(9)
Local.create, Local.delete = created, deleted
fb.drop({str(root)!r}, "length")
"""
    assert subprocess.run([sys.executable, "-c", code], check=False).returncode == 9
    assert fb.open_cache(root, layers=["length"]).read([4], ["times"])["times"].tolist() == [8]
    fb.drop(root, "length")
    assert fb.open_cache(root).layers == ("numbers",)
    assert fb.verify(root, full=True).sound
