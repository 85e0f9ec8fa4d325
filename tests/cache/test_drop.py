"""Dropped and replaced layers: a new generation without them or with others, and the old one as it was."""

import subprocess
import sys
from pathlib import Path

import pytest
from tests.cli.running import run
from tests.layer_recipes import AdditionLayer, LengthLayer, LineRecipe, layered_cache, number_cache

import forebay as fb
from forebay.cache.publish import publish
from forebay.errors import LayerNeeded, LayerNotFound, RecipeMismatch
from forebay.store import LocalStore


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
    assert len(freed.superseded) == 7  # five chunks, and its constants under two names
    assert [path.name for path in (root / "layers/length").iterdir()] == []
    assert fb.clean(root, keep_generations=1, lease_seconds=0).freed_bytes == 0
    assert fb.verify(root).sound
    assert build(root, 3).read([4], ["times"])["times"].tolist() == [12]
    assert fb.verify(root, full=True).sound


def test_a_replaced_layer_is_another_revision_of_its_chunks(tmp_path):
    root = layered_cache(tmp_path)
    pinned = fb.open_cache(root, layers=["length"])
    with pytest.raises(RecipeMismatch, match="--replace length"):
        build(root, 3)
    cache = build(root, 3, replace=True)
    assert cache.read([4], ["times"])["times"].tolist() == [12]
    assert cache.constants("length")["factor"].tolist() == [3]
    assert pinned.read([4], ["times"])["times"].tolist() == [8]
    assert pinned.constants("length")["factor"].tolist() == [2]
    assert sorted(path.name for path in (root / "layers/length").glob("00000*.r1.*")) == [
        f"00000{chunk}.r1.safetensors" for chunk in range(5)
    ]
    assert fb.status(root).complete
    generation = cache.generation.number
    assert build(root, 3, replace=True).generation.number == generation  # the same recipe: nothing is dropped
    fb.clean(root, keep_generations=1, lease_seconds=0)
    assert not list((root / "layers/length").glob("00000?.safetensors"))
    assert fb.verify(root, full=True).sound
    assert build(root, 2, replace=True).read([4], ["times"])["times"].tolist() == [8]


def test_chunks_of_the_old_recipe_are_never_listed_under_the_new_one(tmp_path):
    """A builder of the replaced layer, still at work, publishes what it made."""
    root = layered_cache(tmp_path)
    old = list(fb.open_cache(root).generation.table("length").records())
    fb.build(root, None, LengthLayer(times=3), layer="length", replace=True, workers=0, end_chunk=1)
    late = publish(LocalStore(root), {"length": old}, {})
    assert late.table("length").chunks.tolist() == [0, 1]
    assert late.table("length").numbers["revision"].tolist() == [1, 1]
    assert fb.gaps(root, layer="length")[0].missing == (2, 3, 4)
    assert build(root, 3).read([19, 8], ["times"])["times"].tolist() == [0, 24]


def test_a_layer_that_others_read_is_replaced_with_them_or_not_at_all(tmp_path):
    root = layered_cache(tmp_path)
    fb.build(root, None, OnLength(), layer="above", workers=0)
    with pytest.raises(LayerNeeded, match="layer 'above' was made from it"):
        fb.drop(root, "length")
    assert "layers 'a', 'b' were made from it; drop or replace them" in str(LayerNeeded("cache", "clip", ["a", "b"]))
    with pytest.raises(LayerNeeded, match="base layer"):
        fb.drop(root, "numbers")
    with pytest.raises(LayerNotFound):
        fb.drop(root, "lune")
    recipes = {"length": LengthLayer(times=3), "above": OnLength(times=2)}
    with pytest.raises(LayerNeeded):
        fb.build_layers(root, recipes, replace=["length"], workers=0)
    reports = fb.build_layers(root, recipes, replace=["length", "above"], workers=0)
    assert [report.made for report in reports] == [5, 5]
    assert fb.verify(root, full=True).sound
    assert fb.drop(root, "above", "length").layers == ("above", "length")


def test_a_grown_cache_continues_a_replaced_layer(tmp_path):
    root = layered_cache(tmp_path)
    build(root, 3, replace=True)
    (tmp_path / "raw/c.txt").write_bytes(b"000100\n000101\n")
    fb.grow(root, fb.sources.lines(tmp_path / "raw"), recipe=LineRecipe(), workers=0)
    assert build(root, 3).read([20, 21], ["times"])["times"].tolist() == [300, 303]


@pytest.mark.parametrize("stop", ["create", "delete", "generation"])
def test_a_drop_that_was_killed_is_completed_by_another(tmp_path, stop):
    root = layered_cache(tmp_path)
    code = f"""
import os
import forebay as fb
from forebay.store import LocalStore
from forebay.store.local import LocalStore as Local
create, delete = Local.create, Local.delete
def created(self, key, data):
    if "{stop}" == "generation" and key.startswith("generations"):
        os._exit(9)
    found = create(self, key, data)
    if "{stop}" == "create" and "dropped" in key:
        os._exit(9)
    return found
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


def test_the_command_line_drops_layers(tmp_path):
    root = layered_cache(tmp_path)
    assert "without length" in run("drop", root, "length").out
    assert "has no layer 'length'" in run("drop", root, "length", code=1).err
    other = number_cache(tmp_path / "other")
    fb.build(other, None, AdditionLayer(name="plus"), layer="plus", workers=0)
    newest = fb.open_cache(other).generation.number
    assert run("drop", other, "plus", "--json").json["generation"] == newest + 1
