"""Two encoders, one answer; special tokens in a text stay text."""

import json
import os
import signal
import subprocess
import sys
import threading
import time
from collections.abc import Iterator

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from tests.tokens.vocabularies import added, byte_level

from forebay.errors import LibraryMissing, ModelUnusable, RecipeInvalid
from forebay.tokens import encoders
from forebay.tokens.encoders import choose_encoder, decode, first_difference, open_encoder
from forebay.tokens.vocabulary import Vocabulary, gpt2_json, load_vocabulary

GPT2 = load_vocabulary("gpt2")
texts = st.lists(st.text(st.characters(exclude_categories=["Cs"]), max_size=60), max_size=8)


def never_read() -> Iterator[str]:
    raise AssertionError("texts of the source are read where nothing is compared")
    yield ""


def differing() -> Vocabulary:
    """A tokenizer that fastokens takes and encodes in another way."""
    return Vocabulary("differing", with_two_ids_for("ab"))


def with_two_ids_for(token: str) -> bytes:
    """A tokenizer whose added tokens give a second id to a token of its model."""
    document = json.loads(gpt2_json())
    document["added_tokens"].append(added(token, 50257, special=False))
    return json.dumps(document).encode()


def unsupported() -> Vocabulary:
    return Vocabulary("unsupported", byte_level(normalizer={"type": "NFKC"}))


@pytest.mark.parametrize("name", ["fastokens", "tokenizers"])
@pytest.mark.parametrize("text", ["<|endoftext|>", "a<|endoftext|>b", " <|endoftext|> <|endoftext|>"])
def test_the_text_of_a_special_token_never_becomes_its_id(name, text):
    ids, _ = open_encoder(name, GPT2).encode([text])
    assert 50256 not in ids
    assert decode(GPT2, ids) == text


@pytest.mark.parametrize("name", ["fastokens", "tokenizers"])
def test_a_tokenizer_that_truncates_and_pads_does_neither_here(name):
    truncation = {"direction": "Right", "max_length": 3, "strategy": "LongestFirst", "stride": 0}
    padding = {"strategy": "BatchLongest", "direction": "Right", "pad_to_multiple_of": None, "pad_id": 0,
               "pad_type_id": 0, "pad_token": "<eos>"}  # fmt: skip
    vocabulary = Vocabulary("it", byte_level(truncation=truncation, padding=padding))
    ids, offsets = open_encoder(name, vocabulary).encode(["abcdefgh", "x"])
    assert offsets.tolist() == [0, 8, 9]
    assert decode(vocabulary, ids[:8]) == "abcdefgh"


@settings(deadline=None)
@given(texts)
def test_both_encoders_agree_on_any_text_and_give_it_back(given_texts):
    fast, reference = open_encoder("fastokens", GPT2), open_encoder("tokenizers", GPT2)
    assert first_difference(fast.encode(given_texts), reference.encode(given_texts), given_texts) is None
    ids, offsets = fast.encode(given_texts)
    assert len(offsets) == len(given_texts) + 1
    assert [decode(GPT2, ids[offsets[i] : offsets[i + 1]]) for i in range(len(given_texts))] == given_texts


def test_the_fast_encoder_is_used_where_it_agrees():
    assert choose_encoder("auto", GPT2, ["some text"], planned=False) == ("fastokens", ())
    assert choose_encoder("tokenizers", GPT2, never_read(), planned=False) == ("tokenizers", ())


def test_ctrl_c_waits_for_an_encoder_that_is_being_loaded(monkeypatch):
    are_read, is_loaded, load = threading.Event(), threading.Event(), encoders.open_encoder

    def slowly(name, own, control):
        if name == "fastokens":
            are_read.wait()
            time.sleep(0.3)  # until it is waited for
            os.kill(os.getpid(), signal.SIGINT)
            time.sleep(0.3)
            is_loaded.set()
        return load(name, own, control=control)

    def taken():
        are_read.set()
        yield "a text"

    load("tokenizers", GPT2)
    monkeypatch.setattr(encoders, "open_encoder", slowly)
    with pytest.raises(KeyboardInterrupt):
        choose_encoder("auto", GPT2, taken(), planned=False)
    assert is_loaded.is_set()


def test_a_difference_is_reported_and_the_reference_is_used():
    chosen, (note,) = choose_encoder("auto", differing(), (), planned=False)
    assert chosen == "tokenizers"
    assert "returns other ids than the reference for 'line one" in note


def test_a_difference_in_the_corpus_alone_is_found():
    vocabulary = Vocabulary("rare", with_two_ids_for("ForgeModLoader"))
    assert choose_encoder("auto", vocabulary, ["fine"], planned=False)[0] == "fastokens"
    assert choose_encoder("auto", vocabulary, ["fine", "a ForgeModLoader b"], planned=False)[0] == "tokenizers"


def test_what_the_fast_encoder_does_not_support_goes_to_the_reference():
    chosen, (note,) = choose_encoder("auto", unsupported(), (), planned=False)
    assert chosen == "tokenizers"
    assert "fastokens does not support it" in note


@pytest.mark.parametrize("vocabulary", [differing(), unsupported()])
def test_asked_for_outright_a_fast_encoder_that_differs_is_an_error(vocabulary):
    with pytest.raises(RecipeInvalid, match="pass encoder='auto' or encoder='tokenizers'"):
        choose_encoder("fastokens", vocabulary, (), planned=False)
    with pytest.raises(RecipeInvalid, match="install the fastokens version"):
        choose_encoder("fastokens", vocabulary, (), planned=True)


def without(library, monkeypatch):
    """As on a machine where a library is not installed."""
    installed = encoders.find_spec
    monkeypatch.setattr(encoders, "find_spec", lambda name: None if name == library else installed(name))


def test_without_the_fast_encoder_an_open_choice_is_the_reference_and_a_planned_one_stops(monkeypatch):
    without("fastokens", monkeypatch)
    chosen, (note,) = choose_encoder("auto", GPT2, (), planned=False)
    assert chosen == "tokenizers"
    assert "pip install 'forebay[fast]'" in note
    with pytest.raises(LibraryMissing, match=r"pip install 'forebay\[fast\]'"):
        choose_encoder("fastokens", GPT2, (), planned=True)


def test_without_the_reference_nothing_is_encoded(monkeypatch):
    without("tokenizers", monkeypatch)
    with pytest.raises(LibraryMissing, match="tokenizers"):
        choose_encoder("auto", Vocabulary("new", byte_level()), (), planned=False)


def test_a_tokenizer_whose_library_panics_is_an_error_of_ours(capfd):
    document = json.loads(gpt2_json())
    document["model"]["continuing_subword_prefix"] = "##"
    with pytest.raises(ModelUnusable, match="it cannot be loaded"):
        open_encoder("tokenizers", Vocabulary("broken", json.dumps(document).encode()))
    capfd.readouterr()


@pytest.mark.slow
@pytest.mark.parametrize(
    ("call", "said"),
    [
        ("open_encoder('fastokens', hostile('pre_tokenizer'))", "more than 1 s to encode 1,608 characters"),
        ("open_encoder('tokenizers', hostile('pre_tokenizer'))", "more than 1 s to encode 1,608 characters"),
        ("decode(hostile('decoder'), np.array([256]))", "more than 1 s to decode 1 ids"),
    ],
)
def test_a_tokenizer_whose_regular_expression_takes_for_ever_is_refused(call, said):
    """In a process of its own: what runs for ever ends with it."""
    code = "import numpy as np; from forebay.tokens import encoders; from forebay.tokens.encoders import *; "
    code += "from tests.tokens.vocabularies import with_endless_pattern as hostile; encoders.MOST_SECONDS = 1; "
    ran = subprocess.run([sys.executable, "-c", code + call], capture_output=True, text=True, timeout=600, check=False)
    assert f"ModelUnusable: the tokenizer 'hostile' cannot be used: it takes {said}" in ran.stderr
    assert ran.stderr.rstrip().endswith("use another tokenizer")
