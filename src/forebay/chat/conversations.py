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
from dataclasses import dataclass, replace
from typing import Any, Literal

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


@dataclass(frozen=True, slots=True)
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

    def known_roles(self) -> dict[str, str]:
        """The role of every name whose messages have a text."""
        known = {**dict(zip(ROLES, ROLES, strict=True)), **USUAL_ROLES, **dict(self.roles)}
        return {name: role for name, role in known.items() if name != _CALL}

    def role(self, name: object, at: int, content: object) -> str:
        named = str(name)
        found = dict(self.roles).get(named) or USUAL_ROLES.get(named, named)
        if found not in ROLES:
            raise BadConversation(
                "unknown-role", f"message {at}, {_shown(content)}, has the role {_shown(name)}; map it with `roles`"
            )
        return found


@dataclass(frozen=True, slots=True)
class Conversation:
    """Checked messages as a template reads them; `untrained` are answers with `"weight": 0`, which are only context."""

    messages: list[dict[str, Any]]
    tools: list[Any] | None = None
    untrained: frozenset[int] = frozenset()

    @property
    def turns(self) -> list[int]:
        """The numbers of the assistant's messages to train on."""
        return [at for at in self.answers(len(self.messages)) if at not in self.untrained]

    def answers(self, upto: int) -> list[int]:
        """The numbers of all messages of the assistant among the first ones."""
        return [at for at, message in enumerate(self.messages[:upto]) if message["role"] == "assistant"]


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
    found = Conversation(messages, _tools(record.get(names.tools)), untrained)
    if not found.turns:
        why = "every answer has the weight 0" if untrained else "no message is the assistant's"
        ending = _shown(messages[-1].get("content", ""))
        raise BadConversation("no-response", f"{why}: {_roles(messages)}, which ends with {ending}")
    del messages[found.turns[-1] + 1 :]  # nothing that is generated follows
    return _normalized(found) if nfc else found


def plain_messages(
    record: Mapping[str, Any], names: FieldNames, roles: Mapping[str, str], *, nfc: bool = False
) -> tuple[tuple[str, ...], list[str]] | None:
    """The roles and contents that `read_conversation` finds in a record of nothing but those; None for any other.

    `roles` are `names.known_roles()`. What this function does not understand is read, or refused, by the other one.
    """
    listed, role, content = record.get(names.messages), "role", "content"
    if listed is None:
        listed, role, content = record.get(names.conversations), "from", "value"
    if not isinstance(listed, list) or names.format not in ("auto", "messages" if role == "role" else "sharegpt"):
        return None
    if record.get(names.system) or record.get(names.tools) or len(listed) > MOST_MESSAGES:
        return None
    try:
        found = [roles[each[role]] for each in listed]
        texts = [each[content] for each in listed]
        "".join(texts)  # raises for what is not a text
    except (KeyError, TypeError, IndexError):
        return None
    if set(map(len, listed)) != {2}:
        return None
    if nfc:
        texts = [unicodedata.normalize("NFC", text) for text in texts]
    while found and found[-1] != "assistant":  # nothing that is generated follows
        found.pop()
    return (tuple(found), texts[: len(found)]) if found else None


def without_thinking(conversation: Conversation) -> Conversation:
    """The conversation without its reasoning: neither in fields, nor before `</think>` in contents."""
    messages = [
        {key: value for key, value in each.items() if key not in THINKING_FIELDS} for each in conversation.messages
    ]
    for message in messages:
        if message["role"] == "assistant" and "</think>" in message["content"]:
            message["content"] = message["content"].partition("</think>")[2].lstrip()
    return replace(conversation, messages=messages)


_TEXTS = (bytes, str)
_decode = msgspec.json.Decoder().decode


def read_record(data: Any) -> Mapping[str, Any]:
    if isinstance(data, _TEXTS):
        try:
            data = _decode(data)
        except (msgspec.DecodeError, UnicodeDecodeError, RecursionError) as error:
            raise BadConversation("bad-json", str(error)) from error
    if type(data) is not dict and not isinstance(data, Mapping):  # which takes longer
        raise BadConversation("not-a-record", f"a sample must be an object with messages, not {type(data).__name__}")
    return data


def _messages(record: Mapping[str, Any], names: FieldNames) -> list[dict[str, Any]]:
    match _format(record, names):
        case "messages":
            found = record.get(names.messages, record.get(names.conversations))
            listed = [_message(each, names, at, "role", "content") for at, each in _each(found)]
        case "sharegpt":
            found = record.get(names.conversations, record.get(names.messages))
            listed = [_message(each, names, at, "from", "value") for at, each in _each(found)]
        case "prompt-completion":
            both = [*_turn(record.get(names.prompt), "user"), *_turn(record.get(names.completion), "assistant")]
            listed = [_message(each, names, at, "role", "content") for at, each in _each(both)]
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
        if isinstance(listed := record.get(field), Sequence) and not isinstance(listed, str):
            first = listed[0] if listed else {}
            return "sharegpt" if isinstance(first, Mapping) and "from" in first else "messages"
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


def _each(found: Any) -> Sequence[tuple[int, Mapping[str, Any]]]:
    if not isinstance(found, Sequence) or isinstance(found, str | bytes):
        raise BadConversation("no-messages", f"the messages are {type(found).__name__}; expected a list of objects")
    for at, each in enumerate(found):
        if not isinstance(each, dict | Mapping):  # the first is the usual one, and faster to see
            raise BadConversation("bad-message", f"message {at} is {type(each).__name__}; expected an object")
    return list(enumerate(found))


def _turn(found: Any, role: str) -> Sequence[Any]:
    if isinstance(found, str):
        return [{"role": role, "content": found}]
    if not isinstance(found, Sequence):
        raise BadConversation(
            "bad-message", f"the {role}'s part is {type(found).__name__}; expected a text or messages"
        )
    return found


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


def _message(found: Mapping[str, Any], names: FieldNames, at: int, role: str, content: str) -> dict[str, Any]:
    if role not in found:
        raise BadConversation("bad-message", f"message {at} has no '{role}'; it has {', '.join(map(str, found))}")
    made: dict[str, Any] = {"role": names.role(found[role], at, found.get(content))}
    calls = _tool_calls(found.get("tool_calls"), at)
    if found[role] == _CALL:  # its value is the call itself
        calls = _tool_calls(_parsed(found.get(content)), at)
        made["content"] = ""
    else:
        made["content"] = _content(found.get(content), at, bool(calls))
    if made["role"] == "assistant":
        thinking = next((found[name] for name in names.thinking if found.get(name) is not None), None)
        if thinking is not None and not isinstance(thinking, str):
            raise BadConversation("not-text", f"the thinking of message {at} is {type(thinking).__name__}, not a text")
        if thinking:
            made |= dict.fromkeys(THINKING_FIELDS, thinking)
        if calls:
            made["tool_calls"] = calls
        if (weight := found.get("weight")) is not None:
            if weight not in (0, 1):
                raise BadConversation("bad-message", f"message {at} has the weight {_shown(weight)}; expected 0 or 1")
            if not weight:
                made[_UNTRAINED] = True
    elif calls:
        raise BadConversation("bad-message", f"message {at} calls tools, but its role is {made['role']}, not assistant")
    for name in ("name", "tool_call_id"):
        if isinstance(found.get(name), str):
            made[name] = found[name]
    return made


def _content(content: Any, at: int, calls: bool) -> str:
    """The text of a message; a list of text parts is joined, and None stands for no text beside tool calls."""
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
    made: dict[str, Any] = {"type": "function", "function": {"name": function["name"], "arguments": arguments}}
    return {**made, "id": call["id"]} if isinstance(call.get("id"), str) else made


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
    return replace(conversation, messages=messages)


def _roles(messages: Sequence[Mapping[str, Any]]) -> str:
    return ", ".join(message["role"] for message in messages[:8])


def _shown(value: object) -> str:
    text = repr(value)
    return text if len(text) <= _SHOWN_CHARS else f"{text[:_SHOWN_CHARS]}…"
