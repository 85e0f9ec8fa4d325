"""What a builder and its workers use of their machine; its heartbeat carries it, for observers elsewhere."""

from contextlib import suppress
from dataclasses import dataclass, field

import psutil


@dataclass(frozen=True, slots=True)
class Usage:
    """CPU and memory of a process and its descendants."""

    workers: int = 0  # descendants
    cpu_percent: float = 0.0  # of one core, since the last measurement
    memory_bytes: int = 0  # that belongs to no other process


@dataclass(eq=False)
class ProcessTree:
    """A process and its descendants, which are kept so that CPU is counted between two measurements."""

    pid: int
    _known: dict[int, psutil.Process] = field(default_factory=dict)

    def begin(self) -> Usage:
        """Count CPU from now on, and measure nothing else: in a process of a gigabyte that takes some 25 ms."""
        with suppress(psutil.Error):
            self._known = {self.pid: psutil.Process(self.pid)}
            self._known[self.pid].cpu_percent()
        return Usage()

    def measure(self) -> Usage:
        try:
            top = self._known.get(self.pid) or psutil.Process(self.pid)
            below = {child.pid: child for child in top.children(recursive=True)}
        except (psutil.Error, ValueError):  # ValueError: a claim may name any number
            return Usage()
        self._known = {self.pid: top} | {pid: self._known.get(pid, child) for pid, child in below.items()}
        found = [_measured(process) for process in self._known.values()]
        return Usage(len(below), round(sum(cpu for cpu, _ in found), 1), sum(memory for _, memory in found))


def _measured(process: psutil.Process) -> tuple[float, int]:
    """CPU in percent and memory in bytes; zeros where the process has ended or belongs to somebody else."""
    try:
        return process.cpu_percent(), int(process.memory_full_info().uss)
    except psutil.Error:
        return 0.0, 0
