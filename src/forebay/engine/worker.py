"""The main loop of a worker process: take a chunk number, make the chunk, say what happened."""

import gc
import os
import pickle
import select
import threading
from contextlib import suppress
from multiprocessing.connection import Connection

from forebay.cache.crew import Task
from forebay.engine.attempt import attempt_chunk


def main(descriptor: int) -> None:
    """First comes what a job will need, perhaps while it is still being planned; then the job; then chunk numbers."""
    pipe = Connection(descriptor)
    threading.Thread(target=_end_with_builder, args=(descriptor,), daemon=True).start()
    try:
        _get_ready(pipe.recv_bytes())
        job: Task = pickle.loads(pipe.recv_bytes())
        # Garbage in cycles is looked for between chunks, and not among what is loaded by now: it takes a tenth of the
        # time of a chunk of many small samples otherwise.
        gc.freeze()
        gc.disable()
        while True:
            chunk: int = pickle.loads(pipe.recv_bytes())
            pipe.send_bytes(pickle.dumps(attempt_chunk(job, chunk)))
            gc.collect()
    except (EOFError, BrokenPipeError, ConnectionResetError):
        return


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
