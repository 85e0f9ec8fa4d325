"""How far a cache is: chunks there and missing, claims, failed samples, stale sources."""

from collections import Counter
from collections.abc import Iterator
from functools import cache
from itertools import islice

from forebay.cache.claim import Claim, is_abandoned, read_claims
from forebay.cache.freshness import Freshness, check_freshness
from forebay.cache.outdated import stale_files
from forebay.cache.plan import Plan, load_plan
from forebay.cache.publish import (
    layers_of,
    lost_chunks,
    newest_generation,
    present_chunks,
    read_cache_document,
    read_recipe_document,
)
from forebay.cache.published import open_chunk
from forebay.cache.records import ClaimStatus, FailedSample, Gaps, LayerStatus, Status
from forebay.cache.verify import foreign_files
from forebay.errors import ChunkMissing, Damaged, HubNotFound, HubUnreachable, IndexCorrupt, LayerNotFound
from forebay.format import layout
from forebay.format.chunk import ChunkRecord
from forebay.format.generation import ChunkTable, Generation
from forebay.source import Source, SourceFile
from forebay.store.base import Store

SHOWN_FAILURES = 20


def find_gaps(store: Store, layer: str | None) -> list[Gaps]:
    """Which planned chunks have no file, per layer."""
    document = read_cache_document(store)
    plan, newest = _plan_and_newest(store)
    names = layers_of(store, {document.base, *(newest.recipes if newest else ())})
    if layer is not None and layer not in names:
        raise LayerNotFound(store.address, layer, names)
    planned, found = len(plan), []
    for name in [layer] if layer is not None else names:
        table = newest.table(name) if newest else ChunkTable.of([])
        there = present_chunks(store, name, table, plan.revisions(name))
        missing = tuple(chunk for chunk in range(planned) if chunk not in there)
        kept = read_recipe_document(store, name)
        found.append(
            Gaps(
                root=store.address,
                layer=name,
                kind=kept.kind if kept else "",
                planned=planned,
                present=planned - len(missing),
                missing=missing,
                unlisted=tuple(sorted(there - set(table.chunks.tolist()))),
            )
        )
    return found


def cache_status(store: Store, source: Source | None, shown_failures: int | None = SHOWN_FAILURES) -> Status:
    read_cache_document(store)
    plan, newest = _plan_and_newest(store)
    layers = tuple(_layer_status(store, gaps, newest) for gaps in find_gaps(store, None))
    fresh, stale = _freshness(store, source, plan, newest)
    failed = tuple(islice(_failed_samples(store, newest), shown_failures)) if newest else ()
    return Status(
        root=store.address,
        generation=newest.number if newest else None,
        complete=bool(layers) and all(not layer.missing and layer.listed == layer.planned for layer in layers),
        layers=layers,
        claims=tuple(
            _claim_status(key, claim) for name in layers_of(store) for key, claim in read_claims(store, name).items()
        ),
        failed_samples=failed,
        failed_samples_left_out=sum(layer.failures for layer in layers) - len(failed),
        source_root=str(plan.source.get("root", "")) if plan.segments else "",
        stale=stale,
        grown=fresh.grown if fresh else (),
        source_checked=fresh is not None,
        unreadable=plan.unreadable,
        refreshable=not plan.deduplicates,
        foreign=tuple(foreign_files(store, newest)),
    )


def _plan_and_newest(store: Store) -> tuple[Plan, Generation | None]:
    """The plan and the newest generation, which names every segment: one that is gone must not pass for no plan."""
    newest, plan = newest_generation(store), load_plan(store)
    if newest is not None and len(plan.segments) < len(newest.plan):
        raise IndexCorrupt(store.address, layout.plan_segment(len(plan.segments)), "it is gone")
    return plan, newest


def _layer_status(store: Store, gaps: Gaps, newest: Generation | None) -> LayerStatus:
    table = newest.table(gaps.layer) if newest else ChunkTable.of([])
    return LayerStatus(
        layer=gaps.layer,
        planned=gaps.planned,
        present=gaps.present,
        listed=len(table),
        missing=gaps.missing,
        suspect=tuple(record.chunk for record in table.records() if _is_suspect(store, gaps.layer, record)),
        lost=tuple(sorted(lost_chunks(store, gaps.layer, table))),
        rows=int(table.rows.sum()),
        samples=int(table.numbers["samples"].sum()),
        failures=int(table.numbers["failures"].sum()),
        reasons=dict(Counter(failure.reason for failure in _layer_failures(store, gaps.layer, table))),
        unlisted=gaps.unlisted,
    )


def _is_suspect(store: Store, layer: str, record: ChunkRecord) -> bool:
    """Whether the size or the head of a listed chunk is not what was published; a gap is no suspect."""
    try:
        open_chunk(store, layer, record)
    except ChunkMissing:
        return False
    except Damaged:
        return True
    return False


def _layer_failures(store: Store, layer: str, table: ChunkTable) -> Iterator[FailedSample]:
    for position in (table.numbers["failures"] > 0).nonzero()[0].tolist():
        record = table.record(position)
        try:
            failures = open_chunk(store, layer, record).failures()
        except Damaged:
            continue  # the chunk is listed as suspect
        for failure in failures:
            yield FailedSample(
                layer=layer, chunk=record.chunk, sample=failure.sample, reason=failure.reason, detail=failure.detail
            )


def _failed_samples(store: Store, newest: Generation) -> Iterator[FailedSample]:
    for layer, table in newest.layers.items():
        yield from _layer_failures(store, layer, table)


def _claim_status(key: str, claim: Claim) -> ClaimStatus:
    parsed = layout.parse_claim(key)
    return ClaimStatus(
        layer=key.split("/")[1],
        chunk=parsed[0] if parsed else -1,
        host=claim.host,
        pid=claim.pid,
        state="abandoned" if claim.state == "working" and is_abandoned(claim) else claim.state,
        reason=claim.reason,
    )


def _freshness(
    store: Store, source: Source | None, plan: Plan, newest: Generation | None
) -> tuple[Freshness | None, dict[str, str]]:
    """What became of the source, None where it cannot be asked, and its files that are not what rows were made from."""
    if source is None:
        return None, {}
    if not plan.segments:
        return Freshness(), {}
    base = read_cache_document(store).base
    table = newest.table(base) if newest else ChunkTable.of([])

    @cache
    def fresh(plan: Plan) -> Freshness:
        return check_freshness(store, source, plan, base, table, SourceFile.same_look)

    try:
        return fresh(plan), stale_files(source, plan, base, table, lambda plan: fresh(plan).stale)
    except (HubUnreachable, HubNotFound):
        return None, {}
