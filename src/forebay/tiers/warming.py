"""Filling a tier ahead: every sample read through it once, by several processes, so that training finds it full.

Looking after a tier: what is in it, whether all of it is as it was written, emptying it.

Every step takes a short, separate transaction, so that writers are not held up and no old pages are held.
"""

import json
import os
import time
import warnings
from collections import Counter, deque
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager, suppress
from dataclasses import dataclass, field
from typing import Any

import msgspec

from forebay.cache.records import OnProgress, Progress
from forebay.engine import InlineEngine, LocalEngine
from forebay.engine.base import Died, Done, Engine, Event, Failed, TaskDocument
from forebay.errors import ImageUnreadable, TierDamaged, TierNotFound, TierUnusable, WarmingFailed
from forebay.fields import as_bytes
from forebay.format.tensors import hmac_key
from forebay.recipe import RowRecipe
from forebay.source import Source
from forebay.tiers.cached_images import CachedImages
from forebay.tiers.environment import Environment, Kept, alone, count_values, file_bytes, is_tier, remove_files
from forebay.tiers.lmdb_tier import MAX_BYTES, open_tier
from forebay.tiers.tier_value import (
    BadKept,
    BadValue,
    RecipeShare,
    TierClearReport,
    TierSummary,
    TierVerifyReport,
    TierWarning,
    WarmReport,
    decode_value,
    key_of,
    peek_value,
)

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
    """Raise before any work if the tier cannot be used or is damaged; a reader would go without it."""
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


_HEAD_BYTES = 64 << 10  # no header of forebay is longer
_AT_ONCE = 64


def summarize_tier(path: str) -> TierSummary:
    """What a tier holds, by recipe; only the heads of values are read."""
    shares: dict[str, Counter[str]] = {}
    tagged = unreadable = 0
    with _opened(path) as environment:
        dead = environment.dead_readers + environment.clear_dead_readers()
        environment.check()
        for _, size, head, problem in _values(environment, _HEAD_BYTES):
            try:
                if problem:
                    raise BadValue("page", problem)
                identity, is_tagged = peek_value(head)
                share = shares.setdefault(_made_by(identity), Counter())
            except BadValue:
                unreadable += 1
                continue
            tagged += is_tagged
            share.update(values=1, bytes=size)
        figures = environment.figures()
    recipes = [_share(made_by, **counts) for made_by, counts in sorted(shares.items())]
    total = sum(share.bytes for share in recipes)
    return TierSummary(
        path=path,
        bytes=total,
        tagged=tagged,
        dead_readers=dead,
        unreadable=unreadable,
        recipes=tuple(sorted(recipes, key=lambda share: -share.values)),
        **figures,
    )


def verify_tier(path: str, *, on_progress: OnProgress | None = None) -> TierVerifyReport:
    """Check every value: its checksum, its tag where a key is in use, and that it lies under its own name."""
    key, started = hmac_key(), time.monotonic()
    bad: list[BadKept] = []
    values = checked = 0
    with _opened(path, key) as environment:
        environment.check()
        total = environment.figures()["values"]
        for kept in _values(environment, None):
            values, checked = values + 1, checked + len(kept.content)
            problem = _problem(kept, key)
            if problem is not None:
                bad.append(problem)
            if on_progress is not None:
                on_progress(_moment(values, total, checked, started))
    seconds = time.monotonic() - started
    return TierVerifyReport(path=path, values=values, checked_bytes=checked, seconds=seconds, bad=tuple(bad))


def clear_tier(path: str, *, recipe: str | None = None) -> TierClearReport:
    """Remove all that a tier holds, damaged or not: its files where nobody has it open, else its values.

    With a `recipe`, the beginning of a fingerprint as `summarize_tier` has it, only the values of that one.
    """
    if not is_tier(path):
        raise TierNotFound(path)
    if recipe is not None:
        return _clear_recipe(path, recipe)
    values, before = count_values(path), file_bytes(path)
    with alone(path) as is_alone:
        if is_alone:
            remove_files(path)
    if not is_alone:
        with _opened(path) as environment:
            environment.empty()
    return TierClearReport(path=path, removed=values, freed_bytes=before if is_alone else 0, in_use=not is_alone)


def _clear_recipe(path: str, recipe: str) -> TierClearReport:
    """Remove the values of one recipe; the file keeps its size."""
    known: set[str] = set()
    removed = 0
    with _opened(path) as environment:
        environment.check()
        last = b""
        while found := environment.values(last, _AT_ONCE, _HEAD_BYTES):
            last, keys = found[-1].key, []
            for kept in found:
                if kept.problem:
                    raise TierDamaged(path, kept.problem)
                with suppress(BadValue):
                    fingerprint = json.loads(_made_by(peek_value(kept.content)[0]))[0]
                    known.add(fingerprint)
                    keys += [kept.key] if recipe and fingerprint.startswith(recipe) else []
            removed += environment.remove(keys) if keys else 0
    if not removed:
        raise TierUnusable(
            path,
            f"no recipe in it has a fingerprint that begins with '{recipe}'",
            f"`forebay tier stats {path}` lists them: {', '.join(name[:12] for name in sorted(known)) or 'none'}",
        )
    return TierClearReport(path=path, removed=removed, freed_bytes=0, in_use=False)


@contextmanager
def _opened(path: str, key: bytes | None = None) -> Iterator[Environment]:
    tier = open_tier(path, create=False)
    try:
        tier.check_key(key)
        yield tier.environment
    finally:
        tier.close()


def _values(environment: Environment, head_bytes: int | None) -> Iterator[Kept]:
    last = b""
    while found := environment.values(last, _AT_ONCE, head_bytes):
        yield from found
        last = found[-1][0]


def _made_by(identity: bytes) -> str:
    """The recipe and the libraries of a value, in a form that can be counted by."""
    try:
        known = json.loads(identity.partition(b"\n")[0])
        return json.dumps([str(known["fingerprint"]), dict(known["made_with"])], sort_keys=True)
    except (ValueError, KeyError, TypeError, RecursionError) as error:
        raise BadValue("format", "its head names no recipe") from error


def _share(made_by: str, values: int, bytes: int) -> RecipeShare:
    fingerprint, made_with = json.loads(made_by)
    return RecipeShare(fingerprint=fingerprint, made_with=made_with, values=values, bytes=bytes)


def _problem(kept: Kept, key: bytes | None) -> BadKept | None:
    try:
        if kept.problem:
            raise BadValue("page", kept.problem)
        identity, _ = decode_value(kept.content, key)
        if key_of(identity) != kept.key:
            raise BadValue("identity", "it is stored under the name of another row")
    except BadValue as error:
        return BadKept(key=kept.key.hex(), reason=error.reason, detail=error.detail)
    return None


def _moment(done: int, total: int, checked: int, started: float) -> Progress:
    seconds = time.monotonic() - started
    return Progress(phase="verifying", done=done, total=total, unit="values", read_bytes=checked, seconds=seconds)
