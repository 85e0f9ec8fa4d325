"""The main loop of a worker process: take a chunk number, make the chunk, say what happened."""

import os
import pickle
import select
import threading
from multiprocessing.connection import Connection

from forebay.cache.work import Job
from forebay.engine.attempt import attempt_chunk


def main(descriptor: int) -> None:
    pipe = Connection(descriptor)
    try:
        job: Job = pickle.loads(pipe.recv_bytes())
        threading.Thread(target=_end_with_builder, args=(descriptor,), daemon=True).start()
        while True:
            chunk: int = pickle.loads(pipe.recv_bytes())
            pipe.send_bytes(pickle.dumps(attempt_chunk(job, chunk)))
    except (EOFError, BrokenPipeError, ConnectionResetError):
        return


def _end_with_builder(descriptor: int) -> None:
    """Leave at once when the other end of the pipe closes: a builder that was killed wants no more chunks."""
    watcher = select.poll()
    watcher.register(descriptor, select.POLLHUP | select.POLLERR)
    watcher.poll()
    os._exit(0)
