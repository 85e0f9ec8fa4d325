"""A generation as bytes: which chunks are published, with the facts to check them by.

Per layer and chunk, in order of chunks: rows, sizes, digests and statistics, as arrays of a sealed file; beside them
the text of `cache.json` and of every recipe, and the digests of the plan. Opening a cache reads this one file.
"""

from collections.abc import Iterable, Mapping
from dataclasses import dataclass, replace
from typing import Any

import msgspec
import numpy as np

from forebay.columns import Array
from forebay.errors import IndexCorrupt, RecipeInvalid
from forebay.format.chunk import ChunkRecord
from forebay.format.layout import FORMAT_VERSION
from forebay.format.sealed import seal, unseal
from forebay.recipe import RecipeDocument
from forebay.store.base import Buffer

_NUMBERS = ("chunk", "revision", "rows", "samples", "failures", "size", "head_size")
_DIGESTS = {"head": 16, "sha256": 32, "content": 16, "ids": 16, "base": 16}


class CacheDocument(msgspec.Struct, frozen=True, kw_only=True, forbid_unknown_fields=True):
    """`cache.json`: written once, when a cache begins."""

    format_version: int = FORMAT_VERSION
    cache_id: str
    base: str


@dataclass(frozen=True, slots=True, eq=False)
class ChunkTable:
    """The published chunks of one layer, in order: one array per fact."""

    numbers: Mapping[str, Array]  # each (chunks,) int64
    digests: Mapping[str, Array]  # each (chunks, bytes) uint8
    statistics: Mapping[str, Array]  # each (chunks,) or (chunks, k)

    @classmethod
    def of(cls, records: Iterable[ChunkRecord]) -> "ChunkTable":
        ordered = sorted(records, key=lambda record: record.chunk)
        names = sorted({name for record in ordered for name in record.statistics})
        return cls(
            {name: np.array([getattr(r, name) for r in ordered], np.int64) for name in _NUMBERS},
            {
                name: np.frombuffer(b"".join(getattr(r, name) for r in ordered), np.uint8).reshape(-1, width)
                for name, width in _DIGESTS.items()
            },
            {name: _statistic(name, [record.statistics.get(name) for record in ordered]) for name in names},
        )

    def __len__(self) -> int:
        return len(self.chunks)

    @property
    def chunks(self) -> Array:
        return self.numbers["chunk"]

    @property
    def rows(self) -> Array:
        return self.numbers["rows"]

    def position(self, chunk: int) -> int | None:
        """Where a chunk stands in the table, None where it is not published."""
        at = int(np.searchsorted(self.chunks, chunk))
        return at if at < len(self) and self.chunks[at] == chunk else None

    def record(self, position: int) -> ChunkRecord:
        facts: dict[str, Any] = {name: int(values[position]) for name, values in self.numbers.items()}
        facts |= {name: values[position].tobytes() for name, values in self.digests.items()}
        facts["statistics"] = {name: values[position].tolist() for name, values in self.statistics.items()}
        return ChunkRecord(**facts)

    def records(self) -> list[ChunkRecord]:
        return [self.record(position) for position in range(len(self))]

    def with_records(self, records: Iterable[ChunkRecord]) -> "ChunkTable":
        """The table with further chunks, each taking the place of an older record of it."""
        fresh = ChunkTable.of(records)
        kept = np.flatnonzero(~np.isin(self.chunks, fresh.chunks))
        order = np.argsort(np.concatenate([self.chunks[kept], fresh.chunks]), kind="stable")

        def merged(old: Array, new: Array) -> Array:
            return np.concatenate([old[kept], new])[order]

        names = sorted({*self.statistics, *fresh.statistics})
        return ChunkTable(
            {name: merged(self.numbers[name], fresh.numbers[name]) for name in _NUMBERS},
            {name: merged(self.digests[name], fresh.digests[name]) for name in _DIGESTS},
            {name: merged(*_alike(name, self, fresh)) for name in names},
        )

    def without(self, chunks: Array) -> "ChunkTable":
        """The table without some chunks."""
        kept = ~np.isin(self.chunks, chunks)
        return ChunkTable(
            {name: values[kept] for name, values in self.numbers.items()},
            {name: values[kept] for name, values in self.digests.items()},
            {name: values[kept] for name, values in self.statistics.items()},
        )

    def totals(self) -> dict[str, int | float | list[int]]:
        return {name: values.sum(axis=0).tolist() for name, values in self.statistics.items()}


@dataclass(frozen=True, slots=True, eq=False)
class Generation:
    """All that was published up to a moment."""

    number: int
    cache: str  # the text of cache.json
    recipes: Mapping[str, str]  # layer -> the text of recipe.json
    constants: Mapping[str, str]  # layer -> SHA-256 of constants.safetensors
    plan: tuple[str, ...]  # SHA-256 of every segment
    versions: tuple[Mapping[str, str], ...]  # every set of library versions that made chunks
    layers: Mapping[str, ChunkTable]
    tagged: bool = False

    @property
    def document(self) -> CacheDocument:
        return msgspec.json.decode(self.cache, type=CacheDocument)

    @property
    def base(self) -> str:
        return self.document.base

    def recipe(self, layer: str) -> RecipeDocument:
        return msgspec.json.decode(self.recipes[layer], type=RecipeDocument)

    def table(self, layer: str) -> ChunkTable:
        return self.layers.get(layer) or ChunkTable.of([])

    def numbered(self, number: int) -> "Generation":
        return replace(self, number=number)

    def same_content(self, other: "Generation") -> bool:
        """Whether two generations publish the same, whatever their numbers."""
        mine, theirs = (one.numbered(0).metadata() for one in (self, other))
        if mine != theirs or self.layers.keys() != other.layers.keys():
            return False
        return all(_same(self._tensors(layer), other._tensors(layer)) for layer in self.layers)

    def metadata(self) -> dict[str, Any]:
        return {
            "format_version": FORMAT_VERSION,
            "type": "generation",
            "number": self.number,
            "cache": self.cache,
            "recipes": dict(self.recipes),
            "constants": dict(self.constants),
            "plan": list(self.plan),
            "versions": [dict(version) for version in self.versions],
            "layers": sorted(self.layers),
        }

    def encode(self, key: bytes | None) -> list[Buffer]:
        tensors: dict[str, Array] = {}
        for layer in sorted(self.layers):
            tensors.update(self._tensors(layer))
        return seal(self.metadata(), tensors, key)

    def _tensors(self, layer: str) -> dict[str, Array]:
        table = self.layers[layer]
        facts = {**table.numbers, **table.digests}
        tensors = {f"{layer}.{name}": values for name, values in facts.items()}
        return tensors | {f"{layer}.statistics.{name}": values for name, values in table.statistics.items()}


def decode_generation(view: memoryview, root: str, where: str, key: bytes | None) -> Generation:
    metadata, tensors = unseal(view, root, where, "generation", key)
    try:
        return Generation(
            number=metadata["number"],
            cache=metadata["cache"],
            recipes=metadata["recipes"],
            constants=metadata["constants"],
            plan=tuple(metadata["plan"]),
            versions=tuple(metadata["versions"]),
            layers={layer: _table(layer, tensors) for layer in metadata["layers"]},
            tagged=key is not None,
        )
    except KeyError as error:
        raise IndexCorrupt(root, where, f"it has no {error}") from error
    except (TypeError, ValueError) as error:
        raise IndexCorrupt(root, where, f"it cannot be understood: {error}") from error


def _table(layer: str, tensors: Mapping[str, Array]) -> ChunkTable:
    prefix = f"{layer}.statistics."
    chunks = tensors[f"{layer}.chunk"]
    count = len(chunks)
    if any(len(values) != count for name, values in tensors.items() if name.startswith(f"{layer}.")):
        raise ValueError(f"the facts of layer '{layer}' are of different lengths")
    if (chunks[1:] <= chunks[:-1]).any():
        raise ValueError(f"the chunks of layer '{layer}' are out of order")
    return ChunkTable(
        {name: tensors[f"{layer}.{name}"] for name in _NUMBERS},
        {name: tensors[f"{layer}.{name}"] for name in _DIGESTS},
        {name.removeprefix(prefix): values for name, values in tensors.items() if name.startswith(prefix)},
    )


def _statistic(name: str, values: list[int | float | list[int] | None]) -> Array:
    """One array for one statistic; a chunk without it counts as zero."""
    known = next(value for value in values if value is not None)
    zero: Any = [0] * len(known) if isinstance(known, list) else 0
    try:
        array = np.array([zero if value is None else value for value in values])
    except ValueError as error:
        raise RecipeInvalid(f"the statistic '{name}' has another length in every chunk; give it one") from error
    return array.astype(np.float64 if array.dtype.kind == "f" else np.int64)


def _alike(name: str, left: ChunkTable, right: ChunkTable) -> tuple[Array, Array]:
    """One statistic of two tables, in one type and shape; a table without it counts as zeros."""
    known = left.statistics.get(name, right.statistics.get(name))
    assert known is not None
    pair = [table.statistics.get(name) for table in (left, right)]
    old, new = (
        np.zeros((len(table), *known.shape[1:]), known.dtype) if values is None else values
        for table, values in zip((left, right), pair, strict=True)
    )
    if len(left) and len(right) and old.shape[1:] != new.shape[1:]:
        raise RecipeInvalid(f"the statistic '{name}' has another length in every chunk; give it one")
    return old, new


def _same(left: Mapping[str, Array], right: Mapping[str, Array]) -> bool:
    return left.keys() == right.keys() and all(np.array_equal(left[name], right[name]) for name in left)
