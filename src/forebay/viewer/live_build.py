"""A build as it runs, observed from outside: what is in the cache, and the processes of builders on this machine.

Files of chunks give the speed, heartbeats the builders, claims what each computes. A builder on another machine is
shown as of its last heartbeat; one on this machine is measured.
"""

import threading
import time
from collections import deque
from collections.abc import Collection, Mapping, Sequence
from dataclasses import dataclass, field

from forebay.cache.claims import BuilderBeat, Claim, ProcessTree, Pulses, Usage, is_dead, read_builders
from forebay.cache.records import Record
from forebay.errors import ForebayError
from forebay.format import layout
from forebay.format.chunk_decode import ChunkFile
from forebay.store.base import Owner, Store, this_host
from forebay.viewer.chunk_map import CLAIMED, MADE, PUBLISHED, ChunkMap, HeadChecks, chunk_map, is_here

FRESH_SECONDS = 0.7  # a snapshot younger than this is shown to everybody who asks
RATE_SECONDS = 30.0  # over which speeds are averaged
HISTORY = 600
OPENED_AT_ONCE = 256  # new chunks whose rows are counted in one snapshot


class LiveBuilder(Record, frozen=True, kw_only=True):
    host: str
    pid: int
    here: bool  # on this machine: measured now; elsewhere: as of its last heartbeat
    computing: int  # chunks that it holds and that have no file yet
    workers: int
    cpu_percent: float
    memory_bytes: int
    state: str  # working or abandoned


class Moment(Record, frozen=True, kw_only=True):
    """One point of the curves."""

    time: float  # seconds since 1970
    done: int
    chunks_per_second: float
    rows_per_second: float
    bytes_per_second: float
    cpu_percent: float
    memory_bytes: int
    computing: int
    builders: int
    workers: int
    utilization: float  # share of the workers that compute a chunk
    eta_seconds: float | None


class LiveBuild(Record, frozen=True, kw_only=True):
    """How far a build is, and how fast it moves."""

    running: bool
    done: int
    planned: int
    rows: int  # published and made
    bytes: int
    chunks_per_second: float
    rows_per_second: float
    bytes_per_second: float
    eta_seconds: float | None
    builders: tuple[LiveBuilder, ...]
    moment: Moment


@dataclass(frozen=True)
class BuildMoment:
    map: ChunkMap
    live: LiveBuild


@dataclass(eq=False)
class Watch:
    """Looks at a cache at most about once a second, however many pages are open."""

    store: Store
    heads: HeadChecks
    history: deque[Moment] = field(default_factory=lambda: deque(maxlen=HISTORY))

    def __post_init__(self) -> None:
        self._pulses = Pulses(self.store)
        self._processes: dict[str, ProcessTree] = {}
        self._lock = threading.Lock()
        self._last: BuildMoment | None = None
        self._taken = self._cost = 0.0
        self._rows_made: dict[tuple[str, int], int] = {}
        self._points: deque[tuple[float, int, int, int]] = deque()  # time, chunks, rows, bytes

    def snapshot(self) -> BuildMoment:
        """The cache as it is now; a listing that takes long is repeated less often."""
        with self._lock:
            if self._last is None or time.monotonic() - self._taken >= max(FRESH_SECONDS, 2 * self._cost):
                began = time.monotonic()
                self._last = self._look()
                self._taken = time.monotonic()
                self._cost = self._taken - began
            return self._last

    def _look(self) -> BuildMoment:
        beats = read_builders(self.store)
        self._pulses.take(beats)
        found, claims = chunk_map(self.store, self.heads, self._pulses)
        builders = self._builders(found, claims, beats)
        done = sum(layer.states.count(PUBLISHED) + layer.states.count(MADE) for layer in found.layers)
        planned = sum(layer.planned for layer in found.layers)
        rows = found.rows + self._made_rows(found)
        size = sum(layer.files_bytes for layer in found.layers)
        chunks_s, rows_s, bytes_s = self._speeds(done, rows, size)
        at_work = [one for one in builders if one.state == "working"]
        running = bool(at_work)
        eta = (planned - done) / chunks_s if running and chunks_s > 0 else None
        computing, workers = sum(one.computing for one in at_work), sum(one.workers for one in at_work)
        moment = Moment(
            time=time.time(),
            done=done,
            chunks_per_second=chunks_s,
            rows_per_second=rows_s,
            bytes_per_second=bytes_s,
            cpu_percent=sum(one.cpu_percent for one in at_work),
            memory_bytes=sum(one.memory_bytes for one in at_work),
            computing=computing,
            builders=len(at_work),
            workers=workers,
            utilization=min(1.0, computing / workers) if workers else 0.0,
            eta_seconds=eta,
        )
        if running or (self.history and self.history[-1].computing):
            self.history.append(moment)
        live = LiveBuild(
            running=running,
            done=done,
            planned=planned,
            rows=rows,
            bytes=size,
            chunks_per_second=chunks_s,
            rows_per_second=rows_s,
            bytes_per_second=bytes_s,
            eta_seconds=eta,
            builders=builders,
            moment=moment,
        )
        return BuildMoment(found, live)

    def _speeds(self, *now: int) -> tuple[float, float, float]:
        """Chunks, rows and bytes per second over the last half minute."""
        self._points.append((time.monotonic(), *now))  # type: ignore[arg-type]
        while len(self._points) > 2 and self._points[-1][0] - self._points[0][0] > RATE_SECONDS:
            self._points.popleft()
        first, last = self._points[0], self._points[-1]
        seconds = last[0] - first[0]
        chunks, rows, size = (
            max(0, b - a) / seconds if seconds else 0.0 for a, b in zip(first[1:], last[1:], strict=True)
        )
        return chunks, rows, size

    def _made_rows(self, found: ChunkMap) -> int:
        """Rows of the base layer's chunks that no generation lists yet, from their headers."""
        base = next((layer for layer in found.layers if layer.kind), None)
        if base is None:
            return 0
        made = [chunk for chunk, code in enumerate(base.states) if code == MADE] if MADE in base.states else []
        fresh = [chunk for chunk in made if (base.layer, chunk) not in self._rows_made]
        for chunk in fresh[:OPENED_AT_ONCE]:
            self._rows_made[base.layer, chunk] = self._rows_of(base.layer, chunk)
        return sum(self._rows_made.get((base.layer, chunk), 0) for chunk in made)

    def _rows_of(self, layer: str, chunk: int) -> int:
        key = layout.chunk(layer, chunk)
        try:
            return ChunkFile(self.store.view(key), key).rows if is_here(self.store) else 0
        except (KeyError, ForebayError, OSError, ValueError):
            return 0

    def _builders(
        self, found: ChunkMap, claims: Mapping[str, Mapping[str, Claim]], beats: Mapping[str, BuilderBeat]
    ) -> tuple[LiveBuilder, ...]:
        """Every builder that has a heartbeat, or holds claims as an earlier forebay does."""
        held: dict[str, list[tuple[str, int, Claim]]] = {owner: [] for owner in beats}
        for layer, of_layer in claims.items():
            for key, claim in of_layer.items():
                parsed = layout.parse_claim(key)
                if claim.state == "working" and parsed:
                    held.setdefault(claim.owner, []).append((layer, parsed[0], claim))
        states = {layer.layer: layer.states for layer in found.layers}
        working = {(one.layer, one.chunk) for one in found.claims if one.state == "working"}
        self._processes = {owner: one for owner, one in self._processes.items() if owner in held}
        return tuple(
            self._builder(owner, chunks, states, working, beats.get(owner)) for owner, chunks in sorted(held.items())
        )

    def _builder(
        self,
        owner: str,
        held: Sequence[tuple[str, int, Claim]],
        states: Mapping[str, str],
        working: Collection[tuple[str, int]],
        beat: BuilderBeat | None,
    ) -> LiveBuilder:
        beat = beat or BuilderBeat(beat=0, host=held[0][2].host, pid=held[0][2].pid)
        parsed = Owner.parse(owner)
        here = parsed is not None and parsed.host == this_host()
        usage = Usage(beat.workers, beat.cpu_percent, beat.memory_bytes)
        if here:
            usage = self._processes.setdefault(owner, ProcessTree(beat.pid)).measure()
        computing = sum(chunk < len(states[layer]) and states[layer][chunk] == CLAIMED for layer, chunk, _ in held)
        is_gone = is_dead(owner) or self._pulses.is_silent(owner)
        is_at_work = any((layer, chunk) in working for layer, chunk, _ in held) if held else not is_gone
        return LiveBuilder(
            host=beat.host,
            pid=beat.pid,
            here=here,
            computing=computing,
            workers=usage.workers,
            cpu_percent=usage.cpu_percent,
            memory_bytes=usage.memory_bytes,
            state="working" if is_at_work else "abandoned",
        )
