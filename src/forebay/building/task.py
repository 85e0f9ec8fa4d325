"""A build's task as a JSON document, and the maker that a worker opens from it.

The document names classes by their import path and has their fields: the store and its address, the recipe, the source,
the digests of the plan, the generation. A worker on any machine opens the same objects from it, and checks that it
sees the cache that is meant.
"""

import json
import socket
from collections.abc import Callable, Mapping
from dataclasses import dataclass, fields, is_dataclass
from functools import partial
from pkgutil import resolve_name
from typing import Any, get_type_hints

import msgspec
from msgspec.structs import force_setattr

from forebay.building.chunk_maker import ChunkJob
from forebay.cache.catalog import read_cache_document
from forebay.engine.base import WORKER, TaskDocument
from forebay.errors import CacheNotFound, EngineUnusable, RecipeInvalid
from forebay.kinds import WRONG
from forebay.recipe import AnyRecipe, canonical_json, fields_of, hooks_of
from forebay.source import Source
from forebay.store.base import Store
from forebay.store.retrying import RetryingStore

INLINE = "build in this process (workers=0, --workers 0)"
_OPENED = ("store", "recipe", "source", "known")  # fields of a job that have documents, or stay here


@dataclass(frozen=True, slots=True)
class BuildTask:
    """The chunks of a job, for an engine: the job itself in this process, a document elsewhere."""

    job: ChunkJob

    def begin(self, chunk: int) -> Callable[[], Any]:
        return self.job.begin(chunk)

    def document(self) -> TaskDocument:
        return job_document(self.job)


def job_document(job: ChunkJob) -> TaskDocument:
    """A job for the workers of an engine."""
    plain = {one.name: getattr(job, one.name) for one in fields(job) if one.name not in _OPENED}
    body = {
        "store": _store_document(job.store),
        "cache_id": read_cache_document(job.store).cache_id,
        "recipe": recipe_document(job.recipe),
        "source": None if job.source is None else source_document(job.source),
        "job": msgspec.to_builtins(plain, str_keys=True),
        WORKER: 0,
    }
    return TaskDocument(opener="forebay.building.task:open_build", body=body)


def open_build(body: Mapping[str, Any]) -> ChunkJob:
    """The job of a document; raises if this machine sees another cache at its address."""
    store = open_store_document(body["store"])
    if _cache_id(store) != body["cache_id"]:
        raise EngineUnusable(
            f"'{store.address}' on '{socket.gethostname()}' is not the cache that the build was started for",
            hint="build into a bucket, or into a folder that every machine mounts at the same path",
        )
    types = get_type_hints(ChunkJob)
    plain = {name: msgspec.convert(value, types[name], str_keys=True) for name, value in body["job"].items()}
    return ChunkJob(
        store=RetryingStore(store),
        recipe=hooks_of(open_recipe(body["recipe"])).placed(body[WORKER]),
        source=None if body["source"] is None else open_source(body["source"]),
        **plain,
    )


def _cache_id(store: Store) -> str:
    """The cache id; empty without a cache."""
    try:
        return read_cache_document(store).cache_id
    except CacheNotFound:
        return ""


def recipe_document(recipe: AnyRecipe) -> dict[str, Any]:
    """A recipe by its fields; a struct in a field that is declared as `Any`, such as a teacher, by its class too."""
    types = get_type_hints(type(recipe))
    structs = {name: value for name, value in _values(recipe).items() if isinstance(value, msgspec.Struct)}
    inner = {name: _class_path(value) for name, value in structs.items() if types.get(name) is Any}
    document = {"class": _class_path(recipe), "fields": fields_of(recipe), "inner": inner}
    _check_same(recipe, partial(open_recipe, document), lambda again: _fields_json(again) == _fields_json(recipe))
    return document


def open_recipe(document: Mapping[str, Any]) -> AnyRecipe:
    passed = dict(document["fields"])
    for name, path in document["inner"].items():
        passed[name] = msgspec.convert(passed[name], _imported(path))
    recipe: AnyRecipe = msgspec.convert(passed, _imported(document["class"]))
    for name, value in _values(recipe).items():
        # A whole number in a field of floats is another fingerprint than the float, so it stays one.
        if type(value) is float and type(passed.get(name)) is int:
            set_field: Any = force_setattr if isinstance(recipe, msgspec.Struct) else object.__setattr__
            set_field(recipe, name, passed[name])
    return recipe


def _values(recipe: AnyRecipe) -> dict[str, Any]:
    """The fields of a recipe as they are."""
    own: Any = recipe
    names = own.__struct_fields__ if isinstance(own, msgspec.Struct) else [one.name for one in fields(own)]
    return {name: getattr(recipe, name) for name in names}


def _fields_json(recipe: AnyRecipe) -> bytes:
    return canonical_json(fields_of(recipe))


def source_document(source: Source) -> dict[str, Any]:
    """A source by its fields; one that is not a dataclass, by its description."""
    try:
        values = msgspec.to_builtins(source) if is_dataclass(source) else dict(source.describe())
        values_in_json = json.loads(msgspec.json.encode(values))
    except (TypeError, ValueError) as error:
        raise _no_document(source, str(error)) from error
    document = {"class": _class_path(source), "fields": values_in_json}
    _check_same(source, partial(open_source, document), lambda again: again.describe() == source.describe())
    return document


def open_source(document: Mapping[str, Any]) -> Source:
    kind: Any = _imported(document["class"])
    by_fields = partial(msgspec.convert, type=kind) if is_dataclass(kind) else kind.from_description
    source: Source = by_fields(document["fields"])
    return source


def _store_document(store: Store) -> dict[str, Any]:
    try:
        return dict(store.document())
    except TypeError as error:  # it lives in this process
        raise RecipeInvalid(f"the cache cannot be opened by worker processes: {error}") from error


def open_store_document(document: Mapping[str, Any]) -> Store:
    store: Store = _imported(document["class"])(*document["arguments"])
    return store


def _imported(path: str) -> Any:
    try:
        return resolve_name(path)
    except (ImportError, AttributeError) as error:
        module = (error.name if isinstance(error, ImportError) else None) or path.partition(":")[0]
        raise EngineUnusable(
            f"'{path}' cannot be imported on '{socket.gethostname()}' ({type(error).__name__}: {error})",
            hint=f"install the package of module '{module}' there, or add its folder to PYTHONPATH",
        ) from error


def _class_path(value: object) -> str:
    kind = type(value)
    if kind.__module__ == "__main__":
        raise RecipeInvalid(
            f"{kind.__name__} is defined in the script itself, where worker processes cannot find it; "
            f"move it to a module, or {INLINE}"
        )
    if "<locals>" in kind.__qualname__:
        raise _no_document(value, "it is defined inside a function, so that it cannot be imported by name")
    return f"{kind.__module__}:{kind.__qualname__}"


def _check_same(value: object, opened: Callable[[], Any], is_same: Callable[[Any], bool]) -> None:
    """Raise if a worker would open the document as something else."""
    try:
        again = opened()
    except (*WRONG, ImportError) as error:
        raise _no_document(value, str(error)) from error
    if not is_same(again):
        raise _no_document(value, "what is opened from its fields has others")


def _no_document(value: object, problem: str) -> RecipeInvalid:
    return RecipeInvalid(
        f"{type(value).__name__} cannot be sent to worker processes as a document ({problem}); it needs fields that "
        f"read back from JSON; {INLINE} otherwise"
    )
