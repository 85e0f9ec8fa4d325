"""Keys: where everything is in a cache, and what a key names."""

import pytest
from hypothesis import given
from hypothesis import strategies as st

from forebay.format import layout


def test_every_key_is_the_one_the_documents_name():
    assert layout.CACHE == "cache.json"
    assert layout.plan_segment(0) == "plan/000000.safetensors"
    assert layout.identities(3, "0123456789abcdef" * 4) == "identities/000003.0123456789abcdef.safetensors"
    assert layout.recipe("lune") == "layers/lune/recipe.json"
    assert layout.constants("lune") == "layers/lune/constants.safetensors"
    assert layout.chunk("lune", 35) == "layers/lune/000035.safetensors"
    assert layout.chunk("lune", 35, 1) == "layers/lune/000035.r1.safetensors"
    assert layout.generation(3) == "generations/000003.safetensors"
    assert layout.claim("lune", 35, 2) == "claims/lune/000035.2.json"
    assert layout.claim("lune", 35, 2).startswith(layout.claims_folder("lune"))
    assert layout.chunk("lune", 35).startswith(layout.layer_folder("lune"))


@given(st.integers(0, layout.MAX_NUMBER - 1), st.integers(0, 99))
def test_a_key_says_what_it_names(number, revision):
    assert layout.parse_chunk(layout.chunk("x", number, revision)) == (number, revision)
    assert layout.parse_claim(layout.claim("x", number, revision + 1)) == (number, revision + 1)
    assert layout.parse_generation(layout.generation(number)) == number
    assert layout.parse_segment(layout.plan_segment(number)) == number
    assert layout.parse_identities(layout.identities(number, "0" * 64)) == number
    assert layout.parse_segment(layout.generation(number)) is layout.parse_generation(layout.plan_segment(number))
    assert layout.parse_recipe(layout.recipe("lune")) == "lune"


@pytest.mark.parametrize(
    "key",
    [
        "layers/x/recipe.json", "layers/x/constants.safetensors", "layers/x/35.safetensors", "layers/x/",
        "layers/x/000035.r0.safetensors", "layers/x/000035.safetensors.bak", "layers/x/000035.1.json2", "000035",
        "layers/x/backup/000035.safetensors", "layers/000035.safetensors", "000035.safetensors",
        "plan/old/000035.safetensors", "generations/x/000035.safetensors", "x/000035.safetensors",
        "layers/../000035.safetensors", "layers/a.b/000035.safetensors", "layers/x/0000035.safetensors",
        "generations/0000001.safetensors", "plan/0000001.safetensors", "generations/00000١.safetensors",
        "generations/00000².safetensors", "generations/-00001.safetensors", "plan/000001.safetensors\n",
        "generations/9999999999999999.safetensors", "layers/x/000035.r01.safetensors", "layers/x/000035.r٣.safetensors",
        "layers/x/000035.r9999999999.safetensors", "claims/x/000035.0.json", "claims/x/y/000035.1.json",
        "claims/000035.1.json", "claims/x/000035.1.json.txt", "claims/x/notes", "claims/x/.DS_Store",
        "identities/000003.0123456789ABCDEF.safetensors", "identities/x/000003.0123456789abcdef.safetensors",
    ],
)  # fmt: skip
def test_another_key_names_nothing(key):
    assert layout.parse_chunk(key) is layout.parse_claim(key) is layout.parse_generation(key) is None
    assert layout.parse_identities(key) is layout.parse_segment(key) is None
    assert layout.is_known(key, {"x", "y"}) == (key in ("layers/x/recipe.json", "layers/x/constants.safetensors"))


@pytest.mark.parametrize("name", ["tokens", "lune-2", "_x", "A0"])
def test_a_layer_may_have_letters_digits_and_dashes(name):
    assert layout.is_layer_name(name)


@pytest.mark.parametrize("name", ["", ".", "..", "a.b", "a/b", "-x", "a b", "ü", "x\n", "x" * 129, "a\0", "²"])
def test_a_layer_may_have_no_other_name(name):
    assert not layout.is_layer_name(name)
