"""`doctor`: installed libraries, abilities of machine and disk, and problems of a cache."""

import os
import platform
import re
import shutil
import signal
import subprocess
import sys
import tempfile
from collections.abc import Iterator
from importlib.metadata import PackageNotFoundError, requires, version
from typing import Literal

import psutil

import forebay
from forebay import api, kernels
from forebay.cache.reports import Status
from forebay.errors import ForebayError, message_of
from forebay.preview.words import command_line, counted, human_bytes
from forebay.records import Record, html_table
from forebay.store import LocalStore, Root
from forebay.store.base import is_url
from forebay.store.tier_folder import file_system

NOT_FOR_USERS = ("dev", "docs", "release")
LITTLE_SPACE = 1 << 30
_REQUIREMENT = re.compile(r"([A-Za-z0-9_.-]+)(?:\[[^]]*\])?\s*([^;]*)(?:;(.*))?")
_EXTRA = re.compile(r"extra\s*==\s*[\"']([^\"']+)[\"']")
_AT_LEAST = re.compile(r"[>=]=\s*([\d.]+)")
# Computes as a teacher does. Some virtual machines report AMX and do not run it.
_TRY_BFLOAT16 = "import torch; torch.nn.Linear(64, 64).bfloat16()(torch.zeros(64, 64).bfloat16())"
_STATES = {"ok": "✓", "note": "·", "problem": "✗"}


class Check(Record, frozen=True, kw_only=True):
    """One thing that `doctor` checked, and the command that repairs it if it is a problem."""

    group: str
    name: str
    state: Literal["ok", "note", "problem"]
    detail: str
    command: str = ""


class DoctorReport(Record, frozen=True, kw_only=True):
    """The checks of `doctor`. Its repr counts the checks and lists the problems."""

    checks: tuple[Check, ...]

    @property
    def problems(self) -> list[Check]:
        return [check for check in self.checks if check.state == "problem"]

    def __repr__(self) -> str:
        problems = ", ".join(check.name for check in self.problems)
        return f"DoctorReport({len(self.checks)} checks, {f'problems: {problems}' if problems else 'no problem'})"

    def _repr_html_(self) -> str:
        return html_table(
            "DoctorReport", {f"{_STATES[check.state]} {check.name}": check.detail for check in self.checks}
        )


def doctor(root: Root | None = None) -> DoctorReport:
    """Check the installation, the machine, the disk and, if one is passed, a cache.

    Lists versions and extras; CPU, memory and disk. Tries a create-only write next to the cache, or in this folder.
    `problems` of the report lists what is wrong, each with the command that repairs it.
    """
    checks = (*_python(), *_libraries(), *_extras(), *_machine(), *_disk(_folder_of(root)))
    return DoctorReport(checks=(*checks, *(() if root is None else _cache(root, _address(root)))))


def _address(root: Root) -> str:
    return os.fspath(root) if isinstance(root, str | os.PathLike) else root.address


def _folder_of(root: Root | None) -> str:
    """The nearest folder above a cache of this machine; the current folder if it is elsewhere or none is named."""
    if isinstance(root, str | os.PathLike):
        path = None if is_url(os.fspath(root)) else os.fspath(root)
    else:
        path = None if root is None else root.local_path("")
    folder = os.getcwd() if path is None else os.path.dirname(os.path.abspath(path))
    while not os.path.isdir(folder):
        folder = os.path.dirname(folder)
    return folder


def _python() -> Iterator[Check]:
    yield _check("Python", "python", f"{platform.python_version()} at {sys.executable}")
    yield _check("Python", "forebay", f"{forebay.__version__} at {os.path.dirname(forebay.__file__)}")
    slower = "not built: NumPy does the same, slower; install a C compiler, then forebay again"
    is_built = kernels.IS_COMPILED
    state: Literal["ok", "note"] = "ok" if is_built else "note"
    yield Check(group="Python", name="compiled loops", state=state, detail="built" if is_built else slower, command="")
    yield _check("Python", "platform", f"{platform.system()} {platform.release()}, {platform.machine()}")


def _libraries() -> Iterator[Check]:
    for name, wanted, extra in _requirements():
        if not extra:
            yield _library("Libraries", name, wanted, f"pip install -U '{name}{wanted}'")


def _extras() -> Iterator[Check]:
    """One line per extra: its libraries, or those that are missing or too old."""
    extras: dict[str, list[Check]] = {}
    for name, wanted, extra in _requirements():
        if extra and extra not in NOT_FOR_USERS and name != "forebay":
            check = _library("Extras", name, wanted, f"pip install -U 'forebay[{extra}]'")
            extras.setdefault(extra, []).append(check)
    for extra, libraries in extras.items():
        old = [check for check in libraries if check.state == "problem" and check.detail != "missing"]
        missing = [check for check in libraries if check.detail == "missing"]
        shown = ", ".join(f"{check.name} {check.detail}" for check in old or missing or libraries)
        state: Literal["ok", "note", "problem"] = "problem" if old else "note" if missing else "ok"
        command = next((check.command for check in old or missing), "")
        yield Check(group="Extras", name=extra, state=state, detail=shown, command=command)


def _requirements() -> Iterator[tuple[str, str, str]]:
    """The name, the versions and the extra of every library that forebay names."""
    try:
        lines = requires("forebay") or []
    except PackageNotFoundError:  # run from a source tree
        lines = []
    for line in lines:
        if match := _REQUIREMENT.fullmatch(line):
            extra = _EXTRA.search(match[3] or "")
            yield match[1], (match[2] or "").strip(" ()"), extra[1] if extra else ""


def _library(group: str, name: str, wanted: str, command: str) -> Check:
    try:
        there = version(name)
    except PackageNotFoundError:
        return Check(group=group, name=name, state="problem", detail="missing", command=command)
    least = _AT_LEAST.search(wanted)
    if least and _numbers(there) < _numbers(least[1]):
        detail = f"{there} is too old, {wanted} is needed"
        return Check(group=group, name=name, state="problem", detail=detail, command=command)
    return _check(group, name, there)


def _numbers(text: str) -> list[int]:
    """
    >>> _numbers("2.13.0+cpu") < _numbers("2.8"), _numbers("1.26") <= _numbers("1.26.4")
    (False, True)
    """
    return [int(part) for part in re.findall(r"\d+", text.partition("+")[0])]


def _machine() -> Iterator[Check]:
    flags = _cpu_flags()
    known = [name for name in ("avx2", "avx512f", "avx512_bf16", "amx_bf16") if name in flags]
    yield _check("Machine", "CPU", ", ".join([counted(len(_usable_cores()), "usable core"), *known]))
    memory = psutil.virtual_memory()
    yield _check("Machine", "memory", f"{human_bytes(memory.available)} available of {human_bytes(memory.total)}")
    if "amx_bf16" in flags and _library("", "torch", "", "").state != "problem":
        yield _bfloat16()


def _bfloat16() -> Check:
    ran = subprocess.run([sys.executable, "-c", _TRY_BFLOAT16], capture_output=True, check=False)
    if ran.returncode != -signal.SIGILL:
        return _check("Machine", "bfloat16", "PyTorch computes in bfloat16")
    return Check(
        group="Machine",
        name="bfloat16",
        state="problem",
        detail="the CPU reports AMX but does not run it: PyTorch crashes in bfloat16",
        command="export ONEDNN_MAX_CPU_ISA=AVX512_CORE_BF16",
    )


def _usable_cores() -> set[int]:
    return set(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else set(range(os.cpu_count() or 1))


def _cpu_flags() -> set[str]:
    try:
        with open("/proc/cpuinfo", encoding="utf-8", errors="replace") as file:
            return next((set(line.split()) for line in file if line.startswith("flags")), set())
    except OSError:
        return set()


def _disk(folder: str) -> Iterator[Check]:
    free = shutil.disk_usage(folder).free
    yield Check(
        group="Disk",
        name="space",
        state="ok" if free > LITTLE_SPACE else "problem",
        detail=f"{human_bytes(free)} free at {folder} ({file_system(folder) or 'unknown file system'})",
        command="" if free > LITTLE_SPACE else f"df -h {folder}",
    )
    yield _writes(folder)


def _writes(folder: str) -> Check:
    """Try to publish: a create-only write, synced, that a second one cannot replace."""
    try:
        with tempfile.TemporaryDirectory(prefix=".forebay-doctor-", dir=folder) as scratch:
            store = LocalStore(os.path.join(scratch, "store"))
            first, second = (store.create("layers/x/000000.safetensors", [text]) for text in (b"one", b"two"))
            is_sound = first and not second and store.read("layers/x/000000.safetensors") == b"one"
        problem = "" if is_sound else "a file that exists was replaced"
    except (OSError, ForebayError) as error:
        problem = message_of(error)
    if not problem:
        return _check("Disk", "writing", "create-only writes, links and sync work")
    return Check(
        group="Disk",
        name="writing",
        state="problem",
        detail=f"a cache cannot be built here: {problem}",
        command="forebay build … --into FOLDER-ON-ANOTHER-DISK",
    )


def _cache(root: Root, address: str) -> Iterator[Check]:
    try:
        report = api.status(root)
    except (ForebayError, OSError) as error:
        quoted = re.search(r"`(forebay [^`]*)`", str(error))
        command = quoted[1] if quoted else command_line("verify", address)
        yield Check(group="Cache", name=address, state="problem", detail=message_of(error), command=command)
        return
    for name, problem, command in _problems(report):
        yield Check(group="Cache", name=name, state="problem", detail=problem, command=command_line(command, address))
    for layer in report.layers:
        state = f"{layer.present:,} of {layer.planned:,} chunks, {layer.rows:,} rows"
        command = command_line("status", address) if layer.present < layer.planned else ""
        yield Check(
            group="Cache", name=f"layer {layer.layer}", state="note" if command else "ok", detail=state, command=command
        )
    yield Check(
        group="Cache",
        name="bytes",
        state="note",
        detail="not read; to check every byte:",
        command=command_line("verify", address),
    )


def _problems(report: Status) -> Iterator[tuple[str, str, str]]:
    """A problem: name, description, and the verb that repairs it."""
    for layer in report.layers:
        bad = len(layer.suspect) + len(layer.lost)
        if bad:
            yield f"chunks of {layer.layer}", f"{counted(bad, 'chunk')} suspect or lost", "repair"
    if report.needs_source:
        yield "source", "source files changed or are missing", "status"


def _check(group: str, name: str, detail: str) -> Check:
    return Check(group=group, name=name, state="ok", detail=detail)
