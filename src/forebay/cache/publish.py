"""Publish chunks: create the next generation, after everything that it lists. Creating it is the only commit point.

A generation adds records to the one before it: a listed record stays, except where `repair` restored its file with
other bytes of the same content. Whatever the newest generation carries (texts, tables, limits) is taken from it, not
from the files of now.
"""

import platform
import random
import time
from collections.abc import Callable, Collection, Iterable, Mapping, Sequence
from contextlib import suppress
from dataclasses import dataclass, field, replace
from typing import TypeVar

import msgspec
import numpy as np

from forebay.cache.catalog import newest_generation
from forebay.cache.claims import Claims
from forebay.cache.heartbeat import living_builders
from forebay.cache.plan import Plan
from forebay.errors import Damaged, ForebayError
from forebay.format import layout
from forebay.format.chunk import MADE_BY, ChunkRecord
from forebay.format.codecs import library_versions
from forebay.format.generation import ChunkTable, Generation
from forebay.format.tensors import hmac_key, unseal
from forebay.recipe import recipe_mismatch
from forebay.store.base import (
    Missing,
    Store,
    holds,
    index_corrupt,
    load_index,
    read_document,
    sha256_of,
    wait_until_listed,
)

PUBLISH_SECONDS = 60.0  # between two generations of one builder, times the number of living builders
GROWTH = 0.1  # a builder lists its chunks when they are this share of what it has listed
WAIT_SECONDS = 60.0  # for another builder that publishes
LOST_SECONDS = 5.0  # to wait at most after another builder published first
DEFAULT_SHARE, DEFAULT_COUNT = 0.01, 10  # of a segment's samples may fail, whichever is more
T = TypeVar("T")


def failure_limit(allowed: int | float | None, samples: float) -> float:
    """How many of a segment's samples may fail: a count, a share, or by default 1% or 10 if that is more.

    >>> failure_limit(None, 500), failure_limit(None, 5000), failure_limit(3, 5000), failure_limit(0.5, 5000)
    (10, 50.0, 3, 2500.0)
    """
    if allowed is None:
        return max(DEFAULT_COUNT, DEFAULT_SHARE * samples)
    return allowed if isinstance(allowed, int) else allowed * samples


@dataclass(frozen=True, slots=True)
class OverLimit:
    """A segment with more failures than are allowed; its chunks stay unpublished."""

    segment: int
    failures: int
    samples: int  # so far
    limit: float
    chunks: tuple[int, ...]  # that were made and are not listed
    reasons: Mapping[str, int]


@dataclass(frozen=True, slots=True, kw_only=True)
class Publication:
    """The facts that all records of a publisher share."""

    layer: str
    fingerprint: str
    plan: Plan  # that the chunks were made by
    versions: Mapping[str, str]  # of the libraries that made them
    max_failures: int | float | None = None  # None: the layer's limit in the generation, or the default
    checks_failures: bool = True
    replaced: Mapping[int, bytes] = field(default_factory=dict)  # repair: chunk -> SHA-256 that a record replaces

    @property
    def folder(self) -> str:
        return layout.layer_folder(self.layer, self.fingerprint)


class Publisher:
    """Lists the records of one builder; never reads chunks. Used as a context: it publishes at the end, also after an
    error, then releases the claims on chunks that are listed."""

    def __init__(self, store: Store, claims: Claims, publication: Publication, newest: Generation | None) -> None:
        self._store, self._claims, self._about = store, claims, publication
        self.newest = newest
        self.over_limit: tuple[OverLimit, ...] = ()
        self.withdrawn: set[int] = set()  # chunks that were made of a segment that was withdrawn meanwhile
        self._records: dict[int, ChunkRecord] = {}  # not listed yet
        self._waiting: dict[int, ChunkRecord] = {}  # of source files that looked different; see `confirm`
        self._listed = 0  # by this publisher
        self._last = time.monotonic()

    def __enter__(self) -> "Publisher":
        return self

    def __exit__(self, kind: type[BaseException] | None, error: BaseException | None, _: object) -> None:
        try:
            self._publish(WAIT_SECONDS if error is None or isinstance(error, ForebayError) else 0.0)
        except (OSError, ForebayError):
            if error is None:  # the first error counts
                raise

    def add(self, record: ChunkRecord, waits: bool = False) -> None:
        """Take a chunk that was made or adopted; one that `waits` is listed after `confirm`."""
        (self._waiting if waits else self._records)[record.chunk] = record

    @property
    def waiting(self) -> Mapping[int, ChunkRecord]:
        return self._waiting

    def confirm(self) -> None:
        """The source files of waiting chunks still have the planned content."""
        self._records |= self._waiting
        self._waiting = {}

    def discard(self, chunks: Iterable[int]) -> None:
        """Forget chunks, which are not listed."""
        for chunk in chunks:
            self._records.pop(chunk, None)
            self._waiting.pop(chunk, None)

    def holds_back(self, chunk: int) -> bool:
        """True if a chunk was added and is not listed."""
        return chunk in self._records or chunk in self._waiting

    def lists(self, chunk: int) -> bool:
        """True if the newest generation lists a chunk by now; one request unless another builder has published."""
        following = 0 if self.newest is None else self.newest.number + 1
        with suppress(Damaged):  # a folder or a link has the name
            if holds(self._store, layout.generation(following)):
                self.newest = newest_generation(self._store, self.newest)
        return self.newest is not None and _table(self.newest, self._about).position(chunk) is not None

    def publish_if_due(self) -> None:
        """Publish if enough is unlisted, at most once per minute and living builder."""
        if len(self._records) < max(1, GROWTH * self._listed) or time.monotonic() - self._last < PUBLISH_SECONDS:
            return
        if time.monotonic() - self._last >= PUBLISH_SECONDS * living_builders(self._store):
            self.publish()

    def publish(self) -> Generation | None:
        """The newest generation, after one more if there is something to add; None if nothing is published."""
        return self._publish(WAIT_SECONDS)

    def _publish(self, wait_seconds: float) -> Generation | None:
        with self._claims.holding(layout.PUBLISH_CLAIM, wait_seconds):
            self.newest = create_next(self._store, lambda: newest_generation(self._store, self.newest), self._draft)
        self._take_listed()
        self._last = time.monotonic()
        return self.newest

    def _draft(self, newest: Generation | None) -> Generation | None:
        """The next generation, None if there is nothing to add."""
        about, layer, limit = self._about, self._about.layer, self._about.max_failures
        before = _bound(self._store, _empty(self._store) if newest is None else newest, about)
        listed = before.table(layer)
        plan = joined_digests(self._store, about.plan, before)
        draft = replace(
            before,
            plan=plan,
            source=before.source if plan == before.plan else about.plan.source,
            max_failures={**before.max_failures, **({layer: limit} if limit is not None else {})},
            tagged=hmac_key() is not None,
        )
        if records := self._publishable(before, listed):
            maker, versions = _maker(before.versions, about.versions)
            table = listed.with_records(_made_by(record, maker) for record in records)
            draft = replace(draft, versions=versions, layers={**before.layers, layer: table})
        if newest is None:
            return draft if int(draft.table(layer).rows.sum()) else None
        return draft if records or draft.metadata() != newest.metadata() else None

    def _publishable(self, before: Generation, listed: ChunkTable) -> list[ChunkRecord]:
        """The records that the next generation adds."""
        about, plan = self._about, self._about.plan
        fresh = [record for record in self._records.values() if self._is_new(record, listed)]
        self.withdrawn |= {one.chunk for one in fresh if plan.segment_of(one.chunk).number in before.withdrawn}
        base = None if about.layer == before.base else before.table(before.base)
        fresh = [one for one in fresh if one.chunk not in self.withdrawn and (base is None or base.has_base_of(one))]
        if about.checks_failures:
            limit = before.max_failures.get(about.layer) if about.max_failures is None else about.max_failures
            self.over_limit = over_limit(plan, listed, fresh, limit)
        over = {one.segment for one in self.over_limit}
        return [record for record in fresh if plan.segment_of(record.chunk).number not in over]

    def _is_new(self, record: ChunkRecord, listed: ChunkTable) -> bool:
        at = listed.position(record.chunk)
        if at is None:
            return True
        now = listed.digests["sha256"][at].tobytes()
        return bool(self._about.replaced.get(record.chunk) == now != record.sha256)

    def _take_listed(self) -> None:
        """Release the claims on chunks that are listed now."""
        table = _table(self.newest, self._about)
        for chunk in [chunk for chunk in self._records if table.position(chunk) is not None or chunk in self.withdrawn]:
            del self._records[chunk]
            self._listed += 1
            self._claims.release(layout.claim(self._about.folder, chunk), is_listed=True)


def _table(newest: Generation | None, about: Publication) -> ChunkTable:
    """The listed chunks of the layer, if its recipe is the one that is published under."""
    return newest.table(about.layer) if newest is not None and _is_bound(newest, about) else ChunkTable.of([])


def _is_bound(generation: Generation, about: Publication) -> bool:
    layer = about.layer
    return layer in generation.recipes and generation.recipe(layer).fingerprint == about.fingerprint


def over_limit(
    plan: Plan, listed: ChunkTable, records: Sequence[ChunkRecord], allowed: int | float | None
) -> tuple[OverLimit, ...]:
    """The segments whose failures, of listed and new chunks together, exceed the limit.

    A segment's samples are estimated as samples so far x planned weight / weight so far: exact once it is complete.
    """
    over = []
    for number in sorted({plan.segment_of(record.chunk).number for record in records}):
        segment = plan.segments[number]
        new = [record for record in records if record.chunk in segment.chunk_numbers]
        table = listed.without(np.setdiff1d(listed.chunks, segment.chunk_numbers)).with_records(new)
        failures, samples = (int(table.numbers[name].sum()) for name in ("failures", "samples"))
        so_far, weights = int(plan.weights[table.chunks].sum()), segment.weights()
        limit = failure_limit(allowed, samples * max(1.0, int(weights.sum()) / so_far) if so_far else samples)
        if failures > limit:
            chunks = tuple(record.chunk for record in new)
            over.append(OverLimit(number, failures, samples, limit, chunks, ChunkTable.of(new).reasons()))
    return tuple(over)


def _empty(store: Store) -> Generation:
    """The empty generation before the first one."""
    text = read_document(store, layout.CACHE).decode()
    return Generation(number=-1, cache=text, recipes={}, constants={}, plan=(), versions=(), layers={})


def _bound(store: Store, before: Generation, about: Publication) -> Generation:
    """The generation with the layer bound to the recipe that is published under, without chunks of another recipe."""
    if _is_bound(before, about):
        return before
    layer, others = about.layer, without_layers(before, {about.layer})
    return replace(
        others,
        recipes={**others.recipes, layer: _bound_text(store, about)},
        constants={**others.constants, **_constants_digest(store, layer, about.folder)},
        layers={**others.layers, layer: ChunkTable.of([])},
    )


def _bound_text(store: Store, about: Publication) -> str:
    """The text of the layer's recipe file, which must be the one that is published under."""
    key = layout.recipe(about.layer)
    try:
        text = read_document(store, key).decode()
    except Missing as error:
        raise index_corrupt(store.address, key, "it is gone: the layer was dropped during the build") from error
    if layout.decode_recipe_document(text, about.layer, store.address, key).fingerprint != about.fingerprint:
        raise recipe_mismatch(store.address, about.layer, {"fingerprint": "another recipe binds the layer now"}, False)
    return text


def _constants_digest(store: Store, layer: str, folder: str) -> dict[str, str]:
    key = layout.constants(folder)
    try:
        view = load_index(store, key)
    except Missing:
        return {}
    unseal(view, store.address, key, "constants")  # raises if they contradict their own digest
    return {layer: sha256_of(view).hex()}


def joined_digests(store: Store, plan: Plan, newest: Generation) -> tuple[str, ...]:
    """The plan to list: the one worked by, or the listed one if it has grown; one must continue the other."""
    for number, (one, other) in enumerate(zip(plan.digests, newest.plan, strict=False)):
        if one != other:
            raise index_corrupt(store.address, layout.plan_segment(number), "it is not the segment that is published")
    return max(newest.plan, plan.digests, key=len)


def _maker(
    known: tuple[Mapping[str, str], ...], versions: Mapping[str, str]
) -> tuple[int, tuple[Mapping[str, str], ...]]:
    """Which set of versions made the chunks of this process, and all sets."""
    sets = [dict(one) for one in known]
    if dict(versions) not in sets:
        return len(known), (*known, dict(versions))
    return sets.index(dict(versions)), known


def _made_by(record: ChunkRecord, number: int) -> ChunkRecord:
    """A record with the set of versions that made its chunk; the first set is not written."""
    if not number:
        return record
    return msgspec.structs.replace(record, statistics={**record.statistics, MADE_BY: number})


def create_next(
    store: Store,
    load: Callable[[], Generation | None],
    draft: Callable[[Generation | None], Generation | None],
) -> Generation | None:
    """Create the generation that `draft` returns; if another builder was first, draft again on top of theirs."""
    lost = 0
    while True:
        began, newest = time.monotonic(), load()
        following = draft(newest)
        if following is None:
            return newest
        number = 0 if newest is None else newest.number + 1
        key, data = layout.generation(number), replace(following, number=number).encode(hmac_key())
        if store.create(key, data):
            return replace(following, number=number, digest=bytes(data[-2 if hmac_key() is not None else -1]).hex())
        wait_until_listed(store, key)
        lost += 1  # of many builders that publish at once, each would read the index again for every other one
        time.sleep(random.uniform(0.0, min(LOST_SECONDS, 2 ** min(lost, 20) * (time.monotonic() - began))))


def without_layers(generation: Generation, layers: Collection[str]) -> Generation:
    """The generation without some layers."""

    def others(values: Mapping[str, T]) -> dict[str, T]:
        return {layer: value for layer, value in values.items() if layer not in layers}

    return replace(
        generation,
        recipes=others(generation.recipes),
        constants=others(generation.constants),
        layers=others(generation.layers),
        max_failures=others(generation.max_failures),
    )


def publish_without(store: Store, layers: Collection[str]) -> Generation | None:
    """The newest generation, after one more without some layers if it lists them; None if nothing is published."""

    def without(newest: Generation | None) -> Generation | None:
        is_listed = newest is not None and newest.recipes.keys() & set(layers)
        return without_layers(newest, layers) if newest is not None and is_listed else None

    return create_next(store, lambda: newest_generation(store), without)


def publish_withdrawn(store: Store, plan: Plan) -> Generation | None:
    """The newest generation, after one more that withdraws the last segments of the plan if nothing of them is listed.

    An unlisted segment before a listed one stays: the listed one may continue its files, or leave out its duplicates.
    """

    def withdrawing(newest: Generation | None) -> Generation | None:
        if newest is None or len(newest.plan) > len(plan.segments):
            return None
        last = int(newest.table(newest.base).chunks.max(initial=-1))
        unlisted = {segment.number for segment in plan.segments[1:] if segment.first_chunk > last}
        if unlisted <= set(newest.withdrawn):
            return None
        withdrawn = tuple(sorted(unlisted.union(newest.withdrawn)))
        return replace(newest, plan=joined_digests(store, plan, newest), withdrawn=withdrawn)

    return create_next(store, lambda: newest_generation(store), withdrawing)


def builder_versions(recipe_versions: Mapping[str, str]) -> dict[str, str]:
    """The versions that determine bytes here, for the record in a generation."""
    own = {"python": platform.python_version(), "numpy": np.__version__, **library_versions()}
    return {name: str(version) for name, version in {**own, **recipe_versions}.items()}


def differing_versions(known: Iterable[Mapping[str, str]], now: Mapping[str, str]) -> str:
    """Which libraries have a version that no builder had before; empty if there is none.

    >>> differing_versions([{"numpy": "2.1"}, {"numpy": "2.2", "zstd": "1"}], {"numpy": "2.3", "zstd": "1"})
    'numpy 2.3 (before: 2.1, 2.2)'
    """
    before: dict[str, set[str]] = {}
    for versions in known:
        for name, version in versions.items():
            before.setdefault(name, set()).add(version)
    others = (
        f"{name} {version} (before: {', '.join(sorted(before[name]))})"
        for name, version in now.items()
        if name in before and version not in before[name]
    )
    return ", ".join(others)
