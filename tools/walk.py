"""Print which modules of forebay a real build and a real read run through: `python tools/walk.py [--list]`.

Text is made, packed tokens are built from it in this process, the cache is opened, rows are gathered, and a loader
(where torch is installed) hands out batches. A module counts when one of its functions runs; importing it does not
count. Every step runs once before it is traced: what is imported and set up once is not on the path.
"""

import argparse
import json
import sys
import tempfile
import threading
from collections import Counter
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from importlib import import_module
from importlib.util import find_spec
from pathlib import Path
from types import CodeType, FrameType
from typing import Any

import forebay as fb

ROOT = Path(fb.__file__).parent
IMPORTS = ("<module>", "__getattr__")  # a module's own body, and names that are imported when they are first used


def main() -> None:
    parser = argparse.ArgumentParser(description="Print which modules a build and a read run through.")
    parser.add_argument("--list", action="store_true", help="Print every module with its number of calls.")
    arguments = parser.parse_args()
    with tempfile.TemporaryDirectory() as folder:
        for title, calls in walks(Path(folder)):
            print(f"{title:<28}{len(calls):>4} modules  {sum(calls.values()):>9,} calls")
            if arguments.list:
                for module, count in calls.most_common():
                    print(f"    {module:<40}{count:>9,}")


def walks(folder: Path) -> Iterator[tuple[str, Counter[str]]]:
    data = folder / "data.jsonl"
    data.write_text("".join(json.dumps({"text": f"Document {number}. " * 40}) + "\n" for number in range(200)))
    source = fb.sources.jsonl(data, text="text")
    recipe = fb.TokenRecipe(tokenizer="gpt2", sequence_length=128)

    def build(name: str) -> None:
        fb.build(folder / name, source, recipe, workers=0)

    def read() -> None:
        cache = fb.open_cache(folder / "first")
        cache[0]
        cache.read([5, 3, 1], columns=["tokens", "seq_lens"])

    yield "build tokens", traced(lambda: build("first"), lambda: build("second"))
    yield "open and read rows", traced(read, read)
    yield "gather from an open cache", gather_walk(fb.open_cache(folder / "first"))
    if find_spec("torch") is not None:
        yield "one epoch of batches", loader_walk(folder / "first")


def gather_walk(cache: Any) -> Counter[str]:
    def gather() -> None:
        cache.read([5, 3, 1], columns=["tokens", "seq_lens"])

    return traced(gather, gather)


def loader_walk(root: Path) -> Counter[str]:
    loader: Any = import_module("forebay.torch").Loader

    def epoch() -> None:
        for _ in loader(fb.open_cache(root), global_batch_size=8, seed=0):
            pass

    return traced(epoch, epoch)


def traced(first: Callable[[], object], again: Callable[[], object]) -> Counter[str]:
    """Calls by module while `again` runs, after `first` has imported what it needs."""
    first()
    with counting() as calls:
        again()
    return Counter({module: count for module, count in calls.items() if module})


@contextmanager
def counting() -> Iterator[Counter[str]]:
    """Calls of functions of forebay, by module, in every thread."""
    calls: Counter[str] = Counter()
    known: dict[CodeType, str] = {}

    def profile(frame: FrameType, event: str, argument: object) -> None:
        if event == "call":
            code = frame.f_code
            if code not in known:
                known[code] = module_of(code)
            calls[known[code]] += 1

    threading.setprofile(profile)  # for the threads that reading and batching start
    sys.setprofile(profile)
    try:
        yield calls
    finally:
        sys.setprofile(None)
        threading.setprofile(None)


def module_of(code: CodeType) -> str:
    """The module of forebay that a function is in, "" for any other and for imports."""
    path = Path(code.co_filename)
    if code.co_name in IMPORTS or not path.is_relative_to(ROOT):
        return ""
    return ".".join(path.relative_to(ROOT).with_suffix("").parts)


if __name__ == "__main__":
    main()
