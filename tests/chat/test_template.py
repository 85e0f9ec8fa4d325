"""Templates: where they are found, what they may use, and how hostile ones are stopped."""

import json
import signal
import subprocess
import sys
import time
from collections.abc import Iterator
from contextlib import suppress
from pathlib import Path
from typing import Any

import pytest
from tests.chat.tokenizer_folders import byte_level, write_folder

from forebay.chat import rendering
from forebay.chat import template as module
from forebay.chat.conversations import BadConversation
from forebay.chat.rendering import ChatTemplate
from forebay.chat.template import TemplateSource, load_template
from forebay.errors import ModelUnusable

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
        ({}, "neither a chat_template.jinja nor"),
        ({"tokenizer_config.json": b"{"}, "not valid JSON"),
        ({"tokenizer_config.json": b'{"chat_template": 7}'}, "neither a chat_template.jinja nor"),
        ({"chat_template.jinja": b"\xff"}, "not UTF-8"),
        ({"chat_template.jinja": b"x" * (module.MOST_TEMPLATE_BYTES + 1)}, "more than 262,144 bytes"),
    ],
)
def test_a_folder_without_a_usable_template_is_refused(files: dict[str, bytes], said: str, tmp_path: Path) -> None:
    for name, content in files.items():
        (tmp_path / name).write_bytes(content)
    with pytest.raises(ModelUnusable, match=said):
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
    with pytest.raises(ModelUnusable, match="asks for the current date; pass a fixed one"):
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
        "{% include '/etc/passwd' %}",
        "{% import 'os' as os %}",
        "{{ cycler.__init__.__globals__ }}",
    ],
)
def test_the_sandbox_gives_no_way_out(text: str) -> None:
    with pytest.raises((ModelUnusable, BadConversation)):
        rendered(text)


def test_the_inside_of_helpers_is_empty() -> None:
    assert rendered("{{ raise_exception.__globals__ }}{{ strftime_now.__closure__ }}{{ range.__self__ }}") == ""


_NESTED = "{% set ns = namespace(x=['a']) %}{% for i in range(60) %}{% set ns.x = [ns.x, ns.x] %}{% endfor %}"
_BIG = (
    "{% set f = messages[0].role[:0] ~ 'f' %}"  # so that nothing is computed while compiling
    "{% set a = (f * 8000000) | int(0, 16) %}{% set b = (f * 4000000) | int(0, 16) - 2 %}"
)
_LONG = "{% set t = range(90000) | list %}"


@pytest.fixture
def small_limits(monkeypatch: pytest.MonkeyPatch) -> Iterator[None]:
    """A child with two seconds and 256 MiB for each request."""
    rendering._children.stop()
    monkeypatch.setattr(rendering, "MOST_SECONDS", 2)
    monkeypatch.setattr(rendering, "MOST_BYTES", 256 << 20)
    yield
    rendering._children.stop()


@pytest.mark.usefixtures("small_limits")
@pytest.mark.parametrize(
    "text",
    [
        "{% for a in range(99999) %}{% for b in range(99999) %}{% endfor %}{% endfor %}",
        "{% macro f(n) %}{% if n %}{{ f(n - 1) }}{{ f(n - 1) }}{% endif %}{% endmacro %}{{ f(60) }}",
        _NESTED + _NESTED.replace("ns", "os") + "{{ ns.x == os.x }}",
        _BIG + "{{ 1 if a % b == 1 }}",
        _BIG + "{{ 1 if a // b == 1 }}",
        _LONG + "{% for a in t if a in t and -1 in t %}{% endfor %}",
        "{{ 1.5 | round(1000000000, 'ceil') }}",
    ],
)
def test_a_template_that_does_not_end_is_stopped_at_the_time_limit(text: str) -> None:
    with pytest.raises(ModelUnusable, match=r"template 't' cannot be used: it takes more than 2 s to (compile|render)"):
        rendered(text)
    assert rendered("{{ messages[0].content }}") == "Hi"


@pytest.mark.usefixtures("small_limits")
@pytest.mark.parametrize(
    "text",
    [
        "{{ 'a' * 1000000000 }}",
        "{{ 'a' * 10 ** 30 }}",
        "{% set ns = namespace(x='aa') %}{% for i in range(60) %}{% set ns.x = ns.x + ns.x %}{% endfor %}",
        _NESTED + "{{ ns.x }}",
        _NESTED + "{{ ns.x | tojson }}",
        "{{ range(90000) | list | tojson(indent='x' * 1000000) }}",
        "{{ range(90000) | list | tojson(separators=('x' * 1000000, ':')) }}",
    ],
)
def test_a_template_that_grows_without_end_is_stopped_at_the_memory_limit(text: str) -> None:
    """The error is about the template, not about the conversation that it was tried with."""
    with pytest.raises(ModelUnusable, match=r"template 't' cannot be used: it (needs too much memory|takes|is not)"):
        rendered(text)
    assert rendered("{{ messages[0].content }}") == "Hi"


@pytest.mark.usefixtures("small_limits")
def test_a_template_that_takes_long_to_compile_is_stopped() -> None:
    with pytest.raises(ModelUnusable, match="it takes more than 2 s to compile"):
        rendered(("{{ a" + ".b" * 150 + " }}") * 90)


@pytest.mark.usefixtures("small_limits")
def test_a_macro_that_calls_itself_is_stopped() -> None:
    with pytest.raises(ModelUnusable, match="nested too deeply, or does not end"):
        rendered("{% macro f(n) %}{{ f(n + 1) }}{% endmacro %}{{ f(0) }}")


def test_filters_of_jinja_work_and_random_ones_are_rejected() -> None:
    assert rendered("{{ 'a\nb' | indent(2) }}|{{ 'aa bb' | wordwrap(2) }}|{{ [1, 2, 3] | batch(2) | list }}") == (
        "a\n  b|aa\nbb|[[1, 2], [3]]"
    )
    assert rendered("{{ 'x' | center(3) }}{{ '%s' | format(1) }}{{ '{}'.format(2) }}") == " x 12"
    with pytest.raises(ModelUnusable, match="it uses the filter 'random', and the same conversation must always"):
        rendered("{{ [1, 2] | random }}")
    with pytest.raises(ModelUnusable, match="it uses the filter 'random'"):
        rendered("{{ [[1, 2]] | map('random') | join }}")


def test_a_template_that_is_no_template_is_refused() -> None:
    nested, alternatives = "{% for a in b %}" * 25 + "{% endfor %}" * 25, "{% elif b %}" * 9999
    invalid = ("{% for %}", "{{ 1 | no_such_filter }}", "{% generation %}", "{{ (" * 2000, nested)
    for text in (*invalid, f"{{% if a %}}{alternatives}{{% endif %}}"):
        with pytest.raises(ModelUnusable, match="not a valid template"):
            ChatTemplate(TemplateSource("t", text))


def test_a_token_that_no_file_names_is_not_left_out() -> None:
    source = TemplateSource(
        "chat.jinja", "{{ bos_token }}{% for message in messages %}{{ message.content }}{% endfor %}"
    )
    with pytest.raises(ModelUnusable, match=r"it writes bos_token, and no tokenizer_config\.json says what that is"):
        ChatTemplate(source)
    assert ChatTemplate(source, {"bos_token": "<s>"}).render([{"role": "user", "content": "a"}], None) == "<s>a"


def test_an_interrupted_render_leaves_no_answer_for_the_next_one() -> None:
    hanging = ChatTemplate(TemplateSource("t", _NESTED + _NESTED.replace("ns", "os") + "{{ ns.x == os.x }}"))

    def interrupt(*_: object) -> None:
        raise KeyboardInterrupt

    previous = signal.signal(signal.SIGALRM, interrupt)
    signal.setitimer(signal.ITIMER_REAL, 0.5)
    try:
        with pytest.raises(KeyboardInterrupt):
            hanging.render(ASKED, None)
    finally:
        signal.signal(signal.SIGALRM, previous)
    started = time.monotonic()
    assert rendered("{{ messages[0].content }}") == "Hi"
    assert time.monotonic() - started < 10


@pytest.mark.parametrize("number", [signal.SIGINT, signal.SIGTERM])
def test_a_build_whose_template_hangs_ends_at_a_signal_and_so_does_its_child(
    number: signal.Signals, tmp_path: Path
) -> None:
    hangs = _NESTED + _NESTED.replace("ns", "os") + "{{ ns.x == os.x }}"
    folder = write_folder(tmp_path / "model", byte_level(("<|im_end|>",)), hangs, {"eos_token": "<|im_end|>"})
    (tmp_path / "chats.jsonl").write_text(json.dumps({"messages": ASKED}) + "\n")
    command = ["forebay", "build", "chat", "chats.jsonl", "--into", "cache", "--tokenizer", folder, "--workers", "0"]
    script = "import sys; from forebay.cli.main import main; sys.argv = sys.argv[1:]; main()"
    build = subprocess.Popen([sys.executable, "-c", script, *command], cwd=tmp_path, stderr=subprocess.PIPE, text=True)
    child = _rendering_child(build.pid)
    build.send_signal(number)
    _, errors = build.communicate(timeout=15)
    assert build.returncode == 130, errors
    assert not Path(f"/proc/{child}").exists()


def test_a_build_with_workers_whose_template_hangs_ends_at_ctrl_c(tmp_path: Path) -> None:
    hangs = _NESTED + _NESTED.replace("ns", "os") + "{{ ns.x == os.x }}"
    text = "{% for message in messages %}{{ message.content + '<|im_end|>' }}{% endfor %}"
    text = "{% if messages[0].content == 'hang' %}" + hangs + "{% endif %}" + text
    folder = write_folder(tmp_path / "model", byte_level(("<|im_end|>",)), text, {"eos_token": "<|im_end|>"})
    lines = [json.dumps({"messages": ASKED})] * 100_000
    lines[55_000] = json.dumps({"messages": [{"role": "user", "content": "hang"}, ASKED[1]]})  # not in the trial
    (tmp_path / "chats.jsonl").write_text("\n".join(lines))
    command = ["forebay", "build", "chat", "chats.jsonl", "--into", "cache", "--tokenizer", folder, "--workers", "2"]
    command += ["--chunk-rows", "20"]
    script = "import sys; from forebay.cli.main import main; sys.argv = sys.argv[1:]; main()"
    build = subprocess.Popen([sys.executable, "-c", script, *command], cwd=tmp_path, stderr=subprocess.PIPE, text=True)
    child = _rendering_child(build.pid)
    assert _parent(child) != build.pid
    build.send_signal(signal.SIGINT)
    _, errors = build.communicate(timeout=60)
    assert build.returncode == 130, errors
    deadline = time.monotonic() + 10  # less than its time limit
    while Path(f"/proc/{child}").exists() and time.monotonic() < deadline:
        time.sleep(0.05)
    assert not Path(f"/proc/{child}").exists()


def _rendering_child(ancestor: int) -> int:
    """The process id of the descendant that renders, once one render has taken a second of processor time."""
    deadline = time.monotonic() + 60
    while time.monotonic() < deadline:
        for child in _descendants(ancestor):
            with suppress(FileNotFoundError, ProcessLookupError):
                command, ticks = Path(f"/proc/{child}/cmdline").read_text(), Path(f"/proc/{child}/stat").read_text()
                if "forebay.chat.sandbox" in command and int(ticks.split()[13]) > 100:
                    return child
        time.sleep(0.05)
    raise AssertionError("no child renders")


def _descendants(process: int) -> list[int]:
    try:
        children = [int(child) for path in Path(f"/proc/{process}/task").glob("*/children")
                    for child in path.read_text().split()]  # fmt: skip
    except OSError:
        return []
    return [each for child in children for each in (child, *_descendants(child))]


def _parent(process: int) -> int:
    return int(Path(f"/proc/{process}/stat").read_text().split()[3])
