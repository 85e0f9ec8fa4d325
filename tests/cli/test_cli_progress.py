"""Progress: a bar that fits the terminal, plain lines elsewhere, fewer and fewer; the first sign of life."""

import fcntl
import io
import itertools
import json
import os
import pty
import re
import struct
import subprocess
import sys
import termios
from collections.abc import Iterable
from pathlib import Path
from typing import Any

import pytest
from rich.console import Console
from tests.cli.running import COMMAND, write_lines

from forebay.cache.heartbeat import ProcessTree
from forebay.cache.reports import Progress
from forebay.preview.progress import Bar, JsonLines, Lines, SpeedMeter

HALF = Progress(
    phase="building",
    done=17,
    total=34,
    rows=800,
    read_bytes=14_000_000,
    written_bytes=2_500_000,
    seconds=4.0,
    workers=2,
    busy=2,
    pids=(os.getpid(),),
)


def lines_of(*moments: Progress, seconds: Iterable[float] = itertools.repeat(0.0)) -> list[str]:
    """The lines that a log gets, by a clock that is `seconds` at the start and at each moment."""
    text = io.StringIO()
    clock = iter(seconds)
    shown = Lines(Console(file=text, width=1000), clock=lambda: next(clock))
    for moment in moments:
        shown(moment)
    return text.getvalue().splitlines()


def moment(**changes: object) -> Progress:
    return Progress(**{name: changes.get(name, getattr(HALF, name)) for name in Progress.__struct_fields__})


def test_a_line_says_all_there_is_to_know():
    (line,) = lines_of(HALF, seconds=[0, 2])
    assert re.fullmatch(
        r"building 17/34 chunks  50%, read 3\.5 MB/s, 200 rows/s, written 625\.0 kB/s, "
        r"memory [\d.]+ [MG]B, CPU \d+%, busy 2/2, ETA 4\.0 s",
        line,
    )


@pytest.mark.parametrize("colors", ["standard", "256", "truecolor"])
def test_finished_bar_has_another_color_than_an_empty_one(colors: Any) -> None:
    def drawn(done: int) -> str:
        text = io.StringIO()
        console = Console(file=text, width=120, force_terminal=True, color_system=colors)
        Bar(console, console.print)(moment(done=done))
        return re.findall(r"\x1b\[([\d;]+)m━", text.getvalue())[0]

    assert drawn(0) != drawn(34) != drawn(17) != drawn(0)


PHASES = {
    "samples": 4000,
    "tokens": 102_000,
    "utilization": 0.9974,
    "raw_bytes": 6_000_000,
    "source_bytes": 28_000_000,
    "downloads": True,
    "memory_limit": 16_000_000_000,
}


def test_progress_has_a_figure_for_each_phase_and_memory_of_the_limit():
    (line,) = lines_of(moment(**PHASES), seconds=[0, 2])
    assert "download 14.0 MB of 28.0 MB, 3.5 MB/s, ETA 4.0 s, 1,000 samples/s, 25,500 tokens/s, packed 99.7%, " in line
    assert re.search(r"compression 2\.4x, written .*, memory [\d.]+ [MG]B of 16\.0 GB, .*, ETA 4\.0 s$", line)


def test_json_lines_have_the_figures_of_a_line_and_every_note():
    stream, clock = io.StringIO(), iter([0.0, 2.0, 2.1, 2.2])
    shown = JsonLines(stream, clock=lambda: next(clock))
    for one in (moment(**PHASES), moment(**PHASES), moment(note="chunk 3 failed")):
        shown(one)
    first, noted = (json.loads(line)["progress"] for line in stream.getvalue().splitlines())
    assert (first["phase"], first["done"], first["total"]) == ("building", 17, 34)
    assert (first["samples_per_second"], first["tokens_per_second"], first["utilization"]) == (1000.0, 25500.0, 0.9974)
    assert (first["read_bytes"], first["source_bytes"], first["read_bytes_per_second"]) == (14e6, 28e6, 3.5e6)
    assert (first["compression_ratio"], first["memory_limit"], first["eta_seconds"]) == (2.4, 16e9, 4.0)
    assert first["memory_bytes"] > 0
    assert noted["note"] == "chunk 3 failed"


def test_planning_claims_no_speed_but_tells_the_time_left():
    begun, on = (
        Progress(phase="planning", done=done, total=9, unit="files", read_bytes=size)
        for done, size in ((0, 0), (4, 7_000_000))
    )
    first, second = lines_of(begun, on, seconds=[0, 2, 20])
    assert re.fullmatch(r"planning 0/9 files  0%, memory [\d.]+ [MG]B(, CPU \d+%)?", first)
    facts = r"7\.0 MB planned, memory [\d.]+ [MG]B,( CPU \d+%,)? ETA .+"
    assert re.fullmatch(rf"planning 4/9 files  44%, {facts}", second)


def test_a_log_gets_a_line_after_two_seconds_and_then_fewer_and_fewer():
    hours = 2 * 3600
    lines = lines_of(*(moment(done=second, total=hours) for second in range(hours)), seconds=[0, *range(hours)])
    at = [int(re.search(r" ([\d,]+)/", line)[1].replace(",", "")) for line in lines]  # type: ignore[index]
    pauses = [after - before for before, after in itertools.pairwise(at)]
    assert at[0] == 2
    assert set(pauses[:5]) == {10}
    assert [pause for pause, start in zip(pauses, at, strict=False) if 60 <= start < 600] == [30] * 18
    assert set(pauses[30:]) == {60}
    assert len(lines) < 150


def test_a_short_job_gets_no_line_but_every_note():
    notes = [moment(note=f"chunk {number} failed: \x1b[31m") for number in range(3)]
    assert lines_of(HALF, *notes, HALF) == [rf"note: chunk {number} failed: \x1b[31m" for number in range(3)]


def test_the_time_left_counts_only_what_this_build_made():
    meter = SpeedMeter()
    meter.follow(moment(done=30, seconds=0.1))
    assert meter.time_left(moment(done=32, seconds=10.0)) == "ETA 10 s"
    assert meter.time_left(moment(done=34, seconds=20.0)) == ""


def test_memory_is_that_of_this_process_and_its_children():
    processes = ProcessTree(os.getpid())
    alone = processes.measure()[2]
    holding = "import time; held = b'x' * 100_000_000; print(flush=True); time.sleep(60)"
    with subprocess.Popen([sys.executable, "-c", holding], stdout=subprocess.PIPE) as process:
        assert process.stdout is not None
        process.stdout.readline()
        both = processes.measure()[2]
        process.kill()
    assert 0 < alone < both - 100_000_000 < processes.measure()[2] + 100_000_000


@pytest.mark.slow
def test_a_terminal_gets_a_bar_that_does_not_wrap_and_the_result(tmp_path: Path):
    source = write_lines(tmp_path / "data")
    words = ["build", "raw", source, "--into", tmp_path / "cache", "--chunk-bytes", "400", "--workers", "1"]
    shown = on_terminal(*words, columns=60)
    assert "━" in shown
    assert "12/12 chunks  100%" in shown
    assert "12 built" in shown
    drawn = [line for line in re.split(r"[\r\n]+", ESCAPES.sub("", shown)) if "chunks  " in line or "rows/s" in line]
    assert max(len(line.rstrip()) for line in drawn) <= 60
    assert "━" not in on_terminal("verify", tmp_path / "cache", "--json")


@pytest.mark.slow
def test_help_fits_a_terminal_and_keeps_its_summaries_whole():
    for words in (["--help"], ["build", "--help"], ["build", "images", "--help"]):
        lines = on_terminal(*words).splitlines()
        assert max(map(len, lines)) <= 80
        assert not any(line.endswith("...") for line in lines[1:])


LONG = moment(
    phase="waiting",
    done=123_456,
    total=1_234_567,
    rows=10**9,
    failures=1234,
    read_bytes=10**12,
    waiting_for=("a-machine-with-a-long-name.example.org", "another-machine.example.org"),
    seconds=3000.0,
)


@pytest.mark.parametrize("width", [40, 60, 80, 200])
@pytest.mark.parametrize(
    "progress", [HALF, moment(**PHASES), LONG, Progress(phase="planning", done=0, total=0, unit="files")]
)
def test_the_bar_fits_the_terminal_and_shows_every_fact(width: int, progress: Progress):
    text = io.StringIO()
    console = Console(file=text, width=width, force_terminal=True, color_system=None)
    bar = Bar(console, console.print)
    bar(progress)
    bar_line, *lines = text.getvalue().splitlines()
    assert max(len(line.rstrip()) for line in (bar_line, *lines)) <= width
    assert f"{progress.done:,}/{progress.total:,} {progress.unit}" in bar_line
    shown = [fact.strip() for line in lines for fact in line.split(" · ")]
    assert shown == [fact[: width - 2] for fact in bar._speed.facts(progress)]


def test_the_first_sign_of_life_comes_before_any_library_is_imported(tmp_path: Path):
    (tmp_path / "click.py").write_text("raise ImportError('click is not imported yet')")
    path = os.pathsep.join([str(tmp_path), *sys.path])
    shown = on_terminal("build", "raw", "data", "--into", "cache", code=1, PYTHONPATH=path)
    assert re.search(r"forebay build: starting ….*cannot start: click is not imported yet", shown, re.DOTALL)
    for quiet in ("--json", "-q", "--help"):
        assert "starting" not in on_terminal("build", "raw", quiet, code=1, PYTHONPATH=path)


@pytest.mark.slow
def test_the_first_sign_is_erased_by_what_comes_next(tmp_path: Path):
    source = write_lines(tmp_path / "data")
    erased = "starting …\x1b[?25l\r\x1b[2K"
    assert erased in on_terminal("build", "raw", source, "--into", tmp_path / "cache", "--workers", "0")
    assert "starting …\r\x1b[2K" in on_terminal("build", "raw", "--into", tmp_path / "cache", code=2)


ESCAPES = re.compile(r"\x1b\[[0-9;?]*[A-Za-z]")


def on_terminal(*words: object, columns: int = 80, code: int = 0, **environment: str) -> str:
    """What a terminal gets to see."""
    ours, theirs = pty.openpty()
    fcntl.ioctl(theirs, termios.TIOCSWINSZ, struct.pack("HHHH", 24, columns, 0, 0))
    env = {**os.environ, "TERM": "xterm", **environment}
    env.pop("COLUMNS", None)
    with subprocess.Popen([*COMMAND, *map(str, words)], stdin=theirs, stdout=theirs, stderr=theirs, env=env) as process:
        os.close(theirs)
        seen = b""
        try:
            while piece := os.read(ours, 65536):
                seen += piece
        except OSError:  # the other end is closed
            pass
        assert process.wait() == code, seen
    os.close(ours)
    return seen.decode()
