"""Python processes that tests start, kill and read."""

import os
import subprocess
import sys
from collections.abc import Mapping
from pathlib import Path

REPOSITORY = Path(__file__).resolve().parents[2]


def script_environment() -> dict[str, str]:
    """The environment of this process, with its import path."""
    return {**os.environ, "PYTHONPATH": os.pathsep.join([str(REPOSITORY), *filter(None, sys.path)])}


class PythonProcess(subprocess.Popen[str]):
    """A running `python ARGUMENTS…` with pipes for its output."""

    def __init__(self, *arguments: str, env: Mapping[str, str] | None = None, cwd: Path = REPOSITORY) -> None:
        super().__init__(
            [sys.executable, *arguments], env=env or script_environment(), cwd=cwd,
            stdin=subprocess.DEVNULL, stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True,
        )  # fmt: skip

    def communicate(self, input: str | None = None, timeout: float | None = 600) -> tuple[str, str]:
        """The rest of its output and its errors, once it has ended; a process that hangs is killed."""
        try:
            return super().communicate(input, timeout)
        except subprocess.TimeoutExpired:
            self.kill()
            raise
