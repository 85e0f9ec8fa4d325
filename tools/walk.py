"""Print which modules of forebay a real build and a real read run through: `python tools/walk.py`.

`--list` prints the calls of each module, `--functions` those of each function. `--frames` prints the calls that lie
between a mapped file and the training loop, one a line, the one that copies rows first.

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
Calls = Counter[tuple[str, str]]  # calls of a function, by its module and its name
IMPORTS = ("<module>", "__getattr__")  # a module's own body, and names that are imported when they are first used


def main() -> None:
    parser = argparse.ArgumentParser(description="Print which modules a build and a read run through.")
    parser.add_argument("--list", action="store_true", help="Print every module with its number of calls.")
    parser.add_argument("--functions", action="store_true", help="Print every function with its number of calls.")
    parser.add_argument("--frames", action="store_true", help="Print the calls between a mapped file and a batch.")
    arguments = parser.parse_args()
    if arguments.frames:
        with tempfile.TemporaryDirectory() as folder:
            print("\n".join(frames(Path(folder))))
        return
    with tempfile.TemporaryDirectory() as folder:
        for title, calls in walks(Path(folder)):
            modules = by_module(calls)
            print(f"{title:<28}{len(modules):>4} modules  {calls.total():>9,} calls")
            if arguments.list or arguments.functions:
                for module, count in modules.most_common():
                    print(f"    {module:<40}{count:>9,}")
                    if arguments.functions:
                        print_functions(calls, module)


def by_module(calls: Calls) -> Counter[str]:
    modules: Counter[str] = Counter()
    for (module, _), count in calls.items():
        modules[module] += count
    return modules


def print_functions(calls: Calls, module: str) -> None:
    for (home, function), count in calls.most_common():
        if home == module:
            print(f"        {function:<36}{count:>9,}")


def walks(folder: Path) -> Iterator[tuple[str, Calls]]:
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


def frames(folder: Path) -> list[str]:
    """The functions that are active while rows are copied, then those while the loop waits for the batch."""
    (folder / "data.txt").write_text("A document of a few words.\n" * 400)
    recipe = fb.TokenRecipe(tokenizer="gpt2", sequence_length=128, codec="none")
    fb.build(folder / "cache", fb.sources.text(folder / "data.txt"), recipe, workers=0)
    loader = import_module("forebay.torch").Loader(fb.open_cache(folder / "cache"), global_batch_size=2, threads=1)
    copying, waiting = list[list[str]](), list[list[str]]()

    def profile(frame: FrameType, event: str, argument: object) -> None:
        if event == "c_call" and getattr(argument, "__name__", "") == "read_rows":
            copying.append(_stack(frame))
        if event == "call" and frame.f_code.co_qualname == "Ahead.__next__":
            waiting.append(_stack(frame))

    threading.setprofile(profile)
    sys.setprofile(profile)
    try:
        next(iter(loader))
    finally:
        sys.setprofile(None)
        threading.setprofile(None)
    return next(stack for stack in copying if "FixedReader" in stack[0]) + waiting[0]  # the column of tokens


def _stack(frame: FrameType | None) -> list[str]:
    found = []
    while frame is not None:
        if module := module_of(frame.f_code):
            found.append(f"{module}: {frame.f_code.co_qualname}")
        frame = frame.f_back
    return found


def gather_walk(cache: Any) -> Calls:
    def gather() -> None:
        cache.read([5, 3, 1], columns=["tokens", "seq_lens"])

    return traced(gather, gather)


def loader_walk(root: Path) -> Calls:
    loader: Any = import_module("forebay.torch").Loader

    def epoch() -> None:
        for _ in loader(fb.open_cache(root), global_batch_size=8, seed=0):
            pass

    return traced(epoch, epoch)


def traced(first: Callable[[], object], again: Callable[[], object]) -> Calls:
    """Calls while `again` runs, after `first` has imported what it needs."""
    first()
    with counting() as calls:
        again()
    return Counter({called: count for called, count in calls.items() if called[0]})


@contextmanager
def counting() -> Iterator[Calls]:
    """Calls of functions of forebay, in every thread."""
    calls: Calls = Counter()
    known: dict[CodeType, tuple[str, str]] = {}

    def profile(frame: FrameType, event: str, argument: object) -> None:
        if event == "call":
            code = frame.f_code
            if code not in known:
                known[code] = (module_of(code), code.co_qualname)
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
