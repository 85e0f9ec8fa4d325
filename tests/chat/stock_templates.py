"""Stock chat templates, written down from their documentation, each with an oracle that knows its format by heart.

An oracle is a function of messages that writes the text in pieces `(text, kind, message)`, without Jinja: what every
kind means in this format is decided by hand. `GEN` and `END` stand around what a model generates, for the variant with
`generation` blocks.
"""

import json
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from typing import Any

Messages = Sequence[dict[str, Any]]
Piece = tuple[str, str, int]
H, P, R, T, C, TR, S = "header", "prompt", "response", "thinking", "tool_call", "tool_result", "stop"
GEN, END = "{# gen #}", "{# end #}"


@dataclass(frozen=True, eq=False)
class Stock:
    name: str
    template: str
    special: tuple[str, ...]
    oracle: Callable[[Messages], list[list[Piece]]]  # a list of pieces per document
    ordinary: tuple[str, ...] = ()
    tokens: dict[str, str] = field(default_factory=dict)
    fields: dict[str, Any] = field(default_factory=dict)  # of the recipe
    system: bool = True  # whether it accepts a system prompt
    thinking: bool = False
    tools: bool = False

    def plain(self) -> str:
        return self.template.replace(GEN, "").replace(END, "")

    def with_generation(self) -> str:
        return self.template.replace(GEN, "{% generation %}").replace(END, "{% endgeneration %}")


def kind_of(role: str) -> str:
    return {"assistant": R, "tool": TR}.get(role, P)


def framed(
    before: Callable[[str], str], end: str, after: str = "", *, bos: str = "", tail: str = "", strip: bool = False
) -> Callable[[Messages], list[list[Piece]]]:
    """The oracle of templates that put the same frame around every message: `end` is also the stop token."""

    def oracle(messages: Messages) -> list[list[Piece]]:
        pieces: list[Piece] = [(bos, H, 0)]
        for at, message in enumerate(messages):
            content = message["content"].strip() if strip else message["content"]
            pieces += [(before(message["role"]), H, at), (content, kind_of(message["role"]), at)]
            pieces += [(end, S if message["role"] == "assistant" else H, at), (after, H, at)]
        return [[*pieces, (tail, H, len(messages) - 1)]]

    return oracle


CHATML = Stock(
    "chatml",
    "{% for message in messages %}{{ '<|im_start|>' + message['role'] + '\n' }}"
    f"{{% if message['role'] == 'assistant' %}}{GEN}{{{{ message['content'] + '<|im_end|>' }}}}{END}{{{{ '\\n' }}}}"
    "{% else %}{{ message['content'] + '<|im_end|>' + '\n' }}{% endif %}{% endfor %}"
    "{% if add_generation_prompt %}{{ '<|im_start|>assistant\n' }}{% endif %}",
    ("<|im_start|>", "<|im_end|>"),
    framed(lambda role: f"<|im_start|>{role}\n", "<|im_end|>", "\n"),
    tokens={"eos_token": "<|im_end|>"},
)

PHI3 = Stock(
    "phi-3",
    "{% for message in messages %}{{ '<|' + message['role'] + '|>\n' }}"
    f"{{% if message['role'] == 'assistant' %}}{GEN}{{{{ message['content'] + '<|end|>\n' }}}}{END}"
    "{% else %}{{ message['content'] + '<|end|>\n' }}{% endif %}{% endfor %}"
    "{% if add_generation_prompt %}{{ '<|assistant|>\n' }}{% else %}{{ eos_token }}{% endif %}",
    ("<|system|>", "<|user|>", "<|assistant|>", "<|end|>", "<|endoftext|>"),
    framed(lambda role: f"<|{role}|>\n", "<|end|>", "\n", tail="<|endoftext|>"),
    tokens={"eos_token": "<|endoftext|>"},
)

GLM4 = Stock(
    "glm-4",
    "[gMASK]<sop>{% for message in messages %}{{ '<|' + message.role + '|>\n' }}"
    "{{ message.content }}{% endfor %}"
    "{% if add_generation_prompt %}{{ '<|assistant|>\n' }}{% endif %}",
    ("[gMASK]", "<sop>", "<|system|>", "<|user|>", "<|assistant|>", "<|observation|>"),
    lambda messages: [_glm4(messages)],
    fields={"stop": "<|user|>"},
)


def _glm4(messages: Messages) -> list[Piece]:
    """A turn is ended by the token that begins the next one, and at the end by the one that a user would begin with."""
    pieces: list[Piece] = [("[gMASK]<sop>", H, 0)]
    for at, message in enumerate(messages):
        follows = at > 0 and messages[at - 1]["role"] == "assistant"
        pieces += [(f"<|{message['role']}|>", S if follows else H, at), ("\n", H, at)]
        pieces.append((message["content"], kind_of(message["role"]), at))
    return [*pieces, ("<|user|>", S, len(messages) - 1)]


LLAMA2 = Stock(
    "llama-2",
    """{% if messages[0]['role'] == 'system' %}{% set rest = messages[1:] %}{% set system = messages[0]['content'] %}"""
    """{% else %}{% set rest = messages %}{% set system = false %}{% endif %}{% for message in rest %}"""
    """{% if (message['role'] == 'user') != (loop.index0 % 2 == 0) %}"""
    """{{ raise_exception('Conversation roles must alternate user/assistant/user/assistant') }}{% endif %}"""
    """{% if loop.index0 == 0 and system %}"""
    """{% set content = '<<SYS>>\n' + system + '\n<</SYS>>\n\n' + message['content'] %}"""
    """{% else %}{% set content = message['content'] %}{% endif %}"""
    """{% if message['role'] == 'user' %}{{ bos_token + '[INST] ' + content.strip() + ' [/INST]' }}"""
    f"""{{% else %}}{GEN}{{{{ ' ' + content.strip() + ' ' + eos_token }}}}{END}{{% endif %}}{{% endfor %}}""",
    ("<s>", "</s>"),
    lambda messages: [_llama2(messages)],
    tokens={"bos_token": "<s>", "eos_token": "</s>"},
)


def _llama2(messages: Messages) -> list[Piece]:
    pieces: list[Piece] = []
    for at, message in enumerate(messages):
        content = message["content"].strip()
        if message["role"] == "system":
            pieces += [("<s>[INST] <<SYS>>\n", H, at), (message["content"], P, at), ("\n<</SYS>>\n\n", H, at)]
        elif message["role"] == "user":
            opens = [] if at and messages[at - 1]["role"] == "system" else [("<s>[INST] ", H, at)]
            follows = (
                message["content"].rstrip() if not opens else content
            )  # stripped as one text with the system prompt
            pieces += [*opens, (follows, P, at), (" [/INST]", H, at)]
        else:
            pieces += [(" " + content, R, at), (" </s>", S, at)]
    return pieces


MISTRAL = Stock(
    "mistral-v0.3",
    "{{ bos_token }}{% for message in messages %}{% if message.role == 'user' %}"
    "{% if tools and loop.last %}{{ '[AVAILABLE_TOOLS] ' + (tools | tojson) + '[/AVAILABLE_TOOLS]' }}{% endif %}"
    "{{ '[INST] ' + message.content + '[/INST]' }}{% elif message.role == 'assistant' %}"
    f"{{% if message.tool_calls is defined %}}{GEN}{{{{ '[TOOL_CALLS] [' }}}}{{% for call in message.tool_calls %}}"
    "{{ call.function | tojson }}{% if not loop.last %}{{ ', ' }}{% endif %}{% endfor %}"
    f"{{{{ ']' + eos_token }}}}{END}{{% else %}}"
    f"{GEN}{{{{ ' ' + message.content | trim + eos_token }}}}{END}{{% endif %}}"
    "{% elif message.role == 'tool' %}{{ '[TOOL_RESULTS] ' + message.content + '[/TOOL_RESULTS]' }}"
    "{% else %}{{ raise_exception('Only user, assistant and tool roles are supported') }}{% endif %}{% endfor %}",
    (
        "<s>",
        "</s>",
        "[INST]",
        "[/INST]",
        "[TOOL_CALLS]",
        "[AVAILABLE_TOOLS]",
        "[/AVAILABLE_TOOLS]",
        "[TOOL_RESULTS]",
        "[/TOOL_RESULTS]",
    ),
    lambda messages: [_mistral(messages)],
    tokens={"bos_token": "<s>", "eos_token": "</s>"},
    system=False,
    tools=True,
)


def _mistral(messages: Messages) -> list[Piece]:
    pieces: list[Piece] = [("<s>", H, 0)]
    for at, message in enumerate(messages):
        if message["role"] == "user":
            pieces += [("[INST] ", H, at), (message["content"], P, at), ("[/INST]", H, at)]
        elif message["role"] == "tool":
            pieces += [("[TOOL_RESULTS] ", H, at), (message["content"], TR, at), ("[/TOOL_RESULTS]", H, at)]
        elif "tool_calls" in message:
            calls = ", ".join(json.dumps(call["function"], ensure_ascii=False) for call in message["tool_calls"])
            pieces += [(f"[TOOL_CALLS] [{calls}]", C, at), ("</s>", S, at)]
        else:
            pieces += [(" " + message["content"].strip(), R, at), ("</s>", S, at)]
    return pieces


TEKKEN = Stock(
    "mistral-tekken",
    "{{ bos_token }}{% for message in messages %}{% if message.role == 'system' %}"
    "{{ '[SYSTEM_PROMPT]' + message.content + '[/SYSTEM_PROMPT]' }}{% elif message.role == 'user' %}"
    "{{ '[INST]' + message.content + '[/INST]' }}{% else %}"
    f"{GEN}{{{{ message.content + eos_token }}}}{END}{{% endif %}}{{% endfor %}}",
    ("<s>", "</s>", "[INST]", "[/INST]", "[SYSTEM_PROMPT]", "[/SYSTEM_PROMPT]"),
    lambda messages: [_tekken(messages)],
    tokens={"bos_token": "<s>", "eos_token": "</s>"},
)


def _tekken(messages: Messages) -> list[Piece]:
    pieces: list[Piece] = [("<s>", H, 0)]
    for at, message in enumerate(messages):
        if message["role"] == "assistant":
            pieces += [(message["content"], R, at), ("</s>", S, at)]
        else:
            name = "SYSTEM_PROMPT" if message["role"] == "system" else "INST"
            pieces += [(f"[{name}]", H, at), (message["content"], P, at), (f"[/{name}]", H, at)]
    return pieces


GEMMA2 = Stock(
    "gemma-2",
    "{{ bos_token }}"
    "{% if messages[0]['role'] == 'system' %}{{ raise_exception('System role not supported') }}{% endif %}"
    "{% for message in messages %}{% set role = 'model' if message['role'] == 'assistant' else message['role'] %}"
    "{{ '<start_of_turn>' + role + '\n' }}{% if role == 'model' %}"
    f"{GEN}{{{{ message['content'] | trim + '<end_of_turn>\n' }}}}{END}"
    "{% else %}{{ message['content'] | trim + '<end_of_turn>\n' }}{% endif %}{% endfor %}"
    "{% if add_generation_prompt %}{{ '<start_of_turn>model\n' }}{% endif %}",
    ("<bos>", "<eos>", "<start_of_turn>", "<end_of_turn>"),
    framed(
        lambda role: f"<start_of_turn>{'model' if role == 'assistant' else role}\n",
        "<end_of_turn>",
        "\n",
        bos="<bos>",
        strip=True,
    ),
    tokens={"bos_token": "<bos>", "eos_token": "<eos>"},
    system=False,
)


LLAMA3 = Stock(
    "llama-3.1",
    "{{ bos_token }}{% if messages[0]['role'] == 'system' %}{% set system = messages[0]['content'] | trim %}"
    "{% set messages = messages[1:] %}{% else %}{% set system = '' %}{% endif %}"
    "{{ '<|start_header_id|>system<|end_header_id|>\n\n' }}"
    "{% if tools is not none %}{{ 'Environment: ipython\n' }}{% endif %}"
    "{{ 'Cutting Knowledge Date: December 2023\n' }}{{ 'Today Date: ' + strftime_now('%d %b %Y') + '\n\n' }}"
    "{{ system }}{{ '<|eot_id|>' }}{% for message in messages %}"
    "{% if not (message.role == 'ipython' or message.role == 'tool' or 'tool_calls' in message) %}"
    "{{ '<|start_header_id|>' + message['role'] + '<|end_header_id|>\n\n' }}"
    f"{{% if message.role == 'assistant' %}}{GEN}{{{{ message['content'] | trim + '<|eot_id|>' }}}}{END}"
    "{% else %}{{ message['content'] | trim + '<|eot_id|>' }}{% endif %}"
    "{% elif 'tool_calls' in message %}{% set call = message.tool_calls[0].function %}"
    "{{ '<|start_header_id|>assistant<|end_header_id|>\n\n' }}"
    f'{GEN}{{{{ \'{{"name": "\' + call.name + \'", "parameters": \' }}}}{{{{ call.arguments | tojson }}}}'
    f"{{{{ '}}' + '<|eot_id|>' }}}}{END}"
    "{% else %}{{ '<|start_header_id|>ipython<|end_header_id|>\n\n' }}{{ message.content | tojson }}{{ '<|eot_id|>' }}"
    "{% endif %}{% endfor %}"
    "{% if add_generation_prompt %}{{ '<|start_header_id|>assistant<|end_header_id|>\n\n' }}{% endif %}",
    ("<|begin_of_text|>", "<|end_of_text|>", "<|start_header_id|>", "<|end_header_id|>", "<|eot_id|>", "<|eom_id|>"),
    lambda messages: [_llama3(messages)],
    tokens={"bos_token": "<|begin_of_text|>", "eos_token": "<|eot_id|>"},
    fields={"date": "2024-07-26"},
    tools=True,
)


def _llama3(messages: Messages) -> list[Piece]:
    dates = "Cutting Knowledge Date: December 2023\nToday Date: 26 Jul 2024\n\n"
    pieces: list[Piece] = [(f"<|begin_of_text|>{_llama3_head('system')}{dates}", H, 0)]
    if messages[0]["role"] == "system":
        pieces.append((messages[0]["content"].strip(), P, 0))
    pieces.append(("<|eot_id|>", H, 0))
    for at, message in enumerate(messages):
        content = message["content"].strip()
        if message["role"] == "user":
            pieces += [(_llama3_head("user"), H, at), (content, P, at), ("<|eot_id|>", H, at)]
        elif message["role"] == "tool":  # written as JSON: the quotes are the template's
            inner = json.dumps(message["content"], ensure_ascii=False)
            pieces += [(_llama3_head("ipython") + '"', H, at), (inner[1:-1], TR, at), ('"<|eot_id|>', H, at)]
        elif "tool_calls" in message:
            call = message["tool_calls"][0]["function"]
            text = f'{{"name": "{call["name"]}", "parameters": {json.dumps(call["arguments"], ensure_ascii=False)}}}'
            pieces += [(_llama3_head("assistant"), H, at), (text, C, at), ("<|eot_id|>", S, at)]
        elif message["role"] == "assistant":
            pieces += [(_llama3_head("assistant"), H, at), (content, R, at), ("<|eot_id|>", S, at)]
    return pieces


def _llama3_head(role: str) -> str:
    return f"<|start_header_id|>{role}<|end_header_id|>\n\n"


QWEN25 = Stock(
    "qwen-2.5",
    "{% if messages[0]['role'] == 'system' %}{{ '<|im_start|>system\n' + messages[0]['content'] }}"
    "{% else %}{{ '<|im_start|>system\nYou are a helpful assistant.' }}{% endif %}"
    "{% if tools %}{{ '\n\n# Tools\n<tools>' }}{% for tool in tools %}{{ '\n' }}{{ tool | tojson }}{% endfor %}"
    "{{ '\n</tools>' }}{% endif %}{{ '<|im_end|>\n' }}{% for message in messages %}"
    "{% if message.role == 'user' or (message.role == 'system' and not loop.first) %}"
    "{{ '<|im_start|>' + message.role + '\n' + message.content + '<|im_end|>' + '\n' }}"
    "{% elif message.role == 'assistant' %}{{ '<|im_start|>assistant\n' }}"
    f"{GEN}{{% if message.content %}}{{{{ message.content }}}}{{% endif %}}{{% for call in message.tool_calls %}}"
    "{% if not loop.first or message.content %}{{ '\n' }}{% endif %}"
    '{{ \'<tool_call>\n{"name": "\' }}{{ call.function.name }}{{ \'", "arguments": \' }}'
    f"{{{{ call.function.arguments | tojson }}}}{{{{ '}}\n</tool_call>' }}}}{{% endfor %}}{{{{ '<|im_end|>' }}}}{END}"
    "{{ '\n' }}"
    "{% elif message.role == 'tool' %}"
    "{% if loop.index0 == 0 or messages[loop.index0 - 1].role != 'tool' %}{{ '<|im_start|>user' }}{% endif %}"
    "{{ '\n<tool_response>\n' }}{{ message.content }}{{ '\n</tool_response>' }}"
    "{% if loop.last or messages[loop.index0 + 1].role != 'tool' %}{{ '<|im_end|>\n' }}{% endif %}"
    "{% endif %}{% endfor %}"
    "{% if add_generation_prompt %}{{ '<|im_start|>assistant\n' }}{% endif %}",
    ("<|im_start|>", "<|im_end|>", "<|endoftext|>"),
    lambda messages: [_qwen(messages, default_system="You are a helpful assistant.")],
    ordinary=("<tool_call>", "</tool_call>"),
    tokens={"eos_token": "<|im_end|>", "pad_token": "<|endoftext|>"},
    tools=True,
)


def _qwen(messages: Messages, default_system: str = "", think: Callable[[int], bool] = lambda at: False) -> list[Piece]:
    """Qwen's format; `think` says in which turns thinking is written, if only as an empty block."""
    pieces: list[Piece] = []
    if default_system and messages[0]["role"] != "system":
        pieces.append((f"<|im_start|>system\n{default_system}<|im_end|>\n", H, 0))
    for at, message in enumerate(messages):
        role, content = message["role"], message["content"]
        if role == "tool":
            first = messages[at - 1]["role"] != "tool"
            last = at + 1 == len(messages) or messages[at + 1]["role"] != "tool"
            pieces += [("<|im_start|>user" * first + "\n<tool_response>\n", H, at), (content, TR, at)]
            pieces.append(("\n</tool_response>" + "<|im_end|>\n" * last, H, at))
            continue
        pieces.append((f"<|im_start|>{role}\n", H, at))
        if role != "assistant":
            pieces += [(content, P, at), ("<|im_end|>\n", H, at)]
            continue
        if think(at):
            thought = message.get("reasoning_content", "").strip("\n")
            pieces += [("<think>\n", T, at), (thought, T, at), ("\n</think>\n\n", T, at)]
            content = content.lstrip("\n")
        pieces.append((content, R, at))
        for number, call in enumerate(message.get("tool_calls", ())):
            name, arguments = call["function"]["name"], json.dumps(call["function"]["arguments"], ensure_ascii=False)
            text = f'<tool_call>\n{{"name": "{name}", "arguments": {arguments}}}\n</tool_call>'
            pieces.append(("\n" * bool(number or content) + text, C, at))
        pieces += [("<|im_end|>", S, at), ("\n", H, at)]
    return pieces


QWEN3 = Stock(
    "qwen-3",
    "{% set ns = namespace(last=-1) %}{% for message in messages %}"
    "{% if message.role == 'user' %}{% set ns.last = loop.index0 %}{% endif %}{% endfor %}"
    "{% for message in messages %}{% set content = message.content if message.content is string else '' %}"
    "{% if message.role == 'tool' %}"
    "{% if loop.first or messages[loop.index0 - 1].role != 'tool' %}{{ '<|im_start|>user' }}{% endif %}"
    "{{ '\n<tool_response>\n' + content + '\n</tool_response>' }}"
    "{% if loop.last or messages[loop.index0 + 1].role != 'tool' %}{{ '<|im_end|>\n' }}{% endif %}"
    "{% elif message.role != 'assistant' %}"
    "{{ '<|im_start|>' + message.role + '\n' + content + '<|im_end|>' + '\n' }}"
    "{% else %}{% set thought = '' %}{% if message.reasoning_content is string %}"
    "{% set thought = message.reasoning_content %}{% elif '</think>' in content %}"
    "{% set thought = content.split('</think>')[0].rstrip('\n').split('<think>')[-1].lstrip('\n') %}"
    "{% set content = content.split('</think>')[-1].lstrip('\n') %}{% endif %}{{ '<|im_start|>assistant\n' }}"
    f"{GEN}{{% if loop.index0 > ns.last and (loop.last or thought) %}}"
    "{{ '<think>\n' + thought.strip('\n') + '\n</think>\n\n' + content.lstrip('\n') }}"
    "{% else %}{{ content }}{% endif %}{% for call in message.tool_calls %}"
    "{% if not loop.first or content %}{{ '\n' }}{% endif %}"
    '{{ \'<tool_call>\n{"name": "\' }}{{ call.function.name }}{{ \'", "arguments": \' }}'
    "{{ call.function.arguments | tojson }}{{ '}\n</tool_call>' }}{% endfor %}"
    f"{{{{ '<|im_end|>' }}}}{END}{{{{ '\n' }}}}{{% endif %}}{{% endfor %}}"
    "{% if add_generation_prompt %}{{ '<|im_start|>assistant\n' }}{% endif %}",
    ("<|im_start|>", "<|im_end|>", "<|endoftext|>"),
    lambda messages: _per_turn(
        messages, lambda some, turn: _qwen(some, think=lambda at: at == turn), changes=lambda message: True
    ),
    ordinary=("<think>", "</think>"),
    tokens={"eos_token": "<|im_end|>", "pad_token": "<|endoftext|>"},
    thinking=True,
    tools=True,
)


def _per_turn(
    messages: Messages, one: Callable[[Messages, int], list[Piece]], changes: Callable[[dict[str, Any]], bool]
) -> list[list[Piece]]:
    """A document per turn for templates that change every turn once it is history: there, it is a prompt."""
    found = []
    for turn, message in enumerate(messages):
        if message["role"] == "assistant":
            assert changes(message)
            pieces = one(messages[: turn + 1], turn)
            found.append([(text, kind if at == turn else _history(kind), at) for text, kind, at in pieces])
    return found


def _history(kind: str) -> str:
    return {R: P, T: P, C: H, S: H}.get(kind, kind)


R1 = Stock(
    "deepseek-r1-style",
    "{{ bos_token }}{% for message in messages %}{% if message.role == 'system' %}{{ message.content }}"
    "{% elif message.role == 'user' %}{{ '<｜User｜>' + message.content }}{% else %}{{ '<｜Assistant｜>' }}"
    f"{GEN}{{% if not loop.last %}}{{{{ message.content.split('</think>')[-1] }}}}"
    f"{{% else %}}{{{{ message.content }}}}{{% endif %}}{{{{ eos_token }}}}{END}{{% endif %}}{{% endfor %}}"
    "{% if add_generation_prompt %}{{ '<｜Assistant｜>' }}{% endif %}",
    ("<｜begin▁of▁sentence｜>", "<｜end▁of▁sentence｜>", "<｜User｜>", "<｜Assistant｜>"),
    lambda messages: _r1_documents(messages),
    ordinary=("<think>", "</think>"),
    tokens={"bos_token": "<｜begin▁of▁sentence｜>", "eos_token": "<｜end▁of▁sentence｜>"},
)


def _r1_documents(messages: Messages) -> list[list[Piece]]:
    """Only a turn with thinking is changed by what follows it: it has a document, the others share the last one."""
    turns = [at for at, message in enumerate(messages) if message["role"] == "assistant"]
    changed = [at for at in turns[:-1] if "</think>" in messages[at]["content"]]
    alone = [_r1(messages[: at + 1], at, [at]) for at in changed]
    return [*alone, _r1(messages, turns[-1], [at for at in turns if at not in changed])]


def _r1(messages: Messages, last: int, generated: Sequence[int]) -> list[Piece]:
    pieces: list[Piece] = [("<｜begin▁of▁sentence｜>", H, 0)]
    for at, message in enumerate(messages):
        content = message["content"]
        if message["role"] != "assistant":
            pieces += [("<｜User｜>" * (message["role"] == "user"), H, at), (content, P, at)]
            continue
        pieces.append(("<｜Assistant｜>", H, at))
        thought, closed, answer = content.rpartition("</think>")
        if at == last and closed:
            pieces += [
                ("<think>", T, at),
                (thought.removeprefix("<think>"), T, at),
                ("</think>", T, at),
                (answer, R, at),
            ]
        else:
            pieces.append((answer, R if at in generated else P, at))
        pieces.append(("<｜end▁of▁sentence｜>", S if at in generated else H, at))
    return pieces


HARMONY = Stock(
    "gpt-oss-style",
    "{% for message in messages %}{% if message.role != 'assistant' %}"
    "{{ '<|start|>' + message.role + '<|message|>' + message.content + '<|end|>' }}{% else %}{{ '<|start|>assistant' }}"
    f"{GEN}{{% if loop.last %}}{{% if message.thinking %}}"
    "{{ '<|channel|>analysis<|message|>' + message.thinking + '<|end|><|start|>assistant' }}{% endif %}"
    f"{{{{ '<|channel|>final<|message|>' + message.content + '<|return|>' }}}}{{% else %}}"
    f"{{{{ '<|channel|>final<|message|>' + message.content + '<|end|>' }}}}{{% endif %}}{END}"
    "{% endif %}{% endfor %}"
    "{% if add_generation_prompt %}{{ '<|start|>assistant' }}{% endif %}",
    ("<|start|>", "<|end|>", "<|message|>", "<|channel|>", "<|return|>"),
    lambda messages: _per_turn(messages, _harmony, changes=lambda message: True),
    thinking=True,
)


def _harmony(messages: Messages, turn: int) -> list[Piece]:
    pieces: list[Piece] = []
    for at, message in enumerate(messages):
        if message["role"] != "assistant":
            pieces += [
                (f"<|start|>{message['role']}<|message|>", H, at),
                (message["content"], P, at),
                ("<|end|>", H, at),
            ]
            continue
        final, is_last = "<|channel|>final<|message|>", at == turn
        pieces.append(("<|start|>assistant", H, at))
        if is_last and message.get("thinking"):
            pieces += [("<|channel|>analysis<|message|>", T, at), (message["thinking"], T, at)]
            pieces.append(("<|end|><|start|>assistant" + final, T, at))
        else:
            pieces.append((final, R if is_last else H, at))
        pieces += [(message["content"], R, at), ("<|return|>" if is_last else "<|end|>", S, at)]
    return pieces


STOCK = (
    CHATML, PHI3, GLM4, LLAMA2, MISTRAL, TEKKEN, GEMMA2, LLAMA3, QWEN25, QWEN3, R1,
    HARMONY,
)  # fmt: skip
