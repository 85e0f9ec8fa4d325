"""Break one line per guarantee and see its tests fail: `python tools/break_guarantees.py [NUMBER …]`.

Each break replaces a pattern in one file of a copy of `src`. A pattern that is not found once is reported, and so are
tests that pass with the line broken; the exit code is then 1.
"""

import argparse
import os
import re
import shutil
import subprocess
import sys
import tempfile
from dataclasses import dataclass
from pathlib import Path

ROOT = Path(__file__).parent.parent


@dataclass(frozen=True)
class Break:
    guarantee: int
    change: str
    file: str  # below src/forebay
    pattern: str
    replacement: str
    tests: str


BREAKS = (
    Break(
        1, "chunks contain the process id", "format/chunk.py",
        r"statistics=dict\(statistics or \{\}\)", 'statistics={**(statistics or {}), "pid": __import__("os").getpid()}',
        "tests/property/test_same_bytes.py",
    ),
    Break(
        2, "a second creator overwrites a file", "store/local.py",
        r"created = self\._link\(temporary, path\)",
        'os.replace(temporary, path)\n                open(temporary, "w").close()\n                created = True',
        "tests/contract/test_stores.py",
    ),
    Break(
        3, "checksums of blocks are ignored", "read/blocks.py",
        r"if bad is not None:", "if False:",
        "tests/integration/test_bit_flips.py",
    ),
    Break(
        4, "edited files count as unchanged", "cache/source_check.py",
        r'items\(\) if verdict == "changed"', "items() if False",
        "tests/cache/test_freshness.py",
    ),
    Break(
        5, "features of absent rows are zero", "teachers/feature_reader.py",
        r"(values\[~\w+\.present\]) = np\.nan", r"\1 = 0",
        "tests/compat/test_multi_source.py",
    ),
    Break(
        6, "ranks take positions relative to the batch", "feeding/steps.py",
        r"first \+ \(ranks\.rank - first\) % ranks\.world_size", "first + ranks.rank",
        "tests/torch/test_loader_state.py",
    ),
    Break(
        7, "maps of chunks are never closed", "read/maps.py",
        r"def close_surplus\(self\) -> None:", "def close_surplus(self) -> None:\n        return\n",
        "tests/read/test_maps.py tests/integration/test_open_files.py",
    ),
    Break(
        8, "pickled code is loaded", "compat/pt_import.py",
        r"weights_only=True", "weights_only=False",
        "tests/compat",
    ),
    Break(
        9, "keys may leave the root", "store/base.py",
        r'if any\(part in \("", "\.", "\.\."\) for part in parts\):', "if False:",
        "tests/contract/test_stores.py tests/store",
    ),
)  # fmt: skip


def try_break(one: Break, folder: Path) -> str:
    """What went wrong, or an empty string."""
    source = folder / "src"
    shutil.copytree(ROOT / "src", source, ignore=shutil.ignore_patterns("__pycache__"))
    path = source / "forebay" / one.file
    text, count = re.subn(one.pattern, one.replacement, path.read_text())
    if count != 1:
        return f"the pattern occurs {count} times in {one.file}"
    path.write_text(text)
    environment = {**os.environ, "PYTHONPATH": str(source)}
    command = [
        sys.executable,
        "-m",
        "pytest",
        "-q",
        "-x",
        "-p",
        "no:cacheprovider",
        "-m",
        "not long",
        *one.tests.split(),
    ]
    run = subprocess.run(command, cwd=ROOT, env=environment, capture_output=True, text=True, check=False)
    if run.returncode != 1:
        return f"pytest ended with {run.returncode}: {run.stdout[-300:]}"
    failed = re.search(r"^FAILED (\S+)", run.stdout, re.MULTILINE)
    print(f"{one.guarantee}. {one.change}: {failed[1] if failed else 'a test fails'}", flush=True)
    return ""


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("number", nargs="*", type=int, help="guarantees to break; all by default")
    chosen = parser.parse_args().number or [one.guarantee for one in BREAKS]
    problems = 0
    for one in BREAKS:
        if one.guarantee in chosen:
            with tempfile.TemporaryDirectory() as folder:
                if problem := try_break(one, Path(folder)):
                    problems += 1
                    print(f"{one.guarantee}. {one.change}: NOT NOTICED: {problem}", flush=True)
    return 1 if problems else 0


if __name__ == "__main__":
    sys.exit(main())
