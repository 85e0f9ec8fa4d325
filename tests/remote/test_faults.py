"""A bucket behind faults: what a lost, doubled, late, short or wrong answer may and may not do."""

import os
import tempfile
import threading

import pytest
from tests.helpers.fault_proxy import Fault, FaultProxy
from tests.helpers.processes import PythonProcess

import forebay as fb
from forebay.errors import StoreUnavailable
from forebay.store import open_store
from forebay.store.object_store import PROBES
from forebay.store.retries import RetryPolicy


@pytest.fixture
def proxy(s3, bucket, monkeypatch):
    with FaultProxy(s3) as proxy:
        monkeypatch.setenv("AWS_ENDPOINT_URL", proxy.url)
        yield proxy


@pytest.fixture
def store(proxy, bucket):
    store = open_store(f"{bucket}/a")
    store.create("probed", [b""])
    proxy.reset_counts()
    return store


@pytest.mark.parametrize(
    "kind", ["lost-reply", "reset-after", "reset-before", "server-error", "throttled", "conflict", "latency"]
)
def test_a_create_whose_answer_is_in_doubt_is_true_exactly_if_the_value_is_its_own(proxy, store, kind):
    proxy.set_faults([Fault(kind, "create", most=1)])
    assert store.create("new", [b"mine"])
    proxy.set_faults([Fault(kind, "create", most=1)])
    assert not store.create("new", [b"another's"])
    proxy.set_faults([Fault(kind, "create", most=1)])
    assert not store.create("new", [b"mine"])  # the same bytes, of another write
    assert store.read("new") == b"mine"
    assert proxy.injected[kind] == 3


def test_a_bucket_is_probed_once_by_a_process(proxy, bucket):
    for number in range(3):
        assert open_store(f"{bucket}/new").create(f"{number}", [b""])
    assert sum(".uploads/" in key for operation, key in proxy.log if operation == "create") == 2
    assert proxy.requests["create"] == 5


@pytest.mark.parametrize("kind", ["lost-reply", "reset-after", "conflict"])
def test_one_of_many_creators_wins_behind_faults(proxy, store, kind):
    proxy.set_faults([Fault(kind, "create", probability=0.5, seed=3)])
    won = []

    def create(number):
        for turn in range(4):
            if store.create(f"race/{turn}", [b"%d" % number]):
                won.append((turn, number))

    racers = [threading.Thread(target=create, args=(number,)) for number in range(4)]
    for racer in racers:
        racer.start()
    for racer in racers:
        racer.join()
    assert sorted(turn for turn, _ in won) == list(range(4))
    assert all(store.read(f"race/{turn}") == b"%d" % number for turn, number in won)


@pytest.mark.parametrize("kind", ["short-body", "flipped-bit", "reset-after", "server-error", "lost-reply"])
def test_what_is_read_is_what_was_written(proxy, store, kind):
    value = os.urandom(300_000)
    store.create("value", [value])
    proxy.set_faults([Fault(kind, "read", most=1)])
    assert store.read("value") == value
    proxy.set_faults([Fault(kind, "read", most=1)])
    assert store.view("value") == value
    if kind != "flipped-bit":  # a range has no digest: whoever asks for one checks what it reads
        proxy.set_faults([Fault(kind, "read", most=1)])
        assert store.read("value", 1000, 200_000) == value[1000:200_000]
    assert proxy.injected[kind] == (2 if kind == "flipped-bit" else 3)


def test_a_body_that_stalls_is_noticed_and_resumed(proxy, store, monkeypatch):
    value = os.urandom(300_000)
    store.create("value", [value])
    monkeypatch.setattr("forebay.store.object_store.STALLED_SECONDS", 0.5)
    proxy.set_faults([Fault("stalled-body", "read", most=1)])
    assert open_store(store.address).read("value") == value
    assert proxy.injected["stalled-body"] == 1


def test_a_body_may_take_longer_than_a_stall_while_bytes_arrive(s3, store, monkeypatch):
    """A chunk of a gigabyte on a slow line: only silence counts, whatever the whole body takes."""
    value = os.urandom(800_000)
    store.create("value", [value])
    monkeypatch.setattr("forebay.store.object_store.STALLED_SECONDS", 0.5)
    with FaultProxy(s3, bytes_per_second=400_000) as line:  # two seconds
        monkeypatch.setenv("AWS_ENDPOINT_URL", line.url)
        assert open_store(store.address).read("value") == value
        assert line.requests["read"] <= 3  # a limit for all of the body would cut it into four or more


def test_a_chunk_of_common_size_is_sent_from_memory_by_one_conditional_request(proxy, store, monkeypatch):
    pieces = [os.urandom(3 << 20) for _ in range(4)]  # the client would send more than 5 MiB in parts
    monkeypatch.setattr(tempfile, "tempdir", "/nowhere")  # no disk between
    assert store.create("large", pieces)
    assert not store.create("large", [b"other"])
    assert (proxy.requests, {operation for operation, _ in proxy.log}) == ({"create": 2}, {"create"})
    assert store.head("large").size == 12 << 20
    for at, piece in enumerate(pieces):
        assert store.read("large", at * len(piece), (at + 1) * len(piece)) == piece


def test_a_replacement_with_a_lost_reply_is_a_replacement(proxy, store):
    store.create("value", [b"one"])
    proxy.set_faults([Fault("lost-reply", "write", most=1)])
    assert store.replace("value", [b"two"], if_etag=store.head("value").etag)
    assert store.read("value") == b"two"


def test_a_service_that_stays_away_is_unavailable(proxy, store, monkeypatch):
    monkeypatch.setattr("forebay.store.object_store.RETRIES", RetryPolicy(retries=0))
    monkeypatch.setattr("forebay.store.bucket_client._RETRIES", {"max_retries": 1})
    store = open_store(store.address)
    proxy.set_faults([Fault("reset-before")])
    for act in (
        lambda: store.create("a", [b"x"]), lambda: store.read("a"), lambda: store.replace("a", [b"x"]),
        lambda: list(store.entries("")), lambda: store.head("a"), lambda: store.delete("a"),
    ):  # fmt: skip
        with pytest.raises(StoreUnavailable, match=r"(?s)cannot .* in .s3://.*hint: check the network and try again"):
            act()


@pytest.fixture
def lines(tmp_path):
    (tmp_path / "source.txt").write_text("".join(f"line {number}\n" for number in range(9)))
    return fb.sources.lines(tmp_path / "source.txt")


def test_a_plan_that_is_written_and_not_listed_yet_is_looked_for_again(proxy, bucket, lines):
    proxy.set_faults([Fault("stale-listing", "list", most=8)])  # the plan is listed by the second and the fifth
    assert fb.build(f"{bucket}/cache", lines, fb.RawRecipe(), workers=0).rows == 9


def test_a_listing_that_stays_old_does_not_stop_the_planner(proxy, bucket, lines):
    proxy.set_faults([Fault("stale-listing", "list")])
    assert fb.build(f"{bucket}/cache", lines, fb.RawRecipe(), workers=0).rows == 9
    proxy.set_faults([])
    assert fb.build(f"{bucket}/cache", lines, fb.RawRecipe(), workers=0).built == 0


def test_clean_removes_the_probe_of_a_dead_builder(bucket, tmp_path):
    (tmp_path / "a.txt").write_text("ab\n")
    fb.build(f"{bucket}/cache", fb.sources.lines(tmp_path / "a.txt"), fb.RawRecipe(), workers=0)
    dead, _ = PythonProcess(
        "-c", "from forebay.store.owners import temporary_name as name; print(name())"
    ).communicate()
    store = open_store(f"{bucket}/cache")
    foreign = f"{PROBES}.tmp-0123456789ab-7-7-beefbeef"  # of another host: it may be alive
    for key in (f"{PROBES}{dead.strip()}", foreign, f"{PROBES}of somebody else"):
        store.replace(key, [b"probe"])
    assert fb.clean(f"{bucket}/cache").temporary == (f"{PROBES}{dead.strip()}",)
    assert [entry.key for entry in store.walk(PROBES)] == [foreign, f"{PROBES}of somebody else"]
