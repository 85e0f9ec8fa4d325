"""Find the parts of a rendered conversation: which characters are header, prompt, response, thinking, tool call, stop.

Nothing is searched for by its text. Contents are wrapped in private characters and rendered again, and where those come
out is where the contents are. The generated part of a turn is what the template adds to the prompt of inference:

    prompt   render(messages[:k], add_generation_prompt=True)    <|im_start|>user⏎Hi<|im_end|>⏎<|im_start|>assistant⏎
    whole    render(messages[:k + 1])                            the same, and Hello<|im_end|>⏎
                                                                               └ generated ─┘

`whole` must begin with `prompt`, and the text of the conversation with `whole` up to its stop token. Where the latter
fails, the template changes history, and the turn becomes a document by itself, as inference sees it.

Conversations of one *shape* (roles, fields, white space around contents) have one layout, texts of the template with
slots for contents, if the template does nothing with contents but write them: `content_uses.py` proves that from its
code, or does not. Only then is a layout found once and filled in without rendering, so nothing is guessed for the
others. A template that does more, and a content with a text that it looks for, is always taken apart. That every 32nd
conversation is rendered all the same, and compared, guards against mistakes in the proof, not in place of it.
"""

import json
import re
from collections.abc import Iterable, Sequence
from dataclasses import dataclass, field, replace
from typing import Any, Final, NamedTuple

import numpy as np

from forebay.chat.content_uses import ContentUses
from forebay.chat.conversations import THINKING_FIELDS, BadConversation, Conversation
from forebay.chat.template import GENERATION_CLOSE, GENERATION_OPEN, ChatTemplate
from forebay.columns import Array
from forebay.errors import TemplateUnusable
from forebay.masks.train_on import KINDS, ROLES

MOST_LAYOUTS = 4096
MOST_SHAPE = 1 << 14  # characters; longer ones are mostly tools, and occur once
RENDERED_EVERY = 32  # every 32nd conversation of a known shape is rendered as well, and compared,
TAKEN_APART_EVERY = 1024  # and every 1024th is taken apart
SHOWN_CHARS = 160
_THINKING_TAG = re.compile("</?think")
_THINKING_END = re.compile(r"</think>\s*")
_OPEN, _CLOSE = 0xF0000, 0xF8000  # the private characters before and after slot n
_PRIVATE = re.compile("[\U000f0000-\U0010ffff]")
_KIND: Final = {name: number for number, name in enumerate(KINDS)}
_ROLE: Final = {name: number for number, name in enumerate(ROLES)}
_THINKING = _KIND["thinking"]
# Whether a template removes the white space before the first slot, after it, before the next; empty if it removes none.
Stripped = tuple[bool, ...]


class Slot(NamedTuple):
    """A text of a conversation: characters `start` to `stop` of a field of a message."""

    message: int
    field: str
    start: int
    stop: int
    kind: int


class Turn(NamedTuple):
    """A generated turn in a text: from the end of the prompt to the end of the stop token; `end` ends its message."""

    message: int
    start: int
    contents_stop: int  # of its last content or call, or where a content would end
    stop_start: int
    stop: int
    end: int


class _Piece(NamedTuple):
    """Characters of a rendered text: of the template (`slot` is -1), or of a slot."""

    start: int
    stop: int
    slot: int


@dataclass(frozen=True, slots=True)
class _Parsed:
    """A rendering with private characters, taken apart: its pieces, and where they were without being slots."""

    text: str
    pieces: list[_Piece]
    generation: list[tuple[int, int]]
    calls: dict[int, list[tuple[int, int]]]  # message -> each call that is written, and where it ends or a bit before


class Document(NamedTuple):
    """A text to train on, in parts that cover it; `labels` are role, kind, message, and 1 for a content, per part."""

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


class _Layout(NamedTuple):
    """A document without its contents: texts of the template, and where slots are between them."""

    upto: int  # messages
    stripped: Stripped
    parts: tuple[str, ...]  # empty where a slot is
    places: tuple[tuple[int, int], ...]  # the number of such a part, and of the slot
    labels: Array
    turns: int

    def filled(self, texts: Sequence[str]) -> Document:
        parts = list(self.parts)
        for at, slot in self.places:
            parts[at] = texts[slot]
        return _document(parts, self.labels, self.turns)


@dataclass
class Layouts:
    """Takes conversations apart, and remembers the layouts of their shapes.

    `special` matches every control token. `stop` is the stop token for a template that writes none after a turn.
    """

    template: ChatTemplate
    special: re.Pattern[str]
    stop: str | None = None
    split_history: bool = True
    check_generation: bool = True
    _known: dict[str, list[_Layout]] = field(default_factory=dict)
    _escaping: set[str] = field(default_factory=set)  # shapes that have contents as JSON
    _plain: dict[tuple[str, ...], list[_Layout]] = field(default_factory=dict)  # those of plain messages

    def documents(self, conversation: Conversation, number: int) -> list[Document]:
        """Return the documents of a conversation that ends with an assistant turn; `number` is that of the sample.

        Raises `BadConversation`, and `TemplateUnusable` where two ways to find the generated text disagree.
        """
        self._check_calls(conversation)
        shape = _shape(conversation, self.template.uses)
        shape = "" if shape in self._escaping else shape
        known = self._known.get(shape) if shape else None
        if known is not None and (number + 1) % TAKEN_APART_EVERY:
            return self._compared(_filled(known, conversation), known, conversation, number)
        if any(map(_PRIVATE.search, _slot_texts(conversation))):
            return self._without_private(conversation)
        text = self._render(conversation, len(conversation.messages))
        layouts, found = self._taken_apart(conversation, text)
        if known is not None and not _same(found, _filled(known, conversation)):
            raise self._depends_on_contents()
        if known is None and 0 < len(shape) <= MOST_SHAPE and len(self._known) + len(self._escaping) < MOST_LAYOUTS:
            if self.template.uses and self.template.uses.escapes and not self._writes_quotes(layouts, conversation):
                self._escaping.add(shape)
                return found
            self._known[shape] = layouts
            plain = all(len(message) == len(_PLAIN) for message in conversation.messages)
            if plain and not conversation.tools and not conversation.untrained:
                roles, contents = zip(*((each["role"], each["content"]) for each in conversation.messages), strict=True)
                if (key := self._plain_key(roles, contents)) is not None:
                    self._plain[key] = layouts
        return found

    def _writes_quotes(self, layouts: Sequence[_Layout], conversation: Conversation) -> bool:
        """Whether contents with a quotation mark fit the layouts: they would not where a content is written as JSON."""
        quoted = [
            {key: _quoted(text) if key in _SLOTS else text for key, text in each.items()}
            for each in conversation.messages
        ]
        altered = replace(conversation, messages=quoted)
        try:
            _, found = self._taken_apart(altered, self._render(altered, len(quoted)))
        except BadConversation:
            return False
        return _same(found, _filled(layouts, altered))

    def plain_documents(self, roles: tuple[str, ...], contents: list[str], number: int) -> list[Document] | None:
        """What `documents` returns for messages of nothing but a role and a content, if their layout is known."""
        key = self._plain_key(roles, contents) if (number + 1) % TAKEN_APART_EVERY else None
        known = self._plain.get(key) if key is not None else None
        if known is None:
            return None
        found = [_filled_plain(layout, contents) for layout in known]
        if number % RENDERED_EVERY:
            return found
        messages = [{"role": role, "content": content} for role, content in zip(roles, contents, strict=True)]
        return self._compared(found, known, Conversation(messages), number)

    def _plain_key(self, roles: tuple[str, ...], contents: Sequence[str]) -> tuple[str, ...] | None:
        """What decides the layout of plain messages, as `_shape` has it; None if a content may not be one slot."""
        uses = self.template.uses
        if uses is None or not all(contents) or any(map(str.isspace, contents)):
            return None
        joined = "\n".join(contents)
        if "</think>" in joined:
            return None
        for text in uses.looked_for:
            if text in joined:
                return None
        return (*roles, *(_frame(content, True, False) for content in contents)) if uses.strips else roles

    def _compared(
        self, found: list[Document], known: Sequence[_Layout], conversation: Conversation, number: int
    ) -> list[Document]:
        """Documents that were filled in; some of them are compared with what the template writes."""
        if not number % RENDERED_EVERY:
            texts = [self._render(conversation, layout.upto) for layout in known]
            if texts != [document.text for document in found]:
                self._check_texts(_slot_texts(conversation), "content")  # at its end, it would be taken for a stop
                raise self._depends_on_contents()
        return found

    def _depends_on_contents(self) -> TemplateUnusable:
        return TemplateUnusable(self.template.source.name, "where it writes a content depends on that content")

    def _check_calls(self, conversation: Conversation) -> None:
        """Refuse control tokens in tools, calls and names; those in contents are found by their tokens."""
        beside = [
            value for message in conversation.messages for key, value in message.items() if key not in _CHECKED_BY_TOKEN
        ]
        if beside or conversation.tools:
            self._check_texts(_all_texts([beside, conversation.tools]), "tool, a call or a name")

    def _check_texts(self, texts: Iterable[str], what: str) -> None:
        for text in texts:
            if found := self.special.search(text):
                raise BadConversation("control-token", f"a {what} has the text of the control token {found[0]!r}")

    def _render(self, conversation: Conversation, upto: int) -> str:
        """The text of the first messages; a stop token that the template does not write is added to the last turn."""
        text = self.template.render(conversation.messages[:upto], conversation.tools)
        if not self.stop or conversation.messages[upto - 1]["role"] != "assistant" or self._ends(text):
            return text
        return text + self.stop

    def _ends(self, text: str) -> bool:
        """Whether a text ends with a control token."""
        ends = [found.end() for found in self.special.finditer(text, max(0, len(text) - SHOWN_CHARS))]
        return bool(ends) and not text[ends[-1] :].strip()

    def _without_private(self, conversation: Conversation) -> list[Document]:
        """Take a conversation apart whose contents have the private characters of this module, with others instead."""
        messages = [
            {key: _PRIVATE.sub("x", value) if key in _SLOTS else value for key, value in message.items()}
            for message in conversation.messages
        ]
        plain = replace(conversation, messages=messages)
        layouts, _ = self._taken_apart(plain, self._render(plain, len(messages)))
        found = _filled(layouts, conversation)
        texts = [self._render(conversation, layout.upto) for layout in layouts]
        if [document.text for document in found] != texts:
            raise BadConversation("private-characters", "it has characters from U+F0000 on that are not in a content")
        return found

    def _taken_apart(self, conversation: Conversation, text: str) -> tuple[list[_Layout], list[Document]]:
        """Every turn in the longest rendering that begins with all of it up to its stop token."""
        left = conversation.turns
        layouts: list[_Layout] = []
        documents: list[Document] = []
        while left:
            upto = left[-1] + 1
            whole = self._render(conversation, upto) if documents else text
            stripped, parsed = self._parsed(conversation, upto, whole)
            turns = [turn for at in left if (turn := self._turn(conversation, upto, parsed, at)) is not None]
            if self.template.has_generation and self.check_generation:
                self._compare_blocks(parsed, turns, [turn.message for turn in turns] == conversation.answers(upto))
            parts, labels = _labelled(
                conversation, upto, parsed, turns, self._borders(conversation, upto, parsed, turns)
            )
            _check_complete(conversation, upto, parsed, turns)
            texts = [whole[part.start : part.stop] for part in parts]
            places = tuple((at, part.slot) for at, part in enumerate(parts) if part.slot >= 0)
            own = tuple(text if part.slot < 0 else "" for text, part in zip(texts, parts, strict=True))
            layouts.insert(0, _Layout(upto, stripped, own, places, labels, len(turns)))
            documents.insert(0, _document(texts, labels, len(turns)))
            left = [at for at in left if at not in {turn.message for turn in turns}]
        if len(documents) > 1 and not self.split_history:
            raise BadConversation(
                "history-changes", "the template writes earlier turns differently in later ones; pass history='split'"
            )
        return layouts, documents

    def _parsed(self, conversation: Conversation, upto: int, text: str) -> tuple[Stripped, _Parsed]:
        """Render with private characters around contents: only they may be what differs from the text.

        Where a template removes white space beside contents, those characters are put within it, on as few sides as
        possible: white space that is written belongs to its content.
        """
        messages = conversation.messages[:upto]
        slots = _slots(messages)
        for tools in (True, False):
            if parsed := self._located(conversation, messages, slots, tools, text):
                return (), parsed
            sides = (True, True) * len(slots)
            parsed = self._located(conversation, messages, _narrowed(messages, slots, sides), tools, text)
            for at in range(len(sides) if parsed else 0):
                fewer = (*sides[:at], False, *sides[at + 1 :])
                if found := self._located(conversation, messages, _narrowed(messages, slots, fewer), tools, text):
                    sides, parsed = fewer, found
            if parsed:
                return sides, parsed
        contents = [messages[slot.message][slot.field].strip() for slot in slots]
        changed = next((content for content in contents if content not in text), contents[0] if contents else "")
        raise BadConversation(
            "contents-changed",
            f"the template changes contents, so {_excerpt(changed, 0)} cannot be located in its text {_ending(text)}",
        )

    def _located(
        self, conversation: Conversation, messages: list[dict[str, Any]], slots: Sequence[Slot], tools: bool, text: str
    ) -> _Parsed | None:
        """Where the slots are in a text; None if it is not what the template writes with characters around them."""
        marked = self.template.render(_wrapped(messages, slots, tools), conversation.tools, marked=True)
        parsed = _parse(marked, len(slots), _calls(messages))
        if parsed is None or not text.startswith(parsed.text) or text[len(parsed.text) :] not in ("", self.stop):
            return None
        if text != parsed.text:
            parsed.pieces.append(_Piece(len(parsed.text), len(text), -1))
        return _Parsed(text, parsed.pieces, parsed.generation, parsed.calls)

    def _turn(self, conversation: Conversation, upto: int, parsed: _Parsed, at: int) -> Turn | None:
        """Where the generated part of message `at` is; None if the text has it in another form, as history."""
        text, messages, tools = parsed.text, conversation.messages, conversation.tools
        prompt = self.template.render(messages[:at], tools, prompt=True)
        is_last = at + 1 == upto
        whole = text if is_last else self.template.render(messages[: at + 1], tools)
        if not whole.startswith(prompt):
            from_here = first_difference(whole, prompt)
            raise BadConversation(
                "not-a-prefix",
                f"the template does not write its generation prompt before message {at}: a turn has "
                f"{_excerpt(whole, from_here)} where inference begins with {_excerpt(prompt, from_here)}",
            )
        if not text.startswith(prompt):
            return None
        slots = _slots(messages[:upto])
        own = [piece for piece in parsed.pieces if piece.slot >= 0 and slots[piece.slot].message == at]
        last = max([len(prompt), *(end for _, end in parsed.calls.get(at, ())), *(piece.stop for piece in own)])
        if "tool_calls" not in messages[at] and not any(slots[piece.slot].field == "content" for piece in own):
            last = max(last, self._end_of_nothing(conversation, whole, at))
        stop = self._stop(conversation, whole, last, at)
        if stop is None and self.stop and text.startswith(whole) and (next_ := self.special.match(text, len(whole))):
            stop = next_.span()  # the next turn begins with what ends this one
        if stop is None and text.startswith(whole):
            shown = _excerpt(whole, len(prompt))
            raise BadConversation("no-stop", f"no control token ends message {at}: {shown}; name one with stop='…'")
        if stop is None or not text.startswith(whole[: stop[1]]):
            return None
        end = len(whole) if text.startswith(whole) else stop[1]
        if end == stop[1]:  # line breaks after the stop token belong to the turn
            end += min(_spaces(text, end), _spaces(whole, end))
        return Turn(at, len(prompt), last, *stop, max(end, stop[1]))

    def _stop(self, conversation: Conversation, whole: str, last: int, at: int) -> tuple[int, int] | None:
        """What ends a turn whose last content ends at `last`: a control token, or several.

        Of several, those count that stay when the conversation continues, up to the tokenizer's `eos_token`.
        """
        found = list(self.special.finditer(whole, last))
        if len(found) < 2:
            return found[0].span() if found else None
        if "tool_calls" in conversation.messages[at]:
            return self._stop_after_calls(conversation, found, at).span()
        more = self._rendered_with(conversation, at + 1, {"role": "user", "content": chr(_OPEN)})
        kept = first_difference(whole, more) if more else len(whole)
        staying = [each for each in found if each.end() <= kept] or found
        ends = next((each for each in staying if each[0] == self.template.eos), staying[-1])
        return found[0].start(), ends.end()

    def _end_of_nothing(self, conversation: Conversation, whole: str, at: int) -> int:
        """Where the content of a turn without one would end: what follows one is what ends the turn."""
        mark = chr(_OPEN)
        text = self._rendered_with(conversation, at, {**conversation.messages[at], "content": mark})
        after = text.rpartition(mark)[2] if mark in text else ""
        return len(whole) - len(after) if after and whole.endswith(after) else 0

    def _rendered_with(self, conversation: Conversation, upto: int, message: dict[str, Any]) -> str:
        """The text of the first messages and another one; empty where the template refuses it."""
        try:
            return self.template.render([*conversation.messages[:upto], message], conversation.tools)
        except BadConversation:
            return ""

    def _stop_after_calls(self, conversation: Conversation, found: list[re.Match[str]], at: int) -> re.Match[str]:
        """The control token that ends a turn with tool calls, within which a template may write others.

        It is the one that ends a turn without calls, or else the last one.
        """
        mark = chr(_OPEN)
        text = self._rendered_with(conversation, at, {"role": "assistant", "content": mark})
        usual = self.special.search(text, text.index(mark)) if mark in text else None
        return next((each for each in found if usual and each[0] == usual[0]), found[-1])

    def _borders(self, conversation: Conversation, upto: int, parsed: _Parsed, turns: Sequence[Turn]) -> list[int]:
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

    def _compare_blocks(self, parsed: _Parsed, turns: Sequence[Turn], all_turns: bool) -> None:
        """Compare generated turns with `generation` blocks, which may have the line breaks behind a turn as well.

        Where a text has turns as history too, blocks around those say nothing about the others.
        """
        blocks, required, allowed = (np.zeros(len(parsed.text), np.bool_) for _ in range(3))
        for start, stop in parsed.generation:
            blocks[start:stop] = True
        for turn in turns:
            required[turn.start : turn.stop] = True
            allowed[turn.start : min(turn.end, turn.stop + _spaces(parsed.text, turn.stop))] = True
        wrong = (required & ~blocks) | (blocks & ~allowed & all_turns)
        if wrong.any():
            at = int(np.flatnonzero(wrong)[0])
            raise TemplateUnusable(
                self.template.source.name,
                f"its generation blocks, {_bracketed(parsed.text, blocks, at)}, are not what inference generates, "
                f"{_bracketed(parsed.text, required, at)}; correct the blocks, or pass generation='ignore'",
            )


def _filled(layouts: Sequence[_Layout], conversation: Conversation) -> list[Document]:
    """The documents of layouts with the contents of a conversation."""
    messages = conversation.messages
    found = []
    for layout in layouts:
        slots = _narrowed(messages, _slots(messages[: layout.upto]), layout.stripped)
        found.append(layout.filled([messages[slot.message][slot.field][slot.start : slot.stop] for slot in slots]))
    return found


def _filled_plain(layout: _Layout, contents: Sequence[str]) -> Document:
    """The document of a layout with the contents of plain messages: each message is one slot."""
    texts = contents
    if sides := layout.stripped:
        begun = [text.lstrip() if before else text for text, before in zip(contents, sides[::2], strict=False)]
        texts = [text.rstrip() if after else text for text, after in zip(begun, sides[1::2], strict=True)]
    return layout.filled(texts)


def _shape(conversation: Conversation, uses: ContentUses | None) -> str:
    """What decides a layout: a conversation without its contents. Empty where a content may decide as well."""
    if uses is None:
        return ""
    parts: list[Any] = [sorted(conversation.untrained)] if conversation.untrained else []
    for message in conversation.messages:
        content = message["content"]
        frame = _frame(content, uses.strips, message["role"] == "assistant")
        parts += (message["role"], frame)
        if any(text in content and content.count(text) != frame.count(text) for text in uses.looked_for):
            return ""
        if len(message) > 2:
            for key, value in message.items():
                if key in THINKING_FIELDS:
                    if any(text in value for text in uses.looked_for):
                        return ""
                    parts += (key, _frame(value, uses.strips, False))
                elif key not in _PLAIN:
                    parts += (key, value if isinstance(value, str) else json.dumps(value))
    return repr(parts) + (json.dumps(conversation.tools) if conversation.tools else "")


def _frame(text: str, strips: bool, thinks: bool) -> str:
    """A text with one character for what may be a slot: all of it, or its white space and the tags of thinking stay."""
    if thinks and "</think>" in text:
        return "</think>".join(
            "<think>".join(_frame(b, True, False) for b in a.split("<think>")) for a in text.split("</think>")
        )
    inside = text.strip()
    if not inside:
        return text
    if not strips:
        return _SLOT
    start = text.index(inside)
    return f"{text[:start]}{_SLOT}{text[start + len(inside) :]}"


def _quoted(text: str) -> str:
    """A text with a quotation mark behind its last character that is not white space."""
    end = len(text.rstrip())
    return f'{text[:end]}"{text[end:]}' if end else text


_SLOT = chr(_OPEN)
_PLAIN = ("role", "content")
_SLOTS = ("content", *THINKING_FIELDS)
_CHECKED_BY_TOKEN = ("role", *_SLOTS)


def _slot_texts(conversation: Conversation) -> list[str]:
    """Every text of a conversation that may be a slot."""
    return [text for each in conversation.messages for key, text in each.items() if key in _SLOTS]


def _all_texts(value: Any) -> list[str]:
    """Every text in nested lists and objects, keys too."""
    found: list[str] = []
    left = [value]
    while left:
        one = left.pop()
        if isinstance(one, str):
            found.append(one)
        elif isinstance(one, dict):
            left += [*one.keys(), *one.values()]
        elif isinstance(one, list):
            left += one
    return found


def _slots(messages: Sequence[dict[str, Any]]) -> list[Slot]:
    """The contents of messages; thinking within a content is a slot by itself."""
    found: list[Slot] = []
    for at, message in enumerate(messages):
        content, role = message["content"], message["role"]
        if thinking := message.get(THINKING_FIELDS[0]):
            found.append(Slot(at, THINKING_FIELDS[0], 0, len(thinking), _THINKING))
        end = content.find("</think>") if role == "assistant" else -1
        if end >= 0:
            begin = content.find("<think>")
            begin = begin + len("<think>") if 0 <= begin < end and not content[:begin].strip() else 0
            found.append(Slot(at, "content", begin, end, _THINKING))
            found.append(Slot(at, "content", end + len("</think>"), len(content), _KIND["response"]))
        elif content:
            kind = {"assistant": "response", "tool": "tool_result"}.get(role, "prompt")
            found.append(Slot(at, "content", 0, len(content), _KIND[kind]))
    return found


def _narrowed(messages: Sequence[dict[str, Any]], slots: list[Slot], stripped: Stripped) -> list[Slot]:
    """Slots without the white space before and after them that the template removes."""
    if not stripped:
        return slots
    found = []
    for slot, before, after in zip(slots, stripped[::2], stripped[1::2], strict=True):
        text = messages[slot.message][slot.field][slot.start : slot.stop]
        start = slot.start + (len(text) - len(text.lstrip()) if before else 0)
        found.append(slot._replace(start=start, stop=max(start, slot.start + len(text.rstrip() if after else text))))
    return found


def _wrapped(messages: Sequence[dict[str, Any]], slots: Sequence[Slot], tools: bool) -> list[dict[str, Any]]:
    """Messages with private characters around every slot, and behind every text of a tool call."""
    made = [dict(message) for message in messages]
    for number in reversed(range(len(slots))):
        slot = slots[number]
        if slot.start == slot.stop:
            continue
        text = made[slot.message][slot.field]
        wrapped = f"{chr(_OPEN + number)}{text[slot.start : slot.stop]}{chr(_CLOSE + number)}"
        names = THINKING_FIELDS if slot.field in THINKING_FIELDS else (slot.field,)
        made[slot.message] |= dict.fromkeys(names, text[: slot.start] + wrapped + text[slot.stop :])
    if tools:
        for number, (at, which) in enumerate(_calls(messages)):
            call = made[at]["tool_calls"][which]
            marked = {**call, "function": _followed(call["function"], chr(_CLOSE + len(slots) + number))}
            made[at]["tool_calls"] = [*made[at]["tool_calls"][:which], marked, *made[at]["tool_calls"][which + 1 :]]
    return made


def _calls(messages: Sequence[dict[str, Any]]) -> list[tuple[int, int]]:
    """The message and the number in it of every tool call."""
    return [(at, which) for at, message in enumerate(messages) for which in range(len(message.get("tool_calls", ())))]


def _followed(value: Any, mark: str) -> Any:
    if isinstance(value, str):
        return value + mark
    if isinstance(value, dict):
        return {key: _followed(each, mark) for key, each in value.items()}
    return [_followed(each, mark) for each in value] if isinstance(value, list) else value


def _parse(marked: str, slots: int, calls: Sequence[tuple[int, int]]) -> _Parsed | None:
    """Take a rendering with private characters apart; None where a slot was cut or begins in another."""
    pieces: list[_Piece] = []
    blocks: list[tuple[int, int]] = []
    ends: dict[tuple[int, int], int] = {}
    kept: list[str] = []
    opened: list[int] = []
    at = begin = read = 0
    slot = -1
    for found in _PRIVATE.finditer(marked):
        text = marked[read : found.start()]
        kept.append(text)
        at, read = at + len(text), found.end()
        code = ord(found[0])
        if found[0] == GENERATION_OPEN:
            opened.append(at)
        elif found[0] == GENERATION_CLOSE and opened:
            blocks.append((opened.pop(), at))
        elif code >= _CLOSE + slots + len(calls):
            return None  # not one of forebay's
        elif code >= _CLOSE + slots:
            ends[calls[code - _CLOSE - slots]] = at
        elif (code < _CLOSE and slot >= 0) or (code >= _CLOSE and slot != code - _CLOSE):
            return None
        else:
            pieces.append(_Piece(begin, at, slot))
            begin, slot = at, code - _OPEN if code < _CLOSE else -1
    rest = marked[read:]
    pieces.append(_Piece(begin, at + len(rest), -1))
    if slot >= 0:
        return None
    written: dict[int, list[tuple[int, int]]] = {}
    for (message, which), end in ends.items():
        written.setdefault(message, []).append((which, end))
    return _Parsed("".join([*kept, rest]), [each for each in pieces if each.stop > each.start], blocks, written)


def _labelled(
    conversation: Conversation, upto: int, parsed: _Parsed, turns: Sequence[Turn], borders: Sequence[int]
) -> tuple[list[_Piece], Array]:
    """The pieces of a text, cut where a turn or a message begins or ends, and their labels."""
    slots = _slots(conversation.messages[:upto])
    edges = sorted({*borders, *(edge for turn in turns for edge in turn[1:])})
    roles = [_ROLE[message["role"]] for message in conversation.messages]
    parts: list[_Piece] = []
    labels: list[tuple[int, int, int, int]] = []
    for piece in parsed.pieces:
        inside = [edge for edge in edges if piece.start < edge < piece.stop] if piece.slot < 0 else []
        inside = sorted({*inside, *_ends_of_thinking(conversation, parsed.text, piece, turns)})
        for start, stop in zip([piece.start, *inside], [*inside, piece.stop], strict=True):
            turn = next((turn for turn in turns if turn.start <= start < turn.end), None)
            parts.append(_Piece(start, stop, piece.slot))
            slot = slots[piece.slot] if piece.slot >= 0 else None
            if slot is not None and (turn is None or slot.message == turn.message):
                is_context = turn is None and roles[slot.message] == _ROLE["assistant"]
                kind = _KIND["prompt"] if is_context else slot.kind
                labels.append((roles[slot.message], kind, slot.message, 1))
            elif turn is not None:  # a text of the template, or another content that it repeats in the turn
                message = conversation.messages[turn.message]
                kind = _generated_kind(parsed, slots, parts[-1], turn, "tool_calls" in message)
                labels.append((_ROLE["assistant"], kind, turn.message, int(slot is not None)))
            else:
                owner = next((at for at, border in enumerate(borders) if border > start), upto - 1)
                labels.append((roles[owner], _KIND["header"], owner, 0))
    return parts, np.array(labels, np.uint32).reshape(-1, 4)


def _ends_of_thinking(conversation: Conversation, text: str, piece: _Piece, turns: Sequence[Turn]) -> list[int]:
    """Where thinking ends in a text of the template that has tool calls behind it."""
    calling = [turn for turn in turns if "tool_calls" in conversation.messages[turn.message] and piece.slot < 0]
    ends = [found.end() for found in _THINKING_END.finditer(text, piece.start, piece.stop)] if calling else []
    return [end for end in ends if end < piece.stop and any(turn.start < end <= turn.stop_start for turn in calling)]


def _generated_kind(parsed: _Parsed, slots: Sequence[Slot], part: _Piece, turn: Turn, calls: bool) -> int:
    """The kind of a text of the template in a generated turn: that of the content that it belongs to."""
    start, stop = part.start, part.stop
    if start >= turn.stop_start:
        return _KIND["stop"] if start < turn.stop else _KIND["header"]
    if part.slot < 0 and _THINKING_TAG.search(parsed.text, start, stop):
        return _THINKING
    inside = [piece for piece in parsed.pieces if piece.slot >= 0 and turn.start <= piece.start < turn.stop]
    beside = [piece for piece in inside if slots[piece.slot].message == turn.message]
    before = [slots[piece.slot].kind for piece in beside if piece.stop <= start]
    after = [slots[piece.slot].kind for piece in beside if piece.start >= stop]
    if after:
        return _THINKING if before and before[-1] == _THINKING else after[0]
    if calls:
        return _KIND["tool_call"]
    if not before and start < turn.contents_stop:
        return _KIND["response"]
    return _THINKING if before and before[-1] == _THINKING else _KIND["stop"]


def _check_complete(conversation: Conversation, upto: int, parsed: _Parsed, turns: Sequence[Turn]) -> None:
    """Refuse contents that the template leaves out, and thinking and calls that it leaves out of a generated turn."""
    messages, generated = conversation.messages[:upto], {turn.message: turn for turn in turns}
    written = {piece.slot for piece in parsed.pieces}
    for number, slot in enumerate(_slots(messages)):
        message = messages[slot.message]
        if number in written or not message[slot.field][slot.start : slot.stop].strip():
            continue
        shown = f"{_excerpt(message[slot.field], slot.start)}, in its text {_ending(parsed.text)}"
        if slot.kind != _THINKING:
            reason = "contents-changed" if message["role"] == "assistant" else "unknown-role"
            detail = f"the template leaves out message {slot.message} with the role '{message['role']}', {shown}"
            raise BadConversation(reason, detail)
        if slot.message in generated:
            detail = f"the template leaves out the thinking of message {slot.message}, {shown}; pass thinking='drop'"
            raise BadConversation("thinking-lost", detail)
    for at, turn in generated.items():
        calls = messages[at].get("tool_calls", ())
        found = {which for which, _ in parsed.calls.get(at, ())}
        text = parsed.text[turn.start : turn.stop]
        if any(not (which in found if parsed.calls else call["function"]["name"] in text)
               for which, call in enumerate(calls)):  # fmt: skip
            raise BadConversation("calls-lost", f"the template leaves out a tool call of message {at}: {text!r:.160}")


def _same(one: Sequence[Document], other: Sequence[Document]) -> bool:
    return len(one) == len(other) and all(
        mine.text == theirs.text and mine.sizes == theirs.sizes and np.array_equal(mine.labels, theirs.labels)
        for mine, theirs in zip(one, other, strict=True)
    )


def _spaces(text: str, start: int) -> int:
    return len(text[start:]) - len(text[start:].lstrip())


def first_difference(one: str, other: str) -> int:
    return next((at for at, (a, b) in enumerate(zip(one, other, strict=False)) if a != b), min(len(one), len(other)))


def _excerpt(text: str, at: int) -> str:
    return repr(text[at : at + SHOWN_CHARS // 4]) + ("…" if len(text) > at + SHOWN_CHARS // 4 else "")


def _ending(text: str) -> str:
    """The end of a text, where the turns to train on are."""
    return ("…" if len(text) > SHOWN_CHARS else "") + repr(text[-SHOWN_CHARS:])


def _bracketed(text: str, mask: Array, at: int) -> str:
    """A text around a place, with ⟦ ⟧ around the characters of a mask."""
    first, last = max(0, at - SHOWN_CHARS // 2), min(len(text), at + SHOWN_CHARS // 2)
    changes = np.flatnonzero(np.diff(np.concatenate([[False], mask[first:last], [False]]).astype(np.int8)))
    cut = [
        text[first + start : first + stop] for start, stop in zip([0, *changes], [*changes, last - first], strict=True)
    ]
    shown = "".join(part if number % 2 == 0 else f"⟦{part}⟧" for number, part in enumerate(cut))
    return repr(shown)
