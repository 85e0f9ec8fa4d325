"""The program that compiles and renders chat templates, in a process with limits on time and memory.

A template comes from the publisher of the tokenizer, so it is treated as hostile code. Jinja's immutable sandbox keeps
it away from Python; the process keeps it from running or growing without end:

    time      an alarm ends the process, also in the middle of a comparison or a division that takes years
    memory    an allocation beyond RLIMIT_AS fails
    parent    a signal ends the process when its parent does, also when that was killed

`rendering.py` starts it. Requests and answers are lines of JSON:

    {"open": {"text": "…", "variables": {…}, "date": null, "contents": ["content"]}}    {"template": 0, "uses": null, …}
    {"template": 0, "prompt": false, "messages": […], "tools": null}                          {"text": "…"}

Instead of a text, an answer may be {"refused": "…"} for these messages, or {"unusable": "…"} for the template.

The helpers are those of `transformers`: `raise_exception`, `tojson`, `strftime_now`, `{% generation %}`, `break` and
`continue`. `strftime_now` returns the recipe's `date`; without one, a template that calls it is unusable.
"""

import fcntl
import json
import os
import resource
import signal
import sys
from collections.abc import Callable
from contextlib import suppress
from datetime import date as Date
from typing import Any

import jinja2
from jinja2 import nodes
from jinja2.exceptions import SecurityError
from jinja2.ext import Extension, loopcontrols
from jinja2.sandbox import ImmutableSandboxedEnvironment

from forebay.chat.content_uses import uses_of_contents

_METHODS = frozenset(
    "strip lstrip rstrip split rsplit splitlines startswith endswith upper lower title capitalize replace "  # noqa: SIM905
    "find rfind count index join removeprefix removesuffix partition rpartition isdigit isalpha isalnum isspace "
    "isupper islower isnumeric casefold swapcase format".split()
)
_GLOBALS = ("range", "dict", "namespace")


class _Unusable(Exception):
    """The template cannot be used, whatever the messages are."""


class _Generation(Extension):
    """`{% generation %}` blocks, which are written like any other text."""

    tags = {"generation"}  # noqa: RUF012 - as Jinja declares it

    def parse(self, parser: Any) -> nodes.Node:
        line = next(parser.stream).lineno
        return nodes.Scope(parser.parse_statements(("name:endgeneration",), drop_needle=True)).set_lineno(line)


class _Sandbox(ImmutableSandboxedEnvironment):
    def is_safe_attribute(self, obj: Any, attr: str, value: Any) -> bool:
        if isinstance(obj, str):
            return attr in _METHODS
        if isinstance(obj, int | float | bytes):
            return False
        return super().is_safe_attribute(obj, attr, value)


class _Template:
    """A compiled template."""

    def __init__(self, text: str, variables: dict[str, Any], date: str | None, contents: list[str]) -> None:
        environment = _Sandbox(trim_blocks=True, lstrip_blocks=True, extensions=[_Generation, loopcontrols])
        environment.filters |= {"tojson": _tojson, "random": _random}
        environment.globals = {name: environment.globals[name] for name in _GLOBALS}
        environment.globals |= {"raise_exception": _raise, "strftime_now": _clock(date)}
        self._variables = variables
        try:
            parsed = environment.parse(text)
            self.facts = {
                "uses": uses_of_contents(parsed, contents),
                "has_generation": any(parsed.find_all(nodes.Scope)),
                "names": sorted({name.name for name in parsed.find_all(nodes.Name)}),
            }
            code = environment.compile(parsed)
        except (jinja2.TemplateError, RecursionError, ValueError, SyntaxError) as error:
            raise _Unusable(f"it is not a valid template: {error}") from error
        except MemoryError as error:  # also for what Python's parser finds nested too deeply
            raise _Unusable("it is not a valid template: it is too large to compile") from error
        self._template = environment.template_class.from_code(environment, code, environment.make_globals(None))

    def render(self, messages: list[Any], tools: list[Any] | None, prompt: bool) -> str:
        text: str = self._template.render(
            self._variables, messages=messages, tools=tools, documents=None, add_generation_prompt=prompt
        )
        return text


def _raise(message: object) -> None:
    raise jinja2.TemplateError(message if isinstance(message, str) else "no message")


def _random(*_: object) -> None:
    raise _Unusable("it uses the filter 'random', and the same conversation must always give the same text")


def _tojson(
    value: Any, ensure_ascii: bool = False, indent: Any = None, separators: Any = None, sort_keys: bool = False
) -> str:
    return json.dumps(value, ensure_ascii=ensure_ascii, indent=indent, separators=separators, sort_keys=sort_keys)


def _clock(date: str | None) -> Callable[[str], str]:
    def strftime_now(form: str) -> str:
        if date is None:
            raise _Unusable("it asks for the current date; pass a fixed one: date='2026-01-31'")
        return Date.fromisoformat(date).strftime(str(form)[:100])

    return strftime_now


def _answer(request: dict[str, Any], templates: list[_Template], most_chars: int) -> dict[str, Any]:
    if "open" in request:
        templates.append(_Template(**request["open"]))
        return {"template": len(templates) - 1, **templates[-1].facts}
    template = templates[request.pop("template")]
    text = template.render(**request)
    if len(text) > most_chars:
        raise _Unusable(f"it writes more than {most_chars:,} characters for one conversation")
    return {"text": text}


def _line(request: bytes, templates: list[_Template], most_chars: int) -> bytes:
    """The answer to a request."""
    try:
        answer = _answer(json.loads(request.decode("utf-8", "surrogatepass")), templates, most_chars)
        return json.dumps(answer, ensure_ascii=False).encode("utf-8", "surrogatepass")
    except _Unusable as error:
        problem = str(error)
    except SecurityError as error:
        problem = f"the sandbox rejects it: {error}"
    except (MemoryError, OverflowError):
        problem = "it needs too much memory"
    except RecursionError:
        problem = "it is nested too deeply, or does not end"
    except Exception as error:  # a template may fail in any way
        refused = " ".join(str(error).split())[:200] or type(error).__name__
        return json.dumps({"refused": refused}).encode()
    return json.dumps({"unusable": problem}).encode()


def main(lifeline: int, seconds: int, most_bytes: int, most_chars: int) -> None:
    """Answer requests until there are no more, or the pipe `lifeline` is closed."""
    for ends in (signal.SIGALRM, signal.SIGIO):
        signal.signal(ends, signal.SIG_DFL)
    signal.pthread_sigmask(signal.SIG_UNBLOCK, [signal.SIGALRM, signal.SIGIO])
    fcntl.fcntl(lifeline, fcntl.F_SETOWN, os.getpid())
    fcntl.fcntl(lifeline, fcntl.F_SETFL, os.O_ASYNC)  # SIGIO when its other end is closed
    with suppress(ValueError, OSError):  # macOS has no such limit
        resource.setrlimit(resource.RLIMIT_AS, (most_bytes, most_bytes))
    templates: list[_Template] = []
    for request in sys.stdin.buffer:
        signal.alarm(seconds)
        answer = _line(request, templates, most_chars)
        signal.alarm(0)
        sys.stdout.buffer.write(answer + b"\n")
        sys.stdout.buffer.flush()
