"""Random conversations in random templates: responses decode to the responses, and spans cover everything once."""

import atexit
import json
from functools import lru_cache
from itertools import compress
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import Any

from hypothesis import given, settings
from hypothesis import strategies as st
from tests.chat.chat_rows import expected, labeled_documents
from tests.chat.stock_templates import STOCK, Stock, framed
from tests.chat.tokenizer_folders import byte_level, write_folder
from tests.helpers.hypothesis_profiles import scaled
from tokenizers import Tokenizer

import forebay as fb

TEXTS = st.text(st.characters(exclude_categories=["Cs"]), max_size=12) | st.sampled_from(
    ["Hello", " a ", "\n", "assistant\n", "[INST", "<|im_end", "{{ x }}", "é\u0301", "👩‍💻", "</think", "user\n\n"]
)
ANSWERS = TEXTS.filter(str.strip)
KEEPS_CONTENTS = [
    stock for stock in STOCK if stock.name in ("chatml", "zephyr", "phi-3", "phi-4", "mistral-tekken", "glm-4")
]


@lru_cache(maxsize=1)
def models_folder() -> "TemporaryDirectory[str]":
    """Removed when the process ends that asked for it; one made at import would end with the first that was forked."""
    folder = TemporaryDirectory(ignore_cleanup_errors=True)
    atexit.register(folder.cleanup)
    return folder


@lru_cache(maxsize=32)
def model(stock: Stock, generation: bool) -> tuple[str, Tokenizer]:
    template = stock.with_generation() if generation else stock.plain()
    folder = write_folder(
        Path(models_folder().name, f"{stock.name} {generation}"),
        byte_level(stock.special, stock.ordinary),
        template,
        stock.tokens,
    )
    return folder, Tokenizer.from_file(f"{folder}/tokenizer.json")


def forged(stock: Stock, messages: list[dict[str, Any]]) -> bool:
    return any(token in message["content"] for token in (*stock.special, "</think>") for message in messages)


def turns(texts: list[tuple[str, str]]) -> list[dict[str, Any]]:
    return [
        {"role": role, "content": content}
        for question, answer in texts
        for role, content in (("user", question), ("assistant", answer))
    ]


@settings(deadline=None, max_examples=scaled(240))
@given(
    stock=st.sampled_from(STOCK),
    generation=st.booleans(),
    chats=st.lists(st.lists(st.tuples(TEXTS, ANSWERS), min_size=1, max_size=3), min_size=1, max_size=4),
)
def test_masks_of_random_conversations_are_those_of_the_oracle(
    stock: Stock, generation: bool, chats: list[list[tuple[str, str]]]
) -> None:
    folder, tokenizer = model(stock, generation)
    conversations = [turns(texts) for texts in chats if not forged(stock, turns(texts))]
    recipe = fb.ChatRecipe(tokenizer=folder, sequence_length=4096, **stock.fields)
    samples = [fb.Sample(str(at), json.dumps({"messages": each})) for at, each in enumerate(conversations)]
    rows = recipe.make(samples)
    assert rows.failures == ()
    documents = labeled_documents(rows)  # which checks that spans cover every document once
    wanted = [expected(tokenizer, pieces) for each in conversations for pieces in stock.oracle(each)]
    assert [document.tokens for document in documents] == [ids for _, ids, _, _ in wanted]
    assert [document.kinds for document in documents] == [kinds for _, _, kinds, _ in wanted]


@settings(deadline=None, max_examples=scaled(160))
@given(
    stock=st.sampled_from(KEEPS_CONTENTS),
    texts=st.lists(st.tuples(TEXTS, ANSWERS), min_size=1, max_size=4),
)
def test_tokens_of_kind_response_decode_to_the_responses(stock: Stock, texts: list[tuple[str, str]]) -> None:
    messages = turns(texts)
    if forged(stock, messages):
        return
    folder, tokenizer = model(stock, False)
    rows = fb.ChatRecipe(tokenizer=folder, **stock.fields).make([fb.Sample("a", json.dumps({"messages": messages}))])
    (document,) = labeled_documents(rows)
    for number, (question, answer) in enumerate(texts):
        mine = [token for token, at in zip(document.tokens, document.messages, strict=True) if at == 2 * number + 1]
        kinds = [kind for kind, at in zip(document.kinds, document.messages, strict=True) if at == 2 * number + 1]
        chosen = [token for token, kind in zip(mine, kinds, strict=True) if kind == "response"]
        assert tokenizer.decode(chosen, skip_special_tokens=False) == answer
        del question


CONTROL = ("<|a|>", "<|b|>", "<|end|>")
HEADERS = st.lists(st.sampled_from([*CONTROL[:2], "\n", " ", "user", "assistant", "###", "{", "ü"]), max_size=3).map(
    "".join
)


@st.composite
def templates(draw: st.DrawFn) -> Stock:
    """A frame of any texts around the messages of each role, around which contents may be stripped."""
    bos = draw(st.sampled_from(["", "<|a|>", "You are a model.\n", "<|b|>\n\n"]))
    before = {role: draw(HEADERS) for role in ("system", "user", "assistant")}
    before["assistant"] += draw(st.sampled_from(["", "<|a|>"]))
    end, after = (
        draw(st.sampled_from(["<|end|>", "\n<|end|>", " .<|end|>"])),
        draw(st.sampled_from(["", "\n", " ", "#"])),
    )
    strip = draw(st.booleans())
    content = "message.content" + (" | trim" if strip else "")
    blocks = ("{% generation %}", "{% endgeneration %}") if draw(st.booleans()) else ("", "")
    template = (
        f"{{{{ {json.dumps(bos)} }}}}{{% for message in messages %}}{{{{ {json.dumps(before)}[message.role] }}}}"
        f"{{% if message.role == 'assistant' %}}{blocks[0]}{{{{ ({content}) ~ {json.dumps(end)} }}}}{blocks[1]}"
        f"{{% else %}}{{{{ ({content}) ~ {json.dumps(end)} }}}}{{% endif %}}{{{{ {json.dumps(after)} }}}}{{% endfor %}}"
        f"{{% if add_generation_prompt %}}{{{{ {json.dumps(before['assistant'])} }}}}{{% endif %}}"
    )
    oracle = framed(before.__getitem__, end, after, bos=bos, strip=strip)
    return Stock("random", template, CONTROL, oracle, tokens={"eos_token": "<|end|>"})


@settings(deadline=None, max_examples=scaled(240))
@given(
    stock=templates(),
    system=st.none() | TEXTS,
    chats=st.lists(st.lists(st.tuples(TEXTS, ANSWERS), min_size=1, max_size=3), min_size=1, max_size=4),
)
def test_spans_of_random_templates_are_those_of_the_oracle_and_responses_decode_to_the_responses(
    stock: Stock, system: str | None, chats: list[list[tuple[str, str]]]
) -> None:
    first = [] if system is None else [{"role": "system", "content": system}]
    conversations = [[*first, *turns(texts)] for texts in chats if not forged(stock, [*first, *turns(texts)])]
    folder = write_folder(Path(models_folder().name, "random"), byte_level(CONTROL), stock.template, stock.tokens)
    tokenizer = Tokenizer.from_file(f"{folder}/tokenizer.json")
    recipe = fb.ChatRecipe(tokenizer=folder, sequence_length=4096, encoder="tokenizers")
    rows = recipe.make([fb.Sample(str(at), json.dumps({"messages": each})) for at, each in enumerate(conversations)])
    wanted = [expected(tokenizer, stock.oracle(each)[0]) for each in conversations]
    has_response = ["response" in kinds for _, _, kinds, _ in wanted]  # its text may all be in a token of the header
    assert [each.reason for each in rows.failures] == ["no-response"] * has_response.count(False)
    wanted, conversations = list(compress(wanted, has_response)), list(compress(conversations, has_response))
    documents = labeled_documents(rows)  # which checks that spans cover every document once
    assert [document.tokens for document in documents] == [ids for _, ids, _, _ in wanted]
    assert [document.kinds for document in documents] == [kinds for _, _, kinds, _ in wanted]
    if '<|a|>"}[message.role]' in stock.template and '~ "<|end|>' in stock.template:
        for document, messages in zip(documents, conversations, strict=True):  # no token crosses a border of an answer
            answers = [each["content"] for each in messages if each["role"] == "assistant"]
            written = [each.strip() for each in answers] if "| trim" in stock.template else answers
            assert document.decoded(tokenizer, "response") == "".join(written)
