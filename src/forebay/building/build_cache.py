"""Build a layer of a cache, or grow its base layer by what is new in the source.

Where a recipe leaves out duplicates, the workers of an engine find the identities of samples (`Census`), which reads
all of them.

The draft of the plan and what is found in each chunk are kept beside the plan until it is written.
"""

import os
import sys
from collections import deque
from collections.abc import Callable, Mapping, Sequence
from contextlib import closing, suppress
from dataclasses import dataclass, replace
from functools import partial
from typing import Any, cast

import msgspec

from forebay.building.begin import (
    Draft,
    check_destination,
    check_kept_texts,
    check_kind,
    check_start,
    check_trial,
    draft_segment,
    is_unsigned,
    kept_recipe,
    prepare_base,
    prepare_layer,
    resolve_recipe,
    unsigned_plan,
)
from forebay.building.build_options import (
    BuildOptions,
    BuildRequest,
    PhaseClock,
    allows_all,
    check_failures,
    released,
    show_note,
    show_planning,
)
from forebay.building.dedup import ChunkIdentities, chunk_question
from forebay.building.layer_build import (
    LayerBuild,
    base_workplace,
    build_chunks,
    in_order,
    layer_workplace,
    with_same_source,
)
from forebay.building.planning import (
    SAMPLE_PLACES,
    OnCut,
    SourceListing,
    cut_source,
    limited_chunks,
    try_parts,
    wait_until_settled,
)
from forebay.building.repair_cache import repair_with
from forebay.building.task import (
    open_recipe,
    open_source,
    open_store_document,
    preload_document,
    recipe_document,
    source_document,
)
from forebay.cache.catalog import (
    Snapshot,
    check_index,
    newest_generation,
    read_cache_document,
    read_recipe_document,
)
from forebay.cache.clean import drop_layers, take_back
from forebay.cache.plan import KeptResults, Plan, Segment, Unreadable, decode_segment, keeping_results, named_in
from forebay.cache.records import BuildReport, RepairReport
from forebay.cache.source_check import check_freshness, reported, source_changed
from forebay.engine.base import Died, Done, Engine, Failed, TaskDocument
from forebay.errors import (
    BuildFailed,
    ChunkFailed,
    DiskFull,
    ForebayError,
    RecipeInvalid,
    SourceChanged,
    SourceUnreadable,
)
from forebay.format import layout
from forebay.format.generation import Generation
from forebay.format.tensors import hmac_key, short_key_note
from forebay.recipe import (
    AnyRecipe,
    Identity,
    LayerRecipe,
    Recipe,
    RecipeDocument,
    fingerprint,
    hooks_of,
    identity_of,
    input_layers,
    is_same_recipe,
    reads_of,
    versions_of,
)
from forebay.source import Part, Source, SourceFile
from forebay.store.base import Store, is_full, wait_until_listed

TRIES = 100  # to append a segment, while others append theirs


def named_alike(source: Source, plan: Plan) -> Source:
    """A source whose files are named as the plan names them, so that a file known already is recognised."""
    root = plan.segments[0].source.get("root") if plan.segments else None
    return source if root is None else source.rebased(root)


def append_to_plan(
    snapshot: Snapshot,
    listing: SourceListing,
    recipe: Recipe,
    on_cut: OnCut,
    memory_limit: int | None = None,
    skip_unreadable: bool = False,
    max_failures: int | float | None = None,
) -> tuple[Plan, list[SourceFile]]:
    """The plan with whatever is new in the source, and the files that are new or grew.

    New data of which every sample that is tried fails is refused, unless all of them may fail.
    """
    try:
        return _appended(snapshot, listing, recipe, on_cut, memory_limit, Unreadable(skip_unreadable), max_failures)
    except SourceChanged as error:
        # A source names its own folder.
        raise source_changed(snapshot.store.address, snapshot.plan, error.files) from error
    except OSError as error:
        if not is_full(error):
            raise
        raise DiskFull(snapshot.store.address, listing.weight(), snapshot.store.free_bytes() or 0) from error


def _appended(
    snapshot: Snapshot,
    listing: SourceListing,
    recipe: Recipe,
    on_cut: OnCut,
    memory_limit: int | None,
    unreadable: Unreadable,
    max_failures: int | float | None,
) -> tuple[Plan, list[SourceFile]]:
    store, number = snapshot.store, 0
    for _ in range(TRIES):
        check_index(snapshot)  # what continues another plan would be of no use
        plan = snapshot.plan
        check_kind(store, listing.source, plan)
        if is_unsigned(snapshot.newest, plan):
            _check_unsigned(snapshot, listing, recipe, on_cut, memory_limit, unreadable)
        number = len(plan.segments)
        draft, fresh_files = _drafted(snapshot, listing, recipe, plan, on_cut, memory_limit, unreadable)
        if draft is None:
            return plan, []
        if not allows_all(max_failures):
            parts = [part for chunk in range(len(draft.segment)) for part in draft.segment.parts(chunk)]
            _check_new(store, listing.source, recipe, parts, unreadable)
        if draft.append(store):
            segments, digests = (*plan.segments, draft.segment), (*plan.digests, draft.segment.digest())
            return Plan(segments, digests, plan.dropped), fresh_files
        wait_until_listed(store, layout.plan_segment(number))
        snapshot = Snapshot.take(store)
    raise ForebayError(
        f"'{layout.plan_segment(number)}' of '{store.address}' is taken and cannot be read, or others grow the cache "
        f"without a pause; look at it, and run the same command again"
    )


def _drafted(
    snapshot: Snapshot,
    listing: SourceListing,
    recipe: Recipe,
    plan: Plan,
    on_cut: OnCut,
    memory_limit: int | None,
    unreadable: Unreadable,
) -> tuple[Draft | None, list[SourceFile]]:
    """The next segment of a plan, None where nothing is new, and the files that are new or grew."""
    store, source = snapshot.store, listing.source
    while True:
        fresh_files, starts = _what_is_new(snapshot, listing, plan)
        unreadable.take_listed(source, fresh_files)
        wait_until_settled(fresh_files)
        readable = unreadable.without(fresh_files)
        with keeping_results(store) as kept:
            chunks = cut_source(source, readable, plan.weight, starts, on_cut, unreadable, kept)
            segment = Segment.planned(
                limited_chunks(source, chunks, recipe.chunk_target().most_samples),
                fresh_files,
                number=len(plan.segments),
                first_chunk=len(plan),
                source=source.describe(),
                weight=plan.weight,
            ).passing_over(unreadable)
            is_known = plan.segments[-1].identities or all(file.path in plan.files for file in fresh_files)
            if not len(segment) and is_known:
                return None, []
            try:
                return draft_segment(store, source, recipe, segment, plan, on_cut, memory_limit, kept), fresh_files
            except SourceUnreadable as error:
                unreadable.take(error, fresh_files)


def _check_new(store: Store, source: Source, recipe: Recipe, parts: Sequence[Part], unreadable: Unreadable) -> None:
    """Refuse new data of which nothing can be made before it is planned: no later build would get past it."""
    like = read_like(source)
    while parts:
        try:
            trial = try_parts(source, parts, recipe)
        except SourceUnreadable as error:
            path = named_in(error, [part.file.path for part in parts])
            if path is None or not unreadable.skip:
                raise
            parts = [part for part in parts if part.file.path != path]  # its chunk records the failure
        else:
            check_trial(store, trial, sum(part.weight for part in parts), like)
            return _check_each(store, source, recipe, parts if trial.failures else (), like)


def read_like(source: Source) -> str:
    """How a cache reads its source, in words: `grow` and `refresh` cannot read it differently."""
    described = source.describe()
    fields = ", ".join(f"{name}={described[name]!r}" for name in ("text", "image") if name in source.read_by)
    return f"{source.kind} ({fields})" if fields else source.kind


def _check_each(store: Store, source: Source, recipe: Recipe, parts: Sequence[Part], like: str) -> None:
    """Refuse one wrong file beside good ones: its chunks would fail behind theirs."""
    by_file: dict[str, list[Part]] = {}
    for part in parts if source.unit == "bytes" else ():  # not where a file is a sample
        by_file.setdefault(part.file.path, []).append(part)
    for path in list(by_file)[: SAMPLE_PLACES if len(by_file) > 1 else 0]:
        with suppress(SourceUnreadable):  # its chunk records the failure
            check_trial(store, try_parts(source, by_file[path], recipe), sys.maxsize, like)


def _check_unsigned(
    snapshot: Snapshot,
    listing: SourceListing,
    recipe: Recipe,
    on_cut: OnCut,
    memory_limit: int | None,
    unreadable: Unreadable,
) -> None:
    """With a key, a segment that no tagged generation covers must be what the source gives now."""
    store, newest, plan = snapshot.store, snapshot.newest, snapshot.plan
    number = len(newest.plan) if newest else 0
    if newest is None or plan.segments[number].amends:
        raise unsigned_plan(store, plan, number)
    if len(plan.segments) != number + 1:
        raise unsigned_plan(store, plan, number, compared=True)
    again = Unreadable(unreadable.skip)
    draft, _ = _drafted(snapshot, listing, recipe, plan.first(number), on_cut, memory_limit, again)
    if draft is None or draft.segment.digest() != plan.digests[number]:
        raise unsigned_plan(store, plan, number, compared=True)


def _what_is_new(snapshot: Snapshot, listing: SourceListing, plan: Plan) -> tuple[list[SourceFile], dict[str, int]]:
    """The files that are new or grew, as they were last seen, and how far those that grew are planned."""
    store, base = snapshot.store, read_cache_document(snapshot.store).base
    fresh = check_freshness(store, listing.source, plan, base, snapshot.table(base), listed=listing.walked)
    if fresh.changed:
        raise source_changed(store.address, plan, reported(listing.source, plan, fresh.changed))
    known, grown = plan.files, set(fresh.grown)
    listed = (file for file in listing.apart if file.path not in known or file.path in grown)
    files = [fresh.now.get(file.path, file) for file in listed]
    ends = plan.ends() if grown else {}
    return files, {path: ends.get(path, 0) for path in grown}


LONG_WORK_BYTES = 64 * 1024 * 1024


def build_layer(
    store: Store,
    source: Source | None,
    recipe: AnyRecipe,
    layer: str,
    mode: str,
    start_chunk: int | None,
    end_chunk: int | None,
    request: BuildRequest,
) -> BuildReport:
    """Make what is missing of a layer, in an inclusive range of chunks."""
    _check_range(start_chunk, end_chunk)
    refuse_tier(store)
    source = None if source is None else check_is_source(source)
    request = _with_workers(request, recipe, source)
    with closing(request.open_engine()) as engine, released(recipe) as said:
        snapshot = Snapshot.take(store)
        if snapshot.newest is None:
            check_destination(store)
        listing = None if source is None else SourceListing(source, store)
        clock = PhaseClock()
        if listing is not None:
            with clock.during("listing"):
                is_long = _is_long_work(listing)
            if is_long and snapshot.newest is None:
                with suppress(ForebayError):  # what has no document is refused when the work starts
                    engine.preload(preload_document(recipe), 1 if request.memory_limit else request.slots(engine))
        with clock.during("planning"):
            settled, notes = resolve_recipe(store, listing, recipe, layer)
            notes = (*notes, *(listing.notes if listing is not None else ()), *short_key_note(hmac_key()))
            options = replace(request.options(versions_of(settled), source, engine), clock=clock)
            place = _prepared(snapshot, listing, settled, layer, options, request.skip_unreadable, start_chunk, engine)
        check_start(store.address, start_chunk, max(place.chunks, default=-1) + 1)
        place = place.noting(notes)
        if mode == "inverse" and snapshot.newest is not None:
            repaired, _ = repair_with(store, source, settled, None, lambda index: (engine, options))
            if repaired.failed:
                raise BuildFailed(store.address, _by_chunk(repaired.failed))
            place = place.noting(_repair_notes(repaired))
        report = build_chunks(place, in_order(place.chunks, mode, start_chunk, end_chunk), engine, options)
    # Also of chunks that were there: the same command must not succeed when it is run again.
    check_failures(store.address, report.failures, report.samples, request.max_failures)
    return msgspec.structs.replace(report, notes=(*report.notes, *said))


def replace_layers(store: Store, recipes: Mapping[str, AnyRecipe]) -> tuple[str, ...]:
    """Drop those layers that other recipes have made, or that were made from a layer that is dropped."""
    kept = {layer: one for layer in recipes if (one := read_recipe_document(store, layer)) is not None}
    others = {layer for layer in kept if _is_other(store, kept[layer], recipes[layer])}
    for layer in sorted(kept, key=lambda name: len(input_layers(kept[name]))):
        others |= {layer} if others & input_layers(kept[layer]).keys() else set()
    if others:
        drop_layers(store, sorted(others))
    return tuple(sorted(others))


def _is_other(store: Store, kept: RecipeDocument, recipe: AnyRecipe) -> bool:
    settled, _ = resolve_recipe(store, None, recipe, kept.layer)
    return not is_same_recipe(kept, settled)


def grow_base(store: Store, source: Source, recipe: Recipe | None, request: BuildRequest) -> BuildReport:
    """Append what is new in the source to the plan, and make it."""
    check_is_source(source)
    base = read_cache_document(store).base
    if recipe is None:
        check_kept_texts(store)
    own = recipe or cast(Recipe, kept_recipe(store, base, "repair", False))
    request = _with_workers(request, own)
    with closing(request.open_engine()) as engine, released(own) as said:
        snapshot = Snapshot.take(store)
        request = request.holding(snapshot.newest)
        listing = SourceListing(named_alike(source, snapshot.plan), store)
        clock = PhaseClock()
        with clock.during("planning"):
            own, notes = resolve_recipe(store, listing, own, base)
            prepare_layer(store, own, base)
            options = replace(request.options(versions_of(own), source, engine), clock=clock)
            notes = (*notes, *listing.notes, *short_key_note(hmac_key()))
            on_cut = partial(show_planning, options)
            plan, _ = append_to_plan(
                snapshot, listing, own, on_cut, request.memory_limit, request.skip_unreadable, request.max_failures
            )
            begun, skips = snapshot.with_plan(plan), request.skip_unreadable
            place = base_workplace(begun, listing, own, base, plan, skips, known=snapshot.plan)
        try:
            report = build_chunks(place.noting(notes), place.chunks, engine, options)
        except ForebayError as error:
            planned, left = snapshot.plan, len(plan.segments)
            with suppress(OSError, ForebayError):  # why it failed is what counts
                left = take_back(store)
            if not isinstance(error, ChunkFailed):
                raise
            is_undone = left <= len(planned.segments) and error.chunk >= len(planned)
            like = f"the cache reads its source as {read_like(source)}: pass files like that, or build a separate cache"
            raise error.followed_by(f"nothing was added to '{store.address}'" if is_undone else "", like) from error
    check_failures(store.address, report.failures, report.samples, request.max_failures)
    grown = _growth_notes(own, base, snapshot.newest, newest_generation(store))
    return msgspec.structs.replace(report, notes=(*report.notes, *said, *grown))


def check_is_source(source: object) -> Source:
    if not isinstance(source, Source):
        raise TypeError(
            f"a source is needed, for instance fb.sources.lines('data/*.jsonl'), not {type(source).__name__}"
        )
    return source


def check_is_recipe(recipe: object) -> None:
    if not isinstance(recipe, Recipe | LayerRecipe):
        raise TypeError(f"a recipe is needed, for instance fb.ImageRecipe(size=224), not {type(recipe).__name__}")


def refuse_tier(store: Store) -> None:
    """A cache among the files of a tier would be taken for neither."""
    folder = store.local_path("")
    if folder is not None and all(os.path.isfile(os.path.join(folder, name)) for name in ("data.mdb", "users")):
        raise ForebayError(
            f"'{store.address}' holds a tier (data.mdb), which CachedImages and `forebay warm` fill; "
            "build the cache into another folder"
        )


def _with_workers(request: BuildRequest, recipe: AnyRecipe, source: Source | None = None) -> BuildRequest:
    """The processes that a recipe or a source asks for here, where nobody says; a cluster has its resources."""
    if request.engine not in (None, "local") or request.workers is not None:
        return request
    wanted = hooks_of(recipe).workers
    if wanted is None and source is not None and request.memory_limit is None:
        wanted = source.workers()
    return replace(request, workers=wanted)


def _is_long_work(listing: SourceListing) -> bool:
    """Whether there is enough to do that workers should start while it is planned."""
    return sum(file.size for file in listing.files) >= LONG_WORK_BYTES


def _prepared(
    snapshot: Snapshot,
    listing: SourceListing | None,
    recipe: AnyRecipe,
    layer: str,
    options: BuildOptions,
    skip_unreadable: bool,
    start_chunk: int | None,
    engine: Engine,
) -> LayerBuild:
    """A layer's work, begun now if it is new."""
    if reads_of(recipe):
        if snapshot.newest is not None:
            table = snapshot.newest.table(snapshot.newest.base)
            check_start(snapshot.store.address, start_chunk, max(table.chunks.tolist(), default=-1) + 1)
        prepare_layer(snapshot.store, recipe, layer)
        return layer_workplace(snapshot, cast(LayerRecipe, recipe), layer)
    if listing is None:
        raise RecipeInvalid(f"the recipe '{recipe.kind}' makes base rows and needs a source")
    base, show = cast(Recipe, recipe), partial(show_planning, options)
    slots = 1 if options.memory_limit else options.workers
    begun = prepare_base(
        snapshot,
        listing,
        base,
        layer,
        show,
        options.memory_limit,
        options.max_failures,
        skip_unreadable,
        on_note=partial(show_note, options),
        start_chunk=start_chunk,
        read_ahead=CensusTakers(engine, slots, snapshot.store, listing.source, base, show),
    )
    place = base_workplace(begun, listing, base, layer, begun.plan, skip_unreadable, known=snapshot.plan)
    return with_same_source(place, begun.plan, listing)


def _check_range(start: int | None, end: int | None) -> None:
    for name, chunk in (("start_chunk", start), ("end_chunk", end)):
        if chunk is not None and chunk < 0:
            raise ValueError(f"{name} must be at least 0 (got {chunk})")
    if start is not None and end is not None and start > end:
        raise ValueError(f"start_chunk must be at most end_chunk (got {start} and {end})")


def _repair_notes(report: RepairReport) -> tuple[str, ...]:
    """What an inverse build found damaged or lost, and put right."""
    notes = [f"{len(report.restored):,} damaged or lost file(s) were put back as they were"] if report.restored else []
    notes += [f"'{key}' was replaced by other bytes: {why}" for key, why in report.replaced.items()]
    return tuple(notes)


def _by_chunk(failed: Mapping[str, str]) -> dict[int, str]:
    parsed = {key: layout.parse_chunk(key) for key in failed}
    return {chunk[0] if (chunk := parsed[key]) else -1: reason for key, reason in failed.items()}


def _growth_notes(recipe: Recipe, base: str, before: Generation | None, after: Generation | None) -> tuple[str, ...]:
    """What a recipe says of the rows that were appended, by their sums."""
    if before is None or after is None:
        return ()
    old, new = before.table(base).totals(), after.table(base).totals()
    sums: dict[str, float] = {}
    for name, value in new.items():
        known = old.get(name, 0)
        if not isinstance(value, list) and not isinstance(known, list):
            sums[name] = value - known
    return hooks_of(recipe).grown(sums)


POLL_SECONDS = 0.5
MOST_DEATHS = 10  # of workers, before the chunks that are left are read by the builder itself


@dataclass(frozen=True, slots=True)
class Census:
    """Finds the identities of chunks; what a worker opens."""

    store: Store
    source: Source
    recipe: Recipe
    segment: Segment
    digest: str

    def begin(self, chunk: int) -> Callable[[], None]:
        found = ChunkIdentities.read(self.source, self._identity(), self.segment, chunk).encode()
        return lambda: KeptResults(self.store).keep(found, *self.question(chunk))

    def question(self, chunk: int) -> tuple[Any, ...]:
        return chunk_question(fingerprint(self.recipe), self.digest, chunk)

    def document(self) -> TaskDocument:
        body = {
            "store": dict(self.store.document()),
            "source": source_document(self.source),
            "recipe": recipe_document(self.recipe),
            "segment": self.digest,
        }
        return TaskDocument(opener="forebay.building.build_cache:open_census", body=body)

    def _identity(self) -> Identity:
        identity = identity_of(self.recipe)
        assert identity is not None
        return identity


def open_census(body: Mapping[str, Any]) -> Census:
    store, digest = open_store_document(body["store"]), body["segment"]
    draft = KeptResults(store).find("draft", digest)
    segment, found = decode_segment(memoryview(draft or b""), store.address, "the draft of the plan")
    if found != digest:
        raise ForebayError(f"the draft of the plan is not at '{store.address}' as it is seen here")
    recipe: Any = open_recipe(body["recipe"])
    return Census(store, open_source(body["source"]), recipe, segment, digest)


@dataclass(frozen=True, slots=True)
class CensusTakers:
    """An engine that reads chunks for the planner. What it cannot read the planner reads itself, and says why."""

    engine: Engine
    slots: int
    store: Store
    source: Source
    recipe: Recipe
    on_cut: OnCut

    def __call__(self, segment: Segment, kept: KeptResults) -> None:
        if not kept.is_used or self.slots < 2:
            return
        task = Census(self.store, self.source, self.recipe, segment, segment.digest())
        missing = [chunk for chunk in range(len(segment)) if kept.find(*task.question(chunk)) is None]
        kept.keep(b"".join(map(bytes, segment.encode())), "draft", task.digest)
        try:
            self.engine.start(task, self.slots)
        except (ForebayError, TypeError):  # no document can be made of it
            return
        try:
            self._read(segment, deque(missing))
        finally:
            self.engine.stop()

    def _read(self, segment: Segment, waiting: deque[int]) -> None:
        total, weights, passed, running, deaths = len(waiting), segment.weights(), 0, 0, 0
        while (waiting or running) and deaths < MOST_DEATHS:
            for slot in self.engine.idle():
                if waiting:
                    self.engine.submit(slot, waiting.popleft())
                    running += 1
            for event in self.engine.poll(POLL_SECONDS):
                match event:
                    case Died():
                        deaths += 1
                        lost = {*event.lost, *(() if event.chunk is None else (event.chunk,))}
                        running -= len(lost)
                        waiting.extend(lost)
                    case Done() | Failed():
                        running -= 1
                        passed += int(weights[event.chunk])
            done = segment.file_count * (total - len(waiting) - running) // max(1, total)
            self.on_cut(done, segment.file_count, passed)
