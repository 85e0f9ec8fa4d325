"""Labels for the parts of a rendered conversation: role, kind, message, and whether it is a content."""

import re
from collections.abc import Sequence
from typing import Final

import numpy as np

from forebay.chat.conversations import BadConversation, Conversation
from forebay.chat.rendering import CORRECT_IT
from forebay.chat.slots import KIND, THINKING, Parsed, Piece, Slot, ending, excerpt, slots_of
from forebay.chat.turns import Turn
from forebay.columns import Array
from forebay.masks.train_on import ROLES

CONTENT, HEADER = 1, 2
_ROLE: Final = {name: number for number, name in enumerate(ROLES)}
_THINKING_TAG = re.compile("</?think")
_THINKING_END = re.compile(r"</think>\s*")


def labeled(
    conversation: Conversation, upto: int, parsed: Parsed, turns: Sequence[Turn], borders: Sequence[int]
) -> tuple[list[Piece], Array]:
    """The pieces of a text, cut where a turn or a message begins or ends, and their labels."""
    slots = slots_of(conversation.messages[:upto])
    edges = sorted({*borders, *(edge for turn in turns for edge in turn[1:])})
    roles = [_ROLE[message["role"]] for message in conversation.messages]
    parts: list[Piece] = []
    labels: list[tuple[int, int, int, int]] = []
    for piece in parsed.pieces:
        inside = [edge for edge in edges if piece.start < edge < piece.stop] if piece.slot < 0 else []
        inside = sorted({*inside, *_ends_of_thinking(conversation, parsed.text, piece, turns)})
        for start, stop in zip([piece.start, *inside], [*inside, piece.stop], strict=True):
            turn = next((turn for turn in turns if turn.start <= start < turn.end), None)
            parts.append(Piece(start, stop, piece.slot))
            slot = slots[piece.slot] if piece.slot >= 0 else None
            if slot is not None and (turn is None or slot.message == turn.message):
                is_context = turn is None and roles[slot.message] == _ROLE["assistant"]
                kind = KIND["prompt"] if is_context else slot.kind
                labels.append((roles[slot.message], kind, slot.message, CONTENT))
            elif turn is not None:  # a text of the template, or another content that it repeats in the turn
                message = conversation.messages[turn.message]
                kind = _generated_kind(parsed, slots, parts[-1], turn, "tool_calls" in message)
                labels.append((_ROLE["assistant"], kind, turn.message, CONTENT * (slot is not None)))
            else:
                owner = next((at for at, border in enumerate(borders) if border > start), upto - 1)
                labels.append((roles[owner], KIND["header"], owner, 0))
    return parts, np.array(labels, np.uint32).reshape(-1, 4)


def label_headers(parts: Sequence[Piece], labels: Array, turns: Sequence[Turn]) -> None:
    """Label what the template writes in a turn before its first content."""
    for turn in turns:
        inside = [at for at, part in enumerate(parts) if turn.start <= part.start < turn.stop_start]
        for at in inside:
            if labels[at, 3] == CONTENT:
                break
            labels[at, 3] = HEADER


def _ends_of_thinking(conversation: Conversation, text: str, piece: Piece, turns: Sequence[Turn]) -> list[int]:
    """The end of thinking in a template text before tool calls."""
    calling = [turn for turn in turns if "tool_calls" in conversation.messages[turn.message] and piece.slot < 0]
    ends = [match.end() for match in _THINKING_END.finditer(text, piece.start, piece.stop)] if calling else []
    return [end for end in ends if end < piece.stop and any(turn.start < end <= turn.stop_start for turn in calling)]


def _generated_kind(parsed: Parsed, slots: Sequence[Slot], part: Piece, turn: Turn, calls: bool) -> int:
    """The kind of a template text in a generated turn: that of its content."""
    start, stop = part.start, part.stop
    if start >= turn.stop_start:
        return KIND["stop"] if start < turn.stop else KIND["header"]
    if part.slot < 0 and _THINKING_TAG.search(parsed.text, start, stop):
        return THINKING
    inside = [piece for piece in parsed.pieces if piece.slot >= 0 and turn.start <= piece.start < turn.stop]
    own = [piece for piece in inside if slots[piece.slot].message == turn.message]
    before = [slots[piece.slot].kind for piece in own if piece.stop <= start]
    after = [slots[piece.slot].kind for piece in own if piece.start >= stop]
    if after:
        return THINKING if before and before[-1] == THINKING else after[0]
    if calls:
        return KIND["tool_call"]
    if not before and start < turn.contents_stop:
        return KIND["response"]
    return THINKING if before and before[-1] == THINKING else KIND["stop"]


def check_complete(conversation: Conversation, upto: int, parsed: Parsed, turns: Sequence[Turn]) -> None:
    """Reject templates that omit contents, or thinking and calls of a generated turn."""
    messages, generated = conversation.messages[:upto], {turn.message: turn for turn in turns}
    written = {piece.slot for piece in parsed.pieces}
    for number, slot in enumerate(slots_of(messages)):
        message = messages[slot.message]
        if number in written or not message[slot.field][slot.start : slot.stop].strip():
            continue
        shown = f"{excerpt(message[slot.field], slot.start)}, in its text {ending(parsed.text)}"
        if slot.kind != THINKING:
            reason = "contents-changed" if message["role"] == "assistant" else "unknown-role"
            detail = (
                f"the template leaves out message {slot.message} with the role '{message['role']}', {shown}{CORRECT_IT}"
            )
            raise BadConversation(reason, detail)
        if slot.message in generated:
            detail = f"the template leaves out the thinking of message {slot.message}, {shown}; pass thinking='drop'"
            raise BadConversation("thinking-lost", detail)
    for at, turn in generated.items():
        calls = messages[at].get("tool_calls", ())
        written_calls = parsed.calls.get(at, {})
        text = parsed.text[turn.start : turn.stop]
        if any(not (which in written_calls if parsed.calls else call["function"]["name"] in text)
               for which, call in enumerate(calls)):  # fmt: skip
            raise BadConversation("calls-lost", f"the template leaves out a tool call of message {at}: {text!r:.160}")
