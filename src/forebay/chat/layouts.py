"""Layouts by shape: conversations of one shape are filled in without rendering.

Conversations of one *shape* (roles, fields, white space around contents) have one layout, texts of the template with
slots for contents, if the template does nothing with contents but write them: `content_uses.py` proves that from its
code, or does not. Only then is a layout computed once and filled in. A template that does more, and a content with a
text that it looks for, is always taken apart (`dissect.py`).
"""

import json
from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import Any

from forebay.chat.conversations import THINKING_FIELDS, BadConversation, Conversation
from forebay.chat.dissect import Dissector, Document, Layout
from forebay.chat.rendering import ContentUses
from forebay.chat.slots import MARK, SLOT_FIELDS

MOST_LAYOUTS = 4096
MOST_SHAPE = 1 << 14  # characters; longer ones are mostly tools, and occur once
WHITE = MARK * 2  # white space, where a template neither strips nor escapes it
Shape = tuple[str, ...]


@dataclass
class Layouts:
    """The documents of conversations, from the layouts of their shapes where those are known."""

    dissector: Dissector
    known: dict[Shape, list[Layout] | None] = field(default_factory=dict)  # None: a content is written as JSON

    def documents(self, conversation: Conversation) -> list[Document]:
        """The documents of a conversation that ends with an assistant turn.

        Raises `BadConversation`.
        """
        uses = self.dissector.template.uses
        shape = None if uses is None else shape_of(conversation, uses)
        layouts = self.known.get(shape) if shape else None
        if layouts is not None:
            return [layout.fill(conversation.messages) for layout in layouts]
        own_layouts, documents = self.dissector.take_apart(conversation)
        is_new = shape and shape not in self.known and sum(map(len, shape)) <= MOST_SHAPE
        if shape and uses and is_new and len(self.known) < MOST_LAYOUTS:
            fits = not uses.escapes or self._writes_quotes(own_layouts, conversation)
            self.known[shape] = own_layouts if fits else None
        return documents

    def _writes_quotes(self, layouts: Sequence[Layout], conversation: Conversation) -> bool:
        """Whether contents with a quotation mark fit the layouts: they do not where a content is written as JSON."""
        quoted = [
            {key: _quoted(text) if key in SLOT_FIELDS else text for key, text in each.items()}
            for each in conversation.messages
        ]
        try:
            _, documents = self.dissector.take_apart(conversation._replace(messages=quoted))
        except BadConversation:
            return False
        filled, taken_apart = (
            [(document.text, document.sizes, document.labels.tolist()) for document in each]
            for each in ([layout.fill(quoted) for layout in layouts], documents)
        )
        return filled == taken_apart


def shape_of(conversation: Conversation, uses: ContentUses) -> Shape | None:
    """What decides a layout: a conversation without its contents. None where a content may decide as well."""
    parts: list[str] = []
    for message in conversation.messages:
        content = message["content"]
        thinks = message["role"] == "assistant" and "</think>" in content
        if thinks or uses.strips or uses.escapes or not content:
            frame = _frame(content, uses.strips, thinks)
        else:
            frame = WHITE if content.isspace() else MARK
        parts += (message["role"], frame)
        for text in uses.looked_for:
            if text in content and content.count(text) != frame.count(text):
                return None
        if len(message) > 2:
            if any(text in message.get(THINKING_FIELDS[0], "") for text in uses.looked_for):
                return None
            parts += _other_fields(message, uses.strips)
    if conversation.untrained or conversation.tools:
        parts.append(json.dumps([sorted(conversation.untrained), conversation.tools]))
    return tuple(parts)


def _other_fields(message: dict[str, Any], strips: bool) -> list[str]:
    parts = []
    for key, value in message.items():
        if key in THINKING_FIELDS:
            parts += [key, _frame(value, strips, False)]
        elif key not in ("role", "content"):
            parts += [key, json.dumps(value)]
    return parts


def _frame(text: str, strips: bool, thinks: bool) -> str:
    """A text with one character for what may be a slot: all of it, or its white space and the tags of thinking stay."""
    if thinks:
        return "</think>".join(
            "<think>".join(_frame(b, True, False) for b in a.split("<think>")) for a in text.split("</think>")
        )
    inside = text.strip()
    if not inside:
        return text
    if not strips:
        return MARK
    start = text.index(inside)
    return f"{text[:start]}{MARK}{text[start + len(inside) :]}"


def _quoted(text: str) -> str:
    """A text with a quotation mark behind its last character that is not white space."""
    end = len(text.rstrip())
    return f'{text[:end]}"{text[end:]}' if end else text
