"""What a build ends with: its report, or the error that says what is missing."""

import time
from collections.abc import Mapping

from forebay.building.chunk_maker import ChunkJob
from forebay.building.queue import ChunkQueue
from forebay.building.run import BuildRun
from forebay.building.segments import all_failed, nothing_to_build
from forebay.building.writer import CacheWriter
from forebay.cache.catalog import open_chunk
from forebay.cache.publish import OverLimit, Publisher
from forebay.cache.reports import BuildReport
from forebay.errors import (
    BuildFailed,
    TooManyFailures,
)
from forebay.failure_reasons import Reasons
from forebay.format.chunk import ChunkRecord
from forebay.format.generation import ChunkTable
from forebay.recipe import fields_of, hooks_of
from forebay.store.base import Store

RETRY_HINT = "run the same command again to retry; all others are kept"


def limit_hint(root: str, segment: int) -> str:
    """What to do about a segment over its limit."""
    ways = "fix the cause and run the same command again, or raise --max-failures"
    return f"{ways}, or give the segment up with `forebay clean {root} --unpublished`" if segment else ways


def build_failed(root: str, failed: Mapping[int, str], hint: str = RETRY_HINT) -> BuildFailed:
    shown = "; ".join(f"chunk {chunk}: {reason}" for chunk, reason in list(failed.items())[:3])
    more = f" (and {len(failed) - 3} more)" if len(failed) > 3 else ""
    return BuildFailed(
        f"{len(failed)} chunk(s) of '{root}' could not be built: {shown}{more}",
        hint=hint,
        root=root,
        failed=dict(failed),
    )


def too_many_failures(store: Store, folder: str, over: OverLimit, made: Mapping[int, ChunkRecord]) -> TooManyFailures:
    """The error for a segment over its limit: its chunks are kept, and the next build tries again."""
    root, records = store.address, (made[chunk] for chunk in over.chunks if chunk in made)
    failed = next((record for record in records if record.failures), None)
    reasons = ", ".join(f"{count:,} x {reason}" for reason, count in list(over.reasons.items())[:3])
    advice = ""
    if failed is not None:
        failures = Reasons(open_chunk(store, folder, failed).failures())
        reasons, advice = f"{reasons}, e.g. {failures.most_frequent()[-1]}", f"; {failures.advice()}"
    return TooManyFailures(
        f"{over.failures:,} of {over.samples:,} samples of segment {over.segment} failed ({reasons});"
        f" {over.limit:,.0f} may fail{advice}; its {len(over.chunks):,} new chunk(s) are kept and not published",
        hint=limit_hint(root, over.segment),
        root=root,
        failures=over.failures,
        samples=over.samples,
        limit=over.limit,
        reasons=dict(over.reasons),
    )


def build_report(
    cache: CacheWriter, job: ChunkJob, run: BuildRun, queue: ChunkQueue, publisher: Publisher, table: ChunkTable
) -> BuildReport:
    newest = publisher.newest
    totals, recipe, seconds = table.summary(), job.recipe, time.monotonic() - run.started
    cache.clock.add("publishing", publisher.seconds)
    counts = {"chunks": totals.chunks, "rows": totals.rows, "bytes": totals.size}
    notes = [*cache.notes, *run.warnings]
    if queue.elsewhere:
        notes.append(f"other builders are making and will publish {len(queue.elsewhere):,} chunk(s)")
    if publisher.withdrawn:
        notes.append(f"{len(publisher.withdrawn):,} chunk(s) were withdrawn meanwhile and are not listed")
    return BuildReport(
        root=cache.store.address,
        layer=job.layer,
        chunks=run.total,
        made=run.made,
        present=run.present + len(run.adopted) + queue.listed_elsewhere + len(queue.elsewhere),
        failed=dict(queue.failed),
        rows=totals.rows,
        failures=totals.failures,
        samples=totals.samples,
        written_bytes=run.written_bytes,
        seconds=seconds,
        generation=None if newest is None else newest.number,
        deaths=tuple(run.deaths),
        notes=tuple(notes),
        made_statistics=dict(run.sums),
        statistics=dict(totals.statistics),
        figures=hooks_of(recipe).figures(fields_of(recipe), totals.statistics, counts) if totals.chunks else {},
        reasons=dict(run.reasons.most_common()),
        made_rows=run.rows,
        made_failures=run.failures,
        phases=dict(cache.clock.seconds),
        adopted=len(run.adopted),
        made_elsewhere=queue.listed_elsewhere + len(queue.elsewhere),
        layer_reasons=dict(totals.reasons),
        tokens_per_second=run.sums["tokens"] / max(seconds, 1e-9) if run.sums["tokens"] else None,
    )


def check_something_made(store: Store, folder: str, table: ChunkTable) -> None:
    """Raise if a base layer has no row."""
    samples, failures = (int(table.numbers[name].sum()) for name in ("samples", "failures"))
    if int(table.rows.sum()):
        return
    if not samples:
        raise nothing_to_build(store.address, "the source has no samples")
    if not failures:
        raise nothing_to_build(store.address, f"the recipe made no row of {samples:,} sample(s)")
    reasons = Reasons(one for record in table.records() for one in open_chunk(store, folder, record).failures())
    raise all_failed(store.address, failures, *reasons.most_frequent(), hint=reasons.advice())
