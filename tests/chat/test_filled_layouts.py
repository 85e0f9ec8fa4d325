"""Layouts that are filled in against conversations that are taken apart one by one, and against the oracles by hand."""

import json
import random
from itertools import compress
from pathlib import Path
from typing import Any

import pytest
from tests.chat.chat_rows import expected, labeled_documents
from tests.chat.stock_templates import CHATML, GLM4, STOCK, Stock
from tests.chat.test_layouts import made, recipe_of
from tokenizers import Tokenizer

import forebay as fb
from forebay.chat import ChatRecipe, ChatTemplate
from forebay.chat import recipe as recipe_module
from forebay.chat.dissect import Dissector
from forebay.chat.layouts import Layouts
from forebay.chat.template import TemplateSource

SPACES = ("", "", "", " ", "\n", "\n\n", " \n", "\t", "\u3000", "\x1c", "\u2028")
WORDS = (
    "Hello", "a", "x" * 40, "é", "e\u0301", "你好", "👩‍💻", "🇩🇪", '"', "\\", "{{ 7 }}", "{% raw %}", "[INST]", "<s",
    "<|im_end", "###", "<|user", "tool_response", "<tool_call>", "assistant\n", "\x00", "\ufeff", "\U000f0000",
    "\U00100001",
)  # fmt: skip
THOUGHTS = ("<think>", "</think>", "<think>\n", "\n</think>\n\n", "<think>a</think>", "<thinking>")
CALLS = ({"name": "f", "arguments": {}}, {"name": "weather", "arguments": {"city": "Köln", "of": [1, None, "x y"]}})
INLINE = [
    {"role": ("user", "assistant")[at % 2], "content": text}
    for at, text in enumerate(("1 + 1?", "<think>hm</think>2", "ok", "yes", "3?", "<think>a</think>3"))
]
TOOL = {"type": "function", "function": {"name": "f", "description": "does f", "parameters": {}}}


def a_text(chosen: random.Random, words: tuple[str, ...]) -> str:
    if chosen.random() < 0.06:
        return chosen.choice(SPACES)
    inside = chosen.choice((*SPACES, " ", ", ")).join(chosen.choice(words) for _ in range(chosen.randrange(1, 4)))
    return chosen.choice(SPACES) + inside + chosen.choice(SPACES)


def a_conversation(chosen: random.Random, stock: Stock, words: tuple[str, ...] = WORDS) -> dict[str, Any]:
    """One to three turns of what the template accepts: a system prompt, thinking, calls, weights and tools."""
    messages: list[dict[str, Any]] = []
    if stock.system and chosen.random() < 0.3:
        messages.append({"role": "system", "content": a_text(chosen, words).strip() or "S"})
    for _ in range(chosen.randrange(1, 4)):
        messages.append({"role": "user", "content": a_text(chosen, words)})
        if stock.tools and chosen.random() < 0.2:
            calls = [{"type": "function", "function": chosen.choice(CALLS)}]
            messages.append({"role": "assistant", "content": "", "tool_calls": calls})
            messages.append({"role": "tool", "content": a_text(chosen, words)})
        messages.append({"role": "assistant", "content": a_text(chosen, words)})
        if stock.thinking and chosen.random() < 0.4:
            messages[-1]["reasoning_content"] = a_text(chosen, words)
    return {"messages": messages}


def with_weights_and_tools(chosen: random.Random, record: dict[str, Any], stock: Stock) -> dict[str, Any]:
    answers = [message for message in record["messages"] if message["role"] == "assistant"]
    if len(answers) > 1 and chosen.random() < 0.3:
        chosen.choice(answers)["weight"] = chosen.randrange(2)
    return {**record, "tools": [TOOL]} if stock.tools and chosen.random() < 0.2 else record


def taking_apart(source: TemplateSource, arguments: bytes, date: str | None, special: Any, stop: str | None) -> Layouts:
    """Layouts that are never remembered: every conversation is rendered and taken apart."""
    template = ChatTemplate(source, json.loads(arguments), date)
    template.uses = None
    return Layouts(Dissector(template, special, stop))


def compare(recipe: ChatRecipe, records: list[dict[str, Any]], monkeypatch: pytest.MonkeyPatch) -> fb.Rows:
    """The rows, which are equal with and without remembered layouts; so are the failures."""
    samples = [fb.Sample(f"s{at}", json.dumps(record)) for at, record in enumerate(records)]
    filled = recipe.make(samples)
    with monkeypatch.context() as patched:
        patched.setattr(recipe_module, "_open_layouts", taking_apart)
        apart = recipe.make(samples)
    assert [failure.sample for failure in filled.failures] == [failure.sample for failure in apart.failures]
    for name, column in filled.columns.items():
        both = [each.values if isinstance(each, fb.Ragged) else each for each in (column, apart.columns[name])]
        assert both[0].tolist() == both[1].tolist(), name
    return filled


SEEDS = pytest.mark.parametrize("seeds", [range(1), pytest.param(range(1, 40), marks=pytest.mark.long)], ids=len)


@pytest.mark.slow
@SEEDS
@pytest.mark.parametrize("stock", STOCK, ids=lambda stock: stock.name)
def test_filled_layouts_are_what_taking_apart_gives_for_random_conversations(
    stock: Stock, seeds: range, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Whatever a layout was remembered from: white space, thinking, tools, weights, text like markers."""
    words = (*WORDS, *THOUGHTS, *stock.special[:3])
    for seed in seeds:
        chosen = random.Random(f"{stock.name} {seed}")
        template = stock.with_generation() if seed % 2 else stock.plain()
        recipe = recipe_of(tmp_path / str(seed), stock, template, sequence_length=2048)
        records = [with_weights_and_tools(chosen, a_conversation(chosen, stock, words), stock) for _ in range(100)]
        assert len(compare(recipe, records, monkeypatch).columns["tokens"])


@SEEDS
@pytest.mark.parametrize("stock", STOCK, ids=lambda stock: stock.name)
def test_tokens_and_kinds_of_random_conversations_are_those_of_the_oracle(
    stock: Stock, seeds: range, tmp_path: Path
) -> None:
    recipe = recipe_of(tmp_path, stock, stock.with_generation(), sequence_length=2048)
    tokenizer = Tokenizer.from_file(f"{recipe.tokenizer}/tokenizer.json")
    words = tuple(word for word in WORDS if not any(word in token for token in (*stock.special, *stock.ordinary)))
    for seed in seeds:
        chosen = random.Random(f"{stock.name} {seed}")
        chats = [INLINE] if stock.name == "deepseek-r1-style" else []
        chats += [a_conversation(chosen, stock, words)["messages"] for _ in range(60)]
        rows = made(recipe, *chats)
        documents, failed = labeled_documents(rows), {failure.sample for failure in rows.failures}
        assert len(failed) < len(chats) // 2
        for number, chat in enumerate(chats):
            if f"s{number}" in failed or (
                stock.name == "llama-2" and not all(each["content"].strip() for each in chat)
            ):
                continue  # where nothing follows a system prompt, Llama 2 strips its own text
            aliased = [{**m, "thinking": m["reasoning_content"]} if "reasoning_content" in m else m for m in chat]
            wanted = [expected(tokenizer, pieces) for pieces in stock.oracle(aliased)]
            mine = [document for document in documents if document.sample == number]
            assert [document.tokens for document in mine] == [ids for _, ids, _, _ in wanted], chat
            assert [document.kinds for document in mine] == [kinds for _, _, kinds, _ in wanted], chat
            for document, (_, _, kinds, messages) in zip(mine, wanted, strict=True):
                inside = [kind not in ("header", "stop") for kind in kinds]
                assert list(compress(document.messages, inside)) == list(compress(messages, inside)), chat


TWO_TURNS = [{"role": role, "content": role} for role in ("user", "assistant", "user", "assistant")]


def test_a_layout_with_an_untrained_answer_is_not_taken_for_one_without(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    weighted = [TWO_TURNS[0], {**TWO_TURNS[1], "weight": 0}, *TWO_TURNS[2:]]
    rows = compare(recipe_of(tmp_path, CHATML), [{"messages": weighted}, {"messages": TWO_TURNS}], monkeypatch)
    assert [document.kinds.count("stop") for document in labeled_documents(rows)] == [1, 2]


def test_a_content_that_ends_like_a_turn_is_refused_and_does_not_end_the_build(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The template writes no stop token, so one is added to texts that do not end with one."""
    forged = [*TWO_TURNS[:3], {"role": "assistant", "content": "a<|user|>"}]
    records = [{"messages": forged if not at % 8 and at else TWO_TURNS} for at in range(70)]
    rows = compare(recipe_of(tmp_path, GLM4), records, monkeypatch)
    assert {int(failure.sample[1:]) for failure in rows.failures} == set(range(8, 70, 8))


def test_a_content_that_is_repeated_in_an_answer_has_the_kind_of_the_answer(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Whether the repeated one has the text of a tag of thinking in it or not."""
    template = CHATML.plain().replace(
        "message['role'] == 'assistant' %}", "message['role'] == 'assistant' %}{{ messages[0].content }}"
    )
    assert "messages[0]" in template
    records = [
        {"messages": [{"role": "user", "content": text}, {"role": "assistant", "content": "b"}]}
        for text in ("a <think> tag", "a", "</think>", "c")
    ]
    rows = compare(recipe_of(tmp_path, CHATML, template), records, monkeypatch)
    assert all("thinking" not in document.kinds for document in labeled_documents(rows))


def test_private_characters_in_texts_that_are_written_only_sometimes_are_read(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    qwen3 = next(stock for stock in STOCK if stock.name == "qwen-3")
    thinking = {**TWO_TURNS[1], "reasoning_content": "\U00100001\U000f8001"}
    rows = compare(recipe_of(tmp_path, qwen3), [{"messages": [TWO_TURNS[0], thinking, *TWO_TURNS[2:]]}], monkeypatch)
    assert not rows.failures
