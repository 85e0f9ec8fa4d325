"""Run benchmarks and print one table: `make bench`, or `python -m benchmarks build.text loader.tokens`."""

import argparse
import json
import os
import platform
import sys
import tempfile
import time
from importlib import import_module
from importlib.metadata import PackageNotFoundError, version
from pathlib import Path

import msgspec

from benchmarks.lib.options import Options
from benchmarks.lib.result import Result, Run, markdown

CASES = (
    "build.text", "build.images", "build.resize", "build.planning", "build.write_path", "read.rows", "loader.tokens",
    "loader.stalls", "images.batches", "masks.block_masks", "chat.preparation", "remote.first_batch",
)  # fmt: skip
LIBRARIES = ("forebay", "numpy", "torch", "fastokens", "datasets", "trl", "pillow")


def main() -> None:
    arguments = _arguments()
    options = Options(
        folder=arguments.folder, text=arguments.text, images=arguments.images, rounds=arguments.rounds,
        is_quick=arguments.quick,
    )  # fmt: skip
    options.folder.mkdir(parents=True, exist_ok=True)
    results: list[Result] = []
    for case in arguments.cases or CASES:
        print(f"==> {case}", file=sys.stderr, flush=True)
        for result in import_module(f"benchmarks.{case}").measure(options):
            results.append(result)
            print("  ".join(cell for cell in result.cells() if cell), file=sys.stderr, flush=True)
    print(markdown(results), end="")
    if arguments.json is not None:
        write(arguments.json, _run_of(results))


def _arguments() -> argparse.Namespace:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("cases", nargs="*", metavar="CASE", help=f"one or more of {', '.join(CASES)}; default: all")
    parser.add_argument("--text", type=Path, help="folder of .jsonl or .jsonl.gz files; default: made-up sentences")
    parser.add_argument("--images", type=Path, help="folder of photographs; default: noise of their size")
    below = Path(os.environ.get("FOREBAY_BENCH_DIR", tempfile.gettempdir())) / "forebay-bench"
    parser.add_argument("--folder", type=Path, default=below, help="work folder, kept for the next run; about 20 GB")
    parser.add_argument("--rounds", type=int, default=5, help="rounds of each comparison (default 5)")
    parser.add_argument("--quick", action="store_true", help="small sizes, to see that everything runs")
    parser.add_argument("--json", type=Path, help="add the results to this file")
    arguments = parser.parse_args()
    for case in arguments.cases:
        if case not in CASES:
            parser.error(f"no benchmark '{case}'; choose from {', '.join(CASES)}")
    return arguments


def _run_of(results: list[Result]) -> Run:
    versions = {}
    for name in LIBRARIES:
        try:
            versions[name] = version(name)
        except PackageNotFoundError:
            versions[name] = "not installed"
    machine = f"{os.cpu_count()} cores, {_processor()}, Linux {platform.release()}, Python {platform.python_version()}"
    command = " ".join(["python -m benchmarks", *sys.argv[1:]])
    return Run(
        date=time.strftime("%Y-%m-%d"), machine=machine, command=command, versions=versions, results=tuple(results)
    )  # fmt: skip


def write(path: Path, run: Run) -> None:
    """Replace the results of the measured cases in a file; those of other cases stay."""
    measured = {result.case for result in run.results}
    runs = msgspec.json.decode(path.read_bytes(), type=tuple[Run, ...]) if path.exists() else ()
    older = []
    for one in runs:
        others = tuple(result for result in one.results if result.case not in measured)
        if others:
            older.append(msgspec.structs.replace(one, results=others))
    path.write_text(json.dumps(msgspec.to_builtins((*older, run)), indent=1) + "\n")


def _processor() -> str:
    lines = Path("/proc/cpuinfo").read_text().splitlines() if Path("/proc/cpuinfo").exists() else []
    return next(
        (line.partition(":")[2].strip() for line in lines if line.startswith("model name")), "unknown processor"
    )


if __name__ == "__main__":
    main()
