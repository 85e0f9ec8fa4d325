"""A build as it runs, observed from outside: what is in the cache, and the processes of builders on this machine.

Files of chunks give the speed, heartbeats the builders, claims what each computes. A builder on another machine is
shown as of its last heartbeat; one on this machine is measured.

Every chunk of every layer as one character, from listings alone: no file is opened to draw the map.

.  missing     planned, not made
c  claimed     a builder computes it now, or next
a  abandoned   its builder died or has been silent for a lease
f  failed      a builder gave it up, and said why
u  made        a file that no generation lists yet
p  published   listed, and its file has the published size
l  lost        listed, but its file is gone
b  bad         listed, but size, header or index differ from what was published

Headers are compared in the background, a fraction of a second at a time: a map of 100,000 chunks does not wait. Those
of a cache on another machine are not, as that would fetch it.
"""

import threading
import time
from collections import Counter, deque
from collections.abc import Collection, Mapping, Sequence
from dataclasses import dataclass, field

import numpy as np
from numpy.typing import NDArray

from forebay.cache.catalog import layers_of, newest_generation, open_chunk, read_recipe_document
from forebay.cache.claims import (
    BuilderBeat,
    Claim,
    ProcessTree,
    Pulses,
    Usage,
    claimed,
    is_abandoned,
    is_dead,
    read_builders,
    read_claims,
)
from forebay.cache.plan import Plan, load_plan
from forebay.cache.records import ClaimStatus, Record
from forebay.errors import ChunkMissing, Damaged, ForebayError
from forebay.format import layout
from forebay.format.chunk import ChunkFile
from forebay.format.generation import ChunkTable, Generation
from forebay.store.base import Owner, Store, this_host

MISSING, CLAIMED, ABANDONED, FAILED, MADE, PUBLISHED, LOST, BAD = ".cafuplb"
NAMES = {
    MISSING: "missing",
    CLAIMED: "claimed",
    ABANDONED: "abandoned",
    FAILED: "failed",
    MADE: "made",
    PUBLISHED: "published",
    LOST: "lost",
    BAD: "bad",
}
CHECK_SECONDS = 0.1  # that one map spends on comparing headers
MOST_UNPLANNED = 1 << 20  # cells of a map whose plan is damaged: a stranger's generation may have any numbers
MOST_CLAIMS = 10_000  # that are listed one by one
Codes = NDArray[np.uint8]


class LayerMap(Record, frozen=True, kw_only=True):
    layer: str
    kind: str
    planned: int
    states: str  # one character per chunk, as the module docstring lists them
    counts: dict[str, int]
    files_bytes: int  # of all chunk files that are there, published or not
    headers_checked: int  # of the published chunks


class ChunkMap(Record, frozen=True, kw_only=True):
    """The state of every chunk of a cache."""

    root: str
    generation: int | None
    rows: int
    layers: tuple[LayerMap, ...]
    claims: tuple[ClaimStatus, ...]
    note: str = ""  # why the map is incomplete


@dataclass(eq=False)
class HeadChecks:
    """The chunks whose headers were compared with the generation, and those that differ or failed to read."""

    sound: dict[str, set[bytes]] = field(default_factory=dict)  # layer -> digests of heads
    bad: dict[tuple[str, int, bytes], str] = field(default_factory=dict)  # layer, chunk, digest -> problem
    _lock: threading.Lock = field(default_factory=threading.Lock)

    def check(self, store: Store, layer: str, table: ChunkTable, seconds: float) -> int:
        """Compare headers for at most `seconds`; returns how many are compared by now."""
        known, stop = self.sound.setdefault(layer, set()), time.monotonic() + seconds
        if not is_here(store):
            return len(known)
        with self._lock:
            if len(known) >= len(table):
                return len(table)
            for at in range(len(table)):
                head = table.digests["head"][at].tobytes() + int(table.chunks[at]).to_bytes(8, "little")
                if head in known:
                    continue
                if time.monotonic() > stop:
                    return min(len(known), len(table))
                record = table.record(at)
                try:
                    open_chunk(store, layer, record)
                except ChunkMissing:
                    pass
                except (Damaged, OSError) as error:
                    self.bad[layer, record.chunk, record.sha256] = str(error)
                known.add(head)
        return len(table)

    def report(self, layer: str, chunk: int, sha256: bytes, problem: str) -> None:
        """Remember a chunk that could not be read, whatever its header says."""
        self.bad[layer, chunk, sha256] = problem

    def problem(self, layer: str, chunk: int, sha256: bytes) -> str:
        return self.bad.get((layer, chunk, sha256), "")


def is_here(store: Store) -> bool:
    """Whether chunks are files of this machine: to open one of another store would fetch all of it."""
    return store.local_path(layout.CACHE) is not None


def chunk_map(store: Store, heads: HeadChecks, pulses: Pulses) -> tuple[ChunkMap, dict[str, dict[str, Claim]]]:
    """The map of a cache as it is now, and the claims by layer and key."""
    newest, plan, note = _index(store)
    names = layers_of(store, newest.recipes if newest else ())
    claims = {name: _held_claims(store, name) for name in names}
    layers = tuple(_layer_map(store, name, plan, newest, claims[name], heads, pulses) for name in names)
    found = ChunkMap(
        root=store.address,
        generation=newest.number if newest else None,
        rows=int(newest.table(newest.base).rows.sum()) if newest else 0,
        layers=layers,
        claims=tuple(claim_status(name, key, claims[name][key], pulses) for name, key in _listed(claims)),
        note=note,
    )
    return found, claims


def _held_claims(store: Store, layer: str) -> dict[str, Claim]:
    return {key: claim for key, claim in read_claims(store, layer).items() if claim.state != "returned"}


def _listed(claims: Mapping[str, Mapping[str, Claim]]) -> list[tuple[str, str]]:
    """Layers and keys of claims in order; of very many, first those of builders that work."""
    found = [(claim.state == "failed", name, key) for name in claims for key, claim in claims[name].items()]
    return sorted((name, key) for _, name, key in sorted(found)[:MOST_CLAIMS])


def _index(store: Store) -> tuple[Generation | None, Plan, str]:
    """The newest generation and the plan; where one is damaged, the map goes without it and says so."""
    note = ""
    newest, plan = None, Plan((), ())
    try:
        newest = newest_generation(store)
    except (ForebayError, OSError) as error:
        note = str(error)
    try:
        plan = load_plan(store)
    except (ForebayError, OSError) as error:
        note = note or str(error)
    return newest, plan, note


def _layer_map(
    store: Store,
    layer: str,
    plan: Plan,
    newest: Generation | None,
    claims: Mapping[str, Claim],
    heads: HeadChecks,
    pulses: Pulses,
) -> LayerMap:
    table = newest.table(layer) if newest else ChunkTable.of([])
    files = _files(store, layer)
    planned = len(plan) or min(MOST_UNPLANNED, int(table.chunks.max(initial=-1)) + 1)
    codes = np.full(planned, ord(MISSING), np.uint8)
    for key, claim in claims.items():
        chunk, state = claimed(key)[0], _claim_state(key, claim, pulses)
        if chunk < planned:
            codes[chunk] = ord({"failed": FAILED, "working": CLAIMED}.get(state, ABANDONED))
    there = np.fromiter((chunk for chunk, _ in files if chunk < planned), np.int64)
    codes[there] = ord(MADE)
    _mark_listed(codes, table, files)
    checked = heads.check(store, layer, table, CHECK_SECONDS)
    for name, chunk, sha256 in list(heads.bad):
        at = table.position(chunk) if name == layer and chunk < planned else None
        if at is not None and table.digests["sha256"][at].tobytes() == sha256 and codes[chunk] != ord(LOST):
            codes[chunk] = ord(BAD)
    kept = read_recipe_document(store, layer)
    states = codes.tobytes().decode("ascii")
    return LayerMap(
        layer=layer,
        kind=kept.kind if kept else "",
        planned=planned,
        states=states,
        counts={NAMES[code]: count for code, count in sorted(Counter(states).items())},
        files_bytes=sum(files.values()),
        headers_checked=checked,
    )


def _files(store: Store, layer: str) -> dict[tuple[int, int], int]:
    """(chunk, revision) -> bytes of its file."""
    found = ((layout.parse_chunk(entry.key), entry.size) for entry in store.entries(layout.layer_folder(layer)))
    return {parsed: size for parsed, size in found if parsed is not None}


def _mark_listed(codes: Codes, table: ChunkTable, files: Mapping[tuple[int, int], int]) -> None:
    listed = zip(table.chunks.tolist(), table.numbers["revision"].tolist(), strict=True)
    sizes = np.fromiter((files.get(one, -1) for one in listed), np.int64, len(table))
    states = np.where(sizes < 0, ord(LOST), np.where(sizes == table.numbers["size"], ord(PUBLISHED), ord(BAD)))
    shown = table.chunks < len(codes)
    codes[table.chunks[shown]] = states[shown]


def _claim_state(key: str, claim: Claim, pulses: Pulses) -> str:
    if claim.state == "failed":
        return "failed"
    return "abandoned" if is_abandoned(claim) or pulses.is_silent(claim.owner, key, claim.beat) else "working"


def claim_status(layer: str, key: str, claim: Claim, pulses: Pulses) -> ClaimStatus:
    return ClaimStatus(
        layer=layer,
        chunk=claimed(key)[0],
        host=claim.host,
        pid=claim.pid,
        state=_claim_state(key, claim, pulses),
        reason=claim.reason,
    )


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
