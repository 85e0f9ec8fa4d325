"""A retrying store repeats transient I/O errors, and recognizes a value that a failed attempt has written."""

import errno
import os
from functools import partial

import pytest

from forebay.store import LocalStore, MemoryStore, retries
from forebay.store.retrying import RetryingStore
from forebay.testing import SharedStoreContract


@pytest.fixture(autouse=True)
def no_pauses(monkeypatch):
    monkeypatch.setattr(retries, "DISK", retries.RetryPolicy(retries=3, first_wait=0))


def _opened(address):
    return RetryingStore(LocalStore(address))


class TestRetryingStore(SharedStoreContract):
    def make_store(self, folder):
        return RetryingStore(LocalStore(folder))

    def reopen(self, store):
        return partial(_opened, store.address)


class FlakyStore(MemoryStore):
    """Each method fails `times` times before it works; with `writes`, a failed `create` has written its value."""

    def __init__(self, code, times, writes=False):
        super().__init__()
        self.code, self.times, self.writes, self.calls = code, times, writes, 0

    def _fail(self):
        self.calls += 1
        if self.calls <= self.times:
            raise OSError(self.code, os.strerror(self.code))

    def read(self, key, start=0, stop=None):
        self._fail()
        return super().read(key, start, stop)

    def create(self, key, data, **options):
        if self.writes or self.calls >= self.times:
            created = super().create(key, data, **options)
        self._fail()
        return created

    def entries(self, prefix):
        self._fail()
        yield from super().entries(prefix)


@pytest.mark.parametrize("code", [errno.ESTALE, errno.EIO, errno.EBUSY, errno.ETIMEDOUT])
def test_transient_errors_are_retried(code):
    store = FlakyStore(code, times=2)
    assert RetryingStore(store).create("a", [b"1"])
    store.calls = 0
    assert RetryingStore(store).read("a") == b"1"
    store.calls = 0
    assert [entry.key for entry in RetryingStore(store).entries("")] == ["a"]


def test_a_lasting_error_is_raised_after_the_last_attempt():
    store = FlakyStore(errno.ESTALE, times=99)
    with pytest.raises(OSError, match="Stale"):
        RetryingStore(store).read("a")
    assert store.calls == 4


def test_other_errors_are_not_retried():
    store = FlakyStore(errno.EACCES, times=99)
    with pytest.raises(PermissionError):
        RetryingStore(store).read("a")
    assert store.calls == 1


def test_create_recognizes_the_value_of_its_failed_attempt():
    store = FlakyStore(errno.EIO, times=1, writes=True)
    assert RetryingStore(store).create("a", [b"1", b"2"])
    assert store.read("a") == b"12"


def test_create_does_not_claim_a_value_that_another_process_wrote():
    store = FlakyStore(errno.EIO, times=1)
    MemoryStore.create(store, "a", [b"3"])
    assert not RetryingStore(store).create("a", [b"1", b"2"])
    store.calls = 9
    assert not RetryingStore(store).create("a", [b"3"]), "the first attempt did not fail"
