"""The one module that prints: records on standard output, all else on standard error.

Whatever is printed is escaped here: names, texts and messages come from caches and sources, and a terminal obeys
control characters in them. In JSON they become \\uXXXX, which reads back as the same text.
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
    """A record, or a list of them, for a person or for a program."""
    try:
        _print(record, as_json)
    except OSError as error:
        if error.errno == errno.EPIPE:
            raise  # whoever read our output has enough
        raise ForebayError(
            f"the result cannot be written to standard output: {error.strerror}; the command itself is done, send its "
            "output elsewhere"
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
    """Indented JSON. A file's name that is not UTF-8 has its bytes as lone surrogates, which are escaped."""
    try:
        return msgspec.json.format(msgspec.json.encode(record), indent=2).decode()
    except UnicodeEncodeError:
        return json.dumps(msgspec.to_builtins(record), indent=2)


def _escaped(text: str) -> str:
    r"""JSON whose strings have nothing in them that a terminal would obey; what it means stays the same.

    >>> _escaped('{"name": "\u202egnp.\x9b\x7f\U000e0001 \u00e4"}')
    '{"name": "\\u202egnp.\\u009b\\u007f\\udb40\\udc01 ä"}'
    """
    if text.isprintable():
        return text
    return "".join(mark if mark.isprintable() or mark == "\n" else _by_number(mark) for mark in text)


def _by_number(mark: str) -> str:
    raw = mark.encode("utf-16-be", "surrogatepass").hex()
    return "".join(f"\\u{raw[at : at + 4]}" for at in range(0, len(raw), 4))


def _numbers_on_one_line(text: str) -> str:
    r"""Indented JSON with every list of numbers on a line; inside strings there are no line ends.

    >>> _numbers_on_one_line(msgspec.json.format('{"ids":[1,-2.5],"of":["a"]}'))
    '{\n  "ids": [1, -2.5],\n  "of": [\n    "a"\n  ]\n}'
    """
    return _NUMBERS.sub(lambda found: f"[{' '.join(found[1].split())}]", text)


def say(line: str) -> None:
    """A line beside the result."""
    console_for(sys.stderr).print(Text(line), soft_wrap=True)


def say_error(line: str) -> None:
    """What went wrong, on one line."""
    console_for(sys.stderr).print(Text.assemble(("forebay: ", "bold red"), printable(line)), soft_wrap=True)
