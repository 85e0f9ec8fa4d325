"""Claims: a live one is respected, an expired one is taken over by exactly one, a dead owner's at once."""

import contextlib
import errno
import multiprocessing
import signal
import subprocess
import sys
import time
from collections.abc import Callable, Sequence
from pathlib import Path

import msgspec
import pytest
from tests.helpers.obedient_recipes import TogetherStore

from forebay.cache.claims import Claim, Claims, read_claims
from forebay.cache.heartbeat import MOST_BYTES, read_builders
from forebay.format import layout
from forebay.store import LocalStore, MemoryStore, Store
from forebay.store.base import Buffer
from forebay.store.retrying import RetryingStore

FOLDER = layout.layer_folder("raw", "0" * layout.FINGERPRINT_DIGITS)


class ChunkClaims(Claims):
    """Claims on chunks of one layer, by number."""

    def take(self, chunk: int | str) -> bool:
        return super().take(layout.claim(FOLDER, chunk) if isinstance(chunk, int) else chunk)

    def release(self, chunk: int | str, is_listed: bool = False) -> None:
        super().release(layout.claim(FOLDER, chunk) if isinstance(chunk, int) else chunk, is_listed)


def claims_on(store: Store, lease_seconds: float = 60) -> ChunkClaims:
    return ChunkClaims(store, lease_seconds)


ELSEWHERE = "0123456789ab-1-1"  # an owner that nobody here can check for life


def claim_by_somebody_elsewhere(store: Store, chunk: int) -> None:
    elsewhere = Claim(owner=ELSEWHERE, host="elsewhere", pid=1)
    store.replace(layout.claim(FOLDER, chunk), [msgspec.json.encode(elsewhere)])


def take_when_all_are_ready(folder: str, barrier, results, lease_seconds: float) -> None:
    mine = claims_on(TogetherStore(folder, layout.claim(FOLDER, 35), barrier), lease_seconds)
    mine.take(35)
    time.sleep(lease_seconds)
    results.put(mine.take(35))
    barrier.wait()  # nobody leaves, and so dies, before all have asked


@pytest.fixture
def dead_owner(tmp_path):
    """A store with a claim on chunk 35 whose owner was killed."""
    script = (
        "import os, signal, sys; from forebay.cache.claims import Claims; from forebay.store import LocalStore\n"
        f"assert Claims(LocalStore(sys.argv[1])).take({layout.claim(FOLDER, 35)!r})\n"
        "os.kill(os.getpid(), signal.SIGKILL)"
    )
    ended = subprocess.run([sys.executable, "-c", script, tmp_path])
    assert ended.returncode == -signal.SIGKILL
    return LocalStore(tmp_path)


def test_one_of_two_builders_gets_a_chunk_until_it_releases_it():
    store = MemoryStore()
    first, second = claims_on(store), claims_on(store)
    assert first.take(35)
    assert not second.take(35)
    assert second.take(36)
    first.release(35)
    assert second.take(35)


class LostAnswer(MemoryStore):
    """A store whose answer is lost once, after a claim was replaced or deleted, while somebody else goes on."""

    then: Callable[[], object] | None = None

    def replace(self, key: str, data: Sequence[Buffer], **options) -> bool:
        replaced = super().replace(key, data, **options)
        self._lose()
        return replaced

    def delete(self, key: str, **options) -> None:
        super().delete(key, **options)
        self._lose()

    def _lose(self) -> None:
        then, self.then = self.then, None
        if then is not None:
            then()
            raise OSError(errno.EIO, "the answer was lost")


def test_taking_over_a_claim_survives_a_lost_answer_that_the_store_repeats() -> None:
    store = LostAnswer()
    claim_by_somebody_elsewhere(store, 35)
    mine = claims_on(RetryingStore(store), lease_seconds=0)
    store.then = lambda: None
    assert mine.take(35)
    mine.release(35)
    assert not read_claims(store)


class Interrupted(MemoryStore):
    """A store in which Ctrl-C strikes right after something was created or deleted."""

    armed = False

    def create(self, key: str, data: Sequence[Buffer], **options) -> bool:
        created = super().create(key, data, **options)
        self._strike()
        return created

    def delete(self, key: str, **options) -> None:
        self._strike()
        super().delete(key, **options)

    def _strike(self) -> None:
        if self.armed:
            self.armed = False
            raise KeyboardInterrupt


@pytest.mark.parametrize("moment", ["taking", "releasing"])
def test_an_interruption_while_a_claim_is_taken_or_released_leaves_nothing_behind(moment):
    store = Interrupted()
    mine = claims_on(store)
    store.armed = moment == "taking"
    with contextlib.suppress(KeyboardInterrupt):
        mine.take(35)
    store.armed = moment == "releasing"
    with contextlib.suppress(KeyboardInterrupt):
        mine.release(35)
    mine.release_all()
    assert read_claims(store) == {}


def test_a_silent_claim_is_respected_for_a_lease_and_free_after_it():
    store = MemoryStore()
    claim_by_somebody_elsewhere(store, 35)
    mine = claims_on(store, lease_seconds=0.3)
    seen = time.monotonic()
    assert not mine.take(35)
    while not mine.take(35):
        time.sleep(0.01)
    assert time.monotonic() - seen >= 0.3


def test_what_an_earlier_build_of_this_process_could_not_release_is_not_waited_for():
    store = MemoryStore()
    before, later = claims_on(store), claims_on(store)
    assert before.take(35)
    assert not later.take(35)
    before._held.clear()  # as if the disk had refused to delete it
    before.release_all()
    assert later.take(35)


def test_the_lease_of_a_claim_counts_from_when_it_was_first_seen_not_from_when_it_was_made():
    store = MemoryStore()
    claim_by_somebody_elsewhere(store, 35)
    time.sleep(0.4)
    assert not claims_on(store, lease_seconds=0.3).take(35)


@pytest.mark.parametrize(
    "text",
    [b"", b"{", b"[]", b'{"beat": -1, "host": "x", "pid": 1}', b'{"beat": 1, "host": 3, "pid": 1}',
     b'{"beat": 1, "host": "' + b"x" * 301 + b'", "pid": 1}',
     b'{"beat": 1, "host": "x", "pid": 1}' + b" " * MOST_BYTES],
)  # fmt: skip
def test_a_heartbeat_that_cannot_be_read_keeps_nothing_alive(text):
    store = MemoryStore()
    claim_by_somebody_elsewhere(store, 35)
    store.create(layout.builder(ELSEWHERE), [text])
    assert read_builders(store) == {}
    mine = claims_on(store, lease_seconds=0.1)
    end = time.monotonic() + 600
    while not mine.take(35):
        assert time.monotonic() < end, "the chunk can never be claimed"
        time.sleep(0.02)


@pytest.mark.parametrize("owner", ["../../etc/passwd", "a/b-1-1", "x", "0123456789ab-1-1.json", "a" * 300])
def test_an_owner_of_any_name_is_no_key(owner):
    store = MemoryStore()
    store.create(layout.claim(FOLDER, 35), [msgspec.json.encode(Claim(owner=owner, host="x", pid=1))])
    assert claims_on(store, lease_seconds=0).take(35)


def test_the_claim_of_a_killed_builder_on_this_host_is_free_at_once(dead_owner):
    assert claims_on(dead_owner, lease_seconds=3600).take(35)


@pytest.mark.filterwarnings("ignore:.*multi-threaded, use of fork.*:DeprecationWarning")
@pytest.mark.parametrize("builders", [5, pytest.param(12, marks=pytest.mark.long)])
def test_an_expired_claim_is_taken_over_by_exactly_one_of_many(tmp_path, builders):
    store = LocalStore(tmp_path)
    claim_by_somebody_elsewhere(store, 35)
    context = multiprocessing.get_context("fork")
    barrier, results = context.Barrier(builders), context.Queue()
    racers = [
        context.Process(target=take_when_all_are_ready, args=(str(tmp_path), barrier, results, 0.2))
        for _ in range(builders)
    ]
    for racer in racers:
        racer.start()
    taken = [results.get(timeout=600) for _ in racers]
    for racer in racers:
        racer.join()
    assert sorted(taken) == [False] * (builders - 1) + [True]
    assert set(read_claims(store)) == {layout.claim(FOLDER, 35), layout.claim(FOLDER, 35)}


@pytest.mark.parametrize("content", [b"", b"{", b"[]", b'{"owner": 3}', bytes(100)])
def test_a_claim_that_cannot_be_read_stops_nobody(tmp_path: Path, content: bytes):
    store = LocalStore(tmp_path)
    store.create(layout.claim(FOLDER, 35), [content])
    mine = claims_on(store, lease_seconds=0.2)
    end = time.monotonic() + 600
    while not mine.take(35):
        assert time.monotonic() < end, "the chunk can never be claimed"
        time.sleep(0.02)
