"""What a caller asks of a build and allows it: workers, memory, failed samples; and what happened so far."""

import os
import socket
import time
from collections import Counter
from collections.abc import Iterable, Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass, field, replace
from importlib import import_module
from typing import Any

import msgspec

from forebay.cache.claims import LEASE_SECONDS
from forebay.cache.plan import Plan
from forebay.cache.publish import builder_versions
from forebay.cache.records import OnProgress, Progress
from forebay.engine import InlineEngine, LocalEngine
from forebay.engine.base import Engine
from forebay.errors import LibraryMissing, TooManyFailures
from forebay.format.chunk import FAILED, ChunkRecord, is_counted_by_recipe
from forebay.format.generation import Generation
from forebay.recipe import AnyRecipe, fields_of, hooks_of
from forebay.source import Failure, Source

ENOUGH_SAMPLES = 16  # fewer samples that all failed say nothing about the others
_MOST_CHARS = 300
_ADVICE = {
    "no-text": "set the text field to one of them (text=…, --text …)",
    "not-text": "name another field as the text (text=…, --text …)",
    "null": "name another field as the text (text=…, --text …)",
    "no-messages": "name the field that holds the messages (names={'messages': …}, --names messages=…)",
    "bad-json": "check that the files are JSON lines, one object in each line",
    "not-utf8": "convert the files to UTF-8, or read them as what they are",
    "outside-root": "name the folder that the paths are below (root=…, --root …)",
}


class Reasons:
    """Why samples failed: how often each reason, and the first sample of each."""

    def __init__(self, failures: Iterable[Failure] = ()) -> None:
        self._counts: Counter[str] = Counter()
        self._examples: dict[str, Failure] = {}
        for failure in failures:
            self.add(failure)

    def __len__(self) -> int:
        return self._counts.total()

    def add(self, failure: Failure) -> None:
        self._counts[failure.reason] += 1
        self._examples.setdefault(failure.reason, failure)

    def counts(self) -> dict[str, int]:
        """How often each reason was given, the most frequent first."""
        return dict(self._counts.most_common())

    def most_frequent(self) -> tuple[str, int, str]:
        """The reason that most failures have, how many, and the first sample of them in words."""
        reason, count = self._counts.most_common(1)[0]
        return reason, count, _words(self._examples[reason])

    def advice(self) -> str:
        """What to do about the most frequent reason."""
        reason, _, _ = self.most_frequent()
        example = self._examples[reason]
        if reason == "bad-json" and "`array`" in example.detail:
            return "it looks like one JSON array, not JSON lines: write one object in each line"
        if reason == "not-found" and example.detail.startswith("line "):
            return _ADVICE["outside-root"]
        return _ADVICE.get(reason, "check that the samples are what the recipe reads")


def check_failures(
    root: str, failures: int, samples: int, allowed: int | float | None, expected: int | None = None
) -> None:
    """Raise where more failed than is allowed: a count, or a share of the samples that there are or will be."""
    of = samples if expected is None else expected
    if allowed is not None and failures > (allowed if isinstance(allowed, int) else allowed * of):
        raise TooManyFailures(root, failures, samples, f"{allowed:,}" if isinstance(allowed, int) else f"{allowed:.2%}")


def allows_all(allowed: int | float | None) -> bool:
    """Whether the caller said that every sample may fail: a share of 100 %."""
    return isinstance(allowed, float) and allowed >= 1


def _words(example: Failure) -> str:
    words = f"'{example.sample}': {example.detail}" if example.detail else f"'{example.sample}'"
    return words if len(words) <= _MOST_CHARS else f"{words[:_MOST_CHARS]}…"


PUBLISH_SECONDS = 60.0
ENGINES = ("inline", "local", "ray")


@dataclass(frozen=True, slots=True, kw_only=True)
class BuildOptions:
    """How to run a build; nothing of it changes a byte."""

    workers: int
    host: str
    versions: Mapping[str, str]
    memory_limit: int | None = None
    max_failures: int | float | None = None  # a count, or a share below 1
    lease_seconds: float = LEASE_SECONDS
    publish_seconds: float = PUBLISH_SECONDS
    begin_at: float | None = None  # the share of the chunks after which to begin
    planned: Plan | None = None  # the plan that the caller wrote or compared with the source
    kept_limit: int | float | None = None  # of failures, for later commands
    clock: "PhaseClock" = field(default_factory=lambda: PhaseClock())
    on_progress: OnProgress = lambda progress: None


PHASES = ("listing", "planning", "making", "writing", "publishing")  # in the order of reports


class PhaseClock:
    """How long each phase of a build took."""

    def __init__(self) -> None:
        self.seconds: dict[str, float] = {}

    @contextmanager
    def during(self, phase: str) -> Iterator[None]:
        started = time.monotonic()
        try:
            yield
        finally:
            self.add(phase, time.monotonic() - started)

    def add(self, phase: str, seconds: float) -> None:
        known = {**self.seconds, phase: self.seconds.get(phase, 0.0) + seconds}
        self.seconds = {name: known[name] for name in PHASES if name in known}


@dataclass(slots=True)
class BuildProgress:
    """What happened so far."""

    total: int
    present: int = 0
    unlisted: frozenset[int] = frozenset()  # those of `present` that no generation listed when the build began
    records: dict[int, ChunkRecord] = field(default_factory=dict)
    failed: dict[int, str] = field(default_factory=dict)
    deaths: list[str] = field(default_factory=list)
    rows: int = 0
    samples: int = 0
    failures: int = 0
    read: int = 0
    written_bytes: int = 0
    note: str = ""
    warnings: list[str] = field(default_factory=list)  # for the report
    sums: Counter[str] = field(default_factory=Counter)  # of the statistics of the chunks made
    reasons: Counter[str] = field(default_factory=Counter)  # why samples of them failed
    newest: Generation | None = None  # the last generation that this builder read or wrote

    @property
    def done(self) -> int:
        return self.present + len(self.records)

    def add(self, record: ChunkRecord) -> None:
        self.records[record.chunk] = record
        self.rows += record.rows
        self.samples += record.samples
        self.failures += record.failures
        self.written_bytes += record.size
        numbers = {name: value for name, value in record.statistics.items() if not isinstance(value, list)}
        failed = {name: int(value) for name, value in numbers.items() if name.startswith(FAILED)}
        self.sums.update({name: value for name, value in numbers.items() if is_counted_by_recipe(name)})
        self.reasons.update({name.removeprefix(FAILED): count for name, count in failed.items()})

    def figures(self, recipe: AnyRecipe) -> dict[str, Any]:
        """What the recipe derives from the chunks made so far."""
        holds = {"chunks": len(self.records), "rows": self.rows, "bytes": self.written_bytes}
        return hooks_of(recipe).figures(fields_of(recipe), self.sums, holds) if self.records else {}


@dataclass(frozen=True, slots=True)
class BuildRequest:
    """The arguments that `build`, `grow`, `refresh` and `repair` share."""

    workers: int | None = None  # 0: in this process; None: as many as the recipe asks for, or one per core
    memory_limit: int | None = None
    max_failures: int | float | None = None
    skip_unreadable: bool = False
    lease_seconds: float = LEASE_SECONDS
    on_progress: OnProgress | None = None
    engine: "str | Engine | None" = None  # a name of ENGINES, an engine, None: by `workers`
    begin_at: float | None = None  # the share of the chunks after which to begin; None: at the first, or anywhere

    def holding(self, newest: Generation | None) -> "BuildRequest":
        """The same request, with the limit of failures that the cache was built with where the caller names none."""
        kept = None if newest is None else newest.max_failures
        return replace(self, max_failures=kept) if self.max_failures is None else self

    def options(self, versions: Mapping[str, str], source: Source | None, engine: Engine) -> BuildOptions:
        """What a build runs by; `versions` are those of the recipe."""
        return BuildOptions(
            workers=self.slots(engine),
            host=socket.gethostname(),
            versions=builder_versions(versions),
            memory_limit=self.memory_limit,
            max_failures=self.max_failures,
            lease_seconds=self.lease_seconds,
            publish_seconds=PUBLISH_SECONDS,
            begin_at=self.begin_at,
            on_progress=_in_bytes(source, self.on_progress or silent),
        )

    def open_engine(self) -> Engine:
        """The engine that makes chunks; one that the caller passed is used as it is."""
        if isinstance(self.engine, Engine):
            return self.engine
        name = self.engine or "local"
        if name not in ENGINES:
            raise ValueError(f"engine is {name!r}; one of {', '.join(map(repr, ENGINES))} or an Engine is expected")
        if name == "ray":
            return ray_engine()
        return InlineEngine() if name == "inline" or self.workers == 0 else LocalEngine()

    def slots(self, engine: Engine) -> int:
        """How many chunks are made at once."""
        return engine.capacity() if self.workers is None else worker_count(self.workers)


def ray_engine(**options: Any) -> Engine:
    """A `RayEngine`; the library is imported only now."""
    try:
        module = import_module("forebay.engine.ray")
    except ModuleNotFoundError as error:
        raise LibraryMissing("ray", "engine='ray'", "ray") from error
    engine: Engine = module.RayEngine(**options)
    return engine


def worker_count(workers: int | None) -> int:
    """How many processes make chunks."""
    if workers is None:
        return len(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else os.cpu_count() or 1
    if not isinstance(workers, int) or workers < 0:
        raise ValueError(
            f"workers must be 0 (this process), a positive number, or None (one per core); got {workers!r}"
        )
    return max(1, workers)


def silent(progress: Progress) -> None:
    """Nobody listens."""


@contextmanager
def released(recipe: AnyRecipe) -> Iterator[list[str]]:
    """Release what a recipe has loaded here when the work ends, however it ends; the list then holds its notes."""
    said: list[str] = []
    try:
        yield said
    finally:
        said += hooks_of(recipe).release()


def show_planning(options: BuildOptions, done: int, total: int, passed: int) -> None:
    options.on_progress(Progress(phase="planning", done=done, total=total, unit="files", read_bytes=passed))


def show_note(options: BuildOptions, note: str) -> None:
    options.on_progress(Progress(phase="planning", done=0, total=0, unit="files", note=note))


def _in_bytes(source: Source | None, on_progress: OnProgress) -> OnProgress:
    """Progress of a source that counts samples has no number of bytes."""
    if source is None or source.unit == "bytes":
        return on_progress

    def reported(progress: Progress) -> None:
        reads_the_cache = progress.phase == "verifying"
        on_progress(progress if reads_the_cache else msgspec.structs.replace(progress, read_bytes=0))

    return reported
