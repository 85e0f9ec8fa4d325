"""A build's task as a JSON document, and the maker that a worker opens from it.

The document names classes by their import path and has their fields: the store and its address, the recipe, the source,
the digests of the plan, the generation. A worker on any machine opens the same objects from it, and checks that it
sees the cache that is meant.

Where a recipe leaves out duplicates, workers find the identities of samples too (`Census`), which reads all of them.
The draft of the plan and what is found in each chunk are kept beside the plan until it is written.
"""

import json
import os
import socket
import time
from collections import deque
from collections.abc import Callable, Mapping
from contextlib import closing
from dataclasses import dataclass, fields, is_dataclass
from functools import partial
from pkgutil import resolve_name
from typing import Any, get_type_hints

import msgspec
import numpy as np
from msgspec.structs import force_setattr

from forebay.building import chunk_maker
from forebay.building.chunk_maker import ChunkJob, Job
from forebay.building.dedup import ChunkIdentities, bytes_up_to, chunk_question
from forebay.building.planning import OnCut
from forebay.cache.catalog import read_cache_document
from forebay.cache.plan import KeptResults, Segment, decode_segment
from forebay.engine.base import WORKER, Died, Done, Engine, Failed, TaskDocument
from forebay.errors import CacheNotFound, CacheNotShared, ForebayError, NotImportable, RecipeInvalid, SourceNotShared
from forebay.kinds import WRONG
from forebay.recipe import AnyRecipe, Identity, Recipe, canonical_json, fields_of, fingerprint, hooks_of, identity_of
from forebay.source import Source
from forebay.store.base import Store

INLINE = "build in this process (workers=0, --workers 0)"
_OPENED = ("store", "recipe", "source", "chunks", "known")  # fields of a job that have documents, or stay here


def job_document(job: Job) -> TaskDocument:
    """A job for the workers of an engine."""
    chunks = job.chunks
    body = {
        "store": _store_document(chunks.store),
        "cache_id": read_cache_document(chunks.store).cache_id,
        "recipe": recipe_document(chunks.recipe),
        "source": None if chunks.source is None else source_document(chunks.source),
        "chunks": _fields_document(chunks),
        "job": _fields_document(job),
        WORKER: 0,
    }
    return TaskDocument(opener="forebay.building.task:open_build", body=body)


def open_build(body: Mapping[str, Any]) -> Job:
    """The job of a document, once its cache is the one that is seen here."""
    store = open_store_document(body["store"])
    if _cache_id(store) != body["cache_id"]:
        raise CacheNotShared(store.address, socket.gethostname())
    source = None if body["source"] is None else open_source(body["source"])
    recipe = hooks_of(open_recipe(body["recipe"])).placed(body[WORKER])
    chunks: ChunkJob = _opened_job(body["chunks"], store=store, recipe=recipe, source=source)
    job: Job = _opened_job(body["job"], chunks=chunks)
    return job


def _cache_id(store: Store) -> str:
    """Empty where there is no cache."""
    try:
        return read_cache_document(store).cache_id
    except CacheNotFound:
        return ""


@dataclass(frozen=True, slots=True)
class MachineTrial:
    """A task without chunks: it sees whether a machine reaches what a build needs, before the build is planned."""

    store: Store
    source: Source | None
    recipe: AnyRecipe
    file: str  # of the source, by its path; empty: none
    sign: str  # a file beside a cache that is not there yet

    def begin(self, chunk: int) -> Callable[[], Any]:
        raise NotImplementedError("a trial has no chunks")

    def document(self) -> TaskDocument:
        body = {
            "store": _store_document(self.store),
            "cache_id": _cache_id(self.store),
            "recipe": recipe_document(self.recipe),
            "source": None if self.source is None else source_document(self.source),
            "file": self.file,
            "sign": self.sign,
        }
        return TaskDocument(opener="forebay.building.task:open_trial", body=body)


def open_trial(body: Mapping[str, Any]) -> None:
    """Refuse a machine that cannot import the recipe, or sees another cache or not the source."""
    store, host = open_store_document(body["store"]), socket.gethostname()
    if _cache_id(store) != body["cache_id"] or (body["sign"] and not os.path.isfile(body["sign"])):
        raise CacheNotShared(store.address, host)
    open_recipe(body["recipe"])
    if body["file"]:
        try:
            open_source(body["source"]).look(body["file"])
        except OSError as error:
            raise SourceNotShared(body["file"], host, f"{type(error).__name__}: {error}") from error


def preload_document(recipe: AnyRecipe) -> TaskDocument:
    """Return the document by which a worker loads what a recipe needs, before there is a task."""
    return TaskDocument(opener="forebay.building.task:preload_recipe", body=recipe_document(recipe))


def preload_recipe(body: Mapping[str, Any]) -> None:
    hooks_of(open_recipe(body)).preload()


@dataclass(frozen=True, slots=True)
class StartTrial:
    """A task of which a chunk is nothing: it shows how long a worker takes until it can begin."""

    recipe: AnyRecipe

    def begin(self, chunk: int) -> Callable[[], None]:
        return lambda: None

    def document(self) -> TaskDocument:
        return TaskDocument(opener="forebay.building.task:open_start", body=recipe_document(self.recipe))


def open_start(body: Mapping[str, Any]) -> StartTrial:
    preload_recipe(body)
    return StartTrial(open_recipe(body))


def start_seconds(engine: Engine, recipe: AnyRecipe) -> float:
    """Start a worker, wait until it could make a chunk, and return how long that took; 0 where it cannot be started."""
    started = time.perf_counter()
    with closing(engine):
        try:
            engine.start(StartTrial(recipe), 1)
        except ForebayError:  # a build says what is wrong
            return 0.0
        engine.submit(engine.idle()[0], 0)
        while not engine.poll(POLL_SECONDS):
            pass
        return time.perf_counter() - started


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
        kept = json.loads(msgspec.json.encode(values))
    except (TypeError, ValueError) as error:
        raise _no_document(source, str(error)) from error
    document = {"class": _class_path(source), "fields": kept}
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
        raise NotImportable(path, module, socket.gethostname(), f"{type(error).__name__}: {error}") from error


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
    """Refuse what a worker would open as something else."""
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


def _fields_document(job: Job | ChunkJob) -> dict[str, Any]:
    plain = {field.name: getattr(job, field.name) for field in fields(job) if field.name not in _OPENED}
    return {"class": type(job).__name__, "fields": msgspec.to_builtins(plain, str_keys=True)}


def _opened_job(document: Mapping[str, Any], **opened: Any) -> Any:
    kind = vars(chunk_maker)[document["class"]]
    types = get_type_hints(kind)
    plain = {name: msgspec.convert(value, types[name], str_keys=True) for name, value in document["fields"].items()}
    return kind(**plain, **{name: value for name, value in opened.items() if name in types})


POLL_SECONDS = 0.5
MOST_DEATHS = 10  # of workers, before the chunks that are left are read by the builder itself


@dataclass(frozen=True, slots=True)
class Census:
    """Finds the identities of chunks; what a worker opens."""

    store: Store
    source: Source
    recipe: Recipe
    segment: Segment
    digest: str

    def begin(self, chunk: int) -> Callable[[], None]:
        found = ChunkIdentities.read(self.source, self._identity(), self.segment, chunk).encode()
        return lambda: KeptResults(self.store).keep(found, *self.question(chunk))

    def question(self, chunk: int) -> tuple[Any, ...]:
        return chunk_question(fingerprint(self.recipe), self.digest, chunk)

    def document(self) -> TaskDocument:
        body = {
            "store": dict(self.store.document()),
            "source": source_document(self.source),
            "recipe": recipe_document(self.recipe),
            "segment": self.digest,
        }
        return TaskDocument(opener="forebay.building.task:open_census", body=body)

    def _identity(self) -> Identity:
        identity = identity_of(self.recipe)
        assert identity is not None
        return identity


def open_census(body: Mapping[str, Any]) -> Census:
    store, digest = open_store_document(body["store"]), body["segment"]
    draft = KeptResults(store).find("draft", digest)
    segment, found = decode_segment(memoryview(draft or b""), store.address, "the draft of the plan")
    if found != digest:
        raise ForebayError(f"the draft of the plan is not at '{store.address}' as it is seen here")
    recipe: Any = open_recipe(body["recipe"])
    return Census(store, open_source(body["source"]), recipe, segment, digest)


@dataclass(frozen=True, slots=True)
class CensusTakers:
    """An engine that reads chunks for the planner. What it cannot read the planner reads itself, and says why."""

    engine: Engine
    slots: int
    store: Store
    source: Source
    recipe: Recipe
    on_cut: OnCut

    def __call__(self, segment: Segment, kept: KeptResults) -> None:
        if not kept.is_used or self.slots < 2:
            return
        task = Census(self.store, self.source, self.recipe, segment, segment.digest())
        missing = [chunk for chunk in range(len(segment)) if kept.find(*task.question(chunk)) is None]
        kept.keep(b"".join(map(bytes, segment.encode())), "draft", task.digest)
        try:
            self.engine.start(task, self.slots)
        except (ForebayError, TypeError):  # no document can be made of it
            return
        try:
            self._read(segment, deque(missing))
        finally:
            self.engine.stop()

    def _read(self, segment: Segment, waiting: deque[int]) -> None:
        total, running, deaths = len(waiting), 0, 0
        sizes, size = np.diff(bytes_up_to(segment), prepend=0), int(segment.files.tensors["file_size"].sum())
        passed = size - int(sizes[list(waiting)].sum())
        while (waiting or running) and deaths < MOST_DEATHS:
            for slot in self.engine.idle():
                if waiting:
                    self.engine.submit(slot, waiting.popleft())
                    running += 1
            for event in self.engine.poll(POLL_SECONDS):
                match event:
                    case Died():
                        deaths += 1
                        lost = {*event.lost, *(() if event.chunk is None else (event.chunk,))}
                        running -= len(lost)
                        waiting.extend(lost)
                    case Done() | Failed():
                        running -= 1
                        passed += int(sizes[event.chunk])
            done = segment.file_count * (total - len(waiting) - running) // max(1, total)
            self.on_cut(done, segment.file_count, min(passed, size), size)
