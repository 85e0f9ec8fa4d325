"""Every recipe of a base layer that we ship keeps the contract, and the contract finds a misspelled hook."""

import io

import numpy as np
import pytest
from PIL import Image
from tests.helpers.byte_tokens import ByteTokens

import forebay as fb
from forebay.compat.pt_import import ImportedRecipe
from forebay.recipe import RecipeHooks, hooks_of
from forebay.source import Annotated, Sample
from forebay.testing import RecipeContract, check_hooks


class TestRaw(RecipeContract):
    test_equal_samples_have_one_identity_of_16_bytes = None
    bad = Sample("long", b"x" * 101)

    def make_recipe(self) -> fb.RawRecipe:
        return fb.RawRecipe(max_sample_bytes=100)

    def samples(self) -> list[Sample]:
        return [Sample(f"a@{number}", b"line %d" % number) for number in range(5)]


class TestTokensWithDuplicates(RecipeContract):
    test_equal_samples_have_one_identity_of_16_bytes = None
    helpers = ("vocabulary",)
    bad = Sample("bytes", b"\xff")

    def make_recipe(self) -> fb.TokenRecipe:
        return fb.TokenRecipe(tokenizer="gpt2", sequence_length=16)

    def samples(self) -> list[Sample]:
        return [Sample(f"a@{number}", "The quick brown fox. " * number) for number in range(1, 6)]


class TestTokens(TestTokensWithDuplicates):
    test_equal_samples_have_one_identity_of_16_bytes = RecipeContract.test_equal_samples_have_one_identity_of_16_bytes

    def make_recipe(self) -> fb.TokenRecipe:
        return fb.TokenRecipe(tokenizer="gpt2", sequence_length=16, deduplicate=True)


class TestImages(RecipeContract):
    test_equal_samples_have_one_identity_of_16_bytes = None
    helpers = (
        "letterboxed",
        "packed",
        "policy",
        "stored_column",
        "tags_of",
        "unpacked",
        "planes_of",
        "vocabulary",
    )
    bad = Sample("text.png", Annotated(b"no picture"))

    def make_recipe(self) -> fb.ImageRecipe:
        return fb.ImageRecipe(size=32)

    def samples(self) -> list[Sample]:
        return [Sample(f"{seed}.png", Annotated(_png(seed), {"tags": ["cat", f"t{seed}"]})) for seed in range(4)]


def _png(seed: int) -> bytes:
    pixels = np.random.default_rng(seed).integers(0, 255, (20 + seed, 40, 3), np.uint8)
    file = io.BytesIO()
    Image.fromarray(pixels).save(file, "png")
    return file.getvalue()


def test_the_hooks_of_layer_recipes_are_spelt_as_declared():
    teacher = fb.TeacherRecipe(teacher=fb.teachers.GeometricSol())
    methods = ["model", "fitting_rows", "most_bytes", "known_constants", "run_at", "without_effect", "identity_of"]
    check_hooks(teacher, helpers=methods)
    check_hooks(ImportedRecipe(path="x", part="y", tensors={}, declared=()))


class Misspelled(fb.RawRecipe, frozen=True, kw_only=True):
    def dependancies(self) -> dict[str, str]:
        return {"model": "0" * 64}


class Deaf(fb.RawRecipe, frozen=True, kw_only=True):
    def on_hub(self, name: str) -> tuple[str, ...]:
        return (name,)


@pytest.mark.parametrize(
    ("recipe", "says"),
    [
        (Misspelled(), "'dependancies' (did you mean 'dependencies'?)"),
        (Deaf(), "'on_hub' takes 2 arguments, the hook is passed 1"),
    ],
)
def test_a_misspelt_hook_and_one_that_takes_something_else_fail_the_contract(recipe, says):
    contract = TestRaw()
    contract.make_recipe = lambda: recipe
    with pytest.raises(AssertionError) as caught:
        contract.test_every_public_name_is_a_field_or_a_declared_hook()
    assert says in str(caught.value)


def test_a_recipe_without_the_base_class_is_rejected_by_name():
    class Plain:
        kind = "plain"

    with pytest.raises(TypeError, match=r"^Plain is not a recipe: it must inherit forebay\.RecipeHooks$"):
        hooks_of(Plain())
    assert hooks_of(ByteTokens).figures({}, {}, {}) == {}


def test_every_hook_has_a_default_so_that_no_caller_asks_whether_it_is_there():
    hooks = RecipeHooks()
    assert hooks.settled(None, None) == (hooks, ())
    assert hooks.reopened({}, "") is hooks
    for found in (hooks.dependencies(), hooks.versions(), hooks.constants(), hooks.release(), hooks.grown({})):
        assert len(found) == 0
