"""Refresh a cache: make the chunks of changed source files again, then those of the layers above them.

    plan      chunk 0 = a[0:900]            a was edited             chunk 0 = a[0:910], from revision 1 on
              chunk 1 = a[900:1400] b[0:350] ───────────▶  amended   chunk 1 = a[910:1410] b[0:350], from revision 1 on

The amended plan asks for a higher revision of the chunk files, so that whoever builds next makes them: an interrupted
refresh is resumed. Chunks keep their numbers, and generations that are there keep their files. An amendment of which no
row could be made is taken back.
"""

import time
from collections.abc import Iterable, Iterator, Mapping, Sequence
from contextlib import ExitStack, closing, suppress
from dataclasses import dataclass, replace
from functools import partial
from itertools import pairwise
from typing import cast

from forebay.building.begin import (
    check_kept_texts,
    check_kind,
    is_unsigned,
    kept_recipe,
    kept_workers,
    prepare_layer,
    recipe_until,
    released,
    resolve_recipe,
    source_for,
    unsigned_plan,
)
from forebay.building.builder import BuildOptions
from forebay.building.grow_cache import named_alike, read_like
from forebay.building.layer_build import BuildRequest, base_workplace, build_chunks, layer_workplace
from forebay.building.planning import SourceListing
from forebay.building.repair_cache import layer_height
from forebay.cache.catalog import (
    Snapshot,
    check_index,
    newest_generation,
    outdated_chunks,
    published_record,
    read_cache_document,
)
from forebay.cache.clean import take_back
from forebay.cache.plan import Plan, Segment
from forebay.cache.publish import builder_versions, listed_plan
from forebay.cache.records import GONE, RefreshReport
from forebay.cache.source_check import (
    UNFINISHED,
    Freshness,
    Row,
    SourceDigests,
    can_be_read,
    can_grow,
    check_freshness,
    reported,
    rows_in,
    source_changed,
)
from forebay.columns import Array
from forebay.engine.base import Engine
from forebay.errors import ChunkFailed, Damaged, ForebayError, SourceChanged, SourceEmpty
from forebay.format import layout
from forebay.format.generation import Generation
from forebay.recipe import AnnotatedRecipe, AnyRecipe, LayerRecipe, Recipe, versions_of
from forebay.source import Part, Source, SourceFile, check_failures
from forebay.store.base import Store, wait_until_listed

TRIES = 100  # to amend a plan, while others change it
Place = tuple[int, int, int, int]  # chunk, part of it, start, stop
Range = tuple[int, int]


@dataclass(frozen=True, slots=True)
class Amended:
    """A plan for the source as it is now, and what has changed."""

    plan: Plan
    changed: Mapping[str, str]
    dropped: tuple[str, ...] = ()
    touched: int = 0
    missing: tuple[str, ...] = ()  # files that are gone and stay planned: their rows are kept


def amend_plan(snapshot: Snapshot, source: Source, *, drop_missing: bool = False) -> Amended:
    """Plan the changed files of a source anew, under the same numbers of chunks."""
    store = snapshot.store
    for _ in range(TRIES):
        check_kind(store, source, snapshot.plan)
        if is_unsigned(snapshot.newest, snapshot.plan):
            _check_unsigned(snapshot, source, drop_missing)
        segment, amended = _drafted(snapshot, source, snapshot.plan, drop_missing)
        if segment is None:
            return amended
        if store.create(layout.plan_segment(segment.number), segment.encode()):
            return amended
        wait_until_listed(store, layout.plan_segment(segment.number))
        snapshot = Snapshot.take(store)
    raise ForebayError(f"others change the plan of '{store.address}' without a pause; run the same command again")


def _drafted(snapshot: Snapshot, source: Source, plan: Plan, drop_missing: bool) -> tuple[Segment | None, Amended]:
    """What amends a plan, None where nothing does, and the plan with it."""
    store, base = snapshot.store, read_cache_document(snapshot.store).base
    table = snapshot.table(base)
    fresh = _with_unfinished(source, plan, check_freshness(store, source, plan, base, table))
    dropped = fresh.missing if drop_missing else ()
    gone = dict.fromkeys(dropped, GONE)
    touched = {path: file for path, file in fresh.now.items() if path not in fresh.grown}
    if not (fresh.changed or dropped or touched):
        return None, Amended(plan, {}, missing=fresh.missing)
    if gone or fresh.changed:
        _check_not_deduplicated(store, plan, {**reported(source, plan, fresh.changed), **gone})
    past = SourceDigests(store, plan, base, table)
    segment = _segment(snapshot, source, plan, past, fresh, touched, dropped)
    digests = (*plan.digests, segment.digest())
    whole = Plan((*plan.segments, segment), digests, plan.dropped, plan.etags)
    _check_samples_left(store, source, plan, whole, {**fresh.changed, **gone})
    left = tuple(path for path in fresh.missing if path not in dropped)
    return segment, Amended(whole, reported(source, plan, fresh.changed), dropped, len(touched), left)


def _check_unsigned(snapshot: Snapshot, source: Source, drop_missing: bool) -> None:
    """With a key, an amendment that no tagged generation covers must be what the source gives now.

    The revisions that it asks for depend on the files that were there when it was written: any above what is listed.
    """
    store, newest, plan = snapshot.store, snapshot.newest, snapshot.plan
    number = len(newest.plan) if newest else 0
    found = plan.segments[number]
    if newest is None or not found.amends:
        raise unsigned_plan(store, plan, number)
    again, _ = _drafted(snapshot, source, plan.first(number), drop_missing)
    if again is None or len(plan.segments) != number + 1 or not _asks_for_more(found, newest):
        raise unsigned_plan(store, plan, number, compared=True)
    layers = {again.amends, *snapshot.layers()}
    asked = {layer: revisions.tolist() for layer in layers if (revisions := found.revisions(layer)) is not None}
    same = again.amending(again.amends, again.chunk_numbers.tolist(), asked, again.dropped)
    if same.digest() != plan.digests[number]:
        raise unsigned_plan(store, plan, number, compared=True)


def _asks_for_more(amendment: Segment, newest: Generation) -> bool:
    """Whether an amendment asks for a higher revision of every listed chunk than the listed one."""
    for layer, table in newest.layers.items():
        asked = amendment.revisions(layer)
        if asked is None:
            return False
        listed = dict(zip(table.chunks.tolist(), table.numbers["revision"].tolist(), strict=True))
        pairs = zip(amendment.chunk_numbers.tolist(), asked.tolist(), strict=True)
        if any(revision <= listed.get(chunk, 0) for chunk, revision in pairs):
            return False
    return True


def _with_unfinished(source: Source, plan: Plan, fresh: Freshness) -> Freshness:
    """Streams that grew behind an unfinished sample have changed too; nothing can be appended to them."""
    ends = plan.ends() if fresh.grown else {}
    files = {path: fresh.now[path] for path in fresh.grown if fresh.now[path].stream and path in ends}
    unfinished = [path for path, file in files.items() if not can_grow(source, file, ends[path])]
    return Freshness(
        {**fresh.changed, **dict.fromkeys(unfinished, UNFINISHED)},
        fresh.missing,
        tuple(path for path in fresh.grown if path not in unfinished),
        {path: file for path, file in fresh.now.items() if path not in unfinished},
    )


def _segment(
    snapshot: Snapshot,
    source: Source,
    plan: Plan,
    past: SourceDigests,
    fresh: Freshness,
    touched: Mapping[str, SourceFile],
    dropped: Iterable[str],
) -> Segment:
    files: dict[str, SourceFile] = dict(touched)
    ranges: dict[tuple[int, int], Range | None] = {}  # chunk, part -> what is read now, None: nothing
    for path in fresh.changed:
        files[path], found = _recut(source, plan, past, path)
        ranges |= found
    for path in dropped:
        ranges |= {place[:2]: None for place in plan.places_of(path)}
    chunks = sorted({chunk for chunk, _ in ranges})
    parts = [_parts(plan, chunk, ranges, files) for chunk in chunks]
    _check_readable(snapshot.store, parts, set(fresh.missing) - set(dropped))
    segment = Segment.of(
        parts,
        number=len(plan.segments),
        first_chunk=len(plan),
        source=plan.source,
        weight=plan.weight,
        empty=files.values(),
    )
    base = read_cache_document(snapshot.store).base
    revisions = {layer: _next_revisions(snapshot, layer, plan, chunks) for layer in {base, *snapshot.layers()}}
    return segment.amending(base, chunks, revisions, dropped)


def _parts(
    plan: Plan, chunk: int, ranges: Mapping[tuple[int, int], Range | None], files: Mapping[str, SourceFile]
) -> list[Part]:
    """What a chunk is made from now."""
    found = []
    for number, part in enumerate(plan.parts(chunk)):
        path = part.file.path
        now = ranges.get((chunk, number), (part.start, part.stop))
        if now is not None:
            found.append(Part(files.get(path) or plan.files.get(path) or part.file, *now))
    return found


def _recut(
    source: Source, plan: Plan, past: SourceDigests, path: str
) -> tuple[SourceFile, dict[tuple[int, int], Range | None]]:
    """A changed file as it is now, and the range of every part of it that has to be read again.

    Parts whose content is the same, at the same place, stay as they are: all before the first change, and those behind
    it where samples still begin and end where they did.
    """
    file = source.look(path)
    places = sorted(plan.places_of(path), key=lambda place: place[2:])
    same = [not file.stream and _is_same(source, past, file, place) for place in places]
    if not file.stream and _fits(source, file, places, same):
        return file, {place[:2]: place[2:] for place, is_same in zip(places, same, strict=True) if not is_same}
    first = same.index(False) if False in same else len(places) - 1
    try:
        stops = _stops(source, file, places[first:])
    except SourceChanged:  # no sample begins there any more
        first, stops = 0, _stops(source, file, [(*places[0][:2], 0, places[0][3]), *places[1:]])
    bounds: list[Range | None] = list(pairwise([places[first][2] if first else 0, *stops]))
    bounds += [None] * (len(places) - first - len(bounds))  # it became shorter: there is nothing for its last chunks
    return source.scanned(file), {place[:2]: range for place, range in zip(places[first:], bounds, strict=True)}


def _is_same(source: Source, past: SourceDigests, file: SourceFile, place: Place) -> bool:
    if source.unit == "bytes" and place[3] > file.size:
        return False
    return past.is_same_part(source, file, place) is True


def _fits(source: Source, file: SourceFile, places: Sequence[Place], same: Sequence[bool]) -> bool:
    """Whether the parts of a file can be read as they were planned: samples begin and end where the parts do."""
    if source.unit == "samples":
        return source.weight(file) == places[-1][3]
    if file.size != places[-1][3]:
        return False
    return all(is_same or can_be_read(source, file, *place[2:]) for place, is_same in zip(places, same, strict=True))


def _stops(source: Source, file: SourceFile, places: Sequence[Place]) -> list[int]:
    """Where parts of a file end, at most as many as there were, from where the first begins to the end of the file."""
    start, weight = places[0][2], max(1, sum(stop - start for _, _, start, stop in places) // len(places))
    stops = list(source.cuts(file, start, weight, weight))
    if len(stops) <= len(places):
        return stops
    return [stops[(number + 1) * len(stops) // len(places) - 1] for number in range(len(places))]


def _next_revisions(snapshot: Snapshot, layer: str, plan: Plan, chunks: Sequence[int]) -> list[int]:
    """Return for every chunk a revision that none of its files has."""
    files, asked = snapshot.chunk_files(layer), plan.revisions(layer)
    return [1 + max(files.get(chunk, 0), int(asked[chunk])) for chunk in chunks]


def refreshed_notes(
    store: Store, recipe: Recipe, layer: str, before: Generation | None, after: Generation | None, chunks: Sequence[int]
) -> tuple[str, ...]:
    """What a recipe says of the rows of chunks that were made again, beside what it was made from before."""
    if before is None or after is None or not isinstance(recipe, AnnotatedRecipe):
        return ()

    def rows(listed: Generation) -> Iterator[Row]:
        for chunk in chunks:
            record = published_record(listed, layer, chunk)
            yield from rows_in(store, listed, layer, record, recipe.annotations) if record else ()

    try:
        return recipe.refreshed(rows(before), rows(after))
    except Damaged:
        return ()  # the refresh is done; verify reports the chunk


def _check_samples_left(store: Store, source: Source, plan: Plan, amended: Plan, changed: Mapping[str, str]) -> None:
    """Refuse a source that became empty before anything is written: its rows would go without a word."""
    if int(amended.weights.sum()) or not int(plan.weights.sum()):
        return
    shown = [f"'{path}' {how}" for path, how in reported(source, plan, changed).items()]
    more = f" and {len(shown) - 3:,} more" if shown[3:] else ""
    raise SourceEmpty(
        store.address,
        f"no sample is left: {'; '.join(shown[:3])}{more}",
        f"put the old content back, or put samples into the source and run `forebay refresh {store.address}` again",
    )


def _check_not_deduplicated(store: Store, plan: Plan, changed: Mapping[str, str]) -> None:
    if plan.deduplicates:  # one changed sample may decide about any other
        raise source_changed(store.address, plan, changed)


def _check_readable(store: Store, chunks: Iterable[Iterable[Part]], missing: set[str]) -> None:
    """A chunk that is made again is made of all its files."""
    needed = sorted({part.file.path for parts in chunks for part in parts} & missing)
    if needed:
        shown = ", ".join(f"'{path}'" for path in needed[:3]) + (f" and {len(needed) - 3} more" if needed[3:] else "")
        raise ForebayError(
            f"chunks of '{store.address}' that have to be made again hold samples of files that are gone: {shown}; put "
            f"them back, or run `forebay refresh {store.address} --drop-missing` to leave their samples out"
        )


def refresh_cache(
    store: Store,
    source: Source | None,
    check_source: bool,
    recipes: Mapping[str, AnyRecipe],
    drop_missing: bool,
    request: BuildRequest,
) -> RefreshReport:
    """Amend the plan by what the source holds now, and make what it asks for."""
    started, base = time.monotonic(), read_cache_document(store).base
    snapshot = Snapshot.take(store)
    check_index(snapshot)
    if base not in recipes:
        check_kept_texts(store)
    table, known = snapshot.table(base), listed_plan(snapshot)
    reading = named_alike(source_for(store, source, check_source, known, "refresh"), known)
    listing = SourceListing(reading, store)
    kept = recipes.get(base) or kept_recipe(store, base, "refresh", check_source)
    own, notes = resolve_recipe(store, listing, cast(Recipe, kept), base)
    prepare_layer(store, own, base)
    workers = kept_workers(store) if request.workers is None else request.workers
    asked, request = request.max_failures, replace(request.holding(snapshot.newest), workers=workers)
    amended = amend_plan(snapshot, reading, drop_missing=drop_missing)
    chunks = tuple(outdated_chunks(table, amended.plan.revisions(base)).tolist())
    with closing(request.open_engine()) as engine, released(own) as said:
        options = request.options(versions_of(own), reading, engine)
        try:
            begun = snapshot.with_plan(amended.plan)
            place = base_workplace(begun, listing, own, base, amended.plan, known=snapshot.plan)
            built = build_chunks(place.noting(notes), chunks, engine, options)
        except BaseException as error:
            with suppress(OSError, ForebayError):  # why it failed is what counts; the next refresh resumes it
                take_back(store)
            if not isinstance(error, ChunkFailed):
                raise
            like = f"the cache reads its source as {read_like(reading)}: correct the file, or put the old content back"
            raise error.followed_by("", like) from error
        above = replace(options, max_failures=asked)  # what the cache keeps is of the base layer's samples
        layers, missing = _refresh_layers(store, recipes, check_source, engine, above)
    check_failures(store.address, built.failures, built.samples, request.max_failures)  # also when it is run again
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
        unbuilt=len(amended.plan) - (len(newest.table(base)) if newest is not None else 0),
        notes=(
            *built.notes,
            *_still_missing(amended.missing, amended.plan),
            *refreshed_notes(store, own, base, snapshot.newest, newest, chunks),
            *said,
        ),
    )


def _refresh_layers(
    store: Store, recipes: Mapping[str, AnyRecipe], check_source: bool, engine: Engine, options: BuildOptions
) -> tuple[dict[str, tuple[int, ...]], dict[str, str]]:
    """Make chunks of further layers again, each layer after those it reads; those that cannot be made, with why."""
    made: dict[str, tuple[int, ...]] = {}
    missing: dict[str, str] = {}
    snapshot = Snapshot.take(store)  # with the base chunks that were made just now
    newest = snapshot.newest
    if newest is None:
        return made, missing
    above = sorted((name for name in newest.layers if name != newest.base), key=partial(layer_height, newest))
    plan = listed_plan(snapshot)
    for layer in above:
        wanted = _behind(snapshot, layer, plan.revisions(layer))
        if not wanted:
            continue
        try:
            with ExitStack() as ending:
                kept = partial(kept_recipe, store, verb="refresh", check_source=check_source)
                recipe = cast(LayerRecipe, recipe_until(ending, store, recipes.get(layer), kept, layer))
                versions = builder_versions(versions_of(recipe))
                build_chunks(
                    layer_workplace(snapshot, recipe, layer), wanted, engine, replace(options, versions=versions)
                )
            made[layer] = wanted
        except ForebayError as error:
            missing[layer] = str(error)
        snapshot = Snapshot.take(store)  # for the layers above it, with as much of it as was made
    return made, missing


def _behind(snapshot: Snapshot, layer: str, asked: Array) -> tuple[int, ...]:
    """Chunks that a layer had, in a lower revision than a refresh asks for, and does not list in that one yet."""
    table = snapshot.table(layer)
    listed = dict(zip(table.chunks.tolist(), table.numbers["revision"].tolist(), strict=True))
    had = sorted(chunk for chunk in snapshot.chunk_files(layer) if chunk < len(asked) and asked[chunk])
    return tuple(chunk for chunk in had if listed.get(chunk, -1) < asked[chunk])


def _still_missing(paths: Sequence[str], plan: Plan) -> tuple[str, ...]:
    if not paths:
        return ()
    way = "" if plan.deduplicates else ", --drop-missing leaves them out"
    return (f"{len(paths):,} planned file(s) are gone (the first is '{paths[0]}'); their rows are kept{way}",)
