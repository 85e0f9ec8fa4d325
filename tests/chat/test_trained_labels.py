"""Which tokens are trained, judged by the labels of a `Loader`: with templates that repeat turns or ignore prompts."""

import json
from pathlib import Path
from typing import Any

import pytest
from tests.chat.stock_templates import MISTRAL
from tests.chat.tokenizer_folders import byte_level, write_folder
from tests.cli.running import run
from tokenizers import Tokenizer

import forebay as fb
from forebay.errors import BuildFailed
from forebay.torch import Loader

CALL = {"type": "function", "function": {"name": "get_weather", "arguments": {"city": "Paris"}}}
TOOLS = [
    {"role": "user", "content": "Weather?"},
    {"role": "assistant", "content": "", "tool_calls": [CALL]},
    {"role": "tool", "content": "ok"},
    {"role": "assistant", "content": "Sunny."},
]
TWO_TURNS = [
    {"role": "user", "content": "Who?"},
    {"role": "assistant", "content": "Me."},
    {"role": "user", "content": "Why?"},
    {"role": "assistant", "content": "So."},
]
CHATML_TOKENS = ("<|im_start|>", "<|im_end|>")
GPT_OSS_TOKENS = ("<|start|>", "<|end|>", "<|message|>", "<|channel|>", "<|return|>", "<|call|>")
# The tool's message repeats the name of the function that was called before it.
GPT_OSS = (
    "{% set ns = namespace(name='') %}{% for m in messages %}{% if m.role == 'tool' %}"
    "{{ '<|start|>functions.' + ns.name + ' to=assistant<|channel|>commentary<|message|>' + m.content + '<|end|>' }}"
    "{% elif m.role != 'assistant' %}{{ '<|start|>' + m.role + '<|message|>' + m.content + '<|end|>' }}"
    "{% elif m.tool_calls %}{% set ns.name = m.tool_calls[0].function.name %}"
    "{{ '<|start|>assistant to=functions.' + ns.name + '<|channel|>commentary json<|message|>' }}"
    "{{ m.tool_calls[0].function.arguments | tojson }}<|call|>"
    "{% else %}<|start|>assistant<|channel|>final<|message|>{{ m.content }}"
    "{{ '<|return|>' if loop.last else '<|end|>' }}"
    "{% endif %}{% endfor %}{% if add_generation_prompt %}<|start|>assistant{% endif %}"
)
CALL_NAME = (
    "{% set ns = namespace(name='') %}{% for m in messages %}{% if m.role == 'tool' %}"
    "<|im_start|>tool {{ ns.name }}\n{{ m.content }}<|im_end|>\n{% else %}<|im_start|>{{ m.role }}\n{{ m.content }}"
    "{% if m.tool_calls %}{% set ns.name = m.tool_calls[0].function.name %}"
    "{{ ns.name }}{{ m.tool_calls[0].function.arguments | tojson }}{% endif %}<|im_end|>\n{% endif %}{% endfor %}"
    "{% if add_generation_prompt %}<|im_start|>assistant\n{% endif %}"
)
GEMMA_TOKENS = ("<|turn>", "<turn|>", "<|tool_call>", "<tool_call|>", "<|tool_response>", "<tool_response|>")
GEMMA = (  # a call, its result and the answer are one turn of the model, and the result repeats the name
    "{% set ns = namespace(name='', open=false) %}{% for m in messages %}{% if m.role == 'user' %}"
    "<|turn>user\n{{ m.content }}<turn|>\n{% elif m.role == 'tool' %}"
    "<|tool_response>response:{{ ns.name }}{value:{{ m.content }}}<tool_response|>"
    "{% else %}{% if not ns.open %}<|turn>model\n{% endif %}{{ m.content }}"
    "{% if m.tool_calls %}{% set ns.name = m.tool_calls[0].function.name %}{% set ns.open = true %}"
    "<|tool_call>call:{{ ns.name }}{{ m.tool_calls[0].function.arguments | tojson }}<tool_call|>"
    "{% else %}{% set ns.open = false %}<turn|>\n{% endif %}{% endif %}{% endfor %}"
    "{% if add_generation_prompt and not ns.open %}<|turn>model\n{% endif %}"
)
QUOTE = (
    "{% for m in messages %}<|im_start|>{{ m.role }}\n"
    "{% if m.role == 'user' and loop.index0 %}> {{ messages[loop.index0 - 1].content }}\n{% endif %}"
    "{{ m.content }}<|im_end|>\n{% endfor %}{% if add_generation_prompt %}<|im_start|>assistant\n{% endif %}"
)
MINICPM = (
    "{% for m in messages %}{% if m.role == 'user' %}<用户>{{ m.content }}<AI>{% else %}{{ m.content }}{% endif %}"
    "{% endfor %}"
)
MINICPM_TOKENS = ("<用户>", "<AI>", "</s>")
GLM4 = (
    "[gMASK]<sop>{% for m in messages %}<|{{ m.role if m.role != 'tool' else 'observation' }}|>\n{{ m.content }}"
    "{% if m.tool_calls %}{{ m.tool_calls[0].function.name }}{% endif %}{% endfor %}"
    "{% if add_generation_prompt %}<|assistant|>\n{% endif %}"
)
GLM4_TOKENS = ("[gMASK]", "<sop>", "<|user|>", "<|assistant|>", "<|observation|>", "<|endoftext|>")
NO_PROMPT = "{% for m in messages %}<|im_start|>{{ m.role }}\n{{ m.content }}<|im_end|>\n{% endfor %}"


def trained(path: Path, template: str, special: tuple[str, ...], messages: list[dict[str, Any]], **fields: Any) -> str:
    """What the labels of a loader's only batch have, with `…` for tokens that are not trained."""
    (path / "chats.jsonl").write_text(json.dumps({"messages": messages}) + "\n")
    folder = write_folder(path / "model", byte_level(special), template, {"pad_token": special[0]})
    recipe = fb.ChatRecipe(tokenizer=folder, sequence_length=512, **fields)
    fb.build(path / "cache", fb.sources.lines(path / "chats.jsonl"), recipe, workers=0, progress=False)
    batch = next(iter(Loader(fb.open_cache(path / "cache"), global_batch_size=1)))
    tokenizer = Tokenizer.from_file(f"{folder}/tokenizer.json")
    text = ""
    for label in batch["labels"][0].tolist():
        text += tokenizer.decode([label], skip_special_tokens=False) if label >= 0 else "…" * (text[-1:] != "…")
    return text.strip("…")


ARGUMENTS = '{"city": "Paris"}'


@pytest.mark.parametrize(
    ("template", "special", "messages", "fields", "expected"),
    [
        (GPT_OSS, GPT_OSS_TOKENS, TOOLS, {},
         " to=functions.get_weather<|channel|>commentary json<|message|>" + ARGUMENTS
         + "<|call|>…<|channel|>final<|message|>Sunny.<|return|>"),
        (CALL_NAME, CHATML_TOKENS, TOOLS, {}, f"get_weather{ARGUMENTS}<|im_end|>…Sunny.<|im_end|>"),
        (CALL_NAME, CHATML_TOKENS, TOOLS, {"stop": "<|im_end|>"}, f"get_weather{ARGUMENTS}<|im_end|>…Sunny.<|im_end|>"),
        (GEMMA, GEMMA_TOKENS, TOOLS, {}, f"<|tool_call>call:get_weather{ARGUMENTS}<tool_call|>…Sunny.<turn|>"),
        (QUOTE, CHATML_TOKENS, TWO_TURNS, {}, "Me.<|im_end|>…So.<|im_end|>"),
        (QUOTE, CHATML_TOKENS, TWO_TURNS, {"stop": "<|im_end|>"}, "Me.<|im_end|>…So.<|im_end|>"),
        (MINICPM, MINICPM_TOKENS, TWO_TURNS[:2], {"stop": "</s>"}, "Me.</s>"),
        (GLM4, GLM4_TOKENS, TWO_TURNS, {"stop": "<|user|>"}, "Me.<|user|>…So.<|user|>"),
    ],
    ids=["gpt-oss", "call-name", "call-name-stop", "gemma", "quote", "quote-stop", "minicpm", "glm-4"],
)  # fmt: skip
def test_turns_train_their_content_and_their_stop_token(
    template: str, special: tuple[str, ...], messages: list[dict[str, Any]], fields: dict[str, Any], expected: str,
    tmp_path: Path,
) -> None:  # fmt: skip
    assert trained(tmp_path, template, special, messages, **fields) == expected


@pytest.mark.parametrize(
    ("template", "special", "messages", "stop", "other"),
    [
        (GPT_OSS, GPT_OSS_TOKENS, TOOLS, "<|call|>", "'<|return|>' ends message 3"),
        (MINICPM, MINICPM_TOKENS, TWO_TURNS, "</s>", "'<用户>' ends message 1"),
        (GLM4, GLM4_TOKENS, TWO_TURNS, "<|endoftext|>", "'<|user|>' ends message 1"),
        (GLM4, GLM4_TOKENS, TOOLS, "<|user|>", "'<|observation|>' ends message 1"),
    ],
    ids=["gpt-oss", "minicpm", "glm-4", "glm-4-tools"],
)
def test_another_stop_token_than_the_named_one_is_an_error(
    template: str, special: tuple[str, ...], messages: list[dict[str, Any]], stop: str, other: str, tmp_path: Path
) -> None:
    with pytest.raises(BuildFailed) as caught:
        trained(tmp_path, template, special, messages, stop=stop)
    assert f"{other}, and stop is {stop!r}" in str(caught.value)


def test_a_template_without_a_generation_prompt_is_reported(tmp_path: Path) -> None:
    header = "<|im_start|>assistant\n"
    assert trained(tmp_path, NO_PROMPT, CHATML_TOKENS, TWO_TURNS) == (f"{header}Me.<|im_end|>…{header}So.<|im_end|>")
    recipe = fb.ChatRecipe(tokenizer=str(tmp_path / "model"), sequence_length=512)
    count = 2 * len(Tokenizer.from_file(str(tmp_path / "model/tokenizer.json")).encode(header).ids)
    _, notes = recipe.settled(None, lambda: [fb.Sample("s", json.dumps({"messages": TWO_TURNS}))])
    said = f"the template writes no generation prompt; {count} header tokens are trained"
    assert notes == (f"{said} in the 2 turns of the trial",)
    assert fb.info(tmp_path / "cache").layers[0].statistics["header_tokens_trained"] == count
    assert f"header tokens trained {count}" in " ".join(run("info", tmp_path / "cache").out.split())


R1 = (
    "{{ bos_token }}{% for message in messages %}{% if message['role'] == 'user' %}"
    "{{ '<｜User｜>' + message['content'] }}{% else %}{% set content = message['content'] %}"
    "{% if '</think>' in content %}{% set content = content.split('</think>')[-1] %}{% endif %}"
    "{{ '<｜Assistant｜>' + content + eos_token }}{% endif %}{% endfor %}"
    "{% if add_generation_prompt %}{{ '<｜Assistant｜><think>\n' }}{% endif %}"
)
R1_TOKENS = ("<s>", "</s>", "<｜User｜>", "<｜Assistant｜>")
SYSTEM = {"role": "system", "content": "Be brief."}
THOUGHT = {"role": "assistant", "content": "<think>\nHm.\n</think>\n\nMe."}


@pytest.mark.parametrize(
    ("template", "special", "messages", "reason"),
    [
        (MISTRAL.plain(), MISTRAL.special, [SYSTEM, *TWO_TURNS], "template"),
        (R1, R1_TOKENS, TWO_TURNS, "not-a-prefix"),
        (R1, R1_TOKENS, [TWO_TURNS[0], THOUGHT], "not-a-prefix"),
        (R1.replace("<think>\n", ""), R1_TOKENS, [TWO_TURNS[0], THOUGHT], "thinking-lost"),
    ],
    ids=["mistral-system", "r1", "r1-thinking", "r1-without-prefill"],
)
def test_template_that_does_not_fit_has_the_template_option_in_its_hint(
    template: str, special: tuple[str, ...], messages: list[dict[str, Any]], reason: str, tmp_path: Path
) -> None:
    folder = write_folder(tmp_path / "model", byte_level(special), template, MISTRAL.tokens)
    (tmp_path / "chats.jsonl").write_text(3 * (json.dumps({"messages": messages}) + "\n"))
    build = ["build", "chat", tmp_path / "chats.jsonl", "--tokenizer", folder, "--into", tmp_path / "cache", "-w", 0]
    failed = run(*build, code=1)
    assert f"3 × {reason}" in failed.err
    assert "--template FILE" in failed.err.partition("hint: ")[2]
