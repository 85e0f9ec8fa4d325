"""What a worker of any engine does with a chunk: compute it, write it, and return what happened as an event."""

import resource
import sys
import time
from collections.abc import Callable
from functools import partial
from pathlib import Path
from typing import Any

import msgspec

from forebay.engine.base import ChunkMaker, Done, Event, Failed
from forebay.errors import ChunkFailed, SourceChanged
from forebay.store.base import is_full

_RSS_UNIT = 1 if sys.platform == "darwin" else 1024
Finish = Callable[[], Event]


def attempt_chunk(maker: ChunkMaker, chunk: int) -> Event:
    """Make a chunk; failures are returned as events, never raised."""
    return attempt_beginning(maker, chunk)()


def attempt_beginning(maker: ChunkMaker, chunk: int) -> Finish:
    """Compute a chunk and return the callable that writes it and returns the event."""
    started = time.monotonic()
    try:
        finish = maker.begin(chunk)
    except Exception as error:  # a recipe may raise anything; one chunk's failure must not end the others
        failed = _failed(chunk, error)
        return lambda: failed
    return partial(_finished, chunk, finish, started)


def _finished(chunk: int, finish: Callable[[], Any], started: float) -> Event:
    begun = time.monotonic()
    try:
        record = msgspec.to_builtins(finish(), builtin_types=(bytes,))
    except Exception as error:  # as above
        return _failed(chunk, error)
    ended = time.monotonic()
    return Done(chunk, record, ended - started, peak_bytes(), ended - begun)


def _failed(chunk: int, error: Exception) -> Failed:
    message = f"{type(error).__name__}: {error}"
    match error:
        case SourceChanged():
            return Failed(chunk, "source-changed", str(error), dict(error.files))
        case ChunkFailed():
            reasons = (error.failures, error.reason, error.count, error.example, error.advice)
            return Failed(chunk, "all-failed", str(error), reasons=reasons)
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
