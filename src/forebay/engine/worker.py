"""A worker process: receive a chunk number, make the chunk, report the result.

A second thread writes a chunk while the next one is computed. At most one chunk is being written: computing blocks
while the previous write is in progress.
"""

import gc
import os
import pickle
import resource
import select
import sys
import threading
import time
from collections.abc import Callable
from concurrent.futures import Future, ThreadPoolExecutor
from contextlib import suppress
from functools import partial
from multiprocessing.connection import Connection
from pathlib import Path
from typing import Any

from forebay.engine.base import Event, Made, Refused, Task
from forebay.errors import ChunkFailed, SourceChanged
from forebay.recipe import hooks_of
from forebay.store.base import is_full

_RSS_UNIT = 1 if sys.platform == "darwin" else 1024
Finish = Callable[[], Event]


def attempt_chunk(job: Task, chunk: int) -> Event:
    """Make a chunk; failures are returned as events, never raised."""
    return attempt_beginning(job, chunk)()


def attempt_beginning(job: Task, chunk: int) -> Finish:
    """Compute a chunk and return the callable that writes it and returns the event."""
    started = time.monotonic()
    try:
        finish = job.begin(chunk)
    except Exception as error:  # a recipe may raise anything; one chunk's failure must not end the others
        refused = _refused(chunk, error)
        return lambda: refused
    return partial(_finished, chunk, finish, started)


def _finished(chunk: int, finish: Callable[[], Any], started: float) -> Event:
    try:
        record = finish()
    except Exception as error:  # as above
        return _refused(chunk, error)
    return Made(chunk, record, time.monotonic() - started, peak_bytes())


def _refused(chunk: int, error: Exception) -> Refused:
    message = f"{type(error).__name__}: {error}"
    match error:
        case SourceChanged():
            return Refused(chunk, "source-changed", str(error), error.files)
        case ChunkFailed():
            reasons = (error.failures, error.reason, error.count, error.example, error.advice)
            return Refused(chunk, "all-failed", str(error), reasons=reasons)
        case OSError():
            return Refused(chunk, "disk-full" if is_full(error) else "io", message)
    return Refused(chunk, "error", message)


def peak_bytes() -> int:
    """The peak memory of this process.

    On Linux `getrusage` includes the parent's memory at fork, so `/proc` is preferred.
    """
    try:
        status = Path("/proc/self/status").read_text()
    except OSError:
        return resource.getrusage(resource.RUSAGE_SELF).ru_maxrss * _RSS_UNIT
    return int(status.partition("VmHWM:")[2].split()[0]) * 1024


READY = pickle.dumps("ready")  # sent once, when the job is loaded; a worker that dies before is not a chunk's fault
COMPUTED = pickle.dumps("computed")  # sent before a chunk is written: the worker is free for another


def main(descriptor: int) -> None:
    """Receive the recipe to preload (perhaps while the job is still being planned), the job, then chunk numbers."""
    pipe = Connection(descriptor)
    threading.Thread(target=_end_with_builder, args=(descriptor,), daemon=True).start()
    try:
        _preload(pipe.recv_bytes())
        job: Task = pickle.loads(pipe.recv_bytes())
        pipe.send_bytes(READY)
        # Collect garbage between chunks only, and not among objects loaded by now: otherwise it takes a tenth of
        # the time of a chunk of many small samples.
        gc.freeze()
        gc.disable()
        with ThreadPoolExecutor(1, "writer") as writer:
            _make_chunks(pipe, job, writer)
    except (EOFError, BrokenPipeError, ConnectionResetError):
        return


def _make_chunks(pipe: Connection, job: Task, writer: ThreadPoolExecutor) -> None:
    written: Future[None] | None = None
    while True:
        chunk: int = pickle.loads(pipe.recv_bytes())
        finish = attempt_beginning(job, chunk)
        if written is not None:
            written.result()
        pipe.send_bytes(COMPUTED)
        written = writer.submit(_finish, pipe, finish)
        del finish  # so that its buffers can be freed
        gc.collect()


def _finish(pipe: Connection, finish: Finish) -> None:
    """Write a chunk and send its event. Nothing else is sent meanwhile: COMPUTED of the next chunk comes after."""
    pipe.send_bytes(pickle.dumps(finish()))


def _preload(recipe: bytes) -> None:
    """Load what a recipe needs. Errors are ignored here; the first chunk will raise them again."""
    with suppress(Exception):
        hooks_of(pickle.loads(recipe)).preload()


def _end_with_builder(descriptor: int) -> None:
    """Exit as soon as the other end of the pipe closes: the builder is gone."""
    watcher = select.poll()
    watcher.register(descriptor, select.POLLHUP | select.POLLERR)
    watcher.poll()
    os._exit(0)
