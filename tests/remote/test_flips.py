"""Flips of every byte of a chunk on an S3 service, in the object and on the wire: never served.

The bucket is opened once, the cache for every flip: so every byte is done in minutes.
"""

from collections.abc import Iterator
from pathlib import Path

import pytest
from tests.helpers.fault_proxy import Fault, FaultProxy

import forebay as fb
from forebay.cache.catalog import load_generation
from forebay.errors import ChunkCorrupt
from forebay.format import layout
from forebay.store import Store, open_store

STRIDES = [pytest.param(211, id="some"), pytest.param(1, id="every", marks=pytest.mark.long)]


@pytest.fixture
def url(bucket: str, tmp_path: Path) -> str:
    (tmp_path / "a.txt").write_text("ab\n")
    fb.build(f"{bucket}/flips", fb.sources.lines(tmp_path / "a.txt"), fb.RawRecipe(), workers=0)
    return f"{bucket}/flips"


@pytest.fixture
def proxy(s3: str, url: str, monkeypatch: pytest.MonkeyPatch) -> Iterator[FaultProxy]:
    with FaultProxy(s3) as proxy:
        monkeypatch.setenv("AWS_ENDPOINT_URL", proxy.url)
        yield proxy


def row(store: Store) -> bytes:
    return fb.open_cache(store).read([0])["data"][0].tobytes()


def key_of(store: Store) -> str:
    return layout.chunk(load_generation(store).folder("raw"), 0)


def places(store: Store, stride: int) -> list[int]:
    size = store.head(key_of(store)).size
    return [*range(0, size, stride), size - 1]


@pytest.mark.parametrize("stride", STRIDES)
def test_in_the_object(url: str, stride: int) -> None:
    bucket = open_store(url)
    value = bucket.read(key_of(bucket))
    for at in places(bucket, stride):
        flipped = bytearray(value)
        flipped[at] ^= 1 << at % 8
        bucket.replace(key_of(bucket), [flipped])
        with pytest.raises(ChunkCorrupt, match="its SHA-256 is"):
            row(bucket)
    bucket.replace(key_of(bucket), [value])
    assert row(bucket) == b"ab"


@pytest.mark.parametrize("stride", STRIDES)
def test_on_the_wire(proxy: FaultProxy, url: str, stride: int) -> None:
    """One bad answer is fetched again; where all are bad, nothing is served."""
    bucket = open_store(url)
    for at in places(bucket, stride):
        once, always = (Fault("flipped-bit", "read", "flips/layers/", most=most, byte=at) for most in (1, None))
        proxy.set_faults([always])
        with pytest.raises(ChunkCorrupt, match="its SHA-256 is"):
            row(bucket)
        before = proxy.injected["flipped-bit"]
        proxy.set_faults([once])
        assert row(bucket) == b"ab"
        assert proxy.injected["flipped-bit"] == before + 1
