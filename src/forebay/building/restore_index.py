"""Restore the index of a cache: `cache.json`, recipes, constants, plan and generations. Chunk files are not written.

    sound generations here ─┐
    generation of the copy ─┼─▶ united ─▶ documents ─▶ plan ─▶ sound files of a lost generation ─▶ published
    chunk files ────────────┘

Nothing intact is deleted or overwritten, and no generation is published with fewer rows than were intact. A damaged
generation is deleted after a newer one was created and two more reads failed.
"""

from collections.abc import Mapping, Sequence
from contextlib import suppress
from dataclasses import replace

import msgspec

from forebay.building.repair_run import RepairRun
from forebay.building.restore_documents import (
    check_versions,
    readable_id,
    restore_documents,
    unlisted_problem,
    with_bound_layers,
)
from forebay.building.restore_plan import PlanRepair, source_descriptions, source_sums_differ
from forebay.cache.catalog import (
    generation_numbers,
    load_generation,
    read_cache_document,
    unpublished,
)
from forebay.cache.copy import is_within
from forebay.cache.plan import Plan
from forebay.cache.soundness import Generations, check_generations, sound_records, sound_segment
from forebay.cache.state import Index, numbers
from forebay.cache.verify import check_chunk
from forebay.errors import CacheNotFound, Damaged, ForebayError, FormatTooNew, KeyRefused, message_of
from forebay.format import layout
from forebay.format.chunk import MADE_BY, ChunkRecord
from forebay.format.generation import ChunkTable, Generation
from forebay.format.tensors import hmac_key
from forebay.store.base import Store, holds, key_refused, read_document


def restore_index(run: RepairRun) -> None:
    """Restore documents and plan, then publish one generation that lists everything intact, if that is needed."""
    check_versions(run.store)
    number = None
    while number is None:
        here = check_generations(run.store, past_refused=hmac_key() is not None)
        number = _published(run, here, _restored(run, here))
    _delete_damaged(run, here, number)
    run.log.notes += [f"'{key}' is of another cache and was left alone" for key in here.foreign]


def _restored(run: RepairRun, here: Generations) -> Generation:
    """The generation to publish, once documents and plan are back."""
    there = _copied(run, here)
    if there is not None:
        _check_plans(run, here.newest, there)
    united = _united(run, here.newest, there) or _from_nothing(run, here)
    trusts_files = here.is_lost and hmac_key() is None
    if trusts_files:
        united = with_bound_layers(run, united)
    restore_documents(run, united)
    plan_repair = PlanRepair(run, united)
    plan_repair.restore()
    if trusts_files and (plan := plan_repair.with_lost_segments()).segments:
        united = _with_sound_files(run, united, plan)
    if not united.table(united.base).chunks.size:
        raise _nothing_left(run, here)
    return united


def _nothing_left(run: RepairRun, here: Generations) -> ForebayError:
    """The error if no chunk can be listed: a planned build that was stopped before its first chunk has lost nothing."""
    has_chunks = any(layout.parse_chunk(entry.key) for entry in run.store.entries(layout.LAYERS))
    if not here.numbers and not has_chunks and holds(run.store, layout.plan_segment(0)):
        return unpublished(run.store)
    problem = "no generation is intact, and no chunk file can be listed"
    for key, reason in list(run.log.failed.items())[:1]:
        problem += f" ('{key}': {reason})"
    return Damaged(
        f"the cache at '{run.store.address}' cannot be repaired: {problem}",
        hint=f"{run.copy_hint}, or build the cache again in another folder",
    )


def check_copy(store: Store, copy: Store | None) -> None:
    """Raise unless a copy is another folder or bucket with a cache."""
    if copy is None:
        return
    if is_within(copy, store) and is_within(store, copy):
        raise ForebayError(f"'{copy.address}' is the cache itself", hint="pass a copy of it (--from COPY)")
    if not holds(copy, layout.CACHE) and not generation_numbers(copy):
        raise ForebayError(
            f"'{copy.address}' is not a cache: it has neither '{layout.CACHE}' nor a generation",
            hint=f"pass a copy made with `forebay copy {store.address} COPY`",
        )


def _copied(run: RepairRun, here: Generations) -> Generation | None:
    """The newest sound generation of the copy; None if it has none. Raises if it is of another cache."""
    if run.copy is None:
        return None
    try:
        there = check_generations(run.copy, past_refused=hmac_key() is not None).newest
    except KeyRefused:
        return None
    if there is None:
        return None
    own = readable_id(run.store) or (here.newest.document.cache_id if here.newest is not None else None)
    if own not in (None, there.document.cache_id):
        raise ForebayError(
            f"the copy at '{run.copy.address}' is of another cache (id {there.document.cache_id}, here {own})",
            hint=f"pass a copy of '{run.store.address}'; if '{layout.CACHE}' here is wrong, move it away first",
        )
    return there


def _united(run: RepairRun, here: Generation | None, there: Generation | None) -> Generation | None:
    """One generation with the records of both; None if there is neither."""
    if here is None or there is None or run.copy is None:
        return here or there
    versions = (*here.versions, *(one for one in there.versions if dict(one) not in [dict(v) for v in here.versions]))
    layers, recipes, constants = dict(here.layers), dict(here.recipes), dict(here.constants)
    for layer, table in there.layers.items():
        if layer not in recipes and _is_given_up(run.store, there.folder(layer), layer):
            continue
        if layer in recipes and here.recipe(layer).fingerprint != there.recipe(layer).fingerprint:
            continue
        recipes.setdefault(layer, there.recipes[layer])
        known = layers.get(layer, ChunkTable.of([]))
        if layer in there.constants:
            constants.setdefault(layer, there.constants[layer])
        more = [one for one in table.records() if known.position(one.chunk) is None]
        intact = [one for one in more if _is_intact(run, there.folder(layer), one)]
        layers[layer] = known.with_records(_renumbered(one, there, versions) for one in intact)
    plan = max(here.plan, there.plan, key=len)
    return replace(here, plan=plan, layers=layers, recipes=recipes, constants=constants, versions=versions)


def _is_given_up(store: Store, folder: str, layer: str) -> bool:
    """True for a layer that was dropped: it has neither a recipe nor files."""
    return not holds(store, layout.recipe(layer)) and not any(store.entries(folder))


def _is_intact(run: RepairRun, folder: str, record: ChunkRecord) -> bool:
    stores = (run.store, *((run.copy,) if run.copy is not None else ()))
    return any(check_chunk(store, folder, record, full=False) == [] for store in stores)


def _renumbered(record: ChunkRecord, there: Generation, versions: Sequence[Mapping[str, str]]) -> ChunkRecord:
    """A record of the copy with the number that its set of versions has in the united list."""
    number = record.statistics.get(MADE_BY, 0)
    if not isinstance(number, int) or not 0 <= number < len(there.versions):
        return record
    now = [dict(one) for one in versions].index(dict(there.versions[number]))
    statistics = {name: value for name, value in record.statistics.items() if name != MADE_BY}
    return msgspec.structs.replace(record, statistics=statistics | ({MADE_BY: now} if now else {}))


def _check_plans(run: RepairRun, here: Generation | None, there: Generation) -> None:
    """Raise if the listed segments here, or a sound one that continues them, contradict the plan of the copy."""
    own = list(here.plan) if here is not None else []
    for number, copied in enumerate(there.plan):
        if number >= len(own):
            segment = sound_segment(run.store, number)
            follows = segment is not None and number and segment.previous == own[number - 1]
            own.append(segment.digest if segment is not None and follows else copied)
        if own[number] != copied:
            where = run.copy.address if run.copy is not None else ""
            raise ForebayError(
                f"the cache at '{run.store.address}' and the copy at '{where}' diverged at segment {number}: each was "
                f"updated with other files",
                hint="pass a copy that was made after the last `update`",
            )


def _from_nothing(run: RepairRun, here: Generations) -> Generation:
    """No generation can be read: a generation without records, if `cache.json` can be read and there is no key."""
    store = run.store
    if hmac_key() is not None:
        problem = f"no generation has a right tag of the key in use; {run.copy_hint}"
        raise key_refused(store.address, layout.GENERATIONS, problem)
    try:
        document = read_cache_document(store)
    except FormatTooNew:
        raise
    except (Damaged, CacheNotFound) as error:
        if isinstance(error, CacheNotFound) and not here.damaged and not any(store.entries(layout.LAYERS)):
            raise
        raise Damaged(
            f"the cache at '{store.address}' cannot be repaired: neither '{layout.CACHE}' nor a generation can be read",
            hint=f"{run.copy_hint}, or build the cache again in another folder",
        ) from error
    if not any(store.entries(layout.LAYERS)):
        raise unpublished(store)
    _check_id(run, here, document.cache_id)
    text = read_document(store, layout.CACHE).decode()
    empty = Generation(number=-1, cache=text, recipes={}, constants={}, plan=(), versions=(), layers={})
    problem = unlisted_problem(run, document.base, {})
    if problem:
        raise Damaged(
            f"the cache at '{store.address}' cannot be repaired: no generation can be read, and "
            f"'{layout.recipe(document.base)}' {problem}",
            hint=run.copy_hint,
        )
    return empty


def _check_id(run: RepairRun, here: Generations, cache_id: str) -> None:
    """Raise if sound generations list the files that are here under another id: `cache.json` may be the damaged one."""
    store = run.store
    for key in here.foreign:
        generation = load_generation(store, layout.parse_generation(key))
        first = sound_segment(store, 0)
        if generation.plan and first is not None and first.digest == generation.plan[0]:
            raise Damaged(
                f"'{layout.CACHE}' of '{store.address}' has the id {cache_id}, and '{key}', which lists the plan that "
                f"is here, is of another cache (id {generation.document.cache_id})",
                hint=f"move away whichever is wrong ('{layout.CACHE}' or '{key}'), or {run.copy_hint}",
            )


def _with_sound_files(run: RepairRun, united: Generation, plan: Plan) -> Generation:
    """Add the records of all sound chunk files that are planned, the base first."""
    store = run.store
    source = next(run.sources(source_descriptions(store, united) or [plan.source]), None)
    united = replace(united, plan=max(united.plan, plan.digests, key=len), source=plan.source)
    for layer in sorted(united.recipes, key=Index(store, united, plan).height):
        document, base, records = united.recipe(layer), united.table(united.base), list[ChunkRecord]()
        unlisted = set(numbers(plan.planned)).difference(united.table(layer).chunks.tolist())
        for record in sound_records(store, document, unlisted):
            if layer == united.base and source_sums_differ(store, document, record, plan, source):
                run.log.failed[record.key(layout.document_folder(document))] = "it was made from another source"
            elif layer == united.base or base.has_base_of(record):
                records.append(record)
        united = replace(united, layers={**united.layers, layer: united.table(layer).with_records(records)})
    return united


def _published(run: RepairRun, here: Generations, united: Generation) -> int | None:
    """The number of the generation that lists all of it, created if the newest does not; None if others published."""
    newest = here.newest
    is_same = newest is not None and replace(united, number=newest.number).same_content(newest)
    is_below_foreign = newest is not None and max(here.foreign, default="") > layout.generation(newest.number)
    if newest is not None and is_same and not here.is_lost and not is_below_foreign:
        return newest.number
    number = _created(run.store, here, united)
    if number is not None:
        why = "it lists everything intact" + ("" if here.damaged else ", also what only the copy listed")
        run.log.replaced[layout.generation(number)] = why
    return number


def _created(store: Store, here: Generations, united: Generation) -> int | None:
    """The number of the new generation, above all others; None if somebody else has published meanwhile."""
    number = max(here.numbers, default=-1) + 1
    while tuple(generation_numbers(store)) == here.numbers:
        is_created = False
        with suppress(Damaged):  # a folder or a link has the name
            is_created = store.create(layout.generation(number), replace(united, number=number).encode(hmac_key()))
        if is_created:
            load_generation(store, number)  # raises if it does not read back
            return number
        number += 1
    return None


def _delete_damaged(run: RepairRun, here: Generations, number: int) -> None:
    """Delete damaged generations, each after two more reads of it failed."""
    for key in here.damaged:
        try:
            if not _is_sound(run.store, key) and not _is_sound(run.store, key):
                run.store.delete(key)
                run.log.replaced[key] = f"it could not be read; generation {number} replaces it"
        except OSError as error:
            run.log.failed[key] = f"it could not be read again, and was left: {message_of(error)}"


def _is_sound(store: Store, key: str) -> bool:
    """True for a sound generation; raises if the store does not answer."""
    try:
        load_generation(store, layout.parse_generation(key))
    except (Damaged, KeyRefused, CacheNotFound):
        return False
    return True
