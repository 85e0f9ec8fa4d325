"""Filling a tier ahead: every sample read through it once, by several processes, so that training finds it full."""

import os
import time
import warnings
from collections import Counter, deque
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from typing import Any

import msgspec

from forebay.cache.records import OnProgress, Progress
from forebay.engine import InlineEngine, LocalEngine
from forebay.engine.base import Died, Done, Engine, Event, Failed, TaskDocument
from forebay.errors import ImageUnreadable, WarmingFailed
from forebay.fields import as_bytes
from forebay.format.tensors import hmac_key
from forebay.recipe import RowRecipe
from forebay.source import Source
from forebay.tiers.cached_images import CachedImages
from forebay.tiers.lmdb_tier import MAX_BYTES, open_tier
from forebay.tiers.tier_value import TierWarning, WarmReport

BATCH = 32
_ATTEMPTS = 3
_WAIT_SECONDS = 0.2


class Warmed(msgspec.Struct, frozen=True, kw_only=True):
    """What came of one batch of samples."""

    samples: int
    made: int
    present: int
    written_bytes: int
    bad: dict[str, int]
    dropped: dict[str, int]
    failures: dict[str, int]
    examples: dict[str, str]


@dataclass(frozen=True)
class WarmTask:
    """Batches of samples, read through a tier; what a worker process is sent."""

    images: CachedImages

    def document(self) -> TaskDocument:
        return TaskDocument(opener="forebay.tiers.warming:open_warming", body=self.images.document())

    def begin(self, chunk: int) -> Callable[[], Warmed]:
        """All of the work: tiers write in a separate thread."""
        warmed = self._warmed(chunk)
        return lambda: warmed

    def _warmed(self, chunk: int) -> Warmed:
        """Read the samples of one batch; all rows are on disk when this returns."""
        before = self.images.statistics()
        examples: dict[str, str] = {}
        failures: Counter[str] = Counter()
        batch = _batch(chunk, len(self.images))
        with warnings.catch_warnings():
            warnings.simplefilter("ignore", TierWarning)  # the report says it
            for index in batch:
                try:
                    self.images[index]
                except ImageUnreadable as error:
                    failures[error.reason] += 1
                    examples.setdefault(error.reason, error.detail)
            self.images.flush()
        after = self.images.statistics()
        return Warmed(
            samples=len(batch),
            made=after.misses - before.misses,
            present=after.l2_hits - before.l2_hits,
            written_bytes=after.written_bytes - before.written_bytes,
            bad=dict(Counter(after.bad) - Counter(before.bad)),
            dropped=dict(Counter(after.dropped) - Counter(before.dropped)),
            failures=dict(failures),
            examples=examples,
        )


def warm(
    source: Source,
    recipe: RowRecipe,
    l2: str | os.PathLike[str],
    *,
    workers: int | None = None,
    max_bytes: int | str = MAX_BYTES,
    on_progress: OnProgress | None = None,
) -> WarmReport:
    """Fill the tier `l2` with the rows of all samples that it does not hold yet; call it again to resume.

    `workers=0` works in this process.
    """
    with CachedImages(source, recipe, l1=0, l2=l2, max_bytes=max_bytes) as images:
        _check_tier(str(images.l2), as_bytes(max_bytes))
        engine: Engine = InlineEngine() if workers == 0 else LocalEngine()
        try:
            engine.start(WarmTask(images), max(1, engine.capacity() if workers is None else workers))
            return _Warming(images, engine, on_progress or _silent).run()
        finally:
            engine.close()


def open_warming(body: Mapping[str, Any]) -> WarmTask:
    """The task of a document, in a worker."""
    return WarmTask(CachedImages.opened(body))


@dataclass
class _Warming:
    """The batches that are left, and the sums of those that are done."""

    images: CachedImages
    engine: Engine
    on_progress: OnProgress
    started: float = field(default_factory=time.monotonic)
    done: int = 0
    counts: Counter[str] = field(default_factory=Counter)
    bad: Counter[str] = field(default_factory=Counter)
    dropped: Counter[str] = field(default_factory=Counter)
    failures: Counter[str] = field(default_factory=Counter)
    examples: dict[str, str] = field(default_factory=dict)
    deaths: list[str] = field(default_factory=list)

    def __post_init__(self) -> None:
        self._left = deque(range(-(-len(self.images) // BATCH)))
        self._tries: Counter[int] = Counter()
        self._given = 0

    def run(self) -> WarmReport:
        while self._left or self._given:
            for slot in self.engine.idle():
                if self._left and not self.dropped:
                    self.engine.submit(slot, self._left.popleft())
                    self._given += 1
            if self.dropped and not self._given:  # no slot may be idle because a dead worker is being replaced
                break
            for event in self.engine.poll(_WAIT_SECONDS):
                self._take(event)
            self.on_progress(self._moment())
        return self._report()

    def _take(self, event: Event) -> None:
        if isinstance(event, Done):
            self._given -= 1
            self._add(msgspec.convert(event.record, Warmed))
        elif isinstance(event, Failed):
            self._given -= 1
            self._again(event.chunk, event.reason)
        elif isinstance(event, Died):
            self.deaths.append(f"{event.worker}: {event.reason}")
            self._given -= len(event.lost)
            for batch in event.lost:
                if event.began:
                    self._left.append(batch)
                else:
                    self._again(batch, event.reason)
            if event.chunk is not None:
                self._given -= 1
                self._again(event.chunk, event.reason)

    def _add(self, warmed: Warmed) -> None:
        self.done += warmed.samples
        self.counts.update(made=warmed.made, present=warmed.present, written_bytes=warmed.written_bytes)
        for sums, more in (
            (self.bad, warmed.bad),
            (self.dropped, warmed.dropped),
            (self.failures, warmed.failures),
        ):
            sums.update(more)
        self.examples = {**warmed.examples, **self.examples}

    def _again(self, batch: int, reason: str) -> None:
        self._tries[batch] += 1
        if self._tries[batch] >= _ATTEMPTS:
            samples = _batch(batch, len(self.images))
            raise WarmingFailed(str(self.images.l2), samples[0], samples[-1], reason)
        self._left.append(batch)

    def _moment(self) -> Progress:
        usage = self.engine.usage()
        return Progress(
            phase="warming",
            done=self.done,
            total=len(self.images),
            unit="samples",
            rows=self.done,
            written_bytes=self.counts["written_bytes"],
            seconds=time.monotonic() - self.started,
            workers=usage.workers,
            busy=self._given,
            pids=usage.pids,
        )

    def _report(self) -> WarmReport:
        sums: dict[str, Any] = {name: self.counts[name] for name in ("made", "present", "written_bytes")}
        return WarmReport(
            path=str(self.images.l2),
            samples=len(self.images),
            failures=dict(self.failures),
            examples=self.examples,
            bad=dict(self.bad),
            dropped=dict(self.dropped),
            seconds=time.monotonic() - self.started,
            left=len(self.images) - self.done,
            deaths=tuple(self.deaths),
            **sums,
        )


def _check_tier(path: str, max_bytes: int) -> None:
    """What is wrong with the tier is an error before any work: a damaged one, too, which reading does without."""
    tier = open_tier(path, max_bytes=max_bytes)
    try:
        tier.environment.check()
        tier.require_key(hmac_key())
    finally:
        tier.close()


def _batch(number: int, samples: int) -> range:
    return range(number * BATCH, min((number + 1) * BATCH, samples))


def _silent(progress: Progress) -> None:
    pass
