"""The chat recipe as a recipe: contract, long conversations, statistics, fingerprint, tokenizers."""

import json
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from tests.chat.chat_rows import expected, labeled_documents
from tests.chat.stock_templates import CHATML, HARMONY, LLAMA2, QWEN25, TEKKEN, Stock, framed
from tests.chat.tokenizer_folders import byte_level, sentence_piece, write_folder
from tokenizers import Tokenizer

import forebay as fb
from forebay.chat import ChatRecipe
from forebay.chat import recipe as chat_recipe
from forebay.chat.token_bytes import token_bytes
from forebay.errors import ModelUnusable, RecipeInvalid
from forebay.masks import KINDS, ROLES
from forebay.masks.train_on import TrainOn
from forebay.testing import RecipeContract
from forebay.tokens import Vocabulary


def conversation(*texts: str) -> bytes:
    turns = [{"role": ("user", "assistant")[at % 2], "content": text} for at, text in enumerate(texts)]
    return json.dumps({"messages": turns}).encode()


UNFRAMED = Stock(
    "a text that begins with a content",
    "{% for message in messages %}{{ message['content'] + '</s>' }}{% endfor %}",
    ("</s>",),
    framed(lambda role: "", "</s>"),
    tokens={"eos_token": "</s>"},
)


def samples(count: int) -> list[fb.Sample]:
    return [
        fb.Sample(f"a@{at}", conversation(f"Question {at}?", "Hello world. " * (at % 7 + 1))) for at in range(count)
    ]


@pytest.fixture(scope="module")
def chatml(tmp_path_factory: pytest.TempPathFactory) -> str:
    tokenizer = byte_level(CHATML.special)
    return write_folder(tmp_path_factory.mktemp("chatml"), tokenizer, CHATML.plain(), CHATML.tokens)


class TestChat(RecipeContract):
    helpers = ("signature", "template_source", "token_bytes", "vocabulary")
    bad = fb.Sample("bad", b'{"messages": []}')

    @pytest.fixture(autouse=True)
    def folder(self, chatml: str) -> None:
        self.chatml = chatml

    def make_recipe(self) -> ChatRecipe:
        return ChatRecipe(tokenizer=self.chatml, sequence_length=128, deduplicate=True)

    def samples(self) -> list[fb.Sample]:
        return samples(9)


def test_rows_are_packed_without_splitting_a_conversation(chatml: str) -> None:
    rows = ChatRecipe(tokenizer=chatml, sequence_length=100).make(samples(40))
    lengths: Any = rows.columns["seq_lens"]
    assert len(rows.columns["tokens"]) < 40
    assert len(lengths.values) == 40
    assert max(lengths[row].sum() for row in range(len(lengths))) <= 100
    assert sorted(rows.columns["documents"].values[:, 0].tolist()) == list(range(40))  # type: ignore[union-attr]
    assert len(labeled_documents(rows)) == 40


def test_batches_to_encode_are_bounded_by_bytes_whatever_the_characters(
    chatml: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A character has up to four bytes, and an encoder takes some hundred bytes of memory for each."""
    monkeypatch.setattr(chat_recipe, "BATCH_BYTES", 4000)
    wide = [fb.Sample(f"a@{at}", conversation("語" * (100 + 40 * at), "🌊" * 90)) for at in range(40)]
    rendered = list(ChatRecipe(tokenizer=chatml)._rendered(enumerate(wide), []))
    assert [each.size for each in rendered] == [len(each.documents[0].text.encode()) for each in rendered]
    batches = list(chat_recipe.in_batches(iter(rendered)))
    assert [each.number for batch in batches for each in batch] == list(range(40))
    assert len(batches) > 10
    for batch in batches:
        assert sum(each.size for each in batch[:-1]) < 4000


def test_no_span_reaches_from_a_conversation_into_the_next(chatml: str) -> None:
    """Where one ends with the same role, kind and message that the next one begins with: answers without a question."""
    alone = [json.dumps({"messages": [{"role": "assistant", "content": text}]}) for text in ("One.", "Two.")]
    recipe = ChatRecipe(tokenizer=chatml, sequence_length=128)
    rows = recipe.make([fb.Sample(text, text) for text in alone])
    spans, lengths = rows.columns["spans"], rows.columns["seq_lens"]
    assert isinstance(spans, fb.Ragged)
    assert isinstance(lengths, fb.Ragged)
    assert lengths.values[0] in spans.values[:, 0]
    assert [KINDS[kind] for kind in spans.values[:, 3]] == 2 * ["header", "response", "stop", "header"]


def test_long_conversations_are_an_error_dropped_or_cut_at_a_turn(chatml: str) -> None:
    long = fb.Sample("long", conversation("1", "one", "2", "two " * 10, "3", "three " * 40))
    alone = fb.Sample("alone", conversation("1", "one " * 80))
    fields = {"tokenizer": chatml, "sequence_length": 64}
    with pytest.raises(
        RecipeInvalid,
        match=r"'long' has \d+ tokens; rows hold 64\nhint: .* set long='truncate' or long='drop' \(`--long`\)$",
    ):
        ChatRecipe(**fields).make([long])
    dropped = ChatRecipe(**fields, long="drop").make([*samples(2), long])
    assert [(each.sample, each.reason) for each in dropped.failures] == [("long", "too-long")]
    assert dropped.statistics["documents_dropped"] == 1
    cut = ChatRecipe(**fields, long="truncate").make([long, alone])
    assert [(each.sample, each.detail.split(", and ")[1]) for each in cut.failures] == [
        ("alone", "its first turn does not fit")
    ]
    (document,) = labeled_documents(cut)
    tokenizer = Tokenizer.from_file(f"{chatml}/tokenizer.json")
    assert document.decoded(tokenizer, "response", "stop") == "one<|im_end|>" + "two " * 10 + "<|im_end|>"
    assert document.kinds[-1] == "stop"
    assert cut.columns["last_turn"].values.tolist() == [3]  # type: ignore[union-attr]
    assert (cut.statistics["documents_cut"], cut.statistics["turns"]) == (1, 2)


def test_a_conversation_of_several_documents_is_dropped_whole(tmp_path: Path) -> None:
    """Its last turn is too long for a row, the turn before it is not."""
    folder = write_folder(tmp_path, byte_level(HARMONY.special), HARMONY.plain(), {})
    given = [fb.Sample("a", conversation("1", "one", "2", "two " * 300)), fb.Sample("b", conversation("1", "one"))]
    recipe = ChatRecipe(tokenizer=folder, sequence_length=200, long="drop")
    rows = recipe.make(given)
    assert [(each.sample, each.reason) for each in rows.failures] == [("a", "too-long")]
    assert rows.statistics["documents"] == rows.statistics["conversations"] == 1
    assert rows.statistics["documents_dropped"] == 2


def test_the_last_turn_of_a_split_history_is_that_of_the_conversation(tmp_path: Path) -> None:
    folder = write_folder(tmp_path, byte_level(HARMONY.special), HARMONY.plain(), {})
    rows = ChatRecipe(tokenizer=folder).make([fb.Sample("a", conversation("1", "one", "2", "two"))])
    assert rows.columns["last_turn"].values.tolist() == [3, 3]  # type: ignore[union-attr]
    assert rows.statistics["conversations"] == 1
    assert rows.statistics["documents"] == rows.statistics["turns"] == 2


def test_statistics_count_tokens_by_role_and_kind(chatml: str) -> None:
    recipe = ChatRecipe(tokenizer=chatml, sequence_length=256)
    rows = recipe.make(samples(10))
    documents = labeled_documents(rows)
    kinds = [kind for document in documents for kind in document.kinds]
    assert rows.statistics["tokens_by_kind"] == [kinds.count(kind) for kind in KINDS]
    assert sum(rows.statistics["tokens_by_role"]) == rows.statistics["tokens"] == len(kinds)  # type: ignore[arg-type]
    figures = recipe.figures({"sequence_length": 256}, rows.statistics, {"rows": 2, "bytes": 100})
    assert figures["turns_per_conversation"] == 1
    assert figures["tokens_by_role"] == dict(zip(ROLES, rows.statistics["tokens_by_role"], strict=True))  # type: ignore[arg-type]
    assert figures["generated_share"] == pytest.approx(np.isin(kinds, ["response", "stop"]).mean())


def test_the_fingerprint_has_the_template_and_the_tokenizer_and_not_where_they_are(chatml: str, tmp_path: Path) -> None:
    same = write_folder(tmp_path / "same", byte_level(CHATML.special), CHATML.plain(), CHATML.tokens, as_file=True)
    other = write_folder(tmp_path / "other", byte_level(CHATML.special), CHATML.plain() + " ", CHATML.tokens)
    eos = write_folder(tmp_path / "eos", byte_level(CHATML.special), CHATML.plain(), {"eos_token": "x"})
    marks = [fb.fingerprint(ChatRecipe(tokenizer=folder)) for folder in (chatml, same, other, eos)]
    assert marks[0] == marks[1]
    assert len(set(marks)) == 3


def test_the_padding_token_is_the_configured_one(tmp_path: Path) -> None:
    folder = write_folder(tmp_path, byte_level(QWEN25.special, QWEN25.ordinary), QWEN25.plain(), QWEN25.tokens)
    recipe, _ = ChatRecipe(tokenizer=folder).settled(None, list)
    assert recipe.pad == Tokenizer.from_file(f"{folder}/tokenizer.json").token_to_id("<|endoftext|>")


def test_both_encoders_make_the_same_rows(chatml: str) -> None:
    rows = [ChatRecipe(tokenizer=chatml, encoder=name).make(samples(30)) for name in ("fastokens", "tokenizers")]
    assert np.array_equal(rows[0].columns["tokens"], rows[1].columns["tokens"])
    assert np.array_equal(rows[0].columns["spans"].values, rows[1].columns["spans"].values)  # type: ignore[union-attr]


@pytest.mark.parametrize("scheme", ["", "first", "always", "never"], ids=lambda scheme: scheme or "normalizer")
@pytest.mark.parametrize("stock", [LLAMA2, TEKKEN, CHATML, UNFRAMED], ids=lambda stock: stock.name)
def test_a_space_before_texts_keeps_spans_exact(stock: Stock, scheme: str, tmp_path: Path) -> None:
    folder = write_folder(tmp_path, sentence_piece(stock.special, metaspace=scheme), stock.plain(), stock.tokens)
    tokenizer = Tokenizer.from_file(f"{folder}/tokenizer.json")
    questions = ("Hello", " Hello", "  the", "ü", "the the")
    cases = [
        [{"role": ("user", "assistant")[at % 2], "content": text} for at, text in enumerate((one, two, two, "all"))]
        for one in questions
        for two in questions
    ]
    given = [fb.Sample(f"{at}", {"messages": case}) for at, case in enumerate(cases)]
    rows = ChatRecipe(tokenizer=folder, sequence_length=512).make(given)
    assert rows.failures == ()
    for document in labeled_documents(rows):
        ((text, ids, kinds, _),) = [expected(tokenizer, pieces) for pieces in stock.oracle(cases[document.sample])]
        assert document.tokens == ids, text
        assert document.kinds == kinds, text


def test_a_token_across_a_border_belongs_to_the_span_that_it_begins_in(tmp_path: Path) -> None:
    """`⏎` of the header and `⏎` of the answer are one token here: the header has it."""
    merged = json.loads(byte_level(CHATML.special))
    merged["model"]["vocab"]["ĊĊ"] = merged["model"]["vocab"].pop("".join(merged["model"]["merges"].pop()))
    merged["model"]["merges"].insert(0, ["Ċ", "Ċ"])
    merged["pre_tokenizer"]["use_regex"] = False
    folder = write_folder(tmp_path, json.dumps(merged), CHATML.plain(), CHATML.tokens)
    rows = ChatRecipe(tokenizer=folder).make([fb.Sample("a", conversation("Hi", "\nHello"))])
    assert rows.failures == ()
    (document,) = labeled_documents(rows)
    tokenizer = Tokenizer.from_file(f"{folder}/tokenizer.json")
    assert document.decoded(tokenizer, "response", "stop") == "Hello<|im_end|>"
    assert rows.statistics["tokens_straddling"] == 1


def test_texts_that_do_not_decode_back_are_refused_with_the_place(tmp_path: Path) -> None:
    """`▁` is how the model writes a space: a text that has it comes back with a space."""
    folder = write_folder(tmp_path, sentence_piece(CHATML.special, prefix=False), CHATML.plain(), CHATML.tokens)
    recipe = ChatRecipe(tokenizer=folder)
    rows = recipe.make([fb.Sample("good", conversation("Hi", "a b")), fb.Sample("bad", conversation("Hi", "a▁b"))])
    assert [(each.sample, each.reason) for each in rows.failures] == [("bad", "not-reversible")]
    assert r"'▁b<|im_end|>\n' became ' b<|im_end|>\n'" in rows.failures[0].detail


def test_a_conversation_that_would_take_too_much_memory_is_a_failure(chatml: str) -> None:
    def sample(name: str, size: int) -> fb.Sample:
        turns = [{"role": "user", "content": "x" * size}, {"role": "assistant", "content": "yes"}]
        return fb.Sample(name, json.dumps({"messages": turns}))

    samples = [sample("small", 9), sample("large", 4_000_000), sample("other", 9)]
    rows = ChatRecipe(tokenizer=chatml, sequence_length=64).make(samples)
    assert [(failure.sample, failure.reason) for failure in rows.failures] == [("large", "too-large")]
    assert "split the conversation" in rows.failures[0].detail
    assert rows.statistics["conversations"] == 2


def test_a_token_that_removes_white_space_is_named_where_it_does(tmp_path: Path) -> None:
    """As the control tokens of Phi-3 do: texts without white space beside them are encoded like any other."""
    file = json.loads(byte_level(CHATML.special))
    for token in file["added_tokens"]:
        token.update(rstrip=True)
    template = CHATML.plain().replace("'<|im_end|>' + '\n'", "'<|im_end|>'").replace("{{ '\\n' }}", "")
    folder = write_folder(tmp_path, json.dumps(file), template, CHATML.tokens)
    given = [fb.Sample(str(at), conversation(*texts)) for at, texts in enumerate([("Hi", "Yes"), ("Hi", "Yes\n")])]
    rows = ChatRecipe(tokenizer=folder).make(given)
    assert rows.failures == ()
    file = json.loads(byte_level(CHATML.special))
    file["added_tokens"][1].update(rstrip=True)
    folder = write_folder(tmp_path / "line breaks", json.dumps(file), CHATML.plain(), CHATML.tokens)
    (failure,) = ChatRecipe(tokenizer=folder).make(given[:1]).failures
    assert failure.reason == "not-reversible"
    assert (
        "; the token '<|im_end|>' removes white space next to it: write the template without it, or" in failure.detail
    )


@pytest.mark.parametrize(("joined", "failed"), [(".<|im_end|>", ["1"]), ("<|im_end|>\n", ["0", "1"])])
def test_a_stop_token_of_which_the_tokenizer_makes_another_token_is_refused(
    joined: str, failed: list[str], tmp_path: Path
) -> None:
    """An ordinary token has the text of the stop token and more: a model would never learn to stop."""
    tokenizer = byte_level(CHATML.special, (joined,))
    folder = write_folder(tmp_path / "model", tokenizer, CHATML.plain(), CHATML.tokens)
    recipe = fb.ChatRecipe(tokenizer=folder, encoder="tokenizers")
    chats = [[{"role": "user", "content": "Hi!"}, {"role": "assistant", "content": each}] for each in ("No", "No.")]
    rows = recipe.make([fb.Sample(str(at), json.dumps({"messages": chat})) for at, chat in enumerate(chats)])
    assert [(failure.sample, failure.reason) for failure in rows.failures] == [(each, "no-stop") for each in failed]


def test_texts_are_normalized_as_the_tokenizer_does_it(tmp_path: Path) -> None:
    folder = write_folder(tmp_path, byte_level(CHATML.special, nfc=True), CHATML.plain(), CHATML.tokens)
    rows = ChatRecipe(tokenizer=folder).make([fb.Sample("a", conversation("u\u0308?", "Ja, e\u0301."))])
    assert rows.failures == ()
    (document,) = labeled_documents(rows)
    tokenizer = Tokenizer.from_file(f"{folder}/tokenizer.json")
    assert document.decoded(tokenizer, "response") == "Ja, é."


def test_half_of_a_surrogate_pair_is_a_failure(chatml: str) -> None:
    turns = [{"role": "user", "content": "\ud800"}, {"role": "assistant", "content": "x"}]
    (failure,) = ChatRecipe(tokenizer=chatml).make([fb.Sample("a", {"messages": turns})]).failures
    assert failure.reason == "not-utf8"


@pytest.mark.parametrize(
    ("change", "said"),
    [
        (lambda file: file["added_tokens"][0].update(single_word=True), "is found only between words"),
        (lambda file: file.update(normalizer={"type": "Lowercase"}), "its normalizer Lowercase changes texts"),
        (lambda file: file["pre_tokenizer"].update(add_prefix_space=True), "adds a space before texts"),
        (
            lambda file: file.update(pre_tokenizer={"type": "Whitespace"}, decoder={"type": "WordPiece"}),
            "does not store tokens as bytes",
        ),
    ],
)
def test_tokenizers_whose_tokens_are_not_bytes_are_refused_by_name(change: Any, said: str, tmp_path: Path) -> None:
    file = json.loads(byte_level(CHATML.special))
    change(file)
    folder = write_folder(tmp_path, json.dumps(file), CHATML.plain(), CHATML.tokens)
    with pytest.raises(ModelUnusable, match=said):
        ChatRecipe(tokenizer=folder).settled(None, list)


def test_wrong_fields_are_refused_when_the_recipe_is_made(chatml: str) -> None:
    for fields, said in (
        ({"long": "split"}, "it must be one of 'error', 'drop', 'truncate'"),
        ({"sequence_length": 0}, "sequence_length is 0; it must be a whole number from 1 to"),
        ({"names": {"mesages": "x"}}, "names must map only messages"),
        ({"roles": {"x": "y"}}, "roles is"),
    ):
        with pytest.raises(RecipeInvalid, match=said):
            ChatRecipe(tokenizer=chatml, **fields)
    with pytest.raises(ModelUnusable, match=r"there is no such file\nhint: pass another with --template FILE"):
        ChatRecipe(tokenizer=chatml, template="missing.jinja").dependencies()


def test_a_tokenizer_without_added_tokens_is_read() -> None:
    file = json.loads(byte_level(()))
    vocabulary = Vocabulary("t", json.dumps({**file, "added_tokens": None}).encode())
    assert not token_bytes(vocabulary).added


def test_a_kind_that_is_named_twice_counts_once() -> None:
    assert TrainOn.of(["response", "response"]) == TrainOn.of(["response"])
