"""Long texts are encoded in pieces with the ids of the whole text, or fail where that would take too much memory."""

import json
import random
from itertools import pairwise
from pathlib import Path
from typing import Any

import msgspec
import numpy as np
import pytest

import forebay as fb
from forebay.tokens import long_texts
from forebay.tokens.long_texts import PATTERNS, PiecewiseEncoder, cuts_between_words, pieces
from forebay.tokens.vocabulary import GPT2, Encoder, Vocabulary, load_vocabulary, open_encoder

BYTE_LEVEL = {"type": "ByteLevel", "add_prefix_space": False, "trim_offsets": True, "use_regex": False}
# Words, spaces, breaks, marks, apostrophes, numbers, combining marks, other scripts and half-way cases of all of them.
ALPHABET = [
    *"aZé9²½ß'’ \n\t\r.,;:-_(=!~\"`字，。がアא،ª",
    *"\u0301\u0338\u00a0\u3000\u200d\U0001f469\u0e01\u0e34\u1100\uac00\u11a8",
    "'s",
    "'LL",
    "  ",
    "\r\n",
    "don't",
    "Straße",
    " word",
]


def vocabulary_with(**parts: Any) -> Vocabulary:
    document = json.loads(load_vocabulary(GPT2).json)
    return Vocabulary("changed", json.dumps({**document, **parts}).encode())


def split_by(pattern: str, **changed: Any) -> dict[str, Any]:
    split = {"type": "Split", "pattern": {"Regex": pattern}, "behavior": "Isolated", "invert": False, **changed}
    return {"type": "Sequence", "pretokenizers": [split, BYTE_LEVEL]}


def vocabularies() -> dict[str, Vocabulary]:
    digits = {"type": "Digits", "individual_digits": True}
    word = {"type": "ByteLevel", "add_prefix_space": False, "trim_offsets": True, "use_regex": True}
    found = {f"pattern {at}": vocabulary_with(pre_tokenizer=split_by(each)) for at, each in enumerate(sorted(PATTERNS))}
    return {
        "gpt2": load_vocabulary(GPT2),
        "NFC": vocabulary_with(normalizer={"type": "NFC"}),
        "digits": vocabulary_with(pre_tokenizer={"type": "Sequence", "pretokenizers": [digits, word]}),
        **found,
    }


def encoded(encoder: Any, texts: list[str]) -> list[list[int]]:
    ids, offsets = encoder.encode(texts)
    return [ids[start:stop].tolist() for start, stop in pairwise(offsets)]


@pytest.mark.parametrize("name", sorted(vocabularies()))
@pytest.mark.parametrize("library", ["tokenizers", "fastokens"])
def test_pieces_have_the_ids_of_the_whole_text(monkeypatch: pytest.MonkeyPatch, name: str, library: Any) -> None:
    vocabulary = vocabularies()[name]
    assert cuts_between_words(vocabulary)
    encoder: Encoder = open_encoder(library, vocabulary)
    monkeypatch.setattr(long_texts, "PIECE_CHARS", 3)
    monkeypatch.setattr(long_texts, "CALL_CHARS", 16)
    draw = random.Random(name)
    texts = ["".join(draw.choices(ALPHABET, k=draw.randrange(1, 60))) for _ in range(400)]
    assert sum(len(list(pieces(text, 3))) for text in texts) > 1000
    assert encoded(PiecewiseEncoder(encoder, vocabulary, 4_000_000), texts) == encoded(encoder, texts)


@pytest.mark.parametrize(
    "parts",
    [
        {"normalizer": {"type": "Lowercase"}},
        {"normalizer": {"type": "Sequence", "normalizers": [{"type": "NFC"}, {"type": "Strip"}]}},
        {"pre_tokenizer": None},
        {"pre_tokenizer": {"type": "ByteLevel", "add_prefix_space": True, "use_regex": True}},
        {"pre_tokenizer": BYTE_LEVEL},
        {"pre_tokenizer": {"type": "Metaspace", "replacement": "▁", "prepend_scheme": "always"}},
        {"pre_tokenizer": split_by(r"\w+ \w+|.")},
        {"pre_tokenizer": split_by(max(PATTERNS), invert=True)},
        {"pre_tokenizer": split_by(max(PATTERNS), behavior="MergedWithNext")},
        {"pre_tokenizer": {"type": "Sequence", "pretokenizers": 7}},
        {
            "pre_tokenizer": {
                "type": "Sequence",
                "pretokenizers": [BYTE_LEVEL, split_by(max(PATTERNS))["pretokenizers"][0]],
            }
        },
        {"added_tokens": [{"id": 50257, "content": "New York", "special": False}]},
        {"added_tokens": [{"id": 50257, "content": "York", "special": False, "rstrip": True}]},
        {"added_tokens": [{"id": 50257, "content": "York", "special": False, "single_word": True}]},
    ],
)
def test_a_tokenizer_that_may_join_what_is_cut_gets_every_text_whole(parts: dict[str, Any]) -> None:
    vocabulary = vocabulary_with(**parts)
    assert not cuts_between_words(vocabulary)

    class Whole:
        def encode(self, texts: Any) -> Any:
            seen.extend(texts)
            return np.zeros(0, np.uint32), np.zeros(len(texts) + 1, np.int64)

    seen: list[str] = []
    texts = ["New York, " * 100_000, "a b " * 300_000]
    PiecewiseEncoder(Whole(), vocabulary, 4_000_000).encode(texts)
    assert seen == texts


@pytest.mark.parametrize("source", ["jsonl", "text"])
def test_a_document_without_a_place_to_cut_fails_and_others_are_made(tmp_path: Path, source: str) -> None:
    texts = ["a short one", "x" * 4_100_000, "word, " * 900_000, "y" * 3_900_000]
    if source == "jsonl":
        given: Any = fb.sources.jsonl(tmp_path / "a.jsonl")
        (tmp_path / "a.jsonl").write_text("".join(json.dumps({"text": text}) + "\n" for text in texts))
    else:
        for at, text in enumerate(texts):
            (tmp_path / f"{at}.txt").write_text(text)
        given = fb.sources.text(tmp_path / "*.txt")
    report = fb.build(tmp_path / "cache", given, fb.TokenRecipe())
    assert report.reasons == {"too-large": 1}
    cache = fb.open_cache(tmp_path / "cache")
    documents = cache.read(range(len(cache)), columns=["documents"])["documents"]
    assert isinstance(documents, fb.Ragged)
    assert np.unique(documents.values[:, 0]).tolist() == [0, 2, 3]


def test_the_limit_can_be_raised_and_lowered_and_unset_it_is_not_in_the_fingerprint(tmp_path: Path) -> None:
    (tmp_path / "a.jsonl").write_text("".join(json.dumps({"text": text}) + "\n" for text in ("ab " * 99, "x" * 400)))
    source = fb.sources.jsonl(tmp_path / "a.jsonl")
    for limit, documents in ((100, 1), (400, 2)):
        report = fb.build(tmp_path / f"{limit}", source, fb.TokenRecipe(max_uncut_bytes=limit))
        assert report.failures == 2 - documents
    assert "max_uncut_bytes" not in msgspec.to_builtins(fb.TokenRecipe())
