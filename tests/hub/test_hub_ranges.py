"""Pieces of a file without the whole."""

import io
import random

import pytest
from tests.hub.server import Drop, HubServer, IgnoreRange, Stall, Status, Truncate

from forebay.errors import DownloadCorrupt, HubUnreachable
from forebay.hub import HubFile, RangeFile, Repository, RetryPolicy

CONTENT = random.Random(3).randbytes(100_000)
HASTY = RetryPolicy(retries=3, timeout=1, first_wait=0.01)


def open_file(hub: HubServer, tmp_path) -> RangeFile:
    commit = hub.add("org/set", {"a.parquet": CONTENT})
    owner = Repository("org/set", "dataset", hub.address, str(tmp_path), HASTY)
    file = owner.listing(commit).file("a.parquet")
    assert file is not None
    return RangeFile(HubFile(owner, commit, file))


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
    ("spoiling", "second"),
    [
        (Drop(after=300), "bytes=1300-1999"),
        (Truncate(after=400), "bytes=1400-1999"),
        (Stall(after=500), "bytes=1500-1999"),
        (Status(500), "bytes=1000-1999"),
        (Status(429, {"Retry-After": "0"}), "bytes=1000-1999"),
        (IgnoreRange(after=1200), "bytes=1200-1999"),
    ],
    ids=str,
)
def test_a_read_that_breaks_off_goes_on_where_it_broke(hub, tmp_path, spoiling, second):
    remote = open_file(hub, tmp_path)
    hub.spoil("a.parquet", spoiling)
    remote.seek(1000)
    assert remote.read(1000) == CONTENT[1000:2000]
    assert ranges(hub) == ["bytes=1000-1999", second]


def test_a_server_that_knows_no_ranges_is_read_only_as_far_as_needed(hub, tmp_path):
    remote = open_file(hub, tmp_path)
    hub.spoil("a.parquet", IgnoreRange())
    remote.seek(1000)
    assert remote.read(1000) == CONTENT[1000:2000]
    assert len(ranges(hub)) == 1


def test_a_file_of_another_size_is_refused_and_a_silent_server_given_up(hub, tmp_path):
    remote = open_file(hub, tmp_path)
    hub.spoil("a.parquet", *[Status(416)] * 4)
    with pytest.raises(DownloadCorrupt, match="HTTP 416 does not return byte 0"):
        remote.read(10)
    hub.spoil("a.parquet", *[Stall(after=0)] * 4)
    with pytest.raises(HubUnreachable, match=r"ReadTimeout.*4 attempts"):
        remote.read(10)
