"""Builders whose scans of compressed files are noted, and can be held up.

`python -m tests.planners NOTES ROOT SOURCE LEASE` builds the lines of a folder, and prints how it ended. In the folder
NOTES, `scans` has a line for every scan, `waiting` one for every builder that waits for a plan. While `hold` is there,
a scan of the last file does not begin.
"""

import gzip
import json
import os
import signal
import sys
import time
from pathlib import Path

import msgspec
from tests.builders import script_environment
from tests.warm_process import WarmProcess

import forebay as fb
from forebay.cache.claims import Claim
from forebay.format import layout
from forebay.source import SourceFile
from forebay.sources.jsonl import LineSource

FILES = 6
RECIPE = fb.RawRecipe(chunk_bytes=3000)
OTHER = "0123456789ab-7-1"  # a process of another machine


def append(path: Path, line: str) -> None:
    with path.open("a") as file:
        file.write(line + "\n")


class NotedLines(LineSource):
    def sample_ends(self, file: SourceFile):
        if "PLANNERS_NOTES" in os.environ:
            notes = Path(os.environ["PLANNERS_NOTES"])
            while file.path.startswith(f"{FILES - 1:02d}") and (notes / "hold").exists():
                time.sleep(0.01)
            append(notes / "scans", file.path)
        return super().sample_ends(file)


def write_source(folder: Path, first: int = 0, stop: int = FILES) -> NotedLines:
    folder.mkdir(exist_ok=True)
    for number in range(first, stop):
        text = b"".join(b"line %d of %d\n" % (at, number) for at in range(60))
        (folder / f"{number:02d}.txt.gz").write_bytes(gzip.compress(text, mtime=0))
    return NotedLines(str(folder), (".",))


def start_planner(notes: Path, root: Path | str, source: Path, lease_seconds: float = 60.0) -> WarmProcess:
    environment = script_environment() | {"PLANNERS_NOTES": str(notes)}
    words = (str(notes), str(root), str(source), str(lease_seconds))
    return WarmProcess("-m", "tests.planners", *words, env=environment)


def noted(notes: Path, name: str) -> list[str]:
    return sorted((notes / name).read_text().splitlines()) if (notes / name).exists() else []


def claim_elsewhere(store: fb.Store, segment: int = 0, owner: str = OTHER, **changes: object) -> str:
    """Claim a segment as the builder of another machine, at its beat `beat`; returns the key."""
    key = layout.claim(None, segment, 1)
    store.replace(key, [msgspec.json.encode(Claim(owner=owner, host="node9", pid=7, **changes))])
    return key


def main(notes: str, root: str, source: str, lease_seconds: str) -> None:
    signal.signal(signal.SIGTERM, signal.default_int_handler)  # as the command line does
    has_waited: list[fb.Progress] = []

    def listen(progress: fb.Progress) -> None:
        if progress.phase == "waiting" and progress.unit == "files":
            if not has_waited:
                append(Path(notes) / "waiting", str(os.getpid()))
            has_waited.append(progress)

    try:
        lines = NotedLines(source, (".",))
        report = fb.build(root, lines, RECIPE, workers=0, lease_seconds=float(lease_seconds), on_progress=listen)
        answer = {"report": {"made": report.made, "present": report.present}}
    except (fb.errors.ForebayError, KeyboardInterrupt) as error:
        answer = {"error": type(error).__name__, "text": str(error)}
    print(json.dumps(answer), flush=True)


if __name__ == "__main__":
    main(*sys.argv[1:])
