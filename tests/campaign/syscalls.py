"""Kill a process at one of its system calls, or let that call fail: by ptrace, on Linux for x86-64.

Only calls that touch a chosen folder count, so that every strike lands in what forebay does with its files, and none in
what Python does to find its modules.

    count = run_traced(call, folder).calls                     how many there are
    run_traced(call, folder, Strike(at=17, error=0))           SIGKILL as the 17th begins
    run_traced(call, folder, Strike(at=17, error=errno.EIO))   the 17th fails; lasting: so do all behind it
    run_traced(call, folder, Strike(at=17, meanwhile=…))       something else happens first, while it stands still
"""

import ctypes
import errno
import os
import platform
import resource
import signal
import sys
import tempfile
import time
from collections.abc import Callable
from contextlib import suppress
from dataclasses import dataclass
from pathlib import Path
from typing import Any, NoReturn

from tests.campaign.trial import GUARD_BYTES, PATIENCE, SECONDS, Ending, answer, ending_of, redirect

SUPPORTED = sys.platform == "linux" and platform.machine() == "x86_64"
_TRACEME, _PEEK_REGISTERS, _POKE_REGISTERS, _NEXT_CALL, _OPTIONS = 0, 12, 13, 24, 0x4200
_SYSGOOD, _FORKS, _EXITKILL = 1, 2 | 4 | 8, 0x100000
_CALL_STOP = signal.SIGTRAP | 0x80
_WALL = 0x40000000
# number -> (name, which argument is a path, which is a descriptor), arguments counted from 0
_CALLS: dict[int, tuple[str, int | None, int | None]] = {
    0: ("read", None, 0),
    1: ("write", None, 0),
    2: ("open", 0, None),
    4: ("stat", 0, None),
    5: ("fstat", None, 0),
    6: ("lstat", 0, None),
    17: ("pread64", None, 0),
    18: ("pwrite64", None, 0),
    19: ("readv", None, 0),
    20: ("writev", None, 0),
    73: ("flock", None, 0),
    74: ("fsync", None, 0),
    75: ("fdatasync", None, 0),
    77: ("ftruncate", None, 0),
    82: ("rename", 0, None),
    83: ("mkdir", 0, None),
    86: ("link", 0, None),
    87: ("unlink", 0, None),
    217: ("getdents64", None, 0),
    257: ("openat", 1, None),
    258: ("mkdirat", 1, None),
    262: ("newfstatat", 1, None),
    263: ("unlinkat", 1, None),
    264: ("renameat", 1, None),
    265: ("linkat", 1, None),
    285: ("fallocate", None, 0),
    316: ("renameat2", 1, None),
    332: ("statx", 1, None),
}


class _Registers(ctypes.Structure):
    _fields_ = [
        (name, ctypes.c_ulonglong)
        for name in (
            *("r15", "r14", "r13", "r12", "rbp", "rbx", "r11", "r10", "r9", "r8", "rax", "rcx", "rdx", "rsi", "rdi"),
            *("orig_rax", "rip", "cs", "eflags", "rsp", "ss", "fs_base", "gs_base", "ds", "es", "fs", "gs"),
        )
    ]


@dataclass(frozen=True, slots=True)
class Strike:
    """What happens at a call: `meanwhile` is called with the process id while all else waits, or the call fails with
    `error`, or, without either, SIGKILL. `lasting`: at every call from there on.
    """

    at: int
    error: int = 0
    lasting: bool = False
    meanwhile: Callable[[int], None] | None = None


@dataclass(frozen=True, slots=True)
class Traced:
    """How a traced process ended, how many calls counted, and the name of the one that was struck."""

    ending: Ending
    calls: int
    struck: str | None


def run_traced(
    call: Callable[[], Any], folder: Path, strike: Strike | None = None, *, seconds: float = 3 * SECONDS
) -> Traced:
    """Run a call in a child, counting its system calls that touch `folder`."""
    with tempfile.TemporaryFile() as printed, tempfile.TemporaryFile() as answered:
        deadline = time.monotonic() + PATIENCE * seconds
        pid = os.fork()
        if pid == 0:
            _be_the_traced_child(call, printed.fileno(), answered.fileno())
        tracer = _Tracer(pid, folder, strike, deadline)
        status, usage, hung = tracer.follow()
        ending = ending_of(status, usage, seconds, hung, printed.fileno(), answered.fileno())
        return Traced(ending, tracer.calls, tracer.struck)


def _be_the_traced_child(call: Callable[[], Any], printed: int, answered: int) -> NoReturn:
    code = 70
    try:
        _ptrace(_TRACEME, 0, 0, 0)
        redirect(printed)
        resource.setrlimit(resource.RLIMIT_AS, (GUARD_BYTES, GUARD_BYTES))
        resource.setrlimit(resource.RLIMIT_CORE, (0, 0))
        os.kill(os.getpid(), signal.SIGSTOP)
        code = answer(call, answered)
    finally:
        os._exit(code)


class _Tracer:
    """Follows one process and its threads from call to call."""

    def __init__(self, pid: int, folder: Path, strike: Strike | None, deadline: float) -> None:
        self.calls = 0
        self.struck: str | None = None
        self._pid = pid
        self._folder = os.path.realpath(folder)
        self._strike = strike
        self._deadline = deadline
        self._inside: set[int] = set()  # threads between the beginning and the end of a call
        self._failing: dict[int, int] = {}  # thread -> the error its call will answer

    def follow(self) -> tuple[int, resource.struct_rusage, bool]:
        """The wait status of the process, what it took, and whether its time ran out."""
        os.waitpid(self._pid, _WALL)
        _ptrace(_OPTIONS, self._pid, 0, _SYSGOOD | _FORKS | _EXITKILL)
        self._resume(self._pid, 0)
        hung = False
        while True:
            thread, status, usage = self._wait()
            if thread == 0:
                hung = True
                os.kill(self._pid, signal.SIGKILL)
                continue
            if thread == self._pid and (os.WIFEXITED(status) or os.WIFSIGNALED(status)):
                return status, usage, hung
            if os.WIFSTOPPED(status):
                self._resume(thread, self._stopped(thread, os.WSTOPSIG(status)))

    def _wait(self) -> tuple[int, int, resource.struct_rusage]:
        """The next event, or thread 0 once when the time is up."""
        pause = 0.00005
        while True:
            thread, status, usage = os.wait4(-1, _WALL | os.WNOHANG)
            if thread:
                return thread, status, usage
            if time.monotonic() > self._deadline:
                self._deadline = float("inf")
                return 0, 0, usage
            time.sleep(pause)
            pause = min(0.002, pause * 1.5)

    def _stopped(self, thread: int, number: int) -> int:
        """Act on a stop; the signal that the thread is to get as it continues."""
        if number == _CALL_STOP:
            self._at_call(thread)
            return 0
        return 0 if number in (signal.SIGTRAP, signal.SIGSTOP) else number

    def _at_call(self, thread: int) -> None:
        if thread in self._inside:
            self._inside.discard(thread)
            self._end_call(thread)
            return
        self._inside.add(thread)
        registers = _Registers()
        if not _ptrace(_PEEK_REGISTERS, thread, 0, ctypes.addressof(registers)):
            return
        known = _CALLS.get(registers.orig_rax)
        if known is None or not self._touches(thread, registers, known):
            return
        self.calls += 1
        strike = self._strike
        if strike is None or not (self.calls == strike.at or (strike.lasting and self.calls > strike.at)):
            return
        self.struck = self.struck or known[0]
        if strike.meanwhile is not None:
            strike.meanwhile(self._pid)
            return
        if not strike.error:
            os.kill(self._pid, signal.SIGKILL)
            return
        registers.orig_rax = 2**64 - 1  # no such call: the kernel does nothing
        _ptrace(_POKE_REGISTERS, thread, 0, ctypes.addressof(registers))
        self._failing[thread] = strike.error

    def _end_call(self, thread: int) -> None:
        error = self._failing.pop(thread, None)
        if error is None:
            return
        registers = _Registers()
        if _ptrace(_PEEK_REGISTERS, thread, 0, ctypes.addressof(registers)):
            registers.rax = 2**64 - error
            _ptrace(_POKE_REGISTERS, thread, 0, ctypes.addressof(registers))

    def _touches(self, thread: int, registers: _Registers, known: tuple[str, int | None, int | None]) -> bool:
        _, path, descriptor = known
        arguments = (registers.rdi, registers.rsi)
        with suppress(OSError):
            if descriptor is not None:
                return os.readlink(f"/proc/{thread}/fd/{arguments[descriptor]}").startswith(self._folder)
            assert path is not None
            text = self._text(arguments[path])
            if path and not text.startswith("/") and arguments[0] < 1 << 31:  # relative to a folder that is open
                text = os.path.join(os.readlink(f"/proc/{thread}/fd/{arguments[0]}"), text)
            return text.startswith(self._folder)
        return False

    def _text(self, address: int) -> str:
        memory = os.open(f"/proc/{self._pid}/mem", os.O_RDONLY)
        try:
            # A path may end just before memory that is not there.
            piece = os.pread(memory, min(4096, 4096 - address % 4096 or 4096), address)
            if b"\0" not in piece:
                piece += os.pread(memory, 4096, address + len(piece))
            return os.fsdecode(piece.partition(b"\0")[0])
        finally:
            os.close(memory)

    def _resume(self, thread: int, number: int) -> None:
        _ptrace(_NEXT_CALL, thread, 0, number)


_libc = ctypes.CDLL(None, use_errno=True)
_libc.ptrace.argtypes = [ctypes.c_long, ctypes.c_long, ctypes.c_void_p, ctypes.c_void_p]
_libc.ptrace.restype = ctypes.c_long


def _ptrace(request: int, thread: int, address: int, data: int) -> bool:
    """False where the thread is gone."""
    if _libc.ptrace(request, thread, address, data) == -1:
        number = ctypes.get_errno()
        if number == errno.ESRCH:
            return False
        raise OSError(number, f"ptrace: {os.strerror(number)}")
    return True
