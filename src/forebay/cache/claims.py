"""Claims: advisory leases that save builders of one cache from doing the same work twice.

    free ──create 000035.json──▶ A works, beats ──lists the chunk, deletes 000035.json──▶ done
                                 A stops beating ──B replaces 000035.json──▶ B works …

A claim has its owner, whose heartbeat keeps all of its claims alive. It expires if that has not changed for a lease,
at once if the owner is known to be dead. Two builders that both hold a claim make the same bytes: nothing is lost but
time. A claim on a chunk is released only after the chunk is listed or discarded. `claims/plan.json` and
`claims/publish.json` are claims on planning and on publishing.
"""

import itertools
import socket
import threading
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager, suppress

import msgspec

from forebay.cache.heartbeat import LEASE_SECONDS, HeartbeatWatch, is_dead
from forebay.errors import Damaged, ForebayError
from forebay.format import layout
from forebay.store.base import Entry, Missing, Store, read_document
from forebay.store.owners import this_process

POLL_SECONDS = 0.1  # between two attempts to take a claim that is held
_UNREADABLE = (msgspec.MsgspecError, ForebayError, OSError, ValueError, RecursionError)
_BUILDS = itertools.count(1)
_AT_WORK: dict[int, int] = {}  # the builds of this process that may hold claims -> their threads


class Claim(msgspec.Struct, frozen=True, kw_only=True, omit_defaults=True):
    """The content of a claim file."""

    owner: str
    host: str
    pid: int
    build: int = 0  # of its process, counted from 1


class Claims:
    """The claims of one builder, and its view of all others.

    The pid of a leftover of an earlier build in this process is alive, so builds are counted.
    """

    def __init__(self, store: Store, lease_seconds: float = LEASE_SECONDS) -> None:
        self.watch = HeartbeatWatch(store, lease_seconds)
        self._store = store
        self._build = next(_BUILDS)
        self._held: set[str] = set()
        _AT_WORK[self._build] = threading.get_ident()

    def take(self, key: str) -> bool:
        """Claim a key, unless a living builder has it."""
        if key in self._held or self._create(key):
            return True
        read = _read(self._store, key)
        if read is None:  # released meanwhile; or a folder or a link has the name, and the claim is only advice
            return self._create(key) or _read(self._store, key) is None
        entry, claim = read
        return self.is_free(claim) and self._held_if(key, lambda: self._take_over(key, entry.etag))

    def _create(self, key: str) -> bool:
        return self._held_if(key, lambda: self._store.create(key, [self._encoded()], durable=False))

    def _take_over(self, key: str, etag: str) -> bool:
        # A store that repeats a replacement whose answer was lost finds the claim changed: by itself.
        return self._store.replace(key, [self._encoded()], if_etag=etag, durable=False) or self.is_mine(key)

    def _held_if(self, key: str, write: Callable[[], bool]) -> bool:
        """Note a claim before writing it, so an interrupt or a disk error leaves no file behind."""
        self._held.add(key)
        try:
            is_written = write()
        except Damaged:  # a folder or a link has the name
            is_written = False
        if not is_written:
            self._held.discard(key)
        return is_written

    def release(self, key: str, is_listed: bool = False) -> None:
        """Release a claim, unless another builder took it over and the chunk is not listed."""
        if key in self._held:
            if is_listed or self.is_mine(key):
                self._store.delete(key)
            self._held.discard(key)

    def release_all(self) -> None:
        """Give up all claims; one that cannot be deleted expires."""
        _AT_WORK.pop(self._build, None)
        for key in list(self._held):
            with suppress(OSError):
                self.release(key)

    def is_mine(self, key: str) -> bool:
        """True if the file of a held claim is still the one this builder wrote."""
        try:
            return key in self._held and read_document(self._store, key) == self._encoded()
        except (Missing, Damaged):
            return False

    def holder(self, key: str) -> Claim | None:
        """The claim of another living builder on a key, None if it is free or held here."""
        read = None if key in self._held else _read(self._store, key)
        return None if read is None or self.is_free(read[1]) else read[1]

    def is_free(self, claim: Claim) -> bool:
        """True if another builder may take over a claim."""
        if claim.owner == str(this_process()):  # held by another thread, or left by an earlier build
            return claim.build not in _AT_WORK
        return is_dead(claim.owner) or self.watch.is_silent(claim.owner)

    @contextmanager
    def holding(self, key: str, wait_seconds: float, is_over: Callable[[], bool] = lambda: False) -> Iterator[bool]:
        """Hold a claim; False after `wait_seconds`, once `is_over`, or if this thread already holds it."""
        deadline, taken = time.monotonic() + wait_seconds, False
        try:
            with suppress(OSError, ForebayError):  # the claim is advisory: what is done next raises what is wrong
                while not (taken := self.take(key)) and time.monotonic() < deadline:
                    claim = self.holder(key)
                    if is_over() or (claim is not None and self._is_own_caller(claim)):
                        break
                    time.sleep(POLL_SECONDS)
            yield taken
        finally:
            if taken:
                with suppress(OSError, ForebayError):  # it expires
                    self.release(key)

    def _is_own_caller(self, claim: Claim) -> bool:
        """True if an outer build in this thread holds the claim: waiting for it would never end."""
        return claim.owner == str(this_process()) and _AT_WORK.get(claim.build) == threading.get_ident()

    def _encoded(self) -> bytes:
        owner = this_process()
        return msgspec.json.encode(Claim(owner=str(owner), host=socket.gethostname(), pid=owner.pid, build=self._build))


def read_claims(store: Store, prefix: str = layout.CLAIMS) -> dict[str, Claim]:
    """Every claim below a prefix, by key; files with other names are ignored."""
    keys = [entry.key for entry in store.entries(prefix) if is_claim(entry.key)]
    claims = ((key, _read(store, key)) for key in keys)
    return {key: read[1] for key, read in claims if read is not None}


def is_claim(key: str) -> bool:
    return key in (layout.PLAN_CLAIM, layout.PUBLISH_CLAIM) or layout.parse_claim(key) is not None


def _read(store: Store, key: str) -> tuple[Entry, Claim] | None:
    """A claim; None if it is gone. One that cannot be read has an unknown owner: it counts as held and expires."""
    try:
        if (entry := store.head(key)) is None:
            return None
    except Damaged:
        return None
    try:
        return entry, msgspec.json.decode(read_document(store, key), type=Claim)
    except Missing:
        return None
    except _UNREADABLE:
        return entry, Claim(owner="", host="unknown", pid=0)
