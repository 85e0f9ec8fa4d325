"""Make missing chunks and publish: the loop that every writing verb ends in.

build, update, repair ─▶ CacheWriter ─▶ job ─▶ make: claim ─▶ engine ─▶ publish ─▶ BuildReport
"""

import zlib
from collections.abc import Iterator, Sequence
from contextlib import contextmanager, suppress

import msgspec

from forebay.building.chunk_maker import ChunkJob, MadeChunk
from forebay.building.layers import released
from forebay.building.outcome import build_failed, build_report, check_something_made, too_many_failures
from forebay.building.queue import ChunkQueue
from forebay.building.run import BuildRun, Notices
from forebay.building.task import BuildTask
from forebay.building.writer import CacheWriter
from forebay.cache.publish import Publication, Publisher, builder_versions, differing_versions
from forebay.cache.reports import BuildReport
from forebay.cache.source_check import source_changed
from forebay.cache.state import LayerState, numbers
from forebay.engine.base import Died, Done, Event, Failed, MemoryGovernor
from forebay.errors import (
    BuildFailed,
    BuildStopped,
    ForebayError,
)
from forebay.format import layout
from forebay.format.generation import ChunkTable
from forebay.recipe import versions_of
from forebay.source import CHANGED_MEANWHILE
from forebay.store.base import Store, disk_full, is_full, is_url, naming_full_disk
from forebay.store.owners import this_process

TICK_SECONDS = 0.5
BIRTHS = 10  # workers in a row that end before they begin, once chunks were made; three before
HOPELESS = 20  # chunks that failed with none made, or most of whose samples failed, end a build


def make(cache: CacheWriter, job: ChunkJob, wanted: Sequence[int]) -> BuildReport:
    """Make the wanted chunks that are not listed, then publish. Every writing verb ends here."""
    work = Work(cache, job, wanted)
    with naming_full_disk(cache.store, work.needed_bytes), released(job.recipe) as notes:
        try:
            with work.publisher, cache.clock.during("making"):
                if not work.queue.is_empty:
                    with work.running():
                        while not work.queue.is_empty:
                            work.step()
                work.confirm_sources()
        except KeyboardInterrupt as error:
            raise BuildStopped(cache.store.address, work.run.present + work.listed, work.run.total) from error
        finally:
            work.release()
    cache.notes += notes
    return work.report()


class Work:
    """One run of `make`: queue, publisher, engine and counts."""

    def __init__(self, cache: CacheWriter, job: ChunkJob, wanted: Sequence[int]) -> None:
        self.cache, self.job, self.wanted = cache, job, list(wanted)
        index = cache.index
        self._state: LayerState = index.state(job.layer)
        self._plan = index.plan
        todo = self.wanted if job.repairs else [chunk for chunk in self.wanted if self._state.todo[chunk]]
        versions = builder_versions(versions_of(job.recipe))
        about = Publication(
            layer=job.layer,
            fingerprint=job.fingerprint,
            plan=self._plan,
            versions=versions,
            max_failures=cache.options.max_failures,
            checks_failures=not job.repairs,
            replaced={chunk: record.sha256 for chunk, record in job.repairs.items()},
        )
        self.publisher = Publisher(cache.store, cache.claims, about, index.newest)
        streams = self._plan.streams() if job.source is not None else {}
        order = from_own_place(cache.store, todo)
        is_listed = (lambda chunk: False) if job.repairs else self.publisher.lists
        self.queue = ChunkQueue(order, streams, job.folder, cache.claims, is_listed)
        self._bytes_per_unit = self._plan.bytes_per_unit
        self.run = BuildRun(
            total=len(self.wanted),
            present=len(self.wanted) - len(todo),
            source_bytes=int(self._bytes_per_unit * sum(map(self._weight, todo))),
            downloads=job.source is not None and (job.source.remote or is_url(str(self._plan.source.get("root", "")))),
            memory_limit=cache.options.memory_limit,
        )
        self._notices = Notices()
        weights = self._plan.weights
        heaviest = int(weights[todo].max()) if todo and job.source is not None else 0
        options = cache.options
        self._governor = MemoryGovernor(options.memory_limit, options.slots(cache.engine), heaviest)
        self._todo = todo
        if index.newest is not None and todo and (other := differing_versions(index.newest.versions, versions)):
            self.run.note = f"chunks are made with other library versions than those that exist: {other}"
            self.run.warnings.append(self.run.note)

    @property
    def listed(self) -> int:
        return len(self.run.records)

    @contextmanager
    def running(self) -> Iterator[None]:
        """Start workers; they are gone at the end."""
        cache, engine = self.cache, self.cache.engine
        cache.start()
        cache.heartbeat.layer = self.job.layer
        self._start_engine()
        try:
            self._governor.check_before(engine)
            yield
        except OSError as error:
            if is_full(error):  # no room even for a claim or a generation
                raise disk_full(cache.store.address, self.needed_bytes(), cache.store.free_bytes() or 0) from error
            raise
        finally:
            engine.stop()

    def _start_engine(self) -> None:
        options, engine = self.cache.options, self.cache.engine
        slots = 1 if options.memory_limit else min(options.slots(engine), max(1, self.queue.left))
        engine.start(BuildTask(self.job), slots)

    def step(self) -> None:
        """Hand out chunks, take what came back, publish if it is time."""
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
            self._take(event)
        self._governor.steer(engine, queue.left)
        if not queue.left:
            queue.look_at_held()
            self._warn(self._governor.warning(engine))
        if self.cache.heartbeat.take_silence():
            self._drop_lost_claims()
        self.run.note = self.run.note or self._notices.look(queue.running, engine, is_starting)
        self.publisher.publish_if_due()
        self.cache.heartbeat.made = self.run.made
        self.cache.show(self.run.progress(self.job.recipe, queue, engine))

    def _take(self, event: Event) -> None:
        weight = 0 if event.chunk is None else self._weight(event.chunk)
        self._governor.take(event, weight)
        match event:
            case Done():
                self.cache.clock.add("writing", event.writing_seconds)
                made = msgspec.convert(event.record, MadeChunk)
                self.queue.done(event.chunk)
                self.run.add(made.record, made.adopted)
                self.run.read_bytes += weight * self._bytes_per_unit
                self.publisher.add(made.record, waits=self._waits(event.chunk))
                if len(self.run.records) == HOPELESS:
                    self._check_hopeless()
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
        self.run.note = next(reversed(self.queue.failed.values()), "") if isinstance(event, Failed) else self.run.note
        if len(self.queue.failed) >= HOPELESS and not self.run.records:
            raise build_failed(self.cache.store.address, self.queue.failed)

    def _check_hopeless(self) -> None:
        """Stop early if most samples fail: the limit is exact only after the last chunk."""
        records = self.run.records.values()
        if 2 * sum(record.failures for record in records) > sum(record.samples for record in records):
            self.publisher.publish()
            self._check_limit()

    def _check_limit(self) -> None:
        """Raise if a segment stayed unpublished because of its failures."""
        if over := self.publisher.over_limit:
            raise too_many_failures(self.cache.store, self.job.folder, over[0], self.run.records)

    def _take_death(self, died: Died) -> None:
        self._warn_death(died)
        self.queue.requeue(died.lost)
        if died.chunk is not None:
            self.queue.retry(died.chunk, f"a worker was lost: {died.reason}")
        if not died.began:
            self.run.births_failed += 1
            if self.run.births_failed >= (BIRTHS if self.run.records else 3):
                raise BuildFailed(
                    f"workers for '{self.cache.store.address}' exit during start-up ({died.reason})",
                    hint="see their output above, or build with --workers 0 to see the cause here",
                )

    def _warn_death(self, died: Died) -> None:
        if died.began:
            doing = "" if died.chunk is None else f" while making chunk {died.chunk}"
            self.run.deaths.append(f"{died.worker} {died.reason}{doing}")
            self.run.note = self.run.deaths[-1]

    def _take_moved(self, failed: Failed) -> None:
        """A source file changed while it was read: go on if its planned ranges have not changed."""
        if self.job.repairs:
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

    def _weight(self, chunk: int) -> int:
        return int(self._plan.weights[chunk]) if self.job.source is not None else 0

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
        """What is still to be written, estimated from what was, or from the source."""
        left = [chunk for chunk in self._todo if chunk not in self.run.records]
        if self.run.records:
            return len(left) * self.run.written_bytes // len(self.run.records)
        return sum(map(self._weight, left))

    def report(self) -> BuildReport:
        """What was done; raises if wanted chunks are missing, lost or over the failure limit."""
        newest = self.publisher.newest
        table = newest.table(self.job.layer) if newest is not None else ChunkTable.of([])
        report = build_report(self.cache, self.job, self.run, self.queue, self.publisher, table)
        self._check_failed(table)
        if self.job.source is not None and len(table) == int(self._state.planned.sum()):
            check_something_made(self.cache.store, self.job.folder, table)
        return report

    def _check_failed(self, table: ChunkTable) -> None:
        root = self.cache.store.address
        self._check_limit()
        if self.queue.failed:
            raise build_failed(root, self.queue.failed)
        if not self.job.repairs and (lost := numbers(self._state.lost)):
            chunks = [chunk for chunk in lost if chunk in set(self.wanted)] or lost
            raise build_failed(root, dict.fromkeys(chunks, "its file is gone"), hint=f"run `forebay repair {root}`")
        if self.job.source is not None and not int(table.rows.sum()) and self.run.records:
            check_something_made(self.cache.store, self.job.folder, ChunkTable.of(self.run.records.values()))


def from_own_place(store: Store, chunks: Sequence[int]) -> list[int]:
    """Chunks in the order in which this builder makes them.

    In a bucket, where requests are billed, builders begin at different chunks: one that another builder claimed first
    is a wasted request.
    """
    share = 0.0 if store.local_path("") is not None else zlib.crc32(str(this_process()).encode()) / 2**32
    at = int(share * len(chunks))
    return [*chunks[at:], *chunks[:at]]
