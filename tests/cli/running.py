"""The command line as a test runs it: in this process, or as a process of its own."""

import json
import re
import subprocess
import sys
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from click.testing import CliRunner, Result
from tests.helpers import cache_files

from forebay.cli.main import cli

COMMAND = [sys.executable, "-m", "forebay.cli"]
_STILL_TRYING = re.compile(r"^note: no answer from \S+ yet; still trying\n", re.MULTILINE)


@dataclass(frozen=True)
class Ran:
    """How a command ended."""

    code: int
    out: str
    err: str

    @property
    def json(self) -> Any:
        """The result in the JSON that a command printed; the exit code is what `ok` says."""
        document = json.loads(self.out)
        assert document["ok"] == (self.code == 0)
        return document["result"]

    @property
    def error(self) -> Any:
        """The error in the JSON that a command printed."""
        document = json.loads(self.out)
        assert document["ok"] is False
        return document["error"]


def run(*words: object, code: int | None = 0) -> Ran:
    """Run a command in this process; it must end with an exit code (None: any), and never with a traceback."""
    unwrapped = {"COLUMNS": None}  # whatever the shell exports
    result: Result = CliRunner().invoke(cli, [str(word) for word in words], prog_name="forebay", env=unwrapped)
    ran = Ran(result.exit_code, result.stdout, result.stderr)
    assert "Traceback" not in ran.err, ran.err
    assert result.exception is None or isinstance(result.exception, SystemExit), result.exception
    assert code in (None, ran.code), (words, ran)
    return ran


def run_process(*words: object, code: int = 0, **options: Any) -> Ran:
    """Run a command as a user does."""
    done = subprocess.run(
        [*COMMAND, *map(str, words)], capture_output=True, text=True, check=False, timeout=600, **options
    )
    assert done.returncode == code, (words, done)
    return Ran(done.returncode, done.stdout, _STILL_TRYING.sub("", done.stderr))  # said on a slow machine


def wait_until(what: Callable[[], bool], process: "subprocess.Popen[str]", seconds: float = 60) -> None:
    """Wait for something that a running command does."""
    deadline = time.monotonic() + seconds
    while not what():
        assert process.poll() is None, f"it ended before its time: {process.communicate()}"
        assert time.monotonic() < deadline, "it takes too long"
        time.sleep(0.01)


def write_lines(folder: Path, name: str = "a.jsonl", count: int = 60) -> Path:
    """A file of lines, about 60 bytes each."""
    folder.mkdir(parents=True, exist_ok=True)
    path = folder / name
    path.write_text(
        "".join(f'{{"text": "line {number:03d} of {name}", "fill": "{"x" * 20}"}}\n' for number in range(count))
    )
    return path


def build_lines(tmp_path: Path, *flags: object) -> tuple[Path, Path]:
    """A small cache of lines in some ten chunks: its root and its source."""
    source = write_lines(tmp_path / "data")
    root = tmp_path / "cache"
    run("build", "raw", source, "--into", root, "--chunk-bytes", "400", "--workers", 0, *flags)
    return root, source


def write_documents(folder: Path, texts: Sequence[str], name: str = "a.jsonl", field: str = "text") -> Path:
    """A file of JSON lines with one document each."""
    folder.mkdir(parents=True, exist_ok=True)
    path = folder / name
    path.write_text("".join(json.dumps({field: text}) + "\n" for text in texts))
    return path


def story(number: int) -> str:
    """A document of its own, some forty tokens long."""
    return f"Story {number}. " + " ".join(f"In chapter {part} nothing happens." for part in range(6))


def build_tokens(tmp_path: Path, texts: Sequence[str], *flags: object) -> tuple[Path, Path]:
    """A small cache of packed tokens, 64 in a row: its root and its source."""
    source = write_documents(tmp_path / "data", texts)
    root = tmp_path / "cache"
    words = ["--sequence-length", 64, "--chunk-rows", 8, "--workers", 0, *flags]
    run("build", "tokens", source, "--into", root, *words)
    return root, source


def chunk_path(root: Path, chunk: int, layer: str = "raw") -> Path:
    return cache_files.chunk_path(root, layer, chunk)


def planned_chunks(root: Path) -> int:
    """How many chunks a cache of one layer has planned."""
    return int(run("status", root, "--json", code=None).json["layers"][0]["planned"])


def flip(path: Path, position: int) -> None:
    content = bytearray(path.read_bytes())
    content[position] ^= 1
    path.write_bytes(content)


def stories(number: int) -> list[str]:
    """One slice of a function source."""
    return [story(10 * number + at) for at in range(10)]
