"""Progress: a bar on a terminal, plain lines elsewhere, at most one every two seconds."""

import io
import os
import pty
import re
import subprocess
import sys
from pathlib import Path

import pytest
from rich.console import Console
from tests.cli.running import COMMAND, write_lines

from forebay.cache.records import Progress
from forebay.preview import progress as progress_module
from forebay.preview.progress import Lines, Meter, Pace

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


def lines_of(*moments: Progress) -> list[str]:
    text = io.StringIO()
    shown = Lines(Console(file=text, width=1000))
    for moment in moments:
        shown(moment)
    return text.getvalue().splitlines()


def moment(**changes: object) -> Progress:
    return Progress(**{name: changes.get(name, getattr(HALF, name)) for name in Progress.__struct_fields__})


def test_a_line_says_all_there_is_to_know(monkeypatch: pytest.MonkeyPatch):
    monkeypatch.setattr(progress_module, "LINE_SECONDS", 0)
    (line,) = lines_of(HALF)
    assert re.fullmatch(
        r"building 17/34 chunks  50 %, 200 rows/s, read 3\.5 MB/s, written 625\.0 kB/s, CPU \d+ %, "
        r"memory [\d.]+ MB, busy 2/2, ETA 4\.0 s",
        line,
    )


def test_planning_claims_no_speed(monkeypatch: pytest.MonkeyPatch):
    monkeypatch.setattr(progress_module, "LINE_SECONDS", 0)
    begun, on = (
        Progress(phase="planning", done=done, total=9, unit="files", read_bytes=size)
        for done, size in ((0, 0), (4, 7_000_000))
    )
    first, second = lines_of(begun, on)
    assert re.fullmatch(r"planning 0/9 files  0 %,( CPU \d+ %,)? memory [\d.]+ MB", first)
    assert re.fullmatch(r"planning 4/9 files  44 %, 7\.0 MB planned,( CPU \d+ %,)? memory [\d.]+ MB", second)


def test_there_is_at_most_one_line_in_two_seconds_but_every_note():
    notes = [moment(note=f"chunk {number} failed: \x1b[31m") for number in range(3)]
    assert lines_of(HALF, *notes, HALF) == [rf"note: chunk {number} failed: \x1b[31m" for number in range(3)]


def test_the_time_left_counts_only_what_this_build_made():
    pace = Pace()
    pace.follow(moment(done=30, seconds=0.1))
    assert pace.time_left(moment(done=32, seconds=10.0)) == "ETA 10 s"
    assert pace.time_left(moment(done=34, seconds=20.0)) == ""


def test_the_meter_sums_processes_and_survives_those_that_end():
    meter = Meter()
    alone = meter.measure([]).memory_bytes
    holding = "import time; held = b'x' * 100_000_000; print(flush=True); time.sleep(60)"
    with subprocess.Popen([sys.executable, "-c", holding], stdout=subprocess.PIPE) as process:
        assert process.stdout is not None
        process.stdout.readline()
        both = meter.measure([process.pid]).memory_bytes
        process.kill()
    assert 0 < alone < both
    assert meter.measure([process.pid, 2**22 + 1]).memory_bytes > 0


def test_a_terminal_gets_a_bar_and_the_result(tmp_path: Path):
    source = write_lines(tmp_path / "data")
    words = ["build", "raw", source, "--into", tmp_path / "cache", "--chunk-bytes", "400", "--workers", "1"]
    shown = on_terminal(*words)
    assert "━" in shown
    assert "12/12 chunks  100 %" in shown
    assert "12 built" in shown
    assert "━" not in on_terminal("verify", tmp_path / "cache", "--json")


def test_help_fits_a_terminal_and_keeps_its_summaries_whole():
    for words in (["--help"], ["build", "--help"], ["build", "images", "--help"]):
        lines = on_terminal(*words).splitlines()
        assert max(map(len, lines)) <= 80
        assert not any(line.endswith("...") for line in lines[1:])


def on_terminal(*words: object) -> str:
    """What a terminal of 80 columns gets to see."""
    ours, theirs = pty.openpty()
    environment = {**os.environ, "COLUMNS": "80", "TERM": "xterm"}
    with subprocess.Popen([*COMMAND, *map(str, words)], stdout=theirs, stderr=theirs, env=environment) as process:
        os.close(theirs)
        seen = b""
        try:
            while piece := os.read(ours, 65536):
                seen += piece
        except OSError:  # the other end is closed
            pass
        assert process.wait() == 0, seen
    os.close(ours)
    return seen.decode()
