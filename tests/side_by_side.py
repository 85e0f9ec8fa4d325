"""Tests side by side: `pytest --processes 3` collects them once, then forks processes that take file after file.

Collecting imports torch, transformers and three hundred files of tests. That takes a quarter of a minute, and here it
is done once, while a checker of types has the other core; all that was imported is shared.

The tests of a file run in one process and in their order, so that what a file shares is made once; so do the files of
a line of `TOGETHER`. These lines are first in the queue, then the files of `FIRST`: a long one that began last would
run alone.
"""

import atexit
import ctypes
import gc
import getpass
import itertools
import marshal
import os
import re
import selectors
import shutil
import struct
import sys
import tempfile
import warnings
from collections.abc import Iterator
from contextlib import suppress
from pathlib import Path
from typing import Any

import pytest
from tests.warm_process import fork_server, preload

IN_MEMORY = "/dev/shm"
ROOM_BYTES = 6 << 30  # a run leaves one or two
TOGETHER = (
    ("tests/remote/",),  # an S3, an Azure and a Google service
    ("tests/viewer/",),  # a Chromium
    ("tests/hostile/",),  # a process of crafted caches
    ("tests/torch/test_teacher", "tests/torch/test_h", "tests/torch/test_multi_source.py", "tests/compat/",
     "tests/cli/test_cli_teachers.py", "tests/teachers/test_devices.py"),  # small models
    ("tests/test_english.py", "tests/test_architecture.py", "tests/cli/test_cli_advice.py"),  # the modules, parsed
    ("tests/integration/test_trainers", "tests/integration/test_resume_table", "tests/chat/test_chat_trainers"),
)  # fmt: skip
FIRST = (
    *("tests/engine/", "tests/integration/", "tests/test_docs.py", "tests/cli/test_cli_stop.py"),
    *("tests/tiers/test_tier_processes.py", "tests/tokens/test_long_texts.py", "tests/torch/test_flex_attention.py"),
    *("tests/torch/test_loader_threads.py", "tests/torch/test_letterbox_module.py"),
)
SLOW = Path(__file__).with_name("slow.txt")
LARGE_PAGE = 2 << 20
MADV_COLLAPSE = 25  # <linux/mman.h>
_SIZE = struct.Struct("<I")


def pytest_addoption(parser: pytest.Parser) -> None:
    parser.addoption("--processes", type=int, default=0, help="run files of tests side by side in N processes")


@pytest.hookimpl(tryfirst=True)
def pytest_collection_modifyitems(config: pytest.Config, items: list[pytest.Item]) -> None:
    """Mark the tests of `slow.txt`, and refuse a line of it that names none."""
    known = {line for line in SLOW.read_text().splitlines() if not line.startswith("#")}
    unused = set(known)
    for item in items:
        names = itertools.accumulate(re.split(r"(?=::)|(?=\[)", item.nodeid, maxsplit=3))
        if found := known.intersection(names):
            item.add_marker("slow")
            unused -= found
    if unused and config.args == config.getini("testpaths"):
        raise pytest.UsageError(f"{SLOW}: no test has these names, correct or remove them: {', '.join(sorted(unused))}")


@pytest.hookimpl(tryfirst=True)
def pytest_runtestloop(session: pytest.Session) -> bool | None:
    count: int = session.config.getoption("processes")
    if not count or session.testsfailed or session.config.option.collectonly or sys.platform != "linux":
        return None  # as without --processes
    files = _by_file(session.items)
    queue, entry = os.pipe()  # numbers of files, of which every process takes one at a time
    os.write(entry, b"".join(_SIZE.pack(number) for number in range(len(files))))
    os.close(entry)
    base = _folder(session.config)
    if "torch" in sys.modules:  # otherwise these tests need none of it
        preload()
    gc.collect()
    gc.freeze()  # what was collected is not looked through again, and stays shared
    _in_large_pages()
    running = selectors.DefaultSelector()
    for number in range(count):
        reading, writing = os.pipe()
        with warnings.catch_warnings():
            warnings.simplefilter("ignore", DeprecationWarning)  # from 3.12 on: libraries have threads, which are idle
            child = os.fork()
        if not child:
            for inherited in (reading, *(key.fd for key in running.get_map().values())):
                os.close(inherited)  # so that a process notices that nobody reads its reports
            session.config._tmp_path_factory._basetemp = base / f"process-{number}"  # type: ignore[attr-defined]
            _be_a_process(session, files, queue, writing)
        os.close(writing)
        running.register(reading, selectors.EVENT_READ, [child, ""])
    try:
        _report(session, running, queue)
    finally:
        stopped = list(running.get_map().values())
        for key in stopped:
            os.close(key.fd)  # the next report of such a process ends it
        for key in stopped:
            os.waitpid(key.data[0], 0)
        running.close()
        os.close(queue)
    return True


def _in_large_pages() -> None:
    """Move what this process holds into pages of 2 MB, where Linux can (since 6.1).

    Forking copies a table of all pages: of 400 MB in small ones for 20 ms, and every test that starts a process forks.
    """
    libc = ctypes.CDLL(None)
    libc.madvise.argtypes = [ctypes.c_void_p, ctypes.c_size_t, ctypes.c_int]
    for line in Path("/proc/self/maps").read_text().splitlines():
        bounds, access, *_, name = (*line.split(maxsplit=5), "")[:6]
        if access == "rw-p" and name in ("", "[heap]"):
            start, stop = (int(bound, 16) for bound in bounds.split("-"))
            start, stop = -(-start // LARGE_PAGE) * LARGE_PAGE, stop // LARGE_PAGE * LARGE_PAGE
            if start < stop:
                libc.madvise(start, stop - start, MADV_COLLAPSE)  # what cannot be moved stays where it is


def _folder(config: pytest.Config) -> Path:
    """Where tests write: in memory if there is room, since every file that forebay publishes waits for its disk.

    What a test leaves is kept only if it failed.
    """
    factory = config._tmp_path_factory  # type: ignore[attr-defined]
    if os.path.isdir(IN_MEMORY) and (room := os.statvfs(IN_MEMORY)).f_bavail * room.f_frsize >= ROOM_BYTES:
        os.environ.setdefault("PYTEST_DEBUG_TEMPROOT", IN_MEMORY)
        scratch = _scratch()
        atexit.register(_remove, scratch, os.getpid())
        kernels = f"{tempfile.gettempdir()}/torchinductor_{getpass.getuser()}"  # where torch keeps what it compiled
        os.environ.setdefault("TORCHINDUCTOR_CACHE_DIR", kernels)
        os.environ["TMPDIR"], tempfile.tempdir = scratch, None
    factory._retention_policy = "failed"
    return Path(factory.getbasetemp())


def _remove(folder: str, owner: int) -> None:
    """Remove a folder when the process that made it ends, and not those that were forked from it."""
    if os.getpid() == owner:
        shutil.rmtree(folder, ignore_errors=True)


def _scratch() -> str:
    """A folder for temporary files. Its name is short, since it is in those of sockets, which have a bound."""
    for left in Path(IN_MEMORY).glob("fb[0-9]*"):
        if not Path("/proc", left.name[2:]).exists():  # of a run that was killed
            shutil.rmtree(left, ignore_errors=True)
    os.mkdir(f"{IN_MEMORY}/fb{os.getpid()}", 0o755)  # some tests read as another user
    return f"{IN_MEMORY}/fb{os.getpid()}"


def _by_file(items: list[pytest.Item]) -> list[list[pytest.Item]]:
    """The tests of each file or line of files, those that take long before the others."""
    lines: dict[str, list[pytest.Item]] = {line[0]: [] for line in TOGETHER}
    for item in sorted(items, key=lambda item: not item.nodeid.startswith(FIRST)):
        file = item.nodeid.partition("::")[0]
        lines.setdefault(next((line[0] for line in TOGETHER if file.startswith(line)), file), []).append(item)
    return [tests for tests in lines.values() if tests]


def _report(session: pytest.Session, running: selectors.BaseSelector, queue: int) -> None:
    """Pass on what the processes report, until all have ended."""
    hook, left = session.config.hook, len(session.items)
    while running.get_map():
        for key, _ in running.select():
            message = _receive(key.fd)
            if message is None:
                running.unregister(key.fd)
                os.close(key.fd)
                child, test = key.data
                code = os.waitstatus_to_exitcode(os.waitpid(child, 0)[1])
                if code:
                    _fail(hook, test, f"the process of tests ended with {code}; what is left of this file was not run")
            elif isinstance(message, str):
                key.data[1] = message
            elif message:
                report = hook.pytest_report_from_serializable(config=session.config, data=message)
                hook.pytest_runtest_logreport(report=report)
            else:
                left -= 1
                hook.pytest_runtest_logfinish(nodeid=key.data[1], location=("", None, ""))
        if session.shouldfail or session.shouldstop:
            while os.read(queue, 1 << 16):  # no other file is begun
                pass
            raise session.Failed(session.shouldfail or session.shouldstop)
    if left:  # also where a process ended as if all were well
        _fail(hook, "tests", f"{left} tests were not run to their end")


def _fail(hook: Any, test: str, problem: str) -> None:
    report = pytest.TestReport(test, (test, None, test), {}, "failed", problem, "call")
    hook.pytest_runtest_logreport(report=report)


def _receive(pipe: int) -> Any:
    """The next message of a process; None at its end."""
    head = _read(pipe, _SIZE.size)
    return marshal.loads(_read(pipe, _SIZE.unpack(head)[0])) if len(head) == _SIZE.size else None


def _read(pipe: int, size: int) -> bytes:
    found = b""
    while piece := os.read(pipe, size - len(found)):
        found += piece
    return found


class _Sender:
    """Sends the reports of this process: the name of a test when it begins, its reports, and nothing at its end."""

    def __init__(self, config: pytest.Config, descriptor: int) -> None:
        self._config = config
        self._descriptor = descriptor

    def send(self, message: object) -> None:
        text = marshal.dumps(message)
        left = memoryview(_SIZE.pack(len(text)) + text)
        while left:
            left = left[os.write(self._descriptor, left) :]

    def pytest_runtest_logreport(self, report: pytest.TestReport) -> None:
        self.send(self._config.hook.pytest_report_to_serializable(config=self._config, report=report))


def _be_a_process(session: pytest.Session, files: list[list[pytest.Item]], queue: int, descriptor: int) -> None:
    """Run files until there are no more, then end as an interpreter does: with what was registered for its end."""
    code = 1
    try:
        config = session.config
        config._tmp_path_factory._basetemp.mkdir(mode=0o700)  # type: ignore[attr-defined]
        config.pluginmanager.unregister(name="terminalreporter")
        capture = config.pluginmanager.getplugin("capturemanager")
        capture.stop_global_capturing()  # its files are those of the process that was forked
        capture.start_global_capturing()
        capture.suspend_global_capture()
        owner = os.getpid()  # what a test forks and leaves behind must not hold up the run
        os.register_at_fork(after_in_child=lambda: os.close(descriptor) if os.getppid() == owner else None)
        fork_server(queue)
        sender = _Sender(config, descriptor)
        config.pluginmanager.register(sender)
        for item, following in _with_following(files, queue):
            sender.send(item.nodeid)
            config.hook.pytest_runtest_protocol(item=item, nextitem=following)
            sender.send({})
            if following is None or following.path != item.path:
                gc.collect()
                gc.freeze()  # what a file leaves is not looked through again either, with every model that is released
        atexit._run_exitfuncs()
        code = 0
    except BrokenPipeError:
        code = 0  # the run was stopped
        _end_fixtures(session)
    except BaseException:
        sys.excepthook(*sys.exc_info())  # type: ignore[arg-type]
        _end_fixtures(session)
    finally:
        sys.stdout.flush()
        sys.stderr.flush()
        os._exit(code)


def _end_fixtures(session: pytest.Session) -> None:
    """End what this process started for its tests: servers would outlive it."""
    with suppress(BaseException):
        session._setupstate.teardown_exact(None)


def _with_following(files: list[list[pytest.Item]], queue: int) -> Iterator[tuple[pytest.Item, pytest.Item | None]]:
    """The tests of the files that this process takes, each with the one after it."""
    last: pytest.Item | None = None
    while number := os.read(queue, _SIZE.size):
        for item in files[_SIZE.unpack(number)[0]]:
            if last is not None:
                yield last, item
            last = item
    if last is not None:
        yield last, None
