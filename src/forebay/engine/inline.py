"""Chunks made in this very process: for notebooks, debuggers and stores that live in memory."""

import os
import time

from forebay.cache.crew import Crew, Event, Task
from forebay.engine.attempt import attempt_chunk
from forebay.recipe import AnyRecipe


class InlineEngine:
    def get_ready(self, recipe: AnyRecipe, workers: int) -> None:
        """This process is."""

    def close(self) -> None:
        """Nothing was started."""

    def start(self, job: Task, workers: int) -> Crew:
        return InlineCrew(job)


class InlineCrew:
    """One slot, worked on while the build waits for it."""

    def __init__(self, job: Task) -> None:
        self._job = job
        self._chunk: int | None = None

    def idle(self) -> list[int]:
        return [0] if self._chunk is None else []

    def give(self, slot: int, chunk: int) -> None:
        self._chunk = chunk

    def wait(self, timeout: float) -> list[Event]:
        if self._chunk is None:
            time.sleep(timeout)
            return []
        chunk, self._chunk = self._chunk, None
        return [attempt_chunk(self._job, chunk)]

    def resize(self, workers: int) -> None:
        """There is always one slot."""

    def pids(self) -> list[int]:
        return [os.getpid()]

    def stop(self) -> None:
        self._chunk = None
