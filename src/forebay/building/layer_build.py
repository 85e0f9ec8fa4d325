"""Build a layer: from what a caller asks for to runs of a build.

BuildRequest ─▶ build_layer ─▶ begin.py: recipe, plan ─▶ LayerBuild ─▶ build_chunks ─▶ builder.py: Build, in runs
                                                         which chunks, by which job, in which order
"""

import os
import socket
import time
from collections.abc import Callable, Collection, Iterable, Mapping, Sequence
from contextlib import AbstractContextManager, closing, nullcontext, suppress
from dataclasses import dataclass, field, replace
from functools import partial
from importlib import import_module
from itertools import chain
from typing import Any, cast

import msgspec
import numpy as np

from forebay.building.begin import (
    check_kind,
    check_start,
    prepare_base,
    prepare_layer,
    probed_destination,
    released,
    resolve_recipe,
)
from forebay.building.builder import (
    PUBLISH_SECONDS,
    Build,
    BuildOptions,
    BuildProgress,
    PhaseClock,
    Weigh,
)
from forebay.building.chunk_maker import BaseJob, BuildJob, ChunkJob, LayerJob, RepairJob, has_file
from forebay.building.planning import OnCut, SourceListing, is_long_work
from forebay.building.task import CensusTakers, MachineTrial, preload_document
from forebay.cache.catalog import (
    UNPUBLISHED,
    Snapshot,
    check_index,
    newest_generation,
    open_chunk,
    outdated_chunks,
    read_recipe_document,
)
from forebay.cache.claims import LEASE_SECONDS, OtherBuilders, PlanningClaim, planning_turn
from forebay.cache.clean import drop_layers, unbind
from forebay.cache.plan import Plan, load_plan, unreadable_note
from forebay.cache.publish import (
    builder_versions,
    check_listed_plan,
    differing_versions,
    listed_plan,
    listed_revision,
    publish,
    publish_found,
)
from forebay.cache.records import BuildReport, OnProgress, Progress
from forebay.cache.source_check import Freshness, compare_content, reported, source_changed
from forebay.columns import Array
from forebay.engine import InlineEngine, LocalEngine
from forebay.engine.base import Engine
from forebay.errors import (
    BuildFailed,
    BuildStopped,
    ChunkFailed,
    DiskFull,
    ForebayError,
    InputIncomplete,
    LibraryMissing,
    NothingMade,
    RecipeInvalid,
    SourceChanged,
    SourceEmpty,
    SourceMoving,
    TooManyFailures,
)
from forebay.format import layout
from forebay.format.chunk import ChunkRecord
from forebay.format.generation import ChunkTable, Generation, LayerTotals, ListedLayer, revisions_digest
from forebay.format.tensors import hmac_key, short_key_note
from forebay.recipe import (
    AnyRecipe,
    LayerRecipe,
    Recipe,
    RecipeDocument,
    dependencies_of,
    fields_of,
    hooks_of,
    input_layers,
    is_same_recipe,
    reads_of,
    versions_of,
)
from forebay.source import (
    CHANGED_MEANWHILE,
    FileTable,
    Reasons,
    Source,
    SourceFile,
    allows_all,
    check_failures,
    differing_files,
)
from forebay.store.base import Store, naming_full_disk, with_retries

ENGINES = ("inline", "local", "ray")


@dataclass(frozen=True, slots=True)
class BuildRequest:
    """The arguments that `build`, `grow`, `refresh` and `repair` share."""

    workers: int | None = None  # 0: in this process; None: as many as the recipe asks for, or one per core
    memory_limit: int | None = None
    max_failures: int | float | None = None
    skip_unreadable: bool = False
    lease_seconds: float = LEASE_SECONDS
    on_progress: OnProgress | None = None
    engine: "str | Engine | None" = None  # a name of ENGINES, an engine, None: by `workers`
    begin_at: float | None = None  # the share of the chunks after which to begin; None: at the first, or anywhere

    def holding(self, newest: Generation | None) -> "BuildRequest":
        """The same request, with the limit of failures that the cache was built with where the caller names none."""
        kept = None if newest is None else newest.max_failures
        return replace(self, max_failures=kept) if self.max_failures is None else self

    def options(self, versions: Mapping[str, str], source: Source | None, engine: Engine) -> BuildOptions:
        """What a build runs by; `versions` are those of the recipe."""
        return BuildOptions(
            workers=self.slots(engine),
            host=socket.gethostname(),
            versions=builder_versions(versions),
            memory_limit=self.memory_limit,
            max_failures=self.max_failures,
            lease_seconds=self.lease_seconds,
            publish_seconds=PUBLISH_SECONDS,
            begin_at=self.begin_at,
            on_progress=_in_bytes(source, self.on_progress or silent),
        )

    def open_engine(self) -> Engine:
        """The engine that makes chunks; one that the caller passed is used as it is."""
        engine = self.engine if isinstance(self.engine, Engine) else self._named_engine(self.engine or "local")
        usage = engine.usage()
        if usage.elsewhere and self.memory_limit is not None:
            raise ValueError("memory_limit bounds processes of this machine; leave it out with workers elsewhere")
        if usage.elsewhere and self.workers == 0:
            raise ValueError("workers must be at least 1 with workers elsewhere (got 0); leave it out to use them all")
        if usage.in_process and isinstance(self.workers, int) and self.workers > 1:
            raise ValueError(f"workers must be 0 or 1 with engine='inline', which has one (got {self.workers})")
        return engine

    def _named_engine(self, name: str) -> Engine:
        if name not in ENGINES:
            raise ValueError(f"engine is {name!r}; one of {', '.join(map(repr, ENGINES))} or an Engine is expected")
        if name == "ray":
            return ray_engine()
        return InlineEngine() if name == "inline" or self.workers == 0 else LocalEngine()

    def slots(self, engine: Engine) -> int:
        """How many chunks are made at once."""
        return engine.capacity() if self.workers is None else worker_count(self.workers)


def ray_engine(**options: Any) -> Engine:
    """A `RayEngine`; the library is imported only now."""
    try:
        module = import_module("forebay.engine.ray")
    except ModuleNotFoundError as error:
        raise LibraryMissing("ray", "engine='ray'", "ray") from error
    engine: Engine = module.RayEngine(**options)
    return engine


def worker_count(workers: int | None) -> int:
    """How many processes make chunks."""
    if workers is None:
        return len(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else os.cpu_count() or 1
    if not isinstance(workers, int) or workers < 0:
        raise ValueError(
            f"workers must be 0 (this process), a positive number, or None (one per core); got {workers!r}"
        )
    return max(1, workers)


def silent(progress: Progress) -> None:
    """Nobody listens."""


def show_planning(
    options: BuildOptions, planner: PlanningClaim | None, done: int, total: int, passed: int, size: int
) -> None:
    """Show how far planning is, here and to the builders that wait for the plan; slices of a function have no bytes."""
    passed, size = (passed, size) if size > total else (0, 0)
    progress = Progress(phase="planning", done=done, total=total, unit="files", read_bytes=passed, total_bytes=size)
    if planner is not None:
        planner.show(progress)
    options.on_progress(progress)


def turn_to_plan(
    store: Store, request: BuildRequest, segment: int, files: Sequence[SourceFile]
) -> AbstractContextManager[PlanningClaim]:
    """A context that begins when it is the turn of this builder to plan a segment, or another has planned it."""
    sizes = files.tensors["file_size"] if isinstance(files, FileTable) else [file.size for file in files]
    show, size = request.on_progress or silent, int(np.sum(sizes, dtype=np.int64))
    return planning_turn(store, segment, socket.gethostname(), request.lease_seconds, show, len(files), size)


FAR_TOO_MUCH = 4  # times the free bytes: more than an estimate from a sample is wrong by


def warn_of_little_room(options: BuildOptions, root: str, is_part: bool, needed: int, free: int) -> None:
    """Say before the work starts that the disk cannot hold it; refuse where that is sure and all of it is wanted."""
    if needed > FAR_TOO_MUCH * free and not is_part:
        raise DiskFull(root, needed, free)
    note = (
        f"about {needed:,} bytes are needed at '{root}', {free:,} are free: the build will stop when the disk is full; "
        f"make room, or build a range of chunks"
    )
    options.on_progress(Progress(phase="planning", done=0, total=0, unit="files", note=note))


def _in_bytes(source: Source | None, on_progress: OnProgress) -> OnProgress:
    """Progress of a source that counts samples has no number of bytes."""
    if source is None or source.unit == "bytes":
        return on_progress

    def without_bytes(progress: Progress) -> None:
        is_counted = progress.phase in ("verifying", "planning")  # the bytes of the cache, or of files
        on_progress(progress if is_counted else msgspec.structs.replace(progress, read_bytes=0))

    return without_bytes


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


# Checks the chunks that are there, repairs them, and returns what there is to say of it.
CheckFirst = Callable[[Store, Source | None, AnyRecipe, Engine, BuildOptions], tuple[str, ...]]


def build_layer(
    store: Store,
    source: Source | None,
    recipe: AnyRecipe,
    layer: str,
    mode: str,
    start_chunk: int | None,
    end_chunk: int | None,
    request: BuildRequest,
    check_first: CheckFirst | None = None,
) -> BuildReport:
    """Make what is missing of a layer, in an inclusive range of chunks; `check_first` sees to those that are there."""
    _check_range(start_chunk, end_chunk)
    refuse_tier(store)
    source = None if source is None else check_is_source(source)
    request = with_workers(request, recipe, source)
    with closing(request.open_engine()) as engine, released(recipe) as said:
        snapshot = Snapshot.take(store)
        if snapshot.newest is None:
            with probed_destination(store):
                pass
        listing = None if source is None else SourceListing(source, store)
        clock = PhaseClock()
        if listing is not None:
            with clock.during("listing"):
                is_long = is_long_work(listing.files)
            if is_long and snapshot.newest is None:
                with suppress(ForebayError):  # what has no document is refused when the work starts
                    engine.preload(preload_document(recipe), 1 if request.memory_limit else request.slots(engine))
        _try_machines(engine, snapshot, recipe, listing)
        is_new = snapshot.newest is None and listing is not None and not reads_of(recipe)
        if is_new:
            dependencies_of(recipe)  # a tokenizer that is missing here is named before another's plan is waited for
        # Claimed before the plan is first looked for: whoever made one had this claim before.
        turn = turn_to_plan(store, request, 0, listing.files) if is_new and listing else nullcontext()
        with clock.during("planning"), turn as planner:
            if planner is not None and planner.waited:
                snapshot = Snapshot.take(store)
            settled, notes = resolve_recipe(store, listing, recipe, layer)
            notes = (*notes, *(listing.notes if listing is not None else ()), *short_key_note(hmac_key()))
            options = replace(request.options(versions_of(settled), source, engine), clock=clock)
            is_part, skips = bool(start_chunk) or end_chunk is not None, request.skip_unreadable
            show = partial(show_planning, options, planner)
            place = _prepared(snapshot, listing, settled, layer, options, skips, start_chunk, is_part, engine, show)
        check_start(store.address, start_chunk, max(place.chunks, default=-1) + 1)
        place = place.noting(notes)
        if check_first is not None and snapshot.newest is not None:
            place = place.noting(check_first(store, source, settled, engine, options))
        report = build_chunks(place, in_order(place.chunks, mode, start_chunk, end_chunk), engine, options)
    # Also of chunks that were there: the same command must not succeed when it is run again.
    check_failures(store.address, report.failures, report.samples, request.max_failures)
    return msgspec.structs.replace(report, notes=(*report.notes, *said))


def replace_layers(store: Store, recipes: Mapping[str, AnyRecipe]) -> tuple[str, ...]:
    """Drop those layers that other recipes have made, or that were made from a layer that is dropped."""
    kept = {layer: one for layer in recipes if (one := read_recipe_document(store, layer)) is not None}
    others = {layer for layer in kept if _is_other(store, kept[layer], recipes[layer])}
    for layer in sorted(kept, key=lambda name: len(input_layers(kept[name]))):
        others |= {layer} if others & input_layers(kept[layer]).keys() else set()
    if others:
        drop_layers(store, sorted(others))
    return tuple(sorted(others))


def _is_other(store: Store, kept: RecipeDocument, recipe: AnyRecipe) -> bool:
    settled, _ = resolve_recipe(store, None, recipe, kept.layer)
    return not is_same_recipe(kept, settled)


def check_is_source(source: object) -> Source:
    if not isinstance(source, Source):
        raise TypeError(
            f"a source is needed, for instance fb.sources.lines('data/*.jsonl'), not {type(source).__name__}"
        )
    return source


def check_is_recipe(recipe: object) -> None:
    if not isinstance(recipe, Recipe | LayerRecipe):
        raise TypeError(f"a recipe is needed, for instance fb.ImageRecipe(size=224), not {type(recipe).__name__}")


def refuse_tier(store: Store) -> None:
    """A cache among the files of a tier would be taken for neither."""
    folder = store.local_path("")
    if folder is not None and all(os.path.isfile(os.path.join(folder, name)) for name in ("data.mdb", "users")):
        raise ForebayError(
            f"'{store.address}' holds a tier (data.mdb), which CachedImages and `forebay warm` fill; "
            "build the cache into another folder"
        )


def with_workers(request: BuildRequest, recipe: AnyRecipe, source: Source | None = None) -> BuildRequest:
    """The processes that a recipe or a source asks for here, where nobody says; a cluster has its resources."""
    if request.engine not in (None, "local") or request.workers is not None:
        return request
    wanted = hooks_of(recipe).workers
    if wanted is None and source is not None and request.memory_limit is None:
        wanted = source.workers()
    return replace(request, workers=wanted)


def _try_machines(engine: Engine, snapshot: Snapshot, recipe: AnyRecipe, listing: SourceListing | None) -> None:
    """Refuse a cluster whose machines cannot work on a build before it is planned."""
    if not engine.usage().elsewhere:
        return
    store, source = snapshot.store, None if listing is None else listing.source
    file = next((file.path for file in listing.walked), "") if listing is not None else ""
    with nullcontext("") if snapshot.newest is not None else probed_destination(store) as sign:
        try:
            engine.start(MachineTrial(store, source, recipe, file, sign), 0)
        finally:
            engine.stop()


def _prepared(
    snapshot: Snapshot,
    listing: SourceListing | None,
    recipe: AnyRecipe,
    layer: str,
    options: BuildOptions,
    skip_unreadable: bool,
    start_chunk: int | None,
    is_part: bool,
    engine: Engine,
    show: OnCut,
) -> LayerBuild:
    """A layer's work, begun now if it is new; `is_part`: not all of its chunks are asked for."""
    if reads_of(recipe):
        if snapshot.newest is not None:
            table = snapshot.newest.table(snapshot.newest.base)
            check_start(snapshot.store.address, start_chunk, max(table.chunks.tolist(), default=-1) + 1)
        prepare_layer(snapshot.store, recipe, layer)
        return layer_workplace(snapshot, cast(LayerRecipe, recipe), layer)
    if listing is None:
        raise RecipeInvalid(f"the recipe '{recipe.kind}' makes base rows and needs a source")
    base = cast(Recipe, recipe)
    slots = 1 if options.memory_limit else options.workers
    with naming_full_disk(snapshot.store, listing.weight):
        begun = prepare_base(
            snapshot,
            listing,
            base,
            layer,
            show,
            options.memory_limit,
            options.max_failures,
            skip_unreadable,
            on_little_room=partial(warn_of_little_room, options, snapshot.store.address, is_part),
            start_chunk=start_chunk,
            read_ahead=CensusTakers(engine, slots, snapshot.store, listing.source, base, show),
        )
    place = base_workplace(begun, listing, base, layer, begun.plan, skip_unreadable, known=snapshot.plan)
    return with_same_source(place, begun.plan, listing)


def _check_range(start: int | None, end: int | None) -> None:
    for name, chunk in (("start_chunk", start), ("end_chunk", end)):
        if chunk is not None and chunk < 0:
            raise ValueError(f"{name} must be at least 0 (got {chunk})")
    if start is not None and end is not None and start > end:
        raise ValueError(f"start_chunk must be at most end_chunk (got {start} and {end})")


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


LOOKS = 3  # how often a source that changes while it is read is looked at again


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
    fresh, changed = _since_planned(snapshot, source, layer, plan, made, listed)
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
        changed,
        _notes(listing.apart, plan, fresh),
        frozenset(fresh.missing),
        again=again,
        changed_paths=frozenset(fresh.changed),
    )


def _since_planned(
    snapshot: Snapshot,
    source: Source,
    layer: str,
    plan: Plan,
    made: Mapping[int, ChunkRecord] | None,
    listed: Iterable[SourceFile],
) -> tuple[Freshness, dict[str, str]]:
    """What has become of the planned files, and those with other content by the name of what was edited."""
    differing = differing_files(source, (file for _, file in plan.files.items()), listed)
    first = next(differing, None)
    if first is None:
        return Freshness(), {}
    found = chain([first], differing)  # one after the other: there may be millions
    fresh = compare_content(snapshot.store, source, plan, layer, snapshot.table(layer), found, made)
    return fresh, reported(source, plan, fresh.changed)


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
    store = place.job.store
    with naming_full_disk(store, lambda: max((one.size for one in store.entries(layout.GENERATIONS)), default=0)):
        return _build_missing(place, wanted, engine, options)


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
    tally.wanted = _wanted(order, revisions)
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
    tally.present_before = tally.present
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
    if tally.listed is not None:
        return _announced_report(place, tally, tally.listed, time.monotonic() - started, notes, options.clock.seconds)
    made, refused = {layer: tally.records.values()}, set[str]()
    with options.clock.during("publishing"):
        listing = partial(publish, store, made, options.versions, refused, options.planned, adopts, options.kept_limit)
        generation = with_retries(partial(listing, tally.newest))
    table = generation.table(layer)
    notes += _check_listed(place, order, table, tally, _chunks_of(layer, refused))
    beside = sum(record.revision > later.get(record.chunk, 0) for record in tally.records.values())
    notes += [f"{beside:,} chunk(s) are a later revision: what has their name was left as it is"] if beside else []
    notes += tally.warnings
    seconds, totals = time.monotonic() - started, table.summary()
    report = _report(place, tally, generation.number, totals, seconds, notes, options.clock.seconds)
    if tally.failed:
        raise BuildFailed(store.address, tally.failed)
    if len(table) == len(place.chunks) and isinstance(place.job, BaseJob):
        try:
            check_something_made(store, layer, table)
        except BuildFailed:
            unbind(store, layer)
            raise
    return report


def _wanted(order: Sequence[int], revisions: Array) -> str:
    """`revisions_digest` of the chunks that should be listed; empty where the plan does not have all of them."""
    numbers = np.sort(np.array(order, np.int64))
    is_planned = len(numbers) > 0 and int(numbers[-1]) < len(revisions)
    return revisions_digest(numbers, revisions[numbers]) if is_planned else ""


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


def _announced_report(
    place: LayerBuild,
    tally: BuildProgress,
    listed: ListedLayer,
    seconds: float,
    notes: list[str],
    phases: Mapping[str, float],
) -> BuildReport:
    """The report of a builder for which another has listed all, and has read it back."""
    store = place.job.store
    check_listed_plan(store, load_plan(store, place.plan.as_read()), listed.made.plan)
    return _report(place, tally, listed.generation, listed.totals, seconds, [*notes, *tally.warnings], phases)


def _report(
    place: LayerBuild,
    tally: BuildProgress,
    generation: int,
    totals: LayerTotals,
    seconds: float,
    notes: list[str],
    phases: Mapping[str, float],
) -> BuildReport:
    recipe, statistics = place.job.recipe, totals.statistics
    holds = {"chunks": totals.chunks, "rows": totals.rows, "bytes": totals.size}
    return BuildReport(
        root=place.job.store.address,
        layer=place.job.layer,
        chunks=tally.total,
        made=len(tally.records),
        present=tally.present,
        failed=dict(tally.failed),
        rows=totals.rows,
        failures=totals.failures,
        samples=totals.samples,
        written_bytes=tally.written_bytes,
        seconds=seconds,
        generation=None if generation == UNPUBLISHED else generation,
        deaths=tuple(tally.deaths),
        notes=tuple(notes),
        made_statistics=dict(tally.sums),
        statistics=statistics,
        figures=hooks_of(recipe).figures(fields_of(recipe), statistics, holds) if totals.chunks else {},
        reasons=dict(tally.reasons.most_common()),
        made_rows=sum(record.rows for record in tally.records.values()),
        made_failures=sum(record.failures for record in tally.records.values()),
        phases=dict(phases),
        made_elsewhere=max(0, tally.present - tally.present_before),
        layer_reasons=totals.reasons,
        tokens_per_second=tally.sums["tokens"] / max(seconds, 1e-9) if tally.sums["tokens"] else None,
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
