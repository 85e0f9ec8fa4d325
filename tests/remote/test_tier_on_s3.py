"""A tier in front of an S3 service: each way to start workers, and offline training."""

from pathlib import Path

import numpy as np
import pytest
from tests.helpers.token_caches import token_cache
from torch.utils.data import DataLoader

import forebay as fb
from forebay.torch import CacheDataset, Loader, open_mixture

ROWS = 60


@pytest.fixture
def url(bucket: str, tmp_path: Path) -> str:
    fb.copy(token_cache(tmp_path, ROWS, chunk_rows=10), f"{bucket}/numbers")
    return f"{bucket}/numbers"


@pytest.mark.slow
@pytest.mark.parametrize("method", ["fork", "spawn", pytest.param("forkserver", marks=pytest.mark.long)])
def test_workers_read_a_bucket_through_the_tier(url: str, tmp_path: Path, method: str) -> None:
    cache = fb.open_cache(url, tier=tmp_path / "tier")
    cache.read(range(ROWS) if method == "fork" else [0])  # the client hangs in a forked process
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
