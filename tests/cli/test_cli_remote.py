"""`estimate --remote`, `warm --tier`, `tier list` and `tier clean`."""

from pathlib import Path

import pytest
from tests.cli.running import run
from tests.token_caches import token_cache


@pytest.fixture
def root(tmp_path: Path) -> Path:
    return token_cache(tmp_path, 60, chunk_rows=5)


def test_estimate_remote_shows_bytes_requests_and_the_smallest_tier(root: Path) -> None:
    shown = run("estimate", root, "--remote", "--nodes", 2, "--tier-bytes", "10kB", "--bandwidth", "1Gbit").out
    assert "later epochs" in shown
    assert "smallest tier" in shown
    assert run("estimate", "--remote", "--nodes", 2, "--tier-bytes", "10kB", "--bandwidth", "1Gbit", root).out == shown
    record = run("estimate", "remote", root, "--nodes", 2, "--json").json
    assert record["first_epoch_requests"] == record["node_chunks"]
    assert record["bandwidth"] == 125e6


def test_warm_list_and_clean_by_environment(root: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("FOREBAY_TIER", str(tmp_path / "tier"))
    monkeypatch.setenv("FOREBAY_TIER_BYTES", "1GB")
    assert run("warm", root, "--json").json["fetched_chunks"] == 12
    assert ["there", "before", "12", "chunks"] in [line.split() for line in run("warm", root).out.splitlines()]
    assert "12 chunks" in run("tier", "list").out
    said = run("tier", "stats", tmp_path / "tier", code=1).err
    assert f"if it keeps chunks of remote caches, run `forebay tier list {tmp_path}/tier`" in said
    (kept,) = run("tier", "list", tmp_path / "tier", "--json").json["caches"]
    assert kept["addresses"] == [str(root)]
    assert "no cache has an id that begins with 'nothing'" in run("tier", "clean", "--cache", "nothing", code=1).err
    cleaned = run("tier", "clean", "--cache", kept["cache_id"][:6], "--json").json
    assert cleaned["freed_bytes"] == kept["bytes"]
    assert run("tier", "list", "--json").json["bytes"] == 0


def test_a_tier_that_is_full_is_an_exit_code_of_1(root: Path, tmp_path: Path) -> None:
    options = ("--tier", tmp_path / "tier", "--tier-bytes", "10kB", "--lanes", "0-15")
    assert "the tier is full" in run("warm", root, *options, code=1).out


def test_a_machine_of_several_gets_its_part(root: Path, tmp_path: Path) -> None:
    sizes = [
        run("warm", root, "--tier", tmp_path / str(node), "--node", node, "--nodes", 2, "--ranks", 2, "--json").json
        for node in range(2)
    ]
    whole = run("warm", root, "--tier", tmp_path / "all", "--json").json
    assert all(part["fetched_chunks"] < whole["chunks"] for part in sizes)
    assert sum(part["fetched_chunks"] for part in sizes) >= whole["chunks"]


def test_mistakes_are_one_line(root: Path, tmp_path: Path) -> None:
    for words, code, part in [
        (("warm", root), 2, "Pass --tier DIR"),
        (("warm", root, "--tier", "x", "--lanes", "a"), 2, "use 0-15 or 0,4,8-11"),
        (("warm", root, "--tier", "x", "--lanes", "5-2"), 2, "use 0-15 or 0,4,8-11"),
        (("warm", root, "--tier", "x", "--lanes", "0-²"), 2, "use 0-15 or 0,4,8-11"),
        (("warm", root, "--tier", "x", "--lanes", "0-"), 2, "use 0-15 or 0,4,8-11"),
        (("warm", root, "--tier", tmp_path / "t", "--lanes", "0-99"), 1, "must be from 0 to 63 (got 64)"),
        (("warm", root, "--tier", "x", "--node", "4", "--nodes", "4"), 2, "--node must be from 0 to 3 (got 4)."),
        (("warm", root, "--tier", "x", "--node", "1"), 2, "--node must be from 0 to 0 (got 1); pass --nodes"),
        (("warm", root, "--tier", "x", "--nodes", "4", "--ranks", "8"), 2, "--nodes 4 needs --node, from 0 to 3"),
        (("warm", root, "--tier", "x", "--node", "0", "--lanes", "0"), 2, "Pass --lanes or --node, not both"),
        (("warm", root, root, "--tier", tmp_path / "t"), 2, "--tier takes one cache, not 2"),
        (("estimate", root, "--remote", "--bandwidth", "fast"), 2, "use 1Gbit or 100MB"),
        (("tier", "list", tmp_path), 1, "it is not a tier of chunks"),
        (("tier", "list"), 2, "Pass the folder of the tier, or set FOREBAY_TIER."),
        (("tier", "clean"), 2, "Pass the folder of the tier, or set FOREBAY_TIER."),
    ]:
        assert part in " ".join(run(*words, code=code).err.split())
