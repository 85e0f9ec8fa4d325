"""Retries of failed requests, and messages about a service that does not answer.

    no answer from http://127.0.0.1:9000: connection refused; trying again (2 of 3)

A service that has answered once in this process gets all retries in silence: it may be restarting, and a long build
should outlive that. One that never did is probably named wrong or not running: it gets fewer retries, and each is
reported to the logger `forebay`.
"""

import errno
import logging
import random
import threading
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from typing import TypeVar

_LONGEST_ASKED = 600.0  # the hub's rate limit window is five minutes; longer waits are capped
_TRANSIENT = frozenset({errno.ESTALE, errno.EIO, errno.EBUSY, errno.EINTR, errno.EAGAIN, errno.ETIMEDOUT})
_QUIET_SECONDS = 1.5  # without an answer, until it is reported
_FIRST_RETRIES = 2  # of a service that refuses connections and has not answered yet
_log = logging.getLogger("forebay")
_answered: set[str] = set()
T = TypeVar("T")


@dataclass(frozen=True, slots=True)
class RetryPolicy:
    """Retries with growing pauses; an attempt over a network fails after `timeout` seconds without a byte."""

    retries: int = 5
    timeout: float = 300.0
    first_wait: float = 0.5
    longest_wait: float = 30.0

    def wait(self, failures: int, asked: float | None = None) -> float:
        """The pause after n failures in a row: as the service requested, or exponential back-off with jitter."""
        if asked is not None:
            return min(asked, _LONGEST_ASKED) + random.uniform(0, self.first_wait)
        return min(self.longest_wait, self.first_wait * 2.0 ** (failures - 1)) * random.uniform(0.5, 1)

    def retries_of(self, service: str) -> int:
        """How often a service is asked again that refuses connections."""
        return self.retries if service in _answered else min(self.retries, _FIRST_RETRIES)


DISK = RetryPolicy(retries=5, first_wait=0.1, longest_wait=2)


def with_retries(action: Callable[[], T]) -> T:
    """Return what the action returns; a transient I/O error is raised only after the last pause."""
    for failures in range(1, DISK.retries + 1):
        try:
            return action()
        except OSError as error:
            if error.errno not in _TRANSIENT:
                raise
            time.sleep(DISK.wait(failures))
    return action()


def note_answer(service: str) -> None:
    _answered.add(service)


@contextmanager
def awaited(service: str) -> Iterator[None]:
    """Report after a moment that the service has not answered, unless it answered before."""
    if service in _answered:
        yield
        return
    timer = threading.Timer(_QUIET_SECONDS, _report_silence, (service,))
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
