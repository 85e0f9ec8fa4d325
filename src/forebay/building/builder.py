"""Retrying what a disk or a network file system refuses for a moment, in the builder's own thread."""

import errno
import time
from collections import Counter
from collections.abc import Callable, Mapping, Sequence
from contextlib import suppress
from dataclasses import dataclass, field
from functools import partial
from typing import TypeVar

from forebay.building.chunk_maker import BuildJob, Job, has_file
from forebay.building.failures import check_failures
from forebay.building.scheduler import Answer, MemoryGovernor, Schedule
from forebay.cache.catalog import UNPUBLISHED, generation_numbers, load_generation, sound_record
from forebay.cache.claims import LEASE_SECONDS, Claims, Heartbeat
from forebay.cache.publish import publish
from forebay.cache.records import Progress
from forebay.engine.base import Crew, Died, Engine, Event, Lost, Made, Refused
from forebay.errors import BuildFailed, BuildStopped, ChunkFailed, DiskFull, ForebayError, SourceChanged, WorkersFailed
from forebay.format import layout
from forebay.format.chunk import ChunkRecord
from forebay.store.base import Store, is_full

PAUSES = (0.05, 0.2, 0.8, 2.0)  # seconds, one after the other
TRANSIENT = frozenset({errno.ESTALE, errno.EIO, errno.EBUSY, errno.EINTR, errno.EAGAIN, errno.ETIMEDOUT})
T = TypeVar("T")


def with_retries(action: Callable[[], T]) -> T:
    """What an action returns; an I/O error that may pass is waited for, a few seconds in all, before it is raised."""
    for pause in PAUSES:
        try:
            return action()
        except OSError as error:
            if error.errno not in TRANSIENT:
                raise
            time.sleep(pause)
    return action()


TRIES = 3
BIRTHS = 10  # workers in a row that end before they begin, once chunks were made
HOPELESS = 20  # failed chunks, with none made, that end a build
JUDGED_CHUNKS = 0.1  # the share of chunks that must be made before a share of failures is judged by them
TICK_SECONDS = 0.5
PUBLISH_SECONDS = 60.0
SLOW_SECONDS = 120.0  # on one chunk, until a notice says so
OnProgress = Callable[[Progress], None]
Weigh = Callable[[int], int]  # what a chunk takes from the source


@dataclass(frozen=True, slots=True, kw_only=True)
class BuildOptions:
    """How to run a build; nothing of it changes a byte."""

    workers: int
    host: str
    versions: Mapping[str, str]
    memory_limit: int | None = None
    max_failures: int | float | None = None  # a count, or a share below 1
    lease_seconds: float = LEASE_SECONDS
    publish_seconds: float = PUBLISH_SECONDS
    planned: tuple[str, ...] = ()  # the digests of the plan that the caller wrote or compared with the source
    on_progress: OnProgress = lambda progress: None


@dataclass(slots=True)
class BuildProgress:
    """What happened so far."""

    total: int
    present: int = 0
    records: dict[int, ChunkRecord] = field(default_factory=dict)
    failed: dict[int, str] = field(default_factory=dict)
    deaths: list[str] = field(default_factory=list)
    rows: int = 0
    samples: int = 0
    failures: int = 0
    read: int = 0
    written_bytes: int = 0
    note: str = ""

    @property
    def done(self) -> int:
        return self.present + len(self.records)

    def add(self, record: ChunkRecord) -> None:
        self.records[record.chunk] = record
        self.rows += record.rows
        self.samples += record.samples
        self.failures += record.failures
        self.written_bytes += record.size


class Build:
    """One run of one builder over the chunks it was asked for."""

    def __init__(
        self,
        job: Job,
        chunks: Sequence[int],
        tally: BuildProgress,
        terms: BuildOptions,
        streams: Mapping[int, str],
        weigh: Weigh,
    ) -> None:
        self._job = job
        self._store: Store = job.chunks.store
        self._layer = job.chunks.layer
        self._tally = tally
        self._terms = terms
        self._weigh = weigh
        self._chunks = chunks
        self._claims = Claims(self._store, self._layer, terms.host, terms.lease_seconds)
        self._schedule = Schedule(chunks, streams, self._ask)
        self._tries: Counter[int] = Counter()
        self._again: dict[int, float] = {}  # chunk -> when to try it again
        self._running: dict[int, int] = {}  # chunk -> slot
        self._slow: dict[int, tuple[float, float]] = {}  # chunk -> when it began, after how long to say so
        self._unlisted: list[int] = []  # made, and claimed until a generation lists them
        self._newest: tuple[int, dict[int, int]] = (UNPUBLISHED, {})  # number, chunk of the layer -> listed revision
        self._waiting_for: tuple[str, ...] = ()  # machines whose builders have all that is left
        self._born_dead = 0
        self._started = self._published = time.monotonic()

    def run(self, engine: Engine) -> None:
        """Make every chunk, or raise; either way claims are released and workers are gone."""
        if not self._schedule.pending:
            return
        first = 1 if self._terms.memory_limit else min(self._terms.workers, self._schedule.pending)
        crew = engine.start(self._job, first)
        heaviest = max(map(self._weigh, self._chunks)) if self._terms.memory_limit else 0
        governor = MemoryGovernor(self._terms.memory_limit, self._terms.workers, heaviest)
        try:
            governor.check_before(crew, heaviest)
            with Heartbeat(self._claims):
                while self._step(crew, governor):
                    self._show(crew)
                self._publish_unlisted()
        except KeyboardInterrupt as error:
            raise BuildStopped(self._store.address, self._tally.done, self._tally.total) from error
        except OSError as error:
            if is_full(error):  # no room even for a claim or a generation
                raise self._disk_full() from error
            raise
        finally:
            crew.stop()
            # What cannot be tidied up now must not hide why the build ended: `clean` removes it, and claims expire.
            with suppress(OSError, ForebayError):
                self._publish_unlisted()
            with suppress(OSError):
                with_retries(self._claims.release_all)
            with suppress(OSError):
                with_retries(self._remove_leftovers)

    def _remove_leftovers(self) -> None:
        for leftover in self._store.leftovers():
            self._store.delete(leftover.key)

    def _step(self, crew: Crew, governor: MemoryGovernor) -> bool:
        """Hand out work, take what came back; False when there is nothing left to do or to wait for."""
        idle = crew.idle()
        self._schedule.keep({*idle, *self._running.values()})
        for slot in idle:
            chunk = self._next(slot)
            if chunk is not None:
                self._running[chunk] = slot
                self._slow[chunk] = (time.monotonic(), SLOW_SECONDS)
                crew.give(slot, chunk)
        starting = not idle and self._schedule.pending  # workers that died are being replaced
        if not (self._running or self._again or self._schedule.elsewhere or starting):
            return False
        for event in crew.wait(TICK_SECONDS if self._running else TICK_SECONDS / 2):
            self._take(event)
            governor.take(event, 0 if event.chunk is None else self._weigh(event.chunk))
        left = self._schedule.pending + len(self._running)
        governor.steer(crew, left)
        self._tally.note = self._tally.note or self._slow_chunk() or ("" if left else governor.warning(crew))
        self._waiting_for = ()
        if not self._running and not self._schedule.pending:
            # Builders that wait for each other's claims must not wait for the time to publish too.
            self._publish_unlisted()
            self._waiting_for = self._claims.hosts(self._schedule.elsewhere)
            self._schedule.look_again()
        self._publish_now_and_then()
        return True

    def _slow_chunk(self) -> str:
        """A notice about a chunk that has been running for two minutes, then four, then eight."""
        now = time.monotonic()
        for begun, patience, chunk in [(*self._slow[chunk], chunk) for chunk in self._running]:
            if now - begun >= patience:
                self._slow[chunk] = (begun, 2 * patience)
                return f"chunk {chunk} has been running for {now - begun:.0f} s; Ctrl-C stops the build safely"
        return ""

    def _next(self, slot: int) -> int | None:
        now = time.monotonic()
        due = min(self._again, key=self._again.__getitem__, default=None)
        if due is not None and self._again[due] <= now:
            del self._again[due]
            return due
        return self._schedule.next_for(slot)

    def _ask(self, chunk: int) -> Answer:
        """Whether a chunk is ours to make. The claim comes first, then the second look: nobody can slip between."""
        if self._is_there(chunk):
            return "done"
        if not with_retries(partial(self._claims.take, chunk)):
            reason = with_retries(partial(self._claims.failure, chunk))
            if reason is None:
                return "busy"
            self._tally.failed[chunk] = reason
            return "done"
        if self._is_there(chunk):
            with_retries(partial(self._claims.release, chunk))
            return "done"
        return "mine"

    def _is_there(self, chunk: int) -> bool:
        there = isinstance(self._job, BuildJob) and with_retries(partial(self._is_made, self._job, chunk))
        self._tally.present += there
        return there

    def _is_made(self, job: BuildJob, chunk: int) -> bool:
        revision = job.revision(chunk)
        if chunk in job.distrusted:
            return self._listed().get(chunk, -1) >= revision
        return has_file(self._store, layout.chunk(self._layer, chunk, revision))

    def _listed(self) -> dict[int, int]:
        """The chunks that the newest generation lists, with their revisions; read again when there is a newer one."""
        number = max(generation_numbers(self._store), default=UNPUBLISHED)
        if number != self._newest[0]:
            table = load_generation(self._store, number).table(self._layer)
            revisions = table.numbers["revision"].tolist()
            self._newest = (number, dict(zip(table.chunks.tolist(), revisions, strict=True)))
        return self._newest[1]

    def _take(self, event: Event) -> None:
        if event.chunk is not None:
            self._running.pop(event.chunk, None)
            self._slow.pop(event.chunk, None)
        match event:
            case Made():
                self._made(event)
            case Died(chunk=None):
                self._died_at_birth(event)
            case Died(chunk=int(chunk)):
                self._tally.deaths.append(f"worker {event.pid} {event.reason} while making chunk {chunk}")
                self._tally.note = self._tally.deaths[-1]
                self._try_again(chunk, f"a worker was lost: {event.reason}")
            case Refused():
                self._refused(event)
            case Lost():
                self._lost(event.chunk)

    def _made(self, made: Made) -> None:
        self._born_dead = 0
        if made.record is None:
            self._tally.present += 1
        else:
            self._tally.add(made.record)
        self._tally.read += self._weigh(made.chunk)
        if made.record is None or self._job.is_listed_by_name(made.record):
            with_retries(partial(self._claims.release, made.chunk))
        else:  # nobody else may make or remove it before it is listed
            self._unlisted.append(made.chunk)
        self._check_failures()

    def _refused(self, refused: Refused) -> None:
        if refused.kind == "io":
            self._try_again(refused.chunk, refused.reason)
            return
        if refused.kind == "disk-full":
            raise self._disk_full()
        if refused.kind == "source-changed" and isinstance(self._job, BuildJob):
            raise SourceChanged(self._store.address, refused.files)
        if refused.reasons is not None:
            raise ChunkFailed(self._store.address, refused.chunk, *refused.reasons)
        self._give_up(refused.chunk, refused.reason)

    def _lost(self, chunk: int) -> None:
        """Its worker died after computing it: it is there if it was written, and no try of its own if it was not."""
        record = None
        if isinstance(self._job, BuildJob) and chunk not in self._job.distrusted:
            revision = self._job.revision(chunk)
            record = with_retries(partial(sound_record, self._store, self._layer, chunk, revision))
        if record is None:
            self._again[chunk] = time.monotonic()
        else:
            self._made(Made(chunk, record, 0.0, 0))

    def _try_again(self, chunk: int, reason: str) -> None:
        self._tries[chunk] += 1
        if self._tries[chunk] >= TRIES:
            self._give_up(chunk, f"{reason} ({TRIES} tries)")
        else:
            self._again[chunk] = time.monotonic() + 0.2 * 4 ** (self._tries[chunk] - 1)

    def _give_up(self, chunk: int, reason: str) -> None:
        with_retries(partial(self._claims.fail, chunk, reason))
        self._tally.failed[chunk] = reason
        self._tally.note = f"chunk {chunk} failed: {reason}"
        if len(self._tally.failed) >= HOPELESS and not self._tally.records:
            raise BuildFailed(self._store.address, self._tally.failed)

    def _died_at_birth(self, died: Died) -> None:
        self._born_dead += 1
        if self._born_dead >= (BIRTHS if self._tally.records else TRIES):
            raise WorkersFailed(self._store.address, died.reason)

    def _check_failures(self) -> None:
        """Stop as soon as too many have failed even if no sample of the other chunks does."""
        tally, allowed, made = self._tally, self._terms.max_failures, max(1, len(self._tally.records))
        if isinstance(allowed, float) and made < JUDGED_CHUNKS * len(self._chunks):
            return  # too few to tell how many samples there will be
        expected = tally.samples * len(self._chunks) // made
        check_failures(self._store.address, tally.failures, tally.samples, allowed, expected)

    def _disk_full(self) -> DiskFull:
        """What is still to be written, judged by what was, or by the source; and what is free."""
        sizes = [
            entry.size for entry in self._store.keys(layout.layer_folder(self._layer)) if layout.parse_chunk(entry.key)
        ]
        left = [chunk for chunk in self._chunks if chunk not in self._tally.records]
        needed = len(left) * sum(sizes) // len(sizes) if sizes else sum(map(self._weigh, left))
        return DiskFull(self._store.address, needed, self._store.free_bytes() or 0)

    def _publish_now_and_then(self) -> None:
        if time.monotonic() - self._published >= self._terms.publish_seconds and self._tally.records:
            self._publish()

    def _publish_unlisted(self) -> None:
        if self._unlisted:
            self._publish()

    def _publish(self) -> None:
        """List what was made; only then are the claims released that kept others from it."""
        made = {self._layer: self._tally.records.values()}
        listing = partial(publish, self._store, made, self._terms.versions, planned=self._terms.planned, adopts={})
        with_retries(listing)
        while self._unlisted:
            with_retries(partial(self._claims.release, self._unlisted[-1]))
            self._unlisted.pop()
        self._published = time.monotonic()

    def _show(self, crew: Crew) -> None:
        self._terms.on_progress(
            Progress(
                phase="waiting" if self._waiting_for else "building",
                done=self._tally.done,
                total=self._tally.total,
                rows=self._tally.rows,
                read_bytes=self._tally.read,
                written_bytes=self._tally.written_bytes,
                failures=self._tally.failures,
                seconds=time.monotonic() - self._started,
                workers=len(crew.pids()),
                busy=len(set(self._running.values())),  # a slot may be writing one chunk while it computes another
                pids=tuple(crew.pids()),
                note=self._tally.note,
                waiting_for=self._waiting_for,
            )
        )
        self._tally.note = ""
