"""Claims: who computes which chunk, so that builders on one cache do not do the same work twice.

    nobody ──create 000035.1──▶ A works, beats ──publishes chunk, deletes 000035.1──▶ done
                                 A stops beating, or gives it back ──B creates 000035.2──▶ B works …

A claim is advice: two builders that both hold one make the same bytes, and the second learns that the chunk exists. It
is written once, and once more where the chunk failed or is given back. It names its owner, whose heartbeat keeps all
of its claims alive. It expires when that has not moved for a lease on the observer's own clock, at once when the owner
is known to be dead. Whoever creates the next attempt has it; creation happens once, so exactly one takes over.

The name of a claim is free again when its chunk is made, or the build ends and no other builder is at work. One that is
given back before keeps it: a store repeats a request whose answer was lost, and to delete twice could delete the claim
of who came next. On a chunk that is made that is harmless: who has a claim looks again whether the chunk is there.

Heartbeats: one small file per builder, rewritten while it works, with its progress in it.

    builders/<owner>.json        {"beat": 17, "host": "node3", "made": 412, "total": 20000, …}
    builders/<owner>.000003.safetensors      chunks that it made, for the first of all builders to list
    builders/<owner>.listed.safetensors      what is listed, from the first one to this builder, when all is

A builder that holds a thousand claims writes one file per beat, and whoever waits for it reads one. It is silent when
its counter has not moved for a lease on the observer's own clock: the clock of another machine is never asked.

A heartbeat also carries what the builder and its workers use of their machine (`Usage`), for observers elsewhere.

Planning is claimed the same way, by segment: one builder plans, and the others wait for its plan (`planning_turn`). A
builder that plans has no other heartbeat than its claim, which it rewrites with its progress.

    planning/000000.1.json       {"owner": …, "host": "node3", "beat": 4, "files": 12, "total_files": 40, …}
"""

import itertools
import threading
import time
from collections.abc import Callable, Iterable, Iterator, Mapping
from contextlib import contextmanager, suppress
from dataclasses import dataclass, field
from functools import partial
from itertools import islice
from typing import Annotated, Literal

import msgspec
import psutil

from forebay.cache.plan import is_made_to_plan, remove_planning_folder
from forebay.cache.records import OnProgress, Progress
from forebay.errors import ForebayError, NotForebay, StoreRefused
from forebay.format import layout
from forebay.format.tensors import hmac_key
from forebay.store.base import Entry, Missing, Owner, Store, holds, read_document, this_process, with_retries

LEASE_SECONDS = 60.0
BEATS_PER_LEASE = 6
EARLY_BEATS = (0.1, 0.2, 0.4)  # parts of the time between two beats: the first one of a builder says nothing yet
MOST_BYTES = 64 * 1024  # of a heartbeat
BUILDERS_PER_LOOK = 16  # other builders, for each beat from one look at them to the next
MOST_BUILDERS = 10_000  # that are read: a stranger's folder may have any number
_Count = Annotated[int, msgspec.Meta(ge=0, le=1 << 60)]
_Measure = Annotated[float, msgspec.Meta(ge=0, le=1e18)]
_Name = Annotated[str, msgspec.Meta(max_length=300)]
_UNREADABLE = (Missing, msgspec.MsgspecError, ForebayError, OSError, ValueError, RecursionError)


class BuilderBeat(msgspec.Struct, frozen=True, kw_only=True):
    """The content of a heartbeat. Fields that a later forebay adds are ignored."""

    beat: _Count
    host: _Name
    pid: _Count
    layer: _Name = ""
    workers: _Count = 0  # this and the next two: what the builder used at its last beat
    cpu_percent: _Measure = 0.0
    memory_bytes: _Count = 0
    done: _Count = 0  # chunks that are there, whoever made them
    total: _Count = 0
    made: _Count = 0  # by this builder, in `seconds`
    unlisted: _Count = 0  # of those, not in a generation yet
    rows: _Count = 0
    written_bytes: _Count = 0
    seconds: _Measure = 0.0
    versions: dict[_Name, _Name] = {}  # of the libraries that shape bytes
    lists: bool = False  # it lists what others hand over to it

    @property
    def chunks_per_second(self) -> float:
        return self.made / self.seconds if self.seconds else 0.0


def builder_owners(store: Store) -> list[str]:
    """The owners of all heartbeats, read or not; files of other names do not count."""
    owners = (layout.parse_builder(entry.key) for entry in store.entries(layout.BUILDERS))
    return list(islice((owner for owner in owners if owner is not None), MOST_BUILDERS))


def builder_files(store: Store) -> dict[str, str]:
    """The keys of heartbeats, and of what builders and the one that lists leave to each other -> their owners."""
    keys = (entry.key for entry in store.entries(layout.BUILDERS))
    parsers = (layout.parse_builder, layout.parse_handed, layout.parse_listed)
    owners = ((key, next(filter(None, (parse(key) for parse in parsers)), None)) for key in keys)
    return {key: owner for key, owner in owners if owner is not None}


def read_builders(store: Store) -> dict[str, BuilderBeat]:
    """The heartbeats that can be read, by owner."""
    found = ((owner, read_builder(store, owner)) for owner in builder_owners(store))
    return {owner: beat for owner, beat in found if beat is not None}


def read_builder(store: Store, owner: str) -> BuilderBeat | None:
    """The heartbeat of one builder; None where there is none that can be read."""
    key = layout.builder(owner)
    if layout.parse_builder(key) is None:
        return None  # a claim may name anything as its owner
    try:
        text = store.read(key, 0, MOST_BYTES + 1)
        return msgspec.json.decode(text, type=BuilderBeat) if len(text) <= MOST_BYTES else None
    except _UNREADABLE:
        return None


def is_dead(owner: str) -> bool:
    """Whether an owner is known to be dead; only its own host can know."""
    parsed = Owner.parse(owner)
    return parsed is not None and parsed.is_dead()


class Pulses:
    """When the counters of others were last seen to move, on the clock of this process."""

    def __init__(self, store: Store, lease_seconds: float = LEASE_SECONDS) -> None:
        self.lease_seconds = lease_seconds
        self._store = store
        self._read: dict[str, tuple[float, int | None]] = {}  # owner -> when it was read, its counter
        self._seen: dict[str, tuple[int, float]] = {}  # owner or claim -> counter, when it was first seen

    def take(self, builders: Mapping[str, BuilderBeat]) -> None:
        """Use heartbeats that were read just now."""
        now = time.monotonic()
        self._read |= {owner: (now, beat.beat) for owner, beat in builders.items()}

    def is_silent(self, owner: str, claim: str = "", claim_beat: int = 0) -> bool:
        """Whether an owner has not moved its counter for a lease.

        Without a heartbeat, as an earlier forebay works, the counter in its claim counts.
        """
        read, beat = self._counter(owner)
        name, counter = (owner, beat) if beat is not None else (claim or owner, claim_beat)
        known, since = self._seen.get(name, (None, read))
        since = since if known == counter else read
        self._seen[name] = (counter, since)
        return read - since >= self.lease_seconds

    def silent_owners(self) -> list[str]:
        """The owners of heartbeats that have not moved for a lease."""
        return [owner for owner, (_, beat) in list(self._read.items()) if beat is not None and self.is_silent(owner)]

    def _counter(self, owner: str) -> tuple[float, int | None]:
        """When a counter was read, and the counter; it is read again after the time in which it should move."""
        now, known = time.monotonic(), self._read.get(owner)
        if known is None or known[1] is None or now - known[0] >= self.lease_seconds / BEATS_PER_LEASE:
            found = read_builder(self._store, owner)
            known = self._read[owner] = (now, None if found is None else found.beat)
        return known


class OtherBuilders:
    """The other builders of a layer, seen through their heartbeats."""

    def __init__(self, store: Store, layer: str, lease_seconds: float = LEASE_SECONDS) -> None:
        self._store, self._layer = store, layer
        self._pulses = Pulses(store, lease_seconds)
        self._first: dict[str, int] | None = None  # owner -> what it had made when this builder began
        self._made: dict[str, int] = {}
        self._looks = 0
        self.slots = 0  # chunks that they make at once, when they were last seen; those who are silent make none

    @property
    def made(self) -> int:
        """The chunks that they have made since this builder began, also those who have ended since."""
        return sum(made - (self._first or {}).get(owner, 0) for owner, made in self._made.items())

    @property
    def were_seen(self) -> bool:
        """Whether there was ever another."""
        return bool(self._made)

    def look_now_and_then(self) -> None:
        """Read the heartbeats, the less often the more there are: all builders do it."""
        self._looks += 1
        if self._looks % (1 + len(self._made) // BUILDERS_PER_LOOK) == 0:
            self.look()

    def is_any_at_work(self) -> bool:
        """Whether there is another that is not known to be dead; their heartbeats are read until one is found."""
        return next(self._alive(), None) is not None

    def _alive(self) -> Iterator[tuple[str, BuilderBeat]]:
        own = str(this_process())
        others = (owner for owner in builder_owners(self._store) if owner != own and not is_dead(owner))
        beats = ((owner, read_builder(self._store, owner)) for owner in others)
        return ((owner, beat) for owner, beat in beats if beat is not None and beat.layer == self._layer)

    def is_at_work(self, owner: str) -> bool:
        """Whether the owner of a heartbeat is not known to be dead, and has moved its counter within a lease."""
        return not is_dead(owner) and not self._pulses.is_silent(owner)

    def is_there_lister(self, versions: Mapping[str, str]) -> bool:
        """Whether one that comes before this builder by name, and makes chunks alike, lists those of others."""
        own = str(this_process())
        for owner in sorted(builder_owners(self._store)):
            if owner >= own:
                break
            beat = None if is_dead(owner) else read_builder(self._store, owner)
            is_alike = beat is not None and beat.lists and (beat.layer, beat.versions) == (self._layer, dict(versions))
            if is_alike and not self._pulses.is_silent(owner):
                return True
        return False

    def may_list(self, owner: str) -> bool:
        """Whether another builder has chunks to make or to list, as far as its last heartbeat says."""
        beat = read_builder(self._store, owner)
        return beat is not None and (beat.unlisted > 0 or beat.done < beat.total or not beat.total)

    def alike(self, versions: Mapping[str, str]) -> list[str]:
        """The owners of those at work that make all chunks of the layer with the same libraries."""
        beats = self.look().items()
        made_alike = (owner for owner, beat in beats if beat.lists and beat.versions == dict(versions))
        return [owner for owner in made_alike if self.is_at_work(owner)]

    def look(self) -> dict[str, BuilderBeat]:
        """The heartbeats of the others that are not known to be dead, by owner."""
        found = dict(self._alive())
        if self._first is None:
            self._first = {owner: beat.made for owner, beat in found.items()}
        self._pulses.take(found)
        self.slots = sum(max(1, beat.workers) for owner, beat in found.items() if not self._pulses.is_silent(owner))
        now = {owner: max(beat.made, self._made.get(owner, 0)) for owner, beat in found.items()}
        self._made = {**self._made, **now}  # another one: `made` may be summed at this moment, in another thread
        return found


class Heartbeat(threading.Thread):
    """Rewrites the file of this builder while it works; used as a context, at the end of which the file is removed."""

    def __init__(
        self,
        store: Store,
        host: str,
        lease_seconds: float = LEASE_SECONDS,
        layer: str = "",
        versions: Mapping[str, str] | None = None,
        on_beat: Callable[[], None] = lambda: None,
        lists: bool = False,
    ) -> None:
        super().__init__(name="forebay-heartbeat", daemon=True)
        self.progress: Progress | None = None  # the last one that the builder reported
        self.made = self.unlisted = 0
        self._store, self._host, self._layer = store, host, layer
        self._seconds = lease_seconds / BEATS_PER_LEASE
        self._owner = this_process()
        self._processes = ProcessTree(self._owner.pid)
        self._beat, self._versions = 0, dict(versions or {})
        self._on_beat, self._lists = on_beat, lists
        self._stopped, self._beating = threading.Event(), threading.Lock()

    def run(self) -> None:
        for _ in _beats(self._stopped, self._seconds):
            self.beat()
            with suppress(OSError, ForebayError):
                self._on_beat()

    def beat(self) -> None:
        """Show that this builder lives; a full disk stops the build where it writes chunks, not here."""
        with self._beating, suppress(OSError, ForebayError):
            self._beat += 1
            self._store.replace(layout.builder(str(self._owner)), [msgspec.json.encode(self._now())], durable=False)

    def _now(self) -> BuilderBeat:
        usage = self._processes.measure() if self._beat > 1 else self._processes.begin()
        progress = self.progress or Progress(phase="building", done=0, total=0)
        return BuilderBeat(
            beat=self._beat,
            host=self._host,
            pid=self._owner.pid,
            layer=self._layer,
            workers=progress.workers or usage.workers,
            cpu_percent=usage.cpu_percent,
            memory_bytes=usage.memory_bytes,
            done=progress.done,
            total=progress.total,
            made=self.made,
            unlisted=self.unlisted,
            rows=progress.rows,
            written_bytes=progress.written_bytes,
            seconds=progress.seconds,
            versions=self._versions,
            lists=self._lists,
        )

    def __enter__(self) -> "Heartbeat":
        self.beat()
        self.start()
        return self

    def __exit__(self, *_: object) -> None:
        self._stopped.set()
        self.join()
        with suppress(OSError, ForebayError):
            self._store.delete(layout.builder(str(self._owner)))


def _beats(stopped: threading.Event, seconds: float) -> Iterator[None]:
    """Whenever it is time for a heartbeat, until the event is set."""
    for part in itertools.chain(EARLY_BEATS, itertools.repeat(1.0)):
        if stopped.wait(part * seconds):
            return
        yield


@dataclass(frozen=True, slots=True)
class Usage:
    """CPU and memory of a process and its descendants."""

    workers: int = 0  # descendants
    cpu_percent: float = 0.0  # of one core, since the last measurement
    memory_bytes: int = 0  # that belongs to no other process


@dataclass(eq=False)
class ProcessTree:
    """A process and its descendants, which are kept so that CPU is counted between two measurements."""

    pid: int
    _known: dict[int, psutil.Process] = field(default_factory=dict)

    def begin(self) -> Usage:
        """Count CPU from now on, and measure nothing else: with torch imported that takes 9 ms."""
        with suppress(psutil.Error):
            self._known = {self.pid: psutil.Process(self.pid)}
            self._known[self.pid].cpu_percent()
        return Usage()

    def measure(self) -> Usage:
        try:
            top = self._known.get(self.pid) or psutil.Process(self.pid)
            below = {child.pid: child for child in top.children(recursive=True)}
        except (psutil.Error, ValueError):  # ValueError: a claim may name any number
            return Usage()
        self._known = {self.pid: top} | {pid: self._known.get(pid, child) for pid, child in below.items()}
        found = [_measured(process) for process in self._known.values()]
        return Usage(len(below), round(sum(cpu for cpu, _ in found), 1), sum(memory for _, memory in found))


def _measured(process: psutil.Process) -> tuple[float, int]:
    """CPU in percent and memory in bytes; zeros where the process has ended or belongs to somebody else."""
    try:
        return process.cpu_percent(), int(process.memory_full_info().uss)
    except psutil.Error:
        return 0.0, 0


MOST_ATTEMPTS = 999_999  # a file with a higher number is not a claim of forebay
STRANGE_NAMES = 8  # in a row, taken by what is not a claim, before a chunk is skipped for now
ClaimState = Literal["working", "failed", "returned"]


class Claim(msgspec.Struct, frozen=True, kw_only=True, omit_defaults=True):
    """The content of a claim file."""

    owner: str
    host: str
    pid: int
    beat: int = 0  # a counter that an earlier forebay moves here; now it is in the heartbeat of the owner
    build: int = 0  # which one of its process
    state: ClaimState = "working"
    reason: str = ""
    files: _Count = 0  # this and the following: how far a planner is
    total_files: _Count = 0
    bytes: _Count = 0
    total_bytes: _Count = 0
    seconds: _Measure = 0.0


_BUILDS = itertools.count(1)
_AT_WORK: set[int] = set()  # the builds of this process that may hold claims


class Claims:
    """The claims of one builder on one layer, or without one on segments, and its view of everybody else's."""

    def __init__(self, store: Store, layer: str | None, host: str, lease_seconds: float = LEASE_SECONDS) -> None:
        self._store = store
        self.pulses = Pulses(store, lease_seconds)
        self._layer = layer
        self._owner, self._build = this_process(), next(_BUILDS)
        _AT_WORK.add(self._build)
        self._host = host
        self._held: dict[int, int] = {}  # chunk -> attempt
        self._releasing: set[int] = set()  # held, and perhaps deleted: the answer was lost
        self._holders: dict[int, tuple[Entry, Claim]] = {}  # chunk -> the claim of another, when it was last asked for
        # A failure recorded before this builder began is tried again; one recorded since then has another etag.
        claims = () if layer is None else store.entries(layout.claims_folder(layer))
        self._before = {entry.key: entry.etag for entry in claims}

    def take(self, chunk: int) -> bool:
        """Claim a chunk, unless a live builder has it or it failed since this builder began."""
        if chunk not in self._held and self._create(chunk, 1):  # most chunks have no claim: no listing is needed
            return True
        attempts, attempt = self._attempts(chunk), 1
        self._holders.pop(chunk, None)
        if attempts:
            last = max(attempts)
            entry, claim = attempts[last]
            if not self._is_free(entry.key, claim):
                self._holders[chunk] = (entry, claim)
                return False
            attempt = last + 1
        for _ in range(STRANGE_NAMES):
            if self._create(chunk, attempt):
                return True
            if attempt in self._attempts(chunk):
                return False  # another builder was first
            attempt += 1  # a folder or a link has the name, and will have it for ever
        return False

    def _create(self, chunk: int, attempt: int) -> bool:
        self._held[chunk] = attempt  # first, so that an interruption while it is created leaves nothing behind
        try:
            created = self._store.create(layout.claim(self._layer, chunk, attempt), [self._encode()], durable=False)
        except NotForebay:
            created = False
        except (OSError, StoreRefused):  # the disk may have failed after it made the file, which is then ours
            created = self._is_there(chunk, attempt)
            if not created:
                del self._held[chunk]  # or this builder would wait for itself
                raise
        if not created:
            del self._held[chunk]
        return created

    def _is_there(self, chunk: int, attempt: int) -> bool:
        """Whether an attempt is on the disk, exactly as this builder would write it now."""
        try:
            return self._store.read(layout.claim(self._layer, chunk, attempt)) == self._encode()
        except (Missing, ForebayError, OSError):
            return False

    def failure(self, chunk: int) -> str | None:
        """Why a builder gave up a chunk that could not be taken because of it; None where none did."""
        _, holder = self._holders.get(chunk, (None, None))
        return holder.reason if holder is not None and holder.state == "failed" else None

    def still_held(self, chunks: Iterable[int]) -> set[int]:
        """Those of some chunks whose claims are as they were when they were last asked for, and not free.

        One listing for all of them: a claim with the same etag need not be read again.
        """
        known = {chunk: self._holders[chunk] for chunk in chunks if chunk in self._holders}
        if not known:
            return set()
        now = {entry.key: entry.etag for entry in self._store.entries(layout.claims_folder(self._layer))}
        same = {
            chunk: (entry.key, claim) for chunk, (entry, claim) in known.items() if now.get(entry.key) == entry.etag
        }
        return {chunk for chunk, (key, claim) in same.items() if not self._is_free(key, claim)}

    def hosts(self, chunks: Iterable[int]) -> tuple[str, ...]:
        """The machines of the builders that held some chunks when they were last asked for."""
        return tuple(sorted({self._holders[chunk][1].host for chunk in chunks if chunk in self._holders}))

    def give_back_all(self) -> None:
        """Let others have whatever is held and not made; all these claims keep their names."""
        for chunk in list(self._held):
            self.give_back(chunk)

    def release_all(self) -> None:
        """Give up whatever is held; what the disk refuses is raised when the others are released."""
        _AT_WORK.discard(self._build)
        refused: OSError | None = None
        for chunk in list(self._held):
            try:
                self.release(chunk)
            except OSError as error:
                refused = error
        if refused is not None:
            raise refused

    def release(self, chunk: int) -> None:
        """Give up a chunk that is made, or at the end of a build; nothing of its claims is left."""
        own = self._held[chunk]
        if chunk not in self._releasing or self._is_there(chunk, own):
            self._releasing.add(chunk)
            before = self._attempts(chunk) if own > 1 else ()
            for attempt in [*(earlier for earlier in before if earlier < own), own]:
                self._store.delete(layout.claim(self._layer, chunk, attempt))
        self._releasing.discard(chunk)
        del self._held[chunk]

    def give_back(self, chunk: int) -> None:
        """Let others have a chunk that is not begun; the claim stays, so that nobody else has its name."""
        self._rewrite(chunk, "returned")

    def remove_abandoned(self, is_made: Callable[[int], bool]) -> None:
        """Delete what nobody needs: files of dead builders; on made chunks, their claims and those given back."""
        for key, claim in read_claims(self._store, self._layer).items():
            if (is_abandoned(claim) or claim.state == "returned") and is_made(claimed(key)[0]):
                self._store.delete(key)
        silent = self.pulses.silent_owners()
        for key, owner in builder_files(self._store).items():
            if owner in silent or is_dead(owner):
                self._store.delete(key)

    def fail(self, chunk: int, reason: str) -> None:
        """Record that a chunk cannot be made."""
        self._rewrite(chunk, "failed", reason)

    def _rewrite(self, chunk: int, state: ClaimState, reason: str = "") -> None:
        key = layout.claim(self._layer, chunk, self._held[chunk])
        self._store.replace(key, [self._encode(state, reason)], durable=False)
        del self._held[chunk]

    def _attempts(self, chunk: int) -> dict[int, tuple[Entry, Claim]]:
        prefix = f"{layout.claims_folder(self._layer)}{chunk:06d}."
        return {
            claimed(entry.key)[1]: (entry, claim) for entry, claim in _found_claims(self._store, self._layer, prefix)
        }

    def _is_free(self, key: str, claim: Claim) -> bool:
        if claim.state == "returned":
            return True
        if claim.state == "failed":
            return self._is_from_before(key)
        if claim.owner == str(self._owner):  # of this process: held by another thread, or left by an earlier build
            return claim.build not in _AT_WORK
        return is_abandoned(claim) or self.pulses.is_silent(claim.owner, key, claim.beat)

    def _is_from_before(self, key: str) -> bool:
        """Whether a claim has been as it is since before this builder began."""
        now = self._store.head(key)
        return now is not None and now.etag == self._before.get(key)

    def _encode(self, state: ClaimState = "working", reason: str = "") -> bytes:
        owner = self._owner
        claim = Claim(owner=str(owner), host=self._host, pid=owner.pid, build=self._build, state=state, reason=reason)
        return msgspec.json.encode(claim)


_PLANNERS: dict[int, int] = {}  # build -> the thread that plans
PLANNERS_AWAITED = 2  # that end by themselves without a plan
LEAST_WAIT_SECONDS = 0.1


class PlanningClaim(Claims):
    """The claim of one builder on the next segment of the plan, kept alive by a thread while it plans."""

    def __init__(self, store: Store, segment: int, host: str, lease_seconds: float, files: int, size: int) -> None:
        super().__init__(store, None, host, lease_seconds)
        self.waited = False  # so that what was read of the plan before is old
        self._segment, self._beat, self._began = segment, 0, 0.0  # when it was its turn
        self._progress = Progress(phase="planning", done=0, total=files, unit="files", total_bytes=size)
        self._stopped = threading.Event()
        self._heart = threading.Thread(target=self._keep_alive, name="forebay-planner", daemon=True)

    def show(self, progress: Progress) -> None:
        """Note how far this planner is, for its next heartbeat."""
        self._progress = progress

    def waits(self) -> Iterator[Progress]:
        """How far another planner is, while it plans; ends when this builder has the claim, or the segment is there.

        A planner that is killed is replaced by the next. After two that ended by themselves without a plan, each that
        waits plans without a claim, and reports its own error.
        """
        ended, began = 0, time.monotonic()
        while ended < PLANNERS_AWAITED:
            if self.take(self._segment):
                self._began = time.monotonic()
                _PLANNERS[self._build] = threading.get_ident()
                self._heart.start()
                return
            has_ended, has_slept = True, False
            while attempts := with_retries(lambda: self._attempts(self._segment)):
                entry, planner = attempts[max(attempts)]
                if self._is_free(entry.key, planner):
                    has_ended = not has_slept  # it was killed, and another may take over
                    break
                if self._is_caller(planner) or self._is_planned():
                    return
                yield _waiting(planner)
                patience = (time.monotonic() - began) / 10
                time.sleep(max(LEAST_WAIT_SECONDS, min(patience, self.pulses.lease_seconds / BEATS_PER_LEASE)))
                has_slept = True
            if self._is_planned():
                return
            ended += has_ended

    def release_all(self) -> None:
        self._stopped.set()
        if self._heart.ident is not None:
            self._heart.join()
        _PLANNERS.pop(self._build, None)
        super().release_all()

    def _is_caller(self, planner: Claim) -> bool:
        """Whether this builder runs inside of another that plans, for which it would wait for ever."""
        return planner.owner == str(self._owner) and _PLANNERS.get(planner.build) == threading.get_ident()

    def _is_planned(self) -> bool:
        self.waited = True
        return with_retries(lambda: holds(self._store, layout.plan_segment(self._segment)))

    def _is_free(self, key: str, claim: Claim) -> bool:
        """As of a chunk; but only the claim itself is a heartbeat, and another owner may have the same name."""
        if claim.owner == str(self._owner):
            return claim.build not in _AT_WORK
        return is_abandoned(claim) or self.pulses.is_silent("", f"{key} {claim.owner} {claim.build}", claim.beat)

    def _is_there(self, chunk: int, attempt: int) -> bool:
        found = self._attempts(chunk).get(attempt)
        return found is not None and (found[1].owner, found[1].build) == (str(self._owner), self._build)

    def _keep_alive(self) -> None:
        key = layout.claim(None, self._segment, self._held[self._segment])
        for _ in _beats(self._stopped, self.pulses.lease_seconds / BEATS_PER_LEASE):
            self._beat += 1
            with suppress(OSError, ForebayError):
                self._store.replace(key, [self._encode()], durable=False)

    def _encode(self, state: ClaimState = "working", reason: str = "") -> bytes:
        owner, now = self._owner, self._progress
        claim = Claim(
            owner=str(owner),
            host=self._host,
            pid=owner.pid,
            beat=self._beat,
            build=self._build,
            files=now.done,
            total_files=now.total,
            bytes=now.read_bytes,
            total_bytes=now.total_bytes,
            seconds=round(time.monotonic() - self._began, 1) if self._began else 0.0,
        )
        return msgspec.json.encode(claim)


def _waiting(planner: Claim) -> Progress:
    return Progress(
        phase="waiting",
        done=planner.files,
        total=planner.total_files,
        unit="files",
        read_bytes=planner.bytes,
        total_bytes=planner.total_bytes,
        waiting_for=(planner.host,),
    )


def _next_wait(waits: Iterator[Progress]) -> Progress | None:
    """None at the end, and where planning cannot be claimed: then it is planned all the same."""
    with suppress(OSError, ForebayError):
        return next(waits, None)
    return None


@contextmanager
def planning_turn(
    store: Store, segment: int, host: str, lease_seconds: float, on_progress: OnProgress, files: int, size: int
) -> Iterator[PlanningClaim]:
    """Begin when it is this builder's turn to plan a segment, or another has planned it; nothing is left at the end.

    With a key every builder plans: none trusts a plan that no tagged generation covers.
    """
    is_new, claim = is_made_to_plan(store), PlanningClaim(store, segment, host, lease_seconds, files, size)
    waits = claim.waits() if hmac_key() is None else iter(())
    try:
        for progress in iter(partial(_next_wait, waits), None):
            on_progress(progress)
        yield claim
    finally:
        with suppress(OSError, ForebayError):  # it expires
            claim.release_all()
        remove_planning_folder(store, is_new)


def read_claims(store: Store, layer: str | None) -> dict[str, Claim]:
    """Every claim on a layer, or without one on segments, by key.

    Those that vanish while they are read, and files of other names, do not count. One that cannot be read has an
    unknown owner. It never beats, so it expires; left out, it would be in the way of the next attempt for ever.
    """
    return {entry.key: claim for entry, claim in _found_claims(store, layer, layout.claims_folder(layer))}


def _found_claims(store: Store, layer: str | None, prefix: str) -> Iterator[tuple[Entry, Claim]]:
    for entry in store.entries(prefix):
        if not is_claim(layer, entry.key):
            continue
        try:
            yield entry, msgspec.json.decode(read_document(store, entry.key), type=Claim)
        except Missing:
            continue
        except (msgspec.MsgspecError, ForebayError, OSError, ValueError, RecursionError):
            yield entry, Claim(owner="", host="unknown", pid=0, reason="the claim cannot be read")


def is_claim(layer: str | None, key: str) -> bool:
    """Whether a key is, to the letter, one that a claim on this layer has."""
    parsed = layout.parse_claim(key)
    return parsed is not None and parsed[1] <= MOST_ATTEMPTS and layout.claim(layer, *parsed) == key


def claimed(key: str) -> tuple[int, int]:
    """(chunk or segment, attempt) of a claim's key."""
    parsed = layout.parse_claim(key)
    assert parsed is not None
    return parsed


def is_abandoned(claim: Claim) -> bool:
    """Whether the owner of a claim is known to be dead; only its own host can know."""
    return is_dead(claim.owner)
