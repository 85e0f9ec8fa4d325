"""`pytest --processes`: every test runs once, a file in one process, and whatever ends a process is a failed test."""

import re
import subprocess
import sys
from pathlib import Path

import pytest
from tests.warm_process import REPOSITORY, script_environment

SHARED = """
import os
import pytest

@pytest.fixture(scope="module")
def made(tmp_path_factory):
    with open({notes!r}, "a") as notes:
        notes.write(f"{{__name__}} {{os.getpid()}}\\n")

@pytest.mark.parametrize("number", range(20))
def test_of_many(made, number, tmp_path, capsys):
    print(number)
    assert capsys.readouterr().out == f"{{number}}\\n"
"""
OTHERS = """
import os
import pytest

def test_that_fails():
    print("said before it failed")
    assert [1, 2] == [1, 3]

@pytest.mark.skip(reason="for a reason")
def test_that_is_skipped():
    pass
"""
DEADLY = """
import os

def test_that_ends_its_process():
    os._exit(7)

def test_behind_it():
    pass
"""


def run(folder: Path, *options: str) -> "subprocess.CompletedProcess[str]":
    command = [sys.executable, "-m", "pytest", "-p", "tests.side_by_side", "-p", "no:cacheprovider", "--processes", "2"]
    return subprocess.run(
        [*command, "-rs", "--rootdir", str(folder), *options, str(folder)],
        env=script_environment(), cwd=REPOSITORY, capture_output=True, text=True, check=False, timeout=600,
    )  # fmt: skip


def test_every_test_runs_once_and_what_a_file_shares_is_made_once(tmp_path: Path) -> None:
    (tmp_path / "suite").mkdir()
    for name in ("test_a.py", "test_b.py", "test_c.py"):
        (tmp_path / "suite" / name).write_text(SHARED.format(notes=str(tmp_path / "notes")))
    (tmp_path / "suite" / "test_d.py").write_text(OTHERS)
    ran = run(tmp_path / "suite")
    assert ran.returncode == 1, ran.stdout + ran.stderr
    assert re.search(r"1 failed, 60 passed, 1 skipped", ran.stdout), ran.stdout
    assert "At index 1 diff: 2 != 3" in ran.stdout
    assert "said before it failed" in ran.stdout
    assert "for a reason" in ran.stdout
    made = [line.split()[0] for line in (tmp_path / "notes").read_text().splitlines()]
    assert sorted(made) == ["test_a", "test_b", "test_c"]


def test_a_process_that_ends_is_a_failed_test_and_the_others_go_on(tmp_path: Path) -> None:
    (tmp_path / "test_a.py").write_text(DEADLY)
    (tmp_path / "test_b.py").write_text(SHARED.format(notes=str(tmp_path / "notes")))
    ran = run(tmp_path)
    assert ran.returncode == 1, ran.stdout + ran.stderr
    assert "the process of tests ended with 7; what is left of this file was not run" in ran.stdout
    assert re.search(r"2 failed, 20 passed", ran.stdout), ran.stdout


@pytest.mark.parametrize("ending", ["os._exit(0)", "raise KeyboardInterrupt", "os.kill(os.getpid(), 9)"])
def test_a_process_that_ends_too_early_is_a_failure_whatever_its_exit_code(tmp_path: Path, ending: str) -> None:
    (tmp_path / "test_early.py").write_text(DEADLY.replace("os._exit(7)", ending))
    (tmp_path / "test_sound.py").write_text("def test_sound():\n    pass\n")
    ran = run(tmp_path)
    assert ran.returncode == 1, ran.stdout + ran.stderr
    assert "2 tests were not run to their end" in ran.stdout


MANY = """
import time
import pytest

@pytest.fixture(scope="module")
def server():
    with open({notes!r}, "a") as notes:
        notes.write("+")
    yield
    with open({notes!r}, "a") as notes:
        notes.write("-")

@pytest.mark.parametrize("number", range(400))
def test_many(server, number):
    print("x" * 500)
    time.sleep({seconds})
"""


def test_a_run_that_is_stopped_at_a_failure_ends_and_so_do_fixtures(tmp_path: Path) -> None:
    notes = str(tmp_path / "notes")
    quick, slow = MANY.format(notes=notes, seconds=0), MANY.format(notes=notes, seconds=0.05)
    for name, text in (("test_a.py", quick), ("test_b.py", slow), ("test_c.py", OTHERS)):
        (tmp_path / name).write_text(text)
    ran = run(tmp_path, "-x")
    assert ran.returncode == 1, ran.stdout + ran.stderr
    assert "stopping after 1 failures" in ran.stdout
    assert sorted((tmp_path / "notes").read_text()) == ["+", "+", "-", "-"]
