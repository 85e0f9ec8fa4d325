"""Progress in Python: a bar where a person sees it, a function where one is passed, silence elsewhere."""

import os
import pty
import subprocess
import sys
from pathlib import Path

import pytest

import forebay as fb

SCRIPT = """
import sys
import forebay as fb
fb.build("cache", fb.sources.lines("raw"), fb.RawRecipe(), workers=0{terms})
print("rich" in sys.modules)
"""
# Just enough of a notebook for rich to see one: the shell's class, and the display that the kernel has.
NOTEBOOK = """
import builtins, sys, types
class ZMQInteractiveShell: pass
shown = []
class Handle:
    def update(self, data, raw): shown.append(data["text/plain"])
display = types.ModuleType("IPython.display")
display.display = lambda data, raw, display_id: Handle()
sys.modules |= {{"IPython": types.ModuleType("IPython"), "IPython.display": display, "ipykernel": object()}}
builtins.get_ipython = ZMQInteractiveShell
"""


def run(folder: Path, script: str, stderr: int = subprocess.PIPE) -> subprocess.CompletedProcess:
    (folder / "raw").mkdir(exist_ok=True)
    (folder / "raw" / "a.txt").write_text("one\ntwo\n")
    command = [sys.executable, "-c", script]
    return subprocess.run(command, cwd=folder, stdout=subprocess.PIPE, stderr=stderr, text=True, check=True)


def on_terminal(folder: Path, terms: str = "") -> tuple[str, str]:
    """What a script prints, and what a person sees on the terminal."""
    ours, theirs = pty.openpty()
    try:
        printed = run(folder, SCRIPT.format(terms=terms), theirs).stdout.strip()
        os.write(theirs, b".")  # so that there is something to read
        return printed, os.read(ours, 100_000).decode()
    finally:
        os.close(ours)
        os.close(theirs)


def test_a_terminal_shows_a_bar(tmp_path: Path):
    printed, seen = on_terminal(tmp_path)
    assert printed == "True"
    assert "1/1 chunks  100%" in seen


@pytest.mark.parametrize("progress", ["False", "lambda progress: None"])
def test_a_terminal_shows_nothing_where_progress_is_false_or_a_function(tmp_path: Path, progress: str):
    assert on_terminal(tmp_path, f", progress={progress}") == ("False", ".")


def test_elsewhere_a_build_is_silent_and_does_not_import_rich(tmp_path: Path):
    done = run(tmp_path, SCRIPT.format(terms=""))
    assert (done.stdout.strip(), done.stderr) == ("False", "")


def test_a_notebook_shows_a_bar_below_its_cell(tmp_path: Path):
    done = run(tmp_path, (NOTEBOOK + SCRIPT + "print(shown[-1])").format(terms=""))
    assert "1/1 chunks  100%" in done.stdout
    assert "\x1b" not in done.stdout
    assert done.stderr == ""


@pytest.mark.parametrize("name", ["progress", "on_progress"])
def test_every_long_verb_reports_to_a_function(tmp_path: Path, name: str):
    (tmp_path / "raw").mkdir()
    (tmp_path / "raw" / "a.txt").write_text("one\ntwo\n")
    root, source = tmp_path / "cache", fb.sources.lines(tmp_path / "raw")
    phases: list[str] = []
    terms = {name: lambda progress: phases.append(progress.phase)}
    for phase, verb in {
        "building": lambda: fb.build(root, source, fb.RawRecipe(), workers=0, **terms),
        "verifying": lambda: fb.verify(root, **terms),
        "copying": lambda: fb.copy(root, tmp_path / "copy", **terms),
    }.items():
        phases.clear()
        verb()
        assert phase in phases
    phases.clear()
    (tmp_path / "raw" / "a.txt").write_text("one\ntwo\nthree\n")
    fb.update(root, source=source, workers=0, **terms)
    assert phases
