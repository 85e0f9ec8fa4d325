"""Forge one leaf of a small chunk after the other, and read all rows of the cache each time.

python -m tests.integration.fuzz_process KIND SEED COUNT

One line of JSON per kind of ending, and at the end the most memory that the process took. What is about to be tried is
written to stderr, so that a crash says what caused it.
"""

import json
import random
import resource
import shutil
import sys
import tempfile
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import numpy as np
from tests.helpers.forged_caches import Draft, ending, forge, peak_megabytes
from tests.helpers.layer_recipes import layered_cache
from tests.helpers.token_caches import NumberedTokens, write_numbers

import forebay as fb

LEAVES: list[Any] = [
    None, True, False, -1, 0, 1, 2, 2**31, 2**48, 2**62, 2**63, 2**64 - 1, -(2**63), 10**30, 1.5, 1e300, "", "x",
    "zstd", "\ud800", "\x00", "a" * 70_000, [], [1], [[[[[[]]]]]], {}, {"x": 1}, [0] * 20_000, "bool", "uint64",
    "0" * 32,
]  # fmt: skip
NUMBERS = [0, 1, 2, 63, 64, 2**31, 2**32, 2**48, 2**61, 2**62, 2**63 - 1, 2**63, 2**64 - 2, 2**64 - 1]
TAGS = ["U8", "U64", "I64", "F64", "BOOL", "U16", "BF16", "X"]
ALLOWED = {"read", "ChunkCorrupt", "IndexCorrupt"}

Mutation = tuple[str, Callable[[Draft], None]]


def raw_cache(codec: str) -> Callable[[Path], tuple[Path, str]]:
    def build(folder: Path) -> tuple[Path, str]:
        (folder / "source.txt").write_bytes(b"".join(b"%d " % n * (n % 9) + b"\n" for n in range(60)))
        recipe = fb.RawRecipe(codec=codec, chunk_bytes=256, rows_per_block=4)  # type: ignore[arg-type]
        fb.build(folder / "cache", fb.sources.lines(folder / "source.txt"), recipe, workers=0)
        return folder / "cache", "raw"

    return build


def token_cache(folder: Path) -> tuple[Path, str]:
    source = fb.sources.lines(write_numbers(folder / "numbers.txt", range(20)))
    fb.build(folder / "cache", source, NumberedTokens(codec="zstd"), workers=0)
    return folder / "cache", "tokens"


def layer_cache(folder: Path) -> tuple[Path, str]:
    """Presence bits, fixed plain and compressed columns."""
    return layered_cache(folder), "length"


KINDS: dict[str, Callable[[Path], tuple[Path, str]]] = {
    "none": raw_cache("none"),
    "lz4": raw_cache("lz4"),
    "zstd": raw_cache("zstd"),
    "tokens": token_cache,
    "presence": layer_cache,
}


def mutations(draft: Draft, choose: random.Random) -> Iterator[Mutation]:
    """Without end; every leaf is as likely as another."""
    leaves = list(paths(draft.metadata))
    while True:
        kind = choose.random()
        if kind < 0.4:
            yield metadata_mutation(choose.choice(leaves), choose)
        elif kind < 0.85:
            yield tensor_mutation(choose.choice(list(draft.tensors)), choose)
        else:
            yield structure_mutation(choose.choice(list(draft.tensors)), choose)


def paths(value: Any, path: tuple[Any, ...] = ()) -> Iterator[tuple[Any, ...]]:
    if path:
        yield path
    if isinstance(value, dict | list):
        for key, inner in value.items() if isinstance(value, dict) else enumerate(value):
            yield from paths(inner, (*path, key))


def metadata_mutation(path: tuple[Any, ...], choose: random.Random) -> Mutation:
    value, deletes = choose.choice(LEAVES), choose.random() < 0.1

    def change(draft: Draft) -> None:
        holder: Any = draft.metadata
        for key in path[:-1]:
            holder = holder[key]
        if deletes:
            del holder[path[-1]]
        else:
            holder[path[-1]] = value

    return f"metadata {path} {'deleted' if deletes else repr(value)[:60]}", change


def tensor_mutation(name: str, choose: random.Random) -> Mutation:
    """Other numbers in the index, other bytes in the data."""
    number, at, size = choose.choice(NUMBERS), choose.random(), choose.choice([1, 1, 2, 5])

    def change(draft: Draft) -> None:
        tag, shape, data = draft.tensors[name]
        if not data:
            return
        values = np.frombuffer(data, np.uint64 if tag == "U64" else np.uint8).copy()
        first = int(at * len(values))
        values[first : first + size] = number % (2**64 if tag == "U64" else 256)
        draft.tensors[name] = (tag, shape, values.tobytes())

    return f"tensor {name}[{at:.2f}:+{size}] = {number}", change


def structure_mutation(name: str, choose: random.Random) -> Mutation:
    what = choose.choice(["tag", "shape", "longer", "shorter", "gone", "renamed", "last", "zeros", "flat", "twice"])
    tag = choose.choice(TAGS)

    def change(draft: Draft) -> None:
        old, shape, data = draft.tensors[name]
        size = len(data) // max(1, shape[0]) if shape else len(data)
        replaced: dict[str, tuple[str, list[int], bytes] | None] = {
            "tag": (tag, shape, data),
            "shape": (old, [*shape, 1], data),
            "longer": (old, [shape[0] + 1, *shape[1:]], data + bytes(max(size, 1))),
            "shorter": (old, [max(0, shape[0] - 1), *shape[1:]], data[: max(0, len(data) - size)]),
            "gone": None,
            "renamed": None,
            "last": None,
            "zeros": (old, shape, bytes(len(data))),
            "flat": (old, [2**62, 0], b""),
            "twice": (old, shape, data),
        }
        value = replaced[what]
        if value is None:
            del draft.tensors[name]
            if what != "gone":
                draft.tensors[f"{name}x" if what == "renamed" else name] = (old, shape, data)
        else:
            draft.tensors[name] = value
        if what == "twice":
            draft.tensors[f"{name}.again"] = value or (old, shape, data)

    return f"tensor {name} {what} {tag if what == 'tag' else ''}", change


def main(kind: str, seed: str, count: str) -> None:
    resource.setrlimit(resource.RLIMIT_AS, (8 << 30, 8 << 30))
    choose = random.Random(f"{kind} {seed}")
    endings: dict[str, int] = {}
    with tempfile.TemporaryDirectory() as folder:
        root, layer = KINDS[kind](Path(folder))
        assert ending(root) == {"read": ending(root)["read"]}
        shutil.copytree(root, Path(folder) / "sound")
        taken: list[Draft] = []
        forge(root, taken.append, layer)
        tried = mutations(taken[0], choose)
        for _ in range(int(count)):
            what, change = next(tried)
            print(what, file=sys.stderr, flush=True)
            shutil.rmtree(root)
            shutil.copytree(Path(folder) / "sound", root)
            forge(root, change, layer)
            answer = ending(root)
            name = "read" if "read" in answer else answer["error"]
            endings[name] = endings.get(name, 0) + 1
            if name not in ALLOWED:
                print(json.dumps({"mutation": what, **answer}), flush=True)
    print(json.dumps({"endings": endings, "megabytes": peak_megabytes()}))


if __name__ == "__main__":
    main(*sys.argv[1:])
