"""Ctrl-C, SIGTERM and the demo: real processes."""

import os
import re
import shlex
import signal
import subprocess
import sysconfig
from pathlib import Path

import pytest
from tests.cli.running import COMMAND, run, run_process, wait_until

LIBRARY = os.path.join(sysconfig.get_path("stdlib"), "[c-e]*")
WORDS = ["build", "raw", LIBRARY, "--suffix", ".py", "--level", "max", "--chunk-bytes", "128KiB", "--workers", "2"]


def chunk_count(root: Path) -> int:
    return len(list(root.glob("layers/raw.*/*.safetensors")))


def start(*words: object) -> "subprocess.Popen[str]":
    return subprocess.Popen(
        [*COMMAND, *map(str, words)],
        stdout=subprocess.PIPE,
        stderr=subprocess.PIPE,
        text=True,
        stdin=subprocess.DEVNULL,
    )


@pytest.mark.slow
@pytest.mark.parametrize("number", [signal.SIGINT, signal.SIGTERM])
def test_a_signal_stops_a_build_cleanly_and_the_command_to_go_on_is_right(tmp_path: Path, number: signal.Signals):
    root = tmp_path / "my cache"
    process = start(*WORDS, "--into", root)
    wait_until(lambda: chunk_count(root) >= 2, process)
    process.send_signal(number)
    out, err = process.communicate(timeout=600)
    assert process.returncode == 130
    assert out == ""
    assert "Traceback" not in err
    said = re.search(
        r"stopped: all finished chunks of .* are published \(raw (\d+) of (\d+)\)\n"
        r"hint: resume with: (forebay .*)\n",
        err,
    )
    assert said is not None, err
    present, planned = int(said[1]), int(said[2])
    assert present <= chunk_count(root) < planned  # files whose worker could not report yet are adopted on resume
    status = run("status", root, "--json").json
    assert status["layers"][0]["listed"] == present
    assert status["claims"] == []
    assert not [path for path in root.rglob("*") if ".tmp-" in path.name]
    run_process(*shlex.split(said[3])[1:])
    assert run("status", root, "--json").json["complete"]


def test_a_signal_while_planning_says_how_to_start_again(tmp_path: Path):
    folder = tmp_path / "data"
    folder.mkdir()
    os.mkfifo(folder / "never.txt")  # whoever plans this waits for ever
    process = start("estimate", "raw", folder / "never.txt", "--unit", "files")
    try:
        process.communicate(timeout=3)
    except subprocess.TimeoutExpired:
        process.send_signal(signal.SIGTERM)
    _, err = process.communicate(timeout=600)
    assert "Traceback" not in err
    if process.returncode == 130:  # else the core refused it, which is as good
        assert "stopped\nhint: start again with: forebay estimate raw" in err


@pytest.mark.slow
def test_the_demo_does_what_it_says(tmp_path: Path):
    size = ["--names", "[f-h]*", "--chunk-rows", 20]
    ran = run_process("demo", "--json", *size, env={**os.environ, "TMPDIR": str(tmp_path)})
    report = ran.json
    assert [step["command"].split()[1] for step in report["steps"]] == [
        "estimate", "build", "status", "build", "verify", "verify", "repair", "verify", "peek", "info",
    ]  # fmt: skip
    assert [step["exit_code"] for step in report["steps"]] == [0, 130, 0, 0, 0, 1, 0, 0, 0, 0]
    for words in (
        "$ forebay build tokens",
        "stopped: ",
        "bad-json",  # of the first chunk: shown by `status` if it was listed, else by the next build
        "hint: resume with: forebay build tokens library.jsonl",
        "not sound",
        "restored, byte for byte",
    ):
        assert words in ran.err
    assert report["root"].startswith(str(tmp_path))
    assert list(tmp_path.iterdir()) == [], "a temporary folder is not left behind"


def test_the_demo_needs_a_folder_of_its_own(tmp_path: Path):
    (tmp_path / "mine").touch()
    assert "is not empty" in run_process("demo", "--into", tmp_path, code=2).err


@pytest.mark.slow
def test_the_demo_fails_when_a_step_does_not_do_what_it_should(tmp_path: Path):
    ran = run_process("demo", "--into", tmp_path / "demo", "--names", "no_such_name*", code=1)
    assert "error: the demo failed: " in ran.err
    assert (tmp_path / "demo").exists()
