"""Cache contents: documents, layers, generations, and opening a chunk by its record."""

import hashlib
import os
import secrets
import shlex
from collections.abc import Iterable, Mapping, Sequence
from typing import NamedTuple

import msgspec
import xxhash

from forebay.columns import Array, Column, Ragged
from forebay.errors import (
    CacheNotFound,
    ChunkCorrupt,
    Damaged,
    ForebayError,
    FormatTooNew,
    IndexCorrupt,
    RecipeInvalid,
)
from forebay.format import layout
from forebay.format.chunk import MAX_HEAD_BYTES, ChunkRecord, chunk_corrupt, chunk_missing
from forebay.format.chunk_file import ChunkFile, adopt_chunk
from forebay.format.codecs import MAX_BLOCK_BYTES, BlockOverLimit, CodecError
from forebay.format.generation import Generation, decode_generation
from forebay.format.layout import CacheDocument, decode_cache_document, decode_recipe_document
from forebay.format.tensors import hmac_key
from forebay.recipe import RecipeDocument
from forebay.store.base import (
    BadCopy,
    Expected,
    Missing,
    Pieces,
    Store,
    View,
    cache_not_found,
    holds,
    index_corrupt,
    load_index,
    nothing_published,
    read_document,
)
from forebay.store.owners import Owner

PRESENT = Column(name="present", dtype="bool")


class Home(NamedTuple):
    """The layer a column is in, and its declaration there."""

    layer: str
    column: Column


def layer_columns(columns: tuple[Column, ...], is_base: bool) -> tuple[Column, ...]:
    """The columns that a layer's chunks hold: those of its recipe and, above the base, the presence bits."""
    return columns if is_base else (*columns, PRESENT)


def presence_name(layer: str) -> str:
    """The name by which a layer's presence bits are read."""
    return f"{layer}.{PRESENT.name}"


def column_homes(declared: Mapping[str, tuple[Column, ...]], base: str) -> dict[str, Home]:
    """Every name of a column, the base layer's first; `declared` are columns of recipes."""
    homes: dict[str, Home] = {}
    for layer in sorted(declared, key=lambda name: (name != base, name)):
        homes |= {column.name: Home(layer, column) for column in declared[layer]}
        if layer != base:
            homes[presence_name(layer)] = Home(layer, PRESENT)
    return homes


def shared_column(declared: Mapping[str, tuple[Column, ...]], base: str) -> tuple[str, str, str] | None:
    """(column, layer, layer) of a name that two layers have, the base first: it could be read from either."""
    owners: dict[str, str] = {}
    for layer in sorted(declared, key=lambda name: (name != base, name)):
        for column in declared[layer]:
            if owners.setdefault(column.name, layer) != layer:
                return column.name, owners[column.name], layer
    return None


def begin_cache(store: Store, base: str) -> CacheDocument:
    """The cache at a store, created now if there is none."""
    if (document := _read_cache_document(store)) is not None:
        return document
    check_layer_name(base)
    fresh = CacheDocument(cache_id=secrets.token_hex(16), base=base)
    store.create(layout.CACHE, [msgspec.json.format(msgspec.json.encode(fresh)) + b"\n"])
    return read_cache_document(store)


def check_layer_name(layer: str) -> None:
    if not isinstance(layer, str) or not layout.is_layer_name(layer):
        raise RecipeInvalid(f"'{layer}' is not a valid layer name; use letters, digits, - and _")


def read_cache_document(store: Store) -> CacheDocument:
    if (document := _read_cache_document(store)) is None:
        raise unpublished(store)
    return document


def unpublished(store: Store) -> CacheNotFound:
    """The error if no generation exists: no cache, a cache that is being planned, or nothing published yet."""
    root, key = store.address, layout.plan_segment(0)
    owners = [layout.parse_builder(entry.key) for entry in store.entries(layout.BUILDERS)]
    builders = [parsed for owner in owners if owner is not None and (parsed := Owner.parse(owner)) is not None]
    if not builders and _read_cache_document(store) is None:
        return cache_not_found(root)
    if holds(store, key):
        return nothing_published(root)
    if any(not builder.is_dead() for builder in builders):
        return CacheNotFound(f"the cache at '{root}' is being planned", hint=f"see `forebay status {root}`", root=root)
    return CacheNotFound(
        f"planning of the cache at '{root}' was interrupted: nothing is planned",
        hint="run the same build again",
        root=root,
    )


def _read_cache_document(store: Store) -> CacheDocument | None:
    try:
        text = read_document(store, layout.CACHE)
    except Missing:
        return None
    return decode_cache_document(text, store.address, layout.CACHE)


def read_recipe_document(store: Store, layer: str) -> RecipeDocument | None:
    """The recipe of a layer, None where there is no such layer."""
    key = layout.recipe(layer)
    try:
        text = read_document(store, key)
    except Missing:
        return None
    return decode_recipe_document(text, layer, store.address, key)


def readable_recipe(store: Store, layer: str) -> RecipeDocument | None:
    """The recipe of a layer, None if there is none that can be read; one of a newer forebay is an error."""
    try:
        return read_recipe_document(store, layer)
    except FormatTooNew:
        raise
    except Damaged:
        return None


def layers_of(store: Store) -> list[str]:
    """Every layer that has a recipe which can be read; other files in `recipes/` are ignored."""
    names = (layout.parse_recipe(entry.key) for entry in store.entries(layout.RECIPES))
    return [name for name in names if name is not None and readable_recipe(store, name) is not None]


def generation_numbers(store: Store) -> list[int]:
    """The numbers of all generations. A folder, link or pipe named like a newer one is damage, not absence."""
    numbers = _generations_among(entry.key for entry in store.entries(layout.GENERATIONS))
    irregular = _generations_among(_irregular(store, layout.GENERATIONS))
    return numbers + [number for number in irregular if not numbers or number > numbers[-1]]


def _generations_among(keys: Iterable[str]) -> list[int]:
    return sorted(number for key in keys if (number := layout.parse_generation(key)) is not None)


def _irregular(store: Store, folder: str) -> set[str]:
    """The keys in a folder of this machine that are not regular files."""
    path = store.local_path(folder)
    if path is None or not os.path.isdir(path):
        return set()
    with os.scandir(path) as items:
        return {f"{folder}{item.name}" for item in items if not item.is_file(follow_symlinks=False)}


def load_generation(store: Store, number: int | None = None) -> Generation:
    """A generation, the newest unless one is named, checked against its digest and the key in use."""
    return read_generation(store, number, hmac_key())


def read_generation(store: Store, number: int | None, secret: bytes | None) -> Generation:
    """As `load_generation`, with this key, or none, instead of the one in use."""
    if number is None:
        numbers = generation_numbers(store)
        if not numbers:
            raise unpublished(store)
        number = numbers[-1]
    key = layout.generation(number)
    try:
        view = load_index(store, key)
    except Missing as error:
        if key in _irregular(store, layout.GENERATIONS):
            raise index_corrupt(store.address, key, "it is not a file") from error
        read_cache_document(store)
        raise nothing_published(store.address, number) from error
    generation = decode_generation(view, store.address, key, secret)
    if generation.number != number:
        raise index_corrupt(store.address, key, f"it is generation {generation.number}")
    return generation


def newest_generation(store: Store, known: Generation | None = None) -> Generation | None:
    """The newest generation, None if there is none; one that is `known` is not read again."""
    number = max(generation_numbers(store), default=None)
    if number is None:
        return None
    # Listings of some services are stale for a while: never go back behind what was read or created before.
    return known if known is not None and number <= known.number else load_generation(store, number)


def examine_chunk(store: Store, recipe: RecipeDocument, chunk: int) -> ChunkRecord:
    """Read all of a chunk's file, listed or not, and return its record; raises what is wrong with it."""
    key = layout.chunk(layout.document_folder(recipe), chunk)
    declared = layer_columns(recipe.columns, is_base=not recipe.reads)
    return adopt_chunk(Pieces(store, key), key, recipe.layer, chunk, recipe.fingerprint, declared)


def sound_record(store: Store, recipe: RecipeDocument, chunk: int) -> ChunkRecord | None:
    """As `examine_chunk`; None if there is no sound file that this forebay can read."""
    try:
        return examine_chunk(store, recipe, chunk)
    except (Missing, Damaged):
        return None


def has_sha256(store: Store, key: str, sha256: bytes, size: int | None = None) -> bool:
    """True if a file can be read, and has this SHA-256; of one with another `size` nothing is read."""
    try:
        stored = Pieces(store, key)
        return size in (None, len(stored)) and stored.sha256 == sha256
    except (Missing, Damaged):
        return False


def published_record(generation: Generation, layer: str, chunk: int) -> ChunkRecord | None:
    table = generation.table(layer)
    at = table.position(chunk)
    return None if at is None else table.record(at)


def expected(record: ChunkRecord) -> Expected:
    """The expected size and digests of a chunk file, from the generation."""
    return Expected(record.size, record.sha256)


def open_chunk(
    store: Store, folder: str, record: ChunkRecord, *, columns: Sequence[Column] | None = None, keyed: bool = False
) -> ChunkFile:
    """Map a chunk whose size and head, and with a key whose SHA-256, are those in the generation.

    Its header and index are compared with each other and with the record: a digest shows only that they are what was
    published. `columns` are those that the layer's recipe declares.
    """
    layer = layout.layer_of(folder)

    def corrupt(problem: str) -> ChunkCorrupt:
        return chunk_corrupt(store.address, layer, record.chunk, problem)

    try:
        view = store.view(record.key(folder), expect=expected(record))
        if problem := head_problem(view, record):
            raise corrupt(problem)
        if keyed and hashlib.sha256(view).digest() != record.sha256:
            raise corrupt("its SHA-256 is not the one in the tagged generation")
        file = ChunkFile(view, record.key(folder))
    except Missing as error:
        raise chunk_missing(store.address, layer, record.chunk) from error
    except BadCopy as error:
        raise corrupt(error.problem) from error
    except ChunkCorrupt:
        raise
    except Damaged as error:  # a pipe, a device or a link in its place, or a header that cannot be read
        raise corrupt(problem_of(error)) from error
    if problem := _differs(file, layer, record, columns):
        raise corrupt(problem)
    return file


def _differs(file: ChunkFile, layer: str, record: ChunkRecord, columns: Sequence[Column] | None) -> str | None:
    """How a chunk differs from its record and its recipe, None if it does not."""
    if file.head_size != record.head_size:
        return f"its index ends at {file.head_size:,}, not at {record.head_size:,} as was published"
    if (file.layer, file.chunk, file.rows) != (layer, record.chunk, record.rows):
        other = f"chunk {file.chunk} of layer '{file.layer}' with {file.rows:,} rows"
        return f"its file is {other}; {record.rows:,} were published"
    if columns is not None and tuple(file.columns.values()) != tuple(columns):
        return "its columns are not those that the layer's recipe declares"
    return None


def head_problem(view: View, record: ChunkRecord) -> str | None:
    """The problem with the size or head of a chunk, or None."""
    if len(view) == 0:
        return f"its file is empty, {record.size:,} bytes were published"
    if len(view) != record.size:
        return f"its file has {len(view):,} bytes, {record.size:,} were published"
    if not 0 < record.head_size <= min(record.size, MAX_HEAD_BYTES):
        return f"its header and index cannot have the {record.head_size:,} bytes that were published"
    if xxhash.xxh3_128_digest(view[: record.head_size]) != record.head:
        return f"its header or index (bytes 0 to {record.head_size:,}) disagrees with its digest"
    return None


def read_column(store: Store, file: ChunkFile, column: str, max_block_bytes: int = MAX_BLOCK_BYTES) -> Array | Ragged:
    """All rows of a column, every block checked."""
    layer = file.layer
    for block, _ in file.bad_blocks(column):
        raise corrupt_block(store.address, layer, file, column, block)
    try:
        return file.decode(column, max_block_bytes)
    except BlockOverLimit as error:
        raise ChunkCorrupt(
            f"column '{column}' in chunk {file.chunk} of layer '{layer}' in '{store.address}' decodes "
            f"to {error.size:,} bytes at once; max_block_bytes is {error.limit:,}",
            hint=f"if you trust this cache, pass max_block_bytes={error.size} to open_cache",
            layer=layer,
            chunk=file.chunk,
            column=column,
        ) from error
    except CodecError as error:
        raise chunk_corrupt(store.address, layer, file.chunk, f"column '{column}': {error}") from error


def corrupt_block(root: str, layer: str, file: ChunkFile, column: str, block: int) -> ChunkCorrupt:
    check = file.check(column)
    return chunk_corrupt(
        root, layer, file.chunk, check.problem(block), column=column, block=block, span=check.span(block)
    )


def check_base_documents(store: Store, generation: Generation) -> None:
    """Raise unless cache.json and the recipe of the base layer are those of a generation: nothing drops them."""
    texts = {layout.CACHE: generation.cache, layout.recipe(generation.base): generation.recipes[generation.base]}
    for key, text in texts.items():
        if problem := text_problem(store, key, text):
            raise index_corrupt(store.address, key, problem)


def text_problem(store: Store, key: str, text: str) -> str:
    """Why a document is not the one that a generation was published with; empty if it is."""
    try:
        return "" if read_document(store, key) == text.encode() else "it is not what the generation was published with"
    except Missing:
        return "it is gone"
    except Damaged as error:
        return problem_of(error)


def problem_of(error: ForebayError) -> str:
    """The problem without location and hint, which are separate fields of a report."""
    return str(error.facts.get("problem", error.message))


def layers_share_column(root: str, column: str, first: str, second: str) -> IndexCorrupt:
    message = f"layers '{first}' and '{second}' of the cache at '{root}' both have a column '{column}'"
    return IndexCorrupt(message, hint=f"remove one of them: `{shlex.join(['forebay', 'drop', root, second])}`")
