"""Wrong fields of the built-in recipes: refused when the recipe is made, with what is right."""

import re

import pytest
from tests.teachers.own_teachers import Ramp

import forebay as fb
from forebay.errors import RecipeInvalid


@pytest.mark.parametrize("recipe", [fb.TokenRecipe, fb.ImageRecipe, fb.RawRecipe])
def test_a_wrong_choice_is_refused_with_the_choices_and_the_nearest(recipe: type):
    with pytest.raises(RecipeInvalid, match=r"codec is 'gzip'; it must be one of 'none', 'lz4', 'zstd'$"):
        recipe(codec="gzip")
    with pytest.raises(RecipeInvalid, match=re.escape("did you mean 'zstd'?")):
        recipe(codec="zst")


@pytest.mark.parametrize(
    ("recipe", "fields", "message"),
    [
        (fb.TokenRecipe, {"sequence_length": "512"}, "sequence_length is '512'; it must be a whole number"),
        (fb.TokenRecipe, {"chunk_rows": True}, "chunk_rows is True; it must be a whole number"),
        (fb.TokenRecipe, {"tokenizer": object}, "tokenizer is <class 'object'>; it must be text"),
        (fb.TokenRecipe, {"deduplicate": "yes"}, "deduplicate is 'yes'; it must be True or False"),
        (fb.TokenRecipe, {"eos": 1.5}, "eos is 1.5; it must be text or a whole number or None"),
        (fb.TokenRecipe, {"long": "splitt"}, "did you mean 'split'?"),
        (fb.ImageRecipe, {"resample": "bilinaer"}, "did you mean 'bilinear'?"),
        (fb.ImageRecipe, {"storage": "png"}, "storage is 'png'; it must be one of 'raw', 'jpeg'"),
        (fb.ImageRecipe, {"tags": "cat"}, "tags is 'cat'; it must be a list, each text"),
        (fb.RawRecipe, {"chunk_bytes": "16 MB"}, "chunk_bytes is '16 MB'; it must be a whole number"),
    ],
)
def test_a_field_of_another_type_is_refused_by_name(recipe: type, fields: dict, message: str):
    with pytest.raises(RecipeInvalid, match=re.escape(message)):
        recipe(**fields)


def test_a_teacher_is_asked_with_fields_of_the_right_type():
    with pytest.raises(RecipeInvalid, match=r"(?s)dtype is 'float61'.*did you mean 'float16'"):
        fb.TeacherRecipe(teacher=Ramp(name="ramp"), dtype="float61")
    with pytest.raises(RecipeInvalid, match="batch_size is '8'; it must be a whole number"):
        fb.TeacherRecipe(teacher=Ramp(name="ramp"), batch_size="8")


@pytest.mark.parametrize(
    ("kind", "field"),
    [(fb.TokenRecipe, "pad"), (fb.TokenRecipe, "eos"), (fb.TokenRecipe, "bos"), (fb.ChatRecipe, "pad")],
)
def test_a_negative_token_id_is_refused_when_the_recipe_is_made(kind, field):
    needed = {"tokenizer": "x"} if kind is fb.ChatRecipe else {}
    with pytest.raises(RecipeInvalid, match=rf"{field} must be a token or an id of at least 0 \(got -7\)"):
        kind(**needed, **{field: -7})
