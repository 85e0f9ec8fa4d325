"""A build as it runs, observed from outside: the chunk map, and the builders as of their last heartbeats."""

import threading
import time
from collections import deque
from collections.abc import Sequence
from dataclasses import dataclass, field

from forebay.cache.heartbeat import BuilderBeat, HeartbeatWatch, is_dead, read_builders
from forebay.cache.reports import BuilderStatus
from forebay.cache.status import builder_statuses
from forebay.records import Record
from forebay.store.base import Store
from forebay.viewer.chunk_map import PUBLISHED, UNLISTED, ChunkMap, HeadChecks, chunk_map

FRESH_SECONDS = 0.7  # a younger snapshot answers every page
HISTORY = 600


class Moment(Record, frozen=True, kw_only=True):
    """One point of the curves: sums over the builders that work."""

    time: float  # seconds since 1970
    done: int
    chunks_per_second: float
    rows_per_second: float
    bytes_per_second: float
    cpu_percent: float
    memory_bytes: int
    builders: int
    workers: int
    eta_seconds: float | None


class LiveBuild(Record, frozen=True, kw_only=True):
    """Progress, builders and speed of a build."""

    running: bool
    planned: int
    rows: int  # published
    bytes: int
    builders: tuple[BuilderStatus, ...]
    moment: Moment


@dataclass(frozen=True)
class BuildMoment:
    map: ChunkMap
    live: LiveBuild


@dataclass(eq=False)
class Watch:
    """Reads the index of a cache at most about once a second, however many pages are open."""

    store: Store
    heads: HeadChecks
    history: deque[Moment] = field(default_factory=lambda: deque(maxlen=HISTORY))

    def __post_init__(self) -> None:
        self._watch = HeartbeatWatch(self.store)
        self._lock = threading.Lock()
        self._last: BuildMoment | None = None
        self._taken = self._cost = 0.0

    def snapshot(self) -> BuildMoment:
        """The cache as it is now; a listing that takes long is repeated less often."""
        with self._lock:
            if self._last is None or time.monotonic() - self._taken >= max(FRESH_SECONDS, 2 * self._cost):
                began = time.monotonic()
                self._last = self._read()
                self._taken = time.monotonic()
                self._cost = self._taken - began
            return self._last

    def _read(self) -> BuildMoment:
        beats = read_builders(self.store)
        chunks = chunk_map(self.store, self.heads, self._watch)
        gone = {owner for owner in beats if is_dead(owner) or self._watch.is_silent(owner)}
        done = {layer.layer: sum(map(layer.states.count, PUBLISHED + UNLISTED)) for layer in chunks.layers}
        missing = {layer.layer: layer.planned - done[layer.layer] for layer in chunks.layers}
        builders = builder_statuses(beats, missing, gone.__contains__)
        working = [beat for owner, beat in beats.items() if owner not in gone]
        moment = _moment(sum(done.values()), working, builders)
        if working or (self.history and self.history[-1].builders):
            self.history.append(moment)
        live = LiveBuild(
            running=bool(working),
            planned=sum(layer.planned for layer in chunks.layers),
            rows=chunks.rows,
            bytes=sum(layer.files_bytes for layer in chunks.layers),
            builders=builders,
            moment=moment,
        )
        return BuildMoment(chunks, live)


def _moment(done: int, working: Sequence[BuilderBeat], builders: Sequence[BuilderStatus]) -> Moment:
    timed = [beat for beat in working if beat.seconds]
    waits = [one.eta_seconds for one in builders if one.state == "working" and one.eta_seconds is not None]
    return Moment(
        time=time.time(),
        done=done,
        chunks_per_second=sum(beat.chunks_per_second for beat in timed),
        rows_per_second=sum(beat.rows / beat.seconds for beat in timed),
        bytes_per_second=sum(beat.written_bytes / beat.seconds for beat in timed),
        cpu_percent=sum(beat.cpu_percent for beat in working),
        memory_bytes=sum(beat.memory_bytes for beat in working),
        builders=len(working),
        workers=sum(beat.workers for beat in working),
        eta_seconds=max(waits, default=None),
    )
