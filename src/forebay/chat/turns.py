"""Turns: the part of a rendered conversation that inference generates.

    prompt   render(messages[:k], add_generation_prompt=True)    <|im_start|>user⏎Hi<|im_end|>⏎<|im_start|>assistant⏎
    whole    render(messages[:k + 1])                            the same, and Hello<|im_end|>⏎
                                                                               └ generated ─┘

`whole` must begin with `prompt`, and the text of the conversation with `whole` up to its stop token. Where the latter
fails, the template changes history: the text has no such turn.
"""

import re
from dataclasses import dataclass
from typing import Any, NamedTuple

from forebay.chat.conversations import BadConversation, Conversation
from forebay.chat.rendering import CORRECT_IT, ChatTemplate
from forebay.chat.slots import MARK, Parsed, excerpt, locate_slots, slots_of


class Turn(NamedTuple):
    """A generated turn in a text: from the end of the prompt to the end of the stop token; `end` ends its message."""

    message: int
    start: int
    contents_stop: int  # of its last content or call, or where a content would end
    stop_start: int
    stop: int
    end: int


@dataclass(frozen=True)
class TurnFinder:
    """`special` matches every control token. `stop` is the stop token for a template that writes none after a turn."""

    template: ChatTemplate
    special: re.Pattern[str]
    stop: str | None

    def turn(self, conversation: Conversation, upto: int, parsed: Parsed, at: int) -> Turn | None:
        """The span of the generated part of message `at`; None if the text renders it as history."""
        text, messages, tools = parsed.text, conversation.messages, conversation.tools
        prompt = self.template.render(messages[:at], tools, prompt=True)
        is_last = at + 1 == upto
        whole = text if is_last else self.template.render(messages[: at + 1], tools)
        if not whole.startswith(prompt):
            from_here = first_difference(whole, prompt)
            raise BadConversation(
                "not-a-prefix",
                f"the template does not write its generation prompt before message {at}: a turn has "
                f"{excerpt(whole, from_here)} where inference begins with {excerpt(prompt, from_here)}{CORRECT_IT}, "
                "or other variables with --template-arguments",
            )
        if not text.startswith(prompt):
            return None
        last = self._contents_stop(conversation, upto, parsed, at, len(prompt), whole)
        stop = self._stop(conversation, whole, last, at)
        if stop is None and self.stop and text.startswith(whole) and (next_ := self.special.match(text, len(whole))):
            stop = next_.span()  # the next turn begins with what ends this one
            if next_[0] != self.stop:
                raise self._other_stop(at, next_[0])
        if stop is None and (is_last or (text.startswith(whole) and not self.stop)):
            shown = excerpt(whole, len(prompt))
            raise BadConversation("no-stop", f"no control token ends message {at}: {shown}; name one with stop='…'")
        if stop is None or not text.startswith(whole[: stop[1]]):
            return None
        end = len(whole) if text.startswith(whole) else stop[1]
        if end == stop[1]:  # line breaks after the stop token belong to the turn
            end += min(spaces_at(text, end), spaces_at(whole, end))
        return Turn(at, len(prompt), last, *stop, max(end, stop[1]))

    def _contents_stop(
        self, conversation: Conversation, upto: int, parsed: Parsed, at: int, start: int, whole: str
    ) -> int:
        """The end of a turn's last content or call in `whole`, or the place of an empty content.

        Later messages may repeat contents and names of calls: what is behind `whole` does not count.
        """
        if not parsed.text.startswith(whole):
            upto, parsed = at + 1, locate_slots(self.template, self.stop, conversation, at + 1, whole)[1]
        message, slots = conversation.messages[at], slots_of(conversation.messages[:upto])
        own = [piece for piece in parsed.pieces if piece.slot >= 0 and slots[piece.slot].message == at]
        own = [piece for piece in own if piece.stop <= len(whole)]
        calls = [end for ends in parsed.calls.get(at, {}).values() for end in ends if end <= len(whole)]
        last = max([start, *calls, *(piece.stop for piece in own)])
        if "tool_calls" not in message and not any(slots[piece.slot].field == "content" for piece in own):
            last = max(last, self._end_of_nothing(conversation, whole, at))
        return last

    def _stop(self, conversation: Conversation, whole: str, last: int, at: int) -> tuple[int, int] | None:
        """The end of a turn after its last content: a control token, or several up to the stop token.

        Those that a template writes within or after its calls are part of the calls.
        """
        tokens = list(self.special.finditer(whole, last))
        if not tokens:
            return None
        calls = "tool_calls" in conversation.messages[at]
        if self.stop:
            stop = next((each for each in tokens if each[0] == self.stop), None)
            if stop is None:
                raise self._other_stop(at, tokens[0][0])
        elif calls:
            stop = self._stop_after_calls(conversation, tokens, at)
        else:
            stop = self._last_stop(conversation.messages[: at + 1], conversation, whole, tokens)
        return (stop if calls else tokens[0]).start(), stop.end()

    def _last_stop(
        self, messages: list[dict[str, Any]], conversation: Conversation, whole: str, tokens: list[re.Match[str]]
    ) -> re.Match[str]:
        """The stop token of an answer that several control tokens end.

        It is the tokenizer's `eos_token` or else the last one, of those that stay when the conversation continues.
        """
        if len(tokens) == 1:
            return tokens[0]
        more = self._rendered(conversation, [*messages, {"role": "user", "content": MARK}])
        staying_chars = first_difference(whole, more) if more else len(whole)
        staying = [each for each in tokens if each.end() <= staying_chars] or tokens
        return next((each for each in staying if each[0] == self.template.eos), staying[-1])

    def _stop_after_calls(self, conversation: Conversation, tokens: list[re.Match[str]], at: int) -> re.Match[str]:
        """The stop token of a turn with tool calls: that of an answer in its place, otherwise the last one."""
        messages = [*conversation.messages[:at], {"role": "assistant", "content": MARK}]
        text = self._rendered(conversation, messages)
        after = list(self.special.finditer(text, text.index(MARK))) if MARK in text else []
        usual = self._last_stop(messages, conversation, text, after)[0] if after else ""
        return next((each for each in tokens if each[0] == usual), tokens[-1])

    def _other_stop(self, at: int, token: str) -> BadConversation:
        return BadConversation(
            "other-stop",
            f"{token!r} ends message {at}, and stop is {self.stop!r}: leave stop out, or pass a template that ends "
            "every turn with that token (--template FILE)",
        )

    def _end_of_nothing(self, conversation: Conversation, whole: str, at: int) -> int:
        """The position where an empty turn's content would end; the rest ends the turn."""
        marked = {**conversation.messages[at], "content": MARK}
        text = self._rendered(conversation, [*conversation.messages[:at], marked])
        after = text.rpartition(MARK)[2] if MARK in text else ""
        return len(whole) - len(after) if after and whole.endswith(after) else 0

    def _rendered(self, conversation: Conversation, messages: list[dict[str, Any]]) -> str:
        """The text of other messages; empty where the template refuses them."""
        try:
            return self.template.render(messages, conversation.tools)
        except BadConversation:
            return ""


def spaces_at(text: str, start: int) -> int:
    return len(text[start:]) - len(text[start:].lstrip())


def first_difference(one: str, other: str) -> int:
    return next((at for at, (a, b) in enumerate(zip(one, other, strict=False)) if a != b), min(len(one), len(other)))
