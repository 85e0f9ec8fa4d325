"""A data set on the hub as a source: planned by range reads, built shard by shard, the same as from local files."""

import hashlib
import json
import os
import pickle
import signal
import threading
from collections.abc import Iterator
from dataclasses import replace
from itertools import pairwise
from pathlib import Path
from typing import Any

import pytest
from tests.helpers.builders import wait_until
from tests.helpers.processes import PythonProcess
from tests.hub.data_sets import README, documents, shard
from tests.hub.server import Drop, Flip, HubServer, Request, Stall, Status, Truncate
from tests.sources.recipes import TextRecipe

import forebay as fb
from forebay.errors import BuildFailed, SourceChanged, SourceUnreadable
from forebay.hub import RetryPolicy
from forebay.source import samples_of
from forebay.sources import hub_datasets
from forebay.sources.hub_datasets import SHARDS_FOLDER, HubSource, release
from forebay.sources.hub_datasets import hub as hub_source
from forebay.testing import read_in_parts
from forebay.testing.kind_contracts import cut_file

QUICK = RetryPolicy(retries=4, timeout=3, first_wait=0.01)
SHARDS = {f"sample/{number}.parquet": shard(documents(120, f"s{number}")) for number in range(4)}
FILES = {"README.md": README.encode(), "data/x/0.parquet": shard(["other"]), **SHARDS}
TEXTS = [text for number in range(4) for text in documents(120, f"s{number}")]


@pytest.fixture
def source(hub: HubServer, tmp_path: Path) -> Iterator[HubSource]:
    hub.add("org/set", FILES)
    yield replace(hub_source("org/set", "sample", endpoint=hub.address, spool=tmp_path / "spool"), patience=QUICK)
    release()


def shards_at_rest(folder: Path) -> list[str]:
    """The names of downloaded shards."""
    return sorted(path.name for path in (folder / "spool" / SHARDS_FOLDER).rglob("*.parquet"))


def scratch(folder: Path) -> list[str]:
    return os.listdir(folder / "spool" / SHARDS_FOLDER)


def test_a_glance_gives_what_reading_gives_by_range_reads_of_that_column_only(hub, source, tmp_path):
    big = shard(documents(4000, "big"), rows_per_group=500)
    commit = hub.add("org/set", {"a.parquet": big})
    source = replace(source, subset=None, revision=commit)
    (part, *_) = cut_file(source, source.files()[0], 500, 30, 30)
    hub.requests.clear()
    seen = list(source.read(part, preview=True))
    assert shards_at_rest(tmp_path) == []
    asked = [request.range for request in hub.asked("a.parquet")]
    assert None not in asked
    spans = [[int(number) for number in span.removeprefix("bytes=").split("-")] for span in asked]
    footer = min(1 << 16, len(big))
    assert sum(stop - start + 1 for start, stop in spans) < footer + len(big) / 4
    assert seen == list(samples_of(source, part))
    assert len(seen) == part.weight


def test_a_source_stands_for_one_commit_whatever_is_pushed_later(hub, source):
    again = type(source).from_description(json.loads(json.dumps(source.describe())))
    hub.add("org/set", {"README.md": README.encode(), "sample/0.parquet": shard(["new"])})
    assert again.describe() == source.describe()
    assert again.files() == source.files()
    assert again.describe()["revision"] == source.revision
    newer = hub_source("org/set", "sample", endpoint=hub.address)
    assert newer.revision != source.revision
    assert [sample.data for sample in read_in_parts(newer, 10, 10)] == ["new"]
    assert [sample.data for sample in read_in_parts(source, 99, 99)] == TEXTS


def test_files_carry_the_hash_that_the_hub_lists(source):
    for file in source.files():
        sha256 = hashlib.sha256(SHARDS[file.path])
        assert (file.size, file.etag) == (len(SHARDS[file.path]), sha256.hexdigest())
        assert file.digest == int.from_bytes(sha256.digest()[:8]) == source.digest(file, 0, file.size)
        assert file.stream
        assert source.look(file.path) == file == source.scanned(file)
    with pytest.raises(FileNotFoundError, match=r"none\.parquet"):
        source.look("none.parquet")


def test_a_file_of_many_parts_is_cut_evenly_and_shares_no_chunk_with_the_next(hub, source):
    files = {f"{n}.parquet": shard(["x"] * rows, rows_per_group=25) for n, rows in enumerate((1043, 997, 1011))}
    source = replace(source, subset=None, revision=hub.add("org/set", files))
    for file, rows in zip(source.files(), (1043, 997, 1011), strict=True):
        cuts = list(source.cuts(file, 0, 100, 100))
        assert cuts[-1] == rows
        assert all(85 <= stop - start <= 125 for start, stop in pairwise([0, *cuts]))


@pytest.mark.slow
def test_the_disk_never_holds_more_than_one_shard_per_worker(hub, source, tmp_path):
    """When a worker of two asks for a shard, there is at most the other's; when all is built, there is nothing."""
    there: list[int] = []

    def count(request: Request) -> None:
        if ".parquet" in request.path and request.range is None and request.method == "GET":
            there.append(len(shards_at_rest(tmp_path)))

    hub.on_request = count
    fb.build(tmp_path / "cache", source, TextRecipe(chunk_rows=10), workers=2)
    assert len(there) == len(SHARDS)
    assert max(there) <= 1
    assert shards_at_rest(tmp_path) == []


def test_who_moves_on_to_another_shard_removes_the_one_before(source, tmp_path):
    for file in source.files():
        assert len(list(source.read(fb.Part(file, 0, 5)))) == 5
        assert shards_at_rest(tmp_path) == [os.path.basename(file.path)]
    release()
    assert scratch(tmp_path) == []


@pytest.mark.slow
def test_a_build_over_a_hub_that_misbehaves_is_the_build_from_local_files(hub, source, tmp_path):
    hub.spoil("sample/0.parquet None", Flip(at=100), Drop(after=2000))
    hub.spoil("sample/0", Drop(after=2000), Status(500))
    hub.spoil("sample/1", Status(429, {"Retry-After": "0"}), Truncate(after=500), Drop(after=1))
    hub.spoil("sample/2.parquet None", Stall(after=3000))
    hub.spoil("sample/2", Status(503, {"Retry-After": "0"}))
    hub.spoil("sample/3.parquet None", Drop(after=1500))
    hub.spoil("HEAD sample/3.parquet", Status(503, {"Retry-After": "0"}))
    hub.spoil("/api/", Status(502))
    recipe = TextRecipe(chunk_rows=10)
    report = fb.build(tmp_path / "from-hub", source, recipe, workers=2)
    assert hub.unspent == 0
    assert report.rows == len(TEXTS)
    for name, content in SHARDS.items():
        (tmp_path / "local" / name).parent.mkdir(parents=True, exist_ok=True)
        (tmp_path / "local" / name).write_bytes(content)
    local = fb.sources.parquet(tmp_path / "local", root=str(tmp_path / "local"))
    fb.build(tmp_path / "from-files", local, recipe, workers=0)
    assert texts_of(tmp_path / "from-hub") == texts_of(tmp_path / "from-files") == TEXTS
    assert shards_at_rest(tmp_path) == []
    fb.verify(tmp_path / "from-hub", source=source, full=True)


def test_builder_after_one_killed_during_a_download_builds_all_and_leaves_no_shard(hub, source, tmp_path):
    hub.spoil("sample/0.parquet None", Stall(after=1000))
    builder = start_build(replace(source, patience=RetryPolicy(timeout=60)), tmp_path, rows=10, workers=1)
    wait_until(hub.reached.is_set)
    os.kill(builder.pid, signal.SIGKILL)
    builder.communicate()
    assert start_build(source, tmp_path, rows=10, workers=1).communicate(timeout=600) == ("", "")
    assert texts_of(tmp_path / "cache") == TEXTS
    wait_until(lambda: hub_datasets.sweep(str(tmp_path / "spool" / SHARDS_FOLDER)) or scratch(tmp_path) == [])


def test_a_builder_that_ends_leaves_no_shard_whatever_its_workers_held(hub, source, tmp_path):
    """Chunks of two shards each: a worker ends with the beginning of a shard that another finished."""
    assert start_build(source, tmp_path, rows=50, workers=2).communicate(timeout=600) == ("", "")
    assert texts_of(tmp_path / "cache") == TEXTS
    assert shards_at_rest(tmp_path) == []
    assert start_build(source, tmp_path / "range", rows=50, workers=0, end_chunk=1).communicate() == ("", "")
    assert shards_at_rest(tmp_path) == []


def test_a_hub_that_is_gone_fails_the_chunks_with_the_way_out_and_a_rerun_goes_on(hub, source, tmp_path):
    impatient = replace(source, patience=RetryPolicy(retries=0, timeout=1))
    hub.spoil("sample/2.parquet None", *[Status(503)] * 1000)
    with pytest.raises(
        BuildFailed,
        match=r"(?s)StoreUnavailable: .*'sample/2\.parquet' of the data set 'org/set'.*run the same command again",
    ):
        fb.build(tmp_path / "cache", impatient, TextRecipe(chunk_rows=60), workers=0)
    hub.forgive()
    fb.build(tmp_path / "cache", source, TextRecipe(chunk_rows=60), workers=0)
    assert texts_of(tmp_path / "cache") == TEXTS


def test_what_was_built_can_be_looked_at_and_built_on_without_the_hub(hub, source, tmp_path):
    fb.build(tmp_path / "cache", source, TextRecipe(), workers=0)
    hub.spoil("", *[Status(503)] * 1000)
    asked = len(hub.requests)
    assert fb.build(tmp_path / "cache", source, TextRecipe(), workers=0).built == 0
    assert not fb.status(tmp_path / "cache").stale
    assert not fb.verify(tmp_path / "cache", full=True).stale
    assert len(hub.requests) == asked


def test_a_hub_that_cannot_be_asked_leaves_the_source_unchecked(hub, source, tmp_path):
    root = tmp_path / "cache"
    fb.build(root, source, TextRecipe(), workers=0)
    hub.spoil("", *[Status(503)] * 1000)
    script = (
        "import pickle, sys, forebay as fb; source = pickle.loads(bytes.fromhex(sys.argv[2])); "
        "report = fb.verify(sys.argv[1], source=source); "
        "print(fb.status(sys.argv[1], source=source).source_checked, report.source_checked, report.sound)"
    )
    said, _ = PythonProcess("-c", script, str(root), pickle.dumps(source).hex()).communicate()
    assert said.split() == ["False", "False", "True"]


def test_what_is_pushed_later_is_appended_by_growing(hub, source, tmp_path):
    fb.build(tmp_path / "cache", source, TextRecipe(), workers=0)
    hub.add("org/set", {**FILES, "sample/4.parquet": shard(["pushed later"])})
    newer = hub_source("org/set", "sample", endpoint=hub.address, spool=tmp_path / "spool")
    fb.update(tmp_path / "cache", newer, recipe=TextRecipe(), workers=0)
    assert texts_of(tmp_path / "cache") == [*TEXTS, "pushed later"]
    changed = {**FILES, "sample/1.parquet": shard(["other content"])}
    hub.add("org/set", changed)
    newest = hub_source("org/set", "sample", endpoint=hub.address)
    with pytest.raises(SourceChanged, match=r"sample/1\.parquet"):
        fb.update(tmp_path / "cache", newest, recipe=TextRecipe(), workers=0)


def test_a_shard_without_the_column_names_those_it_has(source):
    with pytest.raises(SourceUnreadable, match=r"(?s)sample/0\.parquet.*no column 'content'.*'id', 'text', 'url'"):
        fb.estimate(replace(source, text="content"), TextRecipe())


def test_a_shard_without_rows_is_nothing(hub, source):
    files = {"0.parquet": shard([]), "1.parquet": shard(["one", "two"]), "2.parquet": shard([], rows_per_group=1)}
    source = replace(source, subset=None, revision=hub.add("org/set", files))
    assert [sample.data for sample in read_in_parts(source, 5, 5)] == ["one", "two"]
    assert fb.estimate(source, TextRecipe()).rows == 2


def test_a_shard_that_is_no_parquet_file_is_unreadable(hub, source, tmp_path):
    source = replace(source, subset=None, revision=hub.add("org/set", {"a.parquet": b"PAR1 nothing of the kind PAR1"}))
    with pytest.raises(SourceUnreadable, match=r"a\.parquet"):
        fb.estimate(source, TextRecipe())


def texts_of(root: Path) -> list[str]:
    return [bytes(row["text"]).decode() for row in fb.open_cache(root)]


def start_build(source: HubSource, folder: Path, rows: int, **build: Any) -> Any:
    """A builder that runs by itself, into the folder's cache."""
    folder.mkdir(exist_ok=True)
    (folder / "source").write_bytes(pickle.dumps(source))
    code = (
        "import pickle; from pathlib import Path; import forebay as fb\n"
        "from tests.sources.recipes import TextRecipe\n"
        f"source = pickle.loads(Path({str(folder / 'source')!r}).read_bytes())\n"
        f"fb.build({str(folder / 'cache')!r}, source, TextRecipe(chunk_rows={rows}), **{build!r})"
    )
    return PythonProcess("-c", code)


def test_footers_are_asked_for_at_the_same_time(hub, source):
    together, begun = threading.Barrier(len(SHARDS)), set()

    def meet(request: Request) -> None:
        if request.path.endswith(".parquet") and request.path not in begun:
            begun.add(request.path)
            together.wait(60)  # one after the other, the first would wait for nobody

    hub.on_request = meet
    assert [list(source.cuts(file, 0, 120, 120)) for file in source.files()] == [[120]] * 4
