"""Process names that let other processes check whether the owner is alive.

An `Owner` has the host (name, boot and pid namespace), the pid and the start time, so that a reused pid, a restarted
machine or another container is not mistaken for it. Temporary files are named after the process that writes them.
"""

import hashlib
import os
import re
import secrets
import socket
import time
from dataclasses import dataclass
from functools import cache, lru_cache
from pathlib import Path

import psutil

OWNER = re.compile(r"([^-/]{1,64})-([1-9][0-9]{0,9})-(0|[1-9][0-9]{0,18})")
_GONE = frozenset("ZXx")
_TEMPORARY = re.compile(r"\.tmp-([0-9a-f]{12}-[0-9]{1,10}-[0-9]{1,19})-[0-9a-f]{8}")
_FOREIGN_LEFTOVER_SECONDS = 24 * 3600


@dataclass(frozen=True, slots=True)
class Owner:
    host: str
    pid: int
    started: int

    def __str__(self) -> str:
        return f"{self.host}-{self.pid}-{self.started}"

    @classmethod
    def parse(cls, text: str) -> "Owner | None":
        parts = OWNER.fullmatch(text)
        return cls(parts[1], int(parts[2]), int(parts[3])) if parts else None

    def is_dead(self) -> bool:
        """True only if this host is sure that the process is gone, or its pid was reused."""
        if self.host != this_host():
            return False
        try:
            return _start_time(self.pid) != self.started
        except PermissionError:  # alive, but hidden from this user
            return False


def this_process() -> Owner:
    return _living(os.getpid())


@lru_cache(maxsize=1)  # a forked child has another pid
def _living(pid: int) -> Owner:
    return Owner(this_host(), pid, _start_time(pid) or 0)


def temporary_name() -> str:
    """A new temporary file name of this process."""
    return f".tmp-{this_process()}-{secrets.token_hex(4)}"


def is_temporary(key: str) -> bool:
    return _TEMPORARY.fullmatch(key.rpartition("/")[2]) is not None


def is_left_behind(key: str, written: float | None) -> bool:
    """Whether a key is the temporary name of a dead process, or a day old and of another host."""
    name = _TEMPORARY.fullmatch(key.rpartition("/")[2])
    owner = Owner.parse(name[1]) if name else None
    if owner is None:
        return False
    if owner.host == this_host():
        return owner.is_dead()
    return written is not None and time.time() - written > _FOREIGN_LEFTOVER_SECONDS


@cache
def this_host() -> str:
    facts = [socket.gethostname(), _text("/proc/sys/kernel/random/boot_id"), _link("/proc/self/ns/pid")]
    return hashlib.sha256("\n".join(facts).encode()).hexdigest()[:12]


def _start_time(pid: int) -> int | None:
    """The start time of a live process in a unit of this host; None if it is dead or a zombie."""
    stat = _text(f"/proc/{pid}/stat")
    if stat:
        after_name = stat[stat.rindex(")") + 2 :].split()
        return None if after_name[0] in _GONE else int(after_name[19])
    if Path("/proc/self/stat").exists():
        _no_process(pid)
        return None
    try:
        process = psutil.Process(pid)
        return None if process.status() == psutil.STATUS_ZOMBIE else int(process.create_time())
    except psutil.Error:
        return None


def _no_process(pid: int) -> None:
    """Return if there is no such process; raise `PermissionError` if it is hidden (`hidepid`)."""
    try:
        os.kill(pid, 0)
    except (ProcessLookupError, OverflowError):
        return
    raise PermissionError(f"process {pid} cannot be inspected")


def _text(path: str) -> str:
    try:
        return Path(path).read_text("utf-8", "replace")  # a process name may have any bytes
    except OSError:
        return ""


def _link(path: str) -> str:
    try:
        return os.readlink(path)
    except OSError:
        return ""
