"""The first sign of life: a line on a terminal that is replaced by the first real output.

It imports nothing heavy, so that it can be shown before the libraries of a verb are imported.

Consoles whose output is escaped.
"""

import sys
from collections.abc import Iterable
from typing import Any, TextIO

from rich.console import Console, ConsoleOptions, RenderableType
from rich.segment import Segment

from forebay.preview.words import harmless

_ERASE = "\r\x1b[2K"
_shown: list[TextIO] = []  # the terminal that shows the line; a progress bar replaces `sys.stderr`


def show_first_sign(line: str) -> None:
    """Show a line on standard error, which must be a terminal."""
    _shown[:] = [sys.stderr]
    sys.stderr.write(f"{_ERASE}{line}")
    sys.stderr.flush()


def clear_first_sign() -> None:
    """Erase the line, before something else is printed."""
    while _shown:
        stream = _shown.pop()
        stream.write(_ERASE)
        stream.flush()


_PIPE_WIDTH = 1000  # lines in a file or a pipe are not wrapped


class SafeConsole(Console):
    """A console that escapes control characters in its input."""

    def render(self, renderable: RenderableType, options: ConsoleOptions | None = None) -> Iterable[Segment]:
        for segment in super().render(renderable, options):
            yield segment if segment.control else Segment(harmless(segment.text), segment.style)


def console_for(stream: Any) -> Console:
    wide = None if stream.isatty() else _PIPE_WIDTH
    return SafeConsole(file=stream, width=wide, highlight=False, emoji=False, markup=False)
