"""A memory limit bounds what builder and workers hold together."""

import contextlib
import json
import random
import subprocess
import time
from pathlib import Path

import pytest
from tests.helpers.builders import children_of
from tests.helpers.obedient_recipes import ObedientRecipe, orders, write_orders
from tests.helpers.processes import PythonProcess

import forebay as fb
from forebay.errors import EngineUnusable

MB = 1_000_000

BUILD = """
import json, sys
import forebay as fb
most = 0
def look(progress):
    global most
    most = max(most, progress.workers)
source = fb.sources.lines(sys.argv[1])
ballast = bytearray(int(sys.argv[3]))
ballast[::4096] = bytes(len(range(0, len(ballast), 4096)))  # every page is touched, and none is copied
recipe = fb.RawRecipe(codec="lz4", chunk_bytes=int(sys.argv[4]))
report = fb.build(sys.argv[2], source, recipe, workers=4, memory_limit=600_000_000, on_progress=look)
print(json.dumps({"made": report.built, "rows": report.rows, "workers": most, "deaths": report.deaths}))
"""


def start_build(folder: Path, ballast: int, chunk_bytes: int) -> "subprocess.Popen[str]":
    """A build under 600 MB by a process that holds some memory of its own."""
    return PythonProcess("-c", BUILD, str(folder / "source.txt"), str(folder / "cache"), str(ballast), str(chunk_bytes))


def pss(pid: int) -> int:
    """What a process holds, shared pages counted by share; 0 where it is gone."""
    with contextlib.suppress(OSError):
        for line in Path(f"/proc/{pid}/smaps_rollup").read_text().splitlines():
            if line.startswith("Pss:"):
                return int(line.split()[1]) * 1024
    return 0


def watch(builder: "subprocess.Popen[str]") -> int:
    """The most that a builder and its workers held at a time, looked at every 50 ms."""
    most = 0
    while builder.poll() is None:
        with contextlib.suppress(OSError):
            most = max(most, sum(map(pss, [builder.pid, *children_of(builder.pid)])))
        time.sleep(0.05)
    return most


def write_source(path: Path, size: int) -> int:
    """Lines of some 500 bytes, much repeated; how many there are."""
    noise = random.Random(0)
    lines = b"".join(noise.randbytes(noise.randrange(200)).hex().encode() + b" some words\n" for _ in range(20_000))
    repeats = size // len(lines)
    with open(path, "wb") as file:
        for _ in range(repeats):
            file.write(lines)
    return 20_000 * repeats


@pytest.mark.slow
@pytest.mark.parametrize("size", [240 * MB, pytest.param(1_000 * MB, marks=pytest.mark.long)])
def test_a_large_build_stays_below_its_memory_limit_and_uses_what_it_may(tmp_path, capsys, size):
    rows = write_source(tmp_path / "source.txt", size)
    builder = start_build(tmp_path, ballast=0, chunk_bytes=32 << 20)  # four such workers would hold 700 MB
    most = watch(builder)
    out, err = builder.communicate()
    assert builder.returncode == 0, err
    report = json.loads(out)
    with capsys.disabled():
        print(f"\nat most {most / MB:.0f} MB of 600 MB, {report['workers']} workers, {report['made']} chunks")
    assert report["rows"] == rows
    assert report["deaths"] == []
    assert report["workers"] >= 2
    assert most < 600 * MB


@pytest.mark.slow
def test_what_the_builder_itself_holds_counts_once_not_for_every_worker(tmp_path):
    """A worker's peak is its own: not that of the large process that started it."""
    write_source(tmp_path / "source.txt", 60 * MB)
    builder = start_build(tmp_path, ballast=250 * MB, chunk_bytes=8 << 20)
    most = watch(builder)
    out, err = builder.communicate()
    assert builder.returncode == 0, err
    assert json.loads(out)["workers"] >= 2
    assert 250 * MB < most < 600 * MB


@pytest.mark.parametrize("workers", [1, 4])
def test_a_limit_that_cannot_hold_one_worker_is_refused_with_what_is_needed(tmp_path, workers):
    source = fb.sources.lines(write_orders(tmp_path / "source.txt", orders(20)))
    with pytest.raises(EngineUnusable, match="raise --memory-limit") as caught:
        fb.build(tmp_path / "cache", source, ObedientRecipe(), workers=workers, memory_limit=10 * MB)
    assert caught.value.facts["needed"] > 10 * MB
    assert fb.status(tmp_path / "cache").claims == ()
    assert fb.build(tmp_path / "cache", source, ObedientRecipe(), workers=1).rows == 40
