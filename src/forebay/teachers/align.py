"""Check teacher layers against their recipes.

Ranges and shapes are read from the rows, buckets from the constants. Prompt hashes are compared with the base rows, and
a few rows are recomputed where the teacher's files are available.

How far features read between two buckets are from what the teacher returns there.

buckets    .05     .15     .25           stored
middles        .10     .20               held out: the teacher is run there, and compared with the interpolation

With noise drawn for each bucket, the teacher gets a new draw at a middle: the error includes what draws change.

What a student expects of teacher layers, as lines that a check can fail: `lune.dim=1280`.

    lune.dim=1280                        width of the features: the last axis of the layer's columns of floats
    sol.spatial=8x8                      shape of the column sol_spatial, at one bucket
    lune.t=linspace(0.05,0.95,10)        buckets; also as a list, 0.1,0.5,0.9
    lune.range=-5..5                     smallest and largest value, of a layer or a column
    lune.present=99%                     share of rows that are present, at least
    lune.dtype=float16                   type on disk
    lune.direction=t0_noise              end of t that is noise
    t=same                               equal buckets in all layers that have some

A profile is the name of a list below, or a file with one expectation per line; `#` begins a comment.
"""

import os
import re
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from itertools import pairwise
from typing import Any

import msgspec
import numpy as np
from numpy.typing import NDArray

from forebay.cache.catalog import presence_name
from forebay.cache.records import Record
from forebay.columns import Array, Columns, Ragged
from forebay.errors import (
    HookSilent,
    HubNotFound,
    HubUnreachable,
    LibraryMissing,
    RecipeInvalid,
    RecipeNotContacted,
    TeacherOutputInvalid,
    TeacherRaised,
    TeacherUnusable,
    UnknownKind,
)
from forebay.read.cache import Cache, open_cache
from forebay.recipe import RecipeDocument, differing_fields, is_same_recipe
from forebay.teachers.batched_forward import PROMPT
from forebay.teachers.recipe import T_BUCKETS, TeacherRecipe
from forebay.teachers.teacher_samples import BUCKETS, NOT_FINITE, Prompts, prompt_hash

_LINSPACE = re.compile(r"linspace\(([^,]+),([^,]+),(\d+)\)")
_LINE = re.compile(r"(?:(?P<subject>[\w-]+)\.)?(?P<fact>\w+)=(?P<value>\S.*)")
PROFILES: dict[str, tuple[str, ...]] = {
    "tinyflux": (
        "lune.dim=1280", "lune.t=linspace(0.05,0.95,10)", "lune.range=-10..10", "sol.stats=4", "sol.spatial=8x8",
        "sol.t=linspace(0.05,0.95,10)", "sol_stats.range=0..1", "sol_spatial.range=0..1", "t=same",
    ),
}  # fmt: skip


@dataclass(frozen=True, slots=True)
class LayerFacts:
    """What is known of a layer: shapes, types and ranges by column."""

    shapes: Mapping[str, tuple[int, ...]]  # of one row, buckets first
    dtypes: Mapping[str, str]
    ranges: Mapping[str, tuple[float, float]]
    buckets: tuple[float, ...]
    direction: str
    present: float

    def shape(self, column: str) -> tuple[int, ...]:
        """Return the shape of a column at one bucket."""
        return self.shapes[column][1 if self.buckets else 0 :]

    def features(self) -> list[str]:
        """Return the columns of floats, if there are any: not masks, and not what says where prompts are stored."""
        return [name for name, dtype in self.dtypes.items() if "float" in dtype] or list(self.shapes)


@dataclass(frozen=True, slots=True)
class Expectation:
    text: str
    subject: str  # a layer or a column; empty for all layers
    fact: str
    value: str


def read_expectations(texts: Iterable[str]) -> tuple[Expectation, ...]:
    """Return expectations from lines, names of profiles and paths of files."""
    return tuple(_parsed(line) for text in texts for line in _lines(text))


def _lines(text: str) -> Sequence[str]:
    if text in PROFILES:
        return PROFILES[text]
    if "=" in text:
        return [text]
    if not os.path.isfile(text):
        raise ValueError(
            f"'{text}' is neither an expectation, such as lune.dim=1280, nor a file, nor a profile: "
            f"{', '.join(PROFILES)}"
        )
    with open(text, encoding="utf-8") as file:
        lines = [line.partition("#")[0].strip() for line in file]
    return [line for line in lines if line]


def _parsed(line: str) -> Expectation:
    found = _LINE.fullmatch(line.strip())
    if found is None:
        raise ValueError(f"an expectation is LAYER.FACT=VALUE, such as lune.dim=1280 (got '{line}')")
    one = Expectation(line.strip(), found["subject"] or "", found["fact"], found["value"].strip())
    if not one.subject and one.text != "t=same":
        raise ValueError(f"an expectation names a layer or a column, except for t=same (got '{line}')")
    if not one.subject:
        return one
    try:
        _READERS.get(one.fact, _shape)(one.value)
    except ValueError as error:
        facts = f"{', '.join(_READERS)}, or the name of a column with a shape such as 8x8"
        raise ValueError(f"'{line}' cannot be read: {error}; facts are {facts}") from error
    return one


def unmet(expected: Iterable[Expectation], layers: Mapping[str, LayerFacts]) -> list[str]:
    """Return a problem for each expectation that the layers do not meet."""
    return [f"{one.text}: {problem}" for one in expected if (problem := _problem(one, layers)) is not None]


def _problem(one: Expectation, layers: Mapping[str, LayerFacts]) -> str | None:
    if not one.subject:
        grids = {name: facts.buckets for name, facts in layers.items() if facts.buckets}
        return None if len(set(grids.values())) < 2 else f"buckets differ between {', '.join(sorted(grids))}"
    layer = next((name for name, facts in layers.items() if one.subject in (name, *facts.shapes)), None)
    if layer is None:
        return f"there is no teacher layer or column '{one.subject}'; there are {', '.join(layers) or 'none'}"
    facts = layers[layer]
    columns = [one.subject] if one.subject in facts.shapes else facts.features()
    if one.fact in _CHECKS:
        return _CHECKS[one.fact](one.value, facts, columns)
    column = f"{layer}_{one.fact}"
    if column not in facts.shapes:
        return f"layer '{layer}' has no column '{column}'; it has {', '.join(facts.shapes)}"
    return _differs("its shape", facts.shape(column), _shape(one.value))


def _dim(value: str, facts: LayerFacts, columns: Sequence[str]) -> str | None:
    found = (_differs(f"'{column}'", facts.shape(column)[-1:], (int(value),)) for column in columns)
    return next((problem for problem in found if problem), None)


def _t(value: str, facts: LayerFacts, columns: Sequence[str]) -> str | None:
    wanted = _buckets(value)
    if len(wanted) == len(facts.buckets) and np.allclose(wanted, facts.buckets, atol=1e-6):
        return None
    return f"its buckets are {', '.join(f'{t:g}' for t in facts.buckets) or 'none'}"


def _range(value: str, facts: LayerFacts, columns: Sequence[str]) -> str | None:
    low, high = _interval(value)
    found = [facts.ranges[column] for column in columns if column in facts.ranges]
    if not found:
        return "no value was read"
    least, most = min(one[0] for one in found), max(one[1] for one in found)
    return None if low <= least and most <= high else f"its values are from {least:g} to {most:g}"


def _present(value: str, facts: LayerFacts, columns: Sequence[str]) -> str | None:
    return None if facts.present >= _share(value) else f"{facts.present:.2%} of the rows are present"


def _dtype(value: str, facts: LayerFacts, columns: Sequence[str]) -> str | None:
    others = {facts.dtypes[column] for column in columns} - {value}
    return f"it is stored as {', '.join(sorted(others))}" if others else None


def _direction(value: str, facts: LayerFacts, columns: Sequence[str]) -> str | None:
    return None if facts.direction == value else f"it is {facts.direction or 'not recorded'}"


def _differs(what: str, found: tuple[int, ...], wanted: tuple[int, ...]) -> str | None:
    return None if found == wanted else f"{what} is {'x'.join(map(str, found)) or 'a number'}"


def _shape(value: str) -> tuple[int, ...]:
    return tuple(int(side) for side in value.split("x"))


def _buckets(value: str) -> tuple[float, ...]:
    spaced = _LINSPACE.fullmatch(value.replace(" ", ""))
    if spaced:
        return tuple(np.linspace(float(spaced[1]), float(spaced[2]), int(spaced[3])).tolist())
    return tuple(float(t) for t in value.split(","))


def _interval(value: str) -> tuple[float, float]:
    low, _, high = value.partition("..")
    return float(low), float(high)


def _share(value: str) -> float:
    return float(value.removesuffix("%")) / (100 if value.endswith("%") else 1)


_READERS: dict[str, Callable[[str], object]] = {
    "dim": int, "t": _buckets, "range": _interval, "present": _share,
    "dtype": str, "direction": str,
}  # fmt: skip
_CHECKS: dict[str, Callable[[str, LayerFacts, Sequence[str]], str | None]] = {
    "dim": _dim, "t": _t, "range": _range, "present": _present, "dtype": _dtype, "direction": _direction,
}  # fmt: skip


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
    given = (cache.read(rows, recipe.reads) for rows in sampled_rows(cache, most_rows))
    made = _joined(recipe.run_at((*recipe.buckets, *middles), rows) for rows in given)
    return tuple(_errors(layer, made, np.array(middles), len(recipe.buckets)))


def _joined(parts: Iterable[dict[str, Array]]) -> dict[str, Array]:
    found = [part for part in parts if part]
    return {name: np.concatenate([part[name] for part in found]) for name in found[0]} if found else {}


def _errors(layer: str, made: dict[str, Array], middles: Array, buckets: int) -> Iterator[InterpolationError]:
    for column, values in made.items():
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
    cache: Cache, *, recompute: int = 8, held_out: int = 0, check_source: bool = False, expect: Sequence[str] = ()
) -> Alignment:
    """Check every teacher layer; `recompute` rows of each are computed again and compared.

    On `held_out` rows, timed teachers are also run halfway between buckets, to measure the error of interpolation.
    `expect` are expectations such as "lune.dim=1280", names of profiles such as "tinyflux", or files of them.

    A model that is not on this disk is downloaded only with `check_source`, because the cache chose its name.
    """
    expected = read_expectations(expect)
    kept = [cache.recipe(layer) for layer in cache.generation.recipes]
    found = [
        _aligned(cache, one, recompute, held_out, check_source)
        for one in kept
        if one.kind in (TeacherRecipe.kind, IMPORTED)
    ]
    return Alignment(root=cache.root, layers=tuple(found), unmet=tuple(unmet(expected, _facts(found))))


def _facts(layers: Sequence[LayerAlignment]) -> dict[str, LayerFacts]:
    return {
        one.layer: LayerFacts(one.columns, one.dtypes, one.ranges, one.buckets, one.direction, one.present)
        for one in layers
    }


def _aligned(cache: Cache, kept: RecipeDocument, recompute: int, held_out: int, check_source: bool) -> LayerAlignment:
    whole = open_cache(cache.store, generation=cache.generation.number, layers=[kept.layer])
    constants = whole.constants(kept.layer)
    buckets = tuple(float(t) for t in constants.pop(T_BUCKETS, np.empty(0)))
    look = _Look(kept.fields)
    for columns in whole.chunks([*_names(kept), *_base_names(kept), presence_name(kept.layer)]):
        look.take(kept, columns)
    for name, values in constants.items():
        look.values(name, values.astype(np.float32))
    again = _recomputed(whole, kept, recompute, held_out if buckets else 0, check_source)
    absent = [f"none of its {len(whole):,} rows is present"] if len(whole) and not look.rows else []
    return LayerAlignment(
        layer=kept.layer,
        teacher=str(look.teacher.get("kind")),
        columns={column.name: column.shape for column in kept.columns}
        | {name: tuple(values.shape) for name, values in constants.items()},
        dtypes={column.name: column.dtype for column in kept.columns}
        | {name: str(values.dtype) for name, values in constants.items()},
        direction=str(look.teacher.get("time_direction") or "") if buckets else "",
        present=look.rows / max(1, len(whole)),
        buckets=buckets,
        usual_buckets=bool(buckets) and len(buckets) == len(BUCKETS) and bool(np.allclose(buckets, BUCKETS)),
        ranges=look.ranges,
        checked_rows=look.rows,
        recomputed_rows=again.rows,
        interpolation=again.interpolation,
        problems=(*absent, *_bucket_problems(kept, buckets), *look.problems, *again.problems),
        notes=again.notes,
    )


class _Look:
    """Collects ranges and problems of a layer, chunk by chunk."""

    def __init__(self, fields: Mapping[str, Any]) -> None:
        self.fields = fields
        self.teacher: Mapping[str, Any] = fields.get("teacher") or {"kind": fields.get("part")}
        self.ranges: dict[str, tuple[float, float]] = {}
        self.problems: list[str] = []
        self.rows = 0

    def take(self, kept: RecipeDocument, columns: Columns) -> None:
        present = np.asarray(columns[presence_name(kept.layer)])
        self.rows += int(present.sum())
        self._prompts({name: columns[name] for name in [*_names(kept), *_base_names(kept)]}, present)
        for column in kept.columns:
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
        """Whether the column is one of Sol's, or named like them by another teacher."""
        return name in {f"{prefix}{ending}" for prefix in ("sol", self.teacher.get("name")) for ending in SOL_COLUMNS}

    def _sol(self, name: str, values: NDArray[np.float32], low: float, high: float) -> None:
        if low < 0 or high > 1:
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


def reopened(kept: RecipeDocument, root: str, verb: str, check_source: bool) -> TeacherRecipe:
    """Return the recipe of a teacher layer; raise if its files would be downloaded or have changed."""
    recipe = msgspec.convert(kept.fields, TeacherRecipe)
    on_hub = () if check_source else recipe.on_hub()
    if on_hub:
        raise RecipeNotContacted(root, kept.layer, on_hub[0], verb)
    if not is_same_recipe(kept, recipe):
        changed = ", ".join(differing_fields(kept, recipe))
        raise RecipeInvalid(f"the teacher of layer '{kept.layer}' has changed (differs in: {changed})")
    return recipe


def _recomputed(cache: Cache, kept: RecipeDocument, most: int, held_out: int, check_source: bool) -> _Again:
    """Recompute and compare a few rows, if the teacher is available."""
    if not (most or held_out) or not kept.columns:
        return _Again()
    if kept.kind == IMPORTED:
        return _Again(notes=("no row was recomputed: an imported layer does not record its teacher",))
    try:
        recipe = msgspec.structs.replace(reopened(kept, cache.root, "verify --align", check_source), device="auto")
        return _compared(cache, kept, recipe, most, held_out)
    except (RecipeNotContacted, TeacherUnusable, UnknownKind, HubNotFound, HubUnreachable, LibraryMissing) as absent:
        return _Again(notes=(f"no row was recomputed: {absent}",))
    except (RecipeInvalid, TeacherRaised, TeacherOutputInvalid, HookSilent) as other:
        return _Again(problems=(str(other),))


def _compared(cache: Cache, kept: RecipeDocument, recipe: TeacherRecipe, most: int, held_out: int) -> _Again:
    problems: dict[str, None] = {}
    count = 0
    try:
        for rows in sampled_rows(cache, most):
            count += len(rows)
            again, stored = recipe.make(cache.read(rows, recipe.reads)), cache.read(rows, _names(kept))
            before = np.asarray(cache.read(rows, [presence_name(kept.layer)])[presence_name(kept.layer)])
            lost = [failure for failure in again.failures if failure.reason == NOT_FINITE]
            if lost and np.count_nonzero(np.asarray(again.present)) < np.count_nonzero(before):
                problems[f"recomputed, sample '{lost[0].sample}' has {lost[0].detail}"] = None
                continue
            found = (_difference(column.name, again.columns, stored, column.dtype) for column in kept.columns)
            problems |= dict.fromkeys(problem for problem in found if problem)
        errors = interpolation_errors(kept.layer, recipe, cache, held_out)
    finally:
        recipe.release()
    return _Again(count, tuple(problems), interpolation=errors)


def _difference(name: str, made: Columns, stored: Columns, dtype: str) -> str | None:
    ours, theirs = made[name], stored[name]
    one = ours.values if isinstance(ours, Ragged) else np.asarray(ours)
    other = theirs.values if isinstance(theirs, Ragged) else np.asarray(theirs)
    if dtype not in TOLERANCES or one.shape != other.shape:
        return None if np.array_equal(one, other) else f"recomputed values of '{name}' differ"
    apart = np.abs(one.astype(np.float32) - other.astype(np.float32))
    allowed = TOLERANCES[dtype] * (1 + np.abs(other.astype(np.float32)))
    if (apart <= allowed).all():
        return None
    return f"recomputed values of '{name}' differ by up to {float(apart.max(initial=0)):g}"


def _bucket_problems(kept: RecipeDocument, buckets: tuple[float, ...]) -> Iterator[str]:
    declared = tuple(kept.fields.get("buckets", ()))
    if declared != buckets:
        yield f"its constants have the buckets {buckets}, but its recipe has {declared}"
    for column in kept.columns:
        if buckets and column.shape[:1] != (len(buckets),):
            yield f"'{column.name}' has {column.shape[:1]} timesteps, but there are {len(buckets)} buckets"


def _names(kept: RecipeDocument) -> list[str]:
    return [column.name for column in kept.columns]


def _base_names(kept: RecipeDocument) -> list[str]:
    prompts = any(column.name.endswith(PROMPT) for column in kept.columns)
    return [str(kept.fields["prompt_column"])] if prompts else []
