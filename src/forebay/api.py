"""The calls that tie the rooms together: `build`, `grow`, `repair`, `estimate` and their kin.

Everything here takes the root of a cache (a folder's path or a store) and answers with a record.
"""

import errno
import os
import socket
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import ExitStack, closing, contextmanager, suppress
from dataclasses import replace
from functools import partial
from typing import Any, Literal, cast

import msgspec

from forebay.building.begin import prepare_base, prepare_layer, resolve_recipe
from forebay.building.builder import BuildOptions
from forebay.building.failures import check_failures
from forebay.building.grow_plan import append_to_plan, named_alike
from forebay.building.layer_build import (
    LayerBuild,
    base_workplace,
    build_chunks,
    in_order,
    layer_workplace,
    with_same_source,
)
from forebay.building.refresh_plan import amend_plan, refreshed_notes, take_back
from forebay.building.repair_chunks import check_repaired, layer_height, repair_chunks
from forebay.building.repair_index import RepairInputs, RepairLog, repair_index
from forebay.building.trial import estimate_build
from forebay.cache.catalog import (
    chunk_files,
    generation_numbers,
    layers_of,
    load_generation,
    newest_generation,
    outdated_chunks,
    read_cache_document,
)
from forebay.cache.catalog import read_recipe_document as kept_recipe
from forebay.cache.claims import LEASE_SECONDS
from forebay.cache.clean import clean_cache
from forebay.cache.copy import copy_cache
from forebay.cache.plan import Plan, load_plan
from forebay.cache.publish import builder_versions, listed_plan
from forebay.cache.records import (
    GONE,
    BuildReport,
    CleanReport,
    CopyReport,
    Estimate,
    Gaps,
    LayerSummary,
    Progress,
    RefreshReport,
    RekeyReport,
    RepairReport,
    Status,
    Summary,
    VerifyReport,
)
from forebay.cache.rekey import rekey_cache
from forebay.cache.source_check import refresh_advice
from forebay.cache.status import SHOWN_FAILURES, cache_status, find_gaps, summarize_cache
from forebay.cache.verify import check_index, newest_sound, published_plan, stale_sources, verify_cache
from forebay.columns import Array
from forebay.engine import InlineEngine, LocalEngine
from forebay.engine.base import Engine
from forebay.errors import (
    BuildFailed,
    Damaged,
    ForebayError,
    KeyRefused,
    LayerNotFound,
    LibraryMissing,
    RangeInvalid,
    RecipeInvalid,
    SourceInvalid,
    SourceNeeded,
    SourceNotContacted,
    UnknownKind,
)
from forebay.format import layout
from forebay.format.codec import MAX_BLOCK_BYTES
from forebay.format.generation import ChunkTable, Generation
from forebay.format.sealed import hmac_key, short_key_note
from forebay.kinds import WRONG, recipe_class, remote_source, reopen_recipe, reopen_source
from forebay.read.cache import check_pins
from forebay.recipe import AnyRecipe, LayerRecipe, Recipe, RecipeHooks, dependencies_of, hooks_of, reads_of, versions_of
from forebay.source import Source, source_notes
from forebay.store import LocalStore, Root, Store, open_store

LONG_WORK_BYTES = 64 * 1024 * 1024
OnProgress = Callable[[Progress], None]
Mode = Literal["forward", "inverse"]


def build(
    root: Root,
    source: Source | None,
    recipe: AnyRecipe,
    *,
    layer: str | None = None,
    workers: int | None = None,
    mode: Mode = "forward",
    start_chunk: int | None = None,
    end_chunk: int | None = None,
    memory_limit: int | None = None,
    max_failures: int | float | None = None,
    skip_unreadable: bool = False,
    lease_seconds: float = LEASE_SECONDS,
    on_progress: OnProgress | None = None,
) -> BuildReport:
    """Compute what is missing of a layer, and nothing else.

    A recipe that `reads` columns adds a layer on the rows that are there; it needs no source. `workers=0` makes
    chunks in this process. `mode="inverse"` first checks every chunk that is there, then fills gaps from the far end.
    The range is inclusive. `max_failures` is a count, or a share below 1; without it a build stops at a chunk of which
    all samples fail. `skip_unreadable` leaves out damaged files of the source, which the report lists.
    """
    _check_recipe(recipe)
    store = open_store(root)
    _refuse_tier(store)
    name = layer or layer_name(recipe)
    workers = hooks_of(recipe).workers if workers is None else workers
    with closing(_engine(workers)) as engine, _letting_go(recipe) as said:
        if source is not None and _is_long_work(store, source):
            engine.preload(recipe, 1 if memory_limit else _worker_count(workers))
        settled, notes = resolve_recipe(store, source, recipe, name)
        notes = (*notes, *source_notes(source, store.address), *short_key_note(hmac_key()))
        told = _told_in_bytes(source, on_progress or _silent)
        terms = _terms(settled, workers, memory_limit, max_failures, lease_seconds, told)
        place = _prepared(store, source, settled, name, terms, skip_unreadable).noting(notes)
        if mode == "inverse" and newest_generation(store) is not None:
            mended = _repair(store, source, settled, None, lambda: (engine, terms))
            if mended.failed:
                raise BuildFailed(store.address, _by_chunk(mended.failed))
            place = place.noting(_mended(mended))
        _check_range(store, place, start_chunk)
        wanted = in_order(place.chunks, mode, start_chunk, end_chunk)
        report = build_chunks(place, wanted, engine, terms)
    # Also of chunks that were there: the same command must not succeed when it is run again.
    check_failures(store.address, report.failures, report.samples, max_failures)
    return msgspec.structs.replace(report, notes=(*report.notes, *said))


def build_layers(root: Root, recipes: Mapping[str, AnyRecipe], **terms: Any) -> list[BuildReport]:
    """Add several layers, by name, one after the other: each is complete before the next begins.

    What a layer needs in memory is let go before the next is begun, and what is complete is passed over without it.
    Missing files that a layer needs are reported before the first is begun. The further arguments are those of `build`.
    """
    for recipe in recipes.values():
        dependencies_of(recipe)
    return [build(root, None, recipe, layer=layer, **terms) for layer, recipe in recipes.items()]


def grow(
    root: Root,
    source: Source,
    *,
    recipe: Recipe | None = None,
    workers: int | None = None,
    memory_limit: int | None = None,
    max_failures: int | float | None = None,
    skip_unreadable: bool = False,
    lease_seconds: float = LEASE_SECONDS,
    on_progress: OnProgress | None = None,
) -> BuildReport:
    """Append new files, and what was appended to known ones, as a new segment of the plan; then build it.

    A known file with other content is an error that names it. The further arguments are those of `build`.
    """
    _check_source(source)
    store = open_store(root)
    base = read_cache_document(store).base
    if recipe is None:
        check_kept_texts(store)
    own = recipe or cast(Recipe, _kept_recipe(store, base, "repair", False))
    workers = hooks_of(own).workers if workers is None else workers
    with closing(_engine(workers)) as engine, _letting_go(own) as said:
        own, notes = resolve_recipe(store, source, own, base)
        prepare_layer(store, own, base)
        told = _told_in_bytes(source, on_progress or _silent)
        terms = _terms(own, workers, memory_limit, max_failures, lease_seconds, told)
        alike = named_alike(source, load_plan(store))
        notes = (*notes, *source_notes(source, store.address), *short_key_note(hmac_key()))
        plan, _ = append_to_plan(store, alike, own, partial(_planning, terms), memory_limit, skip_unreadable)
        before = newest_generation(store)
        place = base_workplace(store, alike, own, base, plan, before, skip_unreadable)
        report = build_chunks(place.noting(notes), place.chunks, engine, terms)
    check_failures(store.address, report.failures, report.samples, max_failures)
    grown = _grown(own, base, before, newest_generation(store))
    return msgspec.structs.replace(report, notes=(*report.notes, *said, *grown))


def refresh(
    root: Root,
    *,
    source: Source | None = None,
    check_source: bool = False,
    recipes: Mapping[str, AnyRecipe] | None = None,
    drop_missing: bool = False,
    workers: int | None = None,
    memory_limit: int | None = None,
    max_failures: int | float | None = None,
    lease_seconds: float = LEASE_SECONDS,
    on_progress: OnProgress | None = None,
) -> RefreshReport:
    """Make the chunks of changed source files again, as new revisions in a new generation.

    Chunks keep their numbers, and generations that are there keep their files. Chunks of further layers that were made
    from the old rows are made again too if their recipe can be opened here, or is passed in `recipes` by the name of
    its layer; otherwise they are missing, and named. `drop_missing` leaves out the samples of files that are gone;
    their rows are kept otherwise. A source on another machine that the cache names is read only with `check_source`,
    or where it is passed.
    """
    store, started = open_store(root), time.monotonic()
    base, before = read_cache_document(store).base, newest_generation(store)
    if before is not None:
        check_index(store, before)
    given = recipes or {}
    if base not in given:
        check_kept_texts(store)
    table = before.table(base) if before is not None else ChunkTable.of([])
    known = listed_plan(store, before)
    reading = named_alike(_source_for(store, source, check_source, known, "refresh"), known)
    kept = given.get(base) or _kept_recipe(store, base, "refresh", check_source)
    own, notes = resolve_recipe(store, reading, cast(Recipe, kept), base)
    prepare_layer(store, own, base)
    workers = _own_workers(store) if workers is None else workers
    told = _told_in_bytes(reading, on_progress or _silent)
    terms = _terms(own, workers, memory_limit, max_failures, lease_seconds, told)
    amended = amend_plan(store, reading, drop_missing=drop_missing)
    chunks = tuple(outdated_chunks(table, amended.plan.revisions(base)).tolist())
    with closing(_engine(workers)) as engine, _letting_go(own) as said:
        try:
            place = base_workplace(store, reading, own, base, amended.plan, before).noting(notes)
            built = build_chunks(place, chunks, engine, terms)
        except BaseException:
            with suppress(OSError, ForebayError):  # why it failed is what counts; the next refresh resumes it
                take_back(store)
            raise
        layers, missing = _refresh_layers(store, given, check_source, engine, terms)
    newest = newest_generation(store)
    return RefreshReport(
        root=store.address,
        changed=dict(amended.changed),
        dropped=amended.dropped,
        touched=amended.touched,
        chunks=chunks,
        rows_before=int(table.rows.sum()),
        rows=int(newest.table(base).rows.sum()) if newest is not None else 0,
        layers=layers,
        missing=missing,
        generation=None if newest is None else newest.number,
        seconds=time.monotonic() - started,
        notes=(
            *built.notes,
            *_still_missing(amended.missing, amended.plan),
            *refreshed_notes(store, own, base, before, newest, chunks),
            *said,
        ),
    )


def _refresh_layers(
    store: Store, recipes: Mapping[str, AnyRecipe], check_source: bool, engine: Engine, terms: BuildOptions
) -> tuple[dict[str, tuple[int, ...]], dict[str, str]]:
    """Make chunks of further layers again, each layer after those it reads; those that cannot be made, with why."""
    made: dict[str, tuple[int, ...]] = {}
    missing: dict[str, str] = {}
    newest = newest_generation(store)
    if newest is None:
        return made, missing
    above = sorted((name for name in newest.layers if name != newest.base), key=partial(layer_height, newest))
    plan = listed_plan(store, newest)
    for layer in above:
        wanted = _behind(store, layer, newest.table(layer), plan.revisions(layer))
        if not wanted:
            continue
        try:
            with ExitStack() as ending:
                kept = partial(_kept_recipe, store, verb="refresh", check_source=check_source)
                recipe = cast(LayerRecipe, _recipe_until(ending, store, recipes.get(layer), kept, layer))
                place = layer_workplace(store, recipe, layer, load_generation(store))
                versions = builder_versions(versions_of(recipe))
                build_chunks(place, wanted, engine, replace(terms, versions=versions))
            made[layer] = wanted
        except ForebayError as error:
            missing[layer] = str(error)
    return made, missing


def _behind(store: Store, layer: str, table: ChunkTable, asked: Array) -> tuple[int, ...]:
    """Chunks that a layer had, in a lower revision than a refresh asks for, and does not list in that one yet."""
    listed = dict(zip(table.chunks.tolist(), table.numbers["revision"].tolist(), strict=True))
    had = sorted(chunk for chunk in chunk_files(store, layer) if chunk < len(asked) and asked[chunk])
    return tuple(chunk for chunk in had if listed.get(chunk, -1) < asked[chunk])


def _still_missing(paths: Sequence[str], plan: Plan) -> tuple[str, ...]:
    if not paths:
        return ()
    way = "" if plan.deduplicates else ", --drop-missing leaves them out"
    return (f"{len(paths):,} planned file(s) are gone (the first is '{paths[0]}'); their rows are kept{way}",)


def verify(
    root: Root,
    *,
    source: Source | None = None,
    check_source: bool = False,
    full: bool = False,
    cache_id: str | None = None,
    min_generation: int | None = None,
    digest: str | None = None,
    max_block_bytes: int = MAX_BLOCK_BYTES,
    on_progress: OnProgress | None = None,
) -> VerifyReport:
    """Check every published byte against its digest; `full` also decodes all rows and hashes the source again.

    A source on another machine that the cache names is asked only with `check_source`, or where it is passed.
    `cache_id`, `min_generation` and `digest` refuse another cache in this place, as `open_cache` does, and
    `max_block_bytes` bounds what one compressed block decodes to.
    """
    if max_block_bytes < 1:
        raise ValueError(f"max_block_bytes must be at least 1 (got {max_block_bytes})")
    store = open_store(root)
    if (cache_id, min_generation, digest) != (None, None, None):
        check_pins(store, load_generation(store), cache_id, min_generation, digest)
    asked = source or _kept_source(store, check_source)
    report = verify_cache(store, asked, full, on_progress or _silent, max_block_bytes)
    if (lost := [bad.key for bad in report.bad if layout.parse_segment(bad.key) is not None]) and asked is not None:
        advice = f"'{lost[0]}' of the plan is damaged; run `forebay repair {store.address}`"
        return msgspec.structs.replace(report, source_note=f"the source was not checked: {advice}")
    return msgspec.structs.replace(report, source_note="" if report.source_checked else _why_unchecked(store, asked))


def repair(
    root: Root,
    *,
    source: Source | None = None,
    check_source: bool = False,
    recipe: AnyRecipe | None = None,
    copy: Root | None = None,
    workers: int | None = None,
    memory_limit: int | None = None,
    on_progress: OnProgress | None = None,
) -> RepairReport:
    """Put back exactly what `verify` finds bad or missing: from a copy of the cache, or made again from the source.

    A source on another machine that the cache names is read only with `check_source`, or where it is passed.
    """
    store = open_store(root)

    def started() -> tuple[Engine, BuildOptions]:
        """Once the index is whole: the recipes and the plan say how to work."""
        count = _own_workers(store) if workers is None else workers
        told = _told_in_bytes(source or _kept_source(store, check_source), on_progress or _silent)
        terms = BuildOptions(
            workers=_worker_count(count),
            host=socket.gethostname(),
            versions=builder_versions({}),  # each layer's repair adds those of its recipe
            memory_limit=memory_limit,
            on_progress=told,
        )
        return _engine(count), terms

    report = _repair(store, source, recipe, None if copy is None else open_store(copy), started, check_source)
    stale = _stale(store, source or _kept_source(store, check_source))
    return msgspec.structs.replace(report, failed={**report.failed, **stale})


def check_kept_texts(store: Store) -> None:
    """With a key, refuse to build by what a cache keeps before a tag covers it: anyone may have put it there."""
    if hmac_key() is not None and newest_generation(store) is None:
        read_cache_document(store)
        problem = "nothing is published yet, so no tag covers it; name the source and the recipe again to build it"
        raise KeyRefused(store.address, layout.CACHE, problem)


def gaps(root: Root, *, layer: str | None = None) -> list[Gaps]:
    """Which planned chunks are missing, per layer."""
    return find_gaps(open_store(root), layer)


def status(
    root: Root,
    *,
    source: Source | None = None,
    check_source: bool = False,
    failures: int | None = SHOWN_FAILURES,
) -> Status:
    """How far a cache is: chunks present, missing, suspect, claimed by whom; failed samples; stale sources.

    Of the failed samples, the first `failures` are listed, and all of them where that is None. A source on another
    machine that the cache names is asked only with `check_source`, or where it is passed.
    """
    store = open_store(root)
    asked = source or _kept_source(store, check_source)
    found = cache_status(store, asked, failures)
    return msgspec.structs.replace(found, source_note="" if found.source_checked else _why_unchecked(store, asked))


def summarize(root: Root) -> Summary:
    """What a cache is."""
    return _with_figures(summarize_cache(open_store(root)))


def estimate(
    source: Source,
    recipe: Recipe,
    *,
    into: Root | None = None,
    workers: int | None = None,
    skip_unreadable: bool = False,
) -> Estimate:
    """What a build will take, estimated from a sample of at most 5 % of the source.

    Of images, the tags of all are read as well, unless the recipe names its vocabulary.
    """
    _check_source(source)
    _check_recipe(recipe)
    store = None if into is None else open_store(into)
    settled, said = resolve_recipe(None, source, recipe, recipe.kind)
    found = estimate_build(source, settled, store, _worker_count(workers), skip_unreadable)
    notes = source_notes(source, store.address if store else "")
    return msgspec.structs.replace(found, notes=(*said, *found.notes, *notes))


def clean(root: Root, *, keep_generations: int | None = None, lease_seconds: float = LEASE_SECONDS) -> CleanReport:
    """Remove temporary files of dead writers, claims of dead builders, replaced chunks; never data in use."""
    return clean_cache(open_store(root), keep_generations, lease_seconds)


def rekey(
    root: Root,
    *,
    old_key: bytes | None = None,
    new_key: bytes | None = None,
    on_progress: OnProgress | None = None,
) -> RekeyReport:
    """Sign the generations of a cache with another key, after checking every byte that they list.

    `old_key` is the key that they are tagged with, None where they carry no tag; `new_key` is the key to sign them
    with, at least 16 bytes, unless one is passed the one in FOREBAY_HMAC_KEY. Adding a key changes the digest that
    `open_cache(digest=…)` compares; replacing one by another does not.
    """
    new = hmac_key() if new_key is None else new_key
    return rekey_cache(open_store(root), old_key, new, on_progress or _silent)


def copy(root: Root, destination: Root, *, on_progress: OnProgress | None = None) -> CopyReport:
    """Copy what the newest generation lists, every chunk checked on the way."""
    if isinstance(destination, str | os.PathLike) and os.path.isfile(destination):
        raise NotADirectoryError(errno.ENOTDIR, "there is a file, and a cache is a folder", os.fspath(destination))
    return copy_cache(open_store(root), open_store(destination), on_progress or _silent)


def _repair(
    store: Store,
    source: Source | None,
    recipe: AnyRecipe | None,
    copy: Store | None,
    started: Callable[[], tuple[Engine, BuildOptions]],
    check_source: bool = False,
) -> RepairReport:
    mending = RepairLog()
    with ExitStack() as ending:
        kept = partial(_kept_recipe, store, verb="repair", check_source=check_source)
        recipe_of = partial(_recipe_until, ending, store, recipe, kept)
        workplace_of = partial(_existing, store, source, check_source, recipe_of)
        means = RepairInputs(store, copy, source, partial(_reopened, check_source), recipe_of, workplace_of)
        generation = repair_index(means, mending)
        engine, terms = started()
        report = verify_cache(store, None, False, terms.on_progress)
        repair_chunks(means, report, generation, engine, terms, mending)
        check_repaired(means, mending)
    newest = newest_generation(store)
    return RepairReport(
        root=store.address,
        restored=tuple(mending.restored),
        replaced=mending.replaced,
        failed=mending.failed,
        generation=newest.number if newest else None,
    )


def _stale(store: Store, reading: Source | None) -> dict[str, str]:
    """Source files with other content than was planned, which no repair puts back and `verify` reports."""
    newest = newest_generation(store)
    if reading is None or newest is None:
        return {}
    try:
        found = stale_sources(store, newest, reading, full=False) or {}
        advice = refresh_advice(store.address, load_plan(store))
    except Damaged:  # a plan that could not be put back, which is said already
        return {}
    return {path: f"it {how}; {advice}" for path, how in found.items() if how != GONE}


def _prepared(
    store: Store, source: Source | None, recipe: AnyRecipe, layer: str, terms: BuildOptions, skip_unreadable: bool
) -> LayerBuild:
    """A layer's workplace, begun now if it is new."""
    if reads_of(recipe):
        prepare_layer(store, recipe, layer)
        return layer_workplace(store, cast(LayerRecipe, recipe), layer, load_generation(store))
    if source is None:
        raise RecipeInvalid(f"the recipe '{recipe.kind}' makes base rows and needs a source")
    _check_source(source)
    base = cast(Recipe, recipe)
    plan = prepare_base(
        store,
        source,
        base,
        layer,
        partial(_planning, terms),
        terms.memory_limit,
        terms.max_failures,
        skip_unreadable,
        on_note=partial(_note, terms),
    )
    place = base_workplace(store, source, base, layer, plan, newest_generation(store), skip_unreadable)
    return with_same_source(place, plan, source)


def _existing(
    store: Store, source: Source | None, check_source: bool, recipe_of: Callable[[str], AnyRecipe], layer: str
) -> LayerBuild:
    """A layer's workplace in a cache that is there."""
    newest, _ = newest_sound(store)
    recipe = recipe_of(layer)
    if reads_of(recipe):
        return layer_workplace(store, cast(LayerRecipe, recipe), layer, newest)
    plan = published_plan(store, newest)
    reading = _source_for(store, source, check_source, plan, "repair")
    place = base_workplace(store, reading, cast(Recipe, recipe), layer, plan, newest)
    return with_same_source(place, plan, reading)


def _source_for(store: Store, source: Source | None, check_source: bool, plan: Plan, verb: str) -> Source:
    """The source that was passed, or the one that the plan names where it may be asked."""
    if source is None and not check_source and (remote := remote_source(plan.source)):
        raise SourceNotContacted(store.address, remote, verb)
    return source or reopen_source(plan.source)  # which says what is in the way


def _recipe_until(
    ending: ExitStack, store: Store, given: AnyRecipe | None, kept: Callable[[str], AnyRecipe], layer: str
) -> AnyRecipe:
    """A layer's recipe; what it loads here goes in the end."""
    recipe = _recipe_for(store, given, layer) or kept(layer)
    ending.enter_context(_letting_go(recipe))
    return recipe


def _recipe_for(store: Store, given: AnyRecipe | None, layer: str) -> AnyRecipe | None:
    """The recipe that was passed, where it is of the kind that the layer has."""
    kept = kept_recipe(store, layer)
    if given is not None and kept is not None and kept.kind == given.kind:
        settled, _ = resolve_recipe(store, None, given, layer)
        prepare_layer(store, settled, layer)
        return settled
    return None


def _kept_recipe(store: Store, layer: str, verb: str, check_source: bool) -> AnyRecipe:
    kept = kept_recipe(store, layer)
    if kept is None:
        raise LayerNotFound(store.address, layer, [])
    constants = os.path.join(store.address, layout.constants(layer)) if isinstance(store, LocalStore) else None
    return reopen_recipe(kept, constants, root=store.address, verb=verb, check_source=check_source)


def _kept_source(store: Store, check_source: bool) -> Source | None:
    """The source that the plan describes, None where it cannot be opened by that or the plan cannot be read.

    One on another machine is opened only where the caller allows it: whoever made the cache chose its address.
    """
    try:
        plan = load_plan(store)
    except Damaged:
        return None
    return _reopened(check_source, plan.source) if plan.segments else None


def _reopened(check_source: bool, description: Mapping[str, Any]) -> Source | None:
    try:
        if remote_source(description) and not check_source:
            return None
        return reopen_source(description)
    except (UnknownKind, LibraryMissing, SourceInvalid, SourceNeeded):
        return None


def _why_unchecked(store: Store, asked: Source | None) -> str:
    """Why a source was not checked, and what to do about it."""
    try:
        plan = load_plan(store)
    except Damaged as error:
        return f"the source was not checked: {error}"
    if not plan.segments:
        gone = f"'{layout.plan_segment(0)}' is gone; run `forebay repair {store.address}`"
        return f"the source was not checked: {gone if generation_numbers(store) else 'nothing is planned yet'}"
    if asked is None:
        try:
            if remote := remote_source(plan.source):
                return f"the source '{remote}' was not checked; pass --check-source (check_source=True) to contact it"
            reopen_source(plan.source)
        except (UnknownKind, LibraryMissing, SourceInvalid, SourceNeeded) as error:
            return f"the source was not checked: {error}"
    return "the source was not checked: it could not be reached, or the plan is damaged"


def layer_name(recipe: AnyRecipe) -> str:
    """The name of a recipe's layer, unless the caller chooses one."""
    return hooks_of(recipe).default_layer or recipe.kind


@contextmanager
def _letting_go(recipe: AnyRecipe) -> Iterator[list[str]]:
    """Whatever ends a build, what its recipe has loaded here goes; the list then holds what it has to say."""
    said: list[str] = []
    try:
        yield said
    finally:
        said += hooks_of(recipe).release()


def _terms(
    recipe: AnyRecipe,
    workers: int | None,
    memory_limit: int | None,
    max_failures: int | float | None,
    lease_seconds: float,
    on_progress: OnProgress,
) -> BuildOptions:
    return BuildOptions(
        workers=_worker_count(workers),
        host=socket.gethostname(),
        versions=builder_versions(versions_of(recipe)),
        memory_limit=memory_limit,
        max_failures=max_failures,
        lease_seconds=lease_seconds,
        on_progress=on_progress,
    )


def _told_in_bytes(source: Source | None, on_progress: OnProgress) -> OnProgress:
    """Progress of a source that counts samples has no number of bytes."""
    if source is None or source.unit == "bytes":
        return on_progress

    def told(progress: Progress) -> None:
        reads_the_cache = progress.phase == "verifying"
        on_progress(progress if reads_the_cache else msgspec.structs.replace(progress, read_bytes=0))

    return told


def _worker_count(workers: int | None) -> int:
    if workers is None:
        return len(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else os.cpu_count() or 1
    if not isinstance(workers, int) or workers < 0:
        raise ValueError(f"workers is {workers!r}; give a whole number, 0 to work in this process, None: one per core")
    return max(1, workers)


def _own_workers(store: Store) -> int | None:
    """How many processes the recipes of a cache ask for: none beside this one where one of them loads a model."""
    kept = [kept_recipe(store, layer) for layer in layers_of(store)]
    asked = [_asked_workers(one.kind) for one in kept if one is not None]
    return min((number for number in asked if number is not None), default=None)


def _asked_workers(kind: str) -> int | None:
    try:
        return hooks_of(recipe_class(kind)).workers
    except UnknownKind:
        return None


def _engine(workers: int | None) -> Engine:
    return InlineEngine() if workers == 0 else LocalEngine()


def _is_long_work(store: Store, source: Source) -> bool:
    """Whether there is enough to do that workers should start while it is planned."""
    _check_source(source)
    return newest_generation(store) is None and sum(file.size for file in source.files()) >= LONG_WORK_BYTES


def _planning(terms: BuildOptions, done: int, total: int, passed: int) -> None:
    terms.on_progress(Progress(phase="planning", done=done, total=total, unit="files", read_bytes=passed))


def _note(terms: BuildOptions, note: str) -> None:
    terms.on_progress(Progress(phase="planning", done=0, total=0, unit="files", note=note))


def _with_figures(summary: Summary) -> Summary:
    """What each layer's kind, if it is installed, derives from the sums over its chunks."""
    layers = tuple(
        msgspec.structs.replace(layer, figures=_derived(layer, lambda hooks: hooks.figures)) for layer in summary.layers
    )
    base = next((layer for layer in layers if layer.layer == summary.base), None)
    return msgspec.structs.replace(
        summary, layers=layers, metadata=_derived(base, lambda hooks: hooks.metadata) if base else {}
    )


def _derived(layer: LayerSummary, hook: Callable[[RecipeHooks], Callable[..., dict[str, Any]]]) -> dict[str, object]:
    try:
        derive = hook(hooks_of(recipe_class(layer.kind)))
    except UnknownKind:
        return {}
    holds = {"chunks": layer.chunks, "rows": layer.rows, "bytes": layer.bytes}
    try:
        return derive(layer.fields, layer.statistics, holds)
    except WRONG:  # a stranger's recipe names this kind and has other fields, or its chunks other statistics
        return {}


def _refuse_tier(store: Store) -> None:
    """A cache among the files of a tier would be taken for neither."""
    if isinstance(store, LocalStore) and all(
        os.path.isfile(os.path.join(store.address, name)) for name in ("data.mdb", "users")
    ):
        raise ForebayError(
            f"'{store.address}' holds a tier (data.mdb), which CachedImages and `forebay warm` fill; "
            "build the cache into another folder"
        )


def _grown(recipe: Recipe, base: str, before: Generation | None, after: Generation | None) -> tuple[str, ...]:
    """What a recipe says of the rows that were appended, by their sums."""
    if before is None or after is None:
        return ()
    old, new = before.table(base).totals(), after.table(base).totals()
    sums: dict[str, float] = {}
    for name, value in new.items():
        known = old.get(name, 0)
        if not isinstance(value, list) and not isinstance(known, list):
            sums[name] = value - known
    return hooks_of(recipe).grown(sums)


def _check_source(source: object) -> None:
    if not isinstance(source, Source):
        raise TypeError(
            f"a source is needed, for instance fb.sources.lines('data/*.jsonl'), not {type(source).__name__}"
        )


def _check_recipe(recipe: object) -> None:
    if not hasattr(recipe, "kind"):
        raise TypeError(f"a recipe is needed, for instance fb.ImageRecipe(size=224), not {type(recipe).__name__}")


def _mended(report: RepairReport) -> tuple[str, ...]:
    """What an inverse build found damaged or lost, and put right."""
    notes = [f"{len(report.restored):,} damaged or lost file(s) were put back as they were"] if report.restored else []
    notes += [f"'{key}' was replaced by other bytes: {why}" for key, why in report.replaced.items()]
    return tuple(notes)


def _check_range(store: Store, place: LayerBuild, start: int | None) -> None:
    planned = max(place.chunks, default=-1) + 1
    if start and start >= planned:
        raise RangeInvalid(store.address, start, planned)


def _by_chunk(failed: Mapping[str, str]) -> dict[int, str]:
    parsed = {key: layout.parse_chunk(key) for key in failed}
    return {chunk[0] if (chunk := parsed[key]) else -1: reason for key, reason in failed.items()}


def _silent(progress: Progress) -> None:
    pass
