"""One process per question: a call or a verb, forked from this warm process under limits, and how it ended.

The parent imports everything and runs nothing of forebay itself, so that every child starts as a fresh process does:
no open maps, no threads, nothing checked yet.
"""

import gc
import importlib
import inspect
import json
import os
import pkgutil
import re
import resource
import select
import shlex
import shutil
import signal
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable, Sequence
from contextlib import suppress
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Literal, NoReturn, get_args

from tests.helpers.gpt2_tokenizer import load_gpt2

import forebay.cli
from forebay import api
from forebay.cli.main import main

MEMORY_BYTES = 1 << 30  # no small input may take more
GUARD_BYTES = 12 << 30  # of address space: what would take more fails by itself, and not the machine
LEASE_SECONDS = 0.3
SECONDS = 10.0  # of processor time, so that a verdict does not depend on what else the machine does
PATIENCE = 6  # a process may wait for its turn, or for a disk, this many times as long before it counts as hung
_SHOWN_BYTES = 200_000
_FREE_TEXT = re.compile(r"\x1b|[\x00-\x08\x0b\x0c\x0e-\x1a\x1c-\x1f\x7f]")
Verdict = Literal[
    "wrong rows", "rows lost", "destroyed", "circular", "traceback", "hang", "crash", "memory", "outside", "unclear"
]
VERDICTS: tuple[Verdict, ...] = get_args(Verdict)


@dataclass(frozen=True, slots=True)
class Ending:
    """How a process ended: its exit code or signal, what it printed, what it answered, what it took."""

    code: int | None
    signal: int | None
    output: str
    answer: Any
    peak_bytes: int
    seconds: float  # of processor time
    allowed: float
    hung: bool

    def circular_hint(self, arguments: Sequence[str]) -> str:
        """A hint of a failed command that is this command, or a part of it; empty if there is none."""
        if self.code and "--from" in arguments and "pass a copy (--from COPY)" in self.output:
            return "to pass a copy"
        for found in re.finditer(r"`forebay ([^`]*)`|next: forebay (.*)", self.output) if self.code else ():
            with suppress(ValueError):
                words = set(shlex.split(found[1] or found[2]))
                if words <= set(arguments) and "--reuse" not in set(arguments) - words:
                    return found[0]
        return ""

    @property
    def last_line(self) -> str:
        lines = self.output.strip().splitlines()
        return lines[-1][:300] if lines else ""

    def faults(self, *, may_die: bool = False) -> list[tuple[Verdict, str]]:
        """What no verb may do, whatever it was asked: hang, die of a signal, print a traceback, or say nothing."""
        found: list[tuple[Verdict, str]] = []
        if self.hung:
            found.append(("hang", f"still running after {PATIENCE * self.allowed:.0f} s"))
        elif self.seconds > self.allowed:
            found.append(("hang", f"took {self.seconds:.1f} s of processor time"))
        elif self.signal is not None and not may_die:
            found.append(("crash", f"killed by {signal.Signals(self.signal).name}"))
        if "Traceback (most recent call last)" in self.output or "this is a bug in forebay" in self.output:
            found.append(("traceback", " | ".join(self.output.strip().splitlines()[-4:])[:600]))
        if self.peak_bytes > MEMORY_BYTES:
            found.append(("memory", f"took {self.peak_bytes >> 20:,} MiB"))
        if self.code == 1 and not self.output.strip():
            found.append(("unclear", "exit 1 without a word"))
        if bare := _FREE_TEXT.search(self.output):
            around = self.output[max(0, bare.start() - 100) : bare.start() + 100]
            found.append(("unclear", f"a control character reaches the terminal: {around!r}"))
        return found


def warm_up() -> None:
    """Import what verbs import when they need it, and keep the collector away: children then share the pages."""
    for name in (
        "numpy.ma", "fastokens", "tokenizers", "forebay.raw", "forebay.images.recipe",
        "forebay.teachers.feature_reader", "forebay.row_cache.cached_images", "rich.live",
        "rich.markup", "rich.progress", "rich.table", "rich.traceback",
    ):  # fmt: skip
        importlib.import_module(name)
    for module in pkgutil.walk_packages(forebay.cli.__path__, "forebay.cli."):
        if not module.name.endswith("__main__"):
            importlib.import_module(module.name)
    load_gpt2()
    gc.collect()
    gc.freeze()


def run_verb(*arguments: str, seconds: float = SECONDS, first: Callable[[], None] | None = None) -> Ending:
    """Run one command of the command line, after `first` in the same process."""

    def verb() -> None:
        if first is not None:
            first()
        command_line(arguments)

    return run_call(verb, seconds=seconds)


def command_line(arguments: Sequence[str]) -> None:
    """Run a command in this process, which ends with it. A stranger's claim is waited for shortly, not for a minute."""
    for verb in (api.build, api.update, api.clean):
        inspect.unwrap(verb).__kwdefaults__.update(lease_seconds=LEASE_SECONDS)  # each has this one
    sys.argv = ["forebay", *arguments]
    main()


def run_call(call: Callable[[], Any], *, seconds: float = SECONDS) -> Ending:
    """Run a call in a child; its answer comes back as JSON. An error it raises is printed as Python prints it."""
    with tempfile.TemporaryFile() as printed, tempfile.TemporaryFile() as answered:
        deadline = time.monotonic() + PATIENCE * seconds
        pid = os.fork()
        if pid == 0:
            _be_the_child(call, printed.fileno(), answered.fileno())
        return _wait_for(pid, deadline, seconds, printed.fileno(), answered.fileno())


def _be_the_child(call: Callable[[], Any], printed: int, answered: int) -> NoReturn:
    code = 70
    try:
        os.setsid()
        redirect(printed)
        resource.setrlimit(resource.RLIMIT_AS, (GUARD_BYTES, GUARD_BYTES))
        resource.setrlimit(resource.RLIMIT_CORE, (0, 0))
        code = answer(call, answered)
    finally:
        os._exit(code)


def redirect(printed: int) -> None:
    """Read nothing, print into a file."""
    nothing = os.open(os.devnull, os.O_RDONLY)
    os.dup2(nothing, 0)
    os.dup2(printed, 1)
    os.dup2(printed, 2)


def answer(call: Callable[[], Any], answered: int) -> int:
    """The exit code of a call; what it returns is written as JSON."""
    code = 0
    try:
        os.write(answered, json.dumps(call()).encode())
    except SystemExit as end:
        code = end.code if isinstance(end.code, int) else int(end.code is not None)
    except BaseException:
        sys.excepthook(*sys.exc_info())
        code = 1
    with suppress(Exception):
        sys.stdout.flush()
    with suppress(Exception):
        sys.stderr.flush()
    return code


def _wait_for(pid: int, deadline: float, allowed: float, printed: int, answered: int) -> Ending:
    """Wait for a child, and end it with all it started when its time is up."""
    handle = os.pidfd_open(pid)
    try:
        waiting = select.poll()
        waiting.register(handle, select.POLLIN)
        hung = not waiting.poll(max(0.0, deadline - time.monotonic()) * 1000)
    finally:
        os.close(handle)
    if hung:
        end_group(pid)
    _, status, usage = os.wait4(pid, 0)
    end_group(pid)
    return ending_of(status, usage, allowed, hung, printed, answered)


def ending_of(
    status: int, usage: resource.struct_rusage, allowed: float, hung: bool, printed: int, answered: int
) -> Ending:
    answer_text = os.pread(answered, 1 << 24, 0)
    return Ending(
        code=os.waitstatus_to_exitcode(status) if os.WIFEXITED(status) else None,
        signal=os.WTERMSIG(status) if os.WIFSIGNALED(status) else None,
        output=os.pread(printed, _SHOWN_BYTES, 0).decode("utf-8", "replace"),
        answer=json.loads(answer_text) if answer_text else None,
        peak_bytes=usage.ru_maxrss * 1024,
        seconds=usage.ru_utime + usage.ru_stime,
        allowed=allowed,
        hung=hung,
    )


def remove(folder: Path) -> None:
    """Remove a folder, however deep: `shutil.rmtree` recurses, and the corpus has folders 1,100 deep."""
    try:
        shutil.rmtree(folder)
    except (RecursionError, OSError):
        subprocess.run(["rm", "-rf", "--", str(folder)], check=True)


def end_group(pid: int) -> None:
    with suppress(ProcessLookupError, PermissionError):
        os.killpg(pid, signal.SIGKILL)
