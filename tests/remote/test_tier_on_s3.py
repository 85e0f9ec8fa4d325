"""A tier in front of an S3 service: each way to start workers, and offline training."""

from pathlib import Path

import numpy as np
import pytest
from tests.token_caches import token_cache
from torch.utils.data import DataLoader

import forebay as fb
from forebay.testing.faults import FaultProxy
from forebay.torch import CacheDataset, Loader, open_mixture

ROWS = 60


@pytest.fixture
def url(bucket: str, tmp_path: Path) -> str:
    fb.copy(token_cache(tmp_path, ROWS, chunk_rows=10), f"{bucket}/numbers")
    return f"{bucket}/numbers"


@pytest.mark.parametrize("method", ["fork", "spawn", pytest.param("forkserver", marks=pytest.mark.long)])
def test_workers_read_a_bucket_through_the_tier(url: str, tmp_path: Path, method: str) -> None:
    cache = fb.open_cache(url, tier=tmp_path / "tier")
    cache.read([0])  # uses the client, which hangs in a forked process
    loader = DataLoader(CacheDataset(cache), batch_size=20, num_workers=2, multiprocessing_context=method)
    assert [row for batch in loader for row in batch["tokens"][:, 0].tolist()] == list(range(ROWS))
    assert len(list((tmp_path / "tier" / "caches").glob("*/chunks/*"))) == 6


def test_a_bucket_is_shuffled_by_windows_and_fetched_once(url: str, tmp_path: Path) -> None:
    cache = fb.open_cache(url, tier=tmp_path / "tier", tier_bytes="1MB")
    loader = Loader(cache, global_batch_size=10)
    assert loader.state_dict()["stream"]["shuffle"] == "window"
    for _ in range(2):
        assert sorted(row for batch in loader for row in batch["tokens"][:, 0].tolist()) == list(range(ROWS))
    assert cache.store.transfers().fetched == 6
    assert "tier hit rate" in str(loader.statistics())


def test_a_first_batch_takes_a_listing_the_index_the_heads_and_the_blocks(
    s3: str, bucket: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("forebay.feeding.chunk_ahead.LEAST_BYTES", 1)
    rows, chunks = 2048, 4
    fb.copy(token_cache(tmp_path, rows, chunk_rows=rows // chunks, sequence_length=256), f"{bucket}/large")
    with FaultProxy(s3) as proxy:
        monkeypatch.setenv("AWS_ENDPOINT_URL", proxy.url)
        cache = fb.open_cache(f"{bucket}/large", tier=tmp_path / "tier")
        batches = iter(
            Loader(cache, global_batch_size=4, fetch_ahead=0, threads=0, columns=["tokens"], collate="stored")
        )
        next(batches)
        asked = [(operation, key.partition("/")[2].partition("/")[0]) for operation, key in proxy.log]
    assert asked[:2] == [("list", ""), ("read", "generations")]
    assert set(asked[2:]) == {("read", "layers")}  # not `cache.json`


def test_a_mixture_file_names_a_bucket(url: str, tmp_path: Path) -> None:
    root = token_cache(tmp_path / "here", 20, chunk_rows=10)
    caches = "".join(f"[[cache]]\nroot = '{place}'\nweight = 1\n" for place in (url, root))
    (tmp_path / "mix.toml").write_text(caches)
    mixture = open_mixture(tmp_path / "mix.toml")
    assert [cache.root for cache in mixture.caches] == [url, str(root)]
    assert len(next(iter(Loader(mixture, global_batch_size=8)))["tokens"]) == 8


@pytest.mark.long  # the client retries for a quarter of a minute before the service counts as away
def test_a_warm_tier_works_while_the_service_is_away(url: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    fb.warm_cache(url, tmp_path / "tier")
    right = fb.open_cache(url).read(np.arange(ROWS), ["tokens"])["tokens"]
    monkeypatch.setenv("AWS_ENDPOINT_URL", "http://127.0.0.1:9")
    cache = fb.open_cache(url, tier=tmp_path / "tier")
    assert np.array_equal(cache.read(np.arange(ROWS), ["tokens"])["tokens"], right)
