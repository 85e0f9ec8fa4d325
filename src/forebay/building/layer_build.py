"""From what a caller asks for to runs of a build: which chunks, by which job, in which order."""

import time
from collections.abc import Callable, Collection, Iterable, Mapping, Sequence
from contextlib import suppress
from dataclasses import dataclass, field, replace
from functools import partial

from forebay.building.builder import Build, BuildOptions, BuildProgress, Weigh, with_retries
from forebay.building.chunk_maker import CHANGED_MEANWHILE, BaseJob, BuildJob, ChunkJob, LayerJob, RepairJob
from forebay.building.failures import check_something_made, unbind
from forebay.building.planning import files_apart
from forebay.cache.catalog import UNPUBLISHED, lost_chunks, newest_generation, outdated_chunks, present_chunks
from forebay.cache.plan import Plan
from forebay.cache.publish import listed_plan, listed_revision, publish
from forebay.cache.records import BuildReport
from forebay.cache.segment import unreadable_note
from forebay.cache.source_check import Freshness, check_freshness, check_kind, reported, source_changed
from forebay.cache.verify import check_index
from forebay.columns import Array
from forebay.engine.base import Engine
from forebay.errors import (
    BuildFailed,
    ChunkFailed,
    DiskFull,
    ForebayError,
    InputIncomplete,
    SourceChanged,
    SourceEmpty,
    SourceMoving,
    TooManyFailures,
)
from forebay.format import layout
from forebay.format.chunk import ChunkRecord
from forebay.format.generation import ChunkTable, Generation
from forebay.format.sealed import hmac_key
from forebay.recipe import LayerRecipe, Recipe
from forebay.source import Source, SourceFile
from forebay.store.base import Store, is_full

LOOKS = 3  # how often a source that changes while it is read is looked at again


@dataclass(frozen=True, slots=True)
class LayerBuild:
    """All that making chunks of one layer needs."""

    job: ChunkJob
    plan: Plan  # that is worked by
    chunks: Sequence[int]  # every chunk that the layer should have
    streams: dict[int, str]
    weigh: Weigh
    changed: Mapping[str, str] = field(default_factory=dict)  # source files that are not what was planned
    notes: tuple[str, ...] = ()
    missing: frozenset[str] = frozenset()  # source files that are not there
    lacking: Mapping[str, frozenset[int]] = field(default_factory=dict)  # layer that is read -> chunks it has not
    again: "Callable[[Mapping[int, ChunkRecord]], LayerBuild] | None" = None  # as the source is then, after these

    @property
    def planned(self) -> tuple[str, ...]:
        """The digests of the plan that is worked by."""
        return self.plan.digests

    def revisions(self) -> Array:
        """Of every planned chunk, the lowest revision that is made from what is planned now."""
        return self.plan.revisions(self.job.layer)

    def noting(self, notes: tuple[str, ...]) -> "LayerBuild":
        return replace(self, notes=(*notes, *self.notes))


def base_workplace(
    store: Store,
    source: Source,
    recipe: Recipe,
    layer: str,
    plan: Plan,
    newest: Generation | None,
    skip_unreadable: bool = False,
    made: Mapping[int, ChunkRecord] | None = None,
) -> LayerBuild:
    """The base layer's work, with what has become of its source since it was planned, and since chunks were `made`."""
    check_kind(store, source, plan)
    table = newest.table(layer) if newest else ChunkTable.of([])
    fresh = check_freshness(store, source, plan, layer, table, made=made)
    job = BaseJob(
        store, layer, recipe, source, fresh.now, plan.digests, skip_unreadable, newest.number if newest else None
    )
    notes = _notes(files_apart(store, source), plan, fresh)

    def again(made: Mapping[int, ChunkRecord]) -> LayerBuild:
        return base_workplace(store, source, recipe, layer, plan, newest_generation(store), skip_unreadable, made)

    return LayerBuild(
        job,
        plan,
        range(len(plan)),
        plan.streams(),
        plan.weight_of,
        reported(source, plan, fresh.changed),
        notes,
        frozenset(fresh.missing),
        again=again,
    )


def with_same_source(place: LayerBuild, plan: Plan, source: Source) -> LayerBuild:
    """A build continues with a source that was planned: all files of a segment, but for those that are gone."""
    given = {file.path for file in source.files()}
    for segment in plan.segments:
        if segment.amends:
            continue
        planned = {segment.path(file) for file in range(segment.file_count)} & plan.files.keys()
        if planned & given and planned - given <= place.missing:
            return place.noting(_absent(planned - given, len(planned)))
    absent = sorted(path for path in plan.files if path not in given)
    if plan.segments and absent:
        how = dict.fromkeys(absent, "was planned and is not in the source passed")
        root = place.job.store.address
        advice = f"pass the source that the cache was built from, or append other files with `forebay grow {root} …`"
        raise SourceChanged(root, how, advice)
    return place


def _absent(paths: set[str], planned: int) -> tuple[str, ...]:
    if not paths:
        return ()
    return (
        f"{len(paths):,} of {planned:,} planned file(s) are not in the source passed (the first is '{min(paths)}'); "
        f"what was made from them is kept",
    )


def layer_workplace(store: Store, recipe: LayerRecipe, layer: str, pinned: Generation) -> LayerBuild:
    """A further layer's work: whatever the base layer has published of what is planned now."""
    job = LayerJob(store, layer, recipe, pinned.number)
    plan = listed_plan(store, pinned)

    def current(name: str) -> frozenset[int]:
        """The chunks of a layer that are listed, without those that a refresh has still to make."""
        table = pinned.table(name)
        return frozenset(table.chunks.tolist()) - frozenset(outdated_chunks(table, plan.revisions(name)).tolist())

    chunks = sorted(current(pinned.base))
    lacking = {name: frozenset(chunks) - current(name) for name in job.inputs}
    return LayerBuild(job, plan, chunks, {}, lambda chunk: 0, lacking=lacking)


def build_chunks(place: LayerBuild, wanted: Iterable[int], engine: Engine, terms: BuildOptions) -> BuildReport:
    """Make what is missing of the wanted chunks, in the order given, and publish."""
    try:
        return _build_missing(place, wanted, engine, terms)
    except OSError as error:
        store = place.job.store
        if not is_full(error):
            raise
        next_generation = max((entry.size for entry in store.keys(layout.GENERATIONS)), default=0)
        raise DiskFull(store.address, next_generation, store.free_bytes() or 0) from error


def _build_missing(place: LayerBuild, wanted: Iterable[int], engine: Engine, terms: BuildOptions) -> BuildReport:
    store, layer = place.job.store, place.job.layer
    if place.changed:
        raise source_changed(store.address, place.plan, place.changed)
    started = time.monotonic()
    terms = replace(terms, planned=place.planned)
    newest, unsound = with_retries(partial(list_what_is_there, place.job, terms))
    table, revisions = newest.table(layer), place.revisions()
    outdated = set(outdated_chunks(table, revisions).tolist())
    listed, there = set(table.chunks.tolist()) - outdated, present_chunks(store, layer, table, revisions)
    gone = lost_chunks(store, layer, table) - outdated
    order = list(wanted)
    # With a key, a file that no generation lists is made again and compared, never signed as it was found.
    distrusted = unsound if hmac_key() is None else frozenset(order)
    missing = [chunk for chunk in order if chunk not in listed and (chunk not in there or chunk in distrusted)]
    _check_inputs(place, missing)
    tally = BuildProgress(total=len(order), present=len(order) - len(missing))
    lost = [chunk for chunk in order if chunk in gone]
    notes = [*place.notes, *_unsound_notes(layer, unsound.intersection(order))]
    if lost:
        again = remake_chunks(place, lost, newest, engine, terms)
        notes.append(f"{len(again.records)} published chunk(s) had lost their files and were made again")
        tally.failed |= again.failed
        tally.present -= len(lost) - len(again.records)
    adopts = {layer: place.job.may_adopt}  # also what a worker wrote and could not say before it was stopped
    try:
        later = {chunk: int(revisions[chunk]) for chunk in missing if revisions[chunk]}
        job = BuildJob(place.job, distrusted, terms.max_failures is not None, later)
        _make_missing(place, job, missing, tally, engine, terms)
    except BaseException as error:
        # That what was made cannot be listed now must not hide why the build ended; a rerun lists it.
        with suppress(OSError, ForebayError):
            publish(store, {layer: tally.records.values()}, terms.versions, None, terms.planned, adopts)
            if isinstance(error, ChunkFailed | TooManyFailures):
                unbind(store, layer)
        if isinstance(error, SourceEmpty) and tally.failures:
            check_something_made(store, layer, ChunkTable.of(list(tally.records.values())))  # says why
        raise
    made = {layer: tally.records.values()}
    generation = with_retries(partial(publish, store, made, terms.versions, None, terms.planned, adopts))
    table = generation.table(layer)
    for chunk in [one.chunk for one in tally.records.values() if listed_revision(table, one) < one.revision]:
        del tally.records[chunk]
        tally.failed[chunk] = "it was written, and was gone before it could be listed; run the same command again"
    for chunk in set(order) - set(table.chunks.tolist()) - tally.failed.keys():
        tally.present -= 1
        tally.failed[chunk] = "its file appeared during the build and is not of this source; run the same command again"
    beside = sum(record.revision > later.get(record.chunk, 0) for record in tally.records.values())
    notes += [f"{beside:,} chunk(s) are a later revision: what has their name was left as it is"] if beside else []
    report = _report(store, layer, tally, generation, time.monotonic() - started, notes)
    if tally.failed:
        raise BuildFailed(store.address, tally.failed)
    if len(table) == len(place.chunks) and isinstance(place.job, BaseJob):
        try:
            check_something_made(store, layer, table)
        except BuildFailed:
            unbind(store, layer)
            raise
    return report


def _make_missing(
    place: LayerBuild, job: BuildJob, missing: list[int], tally: BuildProgress, engine: Engine, terms: BuildOptions
) -> None:
    """Make chunks; a source file that changes meanwhile, but not in what was planned, is no reason to stop."""
    for looks_left in reversed(range(LOOKS)):
        job = replace(job, chunks=place.job)
        left = [chunk for chunk in missing if chunk not in tally.records]
        try:
            Build(job, left, tally, terms, place.streams, place.weigh).run(engine)
        except SourceChanged as error:
            root = place.job.store.address
            if place.again is None or set(error.files.values()) != {CHANGED_MEANWHILE}:
                raise source_changed(root, place.plan, error.files) from error
            place = place.again(tally.records)
            if place.changed:
                raise source_changed(root, place.plan, place.changed) from error
            if not looks_left:
                raise SourceMoving(place.job.store.address, sorted(error.files)) from error
        else:
            _check_what_was_read(place, tally.records)
            return


def _check_what_was_read(place: LayerBuild, made: Mapping[int, ChunkRecord]) -> None:
    """At the end: a file that is another than when it was read must still hold what the chunks were made from.

    Another builder may have read it since. A file that is gone cannot be compared, and its rows are kept.
    """
    if place.again is None or not isinstance(place.job, BaseJob):
        return
    read = {part.file.path: part.file for chunk in made for part in place.plan.parts(chunk)}
    if any(map(place.job.has_changed, read.values())):
        changed = place.again(made).changed
        if changed:
            raise source_changed(place.job.store.address, place.plan, changed)


def _check_inputs(place: LayerBuild, missing: Sequence[int]) -> None:
    """Before any work: what is to be made needs the same chunks of every layer that it reads."""
    for layer, lacking in place.lacking.items():
        needed = [chunk for chunk in missing if chunk in lacking]
        if needed:
            raise InputIncomplete(place.job.store.address, place.job.layer, layer, needed)


def remake_chunks(
    place: LayerBuild, chunks: Iterable[int], generation: Generation, engine: Engine, terms: BuildOptions
) -> BuildProgress:
    """Make published chunks again. Where other bytes come out, a new revision is published."""
    store, layer = place.job.store, place.job.layer
    terms = replace(terms, planned=place.planned)
    listed = published_records(generation, layer, chunks)
    tally = BuildProgress(total=len(listed))
    for chunk in listed.keys() - set(place.chunks):
        del listed[chunk]
        tally.failed[chunk] = "it is published, but neither the plan nor the base layer has it now"
    asked = place.revisions()
    job = RepairJob(place.job, listed, {chunk: int(asked[chunk]) for chunk in listed if chunk < len(asked)})
    with suppress(BuildFailed):  # what could not be made is in the tally
        Build(job, sorted(listed), tally, terms, place.streams, place.weigh).run(engine)
    # What counts is what came to be listed, not what was written.
    newest = newest_generation(store) or generation
    for chunk, record in published_records(newest, layer, list(tally.records)).items():
        if record.sha256 != tally.records[chunk].sha256:
            del tally.records[chunk]
            tally.failed[chunk] = f"it was made again, but generation {newest.number} lists another file; run it again"
    return tally


def published_records(generation: Generation, layer: str, chunks: Iterable[int]) -> dict[int, ChunkRecord]:
    table = generation.table(layer)
    positions = {chunk: table.position(chunk) for chunk in chunks}
    return {chunk: table.record(at) for chunk, at in positions.items() if at is not None}


def list_what_is_there(job: ChunkJob, terms: BuildOptions) -> tuple[Generation, frozenset[int]]:
    """A generation with all of a layer that may be adopted, and the chunks of it whose files may not."""
    store, layer = job.store, job.layer
    newest = newest_generation(store)
    if newest is not None:
        check_index(store, newest)
    skipped: set[str] = set()
    generation = publish(store, {}, terms.versions, skipped, terms.planned, {layer: job.may_adopt})
    parsed = (layout.parse_chunk(key) for key in skipped if key.startswith(layout.layer_folder(layer)))
    return generation, frozenset(one[0] for one in parsed if one)


def _unsound_notes(layer: str, unsound: Collection[int]) -> list[str]:
    if not unsound:
        return []
    names = ", ".join(layout.chunk(layer, chunk) for chunk in sorted(unsound)[:3])
    return [f"{len(unsound):,} unlisted file(s) were not sound, or not of this source, and were made again: {names}"]


def in_order(chunks: Sequence[int], mode: str, start: int | None, end: int | None) -> list[int]:
    """The chunks of an inclusive range, from the near or the far end."""
    first = 0 if start is None else start
    last = max(chunks, default=0) if end is None else end
    chosen = [chunk for chunk in chunks if first <= chunk <= last]
    return chosen[::-1] if mode == "inverse" else chosen


def _report(
    store: Store, layer: str, tally: BuildProgress, generation: Generation, seconds: float, notes: list[str]
) -> BuildReport:
    table = generation.table(layer)
    return BuildReport(
        root=store.address,
        layer=layer,
        chunks=tally.total,
        made=len(tally.records),
        present=tally.present,
        failed=dict(tally.failed),
        rows=int(table.rows.sum()),
        failures=int(table.numbers["failures"].sum()),
        samples=int(table.numbers["samples"].sum()),
        written_bytes=tally.written_bytes,
        seconds=seconds,
        generation=None if generation.number == UNPUBLISHED else generation.number,
        deaths=tuple(tally.deaths),
        notes=tuple(notes),
    )


def _notes(files: Sequence[SourceFile], plan: Plan, fresh: Freshness) -> tuple[str, ...]:
    planned = plan.files
    new = sum(file.path not in planned and file.size > 0 for file in files)
    grew = len(fresh.grown)
    notes = [f"{new:,} file(s) of the source are not in the plan; `forebay grow` appends them"] if new else []
    notes += [f"{grew:,} file(s) of the source grew; `forebay grow` appends what is new"] if grew else []
    left_out = plan.duplicates
    notes += [f"{left_out:,} sample(s) of the plan are duplicates of earlier ones and are left out"] if left_out else []
    return (*notes, *unreadable_note(plan.unreadable))
