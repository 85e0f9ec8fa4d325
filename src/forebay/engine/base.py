"""The contract between a build and the engine that runs its chunks."""

from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from typing import Any, Literal, Protocol

from forebay.recipe import AnyRecipe

ProblemKind = Literal["io", "disk-full", "source-changed", "all-failed", "error"]


class Task(Protocol):
    """Numbered chunks of work. A task is pickled once per worker."""

    @property
    def chunks(self) -> Any:
        """An object with the `recipe` and the `source` (or None) that a worker must be able to import."""

    def begin(self, chunk: int) -> Callable[[], Any]:
        """Compute a chunk and return the callable that writes it; its result becomes `Made.record`.

        A worker may call it in another thread while it computes the next chunk.
        """


@dataclass(frozen=True, slots=True)
class Made:
    """A chunk is done; `record` is what its task returned (in a build: None if another builder was first)."""

    chunk: int
    record: Any
    seconds: float
    peak_bytes: int


@dataclass(frozen=True, slots=True)
class Refused:
    """A chunk could not be made; the worker is alive."""

    chunk: int
    kind: ProblemKind
    reason: str
    files: Mapping[str, str] = field(default_factory=dict)
    reasons: tuple[int, str, int, str, str] | None = (
        None  # if all samples of the chunk failed: the arguments of `ChunkFailed`
    )


@dataclass(frozen=True, slots=True)
class Died:
    """A worker died while computing or writing `chunk`."""

    chunk: int | None
    pid: int
    reason: str


@dataclass(frozen=True, slots=True)
class Lost:
    """The worker died on another chunk before this one was written; it does not count as an attempt."""

    chunk: int


Event = Made | Refused | Died | Lost


class Crew(Protocol):
    """The workers of one task. A slot has one worker, which computes one chunk and may be writing another."""

    def idle(self) -> list[int]:
        """The slots that are free to compute a chunk."""

    def give(self, slot: int, chunk: int) -> None:
        """Assign a chunk to a free slot."""

    def wait(self, timeout: float) -> list[Event]:
        """The events since the last call, after at most `timeout` seconds."""

    def resize(self, workers: int) -> None:
        """Change the number of slots; a busy slot finishes its chunk first."""

    def pids(self) -> list[int]:
        """The worker processes, for measuring memory and CPU."""

    def stop(self) -> None:
        """Kill all workers; unfinished chunks are lost."""


class Engine(Protocol):
    """Starts crews: local processes, this process, a cluster."""

    def preload(self, recipe: AnyRecipe, workers: int) -> None:
        """Start workers early, and have each call the recipe's `preload()`."""

    def start(self, job: Task, workers: int) -> Crew: ...

    def close(self) -> None:
        """Stop workers that were started and not used."""
