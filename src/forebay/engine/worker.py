"""A worker process: take a chunk number, make the chunk, report what happened.

A chunk is written by a second thread, for a disk is waited for; meanwhile the next one is computed. At most one chunk
is being written: who computes faster than the disk takes waits for it.
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
    """Make a chunk."""
    return attempt_beginning(job, chunk)()


def attempt_beginning(job: Task, chunk: int) -> Finish:
    """Compute a chunk; what comes of it is known when it is finished."""
    started = time.monotonic()
    try:
        finish = job.begin(chunk)
    except Exception as error:  # a recipe may raise anything; one chunk's trouble must not end the others
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
    said = f"{type(error).__name__}: {error}"
    match error:
        case SourceChanged():
            return Refused(chunk, "source-changed", str(error), error.files)
        case ChunkFailed():
            reasons = (error.failures, error.reason, error.count, error.example, error.advice)
            return Refused(chunk, "all-failed", str(error), reasons=reasons)
        case OSError():
            return Refused(chunk, "disk-full" if is_full(error) else "io", said)
    return Refused(chunk, "error", said)


def peak_bytes() -> int:
    """The most memory this process has held.

    Linux counts what the parent held before it started this program into `getrusage`, so its own figure is preferred.
    """
    try:
        status = Path("/proc/self/status").read_text()
    except OSError:
        return resource.getrusage(resource.RUSAGE_SELF).ru_maxrss * _RSS_UNIT
    return int(status.partition("VmHWM:")[2].split()[0]) * 1024


READY = pickle.dumps("ready")  # said once, when the job is loaded: what ends a worker before that is no chunk's fault
COMPUTED = pickle.dumps("computed")  # said before a chunk is written: another one can be given


def main(descriptor: int) -> None:
    """First comes what a job will need, perhaps while it is still being planned; then the job; then chunk numbers."""
    pipe = Connection(descriptor)
    threading.Thread(target=_end_with_builder, args=(descriptor,), daemon=True).start()
    try:
        _get_ready(pipe.recv_bytes())
        job: Task = pickle.loads(pipe.recv_bytes())
        pipe.send_bytes(READY)
        # Garbage in cycles is looked for between chunks, and not among what is loaded by now: it takes a tenth of the
        # time of a chunk of many small samples otherwise.
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
        del finish  # with what it is about to write
        gc.collect()


def _finish(pipe: Connection, finish: Finish) -> None:
    """Nothing else is sent meanwhile: the next chunk is said to be computed only after this."""
    pipe.send_bytes(pickle.dumps(finish()))


def _get_ready(recipe: bytes) -> None:
    """Load what a recipe needs. Trouble is not told here: it comes again with the first chunk, and is told then."""
    with suppress(Exception):
        hooks_of(pickle.loads(recipe)).preload()


def _end_with_builder(descriptor: int) -> None:
    """Leave at once when the other end of the pipe closes: a builder that was killed wants no more chunks."""
    watcher = select.poll()
    watcher.register(descriptor, select.POLLHUP | select.POLLERR)
    watcher.poll()
    os._exit(0)
