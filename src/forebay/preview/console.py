"""Consoles whose output is escaped, and the parts of what they show: titles, facts, listings.

Progress of a long job: a bar on a terminal or in a notebook, a line now and then elsewhere.

building ━━━━━━━━━━━━━━━━━╺━━━━━━━━━━━━━━━━━━━━━━  12/34 chunks  35 %  ETA 8 s
  410 rows/s · read 7.0 MB/s · written 1.3 MB/s · CPU 196 % · memory 141 MB · busy 2/2
"""

import io
import os
import sys
import time
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from functools import partial
from importlib import import_module
from itertools import accumulate
from typing import Any

import psutil
from rich.console import Console, ConsoleOptions, Group, RenderableType
from rich.live import Live
from rich.padding import Padding
from rich.progress_bar import ProgressBar
from rich.segment import Segment
from rich.table import Table
from rich.text import Text

from forebay.cache.records import GONE, OnProgress, Progress
from forebay.preview.words import clear_first_sign, command_line, harmless, human_bytes, human_time, printable
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
BUILD_ANEW = Text(
    "next: restore the old files, or build a new cache from the changed source: a deduplicated cache cannot be "
    "refreshed"
)


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
    """The option without which `repair` and `refresh` refuse to contact a source that is on another machine."""
    return ["--check-source"] if is_url(source_root) else []


def repair_command(root: str, source_root: str, files_are_gone: bool, refreshable: bool) -> Text:
    """`repair`, and what to do about chunks that it cannot make again, because files of the source are gone."""
    found = next_command(command_line("repair", root, *source_allowed(source_root)))
    if not files_are_gone:
        return found
    copied = command_line("repair", root, "--from")
    found = Text.assemble(
        found, "\nA chunk of a deleted file comes back with that file, or from a copy: ", (f"{copied} COPY", "cyan")
    )
    if not refreshable:
        return found
    dropped = command_line("refresh", root, "--drop-missing", *source_allowed(source_root))
    return Text.assemble(found, "\nTo drop the samples of deleted files instead: ", (dropped, "cyan"))


_NOTEBOOK_WIDTH = 100


@dataclass(frozen=True, slots=True)
class MachineUsage:
    cpu_percent: float
    memory_bytes: int


class UsageMeter:
    """Measures CPU (since the last call; of this process, since the meter was made) and memory of processes."""

    def __init__(self) -> None:
        self._processes = {os.getpid(): psutil.Process()}
        self._processes[os.getpid()].cpu_percent()

    def measure(self, pids: Iterable[int]) -> MachineUsage:
        wanted = {os.getpid(), *pids}
        self._processes = {pid: known for pid, known in self._processes.items() if pid in wanted}
        found = [_usage(process) for pid in wanted if (process := self._process(pid)) is not None]
        return MachineUsage(sum(one.cpu_percent for one in found), sum(one.memory_bytes for one in found))

    def _process(self, pid: int) -> psutil.Process | None:
        try:
            return self._processes.setdefault(pid, self._processes.get(pid) or psutil.Process(pid))
        except psutil.Error:
            return None


def _usage(process: psutil.Process) -> MachineUsage:
    """The usage of one process; zero if it has just ended."""
    try:
        return MachineUsage(process.cpu_percent(), _memory(process))
    except psutil.Error:
        return MachineUsage(0.0, 0)


def _memory(process: psutil.Process) -> int:
    """Proportional set size of a process; resident set size if the system does not provide it."""
    try:
        full = process.memory_full_info()
        return int(getattr(full, "pss", 0) or full.rss)
    except psutil.AccessDenied:
        return int(process.memory_info().rss)


FIRST_LINE_SECONDS = 2.0  # a shorter job needs no line
# Seconds between lines, and until when: every 10 s in the first minute, every 30 s in the first ten, then every minute.
LINE_SECONDS = ((60.0, 10.0), (600.0, 30.0), (float("inf"), 60.0))
BAR_SECONDS = 0.1
LEAST_BAR = 6  # columns; a shorter bar is left out
MEASURE_SECONDS = 1.0


@contextmanager
def shown_progress() -> Iterator[OnProgress]:
    """A function to call with every `Progress` of one job, which shows it."""
    console = console_for(sys.stderr)
    if console.is_jupyter:
        yield Bar(console, _notebook_cell())
    elif console.is_terminal and not console.is_dumb_terminal:
        with Live(console=console, auto_refresh=False) as live:
            yield Bar(console, partial(live.update, refresh=True))
    else:
        yield Lines(console)


def _notebook_cell() -> Callable[[RenderableType], None]:
    """Draws in place below a notebook's cell. Rich's `Live` would need ipywidgets for it."""
    handle = import_module("IPython.display").display({"text/plain": ""}, raw=True, display_id=True)

    def draw(picture: RenderableType) -> None:
        plain = SafeConsole(file=io.StringIO(), width=_NOTEBOOK_WIDTH, force_jupyter=False, color_system=None)
        with plain.capture() as drawn:
            plain.print(picture)
        handle.update({"text/plain": drawn.get()}, raw=True)

    return draw


class SpeedMeter:
    """Speeds and remaining time, counted from the start of a phase."""

    def __init__(self) -> None:
        self._phase, self._begun = ("", ""), time.monotonic()
        self._done = self._last = 0
        self._meter = UsageMeter()
        self._measured = 0.0
        self._usage = MachineUsage(0.0, 0)

    def follow(self, progress: Progress) -> None:
        done, phase = (
            _done_of(progress)[0],
            ("building" if progress.phase == "waiting" else progress.phase, progress.unit),
        )
        if phase != self._phase or (progress.phase == "planning" and done < self._last):  # it looks for duplicates now
            self._done = done if progress.seconds < 1 else 0
            self._phase, self._begun = phase, time.monotonic()
        self._last = done

    def measure(self, progress: Progress) -> None:
        """Measure at most once a second: the memory of a process with torch takes 9 ms."""
        if time.monotonic() - self._measured >= MEASURE_SECONDS:
            self._usage = self._meter.measure(progress.pids)
            self._measured = time.monotonic()

    def time_left(self, progress: Progress) -> str:
        done, total = _done_of(progress)
        made = done - self._done
        spent = progress.seconds or (time.monotonic() - self._begun if progress.phase == "planning" else 0.0)
        if progress.phase == "waiting" or made <= 0 or spent <= 0 or done >= total:
            return ""
        return f"ETA {human_time((total - done) * spent / made)}"

    def facts(self, progress: Progress) -> list[str]:
        found = _speeds(progress) if progress.seconds else _passed(progress)
        found += [f"CPU {self._usage.cpu_percent:.0f} %"] if self._usage.cpu_percent or progress.workers else []
        found += [f"memory {human_bytes(self._usage.memory_bytes)}"]
        return [*found, f"busy {progress.busy}/{progress.workers}"] if progress.workers else found


class Bar:
    """A bar and a line of facts below it, redrawn in place; notes stay above."""

    def __init__(self, console: Console, draw: Callable[[RenderableType], None]) -> None:
        self._console, self._draw = console, draw
        self._speed = SpeedMeter()
        self._drawn = 0.0

    def __call__(self, progress: Progress) -> None:
        clear_first_sign()
        if progress.note:
            self._console.print(_note(progress.note))
        self._speed.follow(progress)
        self._speed.measure(progress)
        if progress.done < progress.total and time.monotonic() - self._drawn < BAR_SECONDS:
            return
        self._drawn = time.monotonic()
        self._draw(self._picture(progress))

    def _picture(self, progress: Progress) -> Group:
        """Two lines, each cut to the width of the console: the bar takes what is left beside the counts."""
        width = self._console.width
        words = [_phase(progress)[: max(8, width - 40)], _counts(progress), self._speed.time_left(progress)]
        left = width - sum(len(word) + 1 for word in words) - 1
        done, total = _done_of(progress)
        bar = ProgressBar(total=max(1, total), completed=done, width=min(40, left))
        line = Table.grid(padding=(0, 1), expand=False)
        line.add_row(words[0], *([bar] if left >= LEAST_BAR else []), *words[1:])
        facts = Text("  " + " · ".join(_fitting(self._speed.facts(progress), width - 2)), style="dim")
        return Group(line, facts)


def _fitting(facts: list[str], width: int) -> list[str]:
    """The first facts that fit on a line.

    >>> _fitting(["410 rows/s", "read 7.0 MB/s", "busy 2/2"], 26)
    ['410 rows/s', 'read 7.0 MB/s']
    """
    ends = accumulate(len(fact) + len(" · ") for fact in facts)
    return [fact for fact, end in zip(facts, ends, strict=True) if end - len(" · ") <= width]


class Lines:
    """A line after two seconds, then fewer and fewer: a log of a night is a few hundred lines."""

    def __init__(self, console: Console, clock: Callable[[], float] = time.monotonic) -> None:
        self._console, self._clock = console, clock
        self._speed = SpeedMeter()
        self._begun = clock()
        self._next = self._begun + FIRST_LINE_SECONDS

    def __call__(self, progress: Progress) -> None:
        if progress.note:
            self._console.print(_note(progress.note))
        self._speed.follow(progress)
        now = self._clock()
        if now >= self._next - MEASURE_SECONDS:  # CPU of workers is counted between two measurements
            self._speed.measure(progress)
        if now < self._next:
            return
        self._next = now + next(pause for until, pause in LINE_SECONDS if now - self._begun < until)
        parts = [
            f"{_phase(progress)} {_counts(progress)}",
            *self._speed.facts(progress),
            self._speed.time_left(progress),
        ]
        self._console.print(Text(", ".join(part for part in parts if part)))


def _speeds(progress: Progress) -> list[str]:
    seconds = max(progress.seconds, 1e-3)
    found = [f"{progress.rows / seconds:,.0f} rows/s"] if progress.rows else []
    found += [f"{progress.tokens / seconds:,.0f} tokens/s"] if progress.tokens else []
    found += [f"{progress.utilization:.1%} used"] if progress.tokens and progress.utilization is not None else []
    found += [f"read {human_bytes(progress.read_bytes / seconds)}/s"] if progress.read_bytes else []
    found += [f"written {human_bytes(progress.written_bytes / seconds)}/s"] if progress.written_bytes else []
    found += [f"{progress.failures:,} failed"] if progress.failures else []
    return found


def _passed(progress: Progress) -> list[str]:
    """Planned bytes instead of a speed: planning skips most of a source without reading it."""
    total = f" of {human_bytes(progress.total_bytes)}" if progress.total_bytes else ""
    return [f"{human_bytes(progress.read_bytes)}{total} planned"] if progress.read_bytes else []


def _done_of(progress: Progress) -> tuple[int, int]:
    """What is done and all there is: bytes of source files while planning, if their sizes are known."""
    return (progress.read_bytes, progress.total_bytes) if progress.total_bytes else (progress.done, progress.total)


def _phase(progress: Progress) -> str:
    """The phase; while waiting for other builders, also their machines."""
    if not progress.waiting_for:
        return progress.phase
    hosts = printable(", ".join(progress.waiting_for))
    return f"waiting for the plan that {hosts} makes" if progress.unit == "files" else f"waiting for {hosts}"


def _counts(progress: Progress) -> str:
    done, total = _done_of(progress)
    share = 100 * done // max(1, total)
    return f"{progress.done:,}/{progress.total:,} {progress.unit}  {share} %"


def _note(note: str) -> Text:
    return Text.assemble(("note: ", "yellow"), printable(note))
