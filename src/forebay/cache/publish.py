"""Publishing: from chunks that are there to the next generation."""

import hashlib
import platform
import secrets
from collections.abc import Iterable, Mapping
from contextlib import suppress

import msgspec
import numpy as np

from forebay.cache.plan import Plan, load_plan
from forebay.cache.presence import layer_columns
from forebay.columns import Array
from forebay.errors import CacheNotFound, Damaged, ForebayError, FormatTooNew, IndexCorrupt, NothingPublished
from forebay.format import layout
from forebay.format.chunk import ChunkRecord
from forebay.format.chunk_file import adopt_chunk
from forebay.format.codec import library_versions
from forebay.format.generation import CacheDocument, ChunkTable, Generation, decode_generation
from forebay.format.key import hmac_key
from forebay.format.layout import FORMAT_VERSION
from forebay.recipe import RecipeDocument
from forebay.store.base import Store, holds

UNPUBLISHED = -1


def begin_cache(store: Store, base: str) -> CacheDocument:
    """The cache at a store, begun now if there is none."""
    with suppress(CacheNotFound):
        return read_cache_document(store)
    fresh = CacheDocument(cache_id=secrets.token_hex(16), base=base)
    store.create(layout.CACHE, [msgspec.json.format(msgspec.json.encode(fresh)) + b"\n"])
    return read_cache_document(store)


def read_cache_document(store: Store) -> CacheDocument:
    try:
        text = store.read(layout.CACHE)
    except KeyError as error:
        raise CacheNotFound(store.address) from error
    try:
        _check_version(store, layout.CACHE, text)
        return msgspec.json.decode(text, type=CacheDocument)
    except (msgspec.MsgspecError, KeyError, TypeError, ValueError) as error:
        raise IndexCorrupt(store.address, layout.CACHE, f"it cannot be read: {error}") from error


def read_recipe_document(store: Store, layer: str) -> RecipeDocument | None:
    """The recipe of a layer, None where there is no such layer."""
    key = layout.recipe(layer)
    try:
        text = store.read(key)
    except KeyError:
        return None
    try:
        _check_version(store, key, text)
        return msgspec.json.decode(text, type=RecipeDocument)
    except FormatTooNew:
        raise
    except (msgspec.MsgspecError, KeyError, TypeError, ValueError, ForebayError) as error:
        raise IndexCorrupt(store.address, key, f"it cannot be read: {error}") from error


def _check_version(store: Store, key: str, text: bytes) -> None:
    version = msgspec.json.decode(text)["format_version"]
    if version > FORMAT_VERSION:
        raise FormatTooNew(f"{store.address}/{key}", version, FORMAT_VERSION)


def layers_of(store: Store) -> list[str]:
    """Every layer that has a recipe."""
    recipes = (entry.key for entry in store.keys(layout.LAYERS) if entry.key.endswith("/recipe.json"))
    return [key.removeprefix(layout.LAYERS).removesuffix("/recipe.json") for key in recipes]


def generation_numbers(store: Store) -> list[int]:
    numbers = (layout.parse_numbered(entry.key) for entry in store.keys(layout.GENERATIONS))
    return sorted(number for number in numbers if number is not None)


def load_generation(store: Store, number: int | None = None) -> Generation:
    """A generation, the newest unless one is named, checked against its digest and the key in use."""
    if number is None:
        numbers = generation_numbers(store)
        if not numbers:
            read_cache_document(store)
            raise NothingPublished(store.address)
        number = numbers[-1]
    key = layout.generation(number)
    try:
        view = store.map(key)
    except KeyError as error:
        read_cache_document(store)
        raise NothingPublished(store.address, number) from error
    generation = decode_generation(view, store.address, key, hmac_key())
    if generation.number != number:
        raise IndexCorrupt(store.address, key, f"it is generation {generation.number}")
    return generation


def newest_generation(store: Store) -> Generation | None:
    return load_generation(store) if generation_numbers(store) else None


def chunk_files(store: Store, layer: str) -> dict[int, int]:
    """chunk -> the highest revision of it that has a file."""
    found: dict[int, int] = {}
    for entry in store.keys(layout.layer_folder(layer)):
        parsed = layout.parse_chunk(entry.key)
        if parsed:
            found[parsed[0]] = max(parsed[1], found.get(parsed[0], 0))
    return found


def lost_chunks(store: Store, layer: str, table: ChunkTable) -> set[int]:
    """Listed chunks whose file, in the revision that is listed, is gone."""
    found = {layout.parse_chunk(entry.key) for entry in store.keys(layout.layer_folder(layer))}
    listed = zip(table.chunks.tolist(), table.numbers["revision"].tolist(), strict=True)
    return {chunk for chunk, revision in listed if (chunk, revision) not in found}


def present_chunks(store: Store, layer: str, table: ChunkTable, revisions: Array) -> set[int]:
    """The chunks of a layer that have a file, listed or not, made from what is planned now.

    `revisions` is what the plan asks for: a file of a lower revision is of a source that has changed since.
    """
    there = {
        chunk
        for chunk, revision in chunk_files(store, layer).items()
        if chunk < len(revisions) and revision >= revisions[chunk]
    }
    return there - lost_chunks(store, layer, table)


def outdated_chunks(table: ChunkTable, revisions: Array) -> Array:
    """The listed chunks that are made from what was planned before the plan was amended."""
    planned = table.chunks < len(revisions)
    behind = table.numbers["revision"][planned] < revisions[table.chunks[planned]]
    found: Array = table.chunks[planned][behind]
    return found


def publish(
    store: Store,
    made: Mapping[str, Iterable[ChunkRecord]],
    versions: Mapping[str, str],
    skipped: set[str] | None = None,
) -> Generation:
    """The newest generation, after one more if there are chunks that it does not list.

    `made` are records of chunks that this process wrote itself, by layer; any other unlisted chunk is adopted by
    reading and hashing it. One that is not sound is not listed; its key goes into `skipped`. Where there is no row to
    list at all, nothing is published, and the answer has the number UNPUBLISHED.
    """
    while True:
        newest = newest_generation(store)
        draft = _draft(store, newest, made, versions, set() if skipped is None else skipped)
        if newest is not None and newest.same_content(draft):
            return newest
        if newest is None and not any(int(table.rows.sum()) for table in draft.layers.values()):
            return draft.numbered(UNPUBLISHED)
        number = newest.number + 1 if newest else 0
        if store.create(layout.generation(number), draft.numbered(number).encode(hmac_key())):
            return load_generation(store, number)


def publish_over_damaged(store: Store, sound: Generation | None) -> Generation:
    """What a sound generation lists, and all sound chunks besides, published above every generation that is damaged."""
    read_cache_document(store)
    while True:
        draft = _draft(store, sound, {}, {}, set())
        number = generation_numbers(store)[-1] + 1
        if store.create(layout.generation(number), draft.numbered(number).encode(hmac_key())):
            return load_generation(store, number)


def builder_versions(recipe_versions: Mapping[str, str]) -> dict[str, str]:
    """What shapes bytes here, for the record in a generation."""
    own = {"python": platform.python_version(), "numpy": np.__version__, **library_versions()}
    return {**own, **recipe_versions}


def _draft(
    store: Store,
    newest: Generation | None,
    made: Mapping[str, Iterable[ChunkRecord]],
    versions: Mapping[str, str],
    skipped: set[str],
) -> Generation:
    before = newest.layers if newest else {}
    names = sorted({*layers_of(store), *before})  # a layer once published is never dropped
    plan = load_plan(store)
    tables = {name: before.get(name) or ChunkTable.of([]) for name in names}
    layers = {
        name: _with_unlisted(store, name, tables[name], made.get(name, ()), skipped, plan.revisions(name))
        for name in names
    }
    layers = _without_outdated(layers, plan)
    history = newest.versions if newest else ()
    changed = any(layers[name] is not tables[name] for name in names)
    return Generation(
        number=0,
        cache=store.read(layout.CACHE).decode(),
        recipes={name: store.read(layout.recipe(name)).decode() for name in names},
        constants=_constants(store, names),
        plan=plan.digests,
        versions=(*history, dict(versions)) if changed and versions and dict(versions) not in history else history,
        layers=layers,
    )


def _without_outdated(layers: Mapping[str, ChunkTable], plan: Plan) -> dict[str, ChunkTable]:
    """A base chunk that was refreshed takes the chunks of further layers with it that were made from the old one."""
    base = layers.get(plan.amended_base)
    if base is None:
        return dict(layers)
    behind = outdated_chunks(base, plan.revisions(plan.amended_base))
    kept: dict[str, ChunkTable] = {}
    for name, table in layers.items():
        outdated = outdated_chunks(table, plan.revisions(name)) if table is not base else behind[:0]
        outdated = outdated[~np.isin(outdated, behind)]
        kept[name] = table.without(outdated) if len(outdated) else table
    return kept


def _with_unlisted(
    store: Store, layer: str, table: ChunkTable, made: Iterable[ChunkRecord], skipped: set[str], revisions: Array
) -> ChunkTable:
    own = {record.chunk: record for record in made}
    outdated = set(outdated_chunks(table, revisions).tolist())
    listed = set(table.chunks.tolist()) - outdated
    fresh = []
    for chunk, revision in chunk_files(store, layer).items():
        if chunk >= len(revisions) or revision < revisions[chunk]:
            continue  # not planned, or of a source that has changed since
        if chunk in own and holds(store, layout.chunk(layer, chunk, own[chunk].revision)):
            fresh += [own[chunk]] if chunk not in listed or own[chunk].revision else []
        elif chunk not in listed:
            fresh += _adopted(store, layer, chunk, revision, skipped)
    return table.with_records(fresh) if fresh else table


def sound_record(store: Store, layer: str, chunk: int, revision: int = 0) -> ChunkRecord | None:
    """The record of a chunk's file, listed or not, once all of it is read; None where there is no sound one."""
    key = layout.chunk(layer, chunk, revision)
    recipe = read_recipe_document(store, layer)
    if recipe is None:
        return None
    declared = layer_columns(recipe.columns, is_base=not recipe.reads)
    try:
        return adopt_chunk(store.map(key), key, layer, chunk, recipe.fingerprint, revision, declared)
    except FormatTooNew:
        raise  # not damage: a newer forebay made it
    except (KeyError, Damaged):
        return None


def _adopted(store: Store, layer: str, chunk: int, revision: int, skipped: set[str]) -> list[ChunkRecord]:
    try:
        record = sound_record(store, layer, chunk, revision)
    except FormatTooNew:  # whoever builds next leaves it alone, and makes the chunk in another revision
        record = None
    if record is None:
        skipped.add(layout.chunk(layer, chunk, revision))
    return [record] if record else []


def _constants(store: Store, names: list[str]) -> dict[str, str]:
    found: dict[str, str] = {}
    for name in names:
        try:
            found[name] = hashlib.sha256(store.map(layout.constants(name))).hexdigest()
        except KeyError:
            continue
    return found
