"""Kinds: from what a cache says of its recipe and source to the objects, whatever it says."""

from contextlib import suppress
from typing import Any

import msgspec
import pytest
from tests.helpers.byte_tokens import ByteTokens

import forebay as fb
from forebay.errors import LibraryMissing, RecipeInvalid, SourceInvalid
from forebay.kinds import RECIPES, SOURCES, known_kinds, recipe_class, reopen_recipe, reopen_source, source_class
from forebay.recipe import document

WRONG: list[Any] = [None, True, 5, 1.5, [], {}, [[]], [5], {"x": []}]
WHOLE = {
    "root": "/data", "patterns": ["*.x"], "suffixes": [".x"], "separator": None, "text": "text", "image": "image",
    "manifest": "m.jsonl", "name": "org/name", "subset": None, "split": "train", "revision": "a" * 40, "endpoint": None,
    "path": "/data/x", "function": "a:b", "slices": 3,
}  # fmt: skip
USED = {
    "files": ("root", "patterns", "suffixes"), "jsonl": ("root", "patterns", "text"), "lines": ("root", "patterns"),
    "text": ("root", "patterns", "separator", "suffixes"), "images": ("root", "patterns"),
    "image_manifest": ("root", "manifest", "image"), "parquet": ("root", "patterns", "text"),
    "parquet_images": ("root", "patterns", "image"), "hub": ("name", "split", "text", "revision"),
}  # fmt: skip


@pytest.mark.parametrize("kind", USED)
def test_a_source_opens_by_a_whole_description_and_by_no_other(kind):
    assert reopen_source({"kind": kind, **WHOLE}).describe()["kind"] == kind
    for name in USED[kind]:
        missing = rf"'{name}' is missing\nhint: pass the source itself|missing required field `{name}`"
        with pytest.raises(SourceInvalid, match=missing):
            reopen_source({"kind": kind, **{key: value for key, value in WHOLE.items() if key != name}})
        for value in (5, [[]]):
            with pytest.raises(SourceInvalid, match=rf"the source in the plan \(kind '{kind}'\)"):
                reopen_source({"kind": kind, **WHOLE, name: value})


@pytest.mark.parametrize("kind", SOURCES)
@pytest.mark.parametrize("value", WRONG, ids=repr)
def test_no_description_raises_an_error_that_is_not_ours(kind, value):
    for description in ({"kind": kind}, *({"kind": kind, **WHOLE, name: value} for name in WHOLE)):
        with suppress(SourceInvalid, SourceInvalid):
            reopen_source(description)


@pytest.mark.parametrize("description", [{}, {"kind": None}, {"kind": ["lines"]}, {"kind": "../lines"}])
def test_a_description_without_a_kind_names_what_is_known(description):
    with pytest.raises(LibraryMissing, match=r"known: .*files, function"):
        reopen_source(description)


@pytest.mark.parametrize("fields", [{"codec": 5}, {"codec": "rar"}, {"unknown": 1}, {"chunk_bytes": [1]}])
def test_a_recipe_with_fields_of_another_type_says_so(fields):
    kept = document(fb.RawRecipe(), "raw", 1)
    spoiled = msgspec.structs.replace(kept, fields={**kept.fields, **fields})
    with pytest.raises(RecipeInvalid, match="the recipe of layer 'raw' cannot be opened as one of kind 'raw'"):
        reopen_recipe(spoiled)
    assert reopen_recipe(kept) == fb.RawRecipe()


@pytest.mark.parametrize(("own", "find"), [(RECIPES, recipe_class), (SOURCES, source_class)])
def test_every_kind_of_ours_is_found_under_its_own_name(own, find):
    for kind in own:
        assert find(kind).kind == kind


def test_another_package_adds_kinds_and_replaces_none_of_ours(tmp_path, monkeypatch):
    about = tmp_path / "letters-9.dist-info"
    about.mkdir()
    (about / "METADATA").write_text("Metadata-Version: 2.1\nName: letters\nVersion: 9\n")
    named = "tests.helpers.byte_tokens:ByteTokens"
    (about / "entry_points.txt").write_text(f"[forebay.recipes]\nraw = {named}\nbytes = {named}\n")
    monkeypatch.syspath_prepend(tmp_path)
    assert recipe_class("raw") is fb.RawRecipe
    assert recipe_class("bytes") is ByteTokens
    assert known_kinds().count("raw") == 1
    with pytest.raises(LibraryMissing, match="known: chat, images"):
        recipe_class("letters")
