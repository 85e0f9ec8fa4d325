"""Repair a cache: its index first, then the chunks that are bad or missing, then what is left is reported."""

from collections.abc import Callable, Iterator, Mapping
from contextlib import ExitStack
from dataclasses import replace
from functools import partial
from typing import cast

import msgspec

from forebay.building.build_options import BuildOptions, BuildRequest
from forebay.building.layer_build import (
    LayerBuild,
    base_workplace,
    build_chunks,
    layer_workplace,
    remake_chunks,
    with_same_source,
)
from forebay.building.planning import SourceListing
from forebay.building.reopen import kept_recipe, kept_source, kept_workers, recipe_until, reopened, source_for
from forebay.building.repair_index import _ADVICE, RepairInputs, RepairLog, adoptable, repair_index
from forebay.cache.catalog import Snapshot, index_problems, published_record, sound_record
from forebay.cache.copy import read_published
from forebay.cache.publish import adoption_rule, builder_versions, differing_versions, listed_plan
from forebay.cache.records import GONE, RepairReport, VerifyReport
from forebay.cache.source_check import refresh_advice
from forebay.cache.verify import (
    check_chunk,
    identity_problems,
    newest_sound,
    orphan_problems,
    orphans,
    outdated_layers,
    published_plan,
    shared_columns,
    stale_sources,
    verify_generation,
)
from forebay.engine.base import Engine
from forebay.errors import BuildFailed, BuildStopped, Damaged, ForebayError, NotForebay
from forebay.format import layout
from forebay.format.chunk import ChunkRecord
from forebay.format.generation import Generation
from forebay.format.tensors import hmac_key
from forebay.recipe import AnyRecipe, LayerRecipe, Recipe, input_layers, reads_of, versions_of
from forebay.source import Source
from forebay.store import Store
from forebay.store.base import Missing


def repair_chunks(
    means: RepairInputs,
    report: VerifyReport,
    snapshot: Snapshot,
    engine: Engine,
    terms: BuildOptions,
    mending: RepairLog,
) -> None:
    """Take bad and missing chunks from a copy where it has them, make the others again.

    A base chunk that came out with other rows leaves chunks of further layers without the rows they were made for;
    those are made again too.
    """
    tried: set[str] = set()
    generation = snapshot.published
    for layer, records in bad_chunks(report, generation).items():
        left = [record for record in records if not _take_from_copy(means, layer, record, mending)]
        _remake(means, layer, left, generation, engine, terms, mending)
        tried |= {record.key(layer) for record in records}
    if tried:
        snapshot = Snapshot(means.store, newest_sound(means.store)[0])
    newest = snapshot.published
    orphaned: dict[str, list[ChunkRecord]] = {}
    for layer, record in orphans(newest):
        if record.key(layer) not in tried:
            orphaned.setdefault(layer, []).append(record)
    for layer, records in orphaned.items():
        _remake(means, layer, records, newest, engine, terms, mending)
    if hmac_key() is None:  # with a key, no file counts before it is listed, so there is nothing to put right
        after = Snapshot(means.store, newest_sound(means.store)[0]) if orphaned else snapshot
        _make_unlisted(means, after, engine, terms, mending)


def _make_unlisted(
    means: RepairInputs, snapshot: Snapshot, engine: Engine, terms: BuildOptions, mending: RepairLog
) -> None:
    """Make planned chunks again whose file is damaged, or of another source, and listed by no generation.

    A lost generation leaves them behind: `gaps` counts them as there, and a reader never sees their rows.
    """
    store, newest = means.store, snapshot.published
    plan, adopts = listed_plan(snapshot), adoptable(means, snapshot.sound_plan, newest.base, newest.layers)
    for layer in sorted(newest.layers, key=partial(layer_height, newest)):
        table, asked = newest.table(layer), plan.revisions(layer)
        listed = set(table.chunks.tolist())  # also in an older revision: `refresh` makes what it finds unsound
        allowed = adoption_rule(layer, adopts, None if layer == newest.base else newest.table(newest.base))
        unsound: dict[int, str] = {}
        for chunk, revision in snapshot.chunk_files(layer).items():
            if chunk in listed or chunk >= len(asked) or revision < asked[chunk]:
                continue
            record = sound_record(store, layer, chunk, revision)
            if record is None or allowed is None or not allowed(record):
                unsound[chunk] = layout.chunk(layer, chunk, revision)
        if unsound:
            _build_unlisted(means, layer, unsound, engine, terms, mending)


def _build_unlisted(
    means: RepairInputs, layer: str, unsound: Mapping[int, str], engine: Engine, terms: BuildOptions, mending: RepairLog
) -> None:
    store, failed, advice = means.store, {}, f"run `forebay build {means.store.address}` when that is put right"
    try:
        place = means.workplace_of(layer)
        versions = builder_versions(versions_of(place.job.recipe))
        build_chunks(place, sorted(unsound), engine, replace(terms, versions=versions, max_failures=1.0))
    except BuildFailed as error:
        failed = error.failed or dict.fromkeys(unsound, str(error))
    except ForebayError as error:
        failed = dict.fromkeys(unsound, str(error))
    newest, _ = newest_sound(store)
    for chunk, key in unsound.items():
        record = published_record(newest, layer, chunk)
        if record is not None:
            why = "its file was not sound, and no generation that can be read lists it; it was made from the source"
            mending.replaced[record.key(layer)] = why
        else:
            reason = _ADVICE.sub("", failed.get(chunk, "it was not made"))
            mending.failed[key] = f"its file is not sound, and no generation lists it: {reason}; {advice}"


def _remake(
    means: RepairInputs,
    layer: str,
    records: list[ChunkRecord],
    generation: Generation,
    engine: Engine,
    terms: BuildOptions,
    mending: RepairLog,
) -> None:
    if not records:
        return
    try:
        place = means.workplace_of(layer)
        own = replace(terms, versions=builder_versions(versions_of(place.job.recipe)))
        tally = remake_chunks(place, [record.chunk for record in records], generation, engine, own)
    except BuildStopped:
        raise  # the user stopped the repair; no chunk failed
    except ForebayError as error:
        for record in records:
            mending.fail(record.key(layer), error)
        return
    for record in records:
        made = tally.records.get(record.chunk)
        if made is None:
            reason = tally.failed.get(record.chunk, "it was not made")
            mending.failed[record.key(layer)] = _ADVICE.sub("", reason)
        elif made.revision == record.revision:
            mending.restored.append(made.key(layer))
        else:
            other = differing_versions(generation.made_with(layer, record.chunk), own.versions)
            why = _why_other_bytes(record, made) + (f": {other}" if other else "")
            mending.replaced[made.key(layer)] = why


def check_repaired(means: RepairInputs, mending: RepairLog) -> Snapshot:
    """The index after a repair. Whatever `verify` would still find in it is a failure, and none goes unsaid."""
    store = means.store
    generation, bad = newest_sound(store)
    snapshot = Snapshot(store, generation)
    plan = snapshot.sound_plan
    left = [*bad, *index_problems(store, generation, plan), *identity_problems(store, generation, plan)]
    left += [*outdated_layers(generation), *orphan_problems(generation), *shared_columns(store.address, generation)]
    for problem in left:
        mending.failed.setdefault(problem.key, _ADVICE.sub("", problem.problem))
    for layer, record in _touched_chunks(generation, {*mending.restored, *mending.replaced}):
        if check_chunk(store, layer, record, full=False) != []:
            mending.failed.setdefault(record.key(layer), "it was put back, and is damaged again; check the disk")
    mending.restored = [key for key in mending.restored if key not in mending.failed]
    return snapshot


def _touched_chunks(generation: Generation, keys: set[str]) -> Iterator[tuple[str, ChunkRecord]]:
    for layer, table in generation.layers.items():
        for record in table.records():
            if record.key(layer) in keys:
                yield layer, record


def bad_chunks(report: VerifyReport, generation: Generation) -> dict[str, list[ChunkRecord]]:
    """layer -> the chunks to put back, the base layer first, and every layer after those it reads."""
    found: dict[str, set[int]] = {}
    for problem in report.bad:
        if problem.chunk >= 0:
            found.setdefault(problem.layer, set()).add(problem.chunk)
    for layer, chunks in report.missing.items():
        found.setdefault(layer, set()).update(chunks)
    ordered = sorted(found, key=lambda name: (layer_height(generation, name), name))
    records = {
        layer: [published_record(generation, layer, chunk) for chunk in sorted(found[layer])] for layer in ordered
    }
    return {layer: [record for record in some if record is not None] for layer, some in records.items()}


def layer_height(generation: Generation, layer: str) -> int:
    """How many layers lie between this one and the samples."""
    if layer == generation.base:
        return 0
    below = [name for name in input_layers(generation.recipe(layer)) if name in generation.recipes]
    return 1 + max((layer_height(generation, name) for name in below), default=0)


def _take_from_copy(means: RepairInputs, layer: str, record: ChunkRecord, mending: RepairLog) -> bool:
    if means.copy is None:
        return False
    key = record.key(layer)
    try:
        value = read_published(means.copy, key, record)  # what is hashed is what is written
        if value is None:
            return False
        means.store.replace(key, [value])
    except (Missing, NotForebay, IsADirectoryError):
        return False
    mending.restored.append(key)
    return True


def _why_other_bytes(listed: ChunkRecord, made: ChunkRecord) -> str:
    if listed.base != made.base:
        return "the rows of the base layer that it was made for are others now"
    if listed.content == made.content:
        return "the same content came out as other bytes with the library versions installed now"
    return "the source, the libraries or the device of now gave other content"


def repair_cache(
    store: Store,
    source: Source | None,
    recipe: AnyRecipe | None,
    copy: Store | None,
    request: BuildRequest,
    check_source: bool,
) -> RepairReport:
    """Put back what is bad or missing; source files that changed are failures, which no repair puts back."""

    def started(snapshot: Snapshot) -> tuple[Engine, BuildOptions]:
        """Once the index is whole: the recipes and the plan say how to work."""
        workers = kept_workers(store) if request.workers is None else request.workers
        own = replace(request, workers=workers)
        # Each layer's repair adds the versions of its recipe.
        engine = own.open_engine()
        return engine, own.options({}, source or kept_source(snapshot.sound_plan, check_source), engine)

    report, after = repair_with(store, source, recipe, copy, started, check_source)
    stale = _stale(after, source or kept_source(after.sound_plan, check_source))
    return msgspec.structs.replace(report, failed={**report.failed, **stale})


def repair_with(
    store: Store,
    source: Source | None,
    recipe: AnyRecipe | None,
    copy: Store | None,
    started: Callable[[Snapshot], tuple[Engine, BuildOptions]],
    check_source: bool = False,
) -> tuple[RepairReport, Snapshot]:
    """What a repair did, and the index after it. `started` is asked how to work once the index is whole."""
    log = RepairLog()
    with ExitStack() as ending:
        kept = partial(kept_recipe, store, verb="repair", check_source=check_source)
        recipe_of = partial(recipe_until, ending, store, recipe, kept)
        workplace_of = partial(_workplace, store, source, check_source, recipe_of)
        means = RepairInputs(store, copy, source, partial(reopened, check_source), recipe_of, workplace_of)
        snapshot = Snapshot(store, repair_index(means, log), below="")
        engine, options = started(snapshot)
        report = verify_generation(snapshot, [], None, False, options.on_progress)
        repair_chunks(means, report, snapshot, engine, options, log)
        after = check_repaired(means, log)
    found = RepairReport(
        root=store.address,
        restored=tuple(log.restored),
        replaced=log.replaced,
        failed=log.failed,
        generation=after.published.number,
        notes=_lost_growth(after) if any(layout.parse_generation(key) is not None for key in log.replaced) else (),
    )
    return found, after


def _lost_growth(snapshot: Snapshot) -> tuple[str, ...]:
    """Say which chunks are beyond the plan, in place of a generation that is lost: it may have listed them."""
    plan = snapshot.sound_plan
    if plan is None:  # said already
        return ()
    beyond = {
        layer: sum(chunk >= len(plan) for chunk in snapshot.chunk_files(layer)) for layer in snapshot.published.recipes
    }
    return tuple(
        f"layer '{layer}' has {count:,} chunk file(s) that are not in the plan; if the lost generation listed them, "
        f"`forebay grow {snapshot.store.address} SOURCE` with all files of the source brings their rows back"
        for layer, count in beyond.items()
        if count
    )


def _workplace(
    store: Store, source: Source | None, check_source: bool, recipe_of: Callable[[str], AnyRecipe], layer: str
) -> LayerBuild:
    """A layer's work in a cache that is there, by its newest sound generation: lower layers may be new in it."""
    snapshot = Snapshot(store, newest_sound(store)[0])
    recipe = recipe_of(layer)
    if reads_of(recipe):
        return layer_workplace(snapshot, cast(LayerRecipe, recipe), layer)
    plan = published_plan(snapshot)
    listing = SourceListing(source_for(store, source, check_source, plan, "repair"), store)
    place = base_workplace(snapshot, listing, cast(Recipe, recipe), layer, plan, known=plan)
    return with_same_source(place, plan, listing)


def _stale(snapshot: Snapshot, source: Source | None) -> dict[str, str]:
    """Source files with other content than was planned, which no repair puts back and `verify` reports."""
    if source is None:
        return {}
    try:
        found = stale_sources(snapshot, source, full=False) or {}
        advice = refresh_advice(snapshot.store.address, snapshot.plan)
    except Damaged:  # a plan that could not be put back, which is said already
        return {}
    return {path: f"it {how}; {advice}" for path, how in found.items() if how != GONE}
