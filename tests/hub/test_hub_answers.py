"""What a hub answers is not believed: commits, names, sizes, pages, redirects, encodings and READMEs are checked."""

import gzip
import json
import os
import time
from collections.abc import Callable
from contextlib import suppress
from itertools import count
from pathlib import Path
from types import SimpleNamespace

import pytest
from tests.hub.data_sets import shard
from tests.hub.server import HubServer

import forebay as fb
from forebay.errors import SourceNotFound, SourceUnreadable, StoreUnavailable
from forebay.hub import (
    HubFile,
    RangeFile,
    RemoteFile,
    Repository,
    RetryPolicy,
    download,
    model_files,
    parquet_shards,
    repository,
    scratch_folder,
    shards,
)
from forebay.sources.hub_datasets import hub as hub_source
from forebay.store import retries

QUICK = RetryPolicy(retries=1, timeout=5, first_wait=0.01)
Answer = tuple[int, dict[str, str], bytes]


def answering(hub: HubServer, words: str, answer: Callable[[], Answer]) -> None:
    """Have a hub answer something else to requests whose path has these words."""
    usual = hub.answer
    hub.answer = lambda path, query: answer() if words in path else usual(path, query)  # type: ignore[method-assign]


def page(*entries: dict[str, object], cursor: object = None) -> Answer:
    link = {} if cursor is None else {"Link": f'<https://x.invalid/?cursor={cursor}>; rel="next"'}
    return 200, link, json.dumps(entries).encode()


def entry(path: str, size: int = 1, oid: str = "a" * 40) -> dict[str, object]:
    return {"type": "file", "path": path, "size": size, "oid": oid}


def listed(hub: HubServer) -> tuple[RemoteFile, ...]:
    commit = hub.add("org/set", {"a.parquet": b"x"})
    return Repository("org/set", "dataset", hub.address, patience=QUICK).files(commit)


DEEP = b"[" * 200_000
PATHS = ("../x.parquet", "/etc/x.parquet", "a/../x", "a//x", "a/./x", "..", "", "a/", "x\0y", "x" * 5000)
FIELDS = ({"size": -1}, {"size": 1 << 60}, {"oid": "../x"}, {"oid": "A" * 40}, {"oid": "0" * 40 + "\n"})
MALFORMED, UNUSABLE = "its response is malformed", "returned no usable answer"
LISTINGS: dict[str, tuple[str, Answer]] = {
    **{f"path {path[:20]!r}": (MALFORMED, page(entry(path))) for path in PATHS},
    **{f"{field}": (MALFORMED, page({**entry("a.parquet"), **field})) for field in FIELDS},
    "redirect to a file": ("unsupported protocol", (302, {"Location": "file:///etc/passwd"}, b"")),
    "redirect to FTP": ("unsupported protocol", (302, {"Location": "ftp://x.invalid/"}, b"")),
    "endless redirects": ("maximum allowed redirects", (302, {"Location": "/api/datasets/org/set/tree/again"}, b"")),
    "compressed": ("is compressed", (200, {"Content-Encoding": "gzip"}, gzip.compress(bytes(20 << 20), 9))),
    "long": ("longer than 16,777,216 bytes", (200, {}, b" " * (17 << 20))),
    "not UTF-8": (UNUSABLE, (200, {}, b'[{"type":"file","path":"\xff","oid":"' + b"a" * 40 + b'"}]')),
    "deep": (UNUSABLE, (200, {}, b'[{"other":' + DEEP)),
    "no address": (UNUSABLE, (200, {"Link": '<http://[::1?cursor=a>; rel="next"'}, json.dumps([entry("a")]).encode())),
    "superscript": (UNUSABLE, (503, {"Retry-After": "\xb2"}, b"")),  # a digit, and not a number
    "no time": (UNUSABLE, (503, {"Retry-After": "Mon, 01 Jan 0001 00:00:00 +2359"}, b"")),
    "many digits": (UNUSABLE, (429, {"RateLimit": '"api";r=0;t=' + "9" * 5000}, b"")),
}
SHAS = ("../../../../outside", "a" * 39, "A" * 40, "", "a" * 40 + "\n", "a" * 40 + "/x")
REVISIONS = [json.dumps({"sha": sha}).encode() for sha in SHAS] + [b'{"sha":"\xff"}', b'{"other":' + DEEP]


@pytest.mark.parametrize("name", LISTINGS)
def test_unusable_listing_is_an_error_in_one_sentence(hub, tmp_path, name):
    problem, answer = LISTINGS[name]
    answering(hub, "/tree/", lambda: answer)
    with pytest.raises((StoreUnavailable, SourceUnreadable), match=problem) as raised:
        listed(hub)
    assert "\n" not in raised.value.message
    assert len(hub.requests) <= 21


@pytest.mark.parametrize("body", REVISIONS, ids=lambda body: repr(body[:30]))
def test_unusable_commit_is_an_error_and_names_no_folder(hub, tmp_path, body):
    hub.add("org/model", {"config.json": b"{}"}, "models")
    answering(hub, "/revision/", lambda: (200, {}, body))
    with pytest.raises(StoreUnavailable, match=MALFORMED):
        model_files("org/model", "", (".json",), folder=str(tmp_path / "kept"), endpoint=hub.address, patience=QUICK)
    assert not (tmp_path / "outside").exists()
    assert not list(tmp_path.rglob("config.json"))


def test_ordinary_names_are_listed(hub):
    paths = ["a.parquet", ".gitattributes", "a/..b/c...parquet", "ä ö/x y.parquet", "a/.b"]
    answering(hub, "/tree/", lambda: page(*map(entry, paths)))
    assert [file.path for file in listed(hub)] == sorted(paths)


def test_pages_that_never_end_are_given_up(hub, monkeypatch):
    monkeypatch.setattr("forebay.hub.repository._MOST_PAGES", 20)
    numbers = count()
    for pages in (
        lambda: page(entry("same.parquet"), cursor="same"),
        lambda: page(cursor=next(numbers)),
        lambda: page(entry(f"{next(numbers)}.parquet"), cursor=next(numbers)),
    ):
        hub.requests.clear()
        answering(hub, "/tree/", pages)
        with pytest.raises(SourceNotFound, match="more than 20 pages"):
            listed(hub)
        assert len(hub.requests) == 20


@pytest.mark.parametrize("commit", ["../../../outside", "main", "A" * 40, "a" * 41])
def test_what_is_not_a_commit_is_not_asked_for(hub, tmp_path, commit):
    with pytest.raises(SourceNotFound, match="that is not a commit"):
        Repository("org/set", "dataset", hub.address, str(tmp_path / "kept"), QUICK).files(commit)
    assert hub.requests == []


def test_an_answer_that_comes_byte_by_byte_is_given_up(hub, tmp_path, monkeypatch):
    """Each byte may come in time and the answer never end: so the time of the whole is bounded too."""
    hub.add("org/set", {"a.parquet": b"x"})
    clock = SimpleNamespace(monotonic=count(0, 1000).__next__, time=time.time, sleep=time.sleep)
    monkeypatch.setattr("forebay.hub.session.time", clock)
    with pytest.raises(StoreUnavailable, match="its response took longer than 5 seconds"):
        Repository("org/set", "dataset", hub.address, str(tmp_path / "kept"), QUICK).commit()


HEADS = {
    "deep": ("configs: " + "[" * 5000 + "]" * 5000, "is not readable YAML"),
    "invalid": (": : [", "is not readable YAML"),
    "an invalid date": ("a: 2024-13-45", "is not readable YAML"),
    "an alias": ("a: &a [x]\nb: [*a, *a]", "an alias .* is not supported"),
    "long": ("x: " + "y" * (1 << 20), "is longer than"),
    "many patterns": (
        "configs:\n- data_files:" + "".join(f"\n  - '{number}*'" for number in range(1000)),
        "1,000 patterns over 5,000 files would take minutes",
    ),
}


@pytest.mark.parametrize("name", HEADS)
def test_readme_that_cannot_be_read_is_one_line(name):
    head, problem = HEADS[name]
    files = tuple(RemoteFile(f"data/{number}.parquet", 1, "a" * 40) for number in range(5000))
    with pytest.raises(SourceNotFound, match=problem) as raised:
        parquet_shards(files, f"---\n{head}\n---\n", "the data set 'org/set'", None, "train")
    assert "\n" not in raised.value.message


def test_damaged_shard_at_the_hub_is_an_error_of_planning(hub, tmp_path):
    content = bytearray(shard(["text " * 50] * 100, rows_per_group=50))
    content[-300:-8] = bytes(292)
    hub.add("org/set", {"a.parquet": bytes(content)})
    source = hub_source("org/set", endpoint=hub.address, spool=tmp_path / "spool", download_retries=1)
    with pytest.raises(SourceUnreadable):
        source.weight(source.files()[0])


def test_file_that_is_longer_than_listed_is_not_written_to_the_disk(hub, tmp_path):
    commit = hub.add("org/set", {"a.parquet": b"x" * 100_000})
    owner = Repository("org/set", "dataset", hub.address, str(tmp_path / "kept"), QUICK)
    file = HubFile(owner, commit, RemoteFile("a.parquet", 100, "c" * 64))
    with scratch_folder(str(tmp_path / "spool")) as scratch:
        with pytest.raises(SourceUnreadable, match="longer than 100 bytes"):
            download(file, scratch)
        assert not any(path.stat().st_size > 1000 for path in Path(scratch).rglob("*") if path.is_file())


@pytest.mark.parametrize("etag", ["../../../../outside", "/tmp/outside", "a" * 5000, "\xb2", ""])
def test_etag_of_any_content_leads_to_no_file_outside_the_folder(hub, tmp_path, etag):
    commit = hub.add("org/set", {"a.parquet": b"x"})
    owner = Repository("org/set", "dataset", hub.address, str(tmp_path / "kept"), QUICK)
    file = owner.files(commit)[0]
    headers = {"X-Repo-Commit": commit, "ETag": etag}
    answering(hub, "a.parquet", lambda: (200, headers, b"x"))
    with scratch_folder(str(tmp_path / "spool")) as scratch, suppress(OSError):
        download(HubFile(owner, commit, file), scratch)
    assert not list(tmp_path.rglob("outside*"))
    assert os.listdir(tmp_path / "spool") == []


def test_a_range_is_bounded(hub, tmp_path, monkeypatch):
    monkeypatch.setattr("forebay.hub.repository._LARGEST_RANGE", 1000)
    commit = hub.add("org/set", {"a.parquet": bytes(5000)})
    owner = Repository("org/set", "dataset", hub.address, str(tmp_path / "kept"), QUICK)
    reading = RangeFile(HubFile(owner, commit, owner.files(commit)[0]))
    assert len(reading.read(1000)) == 1000
    with pytest.raises(SourceNotFound, match="more than the limit of 1,000"):
        reading.read(1001)


def test_the_threat_model_names_the_limits_that_hold():
    page = (Path(fb.__file__).parents[2] / "docs" / "threat-model.md").read_text()
    for words, limit in (
        (f"{repository._LARGEST_ANSWER >> 20} MiB each", "answer of a hub"),
        (f"{repository._MOST_PAGES:,} pages, {repository._MOST_FILES:,} files", "answer of a hub"),
        (f"{repository._LARGEST_README >> 20} MiB, its head {shards._LARGEST_HEAD >> 20} MiB", "README"),
        (f"{shards._MOST_MATCHES:,} comparisons", "README"),
        (f"{repository._LARGEST_RANGE >> 20} MiB", "one range of a remote file"),
        (f"{retries._LONGEST_ASKED:.0f} s before each retry", "wait that a hub can ask for"),
    ):
        (row,) = [line for line in page.splitlines() if line.startswith(f"| {limit}")]
        assert words in row
