"""Progress and contents of a cache."""

from collections import defaultdict
from collections.abc import Callable, Iterator, Mapping, Sequence
from itertools import islice
from typing import Literal

import numpy as np

from forebay.cache.catalog import generation_numbers, layer_columns, load_generation, open_chunk, read_cache_document
from forebay.cache.claims import Claim, read_claims
from forebay.cache.heartbeat import BuilderBeat, is_dead, read_builders
from forebay.cache.plan import load_plan
from forebay.cache.reports import (
    BuilderStatus,
    ClaimStatus,
    FailedSample,
    LayerStatus,
    LayerSummary,
    MadeWith,
    Status,
    Summary,
)
from forebay.cache.source_check import Freshness
from forebay.cache.state import Index, numbers
from forebay.cache.verify import compare_source, foreign_files
from forebay.columns import Column
from forebay.errors import CacheNotFound, ChunkMissing, Damaged
from forebay.format import layout
from forebay.format.chunk import ChunkRecord
from forebay.format.generation import Generation
from forebay.records import ranges
from forebay.source import Source
from forebay.store.base import Store

SHOWN_FAILURES = 20
PAUSE = 20  # times the usual step between two chunks: nobody was building
Depth = Literal["index", "chunks"]


def cache_status(
    index: Index, source: Source | None, shown_failures: int | None = SHOWN_FAILURES, depth: Depth = "chunks"
) -> Status:
    """The status of a cache; with depth `index`, no chunk is opened."""
    store, plan, newest = index.store, index.plan, index.newest
    layers = tuple(_layer_status(index, layer, depth) for layer in index.layers)
    failed = () if depth == "index" else tuple(islice(_failed_samples(index), shown_failures))
    fresh = compare_source(index, source) if plan.segments or source is None else Freshness()
    claims, beats = read_claims(store), read_builders(store)
    return Status(
        root=store.address,
        generation=newest.number if newest is not None else None,
        complete=bool(layers) and bool(plan.segments) and all(_is_complete(layer) for layer in layers),
        layers=layers,
        claims=tuple(_claim_status(*of, claim) for key, claim in claims.items() if (of := layout.parse_claim(key))),
        builders=builder_statuses(beats, {layer.layer: len(layer.missing) for layer in layers}, is_dead),
        failed_samples=failed,
        failed_samples_left_out=sum(layer.failures for layer in layers) - len(failed),
        source_root=str(plan.source.get("root", "")) if plan.segments else "",
        stale=fresh.stale if fresh is not None else {},
        grown=fresh.grown if fresh is not None else (),
        source_checked=fresh is not None,
        foreign=foreign_files(index),
        reusable=not plan.deduplicates,
    )


def check_begun(store: Store) -> None:
    """Raise if there is no cache and no builder that plans one or was killed while it did."""
    try:
        read_cache_document(store)
    except CacheNotFound:
        if not read_builders(store):
            raise


def _is_complete(layer: LayerStatus) -> bool:
    return not layer.missing and not layer.unlisted and not layer.lost


def _layer_status(index: Index, layer: str, depth: Depth) -> LayerStatus:
    state, table, folder = index.state(layer), index.table(layer), index.folder(layer) or ""
    opened = table.records() if depth == "chunks" else []
    recipe, missing = index.recipe(layer), tuple(numbers(index.plan.planned & ~state.listed & ~state.file))
    return LayerStatus(
        layer=layer,
        kind=recipe.kind if recipe is not None else "",
        planned=int(index.plan.planned.sum()),
        present=int((index.plan.planned & state.file).sum()),
        listed=len(table),
        missing=missing,
        suspect=tuple(record.chunk for record in opened if _is_suspect(index.store, folder, record)),
        lost=tuple(numbers(state.lost)),
        rows=int(table.rows.sum()),
        samples=int(table.numbers["samples"].sum()),
        failures=int(table.numbers["failures"].sum()),
        reasons=table.reasons(),
        unlisted=tuple(numbers(index.plan.planned & ~state.listed & state.file)),
        missing_bytes=int(table.numbers["size"].mean() * len(missing)) if missing and len(table) else None,
        missing_seconds=_seconds_left(index.store, folder, len(missing)) if missing and depth == "chunks" else None,
    )


def _seconds_left(store: Store, folder: str, missing: int) -> float | None:
    """How long missing chunks take at the pace at which the files of a layer were written; None if it is unknown."""
    pace = chunk_seconds([entry.written for entry in store.entries(folder) if entry.written is not None])
    return None if pace is None else pace * missing


def chunk_seconds(written: Sequence[float]) -> float | None:
    """The seconds between two chunks, by the times of their files, without the pauses between builds.

    >>> chunk_seconds([100.0, 102.0, 104.0, 5000.0, 5002.0]), chunk_seconds([7.0])
    (2.0, None)
    """
    steps = np.diff(np.sort(np.array(written, np.float64)))
    steps = steps[steps <= PAUSE * np.median(steps)] if len(steps) else steps
    return float(steps.mean()) if len(steps) > 1 else None


def _is_suspect(store: Store, folder: str, record: ChunkRecord) -> bool:
    """True if the size or the head of a listed chunk is not what was published; a lost chunk is not suspect."""
    try:
        open_chunk(store, folder, record)
    except ChunkMissing:
        return False
    except Damaged:
        return True
    return False


def _failed_samples(index: Index) -> Iterator[FailedSample]:
    for layer in index.layers:
        table, folder = index.table(layer), index.folder(layer) or ""
        for position in (table.numbers["failures"] > 0).nonzero()[0].tolist():
            record = table.record(position)
            try:
                failures = open_chunk(index.store, folder, record).failures()
            except Damaged:
                continue  # the chunk is listed as suspect
            for one in failures:
                yield FailedSample(
                    layer=layer, chunk=record.chunk, sample=one.sample, reason=one.reason, detail=one.detail
                )


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
            phase=beat.phase,
            done=beat.done,
            total=beat.total,
            built=beat.built,
            chunks_per_second=beat.chunks_per_second,
            eta_seconds=missing.get(beat.layer, 0) / speeds[beat.layer] if speeds[beat.layer] else None,
            workers=beat.workers,
            cpu_percent=beat.cpu_percent,
            memory_bytes=beat.memory_bytes,
        )
        for owner, beat in sorted(beats.items())
    )


def _claim_status(folder: str, chunk: int, claim: Claim) -> ClaimStatus:
    return ClaimStatus(
        layer=layout.layer_of(folder),
        chunk=chunk,
        host=claim.host,
        pid=claim.pid,
        state="abandoned" if is_dead(claim.owner) else "working",
    )


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
