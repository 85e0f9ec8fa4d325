"""The only module that prints: results on standard output, everything else on standard error.

With `--json`, standard output has one document: {"ok": true, "result": …}, or {"ok": false, "error": {…}}.

Output is escaped here, because names and texts from caches and sources may contain control characters that a terminal
would execute. In JSON they become \\uXXXX, which reads back as the same text.
"""

import errno
import json
import re
import sys
from collections.abc import Callable, Mapping
from importlib import import_module
from typing import Any

import click
import msgspec
from rich.text import Text

from forebay.cli.verb import Finding, is_json, is_quiet
from forebay.errors import ForebayError
from forebay.preview.console import console_for
from forebay.preview.words import clear_first_sign, printable

_NUMBERS = re.compile(r"\[\n\s+([-+.\deE]+(?:,\n\s+[-+.\deE]+)*)\n\s*\]")


def show_result(found: Any) -> None:
    """Print what a verb returned: a record, a list of records, or a `Finding`."""
    clear_first_sign()
    record = found.record if isinstance(found, Finding) else found
    if is_json():
        document = {"ok": not isinstance(found, Finding), "result": record}
        if isinstance(found, Finding):
            document["error"] = error_document(found.type, found.message, found.command)
        _written(lambda: _print_json(document))
    elif not is_quiet() and record is not None:
        _written(lambda: _print_text(record))
    if isinstance(found, Finding) and found.is_said:
        say_error(found.message)


def show_error(error: Mapping[str, Any]) -> None:
    """Print an error as JSON."""
    _written(lambda: _print_json({"ok": False, "error": error}))


def error_document(
    kind: str, message: str, command: str = "", details: Mapping[str, Any] | None = None
) -> dict[str, Any]:
    """An error in JSON: its type, its message, the next command if there is one, and what else is known."""
    found = {"type": kind, "message": message, "command": command, "details": dict(details or {})}
    return {name: value for name, value in found.items() if value}


def _written(write: Callable[[], None]) -> None:
    try:
        write()
    except OSError as error:
        if error.errno == errno.EPIPE:
            raise  # the reader closed the pipe
        raise ForebayError(
            f"cannot write the result to standard output: {error.strerror}; the command itself succeeded, redirect its "
            "output"
        ) from error


def _print_json(document: Any) -> None:
    click.echo(_escaped(_numbers_on_one_line(_as_json(document))))


def _print_text(record: Any) -> None:
    console = console_for(sys.stdout)
    with console.capture() as picture:
        console.print(import_module("forebay.cli.render").draw(record))
    click.echo("\n".join(line.rstrip() for line in picture.get().splitlines()), color=True)


def _as_json(record: Any) -> str:
    """Indented JSON. File names that are not UTF-8 have lone surrogates, which are escaped."""
    try:
        return msgspec.json.format(msgspec.json.encode(record), indent=2).decode()
    except UnicodeEncodeError:
        return json.dumps(msgspec.to_builtins(record), indent=2)


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

    >>> _numbers_on_one_line(msgspec.json.format('{"ids":[1,-2.5],"of":["a"]}'))
    '{\n  "ids": [1, -2.5],\n  "of": [\n    "a"\n  ]\n}'
    """
    return _NUMBERS.sub(lambda found: f"[{' '.join(found[1].split())}]", text)


def say(line: str) -> None:
    """Print a line on standard error."""
    clear_first_sign()
    console_for(sys.stderr).print(Text(line), soft_wrap=True)


def say_error(line: str) -> None:
    """Print an error on one line of standard error."""
    clear_first_sign()
    console_for(sys.stderr).print(Text.assemble(("forebay: ", "bold red"), printable(line)), soft_wrap=True)
