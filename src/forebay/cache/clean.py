"""Clean a cache: remove leftovers, expired claims, old generations and folders of unused recipes. Drop layers.

Nothing that a remaining generation lists is ever removed. A dropped layer loses its recipe file; its chunks stay until
`clean` removes the generations that list them, and readers that pinned one of those keep working.
"""

import time
from collections.abc import Collection, Iterable, Sequence
from dataclasses import dataclass

from forebay.cache.catalog import (
    check_layer_name,
    generation_numbers,
    load_generation,
    newest_generation,
    read_cache_document,
    read_recipe_document,
)
from forebay.cache.claims import read_claims
from forebay.cache.heartbeat import builder_owners, is_dead, read_builder
from forebay.cache.plan import load_plan
from forebay.cache.publish import publish_withdrawn, publish_without
from forebay.cache.reports import CleanReport, DropReport
from forebay.cache.segment import Segment
from forebay.cache.soundness import segment_numbers, sound_segment
from forebay.cache.state import Index
from forebay.errors import CacheNotFound, Damaged, ForebayError, KeyRefused, not_found
from forebay.format import layout
from forebay.format.generation import Generation
from forebay.recipe import input_layers
from forebay.store.base import Entry, Missing, Store
from forebay.store.owners import Owner, this_host


def clean_cache(
    store: Store, keep_generations: int | None, lease_seconds: float, unpublished: bool = False
) -> CleanReport:
    """Remove unneeded files. With `keep_generations`, also all but the newest n generations.

    `unpublished` gives up the last segments of the plan if nothing of them is listed.
    """
    try:
        read_cache_document(store)
    except CacheNotFound:
        if any(store.entries(layout.LAYERS)) or not (builder_owners(store) or read_claims(store)):
            raise  # a planner that was killed left only claims and a heartbeat
    withdrawn = _give_up_segments(store) if unpublished else ()
    temporary = list(store.leftovers())
    unused = _Unused.take(store, keep_generations)
    # Nothing is removed before everything that stays has been read: the newest generation may be the damaged one.
    freed = sum(_remove(store, entry) for entry in [*unused.generations, *temporary, *unused.files])
    claims = _remove_expired(store, lease_seconds)
    return CleanReport(
        root=store.address,
        temporary=tuple(entry.key for entry in temporary),
        claims=claims,
        superseded=tuple(entry.key for entry in unused.files),
        generations=tuple(layout.parse_generation(entry.key) or 0 for entry in unused.generations),
        freed_bytes=freed,
        kept_generations=max(0, len(generation_numbers(store)) - 1),
        kept_bytes=unused.kept_bytes,
        withdrawn=withdrawn,
    )


def _remove(store: Store, entry: Entry) -> int:
    store.delete(entry.key)
    return entry.size


def _give_up_segments(store: Store) -> tuple[int, ...]:
    """Withdraw the last segments if nothing of them is listed; remove unlisted segments that cannot be read."""
    newest = newest_generation(store)
    if newest is None:
        raise ForebayError(
            f"nothing of the cache at '{store.address}' is published", hint=f"delete '{store.address}' instead"
        )
    damaged = [
        number
        for number in segment_numbers(store)
        if number >= len(newest.plan) and sound_segment(store, number) is None
    ]
    for number in [one for one in segment_numbers(store) if damaged and one >= damaged[0]]:
        store.delete(layout.plan_segment(number))
    after = publish_withdrawn(store, load_plan(store, newest.withdrawn))
    fresh = set(after.withdrawn if after is not None else ()) - set(newest.withdrawn)
    return tuple(sorted({*damaged, *fresh}))


@dataclass(frozen=True, slots=True)
class _Unused:
    """Files that can be removed."""

    generations: list[Entry]
    files: list[Entry]
    kept_bytes: int  # of chunks that only older generations list

    @classmethod
    def take(cls, store: Store, keep: int | None) -> "_Unused":
        """Read files first, then claims, recipes and generations.

        A recipe is bound before its first chunk, and a chunk is listed before its claim is released: a chunk that is
        made meanwhile is absent from the files, claimed, or listed.
        """
        files = [entry for entry in store.entries(layout.LAYERS) if _is_layer_file(entry.key)]
        identities = list(store.entries(layout.IDENTITIES))
        claimed = set(filter(None, map(layout.parse_claim, read_claims(store))))
        bound, unknown = _bound_folders(store)
        numbers = generation_numbers(store)
        stay = numbers if keep is None else numbers[-max(1, keep) :]
        old = [
            one
            for one in store.entries(layout.GENERATIONS)
            if layout.parse_generation(one.key) in numbers[: -len(stay)]
        ]
        remaining: list[Generation] = []  # the newest first
        for number in reversed(stay):
            try:
                remaining.append(load_generation(store, number))
            except KeyRefused:
                if keep is not None or not remaining:
                    raise
                return cls(old, [], 0)  # what an older generation lists is unknown; `repair` removes it
        used = bound | {generation.folder(layer) for generation in remaining for layer in generation.recipes}
        gone = set(remaining[0].withdrawn) if remaining else set()
        segments = _segments(store) if identities or gone else ()
        withdrawn = {chunk for segment in segments if segment.number in gone for chunk in segment.chunk_numbers}
        listed = _listed_sizes(remaining)
        unused = [
            entry
            for entry in files
            if layout.parse_chunk(entry.key) not in claimed
            and entry.key not in listed
            and _is_unused(entry.key, used, unknown, withdrawn)
        ]
        only_older = _listed_sizes(remaining[1:]).keys() - _listed_sizes(remaining[:1]).keys()
        return cls(old, [*unused, *_unnamed_identities(segments, identities)], sum(listed[key] for key in only_older))


def _segments(store: Store) -> Sequence[Segment]:
    """The segments of the plan, none if it is damaged."""
    try:
        return load_plan(store).segments
    except Damaged:
        return ()


def _is_layer_file(key: str) -> bool:
    return layout.parse_chunk(key) is not None or layout.is_constants(key)


def _is_unused(key: str, used: set[str], unknown: set[str], withdrawn: Collection[int]) -> bool:
    """True for a file of a recipe that nothing refers to, and for a chunk of a withdrawn segment."""
    folder, parsed = f"{key.rpartition('/')[0]}/", layout.parse_chunk(key)
    if folder in used:
        return parsed is not None and parsed[1] in withdrawn
    return layout.layer_of(folder) not in unknown


def _bound_folders(store: Store) -> tuple[set[str], set[str]]:
    """The folders of all bound recipes, and the layers whose recipe cannot be read."""
    folders, unknown = set(), set()
    for entry in store.entries(layout.RECIPES):
        if (layer := layout.parse_recipe(entry.key)) is None:
            continue
        try:
            document = read_recipe_document(store, layer)
        except Damaged:
            unknown.add(layer)
            continue
        if document is not None:
            folders.add(layout.document_folder(document))
    return folders, unknown


def _listed_sizes(generations: Iterable[Generation]) -> dict[str, int]:
    return {
        record.key(generation.folder(layer)): record.size
        for generation in generations
        for layer, table in generation.layers.items()
        for record in table.records()
    }


def _unnamed_identities(segments: Sequence[Segment], entries: Collection[Entry]) -> list[Entry]:
    """Identities that a planner wrote for a segment which another planner added first."""
    named = {layout.identities(segment.number, segment.identities) for segment in segments}
    planned = range(len(segments))
    return [entry for entry in entries if entry.key not in named and layout.parse_identities(entry.key) in planned]


def _remove_expired(store: Store, lease_seconds: float) -> tuple[str, ...]:
    """Remove claims and heartbeats of owners that are dead, or silent for a lease on another host."""
    owners = {key: claim.owner for key, claim in read_claims(store).items()}
    owners |= {layout.builder(owner): owner for owner in builder_owners(store)}
    remote = {
        owner for owner in owners.values() if (parsed := Owner.parse(owner)) is None or parsed.host != this_host()
    }
    before = {owner: read_builder(store, owner) for owner in remote}
    if remote:
        time.sleep(lease_seconds)
    silent = {owner for owner in remote if read_builder(store, owner) == before[owner]}
    gone = {owner for owner in owners.values() if owner in silent or is_dead(owner)}
    taken_over = {key for key, claim in read_claims(store).items() if claim.owner != owners.get(key)}
    expired = sorted(key for key, owner in owners.items() if owner in gone and key not in taken_over)
    for key in expired:
        store.delete(key)
    return tuple(expired)


def drop_layers(store: Store, layers: Collection[str]) -> DropReport:
    """Delete the recipes of some layers and publish a generation without them. If it is interrupted, run it again."""
    index = Index.take(store)
    _check_droppable(index, layers)
    tables = [index.table(layer) for layer in layers]
    for layer in sorted(layers):
        try:
            store.delete(layout.recipe(layer))
        except Missing:
            continue
    generation = publish_without(store, layers)
    return DropReport(
        root=store.address,
        layers=tuple(layers),
        chunks=sum(map(len, tables)),
        bytes=sum(int(table.numbers["size"].sum()) for table in tables),
        generation=generation.number if generation is not None else None,
    )


def _check_droppable(index: Index, layers: Collection[str]) -> None:
    root, base = index.store.address, index.published.base
    for layer in layers:
        check_layer_name(layer)
        if layer not in index.layers:
            raise not_found("layer", layer, root, index.layers)
        if layer == base:
            raise ForebayError(
                f"layer '{layer}' of the cache at '{root}' is the base layer and cannot be dropped",
                hint="delete the cache instead",
            )
        recipes = [index.recipe(name) for name in index.layers if name not in layers]
        readers = [recipe.layer for recipe in recipes if recipe is not None and layer in input_layers(recipe)]
        if readers:
            names = ", ".join(f"'{reader}'" for reader in readers)
            raise ForebayError(
                f"layer '{layer}' of the cache at '{root}' cannot be dropped: {names} was made from it",
                hint=f"drop or replace {names} as well",
            )
