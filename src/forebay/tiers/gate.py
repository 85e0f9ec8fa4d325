"""Many at once, or one alone: transactions go through the gate, and what must not meet one waits until all are out."""

import threading
from collections.abc import Iterator
from contextlib import contextmanager


class Gate:
    def __init__(self) -> None:
        self._changed = threading.Condition()
        self._inside = 0
        self._shut = False

    def enter(self) -> None:
        with self._changed:
            while self._shut:
                self._changed.wait()
            self._inside += 1

    def leave(self) -> None:
        with self._changed:
            self._inside -= 1
            if not self._inside:
                self._changed.notify_all()

    def shut(self) -> None:
        """Let nobody in, and wait until nobody is inside."""
        with self._changed:
            while self._shut:
                self._changed.wait()
            self._shut = True
            while self._inside:
                self._changed.wait()

    def open(self) -> None:
        with self._changed:
            self._shut = False
            self._changed.notify_all()

    @contextmanager
    def alone(self) -> Iterator[None]:
        self.shut()
        try:
            yield
        finally:
            self.open()
