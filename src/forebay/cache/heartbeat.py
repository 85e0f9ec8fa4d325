"""Heartbeats: one small file per builder, rewritten while it works, with its progress in it.

    builders/<owner>.json        {"beat": 17, "host": "node3", "built": 412, "total": 20000, …}

A builder that holds a thousand claims writes one file per beat, and builders that wait for it read one. It is silent if
its counter has not changed for a lease on the observer's own clock: clocks of other machines are never compared.
"""

import itertools
import socket
import threading
import time
from contextlib import suppress
from dataclasses import dataclass, field
from itertools import islice
from typing import Annotated

import msgspec
import psutil

from forebay.cache.reports import Progress
from forebay.errors import ForebayError
from forebay.format import layout
from forebay.store.base import Missing, Store
from forebay.store.owners import Owner, this_host, this_process

LEASE_SECONDS = 60.0
LEASE_BOUNDS = 0.1, 1e6  # a shorter one would write without a pause, a much longer one overflows a timer
BEATS_PER_LEASE = 6
EARLY_BEATS = (0.1, 0.2, 0.4)  # parts of the time between two beats: the first beat of a builder has no progress yet
MOST_BYTES = 64 * 1024  # of a heartbeat
MOST_BUILDERS = 10_000  # that are read: an untrusted folder may have any number
_Count = Annotated[int, msgspec.Meta(ge=0, le=1 << 60)]
_Measure = Annotated[float, msgspec.Meta(ge=0, le=1e18)]
_Name = Annotated[str, msgspec.Meta(max_length=300)]
_OF_PROGRESS = ("phase", "done", "total", "rows", "written_bytes", "seconds")
_UNREADABLE = (Missing, msgspec.MsgspecError, ForebayError, OSError, ValueError, RecursionError)


class BuilderBeat(msgspec.Struct, frozen=True, kw_only=True):
    """The content of a heartbeat. Fields that a later forebay adds are ignored."""

    beat: _Count
    host: _Name
    pid: _Count
    layer: _Name = ""
    phase: _Name = "building"
    workers: _Count = 0  # this and the next two: in use at the last beat
    cpu_percent: _Measure = 0.0
    memory_bytes: _Count = 0
    done: _Count = 0
    total: _Count = 0
    built: _Count = 0  # chunks, by this builder, in `seconds`
    rows: _Count = 0
    written_bytes: _Count = 0
    seconds: _Measure = 0.0

    @property
    def chunks_per_second(self) -> float:
        return self.built / self.seconds if self.seconds else 0.0


def builder_owners(store: Store) -> list[str]:
    """The owners of all heartbeats; files with other names are ignored."""
    owners = (layout.parse_builder(entry.key) for entry in store.entries(layout.BUILDERS))
    return list(islice((owner for owner in owners if owner is not None), MOST_BUILDERS))


def living_builders(store: Store) -> int:
    """How many builders have a heartbeat file and are not known to be dead, this one included."""
    return max(1, sum(not is_dead(owner) for owner in builder_owners(store)))


def read_builders(store: Store) -> dict[str, BuilderBeat]:
    """The heartbeats that can be read, by owner."""
    beats = ((owner, read_builder(store, owner)) for owner in builder_owners(store))
    return {owner: beat for owner, beat in beats if beat is not None}


def read_builder(store: Store, owner: str) -> BuilderBeat | None:
    """The heartbeat of one builder, or None if it is missing or unreadable."""
    key = layout.builder(owner)
    if layout.parse_builder(key) is None:
        return None  # a claim may have any text as its owner
    try:
        text = store.read(key, 0, MOST_BYTES + 1)
        return msgspec.json.decode(text, type=BuilderBeat) if len(text) <= MOST_BYTES else None
    except _UNREADABLE:
        return None


def is_dead(owner: str) -> bool:
    """True if an owner is known to be dead; only its own host can tell."""
    parsed = Owner.parse(owner)
    return parsed is not None and parsed.is_dead()


def _is_running(owner: Owner) -> bool:
    """True if a process of this host runs and is not stopped."""
    try:
        return not owner.is_dead() and bool(psutil.Process(owner.pid).status() != psutil.STATUS_STOPPED)
    except (psutil.Error, ValueError):
        return False


class HeartbeatWatch:
    """When the counters of other builders last changed, on the clock of this process."""

    def __init__(self, store: Store, lease_seconds: float = LEASE_SECONDS) -> None:
        self.lease_seconds = lease_seconds
        self._store = store
        self._seen: dict[str, tuple[int, float, float]] = {}  # owner -> counter, first seen at, last read at
        self._moved: set[str] = set()

    def is_silent(self, owner: str) -> bool:
        """True if an owner has not changed its counter for a lease; without a heartbeat the counter is -1."""
        now = time.monotonic()
        counter, since, read = self._seen.get(owner, (None, now, -self.lease_seconds))
        if now - read >= min(1.0, self.lease_seconds / BEATS_PER_LEASE):
            beat = read_builder(self._store, owner)
            current = -1 if beat is None else beat.beat
            if counter is not None and current > counter:
                self._moved.add(owner)
            counter, since = (counter, since) if current == counter else (current, now)
            self._seen[owner] = (counter, since, now)
        return now - since >= self.lease_seconds

    def is_alive(self, owner: str) -> bool:
        """True if an owner is known to work: it runs on this host, or beats on another while it is watched."""
        is_silent, parsed = self.is_silent(owner), Owner.parse(owner)
        if parsed is not None and parsed.host == this_host():
            return _is_running(parsed)  # the last beat of a process that was stopped since proves nothing
        return owner in self._moved and not is_silent


class Heartbeat(threading.Thread):
    """Rewrites the file of this builder while it works; used as a context, at the end of which the file is removed."""

    def __init__(self, store: Store, lease_seconds: float = LEASE_SECONDS) -> None:
        super().__init__(name="forebay-heartbeat", daemon=True)
        self.progress: Progress | None = None  # the last one that the builder reported
        self.layer, self.built = "", 0
        self._store, self._lease = store, lease_seconds
        self._owner = this_process()
        self._processes = ProcessTree(self._owner.pid)
        self._beat, self._last = 0, time.monotonic()
        self._was_silent = False
        self._stopped, self._beating = threading.Event(), threading.Lock()

    def run(self) -> None:
        for part in itertools.chain(EARLY_BEATS, itertools.repeat(1.0)):
            if self._stopped.wait(part * self._lease / BEATS_PER_LEASE):
                return
            self.beat()

    def beat(self) -> None:
        """Show that this builder is alive; a full disk stops the build where it writes chunks, not here."""
        with self._beating, suppress(OSError, ForebayError):
            self._beat += 1
            self._store.replace(layout.builder(str(self._owner)), [msgspec.json.encode(self._now())], durable=False)
            self._note_gap()

    def take_silence(self) -> bool:
        """True if others may have taken over claims since the last call: this process did not run for half a lease."""
        self._note_gap()
        silent, self._was_silent = self._was_silent, False
        return silent

    def _note_gap(self) -> None:
        now = time.monotonic()
        self._was_silent |= now - self._last > self._lease / 2
        self._last = now

    def _now(self) -> BuilderBeat:
        workers, cpu_percent, memory_bytes = self._processes.measure()
        progress = self.progress or Progress(phase="building", done=0, total=0)
        return BuilderBeat(
            beat=self._beat,
            host=socket.gethostname(),
            pid=self._owner.pid,
            layer=self.layer,
            built=self.built,
            workers=progress.workers or workers,
            cpu_percent=cpu_percent,
            memory_bytes=memory_bytes,
            **{name: getattr(progress, name) for name in _OF_PROGRESS},
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


@dataclass(eq=False)
class ProcessTree:
    """A process and its descendants, which are kept so that CPU is counted between two measurements."""

    pid: int
    _known: dict[int, psutil.Process] = field(default_factory=dict)

    def measure(self) -> tuple[int, float, int]:
        """Descendants, CPU in percent of one core since the last measurement, and bytes of private memory."""
        try:
            top = self._known.get(self.pid) or psutil.Process(self.pid)
            below = {child.pid: child for child in top.children(recursive=True)}
        except psutil.Error:
            return 0, 0.0, 0
        self._known = {self.pid: top} | {pid: self._known.get(pid, child) for pid, child in below.items()}
        cpu, memory = 0.0, 0
        for process in self._known.values():
            with suppress(psutil.Error):  # it has ended, or belongs to another user
                cpu += process.cpu_percent()
                memory += int(process.memory_full_info().uss)
        return len(below), round(cpu, 1), memory
