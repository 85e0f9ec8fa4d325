"""Long texts are encoded in pieces with the ids of the whole text, or fail where that would take too much memory."""

import base64
import json
import random
import re
import sys
import unicodedata
from collections.abc import Iterator
from functools import cache
from itertools import chain, pairwise
from pathlib import Path
from typing import Any

import msgspec
import numpy as np
import pytest
from tests.helpers.option_pairs import dealt
from tokenizers import Tokenizer, models, pre_tokenizers, trainers

import forebay as fb
from forebay.source import BatchedSamples, Sample, SampleBatch, TextBatch
from forebay.tokens import piecewise
from forebay.tokens.cut_points import _SAME_IN_NFC, PATTERNS, cut_points
from forebay.tokens.encoders import Encoder, open_encoder
from forebay.tokens.packing import Frame, encode_documents
from forebay.tokens.piecewise import PiecewiseEncoder, pieces
from forebay.tokens.vocabulary import GPT2, Vocabulary, load_vocabulary

LIBRARIES = ["tokenizers", "fastokens"]
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


def added(number: int, content: str, special: bool = False, **options: bool) -> dict[str, Any]:
    rest = {"single_word": False, "lstrip": False, "rstrip": False, "normalized": False}
    return {"id": 50257 + number, "content": content, "special": special, **rest, **options}


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


QWEN = r"(?i:'s|'t|'re|'ve|'m|'ll|'d)|[^\r\n\p{L}\p{N}]?\p{L}+|\p{N}| ?[^\s\p{L}\p{N}]+[\r\n]*|\s*[\r\n]+|\s+(?!\S)|\s+"
QWEN_SPECIAL = ("<|endoftext|>", "<|im_start|>", "<|im_end|>", "<|object_ref_start|>", "<|vision_pad|>")
QWEN_PLAIN = (
    *("<tool_call>", "</tool_call>", "<tool_response>", "</tool_response>", "<think>", "</think>"),
    *("<|fim_prefix|>", "<|fim_middle|>", "<|fim_suffix|>", "<|fim_pad|>", "<|repo_name|>", "<|file_sep|>"),
)


def like_qwen() -> Vocabulary:
    """What Qwen 2.5 and 3 have beside their merges."""
    special = [added(at, content, special=True) for at, content in enumerate(QWEN_SPECIAL, -1)]  # GPT-2 has the first
    plain = [added(at, content) for at, content in enumerate(QWEN_PLAIN, len(special) - 1)]
    return vocabulary_with(normalizer={"type": "NFC"}, pre_tokenizer=split_by(QWEN), added_tokens=[*special, *plain])


WITH_ADDED_TOKENS = {
    "qwen": (like_qwen(), [*QWEN_PLAIN, *QWEN_SPECIAL, "<tool_", "call>", "_prefix|>", "K", ";", "`"]),
    "inside of a special one": (
        vocabulary_with(
            added_tokens=[added(0, "<|im_end|>", special=True), added(1, "_end"), added(2, "New York, NY")]
        ),
        ["<|im_end|>", "_end", "<|im", "|>", "New York, NY", "New", " York", ", NY"],
    ),
    "beside one beside a special one": (
        vocabulary_with(added_tokens=[added(0, "a_b-c", True), added(1, "c.d", True), added(2, "d,e")]),
        ["a_b-c.d,e", "a_b", "-c", ".d", ",e", "c.d,e"],
    ),
    "NFC and spaces": (
        vocabulary_with(
            normalizer={"type": "NFC"}, added_tokens=[added(0, " " * 4, normalized=True), added(1, "|IP_AD|")]
        ),
        [" " * 4, " " * 3, "|IP_AD|", "|IP", "_AD|"],
    ),
}


def encoded(encoder: Any, texts: list[str]) -> list[list[int]]:
    ids, offsets = encoder.encode(texts)
    return [ids[start:stop].tolist() for start, stop in pairwise(offsets)]


class RecordingEncoder:
    """Records the texts of each call; a token for each character."""

    def __init__(self) -> None:
        self.calls: list[list[str]] = []

    def encode(self, texts: Any) -> Any:
        self.calls.append(list(texts))
        lengths = [0, *map(len, texts)]
        return np.zeros(sum(lengths), np.uint32), np.cumsum(lengths)


def assert_same_in_pieces(
    monkeypatch: pytest.MonkeyPatch, library: Any, vocabulary: Vocabulary, texts: list[str], least: int
) -> None:
    """Whether texts that are cut wherever they may be have the ids of the whole; `least` pieces reach the encoder."""
    encoder: Encoder = open_encoder(library, vocabulary)
    given: list[int] = []

    class Seen:
        def encode(self, some: list[str]) -> Any:
            given.append(len(some))
            return encoder.encode(some)

    for name, size in {"PIECE_CHARS": 3, "CALL_BYTES": 16, "LARGE_CALL_BYTES": 16}.items():
        monkeypatch.setattr(piecewise, name, size)
    found = encoded(PiecewiseEncoder(Seen(), vocabulary, 4_000_000), texts)  # type: ignore[arg-type]
    assert sum(given) > least
    assert found == encoded(encoder, texts)


@pytest.mark.slow
@pytest.mark.parametrize(("name", "library"), dealt(sorted(vocabularies()), LIBRARIES))
def test_pieces_have_the_ids_of_the_whole_text(monkeypatch: pytest.MonkeyPatch, name: str, library: Any) -> None:
    draw = random.Random(name)
    texts = ["".join(draw.choices(ALPHABET, k=draw.randrange(1, 60))) for _ in range(400)]
    assert_same_in_pieces(monkeypatch, library, vocabularies()[name], texts, 1000)


@pytest.mark.slow
@pytest.mark.parametrize(("name", "library"), dealt(sorted(WITH_ADDED_TOKENS), LIBRARIES))
def test_no_added_token_is_cut(monkeypatch: pytest.MonkeyPatch, name: str, library: Any) -> None:
    vocabulary, words = WITH_ADDED_TOKENS[name]
    draw = random.Random(name)
    texts = ["".join(draw.choices(words + ALPHABET[:20], k=draw.randrange(1, 40))) for _ in range(600)]
    assert_same_in_pieces(monkeypatch, library, vocabulary, texts, 1500)


def test_long_documents_are_cut_with_the_added_tokens_of_qwen(tmp_path: Path) -> None:
    (tmp_path / "tokenizer.json").write_bytes(like_qwen().json)
    (tmp_path / "a.jsonl").write_text(json.dumps({"text": "<tool_call>word, </tool_call>" * 200_000}) + "\n")
    recipe = fb.TokenRecipe(tokenizer=str(tmp_path / "tokenizer.json"))
    assert fb.build(tmp_path / "cache", fb.sources.jsonl(tmp_path / "a.jsonl"), recipe, workers=0).failures == 0


PROSE = [
    "the cat of the house sat in a hat, and the other one was not there",
    "in the end there were 12 cats, 3 hats and 450 words of the other sort",
    "of all the words the word is the one that the cat in the house has heard",
]
BOOK_WORDS = [
    *(" the", "the ", "of ", " in a", " cat", "ab c", "12 3", "  ", " ", " ", "▁", "▁▁", "\u0600", "\u00ad", "\u200b"),
    *("<tool_call>", "[@BOS@]", "<a b>", "\n\n", "</s>", "``", "fi\ufb01"),
]


def charsmap(**replaced: str) -> str:
    """A map of characters as SentencePiece writes it: a double-array trie of one level, then the texts."""
    units, texts = [0] * 1024, b""
    units[0] = 256 << 10
    for letter, text in replaced.items():
        units[256 ^ ord(letter)] = ord(letter) | 1 << 8 | 512 << 10
        units[256 ^ ord(letter) ^ 512] = len(texts)
        texts += text.encode() + b"\0"
    trie = np.array(units, "<u4").tobytes()
    return base64.b64encode(len(trie).to_bytes(4, "little") + trie + texts).decode()


@cache
def trained(model: str) -> dict[str, Any]:
    special = ["<unk>", "<s>", "</s>"]
    if model == "BPE":
        tokenizer = Tokenizer(models.BPE(unk_token="<unk>", byte_fallback=True, fuse_unk=True))
        trainer: Any = trainers.BpeTrainer(
            vocab_size=400, special_tokens=[*special, *(f"<0x{at:02X}>" for at in range(256))]
        )
    else:
        tokenizer = Tokenizer(models.Unigram())
        trainer = trainers.UnigramTrainer(vocab_size=60, special_tokens=special, unk_token="<unk>")
    tokenizer.pre_tokenizer = pre_tokenizers.Metaspace()
    tokenizer.train_from_iterator(PROSE * 3, trainer)
    document: dict[str, Any] = json.loads(tokenizer.to_str())
    return {**document, "added_tokens": [token for token in document["added_tokens"] if token["content"] in special]}


def metaspace(scheme: str = "always", split: bool = True) -> dict[str, Any]:
    return {"type": "Metaspace", "replacement": "▁", "prepend_scheme": scheme, "split": split}


def in_order(*normalizers: Any) -> dict[str, Any]:
    return {"type": "Sequence", "normalizers": list(normalizers)}


def words_by(*steps: Any) -> dict[str, Any]:
    return {"type": "Sequence", "pretokenizers": list(steps)}


PREPEND = {"type": "Prepend", "prepend": "▁"}
SPACES = {"type": "Replace", "pattern": {"String": " "}, "content": "▁"}
RUNS = {"type": "Replace", "pattern": {"Regex": " {2,}"}, "content": "▁"}
QUOTES = {"type": "Replace", "pattern": {"String": "``"}, "content": '"'}
AT_SPACES = {"type": "WhitespaceSplit"}
STRIP = {"type": "Strip", "strip_left": False, "strip_right": True}
BERT = {"type": "BertNormalizer", "clean_text": True, "handle_chinese_chars": True, "lowercase": True}
GEMMA = {"type": "Split", "pattern": {"String": " "}, "behavior": "MergedWithPrevious", "invert": False}
MAP = {"type": "Precompiled", "precompiled_charsmap": charsmap(A="a", B="bb", C="")}
LLAMA_2 = {"normalizer": in_order(PREPEND, SPACES), "pre_tokenizer": None}
BOOK_TOKENS = [added(500, "<tool_call>"), added(501, "[@BOS@]", normalized=True), added(502, "▁▁")]
NEWER_LLAMA_2 = {"pre_tokenizer": metaspace("first", split=False)}
NFKC, NFKD, ACCENTS, LOWER = ({"type": name} for name in ("NFKC", "NFKD", "StripAccents", "Lowercase"))
DIGITS = {"type": "Digits", "individual_digits": True}
MARKS = {"type": "Punctuation", "behavior": "Isolated"}
BOOKS: dict[str, tuple[str, dict[str, Any]]] = {
    "llama 2": ("BPE", LLAMA_2),
    "llama 2 with added tokens": ("BPE", {**LLAMA_2, "added_tokens": BOOK_TOKENS}),
    "gemma": ("BPE", {"normalizer": SPACES, "pre_tokenizer": GEMMA}),
    "llama 2, newer file": ("BPE", NEWER_LLAMA_2),
    "newer file with added tokens": ("BPE", {**NEWER_LLAMA_2, "added_tokens": BOOK_TOKENS}),
    "always, one word": ("BPE", {"pre_tokenizer": metaspace("always", split=False)}),
    "never, one word": ("BPE", {"pre_tokenizer": metaspace("never", split=False)}),
    "words": ("BPE", {"pre_tokenizer": metaspace()}),
    "unigram": ("Unigram", {"pre_tokenizer": metaspace()}),
    "unigram, first": ("Unigram", {"pre_tokenizer": metaspace("first")}),
    "t5": ("Unigram", {"normalizer": in_order(NFKC, RUNS), "pre_tokenizer": words_by(AT_SPACES, metaspace("first"))}),
    "xlm-r": ("Unigram", {"normalizer": in_order(NFKC, STRIP, RUNS)}),
    "albert": ("Unigram", {"normalizer": in_order(QUOTES, NFKD, ACCENTS, LOWER)}),
    "bert": ("Unigram", {"normalizer": BERT, "pre_tokenizer": {"type": "BertPreTokenizer"}}),
    "parts of words": ("Unigram", {"pre_tokenizer": words_by(DIGITS, MARKS, metaspace("first"))}),
}
FAST = ("llama 2", "llama 2 with added tokens", "gemma")  # that fastokens knows


def book_vocabulary(model: str, parts: dict[str, Any]) -> Vocabulary:
    document = trained(model)
    added_tokens = document["added_tokens"] + parts.get("added_tokens", [])
    return Vocabulary("books", json.dumps({**document, **parts, "added_tokens": added_tokens}).encode())


@pytest.mark.parametrize(
    ("library", "name"), [*(("tokenizers", name) for name in BOOKS), *(("fastokens", name) for name in FAST)]
)
def test_texts_that_are_cut_at_spaces_have_the_ids_of_the_whole(
    monkeypatch: pytest.MonkeyPatch, name: str, library: Any
) -> None:
    draw = random.Random(name)
    texts = ["".join(draw.choices(BOOK_WORDS * 2 + ALPHABET, k=draw.randrange(1, 60))) for _ in range(400)]
    assert_same_in_pieces(monkeypatch, library, book_vocabulary(*BOOKS[name]), texts, 800)


@pytest.mark.parametrize(
    ("model", "parts"),
    [
        ("BPE", {"normalizer": PREPEND, "pre_tokenizer": metaspace()}),
        ("BPE", {**LLAMA_2, "pre_tokenizer": metaspace()}),
        ("BPE", {"normalizer": in_order(PREPEND, PREPEND, SPACES), "pre_tokenizer": None}),
        ("BPE", {**LLAMA_2, "added_tokens": [added(500, "cat")]}),
        ("BPE", {**LLAMA_2, "added_tokens": [added(500, " ")]}),
        ("BPE", {**LLAMA_2, "added_tokens": [added(500, "<a b>")]}),
        ("BPE", {**LLAMA_2, "added_tokens": [added(500, "<|", lstrip=True)]}),
        ("BPE", {**LLAMA_2, "added_tokens": [added(500, "<bb c>", special=True), added(501, "c>")]}),
        ("BPE", {**LLAMA_2, "added_tokens": [added(500, "<bb c|>", special=True), added(501, "|>")]}),
        ("BPE", {**LLAMA_2, "added_tokens": [added(500, "b c|>", special=True), added(501, "|>")]}),
        ("BPE", {**LLAMA_2, "added_tokens": [added(500, " c|>", special=True), added(501, "|>")]}),
        ("BPE", {**LLAMA_2, "added_tokens": [added(500, "<bb ", special=True), added(501, "<")]}),
        ("BPE", {**LLAMA_2, "added_tokens": [added(500, "<bb▁", special=True), added(501, "<")]}),
        ("BPE", {"normalizer": None, "pre_tokenizer": GEMMA}),
        ("BPE", {"normalizer": SPACES, "pre_tokenizer": AT_SPACES}),
        ("BPE", {"normalizer": in_order(SPACES, {"type": "Nmt"}), "pre_tokenizer": None}),
        ("Unigram", {"normalizer": SPACES, "pre_tokenizer": None}),
        ("Unigram", {"pre_tokenizer": metaspace("first", split=False)}),
        ("Unigram", {"pre_tokenizer": words_by(metaspace(split=False), AT_SPACES)}),
        ("Unigram", {"normalizer": {"type": "Strip", "strip_left": True, "strip_right": True}}),
        ("Unigram", {"normalizer": {"type": "Replace", "pattern": {"String": "a"}, "content": ""}}),
        ("Unigram", {"normalizer": {"type": "Replace", "pattern": {"Regex": "."}, "content": "x"}}),
        ("Unigram", {"normalizer": {"type": "Lowercase"}, "added_tokens": [added(500, "<|x|>", normalized=True)]}),
        ("Unigram", {"normalizer": MAP}),
    ],
)
def test_a_text_is_not_cut_at_spaces_where_tokens_could_change(model: str, parts: dict[str, Any]) -> None:
    assert cut_points(book_vocabulary(model, parts)) is None


@pytest.mark.parametrize("changed", [{"vocab": {"t▁": 399}}, {"ignore_merges": True}, {"end_of_word_suffix": "</w>"}])
def test_a_text_that_is_one_word_is_not_cut_where_merges_could_change(changed: dict[str, Any]) -> None:
    document = {**trained("BPE"), **LLAMA_2}
    own = document["model"]
    vocab = {**own["vocab"], **changed.get("vocab", {})}
    document["model"] = {**own, **changed, "vocab": vocab}
    assert cut_points(Vocabulary("books", json.dumps(document).encode())) is None


def test_a_map_of_characters_that_keeps_letters_allows_to_cut() -> None:
    letters = {"type": "Precompiled", "precompiled_charsmap": charsmap(A="a", B="bb")}
    vocabulary = book_vocabulary("Unigram", {"normalizer": letters})
    places, encoder = cut_points(vocabulary), open_encoder("tokenizers", vocabulary)
    assert places is not None
    text = "AB CB, the cat BB A"
    assert list(pieces(text, 1, places)) == ["AB", " CB, the", " cat", " BB", " A"]
    assert [*chain(*encoded(encoder, list(pieces(text, 1, places))))] == encoded(encoder, [text])[0]


@pytest.mark.slow
def test_no_other_character_becomes_one_that_is_the_same_in_nfc() -> None:
    changed = {unicodedata.normalize("NFC", chr(at)) for at in range(128, sys.maxunicode + 1)}
    assert sorted(each for each in changed if _SAME_IN_NFC.fullmatch(each)) == []
    assert sorted(each for each in changed if each.isascii()) == [";", "K", "`"]


def test_a_call_has_few_bytes_whatever_its_characters() -> None:
    for texts in (["字、" * 400_000], ["字、" * 50_000] * 8, ["\U0001f469字、"] * 200_000):
        recording = RecordingEncoder()
        PiecewiseEncoder(recording, load_vocabulary(GPT2), 1_500_000).encode(texts)  # type: ignore[arg-type]
        sizes = [sum(len(text.encode()) for text in call) for call in recording.calls]
        assert sum(sizes) == sum(len(text.encode()) for text in texts)
        assert max(sizes) <= 1 << 20


@pytest.mark.parametrize(("most", "allowed"), [(1_500_000, 1 << 20), (4_000_000, 4_000_000)])
@pytest.mark.parametrize("character", ["a", "é", "字"])
def test_documents_are_encoded_by_few_calls_and_none_is_cut_to_fill_one(
    character: str, most: int, allowed: int
) -> None:
    recording, texts = RecordingEncoder(), [character * 1_000] * 5_000
    blocks = [TextBatch(["id"] * 20, texts[at : at + 20]) for at in range(0, 5_000, 20)]
    frame = Frame(-1, -1, 1, np.dtype(np.uint16))
    encoder = PiecewiseEncoder(recording, load_vocabulary(GPT2), most)  # type: ignore[arg-type]
    documents = encode_documents(Together(blocks), encoder, frame)
    assert documents.lengths.tolist() == list(map(len, texts))
    assert list(chain(*recording.calls)) == texts
    assert all(allowed // 4 // 2 < sum(map(len, call)) <= allowed // 4 for call in recording.calls[:-1])


class Together(BatchedSamples):
    """The texts of blocks, as a source reads them."""

    def __init__(self, blocks: list[TextBatch]) -> None:
        self._blocks = blocks

    def __iter__(self) -> Iterator[Sample]:
        return (sample for block in self._blocks for sample in block.samples())

    def batches(self) -> Iterator[Sample | SampleBatch]:
        return iter(self._blocks)


@pytest.mark.parametrize(
    "parts",
    [
        {"normalizer": {"type": "Lowercase"}},
        {"normalizer": {"type": "Sequence", "normalizers": [{"type": "NFC"}, {"type": "Strip"}]}},
        {"pre_tokenizer": None},
        {"pre_tokenizer": {"type": "ByteLevel", "add_prefix_space": True, "use_regex": True}},
        {"pre_tokenizer": BYTE_LEVEL},
        {"pre_tokenizer": {"type": "Metaspace", "replacement": "▁", "prepend_scheme": "always", "split": False}},
        {"pre_tokenizer": {"type": "Metaspace", "replacement": "_", "prepend_scheme": "always"}},
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
        {"added_tokens": [{"id": 50257, "content": "York", "special": False, "lstrip": True}]},
        {"normalizer": {"type": "NFC"}, "added_tokens": [added(0, "cafe\u0301;x", normalized=True)]},
        {"normalizer": {"type": "NFC"}, "added_tokens": [added(0, "q\u037eq", normalized=True)]},
        {"normalizer": {"type": "NFC"}, "added_tokens": [added(0, "a≠b", normalized=True)]},
        {"normalizer": {"type": "NFC"}, "added_tokens": [added(0, "K;a;b", special=True), added(1, "a;")]},
        {"added_tokens": [{"id": 50257, "content": "York", "special": False, "rstrip": True}]},
        {"added_tokens": [{"id": 50257, "content": "York", "special": False, "single_word": True}]},
    ],
)
def test_a_tokenizer_that_may_join_what_is_cut_gets_every_text_whole(parts: dict[str, Any]) -> None:
    vocabulary = vocabulary_with(**parts)
    assert cut_points(vocabulary) is None
    recording, texts = RecordingEncoder(), ["New York, " * 100_000, "a b " * 300_000]
    PiecewiseEncoder(recording, vocabulary, 4_000_000).encode(texts)  # type: ignore[arg-type]
    assert list(chain(*recording.calls)) == texts


def test_a_text_of_wide_characters_fails_where_it_takes_much_memory(monkeypatch: pytest.MonkeyPatch) -> None:
    def problem(text: str, most: int = 100) -> str | None:
        return PiecewiseEncoder(open_encoder("fastokens", vocabulary), vocabulary, most).problem(text)

    vocabulary, text, wide = load_vocabulary(GPT2), "word, " * 1000, "\U0001f469"
    assert problem(text + wide) is None
    monkeypatch.setattr(piecewise, "WIDE_BYTES", 20_000)
    assert problem(text + "’") is None
    message = problem(text + wide) or ""
    limit = re.fullmatch(r"its 6,001 characters take [\d,]+ bytes .*set max_uncut_bytes to ([\d,]+) or more", message)
    assert limit is not None
    assert problem(text + wide, int(limit[1].replace(",", ""))) is None


@pytest.mark.slow
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
