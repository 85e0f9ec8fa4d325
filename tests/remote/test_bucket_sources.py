"""Sources in buckets: the same files make the same bytes as on this machine, and are identified by their etags."""

import gzip
import json
from pathlib import Path

import pytest
from tests.helpers.cache_files import chunk_path
from tests.helpers.fault_proxy import Fault, FaultProxy
from tests.helpers.image_caches import sample

import forebay as fb
from forebay.errors import SourceChanged
from forebay.source import samples_of
from forebay.sources.bucket_files import ObjectReader
from forebay.sources.opening import open_file
from forebay.store import open_store
from forebay.store.object_store import ObjectStore

RECIPE = fb.RawRecipe(chunk_bytes=4000)


def upload(bucket: str, name: str, content: bytes) -> None:
    folder, _, key = f"{bucket}/{name}".rpartition("/")
    open_store(folder).replace(key, [content])


@pytest.fixture
def raw(bucket, tmp_path) -> Path:
    """A folder whose files are also in the bucket, below `raw`."""
    files = {
        "a.txt": b"".join(b"line %d\n" % number for number in range(900)),
        "b.txt": b"".join(b"more %d\n" % number for number in range(400)),
        "deep/er/still/far/z.txt.gz": gzip.compress(b"".join(b"zip %d\n" % number for number in range(600))),
        "c.jsonl": b"".join(json.dumps({"text": f"document {number}"}).encode() + b"\n" for number in range(300)),
        ".hidden.txt": b"never\n",
        "odd name é#%.txt": b"odd\n",
    }
    for name, content in files.items():
        (tmp_path / "raw" / name).parent.mkdir(parents=True, exist_ok=True)
        (tmp_path / "raw" / name).write_bytes(content)
        upload(bucket, f"raw/{name}", content)
    return tmp_path / "raw"


def chunks(root) -> dict[str, bytes]:
    store = open_store(root)
    return {entry.key: store.read(entry.key) for entry in store.entries("layers/") if "recipe" not in entry.key}


@pytest.mark.parametrize("pattern", ["", "*.txt", "**/*.gz", "a.txt", "deep"])
def test_a_bucket_makes_the_bytes_that_the_same_folder_makes(bucket, raw, tmp_path, pattern):
    here, there = fb.sources.lines(raw / pattern), fb.sources.lines(f"{bucket}/raw/{pattern}")
    assert [file.path for file in there.files()] == [file.path for file in here.files()]
    fb.build(tmp_path / "here", here, RECIPE, workers=0)
    fb.build(tmp_path / "there", there, RECIPE, workers=0)
    assert chunks(tmp_path / "there") == chunks(tmp_path / "here") != {}


def test_documents_come_from_a_bucket(bucket, raw):
    for make in (fb.sources.jsonl, fb.sources.text):
        here, there = make(raw), make(f"{bucket}/raw")
        assert [file.path for file in there.files()] == [file.path for file in here.files()]
        samples = [
            [sample for file in source.files() for cut in [list(source.cuts(file, 0, 1 << 40, 1 << 40))]
             for sample in source.read(fb.source.Part(source.scanned(file), 0, cut[-1]))]
            for source in (here, there)
        ]  # fmt: skip
        assert samples[0] == samples[1] != []


def test_parquet_comes_from_a_bucket(bucket, tmp_path):
    pa, pq = pytest.importorskip("pyarrow"), pytest.importorskip("pyarrow.parquet")
    (tmp_path / "tables").mkdir()
    table = pa.table({"text": [f"document {number}" for number in range(700)], "other": list(range(700))})
    pq.write_table(table, tmp_path / "tables" / "a.parquet", row_group_size=100)
    upload(bucket, "tables/a.parquet", (tmp_path / "tables" / "a.parquet").read_bytes())
    here, there = fb.sources.parquet(tmp_path / "tables"), fb.sources.parquet(f"{bucket}/tables/*.parquet")
    (mine,), (theirs,) = here.files(), there.files()
    assert (theirs.path, theirs.size) == (mine.path, mine.size)
    assert list(there.cuts(theirs, 0, 100, 100)) == list(here.cuts(mine, 0, 100, 100))
    assert there.digest(theirs, 100, 300) == here.digest(mine, 100, 300)
    parts = [fb.source.Part(file, 150, 420) for file in (mine, theirs)]
    assert list(samples_of(there, parts[1])) == list(samples_of(here, parts[0])) != []


@pytest.mark.slow
def test_from_bucket_to_bucket_with_worker_processes(bucket, raw):
    report = fb.build(f"{bucket}/cache", fb.sources.lines(f"{bucket}/raw/*.txt"), RECIPE, workers=2)
    assert report.rows == 1301
    assert fb.verify(f"{bucket}/cache", full=True, allow_network=True).sound


def test_a_changed_object_is_an_error_that_names_it(bucket, raw, tmp_path):
    source = fb.sources.lines(f"{bucket}/raw/*.txt")
    fb.build(tmp_path / "cache", source, RECIPE, workers=0, end_chunk=1)
    upload(bucket, "raw/a.txt", (raw / "a.txt").read_bytes().replace(b"line 1\n", b"LINE 1\n"))
    with pytest.raises(SourceChanged, match=r"a\.txt"):
        fb.build(tmp_path / "cache", source, RECIPE, workers=0)


def test_a_cache_does_not_make_anyone_contact_its_bucket(bucket, raw, tmp_path):
    fb.build(tmp_path / "cache", fb.sources.lines(f"{bucket}/raw/a.txt"), RECIPE, workers=0, end_chunk=1)
    status = fb.status(tmp_path / "cache")
    assert not status.source_checked
    assert "s3://" in status.source_note
    chunk_path(tmp_path / "cache", "raw", 0).unlink()
    assert fb.repair(tmp_path / "cache", workers=0).failed != {}
    assert fb.repair(tmp_path / "cache", workers=0, allow_network=True).failed == {}


@pytest.mark.parametrize("make", [fb.sources.lines, fb.sources.images])
def test_a_report_lists_a_bucket_once(bucket, s3, tmp_path, monkeypatch, make):
    """It looks at the planned objects, and finds those that are new."""
    is_images = make is fb.sources.images
    contents, suffix = (sample(0).data.content, "png") if is_images else (b"one\ntwo\n", "txt")
    recipe = fb.ImageRecipe(size=16) if is_images else RECIPE
    upload(bucket, f"raw/a.{suffix}", contents)
    fb.build(tmp_path / "cache", make(f"{bucket}/raw"), recipe, workers=0)
    upload(bucket, f"raw/new.{suffix}", contents)
    with FaultProxy(s3) as proxy:
        monkeypatch.setenv("AWS_ENDPOINT_URL", proxy.url)
        monkeypatch.setattr("forebay.sources.bucket_files._bucket", ObjectStore)
        status = fb.status(tmp_path / "cache", allow_network=True)
        assert (status.new, status.stale) == ((f"new.{suffix}",), {})
        assert proxy.requests["list"] == 1
        upload(bucket, f"raw/newer.{suffix}", contents)
        assert len(fb.status(tmp_path / "cache", allow_network=True).new) == 2  # a listing is kept for one report
        assert proxy.requests["list"] == 2


def test_a_reader_seeks_and_reads_ahead_by_ranges(bucket, s3, monkeypatch):
    content = bytes(range(256)) * 8000
    upload(bucket, "value", content)
    with FaultProxy(s3, [Fault("short-body", "read", probability=0.3, seed=5)]) as proxy:
        monkeypatch.setenv("AWS_ENDPOINT_URL", proxy.url)
        monkeypatch.setattr("forebay.sources.bucket_files._bucket", ObjectStore)
        with open_file(f"{bucket}/value") as reader:
            assert isinstance(reader, ObjectReader)
            assert reader.seek(-300, 2) == len(content) - 300
            assert reader.read(1000) == content[-300:]
            assert reader.read(10) == b""
            reader.seek(1000)
            pieces = [piece for piece in iter(lambda: reader.read(5000), b"")]
        assert b"".join(pieces) == content[1000:]
        assert proxy.requests["read"] - 2 * proxy.injected["short-body"] <= 8
