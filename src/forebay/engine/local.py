"""Run chunks in worker processes of this machine.

Each worker is a fresh interpreter at the end of a pipe. It does not import the caller's script, so a script needs no
`if __name__ == "__main__"`, and it exits as soon as the builder does, even if the builder was killed.

A second thread writes a chunk while the next one is computed.
"""

import contextlib
import os
import select
import signal
import subprocess
import sys
import threading
import time
from concurrent.futures import Future, ThreadPoolExecutor
from multiprocessing.connection import Connection, Pipe, wait

import msgspec

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
from forebay.errors import with_hint


class Ready(msgspec.Struct, frozen=True, tag=True):
    """Sent once, when the task is open; an earlier death of the worker is not blamed on a chunk."""


class Computed(msgspec.Struct, frozen=True, tag=True):
    """Sent before a chunk is written: the worker is free for another."""


class Unopened(msgspec.Struct, frozen=True, tag=True):
    """The task could not be opened; the worker ends."""

    reason: str


_MESSAGES = msgspec.msgpack.Decoder(Ready | Computed | Unopened | Done | Failed)


def main(descriptor: int) -> None:
    """Receive the task, then chunk numbers."""
    pipe = Connection(descriptor)
    threading.Thread(target=_end_with_builder, args=(descriptor,), daemon=True).start()
    try:
        try:
            worker = ChunkWorker(pipe.recv_bytes())
        except (EOFError, BrokenPipeError, ConnectionResetError):
            raise
        except Exception as error:  # opening imports the classes that the document names
            _send(pipe, Unopened(f"{type(error).__name__}: {with_hint(error)}"))
            return
        _send(pipe, Ready())
        with ThreadPoolExecutor(1, "writer") as writer:
            _make_chunks(pipe, worker, writer)
    except (EOFError, BrokenPipeError, ConnectionResetError):
        return


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


def _end_with_builder(descriptor: int) -> None:
    """Exit as soon as the other end of the pipe closes: the builder is gone."""
    watcher = select.poll()
    watcher.register(descriptor, select.POLLHUP | select.POLLERR)
    watcher.poll()
    os._exit(0)


_ENVIRONMENT = {
    # `workers` says how many cores a build takes: a library that starts a thread per core would slow down the others.
    # OpenBLAS of NumPy spins in a thread per core for a while after it was imported.
    **dict.fromkeys((*THREADS, "OPENBLAS_NUM_THREADS"), "1"),
    **dict.fromkeys(MALLOC, str(KEPT_BYTES)),
}
_FIRST_PAUSE = 0.05  # seconds before a dead worker is replaced, doubled with every death in a row
_MOST_PAUSE = 5.0
_BOOT = "import sys; sys.path[:] = {path!r}; from forebay.engine.local import main; main({fd})"


class LocalEngine:
    """Worker processes, each replaced when it dies."""

    def __init__(self) -> None:
        self._workers: dict[int, Worker] = {}
        self._task = TaskDocument(opener="", body={})
        self._size = self._next_slot = 0
        self._deaths = 0  # in a row
        self._not_before = 0.0  # when the next worker may be started

    def capacity(self) -> int:
        return len(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else os.cpu_count() or 1

    def start(self, task: Task, slots: int) -> None:
        self._task = task.document()
        self._size, self._deaths, self._not_before = slots, 0, 0.0
        self._fill()

    def idle(self) -> list[int]:
        return [slot for slot, worker in self._workers.items() if worker.chunk is None]

    def submit(self, slot: int, chunk: int) -> None:
        self._workers[slot].submit(chunk)

    def poll(self, timeout: float) -> list[Event]:
        by_pipe = {worker.pipe: slot for slot, worker in self._workers.items()}
        events: list[Event] = []
        if not by_pipe:
            time.sleep(timeout)
        for pipe in wait(list(by_pipe), timeout) if by_pipe else ():
            slot = by_pipe[pipe]  # type: ignore[index]  # only connections were waited for
            received = self._workers[slot].receive_all()
            events += received
            if received and isinstance(received[-1], Died):
                self._workers.pop(slot).close()
                self._deaths += 1
                self._not_before = time.monotonic() + min(_MOST_PAUSE, _FIRST_PAUSE * 2**self._deaths)
            elif received:
                self._deaths = 0
        self._retire()
        self._fill()
        return events

    def resize(self, slots: int) -> None:
        self._size = slots
        self._retire()
        self._fill()

    def usage(self) -> EngineUsage:
        pids = tuple(worker.process.pid for worker in self._workers.values())
        return EngineUsage(workers=len(self._workers), pids=pids)

    def stop(self) -> None:
        for worker in self._workers.values():
            worker.process.kill()
        for worker in self._workers.values():
            worker.close()
        self._workers.clear()

    def _retire(self) -> None:
        done = [slot for slot in self.idle() if self._workers[slot].writing is None]
        for slot in done[: max(0, len(self._workers) - self._size)]:
            self._workers.pop(slot).close()

    def _fill(self) -> None:
        if time.monotonic() < self._not_before:
            return
        while len(self._workers) < self._size:
            number = min(set(range(self._size)) - {one.number for one in self._workers.values()})
            self._workers[self._next_slot] = Worker(self._task, number)
            self._next_slot += 1


class Worker:
    """One process and the pipe to it."""

    def __init__(self, task: TaskDocument, number: int) -> None:
        self.chunk: int | None = None  # being computed
        self.writing: int | None = None
        self.number = number  # among the workers of the engine; that of a dead one is used again
        self._is_ready = False
        self._problem = ""  # why it could not open the task
        self.pipe, far = Pipe()
        with far:
            self.process = subprocess.Popen(
                [sys.executable, "-c", _BOOT.format(path=sys.path, fd=far.fileno())],
                pass_fds=[far.fileno()],
                stdin=subprocess.DEVNULL,
                env={**_ENVIRONMENT, **os.environ},
                process_group=0,  # the builder handles Ctrl-C
            )
        self.send(task.numbered(number).encode())

    def submit(self, chunk: int) -> None:
        self.chunk = chunk
        self.send(b"%d" % chunk)

    def receive_all(self) -> list[Event]:
        """The events that the worker has sent; `Died` is the last one."""
        events: list[Event] = []
        while True:
            event = self._receive()
            events += [] if event is None else [event]
            if isinstance(event, Died) or not self.pipe.poll():
                return events

    def _receive(self) -> Event | None:
        """The event in the next message, None if it has none; `Died` if the pipe is closed."""
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
