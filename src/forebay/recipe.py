"""Recipes and their fingerprints.

A recipe is frozen data. Everything that changes the bytes of a chunk is a field of it or the hash of a file it
depends on; nothing else is. Two recipes with one fingerprint make the same chunks.
"""

import hashlib
import json
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import asdict, dataclass, field, is_dataclass
from functools import lru_cache
from types import MappingProxyType
from typing import Any, ClassVar, Protocol, cast, runtime_checkable

import msgspec
import numpy as np

from forebay.columns import Array, Column, Columns, join
from forebay.errors import RecipeInvalid, RecipeMismatch, nearest
from forebay.fields import declared
from forebay.source import Failure, Sample, Source, SourceFile

SHOWN_CHARS = 24  # of a value in an error's text
NO_INPUTS: Mapping[str, str] = MappingProxyType({})
_INPUT = "layer "  # begins the name of a dependency that is a layer; what follows is its name
_CANONICAL = json.JSONEncoder(sort_keys=True, separators=(",", ":"), allow_nan=False)


@dataclass(frozen=True, slots=True)
class ChunkTarget:
    """The target size of a chunk: a number of rows, or of bytes before compression.

    `most_samples` limits the samples of a chunk; planning counts those of a file.
    """

    rows: int | None = None
    bytes: int | None = None
    most_samples: int | None = None


@dataclass(frozen=True, slots=True)
class Rows:
    """Rows and failures that a recipe made from a slice.

    Statistics are summed over chunks where they are shown. `present` belongs to layers on top of a base layer: False
    stands for a row that could not be made.
    """

    columns: Columns
    failures: tuple[Failure, ...] = ()
    statistics: Mapping[str, int | float | list[int]] = field(default_factory=dict)
    present: Array | None = None

    def __repr__(self) -> str:
        count = max(map(len, self.columns.values()), default=0)
        return f"<Rows: {count:,} rows of {', '.join(self.columns)}; {len(self.failures):,} failures>"


def join_rows(parts: Sequence[Rows], columns: Sequence[Column]) -> Rows:
    """The rows of several slices, one after the other, and the sums of their statistics."""
    names = {name: None for rows in parts for name in rows.statistics}
    sums = {name: _summed(name, [rows.statistics[name] for rows in parts if name in rows.statistics]) for name in names}
    return Rows(
        {column.name: join([rows.columns[column.name] for rows in parts]) for column in columns},
        tuple(failure for rows in parts for failure in rows.failures),
        sums,
    )


def _summed(name: str, values: Sequence[Any]) -> Any:
    try:
        return np.asarray(np.sum(values, axis=0)).tolist()
    except (TypeError, ValueError) as error:
        raise RecipeInvalid(
            f"the statistic '{name}' cannot be summed: {error}", hint="store a number or a list"
        ) from error


Identity = Callable[[Sample], bytes | None]


class RecipeHooks:
    """The base of every recipe: its optional hooks, each with a default.

        class MyRecipe(RecipeHooks, msgspec.Struct, frozen=True, kw_only=True): ...

    A hook that takes no argument may be overridden by a class attribute or a property. `forebay.testing.RecipeContract`
    finds a hook that is misspelled.
    """

    __slots__ = ()

    workers: ClassVar[int | None] = None  # processes that make it unless the caller says; 0: the calling one
    judged_by: ClassVar[int | None] = None  # samples that are enough for an estimate, where making one takes long
    numbers_lines: ClassVar[bool] = False  # failures have the line number of their sample, where samples are lines
    sample_ids: ClassVar[str] = ""  # the column that identifies rows
    # The options by which `forebay build KIND` opens a source; empty: the recipe is not built from the command line.
    source_settings: ClassVar[str] = "forebay.sources.source_settings:RawSettings"
    located: ClassVar[tuple[str, ...]] = ()  # fields that say where, not what: outside the fingerprint; `a.b` is b in a

    @property
    def default_layer(self) -> str:
        """The layer's name unless the caller chooses one; empty: the recipe's kind."""
        return ""

    @property
    def reads(self) -> tuple[str, ...]:
        """The columns that `make` is passed. A recipe that reads none makes the base layer, from samples."""
        return ()

    @property
    def identity(self) -> Identity | None:
        """Return 16 bytes of a hash, equal for equal samples; None: the recipe does not deduplicate.

        Planning leaves out every sample that equals an earlier one, in the order of the source. A sample whose identity
        is None is never left out.
        """
        return None

    def dependencies(self) -> Mapping[str, str]:
        """Name -> hash of every file that decides bytes; part of the fingerprint."""
        return {}

    def versions(self) -> Mapping[str, str]:
        """The libraries that shape the bytes; recorded in generations."""
        return {}

    def constants(self) -> Mapping[str, Array]:
        """The columns that are equal for all rows, stored once."""
        return {}

    def check_source(self, source: Source, files: Sequence[SourceFile]) -> None:
        """Raise `SourceInvalid` if a new layer must not be made from this source."""

    def settled(self, stored: Mapping[str, Any] | None, survey: Any) -> tuple[Any, tuple[str, ...]]:
        """Return the recipe with every choice made, and notes about the choices.

        `stored` are the fields of the layer if it exists. `survey()` returns the first samples of the source,
        `survey.annotations()` the metadata of all, and `survey.rows(columns, count)` the first rows of the cache.
        """
        return self, ()

    def placed(self, worker: int) -> Any:
        """Return the recipe for a worker process of this machine, by its number: it may choose a device."""
        return self

    def reopened(self, dependencies: Mapping[str, str], constants: str) -> Any:
        """Return the recipe of an existing cache; `constants` is the file of its constants."""
        return self

    def on_hub(self) -> tuple[str, ...]:
        """The names that would be fetched from the hub, found without a request."""
        return ()

    def release(self) -> tuple[str, ...]:
        """Release loaded models when a build ends in this process; return notes for its report."""
        return ()

    def rows_from(self, statistics: Mapping[str, Any]) -> float | None:
        """Estimate the rows of a large chunk from these statistics; None means the rows that were made."""
        return None

    def grown(self, statistics: Mapping[str, float]) -> tuple[str, ...]:
        """Return notes about the rows that `grow` appended, by the sums of their statistics."""
        return ()

    @staticmethod
    def figures(fields: Mapping[str, Any], statistics: Mapping[str, Any], holds: Mapping[str, int]) -> dict[str, Any]:
        """Derive shares and ratios for a summary from the sums over all chunks; `holds`: chunks, rows, bytes."""
        return {}

    @staticmethod
    def metadata(fields: Mapping[str, Any], statistics: Mapping[str, Any], holds: Mapping[str, int]) -> dict[str, Any]:
        """Return the same figures under the names of another format."""
        return {}


class RecipeMeta(msgspec.StructMeta):
    """The type of built-in recipes: rejects unknown fields and suggests the nearest one."""

    def __call__(cls, *values: Any, **fields: Any) -> Any:
        for name in (name for name in fields if name not in cls.__struct_fields__):
            raise RecipeInvalid(f"{cls.__name__} has no field '{name}'", hint=nearest(name, cls.__struct_fields__))
        return super().__call__(*values, **fields)


def hooks_of(recipe: object) -> RecipeHooks:
    """A recipe or its class as `RecipeHooks`, which every recipe inherits."""
    if isinstance(recipe, RecipeHooks):
        return recipe
    if isinstance(recipe, type) and issubclass(recipe, RecipeHooks):
        return cast(RecipeHooks, recipe)  # for hooks that are class attributes or static
    name = recipe.__name__ if isinstance(recipe, type) else type(recipe).__name__
    raise TypeError(f"{name} is not a recipe: it must inherit forebay.RecipeHooks")


@runtime_checkable
class Recipe(Protocol):
    """How samples become rows of the base layer: the required members of a recipe. `RecipeHooks` has the others."""

    kind: ClassVar[str]
    revision: ClassVar[int]

    def columns(self) -> tuple[Column, ...]: ...

    def chunk_target(self) -> ChunkTarget: ...

    def make(self, samples: Iterable[Sample]) -> Rows: ...


@runtime_checkable
class RowRecipe(Recipe, Protocol):
    """A recipe that makes one row of one sample, or raises `ImageUnreadable`.

    A row cache stores rows without tags under a key of `row_fields`; `with_tags` adds them, for any vocabulary.
    """

    def make_row(self, sample: Sample) -> dict[str, Array]: ...

    def row_fields(self) -> Mapping[str, Any]: ...

    def with_tags(self, row: dict[str, Array]) -> dict[str, Array]: ...


@runtime_checkable
class LayerRecipe(Protocol):
    """A recipe that adds columns to the rows of a base layer: `make` gets the columns in `reads`.

    They are columns of the base layer or of other existing layers. A column of another layer comes with the presence
    bits of that layer, `<layer>.present`; a row that is absent there is absent here as well.
    `RecipeHooks` has the optional methods.
    """

    kind: ClassVar[str]
    revision: ClassVar[int]

    @property
    def reads(self) -> tuple[str, ...]: ...

    def columns(self) -> tuple[Column, ...]: ...

    def make(self, rows: Columns) -> Rows: ...


AnyRecipe = Recipe | LayerRecipe


class RecipeDocument(msgspec.Struct, frozen=True, kw_only=True, forbid_unknown_fields=True):
    """The stored form of a recipe, `recipes/<layer>.json`."""

    format_version: int
    layer: str
    kind: str
    revision: int
    fingerprint: str
    fields: dict[str, Any]
    dependencies: dict[str, str]
    reads: tuple[str, ...]
    sample_ids: str
    columns: tuple[Column, ...]


def canonical_json(value: Any) -> bytes:
    """A value as canonical JSON for hashing: sorted keys, no spaces, ASCII."""
    return _CANONICAL.encode(value).encode("ascii")


def fields_of(recipe: AnyRecipe) -> dict[str, Any]:
    """The fields of a recipe as they read back from JSON."""
    if not isinstance(recipe, msgspec.Struct) and (not is_dataclass(recipe) or isinstance(recipe, type)):
        raise RecipeInvalid(f"a recipe is a msgspec.Struct or a dataclass, not {type(recipe).__name__}")
    try:
        values = msgspec.to_builtins(recipe) if isinstance(recipe, msgspec.Struct) else asdict(recipe)
        restored: dict[str, Any] = json.loads(canonical_json(values))
    except (TypeError, ValueError) as error:
        raise RecipeInvalid(f"a field of the recipe '{recipe.kind}' cannot be written as JSON: {error}") from error
    return restored


def check_fields(recipe: msgspec.Struct) -> None:
    """Reject a field of another type than its recipe declares; called when the recipe is made."""
    kind = type(recipe)
    for name, declared_type in _field_types(kind).items():
        value = getattr(recipe, name)
        try:
            if value is not msgspec.UNSET:
                msgspec.convert(value, declared_type)
        except msgspec.ValidationError as error:
            refusal = declared(kind)[name].refusal(value, error)
            raise RecipeInvalid(f"{name} is {repr(value)[:80]}; {refusal}") from error


@lru_cache(maxsize=64)
def _field_types(kind: type[msgspec.Struct]) -> dict[str, Any]:
    return {field.name: field.type for field in msgspec.structs.fields(kind)}


def check_recipe(recipe: AnyRecipe) -> None:
    """Reject a recipe with fields of undeclared types before writing any file."""
    if isinstance(recipe, msgspec.Struct):
        try:
            msgspec.convert(fields_of(recipe), type(recipe))
        except msgspec.ValidationError as error:
            raise RecipeInvalid(f"the recipe '{recipe.kind}' has a field of the wrong type: {error}") from error


def dependencies_of(recipe: AnyRecipe) -> dict[str, str]:
    return dict(hooks_of(recipe).dependencies())


def identity_of(recipe: AnyRecipe) -> Identity | None:
    """The identity of a sample, or None if the recipe does not deduplicate."""
    return hooks_of(recipe).identity


def reads_of(recipe: AnyRecipe) -> tuple[str, ...]:
    return tuple(hooks_of(recipe).reads)


def input_names(layers: Mapping[str, str]) -> dict[str, str]:
    """Layers that a recipe reads, layer -> fingerprint, as dependencies."""
    return {f"{_INPUT}{layer}": mark for layer, mark in layers.items()}


def inputs_in(dependencies: Mapping[str, str]) -> dict[str, str]:
    """Return the dependencies that are layers."""
    return {name: mark for name, mark in dependencies.items() if name.startswith(_INPUT)}


def input_layers(stored: RecipeDocument) -> dict[str, str]:
    """The layers that a stored recipe reads: layer -> its fingerprint when this one was begun."""
    return {name.removeprefix(_INPUT): mark for name, mark in inputs_in(stored.dependencies).items()}


def fingerprint(recipe: AnyRecipe, inputs: Mapping[str, str] = NO_INPUTS, stored: Mapping[str, str] = NO_INPUTS) -> str:
    """SHA-256 over kind, revision, fields, and the hashes of the files and layers that the recipe depends on.

    `inputs` are the layers that it reads, from `input_names`. A renamed file with the same hash as in the `stored`
    dependencies counts under its stored name.
    """
    identity = {
        "kind": recipe.kind,
        "revision": recipe.revision,
        "fields": _without_places(fields_of(recipe), recipe),
        "dependencies": {**_stored_names(dependencies_of(recipe), stored), **inputs},
    }
    return hashlib.sha256(canonical_json(identity)).hexdigest()


def document_fingerprint(stored: RecipeDocument, kind: type) -> str:
    """The fingerprint that the fields of a document give; `kind` is the class of its recipe."""
    identity = {
        "kind": stored.kind,
        "revision": stored.revision,
        "fields": _without_places(stored.fields, cast(AnyRecipe, kind)),
        "dependencies": stored.dependencies,
    }
    return hashlib.sha256(canonical_json(identity)).hexdigest()


def is_same_recipe(stored: RecipeDocument, recipe: AnyRecipe, inputs: Mapping[str, str] | None = None) -> bool:
    """True if a recipe makes the content of a layer; `inputs` default to those that the layer was made from."""
    now = inputs_in(stored.dependencies) if inputs is None else inputs
    return fingerprint(recipe, now, stored.dependencies) == stored.fingerprint


def _stored_names(dependencies: Mapping[str, str], stored: Mapping[str, str]) -> dict[str, str]:
    """Dependencies under their stored names: a file that was renamed has the same hash and folder."""
    gone = {(_folder(name), mark): name for name, mark in stored.items() if name not in dependencies}
    return {
        name if name in stored else gone.get((_folder(name), mark), name): mark for name, mark in dependencies.items()
    }


def _folder(name: str) -> str:
    return name.rpartition("/")[0]


def document(
    recipe: AnyRecipe,
    layer: str,
    format_version: int,
    inputs: Mapping[str, str] = NO_INPUTS,
    stored: Mapping[str, str] = NO_INPUTS,
) -> RecipeDocument:
    return RecipeDocument(
        format_version=format_version,
        layer=layer,
        kind=recipe.kind,
        revision=recipe.revision,
        fingerprint=fingerprint(recipe, inputs, stored),
        fields=fields_of(recipe),
        dependencies={**_stored_names(dependencies_of(recipe), stored), **inputs},
        reads=reads_of(recipe),
        sample_ids=hooks_of(recipe).sample_ids,
        columns=tuple(recipe.columns()),
    )


def differing_fields(
    stored: RecipeDocument, recipe: AnyRecipe, inputs: Mapping[str, str] | None = None
) -> dict[str, str]:
    """The fields in which a stored recipe and another one differ: name -> stored value → value of the other.

    Nested fields are listed as `a.b`.
    """
    now = inputs_in(stored.dependencies) if inputs is None else inputs
    names = ("kind", "revision")
    fields = (_without_places(fields, recipe) for fields in (stored.fields, fields_of(recipe)))
    pairs: tuple[tuple[Mapping[str, Any], Mapping[str, Any]], ...] = (
        ({name: getattr(stored, name) for name in names}, {name: getattr(recipe, name) for name in names}),
        (next(fields), next(fields)),
        (stored.dependencies, {**_stored_names(dependencies_of(recipe), stored.dependencies), **now}),
    )
    flat = [(_flat(old), _flat(new)) for old, new in pairs]
    return {
        name: " → ".join(_excerpts(_written(old, name), _written(new, name)))
        for old, new in flat
        for name in sorted(old.keys() | new.keys())
        if _written(old, name) != _written(new, name)
    }


def same_document(stored: RecipeDocument, current: RecipeDocument, recipe: AnyRecipe) -> bool:
    """Whether two documents of a recipe are equal, apart from the folders of its dependencies."""
    one, other = (
        msgspec.structs.replace(document, fields=_without_places(document.fields, recipe))
        for document in (stored, current)
    )
    return one == other


def _without_places(fields: Mapping[str, Any], recipe: AnyRecipe) -> dict[str, Any]:
    """The fields without those for locations; `a.b` is the field `b` of the object in `a`."""
    left = dict(fields)
    for name in hooks_of(recipe).located:
        holder, _, inner = name.partition(".")
        if not inner:
            left.pop(holder, None)
        elif isinstance(left.get(holder), Mapping):
            left[holder] = {key: value for key, value in left[holder].items() if key != inner}
    return left


def _flat(fields: Mapping[str, Any]) -> dict[str, Any]:
    flat: dict[str, Any] = {}
    for name, value in fields.items():
        if isinstance(value, Mapping) and value:
            flat |= {f"{name}.{inner}": leaf for inner, leaf in _flat(value).items()}
        else:
            flat[name] = value
    return flat


def _excerpts(*fields: bytes | None) -> list[str]:
    """Two values of a field for an error message; long ones are cut to the first difference."""
    texts = [(field or b"nothing").decode() for field in fields]
    differ = (at for at, (old, new) in enumerate(zip(*texts, strict=False)) if old != new)
    start = max(0, next(differ, min(map(len, texts))) - SHOWN_CHARS // 2)
    if all(len(text) <= SHOWN_CHARS for text in texts):
        return texts
    return [
        f"{'…' if start else ''}{text[start : start + SHOWN_CHARS]}{'…' if len(text) > start + SHOWN_CHARS else ''}"
        for text in texts
    ]


def _written(fields: Mapping[str, Any], name: str) -> bytes | None:
    """A field in the form of the fingerprint, where 1, 1.0, true and a missing field all differ."""
    return canonical_json(fields[name]) if name in fields else None


def recipe_mismatch(root: str, layer: str, changed: Mapping[str, str], is_base: bool = False) -> RecipeMismatch:
    differs = ", ".join(f"{name}: {how}" for name, how in changed.items())
    hint = f"resume with its own recipe (`forebay build {root}`), or build into a new folder"
    if not is_base:
        hint = f"resume with its own recipe, replace the layer (`--replace {layer}`), or build into a new folder"
    message = f"layer '{layer}' of the cache at '{root}' was built by another recipe (differs in: {differs})"
    return RecipeMismatch(message, hint=hint, root=root, layer=layer, changed=dict(changed))
