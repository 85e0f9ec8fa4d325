"""Update a cache: append new files, and data appended to known files, as a segment of the plan; then make it."""

from typing import cast

import msgspec

from forebay.building.layers import bind_layer, check_tagged, resolve_recipe, stored_recipe
from forebay.building.listing import SourceListing
from forebay.building.make import make
from forebay.building.options import BuildOptions
from forebay.building.segments import Planner, check_kind, check_signed, is_unsigned
from forebay.building.writer import CacheWriter
from forebay.cache.catalog import unpublished
from forebay.cache.plan import Plan
from forebay.cache.reports import BuildReport
from forebay.cache.state import Index, numbers
from forebay.errors import BuildFailed, ForebayError
from forebay.format import layout
from forebay.format.generation import ChunkTable
from forebay.recipe import Recipe, hooks_of
from forebay.source import Source
from forebay.store.base import Store, index_corrupt, naming_full_disk, wait_until_listed

ADDED = ("made", "made_rows", "written_bytes", "seconds")  # of the last segment, and of the new one
TRIES = 100  # to append a segment, while others append theirs


def update(
    store: Store, source: Source, recipe: Recipe | None, options: BuildOptions, allow_network: bool = False
) -> BuildReport:
    """Append new files and new data to the plan, and make their chunks; first finish the last segment."""
    index = Index.take(store)
    if index.newest is None and not index.plan.segments:
        raise unpublished(store)
    base = index.base
    if recipe is None:
        check_tagged(store)
        recipe = cast(Recipe, stored_recipe(store, base, "update", allow_network))
    with CacheWriter(store, options.suited_to(recipe, source), before=index) as cache:
        listing = SourceListing(named_alike(source, cache.index.plan), cache.store)
        recipe, notes = resolve_recipe(cache.store, listing, recipe, base)
        bind_layer(cache.store, recipe, base)
        cache.notes += [*notes, *listing.notes]
        planner = Planner(
            cache.store,
            listing,
            recipe,
            cache.show_cut,
            cache.warn,
            options.max_failures,
            options.memory_limit,
        )
        check_kind(cache.store, listing.source, cache.index.plan)
        finished = _finish_last_segment(cache, planner, base)
        before = cache.index.table(base)
        with naming_full_disk(cache.store, listing.weight), cache.planning():
            append_new_files(cache, planner)
        job = cache.base_job(listing, recipe, base, is_update=True)
        report = make(cache, job, numbers(cache.index.state(base).planned))
        grown = _update_notes(recipe, before, cache.refresh().table(base))
        made = {name: getattr(report, name) + getattr(finished, name) for name in ADDED if finished is not None}
        present = report.present - (finished.made if finished is not None else 0)
        return msgspec.structs.replace(report, **made, present=present, notes=(*report.notes, *grown))


def append_new_files(cache: CacheWriter, planner: Planner) -> None:
    """Append a segment with everything new in the source; does nothing if there is nothing. Held: the plan's claim."""
    for _ in range(TRIES):
        index, plan = cache.index, cache.index.plan
        if not plan.segments:
            raise index_corrupt(cache.store.address, layout.plan_segment(0), "it is gone")
        check_unsigned(cache, planner)
        draft = planner.following(index, plan)
        if draft is None:
            return
        cache.append(draft)
        if cache.index.plan.last_digest == draft.segment.digest:
            return
        wait_until_listed(cache.store, layout.plan_segment(draft.segment.number))
        cache.refresh()
    raise ForebayError(
        f"no segment can be appended to the plan of '{cache.store.address}': others append without a pause",
        hint="run the same command again",
    )


def check_unsigned(cache: CacheWriter, planner: Planner) -> None:
    """With a key, plan the segments again that no tagged generation covers, and compare."""
    index, plan = cache.index, cache.index.plan
    if not is_unsigned(index, plan):
        return
    for number in range(len(index.newest.plan) if index.newest is not None else 0, len(plan.segments)):
        draft = planner.following(index, plan.first(number)) if number else planner.first()
        check_signed(cache.store, plan, number, draft)


def _finish_last_segment(cache: CacheWriter, planner: Planner, base: str) -> BuildReport | None:
    """Make what is left of the last segment; raises if nothing of it can be published."""
    index = cache.index
    last = index.plan.segments[-1] if index.plan.segments else None
    todo = numbers(index.state(base).todo)
    left = [chunk for chunk in todo if last is not None and chunk in last.chunk_numbers]
    if last is None or not left or last.number == 0:
        return None
    check_unsigned(cache, planner)
    report = None
    try:
        report = make(cache, cache.base_job(planner.listing, planner.recipe, base, is_update=True), left)
    except BuildFailed:
        listed = cache.refresh().state(base).listed
        if not listed[last.first_chunk : last.first_chunk + len(last)].any():
            raise
    cache.refresh()
    return report


def named_alike(source: Source, plan: Plan) -> Source:
    """A source whose files are named as the plan names them, so that a known file is recognized."""
    root = plan.segments[0].source.get("root") if plan.segments else None
    return source if root is None else source.rebased(root)


def _update_notes(recipe: Recipe, before: ChunkTable, after: ChunkTable) -> tuple[str, ...]:
    """What a recipe says of the rows that were added, by their sums."""
    old, sums = before.totals(), dict[str, float]()
    for name, value in after.totals().items():
        known = old.get(name, 0)
        if not isinstance(value, list) and not isinstance(known, list):
            sums[name] = value - known
    return hooks_of(recipe).grown(sums)
