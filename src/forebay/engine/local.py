"""Chunks made on this machine: by worker processes, or inline in this process.

Each worker is a fresh interpreter at the end of a pipe. It does not import the caller's script, so that a script needs
no `if __name__ == "__main__"`; and it ends as soon as the builder does, however that came about.
"""

import contextlib
import os
import pickle
import signal
import subprocess
import sys
import time
from multiprocessing.connection import Pipe, wait

from forebay.engine.base import Crew, Died, Event, Lost, Task
from forebay.engine.worker import COMPUTED, READY, attempt_chunk
from forebay.errors import RecipeInvalid
from forebay.recipe import AnyRecipe

_ENVIRONMENT = {
    # A worker is one core's work: a library that starts a thread per core would crowd out the others.
    "RAYON_NUM_THREADS": "1",
    # Every chunk takes arrays as large as the one before did: they are kept, not given back and faulted in again.
    "MALLOC_MMAP_THRESHOLD_": str(256 << 20),
    "MALLOC_TRIM_THRESHOLD_": str(256 << 20),
}
_FIRST_PAUSE = 0.05  # seconds before a worker that died is replaced, doubled with every death in a row
_MOST_PAUSE = 5.0
_BOOT = "import sys; sys.path[:] = {path!r}; from forebay.engine.worker import main; main({fd})"


class LocalEngine:
    """Starts workers; some may start while the work is still being planned."""

    def __init__(self) -> None:
        self._ready: list[Worker] = []

    def preload(self, recipe: AnyRecipe, workers: int) -> None:
        self._ready += [Worker(_pickled_recipe(recipe)) for _ in range(workers)]

    def start(self, job: Task, workers: int) -> Crew:
        ready, self._ready = self._ready[:workers], self._ready[workers:]
        return LocalCrew(job, workers, ready)

    def close(self) -> None:
        while self._ready:
            self._ready.pop().end()


class LocalCrew:
    """Worker processes, each replaced when it dies."""

    def __init__(self, job: Task, workers: int, ready: "list[Worker]") -> None:
        self._job = _pickled(job)
        self._ready = ready
        self._workers: dict[int, Worker] = {}
        self._size = workers
        self._next_slot = 0
        self._deaths = 0  # in a row
        self._not_before = 0.0  # when the next worker may be started
        self._fill()

    def idle(self) -> list[int]:
        return [slot for slot, worker in self._workers.items() if worker.chunk is None]

    def give(self, slot: int, chunk: int) -> None:
        self._workers[slot].give(chunk)

    def wait(self, timeout: float) -> list[Event]:
        by_pipe = {worker.pipe: slot for slot, worker in self._workers.items()}
        events: list[Event] = []
        if not by_pipe:
            time.sleep(timeout)
        for pipe in wait(list(by_pipe), timeout) if by_pipe else ():
            slot = by_pipe[pipe]  # type: ignore[index]  # only connections were waited for
            told = self._workers[slot].take()
            events += told
            if any(isinstance(event, Died) for event in told):
                self._workers.pop(slot).close()
                self._deaths += 1
                self._not_before = time.monotonic() + min(_MOST_PAUSE, _FIRST_PAUSE * 2**self._deaths)
            elif told:
                self._deaths = 0
        self._retire()
        self._fill()
        return events

    def resize(self, workers: int) -> None:
        self._size = workers
        self._retire()
        self._fill()

    def pids(self) -> list[int]:
        return [worker.process.pid for worker in self._workers.values()]

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
            worker = self._ready.pop() if self._ready else Worker(pickle.dumps(None))
            worker.begin(self._job)
            self._workers[self._next_slot] = worker
            self._next_slot += 1


class Worker:
    """One process and the pipe to it."""

    def __init__(self, needs: bytes) -> None:
        self.chunk: int | None = None  # being computed
        self.writing: int | None = None
        self._is_ready = False
        self.pipe, far = Pipe()
        with far:
            boot = _BOOT.format(path=sys.path, fd=far.fileno())
            self.process = subprocess.Popen(
                [sys.executable, "-c", boot],
                pass_fds=[far.fileno()],
                stdin=subprocess.DEVNULL,
                env={**_ENVIRONMENT, **os.environ},
                process_group=0,  # Ctrl-C at the terminal is the builder's to handle
            )
        self._send(needs)

    def begin(self, job: bytes) -> None:
        self._send(job)

    def give(self, chunk: int) -> None:
        self.chunk = chunk
        self._send(pickle.dumps(chunk))

    def take(self) -> list[Event]:
        """What the worker says; that it died, where it says nothing more."""
        try:
            said = self.pipe.recv_bytes()
        except (EOFError, OSError):
            return self._death()
        if said == READY:
            self._is_ready = True
            return []
        if said == COMPUTED:
            self.writing, self.chunk = self.chunk, None
            return []
        self.writing = None
        return [pickle.loads(said)]

    def _death(self) -> list[Event]:
        """Of the chunk that was computed, where there was one: what was being written beside it did no harm."""
        if not self._is_ready:
            died = Died(None, self.process.pid, _cause_of_death(self.process.wait()))
            return [died] if self.chunk is None else [died, Lost(self.chunk)]
        at = self.writing if self.chunk is None else self.chunk
        died = Died(at, self.process.pid, _cause_of_death(self.process.wait()))
        return [died] if self.writing in (None, at) else [died, Lost(self.writing)]

    def close(self) -> None:
        """An idle worker ends when its pipe does."""
        self.pipe.close()
        self.process.wait()

    def end(self) -> None:
        """Whatever it is doing."""
        self.process.kill()
        self.close()

    def _send(self, message: bytes) -> None:
        with contextlib.suppress(BrokenPipeError, ConnectionResetError):  # its death shows when it is waited for
            self.pipe.send_bytes(message)


def _pickled_recipe(recipe: AnyRecipe) -> bytes:
    """What cannot be sent is refused when the job is sent; until then a worker starts without it."""
    try:
        return pickle.dumps(recipe)
    except (TypeError, AttributeError, pickle.PicklingError):
        return pickle.dumps(None)


def _pickled(job: Task) -> bytes:
    for part in (job.chunks.recipe, job.chunks.source):
        if type(part).__module__ == "__main__":
            raise RecipeInvalid(
                f"{type(part).__name__} is defined in the script itself, where worker processes cannot find it; "
                "put it into a module of its own, or build with workers=0"
            )
    try:
        return pickle.dumps(job)
    except (TypeError, AttributeError, pickle.PicklingError) as error:
        raise RecipeInvalid(f"the build cannot be sent to worker processes ({error}); build with workers=0") from error


def _cause_of_death(code: int) -> str:
    if code >= 0:
        return f"exit code {code}"
    known = {number.value: number.name for number in signal.Signals}
    name = known.get(-code, f"signal {-code}")
    hint = " (the kernel kills so when memory runs out)" if name == "SIGKILL" else ""
    return f"killed by {name}{hint}"


class InlineEngine:
    def preload(self, recipe: AnyRecipe, workers: int) -> None:
        """This process is."""

    def close(self) -> None:
        """Nothing was started."""

    def start(self, job: Task, workers: int) -> Crew:
        return InlineCrew(job)


class InlineCrew:
    """One slot, worked on while the build waits for it."""

    def __init__(self, job: Task) -> None:
        self._job = job
        self._chunk: int | None = None

    def idle(self) -> list[int]:
        return [0] if self._chunk is None else []

    def give(self, slot: int, chunk: int) -> None:
        self._chunk = chunk

    def wait(self, timeout: float) -> list[Event]:
        if self._chunk is None:
            time.sleep(timeout)
            return []
        chunk, self._chunk = self._chunk, None
        return [attempt_chunk(self._job, chunk)]

    def resize(self, workers: int) -> None:
        """There is always one slot."""

    def pids(self) -> list[int]:
        return [os.getpid()]

    def stop(self) -> None:
        self._chunk = None
