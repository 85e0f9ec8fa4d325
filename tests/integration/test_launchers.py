"""Builders as launchers start them: the same command many times, told apart by a rank, stopped at any time."""

import itertools
import json
import os
import signal
import subprocess
import sys
import time
from collections import Counter
from io import StringIO
from pathlib import Path

import msgspec
import pytest
from rich.console import Console
from tests.helpers.builders import chunk_count, chunk_digests, ending, script_environment, start_builder, wait_until
from tests.helpers.obedient_recipes import NOTES, ObedientRecipe, makes, orders, write_orders

import forebay as fb
from forebay.building import make as writer
from forebay.cache import publish
from forebay.cache.catalog import generation_numbers, load_generation
from forebay.cache.heartbeat import BuilderBeat
from forebay.cli.render import draw
from forebay.errors import BuildFailed
from forebay.format import layout
from forebay.store import LocalStore, MemoryStore

ELSEWHERE = "0123456789ab-1-1"


@pytest.fixture
def notes(tmp_path, monkeypatch) -> Path:
    folder = tmp_path / "notes"
    folder.mkdir()
    monkeypatch.setenv(NOTES, str(folder))
    return folder


def source_of(tmp_path: Path, chunks: int) -> fb.Source:
    return fb.sources.lines(write_orders(tmp_path / "source.txt", orders(chunks)))


def beat(store, number: int, **progress) -> None:
    text = msgspec.json.encode(BuilderBeat(beat=number, host="node3", pid=7, layer="obedient", **progress))
    store.replace(layout.builder(ELSEWHERE), [text])


@pytest.mark.slow
def test_the_same_command_with_four_ranks_builds_one_cache(tmp_path):
    source = write_orders(tmp_path / "source.txt", orders(40))
    command = [sys.executable, "-m", "forebay", "build", "raw", str(source), "--chunk-bytes", "400", "--workers", "1"]
    ranks = [{"RANK": "0"}, {"RANK": "1"}, {"SLURM_ARRAY_TASK_ID": "2"}, {"JOB_COMPLETION_INDEX": "3"}]
    builders = [
        subprocess.Popen(
            [*command, "--into", str(tmp_path / "cache"), "--json"],
            env=script_environment() | rank,
            stdout=subprocess.PIPE,
            stderr=subprocess.PIPE,
            text=True,
        )
        for rank in ranks
    ]
    ended = [builder.communicate(timeout=120) for builder in builders]
    assert [builder.returncode for builder in builders] == [0] * 4, ended
    reports = [json.loads(out)["result"] for out, _ in ended]
    planned = reports[0]["chunks"]
    assert planned >= 20
    assert sum(report["built"] for report in reports) == planned, "no chunk was made twice"
    fb.build(tmp_path / "alone", fb.sources.lines(source), fb.RawRecipe(chunk_bytes=400), workers=0)
    assert chunk_digests(tmp_path / "cache") == chunk_digests(tmp_path / "alone")
    status = fb.status(tmp_path / "cache")
    assert (status.complete, status.claims, status.builders) == (True, (), ())


def test_a_builder_that_is_told_to_end_and_then_killed_loses_the_chunks_under_way_only(tmp_path, notes):
    source, root = write_orders(tmp_path / "source.txt", orders(16)), tmp_path / "cache"
    first = start_builder(root, source, notes, {"seconds": 0.3}, workers=2)
    wait_until(lambda: chunk_count(root) >= 3)
    first.send_signal(signal.SIGTERM)
    time.sleep(0.05)  # a grace that is too short
    first.kill()
    first.communicate()
    kept = chunk_count(root)
    begun = len(makes(notes))
    report = ending(start_builder(root, source, notes, {"seconds": 0.3}, workers=2))["report"]
    assert report["present"] >= kept
    assert report["built"] + report["present"] == 16
    assert begun - kept <= 4, "two workers, each of which computes a chunk while it writes another"
    assert max(Counter(chunk for _, chunk in makes(notes)).values()) <= 2
    status = fb.status(root)
    assert (status.complete, status.claims) == (True, ())


def test_a_killed_machine_that_held_the_only_claim_delays_a_build_by_one_lease(tmp_path):
    store, source = LocalStore(tmp_path / "cache"), source_of(tmp_path, 3)
    fb.build(store, source, ObedientRecipe(), workers=0, end_chunk=1)
    beat(store, 5)
    claim = {"owner": ELSEWHERE, "host": "node3", "pid": 7}
    store.create(layout.claim(load_generation(store).folder("obedient"), 2), [json.dumps(claim).encode()])
    waited = []
    report = fb.build(
        store, source, ObedientRecipe(), workers=0, lease_seconds=3, on_progress=lambda now: waited.append(now)
    )
    assert report.built == 1
    assert {one.waiting_for for one in waited if one.phase == "waiting"} == {("node3",)}
    assert fb.status(store).claims == ()


class ReadsNoted(MemoryStore):
    """Notes which chunks are read."""

    def __init__(self) -> None:
        super().__init__()
        self.chunks_read: list[str] = []

    def read(self, key: str, start: int = 0, stop: int | None = None) -> bytes:
        self.chunks_read += [key] if layout.parse_chunk(key) else []
        return super().read(key, start, stop)

    def view(self, key, *, expect=None):
        self.chunks_read += [key] if layout.parse_chunk(key) else []
        return super().view(key, expect=expect)


def with_unlisted_chunks(tmp_path: Path) -> tuple[ReadsNoted, fb.Source]:
    """Three of four chunks are made, and one of them is listed."""
    store, source = ReadsNoted(), source_of(tmp_path, 4)
    fb.build(store, source, ObedientRecipe(), workers=0, end_chunk=0)
    fb.build(store, source, ObedientRecipe(), workers=0, end_chunk=2)
    store.delete(layout.generation(1))
    store.chunks_read.clear()
    return store, source


def test_what_a_killed_machine_has_made_and_not_listed_is_adopted_after_one_lease(tmp_path):
    store, source = with_unlisted_chunks(tmp_path)
    beat(store, 1)
    report = fb.build(store, source, ObedientRecipe(), workers=0, lease_seconds=0.3)
    assert (report.built, report.present) == (1, 3)
    assert fb.status(store).complete
    assert fb.verify(store, full=True).sound


def test_chunks_of_a_killed_machine_are_adopted_where_nothing_else_is_left_to_make(tmp_path):
    store, source = with_unlisted_chunks(tmp_path)
    beat(store, 1)
    report = fb.build(store, source, ObedientRecipe(), workers=0, end_chunk=2, lease_seconds=0.3)
    assert (report.built, report.present) == (0, 3)
    assert len(load_generation(store).table("obedient")) == 3


def test_a_bad_chunk_of_a_killed_machine_is_made_again(tmp_path):
    store, source = with_unlisted_chunks(tmp_path)
    key = layout.chunk(load_generation(store).folder("obedient"), 1)
    store.replace(key, [bytes([*store.read(key)[:-1], store.read(key)[-1] ^ 1])])
    beat(store, 1)
    assert fb.build(store, source, ObedientRecipe(), workers=0, end_chunk=2, lease_seconds=0.3).built == 1
    assert fb.verify(store, full=True).sound


def test_status_shows_every_builder_with_its_host_its_rate_and_when_all_is_made(tmp_path):
    root, source = tmp_path / "cache", source_of(tmp_path, 10)
    fb.build(root, source, ObedientRecipe(), workers=0, end_chunk=3)
    beat(LocalStore(root), 3, built=4, seconds=2.0, workers=8, cpu_percent=790.0, memory_bytes=2_000_000_000)
    for depth in ("chunks", "index"):
        (one,) = fb.status(root, depth=depth).builders
        assert (one.host, one.pid, one.layer, one.state, one.built) == ("node3", 7, "obedient", "working", 4)
        assert (one.chunks_per_second, one.eta_seconds) == (2.0, 3.0)
    shown = subprocess.run(
        [sys.executable, "-m", "forebay", "status", str(root), "--depth", "index"],
        env=script_environment() | {"COLUMNS": "160"}, capture_output=True, text=True, check=False,
    ).stdout  # fmt: skip
    lines = shown.splitlines()
    at = lines.index("  node3, process 7 · obedient · working")
    assert lines[at + 1].strip() == "4 chunks · 2.0 chunks/s · CPU 790% · 2.0 GB · ETA 3.0 s"


def test_generations_grow_by_a_tenth_from_one_to_the_next(tmp_path, monkeypatch):
    monkeypatch.setattr(publish, "PUBLISH_SECONDS", 0.0)
    store = MemoryStore()
    fb.build(store, source_of(tmp_path, 80), ObedientRecipe(), workers=0)
    listed = [len(load_generation(store, number).table("obedient")) for number in generation_numbers(store)]
    assert listed[-1] == 80
    assert all(b >= 1.1 * a for a, b in itertools.pairwise(listed[:-1])), listed
    assert len(listed) <= 32


def test_a_build_with_other_libraries_than_the_chunks_that_are_there_says_so(tmp_path, monkeypatch):
    store, source = MemoryStore(), source_of(tmp_path, 3)
    with monkeypatch.context() as patch:
        patch.setattr(writer, "builder_versions", lambda versions: {"numpy": "0.9", "zstandard": "0.1"})
        fb.build(store, source, ObedientRecipe(), workers=0, end_chunk=0)
    report = fb.build(store, source, ObedientRecipe(), workers=0)
    (said,) = [note for note in report.notes if "library versions" in note]
    assert "(before: 0.9)" in said
    summary = fb.info(store)
    older, newer = summary.versions
    made = [(one.versions, one.count, one.chunks) for one in summary.layers[0].made_with]
    assert made == [(older, 1, ((0, 0),)), (newer, 2, ((1, 2),))]
    shown = StringIO()
    Console(file=shown, width=200).print(draw(summary))
    built = [line for line in shown.getvalue().splitlines() if "built with" in line]
    assert built[0].rstrip().endswith("zstandard 0.1: chunks of obedient 0"), built
    assert built[1].rstrip().endswith(": chunks of obedient 1–2"), built


def test_a_machine_on_which_every_chunk_fails_stops_early_and_costs_nothing_that_another_cannot_make(tmp_path, notes):
    failing = {f"c{chunk}": "raise ValueError 1" for chunk in range(24)}  # the first time, as on a broken machine
    source, root = fb.sources.lines(write_orders(tmp_path / "source.txt", orders(24, **failing))), tmp_path / "cache"
    with pytest.raises(BuildFailed, match="ValueError") as caught:
        fb.build(root, source, ObedientRecipe(), workers=0)
    assert len(caught.value.facts["failed"]) == 20
    assert fb.status(root).claims == ()
    with pytest.raises(BuildFailed, match="4 chunk"):
        fb.build(root, source, ObedientRecipe(), workers=0)  # the last four fail for the first time
    assert fb.build(root, source, ObedientRecipe(), workers=0).built == 4
    assert fb.status(root).complete


def test_a_clock_that_is_hours_off_changes_nothing(tmp_path, notes):
    """A builder reads no clock of another machine: files that it finds may be of any time."""
    source, root = write_orders(tmp_path / "source.txt", orders(6)), tmp_path / "cache"
    first = start_builder(root, source, notes, {"seconds": 0.3}, workers=1, lease_seconds=2)
    wait_until(lambda: list(root.glob("claims/*/*.json")) and list(root.glob("builders/*.json")))
    for hours, path in enumerate([*root.glob("claims/*/*.json"), *root.glob("builders/*.json")], 3):
        with_time = time.time() + (-1) ** hours * 3600 * hours
        try:
            os.utime(path, (with_time, with_time))
        except FileNotFoundError:
            continue
    second = start_builder(root, source, notes, {"seconds": 0.3}, workers=1, lease_seconds=2)
    reports = [ending(one)["report"] for one in (first, second)]
    assert sum(report["built"] for report in reports) == 6
    assert Counter(chunk for _, chunk in makes(notes)) == Counter(range(6))
