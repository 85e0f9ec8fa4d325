"""How far a cache is, and what it holds."""

from collections import defaultdict
from collections.abc import Callable, Iterator, Mapping
from functools import cache
from itertools import islice
from typing import Literal

from forebay.cache.catalog import (
    Snapshot,
    generation_numbers,
    layer_columns,
    load_generation,
    open_chunk,
    outdated_chunks,
    read_cache_document,
    read_recipe_document,
)
from forebay.cache.claims import BuilderBeat, Claim, claimed, is_abandoned, is_dead, read_builders, read_claims
from forebay.cache.plan import Plan, load_plan
from forebay.cache.records import (
    BuilderStatus,
    ClaimStatus,
    FailedSample,
    Gaps,
    LayerStatus,
    LayerSummary,
    MadeWith,
    PlannerStatus,
    Status,
    Summary,
    ranges,
)
from forebay.cache.source_check import Freshness, check_freshness, stale_files
from forebay.cache.verify import foreign_files
from forebay.columns import Column
from forebay.errors import (
    CacheNotFound,
    ChunkMissing,
    Damaged,
    HubNotFound,
    HubUnreachable,
    IndexCorrupt,
    LayerNotFound,
)
from forebay.format import layout
from forebay.format.chunk import ChunkRecord
from forebay.format.generation import ChunkTable, Generation
from forebay.source import Source, SourceFile
from forebay.store.base import Store

SHOWN_FAILURES = 20
Depth = Literal["index", "chunks"]


def find_gaps(store: Store, layer: str | None) -> list[Gaps]:
    """Which planned chunks have no file, per layer."""
    read_cache_document(store)
    return _gaps(_checked(Snapshot.take(store)), layer)


def _gaps(snapshot: Snapshot, layer: str | None) -> list[Gaps]:
    store, plan, newest = snapshot.store, snapshot.plan, snapshot.newest
    published = list(newest.recipes) if newest else []
    # A published layer whose whole folder is gone has gaps too.
    names = list(dict.fromkeys([*snapshot.layers({read_cache_document(store).base, *published}), *published]))
    if layer is not None and layer not in names:
        raise LayerNotFound(store.address, layer, names)
    planned, found = len(plan), []
    for name in [layer] if layer is not None else names:
        table = snapshot.table(name)
        there = snapshot.present_chunks(name, table, plan.revisions(name))
        listed = set(table.chunks.tolist()) - set(outdated_chunks(table, plan.revisions(name)).tolist())
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
                unlisted=tuple(sorted(there - listed)),
            )
        )
    return found


def cache_status(
    snapshot: Snapshot,
    source: Source | None,
    shown_failures: int | None = SHOWN_FAILURES,
    depth: Depth = "chunks",
) -> Status:
    """How far a cache is, by an index that lists all keys; at the depth of the index, no chunk is opened."""
    store, plan, newest = snapshot.store, _checked(snapshot).plan, snapshot.newest
    layers = tuple(_layer_status(snapshot, gaps, depth) for gaps in _gaps(snapshot, None))
    shown_failures = 0 if depth == "index" else shown_failures
    fresh, stale = _freshness(store, source, plan, newest)
    failed = tuple(islice(_failed_samples(store, newest), shown_failures)) if newest else ()
    claims = (one for name in snapshot.layers() for one in read_claims(store, name).items())
    return Status(
        root=store.address,
        generation=newest.number if newest else None,
        complete=bool(layers) and all(map(_is_complete, layers)),
        layers=layers,
        claims=tuple(_claim_status(key, claim) for key, claim in claims if claim.state != "returned"),
        builders=builder_statuses(read_builders(store), {layer.layer: len(layer.missing) for layer in layers}, is_dead),
        failed_samples=failed,
        failed_samples_left_out=sum(layer.failures for layer in layers) - len(failed),
        source_root=str(plan.source.get("root", "")) if plan.segments else "",
        stale=stale,
        grown=fresh.grown if fresh else (),
        source_checked=fresh is not None,
        unreadable=plan.unreadable,
        refreshable=not plan.deduplicates,
        foreign=foreign_files(snapshot),
        planners=planner_statuses(store, len(plan.segments)),
    )


def planned_status(store: Store) -> Status:
    """The status of what is not a cache yet, as it is still planned, or was when its planner died."""
    planners = planner_statuses(store, 0)
    if not planners:
        raise CacheNotFound(store.address)
    return Status(
        root=store.address,
        generation=None,
        complete=False,
        layers=(),
        claims=(),
        builders=(),
        failed_samples=(),
        failed_samples_left_out=0,
        source_root="",
        stale={},
        grown=(),
        source_checked=False,
        source_note="the source was not checked: nothing is planned yet",
        planners=planners,
    )


def planner_statuses(store: Store, planned: int) -> tuple[PlannerStatus, ...]:
    """Those who plan a segment behind the first `planned`; of several that took over from each other, the last."""
    last: dict[int, tuple[int, Claim]] = {}
    for key, claim in read_claims(store, None).items():
        segment, attempt = claimed(key)
        last[segment] = max(last.get(segment, (0, claim)), (attempt, claim), key=lambda one: one[0])
    return tuple(_planner_status(claim) for segment, (_, claim) in sorted(last.items()) if segment >= planned)


def _planner_status(claim: Claim) -> PlannerStatus:
    done, total = (claim.bytes, claim.total_bytes) if claim.total_bytes else (claim.files, claim.total_files)
    return PlannerStatus(
        host=claim.host,
        pid=claim.pid,
        state="abandoned" if is_abandoned(claim) else "working",
        files=claim.files,
        total_files=claim.total_files,
        bytes=claim.bytes,
        total_bytes=claim.total_bytes,
        seconds=claim.seconds,
        eta_seconds=max(0, total - done) * claim.seconds / done if done else None,
    )


def _is_complete(layer: LayerStatus) -> bool:
    return not layer.missing and not layer.unlisted and layer.listed == layer.planned


def _checked(snapshot: Snapshot) -> Snapshot:
    """The snapshot, if its plan has every segment that the newest generation names."""
    if snapshot.newest is not None and len(snapshot.plan.segments) < len(snapshot.newest.plan):
        key = layout.plan_segment(len(snapshot.plan.segments))
        raise IndexCorrupt(snapshot.store.address, key, "it is gone")
    return snapshot


def _layer_status(snapshot: Snapshot, gaps: Gaps, depth: Depth) -> LayerStatus:
    store, table = snapshot.store, snapshot.table(gaps.layer)
    opened = table.records() if depth == "chunks" else []
    return LayerStatus(
        layer=gaps.layer,
        planned=gaps.planned,
        present=gaps.present,
        listed=len(table),
        missing=gaps.missing,
        suspect=tuple(record.chunk for record in opened if _is_suspect(store, gaps.layer, record)),
        lost=tuple(sorted(snapshot.lost_chunks(gaps.layer, table))),
        rows=int(table.rows.sum()),
        samples=int(table.numbers["samples"].sum()),
        failures=int(table.numbers["failures"].sum()),
        reasons=table.reasons(),
        unlisted=gaps.unlisted,
    )


def _is_suspect(store: Store, layer: str, record: ChunkRecord) -> bool:
    """Whether the size or the head of a listed chunk is not what was published; a gap is not suspect."""
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


def builder_statuses(
    beats: Mapping[str, BuilderBeat], missing: Mapping[str, int], is_gone: Callable[[str], bool]
) -> tuple[BuilderStatus, ...]:
    """Builders by their owners, with the time until the missing chunks of their layer are made by all of them."""
    speeds: defaultdict[str, float] = defaultdict(float)
    for owner, beat in beats.items():
        speeds[beat.layer] += 0.0 if is_gone(owner) else beat.chunks_per_second
    return tuple(
        BuilderStatus(
            layer=beat.layer,
            host=beat.host,
            pid=beat.pid,
            state="abandoned" if is_gone(owner) else "working",
            made=beat.made,
            chunks_per_second=beat.chunks_per_second,
            eta_seconds=missing.get(beat.layer, 0) / speeds[beat.layer] if speeds[beat.layer] else None,
            workers=beat.workers,
            cpu_percent=beat.cpu_percent,
            memory_bytes=beat.memory_bytes,
        )
        for owner, beat in sorted(beats.items())
    )


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


def summarize_cache(store: Store, number: int | None = None) -> Summary:
    generation, plan = load_generation(store, number), load_plan(store)
    layers = tuple(_layer_summary(generation, layer) for layer in generation.recipes)
    return Summary(
        root=store.address,
        cache_id=generation.document.cache_id,
        base=generation.base,
        generation=generation.number,
        generations=len(generation_numbers(store)),
        digest=generation.digest,
        planned_chunks=len(plan),
        rows=int(generation.table(generation.base).rows.sum()),
        bytes=sum(layer.bytes for layer in layers),
        source=plan.described,
        source_files=len(plan.files),
        layers=layers,
        versions=tuple(dict(version) for version in generation.versions),
        tagged=generation.tagged,
    )


def _layer_summary(generation: Generation, layer: str) -> LayerSummary:
    recipe, table, sets = generation.recipe(layer), generation.table(layer), generation.versions
    return LayerSummary(
        layer=layer,
        kind=recipe.kind,
        fingerprint=recipe.fingerprint,
        fields=recipe.fields,
        columns=tuple(map(describe_column, layer_columns(recipe.columns, layer == generation.base))),
        chunks=len(table),
        rows=int(table.rows.sum()),
        bytes=int(table.numbers["size"].sum()),
        failures=int(table.numbers["failures"].sum()),
        statistics=table.totals(),
        made_with=tuple(
            MadeWith(
                versions=dict(sets[maker]) if maker >= 0 else {}, count=len(chunks), chunks=ranges(chunks.tolist())
            )
            for maker, chunks in table.by_maker(len(sets)).items()
        ),
    )


def describe_column(column: Column) -> str:
    """
    >>> describe_column(Column(name="tokens", dtype="uint16", shape=(512,), codec="zstd"))
    'tokens: uint16 [512] zstd'
    """
    shape = f" {list(column.shape)}" if column.shape else ""
    ragged = " ragged" if column.ragged else ""
    codec = "" if column.codec == "none" else f" {column.codec}"
    return f"{column.name}: {column.dtype}{shape}{ragged}{codec}"
