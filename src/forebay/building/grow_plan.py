"""Growing: append what a source has and the plan has not, as a new segment."""

from forebay.building.begin import is_unsigned, unsigned_plan
from forebay.building.dedup import Draft, deduplicate
from forebay.building.planning import OnCut, cut_source, files_apart, wait_until_settled
from forebay.cache.catalog import newest_generation, read_cache_document
from forebay.cache.plan import Plan, load_plan
from forebay.cache.segment import Segment, Unreadable
from forebay.cache.source_check import check_freshness, check_kind, reported, source_changed
from forebay.cache.verify import check_index
from forebay.errors import DiskFull, ForebayError, SourceChanged, SourceUnreadable
from forebay.format import layout
from forebay.format.generation import ChunkTable, Generation
from forebay.recipe import Recipe
from forebay.source import Source, SourceFile
from forebay.store.base import Store, is_full, wait_until_listed

TRIES = 100  # to append a segment, while others append theirs


def named_alike(source: Source, plan: Plan) -> Source:
    """A source whose files are named as the plan names them, so that a file known already is recognised."""
    root = plan.segments[0].source.get("root") if plan.segments else None
    return source if root is None else source.rebased(root)


def append_to_plan(
    store: Store,
    source: Source,
    recipe: Recipe,
    on_cut: OnCut,
    memory_limit: int | None = None,
    skip_unreadable: bool = False,
) -> tuple[Plan, list[SourceFile]]:
    """The plan with whatever is new in the source, and the files that are new or grew."""
    try:
        return _appended(store, source, recipe, on_cut, memory_limit, Unreadable(skip_unreadable))
    except SourceChanged as error:
        # A source names its own folder.
        raise source_changed(store.address, load_plan(store), error.files) from error
    except OSError as error:
        if not is_full(error):
            raise
        raise DiskFull(store.address, sum(map(source.weight, source.files())), store.free_bytes() or 0) from error


def _appended(
    store: Store, source: Source, recipe: Recipe, on_cut: OnCut, memory_limit: int | None, unreadable: Unreadable
) -> tuple[Plan, list[SourceFile]]:
    number = 0
    for _ in range(TRIES):
        newest = newest_generation(store)
        if newest is not None:
            check_index(store, newest)  # what continues another plan would be of no use
        plan = load_plan(store)
        check_kind(store, source, plan)
        if is_unsigned(newest, plan):
            _check_unsigned(store, source, recipe, plan, newest, on_cut, memory_limit, unreadable)
        number = len(plan.segments)
        draft, fresh_files = _drafted(store, source, recipe, plan, on_cut, memory_limit, unreadable)
        if draft is None:
            return plan, []
        if draft.append(store):
            segments, digests = (*plan.segments, draft.segment), (*plan.digests, draft.segment.digest())
            return Plan(segments, digests), fresh_files
        wait_until_listed(store, layout.plan_segment(number))
    raise ForebayError(
        f"'{layout.plan_segment(number)}' of '{store.address}' is taken and cannot be read, or others grow the cache "
        f"without a pause; look at it, and run the same command again"
    )


def _drafted(
    store: Store,
    source: Source,
    recipe: Recipe,
    plan: Plan,
    on_cut: OnCut,
    memory_limit: int | None,
    unreadable: Unreadable,
) -> tuple[Draft | None, list[SourceFile]]:
    """The next segment of a plan, None where nothing is new, and the files that are new or grew."""
    while True:
        fresh_files, starts = _what_is_new(store, source, plan)
        unreadable.take_listed(source, fresh_files)
        wait_until_settled(fresh_files)
        readable = unreadable.without(fresh_files)
        chunks = cut_source(source, readable, plan.weight, starts, on_cut, unreadable)
        if not chunks and (plan.segments[-1].identities or all(file.path in plan.files for file in fresh_files)):
            return None, []
        segment = Segment.of(
            chunks,
            number=len(plan.segments),
            first_chunk=len(plan),
            source=source.describe(),
            weight=plan.weight,
            empty=fresh_files,
        ).passing_over(unreadable)
        try:
            return deduplicate(store, source, recipe, segment, plan, on_cut, memory_limit), fresh_files
        except SourceUnreadable as error:
            unreadable.take(error, fresh_files)


def _check_unsigned(
    store: Store,
    source: Source,
    recipe: Recipe,
    plan: Plan,
    newest: Generation | None,
    on_cut: OnCut,
    memory_limit: int | None,
    unreadable: Unreadable,
) -> None:
    """With a key, a segment that no tagged generation covers must be what the source gives now."""
    number = len(newest.plan) if newest else 0
    if newest is None or plan.segments[number].amends:
        raise unsigned_plan(store, plan, number)
    if len(plan.segments) != number + 1:
        raise unsigned_plan(store, plan, number, compared=True)
    again = Unreadable(unreadable.skip)
    draft, _ = _drafted(store, source, recipe, plan.first(number), on_cut, memory_limit, again)
    if draft is None or draft.segment.digest() != plan.digests[number]:
        raise unsigned_plan(store, plan, number, compared=True)


def _what_is_new(store: Store, source: Source, plan: Plan) -> tuple[list[SourceFile], dict[str, int]]:
    base = read_cache_document(store).base
    newest = newest_generation(store)
    table = newest.table(base) if newest else ChunkTable.of([])
    fresh = check_freshness(store, source, plan, base, table)
    if fresh.changed:
        raise source_changed(store.address, plan, reported(source, plan, fresh.changed))
    known, grown = plan.files, set(fresh.grown)
    files = [file for file in files_apart(store, source) if file.path not in known or file.path in grown]
    ends = plan.ends() if grown else {}
    return files, {path: ends.get(path, 0) for path in grown}
