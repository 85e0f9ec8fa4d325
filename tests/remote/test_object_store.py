"""The contract of stores on buckets, and what only a bucket can do."""

from collections.abc import Iterator
from pathlib import Path

import pytest
from tests.helpers.fault_proxy import Fault, FaultProxy

from forebay.errors import StoreRefused
from forebay.store import open_store
from forebay.store.base import BadCopy, Expected, Store
from forebay.testing import SharedStoreContract, StoreContract

OF_BUCKETS = ("fetch", "stat", "walk")


class TestMemoryBucket(StoreContract):
    helpers = OF_BUCKETS

    def make_store(self, folder: Path) -> Store:
        return open_store(f"memory://{abs(hash(str(folder))):x}/{folder.name}")


class TestS3(SharedStoreContract):
    helpers = OF_BUCKETS

    @pytest.fixture(autouse=True)
    def _bucket(self, bucket: str) -> None:
        self.bucket = bucket

    def make_store(self, folder: Path) -> Store:
        return open_store(f"{self.bucket}/a/{folder.name}")

    def reopen(self, store: Store):
        return Reopen(store.address)


@pytest.mark.slow
class TestGoogle(StoreContract):
    helpers = OF_BUCKETS

    @pytest.fixture(autouse=True)
    def _bucket(self, gcs_bucket: str) -> None:
        self.bucket = gcs_bucket

    def make_store(self, folder: Path) -> Store:
        return open_store(f"{self.bucket}/a/{folder.name}")


@pytest.mark.long
class TestGoogleBetweenProcesses(SharedStoreContract, TestGoogle):
    def reopen(self, store: Store):
        return Reopen(store.address)


@pytest.mark.slow
class TestAzure(StoreContract):
    helpers = OF_BUCKETS

    @pytest.fixture(autouse=True)
    def _container(self, container: str) -> None:
        self.container = container

    def make_store(self, folder: Path) -> Store:
        return open_store(f"{self.container}/a/{folder.name}")


@pytest.mark.long
class TestAzureBetweenProcesses(SharedStoreContract, TestAzure):
    def reopen(self, store: Store):
        return Reopen(store.address)


@pytest.mark.long
class TestS3BehindFaults(TestS3):
    """Every promise, while about every fourth answer is lost, late, doubled or broken off."""

    @pytest.fixture(autouse=True)
    def _faults(self, s3: str, bucket: str, monkeypatch: pytest.MonkeyPatch) -> Iterator[None]:
        faults = [
            Fault("lost-reply", "create", probability=0.1, seed=1),
            Fault("reset-after", "create", probability=0.1, seed=2),
            Fault("conflict", "create", probability=0.1, seed=3), Fault("short-body", "read", probability=0.1, seed=4),
            Fault("server-error", probability=0.05, seed=5), Fault("reset-before", probability=0.05, seed=6),
        ]  # fmt: skip
        with FaultProxy(s3, faults) as proxy:
            monkeypatch.setenv("AWS_ENDPOINT_URL", proxy.url)
            yield


class Reopen:
    def __init__(self, url: str) -> None:
        self.url = url

    def __call__(self) -> Store:
        return open_store(self.url)


def test_an_object_that_is_larger_than_any_of_ours_is_not_fetched(bucket, monkeypatch):
    store = open_store(f"{bucket}/a")
    store.create("value", [bytes(1000)])
    monkeypatch.setattr("forebay.store.object_store.MOST_BYTES", 999)
    for read in (store.read, store.view):
        with pytest.raises(StoreRefused, match="'value' has 1,000 bytes"):
            read("value")
    assert store.read("value", 0, 10) == bytes(10)
    with pytest.raises(BadCopy):
        store.view("value", expect=Expected(10, bytes(32)))


def test_the_first_bytes_of_an_object_are_all_that_is_sent(s3, bucket, monkeypatch):
    open_store(f"{bucket}/a").create("value", [bytes(range(100)) * 1000])
    with FaultProxy(s3) as proxy:
        monkeypatch.setenv("AWS_ENDPOINT_URL", proxy.url)
        assert open_store(f"{bucket}/a").read("value", 0, 10) == bytes(range(10))
    assert (proxy.bytes_sent, proxy.requests) == (10, {"read": 1})


def test_a_value_is_not_read_into_memory_whole_beyond_a_bound(monkeypatch: pytest.MonkeyPatch) -> None:
    store = open_store("memory://bounded")
    store.create("layers/a/large", [b"x" * 100])
    monkeypatch.setattr("forebay.store.object_store.READ_BYTES", 99)
    with pytest.raises(StoreRefused, match=r"more than 99 bytes, too many to read into memory at once"):
        store.read("layers/a/large")
    assert store.read("layers/a/large", 1, 100) == b"x" * 99
    assert len(store.view("layers/a/large")) == 100
    monkeypatch.setattr("forebay.store.object_store.READ_BYTES", 100)
    assert store.read("layers/a/large") == b"x" * 100
