"""What a user sees of a service that does not answer, until its first answer in this process.

    no answer from http://127.0.0.1:9000: connection refused; trying again (2 of 3)

A service that has answered once gets all retries in silence: it may be restarting, and a long build should outlive
that. One that never did is probably named wrong or not running, so less is tried, and it is reported while it is tried.
Lines go to the logger `forebay`: the command line prints them, a program decides by its own logging.
"""

import logging
import threading
from collections.abc import Iterator
from contextlib import contextmanager

QUIET_SECONDS = 1.5  # without an answer, until a first line
FIRST_ATTEMPTS = 3  # at a service that refuses connections and has not answered yet
_log = logging.getLogger("forebay")
_answered: set[str] = set()


def has_answered(service: str) -> bool:
    return service in _answered


def note_answer(service: str) -> None:
    _answered.add(service)


@contextmanager
def awaited(service: str) -> Iterator[None]:
    """Report after a moment that the service has not answered yet, unless it did before."""
    if service in _answered:
        yield
        return
    timer = threading.Timer(QUIET_SECONDS, _report_silence, (service,))
    timer.daemon = True
    timer.start()
    try:
        yield
    finally:
        timer.cancel()
        timer.join()  # at once: no thread is left behind


def _report_silence(service: str) -> None:
    if service not in _answered:
        _log.warning("no answer from %s yet; still trying", service)


def report_retry(service: str, problem: str, attempt: int, attempts: int) -> None:
    """Report that a service is asked again, unless it answered before."""
    if service not in _answered:
        _log.warning("no answer from %s: %s; trying again (%d of %d)", service, problem, attempt, attempts)
