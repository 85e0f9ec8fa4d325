"""Take rendered conversations apart: documents in labeled parts.

Nothing is searched for by its text. Contents are wrapped in private characters and rendered again, and where those come
out is where the contents are (`slots.py`); what the template adds to the prompt of inference is generated (`turns.py`).
A turn that later turns write differently becomes a document by itself, as inference sees it.
"""

import re
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any, NamedTuple

from forebay.chat.conversations import BadConversation, Conversation
from forebay.chat.labels import check_complete, label_headers, labeled
from forebay.chat.rendering import ChatTemplate
from forebay.chat.slots import (
    PRIVATE,
    SHOWN_CHARS,
    SLOT_FIELDS,
    Parsed,
    Stripped,
    locate_slots,
    narrowed,
    slot_texts,
    slots_of,
)  # fmt: skip
from forebay.chat.turns import Turn, TurnFinder
from forebay.columns import Array

_CHECKED_BY_TOKEN = ("role", *SLOT_FIELDS)


class Document(NamedTuple):
    """A text to train on, in parts that cover it; `labels` are role, kind, message, and `CONTENT` or `HEADER` if it is.

    A header that is generated is one of a template that writes no generation prompt.
    """

    text: str
    raw: bytes  # the text in UTF-8
    sizes: list[int]  # bytes of each part
    labels: Array  # (parts, 4) uint32
    turns: int  # assistant turns that are generated in it


def _document(parts: Sequence[str], labels: Array, turns: int) -> Document:
    """The document of parts; raises `UnicodeEncodeError` for half of a surrogate pair."""
    text = "".join(parts)
    raw = text.encode()
    sizes = list(map(len, parts if len(raw) == len(text) else [part.encode() for part in parts]))
    return Document(text, raw, sizes, labels, turns)


class Layout(NamedTuple):
    """A document without its contents: texts of the template, and where slots are between them."""

    upto: int  # messages
    stripped: Stripped
    parts: tuple[str, ...]  # empty where a slot is
    slots: tuple[tuple[int, int], ...]  # the number of such a part, and of the slot
    labels: Array
    turns: int

    def fill(self, messages: Sequence[dict[str, Any]]) -> Document:
        """The document with the contents of messages."""
        slots = narrowed(messages, slots_of(messages[: self.upto]), self.stripped)
        parts = list(self.parts)
        for at, number in self.slots:
            message, field, start, stop, _ = slots[number]
            parts[at] = messages[message][field][start:stop]
        return _document(parts, self.labels, self.turns)


@dataclass(frozen=True)
class Dissector:
    """Takes conversations apart with one template.

    `special` matches every control token. `stop` is the stop token for a template that writes none after a turn.
    """

    template: ChatTemplate
    special: re.Pattern[str]
    stop: str | None = None

    def take_apart(self, conversation: Conversation) -> tuple[list[Layout], list[Document]]:
        """The documents of a conversation that ends with an assistant turn, and their layouts.

        Raises `BadConversation`.
        """
        self.check_calls(conversation)
        if any(map(PRIVATE.search, slot_texts(conversation))):
            return self._without_private(conversation)
        layouts: list[Layout] = []
        documents: list[Document] = []
        left = conversation.turns
        while left:  # every turn in the longest rendering that begins with all of it up to its stop token
            layout, document, turns = self._rendering(conversation, left)
            layouts.insert(0, layout)
            documents.insert(0, document)
            left = [at for at in left if at not in turns]
        return layouts, documents

    def check_calls(self, conversation: Conversation) -> None:
        """Reject control tokens in tools, calls and names; those in contents are found by their tokens."""
        fields = [
            value for message in conversation.messages for key, value in message.items() if key not in _CHECKED_BY_TOKEN
        ]
        for text in _all_texts([fields, conversation.tools]) if fields or conversation.tools else ():
            if match := self.special.search(text):
                detail = f"a tool, a call or a name has the text of the control token {match[0]!r}"
                raise BadConversation("control-token", detail)

    def _render(self, conversation: Conversation, upto: int) -> str:
        """The text of the first messages; a stop token that the template does not write is added to the last turn."""
        text = self.template.render(conversation.messages[:upto], conversation.tools)
        if not self.stop or conversation.messages[upto - 1]["role"] != "assistant" or self._ends(text):
            return text
        return text + self.stop

    def _ends(self, text: str) -> bool:
        """Whether a text ends with a control token."""
        ends = [match.end() for match in self.special.finditer(text, max(0, len(text) - SHOWN_CHARS))]
        return bool(ends) and not text[ends[-1] :].strip()

    def _without_private(self, conversation: Conversation) -> tuple[list[Layout], list[Document]]:
        """Take a conversation apart whose contents have private characters, with others instead."""
        messages = [
            {key: PRIVATE.sub("x", value) if key in SLOT_FIELDS else value for key, value in message.items()}
            for message in conversation.messages
        ]
        layouts, _ = self.take_apart(conversation._replace(messages=messages))
        documents = [layout.fill(conversation.messages) for layout in layouts]
        if [document.text for document in documents] != [self._render(conversation, each.upto) for each in layouts]:
            raise BadConversation("private-characters", "it has characters from U+F0000 on that are not in a content")
        return layouts, documents

    def _rendering(self, conversation: Conversation, turns: list[int]) -> tuple[Layout, Document, set[int]]:
        """The document that ends with the last of some turns, and those of them that are generated in it."""
        upto = turns[-1] + 1
        text = self._render(conversation, upto)
        stripped, parsed = locate_slots(self.template, self.stop, conversation, upto, text)
        finder = TurnFinder(self.template, self.special, self.stop)
        generated = [turn for at in turns if (turn := finder.turn(conversation, upto, parsed, at)) is not None]
        numbers = [turn.message for turn in generated]
        borders = self._borders(conversation, upto, parsed, generated)
        parts, labels = labeled(conversation, upto, parsed, generated, borders)
        if not self.template.has_prompt:
            label_headers(parts, labels, generated)
        check_complete(conversation, upto, parsed, generated)
        texts = [text[part.start : part.stop] for part in parts]
        slots = tuple((at, part.slot) for at, part in enumerate(parts) if part.slot >= 0)
        own = tuple(each if part.slot < 0 else "" for each, part in zip(texts, parts, strict=True))
        layout = Layout(upto, stripped, own, slots, labels, len(generated))
        return layout, _document(texts, labels, len(generated)), set(numbers)

    def _borders(self, conversation: Conversation, upto: int, parsed: Parsed, turns: Sequence[Turn]) -> list[int]:
        """Where the text of each message ends; 0 where the template does not render fewer messages as a prefix."""
        ends = {turn.message: turn.end for turn in turns} | {upto - 1: len(parsed.text)}
        for message in range(upto):
            if message not in ends:
                try:
                    before = self.template.render(conversation.messages[: message + 1], conversation.tools)
                except BadConversation:  # such as a system prompt without a question
                    before = ""
                ends[message] = len(before) if parsed.text.startswith(before) else 0
        return [ends[message] for message in range(upto)]


def _all_texts(value: Any) -> list[str]:
    """Every text in nested lists and objects, keys too."""
    texts: list[str] = []
    left = [value]
    while left:
        one = left.pop()
        if isinstance(one, str):
            texts.append(one)
        elif isinstance(one, dict):
            left += [*one.keys(), *one.values()]
        elif isinstance(one, list):
            left += one
    return texts
