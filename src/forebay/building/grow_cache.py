"""Grow a cache: append what is new in the source to its plan, and make it."""

import sys
from collections.abc import Sequence
from contextlib import closing, suppress
from dataclasses import dataclass, replace
from functools import partial
from typing import cast

import msgspec

from forebay.building.begin import (
    Draft,
    check_kept_texts,
    check_kind,
    check_trial,
    draft_segment,
    is_unsigned,
    kept_recipe,
    prepare_layer,
    released,
    resolve_recipe,
    unsigned_plan,
)
from forebay.building.builder import BuildOptions, PhaseClock
from forebay.building.layer_build import (
    BuildRequest,
    base_workplace,
    build_chunks,
    check_is_source,
    show_planning,
    turn_to_plan,
    with_workers,
)
from forebay.building.planning import (
    SAMPLE_PLACES,
    SourceListing,
    cut_source,
    limited_chunks,
    try_parts,
    wait_until_settled,
)
from forebay.cache.catalog import Snapshot, check_index, newest_generation, read_cache_document
from forebay.cache.claims import PlanningClaim
from forebay.cache.clean import take_back
from forebay.cache.plan import Plan, Segment, Unreadable, keeping_results, named_in
from forebay.cache.records import BuildReport
from forebay.cache.source_check import check_freshness, reported, source_changed
from forebay.errors import ChunkFailed, ForebayError, SourceChanged, SourceUnreadable
from forebay.format import layout
from forebay.format.generation import Generation
from forebay.format.tensors import hmac_key, short_key_note
from forebay.recipe import Recipe, hooks_of, versions_of
from forebay.source import Part, Source, SourceFile, allows_all, check_failures
from forebay.store.base import Store, holds, naming_full_disk, wait_until_listed

TRIES = 100  # to append a segment, while others append theirs


def named_alike(source: Source, plan: Plan) -> Source:
    """A source whose files are named as the plan names them, so that a file known already is recognised."""
    root = plan.segments[0].source.get("root") if plan.segments else None
    return source if root is None else source.rebased(root)


@dataclass(frozen=True, slots=True)
class PlanGrowth:
    """What is appended to a plan, and by what."""

    listing: SourceListing
    recipe: Recipe
    options: BuildOptions
    request: BuildRequest
    unreadable: Unreadable


def append_to_plan(
    snapshot: Snapshot, growth: PlanGrowth, max_failures: int | float | None = None
) -> tuple[Plan, list[SourceFile]]:
    """The plan with whatever is new in the source, and the files that are new or grew.

    New data of which every sample that is tried fails is refused, unless all of them may fail.
    """
    try:
        with naming_full_disk(snapshot.store, growth.listing.weight):
            return _appended(snapshot, growth, max_failures)
    except SourceChanged as error:
        # A source names its own folder.
        raise source_changed(snapshot.store.address, snapshot.plan, error.files) from error


def _appended(
    snapshot: Snapshot, growth: PlanGrowth, max_failures: int | float | None
) -> tuple[Plan, list[SourceFile]]:
    store, source, number = snapshot.store, growth.listing.source, 0
    for _ in range(TRIES):
        check_index(snapshot)  # what continues another plan would be of no use
        plan = snapshot.plan
        check_kind(store, source, plan)
        if is_unsigned(snapshot.newest, plan):
            _check_unsigned(snapshot, growth)
        number = len(plan.segments)
        with turn_to_plan(store, growth.request, number, growth.listing.files) as planner:
            if not holds(store, layout.plan_segment(number)):  # by now: the source was walked since the plan was read
                draft, fresh_files = _drafted(snapshot, growth, plan, planner)
                if draft is None:
                    return plan, []
                if not allows_all(max_failures):
                    parts = [part for chunk in range(len(draft.segment)) for part in draft.segment.parts(chunk)]
                    _check_new(store, source, growth.recipe, parts, growth.unreadable)
                if draft.append(store):
                    segments, digests = (*plan.segments, draft.segment), (*plan.digests, draft.segment.digest())
                    return Plan(segments, digests, plan.dropped, plan.etags), fresh_files
        wait_until_listed(store, layout.plan_segment(number))
        snapshot = Snapshot.take(store)
    raise ForebayError(
        f"'{layout.plan_segment(number)}' of '{store.address}' is taken and cannot be read, or others grow the cache "
        f"without a pause; look at it, and run the same command again"
    )


def _drafted(
    snapshot: Snapshot, growth: PlanGrowth, plan: Plan, planner: PlanningClaim | None = None
) -> tuple[Draft | None, list[SourceFile]]:
    """The next segment of a plan, None where nothing is new, and the files that are new or grew."""
    store, source, recipe = snapshot.store, growth.listing.source, growth.recipe
    unreadable, on_cut = growth.unreadable, partial(show_planning, growth.options, planner)
    while True:
        fresh_files, starts = _what_is_new(snapshot, growth.listing, plan)
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
                draft = draft_segment(store, source, recipe, segment, plan, on_cut, growth.options.memory_limit, kept)
                return draft, fresh_files
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


def _check_unsigned(snapshot: Snapshot, growth: PlanGrowth) -> None:
    """With a key, a segment that no tagged generation covers must be what the source gives now."""
    store, newest, plan = snapshot.store, snapshot.newest, snapshot.plan
    number = len(newest.plan) if newest else 0
    if newest is None or plan.segments[number].amends:
        raise unsigned_plan(store, plan, number)
    if len(plan.segments) != number + 1:
        raise unsigned_plan(store, plan, number, compared=True)
    again = replace(growth, unreadable=Unreadable(growth.unreadable.skip))
    draft, _ = _drafted(snapshot, again, plan.first(number))
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


def grow_base(store: Store, source: Source, recipe: Recipe | None, request: BuildRequest) -> BuildReport:
    """Append what is new in the source to the plan, and make it."""
    check_is_source(source)
    base = read_cache_document(store).base
    if recipe is None:
        check_kept_texts(store)
    own = recipe or cast(Recipe, kept_recipe(store, base, "repair", False))
    request = with_workers(request, own)
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
            skips = request.skip_unreadable
            growth = PlanGrowth(listing, own, options, request, Unreadable(skips))
            plan, _ = append_to_plan(snapshot, growth, request.max_failures)
            begun = snapshot.with_plan(plan)
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
