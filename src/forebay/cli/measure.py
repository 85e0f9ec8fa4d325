"""What a builder and its workers take of the machine."""

import os
from collections.abc import Iterable
from dataclasses import dataclass

import psutil


@dataclass(frozen=True, slots=True)
class Usage:
    cpu_percent: float
    memory_bytes: int


class Meter:
    """Measures this process and others; CPU since the last measurement."""

    def __init__(self) -> None:
        self._processes: dict[int, psutil.Process] = {}

    def measure(self, pids: Iterable[int]) -> Usage:
        wanted = {os.getpid(), *pids}
        self._processes = {pid: known for pid, known in self._processes.items() if pid in wanted}
        found = [_usage(process) for pid in wanted if (process := self._process(pid)) is not None]
        return Usage(sum(one.cpu_percent for one in found), sum(one.memory_bytes for one in found))

    def _process(self, pid: int) -> psutil.Process | None:
        try:
            return self._processes.setdefault(pid, self._processes.get(pid) or psutil.Process(pid))
        except psutil.Error:
            return None


def _usage(process: psutil.Process) -> Usage:
    """One process; nothing where it has just ended."""
    try:
        return Usage(process.cpu_percent(), _memory(process))
    except psutil.Error:
        return Usage(0.0, 0)


def _memory(process: psutil.Process) -> int:
    """Its proportional share of memory; all it has resident where the system does not tell shares."""
    try:
        full = process.memory_full_info()
        return int(getattr(full, "pss", 0) or full.rss)
    except psutil.AccessDenied:
        return int(process.memory_info().rss)
