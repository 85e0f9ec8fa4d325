"""The main loop of a worker process: take a chunk number, make the chunk, say what happened.

A chunk is written by a second thread, for a disk is waited for; meanwhile the next one is computed. At most one chunk
is being written: who computes faster than the disk takes waits for it.
"""

import gc
import os
import pickle
import select
import threading
from concurrent.futures import Future, ThreadPoolExecutor
from contextlib import suppress
from multiprocessing.connection import Connection

from forebay.cache.crew import Task
from forebay.engine.attempt import Finish, attempt_beginning

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
        pickle.loads(recipe).get_ready()


def _end_with_builder(descriptor: int) -> None:
    """Leave at once when the other end of the pipe closes: a builder that was killed wants no more chunks."""
    watcher = select.poll()
    watcher.register(descriptor, select.POLLHUP | select.POLLERR)
    watcher.poll()
    os._exit(0)
