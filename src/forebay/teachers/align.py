"""Check teacher layers against their recipes.

Ranges and shapes are read from the rows, buckets from the constants. Prompt hashes are compared with the base rows, and
a few rows are recomputed where the teacher's files are available.

How far features read between two buckets are from what the teacher returns there.

buckets    .05     .15     .25           stored
middles        .10     .20               held out: the teacher is run there, and compared with the interpolation

With noise drawn for each bucket, the teacher gets a new draw at a middle: the error includes what draws change.

The record has shapes, buckets, ranges, types and shares, for assertions on any student's needs; `expect="tinyflux"` has
those of the TinyFlux document.
"""

from collections.abc import Iterable, Iterator, Mapping, Sequence
from itertools import pairwise
from typing import Any, Literal

import msgspec
import numpy as np
from numpy.typing import NDArray

from forebay.cache.catalog import presence_name
from forebay.columns import Array, Column, Columns, Ragged
from forebay.errors import (
    LibraryMissing,
    ModelUnusable,
    RecipeInvalid,
    SourceInvalid,
    SourceNotFound,
    StoreUnavailable,
    choice_error,
)
from forebay.fields import checked_whole
from forebay.read.cache import Cache
from forebay.read.opening import open_cache
from forebay.recipe import RecipeDocument, differing_fields, is_same_recipe
from forebay.records import Record
from forebay.teachers.prompt_columns import PROMPT
from forebay.teachers.recipe import T_BUCKETS, TeacherRecipe
from forebay.teachers.teacher_samples import BUCKETS, NOT_FINITE, Prompts, prompt_hash

Expected = Literal["tinyflux"]
# Layer -> column -> the shape at one bucket that the document's student takes.
TINYFLUX: dict[str, dict[str, tuple[int, ...]]] = {
    "lune": {"lune": (1280,)},
    "sol": {"sol_stats": (4,), "sol_spatial": (8, 8)},
}
SAMPLED_CHUNKS = 4  # chunks from which rows are recomputed


class InterpolationError(Record, frozen=True, kw_only=True):
    """The relative error |interpolated − computed| / |computed| of one column, halfway between buckets."""

    layer: str
    column: str
    rows: int  # on which it was measured
    error: float  # over all middles
    worst: float  # at one of them
    worst_t: float

    def __str__(self) -> str:
        return (
            f"interpolation error of '{self.column}' halfway between buckets: {self.error:.1%}, at most "
            f"{self.worst:.1%} at t = {self.worst_t:g} ({self.rows:,} rows)"
        )


def sampled_rows(cache: Cache, most: int) -> Iterator[range]:
    """Yield the first rows of a few chunks spread over the cache; first rows hold the shared values of later ones."""
    chunks = len(cache.chunk_numbers)
    chosen = sorted({round(at) for at in np.linspace(0, chunks - 1, min(chunks, most, SAMPLED_CHUNKS))})
    for turn, position in enumerate(chosen):
        share = (most * (turn + 1)) // len(chosen) - (most * turn) // len(chosen)
        start, stop = cache.chunk_starts[position : position + 2].tolist()
        yield range(start, min(stop, start + share))


def interpolation_errors(
    layer: str, recipe: TeacherRecipe, cache: Cache, most_rows: int
) -> tuple[InterpolationError, ...]:
    """Run a timed teacher on some rows of a cache, at its buckets and halfway between them, and compare."""
    if not recipe.model.timed or recipe.model.depends_on == "nothing" or len(recipe.buckets) < 2:
        return ()
    middles = tuple((low + high) / 2 for low, high in pairwise(recipe.buckets))
    # Chunk by chunk: values that are stored once for equal prompts are at rows of their chunk.
    chunks = (cache.read(rows, recipe.reads) for rows in sampled_rows(cache, most_rows))
    outputs = _joined(recipe.run_at((*recipe.buckets, *middles), rows) for rows in chunks)
    return tuple(_errors(layer, outputs, np.array(middles), len(recipe.buckets)))


def _joined(parts: Iterable[dict[str, Array]]) -> dict[str, Array]:
    some = [part for part in parts if part]
    return {name: np.concatenate([part[name] for part in some]) for name in some[0]} if some else {}


def _errors(layer: str, outputs: dict[str, Array], middles: Array, buckets: int) -> Iterator[InterpolationError]:
    for column, values in outputs.items():
        wide = values.astype(np.float64).reshape(len(values), buckets + len(middles), -1)
        nodes, computed = wide[:, :buckets], wide[:, buckets:]
        apart = np.square((nodes[:, :-1] + nodes[:, 1:]) / 2 - computed).sum(axis=(0, 2))
        size = np.square(computed).sum(axis=(0, 2))
        if not len(values) or not size.all():
            continue
        each = np.sqrt(apart / size)
        yield InterpolationError(
            layer=layer,
            column=column,
            rows=len(values),
            error=float(np.sqrt(apart.sum() / size.sum())),
            worst=float(each.max()),
            worst_t=float(middles[each.argmax()]),
        )


SUM_TOLERANCE = 2e-3  # of a map that is stored in float16
TOLERANCES = {"float16": 2e-3, "bfloat16": 2e-2, "float32": 1e-4, "float64": 1e-4}
SOL_COLUMNS = ("_stats", "_spatial")
PER_CHUNK = 512  # rows of each chunk from which ranges are read
IMPORTED = "imported"  # the kind of layers imported from a `.pt` cache


class LayerAlignment(Record, frozen=True, kw_only=True):
    """The findings on one layer."""

    layer: str
    teacher: str
    columns: dict[str, tuple[int, ...]]  # the shape of a row
    buckets: tuple[float, ...]
    usual_buckets: bool  # those of the default grid, 0.05 to 0.95
    ranges: dict[str, tuple[float, float]]  # the smallest and the largest value seen
    checked_rows: int
    recomputed_rows: int
    dtypes: dict[str, str]
    direction: str  # the end of t that is noise, if the teacher has one
    present: float  # the share of rows that are present
    interpolation: tuple[InterpolationError, ...] = ()  # halfway between buckets, on held-out rows
    problems: tuple[str, ...]
    notes: tuple[str, ...] = ()


class Alignment(Record, frozen=True, kw_only=True):
    """The findings on all teacher layers of a cache."""

    root: str
    layers: tuple[LayerAlignment, ...]
    unmet: tuple[str, ...] = ()  # expectations that are not met, and what was found

    @property
    def aligned(self) -> bool:
        return not self.unmet and not any(layer.problems for layer in self.layers)


def check_alignment(
    cache: Cache, *, recompute: int = 8, held_out: int = 0, allow_network: bool = False, expect: Expected | None = None
) -> Alignment:
    """Check every teacher layer; `recompute` rows of each are computed again and compared.

    On `held_out` rows, timed teachers are also run halfway between buckets, to measure the error of interpolation.
    `expect="tinyflux"` also checks shapes and buckets against the TinyFlux document.

    A model that is not on this disk is downloaded only with `allow_network`, because the cache chose its name.
    """
    checked_whole("recompute", recompute)
    checked_whole("held_out", held_out)
    if expect not in (None, "tinyflux"):
        raise choice_error("expect", expect, (None, "tinyflux"))
    document = [cache.recipe(layer) for layer in cache.generation.recipes]
    layers = [
        _aligned(cache, one, recompute, held_out, allow_network)
        for one in document
        if one.kind in (TeacherRecipe.kind, IMPORTED)
    ]
    return Alignment(root=cache.root, layers=tuple(layers), unmet=tuple(_unmet(layers)) if expect else ())


def _unmet(layers: Sequence[LayerAlignment]) -> Iterator[str]:
    """Yield the differences from the TinyFlux document."""
    known = {one.layer: one for one in layers}
    for layer, shapes in TINYFLUX.items():
        if layer not in known:
            yield f"there is no teacher layer '{layer}'; there are {', '.join(known) or 'none'}"
            continue
        if not known[layer].usual_buckets:
            yield f"the buckets of '{layer}' must be linspace(0.05, 0.95, 10) (found {known[layer].buckets})"
        for column, shape in shapes.items():
            stored_shape = known[layer].columns.get(column, (0,))[1:]
            if stored_shape != shape:
                yield f"'{column}' must have the shape {shape} at a bucket (found {stored_shape})"


def _aligned(
    cache: Cache, document: RecipeDocument, recompute: int, held_out: int, allow_network: bool
) -> LayerAlignment:
    whole = open_cache(cache.store, generation=cache.generation.number, layers=[document.layer])
    constants = whole.constants(document.layer)
    buckets = tuple(float(t) for t in constants.pop(T_BUCKETS, np.empty(0)))
    look = _Look(document)
    for columns in whole.chunks([*_names(document), *_base_names(document), presence_name(document.layer)]):
        look.take(document, columns)
    for name, values in constants.items():
        look.values(name, values.astype(np.float32))
    again = _recomputed(whole, document, recompute, held_out if buckets else 0, allow_network)
    absent = [f"none of its {len(whole):,} rows is present"] if len(whole) and not look.rows else []
    return LayerAlignment(
        layer=document.layer,
        teacher=str(look.teacher.get("kind")),
        columns={column.name: column.shape for column in document.columns}
        | {name: tuple(values.shape) for name, values in constants.items()},
        dtypes={column.name: column.dtype for column in document.columns}
        | {name: str(values.dtype) for name, values in constants.items()},
        direction=str(look.teacher.get("time_direction") or document.fields.get("time_direction") or "")
        if buckets
        else "",
        present=look.rows / max(1, len(whole)),
        buckets=buckets,
        usual_buckets=bool(buckets) and len(buckets) == len(BUCKETS) and bool(np.allclose(buckets, BUCKETS)),
        ranges=look.ranges,
        checked_rows=look.rows,
        recomputed_rows=again.rows,
        interpolation=again.interpolation,
        problems=(*absent, *_bucket_problems(document, buckets), *look.problems, *again.problems),
        notes=(*look.notes, *again.notes),
    )


class _Look:
    """Collects ranges and problems of a layer, chunk by chunk."""

    def __init__(self, document: RecipeDocument) -> None:
        self.fields = document.fields
        self.is_imported = document.kind == IMPORTED
        self.teacher: Mapping[str, Any] = document.fields.get("teacher") or {"kind": document.fields.get("part")}
        self.ranges: dict[str, tuple[float, float]] = {}
        self.problems: list[str] = []
        self.notes: tuple[str, ...] = ()
        self.rows = 0

    def take(self, document: RecipeDocument, columns: Columns) -> None:
        present = np.asarray(columns[presence_name(document.layer)])
        self.rows += int(present.sum())
        self._prompts({name: columns[name] for name in [*_names(document), *_base_names(document)]}, present)
        for column in document.columns:
            values = columns[column.name]
            if column.dtype not in TOLERANCES:
                continue
            some = values.values[:PER_CHUNK] if isinstance(values, Ragged) else values[present][:PER_CHUNK]
            self.values(column.name, some.astype(np.float32))

    def values(self, name: str, values: NDArray[np.float32]) -> None:
        if not values.size:
            return
        if not np.isfinite(values).all():
            self._add(f"'{name}' holds NaN or infinity")
            return
        low, high = float(values.min()), float(values.max())
        before = self.ranges.get(name, (low, high))
        self.ranges[name] = (min(low, before[0]), max(high, before[1]))
        if self._is_sol(name):
            self._sol(name, values, low, high)

    def _is_sol(self, name: str) -> bool:
        """True if the column has the name of one of Sol's."""
        return name in {f"{prefix}{ending}" for prefix in ("sol", self.teacher.get("name")) for ending in SOL_COLUMNS}

    def _sol(self, name: str, values: NDArray[np.float32], low: float, high: float) -> None:
        if low < 0 <= high <= 1 and self.is_imported and name.endswith("_spatial"):
            self.notes = (
                f"'{name}' has values outside of the documented range 0 to 1, down to {self.ranges[name][0]:g}: the "
                "document's formula is negative in the corners; loss weights count them as 0",
            )
        elif low < 0 or high > 1:
            self._add(f"'{name}' must be from 0 to 1 (found {low:g} to {high:g})")
        if name.endswith("_spatial"):
            off = float(np.abs(values.sum(axis=(-2, -1)) - 1).max())
            if off > SUM_TOLERANCE:
                self._add(f"maps of '{name}' must sum to 1 (found 1 ± {off:g})")

    def _prompts(self, columns: Columns, present: NDArray[np.bool_]) -> None:
        """Compare the stored hashes with the prompts in the base rows."""
        stored = next((values for name, values in columns.items() if name.endswith(PROMPT)), None)
        if stored is None or isinstance(stored, Ragged):
            return
        prompts = Prompts(self.fields["prompt_column"], self.fields["prompt_key"])
        texts = columns[prompts.column]
        for row in np.flatnonzero(present).tolist():
            text = prompts.of(texts[row])
            if text is None or prompt_hash(text) != int(stored[row]):
                self._add("a row was made of another prompt than the base layer holds now")
                return

    def _add(self, problem: str) -> None:
        if problem not in self.problems:
            self.problems.append(problem)


class _Again(msgspec.Struct, frozen=True):
    rows: int = 0
    problems: tuple[str, ...] = ()
    notes: tuple[str, ...] = ()
    interpolation: tuple[InterpolationError, ...] = ()


def reopened(document: RecipeDocument, root: str, verb: str, allow_network: bool) -> TeacherRecipe:
    """Return the recipe of a teacher layer; raise if its files would be downloaded or have changed."""
    recipe = msgspec.convert(document.fields, TeacherRecipe)
    on_hub = () if allow_network else recipe.on_hub()
    if on_hub:
        raise SourceInvalid(
            f"layer '{document.layer}' of '{root}' needs '{on_hub[0]}' from the hub; forebay does not "
            "contact a machine that only a cache names",
            hint=f"allow it with `forebay {verb} {root} --allow-network`",
            repository=on_hub[0],
        )
    if not is_same_recipe(document, recipe):
        changed = ", ".join(differing_fields(document, recipe))
        raise RecipeInvalid(f"the teacher of layer '{document.layer}' has changed (differs in: {changed})")
    return recipe


def _recomputed(cache: Cache, document: RecipeDocument, most: int, held_out: int, allow_network: bool) -> _Again:
    """Recompute and compare a few rows, if the teacher is available."""
    if not (most or held_out) or not document.columns:
        return _Again()
    if document.kind == IMPORTED:
        return _Again(notes=("no row was recomputed: an imported layer does not record its teacher",))
    try:
        recipe = msgspec.structs.replace(reopened(document, cache.root, "verify --align", allow_network), device="auto")
        return _compared(cache, document, recipe, most, held_out)
    except (SourceInvalid, ModelUnusable, LibraryMissing, SourceNotFound, StoreUnavailable) as error:
        if "sample" in error.facts:
            return _Again(problems=(error.message,))
        return _Again(notes=(f"no row was recomputed: {error.message}",))
    except RecipeInvalid as error:
        return _Again(problems=(error.message,))


def _compared(cache: Cache, document: RecipeDocument, recipe: TeacherRecipe, most: int, held_out: int) -> _Again:
    problems: dict[str, None] = {}
    count = 0
    try:
        for rows in sampled_rows(cache, most):
            count += len(rows)
            again, stored = recipe.make(cache.read(rows, recipe.reads)), cache.read(rows, _names(document))
            before = np.asarray(cache.read(rows, [presence_name(document.layer)])[presence_name(document.layer)])
            lost = [failure for failure in again.failures if failure.reason == NOT_FINITE]
            if lost and np.count_nonzero(np.asarray(again.present)) < np.count_nonzero(before):
                problems[f"recomputed, sample '{lost[0].sample}' has {lost[0].detail}"] = None
                continue
            if not np.array_equal(np.asarray(again.present), before):
                problems["other rows are present where they are recomputed"] = None
            differences = (_difference(column, again.columns, stored, before) for column in document.columns)
            problems |= dict.fromkeys(problem for problem in differences if problem)
        errors = interpolation_errors(document.layer, recipe, cache, held_out)
    finally:
        recipe.release()
    return _Again(count, tuple(problems), interpolation=errors)


def _difference(column: Column, computed: Columns, stored: Columns, present: NDArray[np.bool_]) -> str | None:
    name, dtype = column.name, column.dtype
    one, other = (_present_values(column, columns, np.flatnonzero(present)) for columns in (computed, stored))
    if dtype not in TOLERANCES or one.shape != other.shape:
        return None if np.array_equal(one, other) else f"recomputed values of '{name}' differ"
    apart = np.abs(one.astype(np.float32) - other.astype(np.float32))
    allowed = TOLERANCES[dtype] * (1 + np.abs(other.astype(np.float32)))
    if (apart <= allowed).all():
        return None
    return f"recomputed values of '{name}' differ by up to {float(apart.max(initial=0)):g}"


def _present_values(column: Column, columns: Columns, rows: NDArray[np.int64]) -> Array:
    """Return the values of some rows, one after the other; a dictionary column has them at the rows that hold them."""
    values = columns[column.name]
    if not isinstance(values, Ragged):
        return np.asarray(values)[rows]
    holders = np.asarray(columns[column.index])[rows] if column.index else rows
    return np.concatenate([values.values[:0], *(values[row] for row in holders.tolist())])


def _bucket_problems(document: RecipeDocument, buckets: tuple[float, ...]) -> Iterator[str]:
    declared = tuple(document.fields.get("buckets", ()))
    if declared != buckets:
        yield f"its constants have the buckets {buckets}, but its recipe has {declared}"
    for column in document.columns:
        if buckets and column.shape[:1] != (len(buckets),):
            yield f"'{column.name}' has {column.shape[:1]} timesteps, but there are {len(buckets)} buckets"


def _names(document: RecipeDocument) -> list[str]:
    return [column.name for column in document.columns]


def _base_names(document: RecipeDocument) -> list[str]:
    prompts = any(column.name.endswith(PROMPT) for column in document.columns)
    return [str(document.fields["prompt_column"])] if prompts else []
