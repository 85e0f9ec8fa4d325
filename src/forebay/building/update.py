"""Update a cache: append new files, and data appended to known files, as a segment of the plan; then make it."""

from typing import cast

import msgspec

from forebay.building.layers import bind_layer, check_tagged, stored_recipe
from forebay.building.listing import SourceListing
from forebay.building.make import make
from forebay.building.options import BuildOptions
from forebay.building.segments import Planner, check_kind, check_signed, is_unsigned
from forebay.building.writer import CacheWriter
from forebay.cache.catalog import unpublished
from forebay.cache.plan import Plan
from forebay.cache.reports import BuildReport
from forebay.cache.state import Index, numbers
from forebay.format.generation import ChunkTable
from forebay.recipe import Recipe, hooks_of
from forebay.source import Source
from forebay.store.base import Store, naming_full_disk


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
        planner = cache.planner(SourceListing(named_alike(source, cache.index.plan), cache.store), recipe, base)
        bind_layer(cache.store, planner.recipe, base)
        check_kind(cache.store, planner.source, cache.index.plan)
        before_update = _make_last_segment(cache, planner, base)
        before = cache.index.table(base)
        with naming_full_disk(cache.store, planner.listing.weight), cache.planning():
            append_new_files(cache, planner)
        job = cache.base_job(planner, base, is_update=True)
        report = make(cache, job, numbers(cache.index.state(base).planned))
        grown = _update_notes(planner.recipe, before, cache.refresh().table(base))
        built, present = report.built + before_update, report.present - before_update
        return msgspec.structs.replace(report, built=built, present=present, notes=(*report.notes, *grown))


def append_new_files(cache: CacheWriter, planner: Planner) -> None:
    """Append a segment with all new data of the source, if there is any. The caller holds the plan's claim."""
    check_unsigned(cache, planner)
    while (draft := planner.following(cache.index, cache.index.plan)) is not None:
        cache.append(draft)  # or reads the segment of an update that was first
        if cache.index.plan.last_digest == draft.segment.digest:
            return


def check_unsigned(cache: CacheWriter, planner: Planner) -> None:
    """With a key, compare segments that no signed generation covers with a new plan of them."""
    index, plan = cache.index, cache.index.plan
    if not is_unsigned(index):
        return
    for number in range(len(index.newest.plan) if index.newest is not None else 0, len(plan.segments)):
        draft = planner.following(index, plan.first(number)) if number else planner.first()
        check_signed(cache.store, plan, number, draft)


def _make_last_segment(cache: CacheWriter, planner: Planner, base: str) -> int:
    """Make the last segment if it is fully unpublished, and return its chunks; raises if none can be made."""
    last, state = cache.index.plan.segments[-1], cache.index.state(base)
    own = slice(last.first_chunk, last.first_chunk + len(last))
    if not last.number or not state.todo[own].any() or state.listed[own].any():
        return 0
    check_unsigned(cache, planner)
    job = cache.base_job(planner, base, is_update=True)
    report = make(cache, job, list(last.chunk_numbers))
    cache.refresh()
    return report.built


def named_alike(source: Source, plan: Plan) -> Source:
    """The source with file names as in the plan, to recognize known files."""
    root = plan.segments[0].source.get("root") if plan.segments else None
    return source if root is None else source.rebased(root)


def _update_notes(recipe: Recipe, before: ChunkTable, after: ChunkTable) -> tuple[str, ...]:
    """Notes of the recipe about added rows, by their sums."""
    old = before.totals()
    counted = {name: value for name, value in after.totals().items() if not isinstance(value, list)}
    return hooks_of(recipe).grown({name: value - cast(float, old.get(name, 0)) for name, value in counted.items()})
