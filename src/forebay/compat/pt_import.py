"""Import a teacher cache of the old `.pt` format: a base layer of row numbers, then a layer for each of its parts.

    cache.pt ──▶ base layer: one row per sample, its number as id
             ──▶ layers latents, t5, clip, lune, sol: the teacher outputs

Rows with NaN, infinity, or only zeros (which the old builder left where its hook had not fired) are absent, and listed
as failures.
"""

import hashlib
import os
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
from forebay.compat.pt_cache import BUCKETS, OldCache, part_files, read_old_cache
from forebay.errors import SourceNotFound
from forebay.recipe import ChunkTarget, RecipeHooks, Rows
from forebay.source import Failure, Part, Sample, Source, SourceFile, Unit
from forebay.teachers.recipe import T_BUCKETS
from forebay.torch.batches import to_array

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


def import_pt_cache(old: str | os.PathLike[str], root: str | os.PathLike[str]) -> ImportReport:
    """Import a `cache.pt`, or a folder of its parts, into a cache. Chunks that already exist are not made again."""
    if not os.path.exists(old):
        raise SourceNotFound(os.fspath(old), "there is no such file or folder")
    source = OldCacheSource(os.path.abspath(old))
    recipes = source.recipes()  # first, so that an old cache that cannot be read leaves no new cache behind
    base = api.build(root, source, ImportedRows(), workers=0)
    layers = {layer: api.build(root, None, recipe, layer=layer, workers=0) for layer, recipe in recipes.items()}
    return ImportReport(root=base.root, old=source.path, rows=api.summarize(root).rows, layers=layers)
