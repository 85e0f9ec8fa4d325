"""The same build with local workers and with Ray actors on the same cores: `python -m benchmarks.engines`.

Lines of the standard library are compressed at the highest level, so that workers compute. Rounds are interleaved. What
is compared is the time of making chunks; the cluster runs before, and actors and workers start within it. How long
they take to start is measured by a source of four chunks. Ray gives its workers a lower priority than this process has;
here they have the same, as local workers do.
"""

import argparse
import itertools
import os
import shutil
import statistics
import sysconfig
import tempfile
from pathlib import Path

import ray

import forebay as fb
from forebay.engine.ray import RayEngine

GOAL = 0.9
SMALL_BYTES = 1 << 18  # of a chunk whose start is measured


def write_source(path: Path, size: int) -> None:
    """Python files one after the other, again and again, until there are enough bytes."""
    names = sorted(Path(sysconfig.get_path("stdlib")).glob("*.py"))
    with path.open("wb") as out:
        for name in itertools.cycle(names):
            out.write(name.read_bytes())
            if out.tell() >= size:
                return


def making_seconds(root: Path, source: Path, workers: int, engine: RayEngine | None, chunk_bytes: int) -> float:
    recipe = fb.RawRecipe(level="max", chunk_bytes=chunk_bytes)
    report = fb.build(root, fb.sources.lines(source), recipe, workers=workers, engine=engine, progress=False)
    assert report.made == report.chunks
    return report.phases["making"]


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--rounds", type=int, default=5)
    parser.add_argument("--bytes", type=int, default=100_000_000)
    parser.add_argument("--chunk-bytes", type=int, default=1 << 20, help="a MiB takes some 0.15 s")
    options = parser.parse_args()
    workers = len(os.sched_getaffinity(0))
    folder = Path(tempfile.mkdtemp())
    os.environ.setdefault("RAY_worker_niceness", "0")
    ray.init(num_cpus=workers, include_dashboard=False, log_to_driver=False, logging_level="error")
    try:
        write_source(folder / "source.txt", options.bytes)
        write_source(folder / "small.txt", 4 * SMALL_BYTES)
        for name, engine in (("local", None), ("ray", RayEngine())):
            seconds = making_seconds(folder / f"small-{name}", folder / "small.txt", workers, engine, SMALL_BYTES)
            print(f"four chunks: {name} {seconds:.2f} s", flush=True)
        times: dict[str, list[float]] = {"local": [], "ray": []}
        for number in range(options.rounds):
            for name, engine in (("local", None), ("ray", RayEngine())):
                root = folder / f"{name}{number}"
                times[name].append(making_seconds(root, folder / "source.txt", workers, engine, options.chunk_bytes))
                print(f"round {number}: {name} {times[name][-1]:.2f} s", flush=True)
        local, on_ray = (statistics.median(found) for found in times.values())
        ratio = local / on_ray
        verdict = "met" if ratio >= GOAL else "MISSED"
        print(f"{workers} workers: local {local:.2f} s, ray {on_ray:.2f} s, ratio {ratio:.2f}, goal {GOAL}: {verdict}")
    finally:
        ray.shutdown()
        shutil.rmtree(folder)


if __name__ == "__main__":
    main()
