"""Processes that begin with torch imported: forked from a server that imported it once, before any thread began.

A process of its own shows a crash or a hang as a failed test; the seconds that importing torch takes show nothing.
A forked process ends as any interpreter does, with its exit handlers.

`python -m tests.warm_process DESCRIPTOR` is the server, one for each process of tests.
"""

import atexit
import gc
import json
import os
import runpy
import signal
import socket
import subprocess
import sys
import tempfile
import threading
import warnings
from functools import cache
from importlib import import_module

from tests.builders import REPOSITORY, script_environment

PRELOADED = ("pytest", "torch.distributed.fsdp", "torch.nn.parallel", "forebay.api", "forebay.torch")
MOST_BYTES = 64 * 1024  # of what is asked


@cache
def _server() -> socket.socket:
    """The connection to the server of this process."""
    ours, theirs = socket.socketpair(socket.AF_UNIX, socket.SOCK_SEQPACKET)
    command = [sys.executable, "-X", "faulthandler", "-W", "error", "-m", "tests.warm_process", str(theirs.fileno())]
    process = subprocess.Popen(command, cwd=REPOSITORY, env=script_environment(), pass_fds=[theirs.fileno()])
    theirs.close()

    def stop() -> None:
        ours.close()
        process.wait()

    atexit.register(stop)
    return ours


class WarmProcess:
    """`python -X faulthandler -W error -m MODULE ARGUMENTS…`, or `-c CODE ARGUMENTS…`; one at a time."""

    def __init__(self, how: str, what: str, *arguments: str) -> None:
        reading, writing = os.pipe()
        self.stdout = os.fdopen(reading)
        self._errors = tempfile.TemporaryFile("w+")  # noqa: SIM115  # closed when it has ended
        asked = json.dumps([how, what, *arguments]).encode()
        assert len(asked) < MOST_BYTES
        socket.send_fds(_server(), [asked], [writing, self._errors.fileno()])
        os.close(writing)
        self._pid = int(_server().recv(100))

    def send_signal(self, number: signal.Signals) -> None:
        os.kill(self._pid, number)

    def communicate(self, seconds: float = 600) -> tuple[int, str, str]:
        """(exit code, the rest of its output, its errors), once it has ended."""
        hung = threading.Timer(seconds, self.send_signal, [signal.SIGKILL])
        hung.start()
        with self.stdout, self._errors:
            out = self.stdout.read()
            code = int(_server().recv(100))
            hung.cancel()
            hung.join()
            self._errors.seek(0)
            return code, out, self._errors.read()


def _next_task(server: socket.socket) -> tuple[list[str], list[int]]:
    """What the next process is to do, and where it writes to; returns in that process only."""
    while True:
        asked, descriptors, _, _ = socket.recv_fds(server, MOST_BYTES, 2)
        if not asked:
            sys.exit()
        with warnings.catch_warnings():
            warnings.simplefilter("ignore", DeprecationWarning)  # from 3.12 on: numpy has threads, which are idle here
            child = os.fork()
        if not child:
            return json.loads(asked), descriptors
        for descriptor in descriptors:
            os.close(descriptor)
        server.send(str(child).encode())
        server.send(str(os.waitstatus_to_exitcode(os.waitpid(child, 0)[1])).encode())


def main() -> None:
    for module in PRELOADED:
        import_module(module)
    gc.freeze()  # what is imported is not collected again in every process
    with socket.socket(fileno=int(sys.argv[1])) as server:
        (how, what, *arguments), descriptors = _next_task(server)
    for standard, descriptor in enumerate(descriptors, 1):
        os.dup2(descriptor, standard)
        os.close(descriptor)
    sys.argv = [what, *arguments]
    if how == "-m":
        runpy.run_module(what, run_name="__main__", alter_sys=True)
    else:
        exec(compile(what, "<string>", "exec"), {"__name__": "__main__"})


if __name__ == "__main__":
    main()
