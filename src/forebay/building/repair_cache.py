"""Repair a cache: its index first, then the chunks that are bad or missing, then what is left is reported.

The index is what is not a chunk: documents, plans, constants, generations.

What the newest sound generation carries in words (cache.json, recipes) comes from it. Everything else comes from a copy
of the cache, or is made again; it goes back in place only when it is, to the byte, what was published. With a key,
nothing is signed that no tag covers and that was not made here.
"""

import hashlib
import re
import secrets
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from contextlib import ExitStack, suppress
from dataclasses import dataclass, field, replace
from functools import partial
from typing import Any, cast

import msgspec

from forebay.building.begin import (
    draft_segment,
    first_segment,
    kept_recipe,
    kept_source,
    kept_workers,
    recipe_until,
    reopened,
    sealed_constants,
    source_for,
)
from forebay.building.builder import BuildOptions
from forebay.building.layer_build import (
    BuildRequest,
    LayerBuild,
    base_workplace,
    build_chunks,
    layer_workplace,
    remake_chunks,
    with_same_source,
)
from forebay.building.planning import SourceListing
from forebay.cache.catalog import (
    Snapshot,
    chunk_files,
    generation_numbers,
    index_problems,
    published_record,
    read_cache_document,
    read_recipe_document,
    sound_record,
)
from forebay.cache.copy import is_within, read_published
from forebay.cache.plan import Plan, Segment, decode_segment, load_identities, load_plan
from forebay.cache.publish import (
    Adopts,
    adoption_rule,
    builder_versions,
    differing_versions,
    listed_plan,
    publish_over_damaged,
)
from forebay.cache.records import GONE, RepairReport, VerifyReport
from forebay.cache.source_check import is_made_from, refresh_advice
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
from forebay.errors import (
    BuildFailed,
    BuildStopped,
    CacheNotFound,
    Damaged,
    ForebayError,
    FormatTooNew,
    IndexCorrupt,
    KeyRefused,
    NotForebay,
    NothingPublished,
)
from forebay.format import layout
from forebay.format.chunk import ChunkRecord
from forebay.format.generation import Generation
from forebay.format.layout import CacheDocument
from forebay.format.tensors import hmac_key
from forebay.recipe import AnyRecipe, LayerRecipe, Recipe, input_layers, reads_of, versions_of
from forebay.source import Source
from forebay.store.base import Buffer, Missing, Store, holds, is_full, load_index

_IF_DAMAGED = f", or, if '{layout.CACHE}' there is what was damaged, move it away and run the same command again"
_ADVICE = re.compile(r"; run `forebay (?:verify`, then `forebay )?repair[^`]*`")


@dataclass(slots=True)
class RepairLog:
    """What a repair has done so far, by key."""

    restored: list[str] = field(default_factory=list)  # the very bytes that were published are back
    replaced: dict[str, str] = field(default_factory=dict)  # why other bytes had to be published
    failed: dict[str, str] = field(default_factory=dict)

    def fail(self, key: str, error: ForebayError) -> None:
        """Keep why something cannot be put back, without the advice to run what is running."""
        self.failed[key] = _ADVICE.sub("", str(error))


@dataclass(frozen=True, slots=True)
class RepairInputs:
    """The cache to repair, and what it can be repaired from."""

    store: Store
    copy: Store | None
    source: Source | None  # as the caller passed it
    reopened: Callable[[Mapping[str, Any]], Source | None]  # the source that a description names, if it can be opened
    recipe_of: Callable[[str], AnyRecipe]  # layer -> its recipe, ready to make chunks
    workplace_of: Callable[[str], LayerBuild]


def repair_index(inputs: RepairInputs, log: RepairLog) -> Generation:
    """Put back cache.json, recipes, constants and plan, then see to a sound newest generation."""
    try:
        return _repair_index(inputs, log)
    except NotForebay as error:  # which advises what is running
        raise Damaged(f"{_ADVICE.sub('', str(error))}, and run the repair again") from error


def _repair_index(inputs: RepairInputs, log: RepairLog) -> Generation:
    store = inputs.store
    _check_copy(store, inputs.copy)
    basis, bad = _basis(inputs)
    if basis is None:
        return _list_anew(inputs, bad, log)
    plan = Snapshot(store, None).sound_plan
    problems = index_problems(store, basis, plan)
    for problem in problems:
        _put_back(inputs, log, problem.key, partial(_published_bytes, inputs, basis, problem.key))
    for problem in identity_problems(store, basis, None if problems else plan):  # segments may be back only now
        _put_back(inputs, log, problem.key, partial(_identity_bytes, inputs, problem.key))
    _drop_loose_segments(store, basis, any(problem.key.startswith(layout.PLAN) for problem in problems), log)
    if not bad and basis.number in generation_numbers(store):
        return basis
    plan = Snapshot(store, None).sound_plan
    generation = publish_over_damaged(store, basis, adoptable(inputs, plan, basis.base, basis.recipes))
    why = f"it could not be read; generation {generation.number} stands in its place"
    if hmac_key() is not None:
        why += f", with what generation {basis.number} lists; `forebay build {store.address}` makes the other chunks"
    _replace_generations(store, bad, why + _unbuilt(store, generation), log)
    if not bad and inputs.copy is not None:
        why = (
            f"none was left here; it lists what generation {basis.number} of the copy at '{inputs.copy.address}' lists"
        )
        log.replaced[layout.generation(generation.number)] = why
    return generation


def _check_copy(store: Store, copy: Store | None) -> None:
    """Refuse a place that no copy is in, before anything is written."""
    if copy is None:
        return
    if is_within(copy, store) and is_within(store, copy):
        raise ForebayError(f"'{copy.address}' is the cache itself; name a copy of it (--from COPY)")
    if not (any(entry.key == layout.CACHE for entry in copy.entries(layout.CACHE)) or generation_numbers(copy)):
        raise ForebayError(
            f"'{copy.address}' is not a cache: it has neither '{layout.CACHE}' nor a generation; name a copy made with "
            f"`forebay copy {store.address} COPY`"
        )


def _basis(inputs: RepairInputs) -> tuple[Generation | None, list[str]]:
    """The generation to repair by, and the keys of those that are damaged.

    It is the newest sound one, or the copy's where the newest one here is damaged or lost; None where there is no sound
    one at all.
    """
    store = inputs.store
    try:
        # With a key, a generation whose tag is wrong or gone is damage like any other, if one with a right tag is left.
        here, problems = newest_sound(store, past_refused=hmac_key() is not None)
        bad = [problem.key for problem in problems]
    except (NothingPublished, CacheNotFound, NotForebay) as error:
        if inputs.copy is None:
            if not isinstance(error, NotForebay):
                _check_begun(store)
            raise
        here, bad = None, []
    except (IndexCorrupt, KeyRefused) as error:
        if isinstance(error, KeyRefused) and (inputs.copy is None or hmac_key() is None):
            raise
        here, bad = None, [layout.generation(number) for number in generation_numbers(store)]
    if inputs.copy is None or (here is not None and max(bad, default="") < layout.generation(here.number)):
        return here, bad
    there = _copied_generation(inputs, inputs.copy, here)
    if here is None and there is None and hmac_key() is not None:
        newest_sound(store)  # which says why no generation here is believed
    is_newer = there is not None and (here is None or there.number > here.number)
    return (there if is_newer else here), bad


def _copied_generation(inputs: RepairInputs, copy: Store, here: Generation | None) -> Generation | None:
    """The newest sound generation of the copy, if the copy is of this cache."""
    try:
        there, _ = newest_sound(copy)
    except (Damaged, NothingPublished, CacheNotFound):
        return None
    with suppress(CacheNotFound, Damaged):
        own = here.document.cache_id if here else read_cache_document(inputs.store).cache_id
        if own != there.document.cache_id:
            raise ForebayError(
                f"the copy at '{copy.address}' is of another cache (id {there.document.cache_id}, here {own}); name a "
                f"copy of '{inputs.store.address}'{'' if here else _IF_DAMAGED}"
            )
    return there


def _check_begun(store: Store) -> None:
    """Raise if nothing is published and the index is damaged: repair needs a generation."""
    damaged = [key for key, problem in _begun_problems(store).items() if problem is not None]
    is_cache = holds(store, layout.CACHE) or any(any(store.entries(folder)) for folder in (layout.PLAN, layout.LAYERS))
    if damaged and is_cache:  # another folder must never be said to be deleted
        raise Damaged(
            f"nothing of the cache at '{store.address}' is published, and {_quoted(damaged)} cannot be read; delete "
            f"'{store.address}' and build it again"
        )


def _begun_problems(store: Store) -> dict[str, ForebayError | None]:
    """The texts and the plan that a cache begins with, and what is wrong with each that is there."""
    found: dict[str, ForebayError | None] = {}
    for layer in _layer_folders(store):
        found[layout.recipe(layer)] = _raised(partial(read_recipe_document, store, layer))
    found[layout.CACHE] = _raised(partial(read_cache_document, store))
    found[layout.plan_segment(0)] = _raised(partial(load_plan, store))
    return found


def _raised(call: Callable[[], object]) -> ForebayError | None:
    try:
        call()
    except FormatTooNew:
        raise
    except (Damaged, CacheNotFound) as error:
        return error
    return None


def _layer_folders(store: Store) -> list[str]:
    names = {entry.key.split("/")[1] for entry in store.entries(layout.LAYERS) if entry.key.count("/") == 2}
    return sorted(filter(layout.is_layer_name, names))


def _put_back(inputs: RepairInputs, log: RepairLog, key: str, published: Callable[[], Sequence[Buffer]]) -> None:
    try:
        inputs.store.replace(key, published())
        log.restored.append(key)
    except ForebayError as error:
        log.fail(key, error)
    except IsADirectoryError:
        log.failed[key] = "a folder has its name; move it away and run it again"
    except OSError as error:
        if is_full(error):
            raise
        log.failed[key] = f"'{error.filename}': {error.strerror}" if error.filename else str(error)


def _replace_generations(store: Store, bad: list[str], why: str, log: RepairLog) -> None:
    for key in bad:
        store.delete(key)
        log.replaced[key] = why


def _drop_loose_segments(store: Store, basis: Generation, was_exchanged: bool, log: RepairLog) -> None:
    """Remove segments that no generation lists and that do not continue the published plan, with what they made.

    Their chunks would else be taken for those of the segments that are planned in their place.
    """
    last = len(basis.plan)
    if not any(layout.parse_segment(entry.key) == last for entry in store.entries(layout.PLAN)):
        return
    if not was_exchanged and _raised(partial(load_plan, store)) is None:
        return
    planned = _planned_chunks(store, last)
    if planned is None:
        return
    for layer in basis.layers:
        listed = set(basis.table(layer).chunks.tolist())
        for chunk, revision in chunk_files(store, layer).items():
            if chunk >= planned and chunk not in listed:
                store.delete(layout.chunk(layer, chunk, revision))
    for entry in list(store.entries(layout.PLAN)):
        number = layout.parse_segment(entry.key)
        if number is not None and number >= last and entry.key == layout.plan_segment(number):
            store.delete(entry.key)
            why = (
                "no generation lists it, and it does not continue the plan; what it added comes back with the command "
                f"that wrote it: `forebay grow {store.address} SOURCE` with all files of the source if that was "
                f"`grow`, or `forebay refresh {store.address}` if it was `refresh`"
            )
            log.replaced[entry.key] = why


def _planned_chunks(store: Store, segments: int) -> int | None:
    """How many chunks the published segments plan, None where they cannot be read."""
    try:
        last = decode_segment(load_index(store, layout.plan_segment(segments - 1)), store.address, layout.PLAN)[0]
    except (Missing, Damaged):
        return None
    return last.first_chunk + last.added


def _list_anew(inputs: RepairInputs, bad: list[str], log: RepairLog) -> Generation:
    """No generation can be read: chunks prove themselves by their own digests, and are listed again."""
    store = inputs.store
    if hmac_key() is not None:
        problem = (
            f"no generation can be read, and a key signs nothing that no tag covers; take it from a copy (`forebay "
            f"repair {store.address} --from COPY`), or delete '{layout.GENERATIONS}' and run the build again, which "
            f"makes every chunk again and compares it"
        )
        raise KeyRefused(store.address, bad[-1] if bad else layout.GENERATIONS, problem)
    _restore_begun(inputs, log)
    plan, base = Snapshot(store, None).sound_plan, read_cache_document(store).base
    adopts = adoptable(inputs, plan, base, _layer_folders(store))
    _check_plan(store, base, adopts)
    generation = publish_over_damaged(store, None, adopts)
    why = f"it could not be read; generation {generation.number} lists every chunk that was found sound"
    _replace_generations(store, bad, why + _unbuilt(store, generation), log)
    return generation


def _check_plan(store: Store, base: str, adopts: Adopts) -> None:
    """Raise if no sound chunk of the base layer was made by this plan."""
    planned, found = len(load_plan(store)), 0
    for chunk, revision in chunk_files(store, base).items():
        record = sound_record(store, base, chunk, revision)
        if record is not None and chunk < planned and adopts[base](record):
            return
        found += record is not None
    if found:
        raise Damaged(
            f"the cache at '{store.address}' cannot be repaired: no generation can be read, and none of {found:,} "
            f"sound chunk(s) was made by '{layout.plan_segment(0)}' from the source as it is now: the plan is of "
            f"another cache, or the source has changed; name a copy (`--from COPY`), or build a new cache from it"
        )


def _unbuilt(store: Store, generation: Generation) -> str:
    """Which planned chunks have no file: whether they had one, only the damaged generation knew."""
    snapshot, found = Snapshot(store, generation), []
    plan = listed_plan(snapshot)
    for layer, table in generation.layers.items():
        count = len(plan) - len(snapshot.present_chunks(layer, table, plan.revisions(layer)))
        found += [f"{count:,} planned chunk(s) of layer '{layer}' have no file"] if count > 0 else []
    return f"; {', '.join(found)}, `forebay build {store.address}` makes them" if found else ""


def adoptable(inputs: RepairInputs, plan: Plan | None, base: str, layers: Iterable[str]) -> Adopts:
    """Which chunks that no sound generation lists may be listed: those of the source, where that can be opened."""
    if plan is None or not plan.segments:
        return {}
    source = inputs.source or inputs.reopened(plan.source)
    if source is None:
        return {layer: lambda record: True for layer in layers}
    own = partial(is_made_from, inputs.store, source, plan, base)
    return {layer: own if layer == base else lambda record: True for layer in layers}


def _restore_begun(inputs: RepairInputs, log: RepairLog) -> None:
    """Put back the texts and the plan without a generation: from the copy, file by file, or say what is lost."""
    store = inputs.store
    problems = [key for key, problem in _begun_problems(store).items() if problem is not None]
    lost = [key for key in problems if not _restored_from_copy(inputs, key, log)]
    lost += [key for key in _missing_recipes(store) if not _restored_from_copy(inputs, key, log)]
    plan = Snapshot(store, None).sound_plan
    if plan is None or not plan.segments:
        lost.append(layout.plan_segment(0))
    base = _base_layer(store)
    if lost == [layout.CACHE] and base:  # last: after a repair that fails, a copy must still be known by the old id
        _begin_again(store, base, log)
        return
    if lost:
        raise Damaged(
            f"the cache at '{store.address}' cannot be repaired: no generation can be read, and {_quoted(lost)} cannot "
            f"be restored without one; name a copy (`--from COPY`), or build a new cache from the source"
        )


def _missing_recipes(store: Store) -> list[str]:
    """The recipes that are gone of the base layer, and of layers that have chunks."""
    layers = {layer for layer in _layer_folders(store) if chunk_files(store, layer)}
    with suppress(CacheNotFound, Damaged):
        layers.add(read_cache_document(store).base)
    gone = (layer for layer in sorted(layers) if _is_readable(store, layer) and not read_recipe_document(store, layer))
    return [layout.recipe(layer) for layer in gone]


def _restored_from_copy(inputs: RepairInputs, key: str, log: RepairLog) -> bool:
    """Take a text, or every segment of the plan, from the copy, if it has it whole."""
    copy = inputs.copy
    if copy is None or _begun_problems(copy).get(key) is not None:
        return False
    keys = [entry.key for entry in copy.entries(layout.PLAN)] if key.startswith(layout.PLAN) else [key]
    try:
        values = {name: copy.read(name) for name in keys}
    except Missing:
        return False
    for name, value in values.items():
        inputs.store.replace(name, [value])
        log.restored.append(name)
    return bool(values)


def _base_layer(store: Store) -> str | None:
    """The one layer whose recipe reads no other, None where that is not certain."""
    kept = [read_recipe_document(store, layer) for layer in _layer_folders(store) if _is_readable(store, layer)]
    found = [one.layer for one in kept if one is not None and not one.reads]
    return found[0] if len(found) == 1 else None


def _is_readable(store: Store, layer: str) -> bool:
    return _raised(partial(read_recipe_document, store, layer)) is None


def _begin_again(store: Store, base: str, log: RepairLog) -> None:
    fresh = CacheDocument(cache_id=secrets.token_hex(16), base=base)
    store.replace(layout.CACHE, [msgspec.json.format(msgspec.json.encode(fresh)) + b"\n"])
    log.replaced[layout.CACHE] = (
        f"it could not be read, nor any generation that carries it; the cache has the new id {fresh.cache_id}"
    )


def _quoted(keys: list[str]) -> str:
    return ", ".join(f"'{key}'" for key in sorted(set(keys)))


def _published_bytes(inputs: RepairInputs, generation: Generation, key: str) -> Sequence[Buffer]:
    """The bytes that were published under a key of the index."""
    texts = {layout.recipe(layer): text for layer, text in generation.recipes.items()}
    texts[layout.CACHE] = generation.cache
    if key in texts:
        return [texts[key].encode()]
    if inputs.copy is not None:
        with suppress(Damaged):
            return [_copied_index(inputs.copy, generation, key)]
    for layer, digest in generation.constants.items():
        if key == layout.constants(layer):
            return _checked(sealed_constants(inputs.recipe_of(layer), layer), digest, inputs.store, key)
    return _planned_again(inputs, generation, key)


def _copied_index(copy: Store, generation: Generation, key: str) -> memoryview:
    try:
        value = load_index(copy, key)
    except Missing as error:
        raise Damaged(f"'{key}' cannot be put back: the copy at '{copy.address}' has none") from error
    for number, digest in enumerate(generation.plan):
        if key == layout.plan_segment(number) and decode_segment(value, copy.address, key)[1] == digest:
            return value
    for layer, digest in generation.constants.items():
        if key == layout.constants(layer) and hashlib.sha256(value).hexdigest() == digest:
            return value
    raise Damaged(f"'{key}' cannot be put back: the copy at '{copy.address}' has other bytes")


def _identity_bytes(inputs: RepairInputs, key: str) -> Sequence[Buffer]:
    """A segment's identities, from a copy, or taken again from the source; right only if their digest is."""
    plan = load_plan(inputs.store)
    segment = plan.segments[layout.parse_identities(key) or 0]
    if inputs.copy is not None:
        with suppress(Damaged):
            return [_copied_identities(inputs.copy, segment, key)]
    source = inputs.source or inputs.reopened(plan.source)
    if source is None:
        raise Damaged(f"'{key}' cannot be put back without its source or a copy; name a copy with --from COPY")
    recipe = inputs.recipe_of(read_cache_document(inputs.store).base)
    assert isinstance(recipe, Recipe)
    earlier = plan.first(segment.number)
    draft = draft_segment(inputs.store, source, recipe, segment, earlier, lambda *_: None)
    if draft.segment.identities != segment.identities:
        raise Damaged(f"'{key}' cannot be put back: the source now has other samples; name a copy with --from COPY")
    return list(draft.identities)


def _copied_identities(copy: Store, segment: Segment, key: str) -> memoryview:
    try:
        load_identities(copy, segment)
    except Damaged as error:
        raise Damaged(f"'{key}' cannot be put back: the copy at '{copy.address}' has no sound one") from error
    return copy.view(key)


def _planned_again(inputs: RepairInputs, generation: Generation, key: str) -> Sequence[Buffer]:
    advice = f"'{key}' cannot be put back without a copy of the cache; name one with --from COPY"
    if len(generation.plan) != 1:
        raise Damaged(f"{advice} (the cache has grown, or was refreshed, since this segment was planned)")
    kept = inputs.reopened(generation.source) if generation.source and not inputs.source else None
    source = inputs.source or (kept and kept.without_gone())  # which is walked: only so its files are found again
    if source is None:
        raise Damaged(f"{advice}, or pass the source itself to `forebay.repair`, so that it is planned again")
    recipe = inputs.recipe_of(generation.base)
    assert isinstance(recipe, Recipe)
    try:
        first = first_segment(source, SourceListing(source, inputs.store).apart, recipe, lambda *_: None)
        planned = draft_segment(inputs.store, source, recipe, first, Plan((), ()), lambda *_: None).segment
    except ForebayError as error:
        raise Damaged(f"{advice} (the source cannot be planned again: {error})") from error
    value = planned.encode()
    if decode_segment(memoryview(b"".join(value)), inputs.store.address, key)[1] == generation.plan[0]:
        return value
    raise Damaged(f"{advice} (planning the source again gave another plan)")


def _checked(value: Sequence[Buffer], digest: str, store: Store, key: str) -> Sequence[Buffer]:
    if hashlib.sha256(b"".join(value)).hexdigest() != digest:
        raise Damaged(f"'{key}' of '{store.address}' cannot be put back: the recipe now gives other constants")
    return value


def repair_chunks(
    inputs: RepairInputs,
    report: VerifyReport,
    snapshot: Snapshot,
    engine: Engine,
    terms: BuildOptions,
    log: RepairLog,
) -> None:
    """Take bad and missing chunks from a copy where it has them, make the others again.

    A base chunk that came out with other rows leaves chunks of further layers without the rows they were made for;
    those are made again too.
    """
    tried: set[str] = set()
    generation = snapshot.published
    for layer, records in bad_chunks(report, generation).items():
        left = [record for record in records if not _take_from_copy(inputs, layer, record, log)]
        _remake(inputs, layer, left, generation, engine, terms, log)
        tried |= {record.key(layer) for record in records}
    if tried:
        snapshot = Snapshot(inputs.store, newest_sound(inputs.store)[0])
    newest = snapshot.published
    orphaned: dict[str, list[ChunkRecord]] = {}
    for layer, record in orphans(newest):
        if record.key(layer) not in tried:
            orphaned.setdefault(layer, []).append(record)
    for layer, records in orphaned.items():
        _remake(inputs, layer, records, newest, engine, terms, log)
    if hmac_key() is None:  # with a key, no file counts before it is listed, so there is nothing to put right
        after = Snapshot(inputs.store, newest_sound(inputs.store)[0]) if orphaned else snapshot
        _make_unlisted(inputs, after, engine, terms, log)


def _make_unlisted(
    inputs: RepairInputs, snapshot: Snapshot, engine: Engine, terms: BuildOptions, log: RepairLog
) -> None:
    """Make planned chunks again whose file is damaged, or of another source, and listed by no generation.

    A lost generation leaves them behind: `gaps` counts them as there, and a reader never sees their rows.
    """
    store, newest = inputs.store, snapshot.published
    plan, adopts = listed_plan(snapshot), adoptable(inputs, snapshot.sound_plan, newest.base, newest.layers)
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
            _build_unlisted(inputs, layer, unsound, engine, terms, log)


def _build_unlisted(
    inputs: RepairInputs, layer: str, unsound: Mapping[int, str], engine: Engine, terms: BuildOptions, log: RepairLog
) -> None:
    store, failed, advice = inputs.store, {}, f"run `forebay build {inputs.store.address}` when that is put right"
    try:
        place = inputs.workplace_of(layer)
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
            log.replaced[record.key(layer)] = why
        else:
            reason = _ADVICE.sub("", failed.get(chunk, "it was not made"))
            log.failed[key] = f"its file is not sound, and no generation lists it: {reason}; {advice}"


def _remake(
    inputs: RepairInputs,
    layer: str,
    records: list[ChunkRecord],
    generation: Generation,
    engine: Engine,
    terms: BuildOptions,
    log: RepairLog,
) -> None:
    if not records:
        return
    try:
        place = inputs.workplace_of(layer)
        own = replace(terms, versions=builder_versions(versions_of(place.job.recipe)))
        tally = remake_chunks(place, [record.chunk for record in records], generation, engine, own)
    except BuildStopped:
        raise  # the user stopped the repair; no chunk failed
    except ForebayError as error:
        for record in records:
            log.fail(record.key(layer), error)
        return
    for record in records:
        made = tally.records.get(record.chunk)
        if made is None:
            reason = tally.failed.get(record.chunk, "it was not made")
            log.failed[record.key(layer)] = _ADVICE.sub("", reason)
        elif made.revision == record.revision:
            log.restored.append(made.key(layer))
        else:
            other = differing_versions(generation.made_with(layer, record.chunk), own.versions)
            why = _why_other_bytes(record, made) + (f": {other}" if other else "")
            log.replaced[made.key(layer)] = why


def check_repaired(inputs: RepairInputs, log: RepairLog) -> Snapshot:
    """The index after a repair. Whatever `verify` would still find in it is a failure, and none goes unsaid."""
    store = inputs.store
    generation, bad = newest_sound(store)
    snapshot = Snapshot(store, generation)
    plan = snapshot.sound_plan
    left = [*bad, *index_problems(store, generation, plan), *identity_problems(store, generation, plan)]
    left += [*outdated_layers(generation), *orphan_problems(generation), *shared_columns(store.address, generation)]
    for problem in left:
        log.failed.setdefault(problem.key, _ADVICE.sub("", problem.problem))
    for layer, record in _touched_chunks(generation, {*log.restored, *log.replaced}):
        if check_chunk(store, layer, record, full=False) != []:
            log.failed.setdefault(record.key(layer), "it was put back, and is damaged again; check the disk")
    log.restored = [key for key in log.restored if key not in log.failed]
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


def _take_from_copy(inputs: RepairInputs, layer: str, record: ChunkRecord, log: RepairLog) -> bool:
    if inputs.copy is None:
        return False
    key = record.key(layer)
    try:
        value = read_published(inputs.copy, key, record)  # what is hashed is what is written
        if value is None:
            return False
        inputs.store.replace(key, [value])
    except (Missing, NotForebay, IsADirectoryError):
        return False
    log.restored.append(key)
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
        """Return the engine and its options, once the index is repaired."""
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
        inputs = RepairInputs(store, copy, source, partial(reopened, check_source), recipe_of, workplace_of)
        snapshot = Snapshot(store, repair_index(inputs, log), below="")
        engine, options = started(snapshot)
        report = verify_generation(snapshot, [], None, False, options.on_progress)
        repair_chunks(inputs, report, snapshot, engine, options, log)
        after = check_repaired(inputs, log)
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


def repair_before_build(
    store: Store, source: Source | None, recipe: AnyRecipe, engine: Engine, options: BuildOptions
) -> tuple[str, ...]:
    """Check every chunk that is there, put right what is bad, and return what there is to say of it."""
    repaired, _ = repair_with(store, source, recipe, None, lambda index: (engine, options))
    if repaired.failed:
        raise BuildFailed(store.address, _by_chunk(repaired.failed))
    return _repair_notes(repaired)


def _repair_notes(report: RepairReport) -> tuple[str, ...]:
    """What an inverse build found damaged or lost, and put right."""
    notes = [f"{len(report.restored):,} damaged or lost file(s) were put back as they were"] if report.restored else []
    notes += [f"'{key}' was replaced by other bytes: {why}" for key, why in report.replaced.items()]
    return tuple(notes)


def _by_chunk(failed: Mapping[str, str]) -> dict[int, str]:
    parsed = {key: layout.parse_chunk(key) for key in failed}
    return {chunk[0] if (chunk := parsed[key]) else -1: reason for key, reason in failed.items()}
