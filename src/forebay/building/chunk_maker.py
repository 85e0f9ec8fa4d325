"""The work on one chunk: read its slice, make its rows, write its file. What a worker process does.

A worker adopts a file that an interrupted build left under the chunk's name, or makes the chunk:

    existing file ─▶ header, content, fingerprint and source sums fit, no failures, no key ─▶ adopted
                 └─▶ anything else ─▶ made again, replaces the file
"""

from collections.abc import Callable, Iterator, Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from contextlib import contextmanager, suppress
from dataclasses import dataclass, field, replace
from functools import cached_property, partial
from typing import cast

import msgspec
import numpy as np

from forebay.building.cutting import wait_until_settled
from forebay.building.dedup import DuplicateFilter
from forebay.building.samples import ChunkSamples
from forebay.cache.catalog import (
    PRESENT,
    Home,
    column_homes,
    examine_chunk,
    has_sha256,
    layer_columns,
    load_generation,
    open_chunk,
    presence_name,
    published_record,
    read_column,
    read_recipe_document,
)
from forebay.cache.plan import Plan, load_plan
from forebay.cache.state import Index
from forebay.columns import Array, Columns, Ragged
from forebay.errors import (
    Damaged,
    ForebayError,
    NotFound,
    RecipeInvalid,
    RecipeMismatch,
    SourceUnreadable,
    not_found,
)
from forebay.failure_reasons import Reasons
from forebay.format import layout
from forebay.format.chunk import ChunkRecord, EncodedChunk, chunk_corrupt, encode_chunk
from forebay.format.chunk_file import ChunkFile
from forebay.format.generation import Generation
from forebay.format.tensors import hmac_key
from forebay.recipe import (
    AnyRecipe,
    LayerRecipe,
    Recipe,
    RecipeDocument,
    Rows,
    differing_fields,
    hooks_of,
    identity_of,
    is_same_recipe,
    recipe_mismatch,
)
from forebay.source import CHANGED_MEANWHILE, Failure, Part, Source, SourceFile, files_changed, part_sum
from forebay.store.base import Missing, Store, index_corrupt


class MadeChunk(msgspec.Struct, frozen=True):
    """The record of a chunk that a worker made or adopted."""

    record: ChunkRecord
    adopted: bool = False


@dataclass(frozen=True)
class ChunkJob:
    """Making chunks of one layer. It travels to worker processes as a document."""

    store: Store
    layer: str
    recipe: AnyRecipe
    fingerprint: str
    source: Source | None  # None above the base
    planned: tuple[str, ...]  # the digests of the plan that it works by
    generation: int | None = None  # whose chunks a layer above the base reads
    now: Mapping[str, SourceFile] = field(default_factory=dict)  # files that look different and have the same content
    existing: frozenset[int] = frozenset()  # unlisted chunks that have a file
    repairs: Mapping[int, ChunkRecord] = field(default_factory=dict)  # listed chunks whose files are replaced
    known: Index | None = field(
        default=None, repr=False, compare=False
    )  # in this process, which need not read it again

    @property
    def folder(self) -> str:
        return layout.layer_folder(self.layer, self.fingerprint)

    def begin(self, chunk: int) -> Callable[[], MadeChunk]:
        """Adopt a chunk or compute it; the callable that is returned writes it."""
        listed = self.repairs.get(chunk)
        existing = self._adopted(chunk) if listed is None else self._same_content(listed)
        if existing is not None:
            adopted = MadeChunk(existing, adopted=True)
            return lambda: adopted
        encoded = self.encode(chunk)
        if listed is not None:
            self._check_repair(encoded, listed)
        return partial(self._write, encoded)

    def encode(self, chunk: int) -> EncodedChunk:
        """The bytes of one chunk; a pure function of the recipe and the slice, or of the chunks that it reads."""
        return self._slice.encode(chunk)

    @cached_property
    def _slice(self) -> "BaseSlice | LayerSlice":
        return LayerSlice(self) if self.source is None else BaseSlice(self)

    @cached_property
    def plan(self) -> Plan:
        plan = load_plan(self.store) if self.known is None else self.known.plan
        if plan.digests[: len(self.planned)] != self.planned:
            raise index_corrupt(self.store.address, layout.PLAN, "it was exchanged for another plan during the build")
        return plan.first(len(self.planned))

    @cached_property
    def document(self) -> RecipeDocument:
        document = read_recipe_document(self.store, self.layer)
        if document is None:
            raise not_found("layer", self.layer, self.store.address, [])
        if document.fingerprint != self.fingerprint:
            raise self._mismatch(document)
        return document

    def check_recipe(self) -> None:
        """Before and after a chunk is made: a file that the recipe depends on may change meanwhile."""
        if not is_same_recipe(self.document, self.recipe):
            raise self._mismatch(self.document)

    def _mismatch(self, document: RecipeDocument) -> RecipeMismatch:
        differing = differing_fields(document, self.recipe)
        return recipe_mismatch(self.store.address, self.layer, differing, self.source is not None)

    def _adopted(self, chunk: int) -> ChunkRecord | None:
        """The record of an unlisted file that may be listed as it is; None if the chunk has to be made."""
        if chunk not in self.existing or hmac_key() is not None or self.plan.deduplicates:
            return None
        try:
            record = examine_chunk(self.store, self.document, chunk)
            is_own = record.failures == 0 and self._slice.fits(record)
            return record if is_own else None
        except (Missing, Damaged, OSError, SourceUnreadable):
            return None

    def _same_content(self, listed: ChunkRecord) -> ChunkRecord | None:
        """The record of a sound file with the listed content in other bytes, as another library version writes it."""
        try:
            record = examine_chunk(self.store, self.document, listed.chunk)
        except (Missing, Damaged, OSError):
            return None
        is_same = (record.content, record.ids, record.base) == (listed.content, listed.ids, listed.base)
        return record if is_same and hmac_key() is None else None

    def _check_repair(self, encoded: EncodedChunk, listed: ChunkRecord) -> None:
        """Raise unless a chunk that was made again has the content that is listed."""
        root, meta = self.store.address, encoded.meta
        if listed.rows and meta.failures and not meta.rows:
            reason, count, example = _reasons(encoded).most_frequent()
            raise ForebayError(
                f"all samples of chunk {meta.chunk} fail now ({count:,} x {reason}, e.g. {example}), and "
                f"{listed.rows:,} rows of it were published",
                hint=f"install the library versions that `forebay info {root}` shows",
            )
        if meta.content != listed.content.hex():
            raise ForebayError(
                f"chunk {meta.chunk} of layer '{self.layer}' would have other content than was published: the source, "
                f"the libraries or the device differ",
                hint=f"build a new cache that reuses the others: `forebay build … --into NEW --reuse {root}`",
            )

    def _write(self, encoded: EncodedChunk) -> MadeChunk:
        """Create the file of the chunk, hashing it meanwhile; a file with other content is replaced."""
        key = layout.chunk(self.folder, encoded.meta.chunk)
        with ThreadPoolExecutor(1) as pool:
            sha256 = pool.submit(encoded.sha256)
            created = False
            with suppress(Damaged):  # a folder or a link has the name
                created = self.store.create(key, encoded.buffers)
            record = encoded.record(sha256.result())
        is_stored = created
        with suppress(OSError):  # a bad sector: the file is replaced
            is_stored = created or has_sha256(self.store, key, record.sha256, encoded.size)
        if not is_stored:
            self._put(key, encoded)
        return MadeChunk(record)

    def _put(self, key: str, encoded: EncodedChunk) -> None:
        try:
            self.store.replace(key, encoded.buffers)
        except (Damaged, IsADirectoryError) as error:
            raise ForebayError(f"'{key}' is taken by something that is not a file; move it away") from error


def input_incomplete(root: str, layer: str, read: str, chunks: Sequence[int]) -> NotFound:
    more = f" and {len(chunks) - 1:,} more" if len(chunks) > 1 else ""
    return NotFound(
        f"layer '{layer}' of '{root}' reads layer '{read}', which has no chunk {chunks[0]}{more}",
        hint=f"finish the build of '{read}' first, or choose a range of chunks that it has",
        chunks=tuple(chunks),
    )


def _reasons(encoded: EncodedChunk) -> Reasons:
    return Reasons(msgspec.json.decode(line, type=Failure) for line in bytes(encoded.buffers[-1]).splitlines())


class BaseSlice:
    """Chunks of the base layer, from slices of a source."""

    def __init__(self, job: ChunkJob) -> None:
        self._job, self._plan = job, job.plan
        self._source, self._recipe = cast(Source, job.source), cast(Recipe, job.recipe)

    def encode(self, chunk: int) -> EncodedChunk:
        parts, job = self._plan.parts(chunk), self._job
        job.check_recipe()
        duplicates = self._duplicates(chunk)
        rows, samples, sums = self._read(parts, duplicates)
        if rows.present is not None:
            raise RecipeInvalid(f"the recipe '{self._recipe.kind}' makes base rows; leave out those it cannot make")
        job.check_recipe()
        left_out = {} if duplicates is None else {"duplicates": duplicates.left_out}
        return encode_chunk(
            rows.columns,
            self._recipe.columns(),
            layer=job.layer,
            chunk=chunk,
            fingerprint=job.fingerprint,
            samples=samples.count,
            failures=(*samples.failures, *self._numbered(rows.failures, parts)),
            statistics={**rows.statistics, **left_out},
            sample_ids=hooks_of(self._recipe).sample_ids,
            source_sums=sums,
        )

    def _read(self, parts: list[Part], duplicates: DuplicateFilter | None) -> tuple[Rows, ChunkSamples, list[int]]:
        """The rows of some parts, and the digest of each; the files must look the same before and after."""
        # Sources keep files open by how they look: a file that was exchanged and put back is opened again.
        reading = [replace(part, file=self._reading(part.file)) for part in parts]
        samples = ChunkSamples(self._source, reading, duplicates)
        with self._unchanged(parts):
            rows = self._recipe.make(samples)
            samples.check_exhausted()
            if duplicates is not None and not duplicates.saw_what_was_planned():
                changed = dict.fromkeys((part.file.path for part in parts), "has other samples than were planned")
                raise files_changed(self._job.store.address, changed)
            sums = [part_sum(self._source, *one) for one in zip(parts, samples.digests, strict=True)]
        return rows, samples, sums

    def fits(self, record: ChunkRecord) -> bool:
        """True if a sound file was made from what its slice of the source holds now."""
        key, parts = record.key(self._job.folder), self._plan.parts(record.chunk)
        with self._unchanged(parts):
            sums = ChunkFile(self._job.store.view(key), key).source_sums()
            return [part_sum(self._source, part) for part in parts] == list(sums)

    def _numbered(self, failures: Sequence[Failure], parts: list[Part]) -> Sequence[Failure]:
        return self._source.with_lines(failures, parts) if hooks_of(self._recipe).numbers_lines else failures

    def _duplicates(self, chunk: int) -> DuplicateFilter | None:
        planned = self._plan.left_out(chunk)
        identity = identity_of(self._recipe)
        if planned is None:
            return None
        if identity is None:
            raise RecipeInvalid(f"chunk {chunk} is planned without duplicates, but its recipe has no `identity`")
        return DuplicateFilter(identity, planned)

    @contextmanager
    def _unchanged(self, parts: list[Part]) -> Iterator[None]:
        """The files look as expected before they are read, and the same afterwards: a change explains any error.

        Looking after reading is not enough: a folder or a link on the way may have led elsewhere.
        """
        if self._source.reads_planned_files:
            yield
            return
        files = {part.file.path: self._source.look(part.file.path) for part in parts}
        wait_until_settled(files.values())
        for part in parts:
            self._source.check_beside(part.file, files[part.file.path])
            self._check_look(part.file.path, files[part.file.path], self._expected(part.file))
        try:
            yield
        finally:
            for path, file in files.items():
                self._check_look(path, self._source.look(path), file)

    def _check_look(self, path: str, now: SourceFile, before: SourceFile) -> None:
        if not now.same_identity(before):
            raise files_changed(self._job.store.address, {path: CHANGED_MEANWHILE})

    def _reading(self, planned: SourceFile) -> SourceFile:
        """The file as it looks now. Outside of buckets its etag describes a line or sidecar: it must be as planned."""
        file = self._expected(planned)
        return file if self._source.reads_planned_files else msgspec.structs.replace(file, etag=planned.etag)

    def _expected(self, planned: SourceFile) -> SourceFile:
        """How a file looked when it was last compared with the plan."""
        if len(self._plan.segments) > 1:  # a later segment may have it with a newer look
            planned = self._plan.files[planned.path]
        return self._job.now.get(planned.path, planned)


class LayerSlice:
    """Chunks of a layer above the base, from the rows of published layers."""

    def __init__(self, job: ChunkJob) -> None:
        self._job, self._recipe = job, cast(LayerRecipe, job.recipe)

    def encode(self, chunk: int) -> EncodedChunk:
        job, record = self._job, self._record(self._pinned.base, chunk)
        columns = {name: self._read(name, chunk, record) for name in self._wanted}
        job.check_recipe()
        rows = self._recipe.make(columns)
        job.check_recipe()
        return encode_chunk(
            _with_presence(rows, columns, record.rows, job.layer),
            (*self._recipe.columns(), PRESENT),
            layer=job.layer,
            chunk=chunk,
            fingerprint=job.fingerprint,
            samples=record.rows,
            failures=rows.failures,
            statistics=rows.statistics,
            base=record.ids.hex(),
        )

    def fits(self, record: ChunkRecord) -> bool:
        """True if a sound file was made from the base chunk that is listed."""
        return self._pinned.table(self._pinned.base).has_base_of(record)

    @cached_property
    def _wanted(self) -> tuple[str, ...]:
        """The columns that the recipe reads, and the presence bits of every layer above the base among them."""
        above = (self._homes[name].layer for name in self._recipe.reads if self._is_above(name))
        return tuple(dict.fromkeys([*self._recipe.reads, *map(presence_name, above)]))

    @cached_property
    def _homes(self) -> dict[str, Home]:
        """The published layer of each column."""
        declared = {layer: self._pinned.recipe(layer).columns for layer in self._pinned.recipes}
        return column_homes(declared, self._pinned.base)

    def _is_above(self, name: str) -> bool:
        return self._homes[name].layer != self._pinned.base

    def _read(self, name: str, chunk: int, base: ChunkRecord) -> Array | Ragged:
        layer, column = self._homes[name]
        record, store = self._record(layer, chunk), self._job.store
        if layer != self._pinned.base and (record.base, record.rows) != (base.ids, base.rows):
            raise chunk_corrupt(store.address, layer, chunk, "it was made for other rows of the base layer")
        columns = layer_columns(self._pinned.recipe(layer).columns, layer == self._pinned.base)
        file = open_chunk(store, self._pinned.folder(layer), record, columns=columns, keyed=self._pinned.tagged)
        return read_column(store, file, column.name)

    def _record(self, layer: str, chunk: int) -> ChunkRecord:
        record = published_record(self._pinned, layer, chunk)
        if record is None:
            raise input_incomplete(self._job.store.address, self._job.layer, layer, [chunk])
        return record

    @cached_property
    def _pinned(self) -> Generation:
        job = self._job
        return load_generation(job.store, job.generation) if job.known is None else job.known.published


def _with_presence(rows: Rows, read: Columns, count: int, layer: str) -> Columns:
    """The columns with presence bits; a row that a layer which was read lacks is absent here too."""
    present = np.ones(count, np.bool_) if rows.present is None else np.asarray(rows.present, np.bool_)
    for name, values in {**rows.columns, PRESENT.name: present}.items():
        if len(values) != count:
            raise RecipeInvalid(f"layer '{layer}' made {len(values):,} rows of '{name}' for {count:,} base rows")
    bits = [np.asarray(values) for name, values in read.items() if name.endswith(presence_name(""))]
    return {**rows.columns, PRESENT.name: np.logical_and.reduce([present, *bits])}
