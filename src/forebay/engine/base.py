"""The contract between a build and the engine that runs its chunks.

    engine.start(task, slots)          workers open the task's document
    engine.submit(slot, chunk)         to a slot that `idle` lists
    engine.poll(timeout)               Done, Failed or Died, for every chunk that was submitted
    engine.resize(slots)               more or fewer workers
    engine.usage()                     the workers that exist
    engine.stop()                      workers are gone; the engine can be started again

A task reaches a worker as a JSON document, never as a pickle: a worker may be on another machine. Only an engine that
runs in the calling process uses the task itself, so it also accepts a task without a document.

Every worker calls `attempt_chunk`: compute a chunk, write it, and return the result as an event. `InlineEngine` does
just that in the calling process; a `ChunkWorker` writes one chunk while it computes the next. `MemoryGovernor` resizes
an engine to fit a memory limit.
"""

import ctypes
import gc
import os
import resource
import sys
import time
from collections.abc import Callable
from contextlib import suppress
from functools import partial
from pathlib import Path
from pkgutil import resolve_name
from queue import Queue
from typing import Any, Literal, Protocol, TypeVar, runtime_checkable

import msgspec
import psutil

from forebay.errors import EngineUnusable, SourceChanged, with_hint
from forebay.store.base import is_full

# How many threads libraries start in a worker: `tokenizers` obeys the first, `fastokens` the second alone.
THREADS = ("RAYON_NUM_THREADS", "FASTOKENS_BPE_THREADS")
KEPT_BYTES = 256 << 20  # chunks need arrays of similar size: freed memory is kept, and not faulted in again
MALLOC = {"MALLOC_TRIM_THRESHOLD_": -1, "MALLOC_MMAP_THRESHOLD_": -3}  # variables, and options of malloc.h
WORKER = "worker"  # the key of a body that an engine sets to the number of a worker, from 0 on each machine
ProblemKind = Literal["io", "disk-full", "source-changed", "error"]
T = TypeVar("T")


class TaskDocument(msgspec.Struct, frozen=True, kw_only=True, forbid_unknown_fields=True):
    """A task as JSON. `opener`, a function by its import path, turns `body` into a `ChunkMaker` in a worker."""

    opener: str
    body: dict[str, Any]

    def open(self) -> Any:
        return resolve_name(self.opener)(self.body)

    def encode(self) -> bytes:
        return msgspec.json.encode(self)

    def numbered(self, worker: int) -> "TaskDocument":
        """The document for one of the workers of a machine, if its body asks for their number."""
        if WORKER not in self.body:
            return self
        return TaskDocument(opener=self.opener, body={**self.body, WORKER: worker})

    @classmethod
    def decode(cls, text: bytes) -> "TaskDocument":
        return msgspec.json.decode(text, type=cls)


class ChunkMaker(Protocol):
    """Makes numbered chunks inside a worker."""

    def begin(self, chunk: int) -> Callable[[], Any]:
        """Compute a chunk and return the callable that writes it; its result becomes `Done.record`.

        A worker may call it in another thread while it computes the next chunk.
        """


class Task(ChunkMaker, Protocol):
    """Numbered chunks of work, and how a worker elsewhere opens them."""

    def document(self) -> TaskDocument:
        """The task as JSON; raise a `ForebayError` with a hint if it has no JSON form."""


class Done(msgspec.Struct, frozen=True, tag=True):
    """A chunk is done; `record` is what its task returned, as builtins and bytes."""

    chunk: int
    record: Any
    peak_bytes: int


class Failed(msgspec.Struct, frozen=True, tag=True):
    """A chunk could not be made; the worker is alive."""

    chunk: int
    kind: ProblemKind
    reason: str
    files: dict[str, str] = {}


class Died(msgspec.Struct, frozen=True, tag=True):
    """A worker is gone. `chunk` is the one that may have caused it; those in `lost` did not, and are not there."""

    chunk: int | None
    worker: str  # "worker 123", or what else names it to a person
    reason: str
    lost: tuple[int, ...] = ()
    began: bool = True  # False: it ended before it could begin any chunk


Event = Done | Failed | Died


class EngineUsage(msgspec.Struct, frozen=True, kw_only=True):
    """The workers of an engine, their memory and processor time."""

    workers: int
    pids: tuple[int, ...] = ()  # those on this machine, for measuring memory and CPU
    in_process: bool = False  # chunks are made in the calling process
    elsewhere: bool = False  # workers may be on other machines; known before a task is started
    waiting: str = ""  # what workers that cannot begin wait for


@runtime_checkable
class Engine(Protocol):
    """Runs chunks: in this process, in local processes, on a cluster. It runs one task at a time.

    A slot has one worker, which computes one chunk and may be writing another.
    """

    def capacity(self) -> int:
        """The default number of slots."""

    def start(self, task: Task, slots: int) -> None:
        """Begin a task; raise a `ForebayError` if it has no document or there is no cluster."""

    def idle(self) -> list[int]:
        """The slots that are free to compute a chunk; empty while workers start."""

    def submit(self, slot: int, chunk: int) -> None:
        """Assign a chunk to a free slot."""

    def poll(self, timeout: float) -> list[Event]:
        """The events since the last call, after at most about `timeout` seconds."""

    def resize(self, slots: int) -> None:
        """Change the number of slots; a busy slot finishes its chunk first."""

    def usage(self) -> EngineUsage:
        """The running workers."""

    def stop(self) -> None:
        """End the task and its workers; unfinished chunks are lost. Stopping twice is a no-op."""


_RSS_UNIT = 1 if sys.platform == "darwin" else 1024
Finish = Callable[[], Event]


def attempt_chunk(maker: ChunkMaker, chunk: int) -> Event:
    """Make a chunk; failures are returned as events, never raised."""
    return attempt_beginning(maker, chunk)()


def attempt_beginning(maker: ChunkMaker, chunk: int) -> Finish:
    """Compute a chunk and return the callable that writes it and returns the event."""
    finish = _attempted(chunk, lambda: maker.begin(chunk))
    return (lambda: finish) if isinstance(finish, Failed) else partial(_finished, chunk, finish)


def _finished(chunk: int, finish: Callable[[], Any]) -> Event:
    record = _attempted(chunk, lambda: msgspec.to_builtins(finish(), builtin_types=(bytes,)))
    return record if isinstance(record, Failed) else Done(chunk, record, peak_bytes())


def _attempted(chunk: int, act: Callable[[], T]) -> T | Failed:
    try:
        return act()
    except Exception as error:  # a recipe may raise anything; one chunk's failure must not end the others
        return _failed(chunk, error)


def set_up_process(threads: int) -> None:
    """Give a process that another program started the threads and memory settings of a local worker."""
    for name in THREADS:
        os.environ.setdefault(name, str(threads))
    with suppress(AttributeError, OSError, TypeError):  # of glibc
        for name, option in MALLOC.items():
            if name not in os.environ:
                ctypes.CDLL(None).mallopt(option, KEPT_BYTES)


class ChunkWorker:
    """Opens a task and makes its chunks in two threads: one calls `compute` for each, the other `write`.

    With `threads`, the process is set up as a local worker is by its environment.

    At most one chunk is being written: computing blocks while the previous write is in progress.
    """

    def __init__(self, document: bytes, threads: int = 0) -> None:
        if threads:
            set_up_process(threads)
        self._maker: ChunkMaker = TaskDocument.decode(document).open()
        self._computed: Queue[Finish] = Queue()

    def compute(self, chunk: int) -> None:
        if gc.isenabled():
            # Collect garbage between chunks only, and not among objects loaded by now: otherwise it takes a tenth of
            # the time of a chunk of many small samples.
            gc.freeze()
            gc.disable()
        finish = attempt_beginning(self._maker, chunk)
        self._computed.join()  # the one before is written
        self._computed.put(finish)

    def write(self) -> bytes:
        """Write the chunk that was computed; return its event as MessagePack."""
        finish = self._computed.get()
        try:
            gc.collect()  # here, so that the next chunk can be asked for meanwhile
            return msgspec.msgpack.encode(finish())
        finally:
            self._computed.task_done()


def _failed(chunk: int, error: Exception) -> Failed:
    message = f"{type(error).__name__}: {with_hint(error)}"
    match error:
        case SourceChanged():
            return Failed(chunk, "source-changed", error.message, dict(error.facts["files"]))
        case OSError():
            return Failed(chunk, "disk-full" if is_full(error) else "io", message)
    return Failed(chunk, "error", message)


def peak_bytes() -> int:
    """The peak memory of this process.

    On Linux `getrusage` includes the parent's memory at fork, so `/proc` is preferred.
    """
    try:
        status = Path("/proc/self/status").read_text()
    except OSError:
        return resource.getrusage(resource.RUSAGE_SELF).ru_maxrss * _RSS_UNIT
    return int(status.partition("VmHWM:")[2].split()[0]) * 1024


_MARGIN = 1.15
_TYPICAL = 0.8
_ENOUGH = 2


def _limit_too_small(limit: int, needed: int) -> EngineUnusable:
    message = f"the memory limit of {limit / 1e6:,.0f} MB is too small: one worker needs about {needed / 1e6:,.0f} MB"
    return EngineUnusable(message, hint="raise --memory-limit, or choose smaller chunks in the recipe", needed=needed)


class MemoryGovernor:
    """Begins with one worker, then allows as many as the measured peak of one leaves room for.

    Only a chunk that weighs about as much as the heaviest says what a worker needs, and the second one, for a worker
    writes one chunk while it makes the next; one worker works until then.
    """

    def __init__(self, limit: int | None, workers: int, heaviest: int) -> None:
        self._limit = limit
        self._workers = workers
        self._heaviest = heaviest
        self._peak = 0
        self._weighed = 0
        self._allowed: int | None = None
        self._warned = False
        self._before = peak_bytes()  # of this process, whatever it did

    def check_before(self, engine: Engine) -> None:
        """Raise if the limit cannot hold this process and a worker with the heaviest slice."""
        if self._limit is None:
            return
        needed = psutil.Process().memory_info().rss + self._heaviest
        if needed > self._limit:
            raise _limit_too_small(self._limit, needed)

    def warning(self, engine: Engine) -> str:
        """A warning, once, if the limit was exceeded when no chunk was left to hold back."""
        if self._limit is None or not self._peak or self._warned:
            return ""
        needed = self._needed(engine)
        if needed <= self._limit:
            return ""
        self._warned = True
        return f"the memory limit of {self._limit:,} bytes was passed: about {needed:,} were needed"

    def _needed(self, engine: Engine, margin: float = 1.0) -> int:
        """Memory of this process and of one worker; an inline worker includes the peak from before the build."""
        own: int = psutil.Process().memory_info().rss
        if not engine.usage().in_process:
            return own + int(self._peak * margin)
        return self._peak if self._peak > self._before else own

    def take(self, event: Event, weight: int) -> None:
        if isinstance(event, Done) and weight >= _TYPICAL * self._heaviest:
            self._peak = max(self._peak, event.peak_bytes)
            self._weighed += 1

    def steer(self, engine: Engine, left: int) -> None:
        """Resize the engine when a higher peak, or the first one, was seen."""
        if self._limit is None or not self._peak or not left:
            return
        if self._needed(engine, _MARGIN) > self._limit:
            raise _limit_too_small(self._limit, self._needed(engine, _MARGIN))
        if self._weighed < _ENOUGH or engine.usage().in_process:
            return
        own = psutil.Process().memory_info().rss
        allowed = int((self._limit - own) // (self._peak * _MARGIN))
        wanted = max(1, min(allowed, self._workers, left))
        if wanted != self._allowed:
            engine.resize(wanted)
            self._allowed = wanted


class InlineEngine:
    """One slot, whose chunk is made in `poll`. It uses the task itself, so the task needs no document."""

    def __init__(self) -> None:
        self._task: Task | None = None
        self._chunk: int | None = None

    def capacity(self) -> int:
        return 1

    def start(self, task: Task, slots: int) -> None:
        self._task = task

    def idle(self) -> list[int]:
        return [0] if self._task is not None and self._chunk is None else []

    def submit(self, slot: int, chunk: int) -> None:
        self._chunk = chunk

    def poll(self, timeout: float) -> list[Event]:
        if self._task is None or self._chunk is None:
            time.sleep(timeout)
            return []
        chunk, self._chunk = self._chunk, None
        return [attempt_chunk(self._task, chunk)]

    def resize(self, slots: int) -> None:
        """No-op: there is always one slot."""

    def usage(self) -> EngineUsage:
        return EngineUsage(workers=1, pids=(os.getpid(),), in_process=True)

    def stop(self) -> None:
        self._task = self._chunk = None
