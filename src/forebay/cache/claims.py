"""Claims: who computes which chunk, so that builders on one cache do not do the same work twice.

    nobody ──create 000035.1──▶ A works, beats ──publishes chunk, deletes 000035.1──▶ done
                                 A stops beating ──B creates 000035.2──▶ B works …

A claim is advice: two builders that both hold one make the same bytes, and the second learns that the chunk exists.
It expires when its heartbeat has not moved for a lease on the observer's own clock, at once when the owner is known to
be dead. Whoever creates the next attempt has it; creation happens once, so exactly one takes over.
"""

import threading
import time
from collections.abc import Callable, Iterable
from contextlib import suppress
from typing import Literal

import msgspec

from forebay.cache.builder_usage import ProcessTree, Usage
from forebay.errors import ForebayError, NotForebay, StoreRefused
from forebay.format import layout
from forebay.store.base import Missing, Store, read_document
from forebay.store.owner import Owner, this_process

LEASE_SECONDS = 60.0
MOST_BYTES = 64 * 1024  # of a claim
MOST_ATTEMPTS = 999_999  # a file with a higher number is none of ours
STRANGE_NAMES = 8  # in a row, taken by what is not a claim, before a chunk is passed over for now


class Claim(msgspec.Struct, frozen=True, kw_only=True):
    """The content of a claim file."""

    owner: str
    host: str
    pid: int
    beat: int = 0
    state: Literal["working", "failed"] = "working"
    reason: str = ""
    workers: int = 0  # this and the next two: what the builder used at its last beat
    cpu_percent: float = 0.0
    memory_bytes: int = 0


class Claims:
    """The claims of one builder on one layer, and its view of everybody else's."""

    def __init__(self, store: Store, layer: str, host: str, lease_seconds: float = LEASE_SECONDS) -> None:
        self.lease_seconds = lease_seconds
        self._store = store
        self._layer = layer
        self._owner = this_process()
        self._host = host
        self._held: dict[int, int] = {}  # chunk -> attempt
        self._seen: dict[str, tuple[int, float]] = {}  # key -> beat, when this clock first saw it
        self._holders: dict[int, str] = {}  # chunk -> the host that had it when it was last asked for
        self._beat = 0
        self._processes, self._usage = ProcessTree(self._owner.pid), Usage()
        self._lock = threading.Lock()
        # A failure recorded before this builder began is tried again; one recorded since then is respected.
        self._old_failures = {key for key, claim in self.read_all().items() if claim.state == "failed"}

    def take(self, chunk: int) -> bool:
        """Claim a chunk, unless a live builder has it or it failed since this builder began."""
        if chunk not in self._held and self._create(chunk, 1):  # most chunks have no claim: no listing is needed
            return True
        attempts = self._attempts(chunk)
        attempt = 1
        if attempts:
            last = max(attempts)
            key = layout.claim(self._layer, chunk, last)
            if not self._is_free(key, attempts[last]):
                self._holders[chunk] = attempts[last].host
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
        with self._lock:
            self._held[chunk] = attempt  # first, so that an interruption while it is created leaves nothing behind
            try:
                created = self._store.create(layout.claim(self._layer, chunk, attempt), [self._encode()], durable=False)
            except NotForebay:
                created = False
            except (OSError, StoreRefused):  # the disk may have failed after it made the file, which is then ours
                created = self._is_there(chunk, attempt)
                if not created:
                    del self._held[chunk]  # a heartbeat would create it, and this builder wait for itself
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
        """Why a builder gave a chunk up since this one began; None where none did."""
        attempts = self._attempts(chunk)
        last = attempts[max(attempts)] if attempts else None
        if last is None or last.state != "failed":
            return None
        return None if layout.claim(self._layer, chunk, max(attempts)) in self._old_failures else last.reason

    def hosts(self, chunks: Iterable[int]) -> tuple[str, ...]:
        """The machines of the builders that held some chunks when they were last asked for."""
        return tuple(sorted({self._holders[chunk] for chunk in chunks if chunk in self._holders}))

    def release_all(self) -> None:
        """Give up whatever is held; what the disk refuses is raised when the others are released."""
        refused: OSError | None = None
        for chunk in list(self._held):
            try:
                self.release(chunk)
            except OSError as error:
                refused = error
        if refused is not None:
            raise refused

    def release(self, chunk: int) -> None:
        """Give up a chunk, made or not; nothing of its claims is left."""
        with self._lock:
            own = self._held[chunk]
            before = self._attempts(chunk) if own > 1 else ()
            for attempt in [*(earlier for earlier in before if earlier < own), own]:
                self._store.delete(layout.claim(self._layer, chunk, attempt))
            del self._held[chunk]

    def remove_abandoned(self, is_made: Callable[[int], bool]) -> None:
        """Delete the claims of dead builders on chunks that are made: nobody takes those over."""
        for key, claim in self.read_all().items():
            if is_abandoned(claim) and is_made(claimed(key)[0]):
                self._store.delete(key)

    def fail(self, chunk: int, reason: str) -> None:
        """Record that a chunk cannot be made."""
        with self._lock:
            key = layout.claim(self._layer, chunk, self._held[chunk])
            self._store.replace(key, [self._encode("failed", reason)], durable=False)
            del self._held[chunk]

    def beat(self) -> None:
        """Show that this builder lives: move the counter of everything it holds."""
        usage = self._processes.measure()
        with self._lock:
            self._beat += 1
            self._usage = usage
            for chunk, attempt in self._held.items():
                with suppress(OSError, ForebayError):  # the others must beat all the same
                    self._store.replace(layout.claim(self._layer, chunk, attempt), [self._encode()], durable=False)

    def read_all(self) -> dict[str, Claim]:
        """Every claim on the layer, by key; looking also starts the clock of those not seen before."""
        return read_claims(self._store, self._layer)

    def _attempts(self, chunk: int) -> dict[int, Claim]:
        prefix = f"{layout.claims_folder(self._layer)}{chunk:06d}."
        return {claimed(key)[1]: claim for key, claim in read_claims(self._store, self._layer, prefix).items()}

    def _is_free(self, key: str, claim: Claim) -> bool:
        if claim.state == "failed":
            return key in self._old_failures
        return self._is_expired(key, claim)

    def _is_expired(self, key: str, claim: Claim) -> bool:
        if is_abandoned(claim):
            return True
        now = time.monotonic()
        beat, since = self._seen.get(key, (None, now))
        if beat != claim.beat:
            beat, since = claim.beat, now
        self._seen[key] = (claim.beat, since)
        return now - since >= self.lease_seconds

    def _encode(self, state: Literal["working", "failed"] = "working", reason: str = "") -> bytes:
        claim = Claim(
            owner=str(self._owner),
            host=self._host,
            pid=self._owner.pid,
            beat=self._beat,
            state=state,
            reason=reason,
            workers=self._usage.workers,
            cpu_percent=self._usage.cpu_percent,
            memory_bytes=self._usage.memory_bytes,
        )
        return msgspec.json.encode(claim)


class Heartbeat(threading.Thread):
    """Moves the counter of a builder's claims while it works; used as a context."""

    def __init__(self, claims: Claims) -> None:
        super().__init__(name="forebay-heartbeat", daemon=True)
        self._claims = claims
        self._stopped = threading.Event()

    def run(self) -> None:
        while not self._stopped.wait(self._claims.lease_seconds / 6):
            with suppress(OSError, ForebayError):  # a full disk stops the build where it writes chunks, not here
                self._claims.beat()

    def __enter__(self) -> "Heartbeat":
        self.start()
        return self

    def __exit__(self, *_: object) -> None:
        self._stopped.set()
        self.join()


def read_claims(store: Store, layer: str, prefix: str | None = None) -> dict[str, Claim]:
    """Every claim on a layer, by key; those that vanish while they are read, and files of other names, do not count.

    One that cannot be read has an unknown owner. It never beats, so it expires; left out, it would be in the way of
    the next attempt for ever.
    """
    claims: dict[str, Claim] = {}
    for entry in store.entries(prefix or layout.claims_folder(layer)):
        if not is_claim(layer, entry.key):
            continue
        try:
            claims[entry.key] = msgspec.json.decode(read_document(store, entry.key), type=Claim)
        except Missing:
            continue
        except (msgspec.MsgspecError, ForebayError, OSError, ValueError, RecursionError):
            claims[entry.key] = Claim(owner="", host="unknown", pid=0, reason="the claim cannot be read")
    return claims


def is_claim(layer: str, key: str) -> bool:
    """Whether a key is, to the letter, one that a claim on this layer has."""
    parsed = layout.parse_claim(key)
    return parsed is not None and parsed[1] <= MOST_ATTEMPTS and layout.claim(layer, *parsed) == key


def claimed(key: str) -> tuple[int, int]:
    """(chunk, attempt) of a claim's key."""
    parsed = layout.parse_claim(key)
    assert parsed is not None
    return parsed


def is_abandoned(claim: Claim) -> bool:
    """Whether the owner of a claim is known to be dead; only its own host can know."""
    owner = Owner.parse(claim.owner)
    return owner is not None and owner.is_dead()
