"""Keys: where everything is in a cache, and what a key names."""

import pytest
from hypothesis import given
from hypothesis import strategies as st

from forebay.format import layout

FINGERPRINT = "0123456789abcdef" * 4
FOLDER = "layers/lune.0123456789abcdef/"


def test_every_key_is_the_one_the_documents_name():
    assert layout.CACHE == "cache.json"
    assert layout.plan_segment(0) == "plan/000000.safetensors"
    assert layout.identities(3, "0123456789abcdef" * 4) == "identities/000003.0123456789abcdef.safetensors"
    assert layout.recipe("lune") == "recipes/lune.json"
    assert layout.layer_folder("lune", FINGERPRINT) == FOLDER
    assert layout.constants(FOLDER) == "layers/lune.0123456789abcdef/constants.safetensors"
    assert layout.chunk(FOLDER, 35) == "layers/lune.0123456789abcdef/000035.safetensors"
    assert layout.generation(3) == "generations/000003.safetensors"
    assert layout.claim(FOLDER, 35) == "claims/lune.0123456789abcdef/000035.json"
    assert layout.claim(FOLDER, 35).startswith(layout.claims_folder(FOLDER))
    assert layout.layer_of(FOLDER) == "lune"


@given(st.integers(0, layout.MAX_NUMBER - 1))
def test_a_key_says_what_it_names(number):
    assert layout.parse_chunk(layout.chunk(FOLDER, number)) == (FOLDER, number)
    assert layout.parse_claim(layout.claim(FOLDER, number)) == (FOLDER, number)
    assert layout.parse_generation(layout.generation(number)) == number
    assert layout.parse_segment(layout.plan_segment(number)) == number
    assert layout.parse_identities(layout.identities(number, "0" * 64)) == number
    assert layout.parse_segment(layout.generation(number)) is layout.parse_generation(layout.plan_segment(number))
    assert layout.parse_recipe(layout.recipe("lune")) == "lune"
    keys = (layout.chunk(FOLDER, number), layout.claim(FOLDER, number), layout.generation(number))
    assert all(map(layout.is_known, (*keys, layout.recipe("lune"), layout.constants(FOLDER), layout.PLAN_CLAIM)))


@pytest.mark.parametrize(
    "key",
    [
        "layers/x/constants.safetensors",
        "recipes/x.y.json",
        "layers/x.0123456789abcde/000035.safetensors",
        "layers/x.0123456789abcdef/35.safetensors",
        "layers/x.0123456789abcdef/",
        "layers/x.0123456789abcdef/000035.r0.safetensors",
        "layers/x.0123456789abcdef/backup/000035.safetensors",
        "layers/000035.safetensors",
        "000035.safetensors",
        "layers/../000035.safetensors",
        "layers/a.b/000035.safetensors",
        "layers/x.0123456789abcdef/0000035.safetensors",
        "plan/0000001.safetensors",
        "generations/00000١.safetensors",
        "generations/-00001.safetensors",
        "plan/000001.safetensors\n",
        "generations/9999999999999999.safetensors",
        "layers/x.0123456789abcdef/000035.r٣.safetensors",
        "claims/x.0123456789abcdef/000035.1.json",
        "claims/x.0123456789abcdef/000035.1.json.txt",
        "claims/x.0123456789abcdef/notes",
        "identities/000003.0123456789ABCDEF.safetensors",
        "identities/x/000003.0123456789abcdef.safetensors",
    ],
)  # fmt: skip
def test_another_key_names_nothing(key):
    assert layout.parse_chunk(key) is layout.parse_claim(key) is layout.parse_generation(key) is None
    assert layout.parse_identities(key) is layout.parse_segment(key) is None
    assert not layout.is_known(key)


@pytest.mark.parametrize("name", ["", ".", "..", "a.b", "a/b", "-x", "a b", "ü", "x\n", "x" * 129, "a\0", "²"])
def test_a_layer_may_have_letters_digits_and_dashes_only(name):
    assert not layout.is_layer_name(name)
    assert all(map(layout.is_layer_name, ("tokens", "lune-2", "_x", "A0")))
