"""Run tasks ahead of the consumer of their results: the only queue.

    tasks ──▶ pending  ▮ ▮ ▯ ▯        ▮ made, waits for the consumer      ▯ a thread makes it
                       └─ taken in order

Threads take tasks in order, and begin one more while `fits(task, pending)` is true. They are daemons that hold only
the queue: an abandoned iteration or an exiting interpreter does not wait for them. A forked process has no threads: see
`belongs_to_this_process`.
"""

import atexit
import os
import threading
import time
import weakref
from collections import deque
from collections.abc import Callable, Iterator, Sequence
from typing import Any, Generic, TypeVar

Task = TypeVar("Task")
Item = TypeVar("Item")
_STOP_SECONDS = 0.2  # to wait for running tasks on stop(); a slower one, which may be a download, is abandoned
_EXIT_SECONDS = 2.0  # likewise, when the interpreter exits
_running: "weakref.WeakSet[Ahead[Any, Any]]" = weakref.WeakSet()
_process = object()  # identifies this process without a getpid() per batch


class Slot(Generic[Task, Item]):
    """A running or finished task and its result."""

    __slots__ = ("error", "is_done", "item", "task")

    def __init__(self, task: Task) -> None:
        self.task = task
        self.item: Item | None = None
        self.error: BaseException | None = None
        self.is_done = False


Fits = Callable[[Task, Sequence[Slot[Task, Item]]], bool]


class Ahead(Generic[Task, Item]):
    """Yields `make(task)` for every task, in order, and raises its errors. Without threads, on request."""

    def __init__(
        self, tasks: Iterator[Task], make: Callable[[Task], Item], fits: Fits[Task, Item], threads: int, name: str
    ) -> None:
        self._tasks, self._make, self._fits = tasks, make, fits
        self._process, self._is_stopped, self._has_ended = _process, False, False
        self._listing = threading.Lock()  # of the next task, outside the lock that the consumer takes
        self._lock = threading.RLock()  # a garbage collection may call stop() where this thread holds it
        self._ready = threading.Condition(self._lock)  # the consumer waits: the first pending task is done
        self._room = threading.Condition(self._lock)  # a thread waits: its task fits
        self._pending: deque[Slot[Task, Item]] = deque()
        self._threads = [
            threading.Thread(target=self._work, name=f"forebay-{name}-{number}", daemon=True)
            for number in range(threads)
        ]
        _running.add(self)
        for thread in self._threads:
            thread.start()

    @property
    def belongs_to_this_process(self) -> bool:
        """Whether the threads are threads of this process."""
        return self._process is _process

    def __iter__(self) -> Iterator[Item]:
        return self

    def __next__(self) -> Item:
        if not self._threads:
            return self._make(next(self._tasks))
        with self._lock:
            self._ready.wait_for(lambda: self._pending[0].is_done if self._pending else self._has_ended)
            if not self._pending:
                raise StopIteration
            slot = self._pending.popleft()
            self._room.notify()
        if slot.error is not None:
            raise slot.error
        item, slot.item = slot.item, None
        assert item is not None
        return item

    def release(self, is_passed: Callable[[Task], bool]) -> None:
        """Forget the first tasks that are passed, whether they are done or not; never waits."""
        with self._lock:
            while self._pending and self._pending[0].task is not None and is_passed(self._pending[0].task):
                self._pending.popleft()
            self._room.notify()

    @property
    def is_running(self) -> bool:
        return self.belongs_to_this_process and not self._is_stopped

    def stop(self, *, wait: bool = True) -> None:
        """End the threads and drop pending results; with `wait`, wait briefly for running tasks."""
        if not self.belongs_to_this_process or self._is_stopped:
            return
        with self._lock:
            self._is_stopped = True
            self._pending = deque()  # not cleared: `fits` may be counting the old one
            self._room.notify()
        end = time.monotonic() + _STOP_SECONDS * wait
        for thread in self._threads:
            if thread is not threading.current_thread():
                thread.join(max(0.0, end - time.monotonic()))
        _running.discard(self)

    def _work(self) -> None:
        while (slot := self._begun()) is not None:
            try:
                slot.item = self._make(slot.task)
            except BaseException as error:  # top of a worker: the consumer raises it, at this task
                slot.error = error
            with self._lock:
                slot.is_done = True
                if self._pending and self._pending[0] is slot:
                    self._ready.notify()
            del slot  # while this thread waits, only the consumer holds the item

    def _begun(self) -> Slot[Task, Item] | None:
        """The next task, once it fits; None at the end."""
        with self._listing:
            slot = self._listed()
            if slot is None:
                return None
            with self._lock:
                if not slot.is_done:
                    self._room.wait_for(lambda: self._is_stopped or self._fits(slot.task, self._pending))
                if self._is_stopped:
                    return None
                self._pending.append(slot)
                if slot.is_done:
                    self._has_ended = True  # not before its error is pending, or the consumer would see an end
                    self._ready.notify()
        return None if slot.is_done else slot

    def _listed(self) -> Slot[Task, Item] | None:
        try:
            task = None if self._is_stopped or self._has_ended else next(self._tasks, None)
        except BaseException as error:  # top of a worker: the consumer raises it, after the tasks before
            slot: Slot[Any, Item] = Slot(None)
            slot.error, slot.is_done = error, True
            return slot
        if task is None:
            with self._lock:
                self._has_ended = True
                self._ready.notify()
            return None
        return Slot(task)


def _forked() -> None:
    global _process
    _process = object()


os.register_at_fork(after_in_child=_forked)


@atexit.register
def _stop_all() -> None:
    queues = list(_running)
    for each in queues:
        each.stop(wait=False)
    end = time.monotonic() + _EXIT_SECONDS
    for thread in (thread for each in queues for thread in each._threads):
        thread.join(max(0.0, end - time.monotonic()))
