"""Heartbeats: one small file per builder, rewritten while it works, with its progress in it.

    builders/<owner>.json        {"beat": 17, "host": "node3", "made": 412, "total": 20000, …}

A builder that holds a thousand claims writes one file per beat, and whoever waits for it reads one. It is silent when
its counter has not moved for a lease on the observer's own clock: the clock of another machine is never asked.
"""

import threading
import time
from collections.abc import Callable, Mapping
from contextlib import suppress
from itertools import islice
from typing import Annotated

import msgspec

from forebay.cache.builder_usage import ProcessTree
from forebay.cache.records import Progress
from forebay.errors import ForebayError
from forebay.format import layout
from forebay.store.base import Missing, Store
from forebay.store.owner import Owner, this_process

LEASE_SECONDS = 60.0
BEATS_PER_LEASE = 6
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

    @property
    def chunks_per_second(self) -> float:
        return self.made / self.seconds if self.seconds else 0.0


def builder_owners(store: Store) -> list[str]:
    """The owners of all heartbeats, read or not; files of other names do not count."""
    owners = (layout.parse_builder(entry.key) for entry in store.entries(layout.BUILDERS))
    return list(islice((owner for owner in owners if owner is not None), MOST_BUILDERS))


def read_builders(store: Store, but: str = "") -> dict[str, BuilderBeat]:
    """The heartbeats that can be read, by owner, without the one of `but`."""
    found = ((owner, read_builder(store, owner)) for owner in builder_owners(store) if owner != but)
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

    def __init__(self, store: Store, layer: str) -> None:
        self._store, self._layer = store, layer
        self._first: dict[str, int] | None = None  # owner -> what it had made when this builder began
        self._made: dict[str, int] = {}
        self._looks = 0

    @property
    def made(self) -> int:
        """The chunks that they have made since this builder began, also those who have ended since."""
        return sum(made - (self._first or {}).get(owner, 0) for owner, made in self._made.items())

    def look_now_and_then(self) -> None:
        """Read the heartbeats, the less often the more there are: all builders do it."""
        self._looks += 1
        if self._looks % (1 + len(self._made) // BUILDERS_PER_LOOK) == 0:
            self.look()

    def look(self) -> dict[str, BuilderBeat]:
        """The heartbeats of the others that are not known to be dead, by owner."""
        beats = read_builders(self._store, but=str(this_process()))
        found = {owner: beat for owner, beat in beats.items() if beat.layer == self._layer and not is_dead(owner)}
        if self._first is None:
            self._first = {owner: beat.made for owner, beat in found.items()}
        self._made |= {owner: max(beat.made, self._made.get(owner, 0)) for owner, beat in found.items()}
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
    ) -> None:
        super().__init__(name="forebay-heartbeat", daemon=True)
        self.progress: Progress | None = None  # the last one that the builder reported
        self.made = self.unlisted = 0
        self._store, self._host, self._layer = store, host, layer
        self._seconds = lease_seconds / BEATS_PER_LEASE
        self._owner = this_process()
        self._processes = ProcessTree(self._owner.pid)
        self._beat, self._versions = 0, dict(versions or {})
        self._on_beat = on_beat
        self._stopped = threading.Event()

    def run(self) -> None:
        while not self._stopped.wait(self._seconds):
            self.beat()
            with suppress(OSError, ForebayError):
                self._on_beat()

    def beat(self) -> None:
        """Show that this builder lives; a full disk stops the build where it writes chunks, not here."""
        self._beat += 1
        with suppress(OSError, ForebayError):
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
