"""Import a `cache.pt` of the TinyFlux document: a base layer of row numbers, then a layer for each of its parts.

    {"name": str,
     "encodings": {"latents": [N, 16, 64, 64], "t5_embeds": [N, 128, 768], "clip_pooled": [N, 768]},    optional
     "lune": {"features": [N, 10, 1280], "t_buckets": [10]},                                            optional
     "sol": {"stats": [N, 10, 4], "spatial": [N, 10, 8, 8], "t_buckets": [10]}}                         optional

Rows with NaN, infinity, or only zeros (which the document's builder leaves where its hook did not fire) are absent, and
listed as failures. Other values are copied bit for bit.

The file is a pickle. Only tensors and plain containers are unpickled (`weights_only`), and tensors are mapped. A few
bytes of pickle can still expand to terabytes or years of work, so entries, index and tensors are first compared with
the size of the file.
"""

import os
import pickle
import pickletools
import warnings
import zipfile
from collections.abc import Iterable, Iterator, Mapping
from dataclasses import dataclass
from functools import lru_cache
from typing import Any, ClassVar

import msgspec
import numpy as np
import torch
from torch import Tensor

from forebay import api
from forebay.cache.reports import ImportReport
from forebay.columns import Array, Column, Columns, Dtype
from forebay.errors import SourceInvalid, SourceNotFound
from forebay.raw import RawRecipe
from forebay.recipe import RecipeHooks, Rows
from forebay.source import Failure, Part, PartDigest, Sample, Source, SourceFile, Unit
from forebay.store.base import Store
from forebay.teachers import teacher_samples
from forebay.teachers.protocol import TimeDirection, file_hash
from forebay.teachers.recipe import T_BUCKETS
from forebay.torch.batches import to_array

PARTS: dict[str, tuple[str, ...]] = {
    "encodings": ("latents", "t5_embeds", "clip_pooled"),
    "lune": ("features",),
    "sol": ("stats", "spatial"),
}
# Layer -> the part it comes from, and its columns with their tensors.
LAYERS: dict[str, tuple[str, dict[str, str]]] = {
    "latents": ("encodings", {"latents": "latents"}),
    "t5": ("encodings", {"t5_states": "t5_embeds"}),
    "clip": ("encodings", {"clip_pooled": "clip_pooled"}),
    "lune": ("lune", {"lune": "features"}),
    "sol": ("sol", {"sol_stats": "stats", "sol_spatial": "spatial"}),
}
BUCKETS = "t_buckets"
_TIMED = ("lune", "sol")  # parts whose second axis is the bucket
CHUNK_ROWS = 500
_LARGEST_INDEX = 1 << 20  # bytes of pickle; a cache has some 2,000
_CONTAINERS = frozenset({"TUPLE", "TUPLE1", "TUPLE2", "TUPLE3", "EMPTY_TUPLE", "LIST", "EMPTY_LIST", "FROZENSET"})
_DTYPES: dict[torch.dtype, Dtype] = {
    torch.float16: "float16", torch.bfloat16: "bfloat16", torch.float32: "float32", torch.float64: "float64",
}  # fmt: skip
# What torch.load raises for a damaged or foreign pickle.
_UNREADABLE = (ArithmeticError, AttributeError, EOFError, LookupError, RuntimeError, TypeError, ValueError,
               pickle.UnpicklingError)  # fmt: skip
Parts = Mapping[str, Mapping[str, Tensor]]


def read_parts(path: str) -> tuple[str, Parts]:
    """Return the name of a data set and its tensors by part, (rows, …) each, checked against the format."""
    content = _loaded(path)
    unknown = sorted(map(str, content.keys() - {"name", *PARTS}))
    if unknown:
        raise _invalid(path, f"it has the unknown entries {unknown}; known are name, {', '.join(PARTS)}")
    parts = {part: _checked(path, part, content[part]) for part in PARTS if content.get(part) is not None}
    rows = {f"{part}.{name}": len(parts[part][name]) for part in parts for name in PARTS[part]}
    if not any(rows.values()):
        raise _invalid(path, f"it has no rows of any of {', '.join(PARTS)}")
    if len(set(rows.values())) > 1:
        counts = ", ".join(f"{name} {count:,}" for name, count in rows.items())
        raise _invalid(path, f"its parts have different numbers of rows: {counts}")
    return str(content.get("name") or os.path.basename(path).removesuffix(".pt")), parts


def _invalid(path: str, problem: str) -> SourceInvalid:
    hint = "docs/guide-teachers.md has the format; only tensors and plain containers are read"
    return SourceInvalid(f"'{path}' cannot be imported as a teacher cache: {problem}", hint=hint, path=path)


def _loaded(path: str) -> dict[str, Any]:
    _check_archive(path)
    try:
        with warnings.catch_warnings():
            warnings.simplefilter("ignore")  # of pickle protocols: what matters of them is an error
            content = torch.load(path, map_location="cpu", mmap=True, weights_only=True)
    except _UNREADABLE as error:  # torch's message advises to open the file anyway
        raise _invalid(path, "it holds more than tensors, or is not a file of torch.save") from error
    if not isinstance(content, dict):
        raise _invalid(path, f"it holds a {type(content).__name__}, not a dict")
    return content


def _check_archive(path: str) -> None:
    """Raise for a file that unpacks to more than its size, or takes long to unpickle, before torch reads it."""
    if not zipfile.is_zipfile(path):
        raise _invalid(path, "it is not a file of torch.save; one of a torch before 1.6 can be saved again")
    with zipfile.ZipFile(path) as archive:
        entries = archive.infolist()
        stored = all(entry.compress_type == zipfile.ZIP_STORED for entry in entries)
        if not stored or sum(entry.file_size for entry in entries) > os.path.getsize(path):
            raise _invalid(path, "its entries are compressed or overlap, which torch.save never writes")
        for entry in entries:
            if entry.filename.endswith(".pkl"):
                if entry.file_size > _LARGEST_INDEX:
                    raise _invalid(path, f"its index is longer than {_LARGEST_INDEX:,} bytes")
                _check_index(path, archive.read(entry))


def _check_index(path: str, pickle: bytes) -> None:
    """Raise for a pickle that reuses a list or tuple: a few nested levels of that would take years to process."""
    memo: dict[Any, str] = {}  # number in the memo -> the opcode of its value
    last = ""
    for code, argument, _ in pickletools.genops(pickle):
        if "PUT" in code.name or code.name == "MEMOIZE":
            memo[len(memo) if argument is None else argument] = last
        elif ("GET" in code.name and memo.get(argument) in _CONTAINERS) or code.name == "DUP":
            raise _invalid(path, "it uses a list or tuple more than once, which no cache does")
        last = code.name


def _checked(path: str, part: str, tensors: Any) -> dict[str, Tensor]:
    """Return a part; raise unless it has exactly its tensors, with matching shapes."""
    names = (*([BUCKETS] if part in _TIMED else []), *PARTS[part])
    entries = sorted(map(str, tensors)) if isinstance(tensors, dict) else type(tensors).__name__
    if entries != sorted(names):
        raise _invalid(path, f"'{part}' holds {entries}; {sorted(names)} are expected")
    for name in names:
        value = tensors[name]
        is_dense = isinstance(value, Tensor) and value.layout == torch.strided and value.dtype in _DTYPES
        if not is_dense or value.dim() == 0 or (len(value) and not value.numel()):
            raise _invalid(path, f"'{part}.{name}' is not a dense tensor of floats with rows")
        if value.nbytes > value.untyped_storage().nbytes():
            raise _invalid(path, f"'{part}.{name}' declares more values than the file holds")
        if name in PARTS[part] and part in _TIMED and value.shape[1:2] != tensors[BUCKETS].shape:
            buckets = len(tensors[BUCKETS])
            raise _invalid(
                path, f"'{part}.{name}' is {list(value.shape)}; its second axis is not the {buckets} buckets"
            )
    if part in _TIMED:
        t = tensors[BUCKETS]
        if t.dim() != 1 or not len(t) or not ((t >= 0) & (t <= 1)).all() or not (t.diff() > 0).all():
            raise _invalid(path, f"'{part}.{BUCKETS}' does not rise from bucket to bucket, between 0 and 1")
    return {name: tensors[name] for name in names}


def _exact_buckets(written: Tensor) -> tuple[float, ...]:
    """Return buckets; those of the default grid exactly, not as rounded in the file."""
    usual = torch.tensor(teacher_samples.BUCKETS, dtype=torch.float64)
    step = torch.finfo(written.dtype).eps
    if written.shape == usual.shape and ((written.double() - usual).abs() <= step * usual).all():
        return teacher_samples.BUCKETS
    return tuple(written.double().tolist())


@dataclass(frozen=True, slots=True)
class OldCacheSource(Source):
    """The row numbers of a `cache.pt`; `ImportedRecipe` reads the tensors."""

    kind: ClassVar[str] = "old-cache"
    unit: ClassVar[Unit] = "samples"
    files_grow: ClassVar[bool] = False  # a file with more rows is another file

    path: str

    def files(self) -> list[SourceFile]:
        return [self.look(self.path)]

    def look(self, path: str) -> SourceFile:
        status = os.stat(self.path)
        return SourceFile(path=os.path.basename(self.path), size=status.st_size, mtime_ns=status.st_mtime_ns)

    def weight(self, file: SourceFile) -> int:
        _, parts = _opened(self.path, file)
        return len(next(tensors[PARTS[part][0]] for part, tensors in parts.items()))

    def cuts(self, file: SourceFile, start: int, first: int, every: int) -> Iterator[int]:
        rows = self.weight(file)
        if start < rows:
            yield from range(start + first, rows, every)
            yield rows

    def read(self, part: Part, *, digest: PartDigest | None = None, preview: bool = False) -> Iterable[Sample]:
        return (Sample(str(row), str(row).encode()) for row in range(part.start, part.stop))

    def digest(self, file: SourceFile, start: int, stop: int) -> int:
        """Return a digest of the row numbers only: the tensors' hash is a dependency of the layers."""
        return start << 32 | stop


class ImportedRecipe(RecipeHooks, msgspec.Struct, frozen=True, kw_only=True, forbid_unknown_fields=True):
    """Copies tensors of a `cache.pt` to columns, bit for bit. `time_direction` is the end of t that is noise."""

    kind: ClassVar[str] = "imported"
    revision: ClassVar[int] = 1
    reads: ClassVar[tuple[str, ...]] = ("id",)
    located: ClassVar[tuple[str, ...]] = ("path",)

    path: str
    part: str
    tensors: dict[str, str]  # column -> tensor
    declared: tuple[Column, ...]
    buckets: tuple[float, ...] = ()  # empty without timesteps
    time_direction: TimeDirection | None = None

    def columns(self) -> tuple[Column, ...]:
        return self.declared

    def constants(self) -> dict[str, Array]:
        return {T_BUCKETS: np.array(self.buckets, np.float64)} if self.buckets else {}

    def dependencies(self) -> dict[str, str]:
        return {"old cache": file_hash(self.path)}

    def make(self, rows: Columns) -> Rows:
        ids = [rows["id"][row].tobytes().decode() for row in range(len(rows["id"]))]
        numbers = torch.tensor([int(name) for name in ids], dtype=torch.int64)
        _, parts = _opened(self.path, OldCacheSource(self.path).look(self.path))
        columns = {column: parts[self.part][tensor][numbers] for column, tensor in self.tensors.items()}
        failures: dict[int, Failure] = {}  # one per row, even if several of its tensors are bad
        for column, values in columns.items():
            for row, reason in _problems(values, bool(self.buckets)).items():
                detail = f"'{self.part}.{self.tensors[column]}' of row {ids[row]}"
                failures.setdefault(row, Failure(ids[row], reason, detail))
        present = np.ones(len(ids), np.bool_)
        present[list(failures)] = False
        arrays = {column: to_array(values) for column, values in columns.items()}
        return Rows(arrays, tuple(failures.values()), present=present)


def _problems(values: Tensor, timed: bool) -> dict[int, str]:
    """Return the rows that cannot be teacher outputs -> reason; a timed row must not be zero at any bucket."""
    flat = values.reshape(len(values), values.shape[1] if timed else 1, -1)
    broken = (~flat.isfinite()).flatten(1).any(dim=1)
    empty = (flat == 0).all(dim=2).any(dim=1) & ~broken
    reasons = {row: "not-finite" for row in broken.nonzero().flatten().tolist()}
    return reasons | {row: "all-zero" for row in empty.nonzero().flatten().tolist()}


def _layer_recipe(path: str, layer: str, parts: Parts, direction: TimeDirection) -> ImportedRecipe:
    part, tensors = LAYERS[layer]
    columns = tuple(
        Column(name=column, dtype=_DTYPES[values.dtype], shape=tuple(values.shape[1:]))
        for column, values in ((column, parts[part][name]) for column, name in tensors.items())
    )
    recipe = ImportedRecipe(path=path, part=part, tensors=tensors, declared=columns)
    if part not in _TIMED:
        return recipe
    return msgspec.structs.replace(recipe, buckets=_exact_buckets(parts[part][BUCKETS]), time_direction=direction)


@lru_cache(maxsize=1)
def _opened(path: str, file: SourceFile) -> tuple[str, Parts]:
    """Return the parts of a file; its tensors are mapped, so keeping them takes no memory."""
    return read_parts(path)


def import_pt_cache(
    old: str | os.PathLike[str], root: str | os.PathLike[str] | Store, *, time_direction: TimeDirection = "t0_noise"
) -> ImportReport:
    """Import a `cache.pt` into a cache. Chunks that already exist are not built again.

    `time_direction` is the end of its t that is noise; the document's t = 0 is noise.
    """
    if not os.path.isfile(old):
        raise SourceNotFound(f"no source at '{os.fspath(old)}': there is no such file", hint="check the path")
    source = OldCacheSource(os.path.abspath(old))
    _, parts = _opened(source.path, source.look(source.path))  # first: an unreadable file leaves no cache behind
    base = api.build(root, source, RawRecipe(chunk_rows=CHUNK_ROWS), workers=0)
    layers = {
        layer: api.build(root, None, _layer_recipe(source.path, layer, parts, time_direction), layer=layer, workers=0)
        for layer, (part, _) in LAYERS.items()
        if part in parts
    }
    return ImportReport(root=base.root, old=source.path, rows=api.info(root).rows, layers=layers)
