"""Consoles that escape their output, and parts of reports: titles, facts, listings."""

from collections.abc import Iterable, Mapping, Sequence
from typing import Any

from rich.console import Console, ConsoleOptions, RenderableType
from rich.padding import Padding
from rich.segment import Segment
from rich.table import Table
from rich.text import Text

from forebay.cache.reports import GONE
from forebay.preview.words import command_line, harmless, printable
from forebay.store.base import is_url

_PIPE_WIDTH = 1000  # lines in a file or a pipe are not wrapped


class SafeConsole(Console):
    """A console that escapes control characters in its input."""

    def render(self, renderable: RenderableType, options: ConsoleOptions | None = None) -> Iterable[Segment]:
        for segment in super().render(renderable, options):
            yield segment if segment.control else Segment(harmless(segment.text), segment.style)


def console_for(stream: Any, width: int | None = None) -> Console:
    wide = None if stream.isatty() else width or _PIPE_WIDTH
    return SafeConsole(file=stream, width=wide, highlight=False, emoji=False, markup=False)


SHOWN_FILES = 20


def title(name: str, *facts: str) -> Text:
    """`caches/raw · generation 3 · complete`"""
    return Text.assemble((printable(name), "bold"), *(f" · {fact}" for fact in facts if fact))


def facts(pairs: Iterable[tuple[str, str | Text]]) -> RenderableType:
    """Names and values in two aligned columns, without pairs that have no value."""
    grid = Table.grid(padding=(0, 2))
    grid.add_column(style="dim", no_wrap=True)
    grid.add_column(overflow="fold")
    for name, value in pairs:
        if value:
            grid.add_row(name, value)
    return Padding(grid, (0, 0, 0, 2), expand=False)


def listing(heading: str, rows: Iterable[tuple[str, ...]], style: str = "") -> list[RenderableType]:
    """A heading and aligned rows below it; empty if there are no rows."""
    cells = [tuple(map(printable, row)) for row in rows]
    if not cells:
        return []
    grid = Table.grid(padding=(0, 2))
    for _ in cells[0]:
        grid.add_column(overflow="fold")
    for row in cells:
        grid.add_row(*row)
    return [Text(heading, style=style), Padding(grid, (0, 0, 0, 2), expand=False)]


def stale_files(stale: Mapping[str, str]) -> list[RenderableType]:
    """Source files that changed, and deleted ones, which do not affect published rows."""
    changed = [(path, how) for path, how in stale.items() if how != GONE]
    gone = [(path, how) for path, how in stale.items() if how == GONE]
    return [
        *beginning("stale sources", changed, "bold red"),
        *beginning("deleted source files; published rows stay valid", gone, "yellow"),
    ]


def beginning(heading: str, rows: Sequence[tuple[str, ...]], style: str) -> list[RenderableType]:
    """A listing of the first rows, and how many there are besides."""
    parts = listing(heading, rows[:SHOWN_FILES], style)
    return [*parts, Text(f"  … and {len(rows) - SHOWN_FILES:,} more; --json has all")] if rows[SHOWN_FILES:] else parts


def next_command(command: str) -> Text:
    return Text.assemble("next: ", (command, "cyan"))


def source_allowed(source_root: str) -> list[str]:
    """The option that allows `repair` to contact a source on another machine."""
    return ["--allow-network"] if is_url(source_root) else []


def reuse_command(root: str, reusable: bool) -> Text:
    """A hint for edited source files: published rows never change."""
    if not reusable:
        return Text("next: restore the old files, or build a new cache (this one deduplicates and cannot be reused)")
    return Text.assemble(
        "build a new cache that reuses this one: ", (f"forebay build … --into NEW --reuse {root}", "cyan")
    )


def repair_command(root: str, source_root: str, files_are_gone: bool) -> Text:
    """Suggest `repair`, with a hint for chunks of deleted source files."""
    text = next_command(command_line("repair", root, *source_allowed(source_root)))
    if not files_are_gone:
        return text
    copied = command_line("repair", root, "--from")
    return Text.assemble(
        text, "\nA chunk of a deleted file comes back with that file, or from a copy: ", (f"{copied} COPY", "cyan")
    )
