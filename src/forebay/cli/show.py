"""The only module that prints: records on standard output, everything else on standard error.

Output is escaped here, because names and texts from caches and sources may contain control characters that a terminal
would execute. In JSON they become \\uXXXX, which reads back as the same text.
"""

import errno
import json
import re
import sys
from typing import Any

import click
import msgspec
from rich.text import Text

from forebay.cli.render import draw
from forebay.errors import ForebayError
from forebay.preview.progress import console_for
from forebay.preview.words import printable

_NUMBERS = re.compile(r"\[\n\s+([-+.\deE]+(?:,\n\s+[-+.\deE]+)*)\n\s*\]")


def show(record: Any, as_json: bool) -> None:
    """Print a record, or a list of records, as text or JSON."""
    try:
        _print(record, as_json)
    except OSError as error:
        if error.errno == errno.EPIPE:
            raise  # the reader closed the pipe
        raise ForebayError(
            f"cannot write the result to standard output: {error.strerror}; the command itself succeeded, redirect its "
            "output"
        ) from error


def _print(record: Any, as_json: bool) -> None:
    if as_json:
        click.echo(_escaped(_numbers_on_one_line(_as_json(record))))
    else:
        console = console_for(sys.stdout)
        with console.capture() as picture:
            console.print(draw(record))
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
    console_for(sys.stderr).print(Text(line), soft_wrap=True)


def say_error(line: str) -> None:
    """Print an error on one line of standard error."""
    console_for(sys.stderr).print(Text.assemble(("forebay: ", "bold red"), printable(line)), soft_wrap=True)
