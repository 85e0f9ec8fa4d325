"""Cleaning: remove what nobody needs. Nothing that a generation lists is ever removed.

Dropping layers: a generation without them. Older generations, and readers that pinned one, keep them.

Their files stay until `clean` removes the generations that list them. A layer of the same name may be built again: its
chunks get higher revisions than those that were dropped, which never count again.

What a build or `grow` that made no row leaves behind is removed when it ends, so that another command finds no trace.
"""

import os
import time
from collections.abc import Collection, Iterable, Mapping
from contextlib import suppress

from forebay.cache.catalog import (
    Snapshot,
    chunk_files,
    generation_numbers,
    layers_of,
    load_generation,
    newest_generation,
    outdated_chunks,
    read_cache_document,
    read_recipe_document,
    sound_record,
)
from forebay.cache.claims import Claim, builder_files, claimed, is_abandoned, is_dead, read_builders, read_claims
from forebay.cache.plan import Segment, load_plan, remove_planning_folder
from forebay.cache.publish import publish_without
from forebay.cache.records import CleanReport, DropReport
from forebay.errors import CacheNotFound, KeyRefused, LayerNeeded, LayerNotFound
from forebay.format import layout
from forebay.format.layout import MAX_REVISION
from forebay.recipe import input_layers
from forebay.store.base import Entry, Missing, Owner, Pieces, Store, holds, this_host


def clean_cache(store: Store, keep_generations: int | None, lease_seconds: float) -> CleanReport:
    """Remove temporary files of dead writers, claims of dead builders, chunks that were replaced.

    With `keep_generations`, also all but the newest n generations; a run that pinned an older one cannot open it
    again.
    """
    try:
        read_cache_document(store)
    except CacheNotFound:
        return _clean_planning(store, lease_seconds)
    temporary = list(store.leftovers())
    dropped = _old_generations(store, keep_generations)
    superseded = [
        *_superseded(store, {layout.parse_generation(entry.key) for entry in dropped}),
        *_unnamed_identities(store),
    ]
    # Nothing is removed before all that stays has been read: the newest generation may be the damaged one.
    freed = sum(_remove(store, entry) for entry in [*dropped, *temporary, *superseded])
    claims, kept = _remove_expired(store, lease_seconds)
    older, kept_bytes = _only_in_older(store)
    return CleanReport(
        root=store.address,
        temporary=tuple(entry.key for entry in [*temporary, *kept]),
        claims=tuple(claims),
        superseded=tuple(entry.key for entry in superseded),
        generations=tuple(layout.parse_generation(entry.key) or 0 for entry in dropped),
        freed_bytes=freed + sum(entry.size for entry in kept),
        kept_generations=older,
        kept_bytes=kept_bytes,
    )


def _clean_planning(store: Store, lease_seconds: float) -> CleanReport:
    """Remove what a planner that died has left where there is no cache yet."""
    if not any(layout.is_known(entry.key, set()) for entry in store.entries(layout.PLANNING)):
        raise CacheNotFound(store.address)
    temporary = list(store.leftovers())
    freed = sum(_remove(store, entry) for entry in temporary)
    claims, kept = _remove_expired(store, lease_seconds)
    return CleanReport(
        root=store.address,
        temporary=tuple(entry.key for entry in [*temporary, *kept]),
        claims=tuple(claims),
        superseded=(),
        generations=(),
        freed_bytes=freed + sum(entry.size for entry in kept),
    )


def _remove_expired(store: Store, lease_seconds: float) -> tuple[list[str], list[Entry]]:
    """Remove claims that expired, and what planning has kept, unless a planner is at work; returns both."""
    claims, kept = _expired(store, lease_seconds), list[Entry]()
    if not read_claims(store, None).keys() - set(claims):
        kept = [entry for entry in store.entries(layout.PLANNING) if layout.is_planning(entry.key)]
    for key in [*(entry.key for entry in kept), *claims]:
        store.delete(key)
    remove_planning_folder(store, with_root=False)
    return claims, kept


def _only_in_older(store: Store) -> tuple[int, int]:
    """How many generations come before the newest, and how many bytes of chunks only they list."""
    numbers = generation_numbers(store)
    if len(numbers) < 2:
        return 0, 0
    try:
        newest, older = _listed_sizes(store, numbers[-1:]), _listed_sizes(store, numbers[:-1])
    except KeyRefused:
        return len(numbers) - 1, 0  # what an older one lists is unknown here
    return len(numbers) - 1, sum(size for key, size in older.items() if key not in newest)


def _listed_sizes(store: Store, numbers: Iterable[int]) -> dict[str, int]:
    tables = (load_generation(store, number).layers.items() for number in numbers)
    return {record.key(layer): record.size for some in tables for layer, table in some for record in table.records()}


def _remove(store: Store, entry: Entry) -> int:
    store.delete(entry.key)
    return entry.size


def _old_generations(store: Store, keep: int | None) -> list[Entry]:
    """All generations but the newest `keep`, each of which is read first: it may be damaged, or of another key."""
    if keep is None:
        return []
    numbers = generation_numbers(store)
    for number in numbers[-max(1, keep) :]:
        load_generation(store, number)
    old = {layout.generation(number) for number in numbers[: -max(1, keep)]}
    return [entry for entry in store.entries(layout.GENERATIONS) if entry.key in old]


def _superseded(store: Store, dropped: Collection[int | None]) -> list[Entry]:
    """Chunk files that no generation lists, of chunks that some generation lists in another revision or were dropped.

    Files are listed first, claims second and generations last: a builder lists a chunk before it releases its claim, so
    that what is made and published meanwhile is either not among the files, or claimed, or listed.
    """
    plan = load_plan(store)
    names = dict.fromkeys([*layers_of(store), *plan.dropped])
    files = {layer: list(store.entries(layout.layer_folder(layer))) for layer in names}
    claims = {layer: read_claims(store, layer).items() for layer in files}
    busy = {layer: {claimed(key)[0] for key, one in claims[layer] if one.state != "returned"} for layer in files}
    newest = newest_generation(store)  # the key must accept this one
    kept = [number for number in generation_numbers(store) if number not in dropped]
    try:
        generations = [load_generation(store, number) for number in kept]
    except KeyRefused:
        return []  # what an older one lists is unknown here; `repair` removes it
    found = []
    for layer, entries in files.items():
        listed = {
            (int(chunk), int(revision))
            for generation in generations
            for chunk, revision in zip(
                generation.table(layer).chunks, generation.table(layer).numbers["revision"], strict=True
            )
        }
        # What somebody works on may be about to be published in a new revision.
        chunks = {chunk for chunk, _ in listed} - busy[layer]
        asked = plan.revisions(layer)
        # A refresh lists its chunks when the last of them is made.
        awaited = set(outdated_chunks(newest.table(layer), asked).tolist()) if newest else set()
        constants = {one.constants[layer] for one in generations if layer in one.constants}
        found += _unused_constants(store, layer, entries, constants) if layer in plan.dropped else []
        for entry in entries:
            parsed = layout.parse_chunk(entry.key)
            if not parsed or layout.chunk(layer, *parsed) != entry.key:
                continue  # a name that only resembles one of forebay's
            if parsed[0] in awaited and parsed[1] >= asked[parsed[0]]:
                continue
            if parsed not in listed and (parsed[0] in chunks or parsed[1] <= plan.dropped.get(layer, -1)):
                found.append(entry)
    return found


def _unused_constants(store: Store, layer: str, entries: list[Entry], used: Collection[str]) -> list[Entry]:
    """Constants of a dropped layer that no generation names; those in use have their first name."""
    names = {layout.dropped_constants(layer, digest) for digest in used}
    if used or holds(store, layout.recipe(layer)):
        names.add(layout.constants(layer))
    return [entry for entry in entries if layout.is_constants(entry.key, layer) and entry.key not in names]


def _unnamed_identities(store: Store) -> list[Entry]:
    """Identities that a planner wrote for a segment which another planner then added first.

    Those of a segment that is not there yet may be about to be named.
    """
    found = list(store.entries(layout.IDENTITIES))
    segments = load_plan(store).segments if found else ()
    named = {layout.identities(segment.number, segment.identities) for segment in segments}
    numbers = {segment.number for segment in segments}
    return [
        entry
        for entry in found
        if entry.key not in named
        and layout.parse_identities(entry.key) in numbers
        and entry.key.count("/") == layout.IDENTITIES.count("/")
    ]


def _expired(store: Store, lease_seconds: float) -> list[str]:
    """Claims and heartbeats of owners known dead or silent for a lease elsewhere; failures of chunks that are there.

    Also claims that were given back. A claim with a later one that stays keeps its name, so that nobody can take it
    again; one that is not what it was before the lease is that of another builder.
    """
    claims = _all_claims(store)
    gone = [
        key
        for key, claim in claims.items()
        if is_abandoned(claim)
        or claim.state == "returned"
        or (claim.state == "failed" and _is_done(store, key.split("/")[1], key))
    ]
    owners = builder_files(store)
    gone += [key for key, owner in owners.items() if is_dead(owner)]
    owners |= {key: claim.owner for key, claim in claims.items() if claim.state == "working"}
    remote = {key: owner for key, owner in owners.items() if key not in gone and _is_remote(owner)}
    if remote:
        before = _counters(store, claims)
        time.sleep(lease_seconds)  # once, for all layers
        now, there = _all_claims(store), builder_files(store)
        after = _counters(store, now)
        gone += [
            key
            for key, owner in remote.items()
            if (key in now or key in there) and all(before.get(one) == after.get(one) for one in (key, owner))
        ]
        gone = [key for key in gone if key not in claims or now.get(key) == claims[key]]
        claims = now
    last: dict[str, int] = {}  # of each chunk with claims that stay
    for key in claims.keys() - set(gone):
        last[_chunk_of(key)] = max(claimed(key)[1], last.get(_chunk_of(key), 0))
    return [key for key in gone if key not in claims or claimed(key)[1] > last.get(_chunk_of(key), 0)]


def _chunk_of(key: str) -> str:
    """What all claims on a chunk begin with."""
    return key.rsplit(".", 2)[0]


def _counters(store: Store, claims: Mapping[str, Claim]) -> dict[str, int]:
    """The counters of claims by key, which earlier builders move, and those of heartbeats by owner."""
    beats = {owner: beat.beat for owner, beat in read_builders(store).items()}
    return {**beats, **{key: claim.beat for key, claim in claims.items()}}


def _all_claims(store: Store) -> dict[str, Claim]:
    return {key: claim for layer in (None, *layers_of(store)) for key, claim in read_claims(store, layer).items()}


def _is_done(store: Store, layer: str, key: str) -> bool:
    """Whether a chunk that failed is there now, in the revision that the plan asks for."""
    chunk, asked = claimed(key)[0], load_plan(store).revisions(layer)
    return chunk < len(asked) and chunk_files(store, layer).get(chunk, -1) >= int(asked[chunk])


def _is_remote(owner: str) -> bool:
    parsed = Owner.parse(owner)
    return parsed is None or parsed.host != this_host()


def drop_layers(store: Store, layers: Collection[str]) -> DropReport:
    """Publish a generation without some layers. If it is interrupted, run it again."""
    snapshot = Snapshot.take(store)
    _check_droppable(snapshot, layers)
    tables = [snapshot.table(layer) for layer in layers]
    for layer in sorted(layers):
        _set_aside(snapshot, layer)
    generation = publish_without(store, layers)
    return DropReport(
        root=store.address,
        layers=tuple(layers),
        chunks=sum(map(len, tables)),
        bytes=sum(int(table.numbers["size"].sum()) for table in tables),
        generation=generation.number if generation else None,
    )


def _check_droppable(snapshot: Snapshot, layers: Collection[str]) -> None:
    store = snapshot.store
    base = read_cache_document(store).base
    listed = dict(snapshot.newest.recipes) if snapshot.newest else {}
    known = sorted({*snapshot.layers(listed), *listed})
    for layer in layers:
        if layer not in known:
            raise LayerNotFound(store.address, layer, known)
        if layer == base:
            raise LayerNeeded(store.address, layer, [])
        others = [read_recipe_document(store, name) for name in known if name not in layers]
        readers = [kept.layer for kept in others if kept is not None and layer in input_layers(kept)]
        if readers:
            raise LayerNeeded(store.address, layer, readers)


def _set_aside(snapshot: Snapshot, layer: str) -> None:
    """Keep what older generations need of a layer, and remove what makes it a layer of the cache.

    Its files stop to count before its recipe is gone, so that no builder lists them under another recipe.
    """
    store, recipe = snapshot.store, layout.recipe(layer)
    revision = max(snapshot.chunk_files(layer).values(), default=0)
    text = snapshot.newest.recipes.get(layer, "") if snapshot.newest else ""
    store.create(layout.dropped(layer, revision), [text.encode() or store.read(recipe)])
    try:
        digest = Pieces(store, layout.constants(layer)).sha256.hex()
        store.create(layout.dropped_constants(layer, digest), [store.view(layout.constants(layer))])
    except Missing:
        pass  # it has none
    if holds(store, recipe):
        store.delete(recipe)


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
