"""Claims: a live one is respected, an expired one is taken over by exactly one, a dead owner's at once."""

import contextlib
import errno
import multiprocessing
import os
import signal
import subprocess
import sys
import time
from collections.abc import Callable, Sequence
from functools import partial
from pathlib import Path

import msgspec
import pytest
from tests.recipes import TogetherStore

from forebay.cache.claims import (
    MOST_BYTES,
    BuilderBeat,
    Claim,
    Claims,
    Heartbeat,
    OtherBuilders,
    Pulses,
    read_builders,
    read_claims,
)
from forebay.errors import StoreRefused
from forebay.format import layout
from forebay.store import LocalStore, MemoryStore, Store
from forebay.store.base import Buffer, this_process, with_retries

LAYER = "raw"


def claims_on(store: Store, lease_seconds: float = 60) -> Claims:
    return Claims(store, LAYER, "here", lease_seconds)


ELSEWHERE = "0123456789ab-1-1"  # an owner that nobody here can check for life


def claim_by_somebody_elsewhere(store: Store, chunk: int, beat: int = 0) -> None:
    """A claim as an earlier forebay writes it, with a counter in it, unless that is 0."""
    elsewhere = Claim(owner=ELSEWHERE, host="elsewhere", pid=1, beat=beat)
    store.replace(layout.claim(LAYER, chunk, 1), [msgspec.json.encode(elsewhere)])


def beat_elsewhere(store: Store, beat: int, **progress: int) -> None:
    text = msgspec.json.encode(BuilderBeat(beat=beat, host="elsewhere", pid=1, layer=LAYER, **progress))
    store.replace(layout.builder(ELSEWHERE), [text])


def take_when_all_are_ready(folder: str, barrier, results, lease_seconds: float) -> None:
    mine = claims_on(TogetherStore(folder, layout.claim(LAYER, 35, 2), barrier), lease_seconds)
    mine.take(35)
    time.sleep(lease_seconds)
    results.put(mine.take(35))
    barrier.wait()  # nobody leaves, and so dies, before all have asked


@pytest.fixture
def dead_owner(tmp_path):
    """A store with a claim on chunk 35 whose owner was killed."""
    script = (
        "import os, signal, sys; from forebay.cache.claims import Claims; from forebay.store import LocalStore\n"
        f"assert Claims(LocalStore(sys.argv[1]), {LAYER!r}, 'here').take(35)\n"
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
    assert not first.take(35)
    assert second.take(36)
    first.release(35)
    assert second.take(35)


def test_claims_of_dead_builders_on_made_chunks_are_removed(dead_owner):
    claim_by_somebody_elsewhere(dead_owner, 36)
    mine = claims_on(dead_owner)
    mine.remove_abandoned(is_made=lambda chunk: False)
    assert len(read_claims(dead_owner, LAYER)) == 2
    mine.remove_abandoned(is_made=lambda chunk: True)
    assert list(read_claims(dead_owner, LAYER)) == [layout.claim(LAYER, 36, 1)]


def test_nothing_is_left_of_the_claims_on_a_released_chunk(dead_owner):
    mine = claims_on(dead_owner)
    assert mine.take(35)
    assert set(read_claims(dead_owner, LAYER)) == {layout.claim(LAYER, 35, 1), layout.claim(LAYER, 35, 2)}
    mine.release(35)
    assert read_claims(dead_owner, LAYER) == {}


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


@pytest.mark.parametrize("leaves", [Claims.give_back, Claims.release])
def test_a_chunk_is_left_twice_where_an_answer_was_lost_and_who_took_it_meanwhile_keeps_it(leaves) -> None:
    store = LostAnswer()
    first, second, third = claims_on(store), claims_on(store), claims_on(store)
    assert first.take(35)
    store.then = lambda: second.take(35)
    with_retries(partial(leaves, first, 35))
    assert not third.take(35)
    assert not first.take(35)
    second.release(35)
    assert read_claims(store, LAYER) == {}


def test_a_chunk_that_was_given_back_is_free_at_once_under_the_next_name() -> None:
    store = MemoryStore()
    first, second = claims_on(store), claims_on(store)
    assert first.take(35)
    first.give_back(35)
    assert second.take(35)
    assert {key for key, one in read_claims(store, LAYER).items() if one.state == "working"} == {
        layout.claim(LAYER, 35, 2)
    }
    second.give_back(35)
    assert first.take(35)
    first.release_all()
    assert read_claims(store, LAYER) == {}


def test_a_claim_that_was_given_back_is_removed_once_its_chunk_is_made() -> None:
    store = MemoryStore()
    first = claims_on(store)
    assert first.take(35)
    first.give_back(35)
    first.remove_abandoned(is_made=lambda chunk: False)
    assert len(read_claims(store, LAYER)) == 1
    first.remove_abandoned(is_made=lambda chunk: True)
    assert read_claims(store, LAYER) == {}


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


class Failing(LocalStore):
    """A disk that fails once, before or after it creates a file."""

    moment = ""

    def create(self, key: str, data: Sequence[Buffer], **options) -> bool:
        moment, self.moment = self.moment, ""
        if moment == "before":
            raise OSError(errno.EBUSY, "busy")
        created = super().create(key, data, **options)
        if moment == "after":
            raise OSError(errno.EBUSY, "busy")
        return created


@pytest.mark.parametrize("moment", ["before", "after"])
def test_a_builder_whose_claim_failed_once_does_not_wait_for_itself(tmp_path: Path, moment: str) -> None:
    store = Failing(tmp_path)
    mine = claims_on(store)
    store.moment = moment
    try:
        taken = mine.take(35)
    except OSError:
        taken = mine.take(35)
    assert taken
    mine.release(35)
    assert read_claims(store, LAYER) == {}


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
    assert read_claims(store, LAYER) == {}


def test_a_silent_claim_is_respected_for_a_lease_and_free_after_it():
    store = MemoryStore()
    claim_by_somebody_elsewhere(store, 35)
    mine = claims_on(store, lease_seconds=0.3)
    seen = time.monotonic()
    assert not mine.take(35)
    while not mine.take(35):
        time.sleep(0.01)
    assert time.monotonic() - seen >= 0.3


@pytest.mark.parametrize("where", ["claim", "heartbeat"])
def test_the_claims_of_a_builder_that_beats_are_never_free(where):
    store = MemoryStore()
    claim_by_somebody_elsewhere(store, 35)
    mine = claims_on(store, lease_seconds=0.3)
    begun = time.monotonic()
    beat = 0
    while time.monotonic() - begun < 1:
        beat += 1
        beat_elsewhere(store, beat) if where == "heartbeat" else claim_by_somebody_elsewhere(store, 35, beat)
        assert not mine.take(35)
        time.sleep(0.02)


def test_a_builder_whose_heartbeat_stands_still_loses_all_of_its_claims_after_one_lease():
    store = MemoryStore()
    for chunk in (35, 36):
        claim_by_somebody_elsewhere(store, chunk)
    beat_elsewhere(store, 7)
    mine = claims_on(store, lease_seconds=0.3)
    seen = time.monotonic()
    assert not mine.take(35)
    while not mine.take(35):
        time.sleep(0.01)
    assert time.monotonic() - seen >= 0.3
    assert mine.take(36), "its owner is known to be silent, whichever of its claims was seen"


def test_a_claim_is_written_once_and_a_beat_writes_one_file_however_many_are_held(tmp_path):
    store = LocalStore(tmp_path)
    holder = claims_on(store)
    assert all(holder.take(chunk) for chunk in range(20))
    before = {entry.key: entry.etag for entry in store.entries(layout.claims_folder(LAYER))}
    with Heartbeat(store, "here") as heart:
        heart.beat()
        assert {entry.key: entry.etag for entry in store.entries(layout.claims_folder(LAYER))} == before
        ((owner, beat),) = read_builders(store).items()
        assert (owner, beat.beat, beat.host, beat.pid) == (str(this_process()), 2, "here", os.getpid())
    assert read_builders(store) == {}


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


def test_heartbeats_keep_all_that_a_builder_holds_alive_past_a_lease():
    store = MemoryStore()  # no disk, which may be busy for a lease
    holder, other = claims_on(store, lease_seconds=0.06), claims_on(store, lease_seconds=1)
    assert holder.take(1)
    assert holder.take(2)
    pulses = Pulses(store, 1)
    with Heartbeat(store, "here", 0.06):
        begun = time.monotonic()
        while time.monotonic() - begun < 1.5:
            assert not other.take(1)
            assert not other.take(2)
            assert not pulses.is_silent(str(this_process()))
            time.sleep(0.05)
    holder.release(1)
    assert other.take(1)


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
    store.create(layout.claim(LAYER, 35, 1), [msgspec.json.encode(Claim(owner=owner, host="x", pid=1))])
    assert claims_on(store, lease_seconds=0).take(35)


def test_chunks_of_other_builders_count_from_when_this_one_began_also_after_they_end():
    store = MemoryStore()
    beat_elsewhere(store, 1, made=5)
    others = OtherBuilders(store, LAYER)
    others.look()
    assert others.made == 0
    beat_elsewhere(store, 2, made=12)
    others.look()
    assert others.made == 7
    store.delete(layout.builder(ELSEWHERE))
    assert others.look() == {}
    assert others.made == 7
    assert OtherBuilders(store, "another").look() == {}


def test_a_builder_whose_heartbeat_stands_still_is_not_counted_on() -> None:
    store = MemoryStore()
    others = OtherBuilders(store, LAYER, lease_seconds=0.05)
    beat_elsewhere(store, 1, workers=8, made=3)
    others.look()
    assert others.slots == 8
    time.sleep(0.06)
    others.look()
    assert (others.slots, others.made) == (0, 0)
    beat_elsewhere(store, 2, workers=8, made=4)
    others.look()
    assert (others.slots, others.made) == (8, 1)


def test_heartbeats_can_be_read_while_chunks_of_others_are_counted() -> None:
    """The thread of the heartbeat reads them, the main thread counts."""
    store = MemoryStore()
    others = OtherBuilders(store, LAYER)

    class LooksMeanwhile(dict[str, int]):
        def get(self, owner: str, default: int = 0) -> int:
            text = msgspec.json.encode(BuilderBeat(beat=1, host="third", pid=2, layer=LAYER, made=4))
            store.replace(layout.builder("0123456789ab-2-1"), [text])
            others.look()
            return default

    beat_elsewhere(store, 1, made=3)
    others.look()
    others._first = LooksMeanwhile(nobody=0)
    assert others.made == 3
    assert others.made == 7


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
    assert set(read_claims(store, LAYER)) == {layout.claim(LAYER, 35, 1), layout.claim(LAYER, 35, 2)}


def test_a_failure_from_before_is_tried_again_one_since_then_is_respected():
    store = MemoryStore()
    failing, witness = claims_on(store), claims_on(store)
    assert failing.take(35)
    failing.fail(35, "a bad sample")
    assert not witness.take(35)
    later = claims_on(store)
    assert later.take(35)
    later.release(35)
    assert read_claims(store, LAYER) == {}


def test_a_failure_is_kept_with_its_reason():
    store = MemoryStore()
    failing = claims_on(store)
    assert failing.take(35)
    failing.fail(35, "a bad sample")
    (claim,) = read_claims(store, LAYER).values()
    assert (claim.state, claim.reason, claim.pid) == ("failed", "a bad sample", os.getpid())


@pytest.mark.parametrize("content", [b"", b"{", b"[]", b'{"owner": 3}', bytes(100)])
def test_a_claim_that_cannot_be_read_stops_nobody(tmp_path: Path, content: bytes):
    store = LocalStore(tmp_path)
    store.create(layout.claim(LAYER, 35, 1), [content])
    mine = claims_on(store, lease_seconds=0.2)
    end = time.monotonic() + 600
    while not mine.take(35):
        assert time.monotonic() < end, "the chunk can never be claimed"
        time.sleep(0.02)


@pytest.mark.parametrize("what", ["folder", "dangling link"])
def test_what_has_the_name_of_a_claim_and_is_none_is_passed_over(tmp_path, what):
    taken = tmp_path / layout.claim(LAYER, 35, 1)
    taken.parent.mkdir(parents=True)
    taken.mkdir() if what == "folder" else taken.symlink_to("nowhere")
    store = LocalStore(tmp_path)
    mine = claims_on(store)
    assert mine.take(35)
    assert not claims_on(store).take(35)
    mine.release(35)
    assert read_claims(store, LAYER) == {}
    assert taken.is_dir() or taken.is_symlink()


def test_a_claim_with_a_huge_attempt_is_none_of_ours_and_costs_no_time():
    store = MemoryStore()
    for attempt in (10**9, 10**18):
        store.create(f"claims/{LAYER}/000035.{attempt}.json", [b"{}"])
    mine = claims_on(store)
    assert mine.take(35)
    mine.release(35)
    assert len(list(store.entries("claims/"))) == 2


def test_releasing_removes_the_attempts_there_are_and_no_others():
    store = MemoryStore()
    claim_by_somebody_elsewhere(store, 35)
    late = claims_on(store, lease_seconds=0)
    assert late.take(35)
    late.release(35)
    assert read_claims(store, LAYER) == {}


class Refusing(MemoryStore):
    """A bucket whose credentials have run out, while `refuses` is set."""

    refuses, refused = False, 0

    def replace(self, key: str, data: Sequence[Buffer], *, if_etag: str | None = None, durable: bool = True) -> bool:
        if self.refuses:
            self.refused += 1
            raise StoreRefused(self.address, "the credentials do not allow to write to it", "renew them")
        return super().replace(key, data, if_etag=if_etag, durable=durable)


def test_a_heartbeat_outlives_credentials_that_ran_out() -> None:
    store = Refusing()
    deadline = time.monotonic() + 600

    def beat() -> int:
        assert time.monotonic() < deadline, "no beat came"
        time.sleep(0.02)
        return max((one.beat for one in read_builders(store).values()), default=0)

    with Heartbeat(store, "here", lease_seconds=0.12):
        store.refuses = True
        while not store.refused:
            beat()
        store.refuses = False
        before = beat()
        while beat() <= before:
            pass


def test_a_builder_says_how_far_it_is_before_the_time_of_a_beat_has_passed() -> None:
    store = MemoryStore()
    with Heartbeat(store, "here", lease_seconds=60.0) as heart:  # a beat every 10 s
        heart.made = 3
        deadline = time.monotonic() + 9
        while (shown := next(iter(read_builders(store).values()))).made != 3:
            assert time.monotonic() < deadline
            time.sleep(0.02)
    assert shown.beat == 2
