"""A cache is untrusted input: whatever its index files say, verbs give the right rows or an error of ours.

One value of one file is changed to something hostile, and the file is sealed again with a right digest, as a stranger
would do it. What is read afterwards must be the rows that were built; anything else must be a `ForebayError`.
"""

import json
import random
from collections.abc import Callable, Iterator, Mapping
from contextlib import suppress
from functools import partial
from typing import Any, ClassVar

import msgspec
import numpy as np
import pytest
from tests.helpers.layer_recipes import write_lines

import forebay as fb
from forebay.columns import Array, Column, Columns, Ragged
from forebay.errors import ForebayError
from forebay.format import layout
from forebay.format.tensors import parse_header, seal, unseal
from forebay.recipe import Rows
from forebay.store import LocalStore, MemoryStore

Files = dict[str, bytes]
Path = tuple[str | int, ...]

CLAIM = {"owner": "0123456789ab-7-7", "host": "elsewhere", "pid": 7, "beat": 3, "state": "working", "reason": ""}
HEARTBEAT_OWNER = "0123456789ab-7-1"
NODE = {"host": "node-b", "pid": 7, "versions": {"numpy": "1"}}
HEARTBEAT = {**NODE, "beat": 3, "layer": "raw", "built": 4, "seconds": 2.5}

EXAMPLES = 60
DEEP: Any = json.loads("[" * 200 + "]" * 200)
HOSTILE_VALUES = [
    None, True, False, 0, 1, -1, 7, 2**31, 2**63 - 1, 2**63, 2**64, -(2**63), 1.5, 1e300, "", "x", "raw", ".", "..",
    "../../outside", "/etc", "a/../../b", "a\0b", "\ud800", "a.b", "²", "x" * 300, "layer raw", [], {}, [None], ["x"],
    [[]], {"x": 1}, {"": ""}, DEEP, "0" * 64, "{}", "[" * 5000, "9" * 5000,
]  # fmt: skip
DROPPED = object()


class Doubled(fb.RecipeHooks, msgspec.Struct, frozen=True, kw_only=True):
    """A layer of the length of every sample, twice."""

    kind: ClassVar[str] = "doubled"
    revision: ClassVar[int] = 1
    reads: ClassVar[tuple[str, ...]] = ("data",)

    def columns(self) -> tuple[Column, ...]:
        return (Column(name="length", dtype="int32"),)

    def constants(self) -> dict[str, Array]:
        return {"factor": np.array([2], np.int16)}

    def make(self, rows: Columns) -> Rows:
        data = rows["data"]
        assert isinstance(data, Ragged)
        return Rows({"length": (data.lengths * 2).astype(np.int32)}, statistics={"lengths": [1, 2]})


@pytest.fixture(scope="module")
def files(tmp_path_factory: pytest.TempPathFactory) -> Files:
    """A cache of two layers, grown once."""
    folder = tmp_path_factory.mktemp("hostile")
    root = folder / "cache"
    fb.build(root, fb.sources.lines(write_lines(folder / "raw/a.txt", 0, 40)), fb.RawRecipe(chunk_bytes=700), workers=0)
    fb.update(root, fb.sources.lines(write_lines(folder / "raw/b.txt", 40, 30)), workers=0)
    fb.build(root, None, Doubled(), workers=0)
    fb.clean(root, keep_generations=1)
    store = LocalStore(root)
    return {entry.key: store.read(entry.key) for entry in store.entries("")}


@pytest.fixture(scope="module")
def rows(files: Files) -> list[Any]:
    return rows_of(stored(files))


def stored(files: Mapping[str, bytes]) -> MemoryStore:
    store = MemoryStore("hostile")
    for key, value in files.items():
        store.create(key, [value])
    return store


def rows_of(store: MemoryStore) -> list[Any]:
    """Every row; a count that is not true is found when rows are read."""
    cache = fb.open_cache(store, layers=["doubled"])
    read = cache.read(range(min(len(cache), 1000)))
    columns = [
        [value.tobytes() for value in values] if isinstance(values, Ragged) else values.tolist()
        for values in read.values()
    ]
    return list(zip(*columns, strict=True))


def are_right(found: list[Any], built: list[Any]) -> bool:
    """Whether rows are rows that were built, in order. A generation without a key may list any part of a cache."""
    return found == [row for row in built if row in set(found)]


def places(value: Any, path: Path = ()) -> Iterator[Path]:
    """Where the leaves of a JSON value are, and what holds them."""
    yield path
    items = value.items() if isinstance(value, dict) else enumerate(value) if isinstance(value, list) else ()
    for name, inner in items:
        yield from places(inner, (*path, name))


def changed(value: Any, path: Path, new: Any) -> Any:
    """A JSON value with another at one place of it."""
    if not path:
        return {} if new is DROPPED else new
    copy = dict(value) if isinstance(value, dict) else list(value)
    copy[path[0]] = changed(copy[path[0]], path[1:], new)
    if len(path) == 1 and new is DROPPED:
        del copy[path[0]]
    return copy


def hostile_value(draw: random.Random) -> Any:
    return draw.choice([*HOSTILE_VALUES, DROPPED])


def spoil_json(text: bytes, draw: random.Random) -> bytes:
    value = json.loads(text)
    path = draw.choice(list(places(value)))
    return json.dumps(changed(value, path, hostile_value(draw))).encode()


def spoil_metadata(content: bytes, draw: random.Random) -> bytes:
    """Another value in the header of an index file, or in a document that it quotes."""
    metadata, tensors = opened(content)
    quoted = [
        path for path in places(metadata) if path and (path[0] == "cache" or (path[:1] == ("recipes",) and path[1:]))
    ]
    if quoted and draw.random() < 0.5:
        path = draw.choice(quoted)
        text = metadata["cache"] if path[0] == "cache" else metadata["recipes"][path[1]]
        return resealed(changed(metadata, path, spoil_json(text.encode(), draw).decode()), tensors)
    path = draw.choice([path for path in places(metadata) if path])
    return resealed(changed(metadata, path, hostile_value(draw)), tensors)


def spoil_tensor(content: bytes, draw: random.Random) -> bytes:
    """Another number, type or shape in an array of an index file."""
    metadata, tensors = opened(content)
    name = draw.choice(sorted(tensors))
    array = np.array(tensors[name])
    how = draw.choice(["value", "value", "value", "short", "long", "type", "shape", "rename", "drop", "fill"])
    if how == "value" and array.size:
        extremes = [0, 1, 255, 2**31, 2**62, 2**63 - 1, -1, -(2**63)]
        array.reshape(-1).view(np.uint8 if array.itemsize == 1 else f"<i{array.itemsize}")[
            draw.randint(0, array.size - 1)
        ] = (
            np.array(draw.choice(extremes), np.int64)
            .astype(f"<i{array.itemsize}")
            .view(np.uint8 if array.itemsize == 1 else f"<i{array.itemsize}")
        )
    elif how == "fill":
        array = np.full_like(array, 1)
    elif how == "type":
        array = array.astype(draw.choice([np.uint8, np.float32, np.int64, np.uint64, np.bool_]))
    elif how == "shape":
        array = array.reshape(draw.choice([(1, *array.shape), (*array.shape, 1)]))
    others = {key: value for key, value in tensors.items() if key != name}
    if how == "drop":
        return resealed(metadata, others)
    if how == "rename":
        return resealed(metadata, {**others, draw.choice(["x", "raw.", "raw.statistics.", "raw.x"]): array})
    if how == "short":
        array = array[:-1]
    elif how == "long":
        array = np.concatenate([array, array[-1:]])
    return resealed(metadata, {**others, name: array})


def opened(content: bytes) -> tuple[dict[str, Any], dict[str, Array]]:
    view = memoryview(content)
    kind = parse_header(view, "").metadata["type"]
    return unseal(view, "", "", kind)


def resealed(metadata: Any, tensors: Mapping[str, Array]) -> bytes:
    return b"".join(seal(metadata, {name: np.ascontiguousarray(array) for name, array in tensors.items()}))


SPOILED = {
    "cache.json": (spoil_json, layout.CACHE),
    "recipe.json": (spoil_json, layout.recipe("raw")),
    "claim": (spoil_json, layout.CLAIMS),
    "heartbeat": (spoil_json, layout.BUILDERS),
    "generation": (spoil_metadata, layout.GENERATIONS),
    "generation-tensors": (spoil_tensor, layout.GENERATIONS),
    "plan": (spoil_metadata, layout.plan_segment(0)),
    "plan-tensors": (spoil_tensor, layout.plan_segment(0)),
    "constants": (spoil_tensor, layout.LAYERS + "doubled."),
}
VERBS: dict[str, Callable[[MemoryStore], object]] = {
    "status": fb.status,
    "info": fb.info,
    "verify": partial(fb.verify, full=True),
    "constants": lambda store: fb.open_cache(store, layers=["doubled"]).constants("doubled"),
    "copy": lambda store: fb.copy(store, MemoryStore("copy")),
    "clean": partial(fb.clean, lease_seconds=0, keep_generations=1),
    "repair": partial(fb.repair, workers=0),
}


RAW = layout.layer_folder("raw", "0" * 16)


def spoiled_files(what: str, files: Files, draw: random.Random) -> Files:
    beside = {"claim": {layout.claim(RAW, 0): CLAIM}, "heartbeat": {layout.builder(HEARTBEAT_OWNER): HEARTBEAT}}
    spoil, begins = SPOILED[what]
    found = {**files, **{key: json.dumps(document).encode() for key, document in beside.get(what, {}).items()}}
    constants = what == "constants"
    key = max(key for key in found if key.startswith(begins) and (not constants or layout.is_constants(key)))
    return {**found, key: spoil(found[key], draw)}


@pytest.mark.parametrize("what", SPOILED)
def test_a_hostile_index_gives_the_right_rows_or_an_error_of_ours(what, files, rows):
    for seed in range(EXAMPLES):
        check_spoiled(what, files, rows, random.Random(f"{what} {seed}"))


def check_spoiled(what: str, files: Files, rows: list[Any], draw: random.Random) -> None:
    verb = draw.choice(sorted(VERBS))
    spoiled = spoiled_files(what, files, draw)
    with suppress(ForebayError):
        assert are_right(rows_of(stored(spoiled)), rows)
    store = stored(spoiled)
    with suppress(ForebayError):
        VERBS[verb](store)
    with suppress(ForebayError):
        assert are_right(rows_of(store), rows), f"after {verb}"
