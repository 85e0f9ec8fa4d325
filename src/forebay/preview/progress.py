"""Progress of a long job: a bar on a terminal or in a notebook, a line now and then elsewhere.

building ━━━━━━━━━━━━━━━━━╺━━━━━━━━━━━━━━━━━━━━━━  12/34 chunks  35 %  ETA 8 s
  410 rows/s · read 7.0 MB/s · written 1.3 MB/s · CPU 196 % · memory 141 MB · busy 2/2
"""

import io
import os
import sys
import time
from collections.abc import Callable, Iterable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from functools import partial
from importlib import import_module
from typing import Any

import psutil
from rich.console import Console, ConsoleOptions, Group, RenderableType
from rich.live import Live
from rich.progress_bar import ProgressBar
from rich.segment import Segment
from rich.table import Table
from rich.text import Text

from forebay.cache.records import Progress
from forebay.preview.words import harmless, human_bytes, human_time, printable

_PIPE_WIDTH = 1000  # lines in a file or a pipe are not wrapped
_NOTEBOOK_WIDTH = 100


class SafeConsole(Console):
    """A console that escapes control characters in its input."""

    def render(self, renderable: RenderableType, options: ConsoleOptions | None = None) -> Iterable[Segment]:
        for segment in super().render(renderable, options):
            yield segment if segment.control else Segment(harmless(segment.text), segment.style)


def console_for(stream: Any) -> Console:
    wide = None if stream.isatty() else _PIPE_WIDTH
    return SafeConsole(file=stream, width=wide, highlight=False, emoji=False, markup=False)


@dataclass(frozen=True, slots=True)
class Usage:
    cpu_percent: float
    memory_bytes: int


class Meter:
    """Measures CPU (since the last call) and memory of this process and others."""

    def __init__(self) -> None:
        self._processes: dict[int, psutil.Process] = {}

    def measure(self, pids: Iterable[int]) -> Usage:
        wanted = {os.getpid(), *pids}
        self._processes = {pid: known for pid, known in self._processes.items() if pid in wanted}
        found = [_usage(process) for pid in wanted if (process := self._process(pid)) is not None]
        return Usage(sum(one.cpu_percent for one in found), sum(one.memory_bytes for one in found))

    def _process(self, pid: int) -> psutil.Process | None:
        try:
            return self._processes.setdefault(pid, self._processes.get(pid) or psutil.Process(pid))
        except psutil.Error:
            return None


def _usage(process: psutil.Process) -> Usage:
    """The usage of one process; zero if it has just ended."""
    try:
        return Usage(process.cpu_percent(), _memory(process))
    except psutil.Error:
        return Usage(0.0, 0)


def _memory(process: psutil.Process) -> int:
    """Proportional set size of a process; resident set size if the system does not provide it."""
    try:
        full = process.memory_full_info()
        return int(getattr(full, "pss", 0) or full.rss)
    except psutil.AccessDenied:
        return int(process.memory_info().rss)


OnProgress = Callable[[Progress], None]
LINE_SECONDS = 2.0
BAR_SECONDS = 0.1
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


class Pace:
    """Speeds and remaining time, counted from the start of a phase."""

    def __init__(self) -> None:
        self._phase = ""
        self._done = 0
        self._meter = Meter()
        self._measured = 0.0
        self._usage = Usage(0.0, 0)

    def follow(self, progress: Progress) -> None:
        if progress.phase != self._phase and {progress.phase, self._phase} != {"building", "waiting"}:
            self._done = progress.done if progress.seconds < 1 else 0
            self._phase = progress.phase
        if time.monotonic() - self._measured >= MEASURE_SECONDS:
            self._usage = self._meter.measure(progress.pids)
            self._measured = time.monotonic()

    def time_left(self, progress: Progress) -> str:
        made = progress.done - self._done
        if progress.phase == "waiting" or made <= 0 or progress.seconds <= 0 or progress.done >= progress.total:
            return ""
        return f"ETA {human_time((progress.total - progress.done) * progress.seconds / made)}"

    def facts(self, progress: Progress) -> list[str]:
        found = _speeds(progress) if progress.seconds else _passed(progress)
        found += [f"CPU {self._usage.cpu_percent:.0f} %"] if self._usage.cpu_percent or progress.workers else []
        found += [f"memory {human_bytes(self._usage.memory_bytes)}"]
        return [*found, f"busy {progress.busy}/{progress.workers}"] if progress.workers else found


class Bar:
    """A bar and a line of facts below it, redrawn in place; notes stay above."""

    def __init__(self, console: Console, draw: Callable[[RenderableType], None]) -> None:
        self._console, self._draw = console, draw
        self._pace = Pace()
        self._drawn = 0.0

    def __call__(self, progress: Progress) -> None:
        if progress.note:
            self._console.print(_note(progress.note))
        self._pace.follow(progress)
        if progress.done < progress.total and time.monotonic() - self._drawn < BAR_SECONDS:
            return
        self._drawn = time.monotonic()
        self._draw(self._picture(progress))

    def _picture(self, progress: Progress) -> Group:
        line = Table.grid(padding=(0, 1), expand=False)
        bar = ProgressBar(total=max(1, progress.total), completed=progress.done, width=self._bar_width())
        line.add_row(_phase(progress), bar, _counts(progress), self._pace.time_left(progress))
        return Group(line, Text("  " + " · ".join(self._pace.facts(progress)), style="dim"))

    def _bar_width(self) -> int:
        return max(10, min(40, self._console.width - 48))


class Lines:
    """At most one line every two seconds."""

    def __init__(self, console: Console) -> None:
        self._console = console
        self._pace = Pace()
        self._shown = time.monotonic()  # a job of less than two seconds needs no line

    def __call__(self, progress: Progress) -> None:
        if progress.note:
            self._console.print(_note(progress.note))
        self._pace.follow(progress)
        if time.monotonic() - self._shown < LINE_SECONDS:
            return
        self._shown = time.monotonic()
        parts = [f"{_phase(progress)} {_counts(progress)}", *self._pace.facts(progress), self._pace.time_left(progress)]
        self._console.print(Text(", ".join(part for part in parts if part)))


def _speeds(progress: Progress) -> list[str]:
    seconds = max(progress.seconds, 1e-3)
    found = [f"{progress.rows / seconds:,.0f} rows/s"] if progress.rows else []
    found += [f"read {human_bytes(progress.read_bytes / seconds)}/s"] if progress.read_bytes else []
    found += [f"written {human_bytes(progress.written_bytes / seconds)}/s"] if progress.written_bytes else []
    found += [f"{progress.failures:,} failed"] if progress.failures else []
    return found


def _passed(progress: Progress) -> list[str]:
    """Planned bytes instead of a speed: planning skips most of a source without reading it."""
    return [f"{human_bytes(progress.read_bytes)} planned"] if progress.read_bytes else []


def _phase(progress: Progress) -> str:
    """The phase; while waiting for other builders, also their machines."""
    return (
        f"{progress.phase} for {printable(', '.join(progress.waiting_for))}" if progress.waiting_for else progress.phase
    )


def _counts(progress: Progress) -> str:
    share = 100 * progress.done // max(1, progress.total)
    return f"{progress.done:,}/{progress.total:,} {progress.unit}  {share} %"


def _note(note: str) -> Text:
    return Text.assemble(("note: ", "yellow"), printable(note))
