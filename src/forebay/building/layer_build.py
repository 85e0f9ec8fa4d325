"""From what a caller asks for to runs of a build: which chunks, by which job, in which order."""

import os
import time
from collections.abc import Callable, Collection, Iterable, Mapping, Sequence
from contextlib import suppress
from dataclasses import dataclass, field, replace
from functools import partial

from forebay.building.build_options import BuildOptions, BuildProgress, Reasons, allows_all
from forebay.building.builder import Build, Weigh, with_retries
from forebay.building.chunk_maker import BaseJob, BuildJob, ChunkJob, LayerJob, RepairJob, has_file
from forebay.building.planning import SourceListing
from forebay.cache.catalog import (
    UNPUBLISHED,
    Snapshot,
    check_index,
    chunk_files,
    layers_of,
    newest_generation,
    open_chunk,
    outdated_chunks,
    read_cache_document,
    sound_record,
)
from forebay.cache.claims import OtherBuilders, is_abandoned, read_claims
from forebay.cache.plan import Plan, Segment, unreadable_note
from forebay.cache.publish import differing_versions, listed_plan, listed_revision, publish, publish_found
from forebay.cache.records import BuildReport
from forebay.cache.source_check import Freshness, check_freshness, check_kind, reported, source_changed
from forebay.columns import Array
from forebay.engine.base import Engine
from forebay.errors import (
    BuildFailed,
    BuildStopped,
    CacheNotFound,
    ChunkFailed,
    DiskFull,
    ForebayError,
    InputIncomplete,
    NothingMade,
    SourceChanged,
    SourceEmpty,
    SourceMoving,
    TooManyFailures,
)
from forebay.format import layout
from forebay.format.chunk import ChunkRecord
from forebay.format.generation import ChunkTable, Generation
from forebay.format.layout import MAX_REVISION
from forebay.format.tensors import hmac_key
from forebay.recipe import LayerRecipe, Recipe, fields_of, hooks_of
from forebay.source import CHANGED_MEANWHILE, FileTable, SourceFile
from forebay.store.base import Store, is_full


def check_something_made(store: Store, layer: str, table: ChunkTable) -> None:
    """Raise where a base layer has no row: there is nothing to train on."""
    samples, failures = (int(table.numbers[name].sum()) for name in ("samples", "failures"))
    if int(table.rows.sum()):
        return
    if not samples:
        raise SourceEmpty(store.address, "the source has no samples")
    if not failures:
        raise SourceEmpty(store.address, f"the recipe made no row of {samples:,} sample(s)")
    reasons = Reasons(one for record in table.records() for one in open_chunk(store, layer, record).failures())
    raise NothingMade(store.address, failures, *reasons.most_frequent(), reasons.advice())


def unbind(store: Store, layer: str) -> bool:
    """Remove what a build of a base layer that made no row has left, so that another command can use the root.

    Nothing is removed where a generation, a row, another layer or another builder's claim is there. Chunks go first
    and `cache.json` last: whatever is left when this is interrupted belongs together.
    """
    try:
        base = read_cache_document(store).base
    except CacheNotFound:
        return False
    if base != layer or layers_of(store) not in ([layer], []) or newest_generation(store) is not None:
        return False
    if any(claim.state == "working" and not is_abandoned(claim) for claim in read_claims(store, layer).values()):
        return False
    files = chunk_files(store, layer)
    records = [sound_record(store, layer, chunk, revision) for chunk, revision in files.items()]
    if any(record is None or record.rows for record in records):
        return False
    prefixes = (
        layout.layer_folder(layer),
        layout.claims_folder(layer),
        layout.BUILDERS,
        layout.PLAN,
        layout.IDENTITIES,
    )
    keys = [entry.key for prefix in prefixes for entry in store.entries(prefix) if layout.is_known(entry.key, {layer})]
    for key in sorted(keys, key=lambda key: layout.parse_chunk(key) is None or key.startswith(layout.PLAN)):
        store.delete(key)
    store.delete(layout.CACHE)
    root = store.local_path("")
    if root is not None:
        _remove_empty_folders(root, layer)
    return True


def take_back(store: Store) -> int:
    """Remove segments at the end of the plan of which no row was made and that nobody works on, with their files.

    What a generation lists stays, as does a segment with rows: the next command finishes it. Returns how many
    segments are left.
    """
    while True:
        snapshot = Snapshot.take(store)
        newest, plan = snapshot.newest, snapshot.plan
        number = len(plan.segments) - 1
        if newest is None or number < len(newest.plan):
            return len(plan.segments)
        segment, layers = plan.segments[number], snapshot.layers()
        claims = (claim for layer in layers for claim in read_claims(store, layer).values())
        made = [(layer, *one) for layer in layers for one in _made_for(snapshot, segment, layer)]
        if any(claim.state == "working" and not is_abandoned(claim) for claim in claims):
            return len(plan.segments)
        if any((record := sound_record(store, *one)) is None or record.rows for one in made):
            return len(plan.segments)
        for one in made:
            store.delete(layout.chunk(*one))
        store.delete(layout.plan_segment(number))


def _made_for(snapshot: Snapshot, segment: Segment, layer: str) -> list[tuple[int, int]]:
    """(chunk, revision) of files that are there because a segment asks for them."""
    asked = segment.asked(layer) if segment.amends else dict.fromkeys(segment.chunk_numbers.tolist(), 0)
    return [(chunk, now) for chunk, now in snapshot.chunk_files(layer).items() if now >= asked.get(chunk, MAX_REVISION)]


def _remove_empty_folders(root: str, layer: str) -> None:
    """Remove the folders that a build made, each only if nothing is in it; the root may be the user's."""
    inner, outer = (layout.layer_folder(layer), layout.claims_folder(layer)), (layout.LAYERS, layout.CLAIMS)
    for folder in (*inner, *outer, layout.BUILDERS, layout.PLAN, layout.IDENTITIES):
        path = os.path.join(root, folder).rstrip("/")
        if not os.path.islink(os.path.dirname(path)) or os.path.dirname(path) == root:
            with suppress(OSError):
                os.rmdir(path)


LOOKS = 3  # how often a source that changes while it is read is looked at again


@dataclass(frozen=True, slots=True)
class LayerBuild:
    """All that making chunks of one layer needs."""

    snapshot: Snapshot  # the index that it was found by
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
    changed_paths: frozenset[str] = frozenset()  # planned files that `changed` is about

    def is_changed(self, chunk: int) -> bool:
        """Whether a file of a chunk is not what was planned."""
        return any(part.file.path in self.changed_paths for part in self.plan.parts(chunk) if self.changed_paths)

    def revisions(self) -> Array:
        """Of every planned chunk, the lowest revision that is made from what is planned now."""
        return self.plan.revisions(self.job.layer)

    def noting(self, notes: tuple[str, ...]) -> "LayerBuild":
        return replace(self, notes=(*notes, *self.notes))


def base_workplace(
    snapshot: Snapshot,
    listing: SourceListing,
    recipe: Recipe,
    layer: str,
    plan: Plan,
    skip_unreadable: bool = False,
    made: Mapping[int, ChunkRecord] | None = None,
    known: Plan | None = None,
) -> LayerBuild:
    """The base layer's work, with what has become of its source since it was planned, and since chunks were `made`.

    Where the plan is the one that was `known` before the source was walked, that walk shows what has become of it.
    Otherwise the plan is of that walk itself, and its files are looked at again.
    """
    store, source, newest = snapshot.store, listing.source, snapshot.newest
    check_kind(store, source, plan)
    is_known = known is not None and known.digests == plan.digests
    listed = listing.walked if is_known else ()
    fresh = check_freshness(store, source, plan, layer, snapshot.table(layer), made=made, listed=listed)
    job = BaseJob(
        store, layer, recipe, source, fresh.now, plan.digests, skip_unreadable, newest.number if newest else None, plan
    )

    def again(made: Mapping[int, ChunkRecord]) -> LayerBuild:
        return base_workplace(Snapshot.take(store), listing, recipe, layer, plan, skip_unreadable, made)

    return LayerBuild(
        snapshot,
        job,
        plan,
        range(len(plan)),
        plan.streams(),
        plan.weight_of,
        reported(source, plan, fresh.changed),
        _notes(listing.apart, plan, fresh),
        frozenset(fresh.missing),
        again=again,
        changed_paths=frozenset(fresh.changed),
    )


def with_same_source(place: LayerBuild, plan: Plan, listing: SourceListing) -> LayerBuild:
    """A build continues with a source that was planned: all files of a segment, but for those that are gone."""
    given = FileTable.of(listing.files)
    for segment in plan.segments:
        if segment.amends:
            continue
        if len(plan.segments) == 1 and segment.files.same_paths(given):
            return place
        planned = FileTable.of(plan.files[path] for path in segment.files.paths() if path in plan.files)
        away = {path for path in planned.paths() if given.find(path) is None}
        if len(away) < len(planned) and away <= place.missing:
            return place.noting(_absent(away, len(planned)))
    absent = sorted(path for path in plan.files if given.find(path) is None)
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


def layer_workplace(snapshot: Snapshot, recipe: LayerRecipe, layer: str) -> LayerBuild:
    """A further layer's work: whatever the base layer has published of what is planned now."""
    pinned = snapshot.published
    job = LayerJob(snapshot.store, layer, recipe, pinned.number)
    plan = listed_plan(snapshot)

    def current(name: str) -> frozenset[int]:
        """The chunks of a layer that are listed, without those that a refresh has still to make."""
        table = pinned.table(name)
        return frozenset(table.chunks.tolist()) - frozenset(outdated_chunks(table, plan.revisions(name)).tolist())

    chunks = sorted(current(pinned.base))
    lacking = {name: frozenset(chunks) - current(name) for name in job.inputs}
    return LayerBuild(snapshot, job, plan, chunks, {}, lambda chunk: 0, lacking=lacking)


def build_chunks(place: LayerBuild, wanted: Iterable[int], engine: Engine, options: BuildOptions) -> BuildReport:
    """Make the missing ones of some chunks, in this order, and publish."""
    try:
        return _build_missing(place, wanted, engine, options)
    except OSError as error:
        store = place.job.store
        if not is_full(error):
            raise
        next_generation = max((entry.size for entry in store.entries(layout.GENERATIONS)), default=0)
        raise DiskFull(store.address, next_generation, store.free_bytes() or 0) from error


def _build_missing(place: LayerBuild, wanted: Iterable[int], engine: Engine, options: BuildOptions) -> BuildReport:
    store, layer = place.job.store, place.job.layer
    if place.changed:
        raise _changed_source(place, place.changed)
    started = time.monotonic()
    is_kept = isinstance(place.job, BaseJob) and not allows_all(options.max_failures)
    options = replace(options, planned=place.plan, kept_limit=options.max_failures if is_kept else None)
    with options.clock.during("listing"):
        found, unsound = with_retries(partial(list_what_is_there, place, options))
    table, revisions = found.table(layer), place.revisions()
    outdated = set(outdated_chunks(table, revisions).tolist())
    listed, there = set(table.chunks.tolist()) - outdated, found.present_chunks(layer, table, revisions)
    gone = found.lost_chunks(layer, table) - outdated
    order = list(wanted)
    # With a key, a file that no generation lists is made again and compared, never signed as it was found.
    distrusted = unsound if hmac_key() is None else frozenset(order)
    missing = [chunk for chunk in order if chunk not in listed and (chunk not in there or chunk in distrusted)]
    _check_inputs(place, missing)
    unlisted = frozenset(there).intersection(order) - listed - set(missing)
    tally = BuildProgress(total=len(order), present=len(order) - len(missing), unlisted=unlisted, newest=found.newest)
    lost = [chunk for chunk in order if chunk in gone]
    notes = [*place.notes, *_unsound_notes(layer, unsound.intersection(order))]
    if missing and (differing := differing_versions(found.newest.versions if found.newest else (), options.versions)):
        tally.note = f"chunks are made with other library versions than those that are there: {differing}"
        notes.append(tally.note)
    if lost:
        again = remake_chunks(place, lost, found.published, engine, options)
        notes.append(f"{len(again.records)} published chunk(s) had lost their files and were made again")
        tally.failed |= again.failed
        tally.present -= len(lost) - len(again.records)
    adopts = {layer: place.job.may_adopt}  # also what a worker wrote and could not say before it was stopped
    try:
        later = {chunk: int(revisions[chunk]) for chunk in missing if revisions[chunk]}
        job = BuildJob(place.job, distrusted, options.max_failures is not None, later)
        with options.clock.during("making"):
            _make_missing(place, job, missing, tally, engine, options)
    except BaseException as error:
        # That what was made cannot be listed now must not hide why the build ended; a rerun lists it.
        unbound = False
        with suppress(OSError, ForebayError):
            made = {layer: tally.records.values()}
            # Who is stopped may have seconds: what others have not listed yet is not read now.
            adopted = {} if isinstance(error, BuildStopped) else adopts
            publish(store, made, options.versions, None, options.planned, adopted, options.kept_limit, tally.newest)
            if isinstance(error, ChunkFailed | TooManyFailures):
                unbound = unbind(store, layer)
        if isinstance(error, SourceChanged):
            raise _changed_source(place, error.files) from error
        if isinstance(error, ChunkFailed):
            raise error.followed_by(_after_failed_chunk(place, unbound)) from error
        if isinstance(error, SourceEmpty) and tally.failures:
            check_something_made(store, layer, ChunkTable.of(list(tally.records.values())))  # says why
        raise
    made, refused = {layer: tally.records.values()}, set[str]()
    with options.clock.during("publishing"):
        listing = partial(publish, store, made, options.versions, refused, options.planned, adopts, options.kept_limit)
        generation = with_retries(partial(listing, tally.newest))
    table = generation.table(layer)
    notes += _check_listed(place, order, table, tally, _chunks_of(layer, refused))
    beside = sum(record.revision > later.get(record.chunk, 0) for record in tally.records.values())
    notes += [f"{beside:,} chunk(s) are a later revision: what has their name was left as it is"] if beside else []
    notes += tally.warnings
    report = _report(place, tally, generation, time.monotonic() - started, notes, options.clock.seconds)
    if tally.failed:
        raise BuildFailed(store.address, tally.failed)
    if len(table) == len(place.chunks) and isinstance(place.job, BaseJob):
        try:
            check_something_made(store, layer, table)
        except BuildFailed:
            unbind(store, layer)
            raise
    return report


def _changed_source(place: LayerBuild, changed: Mapping[str, str]) -> SourceChanged:
    """The error about changed files; where nothing was made of the source yet, the root is free again."""
    store, unbound = place.job.store, False
    with suppress(OSError, ForebayError):  # that the source has changed is what counts
        unbound = isinstance(place.job, BaseJob) and unbind(store, place.job.layer)
    if unbound:
        advice = f"nothing was made of it yet, and nothing is left at '{store.address}': build it again as it is now"
        return SourceChanged(store.address, changed, advice)
    return source_changed(store.address, place.plan, changed)


def _after_failed_chunk(place: LayerBuild, unbound: bool) -> str:
    """What became of a cache of which a chunk failed, and how to leave its file out."""
    root = place.job.store.address
    if unbound:
        return f"nothing was published at '{root}', so the corrected command can use it"
    kept = f"the chunks built before are kept at '{root}'"
    if place.plan.deduplicates or "root" not in place.plan.source:
        return kept
    return f"{kept}; to leave the file out, move it away and run `forebay refresh {root} --drop-missing`"


def _make_missing(
    place: LayerBuild, job: BuildJob, missing: list[int], tally: BuildProgress, engine: Engine, options: BuildOptions
) -> None:
    """Make chunks, also when a source file changes meanwhile in a part that was not planned."""
    for looks_left in reversed(range(LOOKS)):
        job = replace(job, chunks=place.job)
        left = [chunk for chunk in missing if chunk not in tally.records]
        try:
            Build(job, left, tally, options, place.streams, place.weigh).run(engine)
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
    look = place.job.source.looking()
    if any(place.job.has_changed(file, look) for file in read.values()):
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
    place: LayerBuild, chunks: Iterable[int], generation: Generation, engine: Engine, options: BuildOptions
) -> BuildProgress:
    """Make published chunks again. Where other bytes come out, a new revision is published."""
    store, layer = place.job.store, place.job.layer
    options = replace(options, planned=place.plan)
    listed = published_records(generation, layer, chunks)
    tally = BuildProgress(total=len(listed))
    for chunk in listed.keys() - set(place.chunks):
        del listed[chunk]
        tally.failed[chunk] = "it is published, but neither the plan nor the base layer has it now"
    for chunk in [chunk for chunk in listed if place.is_changed(chunk)]:
        del listed[chunk]
        tally.failed[chunk] = str(source_changed(store.address, place.plan, place.changed))
    asked = place.revisions()
    for chunk in listed.keys() & set(outdated_chunks(generation.table(layer), asked).tolist()):
        del listed[chunk]
        tally.failed[chunk] = f"its source has changed since; run `forebay refresh {store.address}`"
    job = RepairJob(place.job, listed, {chunk: int(asked[chunk]) for chunk in listed if chunk < len(asked)})
    with suppress(BuildFailed):  # what could not be made is in the tally
        Build(job, sorted(listed), tally, options, place.streams, place.weigh).run(engine)
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


def list_what_is_there(place: LayerBuild, options: BuildOptions) -> tuple[Snapshot, frozenset[int]]:
    """The index with all of a layer that may be adopted listed, and the chunks of it whose files may not.

    Builders at work list their own chunks. While there are some, nothing is adopted: each that starts would read and
    hash what the others have made since they last listed it. What a dead one left is adopted at the end.
    """
    check_index(place.snapshot)
    layer, skipped = place.job.layer, set[str]()
    adopts = {} if OtherBuilders(place.job.store, layer).is_any_at_work() else {layer: place.job.may_adopt}
    found = publish_found(place.snapshot, options.versions, skipped, place.plan, adopts)
    return found, _chunks_of(layer, skipped)


def _chunks_of(layer: str, keys: Iterable[str]) -> frozenset[int]:
    parsed = (layout.parse_chunk(key) for key in keys if key.startswith(layout.layer_folder(layer)))
    return frozenset(one[0] for one in parsed if one)


def _check_listed(
    place: LayerBuild, order: Sequence[int], table: ChunkTable, tally: BuildProgress, refused: Collection[int]
) -> list[str]:
    """Note every chunk that should be listed and is not as failed, but for those that wait for the rest of a refresh.

    Returns what to say of these.
    """
    store, layer, asked = place.job.store, place.job.layer, place.revisions()
    behind = set(outdated_chunks(table, asked).tolist())
    held = {chunk for chunk in order if behind and asked[chunk]} - set(refused)
    again = "run the same command again"
    for record in [one for one in tally.records.values() if listed_revision(table, one) < one.revision]:
        if record.chunk not in held or not has_file(store, record.key(layer)):
            del tally.records[record.chunk]
            tally.failed[record.chunk] = f"it was written, and was gone before it could be listed; {again}"
    for chunk in set(order) - (set(table.chunks.tolist()) - (behind & set(refused))) - held - tally.failed.keys():
        tally.present -= 1
        tally.failed[chunk] = f"its file appeared during the build and is not of this source; {again}"
    if not behind or tally.failed:
        return []
    return [
        f"{len(behind):,} chunk(s) are of a refresh that is not finished; it is listed as a whole, and readers get the "
        f"rows from before it until then; run `forebay refresh {store.address}`"
    ]


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
    place: LayerBuild,
    tally: BuildProgress,
    generation: Generation,
    seconds: float,
    notes: list[str],
    phases: Mapping[str, float],
) -> BuildReport:
    store, layer, recipe = place.job.store, place.job.layer, place.job.recipe
    table = generation.table(layer)
    statistics = {name: value for name, value in table.totals().items() if not isinstance(value, list)}
    holds = {"chunks": len(table), "rows": int(table.rows.sum()), "bytes": int(table.numbers["size"].sum())}
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
        made_statistics=dict(tally.sums),
        statistics=statistics,
        figures=hooks_of(recipe).figures(fields_of(recipe), statistics, holds) if len(table) else {},
        reasons=dict(tally.reasons.most_common()),
        made_rows=sum(record.rows for record in tally.records.values()),
        made_failures=sum(record.failures for record in tally.records.values()),
        phases=dict(phases),
    )


def _notes(files: Sequence[SourceFile], plan: Plan, fresh: Freshness) -> tuple[str, ...]:
    planned = plan.files
    is_same = len(plan.segments) == 1 and plan.segments[0].files.same_paths(FileTable.of(files))
    new = 0 if is_same else sum(file.path not in planned and file.size > 0 for file in files)
    grew = len(fresh.grown)
    notes = [f"{new:,} file(s) of the source are not in the plan; `forebay grow` appends them"] if new else []
    notes += [f"{grew:,} file(s) of the source grew; `forebay grow` appends what is new"] if grew else []
    left_out = plan.duplicates
    notes += [f"{left_out:,} sample(s) of the plan are duplicates of earlier ones and are left out"] if left_out else []
    return (*notes, *unreadable_note(plan.unreadable))
