"""URLs: what looks like one is refused wherever a path is meant, and no folder is made for it."""

from pathlib import Path

import pytest
from tests.layer_recipes import LineRecipe, number_cache

import forebay as fb
from forebay.errors import SourceInvalid, SourceNotFound, StoreRefused, TierUnusable
from forebay.store import open_store
from forebay.tiers import CachedImages

URLS = ["s3://bucket/cache", "gs://bucket/x", "az://x", "hf://datasets/x", "https://host/x", "file:///tmp/x", "S3://b"]


@pytest.fixture
def here(tmp_path, monkeypatch):
    """A working folder in which nothing may appear."""
    (tmp_path / "work").mkdir()
    monkeypatch.chdir(tmp_path / "work")
    yield tmp_path
    assert list((tmp_path / "work").iterdir()) == []


@pytest.mark.parametrize("url", [*URLS, *map(Path, URLS)], ids=str)
def test_a_url_is_no_root(here, url):
    root = number_cache(here)
    source = fb.sources.lines(here / "raw")
    for act in (
        lambda: open_store(url),
        lambda: fb.open_cache(url),
        lambda: fb.build(url, source, LineRecipe(), workers=0),
        lambda: fb.grow(url, source, workers=0),
        lambda: fb.copy(root, url),
        lambda: fb.repair(root, copy=url),
        lambda: fb.estimate(source, LineRecipe(), into=url),
        lambda: fb.status(url),
    ):
        with pytest.raises(StoreRefused, match="it is a URL, but a cache is a folder; pass the path of a folder"):
            act()


@pytest.mark.parametrize("url", URLS)
def test_a_url_is_no_source(here, url):
    sources = fb.sources
    for act in (
        lambda: sources.lines(url), lambda: sources.jsonl(url), lambda: sources.text(url), lambda: sources.files(url),
        lambda: sources.images(url), lambda: sources.image_manifest(url), lambda: sources.parquet(url),
        lambda: sources.lines(here, root=url),
    ):  # fmt: skip
        with pytest.raises(SourceNotFound, match="it is a URL"):
            act()
    with pytest.raises(SourceInvalid, match="the URL"):
        sources.documents(["text"], f"{url}/x.jsonl")


def test_a_url_is_no_tier(here):
    with pytest.raises(TierUnusable, match="it is a URL"):
        CachedImages(fb.sources.images(here), fb.ImageRecipe(), l2="s3://bucket/tier")


def test_a_url_is_no_cache_of_a_mixture(here):
    torch = pytest.importorskip("forebay.torch")
    path = here / "mixture.toml"
    path.write_text('[[cache]]\nroot = "s3://bucket/cache"\nweight = 1.0\n')
    with pytest.raises(StoreRefused, match="'s3://bucket/cache' cannot be used as a store: it is a URL"):
        torch.open_mixture(path)


def test_a_folder_of_such_a_name_can_be_meant(tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    open_store("./s3:/x").create("a", [b"x"])
    assert (tmp_path / "s3:/x/a").read_bytes() == b"x"
