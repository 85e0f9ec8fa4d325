"""Processes that begin with everything imported: forked from a server that did it once, before any thread began.

A process of its own shows a crash or a hang as a failed test, and can be killed; the seconds that importing takes show
nothing. A forked process ends as any interpreter does, with its exit handlers. What a test measures of a fresh
interpreter (imports, memory, the first answer) needs one: `tests.builders.start_python`.

With `pytest --processes` the server is forked from the process of tests before its first test. Otherwise it is
`python -m tests.warm_process DESCRIPTOR`, one for each process of tests.
"""

import atexit
import faulthandler
import gc
import json
import os
import random
import runpy
import select
import signal
import socket
import subprocess
import sys
import threading
import warnings
import weakref
from collections.abc import Mapping
from concurrent.futures import ThreadPoolExecutor
from contextlib import suppress
from importlib import import_module
from pathlib import Path

from tests.gpt2 import load_gpt2

REPOSITORY = Path(__file__).resolve().parent.parent
PRELOADED = (
    "pytest",
    "torch.distributed.fsdp",
    "torch.nn.parallel",
    "forebay.api",
    "forebay.torch",
    "forebay.images.recipe",
    "forebay.raw",
    "forebay.tokens.recipe",
    "forebay.teachers.feature_reader",
    "forebay.tiers.warming",
    "forebay.cli.main",
    "forebay.cli.build_verbs",
    "forebay.cli.demo",
    "forebay.cli.inspect_verbs",
    "forebay.cli.maintain_verbs",
    "forebay.cli.tier_verbs",
    "rich.live",
    "rich.progress",
)
MOST_BYTES = 128 * 1024  # of what is asked
_connections: dict[int, socket.socket] = {}  # to the server of a process of tests


def script_environment() -> dict[str, str]:
    """Where a script finds what this process finds."""
    return {**os.environ, "PYTHONPATH": os.pathsep.join([str(REPOSITORY), *filter(None, sys.path)])}


def preload() -> None:
    """Import what processes import when they need it, and load the vocabulary that most of them read."""
    for module in PRELOADED:
        with suppress(ImportError):  # `make lowest` installs the core alone
            import_module(module)
    if "ray" in sys.modules:
        import_module("ray.dag")  # which it imports when a process ends
    load_gpt2()


def fork_server(*not_inherited: int) -> None:
    """Fork the server of this process, which has imported everything and has no threads."""
    ours, theirs = socket.socketpair(socket.AF_UNIX, socket.SOCK_SEQPACKET)
    child = _fork()
    if not child:
        ours.close()
        for descriptor in not_inherited:
            os.close(descriptor)
        _serve(theirs)
    theirs.close()
    _keep(ours, child)


def _start_server() -> socket.socket:
    ours, theirs = socket.socketpair(socket.AF_UNIX, socket.SOCK_SEQPACKET)
    command = [sys.executable, "-m", "tests.warm_process", str(theirs.fileno())]
    process = subprocess.Popen(command, cwd=REPOSITORY, env=script_environment(), pass_fds=[theirs.fileno()])
    theirs.close()
    process.returncode = 0  # it is waited for here
    return _keep(ours, process.pid)


def _keep(connection: socket.socket, child: int) -> socket.socket:
    def stop() -> None:
        connection.close()
        os.waitpid(child, 0)

    atexit.register(stop)
    _connections[os.getpid()] = connection
    return connection


def _ask(asked: list[object], descriptors: list[int]) -> None:
    text = json.dumps(asked).encode()
    assert len(text) < MOST_BYTES
    socket.send_fds(_connections.get(os.getpid()) or _start_server(), [text], descriptors)


class WarmProcess:
    """`python -m MODULE ARGUMENTS…`, `-c CODE ARGUMENTS…`, or with "-" a script, as a `subprocess.Popen` with pipes."""

    def __init__(
        self, how: str, what: str, *arguments: str, env: Mapping[str, str] | None = None, cwd: Path = REPOSITORY
    ) -> None:
        pipes = [os.pipe() for _ in range(3)]
        _ask([dict(env or script_environment()), str(cwd), how, what, *arguments], [writing for _, writing in pipes])
        for _, writing in pipes:
            os.close(writing)
        self.stdout, self.stderr, self._state = (os.fdopen(reading) for reading, _ in pipes)
        self.pid = int(self._state.readline())
        self.returncode: int | None = None

    def poll(self) -> int | None:
        """Its exit code, once it has ended."""
        if self.returncode is None and select.select([self._state], [], [], 0)[0]:
            self.wait()
        return self.returncode

    def wait(self) -> int:
        if self.returncode is None:
            self.returncode = int(self._state.readline())
            self._state.close()
        return self.returncode

    def send_signal(self, number: signal.Signals) -> None:
        if self.poll() is None:
            os.kill(self.pid, number)

    def terminate(self) -> None:
        self.send_signal(signal.SIGTERM)

    def kill(self) -> None:
        self.send_signal(signal.SIGKILL)

    def communicate(self, timeout: float = 600) -> tuple[str, str]:
        """The rest of its output and its errors, once it has ended."""
        if self.stdout.closed:
            return "", ""
        hung = threading.Timer(timeout, os.kill, [self.pid, signal.SIGKILL])
        hung.start()
        with self.stdout, self.stderr, ThreadPoolExecutor(1) as beside:
            errors = beside.submit(self.stderr.read)
            out = self.stdout.read()
            self.wait()
            hung.cancel()
            hung.join()
            return out, errors.result()


class WarmWorker:
    """A worker of a build as `forebay.engine.local` starts one with `subprocess.Popen`, and what it asks of it."""

    def __init__(
        self, command: list[str], *, pass_fds: list[int], stdin: int, env: Mapping[str, str], process_group: int
    ) -> None:
        reading, writing = os.pipe()
        _ask([dict(env), os.getcwd(), "worker", command[-1], *map(str, pass_fds)], [1, 2, writing, *pass_fds])
        os.close(writing)
        self._state = os.fdopen(reading)
        self.pid = int(self._state.readline())
        self._returncode: int | None = None

    def kill(self) -> None:
        if self._returncode is None and not select.select([self._state], [], [], 0)[0]:
            os.kill(self.pid, signal.SIGKILL)

    def wait(self) -> int:
        if self._returncode is None:
            self._returncode = int(self._state.readline())
            self._state.close()
        return self._returncode


def _fork() -> int:
    with warnings.catch_warnings():
        warnings.simplefilter("ignore", DeprecationWarning)  # from 3.12 on: libraries have threads, which are idle
        return os.fork()


def _serve(server: socket.socket) -> None:
    """Fork what is asked for, and tell of each its number and how it ended, until nobody asks any more."""
    signal.signal(signal.SIGINT, signal.SIG_IGN)
    for finalizer in weakref.finalize._registry:  # type: ignore[attr-defined]
        finalizer.atexit = False  # of objects of the process that was forked, and its to run
    woken, waking = os.pipe()
    os.set_blocking(woken, False)
    os.set_blocking(waking, False)
    signal.signal(signal.SIGCHLD, lambda *_: None)
    signal.set_wakeup_fd(waking, warn_on_full_buffer=False)
    running: dict[int, int] = {}  # where the end of a process is told
    while True:
        ready, _, _ = select.select([server, woken], [], [])
        if woken in ready:
            os.read(woken, 1 << 16)
            for child in list(running):
                ended, status = os.waitpid(child, os.WNOHANG)
                if ended:
                    _tell(running[child], os.waitstatus_to_exitcode(status))
                    os.close(running.pop(child))
        if server not in ready:
            continue
        asked, descriptors, _, _ = socket.recv_fds(server, MOST_BYTES, 8)
        if not asked:
            os._exit(0)
        out, errors, state, *passed = descriptors
        child = _fork()
        if not child:
            signal.set_wakeup_fd(-1)
            signal.signal(signal.SIGCHLD, signal.SIG_DFL)
            server.close()
            for descriptor in (woken, waking, state, *running.values()):
                os.close(descriptor)
            _become(json.loads(asked), [out, errors], passed)
        for descriptor in (out, errors, *passed):
            os.close(descriptor)
        running[child] = state
        _tell(state, child)


def _tell(state: int, number: int) -> None:
    with suppress(BrokenPipeError):  # nobody waits for it
        os.write(state, f"{number}\n".encode())


def _become(asked: list[object], standard: list[int], passed: list[int]) -> None:
    """Be the process that was asked for, to its end."""
    code = 1
    try:
        signal.signal(signal.SIGINT, signal.default_int_handler)
        for number, descriptor in enumerate(standard, 1):
            os.dup2(descriptor, number)
            os.close(descriptor)
        sys.stdout = open(1, "w", closefd=False)  # noqa: SIM115
        sys.stderr = open(2, "w", buffering=1, errors="backslashreplace", closefd=False)  # noqa: SIM115
        sys.__stdout__, sys.__stderr__ = sys.stdout, sys.stderr
        faulthandler.enable(2)
        random.seed()
        environment, folder, how, what, *arguments = asked
        os.environ.clear()
        os.environ.update(environment)  # type: ignore[call-overload]
        if "PYTHONWARNINGS" in os.environ:
            warnings.simplefilter(os.environ["PYTHONWARNINGS"])  # type: ignore[arg-type]
        warnings.filterwarnings("ignore", ".* found in sys.modules after import of package", RuntimeWarning)
        os.chdir(str(folder))
        sys.argv = [str(what), *map(str, arguments)]
        if how == "worker":
            os.setpgid(0, 0)
            for descriptor, number in zip(passed, map(int, arguments), strict=True):
                if descriptor != number:
                    os.dup2(descriptor, number)
                    os.close(descriptor)
            exec(str(what), {"__name__": "__main__"})
        elif how == "-m":
            runpy.run_module(str(what), run_name="__main__", alter_sys=True)
        elif how == "-":
            runpy.run_path(str(what), run_name="__main__")
        else:
            exec(compile(str(what), "<string>", "exec"), {"__name__": "__main__"})
        code = 0
    except SystemExit as end:
        code = end.code if isinstance(end.code, int) else int(end.code is not None)
        if not isinstance(end.code, int | None):
            print(end.code, file=sys.stderr)
    except KeyboardInterrupt:
        sys.excepthook(*sys.exc_info())  # type: ignore[arg-type]
        code = 128 + signal.SIGINT
    except BaseException:
        sys.excepthook(*sys.exc_info())  # type: ignore[arg-type]
    finally:
        threading._shutdown()  # type: ignore[attr-defined]
        atexit._run_exitfuncs()
        sys.stdout.flush()
        sys.stderr.flush()
        os._exit(code & 255)


if __name__ == "__main__":
    preload()
    gc.freeze()  # what is imported is not collected again in every process
    _serve(socket.socket(fileno=int(sys.argv[1])))
