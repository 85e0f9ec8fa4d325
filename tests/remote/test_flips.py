"""Flips of every byte of a chunk on an S3 service, in the object, on the wire and in the tier: never served."""

from collections.abc import Iterator
from pathlib import Path

import pytest

import forebay as fb
from forebay.errors import ChunkCorrupt
from forebay.store import open_store
from forebay.testing.faults import Fault, FaultProxy

KEY = "layers/raw/000000.safetensors"
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


def row(url: str, tier: Path | None = None) -> bytes:
    return fb.open_cache(url, tier=tier).read([0])["data"][0].tobytes()


def places(url: str, stride: int) -> list[int]:
    size = open_store(url).head(KEY).size
    return [*range(0, size, stride), size - 1]


@pytest.mark.parametrize("stride", STRIDES)
@pytest.mark.parametrize("tiered", [False, True], ids=["direct", "tier"])
def test_in_the_object(url: str, tmp_path: Path, stride: int, tiered: bool) -> None:
    store, tier = open_store(url), tmp_path / "tier" if tiered else None
    value = store.read(KEY)
    for at in places(url, stride):
        flipped = bytearray(value)
        flipped[at] ^= 1 << at % 8
        store.replace(KEY, [flipped])
        with pytest.raises(ChunkCorrupt, match="its SHA-256 is"):
            row(url, tier)
    assert not list(tmp_path.glob("tier/caches/*/*/*"))
    store.replace(KEY, [value])
    assert row(url, tier) == b"ab"


@pytest.mark.parametrize("stride", STRIDES)
@pytest.mark.parametrize("tiered", [False, True], ids=["direct", "tier"])
def test_on_the_wire(proxy: FaultProxy, url: str, tmp_path: Path, stride: int, tiered: bool) -> None:
    """One bad answer is fetched again; where all are bad, nothing is served, and nothing kept."""
    for at in places(url, stride):
        once, always = (Fault("flipped-bit", "read", "flips/layers/", most=most, byte=at) for most in (1, None))
        tier = tmp_path / f"{at}" if tiered else None
        proxy.set_faults([always])
        with pytest.raises(ChunkCorrupt, match="its SHA-256 is"):
            row(url, tier)
        assert not list(tmp_path.glob("*/caches/*/chunks/*"))
        before = proxy.injected["flipped-bit"]
        proxy.set_faults([once])
        assert row(url, tier) == b"ab"
        assert proxy.injected["flipped-bit"] == before + 1
        for kept in tmp_path.glob("*/caches/*/chunks/*"):
            kept.unlink()


@pytest.mark.parametrize("stride", STRIDES)
def test_in_the_tier(proxy: FaultProxy, url: str, tmp_path: Path, stride: int) -> None:
    """Bytes that no row comes from, as padding, may stay; every other one is found, and the chunk fetched again."""
    row(url, tmp_path / "tier")
    (kept,) = tmp_path.glob("tier/caches/*/chunks/*")
    value, found = kept.read_bytes(), 0
    for at in places(url, stride):
        flipped = bytearray(value)
        flipped[at] ^= 1 << at % 8
        kept.write_bytes(flipped)
        proxy.reset_counts()
        assert row(url, tmp_path / "tier") == b"ab"
        fetched = [key for operation, key in proxy.log if operation == "read" and key.endswith(KEY)]
        assert kept.read_bytes() == (value if fetched else bytes(flipped))
        found += bool(fetched)
    assert found >= len(places(url, stride)) / 2
