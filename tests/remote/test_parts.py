"""Large chunks are sent in parts, and put in place on condition that their key is new."""

import os
import signal
import tempfile
import threading
from collections.abc import Iterator
from itertools import product
from pathlib import Path

import pytest
from obstore import exceptions
from tests.builders import wait_until
from tests.pairs import dealt
from tests.warm_process import WarmProcess

import forebay as fb
from forebay.store import open_store
from forebay.store.base import Entry, Store, temporary_name
from forebay.store.bucket_client import ASIDE, Upload
from forebay.store.object_store import ObjectStore
from forebay.testing import StoreContract
from forebay.testing.faults import Fault, FaultProxy

# name -> fixtures of an empty bucket and of its endpoint; "s3" copies in parts, which lose the metadata
SERVICES = {
    "s3": ("bucket", "s3"),
    "s3-copies": ("bucket_that_copies", "s3_that_copies"),
    "gs": ("gcs_bucket", "gcs"),
    "az": ("container", "azure"),
}
PART = 5 << 20  # the least that S3 allows
VALUE = bytes(range(256)) * (2 * PART // 256) + b"the end"  # three parts
DOUBTS = ["lost-reply", "reset-after", "reset-before", "server-error", "throttled", "conflict"]

# Sends a large value, and says when its parts are there: the proxy does not let it be put in place.
SENDER = """
import sys
from forebay.store import object_store, open_store
object_store.PARTS_FROM_BYTES, object_store.PART_BYTES = 5 << 20, 5 << 20
store = open_store(sys.argv[1])
store.create("probed", [b""])
print("sending", flush=True)
store.create("layers/x/000000.safetensors", [bytes(11 << 20)])
"""


@pytest.fixture
def in_parts(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("forebay.store.object_store.PARTS_FROM_BYTES", PART)
    monkeypatch.setattr("forebay.store.object_store.PART_BYTES", PART)


@pytest.fixture(params=SERVICES)
def service(request: pytest.FixtureRequest) -> tuple[str, str, str]:
    """(address of an empty bucket, endpoint, name in `SERVICES`)."""
    bucket, endpoint = map(request.getfixturevalue, SERVICES[request.param])
    return bucket, endpoint, request.param


@pytest.fixture
def proxy(service: tuple[str, str, str], tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[FaultProxy]:
    _, endpoint, name = service
    with FaultProxy(endpoint) as proxy:
        if name == "gs":
            account = Path(os.environ["GOOGLE_SERVICE_ACCOUNT"])
            account.write_text(account.read_text().replace(endpoint, proxy.url))
        monkeypatch.setenv({"gs": "UNUSED", "az": "AZURITE_BLOB_STORAGE_URL"}.get(name, "AWS_ENDPOINT_URL"), proxy.url)
        yield proxy


@pytest.fixture
def store(proxy: FaultProxy, service: tuple[str, str, str], in_parts: None) -> Store:
    store = open_store(f"{service[0]}/a")
    store.create("probed", [b""])
    store.create("also probed", [bytes(PART)])
    proxy.reset_counts()
    return store


def aside(store: ObjectStore) -> list[Entry]:
    return list(store.walk(ASIDE))


def test_a_large_value_is_sent_from_memory_in_parts(
    proxy: FaultProxy, store: ObjectStore, service: tuple[str, str, str], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(tempfile, "tempdir", "/nowhere")  # no disk between
    assert store.create("large", [VALUE[:1000], VALUE[1000:]])
    monkeypatch.undo()
    assert proxy.requests["create"] == 1  # what puts it in place
    # A look, three parts, what begins and ends them, the copy, a look, the end of what was aside.
    assert sum(proxy.requests.values()) == {"s3": 11, "s3-copies": 9, "gs": 9, "az": 8}[service[2]]
    assert store.read("large") == VALUE
    assert [(entry.key, entry.size) for entry in store.entries("")] == [
        ("also probed", PART), ("large", len(VALUE)), ("probed", 0),
    ]  # fmt: skip
    assert aside(store) == []


def test_nothing_is_sent_for_a_key_that_exists(proxy: FaultProxy, store: ObjectStore) -> None:
    store.create("large", [b"small, but first"])
    proxy.reset_counts()
    assert not store.create("large", [VALUE])
    assert not proxy.requests.keys() & {"write", "create"}
    assert store.read("large") == b"small, but first"


@pytest.mark.parametrize(
    ("service", "fault"), dealt(list(SERVICES), [*product(DOUBTS, ["write", "create"])]), indirect=["service"]
)
def test_an_answer_in_doubt_is_true_exactly_if_the_value_is_its_own(
    proxy: FaultProxy, store: ObjectStore, fault: tuple[str, str]
) -> None:
    kind, operation = fault  # of the parts, or of the copy that puts them in place
    proxy.set_faults([Fault(kind, operation, most=1)])
    assert store.create("large", [VALUE])
    assert proxy.injected[kind] == 1
    assert not store.create("large", [b"another's" + VALUE])
    assert store.read("large") == VALUE
    assert aside(store) == []


@pytest.mark.parametrize(("service", "kind"), dealt(list(SERVICES), [None, *DOUBTS]), indirect=["service"])
def test_what_another_created_while_the_parts_were_sent_stays(
    proxy: FaultProxy, store: ObjectStore, kind: str | None
) -> None:
    upload, name = Upload(store.address, "large", [VALUE]), f"{ASIDE}{temporary_name()}"
    store._put_parts(upload, name)
    assert store.create("large", [VALUE[::-1]])
    proxy.set_faults([Fault(kind, "create", most=1)] if kind else [])
    assert not store._created(upload, lambda: store._put_in_place(upload, name, store._way_to_copy()))
    assert store.read("large") == VALUE[::-1]


@pytest.mark.parametrize(("service", "kind"), dealt(list(SERVICES), ["lost-reply", "conflict"]), indirect=["service"])
def test_equal_bytes_of_another_are_not_its_own(
    proxy: FaultProxy, store: ObjectStore, service: tuple[str, str, str], kind: str
) -> None:
    """The name of the write says whose they are; only a service that loses it leaves that open."""
    upload, name = Upload(store.address, "large", [VALUE]), f"{ASIDE}{temporary_name()}"
    store._put_parts(upload, name)
    assert store.create("large", [VALUE])
    proxy.set_faults([Fault(kind, "create", most=1)])
    created = store._created(upload, lambda: store._put_in_place(upload, name, store._way_to_copy()))
    assert created is (service[2] == "s3")
    assert store.read("large") == VALUE


@pytest.mark.parametrize(("service", "seed"), dealt(list(SERVICES), range(3)), indirect=["service"])
def test_many_answers_in_doubt_lose_nothing(proxy: FaultProxy, store: ObjectStore, seed: int) -> None:
    """Also that to the request which makes an object of the parts, and is refused the second time."""
    kinds = ("lost-reply", "reset-after", "server-error")
    proxy.set_faults([Fault(kind, probability=0.15, seed=seed + at) for at, kind in enumerate(kinds)])
    assert store.create("large", [VALUE])
    proxy.set_faults([])
    assert store.read("large") == VALUE
    assert aside(store) == []


@pytest.mark.parametrize(
    ("service", "kind"), dealt(list(SERVICES), ["none", "lost-reply", "conflict"]), indirect=["service"]
)
def test_one_of_many_creators_wins(proxy: FaultProxy, store: ObjectStore, kind: str) -> None:
    """All of them find no object, send their parts, and are answered; the copies decide."""
    proxy.set_faults([] if kind == "none" else [Fault(kind, "create", probability=0.5, seed=3)])
    won, begin = [], threading.Barrier(4)

    def create(number: int) -> None:
        value = bytes([number]) * (PART + number)
        begin.wait()
        if store.create("race", [value]):
            won.append(value)

    racers = [threading.Thread(target=create, args=(number,)) for number in range(4)]
    for racer in racers:
        racer.start()
    for racer in racers:
        racer.join()
    proxy.set_faults([])
    assert won == [store.read("race")]
    assert aside(store) == []


def test_a_sender_that_is_killed_leaves_what_clean_removes_and_no_listing_shows(
    proxy: FaultProxy, store: ObjectStore
) -> None:
    key = "layers/x/000000.safetensors"
    in_bucket = store.address.partition("://")[2].partition("/")[2]
    prefix = f"{store.address.split('/')[2]}/{in_bucket}/{key}" if store.scheme == "az" else f"{in_bucket}/{key}"
    proxy.set_faults([Fault("latency", "create", prefix, seconds=3600.0)])
    sender = WarmProcess("-c", SENDER, store.address)
    assert sender.stdout.readline() == "sending\n"
    wait_until(lambda: proxy.injected["latency"] == 1)
    assert list(store.leftovers()) == []  # it is alive
    sender.send_signal(signal.SIGKILL)
    sender.communicate()
    proxy.set_faults([])
    (left,) = store.leftovers()
    assert left == Entry(left.key, 11 << 20)
    assert [entry.key for entry in store.entries("")] == ["also probed", "probed"]
    assert list(store.entries("layers/")) == []
    assert store.create(key, [VALUE])
    for leftover in store.leftovers():
        store.delete(leftover.key)
    assert aside(store) == []
    assert store.read(key) == VALUE


def test_clean_removes_the_upload_of_a_dead_builder(bucket: str, tmp_path: Path) -> None:
    (tmp_path / "a.txt").write_text("ab\n")
    fb.build(f"{bucket}/cache", fb.sources.lines(tmp_path / "a.txt"), fb.RawRecipe(), workers=0)
    dead, _ = WarmProcess("-c", "from forebay.store.base import temporary_name as name; print(name())").communicate()
    store = open_store(f"{bucket}/cache")
    foreign = f"{ASIDE}.tmp-0123456789ab-7-7-beefbeef"  # of another host: it may be alive
    for key in (f"{ASIDE}{dead.strip()}", foreign, f"{ASIDE}of somebody else"):
        store.replace(key, [b"parts"])
    assert fb.clean(f"{bucket}/cache").temporary == (f"{ASIDE}{dead.strip()}",)
    assert [entry.key for entry in aside(store)] == [foreign, f"{ASIDE}of somebody else"]


def test_a_service_that_copies_over_an_object_gets_large_values_whole(
    s3: str, bucket: str, in_parts: None, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    monkeypatch.setenv("AWS_COPY_IF_NOT_EXISTS", "header:x-nobody-knows:*")
    with FaultProxy(s3) as proxy:
        monkeypatch.setenv("AWS_ENDPOINT_URL", proxy.url)
        store = open_store(f"{bucket}/whole")
        assert store.create("one", [VALUE])
        assert store.create("two", [VALUE])
        assert not store.create("two", [VALUE])
        assert store.read("two") == VALUE
        assert aside(store) == []
    assert proxy.requests["write"] == 2  # what was tried, once
    assert [record.getMessage() for record in caplog.records] == [
        f"{bucket}/whole cannot copy an object on condition, so large chunks are sent whole, not in parts"
    ]


@pytest.mark.parametrize("kind", ["server-error", "conflict"])
def test_a_service_that_does_not_copy_gets_large_values_whole(
    s3: str,
    bucket: str,
    in_parts: None,
    monkeypatch: pytest.MonkeyPatch,
    caplog: pytest.LogCaptureFixture,
    kind: str,
) -> None:
    monkeypatch.setattr("forebay.store.bucket_client._RETRIES", {"max_retries": 0})
    monkeypatch.setattr("forebay.store.object_store._PAUSES", (0.01,) * 5 + (0.02,))
    with FaultProxy(s3, [Fault(kind, "write")]) as proxy:
        monkeypatch.setenv("AWS_ENDPOINT_URL", proxy.url)
        store = open_store(f"{bucket}/whole")
        assert store.create("one", [VALUE])
        assert not store.create("one", [VALUE])
        assert store.read("one") == VALUE
        tried = proxy.requests["write"]
        assert store.create("two", [VALUE])
        assert proxy.requests["write"] == tried  # it does not try for ever
    assert [record.getMessage() for record in caplog.records] == [
        f"{bucket}/whole did not answer 2 probes of copies on condition, so large chunks are sent whole, not in parts"
    ]


@pytest.mark.parametrize(
    ("error", "copies"),
    [
        (exceptions.PreconditionError("status code: 412, PreconditionFailed"), [4]),
        (exceptions.AlreadyExistsError("status code: 409, ConditionalRequestConflict"), [12, 12]),
        (FileNotFoundError("status: 404 no such key"), [12, 12]),
        (exceptions.GenericError("status: 500 internal error"), [12, 12]),
    ],
)
def test_a_lasting_answer_to_copies_ends_their_probes(
    s3: str, bucket: str, in_parts: None, monkeypatch: pytest.MonkeyPatch, error: Exception, copies: list[int]
) -> None:
    tried: list[str] = []

    def refuse(self: ObjectStore, source: str, key: str, size: int, copying: str) -> None:
        tried.append(copying)
        raise error

    monkeypatch.setattr("forebay.store.object_store._PAUSES", (0.001,) * 5 + (0.002,))
    monkeypatch.setattr(ObjectStore, "_copy", refuse)
    store = open_store(f"{bucket}/lasting")
    for count in [*copies, 0, 0]:
        tried.clear()
        assert store.create(f"after {count} {temporary_name()}", [VALUE])
        assert len(tried) == count
        assert set(tried) in ({"header:if-none-match:*", "multipart"}, set())


def test_an_open_question_about_one_way_to_copy_does_not_hide_the_other(
    s3: str, bucket: str, in_parts: None, monkeypatch: pytest.MonkeyPatch
) -> None:
    copy = ObjectStore._copy

    def only_in_parts(self: ObjectStore, source: str, key: str, size: int, copying: str) -> None:
        if copying != "multipart":
            raise exceptions.GenericError("status: 500 internal error")
        copy(self, source, key, size, copying)

    monkeypatch.setattr("forebay.store.object_store._PAUSES", (0.001,) * 5 + (0.002,))
    monkeypatch.setattr(ObjectStore, "_copy", only_in_parts)
    assert open_store(f"{bucket}/other")._way_to_copy() == "multipart"


@pytest.mark.parametrize(
    ("kind", "nth"),  # the conflict at the last request is in every run: only there it looks like a refusal
    dealt(["lost-reply", "reset-after", "server-error", "conflict", "throttled"], range(4)),
)
def test_a_wrong_answer_does_not_vouch_for_a_condition_that_a_service_ignores(
    s3: str, bucket: str, in_parts: None, monkeypatch: pytest.MonkeyPatch, kind: str, nth: int
) -> None:
    """This server overwrites by `CopyObject`, whatever its condition says: only a copy in parts is safe here."""
    monkeypatch.setattr("forebay.store.bucket_client._RETRIES", {"max_retries": 0})
    with FaultProxy(s3) as proxy:
        monkeypatch.setenv("AWS_ENDPOINT_URL", proxy.url)
        store = open_store(f"{bucket}/ignores")
        store.create("probed", [b""])
        proxy.set_faults(
            [Fault("latency", "create", most=nth, seconds=0), Fault(kind, "create", "ignores/.uploads/", most=1)]
        )
        assert store.create("large", [VALUE])
        assert store._way_to_copy() == "multipart"
        assert store.read("large") == VALUE
        assert aside(store) == []
        assert proxy.injected[kind] == 1, dict(proxy.injected)


def test_errors_of_a_moment_do_not_decide_how_all_large_values_are_sent(
    s3: str, bucket: str, in_parts: None, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    monkeypatch.setattr("forebay.store.bucket_client._RETRIES", {"max_retries": 0})
    monkeypatch.setattr("forebay.store.object_store._PAUSES", (0.01,) * 5 + (0.02,))
    with FaultProxy(s3) as proxy:
        monkeypatch.setenv("AWS_ENDPOINT_URL", proxy.url)
        store = open_store(f"{bucket}/moment")
        store.create("probed", [b""])
        proxy.set_faults([Fault("server-error", "write")])  # every copy
        assert store._way_to_copy() is None
        proxy.set_faults([Fault("flipped-bit", "read", most=1)])
        assert store._way_to_copy() == "multipart"
    assert caplog.records == []


@pytest.mark.parametrize("mine", [b"1 of the values", b"0 of the values"])
def test_a_wrong_bit_does_not_decide_whose_an_object_is(
    s3: str, bucket: str, in_parts: None, monkeypatch: pytest.MonkeyPatch, mine: bytes
) -> None:
    """Without metadata the bytes say it; one bit makes those of one writer the other's."""
    with FaultProxy(s3) as proxy:
        monkeypatch.setenv("AWS_ENDPOINT_URL", proxy.url)
        store = open_store(f"{bucket}/bit")
        store._writer(0).put("value", b"0 of the values", use_multipart=False)
        upload = Upload(store.address, "value", [mine])
        for _ in range(30):  # the bit is any of a byte's
            proxy.set_faults([Fault("flipped-bit", "read", byte=0, most=1)])
            assert store._owner(upload) is (mine[:1] == b"0")


class TestS3InParts(StoreContract):
    """Every promise of a store, where whatever is not empty is sent in parts."""

    helpers = ("fetch", "stat", "walk")

    @pytest.fixture(autouse=True)
    def _bucket(self, bucket: str, monkeypatch: pytest.MonkeyPatch) -> None:
        self.bucket = bucket
        monkeypatch.setattr("forebay.store.object_store.PARTS_FROM_BYTES", 1)

    def make_store(self, folder: Path) -> Store:
        return open_store(f"{self.bucket}/a/{folder.name}")
