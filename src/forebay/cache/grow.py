"""Growing: append what a source has and the plan has not, as a new segment."""

from forebay.cache.cut import OnCut, cut_source, wait_until_settled
from forebay.cache.duplicates import deduplicate
from forebay.cache.freshness import check_freshness
from forebay.cache.plan import Plan, Segment, check_kind, files_apart, load_plan
from forebay.cache.publish import newest_generation, read_cache_document
from forebay.cache.unreadable import Unreadable
from forebay.errors import DiskFull, SourceChanged, SourceUnreadable
from forebay.format.generation import ChunkTable
from forebay.recipe import Recipe
from forebay.source import Source, SourceFile
from forebay.store.base import Store, is_full


def named_alike(source: Source, plan: Plan) -> Source:
    """A source whose files are named as the plan names them, so that a file known already is recognised."""
    root = plan.segments[0].source.get("root") if plan.segments else None
    if root is None or not hasattr(source, "rebased"):
        return source
    alike: Source = source.rebased(root)
    return alike


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
        raise SourceChanged(store.address, error.files) from error  # a source names its own folder
    except OSError as error:
        if not is_full(error):
            raise
        raise DiskFull(store.address, sum(map(source.weight, source.files())), store.free_bytes() or 0) from error


def _appended(
    store: Store,
    source: Source,
    recipe: Recipe,
    on_cut: OnCut,
    memory_limit: int | None,
    unreadable: Unreadable,
) -> tuple[Plan, list[SourceFile]]:
    while True:
        plan = load_plan(store)
        check_kind(store, source, plan)
        fresh_files, starts = _what_is_new(store, source, plan)
        wait_until_settled(fresh_files)
        readable = unreadable.without(fresh_files)
        chunks = cut_source(source, readable, plan.weight, starts, on_cut, unreadable)
        if not chunks and (plan.segments[-1].identities or all(file.path in plan.files for file in fresh_files)):
            return plan, []
        segment = Segment.of(
            chunks,
            number=len(plan.segments),
            first_chunk=len(plan),
            source=source.describe(),
            weight=plan.weight,
            empty=fresh_files,
        ).passing_over(unreadable)
        try:
            draft = deduplicate(store, source, recipe, segment, plan, on_cut, memory_limit)
        except SourceUnreadable as error:
            unreadable.take(error, fresh_files)
            continue
        if draft.append(store):
            return load_plan(store), fresh_files


def _what_is_new(store: Store, source: Source, plan: Plan) -> tuple[list[SourceFile], dict[str, int]]:
    base = read_cache_document(store).base
    newest = newest_generation(store)
    table = newest.table(base) if newest else ChunkTable.of([])
    fresh = check_freshness(store, source, plan, base, table)
    if fresh.changed:
        raise SourceChanged(store.address, fresh.changed)
    known, grown = plan.files, set(fresh.grown)
    files = [file for file in files_apart(store, source) if file.path not in known or file.path in grown]
    ends = plan.ends() if grown else {}
    return files, {path: ends.get(path, 0) for path in grown}
