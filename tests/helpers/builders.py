"""Builders as processes, and what they leave on disk.

`python -m tests.helpers.builders '{"root": …, "source": …, "recipe": {…}, "build": {…}}'` builds lines with the
obedient recipe and prints how it ended.
"""

import hashlib
import json
import os
import signal
import sys
import time
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any

from tests.helpers.obedient_recipes import NOTES, ObedientRecipe
from tests.helpers.processes import REPOSITORY, PythonProcess, script_environment

import forebay as fb
from forebay.cache import publish
from forebay.cache.reports import Progress

__all__ = ["REPOSITORY", "script_environment"]  # of every process that a test starts


def start_builder(
    root: Path | str, source: Path, notes: Path | None = None, recipe: Mapping[str, Any] | None = None, **build: Any
) -> PythonProcess:
    """A builder that runs by itself; the end of its output is one line of JSON."""
    task = {"root": str(root), "source": str(source), "recipe": recipe or {}, "build": build}
    env = script_environment() | ({NOTES: str(notes)} if notes else {})
    return PythonProcess("-m", "tests.helpers.builders", json.dumps(task), env=env)


def ending(process: PythonProcess, seconds: float = 600) -> dict[str, Any]:
    """How a builder ended: {"error": …} or {"report": …}."""
    out, err = process.communicate(timeout=seconds)
    assert out, f"the builder ended with {process.returncode} and said nothing but: {err}"
    answer: dict[str, Any] = json.loads(out.splitlines()[-1])
    return answer


def die_after(calls: int) -> Callable[[Progress], None]:
    """A listener to a build's progress: after its first chunk the process kills itself at one of the next calls.

    Function calls are counted, so that where it dies does not depend on the machine.
    """
    first: list[int] = []
    left = calls

    def count(*_: object) -> None:
        nonlocal left
        left -= 1
        if left <= 0:
            os.kill(os.getpid(), signal.SIGKILL)

    def begin_to_count(progress: Progress) -> None:
        if progress.phase == "building":
            first.append(progress.done)
            if progress.done > first[0]:
                sys.setprofile(count)

    return begin_to_count


def chunk_digests(root: Path, layer: str | None = None) -> dict[str, str]:
    """The SHA-256 of every chunk file, by its name below the root."""
    below = (root / "layers").glob(f"{layer}.*" if layer else "*")
    names = sorted(path for folder in below for path in folder.glob("*.safetensors") if path.name[0] != ".")
    return {str(path.relative_to(root)): hashlib.sha256(path.read_bytes()).hexdigest() for path in names}


def chunk_count(root: Path) -> int:
    """How many chunk files there are now."""
    return sum(1 for path in (root / "layers").glob("*/[0-9]*.safetensors"))


def every_file(root: Path) -> list[str]:
    return sorted(str(path.relative_to(root)) for path in root.rglob("*") if path.is_file())


def wait_until(condition: Callable[[], Any], seconds: float = 60, what: str = "it did not happen") -> None:
    end = time.monotonic() + seconds
    while not condition():
        assert time.monotonic() < end, what
        time.sleep(0.005)


def patient(seconds: float = 60) -> Callable[[fb.Progress], None]:
    """A listener that ends a build that would never end."""
    end = time.monotonic() + seconds

    def listen(progress: fb.Progress) -> None:
        assert time.monotonic() < end, f"the build still runs: {progress}"

    return listen


def children_of(pid: int) -> list[int]:
    """The processes that a process started, while it lives."""
    return [int(child) for child in Path(f"/proc/{pid}/task/{pid}/children").read_text().split()]


def is_running(pid: int) -> bool:
    """Whether there is such a process; one that only waits to be collected is gone."""
    try:
        return Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()[0] not in "ZX"
    except OSError:
        return False


def set_clock_off(hours: float, file: str) -> None:
    """From when a file is there, the clock of this process is some hours off, as after it was set."""
    now, now_ns = time.time, time.time_ns
    time.time = lambda: now() + 3600 * hours * os.path.exists(file)
    time.time_ns = lambda: now_ns() + int(3600e9 * hours) * os.path.exists(file)


def main(text: str) -> None:
    signal.signal(signal.SIGTERM, signal.default_int_handler)  # as the command line does
    task = json.loads(text)
    if clock := task["build"].pop("clock", None):
        set_clock_off(*clock)
    recipe = ObedientRecipe(**task["recipe"])
    publish.PUBLISH_SECONDS = task["build"].pop("publish_seconds", publish.PUBLISH_SECONDS)
    try:
        report = fb.build(task["root"], fb.sources.lines(task["source"]), recipe, **task["build"])
        names = ("built", "present", "deaths", "rows", "samples", "statistics", "generation")
        answer = {"report": {name: getattr(report, name) for name in names}}
    except (fb.errors.ForebayError, fb.errors.BuildStopped) as error:
        answer = {"error": type(error).__name__, "text": str(error)}
    print(json.dumps(answer), flush=True)


if __name__ == "__main__":
    main(sys.argv[1])
