"""A generation: the list of published chunks, as one sealed file.

For every chunk of every layer it has the rows, sizes, digests and statistics, as arrays in the order of chunks; also
the text of `cache.json` and of every recipe, the digests of the plan, and the failure limits. Opening a cache reads
this one file.
"""

from collections import Counter
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field, replace
from functools import cached_property
from typing import Annotated, Any

import msgspec
import numpy as np

from forebay.columns import Array
from forebay.errors import IndexCorrupt, RecipeInvalid
from forebay.format import layout
from forebay.format.chunk import FAILED, MADE_BY, OTHER, ChunkRecord, is_counted_by_recipe
from forebay.format.layout import (
    FORMAT_VERSION,
    MAX_NUMBER,
    CacheDocument,
    LayerName,
    check_no_cycle,
    decode_cache_document,
    decode_recipe_document,
    one_line,
)
from forebay.format.tensors import seal, unseal
from forebay.recipe import RecipeDocument
from forebay.store.base import Buffer, index_corrupt

_NUMBERS = ("chunk", "rows", "samples", "failures", "size", "head_size")
_DIGESTS = {"head": 16, "sha256": 32, "content": 16, "ids": 16, "base": 16}
_MOST = 1 << 62  # rows or bytes, also summed over chunks
_LIMITS = {"chunk": MAX_NUMBER}
_STATISTICS = (np.dtype("<i8"), np.dtype("<f8"))
_Number = Annotated[int, msgspec.Meta(ge=0, lt=MAX_NUMBER)]
_Count = Annotated[int, msgspec.Meta(ge=0)]
_Share = Annotated[float, msgspec.Meta(ge=0, le=1)]
_Sha256 = Annotated[str, msgspec.Meta(pattern=r"\A[0-9a-f]{64}\Z")]


class _GenerationHeader(msgspec.Struct, frozen=True):
    """The header of a generation; fields that a later forebay adds are ignored."""

    number: _Number
    cache: str
    recipes: dict[LayerName, str]
    constants: dict[LayerName, _Sha256]
    plan: tuple[_Sha256, ...]
    versions: tuple[dict[str, str], ...]
    layers: Annotated[tuple[LayerName, ...], msgspec.Meta(max_length=1000)]
    source: dict[str, Any] = {}
    max_failures: dict[LayerName, _Count | _Share] = {}
    withdrawn: tuple[_Number, ...] = ()


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
        """The position of a chunk in the table, None if it is not published."""
        at = int(np.searchsorted(self.chunks, chunk))
        return at if at < len(self) and self.chunks[at] == chunk else None

    def record(self, position: int) -> ChunkRecord:
        facts: dict[str, Any] = {name: int(values[position]) for name, values in self.numbers.items()}
        facts |= {name: values[position].tobytes() for name, values in self.digests.items()}
        facts["statistics"] = {name: values[position].tolist() for name, values in self.statistics.items()}
        return ChunkRecord(**facts)

    def has_base_of(self, record: ChunkRecord) -> bool:
        """True if this is the table of the base layer, and a chunk above it was made from the rows that it lists."""
        at = self.position(record.chunk)
        return at is not None and (int(self.rows[at]), self.digests["ids"][at].tobytes()) == (record.rows, record.base)

    def records(self) -> list[ChunkRecord]:
        return [self.record(position) for position in range(len(self))]

    def with_records(self, records: Iterable[ChunkRecord]) -> "ChunkTable":
        """The table with more chunks; a new record replaces an older one of the same chunk."""
        fresh = ChunkTable.of(records)
        others = np.flatnonzero(~np.isin(self.chunks, fresh.chunks))
        order = np.argsort(np.concatenate([self.chunks[others], fresh.chunks]), kind="stable")

        def merged(old: Array, new: Array) -> Array:
            return np.concatenate([old[others], new])[order]

        names = sorted({*self.statistics, *fresh.statistics})
        return ChunkTable(
            {name: merged(self.numbers[name], fresh.numbers[name]) for name in _NUMBERS},
            {name: merged(self.digests[name], fresh.digests[name]) for name in _DIGESTS},
            {name: merged(*_alike(name, self, fresh)) for name in names},
        )

    def without(self, chunks: Array) -> "ChunkTable":
        """The table without some chunks."""
        left = ~np.isin(self.chunks, chunks)
        return ChunkTable(
            {name: values[left] for name, values in self.numbers.items()},
            {name: values[left] for name, values in self.digests.items()},
            {name: values[left] for name, values in self.statistics.items()},
        )

    def summary(self) -> "LayerTotals":
        """Its sums, for a report."""
        sums = {name: int(self.numbers[name].sum()) for name in ("rows", "samples", "failures", "size")}
        statistics = {name: value for name, value in self.totals().items() if not isinstance(value, list)}
        return LayerTotals(chunks=len(self), statistics=statistics, reasons=self.reasons(), **sums)

    def totals(self) -> dict[str, int | float | list[int]]:
        """The sums of the statistics that recipes count."""
        return {
            name: _summed(values).tolist() for name, values in self.statistics.items() if is_counted_by_recipe(name)
        }

    def made_by(self, position: int) -> int:
        """Index of the versions that made the chunk at a position, by default 0."""
        sets = self.statistics.get(MADE_BY)
        return int(sets[position]) if sets is not None and sets.ndim == 1 else 0

    def by_maker(self, sets: int) -> dict[int, Array]:
        """Version index -> the chunks that these versions made; -1: unknown."""
        known = self.statistics.get(MADE_BY)
        numbers = np.zeros(len(self), np.int64) if known is None or known.ndim != 1 else known
        makers = np.where(np.isin(numbers, np.arange(sets)), numbers, -1).astype(np.int64)
        return {int(maker): np.sort(self.chunks[makers == maker]) for maker in np.unique(makers)}

    def reasons(self) -> dict[str, int]:
        """Why samples failed, the most frequent reason first; `other` where an earlier forebay did not count them."""
        sums = {name: values.sum() for name, values in self.statistics.items() if name.startswith(FAILED)}
        counts = Counter({name.removeprefix(FAILED): int(count) for name, count in sums.items() if count.ndim == 0})
        counts[OTHER] += max(0, int(self.numbers["failures"].sum()) - counts.total())
        return {reason: count for reason, count in counts.most_common() if count > 0}


@dataclass(frozen=True, eq=False)
class Generation:
    """Everything that was published up to one point in time."""

    number: int
    cache: str  # the text of cache.json
    recipes: Mapping[str, str]  # layer -> the text of recipes/<layer>.json
    constants: Mapping[str, str]  # layer -> SHA-256 of constants.safetensors
    plan: tuple[str, ...]  # the digest of every segment
    versions: tuple[Mapping[str, str], ...]  # every set of library versions that made chunks
    layers: Mapping[str, ChunkTable]
    tagged: bool = False
    source: Mapping[str, Any] = field(default_factory=dict)  # the source description, in case the plan is lost
    digest: str = ""  # SHA-256 at the end of the file it was read from
    max_failures: Mapping[str, int | float] = field(default_factory=dict)  # layer -> a count or a share per segment
    withdrawn: tuple[int, ...] = ()  # segments without listed chunks, now and later

    def __repr__(self) -> str:
        return f"<Generation {self.number} with the layers {', '.join(self.layers)}>"

    @cached_property
    def document(self) -> CacheDocument:
        return decode_cache_document(self.cache, f"generation {self.number}", layout.CACHE)

    @property
    def base(self) -> str:
        return self.document.base

    def recipe(self, layer: str) -> RecipeDocument:
        if layer not in self._documents:
            where = f"generation {self.number}"
            self._documents[layer] = decode_recipe_document(self.recipes[layer], layer, where, layout.recipe(layer))
        return self._documents[layer]

    @cached_property
    def _documents(self) -> dict[str, RecipeDocument]:
        return {}

    def folder(self, layer: str) -> str:
        """The folder of a layer's chunks."""
        return layout.document_folder(self.recipe(layer))

    def table(self, layer: str) -> ChunkTable:
        return self.layers.get(layer) or ChunkTable.of([])

    def chunks(self) -> Iterator[tuple[str, ChunkRecord]]:
        """The folder and record of every listed chunk, layer by layer."""
        for layer, table in self.layers.items():
            folder = self.folder(layer)
            yield from ((folder, record) for record in table.records())

    def made_with(self, layer: str, chunk: int) -> tuple[Mapping[str, str], ...]:
        """The library versions that made a chunk; all candidates if that is unknown."""
        table = self.table(layer)
        at = table.position(chunk)
        number = -1 if at is None else table.made_by(at)
        return self.versions[number : number + 1] if 0 <= number < len(self.versions) else self.versions

    def numbered(self, number: int) -> "Generation":
        return replace(self, number=number)

    def same_content(self, other: "Generation") -> bool:
        """Whether two generations publish the same content; numbers may differ."""
        mine, theirs = (replace(one, number=0, source={}).metadata() for one in (self, other))
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
            **({"source": dict(self.source)} if self.source else {}),
            **({"max_failures": dict(self.max_failures)} if self.max_failures else {}),
            **({"withdrawn": list(self.withdrawn)} if self.withdrawn else {}),
        }

    def encode(self, key: bytes | None) -> Sequence[Buffer]:
        data = self.sealed(key)
        self._check_readable(data, key)
        return data

    def sealed(self, key: bytes | None) -> Sequence[Buffer]:
        """Return the bytes without a check that the reader accepts them."""
        tensors: dict[str, Array] = {}
        for layer in sorted(self.layers):
            tensors.update(self._tensors(layer))
        return seal(self.metadata(), tensors, key)

    def _check_readable(self, data: Sequence[Buffer], key: bytes | None) -> None:
        """Raise if the reader would reject these bytes: nothing must be published that cannot be read."""
        try:
            decode_generation(memoryview(b"".join(data)), "", layout.generation(self.number), key)
        except IndexCorrupt as error:
            problem = error.facts["problem"]
            raise RecipeInvalid(f"generation {self.number} is not published, because {problem}") from error

    def _tensors(self, layer: str) -> dict[str, Array]:
        return _table_tensors(layer, self.layers[layer])


@dataclass(frozen=True, slots=True)
class LayerTotals:
    """Sums over the chunks of a layer."""

    chunks: int
    rows: int
    samples: int
    failures: int
    size: int
    statistics: Mapping[str, int | float]  # those that recipes count, except lists
    reasons: Mapping[str, int]  # why samples failed


def decode_generation(view: memoryview, root: str, where: str, key: bytes | None) -> Generation:
    """Decode and validate a generation; all names, numbers and texts must be within forebay's limits."""
    metadata, tensors = unseal(view, root, where, "generation", key)
    try:
        facts = msgspec.convert(metadata, _GenerationHeader)
        generation = Generation(
            number=facts.number,
            cache=facts.cache,
            recipes=facts.recipes,
            constants=facts.constants,
            plan=facts.plan,
            versions=facts.versions,
            layers={layer: _table(layer, tensors) for layer in facts.layers},
            tagged=key is not None,
            source=facts.source,
            max_failures=facts.max_failures,
            withdrawn=facts.withdrawn,
            digest=bytes(view[-64:-32] if key is not None else view[-32:]).hex(),  # the tag comes last
        )
        _check_texts(generation)
    except (msgspec.ValidationError, ValueError) as error:
        raise index_corrupt(root, where, f"it is malformed: {one_line(error)}") from error
    return generation


def _check_texts(generation: Generation) -> None:
    if generation.source and not isinstance(generation.source.get("kind"), str):
        raise ValueError("the description of its source has no kind")
    try:
        recipes = {layer: generation.recipe(layer) for layer in generation.recipes}
        base = generation.base
    except IndexCorrupt as error:
        raise ValueError(f"in its copy of '{error.facts['key']}', {error.facts['problem']}") from error
    if any(number >= len(generation.plan) for number in generation.withdrawn):
        raise ValueError("it withdraws a segment that it does not list")
    unknown = {base, *generation.layers, *generation.constants, *generation.max_failures} - recipes.keys()
    if unknown:
        raise ValueError(f"it has no recipe for layer '{sorted(unknown)[0]}'")
    check_no_cycle(recipes)


def _table_tensors(layer: str, table: ChunkTable) -> dict[str, Array]:
    facts = {**table.numbers, **table.digests}
    tensors = {f"{layer}.{name}": values for name, values in facts.items()}
    return tensors | {f"{layer}.statistics.{name}": values for name, values in table.statistics.items()}


def _table(layer: str, tensors: Mapping[str, Array]) -> ChunkTable:
    prefix = f"{layer}."
    facts = {name.removeprefix(prefix): values for name, values in tensors.items() if name.startswith(prefix)}
    for name in (*_NUMBERS, *_DIGESTS):
        if name not in facts:
            raise ValueError(f"layer '{layer}' has no '{name}'")
    count = facts["chunk"].size
    for name, values in facts.items():
        if not _is_sound(name, values, count):
            raise ValueError(f"'{name}' of layer '{layer}' has an invalid type, shape or value")
    chunks = facts["chunk"]
    if (chunks[1:] <= chunks[:-1]).any():
        raise ValueError(f"the chunks of layer '{layer}' are out of order")
    if (facts["head_size"] > facts["size"]).any():
        raise ValueError(f"a chunk of layer '{layer}' has a head that is larger than the chunk")
    return ChunkTable(
        {name: facts[name] for name in _NUMBERS},
        {name: facts[name] for name in _DIGESTS},
        {name.removeprefix("statistics."): facts[name] for name in facts if name.startswith("statistics.")},
    )


def _is_sound(name: str, values: Array, count: int) -> bool:
    """Whether an array over `count` chunks has a valid type, shape and range."""
    if name in _NUMBERS:
        if values.dtype != np.dtype("<i8") or values.shape != (count,):
            return False
        in_range = not count or (int(values.min()) >= 0 and int(values.max()) < _LIMITS.get(name, _MOST))
        return in_range and float(values.sum(dtype=np.float64)) < (_MOST if name not in _LIMITS else np.inf)
    if name in _DIGESTS:
        return values.dtype == np.uint8 and values.shape == (count, _DIGESTS[name])
    if name.startswith("statistics."):
        return values.dtype in _STATISTICS and values.ndim in (1, 2) and len(values) == count
    return values.ndim > 0 and len(values) == count


def _summed(values: Array) -> Array:
    """Sums over chunks: integers, or floats where a sum might not fit into 64 bits."""
    with np.errstate(over="ignore"):  # a sum of floats that is too large is infinite
        summed: Array = np.asarray(values.sum(axis=0))
    if values.dtype.kind == "f":
        return summed
    wide = values.astype(np.float64)
    is_large = np.abs(wide).sum(axis=0) >= _MOST  # half of what fits: a sum of floats is rounded
    rounded = np.asarray(wide.sum(axis=0))
    return np.where(is_large, rounded.astype(object), summed.astype(object))


def _statistic(name: str, values: list[int | float | list[int] | None]) -> Array:
    """A statistic as one array; a chunk without it counts as zero."""
    known = next(value for value in values if value is not None)
    zero: Any = [0] * len(known) if isinstance(known, list) else 0
    try:
        array = np.array([zero if value is None else value for value in values])
    except ValueError as error:
        raise RecipeInvalid(
            f"the statistic '{name}' has different lengths in different chunks", hint="return one length"
        ) from error
    return array.astype(np.float64 if array.dtype.kind == "f" else np.int64)


def _alike(name: str, left: ChunkTable, right: ChunkTable) -> tuple[Array, Array]:
    """A statistic of two tables with equal shapes; a table without it counts as zeros."""
    known = left.statistics.get(name, right.statistics.get(name))
    assert known is not None
    pair = [table.statistics.get(name) for table in (left, right)]
    old, new = (
        np.zeros((len(table), *known.shape[1:]), known.dtype) if values is None else values
        for table, values in zip((left, right), pair, strict=True)
    )
    if len(left) and len(right) and old.shape[1:] != new.shape[1:]:
        raise RecipeInvalid(
            f"the statistic '{name}' has different lengths in different chunks", hint="return one length"
        )
    return old, new


def _same(left: Mapping[str, Array], right: Mapping[str, Array]) -> bool:
    return left.keys() == right.keys() and all(np.array_equal(left[name], right[name]) for name in left)
