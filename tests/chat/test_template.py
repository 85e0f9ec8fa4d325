"""Templates: where they are found, what they may use, and how hostile ones are stopped."""

import json
from pathlib import Path
from typing import Any

import pytest
from tests.chat.tokenizer_folders import write_folder

from forebay.chat import template as module
from forebay.chat.conversations import BadConversation
from forebay.chat.template import ChatTemplate, TemplateSource, load_template
from forebay.errors import TemplateUnusable

ASKED = [{"role": "user", "content": "Hi"}, {"role": "assistant", "content": "Hello"}]


def rendered(text: str, date: str | None = None, tools: Any = None, prompt: bool = False, **arguments: Any) -> str:
    return ChatTemplate(TemplateSource("t", text), arguments, date).render(ASKED, tools, prompt=prompt)


def test_a_template_file_counts_before_the_configuration(tmp_path: Path) -> None:
    folder = write_folder(tmp_path, "{}", "from the configuration", {"eos_token": "</s>"})
    assert load_template(folder).text == "from the configuration"
    (tmp_path / "chat_template.jinja").write_text("from the file")
    assert load_template(folder).text == "from the file"
    assert load_template(str(tmp_path / "tokenizer.json")).text == "from the file"
    other = tmp_path / "other.jinja"
    other.write_text("passed")
    assert load_template(folder, str(other)).text == "passed"
    assert load_template(folder, str(other)).tokens == (("eos_token", "</s>"),)


def test_of_several_templates_the_default_one_is_used(tmp_path: Path) -> None:
    templates = [{"name": "tool_use", "template": "tools"}, {"name": "default", "template": "usual"}]
    (tmp_path / "tokenizer_config.json").write_text(json.dumps({"chat_template": templates}))
    assert load_template(str(tmp_path)).text == "usual"


def test_special_tokens_are_texts_or_objects(tmp_path: Path) -> None:
    tokens = {"bos_token": {"content": "<s>", "special": True}, "eos_token": "</s>", "unk_token": None}
    (tmp_path / "tokenizer_config.json").write_text(json.dumps({**tokens, "chat_template": "{{ bos_token }}"}))
    assert load_template(str(tmp_path)).tokens == (("bos_token", "<s>"), ("eos_token", "</s>"))


def test_the_hash_covers_the_text_and_the_tokens() -> None:
    one = TemplateSource("a", "x", (("eos_token", "</s>"),))
    assert one.sha256 == TemplateSource("elsewhere", "x", (("eos_token", "</s>"),)).sha256
    assert one.sha256 != TemplateSource("a", "x", (("eos_token", "<e>"),)).sha256
    assert one.sha256 != TemplateSource("a", "x ", (("eos_token", "</s>"),)).sha256


@pytest.mark.parametrize(
    ("files", "said"),
    [
        ({}, "neither chat_template.jinja nor"),
        ({"tokenizer_config.json": b"{"}, "not valid JSON"),
        ({"tokenizer_config.json": b'{"chat_template": 7}'}, "neither chat_template.jinja nor"),
        ({"chat_template.jinja": b"\xff"}, "not UTF-8"),
        ({"chat_template.jinja": b"x" * (module.MOST_TEMPLATE_BYTES + 1)}, "more than 262,144 bytes"),
    ],
)
def test_a_folder_without_a_usable_template_is_refused(files: dict[str, bytes], said: str, tmp_path: Path) -> None:
    for name, content in files.items():
        (tmp_path / name).write_bytes(content)
    with pytest.raises(TemplateUnusable, match=said):
        load_template(str(tmp_path))


def test_the_helpers_of_transformers_are_there() -> None:
    assert rendered("{{ {'ä': [1, '<']} | tojson }}") == '{"ä": [1, "<"]}'
    assert (
        rendered("{% for m in messages %}{% if loop.first %}{% continue %}{% endif %}{{ m.content }}{% endfor %}")
        == "Hello"
    )
    assert (
        rendered("{% set ns = namespace(n=0) %}{% for m in messages %}{% set ns.n = ns.n + 1 %}{% endfor %}{{ ns.n }}")
        == "2"
    )
    assert rendered("a{% generation %}b{% endgeneration %}c") == "abc"
    assert rendered("{{ add_generation_prompt }}", prompt=True) == "True"
    assert rendered("{{ enable_thinking }}", enable_thinking=False) == "False"
    with pytest.raises(BadConversation, match="only pairs, please"):
        rendered("{{ raise_exception('only pairs, please') }}")


def test_blocks_are_trimmed_as_transformers_does() -> None:
    assert rendered("{% if true %}\n  x\n  {% endif %}\ny") == "  x\ny"


def test_the_date_is_fixed_or_refused() -> None:
    assert rendered("{{ strftime_now('%d %b %Y') }}", date="2024-07-26") == "26 Jul 2024"
    with pytest.raises(TemplateUnusable, match="asks for the current date; pass a fixed one"):
        rendered("{{ strftime_now('%Y') }}")
    assert rendered("{{ 'y' if strftime_now is defined }}") == "y"


def test_code_in_messages_is_text() -> None:
    messages = [{"role": "user", "content": "{{ 7 * 7 }}{% raise %}"}, ASKED[1]]
    template = ChatTemplate(TemplateSource("t", "{% for m in messages %}{{ m.content }}{% endfor %}"))
    assert template.render(messages, None) == "{{ 7 * 7 }}{% raise %}Hello"


@pytest.mark.parametrize(
    "text",
    [
        "{{ ''.__class__.__mro__[1].__subclasses__() }}",
        "{{ messages.append(1) }}",
        "{{ messages[0].update({'a': 1}) }}",
        "{{ (1).to_bytes(1000000000, 'big') }}",
        "{{ '%1000000000d' % 1 }}",
        "{{ '{:1000000000}'.format(1) }}",
        "{{ 'a'.center(1000000000) }}",
        "{{ 'a'.zfill(1000000000) }}",
        "{{ 'a'.encode() }}",
        "{{ 2 ** 100000000 }}",
        "{{ lipsum(100000) }}",
        "{{ [1] | tojson(indent=1000000000) }}",
        "{{ 'a' | center(1000000000) }}",
        "{{ ((2 ** 256) ** 256) ** 256 ** 2 }}",
        "{{ 1.5 | round(1000000000, 'ceil') }}",
        "{% include '/etc/passwd' %}",
        "{% import 'os' as os %}",
        "{{ cycler.__init__.__globals__ }}",
    ],
)
def test_the_sandbox_gives_no_way_out(text: str) -> None:
    with pytest.raises((TemplateUnusable, BadConversation)):
        rendered(text)


def test_the_inside_of_helpers_is_empty() -> None:
    assert rendered("{{ raise_exception.__globals__ }}{{ strftime_now.__closure__ }}{{ range.__self__ }}") == ""


@pytest.mark.parametrize(
    "text",
    [
        "{% for a in range(99999) %}{% for b in range(99999) %}{% endfor %}{% endfor %}",
        "{% macro f(n) %}{{ f(n + 1) }}{{ f(n + 1) }}{% endmacro %}{{ f(0) }}",
        "{% macro f(n) %}{% if n %}{{ f(n - 1) }}{{ f(n - 1) }}{% endif %}{% endmacro %}{{ f(60) }}",
        "{{ 'a' * 1000000000 }}",
        "{% set ns = namespace(x='aa') %}{% for i in range(60) %}{% set ns.x = ns.x + ns.x %}{% endfor %}",
        "{% set ns = namespace(x='aa') %}{% for i in range(60) %}{% set ns.x = ns.x ~ ns.x %}{% endfor %}",
        "{% set ns = namespace(x='aa') %}{% for i in range(60) %}{% set ns.x = ns.x * 2 %}{% endfor %}",
        "{% set ns = namespace(x=9) %}{% for i in range(60) %}{% set ns.x = ns.x * ns.x %}{% endfor %}",
        "{% set ns = namespace(x='aa') %}{% for i in range(60) %}{% set ns.x = ns.x.replace('a', 'aa') %}{% endfor %}",
        "{% set ns = namespace(x='aa') %}{% for i in range(60) %}"
        "{% set ns.x = ns.x | replace('a', 'aa') %}{% endfor %}",
        "{% set ns = namespace(x='aa') %}{% for i in range(60) %}"
        "{% set ns.x = ns.x.join(['a', 'b', 'c']) %}{% endfor %}",
        "{% set ns = namespace(x=['a']) %}{% for i in range(60) %}{% set ns.x = ns.x + ns.x %}{% endfor %}",
        "{% set ns = namespace(x='aa') %}{% for i in range(60) %}{% set y %}{{ ns.x }}{{ ns.x }}{% endset %}"
        "{% set ns.x = y %}{% endfor %}",
        *(
            "{% set ns = namespace(x=['a']) %}{% for i in range(60) %}{% set ns.x = [ns.x, ns.x] %}{% endfor %}" + used
            for used in (
                "{{ ns.x }}",
                "{{ ns.x ~ 'a' }}",
                "{{ ns.x | tojson }}",
                "{{ ns.x | string | length }}",
                "{{ ns.x | upper }}",
                "{{ [ns.x] | join }}",
                "{{ 'a'.join(ns.x | map('string')) }}",
                "{{ {'a': ns.x}.items() }}",
                "{{ ns }}",
                "{{ raise_exception(ns.x) }}",
            )
        ),
        *(
            "{% set s = 'abcdefghi ' * 50000 %}{% set ns = namespace(x=[]) %}{% for i in range(99) %}"
            "{% set ns.x = ns.x + [" + copied + "] %}{% endfor %}"
            for copied in (
                "s.upper()",
                "s | upper",
                "s[1:]",
                "s.partition(' ')",
                "s.split()",
                "s.split('a', 1)",
                "s.rsplit(' ')",
                "s.splitlines()",
                "s | list",
                "s | map('upper') | list",
                "s | reverse",
                "s | sort",
                "s | unique | list",
                "(s | list)[1:]",
                "s | e",
                "s | default('', true) | trim",
                "dict(a=s.lower())",
            )
        ),
        *(
            "{% set big = range(9999) | list %}{% set ns = namespace(x=[]) %}{% for i in range(99) %}"
            "{% set ns.x = [" + copied + ", ns.x] %}{% endfor %}"
            for copied in ("big.copy()", "{}.fromkeys(big)", "{}.fromkeys(range(9999))", "dict({}.fromkeys(big))")
        ),
        "{{ 'ሴ' * 1000000 | list | length }}",
        "{{ ('ሴ' * 1000000) | list | length }}",
        "{{ ('a ' * 100000).split() | length }}",
        "{{ ('a' * 100000).splitlines() | length }}",
        "{{ ('<' * 999999) | e | length }}",
        "{% for a in range(99999) %}" + "long text " * 1000 + "{% endfor %}",
        "{% for a in range(99999) %}{{ '" + "long text " * 1000 + "' }}{% endfor %}",
    ],
)
def test_a_template_that_does_not_end_or_grows_without_end_is_stopped(
    text: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(module, "MOST_STEPS", 20_000)
    monkeypatch.setattr(module, "MOST_CHARS", 1 << 20)
    with pytest.raises((TemplateUnusable, BadConversation)):
        rendered(text)


def test_a_template_that_takes_long_is_stopped(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(module, "MOST_SECONDS", 0)
    with pytest.raises(TemplateUnusable, match="takes more than 0 s"):
        rendered("{% for a in range(99999) %}{% endfor %}")


def test_a_template_without_a_loop_that_takes_long_is_stopped(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(module, "MOST_SECONDS", 0)
    for used in ("messages[0].role.count('b')", "messages | length", "messages[1:]"):
        with pytest.raises(TemplateUnusable, match="takes more than 0 s"):
            rendered(f"{{% set x = {used} %}}" * 99)


def test_slices_calls_and_filters_of_ordinary_templates_are_as_ever() -> None:
    assert rendered("{{ messages[1:] | map(attribute='content') | list }}") == "['Hello']"
    assert rendered("{{ messages[::-1][0]['content'][:-1] }}{{ 'a b'.split() }}{{ 'a,b,c'.split(',', 1)[-1] }}") == (
        "Hell['a', 'b']b,c"
    )
    assert rendered("{{ {'b': 1, 'a': 2} | dictsort }}{{ {'b': 1} | items | list }}{{ [3, 1] | sort | first }}") == (
        "[('a', 2), ('b', 1)][('b', 1)]1"
    )
    assert rendered("{{ messages | selectattr('role', 'equalto', 'user') | map(attribute='content') | join }}") == "Hi"


def test_a_template_that_is_no_template_is_refused() -> None:
    nested, alternatives = "{% for a in b %}" * 25 + "{% endfor %}" * 25, "{% elif b %}" * 9999
    invalid = ("{% for %}", "{{ 1 | no_such_filter }}", "{% generation %}", "{{ (" * 2000, nested)
    for text in (*invalid, f"{{% if a %}}{alternatives}{{% endif %}}"):
        with pytest.raises(TemplateUnusable, match="not a valid template"):
            ChatTemplate(TemplateSource("t", text))


def test_a_token_that_no_file_names_is_not_left_out() -> None:
    source = TemplateSource(
        "chat.jinja", "{{ bos_token }}{% for message in messages %}{{ message.content }}{% endfor %}"
    )
    with pytest.raises(TemplateUnusable, match=r"it writes bos_token, and no tokenizer_config\.json says what that is"):
        ChatTemplate(source)
    assert ChatTemplate(source, {"bos_token": "<s>"}).render([{"role": "user", "content": "a"}], None) == "<s>a"
