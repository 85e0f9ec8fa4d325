"""Read a conversation from a sample, in any of the usual formats, and check it.

    messages             {"messages": [{"role": "user", "content": "Hi"}, …], "tools": […]}
    sharegpt             {"conversations": [{"from": "human", "value": "Hi"}, …], "system": "…", "tools": "[…]"}
    prompt-completion    {"prompt": "Hi", "completion": "Hello"}, each a text or a list of messages
    instruction          {"instruction": "Translate", "input": "Hi", "output": "Salut", "history": [["…", "…"], …]}

A message keeps only what templates read: role, content, thinking, tool calls, the id and the name of a tool. Template
code in a sample is data like any other text: nothing here or later compiles it.
"""

import json
import unicodedata
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from functools import cached_property
from typing import Any, Literal, NamedTuple

import msgspec

from forebay.errors import ForebayError
from forebay.source import TOO_DEEP, Failure, is_shallow

Format = Literal["auto", "messages", "sharegpt", "prompt-completion", "instruction"]
ROLES = ("system", "developer", "user", "assistant", "tool")
USUAL_ROLES = {
    "human": "user", "gpt": "assistant", "chatgpt": "assistant", "bot": "assistant", "model": "assistant",
    "function": "tool", "observation": "tool", "ipython": "tool", "function_call": "assistant",
}  # fmt: skip
THINKING_FIELDS = ("reasoning_content", "thinking", "reasoning")  # templates read one of these
MOST_MESSAGES = 4096
_SHOWN_CHARS = 60
_UNTRAINED = "untrained"
_CALL = "function_call"


class BadConversation(ForebayError):
    """A sample cannot be used; it becomes a failure with this reason."""

    def __init__(self, reason: str, detail: str) -> None:
        self.reason, self.detail = reason, detail
        super().__init__(f"{reason}: {detail}")

    def failure(self, sample: str) -> Failure:
        return Failure(sample, self.reason, self.detail)


@dataclass(frozen=True)
class FieldNames:
    """The fields of samples and messages, and the role that each name stands for."""

    format: Format = "auto"
    messages: str = "messages"
    conversations: str = "conversations"
    tools: str = "tools"
    system: str = "system"
    prompt: str = "prompt"
    completion: str = "completion"
    instruction: str = "instruction"
    input: str = "input"
    output: str = "output"
    thinking: tuple[str, ...] = THINKING_FIELDS
    roles: tuple[tuple[str, str], ...] = ()

    @cached_property
    def known_roles(self) -> Mapping[str, str]:
        """The role of every name."""
        return {**dict(zip(ROLES, ROLES, strict=True)), **USUAL_ROLES, **dict(self.roles)}

    def role(self, name: object, at: int, content: object) -> str:
        role = self.known_roles.get(str(name))  # some data sets number their roles
        if role is None:
            raise BadConversation(
                "unknown-role", f"message {at}, {_shown(content)}, has the role {_shown(name)}; map it with `roles`"
            )
        return role


class Conversation(NamedTuple):
    """Checked messages as a template reads them; `untrained` are answers with `"weight": 0`, which are only context."""

    messages: list[dict[str, Any]]
    tools: list[Any] | None = None
    untrained: frozenset[int] = frozenset()

    @property
    def turns(self) -> list[int]:
        """The numbers of the assistant's messages to train on."""
        trained = enumerate(self.messages)
        return [at for at, message in trained if message["role"] == "assistant" and at not in self.untrained]


def read_conversation(data: Any, names: FieldNames, *, nfc: bool = False) -> Conversation:
    """Return the conversation in the data of a sample, raise `BadConversation`.

    `nfc`: normalize texts as the tokenizer would.
    """
    record = read_record(data)
    messages = _messages(record, names)
    if not messages:
        raise BadConversation("empty", "the conversation has no message")
    if len(messages) > MOST_MESSAGES:
        raise BadConversation("too-long", f"it has {len(messages):,} messages; at most {MOST_MESSAGES:,} are read")
    untrained = frozenset(at for at, message in enumerate(messages) if message.pop(_UNTRAINED, False))
    conversation = Conversation(messages, _tools(record.get(names.tools)), untrained)
    turns = conversation.turns
    if not turns:
        why = "all assistant messages have weight 0" if untrained else "no assistant message"
        ending = _shown(messages[-1].get("content", ""))
        raise BadConversation("no-response", f"{why} (roles: {_roles(messages)}); the last message is {ending}")
    del messages[turns[-1] + 1 :]  # nothing that is generated follows
    return _normalized(conversation) if nfc else conversation


def without_thinking(conversation: Conversation) -> Conversation:
    """The conversation without its reasoning: neither in fields, nor before `</think>` in contents."""
    messages = [
        {key: value for key, value in each.items() if key not in THINKING_FIELDS} for each in conversation.messages
    ]
    for message in messages:
        if message["role"] == "assistant" and "</think>" in message["content"]:
            message["content"] = message["content"].partition("</think>")[2].lstrip()
    return conversation._replace(messages=messages)


_TEXTS = (bytes, str)
_OBJECT, _LIST = (dict, Mapping), (list, Sequence)  # the first is the usual one, and faster to see
_decode = msgspec.json.Decoder().decode


def read_record(data: Any) -> Mapping[str, Any]:
    if isinstance(data, _TEXTS):
        try:
            data = _decode(data)
        except (msgspec.DecodeError, UnicodeDecodeError, RecursionError) as error:
            raise BadConversation("bad-json", str(error)) from error
    if not isinstance(data, _OBJECT):
        raise BadConversation("not-a-record", f"a sample must be an object with messages, not {type(data).__name__}")
    return data


def _messages(record: Mapping[str, Any], names: FieldNames) -> list[dict[str, Any]]:
    match _format(record, names):
        case "messages":
            listed = _each(record.get(names.messages, record.get(names.conversations)), names)
        case "sharegpt":
            listed = _each(record.get(names.conversations, record.get(names.messages)), names)
        case "prompt-completion":
            sides = ((record.get(names.prompt), "user"), (record.get(names.completion), "assistant"))
            listed = _each([message for part, role in sides for message in messages_of(part, role)], names)
        case _:
            listed = _instruction(record, names)
    system = record.get(names.system)
    if isinstance(system, str) and system and not (listed and listed[0]["role"] == "system"):
        listed = [{"role": "system", "content": system}, *listed]
    return listed


def _format(record: Mapping[str, Any], names: FieldNames) -> Format:
    """The format of a record: the one that was chosen, else by its fields, and of a message by its first one."""
    if names.format != "auto":
        return names.format
    for field in (names.messages, names.conversations):
        if isinstance(listed := record.get(field), _LIST) and not isinstance(listed, str):
            return "messages" if field == names.messages else "sharegpt"
    if names.prompt in record and names.completion in record:
        return "prompt-completion"
    if names.instruction in record and names.output in record:
        return "instruction"
    known = (names.messages, names.conversations, f"{names.prompt} and {names.completion}")
    shown = ", ".join(list(map(str, record))[:6]) or "none"
    raise BadConversation(
        "no-messages",
        f"it has none of the fields {', '.join(known)}, {names.instruction} and {names.output}; it has {shown}; "
        "map them with `names`",
    )


def _each(listed: Any, names: FieldNames) -> list[dict[str, Any]]:
    if not isinstance(listed, _LIST) or isinstance(listed, _TEXTS):
        raise BadConversation("no-messages", f"the messages are {type(listed).__name__}; expected a list of objects")
    return [_message(message, names, at) for at, message in enumerate(listed)]


def messages_of(part: Any, role: str) -> Sequence[Any]:
    """The messages of a prompt or an answer: a text, one message, or several."""
    if isinstance(part, str):
        return [{"role": role, "content": part}]
    if isinstance(part, Mapping):
        return [part if "role" in part or "from" in part else {"role": role, "content": part.get("content")}]
    if not isinstance(part, Sequence):
        raise BadConversation("bad-message", f"the {role}'s part is {type(part).__name__}; expected text or messages")
    return part


def _instruction(record: Mapping[str, Any], names: FieldNames) -> list[dict[str, Any]]:
    history, rest = record.get("history") or [], record.get(names.input)
    texts = [record.get(names.instruction), record.get(names.output)]
    for pair in history if isinstance(history, Sequence) else [history]:
        if not isinstance(pair, Sequence) or len(pair) != 2:
            raise BadConversation("bad-message", "`history` must be a list of pairs: a question and its answer")
    texts = [*(text for pair in history for text in pair), *texts]
    if not all(isinstance(text, str) for text in (*texts, rest or "")):
        raise BadConversation("not-text", f"{names.instruction}, {names.input} and {names.output} must be texts")
    if rest:
        texts[-2] = f"{texts[-2]}\n\n{rest}"
    return [{"role": ("user", "assistant")[at % 2], "content": text} for at, text in enumerate(texts)]


def _message(fields: Any, names: FieldNames, at: int) -> dict[str, Any]:
    if not isinstance(fields, _OBJECT):
        raise BadConversation("bad-message", f"message {at} is {type(fields).__name__}; expected an object")
    role, content = ("from", "value") if "from" in fields and "role" not in fields else ("role", "content")
    if role not in fields:
        raise BadConversation("bad-message", f"message {at} has no '{role}'; it has {', '.join(map(str, fields))}")
    message: dict[str, Any] = {"role": names.role(fields[role], at, fields.get(content))}
    if len(fields) == 2 and isinstance(text := fields.get(content), str) and fields[role] != _CALL:  # most messages
        message["content"] = text
        return message
    calls = _tool_calls(fields.get("tool_calls"), at)
    if fields[role] == _CALL:  # its value is the call itself
        calls = _tool_calls(_parsed(fields.get(content)), at)
        message["content"] = ""
    else:
        message["content"] = _content(fields.get(content), at, bool(calls))
    if message["role"] == "assistant":
        thinking = next((fields[name] for name in names.thinking if fields.get(name) is not None), None)
        if thinking is not None and not isinstance(thinking, str):
            raise BadConversation("not-text", f"the thinking of message {at} is {type(thinking).__name__}, not a text")
        if thinking:
            message |= dict.fromkeys(THINKING_FIELDS, thinking)
        if calls:
            message["tool_calls"] = calls
        if (weight := fields.get("weight")) is not None:
            if weight not in (0, 1):
                raise BadConversation("bad-message", f"message {at} has the weight {_shown(weight)}; expected 0 or 1")
            if not weight:
                message[_UNTRAINED] = True
    elif calls:
        raise BadConversation(
            "bad-message", f"message {at} calls tools, but its role is {message['role']}, not assistant"
        )
    for name in ("name", "tool_call_id"):
        if isinstance(fields.get(name), str):
            message[name] = fields[name]
    return message


def _content(content: Any, at: int, calls: bool) -> str:
    """The text of a message; a list of text parts is joined, and None means no text next to tool calls."""
    if isinstance(content, str):
        return content
    if content is None and calls:
        return ""
    if isinstance(content, Sequence):
        parts = [
            part.get("text") if isinstance(part, Mapping) and part.get("type") == "text" else None for part in content
        ]
        if all(isinstance(part, str) for part in parts):
            return "".join(parts)  # type: ignore[arg-type]
        raise BadConversation("not-text", f"message {at} has parts that are not text; chat caches hold text only")
    raise BadConversation("not-text", f"the content of message {at} is {type(content).__name__}, not a text")


def _tool_calls(calls: Any, at: int) -> list[dict[str, Any]]:
    if calls is None or calls == []:
        return []
    if not is_shallow(calls):
        raise BadConversation("too-deep", f"the tool calls of message {at}: {TOO_DEEP}")
    listed = [calls] if isinstance(calls, Mapping) else calls
    if not isinstance(listed, Sequence) or isinstance(listed, str):
        raise BadConversation("bad-tool-call", f"the tool calls of message {at} are {type(calls).__name__}, not a list")
    return [_tool_call(call, at) for call in listed]


def _tool_call(call: Any, at: int) -> dict[str, Any]:
    """A call as `{"type": "function", "function": {"name", "arguments"}}`; arguments as JSON text are parsed.

    A template would otherwise write them as JSON a second time, with every quote escaped.
    """
    function = call.get("function", call) if isinstance(call, Mapping) else None
    if not isinstance(function, Mapping) or not isinstance(function.get("name"), str):
        raise BadConversation("bad-tool-call", f"a tool call of message {at} names no function")
    arguments = function.get("arguments", {})
    arguments = _parsed(arguments) if isinstance(arguments, str) and arguments.lstrip()[:1] == "{" else arguments
    parsed: dict[str, Any] = {"type": "function", "function": {"name": function["name"], "arguments": arguments}}
    return {**parsed, "id": call["id"]} if isinstance(call.get("id"), str) else parsed


def _tools(tools: Any) -> list[Any] | None:
    tools = _parsed(tools) if isinstance(tools, str) and tools.strip() else tools
    if not tools:
        return None
    if not is_shallow(tools):
        raise BadConversation("too-deep", f"the tools: {TOO_DEEP}")
    if not isinstance(tools, list) or not all(isinstance(tool, dict) for tool in tools):
        raise BadConversation("bad-tools", "`tools` must be a list of objects, or the JSON text of one")
    return tools


def _parsed(text: Any) -> Any:
    if not isinstance(text, str | bytes):
        return text
    try:
        value = json.loads(text)
    except (ValueError, RecursionError) as error:
        raise BadConversation("bad-tool-call", f"JSON text of a tool call cannot be read: {error}") from error
    if not is_shallow(value):
        raise BadConversation("too-deep", TOO_DEEP)
    return value


def _normalized(conversation: Conversation) -> Conversation:
    """The conversation with texts in NFC, which the tokenizer makes of them anyway."""
    messages: list[dict[str, Any]] = [
        {
            key: unicodedata.normalize("NFC", value) if isinstance(value, str) else value
            for key, value in message.items()
        }
        for message in conversation.messages
    ]
    return conversation._replace(messages=messages)


def _roles(messages: Sequence[Mapping[str, Any]]) -> str:
    return ", ".join(message["role"] for message in messages[:8])


def _shown(value: object) -> str:
    text = repr(value)
    return text if len(text) <= _SHOWN_CHARS else f"{text[:_SHOWN_CHARS]}…"
