"""Growing: append what a source has and the plan has not, as a new segment."""

from forebay.cache.cut import OnCut, cut_source
from forebay.cache.duplicates import deduplicate
from forebay.cache.freshness import check_freshness
from forebay.cache.plan import Plan, Segment, check_kind, files_apart, load_plan
from forebay.cache.publish import newest_generation, read_cache_document
from forebay.cache.work import wait_until_settled
from forebay.errors import DiskFull, SourceChanged
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
    store: Store, source: Source, recipe: Recipe, on_cut: OnCut, memory_limit: int | None = None
) -> tuple[Plan, list[SourceFile]]:
    """The plan with whatever is new in the source, and the files that are new or grew."""
    try:
        return _appended(store, source, recipe, on_cut, memory_limit)
    except OSError as error:
        if not is_full(error):
            raise
        raise DiskFull(store.address, sum(map(source.weight, source.files())), store.free_bytes() or 0) from error


def _appended(
    store: Store, source: Source, recipe: Recipe, on_cut: OnCut, memory_limit: int | None
) -> tuple[Plan, list[SourceFile]]:
    while True:
        plan = load_plan(store)
        check_kind(store, source, plan)
        fresh_files, starts = _what_is_new(store, source, plan)
        wait_until_settled(fresh_files)
        chunks = cut_source(source, fresh_files, plan.weight, starts, on_cut)
        if not chunks:
            return plan, []
        number = len(plan.segments)
        segment = Segment.of(chunks, number=number, first_chunk=len(plan), source=source.describe(), weight=plan.weight)
        draft = deduplicate(store, source, recipe, segment, plan, on_cut, memory_limit)
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
