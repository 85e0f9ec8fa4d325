"""One try at one chunk, with every outcome as an event."""

import resource
import sys
import time
from pathlib import Path

from forebay.cache.crew import Event, Made, Refused, Task
from forebay.errors import SourceChanged
from forebay.store.base import is_full

_RSS_UNIT = 1 if sys.platform == "darwin" else 1024


def attempt_chunk(job: Task, chunk: int) -> Event:
    """Make a chunk; whatever goes wrong comes back as words, not as an exception."""
    started = time.monotonic()
    try:
        record = job.make(chunk)
    except SourceChanged as error:
        return Refused(chunk, "source-changed", str(error), error.files)
    except OSError as error:
        return Refused(chunk, "disk-full" if is_full(error) else "io", f"{type(error).__name__}: {error}")
    except Exception as error:  # a recipe may raise anything; one chunk's trouble must not end the others
        return Refused(chunk, "error", f"{type(error).__name__}: {error}")
    return Made(chunk, record, time.monotonic() - started, peak_bytes())


def peak_bytes() -> int:
    """The most memory this process has held.

    Linux counts what the parent held before it started this program into `getrusage`, so its own figure is preferred.
    """
    try:
        status = Path("/proc/self/status").read_text()
    except OSError:
        return resource.getrusage(resource.RUSAGE_SELF).ru_maxrss * _RSS_UNIT
    return int(status.partition("VmHWM:")[2].split()[0]) * 1024
