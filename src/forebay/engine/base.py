"""The contract between a build and whoever runs its chunks."""

from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from typing import Any, Literal, Protocol

from forebay.recipe import AnyRecipe

Trouble = Literal["io", "disk-full", "source-changed", "all-failed", "error"]


class Task(Protocol):
    """What is run: numbered chunks of work, each by whoever is free. It is pickled to get there."""

    @property
    def chunks(self) -> Any:
        """Has the `recipe` and the `source` (None: none) that a worker must be able to import."""

    def begin(self, chunk: int) -> Callable[[], Any]:
        """Compute a chunk, and say how to finish it: what that call gives is told to whoever started the crew.

        Finishing waits for the disk. A worker may do it in another thread, while it begins the next chunk.
        """


@dataclass(frozen=True, slots=True)
class Made:
    """A chunk is done; `record` is what the task says of it (a build: None where somebody else was first)."""

    chunk: int
    record: Any
    seconds: float
    peak_bytes: int


@dataclass(frozen=True, slots=True)
class Refused:
    """A chunk could not be made, and the worker lives."""

    chunk: int
    trouble: Trouble
    reason: str
    files: Mapping[str, str] = field(default_factory=dict)
    reasons: tuple[int, str, int, str, str] | None = None  # of a chunk of which all samples failed: see `ChunkFailed`


@dataclass(frozen=True, slots=True)
class Died:
    """A worker is gone, with the chunk it was at."""

    chunk: int | None
    pid: int
    reason: str


@dataclass(frozen=True, slots=True)
class Lost:
    """A chunk was computed and not yet written when its worker died of another one. Nobody blames it."""

    chunk: int


Event = Made | Refused | Died | Lost


class Crew(Protocol):
    """Workers at work on one job. A slot holds one worker, that computes one chunk and may be writing another."""

    def idle(self) -> list[int]:
        """The slots that can compute a chunk."""

    def give(self, slot: int, chunk: int) -> None:
        """Have a slot make a chunk."""

    def wait(self, timeout: float) -> list[Event]:
        """What happened, after at most `timeout` seconds."""

    def resize(self, workers: int) -> None:
        """Have this many slots from now on; one that is busy ends its chunk first."""

    def pids(self) -> list[int]:
        """The processes at work, for measuring them."""

    def stop(self) -> None:
        """End all work at once; what was under way is lost."""


class Engine(Protocol):
    """Who runs the chunks: local processes, this process, a cluster."""

    def preload(self, recipe: AnyRecipe, workers: int) -> None:
        """Begin to start so many workers, and have them load what a recipe needs: its `preload()`."""

    def start(self, job: Task, workers: int) -> Crew: ...

    def close(self) -> None:
        """End what was started and not used."""
