"""The most memory that a worker of a build ever held, seen from outside."""

import contextlib
import os
import subprocess
import sys
import time
from pathlib import Path

import psutil

LOOK_SECONDS = 0.02


def worker_peak(root: Path, files: list[Path], workers: int, environment: dict[str, str]) -> tuple[float, float]:
    """Peak RSS as the kernel recorded it, and the largest PSS that was seen, of any one worker, in MB."""
    command = [sys.executable, "-m", "benchmarks.tokens_runs", "build", str(root), str(workers), *map(str, files)]
    rss = pss = 0
    with subprocess.Popen(command, env=environment, stdout=subprocess.DEVNULL) as builder:
        while builder.poll() is None:
            for worker in _workers(builder.pid):
                rss = max(rss, _kilobytes(worker, "status", "VmHWM:"))
                pss = max(pss, _kilobytes(worker, "smaps_rollup", "Pss:"))
            time.sleep(LOOK_SECONDS)
    if builder.returncode:
        raise RuntimeError(f"the build for the memory figures ended with {builder.returncode}")
    return rss * 1024 / 1e6, pss * 1024 / 1e6


def _workers(builder: int) -> list[int]:
    """Its children, but for those that are still copies of the builder itself."""
    with contextlib.suppress(psutil.NoSuchProcess):
        return [child.pid for child in psutil.Process(builder).children() if "engine.local" in str(child.cmdline())]
    return []


def _kilobytes(pid: int, file: str, field: str) -> int:
    """A figure from /proc, 0 where the process is gone."""
    with contextlib.suppress(OSError, IndexError):
        return int(Path(os.sep, "proc", str(pid), file).read_text().partition(f"\n{field}")[2].split()[0])
    return 0
