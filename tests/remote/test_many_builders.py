"""Several builder processes that share a bucket: together they make every chunk once, whatever dies."""

import json
import os
import subprocess
import sys

from tests.builders import script_environment, wait_until
from tests.recipes import orders, write_orders

import forebay as fb
from forebay.cache.catalog import load_generation
from forebay.format import layout
from forebay.store import MemoryStore, open_store


def start(url: str, source: str, rank: int) -> "subprocess.Popen[str]":
    words = ["build", "raw", source, "--chunk-bytes", "400", "--workers", "1", "--into", url, "--json"]
    return subprocess.Popen(
        [sys.executable, "-m", "forebay", *words],
        env=script_environment() | {"RANK": str(rank)},
        stdout=subprocess.PIPE,
        stderr=subprocess.PIPE,
        text=True,
    )


def digests(store: fb.Store) -> list[bytes]:
    table = load_generation(store).table("raw")
    return [record.sha256 for record in table.records()]


def test_three_processes_share_a_bucket_and_one_is_killed(bucket, tmp_path):
    source, url = write_orders(tmp_path / "source.txt", orders(40)), f"{bucket}/cache"
    first, second, third = (start(url, str(source), rank) for rank in range(3))
    store = open_store(url)
    wait_until(lambda: any(layout.parse_chunk(entry.key) for entry in store.entries(layout.LAYERS)))
    second.kill()
    second.communicate()
    ended = [builder.communicate(timeout=120) for builder in (first, third)]
    assert [first.returncode, third.returncode] == [0, 0], ended
    reports = [json.loads(out)["result"] for out, _ in ended]
    fb.build(alone := MemoryStore(), fb.sources.lines(source), fb.RawRecipe(chunk_bytes=400), workers=0)
    assert digests(store) == digests(alone)
    assert all(report["made"] + report["present"] == len(digests(alone)) for report in reports)
    status = fb.status(url)
    assert (status.complete, status.claims, status.builders) == (True, (), ())
    assert os.listdir(tmp_path) == ["source.txt"]
