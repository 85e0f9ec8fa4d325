"""Results of numbered tasks, in order, made by threads ahead of whoever takes them.

    tasks ──▶ thread ─┐
          ──▶ thread ─┴─▶ slot 0 │ slot 1 │ slot 2 │ … ──▶ taken in order; each taken slot lets one more task begin

Threads are daemons and hold nothing but the feed, so neither an iteration that is dropped half way nor an
interpreter that exits waits for them: both tell them to stop first. A forked process has no threads; its copy of a
feed is left alone, and says so by `is_mine`.
"""

import atexit
import os
import threading
import time
import weakref
from collections.abc import Callable
from queue import SimpleQueue
from typing import Any, Generic, TypeVar

Made = TypeVar("Made")

_PATIENCE_SECONDS = 2.0  # for tasks under way, when a feed is stopped; what takes longer is left behind
_running: "weakref.WeakSet[Feed[Any]]" = weakref.WeakSet()


class Failed:
    """What a task raised, kept until its turn."""

    def __init__(self, error: BaseException) -> None:
        self.error = error


class Feed(Generic[Made]):
    """`take()` gives what `make(0)`, `make(1)`, … return, or raises what they raise."""

    def __init__(self, make: Callable[[int], Made], count: int, *, threads: int, ahead: int) -> None:
        self._make = make
        self._count = count
        self._next = 0
        self._pid = os.getpid()
        self._stopped = False
        self._tasks: SimpleQueue[int | None] = SimpleQueue()
        self._slots: list[SimpleQueue[Made | Failed]] = [SimpleQueue() for _ in range(max(1, ahead))]
        for task in range(min(count, len(self._slots))):
            self._tasks.put(task)
        self._threads = [
            threading.Thread(target=self._work, name=f"forebay-feed-{number}", daemon=True) for number in range(threads)
        ]
        _running.add(self)
        for thread in self._threads:
            thread.start()

    @property
    def is_mine(self) -> bool:
        """Whether the threads of this feed are threads of this process."""
        return self._pid == os.getpid()

    def take(self) -> Made:
        """The next result; waits for it. Without threads, it is made now."""
        made = self._slots[self._next % len(self._slots)].get() if self._threads else self._make(self._next)
        self._next += 1
        if isinstance(made, Failed):
            raise made.error
        if self._next - 1 + len(self._slots) < self._count:
            self._tasks.put(self._next - 1 + len(self._slots))
        return made

    def stop(self) -> None:
        """End the threads; a task under way is waited for, what was made ahead is dropped."""
        if not self.is_mine or self._stopped:
            return
        self._stopped = True
        for _ in self._threads:
            self._tasks.put(None)
        end = time.monotonic() + _PATIENCE_SECONDS
        for thread in self._threads:
            if thread is not threading.current_thread():  # the garbage collector may run in one of them
                thread.join(max(0.0, end - time.monotonic()))
        _running.discard(self)

    def _work(self) -> None:
        while (task := self._tasks.get()) is not None and not self._stopped:
            try:
                made: Made | Failed = self._make(task)
            except BaseException as error:
                made = Failed(error)
            self._slots[task % len(self._slots)].put(made)
            del made  # while this thread waits, the buffers belong to whoever took them


@atexit.register
def _stop_all() -> None:
    for feed in list(_running):
        feed.stop()
