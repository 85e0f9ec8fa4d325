"""Masks of stock templates, token by token, against oracles that are written by hand."""

import json
from pathlib import Path
from typing import Any

import pytest
from tests.chat.chat_rows import assistant, expected, labeled_documents, user
from tests.chat.stock_templates import STOCK, Stock
from tests.chat.tokenizer_folders import byte_level, write_folder
from tokenizers import Tokenizer

import forebay as fb
from forebay.chat import ChatRecipe

WEATHER = {"type": "function", "function": {"name": "weather", "arguments": {"city": "Köln", "days": 2}}}


CONVERSATIONS: dict[str, list[dict[str, Any]]] = {
    "one turn": [user("Who are you?"), assistant("I am a small model.")],
    "three turns": [user("1"), assistant("one"), user("2"), assistant("two"), user("3"), assistant("three")],
    "trailing spaces": [user("  Hi there \n"), assistant(" Hello \n\n"), user("\tand?"), assistant("fine  ")],
    "unicode": [user("Wie heißt du? 你好 👩‍💻"), assistant("Ⅷ – naïve 🇩🇪\u0301 ok"), user("é"), assistant("\u3000 ü")],
    "markers as text": [
        user("[INST] ### user: <<SYS>> <|not a token|> {{ 7 * 7 }} {% raw %}"),
        assistant("assistant\n[/INST] {{ messages }} user\n</s"),
        user("Hello"),
        assistant("[/INST]"[:-1]),
    ],
    "the same text everywhere": [user("Hello"), assistant("Hello"), user("Hello"), assistant("Hello")],
    "an empty question": [user(""), assistant("Yes?"), user("No."), assistant("Good.")],
    "private characters": [user("\U000f0000 a \U00100001"), assistant("\U000f8001\U0010fffd b")],
}
SYSTEM = [{"role": "system", "content": "Be brief. "}, user("Who?"), assistant("Me."), user("Why?"), assistant("So.")]
THINKING = [
    user("1 + 1?"),
    assistant("2", reasoning_content="one and\none"),
    user("And 3?"),
    assistant("3", reasoning_content="easy"),
]
INLINE = [
    user("1 + 1?"),
    assistant("<think>hm</think>2"),
    user("ok"),
    assistant("yes"),
    user("3?"),
    assistant("<think>a</think>3"),
]
TOOLS = [
    user("Weather?"),
    assistant("", tool_calls=[WEATHER]),
    {"role": "tool", "content": '{"degrees": 7}'},
    assistant("Cold.\n"),
]


def conversations(stock: Stock) -> dict[str, list[dict[str, Any]]]:
    found = dict(CONVERSATIONS)
    if stock.name == "mistral-v0.3" or any("[INST" in token for token in stock.special):
        markers = found["markers as text"]
        found["markers as text"] = [{**m, "content": m["content"].replace("INST]", "INST")} for m in markers]
    if any(token in ("<|user|>", "</s>") for token in stock.special):
        found["markers as text"] = [
            {**m, "content": m["content"].replace("</s", "<s")} for m in found["markers as text"]
        ]
    found |= {"system": SYSTEM} if stock.system else {}
    found |= {"thinking": THINKING} if stock.thinking else {}
    found |= {"thinking in contents": INLINE} if stock.name == "deepseek-r1-style" else {}
    return found | ({"tools": TOOLS} if stock.tools else {})


def rows_of(recipe: ChatRecipe, *samples: dict[str, Any]) -> fb.Rows:
    return recipe.make([fb.Sample(f"sample {at}", json.dumps(sample)) for at, sample in enumerate(samples)])


@pytest.mark.parametrize("stock", STOCK, ids=lambda stock: stock.name)
def test_every_token_has_the_kind_that_the_format_says(stock: Stock, tmp_path: Path) -> None:
    tokens = byte_level(stock.special, stock.ordinary)
    folder = write_folder(tmp_path / "model", tokens, stock.with_generation(), stock.tokens)
    tokenizer = Tokenizer.from_file(f"{folder}/tokenizer.json")
    recipe = ChatRecipe(tokenizer=folder, sequence_length=4096, **stock.fields)
    cases = conversations(stock)
    made = rows_of(recipe, *({"messages": messages} for messages in cases.values()))
    assert [failure.detail for failure in made.failures] == []
    documents = labeled_documents(made)
    for number, (name, messages) in enumerate(cases.items()):
        aliased = [{**m, "thinking": m["reasoning_content"]} if "reasoning_content" in m else m for m in messages]
        wanted = [expected(tokenizer, pieces) for pieces in stock.oracle(aliased)]
        mine = [document for document in documents if document.sample == number]
        assert len(mine) == len(wanted), name
        for document, (text, ids, kinds, messages_of) in zip(mine, wanted, strict=True):
            assert tokenizer.decode(document.tokens, skip_special_tokens=False) == text, name
            assert document.tokens == ids, name
            assert document.kinds == kinds, f"{name}: {list(zip(ids, document.kinds, kinds, strict=True))}"
            contents = [at for at, kind in enumerate(kinds) if kind not in ("header", "stop")]
            assert [document.messages[at] for at in contents] == [messages_of[at] for at in contents], name
