"""Run chunks in worker processes of this machine.

Each worker is a process at the end of a pipe: a fresh interpreter, or forked from one. It does not import the caller's
script, so a script needs no `if __name__ == "__main__"`, and it exits as soon as the builder does, even if the builder
was killed.

A second thread writes a chunk while the next one is computed.

What several workers need in memory, such as a tokenizer, is loaded by one process, from which they are forked:

    builder ── pipe ──────────────────────────────► worker       forked; the pipe was sent to the seed
       └────── "here is a pipe" ──► WorkerSeed ──┘               it reports the exit code of every worker
"""

import contextlib
import gc
import os
import select
import signal
import socket
import subprocess
import sys
import threading
import time
from concurrent.futures import Future, ThreadPoolExecutor
from contextlib import suppress
from multiprocessing.connection import Connection, Pipe, wait

import msgspec
import numpy as np

from forebay.engine.base import (
    KEPT_BYTES,
    MALLOC,
    THREADS,
    ChunkWorker,
    Died,
    Done,
    EngineUsage,
    Event,
    Failed,
    Task,
    TaskDocument,
)


class Ready(msgspec.Struct, frozen=True, tag=True):
    """Sent once, when the task is open; a worker that dies before is not a chunk's fault."""


class Computed(msgspec.Struct, frozen=True, tag=True):
    """Sent before a chunk is written: the worker is free for another."""


class Unopened(msgspec.Struct, frozen=True, tag=True):
    """The task could not be opened; the worker ends."""

    reason: str


_MESSAGES = msgspec.msgpack.Decoder(Ready | Computed | Unopened | Done | Failed)
_NOTHING = b"null"  # there is no document to preload


def main(descriptor: int) -> None:
    """Receive what to preload (perhaps while the task is still being planned), the task, then chunk numbers."""
    pipe = Connection(descriptor)
    threading.Thread(target=_end_with_builder, args=(descriptor,), daemon=True).start()
    try:
        _preload(pipe.recv_bytes())
        try:
            worker = ChunkWorker(pipe.recv_bytes())
        except (EOFError, BrokenPipeError, ConnectionResetError):
            raise
        except Exception as error:  # opening imports the classes that the document names
            _send(pipe, Unopened(f"{type(error).__name__}: {error}"))
            return
        _send(pipe, Ready())
        with ThreadPoolExecutor(1, "writer") as writer:
            _make_chunks(pipe, worker, writer)
    except (EOFError, BrokenPipeError, ConnectionResetError):
        return


def serve(descriptor: int) -> None:
    """Preload what is received first, then start a worker for every pipe that is received; what a `WorkerSeed` runs.

    With each pipe comes another one, to report by: first the process id of the worker, then its exit code.
    """
    signal.signal(signal.SIGCHLD, signal.SIG_DFL)  # who ignores it has no exit codes, and passes that on
    try:
        preloads = Connection(os.dup(descriptor)).recv_bytes()
    except (EOFError, ConnectionResetError):  # the builder is gone
        return
    watched, loading = os.pipe()
    watch = threading.Thread(target=_end_with_builder, args=(descriptor, watched), daemon=True)
    watch.start()
    _preload(preloads)
    os.close(loading)
    watch.join()  # a process with several threads cannot be forked
    os.close(watched)
    gc.freeze()  # a collection would copy the pages that all workers share
    server, watcher = socket.socket(fileno=descriptor), select.poll()
    watcher.register(descriptor, select.POLLIN)
    running: dict[int, tuple[int, int]] = {}  # pidfd -> process id, pipe to report by
    while True:
        for ready, _ in watcher.poll():
            if ready != descriptor:
                watcher.unregister(ready)
                process, report = running.pop(ready)
                _report(report, os.waitstatus_to_exitcode(os.waitpid(process, 0)[1]))
                os.close(report)
                os.close(ready)
                continue
            asked, passed, _, _ = socket.recv_fds(server, 1, 2)
            if not asked:
                os._exit(0)  # the builder has gone or is done
            pipe, report = passed
            process = _start_worker(pipe, [descriptor, report, *running, *(other for _, other in running.values())])
            os.close(pipe)
            _report(report, process)
            ended = os.pidfd_open(process)
            watcher.register(ended, select.POLLIN)
            running[ended] = process, report


def _report(pipe: int, number: int) -> None:
    with suppress(BrokenPipeError):  # nobody waits for it any more
        os.write(pipe, b"%d\n" % number)


def _start_worker(pipe: int, not_inherited: list[int]) -> int:
    """Fork a worker and return its process id. A process with several threads is not forked, but another started."""
    if not _has_one_thread():
        started = _started("main", pipe)
        started.returncode = 0  # it is waited for in `serve`
        return started.pid
    process = os.fork()
    if process:
        return process
    code = 1
    try:
        os.setpgid(0, 0)
        for descriptor in not_inherited:
            os.close(descriptor)
        if "numpy.random" in sys.modules:  # or all workers would draw the same; Python's `random` does it by itself
            np.random.seed()
        main(pipe)
        code = 0
    except BaseException:  # it must not get into the loop of the seed
        sys.excepthook(*sys.exc_info())
    finally:
        with suppress(Exception):  # it may be closed
            sys.stderr.flush()
        os._exit(code)


def _has_one_thread() -> bool:
    """Whether this process has one thread; waits for threads that are ending."""
    for _ in range(20):
        if len(os.listdir("/proc/self/task")) == 1:
            return True
        time.sleep(0.002)
    return False


def _make_chunks(pipe: Connection, worker: ChunkWorker, writer: ThreadPoolExecutor) -> None:
    written: Future[None] | None = None
    while True:
        worker.compute(int(pipe.recv_bytes()))
        if written is not None:
            written.result()  # its event is sent: two threads must not send at once
        _send(pipe, Computed())
        written = writer.submit(lambda: pipe.send_bytes(worker.write()))


def _send(pipe: Connection, message: Ready | Computed | Unopened) -> None:
    pipe.send_bytes(msgspec.msgpack.encode(message))


def _preload(text: bytes) -> None:
    """Open a document early. Errors are ignored here; the first chunk will raise them again."""
    with suppress(Exception):
        if text != _NOTHING:
            TaskDocument.decode(text).open()


def _end_with_builder(descriptor: int, until: int | None = None) -> None:
    """Exit as soon as the other end of the pipe closes: the builder is gone. Return if that of `until` closes first."""
    watcher = select.poll()
    watcher.register(descriptor, select.POLLHUP | select.POLLERR)
    if until is not None:
        watcher.register(until, select.POLLHUP)
    if any(closed == descriptor for closed, _ in watcher.poll()):
        os._exit(0)


_ENVIRONMENT = {
    # `workers` says how many cores a build takes: a library that starts a thread per core would slow down the others.
    # OpenBLAS of NumPy spins in a thread per core for a while after it was imported.
    **dict.fromkeys((*THREADS, "OPENBLAS_NUM_THREADS"), "1"),
    **dict.fromkeys(MALLOC, str(KEPT_BYTES)),
}
_FIRST_PAUSE = 0.05  # seconds before a dead worker is replaced, doubled with every death in a row
_MOST_PAUSE = 5.0
_REPORT_SECONDS = 0.2  # for a seed to say which process it has forked; one that is still loading does not
_BOOT = "import sys; sys.path[:] = {path!r}; from forebay.engine.local import {call}; {call}({fd})"


def _can_fork() -> bool:
    """Whether a seed can watch what it forks: on Linux, unless a container forbids it."""
    if not hasattr(os, "pidfd_open"):
        return False
    try:
        os.close(os.pidfd_open(os.getpid()))
    except OSError:
        return False
    return os.path.isdir("/proc/self/task")


class LocalEngine:
    """Worker processes, each replaced when it dies; `preload` starts some while the build is still being planned."""

    def __init__(self) -> None:
        self._ready: list[Worker] = []
        self._seed: WorkerSeed | None = None
        self._workers: dict[int, Worker] = {}
        self._task = TaskDocument(opener="", body={})
        self._size = self._next_slot = 0
        self._deaths = 0  # in a row
        self._not_before = 0.0  # when the next worker may be started

    def capacity(self) -> int:
        return len(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else os.cpu_count() or 1

    def preload(self, document: TaskDocument, slots: int) -> None:
        if slots > 1 and _can_fork():
            self._seed = WorkerSeed(document.encode())
        else:
            self._ready += [Worker(document.encode()) for _ in range(slots)]

    def start(self, task: Task, slots: int) -> None:
        self._task = task.document()
        self._size, self._deaths, self._not_before = slots, 0, 0.0
        self._fill()

    def idle(self) -> list[int]:
        return [slot for slot, worker in self._workers.items() if worker.chunk is None]

    def place(self, slot: int) -> str:
        return ""

    def submit(self, slot: int, chunk: int) -> None:
        self._workers[slot].submit(chunk)

    def poll(self, timeout: float) -> list[Event]:
        by_pipe = {worker.pipe: slot for slot, worker in self._workers.items()}
        events: list[Event] = []
        if not by_pipe:
            time.sleep(timeout)
        for pipe in wait(list(by_pipe), timeout) if by_pipe else ():
            slot = by_pipe[pipe]  # type: ignore[index]  # only connections were waited for
            found = self._workers[slot].receive_all()
            if self._workers[slot].was_not_forked:
                self._replace(slot)
                continue
            events += found
            if found and isinstance(found[-1], Died):
                self._workers.pop(slot).close()
                self._deaths += 1
                self._not_before = time.monotonic() + min(_MOST_PAUSE, _FIRST_PAUSE * 2**self._deaths)
            elif found:
                self._deaths = 0
        self._retire()
        self._fill()
        return events

    def resize(self, slots: int) -> None:
        self._size = slots
        self._retire()
        self._fill()

    def usage(self) -> EngineUsage:
        # A worker that is not forked yet waits for the seed, which loads what all of them need.
        pids = (worker.process.pid or (self._seed.pid if self._seed else 0) for worker in self._workers.values())
        return EngineUsage(workers=len(self._workers), pids=tuple(dict.fromkeys(filter(None, pids))))

    def stop(self) -> None:
        for worker in self._workers.values():
            worker.process.kill()
        for worker in self._workers.values():
            worker.close()
        self._workers.clear()

    def close(self) -> None:
        self.stop()
        while self._ready:
            self._ready.pop().end()
        if self._seed is not None:
            self._seed.end()
            self._seed = None

    def _retire(self) -> None:
        done = [slot for slot in self.idle() if self._workers[slot].writing is None]
        for slot in done[: max(0, len(self._workers) - self._size)]:
            self._workers.pop(slot).close()

    def _fill(self) -> None:
        if time.monotonic() < self._not_before:
            return
        while len(self._workers) < self._size:
            number = min(set(range(self._size)) - {one.number for one in self._workers.values()})
            self._workers[self._next_slot] = self._begun(number)
            self._next_slot += 1

    def _begun(self, number: int) -> "Worker":
        worker = self._ready.pop() if self._ready else Worker(_NOTHING, self._seed)
        worker.number = number
        worker.send(self._task.numbered(number).encode())
        return worker

    def _replace(self, slot: int) -> None:
        """Put another worker in the place of one that was not forked, since the seed was lost: no worker has died."""
        lost = self._workers[slot]
        lost.close()
        self._workers[slot] = self._begun(lost.number)
        if lost.chunk is not None:
            self._workers[slot].submit(lost.chunk)


def _started(call: str, pipe: int) -> "subprocess.Popen[bytes]":
    """A fresh interpreter that calls a function of this module with a pipe."""
    # One thread of `tokenizers` is one too many for a process that is to be forked.
    alone = {} if THREADS[0] in os.environ else {"TOKENIZERS_PARALLELISM": "false"}
    return subprocess.Popen(
        [sys.executable, "-c", _BOOT.format(path=sys.path, call=call, fd=pipe)],
        pass_fds=[pipe],
        stdin=subprocess.DEVNULL,
        env={**_ENVIRONMENT, **alone, **os.environ},
        process_group=0,  # the builder handles Ctrl-C
    )


class WorkerSeed:
    """A process that opens a document once, and forks workers that share it."""

    def __init__(self, preloads: bytes) -> None:
        self._pipe, far = Pipe()
        with far:
            self._process = _started("serve", far.fileno())
        with contextlib.suppress(BrokenPipeError, ConnectionResetError):  # workers are started without it then
            self._pipe.send_bytes(preloads)
        self.is_gone = False

    @property
    def pid(self) -> int:
        """0 where the process is gone."""
        return 0 if self.is_gone else self._process.pid

    def fork(self, pipe: Connection, report: int) -> None:
        """Ask for a worker. If the process is gone, nothing is reported, and the pipe `report` ends."""
        with contextlib.suppress(OSError), socket.socket(fileno=os.dup(self._pipe.fileno())) as asking:
            socket.send_fds(asking, [b"."], [pipe.fileno(), report])

    def end(self) -> None:
        """Kill the process; its workers end when their own pipes are closed."""
        if not self.is_gone:
            self.is_gone = True
            self._process.kill()
            self._pipe.close()
            self._process.wait()


class ForkedWorker:
    """What `subprocess.Popen` is for a worker that was forked from a seed."""

    def __init__(self, seed: WorkerSeed, far: Connection) -> None:
        self._seed = seed
        self._reports, report = os.pipe()
        try:
            seed.fork(far, report)
        finally:
            os.close(report)
        self._read, self._is_at_end = b"", False  # a line with its process id, then one with its exit code
        self._code: int | None = None

    @property
    def pid(self) -> int:
        """0 while the seed is still loading."""
        while self._code is None and select.select([self._reports], [], [], 0)[0] and self._take():
            pass
        number, is_known, _ = self._read.partition(b"\n")
        return int(number) if is_known else 0

    @property
    def was_not_forked(self) -> bool:
        """Whether it is known that the seed was lost before it forked this worker."""
        return self._code is not None and not self.pid

    def kill(self) -> None:
        number = self.pid
        if not number and self._code is None and select.select([self._reports], [], [], _REPORT_SECONDS)[0]:
            number = self.pid  # a worker may be at work before the seed gets to say which process it is
        if not number:
            self._seed.end()  # it is still loading, and this worker was not forked
        elif self._read.count(b"\n") == 1 and not self._is_at_end:
            with suppress(ProcessLookupError):
                os.kill(number, signal.SIGKILL)
        # Where the seed is lost, the worker may have ended, and its process id be that of another process. One that is
        # still there ends when its pipe is closed.

    def wait(self) -> int:
        """The exit code. Where the seed was lost, which would have reported it, that of a process that was killed."""
        while self._code is None:
            if self._read.count(b"\n") == 2:
                self._code = int(self._read.split(b"\n")[1])
            elif not self._take():
                self._code = -signal.SIGKILL
                self._seed.end()  # workers are started without it from now on
            if self._code is not None:
                os.close(self._reports)
        return self._code

    def _take(self) -> bool:
        found = os.read(self._reports, 64)
        self._read, self._is_at_end = self._read + found, not found
        return bool(found)


class Worker:
    """One process and the pipe to it."""

    def __init__(self, preloads: bytes, seed: "WorkerSeed | None" = None) -> None:
        self.chunk: int | None = None  # being computed
        self.writing: int | None = None
        self.process: subprocess.Popen[bytes] | ForkedWorker
        self.number = 0  # among the workers of the engine; that of a dead one is used again
        self._is_ready = False
        self._problem = ""  # why it could not open the task
        self.pipe, far = Pipe()
        with far:
            forked = seed is not None and not seed.is_gone
            self.process = ForkedWorker(seed, far) if seed is not None and forked else _started("main", far.fileno())
        self.send(preloads)

    @property
    def was_not_forked(self) -> bool:
        return isinstance(self.process, ForkedWorker) and self.process.was_not_forked

    def submit(self, chunk: int) -> None:
        self.chunk = chunk
        self.send(b"%d" % chunk)

    def receive_all(self) -> list[Event]:
        """What all messages that the worker has sent say of chunks; after `Died` there is none."""
        found: list[Event] = []
        while True:
            event = self._receive()
            found += [] if event is None else [event]
            if isinstance(event, Died) or not self.pipe.poll():
                return found

    def _receive(self) -> Event | None:
        """What the next message of the worker says of a chunk; `Died` if its pipe is closed."""
        try:
            message = _MESSAGES.decode(self.pipe.recv_bytes())
        except (EOFError, OSError):
            return self._death()
        match message:
            case Ready():
                self._is_ready = True
            case Computed():
                self.writing, self.chunk = self.chunk, None
            case Unopened(reason):
                self._problem = reason
            case Done() | Failed():
                self.writing = None
                return message
        return None

    def _death(self) -> Died:
        """Blame the chunk being computed, if any; the one being written is lost."""
        cause, name = _cause_of_death(self.process.wait()), f"worker {self.process.pid}"
        if not self._is_ready:
            lost = () if self.chunk is None else (self.chunk,)
            return Died(None, name, self._problem or cause, lost, began=False)
        at = self.writing if self.chunk is None else self.chunk
        return Died(at, name, cause, () if self.writing in (None, at) else (self.writing,))

    def close(self) -> None:
        """Close the pipe, which ends an idle worker."""
        self.pipe.close()
        self.process.wait()

    def end(self) -> None:
        """Kill the process, even mid-chunk."""
        self.process.kill()
        self.close()

    def send(self, message: bytes) -> None:
        with contextlib.suppress(BrokenPipeError, ConnectionResetError):  # `poll` will report its death
            self.pipe.send_bytes(message)


def _cause_of_death(code: int) -> str:
    if code >= 0:
        return f"exit code {code}"
    known = {number.value: number.name for number in signal.Signals}
    name = known.get(-code, f"signal {-code}")
    hint = " (often the OOM killer)" if name == "SIGKILL" else ""
    return f"killed by {name}{hint}"
