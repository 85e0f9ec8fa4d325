"""Progress of a long job: a bar on a terminal or in a notebook, a line now and then elsewhere, JSON for programs.

building ━━━━━━━━━━━━━━━━━╺━━━━━━━━━━━━━━━━━━━━━━  12/34 chunks  35%  ETA 8 s
  download 1.2 GB of 4.0 GB, 30.0 MB/s · 410 samples/s · 210,000 tokens/s
  packed 99.7% · compression 2.4x · memory 1.1 GB of 16.0 GB · busy 2/2

Each phase of a build has its figures: download or reading (bytes, rate, time left), tokenizing (samples and tokens per
second), packing (utilization), compression (ratio). Memory of all processes, CPU and busy workers follow.
"""

import io
import os
import sys
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from functools import partial
from importlib import import_module
from typing import Any, TextIO

import msgspec
from rich.console import Console, Group, RenderableType
from rich.live import Live
from rich.progress_bar import ProgressBar
from rich.table import Table
from rich.text import Text

from forebay.cache.heartbeat import ProcessTree
from forebay.cache.reports import OnProgress, Progress
from forebay.preview.console import SafeConsole, console_for
from forebay.preview.words import clear_first_sign, human_bytes, human_time, printable

_NOTEBOOK_WIDTH = 100


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
        self._processes = ProcessTree(os.getpid())
        self._measured = self._cpu_percent = 0.0
        self._memory_bytes = 0

    def follow(self, progress: Progress) -> None:
        done, phase = (
            _done_of(progress)[0],
            ("building" if progress.phase == "waiting" else progress.phase, progress.unit),
        )
        if phase != self._phase or (progress.phase == "planning" and done < self._last):  # it looks for duplicates now
            self._done = done if progress.seconds < 1 else 0
            self._phase, self._begun = phase, time.monotonic()
        self._last = done

    def measure(self) -> None:
        """Measure at most once a second: the memory of a process with torch takes 9 ms."""
        if time.monotonic() - self._measured >= MEASURE_SECONDS:
            _, self._cpu_percent, self._memory_bytes = self._processes.measure()
            self._measured = time.monotonic()

    def seconds_left(self, progress: Progress) -> float | None:
        """Seconds until the job is done, at the speed of this phase; None if it cannot be known."""
        done, total = _done_of(progress)
        recent = done - self._done
        spent = progress.seconds or (time.monotonic() - self._begun if progress.phase == "planning" else 0.0)
        if progress.phase == "waiting" or recent <= 0 or spent <= 0 or done >= total:
            return None
        return (total - done) * spent / recent

    def time_left(self, progress: Progress) -> str:
        seconds = self.seconds_left(progress)
        return "" if seconds is None else f"ETA {human_time(seconds)}"

    def facts(self, progress: Progress) -> list[str]:
        shown = [*_phase_facts(progress)] if progress.seconds else _passed(progress)
        limit = f" of {human_bytes(progress.memory_limit)}" if progress.memory_limit else ""
        shown += [f"memory {human_bytes(self._memory_bytes)}{limit}"]
        shown += [f"CPU {self._cpu_percent:.0f}%"] if self._cpu_percent or progress.workers else []
        return [*shown, f"busy {progress.busy}/{progress.workers}"] if progress.workers else shown

    def record(self, progress: Progress) -> dict[str, Any]:
        """The progress with rates, memory and time left, for programs."""
        counts = {name: value for name, value in msgspec.to_builtins(progress).items() if name != "pids"}
        seconds = max(progress.seconds, 1e-3)
        rates = {
            f"{name}_per_second": round(getattr(progress, name) / seconds, 1)
            for name in ("read_bytes", "samples", "rows", "tokens", "written_bytes")
            if progress.seconds
        }
        left, ratio = self.seconds_left(progress), compression_ratio(progress)
        return {
            **counts,
            **rates,
            "compression_ratio": ratio,
            "memory_bytes": self._memory_bytes,
            "cpu_percent": round(self._cpu_percent, 1),
            "eta_seconds": None if left is None else round(left, 1),
        }


class Bar:
    """A bar and lines of facts below it, redrawn in place; notes stay above."""

    def __init__(self, console: Console, draw: Callable[[RenderableType], None]) -> None:
        self._console, self._draw = console, draw
        self._speed = SpeedMeter()
        self._drawn = 0.0

    def __call__(self, progress: Progress) -> None:
        clear_first_sign()
        if progress.note:
            self._console.print(_note(progress.note))
        self._speed.follow(progress)
        self._speed.measure()
        if progress.done < progress.total and time.monotonic() - self._drawn < BAR_SECONDS:
            return
        self._drawn = time.monotonic()
        self._draw(self._picture(progress))

    def _picture(self, progress: Progress) -> Group:
        """The bar in the remaining width, and lines of facts that fit the console."""
        width = self._console.width
        words = [_phase(progress)[: max(8, width - 40)], _counts(progress), self._speed.time_left(progress)]
        left = width - sum(len(word) + 1 for word in words) - 1
        done, total = _done_of(progress)
        # Rich's own green becomes the gray of an empty bar in a terminal with 16 colors.
        bar = ProgressBar(
            total=max(1, total), completed=done, width=min(40, left), complete_style="magenta", finished_style="green"
        )
        line = Table.grid(padding=(0, 1), expand=False)
        line.add_row(words[0], *([bar] if left >= LEAST_BAR else []), *words[1:])
        facts = (Text(f"  {row[: width - 2]}", style="dim") for row in _rows_of(self._speed.facts(progress), width - 2))
        return Group(line, *facts)


def _rows_of(facts: list[str], width: int) -> list[str]:
    """The facts, on as many lines as they need; none is broken.

    >>> _rows_of(["410 rows/s", "read 7.0 MB/s", "busy 2/2"], 26)
    ['410 rows/s · read 7.0 MB/s', 'busy 2/2']
    """
    rows = facts[:1]
    for fact in facts[1:]:
        longer = f"{rows[-1]} · {fact}"
        rows[-1:] = [longer] if len(longer) <= width else [rows[-1], fact]
    return rows


class Cadence:
    """When lines are due: after two seconds, then less often, for a few hundred lines in a night."""

    def __init__(self, clock: Callable[[], float]) -> None:
        self._clock = clock
        self._begun = clock()
        self._next = self._begun + FIRST_LINE_SECONDS

    def is_due(self, speed: SpeedMeter, progress: Progress) -> bool:
        """True if a line is due. CPU is measured shortly before, because it needs two samples."""
        now = self._clock()
        speed.follow(progress)
        if now >= self._next - MEASURE_SECONDS:
            speed.measure()
        if now < self._next:
            return False
        self._next = now + next(pause for until, pause in LINE_SECONDS if now - self._begun < until)
        return True


class Lines:
    """Periodic progress lines for logs."""

    def __init__(self, console: Console, clock: Callable[[], float] = time.monotonic) -> None:
        self._console = console
        self._speed = SpeedMeter()
        self._cadence = Cadence(clock)

    def __call__(self, progress: Progress) -> None:
        if progress.note:
            self._console.print(_note(progress.note))
        if self._cadence.is_due(self._speed, progress):
            facts = (*self._speed.facts(progress), self._speed.time_left(progress))
            parts = (f"{_phase(progress)} {_counts(progress)}", *facts)
            self._console.print(Text(", ".join(part for part in parts if part)))


class JsonLines:
    """A JSON object per line now and then, and one for each note."""

    def __init__(self, stream: TextIO, clock: Callable[[], float] = time.monotonic) -> None:
        self._stream = stream
        self._speed = SpeedMeter()
        self._cadence = Cadence(clock)

    def __call__(self, progress: Progress) -> None:
        if self._cadence.is_due(self._speed, progress) or progress.note:
            line = msgspec.json.encode({"progress": self._speed.record(progress)}).decode()
            self._stream.write(f"{line}\n")
            self._stream.flush()


def compression_ratio(progress: Progress) -> float | None:
    """The compression ratio; None if the recipe does not count bytes."""
    return (
        round(progress.raw_bytes / progress.written_bytes, 2) if progress.raw_bytes * progress.written_bytes else None
    )


def _phase_facts(progress: Progress) -> Iterator[str]:
    """The figures of each phase, in the order in which data passes through them."""
    seconds = max(progress.seconds, 1e-3)
    if progress.read_bytes:
        yield _reading(progress, seconds)
    if progress.samples:
        yield f"{progress.samples / seconds:,.0f} samples/s"
    elif progress.rows:
        yield f"{progress.rows / seconds:,.0f} rows/s"
    if progress.tokens:
        yield f"{progress.tokens / seconds:,.0f} tokens/s"
    if progress.tokens and progress.utilization is not None:
        yield f"packed {progress.utilization:.1%}"
    ratio = compression_ratio(progress)
    if ratio is not None:
        yield f"compression {ratio:.1f}x"
    if progress.written_bytes:
        yield f"written {human_bytes(progress.written_bytes / seconds)}/s"
    if progress.failures:
        yield f"{progress.failures:,} failed"


def _reading(progress: Progress, seconds: float) -> str:
    """The bytes read or downloaded, and their rate."""
    rate = f"{human_bytes(progress.read_bytes / seconds)}/s"
    if not progress.downloads:
        return f"read {rate}"
    left = (progress.source_bytes - progress.read_bytes) * seconds / progress.read_bytes
    total = f" of {human_bytes(progress.source_bytes)}" if progress.source_bytes else ""
    eta = f", ETA {human_time(left)}" if left > 0 else ""
    return f"download {human_bytes(progress.read_bytes)}{total}, {rate}{eta}"


def _passed(progress: Progress) -> list[str]:
    """Planned bytes instead of a speed: planning skips most of a source without reading it."""
    total = f" of {human_bytes(progress.total_bytes)}" if progress.total_bytes else ""
    return [f"{human_bytes(progress.read_bytes)}{total} planned"] if progress.read_bytes else []


def _done_of(progress: Progress) -> tuple[int, int]:
    """Done and total work: bytes of source files while planning, if their sizes are known."""
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
    return f"{progress.done:,}/{progress.total:,} {progress.unit}  {share}%"


def _note(note: str) -> Text:
    return Text.assemble(("note: ", "yellow"), printable(note))
