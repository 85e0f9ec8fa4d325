"""Planning a cache of five million files: peak memory, and the time to open the plan. Each step is a fresh process."""

import json
import re
import subprocess
import sys
import tempfile
import time
from collections.abc import Iterable, Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any, ClassVar

import forebay as fb
from benchmarks.lib.options import Options
from benchmarks.lib.result import Result
from forebay.building.cutting import wait_until_settled
from forebay.building.listing import SourceListing
from forebay.building.segments import Draft, Planner
from forebay.cache.plan import Plan, load_plan
from forebay.file_table import FileTable
from forebay.source import Failure, Part, Sample, Source, SourceFile, Unit
from forebay.store.local import LocalStore

CASE = "build.planning"
PER_FOLDER = 1000
CHUNK_IMAGES = 160


class MadeUpImages(Source):
    """Image files that do not exist; planning does not read them."""

    kind: ClassVar[str] = "made-up"
    unit: ClassVar[Unit] = "samples"

    def __init__(self, count: int) -> None:
        self.count = count

    def files(self) -> Sequence[SourceFile]:
        return FileTable.of(map(self._file, range(self.count)))

    def _file(self, number: int) -> SourceFile:
        path = f"{number // PER_FOLDER:05d}/{number:010d}.jpg"
        at = 1_700_000_000_000_000_000 + number * 1_000_003
        return SourceFile(path, 20_000 + number % 90_000, at, ctime_ns=at + 5, inode=number + 12)

    def look(self, path: str) -> SourceFile:
        return self._file(int(Path(path).stem))

    def weight(self, file: SourceFile) -> int:
        return 1

    def cuts(self, file: SourceFile, start: int, first: int, every: int) -> Iterator[int]:
        return iter(range(start + 1, 2))

    def read(self, part: Part, **_: object) -> Iterable[Sample | Failure]:
        return ()

    def digest(self, file: SourceFile, start: int, stop: int) -> int:
        return 0

    def describe(self) -> Mapping[str, Any]:
        return {"kind": self.kind}


def plan(root: str, source: Source) -> None:
    """List a source, cut it, and write its plan."""
    files = source.files()
    wait_until_settled(files)
    listing, recipe = SourceListing(source), fb.ImageRecipe(tags=())
    planner = Planner(LocalStore(root), listing, recipe, lambda *_: None, lambda _: None)
    segment = planner._segment(Plan(()), files, {}, CHUNK_IMAGES)
    Draft(segment).append(LocalStore(root))


def open_plan(root: str) -> None:
    """Open a plan, with every check, and find one chunk in it."""
    opened = load_plan(LocalStore(root))
    assert opened.parts(len(opened) // 2)


def measure(options: Options) -> Iterator[Result]:
    count = 50_000 if options.is_quick else 5_000_000
    with tempfile.TemporaryDirectory() as root:
        planning, opening = in_process("plan", root, count), in_process("open", root, count)
    work = f"plan {count:,} image files"
    yield Result(case=CASE, work=f"{work}: peak memory", unit="MB", ours=planning["peak"], at_most=1000)
    yield Result(case=CASE, work=f"{work}: time", unit="s", ours=planning["seconds"])
    yield Result(case=CASE, work="open that plan, all checks", unit="s", ours=opening["seconds"], at_most=1.0)


def in_process(step: str, root: str, count: int) -> dict[str, float]:
    command = [sys.executable, "-m", "benchmarks.build.planning", step, root, str(count)]
    return dict(json.loads(subprocess.run(command, check=True, capture_output=True, text=True).stdout))


def main(step: str, root: str, count: str) -> None:
    started = time.perf_counter()
    if step == "open":
        open_plan(root)
    else:
        plan(root, MadeUpImages(int(count)))
    seconds = time.perf_counter() - started
    peak = re.search(r"VmHWM:\s+(\d+) kB", Path("/proc/self/status").read_text())
    print(json.dumps({"seconds": seconds, "peak": int(peak[1]) / 1000 if peak else 0.0}))


if __name__ == "__main__":
    main(*sys.argv[1:])
