"""Threads of a loader, in real processes: they end with it, whatever ends it."""

import json
import signal
import subprocess
import sys
from pathlib import Path

import pytest
from tests.builders import REPOSITORY, script_environment
from tests.token_caches import grow_cache, interleaved, numbers_of, token_cache

import forebay as fb
from forebay.torch import Loader

ROWS = 120


@pytest.fixture(scope="module")
def root(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return token_cache(tmp_path_factory.mktemp("threads"), ROWS, chunk_rows=20, codec="lz4")


def start(command: str, root: Path, *more: object) -> "subprocess.Popen[str]":
    options = ["-X", "faulthandler", "-W", "error"]
    arguments = [*options, "-m", "tests.torch.loader_process", command, str(root), *map(str, more)]
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


def test_ranks_that_know_each_other_grow_together(tmp_path: Path) -> None:
    root = token_cache(tmp_path, 11)
    grow_cache(tmp_path, 11, 6)
    ranks = [start("grow-together", root, tmp_path / "meeting", rank) for rank in (0, 1)]
    (first, generations), (second, same) = (json.loads(said(rank)) for rank in ranks)
    assert generations == same == [fb.open_cache(root).generation.number]
    for epoch in zip(first, second, strict=True):
        starts = range(0, 17, 2)
        assert sorted(row for batch in interleaved(starts, epoch) for row in batch) == list(range(17))
    alone = Loader(fb.open_cache(root, generation=0), global_batch_size=2, growth="within", drop_last=False)
    assert interleaved(range(0, 17, 2), [first[0], second[0]]) == numbers_of(alone)


def test_ranks_that_opened_different_generations_read_the_lowest(tmp_path: Path) -> None:
    root = token_cache(tmp_path, 11)
    grow_cache(tmp_path, 11, 6)
    ranks = [start("open-apart", root, tmp_path / "meeting", rank) for rank in (0, 1)]
    (first, generations), (second, same) = (json.loads(said(rank)) for rank in ranks)
    assert generations == same == [0]
    alone = Loader(fb.open_cache(root, generation=0), global_batch_size=2, drop_last=False)
    assert interleaved(range(0, 11, 2), [first, second]) == numbers_of(alone)
