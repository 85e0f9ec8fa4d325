"""Print results on standard output, and everything else on standard error. No other module prints.

With `--json`, standard output has one document: {"ok": true, "result": …}, or {"ok": false, "error": {…}}. Output is
escaped here, because names and texts from caches and sources may contain control characters that a terminal would
execute. In JSON they become \\uXXXX, which reads back as the same text.
"""

import errno
import os
import re
import sys
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager, redirect_stdout
from dataclasses import dataclass
from importlib import import_module
from typing import Any

import click
from rich.text import Text

from forebay.cache.reports import OnProgress
from forebay.errors import ForebayError
from forebay.preview.console import console_for
from forebay.preview.progress import JsonLines
from forebay.preview.progress import shown_progress as drawn_progress
from forebay.preview.words import clear_first_sign, printable
from forebay.records import as_json

JSON, QUIET, STDOUT = "forebay.json", "forebay.quiet", "forebay.stdout"


@dataclass(frozen=True, slots=True)
class Finding:
    """The result of a verb that ran and found a problem: it is shown, and the exit code is 1.

    `command` repairs it. `prints_error` is for results whose text does not include the problem.
    """

    record: Any
    type: str
    message: str
    command: str = ""
    prints_error: bool = False


def is_json() -> bool:
    """Whether the running command prints JSON."""
    return _is_set(JSON)


def is_quiet() -> bool:
    return _is_set(QUIET)


def _is_set(name: str) -> bool:
    ctx = click.get_current_context(silent=True)
    return ctx is not None and bool(ctx.meta.get(name))


@contextmanager
def shown_progress() -> Iterator[OnProgress]:
    """A function to call with every `Progress` of one job; with --json it prints JSON lines on standard error."""
    if is_quiet():
        yield lambda progress: None
    elif is_json():
        yield JsonLines(sys.stderr)
    else:
        with drawn_progress() as on_progress:
            yield on_progress


_NUMBERS = re.compile(r"\[\n\s+([-+.\deE]+(?:,\n\s+[-+.\deE]+)*)\n\s*\]")


def show_result(result: Any) -> None:
    """Print what a verb returned: a record, a list of records, or a `Finding`."""
    clear_first_sign()
    record = result.record if isinstance(result, Finding) else result
    if is_json():
        document = {"ok": not isinstance(result, Finding), "result": record}
        if isinstance(result, Finding):
            document["error"] = error_document(result.type, result.message, command=result.command)
        _written(lambda: _print_json(document))
    elif not is_quiet() and record is not None:
        _written(lambda: _print_text(record))
    if isinstance(result, Finding) and result.prints_error:
        say_error(result.message)


def show_now(record: Any) -> None:
    """Show a result before the verb ends."""
    with redirect_stdout(click.get_current_context().meta[STDOUT]):
        show_result(record)


def show_error(error: Mapping[str, Any]) -> None:
    """Print an error as JSON."""
    _written(lambda: _print_json({"ok": False, "error": error}))


def error_document(
    kind: str, message: str, hint: str = "", command: str = "", facts: Mapping[str, Any] | None = None
) -> dict[str, Any]:
    """An error in JSON: its type, message, hint, the next command if there is one, and facts."""
    fields = {"type": kind, "message": message, "hint": hint, "command": command, "facts": dict(facts or {})}
    return {name: value for name, value in fields.items() if value}


def _written(write: Callable[[], None]) -> None:
    try:
        write()
    except OSError as error:
        if error.errno == errno.EPIPE:
            raise  # the reader closed the pipe
        raise ForebayError(
            f"cannot write the result to standard output: {error.strerror}",
            hint="the command itself succeeded, redirect its output",
        ) from error


def _print_json(document: Any) -> None:
    click.echo(_escaped(_numbers_on_one_line(as_json(document, indent=2).decode())))


def _print_text(record: Any) -> None:
    console = console_for(sys.stdout, wanted_width())
    with console.capture() as picture:
        console.print(import_module("forebay.cli.render").draw(record))
    click.echo("\n".join(line.rstrip() for line in picture.get().splitlines()), color=True)


def wanted_width() -> int | None:
    """The width set by COLUMNS, also in a pipe."""
    columns = os.environ.get("COLUMNS", "")
    return int(columns) if columns.isdecimal() and int(columns) else None


def _escaped(text: str) -> str:
    r"""JSON with control characters in strings escaped; its meaning stays the same.

    >>> _escaped('{"name": "\u202egnp.\x9b\x7f\U000e0001 \u00e4"}')
    '{"name": "\\u202egnp.\\u009b\\u007f\\udb40\\udc01 ä"}'
    """
    if text.isprintable():
        return text
    return "".join(char if char.isprintable() or char == "\n" else _by_number(char) for char in text)


def _by_number(char: str) -> str:
    raw = char.encode("utf-16-be", "surrogatepass").hex()
    return "".join(f"\\u{raw[at : at + 4]}" for at in range(0, len(raw), 4))


def _numbers_on_one_line(text: str) -> str:
    r"""Indented JSON with every list of numbers on one line; strings contain no newlines.

    >>> _numbers_on_one_line('{\n  "ids": [\n    1,\n    -2.5\n  ],\n  "of": [\n    "a"\n  ]\n}')
    '{\n  "ids": [1, -2.5],\n  "of": [\n    "a"\n  ]\n}'
    """
    return _NUMBERS.sub(lambda result: f"[{' '.join(result[1].split())}]", text)


def say(line: str) -> None:
    """Print a line on standard error."""
    clear_first_sign()
    console_for(sys.stderr).print(Text(line), soft_wrap=True)


def say_error(message: str, hint: str = "") -> None:
    """Print `error: MESSAGE` and `hint: HINT` on standard error, one line each."""
    clear_first_sign()
    console = console_for(sys.stderr)
    console.print(Text.assemble(("error: ", "bold red"), printable(message)), soft_wrap=True)
    if hint:
        console.print(Text.assemble(("hint: ", "bold cyan"), printable(hint)), soft_wrap=True)
