"""Retrying what a disk or a network file system refuses for a moment, in the builder's own thread."""

import errno
import time
from collections.abc import Callable
from typing import TypeVar

PAUSES = (0.05, 0.2, 0.8, 2.0)  # seconds, one after the other
TRANSIENT = frozenset({errno.ESTALE, errno.EIO, errno.EBUSY, errno.EINTR, errno.EAGAIN, errno.ETIMEDOUT})

T = TypeVar("T")


def with_retries(action: Callable[[], T]) -> T:
    """What an action returns; an I/O error that may pass is waited for, a few seconds in all, before it is raised."""
    for pause in PAUSES:
        try:
            return action()
        except OSError as error:
            if error.errno not in TRANSIENT:
                raise
            time.sleep(pause)
    return action()
