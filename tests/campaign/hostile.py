"""A corpus of crafted caches: what somebody would put into a cache that a stranger will open.

Every craft takes a pristine cache and turns it into a hostile one. Index files are taken apart and put together by the
bytes that `docs/format.md` describes, and every digest is made right again: only checks of meaning are left to reject
them.
"""

import copy
import hashlib
import json
import os
import random
import socket
from collections.abc import Callable
from contextlib import suppress
from dataclasses import dataclass
from functools import cache
from pathlib import Path
from typing import Any

import numpy as np
import zstandard
from tests.campaign.worlds import doorbell
from tests.helpers.forged_caches import Draft, forge, list_again

from forebay.cache.segment import decode_segment
from forebay.columns import Array, Ragged
from forebay.errors import ForebayError
from forebay.format.chunk import encode_chunk
from forebay.format.chunk_file import ChunkFile

Craft = Callable[[random.Random, Path, Path], str]  # draw, the root, a tree outside -> what was done
# What is asked of a stranger's cache: verbs that change nothing in it, and verbs that may. {root} is that cache, {mine}
# a damaged copy of it from before it was crafted, {pristine} a sound one; {copy} and {tier} are new folders.
LOOKING: tuple[tuple[str, ...], ...] = (
    ("status", "{root}"),
    ("info", "{root}"),
    ("peek", "{root}"),
    ("verify", "{root}"),
    ("verify", "--full", "{root}"),
    ("estimate", "{root}"),
    ("build", "{root}", "--dry-run"),
    ("copy", "{root}", "{copy}"),
    ("repair", "{mine}", "--from", "{root}", "--workers", "0"),
    ("doctor", "{root}"),
    ("tier", "list", "{root}"),
    ("tier", "clean", "{root}"),
    ("build", "raw", "{root}", "--into", "{copy}-raw", "--workers", "0"),
    ("view", "{root}", "--bundle", "{copy}.html"),
    ("tier", "fill", "{root}", "{tier}-chunks"),
    ("build", "{command}", "--into", "{copy}-reused", "--reuse", "{root}", "--workers", "0"),
    ("estimate", "remote", "{root}"),
)
CHANGING: tuple[tuple[str, ...], ...] = (
    ("repair", "{root}", "--workers", "0"),
    ("repair", "{root}", "--from", "{pristine}", "--workers", "0"),
    ("build", "{root}", "--workers", "0"),
    ("build", "{root}", "--mode", "inverse", "--workers", "0"),
    ("update", "{root}", "{source}", "--workers", "0"),
    ("drop", "{root}", "raw"),
    ("clean", "{root}"),
    ("clean", "{root}", "--keep-generations", "1"),
    ("clean", "{root}", "--unpublished"),
    ("copy", "{pristine}", "{root}"),
)
LEAVES: tuple[Any, ...] = (
    None, True, False, -1, 0, 1, 2**31, 2**63 - 1, 2**63, 2**64, -(2**63), 10**400, 1e308, float("nan"), "",
    "x", "raw", ".", "..", "../x", "a/../../b", "/etc/passwd", "a\0b", "a.b", "²", "\ud800", "\x1b[31m", "é" * 50,
    "9" * 5000, "0" * 64, "{}", "[" * 5000, [], {}, [1], ["x"] * 9, {"x": 1}, {"": ""}, [[[[]]]], {"kind": "hub"},
)  # fmt: skip
NUMBERS = (0, 1, 2, 255, 2**16, 2**31, 2**32, 2**62, 2**63 - 1, 2**63, 2**64 - 1)
# --- files, byte by byte ---------------------------------------------------------------------------------------------


@dataclass
class Parts:
    """A file of ours, taken apart: its metadata and its tensors as (dtype, shape, bytes)."""

    metadata: dict[str, Any]
    tensors: dict[str, tuple[str, list[int], bytes]]

    @classmethod
    def of(cls, content: bytes) -> "Parts":
        length = int.from_bytes(content[:8], "little")
        header = json.loads(content[8 : 8 + length])
        metadata = json.loads(header.pop("__metadata__")["forebay"])
        data = content[8 + length :]
        tensors = {
            name: (entry["dtype"], entry["shape"], data[slice(*entry["data_offsets"])])
            for name, entry in header.items()
        }
        return cls(metadata, tensors)

    def joined(self) -> bytes:
        header: dict[str, Any] = {"__metadata__": {"forebay": canonical(self.metadata)}}
        position = 0
        for name, (dtype, shape, data) in self.tensors.items():
            header[name] = {"dtype": dtype, "shape": shape, "data_offsets": [position, position + len(data)]}
            position += len(data)
        text = json.dumps(header, separators=(",", ":")).encode("utf-8", "surrogatepass")
        padded = -(-(8 + len(text)) // 4096) * 4096 - 8
        data = b"".join(data for _, _, data in self.tensors.values())
        return padded.to_bytes(8, "little") + text.ljust(padded) + data

    def sealed(self) -> bytes:
        """With the digest that an index file carries at its end."""
        self.tensors.pop(".digest", None)
        self.tensors.pop(".hmac", None)
        self.tensors[".digest"] = ("U8", [32], bytes(32))
        whole = self.joined()
        return whole[:-32] + hashlib.sha256(whole[:-32]).digest()

    def numbers(self, name: str) -> list[int]:
        data = self.tensors[name][2]
        return [int.from_bytes(data[at : at + 8], "little") for at in range(0, len(data), 8)]

    def set_number(self, name: str, at: int, value: int) -> None:
        dtype, shape, data = self.tensors[name]
        width = len(data) // max(1, _count(shape))
        changed = bytearray(data)
        changed[at * width : (at + 1) * width] = (value % (1 << 8 * width)).to_bytes(width, "little")
        self.tensors[name] = (dtype, shape, bytes(changed))


def canonical(value: Any) -> str:
    return json.dumps(value, separators=(",", ":"), sort_keys=True, allow_nan=True)


def _count(shape: list[int]) -> int:
    count = 1
    for side in shape:
        count *= side
    return count


def newest(root: Path) -> Path:
    return max((root / "generations").glob("[0-9]*.safetensors"))


def chunks(root: Path) -> list[Path]:
    return sorted((root / "layers").glob("*/[0-9]*.safetensors"))


def _plans(root: Path) -> list[Path]:
    return sorted((root / "plan").glob("[0-9]*.safetensors"))


def _recipes(root: Path) -> list[Path]:
    return sorted((root / "recipes").glob("*.json"))


def _paths(value: Any, path: tuple[Any, ...] = ()) -> list[tuple[Any, ...]]:
    """Where every value of a document is."""
    found = [path] if path else []
    items = value.items() if isinstance(value, dict) else enumerate(value) if isinstance(value, list) else ()
    for name, below in items:
        found += _paths(below, (*path, name))
    return found


def _mutated(draw: random.Random, document: Any) -> tuple[Any, str]:
    """A document with one value changed, gone, or added."""
    changed = copy.deepcopy(document)
    path = draw.choice(_paths(changed))
    parent = changed
    for name in path[:-1]:
        parent = parent[name]
    how = draw.choice(("set", "set", "set", "delete", "add"))
    if how == "set":
        parent[path[-1]] = draw.choice(LEAVES)
        return changed, f"{path} = {str(parent[path[-1]])[:40]!r}"
    if how == "delete" and isinstance(parent, dict):
        del parent[path[-1]]
        return changed, f"{path} deleted"
    if isinstance(parent, dict):
        parent["surplus"] = draw.choice(LEAVES)
    else:
        parent.append(draw.choice(LEAVES))
    return changed, f"something added at {path[:-1]}"


def _mutate_tensor(draw: random.Random, parts: Parts) -> str:
    """One number, the shape, the type or the presence of a tensor changed; the header still describes the file."""
    name = draw.choice([each for each in parts.tensors if not each.startswith(".")] or list(parts.tensors))
    dtype, shape, data = parts.tensors[name]
    kinds = ("number", "number", "number", "dtype", "shape", "short", "long", "flat", "gone", "empty", "renamed")
    how = draw.choice(kinds)
    if how == "number" and data:
        at, value = draw.randrange(_count(shape)), draw.choice(NUMBERS)
        parts.set_number(name, at, value)
        return f"{name}[{at}] = {value}"
    if how == "dtype":
        parts.tensors[name] = (draw.choice(("F64", "I64", "U64", "U8")), [len(data)], data)
        width = 1 if parts.tensors[name][0] == "U8" else 8
        parts.tensors[name] = (parts.tensors[name][0], [len(data) // width], data[: len(data) // width * width])
    elif how == "shape":
        parts.tensors[name] = (dtype, [1, *shape], data)
    elif how == "short" and shape and shape[0] > 1:
        width = len(data) // shape[0]
        parts.tensors[name] = (dtype, [shape[0] - 1, *shape[1:]], data[:-width])
    elif how == "long" and shape:
        width = len(data) // max(1, shape[0])
        parts.tensors[name] = (dtype, [shape[0] + 1, *shape[1:]], data + bytes(width))
    elif how == "flat":
        parts.tensors[name] = (dtype, [2**62, 0], b"")
    elif how == "renamed":
        parts.tensors = {("../" + key if key == name else key): value for key, value in parts.tensors.items()}
    elif how == "gone":
        del parts.tensors[name]
    else:
        parts.tensors[name] = (dtype, [0, *shape[1:]], b"")
    return f"{name}: {how}"


# --- the crafts ------------------------------------------------------------------------------------------------------


def _fuzz_document(draw: random.Random, root: Path, outside: Path) -> str:
    """cache.json or a recipe with a value changed: on disk, in the generation, or alike in both."""
    path = draw.choice([root / "cache.json", *_recipes(root)])
    document, what = _mutated(draw, json.loads(path.read_bytes()))
    text, where = json.dumps(document), draw.choice(("on disk", "in the generation", "everywhere", "everywhere"))
    if where != "in the generation":
        path.write_text(text, errors="surrogatepass")
    if where == "on disk":
        return f"{path.name} {what} {where}"
    generation = Parts.of(newest(root).read_bytes())
    if path.name == "cache.json":
        generation.metadata["cache"] = text
    else:
        generation.metadata["recipes"][path.stem] = text
    newest(root).write_bytes(generation.sealed())
    return f"{path.name} {what} {where}"


def _fuzz_parts(draw: random.Random, parts: Parts, headers: float = 0.5) -> str:
    """One value of the metadata or one tensor changed; what was done."""
    if draw.random() < headers:
        parts.metadata, what = _mutated(draw, parts.metadata)
        return what
    return _mutate_tensor(draw, parts)


def _fuzz_generation(draw: random.Random, root: Path, outside: Path) -> str:
    parts = Parts.of(newest(root).read_bytes())
    what = _fuzz_parts(draw, parts)
    newest(root).write_bytes(parts.sealed())
    return f"generation {what}"


def _fuzz_plan(draw: random.Random, root: Path, outside: Path) -> str:
    path = draw.choice(_plans(root))
    parts = Parts.of(path.read_bytes())
    what = _fuzz_parts(draw, parts)
    write_plan(root, path, parts)
    return f"plan {what}"


def _fuzz_constants(draw: random.Random, root: Path, outside: Path) -> str:
    files = sorted(root.glob("layers/*/constants.safetensors"))
    if not files:
        return "no layer has constants"
    path = draw.choice(files)
    parts = Parts.of(path.read_bytes())
    what = _fuzz_parts(draw, parts, headers=0.2)
    _write_constants(root, path, parts)
    return f"constants of {path.parent.name}: {what}"


def _write_constants(root: Path, path: Path, parts: Parts) -> Parts:
    """The constants of a layer, and the newest generation with their digest."""
    content = parts.sealed()
    path.write_bytes(content)
    generation = Parts.of(newest(root).read_bytes())
    generation.metadata["constants"][path.parent.name.partition(".")[0]] = hashlib.sha256(content).hexdigest()
    newest(root).write_bytes(generation.sealed())
    return generation


def _fuzz_chunk(draw: random.Random, root: Path, outside: Path) -> str:
    path = draw.choice(chunks(root))
    done: list[str] = []

    def change(draft: Draft) -> None:
        parts = Parts(draft.metadata, draft.tensors)
        done.append(_fuzz_parts(draw, parts, headers=0.4))
        draft.metadata, draft.tensors = parts.metadata, parts.tensors

    with suppress(ValueError, ForebayError):  # what no header can hold
        forge(root, change, *_place(path))
    return f"chunk {path.parent.name}/{path.name} {done[0]}"


def _place(path: Path) -> tuple[str, int]:
    """The layer and the number of a chunk."""
    return path.parent.name.partition(".")[0], int(path.name[:6])


TEXTS = (
    b"", b"[]", b"null", b"{", b"[" * 5000, b"\xff\xfe", b'{"a": NaN}', b"9" * 5000, b'"\\ud800"', b"\x1b[31m",
)  # fmt: skip


def _fuzz_values(draw: random.Random, root: Path, outside: Path) -> str:
    """Rows that no recipe makes: some values of one column are others, and every sum and digest is right."""
    path = draw.choice(chunks(root))
    file = ChunkFile(memoryview(path.read_bytes()), path.name)
    meta = file.meta
    columns: dict[str, Array | Ragged] = {column.name: file.decode(column.name) for column in meta.columns}
    forged = draw.choice(meta.columns)
    columns[forged.name], what = _forged(draw, columns[forged.name])
    encoded = encode_chunk(
        columns, meta.columns, layer=meta.layer, chunk=meta.chunk, fingerprint=meta.fingerprint, samples=meta.samples,
        failures=file.failures(), statistics=meta.statistics, base=meta.base, source_sums=file.source_sums(),
    )  # fmt: skip
    content = b"".join(encoded.buffers)
    path.write_bytes(content)
    list_again(root, *_place(path), content, head_size=encoded.head_size)
    return f"values of {path.parent.name}.{forged.name}: {what}"


def _forged(draw: random.Random, values: Array | Ragged) -> tuple[Array | Ragged, str]:
    """Other values of a column: one, some or all of them, or another text in a row of bytes."""
    if (
        isinstance(values, Ragged)
        and values.values.dtype == np.uint8
        and values.values.ndim == 1
        and draw.random() < 0.5
    ):
        rows, text = [values[at] for at in range(len(values))], draw.choice(TEXTS)
        rows[draw.randrange(len(rows))] = np.frombuffer(text, np.uint8)
        return Ragged.of(rows, values.values.dtype, ()), repr(text[:20])
    flat = (values.values if isinstance(values, Ragged) else values).copy()
    if flat.size:
        whole = flat.dtype.kind in "iu"
        extremes = [np.iinfo(flat.dtype).min, np.iinfo(flat.dtype).max, 0, 1] if whole else [np.nan, np.inf, -1e30, 0]
        value, count = draw.choice(extremes), draw.choice((1, max(1, flat.size // 3), flat.size))
        with np.errstate(all="ignore"):
            flat.reshape(-1)[draw.sample(range(flat.size), count)] = np.array(value).astype(flat.dtype)
        return (Ragged(flat, values.offsets) if isinstance(values, Ragged) else flat), f"{count} are {value}"
    return values, "none"


def _fuzz_heartbeat(draw: random.Random, root: Path, outside: Path) -> str:
    document = {"host": "node-b", "pid": 7, "beat": 1, "layer": chunks(root)[0].parent.name, "built": 3, "seconds": 1.5}
    changed, what = _mutated(draw, document)
    (root / "builders").mkdir(exist_ok=True)
    name = draw.choice(("0123456789ab-7-1.json", "node-b-7-1.json", "0123456789ab-7-1", "notes.txt"))
    (root / "builders" / name).write_text(json.dumps(changed), errors="surrogatepass")
    return f"heartbeat {name} {what}"


def _fuzz_claim(draw: random.Random, root: Path, outside: Path) -> str:
    layer = chunks(root)[0].parent.name
    document = {"host": "node-b", "pid": 7, "started": "1", "beat": 1, "owner": "node-b-7-1"}
    changed, what = _mutated(draw, document)
    folder = root / "claims" / layer
    folder.mkdir(parents=True, exist_ok=True)
    name = draw.choice(("000000.json", "000001.json", "notes.txt", "000000.json.bak"))
    (folder / name).write_text(json.dumps(changed), errors="surrogatepass")
    return f"claim {name} {what}"


NAMES = (
    "../../outside", "a/../../outside", "/tmp/x", "", ".", "..", "a\0b", "a/b", "x" * 300, "\x1b[31m", "ä", "con\n",
)  # fmt: skip


def _names(draw: random.Random, root: Path, outside: Path) -> str:
    """A layer whose name leads elsewhere, in the generation, its recipes, its constants or cache.json."""
    name = draw.choice(NAMES)
    parts = Parts.of(newest(root).read_bytes())
    layer = parts.metadata["layers"][0]
    where = draw.choice(("layers", "recipes", "constants", "base"))
    if where == "layers":
        parts.metadata["layers"] = [name]
        parts.metadata["recipes"] = {name: parts.metadata["recipes"][layer]}
        parts.tensors = {key.replace(f"{layer}.", f"{name}.", 1): value for key, value in parts.tensors.items()}
    elif where == "recipes":
        parts.metadata["recipes"][name] = '{"evil": true}'
    elif where == "constants":
        parts.metadata["constants"][name] = "0" * 64
    else:
        document = json.loads(parts.metadata["cache"])
        document["base"] = name
        parts.metadata["cache"] = json.dumps(document)
        (root / "cache.json").write_text(parts.metadata["cache"])
    newest(root).write_bytes(parts.sealed())
    return f"{where} names {name[:20]!r}"


def _links(draw: random.Random, root: Path, outside: Path) -> str:
    """A folder or a file of the cache is a link to somewhere else, or to itself."""
    layer = chunks(root)[0].parent.name
    files = (chunks(root)[0], newest(root), root / f"recipes/{layer.partition(chr(46))[0]}.json")
    choices = [
        f"claims/{layer}",
        "claims",
        "builders",
        f"layers/{layer}",
        "layers",
        "generations",
        "plan",
        "cache.json",
    ]
    choices += [str(path.relative_to(root)) for path in files]
    name = draw.choice(choices)
    path = root / name
    path.parent.mkdir(parents=True, exist_ok=True)
    if os.path.lexists(path):
        path.rename(root.parent / f"aside-{draw.randrange(1 << 30)}")
    target = draw.choice((outside, outside / "deep", outside / "thesis.txt", path, root, Path("/nowhere")))
    path.symlink_to(target)
    for loop in range(2 if not (root / "layers").is_symlink() else 0):
        with suppress(OSError):
            (root / "layers" / f"loop{loop}").symlink_to(root)
    return f"{name} -> {target.name}"


def _special(draw: random.Random, root: Path, outside: Path) -> str:
    """Something that is not a file where a file should be."""
    names = [Path("cache.json"), newest(root).relative_to(root), _plans(root)[0].relative_to(root)]
    names += [chunks(root)[0].relative_to(root), _recipes(root)[0].relative_to(root)]
    path = root / draw.choice(names)
    path.unlink()
    kind = draw.choice(("fifo", "directory", "zero", "full", "socket", "tty"))
    if kind == "fifo":
        os.mkfifo(path)
    elif kind == "directory":
        path.mkdir()
    elif kind == "socket":
        here = os.getcwd()
        os.chdir(path.parent)  # the address of a socket is short
        try:
            with socket.socket(socket.AF_UNIX) as listening:
                listening.bind(path.name)
        finally:
            os.chdir(here)
    else:
        path.symlink_to(f"/dev/{kind}")
    return f"{path.relative_to(root)} is a {kind}"


ODD_JSON: dict[str, bytes] = {
    "deep": b"[" * 100_000,
    "deep-object": b'{"a":' * 100_000,
    "huge-int": b'{"format_version":' + b"9" * 100_000 + b"}",
    "negative": b'{"format_version":-1}',
    "float": b'{"format_version":1.5}',
    "nan": b'{"format_version":NaN}',
    "null": b"null",
    "text": b'"cache"',
    "not-utf8": b'{"format_version":1,"cache_id":"\xff\xfe","base":"raw"}',
    "surrogate": b'{"format_version":1,"cache_id":"\\ud800","base":"raw"}',
    "twice": b'{"format_version":1,"format_version":2,"cache_id":"x","base":"raw"}',
    "spaces": b" " * 3_000_000,
    "zeros": bytes(100_000),
}


def _odd_json(draw: random.Random, root: Path, outside: Path) -> str:
    name = draw.choice(sorted(ODD_JSON))
    text = ODD_JSON[name]
    if draw.random() < 0.5:
        path = draw.choice([root / "cache.json", *root.glob("recipes/*.json")])
        path.write_bytes(text)
        return f"{path.name} is {name}"
    parts = Parts.of(newest(root).read_bytes())
    where = draw.choice(("cache", "recipes"))
    loose = text.decode("utf-8", "replace")
    parts.metadata[where] = loose if where == "cache" else {parts.metadata["layers"][0]: loose}
    newest(root).write_bytes(parts.sealed())
    return f"the generation's {where} is {name}"


def _header(draw: random.Random, root: Path, outside: Path) -> str:
    """A header that lies about sizes, or is itself a load."""
    path = draw.choice([newest(root), _plans(root)[0], chunks(root)[0]])
    kind = draw.choice(("long", "many", "overlap", "beyond", "negative", "deep", "huge-shape"))
    data = bytes(4096)
    if kind == "long":
        path.write_bytes((99_999_992).to_bytes(8, "little") + b"{}" + b" " * 5000)
        return f"{path.parent.name}: a header of 100 MB that is not there"
    entries: dict[str, Any] = {"__metadata__": {"forebay": '{"format_version":1,"type":"generation"}'}}
    if kind == "many":
        entries |= {f"t{n}": {"dtype": "U8", "shape": [0], "data_offsets": [0, 0]} for n in range(300_000)}
    elif kind == "overlap":
        entries |= {name: {"dtype": "U8", "shape": [4096], "data_offsets": [0, 4096]} for name in "ab"}
    elif kind == "beyond":
        entries["a"] = {"dtype": "U8", "shape": [2**40], "data_offsets": [0, 2**40]}
    elif kind == "negative":
        entries["a"] = {"dtype": "U8", "shape": [-1, -4096], "data_offsets": [0, 4096]}
    elif kind == "huge-shape":
        entries["a"] = {"dtype": "U8", "shape": [2**32, 2**32, 0], "data_offsets": [0, 0]}
    text = json.dumps(entries).encode()
    if kind == "deep":
        text = b'{"__metadata__":{"forebay":"{}"},"a":' + b"[" * 50_000
    padded = -(-(8 + len(text)) // 4096) * 4096 - 8
    path.write_bytes(padded.to_bytes(8, "little") + text.ljust(padded) + data)
    return f"{path.parent.name}: header {kind}"


@cache
def _gibibyte() -> bytes:
    """A frame that unpacks to a gibibyte of zeros."""
    squeezer = zstandard.ZstdCompressor(level=1).compressobj(size=1 << 30)
    zeros = bytes(1 << 24)
    return b"".join(squeezer.compress(zeros) for _ in range(64)) + squeezer.flush()


def _bomb(draw: random.Random, root: Path, outside: Path) -> str:
    """Compressed blocks that unpack to gigabytes, listed with right digests."""
    compressed = []
    for path in chunks(root):
        parts = Parts.of(path.read_bytes())
        names = [
            each["name"] for each in parts.metadata["columns"] if each.get("codec") == "zstd" and each.get("ragged")
        ]
        compressed += [(path, name) for name in names]
    if not compressed:
        return _header(draw, root, outside)
    path, name = draw.choice(compressed)
    size, block, is_first = draw.choice((1 << 30, 3 << 30, 1 << 34)), _gibibyte(), draw.random() < 0.5

    def change(draft: Draft) -> None:
        rows, count = draft.metadata["rows"], len(draft.numbers(f"{name}.blocks"))
        draft.tensors[name] = ("U8", [len(block)], block)
        draft.put(f"{name}.offsets", np.array([0, *[size] * rows] if is_first else [*[0] * rows, size], np.uint64))
        draft.put(f"{name}.blocks", np.array([0, *[len(block)] * (count - 1)], np.uint64))

    forge(root, change, *_place(path))
    return f"column {name} of {path.name} unpacks to {size >> 30} GiB"


def _deep_folders(draw: random.Random, root: Path, outside: Path) -> str:
    """Folders in folders, more of them than a recursion goes down."""
    here = os.open(root / draw.choice(("layers", "generations", ".")), os.O_RDONLY)
    for _ in range(1100):
        os.mkdir("d", dir_fd=here)
        below = os.open("d", os.O_RDONLY, dir_fd=here)
        os.close(here)
        here = below
    os.close(
        os.open("000000.safetensors", os.O_CREAT | os.O_WRONLY, dir_fd=here)
    )  # a bucket knows folders by their files
    os.close(here)
    return "folders 1,100 deep"


def _escapes(draw: random.Random, root: Path, outside: Path) -> str:
    """Text for a terminal, where names and versions are shown."""
    escape = draw.choice(("\x1b[31mRED\x1b[0m", "\x1b]0;title\x07", "\x9b31m", "a\rb", "‮abc"))
    parts = Parts.of(newest(root).read_bytes())
    parts.metadata["versions"] = [{"forebay": escape, escape: "1"}]
    newest(root).write_bytes(parts.sealed())
    plan = Parts.of(_plans(root)[0].read_bytes())
    plan.metadata["source"] = {"kind": escape, "root": escape}
    write_plan(root, _plans(root)[0], plan)
    layer = chunks(root)[0].parent.name
    (root / "claims" / layer).mkdir(parents=True, exist_ok=True)
    (root / "claims" / layer / "000000.json").write_text(json.dumps({"owner": escape, "host": escape, "pid": 1}))
    (root / "builders").mkdir(exist_ok=True)
    beat = {"beat": 1, "host": escape, "pid": 1, "layer": escape, "versions": {"numpy": escape, escape: "1"}}
    (root / "builders" / "0123456789ab-7-1.json").write_text(json.dumps(beat))
    return f"escapes {escape!r}"


def _source_kinds(draw: random.Random, root: Path, outside: Path) -> str:
    """A plan whose source is of another kind, or of one that does not exist, and names what is not the user's."""
    kind = draw.choice(("hub", "jsonl", "images", "parquet", "lines", "files", "text", "function", "iterable", "evil"))
    description = draw.choice(
        (
            {},
            {"root": str(outside), "patterns": ["**/*"]},
            {"root": 7},
            {"name": "../x", "endpoint": doorbell().address},
            {"name": "org/set", "split": "train", "text": "text", "revision": "a" * 40, "endpoint": doorbell().address},
        )
    )
    path = _plans(root)[-1]
    parts = Parts.of(path.read_bytes())
    parts.metadata["source"] = {"kind": kind, **description}
    write_plan(root, path, parts)
    return f"source of kind {kind} {description}"


def write_plan(root: Path, path: Path, parts: Parts) -> None:
    """A segment of the plan, and the newest generation with its digest."""
    content = parts.sealed()
    path.write_bytes(content)
    generation = Parts.of(newest(root).read_bytes())
    with suppress(ForebayError):  # one that cannot be decoded is rejected whatever its digest is
        generation.metadata["plan"][int(path.stem)] = decode_segment(memoryview(content), "", "").digest
    newest(root).write_bytes(generation.sealed())


def _buckets(draw: random.Random, root: Path, outside: Path) -> str:
    """A plan whose source is in a bucket, or whose files become URLs where they are joined to a root of this disk."""
    path = _plans(root)[-1]
    parts = Parts.of(path.read_bytes())
    kinds = (parts.metadata["source"]["kind"], "jsonl", "lines", "files", "text", "parquet", "images", "image_manifest")
    where = draw.choice(
        ("s3://evil/x", "S3://evil", "s3:/evil", "gs://evil", "az://evil", "memory://x", "ftp://x", ".", "")
    )
    name = draw.choice(("s3://evil/a.jsonl", "s3:/evil/a.jsonl", "../s3:/evil/a.jsonl", "a.jsonl", ""))
    source = {"kind": draw.choice(kinds), "root": where, "patterns": [name], "manifest": name}
    parts.metadata["source"] |= source
    paths = [name.encode()] + [f"{name}{number}".encode() for number in range(1, _count(parts.tensors["file_size"][1]))]
    ends = [sum(map(len, paths[:at])) for at in range(len(paths) + 1)]
    parts.tensors["file_path"] = ("U8", [ends[-1]], b"".join(paths))
    parts.tensors["file_path_offsets"] = ("U64", [len(ends)], b"".join(end.to_bytes(8, "little") for end in ends))
    write_plan(root, path, parts)
    chunks(root)[0].unlink()  # so that somebody wants to read the source
    return f"source {source}"


# Each takes for ever, grows without end, or looks for Python.
TEMPLATES = (
    "{% for a in range(99999) %}{% for b in range(99999) %}{% endfor %}{% endfor %}",
    "{% set ns = namespace(s='x' * 999) %}{% for a in range(60) %}{% set ns.s = ns.s ~ ns.s %}{% endfor %}{{ ns.s }}",
    "{% set ns = namespace(s=[1]) %}{% for a in range(60) %}{% set ns.s = ns.s + ns.s %}{% endfor %}{{ ns.s }}",
    "{% macro again(n) %}{{ again(n + 1) }}{% endmacro %}{{ again(0) }}",
    "{{ 'x' * (1 << 40) }}",
    "{{ 9 ** 9 ** 9 }}",
    "{{ '%0999999999d' % 1 }}",
    "{{ '{:>999999999}'.format(1) }}",
    "{{ 'x'.ljust(999999999) }}",
    "{{ 'x' | center(999999999) }}",
    "{{ messages | tojson(indent=999999999) }}",
    "{{ ('1' * 99999) | int }}",
    "{{ lipsum(n=99999999) }}",
    "{{ strftime_now('%999999999Y') }}",
    "{{ ''.__class__.__mro__[1].__subclasses__() }}",
    "{{ messages.__class__.__init__.__globals__ }}",
    "{{ cycler.__init__.__globals__.os.system('touch /tmp/pwned') }}",
    "{{ self._TemplateReference__context }}",
    "{% include '/etc/passwd' %}",
    "{% import 'os' as os %}",
    "{{ messages.append(messages) }}{{ messages }}",
    "{{ 'a,' * 999999 | replace(',', 'x' * 99999) }}",
    "{{ raise_exception('\x1b[31m' * 99999) }}",
    "\x1b]0;title\x07{{ messages }}",
    "{% for a in messages recursive %}{{ loop(messages) }}{% endfor %}",
    "{{ messages | map('string') | join('x' * 9999999) }}",
    "{{ (messages | list) * 99999999 }}",
    "{% set x = messages | map('tojson') | map('upper') | map('tojson') | list %}{{ x * 9999 }}",
    "{{ [messages] | sum(start=[]) }}",
    "{{ 1 / 0 }}",
    "{% for",
)


def _templates(draw: random.Random, root: Path, outside: Path) -> str:
    """A chat template of an attacker, in the constants that a recipe and a generation are right about."""
    text = draw.choice(TEMPLATES)
    path = next(root.glob("layers/*/constants.safetensors"), None)
    parts = None if path is None else Parts.of(path.read_bytes())
    if path is None or parts is None or "template" not in parts.tensors:
        return "no layer has a template"
    content = text.encode()
    parts.tensors["template"] = ("U8", [len(content)], content)
    generation = _write_constants(root, path, parts)
    layer = path.parent.name.partition(".")[0]
    recipe = root / f"recipes/{layer}.json"
    document = json.loads(recipe.read_bytes())
    tokens = parts.tensors["special_tokens"][2]
    document["dependencies"]["chat template"] = hashlib.sha256(content + b"\0" + tokens).hexdigest()
    fields = {name: value for name, value in document["fields"].items() if name not in ("tokenizer", "template")}
    identity = {"kind": document["kind"], "revision": document["revision"], "fields": fields}
    known = canonical({**identity, "dependencies": document["dependencies"]})
    document["fingerprint"] = hashlib.sha256(known.encode()).hexdigest()
    recipe.write_text(json.dumps(document))
    path.parent.rename(path.parent.with_name(f"{layer}.{document['fingerprint'][:16]}"))
    generation.metadata["recipes"][layer] = json.dumps(document)
    newest(root).write_bytes(generation.sealed())
    chunks(root)[0].unlink()  # so that somebody wants to render
    return f"the template is {text[:70]!r}"


def _models(draw: random.Random, root: Path, outside: Path) -> str:
    """A recipe that names a tokenizer or a model of a hub, or of this disk, and has lost the file it had."""
    name = draw.choice(
        ("evil/probe", "../../etc/passwd", "/etc/passwd", "/dev/zero", str(outside / "thesis.txt"), "x" * 9999)
    )
    path = next(root.glob("recipes/*.json"))
    document = json.loads(path.read_bytes())
    fields = document.get("fields", document)
    where = draw.choice(("tokenizer", "model", "tags")) if "tokenizer" not in fields else "tokenizer"
    fields[where] = name
    path.write_text(json.dumps(document))
    if draw.random() < 0.5:
        for generation in (root / "generations").iterdir():
            generation.unlink()
    else:
        parts = Parts.of(newest(root).read_bytes())
        parts.metadata["recipes"][path.stem] = json.dumps(document)
        newest(root).write_bytes(parts.sealed())
    for constants in root.glob(f"layers/{path.stem}.*/constants.safetensors"):
        constants.unlink()
    return f"the recipe's {where} is {name[:40]!r}"


CRAFTED: dict[str, Craft] = {
    "documents": _fuzz_document,
    "generation": _fuzz_generation,
    "plan": _fuzz_plan,
    "constants": _fuzz_constants,
    "chunk": _fuzz_chunk,
    "values": _fuzz_values,
    "claim": _fuzz_claim,
    "heartbeat": _fuzz_heartbeat,
    "names": _names,
    "links": _links,
    "special": _special,
    "odd-json": _odd_json,
    "header": _header,
    "bomb": _bomb,
    "deep-folders": _deep_folders,
    "escapes": _escapes,
    "source": _source_kinds,
    "models": _models,
    "buckets": _buckets,
    "templates": _templates,
}


def craft(name: str, draw: random.Random, root: Path, outside: Path) -> str:
    """Turn a cache into a hostile one; what was done."""
    return f"{name}: {CRAFTED[name](draw, root, outside)}"
