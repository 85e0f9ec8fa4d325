"""Progress of long jobs: a bar on a terminal, a line every two seconds elsewhere, nothing with --json.

building ━━━━━━━━━━━━━━━━━╺━━━━━━━━━━━━━━━━━━━━━━  12/34 chunks  35 %  ETA 8 s
  410 rows/s · read 7.0 MB/s · written 1.3 MB/s · CPU 196 % · memory 141 MB · busy 2/2
"""

import os
import sys
import time
from collections.abc import Callable, Iterable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass

import psutil
from rich.console import Console, Group
from rich.live import Live
from rich.progress_bar import ProgressBar
from rich.table import Table
from rich.text import Text

from forebay.cache.records import Progress
from forebay.cli.show import console_for
from forebay.preview.words import human_bytes, human_time, printable


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
def shown_progress(as_json: bool) -> Iterator[OnProgress]:
    """A function to call with every `Progress` of one job."""
    console = console_for(sys.stderr)
    if as_json:
        yield lambda progress: None
    elif console.is_terminal and not console.is_dumb_terminal:
        with Live(console=console, auto_refresh=False) as live:
            yield Bar(live)
    else:
        yield Lines(console)


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

    def __init__(self, live: Live) -> None:
        self._live = live
        self._pace = Pace()
        self._drawn = 0.0

    def __call__(self, progress: Progress) -> None:
        if progress.note:
            self._live.console.print(_note(progress.note))
        self._pace.follow(progress)
        if progress.done < progress.total and time.monotonic() - self._drawn < BAR_SECONDS:
            return
        self._drawn = time.monotonic()
        self._live.update(self._picture(progress), refresh=True)

    def _picture(self, progress: Progress) -> Group:
        line = Table.grid(padding=(0, 1), expand=False)
        bar = ProgressBar(total=max(1, progress.total), completed=progress.done, width=self._bar_width())
        line.add_row(_phase(progress), bar, _counts(progress), self._pace.time_left(progress))
        return Group(line, Text("  " + " · ".join(self._pace.facts(progress)), style="dim"))

    def _bar_width(self) -> int:
        return max(10, min(40, self._live.console.width - 48))


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
