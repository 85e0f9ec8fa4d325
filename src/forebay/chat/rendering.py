"""Compile and render chat templates in a child process, which is ended at a limit on time or memory.

There is one child for all templates of a process. It runs `sandbox.py`, is started when the first template is opened,
and again after a template has ended it. Most conversations are not rendered at all, see `layouts.py`.
"""

import atexit
import json
import os
import signal
import subprocess
import sys
import threading
from collections.abc import Mapping, Sequence
from contextlib import suppress
from functools import lru_cache
from importlib.util import find_spec
from typing import Any, NamedTuple

from forebay.chat.conversations import THINKING_FIELDS, BadConversation
from forebay.chat.template import CONFIG, TOKEN_NAMES, TemplateSource, template_unusable
from forebay.errors import LibraryMissing

MOST_SECONDS = 20  # to compile a template, or to render one conversation
MOST_BYTES = 1 << 30  # of memory
MOST_CHARS = 64 << 20  # of a rendered conversation
SHOWN_MESSAGES, SHOWN_CHARS = 6, 40
CORRECT_IT = "; pass a corrected template with --template FILE"
_BOOT = "import sys; sys.path[:] = {path!r}; from forebay.chat.sandbox import main; main{limits}"


class ContentUses(NamedTuple):
    """Uses of contents in a template other than writing them."""

    looked_for: tuple[str, ...]  # texts
    strips: bool  # whether outer white space may decide what is written
    escapes: bool  # whether some are written as JSON


class _Ended(Exception):
    """The child has ended; the argument is its exit code, or minus the signal that ended it."""


class _Child:
    """A process that runs `sandbox.py`."""

    def __init__(self) -> None:
        if find_spec("jinja2") is None:
            message = "rendering chat templates needs 'jinja2', which is not installed"
            raise LibraryMissing(message, hint="pip install 'forebay[chat]'", extra="chat")
        lifeline, self._lifeline = os.pipe()  # closed when this process ends, however it does
        boot = _BOOT.format(path=sys.path, limits=(lifeline, MOST_SECONDS, MOST_BYTES, MOST_CHARS))
        self._process = subprocess.Popen(
            [sys.executable, "-c", boot],
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            process_group=0,  # Ctrl-C is for the parent, which kills the child
            pass_fds=[lifeline],
        )
        os.close(lifeline)
        assert self._process.stdin is not None
        assert self._process.stdout is not None
        self._requests, self._answers = self._process.stdin, self._process.stdout
        self.exit_code: int | None = None

    def ask(self, request: Mapping[str, Any]) -> dict[str, Any]:
        """The answer to a request. Without one, such as after Ctrl-C, the child is ended."""
        line = json.dumps(request, ensure_ascii=False).encode("utf-8", "surrogatepass") + b"\n"
        answer = b""
        try:
            with suppress(BrokenPipeError):
                self._requests.write(line)
                self._requests.flush()
                answer = self._answers.readline()
        finally:
            if not answer.endswith(b"\n"):
                self.kill()
        if self.exit_code is not None:
            raise _Ended(self.exit_code)
        decoded: dict[str, Any] = json.loads(answer.decode("utf-8", "surrogatepass"))
        return decoded

    def kill(self) -> None:
        if self.exit_code is not None:
            return
        self._process.kill()  # no effect on one that has ended
        os.close(self._lifeline)
        self._answers.close()
        with suppress(BrokenPipeError):
            self._requests.close()
        self.exit_code = self._process.wait()


class _Children:
    """The child of this process; a forked process starts its own."""

    def __init__(self) -> None:
        self.forget()

    def forget(self) -> None:
        self.lock = threading.Lock()
        self.child: _Child | None = None

    def running(self) -> _Child:
        if self.child is None or self.child.exit_code is not None:
            self.child = _Child()
        return self.child

    def stop(self) -> None:
        child, self.child = self.child, None
        if child is not None:
            child.kill()


_children = _Children()
os.register_at_fork(after_in_child=_children.forget)
atexit.register(_children.stop)


class ChatTemplate:
    """A template that is open in the child."""

    def __init__(
        self, source: TemplateSource, arguments: Mapping[str, Any] | None = None, date: str | None = None
    ) -> None:
        self.source = source
        variables = {**dict(source.tokens), **(arguments or {})}
        self.eos = variables.get("eos_token")
        contents = ("content", *THINKING_FIELDS)
        self._document = {"text": source.text, "variables": variables, "date": date, "contents": contents}
        self._opened: tuple[_Child, int] | None = None
        with _children.lock:
            facts = self._open(_children.running())
        uses = facts["uses"]
        self.uses = None if uses is None else ContentUses(tuple(uses["looked_for"]), uses["strips"], uses["escapes"])
        self.has_generation: bool = facts["has_generation"]
        self.has_prompt = "add_generation_prompt" in facts["names"]
        unnamed = sorted(TOKEN_NAMES & set(facts["names"]) - variables.keys())
        if unnamed and not source.tokens:
            raise template_unusable(
                source.name,
                f"it writes {unnamed[0]}, and no {CONFIG} says what that is",
                f"pass the folder of the tokenizer, with that file in it, or template_arguments={{'{unnamed[0]}': …}}",
            )

    def __repr__(self) -> str:
        return f"<ChatTemplate {self.source.name!r}>"

    def render(self, messages: Sequence[Mapping[str, Any]], tools: list[Any] | None, *, prompt: bool = False) -> str:
        """Return the text of messages, with the generation prompt behind them if `prompt`.

        Raises `BadConversation` where the template rejects these messages, `ModelUnusable` at a limit.
        """
        request = {"prompt": prompt, "messages": messages, "tools": tools}
        with _children.lock:
            child = _children.running()
            if self._opened is None or self._opened[0] is not child:
                self._open(child)
            assert self._opened is not None
            answer = self._ask(child, {"template": self._opened[1], **request}, "render one conversation")
        if "refused" in answer:
            detail = f"the template rejects {_shown(messages)}: {answer['refused']}{CORRECT_IT}"
            raise BadConversation("template", detail)
        text: str = answer["text"]
        return text

    def _open(self, child: _Child) -> dict[str, Any]:
        facts = self._ask(child, {"open": self._document}, "compile")
        self._opened = child, facts["template"]
        return facts

    def _ask(self, child: _Child, request: Mapping[str, Any], what: str) -> dict[str, Any]:
        """The answer of the child; raises `ModelUnusable` if the template is the problem."""
        try:
            answer = child.ask(request)
        except (TypeError, ValueError, RecursionError) as error:  # not JSON: a sample that a function made
            raise BadConversation("bad-message", f"a tool or a tool call cannot be written as JSON: {error}") from error
        except _Ended as ended:
            raise template_unusable(self.source.name, _end(ended.args[0], what)) from None
        if "unusable" in answer:
            raise template_unusable(self.source.name, answer["unusable"])
        return answer


def _end(code: int, what: str) -> str:
    if code == -signal.SIGALRM:
        return f"it takes more than {MOST_SECONDS} s to {what}"
    reason = signal.Signals(-code).name if code < 0 else f"exit code {code}"
    return f"the process that was to {what} with it ended ({reason})"


@lru_cache(maxsize=8)
def open_template(source: TemplateSource, arguments: bytes, date: str | None) -> ChatTemplate:
    return ChatTemplate(source, json.loads(arguments), date)


def _shown(messages: Sequence[Mapping[str, Any]]) -> str:
    listed = [f"{each.get('role')} {str(each.get('content'))[:SHOWN_CHARS]!r}" for each in messages[:SHOWN_MESSAGES]]
    return "the messages " + ", ".join(listed) + ("…" if len(messages) > SHOWN_MESSAGES else "")
