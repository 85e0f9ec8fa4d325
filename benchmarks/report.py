"""Rewrite the tables of docs/benchmarks.md from docs/benchmarks.json: `python -m benchmarks.report`."""

import re
from pathlib import Path

import msgspec

from benchmarks.lib.result import Run, markdown

DOCS = Path(__file__).parents[1] / "docs"
BEGIN, END = "<!-- begin results -->\n", "<!-- end results -->\n"


def load_runs(path: Path = DOCS / "benchmarks.json") -> tuple[Run, ...]:
    return msgspec.json.decode(path.read_bytes(), type=tuple[Run, ...])


def results_section(runs: tuple[Run, ...]) -> str:
    """The part of docs/benchmarks.md between the markers."""
    parts = []
    for run in runs:
        libraries = ", ".join(f"{name} {number}" for name, number in run.versions.items())
        parts.append(f"`{run.command}`, {run.date}, {run.machine}; {libraries}:\n\n{markdown(run.results)}")
    return "\n" + "\n".join(parts) + "\n"


def section_of(page: str) -> str:
    return page.partition(BEGIN)[2].partition(END)[0]


def main() -> None:
    page = DOCS / "benchmarks.md"
    section = results_section(load_runs())
    page.write_text(re.sub(f"{BEGIN}.*{END}", lambda _: BEGIN + section + END, page.read_text(), flags=re.DOTALL))


if __name__ == "__main__":
    main()
