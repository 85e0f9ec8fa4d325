"""Consoles whose output is escaped."""

from collections.abc import Iterable
from typing import Any

from rich.console import Console, ConsoleOptions, RenderableType
from rich.segment import Segment

from forebay.preview.words import harmless

_PIPE_WIDTH = 1000  # lines in a file or a pipe are not wrapped


class SafeConsole(Console):
    """A console that escapes control characters in its input."""

    def render(self, renderable: RenderableType, options: ConsoleOptions | None = None) -> Iterable[Segment]:
        for segment in super().render(renderable, options):
            yield segment if segment.control else Segment(harmless(segment.text), segment.style)


def console_for(stream: Any) -> Console:
    wide = None if stream.isatty() else _PIPE_WIDTH
    return SafeConsole(file=stream, width=wide, highlight=False, emoji=False, markup=False)
