"""Slots: the texts of a conversation, found in a rendering by private characters around them.

messages   {"role": "user", "content": "Hi"}        wrapped    {"role": "user", "content": "⟦Hi⟧"}
rendering  <|im_start|>user⏎⟦Hi⟧<|im_end|>          pieces     <|im_start|>user⏎ · Hi · <|im_end|>
"""

import re
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any, Final, NamedTuple

from forebay.chat.conversations import THINKING_FIELDS, BadConversation, Conversation
from forebay.chat.rendering import CORRECT_IT, ChatTemplate
from forebay.masks.train_on import KINDS

SHOWN_CHARS = 160
_OPEN, _CLOSE = 0xF0000, 0xF8000  # the private characters before and after slot n
MARK = chr(_OPEN)
PRIVATE = re.compile("[\U000f0000-\U0010ffff]")
KIND: Final = {name: number for number, name in enumerate(KINDS)}
THINKING, PROMPT = KIND["thinking"], KIND["prompt"]
_KIND_OF_ROLE = {"assistant": KIND["response"], "tool": KIND["tool_result"]}
SLOT_FIELDS = ("content", *THINKING_FIELDS)
# Whether a template removes the white space before the first slot, after it, before the next; empty if it removes none.
Stripped = tuple[bool, ...]


class Slot(NamedTuple):
    """A text of a conversation: characters `start` to `stop` of a field of a message."""

    message: int
    field: str
    start: int
    stop: int
    kind: int


class Piece(NamedTuple):
    """Characters of a rendered text: of the template (`slot` is -1), or of a slot."""

    start: int
    stop: int
    slot: int


@dataclass(frozen=True, slots=True)
class Parsed:
    """A rendering with private characters, taken apart: its pieces, and where they were without being slots."""

    text: str
    pieces: list[Piece]
    calls: dict[int, dict[int, list[int]]]  # message -> number of a call -> where it ends, or a bit before


def slot_texts(conversation: Conversation) -> list[str]:
    """Every text of a conversation that may be a slot."""
    return [text for each in conversation.messages for key, text in each.items() if key in SLOT_FIELDS]


def slots_of(messages: Sequence[dict[str, Any]]) -> list[Slot]:
    """The contents of messages; thinking within a content is a slot by itself."""
    slots: list[Slot] = []
    for at, message in enumerate(messages):
        content, role = message["content"], message["role"]
        if len(message) > 2 and (thinking := message.get(THINKING_FIELDS[0])):
            slots.append(Slot(at, THINKING_FIELDS[0], 0, len(thinking), THINKING))
        end = content.find("</think>") if role == "assistant" else -1
        if end >= 0:
            begin = content.find("<think>")
            begin = begin + len("<think>") if 0 <= begin < end and not content[:begin].strip() else 0
            slots.append(Slot(at, "content", begin, end, THINKING))
            slots.append(Slot(at, "content", end + len("</think>"), len(content), KIND["response"]))
        elif content:
            slots.append(Slot(at, "content", 0, len(content), _KIND_OF_ROLE.get(role, PROMPT)))
    return slots


def narrowed(messages: Sequence[dict[str, Any]], slots: list[Slot], stripped: Stripped) -> list[Slot]:
    """Slots without the white space before and after them that the template removes."""
    if not stripped:
        return slots
    narrow = []
    for slot, before, after in zip(slots, stripped[::2], stripped[1::2], strict=True):
        text = messages[slot.message][slot.field][slot.start : slot.stop]
        start = slot.start + (len(text) - len(text.lstrip()) if before else 0)
        narrow.append(slot._replace(start=start, stop=max(start, slot.start + len(text.rstrip() if after else text))))
    return narrow


def wrapped(messages: Sequence[dict[str, Any]], slots: Sequence[Slot], tools: bool) -> list[dict[str, Any]]:
    """Messages with private characters around every slot, and behind every text of a tool call."""
    copies = [dict(message) for message in messages]
    for number in reversed(range(len(slots))):
        slot = slots[number]
        if slot.start == slot.stop:
            continue
        text = copies[slot.message][slot.field]
        wrapped = f"{chr(_OPEN + number)}{text[slot.start : slot.stop]}{chr(_CLOSE + number)}"
        names = THINKING_FIELDS if slot.field in THINKING_FIELDS else (slot.field,)
        copies[slot.message] |= dict.fromkeys(names, text[: slot.start] + wrapped + text[slot.stop :])
    if tools:
        for number, (at, which) in enumerate(_calls(messages)):
            call = copies[at]["tool_calls"][which]
            followed = {**call, "function": _followed(call["function"], chr(_CLOSE + len(slots) + number))}
            copies[at]["tool_calls"] = [
                *copies[at]["tool_calls"][:which],
                followed,
                *copies[at]["tool_calls"][which + 1 :],
            ]
    return copies


def _calls(messages: Sequence[dict[str, Any]]) -> list[tuple[int, int]]:
    """The message and the number in it of every tool call."""
    return [(at, which) for at, message in enumerate(messages) for which in range(len(message.get("tool_calls", ())))]


def _followed(value: Any, mark: str) -> Any:
    if isinstance(value, str):
        return value + mark
    if isinstance(value, dict):
        return {key: _followed(each, mark) for key, each in value.items()}
    return [_followed(each, mark) for each in value] if isinstance(value, list) else value


def _parse(marked: str, slots: int, calls: Sequence[tuple[int, int]]) -> Parsed | None:
    """Take a rendering with private characters apart; None where a slot was cut or begins in another."""
    pieces: list[Piece] = []
    call_ends: dict[int, dict[int, list[int]]] = {}
    texts: list[str] = []
    at = begin = read = 0
    slot = -1
    for match in PRIVATE.finditer(marked):
        text = marked[read : match.start()]
        texts.append(text)
        at, read = at + len(text), match.end()
        code = ord(match[0])
        if code >= _CLOSE + slots + len(calls):
            return None  # not one of forebay's
        elif code >= _CLOSE + slots:
            message, which = calls[code - _CLOSE - slots]
            call_ends.setdefault(message, {}).setdefault(which, []).append(at)
        elif (code < _CLOSE and slot >= 0) or (code >= _CLOSE and slot != code - _CLOSE):
            return None
        else:
            pieces.append(Piece(begin, at, slot))
            begin, slot = at, code - _OPEN if code < _CLOSE else -1
    rest = marked[read:]
    pieces.append(Piece(begin, at + len(rest), -1))
    if slot >= 0:
        return None
    return Parsed("".join([*texts, rest]), [each for each in pieces if each.stop > each.start], call_ends)


def locate_slots(
    template: ChatTemplate, stop: str | None, conversation: Conversation, upto: int, text: str
) -> tuple[Stripped, Parsed]:
    """Render with private characters around contents; without them the text must be the same.

    Where a template removes white space around contents, the characters are put inside it, on as few sides as possible:
    white space that is written belongs to its content.
    """
    messages = conversation.messages[:upto]
    slots = slots_of(messages)
    for mark_calls in (True, False):

        def located(sides: Stripped, mark_calls: bool = mark_calls) -> Parsed | None:
            marked = wrapped(messages, narrowed(messages, slots, sides), mark_calls)
            return _parsed_as(template.render(marked, conversation.tools), messages, slots, text, stop)

        if parsed := located(()):
            return (), parsed
        sides = (True, True) * len(slots)
        parsed = located(sides)
        for at in range(len(sides) if parsed else 0):
            fewer = (*sides[:at], False, *sides[at + 1 :])
            if better := located(fewer):
                sides, parsed = fewer, better
        if parsed:
            return sides, parsed
    contents = [messages[slot.message][slot.field].strip() for slot in slots]
    changed = next((content for content in contents if content not in text), contents[0] if contents else "")
    detail = f"the template changes contents, so {excerpt(changed, 0)} cannot be located in its text {ending(text)}"
    raise BadConversation("contents-changed", detail + CORRECT_IT)


def _parsed_as(
    marked: str, messages: Sequence[dict[str, Any]], slots: Sequence[Slot], text: str, stop: str | None
) -> Parsed | None:
    """A marked rendering taken apart; None if it is not `text`, perhaps without the stop token behind it."""
    parsed = _parse(marked, len(slots), _calls(messages))
    if parsed is None or not text.startswith(parsed.text) or text[len(parsed.text) :] not in ("", stop):
        return None
    if text != parsed.text:
        parsed.pieces.append(Piece(len(parsed.text), len(text), -1))
    return Parsed(text, parsed.pieces, parsed.calls)


def excerpt(text: str, at: int) -> str:
    return repr(text[at : at + SHOWN_CHARS // 4]) + ("…" if len(text) > at + SHOWN_CHARS // 4 else "")


def ending(text: str) -> str:
    """The end of a text, where the turns to train on are."""
    return ("…" if len(text) > SHOWN_CHARS else "") + repr(text[-SHOWN_CHARS:])
