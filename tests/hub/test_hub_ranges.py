"""Pieces of a file without the whole."""

import io
import random

import pytest
from tests.hub.server import Drop, HubServer, IgnoreRange, Stall, Status, Truncate

from forebay.errors import SourceUnreadable, StoreUnavailable
from forebay.hub import HubFile, RangeFile, Repository, RetryPolicy

CONTENT = random.Random(3).randbytes(100_000)
HASTY = RetryPolicy(retries=3, timeout=1, first_wait=0.01)


def open_file(hub: HubServer, tmp_path) -> RangeFile:
    commit = hub.add("org/set", {"a.parquet": CONTENT})
    owner = Repository("org/set", "dataset", hub.address, str(tmp_path), HASTY)
    return RangeFile(HubFile(owner, commit, owner.files(commit)[0]))


def ranges(hub: HubServer) -> list[str | None]:
    return [request.range for request in hub.asked("a.parquet")]


def test_it_reads_and_seeks_like_a_file_and_asks_for_no_more(hub, tmp_path):
    remote, local = open_file(hub, tmp_path), io.BytesIO(CONTENT)
    for offset, whence, size in ((0, 0, 10), (5, 1, 100), (-8, 2, 8), (-8, 2, 80), (500, 0, 0), (99_000, 0, -1)):
        assert remote.seek(offset, whence) == local.seek(offset, whence)
        assert remote.read(size) == local.read(size)
        assert remote.tell() == local.tell()
    assert remote.read(10) == b""
    assert ranges(hub) == [
        "bytes=0-9",
        "bytes=15-114",
        "bytes=99992-99999",
        "bytes=99992-99999",
        "bytes=99000-99999",
    ]


@pytest.mark.parametrize(
    "spoiling",
    [
        Drop(after=300),
        Truncate(after=400),
        Stall(after=500),
        Status(500),
        Status(429, {"Retry-After": "0"}),
        IgnoreRange(after=1200),
        IgnoreRange(),
    ],
    ids=str,
)
def test_range_read_that_fails_once_is_retried(hub, tmp_path, spoiling):
    remote = open_file(hub, tmp_path)
    hub.spoil("a.parquet", spoiling)
    remote.seek(1000)
    assert remote.read(1000) == CONTENT[1000:2000]
    assert hub.unspent == 0


def test_range_read_from_a_server_without_ranges_is_an_error(hub, tmp_path):
    remote = open_file(hub, tmp_path)
    hub.spoil("a.parquet", *[IgnoreRange()] * 4)
    with pytest.raises(SourceUnreadable, match=r"its response is longer than 10 bytes"):
        remote.read(10)


def test_range_read_from_a_server_that_does_not_answer_is_an_error(hub, tmp_path):
    remote = open_file(hub, tmp_path)
    hub.spoil("a.parquet", *[Status(416)] * 4)
    with pytest.raises(StoreUnavailable, match=r"HTTP 416.*4 attempts"):
        remote.read(10)
    hub.spoil("a.parquet", *[Status(503)] * 4)
    with pytest.raises(StoreUnavailable, match=r"HTTP 503.*4 attempts"):
        remote.read(10)
