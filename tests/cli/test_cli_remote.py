"""`estimate remote`, `warm --tier`, `tier list` and `tier clean`."""

import os
from pathlib import Path

import pytest
from tests.cli.running import run
from tests.helpers.token_caches import token_cache


@pytest.fixture
def root(tmp_path: Path) -> Path:
    return token_cache(tmp_path, 60, chunk_rows=5)


def test_estimate_remote_shows_bytes_requests_and_the_smallest_tier(root: Path) -> None:
    shown = run("estimate", "remote", root, "--nodes", 2, "--tier-bytes", "10kB", "--bandwidth", "1Gbit").out
    assert "later epoch bytes" in shown
    assert "node bytes" in shown
    assert run("estimate", "remote", "--nodes", 2, "--tier-bytes", "10kB", "--bandwidth", "1Gbit", root).out == shown
    record = run("estimate", "remote", root, "--nodes", 2, "--json").json
    assert record["first_epoch_requests"] == record["node_chunks"]
    assert record["bandwidth"] == 125e6


def test_tier_fill_list_and_clean_by_environment(root: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("FOREBAY_TIER", str(tmp_path / "tier"))
    monkeypatch.setenv("FOREBAY_TIER_BYTES", "1GB")
    assert run("tier", "fill", root, "--json").json["fetched_chunks"] == 12
    again = [line.split() for line in run("tier", "fill", root).out.splitlines()]
    assert ["chunks", "12"] in again
    assert not any(words[0] == "fetched" for words in again)
    assert "12 chunks" in run("tier", "list").out
    (kept,) = run("tier", "list", tmp_path / "tier", "--json").json["caches"]
    assert kept["address"] == str(root)
    assert "has nothing of a cache at 's3://b/c'" in run("tier", "clean", "--cache", "s3://b/c", code=1).err
    cleaned = run("tier", "clean", "--cache", os.path.relpath(root), "--json").json
    assert cleaned["freed_bytes"] == kept["bytes"]
    assert run("tier", "list", "--json").json["bytes"] == 0


def test_a_tier_that_is_full_is_an_exit_code_of_1(root: Path, tmp_path: Path) -> None:
    options = (tmp_path / "tier", "--tier-bytes", "10kB", "--node", "0", "--nodes", "4")
    assert f"error: '{tmp_path / 'tier'}' is full" in run("tier", "fill", root, *options, code=1).err


def test_a_machine_of_several_gets_its_part(root: Path, tmp_path: Path) -> None:
    sizes = [
        run("tier", "fill", root, tmp_path / str(node), "--node", node, "--nodes", 2, "--ranks", 2, "--json").json
        for node in range(2)
    ]
    whole = run("tier", "fill", root, tmp_path / "all", "--json").json
    assert all(part["fetched_chunks"] < whole["chunks"] for part in sizes)
    assert sum(part["fetched_chunks"] for part in sizes) >= whole["chunks"]
