"""Claims: who computes which chunk, so that builders on one cache do not do the same work twice.

    nobody ──create 000035.1──▶ A works, beats ──publishes chunk, deletes 000035.1──▶ done
                                 A stops beating ──B creates 000035.2──▶ B works …

A claim is advice: two builders that both hold one make the same bytes, and the second learns that the chunk exists. It
is written once, and names its owner, whose heartbeat (`heartbeats`) keeps all of its claims alive. It expires when that
has not moved for a lease on the observer's own clock, at once when the owner is known to be dead. Whoever creates the
next attempt has it; creation happens once, so exactly one takes over.
"""

import itertools
from collections.abc import Callable, Iterable
from typing import Literal

import msgspec

from forebay.cache.heartbeats import LEASE_SECONDS, Pulses, builder_owners, is_dead
from forebay.errors import ForebayError, NotForebay, StoreRefused
from forebay.format import layout
from forebay.store.base import Missing, Store, read_document, this_process

MOST_ATTEMPTS = 999_999  # a file with a higher number is none of ours
STRANGE_NAMES = 8  # in a row, taken by what is not a claim, before a chunk is passed over for now


class Claim(msgspec.Struct, frozen=True, kw_only=True, omit_defaults=True):
    """The content of a claim file."""

    owner: str
    host: str
    pid: int
    beat: int = 0  # a counter that an earlier forebay moves here; now it is in the heartbeat of the owner
    build: int = 0  # which one of its process
    state: Literal["working", "failed"] = "working"
    reason: str = ""


_BUILDS = itertools.count(1)
_AT_WORK: set[int] = set()  # the builds of this process that may hold claims


class Claims:
    """The claims of one builder on one layer, and its view of everybody else's."""

    def __init__(self, store: Store, layer: str, host: str, lease_seconds: float = LEASE_SECONDS) -> None:
        self._store = store
        self.pulses = Pulses(store, lease_seconds)
        self._layer = layer
        self._owner, self._build = this_process(), next(_BUILDS)
        _AT_WORK.add(self._build)
        self._host = host
        self._held: dict[int, int] = {}  # chunk -> attempt
        self._holders: dict[int, Claim] = {}  # chunk -> the claim of another that was there when it was last asked for
        # A failure recorded before this builder began is tried again; one recorded since then has another etag.
        self._before = {entry.key: entry.etag for entry in store.entries(layout.claims_folder(layer))}

    def take(self, chunk: int) -> bool:
        """Claim a chunk, unless a live builder has it or it failed since this builder began."""
        if chunk not in self._held and self._create(chunk, 1):  # most chunks have no claim: no listing is needed
            return True
        attempts, attempt = self._attempts(chunk), 1
        self._holders.pop(chunk, None)
        if attempts:
            last = max(attempts)
            if not self._is_free(layout.claim(self._layer, chunk, last), attempts[last]):
                self._holders[chunk] = attempts[last]
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
        holder = self._holders.get(chunk)
        return holder.reason if holder is not None and holder.state == "failed" else None

    def hosts(self, chunks: Iterable[int]) -> tuple[str, ...]:
        """The machines of the builders that held some chunks when they were last asked for."""
        return tuple(sorted({self._holders[chunk].host for chunk in chunks if chunk in self._holders}))

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
        """Give up a chunk, made or not; nothing of its claims is left."""
        own = self._held[chunk]
        before = self._attempts(chunk) if own > 1 else ()
        for attempt in [*(earlier for earlier in before if earlier < own), own]:
            self._store.delete(layout.claim(self._layer, chunk, attempt))
        del self._held[chunk]

    def remove_abandoned(self, is_made: Callable[[int], bool]) -> None:
        """Delete what dead builders left: their heartbeats, and claims on chunks that are made, which nobody takes."""
        for key, claim in read_claims(self._store, self._layer).items():
            if is_abandoned(claim) and is_made(claimed(key)[0]):
                self._store.delete(key)
        silent = self.pulses.silent_owners()
        for owner in builder_owners(self._store):
            if owner in silent or is_dead(owner):
                self._store.delete(layout.builder(owner))

    def fail(self, chunk: int, reason: str) -> None:
        """Record that a chunk cannot be made."""
        key = layout.claim(self._layer, chunk, self._held[chunk])
        self._store.replace(key, [self._encode("failed", reason)], durable=False)
        del self._held[chunk]

    def _attempts(self, chunk: int) -> dict[int, Claim]:
        prefix = f"{layout.claims_folder(self._layer)}{chunk:06d}."
        return {claimed(key)[1]: claim for key, claim in read_claims(self._store, self._layer, prefix).items()}

    def _is_free(self, key: str, claim: Claim) -> bool:
        if claim.state == "failed":
            return self._is_from_before(key)
        if claim.owner == str(self._owner):  # of this process: held by another thread, or left by an earlier build
            return claim.build not in _AT_WORK
        return is_abandoned(claim) or self.pulses.is_silent(claim.owner, key, claim.beat)

    def _is_from_before(self, key: str) -> bool:
        """Whether a claim has been as it is since before this builder began."""
        now = self._store.head(key)
        return now is not None and now.etag == self._before.get(key)

    def _encode(self, state: Literal["working", "failed"] = "working", reason: str = "") -> bytes:
        owner = self._owner
        claim = Claim(owner=str(owner), host=self._host, pid=owner.pid, build=self._build, state=state, reason=reason)
        return msgspec.json.encode(claim)


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
    return is_dead(claim.owner)
