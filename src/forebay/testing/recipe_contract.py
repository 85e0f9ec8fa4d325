"""What every recipe of a base layer promises, as tests to inherit.

A subclass makes the recipe and a few samples for it. Public names of the recipe that forebay does not call are listed
in `helpers`: any other name that is not a declared hook is taken for a misspelt one.
"""

import pickle
from collections.abc import Iterable
from dataclasses import fields, is_dataclass
from difflib import get_close_matches
from inspect import get_annotations, getattr_static, signature
from typing import Any

import msgspec
import pytest

from forebay.format.chunk import encode_chunk
from forebay.recipe import (
    AnnotatedRecipe,
    AnyRecipe,
    LayerRecipe,
    Recipe,
    RecipeHooks,
    RowRecipe,
    Rows,
    check_recipe,
    fields_of,
    fingerprint,
    hooks_of,
)
from forebay.source import Sample


def undeclared_names(kind: type[Any], declared: Iterable[type[Any]], helpers: Iterable[str] = ()) -> dict[str, str]:
    """The public names of a class that are neither its fields nor declared: name -> the declared one it resembles."""
    known = {name for each in declared for name in (*dir(each), *get_annotations(each))}
    own = (
        msgspec.structs.fields(kind) if issubclass(kind, msgspec.Struct) else fields(kind) if is_dataclass(kind) else ()
    )
    allowed = {*known, *helpers, *(field.name for field in own)}
    found = sorted(name for name in dir(kind) if not name.startswith("_") and name not in allowed)
    return {name: next(iter(get_close_matches(name, sorted(known), 1)), "") for name in found}


def check_hooks(recipe: AnyRecipe, helpers: Iterable[str] = ()) -> None:
    """Fail where a public name of a recipe is not a declared hook, or a hook takes other arguments than are passed."""
    names = undeclared_names(type(recipe), (RecipeHooks, Recipe, LayerRecipe, AnnotatedRecipe, RowRecipe), helpers)
    assert not names, "not hooks of a recipe: " + ", ".join(
        f"'{name}'" + (f" (did you mean '{near}'?)" if near else " (list it in `helpers`)")
        for name, near in names.items()
    )
    for name in (name for name in dir(RecipeHooks) if not name.startswith("_")):
        default, own = (getattr_static(kind, name, None) for kind in (RecipeHooks, type(recipe)))
        if own is not None and (callable(default) or isinstance(default, staticmethod)):
            takes = [len(signature(getattr(kind, name)).parameters) for kind in (RecipeHooks, type(recipe))]
            assert takes[0] == takes[1], f"'{name}' takes {takes[1]} arguments, the hook is passed {takes[0]}"


class RecipeContract:
    helpers: tuple[str, ...] = ()  # public names of the recipe that are its own affair
    bad: Sample | None = None  # a sample that no row can be made of

    def make_recipe(self) -> Recipe:
        raise NotImplementedError

    def samples(self) -> list[Sample]:
        """A few samples of which rows can be made."""
        raise NotImplementedError

    @pytest.fixture
    def recipe(self) -> Recipe:
        """With every choice made, as chunks are made by it."""
        recipe: Recipe = hooks_of(self.make_recipe()).settled(None, _Samples(self.samples()))[0]
        return recipe

    def encoded(self, recipe: Recipe, samples: Iterable[Sample]) -> tuple[Rows, bytes]:
        """Rows, and their bytes as a chunk: they are refused unless they are of the columns that are declared."""
        rows = recipe.make(samples)
        ids = hooks_of(recipe).sample_ids
        chunk = encode_chunk(
            rows.columns, recipe.columns(), layer="x", chunk=0, fingerprint="", samples=1000, sample_ids=ids
        )
        return rows, b"".join(bytes(buffer) for buffer in chunk.buffers)

    def test_every_public_name_is_a_field_or_a_declared_hook(self) -> None:
        check_hooks(self.make_recipe(), self.helpers)

    def test_it_has_a_kind_and_a_revision_and_says_how_large_chunks_are(self, recipe: Recipe) -> None:
        assert isinstance(recipe, Recipe)
        assert recipe.kind
        assert recipe.revision >= 1
        assert (recipe.chunk_target().rows is None) != (recipe.chunk_target().bytes is None)

    def test_it_is_frozen(self, recipe: Recipe) -> None:
        for name, value in fields_of(recipe).items():
            with pytest.raises(AttributeError):
                setattr(recipe, name, value)

    def test_it_opens_again_from_its_fields_with_the_same_fingerprint(self, recipe: Recipe) -> None:
        check_recipe(recipe)
        again = msgspec.convert(fields_of(recipe), type(recipe))
        assert fingerprint(again) == fingerprint(recipe)

    def test_it_travels_to_another_process(self, recipe: Recipe) -> None:
        again: Recipe = pickle.loads(pickle.dumps(recipe))
        assert fingerprint(again) == fingerprint(recipe)
        assert self.encoded(again, self.samples())[1] == self.encoded(recipe, self.samples())[1]

    def test_choices_that_are_made_stay_as_they_are(self, recipe: Recipe) -> None:
        again, _ = hooks_of(self.make_recipe()).settled(fields_of(recipe), _Samples([]))
        assert fingerprint(again) == fingerprint(recipe)

    def test_the_same_samples_make_the_same_bytes(self, recipe: Recipe) -> None:
        rows, made = self.encoded(recipe, self.samples())
        assert made == self.encoded(recipe, self.samples())[1]
        assert not rows.failures
        assert all(len(rows.columns[column.name]) for column in recipe.columns())

    def test_it_makes_base_rows_without_presence_bits_and_reads_every_sample_once(self, recipe: Recipe) -> None:
        samples = iter(self.samples())
        assert recipe.make(samples).present is None
        assert next(samples, None) is None

    def test_no_samples_make_no_rows(self, recipe: Recipe) -> None:
        rows, _ = self.encoded(recipe, [])
        assert all(len(rows.columns[column.name]) == 0 for column in recipe.columns())

    def test_a_bad_sample_is_a_failure_with_a_reason_beside_the_others(self, recipe: Recipe) -> None:
        if self.bad is None:
            pytest.skip("this recipe takes any content")
        rows, _ = self.encoded(recipe, [*self.samples(), self.bad])
        assert [(failure.sample, bool(failure.reason)) for failure in rows.failures] == [(self.bad.id, True)]
        assert all(len(rows.columns[column.name]) for column in recipe.columns())

    def test_equal_samples_have_one_identity_of_16_bytes(self, recipe: Recipe) -> None:
        identity = hooks_of(recipe).identity
        if identity is None:
            pytest.skip("this recipe does not deduplicate")
        for sample in self.samples():
            found = identity(sample)
            assert found is None or len(found) == 16
            assert found == identity(Sample("another id", sample.data))


class _Samples:
    """What a recipe may ask before it decides, about a list of samples."""

    def __init__(self, samples: list[Sample]) -> None:
        self._samples = samples

    def __call__(self) -> list[Sample]:
        return self._samples

    def annotations(self) -> list[Any]:
        return [sample.data.metadata for sample in self._samples if hasattr(sample.data, "metadata")]
