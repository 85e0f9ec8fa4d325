"""Planning and opening caches of millions of files, each in a separate process whose memory is measured.

`python -m benchmarks.large_sources 5000000` plans made-up images; `--folder` takes as many sparse files of a real
folder instead (made below it if they are not there, of different sizes and touched after they were written),
`--manifest` a JSONL manifest of them. `--lines` plans a manifest only whose images are not there: each line is a
failure, and named by its place.
"""

import argparse
import json
import os
import re
import subprocess
import sys
import tempfile
import time
from collections.abc import Iterable, Iterator, Mapping, Sequence
from contextlib import suppress
from pathlib import Path
from typing import Any, ClassVar

import forebay as fb
from benchmarks.tokens_goal import Goal
from forebay.building.begin import Draft, first_segment
from forebay.building.planning import Trial, wait_until_settled
from forebay.cache.plan import Unreadable, load_plan
from forebay.source import Failure, FileTable, Part, Sample, Source, SourceFile, Unit
from forebay.store.local import LocalStore

PER_FOLDER = 1000
MOST_MEGABYTES, MOST_SECONDS = 400, 1.0
_ROWS = Trial(1, 0.0, 1, 0, 1.0, 400_000, 0, 400_000)  # as an image of 448 pixels: 160 of them make a chunk


class MadeUp(Source):
    """Images that are nowhere; planning does not read them."""

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

    def read(self, part: Part) -> Iterable[Sample | Failure]:
        return ()

    def digest(self, file: SourceFile, start: int, stop: int) -> int:
        return 0

    def describe(self) -> Mapping[str, Any]:
        return {"kind": self.kind}


def plan(root: str, source: Source) -> None:
    """List a source, cut it, and write its plan."""
    files = source.files()
    wait_until_settled(files)
    segment = first_segment(source, files, fb.ImageRecipe(tags=()), lambda *_: None, _ROWS, Unreadable())
    Draft(segment).append(LocalStore(root))


def open_plan(root: str) -> None:
    """Open a plan, with every check, and find one chunk in it."""
    opened = load_plan(LocalStore(root))
    assert opened.parts(len(opened) // 2)


def compare(root: str, source: Source) -> None:
    """Look at every planned file, as a build does before it begins."""
    look, planned = source.looking(), load_plan(LocalStore(root)).files
    assert all(look(path).same_identity(known) for path, known in planned.items())


def measured(step: str, root: str, source: str) -> dict[str, float]:
    """Seconds and megabytes of one step in a process that does nothing else."""
    command = [sys.executable, "-m", "benchmarks.large_sources", "--step", step, "--root", root, "--source", source]
    return dict(json.loads(subprocess.run(command, check=True, capture_output=True, text=True).stdout))


def run_step(step: str, root: str, described: str) -> None:
    before, started = _megabytes("RssAnon"), time.perf_counter()
    if step == "open":
        open_plan(root)
    else:
        (plan if step == "plan" else compare)(root, _source(described))
    seconds = time.perf_counter() - started
    found = {"seconds": seconds, "peak": _megabytes("VmHWM"), "before": before, "after": _megabytes("RssAnon")}
    print(json.dumps(found))


def _source(described: str) -> Source:
    kind, _, value = described.partition(":")
    if kind == "made-up":
        return MadeUp(int(value))
    return fb.sources.images(value) if kind == "folder" else fb.sources.image_manifest(value)


def _megabytes(field: str) -> float:
    found = re.search(rf"{field}:\s+(\d+) kB", Path("/proc/self/status").read_text())
    return int(found[1]) / 1000 if found else 0.0


def make_folder(folder: Path, count: int) -> None:
    """Files without content, of different sizes, whose times of writing are before those of their last change."""
    for number in range(0, count, PER_FOLDER):
        inside = folder / f"{number // PER_FOLDER:05d}"
        with suppress(FileExistsError):
            inside.mkdir(parents=True)
            for at in range(number, min(number + PER_FOLDER, count)):
                made = MadeUp(count)._file(at)
                file = os.open(inside / f"{at:010d}.jpg", os.O_CREAT | os.O_WRONLY)
                os.truncate(file, made.size)
                os.utime(file, ns=(made.mtime_ns, made.mtime_ns))
                os.close(file)


def make_manifest(path: Path, count: int) -> None:
    with path.open("w") as lines:
        for number in range(count):
            named = f"{number // PER_FOLDER:05d}/{number:010d}.jpg"
            lines.write(json.dumps({"path": named, "tags": ["cat", f"tag{number % 1000}"]}) + "\n")


def report(count: int, name: str, described: str) -> None:
    with tempfile.TemporaryDirectory() as root:
        planned = measured("plan", root, described)
        opened = measured("open", root, described)
        compared = measured("compare", root, described)
        size = sum(file.stat().st_size for file in Path(root).rglob("*") if file.is_file())
    note = f"{planned['seconds']:.1f} s, {planned['before']:.0f} MB before it began"
    print(Goal(f"{name}: planning {count:,} files, peak memory, MB", planned["peak"], "≤", MOST_MEGABYTES, note=note))
    note = f"peak memory {opened['peak']:.0f} MB, plan of {size / 1e6:.0f} MB"
    print(Goal(f"{name}: opening the plan, s", opened["seconds"], "≤", MOST_SECONDS, note=note))
    print(
        f"{name}: comparing every file: {compared['seconds']:.1f} s, peak memory {compared['peak']:.0f} MB", flush=True
    )


def main() -> None:
    arguments = argparse.ArgumentParser(description=__doc__)
    arguments.add_argument("count", type=int, nargs="?", default=5_000_000)
    for name in ("--folder", "--step", "--root", "--source"):
        arguments.add_argument(name, default="")
    arguments.add_argument("--manifest", action="store_true")
    arguments.add_argument("--lines", action="store_true")
    given = arguments.parse_args()
    if given.step:
        return run_step(given.step, given.root, given.source)
    if given.lines:
        with tempfile.TemporaryDirectory(dir=given.folder or None) as folder:
            make_manifest(Path(folder, "list.jsonl"), given.count)
            return report(given.count, "lines", f"manifest:{folder}/list.jsonl")
    report(given.count, "made-up", f"made-up:{given.count}")
    if given.folder:
        folder = Path(given.folder)
        make_folder(folder / "files", given.count)
        report(given.count, "folder", f"folder:{folder / 'files'}")
        if given.manifest:
            make_manifest(folder / "files" / "list.jsonl", given.count)
            report(given.count, "manifest", f"manifest:{folder / 'files' / 'list.jsonl'}")


if __name__ == "__main__":
    main()
