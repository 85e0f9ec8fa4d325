"""Make chunks with an engine: claim, schedule, retry, publish.

`BuildOptions` is what a build runs by, `BuildProgress` what happened so far.

lane None       3 7 8          chunks that can be made anywhere, any time
lane a.gz       0 1 2          one worker reads a.gz from its beginning
lane b.gz       4 5 6          nobody else takes from its lane: that would decompress it again from the start
"""

import random
import time
import zlib
from collections import Counter, deque
from collections.abc import Callable, Collection, Iterable, Iterator, Mapping, Sequence
from contextlib import contextmanager, suppress
from dataclasses import dataclass, field
from functools import cached_property, partial
from itertools import chain, count
from typing import Any, Literal

import msgspec

from forebay.building.chunk_maker import BuildJob, Job, has_file
from forebay.building.task import job_document
from forebay.cache.catalog import UNPUBLISHED, chunk_files, listed_count, load_generation, newest_number, sound_record
from forebay.cache.claims import LEASE_SECONDS, BuilderBeat, Claims, Heartbeat, OtherBuilders, builder_owners, is_dead
from forebay.cache.plan import Plan
from forebay.cache.publish import Announcement, announce, differing_versions, handed_chunks, publish
from forebay.cache.records import OnProgress, Progress
from forebay.engine.base import Died, Done, Engine, Event, Failed, MachineFailures, MemoryGovernor, TaskDocument
from forebay.errors import (
    BuildFailed,
    BuildStopped,
    ChunkFailed,
    DiskFull,
    ForebayError,
    NotForebay,
    RecipeInvalid,
    SourceChanged,
    WorkersFailed,
)
from forebay.format import layout
from forebay.format.chunk import FAILED, ChunkRecord, is_counted_by_recipe
from forebay.format.generation import Generation, HandedChunks, ListedLayer, revisions_digest
from forebay.format.tensors import hmac_key
from forebay.recipe import AnyRecipe, fields_of, hooks_of
from forebay.source import check_failures
from forebay.store.base import Missing, Store, is_full, this_process, with_retries

PUBLISH_SECONDS = 60.0
PHASES = ("listing", "planning", "making", "writing", "publishing")  # in the order of reports


class PhaseClock:
    """How long each phase of a build took."""

    def __init__(self) -> None:
        self.seconds: dict[str, float] = {}

    @contextmanager
    def during(self, phase: str) -> Iterator[None]:
        started = time.monotonic()
        try:
            yield
        finally:
            self.add(phase, time.monotonic() - started)

    def add(self, phase: str, seconds: float) -> None:
        known = {**self.seconds, phase: self.seconds.get(phase, 0.0) + seconds}
        self.seconds = {name: known[name] for name in PHASES if name in known}


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
    begin_at: float | None = None  # the share of the chunks after which to begin
    planned: Plan | None = None  # the plan that the caller wrote or compared with the source
    kept_limit: int | float | None = None  # of failures, for later commands
    clock: PhaseClock = field(default_factory=PhaseClock)
    on_progress: OnProgress = lambda progress: None


@dataclass(slots=True)
class BuildProgress:
    """What happened so far."""

    total: int
    present: int = 0
    present_before: int = 0  # of `present`, when the build began
    unlisted: frozenset[int] = frozenset()  # those of `present` that no generation listed when the build began
    records: dict[int, ChunkRecord] = field(default_factory=dict)
    failed: dict[int, str] = field(default_factory=dict)
    deaths: list[str] = field(default_factory=list)
    rows: int = 0
    samples: int = 0
    failures: int = 0
    read: int = 0
    written_bytes: int = 0
    note: str = ""
    warnings: list[str] = field(default_factory=list)  # for the report
    sums: Counter[str] = field(default_factory=Counter)  # of the statistics of the chunks made
    reasons: Counter[str] = field(default_factory=Counter)  # why samples of them failed
    newest: Generation | None = None  # the last generation that this builder read or wrote
    wanted: str = ""  # `revisions_digest` of all chunks that should be listed
    listed: ListedLayer | None = None  # what another builder has announced of the generation with all of them

    @property
    def done(self) -> int:
        return self.present + len(self.records)

    def add(self, record: ChunkRecord) -> None:
        self.records[record.chunk] = record
        self.rows += record.rows
        self.samples += record.samples
        self.failures += record.failures
        self.written_bytes += record.size
        numbers = {name: value for name, value in record.statistics.items() if not isinstance(value, list)}
        failed = {name: int(value) for name, value in numbers.items() if name.startswith(FAILED)}
        self.sums.update({name: value for name, value in numbers.items() if is_counted_by_recipe(name)})
        self.reasons.update({name.removeprefix(FAILED): count for name, count in failed.items()})

    def figures(self, recipe: AnyRecipe) -> dict[str, Any]:
        """What the recipe derives from the chunks made so far."""
        holds = {"chunks": len(self.records), "rows": self.rows, "bytes": self.written_bytes}
        return hooks_of(recipe).figures(fields_of(recipe), self.sums, holds) if self.records else {}


Answer = Literal["mine", "done", "busy"]


class ChunkSchedule:
    """The chunks still to do, handed to slots.

    `ask` claims a chunk: "mine" hands it out, "done" drops it, "busy" sets it aside until `look_again`. A pick takes
    the same time however many lanes there are: those that nobody is in wait in line.
    """

    def __init__(self, chunks: Iterable[int], streams: Mapping[int, str], ask: Callable[[int], Answer]) -> None:
        self._streams = streams
        self._ask = ask
        self._lanes: dict[str | None, deque[int]] = {}
        self._line: deque[str | None] = deque()  # lanes with chunks that no slot is in; None stays while it has some
        self._open: dict[int, str | None] = {}  # slot -> the lane it is in
        self.elsewhere: list[int] = []  # what other builders hold
        self.pending = 0
        self._fill(chunks)

    def next_for(self, slot: int) -> int | None:
        """A claimed chunk for a slot, None where nothing can be had now."""
        while (chunk := self._pick(slot)) is not None:
            answer = self._ask(chunk)
            if answer == "mine":
                return chunk
            if answer == "busy":
                self.elsewhere.append(chunk)
        return None

    def look_again(self, is_held: Callable[[int], bool] = lambda chunk: False) -> None:
        """Reconsider what other builders held when last asked, but for what they are known to hold still."""
        held = {chunk for chunk in self.elsewhere if is_held(chunk)}
        chunks, self.elsewhere = self.elsewhere, [chunk for chunk in self.elsewhere if chunk in held]
        self._fill(chunk for chunk in chunks if chunk not in held)

    def drop(self, is_done: Callable[[int], bool]) -> int:
        """Forget the chunks that are done; returns how many."""
        before = self.pending
        for lane, chunks in self._lanes.items():
            self._lanes[lane] = deque(chunk for chunk in chunks if not is_done(chunk))
        self._line = deque(lane for lane in self._line if self._lanes[lane])
        self.pending = sum(map(len, self._lanes.values()))
        return before - self.pending

    def give_back(self, chunk: int) -> None:
        """Take back a chunk that a slot did not begin; one of a stream is again the next of it."""
        self._fill([chunk])

    def begin_at(self, share: float) -> None:
        """Go on elsewhere among the chunks that can be made anywhere."""
        if chunks := self._lanes.get(None):
            chunks.rotate(-int(share * len(chunks)))

    def keep(self, slots: Collection[int]) -> None:
        """Forget slots that are gone, so that another slot can take over their lanes."""
        for slot in [slot for slot in self._open if slot not in slots]:
            self._leave(slot)

    def _fill(self, chunks: Iterable[int]) -> None:
        fresh: dict[str | None, list[int]] = {}
        for chunk in chunks:
            fresh.setdefault(self._streams.get(chunk), []).append(chunk)
            self.pending += 1
        taken = set(self._open.values())
        for lane, added in fresh.items():
            known = self._lanes.get(lane)
            if not known and (lane is None or lane not in taken):
                self._line.append(lane)
            self._lanes[lane] = deque([*(known or ()), *added] if lane is None else sorted([*(known or ()), *added]))

    def _leave(self, slot: int) -> None:
        lane = self._open.pop(slot, None)
        if lane is not None and self._lanes[lane]:
            self._line.appendleft(lane)

    def _pick(self, slot: int) -> int | None:
        mine = self._open.get(slot)
        if mine is None or not self._lanes[mine]:
            self._open.pop(slot, None)
            while self._line and not self._lanes[self._line[0]]:
                self._line.popleft()
            if not self._line:
                return None
            mine = self._line[0]
            if mine is not None:
                self._open[slot] = self._line.popleft()
        self.pending -= 1
        return self._lanes[mine].popleft()


TRIES = 3
BIRTHS = 10  # workers in a row that end before they begin, once chunks were made
HOPELESS = 20  # failed chunks, with none made, that end a build
JUDGED_CHUNKS = 0.1  # the share of chunks that must be made before a share of failures counts
TICK_SECONDS = 0.5
WAIT_SECONDS = 2.0  # at most, between two looks at what other builders hold
GROWTH = 0.1  # a builder lists its chunks when they are this share of what is listed
ANNOUNCE_TICKS = 20  # to wait for what the lister says of a generation, before all of it is read here
FEW_MET = 4  # chunks that others made, one after the other, before all that is there is listed
MET_SHARE = 1000  # or this part of all chunks, if that is more: then the listing takes as many requests
SLOW_SECONDS = 120.0  # on one chunk, until a notice says so
STALL_SECONDS = 5.0  # without a worker that could begin a chunk, until a notice says so
START_SECONDS = 30.0  # in which machines whose workers start more slowly are waited for
_HANDED = count(1)  # lists of chunks that this process left to other builders
Weigh = Callable[[int], int]  # what a chunk takes from the source


def _from_own_place(store: Store, chunks: Sequence[int], begin_at: float | None) -> Iterable[int]:
    """Builders start at different places: a chunk that another was first to claim is a request for nothing.

    The launcher may say where. In a bucket, where requests are billed, a builder finds its own place.
    """
    if begin_at is None:
        begin_at = 0.0 if store.local_path("") is not None else zlib.crc32(str(this_process()).encode()) / 2**32
    rotated = deque(chunks)
    rotated.rotate(-int(begin_at * len(chunks)))
    return rotated


@dataclass(frozen=True, slots=True)
class BuildTask:
    """The chunks of a job, for an engine: as they are in this process, as a document elsewhere."""

    job: Job

    def begin(self, chunk: int) -> Callable[[], Any]:
        return self.job.begin(chunk)

    def document(self) -> TaskDocument:
        return job_document(self.job)


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
        self._schedule = ChunkSchedule(_from_own_place(self._store, chunks, terms.begin_at), streams, self._ask)
        self._machines = MachineFailures()
        self._where: dict[int, str] = {}  # chunk -> the machine that makes it
        self._again: dict[int, float] = {}  # chunk -> when to try it again
        self._running: dict[int, int] = {}  # chunk -> slot
        self._ahead: dict[int, int] = {}  # slot -> the chunk that was claimed for it while it computes another
        self._returned: set[int] = set()  # claimed, and in the schedule again
        self._slow: dict[int, tuple[float, float]] = {}  # chunk -> when it began, after how long to say so
        self._unlisted: list[int] = []  # made, and claimed until a generation lists them
        self._fresh: list[int] = []  # chunks made and neither listed nor handed over to be listed
        self._handed: dict[str, list[int]] = {}  # key -> chunks that another builder is to list
        self._found: dict[str, list[ChunkRecord]] = {}  # key -> chunks that others handed over, not listed yet
        self._kept_lists: set[str] = set()  # that are listed and could not be removed
        self._looked = 0.0  # when that was last looked for
        self._is_lister = True  # lists what it makes itself, and for others
        self._has_others = False  # at its end, so that one of them may list for it
        self._met = 0  # chunks of others, since all that is there was listed
        self._others = OtherBuilders(self._store, self._layer, terms.lease_seconds)
        self._has_range = terms.planned is not None and tally.total < len(terms.planned)
        self._first_present, self._listed_count = tally.present, tally.present
        self._shares_lists = isinstance(job, BuildJob) and not self._has_range
        self._heart = Heartbeat(
            self._store,
            terms.host,
            terms.lease_seconds,
            self._layer,
            terms.versions,
            self._others.look_now_and_then,
            self._shares_lists,
        )
        self._newest: tuple[int, dict[int, int]] = (UNPUBLISHED, {})  # number, chunk of the layer -> listed revision
        self._waiting_for: tuple[str, ...] = ()  # machines whose builders have all that is left
        self._patience = 0.0  # seconds to wait before looking at what others hold again
        self._born_dead = 0
        self._started = self._published = time.monotonic()
        self._stalled = (self._started, STALL_SECONDS)  # since when no worker can begin, after how long to say so

    def run(self, engine: Engine) -> None:
        """Make every chunk, or raise; either way claims are released and workers are gone."""
        if not self._schedule.pending:
            if self._tally.unlisted:
                self._wait_only(engine)
            return
        first = 1 if self._terms.memory_limit else min(self._terms.workers, self._schedule.pending)
        engine.start(BuildTask(self._job), first)
        heaviest = max(map(self._weigh, self._chunks)) if self._terms.memory_limit else 0
        governor = MemoryGovernor(self._terms.memory_limit, self._terms.workers, heaviest)
        try:
            with self._heart:
                self._work(engine, governor)
        except KeyboardInterrupt as error:
            raise BuildStopped(self._store.address, self._tally.done, self._tally.total) from error
        except OSError as error:
            if is_full(error):  # no room even for a claim or a generation
                raise self._disk_full() from error
            raise
        finally:
            engine.stop()
            with suppress(OSError, ForebayError):  # after the heartbeat: without one, nobody leaves it there
                if self._shares_lists and self._others.were_seen:
                    self._store.delete(layout.listed(str(this_process())))

    def _wait_only(self, engine: Engine) -> None:
        """Wait for those who made what is not listed yet; the heartbeat of a dead one must not stop the next build."""
        try:
            self._wait_for_makers(engine)
        except KeyboardInterrupt as error:
            raise BuildStopped(self._store.address, self._tally.done, self._tally.total) from error
        finally:
            with suppress(OSError, ForebayError):
                with_retries(partial(self._claims.remove_abandoned, self._is_made_by_anyone))

    def _work(self, engine: Engine, governor: MemoryGovernor) -> None:
        try:
            governor.check_before(engine)
            with suppress(OSError, ForebayError):
                self._compare_versions(self._others.look())
            while self._step(engine, governor):
                self._show(engine)
            self._wait_for_makers(engine)
            self._publish_unlisted()
        finally:
            engine.stop()
            # What cannot be tidied up now must not hide why the build ended: `clean` removes it, and claims expire.
            with suppress(OSError, ForebayError):
                self._take_unreported()
                self._publish_unlisted()
            with suppress(OSError, ForebayError):
                if self._others.is_any_at_work():  # it may take a chunk at once, and a repeated request its claim
                    with_retries(self._claims.give_back_all)
            with suppress(OSError):
                with_retries(self._claims.release_all)
            with suppress(OSError, ForebayError):
                with_retries(partial(self._claims.remove_abandoned, self._is_made_by_anyone))
            with suppress(OSError):
                with_retries(self._remove_leftovers)

    def _compare_versions(self, others: Mapping[str, BuilderBeat]) -> None:
        """Say which libraries are not those of the other builders: bytes may differ, and are recorded with both."""
        differing = differing_versions([beat.versions for beat in others.values()], self._terms.versions)
        if differing:
            hosts = ", ".join(sorted({beat.host for beat in others.values()}))
            self._tally.note = f"library versions here are not those of the builders on {hosts}: {differing}"
            self._tally.warnings.append(self._tally.note)

    def _remove_leftovers(self) -> None:
        for leftover in self._store.leftovers():
            self._store.delete(leftover.key)

    def _step(self, engine: Engine, governor: MemoryGovernor) -> bool:
        """Hand out work, take what came back; False when there is nothing left to do or to wait for."""
        idle = self._usable(engine)
        slots = {*idle, *self._running.values()}
        for gone in self._ahead.keys() - slots:  # its worker died, or is not needed any more
            self._returned.add(self._ahead[gone])
            self._schedule.give_back(self._ahead.pop(gone))
        self._schedule.keep(slots)
        for slot in idle:
            chunk = self._ahead.pop(slot) if slot in self._ahead else self._next(slot, engine.place(slot))
            if chunk is not None:
                self._running[chunk], self._where[chunk] = slot, engine.place(slot)
                self._slow[chunk] = (time.monotonic(), SLOW_SECONDS)
                engine.submit(slot, chunk)
        self._claim_ahead(engine, slots)
        starting = not idle and self._schedule.pending  # workers that died are being replaced
        if not (self._running or self._again or self._schedule.elsewhere or starting):
            return False
        for event in engine.poll(TICK_SECONDS if self._running else max(TICK_SECONDS / 2, self._patience)):
            self._take(event)
            governor.take(event, 0 if event.chunk is None else self._weigh(event.chunk))
        left = self._schedule.pending + len(self._running) + len(self._ahead)
        governor.steer(engine, left)
        warning = "" if left else governor.warning(engine)
        news = "; ".join(self._machines.news())
        self._tally.warnings += [said for said in (warning, news) if said]
        stalled = self._stalled_for(engine, bool(self._running or idle or not starting))
        self._tally.note = news or self._tally.note or warning or stalled or self._slow_chunk()
        self._waiting_for = ()
        if self._running or self._schedule.pending:
            self._patience = 0.0
        else:
            # Builders that wait for each other's claims must not wait for the time to publish too.
            if self._schedule.elsewhere:
                self._list_own()
            self._waiting_for = self._claims.hosts(self._schedule.elsewhere)
            held = with_retries(partial(self._claims.still_held, self._schedule.elsewhere))
            self._schedule.look_again(lambda chunk: chunk in held and not self._is_made_by_anyone(chunk))
            self._patience = min(WAIT_SECONDS, max(TICK_SECONDS / 4, 2 * self._patience))
        self._publish_now_and_then()
        return True

    def _usable(self, engine: Engine) -> list[int]:
        """The idle slots, but for those of machines on which all chunks fail."""
        idle = {slot: engine.place(slot) for slot in engine.idle()}
        at_work = {slot: self._where[chunk] for chunk, slot in self._running.items()}
        are_starting = len({**idle, **at_work}) < engine.usage().workers
        more_may_come = are_starting and time.monotonic() - self._started < START_SECONDS
        self._machines.see({*idle.values(), *at_work.values()}, more_may_come)
        return [slot for slot, place in idle.items() if not self._machines.is_left_out(place)]

    def _stalled_for(self, engine: Engine, is_at_work: bool) -> str:
        """A notice that no worker has been ready for five seconds, then ten, then twenty."""
        now, (since, patience) = time.monotonic(), self._stalled
        if is_at_work:
            self._stalled = (now, STALL_SECONDS)
        elif now - since >= patience:
            self._stalled = (since, 2 * patience)
            waiting = engine.usage().waiting or "they are still starting"
            return f"no worker has been ready for {now - since:.0f} s: {waiting}"
        return ""

    def _claim_ahead(self, engine: Engine, slots: Collection[int]) -> None:
        """Claim the next chunk of every slot while it computes: in a bucket, a claim takes several answers.

        The last chunks are claimed by whoever is free to make them, and given back where they were claimed before.
        """
        if engine.usage().in_process:
            return
        if self._others.slots and self._unclaimed() <= len(slots) + self._others.slots:
            self._give_back_ahead()
            return
        for slot in set(slots) & set(self._running.values()) - self._ahead.keys():
            if self._schedule.pending <= len(slots):
                return
            chunk = self._schedule.next_for(slot)
            if chunk is not None:
                self._ahead[slot] = chunk

    def _unclaimed(self) -> int:
        """About how many chunks nobody has begun: heartbeats say what others have made, a few seconds ago."""
        mine = self._schedule.pending + len(self._ahead)
        left = self._tally.total - self._done() - len(self._running) - self._others.slots
        return mine if self._has_range else min(left, mine)

    def _give_back_ahead(self) -> None:
        """Let another builder have what is claimed here and not begun."""
        while self._ahead:
            _, chunk = self._ahead.popitem()
            with_retries(partial(self._claims.give_back, chunk))
            self._schedule.give_back(chunk)

    def _slow_chunk(self) -> str:
        """A notice about a chunk that has been running for two minutes, then four, then eight."""
        now = time.monotonic()
        for begun, patience, chunk in [(*self._slow[chunk], chunk) for chunk in self._running]:
            if now - begun >= patience:
                self._slow[chunk] = (begun, 2 * patience)
                return f"chunk {chunk} has been running for {now - begun:.0f} s; Ctrl-C stops the build safely"
        return ""

    def _next(self, slot: int, place: str) -> int | None:
        now = time.monotonic()
        suited = [chunk for chunk in self._again if self._machines.suits(chunk, place)]
        due = min(suited, key=self._again.__getitem__, default=None)
        if due is not None and self._again[due] <= now:
            del self._again[due]
            return due
        return self._schedule.next_for(slot)

    def _ask(self, chunk: int) -> Answer:
        """Whether a chunk is ours to make. The claim comes first, then the second look: nobody can slip between."""
        if chunk in self._returned:
            self._returned.remove(chunk)
            return "mine"
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
        there = self._is_made_by_anyone(chunk)
        self._tally.present += there
        self._met = self._met + 1 if there else 0
        if self._met >= max(FEW_MET, len(self._chunks) // MET_SHARE):
            self._drop_made()
        return there

    def _drop_made(self) -> None:
        """Leave out what others made, found in one listing: another builder was at work in this place."""
        self._met = 0
        if isinstance(self._job, BuildJob):
            files, job = with_retries(partial(chunk_files, self._store, self._layer)), self._job
            self._tally.present += self._schedule.drop(
                lambda chunk: chunk not in job.distrusted and files.get(chunk) == job.revision(chunk)
            )
            self._schedule.begin_at(random.random())  # whoever made these is just ahead

    def _is_made_by_anyone(self, chunk: int) -> bool:
        return isinstance(self._job, BuildJob) and with_retries(partial(self._is_made, self._job, chunk))

    def _is_made(self, job: BuildJob, chunk: int) -> bool:
        revision = job.revision(chunk)
        if chunk in job.distrusted:
            return self._listed_in(newest_number(self._store)).get(chunk, -1) >= revision
        return has_file(self._store, layout.chunk(self._layer, chunk, revision))

    def _listed_in(self, number: int) -> dict[int, int]:
        """The chunks that a generation lists, with their revisions; the last one is kept."""
        if number != self._newest[0]:
            if self._tally.newest is None or self._tally.newest.number != number:
                self._tally.newest = load_generation(self._store, number)
            table = self._tally.newest.table(self._layer)
            revisions = table.numbers["revision"].tolist()
            self._newest = (number, dict(zip(table.chunks.tolist(), revisions, strict=True)))
        return self._newest[1]

    def _take(self, event: Event) -> None:
        """Count what a worker reports; until it is counted, an interrupt finds the chunk among those that run."""
        match event:
            case Done():
                self._terms.clock.add("writing", event.writing_seconds)
                self._made(event.chunk, msgspec.convert(event.record, ChunkRecord | None))
            case Died():
                self._died(event)
            case Failed():
                self._failed(event)
        if event.chunk is not None:
            self._forget(event.chunk)

    def _forget(self, chunk: int) -> None:
        """A chunk is not being made any more."""
        for known in (self._running, self._slow, self._where):
            known.pop(chunk, None)

    def _made(self, chunk: int, record: ChunkRecord | None) -> None:
        self._born_dead = 0
        self._machines.made(chunk, self._where.get(chunk))
        if record is None:
            self._tally.present += 1
        else:
            self._tally.add(record)
            self._fresh.append(chunk)
            self._heart.made += 1
        self._tally.read += self._weigh(chunk)
        if record is None or self._job.is_listed_by_name(record):
            with_retries(partial(self._claims.release, chunk))
        else:  # nobody else may make or remove it before it is listed
            self._unlisted.append(chunk)
        self._check_failures()

    def _died(self, died: Died) -> None:
        for chunk in died.lost:
            self._lost(chunk)
            self._forget(chunk)
        if not died.began:
            self._died_at_birth(died)
            return
        doing = "" if died.chunk is None else f" while making chunk {died.chunk}"
        self._tally.deaths.append(f"{died.worker} {died.reason}{doing}")
        self._tally.note = self._tally.deaths[-1]
        if died.chunk is not None and not self._is_tried_again(died.chunk, TRIES, died.reason):
            self._give_up(died.chunk, f"a worker was lost: {died.reason}")

    def _failed(self, failed: Failed) -> None:
        if failed.kind == "disk-full":
            raise self._disk_full()
        if self._is_tried_again(failed.chunk, TRIES if failed.kind == "io" else 1, failed.reason):
            return
        if failed.kind == "source-changed" and isinstance(self._job, BuildJob):
            raise SourceChanged(self._store.address, failed.files)
        if failed.reasons is not None:
            raise ChunkFailed(self._store.address, failed.chunk, *failed.reasons)
        self._give_up(failed.chunk, failed.reason)

    def _lost(self, chunk: int) -> None:
        """Its worker died after computing it: it is there if it was written, and else is tried again."""
        record = self._written(chunk)
        if record is None:
            self._again[chunk] = time.monotonic()
        else:
            self._made(chunk, record)

    def _written(self, chunk: int) -> ChunkRecord | None:
        """The record of a chunk that a worker was making, if it wrote it before it ended."""
        if not isinstance(self._job, BuildJob) or chunk in self._job.distrusted:
            return None
        return with_retries(partial(sound_record, self._store, self._layer, chunk, self._job.revision(chunk)))

    def _take_unreported(self) -> None:
        """Count what workers wrote, and could not report before they were stopped."""
        for chunk in self._running:
            record = None if chunk in self._tally.records else self._written(chunk)
            if record is not None:
                self._tally.add(record)
                self._unlisted.append(chunk)
        self._running.clear()

    def _is_tried_again(self, chunk: int, tries: int, reason: str) -> bool:
        """Whether a chunk that failed is scheduled again: on another machine, or as often as its error may pass."""
        pause = self._machines.fail(chunk, self._where.get(chunk, ""), reason)
        if self._machines.is_final(chunk, tries):
            return False
        self._again[chunk] = time.monotonic() + pause
        return True

    def _give_up(self, chunk: int, reason: str) -> None:
        reason += self._machines.give_up(chunk)
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
        """What is still to be written, estimated from what was, or from the source; and what is free."""
        sizes = [
            entry.size
            for entry in self._store.entries(layout.layer_folder(self._layer))
            if layout.parse_chunk(entry.key)
        ]
        left = [chunk for chunk in self._chunks if chunk not in self._tally.records]
        needed = len(left) * sum(sizes) // len(sizes) if sizes else sum(map(self._weigh, left))
        return DiskFull(self._store.address, needed, self._store.free_bytes() or 0)

    def _publish_now_and_then(self) -> None:
        """List what was made, the less often the more is listed: a generation is as large as the list."""
        now = time.monotonic()
        if min(now - self._published, now - self._looked) < self._terms.publish_seconds:
            return
        if not self._fresh and not self._shares_lists:
            return
        self._looked = now
        self._look_at_lists()
        if self._is_lister:
            handed = chain(map(len, self._found.values()), map(len, self._handed.values()))
            fresh = len(self._fresh) + sum(handed)
            if fresh and fresh >= GROWTH * self._listed_count:
                self._publish()
        elif self._fresh and len(self._fresh) >= GROWTH * (len(self._tally.records) - len(self._fresh)):
            self._hand_over()

    def _look_at_lists(self) -> None:
        """Find out who lists chunks; take what others handed over, or release the claims on what is listed by now.

        The first builder by name lists for all, so that one reads and writes what is listed. Two who both think they
        are, as one has just begun, do no harm: a generation lists a chunk once.
        """
        if not self._shares_lists:
            return
        self._is_lister = not with_retries(partial(self._others.is_there_lister, self._terms.versions))
        if self._is_lister:
            at_work = self._others.is_at_work
            known = {**self._found, **{key: [] for key in self._kept_lists}}
            found = with_retries(partial(handed_chunks, self._store, self._about, known, at_work))
            self._found = {key: records for key, records in found.items() if key not in self._kept_lists}
        elif self._handed:
            prefix = f"{layout.BUILDERS}{this_process()}."
            there = {entry.key for entry in with_retries(lambda: list(self._store.entries(prefix)))}
            for key in self._handed.keys() - there:
                self._release_listed(self._handed.pop(key))

    @cached_property
    def _about(self) -> HandedChunks:
        planned = self._terms.planned
        digests = planned.digests if planned is not None else ()
        return HandedChunks(self._layer, self._job.chunks.fingerprint, digests, dict(self._terms.versions))

    def _hand_over(self) -> None:
        """Leave what was made to the builder that lists; until it has, the claims are kept."""
        records = self._about.encode([self._tally.records[chunk] for chunk in self._fresh], hmac_key())
        key = layout.handed(str(this_process()), next(_HANDED))
        if with_retries(partial(self._store.create, key, records, durable=False)):
            self._handed[key], self._fresh, self._published = self._fresh, [], time.monotonic()
        else:
            self._publish()

    def _publish_unlisted(self) -> None:
        if self._unlisted or self._found or self._handed:
            self._publish()

    def _list_own(self) -> None:
        """List what this builder made, or hand it over, for others who wait for it."""
        self._look_at_lists()
        if self._is_lister:
            if self._unlisted or self._fresh or self._found:
                self._publish()
        elif self._fresh:
            self._hand_over()

    def _wait_for_makers(self, engine: Engine) -> None:
        """Builders that are at work list their chunks: wait for it a while, rather than read and hash them here."""
        pause, patience = TICK_SECONDS / 8, max(self._terms.publish_seconds, self._terms.lease_seconds)
        end, seen = time.monotonic() + patience, UNPUBLISHED
        others, has_told = self._others.look(), False
        self._claims.pulses.take(others)
        self._has_others = self._shares_lists and bool(others)
        while time.monotonic() < end and others:
            if self._has_announcement():
                return
            self._list_own()
            number = with_retries(partial(newest_number, self._store))
            # Of generations that follow each other closely, as many builders that end publish them, the last is read.
            is_last, seen = number == seen, number
            if all(map(self._claims.pulses.is_silent, others)) or (is_last and self._has_all_listed(number)):
                return
            if is_last and self._is_lister and not any(map(self._others.may_list, others)):
                return  # what is left was made by builders that died, and they would all wait for one another
            pause = pause if is_last else TICK_SECONDS / 8
            self._waiting_for = tuple(sorted({beat.host for beat in others.values()}))
            self._show(engine)
            if not has_told and not self._heart.unlisted and self._heart.is_alive():
                self._heart.beat()  # others need not wait for this builder
                has_told = True
            time.sleep(pause)
            pause = min(WAIT_SECONDS, 2 * pause)
            there = builder_owners(self._store)
            others = {owner: others[owner] for owner in there if owner in others and not is_dead(owner)}
        self._has_announcement()

    def _has_announcement(self) -> bool:
        """Whether the builder that lists has said that all is listed; then nobody else need read the generation."""
        self._tally.listed = self._announcement.find() if self._can_be_announced() else None
        if self._tally.listed is not None:
            self._all_listed()
        return self._tally.listed is not None

    def _can_be_announced(self) -> bool:
        """Whether another builder could list just what this one waits for: all chunks, as the plan asks for them."""
        if not self._has_others or self._tally.failed or not isinstance(self._job, BuildJob):
            return False
        asked = self._job.revision
        return all(record.revision == asked(chunk) for chunk, record in self._tally.records.items())

    @cached_property
    def _announcement(self) -> Announcement:
        seconds = ANNOUNCE_TICKS * TICK_SECONDS
        return Announcement(self._store, self._about, self._tally.wanted, self._terms.kept_limit, seconds)

    def _announce(self, listed: Generation) -> None:
        """Read back a generation that lists all there is to do, and say so to the others: each would read it."""
        table = listed.table(self._layer)
        if revisions_digest(table.chunks, table.numbers["revision"]) != self._tally.wanted:
            return
        with suppress(OSError, ForebayError):  # at its end, a build reads what it listed and says what is wrong
            if alike := self._others.alike(self._about.versions):
                self._tally.newest = with_retries(partial(load_generation, self._store, listed.number))
                announce(self._store, self._tally.newest, self._about, alike)

    def _has_all_listed(self, number: int) -> bool:
        """Whether a generation lists all that this builder waits for."""
        expected = {*self._chunks, *self._tally.unlisted} - self._tally.failed.keys()
        with suppress(Missing, NotForebay):  # reading all of it says what is wrong
            # Of many builders that end, each would read the whole of every generation that the others publish.
            if with_retries(partial(listed_count, self._store, number, self._layer)) < len(expected):
                return False
        if not self._is_lister and self._can_be_announced() and self._announcement.is_awaited():
            return False
        listed = with_retries(partial(self._listed_in, number))
        return expected <= listed.keys()

    def _publish(self) -> None:
        """List what was made; only then are the claims released that kept others from it."""
        try:
            listed = self._with_found()
        except RecipeInvalid:  # another's statistics do not fit to these: it lists its chunks itself, or nobody can
            if not self._found:
                raise
            self._found.clear()
            listed = self._with_found()
        self._tally.newest = listed
        self._all_listed()
        self._published, self._listed_count = time.monotonic(), len(listed.table(self._layer))
        if self._shares_lists and self._listed_count == self._tally.total:
            self._announce(listed)

    def _all_listed(self) -> None:
        """Remove the lists of what is listed now, and release the claims."""
        for key in (*self._found, *self._handed):
            try:
                with_retries(partial(self._store.delete, key))
            except (OSError, ForebayError):  # its owner removes it when it ends
                self._kept_lists.add(key)
        self._found.clear()
        self._handed.clear()
        self._release_listed(list(self._unlisted))
        self._fresh = []

    def _with_found(self) -> Generation:
        """A generation with what was made here and what others handed over."""
        made = {self._layer: [*chain.from_iterable(self._found.values()), *self._tally.records.values()]}
        terms, newest = self._terms, self._tally.newest
        return with_retries(
            partial(publish, self._store, made, terms.versions, None, terms.planned, {}, terms.kept_limit, newest)
        )

    def _release_listed(self, chunks: Iterable[int]) -> None:
        for chunk in chunks:
            if chunk in self._unlisted:
                with_retries(partial(self._claims.release, chunk))
                self._unlisted.remove(chunk)

    def _done(self) -> int:
        """The chunks that are made, here or elsewhere as far as heartbeats say, which do not know of ranges."""
        made_elsewhere = max(self._tally.present, 0 if self._has_range else self._first_present + self._others.made)
        return min(self._tally.total, len(self._tally.records) + made_elsewhere)

    def _show(self, engine: Engine) -> None:
        usage = engine.usage()
        progress = Progress(
            phase="waiting" if self._waiting_for else "building",
            done=self._done(),
            total=self._tally.total,
            rows=self._tally.rows,
            read_bytes=self._tally.read,
            written_bytes=self._tally.written_bytes,
            failures=self._tally.failures,
            tokens=self._tally.sums["tokens"],
            utilization=self._tally.figures(self._job.chunks.recipe).get("utilization"),
            seconds=time.monotonic() - self._started,
            workers=usage.workers,
            busy=len(set(self._running.values())),  # a slot may be writing one chunk while it computes another
            pids=usage.pids,
            note=self._tally.note,
            waiting_for=self._waiting_for,
        )
        self._heart.progress = progress
        self._heart.unlisted = len(self._fresh) + sum(map(len, self._handed.values()))
        self._terms.on_progress(progress)
        self._tally.note = ""
