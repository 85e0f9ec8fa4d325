"""The fingerprint names a recipe: everything that changes bytes changes it, nothing else does."""

import hashlib
import json
import os
import subprocess
import sys
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any, ClassVar

import msgspec
import pytest
from hypothesis import given
from hypothesis import strategies as st

from forebay.columns import Column
from forebay.errors import RecipeInvalid
from forebay.raw import RawRecipe
from forebay.recipe import (
    RecipeDocument,
    RecipeHooks,
    canonical_json,
    differing_fields,
    document,
    fields_of,
    fingerprint,
)

JSON = st.recursive(
    st.none() | st.booleans() | st.integers() | st.floats(allow_nan=False, allow_infinity=False) | st.text(),
    lambda inner: st.lists(inner, max_size=4) | st.dictionaries(st.text(), inner, max_size=4),
    max_leaves=12,
)


class Words(RecipeHooks, msgspec.Struct, frozen=True, kw_only=True):
    kind: ClassVar[str] = "words"
    revision: ClassVar[int] = 1
    sample_ids: ClassVar[str] = "id"

    size: int = 512
    letters: tuple[str, ...] = ("a", "ü")
    table: dict[str, float] = msgspec.field(default_factory=lambda: {"y": 0.5, "x": 2.0})
    limit: int | float | None = None

    def columns(self) -> tuple[Column, ...]:
        return (Column(name="id", dtype="uint8", ragged=True), Column(name="words", dtype="uint16", shape=(self.size,)))


@dataclass(frozen=True)
class WordsAsDataclass(RecipeHooks):
    size: int
    letters: tuple[str, ...]
    table: dict[str, float]
    limit: int | None
    kind: ClassVar[str] = "words"
    revision: ClassVar[int] = 1


class Dependent(Words, frozen=True, kw_only=True):
    weights: ClassVar[str] = "1234"

    def dependencies(self) -> Mapping[str, str]:
        return {"weights.bin": self.weights}


class Retrained(Dependent, frozen=True, kw_only=True):
    weights: ClassVar[str] = "5678"


class Revised(Words, frozen=True, kw_only=True):
    revision: ClassVar[int] = 2


class Renamed(Words, frozen=True, kw_only=True):
    kind: ClassVar[str] = "other-words"


def kept(recipe: Any, **changes: Any) -> RecipeDocument:
    return msgspec.structs.replace(document(recipe, "words", 1), **changes)


def test_a_fingerprint_is_the_sha256_of_kind_revision_fields_and_dependencies():
    """Pinned: a change here makes every cache that exists another recipe's."""
    text = (
        rb'{"dependencies":{},"fields":{"letters":["a","\u00fc"],"limit":null,"size":512,"table":{"x":2.0,"y":0.5}},'
        rb'"kind":"words","revision":1}'
    )
    pinned = "13c0ace5b34743ff01b2fe7e26862fa1d6017a7009aad6652db76a24e3d71168"
    assert fingerprint(Words()) == hashlib.sha256(text).hexdigest() == pinned


def test_equal_recipes_have_one_fingerprint_whatever_their_class_and_order_of_keys():
    as_dataclass = WordsAsDataclass(512, ("a", "ü"), {"x": 2.0, "y": 0.5}, None)
    assert fingerprint(as_dataclass) == fingerprint(Words()) == fingerprint(Words(table={"x": 2.0, "y": 0.5}))


@pytest.mark.parametrize(
    ("other", "names"),
    [
        (Words(size=513), ["size"]),
        (Words(letters=("a",), size=1), ["letters", "size"]),
        (Words(table={"x": 2.0}), ["table.y"]),
        (Revised(), ["revision"]),
        (Renamed(size=5), ["kind", "size"]),
        (Dependent(), ["weights.bin"]),
    ],
)
def test_another_recipe_names_the_fields_that_differ(other, names):
    assert fingerprint(other) != fingerprint(Words())
    assert list(differing_fields(kept(Words()), other)) == names


def test_another_dependency_is_named():
    assert fingerprint(Dependent()) != fingerprint(Retrained())
    assert differing_fields(kept(Dependent()), Retrained()).keys() == {"weights.bin"}


def test_what_differs_is_shown_as_it_is_kept_and_as_it_is_given():
    assert differing_fields(kept(Words()), Words(size=513)) == {"size": "512 → 513"}
    fields = {name: value for name, value in fields_of(Words()).items() if name != "limit"}
    assert differing_fields(kept(Words(), fields=fields), Words()) == {"limit": "nothing → null"}
    long = differing_fields(kept(Words()), Words(letters=("word",) * 99))["letters"]
    assert long == '["a","\\u00fc"] → ["word","word","word","w…'


def test_of_long_values_the_part_is_shown_in_which_they_differ():
    many = ("word",) * 99
    old, new = Words(letters=(*many, "left", *many)), Words(letters=(*many, "right", *many))
    shown = differing_fields(kept(old), new)["letters"]
    assert "left" in shown.partition(" → ")[0]
    assert "right" in shown.partition(" → ")[2]
    assert len(shown) < 80


def test_of_a_field_that_holds_fields_only_those_that_differ_are_named():
    fields = {**fields_of(Words()), "size": {"width": 5, "height": 7}}
    found = differing_fields(kept(Words(), fields=fields), Words())
    assert found == {"size": "nothing → 512", "size.height": "7 → nothing", "size.width": "5 → nothing"}


def test_a_field_that_is_new_is_named_even_where_it_is_none():
    fields = fields_of(Words())
    del fields["limit"]
    assert differing_fields(kept(Words(), fields=fields), Words()).keys() == {"limit"}


@pytest.mark.parametrize(("one", "other"), [(1, 1.0), (1, True), (0, False)])
def test_values_that_only_python_calls_equal_are_named(one, other):
    assert fingerprint(Words(limit=one)) != fingerprint(Words(limit=other))
    assert differing_fields(kept(Words(limit=one)), Words(limit=other)).keys() == {"limit"}


def test_the_same_recipe_differs_in_nothing():
    assert differing_fields(kept(Words()), Words()) == {}


@given(st.integers(0, 3), st.lists(st.text(), max_size=3), st.integers(0, 3), st.lists(st.text(), max_size=3))
def test_two_recipes_share_a_fingerprint_exactly_if_they_differ_in_nothing(size, letters, other_size, other_letters):
    one, other = Words(size=size, letters=tuple(letters)), Words(size=other_size, letters=tuple(other_letters))
    assert (fingerprint(one) == fingerprint(other)) == (not differing_fields(kept(one), other))


def test_a_document_keeps_the_recipe_readable_and_reads_back():
    kept_recipe = document(Dependent(), "words", 1)
    assert msgspec.json.decode(msgspec.json.encode(kept_recipe), type=RecipeDocument) == kept_recipe
    assert kept_recipe.fields == {"size": 512, "letters": ["a", "ü"], "table": {"x": 2.0, "y": 0.5}, "limit": None}
    assert (kept_recipe.kind, kept_recipe.revision, kept_recipe.sample_ids) == ("words", 1, "id")
    assert kept_recipe.dependencies == {"weights.bin": "1234"}
    assert [column.name for column in kept_recipe.columns] == ["id", "words"]
    assert kept_recipe.fingerprint == fingerprint(Dependent())


def test_what_is_neither_a_struct_nor_a_dataclass_is_no_recipe():
    class Plain:
        kind: ClassVar[str] = "plain"
        revision: ClassVar[int] = 1

    with pytest.raises(RecipeInvalid, match=r"msgspec\.Struct or a dataclass, not Plain"):
        fingerprint(Plain())
    with pytest.raises(RecipeInvalid, match="not type"):
        fingerprint(WordsAsDataclass)


@pytest.mark.parametrize("value", [Path("/data"), {1, 2}, float("nan"), float("inf"), b"bytes"])
def test_a_field_that_is_no_json_is_refused(value):
    with pytest.raises(RecipeInvalid, match="'words' cannot be written as JSON"):
        fingerprint(WordsAsDataclass(value, (), {}, None))


def test_canonical_json_has_sorted_keys_no_spaces_and_only_ascii():
    value = {"b": [1, 2.5, True, None], "a": {"ü": "☃", "1": "\n"}}
    assert canonical_json(value) == rb'{"a":{"1":"\n","\u00fc":"\u2603"},"b":[1,2.5,true,null]}'


@given(JSON)
def test_canonical_json_reads_back_and_is_written_again_the_same(value):
    text = canonical_json(value)
    assert json.loads(text) == value
    assert canonical_json(json.loads(text)) == text
    assert all(32 <= byte < 127 for byte in text)


@pytest.mark.parametrize("value", [float("nan"), float("inf"), [-float("inf")]])
def test_canonical_json_has_no_words_for_what_is_no_number(value):
    with pytest.raises(ValueError, match="JSON compliant"):
        canonical_json(value)


def test_a_fingerprint_is_the_same_in_every_process():
    script = "from forebay import raw, recipe; print(recipe.fingerprint(raw.RawRecipe(codec='lz4')))"
    for seed in ("0", "1", "4242"):
        environment = {**os.environ, "PYTHONHASHSEED": seed}
        said = subprocess.run(
            [sys.executable, "-c", script], env=environment, capture_output=True, text=True, check=True
        )
        assert said.stdout.strip() == fingerprint(RawRecipe(codec="lz4"))
