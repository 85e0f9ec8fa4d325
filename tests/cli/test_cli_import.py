"""`forebay import` of an old teacher cache."""

from pathlib import Path

import pytest
import torch
from tests.cli.running import run

BUCKETS = torch.linspace(0.05, 0.95, 10)


@pytest.fixture(scope="module")
def old(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """An old cache of four rows, of one of which Lune had said nothing."""
    folder = tmp_path_factory.mktemp("old")
    features = torch.randn(4, 10, 32, generator=torch.Generator().manual_seed(0)).half()
    features[2] = 0
    maps = torch.rand(4, 10, 8, 8, generator=torch.Generator().manual_seed(1))
    sol = {"stats": torch.rand(4, 10, 4), "spatial": maps / maps.sum((2, 3), keepdim=True), "t_buckets": BUCKETS}
    torch.save({"name": "old", "lune": {"features": features, "t_buckets": BUCKETS}, "sol": sol}, folder / "cache.pt")
    return folder / "cache.pt"


def test_an_old_cache_is_imported_and_what_is_absent_is_told(old: Path, tmp_path: Path) -> None:
    report = run("import", old, "--into", tmp_path / "cache", "--json").json
    assert report["rows"] == 4
    assert {layer: built["failures"] for layer, built in report["layers"].items()} == {"lune": 1, "sol": 0}
    again = run("import", str(old), "--into", str(tmp_path / "cache"))
    assert "0 chunks built, 1 already present" in again.out
    run("verify", str(tmp_path / "cache"))


def test_what_is_no_old_cache_is_an_error_of_one_line(tmp_path: Path) -> None:
    (tmp_path / "cache.pt").write_bytes(b"nothing")
    failed = run("import", tmp_path / "cache.pt", "--into", tmp_path / "cache", code=1)
    assert "cannot be imported as a teacher cache" in failed.err
    assert "there is no such file" in run("import", "gone.pt", "--into", tmp_path / "cache", code=1).err
    assert (
        "it is a file, not a folder"
        in run("import", tmp_path / "cache.pt", "--into", tmp_path / "cache.pt", code=1).err
    )
