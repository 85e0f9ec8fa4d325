"""Whatever a connection does, the file arrives whole and checked, or the error says why not."""

import hashlib
import os
import random
import shutil
import signal
import subprocess
from pathlib import Path
from typing import Any

import pytest
from tests.builders import wait_until
from tests.hub.server import Drop, Flip, HubServer, IgnoreRange, Retag, Stall, Status, Truncate, Wait, blob_hash
from tests.warm_process import WarmProcess

from forebay.errors import DiskFull, DownloadCorrupt, HubNotFound, HubUnreachable
from forebay.hub import HubFile, Repository, RetryPolicy, acquire, sweep

SHARD = random.Random(0).randbytes(300_000)
QUICK = RetryPolicy(retries=3, timeout=5, first_wait=0.01)
HASTY = RetryPolicy(retries=3, timeout=1, first_wait=0.01)


def repository(hub: HubServer, folder: Path, patience: RetryPolicy = QUICK) -> Repository:
    return Repository("org/set", "dataset", hub.address, str(folder / "kept"), patience)


def fetched(hub: HubServer, folder: Path, patience: RetryPolicy = QUICK, path: str = "a.parquet") -> bytes:
    """The file as it comes to rest in the folder."""
    owner = repository(hub, folder, patience)
    commit = owner.commit()
    file = owner.listing(commit).file(path)
    assert file is not None
    held = acquire(HubFile(owner, commit, file), str(folder / "spool"))
    content = Path(held.path).read_bytes()
    held.remove()
    return content


def ranges(hub: HubServer) -> list[str | None]:
    return [request.range for request in hub.asked("a.parquet")]


@pytest.mark.parametrize(
    ("spoiling", "resumed"),
    [
        (Drop(after=100_000), "bytes=100000-"),
        (Truncate(after=70_000), "bytes=70000-"),
        (Drop(after=0), None),
        (Status(500), None),
        (Status(429, {"Retry-After": "0"}), None),
        (Status(503), None),
        (Status(502), None),
        (Flip(at=123_456), None),
    ],
    ids=str,
)
def test_a_download_that_was_spoiled_once_goes_on_where_it_broke(hub, tmp_path, spoiling, resumed):
    hub.add("org/set", {"a.parquet": SHARD})
    hub.spoil("a.parquet", spoiling)
    assert fetched(hub, tmp_path) == SHARD
    assert ranges(hub) == [None, resumed]
    assert os.listdir(tmp_path / "spool") == []


def test_a_stalled_connection_is_given_up_and_resumed(hub, tmp_path):
    hub.add("org/set", {"a.parquet": SHARD})
    hub.spoil("a.parquet", Stall(after=50_000))
    assert fetched(hub, tmp_path, HASTY) == SHARD
    assert ranges(hub) == [None, "bytes=50000-"]


def test_a_listing_that_stalls_is_asked_again(hub, tmp_path):
    hub.add("org/set", {"a.parquet": SHARD})
    hub.spoil("/tree/", Stall(after=3))
    hub.spoil("/revision/", Status(500), Drop(after=1))
    assert fetched(hub, tmp_path, HASTY) == SHARD
    assert len(hub.asked("/tree/")) == 2
    assert len(hub.asked("/revision/")) == 3


def test_a_server_that_knows_no_ranges_gives_all_again_and_only_the_rest_is_taken(hub, tmp_path):
    hub.add("org/set", {"a.parquet": SHARD})
    hub.spoil("a.parquet", Drop(after=100_000), IgnoreRange(after=150_000), IgnoreRange())
    assert fetched(hub, tmp_path) == SHARD
    assert ranges(hub) == [None, "bytes=100000-", "bytes=150000-"]


def test_pieces_of_two_versions_are_not_put_together(hub, tmp_path):
    hub.add("org/set", {"a.parquet": SHARD})
    hub.spoil("a.parquet", Drop(after=100_000), Retag('"another"'))
    assert fetched(hub, tmp_path) == SHARD
    assert ranges(hub) == [None, "bytes=100000-", None]


def test_tags_that_change_with_every_answer_are_not_believed_twice(hub, tmp_path):
    hub.add("org/set", {"a.parquet": SHARD})
    hub.spoil("a.parquet", Drop(after=100_000), Retag('"1"'), Drop(after=150_000), Retag('"2"'))
    assert fetched(hub, tmp_path) == SHARD
    assert ranges(hub) == [None, "bytes=100000-", None, "bytes=150000-"]


def test_a_part_left_behind_is_taken_up(hub, tmp_path):
    hub.add("org/set", {"a.parquet": SHARD})
    leave_part(tmp_path, SHARD[:200_000])
    assert fetched(hub, tmp_path) == SHARD
    assert ranges(hub) == ["bytes=200000-"]


def test_a_part_that_is_complete_is_not_asked_for_again(hub, tmp_path):
    hub.add("org/set", {"a.parquet": SHARD})
    leave_part(tmp_path, SHARD)
    assert fetched(hub, tmp_path) == SHARD
    assert ranges(hub) == []


@pytest.mark.parametrize("left", [b"x" * 200_000, b"x" * len(SHARD), SHARD + b"more"], ids=["other", "whole", "longer"])
def test_a_part_of_another_content_is_thrown_away(hub, tmp_path, left):
    hub.add("org/set", {"a.parquet": SHARD})
    leave_part(tmp_path, left)
    assert fetched(hub, tmp_path) == SHARD
    assert ranges(hub)[-1] is None


def test_a_server_whose_file_is_shorter_than_listed_is_refused(hub, tmp_path):
    """It answers 416 where the part goes on, then less than it should."""
    hub.add("org/set", {"a.parquet": SHARD})
    owner = repository(hub, tmp_path)
    owner.listing(owner.commit())
    hub._repositories["datasets/org/set"][1]["a.parquet"] = SHARD[:1000]
    hub._repositories[f"datasets/org/set@{owner.commit()}"][1]["a.parquet"] = SHARD[:1000]
    leave_part(tmp_path, SHARD[:2000])
    with pytest.raises(HubUnreachable, match=r"'a\.parquet' of the data set 'org/set'"):
        fetched(hub, tmp_path)
    assert ranges(hub)[0] == "bytes=2000-"
    assert ranges(hub)[1] is None


def test_a_file_that_never_matches_its_hash_is_corrupt_and_is_not_kept(hub, tmp_path):
    hub.add("org/set", {"a.parquet": SHARD})
    hub.spoil("a.parquet", *[Flip(at=7)] * 9)
    with pytest.raises(DownloadCorrupt, match=rf"'a\.parquet'.*{hashlib.sha256(SHARD).hexdigest()} is listed"):
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


@pytest.mark.parametrize("name", ["../../elsewhere", "/tmp/elsewhere", "0" * 39 + "/", "0" * 40 + "\n", ""])
def test_what_is_no_hash_names_no_file_on_this_disk(hub, tmp_path, monkeypatch, name):
    monkeypatch.setattr(hub, "_entry", lambda path, content: {"type": "file", "path": path, "oid": name, "size": 1})
    commit = hub.add("org/set", {"a.parquet": b"x"})
    with pytest.raises(HubUnreachable, match="its response is malformed"):
        repository(hub, tmp_path).listing(commit)


def test_a_listing_that_a_crash_left_empty_is_asked_for_again(hub, tmp_path):
    commit = hub.add("org/set", {"a.parquet": b"x"})
    (listed,) = repository(hub, tmp_path).listing(commit).files
    for kept in (tmp_path / "kept/listings").iterdir():
        kept.write_bytes(b"")
    assert repository(hub, tmp_path, HASTY).listing(commit).files == (listed,)  # another one, which remembers nothing


@pytest.mark.parametrize("thing", ["fifo", "folder", "dangling link", "link to a device"])
def test_what_is_not_a_file_where_a_listing_was_kept_is_not_read(hub, tmp_path, thing):
    commit = hub.add("org/set", {"a.parquet": b"x"})
    (listed,) = repository(hub, tmp_path).listing(commit).files
    (kept,) = (tmp_path / "kept/listings").iterdir()
    kept.unlink()
    if thing == "fifo":
        os.mkfifo(kept)
    elif thing == "folder":
        kept.mkdir()
    else:
        kept.symlink_to("/nowhere" if thing == "dangling link" else "/dev/zero")
    assert repository(hub, tmp_path, HASTY).listing(commit).files == (listed,)
    assert os.listdir(tmp_path / "kept/listings") == [kept.name]


def test_retries_in_a_row_are_counted_and_the_last_trouble_is_named(hub, tmp_path):
    hub.add("org/set", {"a.parquet": SHARD})
    hub.spoil("a.parquet", *[Status(503)] * 9)
    with pytest.raises(HubUnreachable, match=r"HTTP 503 Service Unavailable \(4 attempts\)"):
        fetched(hub, tmp_path)
    assert len(ranges(hub)) == 4


def test_a_try_that_brings_much_is_no_failure(hub, tmp_path):
    """More breaks than retries: each brought a new megabyte, so patience begins anew."""
    large = random.Random(1).randbytes(9 << 20)
    hub.add("org/set", {"a.parquet": large})
    hub.spoil("a.parquet", *[Drop(after=(1 << 20) + 1)] * 8)
    assert fetched(hub, tmp_path, RetryPolicy(retries=1, timeout=5, first_wait=0.001)) == large
    assert hub.unspent == 0


def test_a_busy_hub_is_left_alone_as_long_as_it_asks(hub, tmp_path, monkeypatch):
    hub.add("org/set", {"a.parquet": SHARD})
    hub.spoil(
        "a.parquet", Status(429, {"Retry-After": "17"}), Status(429, {"RateLimit": '"api";r=0;t=55'}), Status(500)
    )
    waited: list[float] = []
    monkeypatch.setattr("forebay.hub.http.time.sleep", waited.append)
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
        assert [request.range for request in storage.requests] == [None, "bytes=1000-", "bytes=1000-"]
        assert {request.authorization for request in hub.requests} == {"Bearer hf_secret"}


def test_what_is_not_there_or_not_for_us_says_what_to_do(hub, tmp_path):
    hub.add("org/set", {"a.parquet": SHARD})
    with pytest.raises(HubNotFound, match=r"'org/none'.*check the name.*hf auth login"):
        Repository("org/none", "dataset", hub.address, str(tmp_path), QUICK).commit()
    with pytest.raises(HubNotFound, match=r"revision 'v9'.*check the revision"):
        repository(hub, tmp_path).commit("v9")
    hub.spoil("/revision/", Status(403, {"X-Error-Code": "GatedRepo", "X-Error-Message": "Access is restricted"}))
    with pytest.raises(HubNotFound, match=r"'org/set'.*restricted.*gated.*hf auth login"):
        repository(hub, tmp_path).commit()
    hub.token = "hf_other"
    with pytest.raises(HubNotFound, match=r"'org/set'.*hf auth login"):
        repository(hub, tmp_path).commit()
    with pytest.raises(HubNotFound, match="organization/name"):
        Repository("a/b/c", "dataset", hub.address, str(tmp_path), QUICK).commit()
    assert not any(request.path.count("a/b/c") for request in hub.requests)


def test_without_a_network_the_error_names_the_ways_out(tmp_path):
    owner = Repository(
        "org/set", "dataset", "http://127.0.0.1:9", str(tmp_path), RetryPolicy(retries=1, first_wait=0.01)
    )
    with pytest.raises(
        HubUnreachable, match=r"http://127\.0\.0\.1:9 .*'org/set'.*2 attempts.*HF_ENDPOINT.*local files"
    ) as caught:
        owner.commit()
    assert isinstance(caught.value, OSError)
    assert "\n" not in str(caught.value)


def test_an_answer_that_is_not_the_hubs_is_said_to_be_so(hub, tmp_path):
    hub.add("org/set", {"a.parquet": SHARD})
    hub.spoil("/revision/", Truncate(after=5))
    with pytest.raises(HubUnreachable, match="its response is malformed"):
        repository(hub, tmp_path).commit()


def test_a_commit_is_listed_once_in_pages_and_then_known_without_the_hub(hub, tmp_path):
    files = {f"data/{number}.parquet": bytes([number]) for number in range(8)}
    commit = hub.add("org/set", files)
    owner = repository(hub, tmp_path)
    assert [file.path for file in owner.listing(commit).files] == sorted(files)
    assert len(hub.asked("/tree/")) == 3
    again = Repository("org/set", "dataset", hub.address, str(tmp_path / "kept"), HASTY)
    assert again.listing(commit) == owner.listing(commit)
    assert len(hub.asked("/tree/")) == 3
    assert not hub.asked("elsewhere")


def test_of_two_that_want_a_file_the_second_waits_and_finds_it(hub, tmp_path):
    hub.add("org/set", {"a.parquet": SHARD})
    hub.spoil("a.parquet", Wait(after=1000))
    first = start_taking(hub, tmp_path)
    wait_until(hub.reached.is_set)
    second = start_taking(hub, tmp_path)
    wait_until(lambda: len(hub.asked("/revision/")) == 2)
    hub.go.set()
    said = [process.stdout.readline().strip() for process in (first, second)]
    (tmp_path / "let-go").touch()
    assert [process.communicate(timeout=600) for process in (first, second)] == [("", "")] * 2
    assert said == [hashlib.sha256(SHARD).hexdigest()] * 2
    assert ranges(hub) == [None]
    assert os.listdir(tmp_path / "spool") == []


def test_a_download_that_was_killed_goes_on_from_its_part(hub, tmp_path):
    hub.add("org/set", {"a.parquet": SHARD})
    hub.spoil("a.parquet", Stall(after=180_000))
    killed = start_taking(hub, tmp_path)
    part = tmp_path / "spool" / (hashlib.sha256(SHARD).hexdigest() + ".part")
    wait_until(lambda: part.exists() and part.stat().st_size == 180_000)
    os.kill(killed.pid, signal.SIGKILL)
    killed.communicate()
    assert fetched(hub, tmp_path) == SHARD
    assert ranges(hub) == [None, "bytes=180000-"]


def test_a_file_damaged_on_disk_is_downloaded_again(hub, tmp_path):
    hub.add("org/set", {"a.parquet": SHARD})
    spool = tmp_path / "spool"
    spool.mkdir()
    (spool / hashlib.sha256(SHARD).hexdigest()).write_bytes(SHARD[:-1] + b"x")
    assert fetched(hub, tmp_path) == SHARD


def test_what_nobody_took_up_for_a_day_is_swept(tmp_path):
    spool = tmp_path / "spool"
    spool.mkdir()
    old, young = "a" * 64, "b" * 40
    for name in (old, f"{old}.part", f"{young}.part"):
        (spool / name).write_bytes(b"x")
    for name in (old, f"{old}.part"):
        os.utime(spool / name, (1e9, 1e9))
    sweep(str(spool))
    assert os.listdir(spool) == [f"{young}.part"]


def test_a_full_spool_is_said_to_be_full_and_goes_on_when_there_is_room(hub, tmp_path):
    hub.add("org/set", {"a.parquet": SHARD})
    spool = tmp_path / "spool"
    spool.mkdir()
    mounting = ["mount", "-t", "tmpfs", "-o", "size=128k", "tmpfs", str(spool)]
    if not shutil.which("mount") or subprocess.run(mounting, capture_output=True).returncode:
        pytest.skip("no file system can be mounted here")
    try:
        with pytest.raises(DiskFull, match=rf"not enough disk space at '{spool}'"):
            fetched(hub, tmp_path)
        subprocess.run(["mount", "-o", "remount,size=1m", spool], check=True)
        assert fetched(hub, tmp_path) == SHARD
        assert ranges(hub) == [None, "bytes=131072-"]
    finally:
        subprocess.run(["umount", "--lazy", spool], check=True)


def leave_part(folder: Path, content: bytes) -> None:
    spool = folder / "spool"
    spool.mkdir()
    (spool / (hashlib.sha256(SHARD).hexdigest() + ".part")).write_bytes(content)


def start_taking(hub: HubServer, folder: Path) -> Any:
    return WarmProcess("-c", f"from tests.hub.taking import main; main({hub.address!r}, {str(folder)!r})")
