"""Make missing chunks and publish: the loop that every writing verb ends in.

build, update, repair ─▶ CacheWriter ─▶ job ─▶ make: claim ─▶ engine ─▶ publish ─▶ BuildReport
"""

import time
import zlib
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager, suppress

import msgspec

from forebay.building.chunk_maker import ChunkJob, MadeChunk
from forebay.building.layers import released
from forebay.building.queue import ChunkQueue
from forebay.building.run import BuildRun
from forebay.building.segments import nothing_to_build
from forebay.building.task import BuildTask
from forebay.building.writer import CacheWriter
from forebay.cache.catalog import open_chunk
from forebay.cache.publish import OverLimit, Publication, Publisher, builder_versions, differing_versions
from forebay.cache.reports import BuildReport
from forebay.cache.source_check import source_changed
from forebay.cache.state import numbers
from forebay.engine.base import Died, Done, Event, Failed, MemoryGovernor
from forebay.errors import BuildFailed, BuildStopped, ForebayError, TooManyFailures
from forebay.failure_reasons import Reasons
from forebay.format import layout
from forebay.format.chunk import ChunkRecord
from forebay.format.generation import ChunkTable
from forebay.recipe import fields_of, hooks_of
from forebay.source import CHANGED_MEANWHILE
from forebay.store.base import Store, disk_full, is_url, naming_full_disk
from forebay.store.owners import this_process

TICK_SECONDS = 0.5
BIRTHS = 3  # workers in a row that end before they begin
HOPELESS = 20  # chunks that failed with none made end a build
RETRY_HINT = "run the same command again to retry; all others are kept"


def make(cache: CacheWriter, job: ChunkJob, wanted: Sequence[int]) -> BuildReport:
    """Make the wanted chunks that are not listed, then publish. Every writing verb ends here."""
    work = Work(cache, job, wanted)
    with naming_full_disk(cache.store, work.needed_bytes), released(job.recipe) as notes:
        try:
            with work.publisher:
                if not work.queue.is_empty:
                    with work.running():
                        while not work.queue.is_empty:
                            work.step()
                work.confirm_sources()
        except KeyboardInterrupt as error:
            raise BuildStopped(cache.store.address, work.run.present + len(work.run.records), len(wanted)) from error
        finally:
            work.release()
    cache.notes += notes
    return work.report()


class Work:
    """One run of `make`: queue, publisher, engine and counts."""

    def __init__(self, cache: CacheWriter, job: ChunkJob, wanted: Sequence[int]) -> None:
        self.cache, self.job, self.wanted = cache, job, wanted
        self._plan, self._state = cache.index.plan, cache.index.state(job.layer)
        self._todo = [chunk for chunk in wanted if chunk in job.repairs or self._state.todo[chunk]]
        self._weights = self._plan.weights if job.source is not None else [0] * len(self._plan)
        self._bytes_per_unit = self._plan.bytes_per_unit
        weights = [int(self._weights[chunk]) for chunk in self._todo]
        self.run = BuildRun(
            total=len(wanted),
            present=len(wanted) - len(self._todo),
            source_bytes=int(self._bytes_per_unit * sum(weights)),
            downloads=job.source is not None and (job.source.remote or is_url(str(self._plan.source.get("root", "")))),
            memory_limit=cache.options.memory_limit,
        )
        self.publisher = self._publisher()
        streams = self._plan.streams() if job.source is not None else {}
        order = from_own_start(cache.store, self._todo)
        self.queue = ChunkQueue(order, streams, job.folder, cache.claims, self._is_listed)
        slots = cache.options.slots(cache.engine)
        self._governor = MemoryGovernor(cache.options.memory_limit, slots, max(weights, default=0))

    def _publisher(self) -> Publisher:
        cache, job = self.cache, self.job
        versions, newest = builder_versions(hooks_of(job.recipe).versions()), cache.index.newest
        if newest is not None and self._todo and (other := differing_versions(newest.versions, versions)):
            self._warn(f"chunks are made with other library versions than those that exist: {other}")
        about = Publication(
            layer=job.layer,
            fingerprint=job.fingerprint,
            plan=self._plan,
            versions=versions,
            max_failures=cache.options.max_failures,
            checks_failures=not cache.is_repair,
            replaced={chunk: record.sha256 for chunk, record in job.repairs.items()},
        )
        return Publisher(cache.store, cache.claims, about, newest)

    def _is_listed(self, chunk: int) -> bool:
        return chunk not in self.job.repairs and self.publisher.lists(chunk)

    @contextmanager
    def running(self) -> Iterator[None]:
        """Start workers; they are gone at the end."""
        self.cache.start()
        self.cache.heartbeat.layer = self.job.layer
        self._start_engine()
        try:
            self._governor.check_before(self.cache.engine)
            yield
        finally:
            self.cache.engine.stop()

    def _start_engine(self) -> None:
        options, engine = self.cache.options, self.cache.engine
        slots = 1 if options.memory_limit else min(options.slots(engine), max(1, self.queue.left))
        engine.start(BuildTask(self.job), slots)

    def step(self) -> None:
        """Submit chunks, collect results, and publish if it is time."""
        engine, queue = self.cache.engine, self.queue
        idle = engine.idle()
        slots = {*idle, *queue.running.values()}
        for slot in idle:
            if (chunk := queue.claim_next(slot, slots)) is not None:
                engine.submit(slot, chunk)
        is_starting = not idle and queue.left > len(queue.running)
        if queue.is_empty:
            return
        for event in engine.poll(TICK_SECONDS):
            self._governor.take(event, 0 if event.chunk is None else int(self._weights[event.chunk]))
            self._take(event)
        self._governor.steer(engine, queue.left)
        if not queue.left:
            queue.look_at_held()
            self._warn(self._governor.warning(engine))
        if self.cache.heartbeat.take_silence():
            self._drop_lost_claims()
        self.run.note_stall(engine, is_working=bool(queue.running) or not is_starting)
        self.publisher.publish_if_due()
        self.cache.heartbeat.built = self.run.built
        self.cache.show(self.run.progress(self.job.recipe, queue, engine))

    def _take(self, event: Event) -> None:
        match event:
            case Done():
                self._take_made(event)
            case Died():
                self._take_death(event)
            case Failed(kind="disk-full"):
                store = self.cache.store
                raise disk_full(store.address, self.needed_bytes(), store.free_bytes() or 0)
            case Failed(kind="source-changed"):
                self._take_moved(event)
            case Failed(kind="io"):
                self.queue.retry(event.chunk, event.reason)
            case Failed():
                self.queue.give_up(event.chunk, event.reason)
        if isinstance(event, Failed):
            self.run.note = next(reversed(self.queue.failed.values()), "")
        if len(self.queue.failed) >= HOPELESS and not self.run.records:
            raise build_failed(self.cache.store.address, self.queue.failed)

    def _take_made(self, event: Done) -> None:
        chunk = msgspec.convert(event.record, MadeChunk)
        self.queue.done(event.chunk)
        self.run.add(chunk.record, chunk.adopted)
        self.run.read_bytes += self._weights[event.chunk] * self._bytes_per_unit
        self.publisher.add(chunk.record, waits=self._waits(event.chunk))

    def _take_death(self, died: Died) -> None:
        if died.began:
            doing = "" if died.chunk is None else f" while making chunk {died.chunk}"
            self.run.note = f"{died.worker} {died.reason}{doing}"
            self.run.deaths.append(self.run.note)
        else:
            self.run.births_failed += 1
        self.queue.requeue(died.lost)
        if died.chunk is not None:
            self.queue.retry(died.chunk, f"a worker was lost: {died.reason}")
        if self.run.births_failed >= BIRTHS:
            raise BuildFailed(
                f"workers for '{self.cache.store.address}' exit during start-up ({died.reason})",
                hint="see their output above, or build with --workers 0 to see the cause here",
            )

    def _take_moved(self, failed: Failed) -> None:
        """A source file changed while it was read: go on if its planned ranges have not changed."""
        if self.cache.is_repair:
            self.queue.give_up(failed.chunk, failed.reason)
            return
        if set(failed.files.values()) != {CHANGED_MEANWHILE}:
            raise source_changed(self.cache.store.address, self._plan, failed.files)
        self.job = self.cache.recheck(self.job, list(failed.files), self.run.records)
        self.cache.engine.stop()
        self.queue.retry_moved(failed.chunk, failed.reason)
        self.queue.requeue(self.queue.running)
        self._start_engine()

    def _waits(self, chunk: int) -> bool:
        """True if a source file of a chunk looks different from when it was planned."""
        now = self.job.now
        return bool(now) and any(part.file.path in now for part in self._plan.parts(chunk))

    def _warn(self, warning: str) -> None:
        if warning:
            self.run.note = warning
            self.run.warnings.append(warning)

    def _drop_lost_claims(self) -> None:
        """This process did not run for a while: others may have taken over its claims, and list these chunks."""
        claims, folder = self.cache.claims, self.job.folder
        lost = [chunk for chunk in self.run.records if self.publisher.holds_back(chunk)]
        self.publisher.discard(chunk for chunk in lost if not claims.is_mine(layout.claim(folder, chunk)))

    def confirm_sources(self) -> None:
        """Raise if files of chunks that were made here do not have the planned content now.

        Another builder may have made other chunks from the new content. Chunks of files that looked different when they
        were read are listed only after this.
        """
        changed = self.cache.changed_since(self.job, self.run.records)
        if changed:
            self.publisher.discard(list(self.publisher.waiting))
            raise source_changed(self.cache.store.address, self._plan, changed)
        self.publisher.confirm()

    def release(self) -> None:
        """Release the claims on chunks that are not listed."""
        with suppress(OSError, ForebayError):
            for chunk in self._todo:
                self.cache.claims.release(layout.claim(self.job.folder, chunk))
        with suppress(OSError):
            for leftover in self.cache.store.leftovers():
                self.cache.store.delete(leftover.key)

    def needed_bytes(self) -> int:
        """Estimate the bytes still to write, from those written so far or from the source."""
        left = [chunk for chunk in self._todo if chunk not in self.run.records]
        if self.run.records:
            return len(left) * self.run.written_bytes // len(self.run.records)
        return sum(int(self._weights[chunk]) for chunk in left)

    def report(self) -> BuildReport:
        """The build report; raises if requested chunks are missing, lost or over the failure limit."""
        newest, store, folder = self.publisher.newest, self.cache.store, self.job.folder
        table = newest.table(self.job.layer) if newest is not None else ChunkTable.of([])
        report = self._report(table)
        if over := self.publisher.over_limit:
            raise too_many_failures(store, folder, over[0], self.run.records)
        if self.queue.failed:
            raise build_failed(store.address, self.queue.failed)
        if not self.cache.is_repair and (lost := numbers(self._state.lost)):
            chunks = [chunk for chunk in lost if chunk in set(self.wanted)] or lost
            hint = f"run `forebay repair {store.address}`"
            raise build_failed(store.address, dict.fromkeys(chunks, "its file is gone"), hint=hint)
        if self.job.source is not None and newest is None and self.run.records:
            raise self._without_rows()
        return report

    def _without_rows(self) -> BuildFailed:
        """The error of a build whose chunks have no row."""
        store, folder, records = self.cache.store, self.job.folder, self.run.records.values()
        problem = f"the recipe made no row of {sum(record.samples for record in records):,} sample(s)"
        reasons = Reasons(one for record in records for one in open_chunk(store, folder, record).failures())
        if not reasons:
            return nothing_to_build(store.address, problem)
        reason, count, example = reasons.most_frequent()
        return nothing_to_build(store.address, f"{problem} ({count:,} × {reason}, e.g. {example})", reasons.advice())

    def _notes(self) -> Iterator[str]:
        if elsewhere := len(self.queue.elsewhere):
            yield f"other builders are making and will publish {elsewhere:,} chunk(s)"
        if withdrawn := len(self.publisher.withdrawn):
            yield f"{withdrawn:,} chunk(s) were withdrawn meanwhile and are not listed"

    def _report(self, table: ChunkTable) -> BuildReport:
        run, queue, recipe, totals = self.run, self.queue, self.job.recipe, table.summary()
        seconds, newest = time.monotonic() - run.started, self.publisher.newest
        counts = {"chunks": totals.chunks, "rows": totals.rows, "bytes": totals.size}
        return BuildReport(
            root=self.cache.store.address,
            layer=self.job.layer,
            chunks=run.total,
            built=run.built,
            present=run.present + len(run.adopted) + queue.listed_elsewhere + len(queue.elsewhere),
            failed=dict(queue.failed),
            rows=totals.rows,
            failures=totals.failures,
            samples=totals.samples,
            written_bytes=run.written_bytes,
            seconds=seconds,
            generation=None if newest is None else newest.number,
            deaths=tuple(run.deaths),
            notes=(*self.cache.notes, *run.warnings, *self._notes()),
            built_statistics=dict(run.sums),
            statistics=dict(totals.statistics),
            figures=hooks_of(recipe).figures(fields_of(recipe), totals.statistics, counts) if totals.chunks else {},
            reasons=dict(run.reasons.most_common()),
            built_rows=run.rows,
            built_failures=run.failures,
            adopted=len(run.adopted),
            built_elsewhere=queue.listed_elsewhere + len(queue.elsewhere),
            layer_reasons=dict(totals.reasons),
            tokens_per_second=run.sums["tokens"] / max(seconds, 1e-9) if run.sums["tokens"] else None,
        )


def from_own_start(store: Store, chunks: Sequence[int]) -> list[int]:
    """Chunks in the order in which this builder makes them.

    In a bucket, where requests are billed, builders begin at different chunks: one that another builder claimed first
    is a wasted request.
    """
    share = 0.0 if store.local_path("") is not None else zlib.crc32(str(this_process()).encode()) / 2**32
    at = int(share * len(chunks))
    return [*chunks[at:], *chunks[:at]]


def limit_hint(root: str, segment: int) -> str:
    """A hint for a segment over its failure limit."""
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


def too_many_failures(store: Store, folder: str, over: OverLimit, built: Mapping[int, ChunkRecord]) -> TooManyFailures:
    """The error for a segment over its limit: its chunks are kept, and the next build tries again."""
    root, records = store.address, (built[chunk] for chunk in over.chunks if chunk in built)
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
