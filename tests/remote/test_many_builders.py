"""Several builder processes that share a bucket: together they make every chunk once, whatever dies."""

import json
import os
import subprocess
import sys

import pytest
from tests.helpers.builders import ending, script_environment, start_builder, wait_until
from tests.helpers.fault_proxy import Fault, FaultProxy
from tests.helpers.obedient_recipes import ObedientRecipe, orders, write_orders

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


def digests(store: fb.Store, layer: str = "raw") -> list[bytes]:
    table = load_generation(store).table(layer)
    return [record.sha256 for record in table.records()]


@pytest.mark.slow
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
    assert all(report["built"] + report["present"] == len(digests(alone)) for report in reports)
    status = fb.status(url)
    assert (status.complete, status.claims) == (True, ())
    assert os.listdir(tmp_path) == ["source.txt"]


@pytest.mark.slow
@pytest.mark.parametrize(
    ("kind", "operation", "below"),
    [
        ("lost-reply", "create", "cache/generations/"),
        ("flipped-bit", "read", "cache/builders/"),
        ("stale-listing", "list", ""),
        pytest.param("reset-after", "create", "cache/builders/", marks=pytest.mark.long),
        pytest.param("server-error", "delete", "cache/builders/", marks=pytest.mark.long),
        pytest.param("short-body", "read", "cache/generations/", marks=pytest.mark.long),
    ],
)
def test_builders_that_publish_behind_faults_list_every_chunk(
    s3, bucket, tmp_path, monkeypatch, kind, operation, below
):
    source, url, notes = write_orders(tmp_path / "source.txt", orders(40)), f"{bucket}/cache", tmp_path / "notes"
    notes.mkdir()
    settings = {"workers": 1, "publish_seconds": 0.1, "lease_seconds": 3.0}
    with FaultProxy(s3, [Fault(kind, operation, below, probability=0.3, seed=1)]) as proxy:
        with monkeypatch.context() as patch:
            patch.setenv("AWS_ENDPOINT_URL", proxy.url)
            running = [start_builder(url, source, notes, {"seconds": 0.1}, **settings) for _ in range(3)]
        answers = [ending(one, 120) for one in running]
        assert proxy.injected[kind]
    assert all("report" in answer for answer in answers), answers
    assert max(answer["report"]["rows"] for answer in answers) == 80, "the last one to end has listed all"
    store = open_store(url)
    fb.build(alone := MemoryStore(), fb.sources.lines(source), ObedientRecipe(seconds=0.1), workers=0)
    assert digests(store, "obedient") == digests(alone, "obedient")
    assert fb.verify(url, full=True).sound
    assert fb.status(url).complete
