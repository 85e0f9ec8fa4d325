"""What is in a cache: documents, layers, generations, chunk files, and opening a chunk by its record. Reading only."""

import hashlib
import secrets
from collections.abc import Callable, Collection, Mapping, Sequence
from functools import cached_property
from typing import NamedTuple

import msgspec
import xxhash

from forebay.cache.plan import Plan, decode_segment, load_plan
from forebay.cache.records import Problem
from forebay.columns import Array, Column, Ragged
from forebay.errors import (
    BlockTooLarge,
    CacheNotFound,
    ChunkCorrupt,
    ChunkMissing,
    Damaged,
    ForebayError,
    FormatTooNew,
    IndexCorrupt,
    NotForebay,
    NothingPublished,
    RecipeInvalid,
)
from forebay.format import layout
from forebay.format.chunk import (
    MAX_BLOCK_BYTES,
    MAX_HEAD_BYTES,
    BlockOverLimit,
    ChunkFile,
    ChunkRecord,
    CodecError,
    adopt_chunk,
)
from forebay.format.generation import ChunkTable, Generation, decode_generation
from forebay.format.layout import CacheDocument, decode_cache_document, decode_recipe_document
from forebay.format.tensors import ALIGNMENT, first_sides, header_size, hmac_key
from forebay.recipe import RecipeDocument
from forebay.store.base import BadCopy, Expected, Missing, Pieces, Store, View, holds, load_index, read_document

PRESENT = Column(name="present", dtype="bool")


class Home(NamedTuple):
    """The layer a column is in, and its declaration there."""

    layer: str
    column: Column


def layer_columns(columns: tuple[Column, ...], is_base: bool) -> tuple[Column, ...]:
    """The columns that a layer's chunks hold: those of its recipe and, above the base, the presence bits."""
    return columns if is_base else (*columns, PRESENT)


def presence_name(layer: str) -> str:
    """How a layer's presence bits are asked for."""
    return f"{layer}.{PRESENT.name}"


def column_homes(declared: Mapping[str, tuple[Column, ...]], base: str) -> dict[str, Home]:
    """Every name that a column can be asked for by, the base layer's first; `declared` are columns of recipes."""
    found: dict[str, Home] = {}
    for layer in sorted(declared, key=lambda name: (name != base, name)):
        found |= {column.name: Home(layer, column) for column in declared[layer]}
        if layer != base:
            found[presence_name(layer)] = Home(layer, PRESENT)
    return found


def shared_column(declared: Mapping[str, tuple[Column, ...]], base: str) -> tuple[str, str, str] | None:
    """(column, layer, layer) of a name that two layers have, the base first: it could be read from either."""
    owners: dict[str, str] = {}
    for layer in sorted(declared, key=lambda name: (name != base, name)):
        for column in declared[layer]:
            if owners.setdefault(column.name, layer) != layer:
                return column.name, owners[column.name], layer
    return None


UNPUBLISHED = -1
_NOT_LISTABLE = (ForebayError, ArithmeticError, TypeError, ValueError)  # a statistic of another length, or too large
STRANGE_NAMES = 8  # in a row, taken by what is not a generation, before publishing gives up


def begin_cache(store: Store, base: str) -> CacheDocument:
    """The cache at a store, begun now if there is none."""
    if (kept := _kept_document(store)) is not None:
        return kept
    check_layer_name(base)
    fresh = CacheDocument(cache_id=secrets.token_hex(16), base=base)
    store.create(layout.CACHE, [msgspec.json.format(msgspec.json.encode(fresh)) + b"\n"])
    return read_cache_document(store)


def check_layer_name(layer: str) -> None:
    if not layout.is_layer_name(layer):
        raise RecipeInvalid(f"'{layer}' is not a valid layer name; use letters, digits, - and _")


def read_cache_document(store: Store) -> CacheDocument:
    if (kept := _kept_document(store)) is None:
        raise CacheNotFound(store.address)
    return kept


def _kept_document(store: Store) -> CacheDocument | None:
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


def layers_of(store: Store, listed: Collection[str] = ()) -> list[str]:
    """Every layer that has a recipe which can be read, and those in `listed` that have one at all.

    A folder with anything else in it is not a layer: it must not stop work on those that are.
    """
    names = sorted(store.folders(layout.LAYERS), key=lambda name: f"{name}/")  # as their keys are listed
    return [name for name in names if layout.parse_recipe(layout.recipe(name)) and _has_recipe(store, name, listed)]


def _has_recipe(store: Store, layer: str, listed: Collection[str]) -> bool:
    try:
        if layer in listed:
            return holds(store, layout.recipe(layer))
        return read_recipe_document(store, layer) is not None
    except FormatTooNew:
        return True  # for a newer forebay; whoever reads it says so
    except Damaged:
        return False


def generation_numbers(store: Store) -> list[int]:
    numbers = (layout.parse_generation(entry.key) for entry in store.entries(layout.GENERATIONS))
    return sorted(number for number in numbers if number is not None)


def newest_number(store: Store) -> int:
    """The number of the newest generation, UNPUBLISHED where there is none."""
    return max(generation_numbers(store), default=UNPUBLISHED)


def load_generation(store: Store, number: int | None = None) -> Generation:
    """A generation, the newest unless one is named, checked against its digest and the key in use."""
    return read_generation(store, number, hmac_key())


def read_generation(store: Store, number: int | None, secret: bytes | None) -> Generation:
    """As `load_generation`, with this key, or none, instead of the one in use."""
    if number is None:
        numbers = generation_numbers(store)
        if not numbers:
            read_cache_document(store)
            raise NothingPublished(store.address)
        number = numbers[-1]
    key = layout.generation(number)
    try:
        view = load_index(store, key)
    except Missing as error:
        read_cache_document(store)
        raise NothingPublished(store.address, number) from error
    generation = decode_generation(view, store.address, key, secret)
    if generation.number != number:
        raise IndexCorrupt(store.address, key, f"it is generation {generation.number}")
    return generation


def listed_count(store: Store, number: int, layer: str) -> int:
    """How many chunks of a layer a generation lists, by its header only; nothing else of it is read or checked."""
    key = layout.generation(number)
    start = store.read(key, 0, ALIGNMENT)
    size = header_size(start)
    text = start if size <= len(start) else start + store.read(key, len(start), size)
    return first_sides(text, key).get(f"{layer}.chunk", 0)


def newest_generation(store: Store) -> Generation | None:
    numbers = generation_numbers(store)
    return load_generation(store, numbers[-1]) if numbers else None


class Snapshot:
    """The index of a cache at one moment: its newest generation, and after that its plan and its chunk files.

    Each is read once, when first asked for, and never before the generation: whatever a generation lists was there
    before it. `below` is what is listed, all keys where it is empty.
    """

    def __init__(
        self,
        store: Store,
        newest: Generation | None,
        plan: Plan | None = None,
        below: str = layout.LAYERS,
        known: Plan | None = None,
    ) -> None:
        self.store, self.newest = store, newest
        self._plan, self._below, self._known = plan, below, known

    @classmethod
    def take(
        cls, store: Store, below: str = layout.LAYERS, known: Plan | None = None, listed: Generation | None = None
    ) -> "Snapshot":
        """The index as it is now; segments of a `known` plan are not read again, nor `listed` if it is the newest."""
        number = max(generation_numbers(store), default=None)
        if number is None:
            return cls(store, None, below=below, known=known)
        is_newest = listed is not None and listed.number == number
        return cls(store, listed if is_newest else load_generation(store, number), below=below, known=known)

    @property
    def published(self) -> Generation:
        """The newest generation; an error where nothing is published."""
        return self.newest if self.newest is not None else load_generation(self.store)

    @property
    def plan(self) -> Plan:
        """The plan, every segment checked against its digest, but for those of the known plan: see `load_plan`."""
        if self._plan is None:
            self._plan = load_plan(self.store, self._known)
        return self._plan

    @property
    def sound_plan(self) -> Plan | None:
        """The plan, None where it is damaged."""
        try:
            return self.plan
        except Damaged:
            return None

    @cached_property
    def keys(self) -> tuple[str, ...]:
        """The listed entries whose key begins with `below`."""
        return tuple(entry.key for entry in self.store.entries(self._below))

    def is_newest(self) -> bool:
        """Whether nobody has published since."""
        return max(generation_numbers(self.store), default=None) == (self.newest.number if self.newest else None)

    def with_plan(self, plan: Plan) -> "Snapshot":
        """The same generation under a plan that was read or written since; chunk files are listed again."""
        return Snapshot(self.store, self.newest, plan, self._below)

    def followed_by(self, generation: Generation) -> "Snapshot":
        """The index once a generation is published that adds nothing but files which are listed here."""
        after = Snapshot(self.store, generation, self._plan, self._below)
        after.keys = self.keys
        return after

    def table(self, layer: str) -> ChunkTable:
        """What the newest generation lists of a layer."""
        return self.newest.table(layer) if self.newest else ChunkTable.of([])

    def layers(self, listed: Collection[str] = ()) -> list[str]:
        """Every layer that has a recipe which can be read, and those in `listed` that have one at all.

        A folder with anything else in it is not a layer: it must not stop work on those that are.
        """
        names = map(layout.parse_recipe, self.keys)
        return [name for name in names if name is not None and (name in listed or _has_recipe(self.store, name, ()))]

    def chunk_files(self, layer: str) -> dict[int, int]:
        """chunk -> the highest revision of it that has a file."""
        found: dict[int, int] = {}
        for chunk, revision in self._files.get(layer, ()):
            found[chunk] = max(revision, found.get(chunk, 0))
        return found

    def lost_chunks(self, layer: str, table: ChunkTable) -> set[int]:
        """Listed chunks whose file, in the revision that is listed, is gone."""
        found = self._files.get(layer, set())
        listed = zip(table.chunks.tolist(), table.numbers["revision"].tolist(), strict=True)
        return {chunk for chunk, revision in listed if (chunk, revision) not in found}

    def present_chunks(self, layer: str, table: ChunkTable, revisions: Array) -> set[int]:
        """The chunks of a layer that have a file, listed or not, made from what is planned now.

        `revisions` is what the plan asks for: a file of a lower revision is of a source that has changed since.
        """
        there = {
            chunk
            for chunk, revision in self.chunk_files(layer).items()
            if chunk < len(revisions) and revision >= revisions[chunk]
        }
        return there - self.lost_chunks(layer, table)

    @cached_property
    def _files(self) -> dict[str, set[tuple[int, int]]]:
        """layer -> (chunk, revision) of every file that has the name of a chunk."""
        found: dict[str, set[tuple[int, int]]] = {}
        for key in self.keys:
            parsed, layer = layout.parse_chunk(key), key.rpartition("/")[0].removeprefix(layout.LAYERS)
            if parsed is not None and layout.chunk(layer, *parsed) == key:
                found.setdefault(layer, set()).add(parsed)
        return found


def chunk_files(store: Store, layer: str) -> dict[int, int]:
    """chunk -> the highest revision of it that has a file now."""
    return Snapshot(store, None, below=layout.layer_folder(layer)).chunk_files(layer)


def outdated_chunks(table: ChunkTable, revisions: Array) -> Array:
    """The listed chunks that are made from what was planned before the plan was amended."""
    planned = table.chunks < len(revisions)
    behind = table.numbers["revision"][planned] < revisions[table.chunks[planned]]
    found: Array = table.chunks[planned][behind]
    return found


def examine_chunk(store: Store, layer: str, chunk: int, revision: int = 0) -> ChunkRecord:
    """The record of a chunk's file, listed or not, once all of it is read; raises what is wrong with it."""
    key = layout.chunk(layer, chunk, revision)
    recipe = read_recipe_document(store, layer)
    if recipe is None:
        raise Missing(layout.recipe(layer))
    declared = layer_columns(recipe.columns, is_base=not recipe.reads)
    return adopt_chunk(Pieces(store, key), key, layer, chunk, recipe.fingerprint, revision, declared)


def sound_record(store: Store, layer: str, chunk: int, revision: int = 0) -> ChunkRecord | None:
    """The record of a chunk's file, listed or not, once all of it is read; None where there is no sound one.

    One that a newer forebay wrote cannot be read here, so here it is none.
    """
    try:
        return examine_chunk(store, layer, chunk, revision)
    except (Missing, Damaged):
        return None


def published_record(generation: Generation, layer: str, chunk: int) -> ChunkRecord | None:
    table = generation.table(layer)
    at = table.position(chunk)
    return None if at is None else table.record(at)


def expected(record: ChunkRecord) -> Expected:
    """What the file of a chunk must be, as the generation says."""
    return Expected(record.size, record.sha256, (record.head_size, record.head))


def open_chunk(
    store: Store, layer: str, record: ChunkRecord, *, columns: Sequence[Column] | None = None, keyed: bool = False
) -> ChunkFile:
    """Map a chunk whose size and head, and with a key whose SHA-256, are what the generation says.

    Its header and index are compared with each other and with the record, whoever wrote them: a digest says only that
    they are what was published. `columns` are those that the layer's recipe declares.
    """
    key = record.key(layer)
    try:
        view = store.view(key, expect=expected(record))
    except Missing as error:
        raise ChunkMissing(store.address, layer, record.chunk) from error
    except BadCopy as error:
        raise ChunkCorrupt(store.address, layer, record.chunk, error.problem) from error
    except NotForebay as error:  # a pipe, a device or a link in its place
        raise ChunkCorrupt(store.address, layer, record.chunk, error.problem) from error
    return checked_chunk(view, store.address, layer, record, columns=columns, keyed=keyed)


def checked_chunk(
    view: memoryview,
    address: str,
    layer: str,
    record: ChunkRecord,
    *,
    columns: Sequence[Column] | None = None,
    keyed: bool = False,
) -> ChunkFile:
    """The chunk in a view, as `open_chunk` returns it; without a key, only its head is looked at."""
    problem = head_problem(view, record)
    if problem is None and keyed and hashlib.sha256(view).digest() != record.sha256:
        problem = "its SHA-256 is not the one the tagged generation lists"
    if problem is not None:
        raise ChunkCorrupt(address, layer, record.chunk, problem)
    try:
        file = ChunkFile(view, record.key(layer))
    except ForebayError as error:
        problem = error.problem if isinstance(error, NotForebay) else str(error)
        raise ChunkCorrupt(address, layer, record.chunk, problem) from error
    if file.head_size != record.head_size:
        problem = f"its index ends at {file.head_size:,}, not at {record.head_size:,} as was published"
        raise ChunkCorrupt(address, layer, record.chunk, problem)
    if (file.layer, file.chunk, file.rows) != (layer, record.chunk, record.rows):
        found = f"chunk {file.chunk} of layer '{file.layer}' with {file.rows:,} rows"
        raise ChunkCorrupt(address, layer, record.chunk, f"its file is {found}; {record.rows:,} were published")
    if columns is not None and tuple(file.columns.values()) != tuple(columns):
        problem = "its columns are not those that the layer's recipe declares"
        raise ChunkCorrupt(address, layer, record.chunk, problem)
    return file


def head_problem(view: View, record: ChunkRecord) -> str | None:
    """What is wrong with the size or the head of a chunk, None where nothing is."""
    if len(view) == 0:
        return f"its file is empty, {record.size:,} bytes were published"
    if len(view) != record.size:
        return f"its file has {len(view):,} bytes, {record.size:,} were published"
    if not 0 < record.head_size <= min(record.size, MAX_HEAD_BYTES):
        return f"its header and index cannot have the {record.head_size:,} bytes that were published"
    if xxhash.xxh3_128_digest(view[: record.head_size]) != record.head:
        return f"its header or index (bytes 0 to {record.head_size:,}) disagrees with its digest"
    return None


def read_column(
    store: Store, layer: str, file: ChunkFile, column: str, max_block_bytes: int = MAX_BLOCK_BYTES
) -> Array | Ragged:
    """All rows of a column, every block checked."""
    for block, _ in file.bad_blocks(column):
        raise corrupt_block(store.address, layer, file, column, block)
    try:
        return file.decode(column, max_block_bytes)
    except BlockOverLimit as error:
        raise BlockTooLarge(store.address, layer, file.chunk, column, error.size, error.limit) from error
    except CodecError as error:
        raise ChunkCorrupt(store.address, layer, file.chunk, f"column '{column}': {error}") from error


def corrupt_block(root: str, layer: str, file: ChunkFile, column: str, block: int) -> ChunkCorrupt:
    check = file.check(column)
    return ChunkCorrupt(
        root, layer, file.chunk, check.problem(block), column=column, block=block, span=check.span(block)
    )


def index_problems(store: Store, generation: Generation, plan: Plan | None = None) -> list[Problem]:
    """What is wrong with cache.json, the recipes, the constants and the plan.

    Segments of a `plan` that was read just now are not read again, here and below, where their digests are right.
    """
    texts = {layout.CACHE: generation.cache}
    texts |= {layout.recipe(layer): text for layer, text in generation.recipes.items()}
    found = [_text_problem(store, key, text) for key, text in texts.items()]
    found += [_digest_problem(store, layout.constants(layer), digest) for layer, digest in generation.constants.items()]
    found += [
        segment_problem(store, number, digest)
        for number, digest in enumerate(generation.plan)
        if plan is None or plan.digests[number : number + 1] != (digest,)
    ]
    return [problem for problem in found if problem is not None]


def check_index(snapshot: Snapshot) -> None:
    """Refuse to build on, or to copy, what is not what the generation was published with."""
    if snapshot.newest is None:
        return
    for problem in index_problems(snapshot.store, snapshot.newest, snapshot.sound_plan):
        raise IndexCorrupt(snapshot.store.address, problem.key, problem.problem)


def _text_problem(store: Store, key: str, text: str) -> Problem | None:
    otherwise = "it is not what the generation was published with"
    return _compared(key, lambda: read_document(store, key) == text.encode(), otherwise)


def _digest_problem(store: Store, key: str, digest: str) -> Problem | None:
    return _compared(key, lambda: Pieces(store, key).sha256.hex() == digest, "its SHA-256 is not the published one")


def segment_problem(store: Store, number: int, digest: str) -> Problem | None:
    key = layout.plan_segment(number)

    def is_same() -> bool:
        return decode_segment(load_index(store, key), store.address, key)[1] == digest

    return _compared(key, is_same, "it is not the segment that was published")


def _compared(key: str, is_same: Callable[[], bool], otherwise: str) -> Problem | None:
    """What is wrong with a file of the index, None if it is the same."""
    try:
        return None if is_same() else Problem(key=key, problem=otherwise)
    except Missing:
        return Problem(key=key, problem="it is gone")
    except Damaged as error:
        return Problem(key=key, problem=problem_of(error))


def problem_of(error: ForebayError) -> str:
    """What is wrong, without the place and the advice, which the report has beside it."""
    return error.problem if isinstance(error, IndexCorrupt | NotForebay) else str(error)
