"""Forged chunks: all checksums are valid, also in the generation, but the contents are not.

`python -m tests.helpers.forged_caches ROOT [max_block_bytes]` reads every row of a cache in shuffled order, in every
way there is, and prints one line of JSON: how it ended, and its peak memory.
"""

import hashlib
import json
import re
import resource
import sys
from collections.abc import Callable
from dataclasses import dataclass, replace
from itertools import pairwise
from pathlib import Path
from typing import Any

import numpy as np
import xxhash
from tests.helpers.processes import PythonProcess

import forebay as fb
from forebay.cache.catalog import load_generation
from forebay.format import layout
from forebay.format.tensors import encode_header, parse_header
from forebay.recipe import canonical_json
from forebay.store import LocalStore


@dataclass
class Draft:
    """A chunk taken apart: tensors are (tag, shape, bytes)."""

    metadata: dict[str, Any]
    tensors: dict[str, tuple[str, list[int], bytes]]

    def numbers(self, name: str) -> np.ndarray[Any, Any]:
        """A copy of a tensor of the index."""
        return np.frombuffer(self.tensors[name][2], np.uint64).copy()

    def put(self, name: str, values: Any, tag: str = "U64") -> None:
        array = np.asarray(values)
        self.tensors[name] = (tag, list(array.shape), array.tobytes())


Change = Callable[[Draft], None]


def forge(root: Path, change: Change, layer: str = "raw", chunk: int = 0, **record: int) -> None:
    """Change a chunk, make every sum and digest right again, and list it; `record` is put into the generation as is."""
    path = root / layout.chunk(load_generation(LocalStore(root)).folder(layer), chunk)
    draft = take_apart(path.read_bytes())
    change(draft)
    for column in draft.metadata["columns"] if isinstance(draft.metadata.get("columns"), list | tuple) else ():
        _sum_again(draft, column)
    data, head_size = put_together(draft)
    path.write_bytes(data)
    rows = draft.metadata.get("rows")
    facts = {"rows": rows} if isinstance(rows, int) and abs(rows) < 2**63 else {}
    list_again(root, layer, chunk, data, **{"head_size": head_size, **facts, **record})


def take_apart(data: bytes) -> Draft:
    header = parse_header(memoryview(data), "a chunk")
    tensors = {name: (t.tag, list(t.shape), data[t.start : t.stop]) for name, t in header.tensors.items()}
    return Draft(json.loads(json.dumps(header.metadata)), tensors)


def put_together(draft: Draft) -> tuple[bytes, int]:
    """The bytes, and where the index ends."""
    tensors = draft.tensors
    if "check" in draft.metadata:
        ends = b"".join(tensors[name][2] for name in (".source", ".failures") if name in tensors)
        draft.metadata["check"] = ""
        draft.metadata["check"] = xxhash.xxh3_64_hexdigest(canonical_json(draft.metadata) + ends)
    header = encode_header(draft.metadata, [(name, t, shape, len(data)) for name, (t, shape, data) in tensors.items()])
    index = list(tensors)[: list(tensors).index(".source") + 1] if ".source" in tensors else []
    return header + b"".join(d for *_, d in tensors.values()), len(header) + sum(len(tensors[n][2]) for n in index)


def list_again(root: Path, layer: str, chunk: int, data: bytes, **record: int) -> None:
    """Publish other bytes for a chunk in the generation that there is."""
    store = LocalStore(root)
    generation = load_generation(store)
    table = generation.layers[layer]
    at = table.position(chunk)
    assert at is not None
    numbers = {name: values.copy() for name, values in table.numbers.items()}
    digests = {name: values.copy() for name, values in table.digests.items()}
    for name, value in {"size": len(data), **record}.items():
        numbers[name][at] = value
    head = xxhash.xxh3_128_digest(data[: int(numbers["head_size"][at])])
    for name, digest in (("head", head), ("sha256", hashlib.sha256(data).digest())):
        digests[name][at] = np.frombuffer(digest, np.uint8)
    changed = replace(generation, layers={**generation.layers, layer: replace(table, numbers=numbers, digests=digests)})
    store.replace(layout.generation(generation.number), changed.sealed(None))


def read_in_a_process(root: Path, *arguments: object) -> dict[str, Any]:
    """How reading all of a cache ends: {"read": rows} or {"error": …, "text": …}, with the memory it took."""
    process = PythonProcess("-m", "tests.helpers.forged_caches", str(root), *map(str, arguments))
    out, err = process.communicate(timeout=600)
    assert process.returncode == 0, f"reading ended with {process.returncode}: {err[-2000:]}"
    answer: dict[str, Any] = json.loads(out.splitlines()[-1])
    return answer


def ending(root: Path, **options: Any) -> dict[str, Any]:
    """The same, in this process."""
    try:
        return {"read": read_everything(root, **options)}
    except Exception as error:
        return {"error": type(error).__name__, "text": str(error)}


def peak_megabytes() -> int:
    """The most memory that this process has had; `getrusage` counts that of the process it was forked from."""
    peak = re.search(r"VmHWM:\s*(\d+) kB", Path("/proc/self/status").read_text())
    assert peak
    return int(peak[1]) // 1024


def read_everything(root: Path, **options: Any) -> int:
    with_layers = fb.open_cache(root)
    cache = fb.open_cache(root, layers=list(with_layers.generation.recipes), **options)
    order = np.random.default_rng(0).permutation(min(len(cache), 10_000))
    cache.read(order)
    for at in range(0, len(order), 3):
        assert len(cache.read(order[at : at + 3])) == len(cache.default_columns)
    for name in cache.columns:
        for view in cache.views(order, name):
            view.copy()
    for columns in fb.open_cache(root, **options).chunks():
        assert columns
    return len(order)


def _sum_again(draft: Draft, column: Any) -> None:
    """The sums of a column's blocks, as far as there are blocks."""
    try:
        name = column["name"]
        data = draft.tensors[name][2]
        sums = [xxhash.xxh3_64_intdigest(data[a:b]) for a, b in pairwise(_edges(draft, column))]
        if len(sums) == draft.tensors[f"{name}.sums"][1][0]:
            draft.put(f"{name}.sums", np.array(sums, np.uint64))
    except (KeyError, IndexError, TypeError, ValueError, OverflowError, ZeroDivisionError, AttributeError):
        return


def _edges(draft: Draft, column: dict[str, Any]) -> list[int]:
    name = column["name"]
    if f"{name}.blocks" in draft.tensors:
        edges: list[int] = draft.numbers(f"{name}.blocks").tolist()
        return edges
    _, shape, data = draft.tensors[name]
    items, rows = max(1, shape[0]), draft.metadata["rows"]
    step = column["rows_per_block"] or (64 if column["ragged"] else max(1, 65536 // max(1, len(data) // items)))
    at = [min(row, rows) for row in range(0, rows + step, step)]
    if column["ragged"]:
        offsets = draft.numbers(f"{name}.offsets").tolist()
        return [offsets[row] * (len(data) // items) for row in at]
    return [row * (len(data) // items) for row in at]


def main(root: str, *arguments: str) -> None:
    options = {"max_block_bytes": int(arguments[0])} if arguments else {}
    resource.setrlimit(resource.RLIMIT_AS, (8 << 30, 8 << 30))
    before = peak_megabytes()
    answer = ending(Path(root), **options)
    print(json.dumps({**answer, "megabytes": peak_megabytes() - before}), flush=True)


if __name__ == "__main__":
    main(*sys.argv[1:])
