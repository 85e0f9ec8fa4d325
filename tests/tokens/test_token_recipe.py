"""Documents in, rows out: nothing lost, nothing shared, every choice recorded."""

import json
from collections import defaultdict
from pathlib import Path

import msgspec
import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from tests.helpers.cache_files import chunk_path, constants_path
from tests.tokens.vocabularies import added, byte_level, written

import forebay as fb
from forebay.cache.reports import BuildReport
from forebay.errors import ModelUnusable, RecipeInvalid, RecipeMismatch
from forebay.source import Failure, Sample
from forebay.tokens import decode, load_vocabulary

GPT2 = load_vocabulary("gpt2")
EOS = 50256
documents = st.lists(st.text(st.characters(exclude_categories=["Cs"]), min_size=1, max_size=120), max_size=12)


def made(texts, **fields) -> fb.Rows:
    recipe = fb.TokenRecipe(**{"tokenizer": "gpt2", "sequence_length": 16, "encoder": "fastokens", **fields})
    return recipe.make(Sample(f"d{number}", text) for number, text in enumerate(texts))


def pieces_of(rows: fb.Rows):
    """(document, offset, tokens) of every piece, row by row."""
    tokens, lengths, sources = (rows.columns[name] for name in ("tokens", "seq_lens", "documents"))
    for row in range(len(tokens)):
        begin = 0
        for length, (document, offset) in zip(lengths[row].tolist(), sources[row].tolist(), strict=True):
            yield document, offset, tokens[row, begin : begin + length]
            begin += length


def whole_documents(rows: fb.Rows) -> dict[int, np.ndarray]:
    found = defaultdict(list)
    for document, offset, tokens in pieces_of(rows):
        found[document].append((offset, tokens))
    joined = {}
    for document, pieces in found.items():
        pieces.sort(key=lambda piece: piece[0])
        assert [offset for offset, _ in pieces] == np.cumsum([0, *(len(t) for _, t in pieces[:-1])]).tolist()
        joined[document] = np.concatenate([tokens for _, tokens in pieces])
    return joined


@settings(deadline=None)
@given(documents, st.integers(2, 40))
def test_rows_in_the_order_of_documents_give_every_text_back(texts, sequence_length):
    rows = made(texts, sequence_length=sequence_length)
    whole = whole_documents(rows)
    assert sorted(whole) == list(range(len(texts)))
    for number, text in enumerate(texts):
        assert whole[number][-1] == EOS
        assert decode(GPT2, whole[number][:-1]) == text


@settings(deadline=None)
@given(documents, st.integers(2, 40))
def test_sums_and_padding_add_up(texts, sequence_length):
    rows = made(texts, sequence_length=sequence_length, pad=7)
    tokens, lengths = rows.columns["tokens"], rows.columns["seq_lens"]
    used = np.array([lengths[row].sum() for row in range(len(lengths))], np.int64)
    assert ((used > 0) & (used <= sequence_length)).all()
    assert all((tokens[row, count:] == 7).all() for row, count in enumerate(used))
    statistics = rows.statistics
    assert statistics["tokens"] == statistics["tokens_in"] == used.sum()
    assert statistics["tokens_dropped"] == 0
    assert statistics["documents"] == len(texts)
    assert sum(statistics["rows_by_use"]) == len(tokens)
    assert statistics["rows_by_use"][-1] == np.count_nonzero(used == sequence_length)
    assert statistics["characters"] == sum(map(len, texts))


def test_the_text_of_the_end_token_stays_text():
    rows = made(["one<|endoftext|>two"])
    whole = whole_documents(rows)[0]
    assert np.flatnonzero(whole == EOS).tolist() == [len(whole) - 1]
    assert decode(GPT2, whole[:-1]) == "one<|endoftext|>two"


def words(folder: Path, *known: str, added_tokens: list) -> str:
    """A tokenizer that knows some words, whatever else they are, and one for all others."""
    vocabulary = {word: number for number, word in enumerate(("[UNK]", *known))}
    model = {"type": "WordLevel", "vocab": vocabulary, "unk_token": "[UNK]"}
    rest = dict.fromkeys(("normalizer", "post_processor", "decoder", "truncation", "padding"))
    document = {"version": "1.0", "added_tokens": added_tokens, "pre_tokenizer": {"type": "WhitespaceSplit"}, **rest}
    return written(folder, json.dumps(document | {"model": model}).encode())


def test_a_document_whose_text_would_become_a_control_token_is_recorded_not_forged(tmp_path):
    unknown, end = added("[UNK]", 0), added("</s>", 3)
    tokenizer = words(tmp_path, "one", "two", "</s>", added_tokens=[unknown, end])
    rows = made(["one two", "one </s> two", "two other", "</s>", "one"], tokenizer=tokenizer, encoder="tokenizers")
    assert {number: ids.tolist() for number, ids in whole_documents(rows).items()} == {
        0: [1, 2, 3],
        2: [2, 0, 3],
        4: [1, 3],
    }
    assert [(failure.sample, failure.reason) for failure in rows.failures] == [
        ("d1", "control-token"),
        ("d3", "control-token"),
    ]
    assert rows.statistics["documents"] == 3
    assert rows.statistics["characters"] == len("one two" + "two other" + "one")


def test_a_document_of_blanks_that_becomes_no_token_is_empty_and_not_a_bare_end(tmp_path):
    tokenizer = words(tmp_path, "one", "</s>", added_tokens=[added("[UNK]", 0), added("</s>", 2)])
    rows = made(["one", " \n\t", "</s>", "  one", "\u3000"], tokenizer=tokenizer, encoder="tokenizers")
    assert {number: ids.tolist() for number, ids in whole_documents(rows).items()} == {0: [1, 2], 3: [1, 2]}
    assert [(failure.sample, failure.reason) for failure in rows.failures] == [
        ("d1", "empty"),
        ("d2", "control-token"),
        ("d4", "empty"),
    ]
    assert "no token" in rows.failures[0].detail
    assert rows.statistics["characters"] == len("one  one")
    assert not made([" "], tokenizer="gpt2").failures, "a tokenizer that has a token for it keeps it"


@pytest.mark.parametrize("encoder", ["fastokens", "tokenizers"])
def test_an_added_token_that_is_not_marked_as_special_ends_no_document_by_its_text(tmp_path, encoder):
    ends = [added("<eos>", 256), added("<|im_end|>", 257, special=False)]
    tokenizer = written(tmp_path, byte_level(added_tokens=ends))
    rows = made(["a", "b<|im_end|>c"], tokenizer=tokenizer, encoder=encoder, eos="<|im_end|>")
    assert [(failure.sample, failure.reason) for failure in rows.failures] == [("d1", "control-token")]
    assert [ids[-1] for ids in whole_documents(rows).values()] == [257]


def test_an_ordinary_token_may_end_documents_and_be_in_their_text():
    rows = made(["one\ntwo"], eos=198)
    assert not rows.failures
    assert np.count_nonzero(whole_documents(rows)[0] == 198) == 2


def test_a_document_can_begin_and_end_with_what_is_asked_for():
    for fields, first, last in [
        ({"bos": "<|endoftext|>"}, EOS, EOS),
        ({"bos": 5, "eos": None}, 5, None),
        ({"eos": "!"}, None, 0),
        ({"eos": None}, None, None),
    ]:
        whole = whole_documents(made(["some text here"], **fields))[0].tolist()
        assert first is None or whole[0] == first
        assert last is None or whole[-1] == last
        assert len(whole) == 3 + (first is not None) + (last is not None)


def test_padding_is_the_vocabulary_s_own_pad_or_zero(tmp_path):
    assert made(["x"]).columns["tokens"][0, -1] == 0
    own = written(tmp_path, byte_level(added_tokens=[added("<eos>", 256), added("<pad>", 257)]))
    assert made(["x"], tokenizer=own).columns["tokens"][0, -1] == 257


LONG = " word" * 40  # 41 tokens with its end


@pytest.mark.parametrize(
    ("long", "lengths", "statistics", "failures"),
    [
        ("split", {0: 41, 1: 2}, {"documents_split": 1, "tokens_dropped": 0}, ()),
        ("truncate", {0: 16, 1: 2}, {"documents_cut": 1, "tokens_dropped": 25}, ()),
        (
            "drop",
            {1: 2},
            {"documents": 1, "documents_dropped": 1, "tokens_dropped": 41},
            (Failure("d0", "too-long", "41 tokens, a row holds 16"),),
        ),
    ],
)
def test_long_documents_are_split_truncated_or_dropped(long, lengths, statistics, failures):
    rows = made([LONG, "short"], long=long)
    assert {document: len(tokens) for document, tokens in whole_documents(rows).items()} == lengths
    assert rows.statistics.items() >= statistics.items()
    assert rows.statistics["tokens"] + rows.statistics["tokens_dropped"] == rows.statistics["tokens_in"]
    assert rows.failures == failures
    assert max(len(tokens) for _, _, tokens in pieces_of(rows)) <= 16


def test_a_long_document_can_be_an_error_that_names_it():
    with pytest.raises(RecipeInvalid, match="document 'd1' has 41 tokens; rows hold 16"):
        made(["short", LONG], long="error")


def test_what_is_no_text_is_recorded_and_the_rest_is_made():
    rows = made(["", b"\xff", 7, b"bytes are text", "x"])
    assert [(failure.sample, failure.reason) for failure in rows.failures] == [
        ("d0", "empty"),
        ("d1", "not-utf8"),
        ("d2", "not-text"),
    ]
    assert sorted(whole_documents(rows)) == [3, 4]


def test_no_documents_make_no_rows():
    rows = made([])
    assert rows.columns["tokens"].shape == (0, 16)
    assert len(rows.columns["seq_lens"]) == len(rows.columns["documents"]) == 0


def test_many_ids_take_four_bytes(tmp_path):
    tokens = [added(f"<{number}>", number) for number in range(257, 70_000)]
    path = written(tmp_path, byte_level(added_tokens=[added("<eos>", 256), *tokens]))
    recipe = fb.TokenRecipe(tokenizer=path)
    assert recipe.columns()[0].dtype == "uint32"
    assert fb.TokenRecipe(tokenizer="gpt2").columns()[0].dtype == "uint16"


@pytest.mark.parametrize(
    "fields",
    [
        {"sequence_length": 0},
        {"chunk_rows": 0},
        {"sequence_length": 1},
        {"sequence_length": 2, "bos": 0},
        {"sequence_length": 1 << 31},
    ],
)
def test_recipe_with_impossible_sizes_is_an_error(fields):
    with pytest.raises(RecipeInvalid):
        fb.TokenRecipe(tokenizer="gpt2", **fields)


# — as a cache —


def corpus(folder: Path, count: int = 30) -> Path:
    path = folder / "corpus.jsonl"
    lines = (json.dumps({"text": f"Document {number}. " + "It goes on. " * (number % 9)}) for number in range(count))
    path.write_text("\n".join(lines) + "\n")
    return path


def build(folder: Path, root: str = "cache", **fields) -> BuildReport:
    recipe = fb.TokenRecipe(**{"tokenizer": "gpt2", "sequence_length": 32, "chunk_rows": 8, **fields})
    return fb.build(folder / root, fb.sources.jsonl(folder / "corpus.jsonl"), recipe, workers=0)


def test_the_encoder_is_chosen_when_a_cache_is_planned_and_recorded(tmp_path):
    corpus(tmp_path)
    build(tmp_path)
    (layer,) = fb.info(tmp_path / "cache").layers
    assert layer.fields["encoder"] == "fastokens"
    assert (layer.fields["eos"], layer.fields["bos"], layer.fields["pad"]) == (50256, None, 0)
    assert build(tmp_path, eos="<|endoftext|>", pad="!").built == 0
    build(tmp_path, encoder="fastokens")
    with pytest.raises(RecipeMismatch, match="encoder"):
        build(tmp_path, encoder="tokenizers")


def test_a_tokenizer_that_moved_is_the_same_and_one_that_changed_is_another(tmp_path):
    corpus(tmp_path)
    (tmp_path / "a").mkdir()
    (tmp_path / "b").mkdir()
    build(tmp_path, tokenizer=written(tmp_path / "a", byte_level()))
    assert build(tmp_path, tokenizer=written(tmp_path / "b", byte_level())).built == 0
    changed = byte_level(added_tokens=[added("<eos>", 256), added("<more>", 257)])
    with pytest.raises(RecipeMismatch, match=r"tokenizer\.json"):
        build(tmp_path, tokenizer=written(tmp_path / "b", changed))


def test_a_cache_grows_and_is_repaired_without_the_tokenizer_s_file(tmp_path):
    source = corpus(tmp_path)
    tokenizer = Path(written(tmp_path, byte_level()))
    build(tmp_path, tokenizer=str(tokenizer))
    tokenizer.unlink()
    with source.open("a") as file:
        file.write(json.dumps({"text": "appended"}) + "\n")
    assert fb.update(tmp_path / "cache", fb.sources.jsonl(source), workers=1).built == 1
    victim = chunk_path(tmp_path / "cache", "tokens", 1)
    before = victim.read_bytes()
    victim.write_bytes(before[:-1] + bytes([before[-1] ^ 1]))
    fb.repair(tmp_path / "cache", workers=0)
    assert victim.read_bytes() == before


def test_a_damaged_tokenizer_in_a_cache_is_put_back_from_its_file(tmp_path):
    corpus(tmp_path)
    build(tmp_path, tokenizer=written(tmp_path, byte_level()))
    constants = constants_path(tmp_path / "cache", "tokens")
    before = constants.read_bytes()
    constants.write_bytes(before[:5000] + bytes([before[5000] ^ 1]) + before[5001:])
    assert not fb.verify(tmp_path / "cache").sound
    fb.repair(tmp_path / "cache", workers=0)
    assert constants.read_bytes() == before


def test_the_summary_has_the_names_that_hand_made_caches_use_computed_from_the_rows(tmp_path):
    corpus(tmp_path)
    build(tmp_path)
    cache, summary = fb.open_cache(tmp_path / "cache"), fb.info(tmp_path / "cache")
    lengths = cache.read(np.arange(len(cache)), ["seq_lens"])["seq_lens"]
    tokens = int(lengths.values.sum())
    assert summary.metadata == {
        "version": "1.0",
        "total_chunks": summary.layers[0].chunks,
        "total_sequences": len(cache),
        "max_length": 32,
        "compression_enabled": True,
        "utilization_stats": {
            "avg_utilization": tokens / (32 * len(cache)),
            "total_tokens": tokens,
            "efficiency_ratio": 1.0,
        },
    }
    figures = summary.layers[0].figures
    assert figures["padding_share"] == pytest.approx(1 - tokens / (32 * len(cache)))
    assert figures["bytes_per_token"] == pytest.approx(summary.bytes / tokens)


def test_an_equal_document_is_left_out_when_asked(tmp_path):
    path = tmp_path / "corpus.jsonl"
    texts = ["one", "two", "one", "", "three", "two", "one", ""]
    path.write_text("".join(json.dumps({"n": number, "text": text}) + "\n" for number, text in enumerate(texts)))
    assert build(tmp_path, deduplicate=True).failures == 2
    (layer,) = fb.info(tmp_path / "cache").layers
    assert layer.statistics["duplicates"] == 3
    assert layer.statistics["documents"] == 3


def test_an_eos_that_is_not_in_the_vocabulary_is_refused_before_anything_is_written(tmp_path):
    corpus(tmp_path)
    with pytest.raises(ModelUnusable, match="no token '</s>' for 'eos'"):
        build(tmp_path, eos="</s>")
    assert not (tmp_path / "cache" / "cache.json").exists()


def test_a_report_speaks_of_the_data(tmp_path):
    lines = ['{"text": "one two three"}', '{"text": ""}', '{"text": 1}', "no JSON", '{"text": "one two three"}'] * 40
    (tmp_path / "a.jsonl").write_text("\n".join(lines) + "\n")
    moments = []
    source = fb.sources.jsonl(tmp_path / "a.jsonl")
    recipe = fb.TokenRecipe(tokenizer="gpt2", sequence_length=16, deduplicate=True)
    options = {"workers": 0, "max_failures": 1.0}
    report = fb.build(tmp_path / "cache", source, recipe, **options, on_progress=moments.append)
    assert report.reasons == {"empty": 40, "not-text": 40, "bad-json": 40}
    assert sum(report.reasons.values()) == report.failures
    assert (report.statistics["tokens"], report.statistics["duplicates"]) == (4, 79)
    assert report.built_statistics == report.statistics
    assert report.figures["utilization"] == 4 / 16
    assert report.figures["characters_per_token"] == len("one two three") / 4
    assert report.tokens_per_second == 4 / report.seconds
    assert msgspec.to_builtins(report)["tokens_per_second"] == report.tokens_per_second, "JSON has it"
    assert (moments[-1].tokens, moments[-1].utilization) == (4, 4 / 16)
    again = fb.build(tmp_path / "cache", source, recipe, **options)
    assert (again.statistics, again.built_statistics, again.tokens_per_second) == (report.statistics, {}, None)
    assert (again.reasons, again.layer_reasons) == ({}, report.reasons)
