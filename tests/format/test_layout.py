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


@given(st.integers(0, 2**50), st.integers(0, 99))
def test_a_key_says_what_it_names(number, revision):
    assert layout.parse_chunk(layout.chunk("x", number, revision)) == (number, revision)
    assert layout.parse_claim(layout.claim("x", number, revision + 1)) == (number, revision + 1)
    assert layout.parse_numbered(layout.generation(number)) == number
    assert layout.parse_numbered(layout.plan_segment(number)) == number
    assert layout.parse_identities(layout.identities(number, "0" * 64)) == number
    assert layout.parse_numbered(layout.identities(number, "0" * 64)) is None


@pytest.mark.parametrize(
    "key",
    [
        "layers/x/recipe.json", "layers/x/constants.safetensors", "layers/x/35.safetensors", "layers/x/",
        "layers/x/000035.r0.safetensors", "layers/x/000035.safetensors.bak", "layers/x/000035.1.json2", "000035",
    ],
)  # fmt: skip
def test_another_key_names_nothing(key):
    assert layout.parse_chunk(key) is layout.parse_claim(key) is layout.parse_numbered(key) is None
    assert layout.parse_identities(key) is None


@pytest.mark.parametrize("name", ["tokens", "lune-2", "_x", "A0"])
def test_a_layer_may_have_letters_digits_and_dashes(name):
    assert layout.is_layer_name(name)


@pytest.mark.parametrize("name", ["", ".", "..", "a.b", "a/b", "-x", "a b", "ü", "x\n"])
def test_a_layer_may_have_no_other_name(name):
    assert not layout.is_layer_name(name)
