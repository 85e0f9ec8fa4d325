"""Whatever a connection does, the file arrives whole and checked, or the error says why not."""

import hashlib
import os
import random
import shutil
import signal
import subprocess
from pathlib import Path

import pytest
from tests.helpers.builders import wait_until
from tests.helpers.processes import PythonProcess
from tests.hub.server import Drop, Flip, HubServer, IgnoreRange, Retag, Stall, Status, Truncate, blob_hash

from forebay.errors import SourceNotFound, SourceUnreadable, StoreFull, StoreUnavailable
from forebay.hub import HubFile, Repository, RetryPolicy, download, scratch_folder, sweep

SHARD = random.Random(0).randbytes(300_000)
QUICK = RetryPolicy(retries=3, timeout=5, first_wait=0.01)
HASTY = RetryPolicy(retries=3, timeout=1, first_wait=0.01)


def repository(hub: HubServer, folder: Path) -> Repository:
    return Repository("org/set", "dataset", hub.address, str(folder / "kept"), QUICK)


def fetched(hub: HubServer, folder: Path, patience: RetryPolicy = QUICK, path: str = "a.parquet") -> bytes:
    """The downloaded file."""
    return fetched_from(hub.address, folder, patience, path)


def fetched_from(address: str, folder: Path, patience: RetryPolicy = QUICK, path: str = "a.parquet") -> bytes:
    owner = Repository("org/set", "dataset", address, str(folder / "kept"), patience)
    commit = owner.commit()
    (file,) = (file for file in owner.files(commit) if file.path == path)
    with scratch_folder(str(folder / "spool")) as scratch:
        return Path(download(HubFile(owner, commit, file), scratch)).read_bytes()


def ranges(hub: HubServer) -> list[str | None]:
    return [request.range for request in hub.asked("a.parquet")]


@pytest.mark.parametrize(
    "spoiling",
    [
        Drop(after=100_000),
        Truncate(after=70_000),
        Drop(after=0),
        Status(500),
        Status(429, {"Retry-After": "0"}),
        Status(503),
        Status(502),
        Flip(at=123_456),
        Retag('"another"'),
    ],
    ids=str,
)
def test_download_that_fails_once_is_retried_and_complete(hub, tmp_path, spoiling):
    hub.add("org/set", {"a.parquet": SHARD})
    hub.spoil("a.parquet", spoiling)
    assert fetched(hub, tmp_path) == SHARD
    assert hub.unspent == 0
    assert len(ranges(hub)) == (1 if isinstance(spoiling, Retag) else 2)
    assert os.listdir(tmp_path / "spool") == []


@pytest.mark.parametrize("spoiling", [Status(503), Status(429, {"Retry-After": "0"}), Drop(after=0)], ids=str)
def test_download_retries_a_failed_request_for_metadata(hub, tmp_path, spoiling):
    hub.add("org/set", {"a.parquet": SHARD})
    hub.spoil("HEAD a.parquet", spoiling)
    assert fetched(hub, tmp_path) == SHARD
    assert (hub.unspent, ranges(hub)) == (0, [None])


def test_download_that_breaks_off_resumes_in_steps_of_ten_megabytes(hub, tmp_path):
    large = SHARD * 80
    hub.add("org/set", {"a.parquet": large})
    hub.spoil("a.parquet", Drop(after=22 << 20))
    assert fetched(hub, tmp_path) == large
    assert ranges(hub) == [None, f"bytes={20 << 20}-"]


def test_a_stalled_connection_is_given_up_and_resumed(hub, tmp_path):
    hub.add("org/set", {"a.parquet": SHARD})
    hub.spoil("a.parquet", Stall(after=50_000))
    assert fetched(hub, tmp_path, HASTY) == SHARD
    assert len(ranges(hub)) == 2


def test_a_listing_that_stalls_is_asked_again(hub, tmp_path):
    hub.add("org/set", {"a.parquet": SHARD})
    hub.spoil("/tree/", Stall(after=3))
    hub.spoil("/revision/", Status(500), Drop(after=1))
    assert fetched(hub, tmp_path, HASTY) == SHARD
    assert len(hub.asked("/tree/")) == 2
    assert len(hub.asked("/revision/")) == 3


def test_download_from_a_server_without_ranges_starts_again(hub, tmp_path):
    large = SHARD * 50
    hub.add("org/set", {"a.parquet": large})
    hub.spoil("a.parquet", Drop(after=12 << 20), IgnoreRange())
    assert fetched(hub, tmp_path) == large
    assert ranges(hub) == [None, f"bytes={10 << 20}-"]


@pytest.mark.parametrize("content", [SHARD[:1000], SHARD + b"more"], ids=["shorter", "longer"])
def test_download_of_a_file_with_another_length_than_listed_is_rejected(hub, tmp_path, content):
    commit = hub.add("org/set", {"a.parquet": SHARD})
    owner = repository(hub, tmp_path)
    (file,) = owner.files(commit)
    hub._repositories[f"datasets/org/set@{commit}"][1]["a.parquet"] = content
    with pytest.raises(SourceUnreadable, match=r"'a\.parquet' of the data set 'org/set' does not match"):
        download(HubFile(owner, commit, file), str(tmp_path))
    assert len(ranges(hub)) == QUICK.retries + 1


def test_a_file_that_never_matches_its_hash_is_corrupt_and_is_not_kept(hub, tmp_path):
    hub.add("org/set", {"a.parquet": SHARD})
    hub.spoil("a.parquet", *[Flip(at=7)] * 9)
    with pytest.raises(SourceUnreadable, match=rf"'a\.parquet'.*{hashlib.sha256(SHARD).hexdigest()} is listed"):
        fetched(hub, tmp_path)
    assert len(ranges(hub)) == QUICK.retries + 1
    assert not (tmp_path / "spool" / hashlib.sha256(SHARD).hexdigest()).exists()


def test_a_small_file_is_checked_by_the_hash_that_git_gives_it(hub, tmp_path):
    text = b"not a large file\n"
    hub.add("org/set", {"notes.txt": text})
    hub.spoil("notes.txt", Flip(at=2))
    assert fetched(hub, tmp_path, path="notes.txt") == text
    assert len(hub.asked("notes.txt")) == 2
    assert len(blob_hash(text)) == 40


def test_retries_in_a_row_are_counted_and_the_last_trouble_is_named(hub, tmp_path):
    hub.add("org/set", {"a.parquet": SHARD})
    hub.spoil("a.parquet", *[Status(503)] * 9)
    with pytest.raises(StoreUnavailable, match=r"HTTP 503 Service Unavailable \(4 attempts\)"):
        fetched(hub, tmp_path)
    assert len(ranges(hub)) == 4


def test_a_busy_hub_is_left_alone_as_long_as_it_asks(hub, tmp_path, monkeypatch):
    hub.add("org/set", {"a.parquet": SHARD})
    hub.spoil(
        "a.parquet", Status(429, {"Retry-After": "17"}), Status(429, {"RateLimit": '"api";r=0;t=55'}), Status(500)
    )
    waited: list[float] = []
    monkeypatch.setattr("forebay.hub.session.time.sleep", waited.append)
    assert fetched(hub, tmp_path) == SHARD
    assert 17 <= waited[0] < 17.1
    assert 55 <= waited[1] < 55.1
    assert waited[2] < 0.1


def test_waits_grow_and_are_not_the_same_for_everybody():
    patience = RetryPolicy(first_wait=1, longest_wait=10)
    for failures, longest in ((1, 1), (2, 2), (3, 4), (4, 8), (5, 10), (60, 10)):
        waits = {patience.wait(failures, None) for _ in range(50)}
        assert len(waits) > 10
        assert all(longest / 2 <= wait <= longest for wait in waits)
    assert patience.wait(1, asked=1e9) <= 601


def test_the_token_goes_to_the_hub_and_not_to_the_storage_behind_it(hub, tmp_path, monkeypatch):
    monkeypatch.setenv("HF_TOKEN", "hf_secret")
    with HubServer() as storage:
        hub.elsewhere, hub.token = storage, "hf_secret"
        hub.add("org/set", {"a.parquet": SHARD})
        storage.spoil("blobs", Drop(after=1000), Status(403))
        assert fetched(hub, tmp_path) == SHARD
        assert [request.authorization for request in storage.requests] == [None] * 3
        assert {request.authorization for request in hub.requests} == {"Bearer hf_secret"}


def test_what_is_not_there_or_not_for_us_says_what_to_do(hub, tmp_path):
    hub.add("org/set", {"a.parquet": SHARD})
    with pytest.raises(SourceNotFound, match=r"(?s)'org/none'.*check the name.*hf auth login"):
        Repository("org/none", "dataset", hub.address, str(tmp_path), QUICK).commit()
    with pytest.raises(SourceNotFound, match=r"(?s)revision 'v9'.*check the revision"):
        repository(hub, tmp_path).commit("v9")
    hub.spoil("/revision/", Status(403, {"X-Error-Code": "GatedRepo", "X-Error-Message": "Access is restricted"}))
    with pytest.raises(SourceNotFound, match=r"(?s)'org/set'.*restricted.*gated.*hf auth login"):
        repository(hub, tmp_path).commit()
    hub.token = "hf_other"
    with pytest.raises(SourceNotFound, match=r"(?s)'org/set'.*hf auth login"):
        repository(hub, tmp_path).commit()
    with pytest.raises(SourceNotFound, match="organization/name"):
        Repository("a/b/c", "dataset", hub.address, str(tmp_path), QUICK).commit()
    assert not any(request.path.count("a/b/c") for request in hub.requests)


def test_without_a_network_the_error_names_the_ways_out(tmp_path):
    owner = Repository(
        "org/set", "dataset", "http://127.0.0.1:9", str(tmp_path), RetryPolicy(retries=1, first_wait=0.01)
    )
    with pytest.raises(
        StoreUnavailable, match=r"(?s)http://127\.0\.0\.1:9 .*'org/set'.*2 attempts.*HF_ENDPOINT.*local files"
    ) as caught:
        owner.commit()
    assert isinstance(caught.value, OSError)
    assert "\n" not in caught.value.message


def test_a_listing_of_many_pages_asks_only_the_hub(hub, tmp_path):
    files = {f"data/{number}.parquet": bytes([number]) for number in range(8)}
    commit = hub.add("org/set", files)
    assert [file.path for file in repository(hub, tmp_path).files(commit)] == sorted(files)
    assert len(hub.asked("/tree/")) == 3


def test_scratch_folder_of_a_killed_process_is_swept_and_of_a_live_one_is_not(hub, tmp_path):
    hub.add("org/set", {"a.parquet": SHARD})
    hub.spoil("a.parquet", Stall(after=180_000))
    code = f"from tests.hub.test_hub_download import *; fetched_from({hub.address!r}, Path({str(tmp_path)!r}))"
    killed = PythonProcess("-c", code)
    wait_until(hub.reached.is_set)
    sweep(str(tmp_path / "spool"))
    assert len(os.listdir(tmp_path / "spool")) == 1
    os.kill(killed.pid, signal.SIGKILL)
    killed.communicate()
    sweep(str(tmp_path / "spool"))
    assert os.listdir(tmp_path / "spool") == []


@pytest.mark.filterwarnings("ignore:Not enough free disk space")
def test_a_full_spool_is_said_to_be_full_and_goes_on_when_there_is_room(hub, tmp_path):
    hub.add("org/set", {"a.parquet": SHARD})
    spool = tmp_path / "spool"
    spool.mkdir()
    mounting = ["mount", "-t", "tmpfs", "-o", "size=128k", "tmpfs", str(spool)]
    if not shutil.which("mount") or subprocess.run(mounting, capture_output=True).returncode:
        pytest.skip("no file system can be mounted here")
    try:
        with pytest.raises(StoreFull, match=rf"not enough disk space at '{spool}/\.tmp-"):
            fetched(hub, tmp_path)
        subprocess.run(["mount", "-o", "remount,size=1m", spool], check=True)
        assert fetched(hub, tmp_path) == SHARD
    finally:
        subprocess.run(["umount", "--lazy", spool], check=True)
