"""Import a teacher cache of the old `.pt` format: a base layer of row numbers, then a layer for each of its parts.

    cache.pt ──▶ base layer: one row per sample, its number as id
             ──▶ layers latents, t5, clip, lune, sol: the teacher outputs

Rows with NaN, infinity, or only zeros (which the old builder left where its hook had not fired) are absent, and listed
as failures.

    {"name": str,
     "encodings": {"latents": [N, 16, 64, 64], "t5_embeds": [N, 128, 768], "clip_pooled": [N, 768]},
     "lune": {"features": [N, 10, 1280], "t_buckets": [10]},                                            optional
     "sol": {"stats": [N, 10, 4], "spatial": [N, 10, 8, 8], "t_buckets": [10]}}                         optional

They are pickles. Only tensors and plain containers are unpickled (`weights_only`), and tensors are mapped, not read. A
few bytes of pickle can still expand to terabytes or years of work, so entries, index and tensors are first compared
with the size of the file.
"""

import hashlib
import io
import json
import os
import pickletools
import re
import warnings
import zipfile
from collections.abc import Iterable, Iterator, Mapping
from dataclasses import dataclass
from functools import lru_cache
from typing import Any, ClassVar

import msgspec
import numpy as np
import torch
import xxhash
from torch import Tensor

from forebay import api
from forebay.cache.records import ImportReport
from forebay.columns import Array, Column, Columns, Dtype, Ragged
from forebay.errors import ForebayError, OldCacheInvalid, SourceNotFound
from forebay.format import layout
from forebay.recipe import ChunkTarget, RecipeHooks, Rows
from forebay.source import Failure, Part, Sample, Source, SourceFile, Unit
from forebay.store import open_store
from forebay.store.base import Missing, Store, read_document
from forebay.teachers import teacher_samples
from forebay.teachers.recipe import T_BUCKETS
from forebay.torch.batches import to_array

PARTS: dict[str, tuple[str, ...]] = {
    "encodings": ("latents", "t5_embeds", "clip_pooled"),
    "lune": ("features",),
    "sol": ("stats", "spatial"),
}
BUCKETS = "t_buckets"
_TIMED = ("lune", "sol")  # parts whose second axis is the bucket
_LARGEST_INDEX = 1 << 20  # bytes of pickle; a cache has some 2,000
_LEGACY_PICKLES = 4  # magic number, version, machine, content
_CONTAINERS = frozenset({"TUPLE", "TUPLE1", "TUPLE2", "TUPLE3", "EMPTY_TUPLE", "LIST", "EMPTY_LIST", "FROZENSET"})
_FLOATS = (torch.float16, torch.bfloat16, torch.float32, torch.float64)


@dataclass(frozen=True, slots=True, eq=False)
class OldCache:
    """The tensors of an old cache by part and name, (rows, …) each."""

    path: str
    name: str
    rows: int
    parts: Mapping[str, Mapping[str, Tensor]]

    def buckets(self, part: str) -> tuple[float, ...]:
        """Return the buckets of a part; those of the default grid exactly, not as rounded in the file."""
        written = self.parts[part][BUCKETS]
        usual = torch.tensor(teacher_samples.BUCKETS, dtype=torch.float64)
        step = torch.finfo(written.dtype).eps
        if written.shape == usual.shape and ((written.double() - usual).abs() <= step * usual).all():
            return teacher_samples.BUCKETS
        return tuple(written.double().tolist())


def read_old_cache(path: str | os.PathLike[str]) -> OldCache:
    """Open an old cache and check it against the format."""
    path = os.fspath(path)
    found = {_part(file): _loaded(file) for file in part_files(path)} if os.path.isdir(path) else _loaded(path)
    unknown = sorted(map(str, found.keys() - {"name", *PARTS}))
    if unknown:
        raise OldCacheInvalid(path, f"it has the unknown entries {unknown}; known are name, {', '.join(PARTS)}")
    parts = {part: _checked(path, part, found[part]) for part in PARTS if found.get(part) is not None}
    rows = {f"{part}.{name}": len(parts[part][name]) for part in parts for name in PARTS[part]}
    if not any(rows.values()):
        raise OldCacheInvalid(path, f"it has no rows of any of {', '.join(PARTS)}")
    if len(set(rows.values())) > 1:
        raise OldCacheInvalid(path, "its parts have different numbers of rows: " + _listed(rows))
    name = found.get("name") or os.path.basename(path.rstrip("/")).removesuffix(".pt")
    return OldCache(path, str(name), next(iter(rows.values())), parts)


def part_files(path: str) -> list[str]:
    """Return the files of an old cache: itself, or those of its parts in a folder."""
    if not os.path.isdir(path):
        return [path]
    names = [f"{part}.pt" for part in PARTS]
    found = [file for file in (os.path.join(path, name) for name in names) if os.path.exists(file)]
    if not found:
        raise OldCacheInvalid(path, f"the folder has none of {', '.join(names)}; pass the file itself")
    return found


def _part(file: str) -> str:
    return os.path.basename(file).removesuffix(".pt")


def _reason(error: Exception) -> str:
    """Return what torch found, without its advice to open the file anyway."""
    named = re.search(r"GLOBAL (\S+)", str(error))
    if named:
        return f"it names {named[1]}"
    found = re.search(r"WeightsUnpickler error:\s*(.+)", str(error))
    return found[1] if found else str(error).strip().partition("\n")[0][:200] or type(error).__name__


def _loaded(path: str) -> dict[str, Any]:
    try:
        _check_archive(path)
        with warnings.catch_warnings():
            warnings.simplefilter("ignore")  # of pickle protocols: what matters of them is an error
            # Files of very old versions of torch are not archives, and cannot be mapped.
            found = torch.load(path, map_location="cpu", mmap=zipfile.is_zipfile(path), weights_only=True)
    except FileNotFoundError as error:
        raise OldCacheInvalid(path, "there is no such file") from error
    except (OSError, MemoryError, OldCacheInvalid):
        raise
    except Exception as error:  # a damaged pickle raises errors of any type
        problem = f"it holds more than tensors, or is not a file of torch.save ({_reason(error)})"
        raise OldCacheInvalid(path, problem) from error
    if not isinstance(found, dict):
        raise OldCacheInvalid(path, f"it holds a {type(found).__name__}, not a dict")
    return found


def _check_archive(path: str) -> None:
    """Raise for a file that unpacks to more than its size, or takes long to unpickle, before torch reads it."""
    if not zipfile.is_zipfile(path):
        with open(path, "rb") as file:
            _check_index(path, io.BytesIO(file.read(_LARGEST_INDEX)), _LEGACY_PICKLES)
        return
    with zipfile.ZipFile(path) as archive:
        entries = archive.infolist()
        stored = all(entry.compress_type == zipfile.ZIP_STORED for entry in entries)
        if not stored or sum(entry.file_size for entry in entries) > os.path.getsize(path):
            raise OldCacheInvalid(path, "its entries are compressed or overlap, which torch.save never writes")
        for entry in entries:
            if entry.filename.endswith(".pkl"):
                if entry.file_size > _LARGEST_INDEX:
                    raise OldCacheInvalid(path, f"its index is longer than {_LARGEST_INDEX:,} bytes")
                _check_index(path, io.BytesIO(archive.read(entry)), 1)


def _check_index(path: str, pickles: io.BytesIO, count: int) -> None:
    """Raise for a pickle that reuses a list or tuple: a few nested levels of that would take for ever to process."""
    for _ in range(count):
        made: dict[Any, str] = {}  # number in the memo -> the opcode that made its value
        last = ""
        for code, argument, _ in pickletools.genops(pickles):
            if "PUT" in code.name or code.name == "MEMOIZE":
                made[len(made) if argument is None else argument] = last
            elif ("GET" in code.name and made.get(argument) in _CONTAINERS) or code.name == "DUP":
                raise OldCacheInvalid(path, "it uses a list or tuple more than once, which no cache does")
            last = code.name


def _checked(path: str, part: str, found: Any) -> dict[str, Tensor]:
    """Return a part; raise unless it has exactly its tensors, with matching shapes."""
    names = (*PARTS[part], *([BUCKETS] if part in _TIMED else []))
    held = sorted(map(str, found)) if isinstance(found, dict) else type(found).__name__
    if held != sorted(names):
        raise OldCacheInvalid(path, f"'{part}' holds {held}; {sorted(names)} are expected")
    for name in names:
        if not _is_plain(found[name]):
            raise OldCacheInvalid(path, f"'{part}.{name}' is not a dense tensor of floats with rows")
        if found[name].nbytes > found[name].untyped_storage().nbytes():
            raise OldCacheInvalid(path, f"'{part}.{name}' declares more values than the file holds")
    if part in _TIMED:
        _check_buckets(path, part, found)
    return {name: found[name] for name in names}


def _is_plain(value: Any) -> bool:
    if not isinstance(value, Tensor) or value.layout != torch.strided or value.dtype not in _FLOATS:
        return False
    return value.dim() > 0 and (value.numel() > 0 or len(value) == 0)


def _check_buckets(path: str, part: str, found: Mapping[str, Tensor]) -> None:
    buckets = found[BUCKETS]
    inside = (buckets >= 0) & (buckets <= 1)
    if buckets.dim() != 1 or not len(buckets) or not (buckets.diff() > 0).all() or not inside.all():
        raise OldCacheInvalid(path, f"'{part}.{BUCKETS}' does not rise from bucket to bucket, between 0 and 1")
    for name in PARTS[part]:
        if found[name].dim() < 2 or found[name].shape[1] != len(buckets):
            shape = list(found[name].shape)
            raise OldCacheInvalid(
                path, f"'{part}.{name}' is {shape}; its second axis is not the {len(buckets)} buckets"
            )


def _listed(rows: Mapping[str, int]) -> str:
    return ", ".join(f"{name} {count:,}" for name, count in rows.items())


# Layer -> the part it comes from, and its columns with their tensors.
LAYERS: dict[str, tuple[str, dict[str, str]]] = {
    "latents": ("encodings", {"latents": "latents"}),
    "t5": ("encodings", {"t5_states": "t5_embeds"}),
    "clip": ("encodings", {"clip_pooled": "clip_pooled"}),
    "lune": ("lune", {"lune": "features"}),
    "sol": ("sol", {"sol_stats": "stats", "sol_spatial": "spatial"}),
}
_DTYPES: dict[torch.dtype, Dtype] = {
    torch.float16: "float16",
    torch.bfloat16: "bfloat16",
    torch.float32: "float32",
    torch.float64: "float64",
}


@dataclass(frozen=True, slots=True)
class OldCacheSource(Source):
    """The row numbers of an old cache; `ImportedRecipe` reads their tensors."""

    kind: ClassVar[str] = "old-cache"
    unit: ClassVar[Unit] = "samples"
    files_grow: ClassVar[bool] = False  # a file with more rows is another file

    path: str

    def describe(self) -> Mapping[str, Any]:
        return {"kind": self.kind, "path": self.path}

    @classmethod
    def from_description(cls, description: Mapping[str, Any]) -> "OldCacheSource":
        return cls(description["path"])

    def files(self) -> list[SourceFile]:
        return [_look(self.path)]

    def look(self, path: str) -> SourceFile:
        return _look(self.path)

    def weight(self, file: SourceFile) -> int:
        return _opened(self.path, file).rows

    def cuts(self, file: SourceFile, start: int, first: int, every: int) -> Iterator[int]:
        rows = self.weight(file)
        if start < rows:
            yield from range(start + first, rows, every)
            yield rows

    def scanned(self, file: SourceFile) -> SourceFile:
        return file

    def read(self, part: Part) -> Iterable[Sample]:
        return (Sample(str(row), str(row).encode()) for row in range(part.start, part.stop))

    def digest(self, file: SourceFile, start: int, stop: int) -> int:
        """Return a digest of the row numbers only: the tensors' hash is a dependency of the layers."""
        value: int = xxhash.xxh3_64_intdigest(f"{start}:{stop}".encode())
        return value

    def recipes(self) -> dict[str, "ImportedRecipe"]:
        """Return layer -> recipe, for the parts that the old cache has."""
        old = _opened(self.path, _look(self.path))
        return {layer: _recipe(old, part, tensors) for layer, (part, tensors) in LAYERS.items() if part in old.parts}


class ImportedRows(RecipeHooks, msgspec.Struct, frozen=True, kw_only=True, forbid_unknown_fields=True):
    """The base of an imported cache: its row numbers as ids, `chunk_rows` in a chunk of every layer."""

    kind: ClassVar[str] = "imported-rows"
    revision: ClassVar[int] = 1
    source_settings: ClassVar[str] = ""
    sample_ids: ClassVar[str] = "id"

    chunk_rows: int = 500

    def columns(self) -> tuple[Column, ...]:
        return (Column(name="id", dtype="uint8", ragged=True),)

    def chunk_target(self) -> ChunkTarget:
        return ChunkTarget(rows=self.chunk_rows)

    def make(self, samples: Iterable[Sample]) -> Rows:
        return Rows({"id": Ragged.of_bytes([sample.data for sample in samples])})


class ImportedRecipe(RecipeHooks, msgspec.Struct, frozen=True, kw_only=True, forbid_unknown_fields=True):
    """Copies tensors of an old cache to columns, bit for bit."""

    kind: ClassVar[str] = "imported"
    revision: ClassVar[int] = 1
    reads: ClassVar[tuple[str, ...]] = ("id",)
    located: ClassVar[tuple[str, ...]] = ("path",)

    path: str
    part: str
    tensors: dict[str, str]  # column -> tensor
    declared: tuple[Column, ...]
    buckets: tuple[float, ...] = ()  # empty without timesteps

    @property
    def default_layer(self) -> str:
        return next(layer for layer, (_, tensors) in LAYERS.items() if tensors == self.tensors)

    def columns(self) -> tuple[Column, ...]:
        return self.declared

    def constants(self) -> dict[str, Array]:
        return {T_BUCKETS: np.array(self.buckets, np.float64)} if self.buckets else {}

    def dependencies(self) -> dict[str, str]:
        return {"old cache": _sha256(self.path, _look(self.path))}

    def versions(self) -> dict[str, str]:
        return {"torch": str(torch.__version__)}

    def make(self, rows: Columns) -> Rows:
        names = rows["id"]
        assert isinstance(names, Ragged)
        ids = [names[row].tobytes().decode() for row in range(len(names))]
        numbers = torch.tensor([int(name) for name in ids], dtype=torch.int64)
        held = _opened(self.path, _look(self.path)).parts[self.part]
        taken = {column: held[tensor][numbers] for column, tensor in self.tensors.items()}
        failures: dict[int, Failure] = {}  # one per row, even if several of its tensors are bad
        for column, values in taken.items():
            for row, reason in _problems(values, bool(self.buckets)).items():
                detail = f"'{self.part}.{self.tensors[column]}' of row {ids[row]}"
                failures.setdefault(row, Failure(ids[row], reason, detail))
        present = np.ones(len(ids), np.bool_)
        present[list(failures)] = False
        made = {column: to_array(values) for column, values in taken.items()}
        return Rows(made, tuple(failures.values()), present=present)


def _recipe(old: OldCache, part: str, tensors: Mapping[str, str]) -> ImportedRecipe:
    columns = [
        Column(name=column, dtype=_DTYPES[tensor.dtype], shape=tuple(tensor.shape[1:]))
        for column, tensor in ((column, old.parts[part][name]) for column, name in tensors.items())
    ]
    return ImportedRecipe(
        path=old.path,
        part=part,
        tensors=dict(tensors),
        declared=tuple(columns),
        buckets=old.buckets(part) if BUCKETS in old.parts[part] else (),
    )


def _problems(values: Tensor, timed: bool) -> dict[int, str]:
    """Return the rows that cannot be teacher outputs -> reason; a timed row must not be zero at any bucket."""
    flat = values.reshape(len(values), values.shape[1] if timed else 1, -1)
    broken = (~flat.isfinite()).flatten(1).any(dim=1)
    empty = (flat == 0).all(dim=2).any(dim=1) & ~broken
    reasons = {row: "not-finite" for row in broken.nonzero().flatten().tolist()}
    return reasons | {row: "all-zero" for row in empty.nonzero().flatten().tolist()}


def _look(path: str) -> SourceFile:
    """Return the file, or the files of the folder as one."""
    found = [os.stat(file) for file in part_files(path)]
    return SourceFile(
        path=os.path.basename(path),
        size=sum(status.st_size for status in found),
        mtime_ns=max(status.st_mtime_ns for status in found),
        etag="-".join(f"{status.st_size}.{status.st_mtime_ns}" for status in found),
    )


@lru_cache(maxsize=1)
def _opened(path: str, file: SourceFile) -> OldCache:
    """Return an open old cache; its tensors are mapped, so keeping it open takes no memory."""
    return read_old_cache(path)


@lru_cache(maxsize=1)
def _sha256(path: str, file: SourceFile) -> str:
    digest = hashlib.sha256()
    for part in part_files(path):
        with open(part, "rb") as stream:
            digest.update(hashlib.file_digest(stream, "sha256").digest())
    return digest.hexdigest()


def store_name(store: Store, name: str) -> None:
    """Keep the name of a data set beside its cache."""
    store.replace(layout.DATASET, [json.dumps({"name": name}).encode()], durable=False)


def stored_name(store: Store) -> str:
    """Return the name of a data set; empty if none was kept, or it cannot be read."""
    try:
        found = json.loads(read_document(store, layout.DATASET))
    except (Missing, OSError, ValueError, ForebayError):
        return ""
    name = found.get("name") if isinstance(found, dict) else None
    return name if isinstance(name, str) else ""


def import_pt_cache(old: str | os.PathLike[str], root: str | os.PathLike[str]) -> ImportReport:
    """Import a `cache.pt`, or a folder of its parts, into a cache. Chunks that already exist are not made again."""
    if not os.path.exists(old):
        raise SourceNotFound(os.fspath(old), "there is no such file or folder")
    source = OldCacheSource(os.path.abspath(old))
    recipes = source.recipes()  # first, so that an old cache that cannot be read leaves no new cache behind
    base = api.build(root, source, ImportedRows(), workers=0)
    layers = {layer: api.build(root, None, recipe, layer=layer, workers=0) for layer, recipe in recipes.items()}
    store_name(open_store(root), _opened(source.path, _look(source.path)).name)
    return ImportReport(root=base.root, old=source.path, rows=api.summarize(root).rows, layers=layers)
