"""Templates and conversations that could get a wrong mask without a word: each is masked right, or refused."""

from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
from tests.chat.chat_rows import assistant, labeled_documents, user
from tests.chat.stock_templates import CHATML, GLM4, HARMONY, LLAMA3, PHI3, QWEN3, STOCK, Stock
from tests.chat.test_filled_layouts import compare
from tests.chat.test_layouts import made, only_failure, recipe_of
from tokenizers import Tokenizer

from forebay.chat.rendering import ChatTemplate
from forebay.chat.template import TemplateSource
from forebay.errors import RecipeInvalid


def chatml(answer: str, prompt: str = "") -> str:
    """ChatML with another way to write answers, and something behind the generation prompt."""
    return (
        "{% for m in messages %}<|im_start|>{{ m.role }}\n{% if m.role == 'assistant' %}" + answer + "{% else %}"
        "{{ m.content }}<|im_end|>\n{% endif %}{% endfor %}"
        "{% if add_generation_prompt %}<|im_start|>assistant\n" + prompt + "{% endif %}"
    )


TWO_ENDS = replace(CHATML, special=(*CHATML.special, "<|begin|>", "<|end|>"))
TWO_TURNS = [user("Who?"), assistant("Me."), user("Why?"), assistant("So.")]
CALL, OTHER = {"name": "w", "arguments": {"a": 1}}, {"name": "v", "arguments": {}}


def trained(path: Path, stock: Stock, template: str | None, *chats: list[dict[str, Any]], **fields: Any) -> list[str]:
    """What is generated in each document, with `|` before the stop token."""
    recipe = recipe_of(path, stock, template, **fields)
    rows = made(recipe, *chats)
    assert [failure.detail for failure in rows.failures] == []
    tokenizer = Tokenizer.from_str(recipe.vocabulary().json.decode())
    found = []
    for document in labeled_documents(rows):
        text, before = "", ""
        for token, kind in zip(document.tokens, document.kinds, strict=True):
            if kind in ("response", "thinking", "tool_call", "stop"):
                text += "|" * (kind == "stop" != before) + tokenizer.decode([token], skip_special_tokens=False)
            before = kind
        found.append(text)
    return found


def test_a_turn_that_ends_with_two_control_tokens_trains_both(tmp_path: Path) -> None:
    """The second is the one that inference stops at: without it, a model would never end."""
    template = chatml("<|begin|>{{ m.content }}<|end|><|im_end|>")
    expected = "<|begin|>Me.|<|end|><|im_end|><|begin|>So.|<|end|><|im_end|>"
    assert trained(tmp_path, TWO_ENDS, template, TWO_TURNS) == [expected]
    nameless = replace(TWO_ENDS, tokens={})
    assert trained(tmp_path / "nameless", nameless, template, TWO_TURNS) == [expected]


def test_a_token_behind_the_last_turn_alone_is_not_its_stop_token(tmp_path: Path) -> None:
    template = PHI3.plain().replace("'<|end|>\n'", "'<|end|>'")
    assert template != PHI3.plain()
    assert trained(tmp_path, PHI3, template, TWO_TURNS) == ["Me.|<|end|>So.|<|end|>"]


def test_empty_answers_have_the_frame_of_others(tmp_path: Path) -> None:
    """The first control token after the prompt is not what ends them."""
    template = chatml("<|begin|>{{ m.content }}<|end|><|im_end|>")
    empty = [user("x"), assistant(""), user("y"), assistant("z")]
    ends = "|<|end|><|im_end|>"
    assert trained(tmp_path, TWO_ENDS, template, empty) == [f"<|begin|>{ends}<|begin|>z{ends}"]
    final = "<|channel|>final<|message|>"
    assert trained(tmp_path / "harmony", HARMONY, None, empty) == [f"{final}|<|return|>", f"{final}z|<|return|>"]
    thinks = [user("x"), assistant("", thinking="hm")]
    thought = "<|channel|>analysis<|message|>hm<|end|><|start|>assistant"
    assert trained(tmp_path / "harmony", HARMONY, None, thinks) == [f"{thought}{final}|<|return|>"]


def test_a_question_that_is_repeated_in_the_answer_is_generated(tmp_path: Path) -> None:
    template = chatml("> {{ messages[loop.index0 - 1].content }}\n{{ m.content }}<|im_end|>\n")
    assert trained(tmp_path, CHATML, template, TWO_TURNS) == ["> Who?\nMe.|<|im_end|>> Why?\nSo.|<|im_end|>"]


def test_a_generation_prompt_that_depends_on_a_word_is_the_one_of_inference(tmp_path: Path) -> None:
    """The text is the same for all, and what of it is generated is not."""
    empty = "<think>\n\n</think>\n\n"
    template = chatml(
        "{% if loop.last %}" + empty + "{% endif %}{{ m.content }}<|im_end|>\n",
        "{% if 'quick' in messages[-1].content %}" + empty + "{% endif %}",
    )
    asked, quick = [user("Who?"), assistant("Me.")], [user("quick"), assistant("Me.")]
    found = trained(tmp_path, CHATML, template, asked, quick, asked, quick)
    assert found == [f"{empty}Me.|<|im_end|>", "Me.|<|im_end|>"] * 2


@pytest.mark.parametrize(
    ("answer", "first"),
    [
        ("{{ m.content if loop.last else m.content.strip() }}<|im_end|>\n", "|<|im_end|>"),
        ("{{ m.content }}{{ '!' if loop.last and m.content | length > 9 }}<|im_end|>\n", "|!<|im_end|>"),
    ],
)
def test_a_history_that_changes_with_contents_is_split_only_where_it_changes(
    answer: str, first: str, tmp_path: Path
) -> None:
    changed = [user("x"), assistant("long, and more "), user("z"), assistant("w")]
    first = changed[1]["content"] + first
    whole = "Me.|<|im_end|>So.|<|im_end|>"
    found = trained(tmp_path, CHATML, chatml(answer), TWO_TURNS, changed, TWO_TURNS, changed)
    assert found == [whole, first, "w|<|im_end|>"] * 2


def test_tool_calls_that_the_template_leaves_out_are_refused(tmp_path: Path) -> None:
    messages = [user("x"), assistant("Let me see", tool_calls=[CALL]), {"role": "tool", "content": "1"}, assistant("!")]
    reason, detail = only_failure(recipe_of(tmp_path, CHATML), messages)
    assert (reason, detail) == (
        "calls-lost", "the template leaves out a tool call of message 1: 'Let me see<|im_end|>'",
    )  # fmt: skip
    messages[1] = assistant("", tool_calls=[CALL, OTHER])
    assert only_failure(recipe_of(tmp_path / "llama", LLAMA3), messages)[0] == "calls-lost"


def test_a_response_that_is_left_out_beside_thinking_is_refused(tmp_path: Path) -> None:
    template = chatml("{{ m.thinking or m.content }}<|im_end|>\n")
    reason, detail = only_failure(recipe_of(tmp_path, CHATML, template), [user("x"), assistant("y", thinking="hm")])
    assert reason == "contents-changed"
    assert "leaves out message 1 with the role 'assistant', 'y', in its text '" in detail


def test_a_content_that_the_template_changes_is_shown_with_the_text(tmp_path: Path) -> None:
    template = chatml("{{ m.content[:3] }}<|im_end|>\n")
    reason, detail = only_failure(recipe_of(tmp_path, CHATML, template), [user("Question"), assistant("Answer")])
    assert reason == "contents-changed"
    assert "so 'Answer' cannot be located in its text '<|im_start|>user\\nQuestion<|im_end|>" in detail


def test_a_stop_token_need_not_be_declared_special(tmp_path: Path) -> None:
    """By `eos_token` of the configuration, or by `stop`; one that is not a token is refused."""
    ordinary = replace(CHATML, special=("<|im_start|>",), ordinary=("<|im_end|>",))
    expected = ["Me.|<|im_end|>So.|<|im_end|>"]
    assert trained(tmp_path, ordinary, None, TWO_TURNS) == expected
    nameless = replace(ordinary, tokens={"pad_token": "<|im_start|>"})
    assert trained(tmp_path / "named", nameless, None, TWO_TURNS, stop="<|im_end|>") == expected
    forged = [user("<|im_end|>"), assistant("Me.")]
    assert only_failure(recipe_of(tmp_path, ordinary), forged)[0] == "control-token"
    with pytest.raises(RecipeInvalid, match=r"stop is '<\|none\|>', which is not a token of"):
        made(recipe_of(tmp_path / "glm", GLM4, stop="<|none|>"), TWO_TURNS)


def test_answers_with_the_weight_0_are_only_context(tmp_path: Path) -> None:
    """As in the format of OpenAI."""
    chat = [
        user("x"),
        assistant("bad", weight=0),
        user("y"),
        assistant("good", weight=1),
        user("z"),
        assistant("", weight=0),
    ]
    for generation in (CHATML.plain(), CHATML.with_generation()):
        assert trained(tmp_path, CHATML, generation, chat) == ["good|<|im_end|>"]
    none = [user("x"), assistant("bad", weight=0.0)]
    recipe = recipe_of(tmp_path, CHATML)
    shown = "all assistant messages have weight 0 (roles: user, assistant); the last message is 'bad'"
    assert only_failure(recipe, none) == ("no-response", shown)
    assert only_failure(recipe, [user("x"), assistant("bad", weight=0.5)])[0] == "bad-message"


LOOKED_FOR = {
    "{{ m.content | trim }}{{ m['content'].strip('\\n') }}": (),
    "{% if '</think>' in m.content %}{{ m.content.split('</think>')[-1].lstrip('\\n') }}{% endif %}": ("</think>",),
    "{% set ns = namespace(x='') %}{% set ns.x = m.content %}{{ ns.x.replace('a', 'b') }}": ("a",),
    "{% if m.content == 'quick' or m.content in ['a', 'b'] %}!{% endif %}{{ m.content }}": ("a", "b", "quick"),
    "{% if m.content is string and 'tool_calls' in m and messages | length > 1 %}{{ m.content }}{% endif %}": (),
    "{{ m.content or m.thinking }}{{ 'x' if m.content else 'y' }}{{ m.get('content', '') }}": (),
    "{% set ns = namespace(n=0, t='') %}{% set ns.t = ns.t + m.content %}{{ ns.t.strip() ~ loop.index0 }}": (),
    "{% set i = messages | length - 1 %}{{ messages[i - loop.index0].content }}{{ messages[::-1][0].content }}": (),
    "{{ (messages | selectattr('role', 'equalto', 'user') | list | last).content }}{{ loop.nextitem.content }}": (),
}
NOT_UNDERSTOOD = [
    "{{ m.content | length }}", "{{ m.content[0] }}", "{{ m.content[1:] }}", "{{ m.content | upper }}", "{{ m }}",
    "{{ m.content | tojson(indent=1) }}", "{{ (m.content | tojson).strip() }}",
    "{% set j = m.content | tojson %}{{ j }}",
    "{{ m.content.strip('x') }}", "{{ m.content | trim('x') }}", "{{ m.content.split() }}",
    "{% if m.content == messages[0].content %}!{% endif %}", "{% if m.content in 'abc' %}!{% endif %}",
    "{% if m.content < 'b' %}!{% endif %}", "{% for letter in m.content %}!{% endfor %}",
    "{{ loop.previtem.content | length }}", "{{ m.content.find('a') }}", "{% if m.content is lower %}!{% endif %}",
    "{{ m.items() | list }}", "{{ messages | map(attribute='content') | join }}", "{{ {m.content: 1} }}",
    "{% macro f(x) %}{{ x | length }}{% endmacro %}{{ f(m.content) }}",
    "{% macro f() %}{{ messages[0].content }}{% endmacro %}{% if 'a' in f() %}!{% endif %}",
    "{% set c = m.content %}{{ c[-1] }}", "{{ m.content.split('a')[1] }}", "{{ m.content * 2 }}",
    "{{ messages | selectattr('content', 'equalto', 'x') | list | length }}",
    "{{ messages | selectattr('content.0', 'equalto', 'x') | list | length }}",
    "{{ dict(**m).content | length }}", "{{ range(*m.content) }}", "{{ 'a' | replace(*m.values()) }}",
    "{% macro f(x=messages[0].content) %}{{ x | length }}{% endmacro %}{{ f() }}",
    "{% macro f() %}{% macro g() %}{% endmacro %}{{ m.content }}{% endmacro %}{{ f() | length }}",
    "{% macro f(x) %}{{ caller() | length }}{% endmacro %}{% call f('generation') %}{{ m.content }}{% endcall %}",
    "{% set t = 'a: ' + m.content %}{% if 'a: b' in t %}!{% endif %}", "{{ (m.role ~ m.content).split('rb')[0] }}",
    "{% set t %}a{{ m.content }}{% endset %}{% if t == 'ab' %}!{% endif %}",
    "{% set k = 'content' %}{{ m[k] | length }}", "{{ m['con' ~ 'tent'] | length }}",
    "{% set get = m.get %}{{ get('content') | length }}", "{{ m['content']['upper']() }}",
    "{% set l = loop %}{{ l.previtem.content | length }}", "{{ loop['previtem'].content | length }}",
    "{% set ns = namespace() %}{% set ns.t = m.content %}{{ ns['t'] | length }}",
    "{% set ns = namespace() %}{% set ns.t = m.content %}{% set o = ns %}{{ o.t | length }}",
    "{% if {'role': 'user', 'content': 'x'} in messages %}!{% endif %}", "{{ messages.index(m) }}",
    "{% set i = messages.index %}{{ i({'role': 'user', 'content': 'x'}) }}",
    "{% set x = m.content %}{{ x | length }}{% set x = m.content.split('a') %}", "{{ m.content | trim(chars='x') }}",
]  # fmt: skip


@pytest.mark.parametrize(("text", "found"), LOOKED_FOR.items())
def test_what_a_template_looks_for_in_contents_is_known(text: str, found: tuple[str, ...]) -> None:
    template = "{% for m in messages %}" + text + "{% endfor %}"
    uses = ChatTemplate(TemplateSource("t", template)).uses
    assert uses is not None
    assert uses.looked_for == found


@pytest.mark.parametrize("text", NOT_UNDERSTOOD)
def test_other_uses_of_contents_are_not_understood(text: str) -> None:
    template = "{% for m in messages %}" + text + "{% endfor %}"
    assert ChatTemplate(TemplateSource("t", template)).uses is None


def test_most_stock_templates_only_write_contents() -> None:
    sources = {stock.name: TemplateSource("t", stock.plain(), tuple(stock.tokens.items())) for stock in STOCK}
    exact = [name for name, source in sources.items() if ChatTemplate(source).uses is None]
    assert exact == []


def test_contents_that_are_written_as_json_are_never_filled_in(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """The first of a shape is the same as JSON, the next ones are not."""
    template = CHATML.plain().replace(
        "{% else %}{{ message['content'] +", "{% else %}{{ message['content'] | tojson }}{{"
    )
    texts = ["plain", 'a "quoted" text', "two\nlines", "back\\slash", " plain"]
    chats = [[user(one), assistant(other)] for one in texts for other in texts]
    assert "tojson" in template
    compare(recipe_of(tmp_path, CHATML, template), [{"messages": chat} for chat in chats], monkeypatch)


def test_white_space_has_no_layout_where_the_template_does_not_strip(tmp_path: Path) -> None:
    spaces = ["", " ", "\n", "\n\n", "\t"]
    chats = [[user(f"{one}a{other}"), assistant(f"{other}b{one}")] for one in spaces for other in spaces]
    for stock, shapes in ((CHATML, 1), (LLAMA3, len(chats))):
        recipe = recipe_of(tmp_path / stock.name, stock)
        made(recipe, *chats)
        assert len(recipe._renderer().layouts.known) == shapes


def test_white_space_alone_shares_one_layout_unless_it_is_looked_for(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    spaces = [" ", "\n", "\t \n\n", "a"]
    chats = [{"messages": [user(one), assistant(other)]} for one in spaces for other in spaces]
    looking = CHATML.plain().replace("{% for", "{% if ' ' in messages[0].content %}!{% endif %}{% for", 1)
    for name, template, shapes in (("any", CHATML.plain(), 4), ("looked-for", looking, 4)):
        recipe = recipe_of(tmp_path / name, CHATML, template)
        compare(recipe, chats, monkeypatch)
        assert len(recipe._renderer().layouts.known) == shapes


def test_thinking_in_fields_and_contents_shares_no_layout_with_texts_that_only_look_like_it(tmp_path: Path) -> None:
    chats = [
        [user("x"), assistant(text)] for text in ("<think>\na\n</think>\n\nb", "c", "<think>\nd\n</think>\n\ne", "f")
    ]
    found = trained(tmp_path, QWEN3, None, *chats)
    assert found == [
        f"<think>\n{thought}\n</think>\n\n{text}|<|im_end|>"
        for thought, text in (("a", "b"), ("", "c"), ("d", "e"), ("", "f"))
    ]
