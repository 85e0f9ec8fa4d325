"""Items of numbered tasks, in order, made by threads ahead of whoever takes them.

    tasks ─▶ thread ─▶ slot 0  ▯▯▯ end
          ─▶ thread ─▶ slot 1  ▯▯        ──▶ taken slot by slot; an emptied slot lets one more task begin
                                room for `ahead` items each, then its thread waits

Threads are daemons and hold nothing but the feed, so neither an iteration that is dropped half way nor an
interpreter that exits waits for them: both tell them to stop first. A forked process has no threads; its copy of a
feed is left alone, and says so by `is_mine`.
"""

import atexit
import os
import threading
import time
import weakref
from collections.abc import Callable, Iterator
from queue import SimpleQueue
from typing import Any, Generic, TypeVar

Made = TypeVar("Made")

_PATIENCE_SECONDS = 2.0  # for tasks under way, when a feed is stopped; what takes longer is left behind
_running: "weakref.WeakSet[Feed[Any]]" = weakref.WeakSet()
_process = object()  # stands for this process; its number would be asked of the system with every batch


class _End:
    """Comes after the items of a task: with what it raised, if it did."""

    def __init__(self, error: BaseException | None = None) -> None:
        self.error = error


class _Slot(Generic[Made]):
    """The items of one task, and a token for each further one that there is room for."""

    def __init__(self, ahead: int) -> None:
        self.items: SimpleQueue[Made | _End] = SimpleQueue()
        self.room: SimpleQueue[None] = SimpleQueue()
        for _ in range(ahead - 1):
            self.room.put(None)


class Feed(Generic[Made]):
    """`items()` gives what the iterators `make(0)`, `make(1)`, … give, one after the other, and raises what they do."""

    def __init__(self, make: Callable[[int], Iterator[Made]], count: int, *, threads: int, ahead: int) -> None:
        self._make = make
        self._count = count
        self._process = _process
        self._stopped = False
        self._tasks: SimpleQueue[int | None] = SimpleQueue()
        self._slots: list[_Slot[Made]] = [_Slot(ahead) for _ in range(threads + 1)]
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
        return self._process is _process

    def items(self) -> Iterator[Made]:
        """All items; waits for each. Without threads, it is made now."""
        for task in range(self._count):
            yield from self._taken(task) if self._threads else self._make(task)

    def stop(self) -> None:
        """End the threads; an item under way is waited for, what was made ahead is dropped."""
        if not self.is_mine or self._stopped:
            return
        self._stopped = True
        for _ in self._threads:
            self._tasks.put(None)
        for slot in self._slots:
            slot.room.put(None)
        end = time.monotonic() + _PATIENCE_SECONDS
        for thread in self._threads:
            if thread is not threading.current_thread():  # the garbage collector may run in one of them
                thread.join(max(0.0, end - time.monotonic()))
        _running.discard(self)

    def _taken(self, task: int) -> Iterator[Made]:
        slot = self._slots[task % len(self._slots)]
        while not isinstance(item := slot.items.get(), _End):
            slot.room.put(None)
            yield item
        if item.error is not None:
            raise item.error
        if task + len(self._slots) < self._count:
            self._tasks.put(task + len(self._slots))

    def _work(self) -> None:
        while (task := self._tasks.get()) is not None and not self._stopped:
            slot = self._slots[task % len(self._slots)]
            try:
                self._fill(slot, self._make(task))
            except BaseException as error:
                slot.items.put(_End(error))
            else:
                slot.items.put(_End())

    def _fill(self, slot: _Slot[Made], items: Iterator[Made]) -> None:
        for item in items:
            slot.items.put(item)
            del item  # while this thread waits, the item belongs to whoever takes it
            slot.room.get()
            if self._stopped:
                return


def _forked() -> None:
    global _process
    _process = object()


if hasattr(os, "register_at_fork"):
    os.register_at_fork(after_in_child=_forked)


@atexit.register
def _stop_all() -> None:
    for feed in list(_running):
        feed.stop()
