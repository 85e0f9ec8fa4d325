"""The state of a running build: counts, notices, progress."""

import time
from collections import Counter
from dataclasses import dataclass, field
from typing import Any

from forebay.building.queue import ChunkQueue
from forebay.cache.reports import Progress
from forebay.engine.base import Engine
from forebay.format.chunk import FAILED, ChunkRecord, is_counted_by_recipe
from forebay.recipe import AnyRecipe, fields_of, hooks_of

STALL_SECONDS = 5.0  # without a worker that could begin a chunk, until a notice


@dataclass(slots=True)
class BuildRun:
    """The counts of one run of `make`."""

    total: int  # wanted chunks
    present: int  # of those, listed before
    started: float = field(default_factory=time.monotonic)
    records: dict[int, ChunkRecord] = field(default_factory=dict)  # made or adopted here
    adopted: set[int] = field(default_factory=set)
    deaths: list[str] = field(default_factory=list)  # of workers
    births_failed: int = 0  # workers in a row that ended before they began
    rows: int = 0
    samples: int = 0
    failures: int = 0
    read_bytes: float = 0.0  # of the source
    written_bytes: int = 0
    note: str = ""
    warnings: list[str] = field(default_factory=list)  # for the report
    source_bytes: int = 0  # of the chunks to make
    downloads: bool = False  # whether the source is on another machine
    memory_limit: int | None = None
    sums: Counter[str] = field(default_factory=Counter)  # statistics of the chunks made
    reasons: Counter[str] = field(default_factory=Counter)  # why samples of them failed
    ready: float = field(default_factory=time.monotonic)  # when a worker could last begin a chunk
    stall_seconds: float = field(default_factory=lambda: STALL_SECONDS)  # without one, until the next note

    def add(self, record: ChunkRecord, adopted: bool) -> None:
        self.records[record.chunk] = record
        self.births_failed = 0
        if adopted:
            self.adopted.add(record.chunk)
            return
        self.rows += record.rows
        self.samples += record.samples
        self.failures += record.failures
        self.written_bytes += record.size
        numbers = {name: value for name, value in record.statistics.items() if not isinstance(value, list)}
        failed = {name: int(value) for name, value in numbers.items() if name.startswith(FAILED)}
        self.sums.update({name: value for name, value in numbers.items() if is_counted_by_recipe(name)})
        self.reasons.update({name.removeprefix(FAILED): count for name, count in failed.items()})

    def note_stall(self, engine: Engine, is_working: bool) -> None:
        """Note that no worker could begin a chunk, each time after twice as long."""
        now = time.monotonic()
        if is_working:
            self.ready, self.stall_seconds = now, STALL_SECONDS
        elif now - self.ready >= self.stall_seconds and not self.note:
            self.stall_seconds *= 2
            waiting = engine.usage().waiting or "they are still starting"
            self.note = f"no worker has been ready for {now - self.ready:.0f} s: {waiting}"

    @property
    def built(self) -> int:
        return len(self.records) - len(self.adopted)

    def figures(self, recipe: AnyRecipe) -> dict[str, Any]:
        """Figures that the recipe derives from the chunks made so far."""
        counts = {"chunks": self.built, "rows": self.rows, "bytes": self.written_bytes}
        return hooks_of(recipe).figures(fields_of(recipe), self.sums, counts) if self.built else {}

    def progress(self, recipe: AnyRecipe, queue: ChunkQueue, engine: Engine) -> Progress:
        usage = engine.usage()
        done = self.present + len(self.records) + queue.listed_elsewhere + len(queue.elsewhere)
        waits = not queue.left and bool(queue.holders)
        progress = Progress(
            phase="waiting" if waits else "building",
            done=min(self.total, done),
            total=self.total,
            rows=self.rows,
            samples=self.samples,
            read_bytes=int(self.read_bytes),
            source_bytes=self.source_bytes,
            downloads=self.downloads,
            raw_bytes=int(self.sums["raw_bytes"]),
            memory_limit=self.memory_limit,
            written_bytes=self.written_bytes,
            failures=self.failures,
            tokens=self.sums["tokens"],
            utilization=self.figures(recipe).get("utilization"),
            seconds=time.monotonic() - self.started,
            workers=usage.workers,
            busy=len(set(queue.running.values())),  # a slot may write one chunk while it computes another
            pids=usage.pids,
            note=self.note,
            waiting_for=queue.holders if waits else (),
        )
        self.note = ""
        return progress
