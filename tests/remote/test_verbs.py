"""Every verb on a URL, in Python and on the command line, and what it costs in requests."""

from collections import Counter
from pathlib import Path

import numpy as np
import pytest
from tests.cli.running import run as run_command
from tests.helpers.cache_files import chunk_key
from tests.helpers.fault_proxy import FaultProxy
from tests.helpers.layer_recipes import LengthLayer, LineRecipe
from tests.remote.servers import SECRET

import forebay as fb
from forebay.store import open_store

CHUNKS = 25


@pytest.fixture
def lines(tmp_path) -> Path:
    path = tmp_path / "raw" / "a.txt"
    path.parent.mkdir()
    path.write_text("".join(f"line {number:04d} of the source\n" for number in range(2400)))
    return path


RECIPE = fb.RawRecipe(chunk_bytes=4800)


def contents(root) -> dict[str, bytes]:
    store = open_store(root)
    return {entry.key: store.read(entry.key) for entry in store.entries("layers/")}


def test_every_verb_works_on_a_bucket(bucket, lines, tmp_path):
    url, source = f"{bucket}/caches/lines", fb.sources.lines(lines.parent)
    local = tmp_path / "local"
    fb.build(local, source, RECIPE, workers=0)
    report = fb.build(url, source, RECIPE, workers=2)
    assert (report.built, report.root) == (CHUNKS, url)
    assert contents(url) == contents(local)
    assert fb.status(url, source=source).complete
    assert fb.open_cache(url).read([0, 2399])["data"][1].tobytes() == b"line 2399 of the source"
    (lines.parent / "b.txt").write_text("one more line\n" * 300)
    assert fb.update(url, fb.sources.lines(lines.parent), workers=0).built > 0
    assert fb.verify(url, full=True).sound
    (lines.parent / "b.txt").write_text("another line\n" * 300)
    reused = fb.build(f"{bucket}/caches/new", fb.sources.lines(lines.parent), RECIPE, reuse=url, workers=0)
    assert reused.present == CHUNKS
    assert fb.verify(f"{bucket}/caches/new", full=True).sound
    fb.copy(url, tmp_path / "down")
    fb.copy(tmp_path / "down", f"{bucket}/caches/up")
    fb.copy(f"{bucket}/caches/up", f"{bucket}/caches/across")
    assert contents(f"{bucket}/caches/across") == contents(url) == contents(tmp_path / "down")
    store = open_store(f"{bucket}/caches/across")
    broken = chunk_key(local, "raw", 3)
    store.replace(broken, [store.read(broken)[:-1], b"?"])
    assert not fb.verify(store, full=True).sound
    with pytest.raises(fb.errors.ChunkCorrupt, match="its SHA-256 is"):
        fb.open_cache(store).read(np.arange(2400))
    assert fb.repair(store, copy=url, workers=0).failed == {}
    assert contents(store) == contents(url)
    store.delete(broken)
    assert fb.repair(store, workers=0).failed == {}
    assert contents(store) == contents(url)
    fb.clean(url, keep_generations=1)
    assert len(list(open_store(url).entries("generations/"))) == 1
    assert fb.peek(url, rows=[1]).rows == 2700


def run(*words: object, code: int = 0) -> str:
    ran = run_command(*words, code=code)
    assert SECRET not in ran.out + ran.err
    return ran.out + ran.err


def test_a_layer_in_a_bucket_is_built_and_dropped_and_its_chunks_are_freed(bucket, tmp_path):
    url, numbers = f"{bucket}/caches/layers", tmp_path / "numbers.txt"
    numbers.write_text("".join(f"{number}\n" for number in range(20)))
    fb.build(url, fb.sources.lines(numbers), LineRecipe(), workers=0)
    fb.build(url, None, LengthLayer(times=2), layer="length", workers=0)
    assert fb.open_cache(url, layers=["length"]).read([4], ["times"])["times"].tolist() == [8]
    run("drop", url, "length")
    assert fb.open_cache(url).layers == ("numbers",)
    run("clean", url, "--keep-generations", 1)
    assert [entry.key for entry in open_store(url).entries("layers/length.")] == []
    assert fb.verify(url, full=True).sound


def test_requests_per_chunk_are_few(bucket, s3, lines, monkeypatch):
    """Building costs a look, a claim, a second look, the chunk and the end of the claim; reading costs one request."""
    with FaultProxy(s3) as proxy:
        monkeypatch.setenv("AWS_ENDPOINT_URL", proxy.url)
        url, source = f"{bucket}/counted", fb.sources.lines(lines)
        fb.build(url, source, RECIPE, workers=0)
        per_chunk = Counter(operation for operation, key in proxy.log if "layers/raw." in key)
        claims = Counter(operation for operation, key in proxy.log if "claims/" in key)
        assert per_chunk["create"] == CHUNKS
        assert claims["create"] == CHUNKS + 3, "plus the destination check and the claims on plan and publishing"
        assert claims["write"] == 0  # a claim is written once: its builder has one heartbeat for all of them
        assert len({key for operation, key in proxy.log if "builders/" in key and operation != "list"}) == 1
        assert sum(per_chunk.values()) <= 3 * CHUNKS
        assert claims["delete"] + proxy.requests["delete"] <= 2 * CHUNKS + 3
        others = Counter(operation for operation, key in proxy.log if "builders/" not in key)  # a slow build beats more
        assert sum(others.values()) <= 5 * CHUNKS + 55, others  # and a look for dead builders' claims
        proxy.reset_counts()
        cache = fb.open_cache(url)
        assert sum(proxy.requests.values()) <= 4
        proxy.reset_counts()
        cache.read(np.arange(len(cache)))
        assert proxy.requests == {"read": CHUNKS}
