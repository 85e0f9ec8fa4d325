"""Threads of a loader, in real processes: they end with it, whatever ends it."""

import signal
import subprocess
import sys
from pathlib import Path

import pytest
from tests.builders import REPOSITORY, script_environment
from tests.token_caches import token_cache

ROWS = 120


@pytest.fixture(scope="module")
def root(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return token_cache(tmp_path_factory.mktemp("threads"), ROWS, chunk_rows=20, codec="lz4")


def start(command: str, root: Path) -> "subprocess.Popen[str]":
    arguments = ["-X", "faulthandler", "-W", "error", "-m", "tests.torch.loader_process", command, str(root)]
    return subprocess.Popen(
        [sys.executable, *arguments],
        cwd=REPOSITORY,
        env=script_environment(),
        stdout=subprocess.PIPE,
        stderr=subprocess.PIPE,
        text=True,
    )


def said(process: "subprocess.Popen[str]", seconds: float = 100) -> str:
    """All that it printed, once it has ended well and without a word of complaint."""
    try:
        out, err = process.communicate(timeout=seconds)
    finally:
        process.kill()
    assert (process.returncode, err) == (0, ""), out
    return out


@pytest.mark.parametrize(
    ("command", "answer"),
    [
        ("leave-in-the-middle", "left\n"),
        ("transform-raises", "raised in its turn\n"),
        ("transform-sleeps", "asleep\n"),
        ("fork-in-the-middle", "both went on\n"),
        ("fork-and-leave", "four children\n"),
        ("leave-nothing", "nothing left\n"),
    ],
)
def test_threads_end_with_whatever_ends_the_loader(root: Path, command: str, answer: str) -> None:
    assert said(start(command, root)) == answer


def test_ctrl_c_stops_training_at_once_and_it_can_go_on(root: Path) -> None:
    process = start("wait-for-interrupt", root)
    assert process.stdout is not None
    for _ in range(3):
        process.stdout.readline()
    process.send_signal(signal.SIGINT)
    *_, interrupted, ended = said(process).splitlines()
    assert interrupted.startswith("interrupted ")
    assert ended == "ended"
