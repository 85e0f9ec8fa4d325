"""One try at one chunk, with every outcome as an event: what goes wrong comes back as words, not as an exception."""

import resource
import sys
import time
from collections.abc import Callable
from functools import partial
from pathlib import Path
from typing import Any

from forebay.cache.crew import Event, Made, Refused, Task
from forebay.errors import ChunkFailed, SourceChanged
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
