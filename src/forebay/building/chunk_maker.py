"""The work on one chunk: read its slice, make its rows, write its file. What a worker process does."""

from collections.abc import Callable, Iterable, Iterator, Mapping
from concurrent.futures import ThreadPoolExecutor
from contextlib import suppress
from dataclasses import dataclass, field, replace
from functools import cached_property, partial
from typing import TypeGuard

import msgspec
import numpy as np

from forebay.building.dedup import DuplicateFilter
from forebay.building.planning import wait_until_settled
from forebay.cache.catalog import (
    PRESENT,
    Home,
    column_homes,
    examine_chunk,
    layer_columns,
    layers_of,
    load_generation,
    open_chunk,
    presence_name,
    published_record,
    read_column,
    read_recipe_document,
)
from forebay.cache.plan import Plan, load_plan, named_in
from forebay.cache.source_check import is_made_from, reusable_rows
from forebay.columns import Array, Columns, Ragged
from forebay.errors import (
    ChunkCorrupt,
    ChunkFailed,
    ForebayError,
    FormatTooNew,
    IndexCorrupt,
    InputIncomplete,
    LayerNotFound,
    NotForebay,
    RecipeInvalid,
    RecipeMismatch,
    SourceChanged,
    SourceUnreadable,
)
from forebay.format import layout
from forebay.format.chunk import ChunkRecord, EncodedChunk, encode_chunk
from forebay.format.generation import Generation
from forebay.recipe import (
    AnnotatedRecipe,
    LayerRecipe,
    Recipe,
    RecipeDocument,
    Rows,
    differing_fields,
    hooks_of,
    identity_of,
    is_same_recipe,
)
from forebay.source import (
    CHANGED_MEANWHILE,
    BatchedSamples,
    Failure,
    Part,
    PartDigest,
    Reasons,
    Sample,
    SampleBatch,
    Source,
    SourceFile,
    part_sum,
)
from forebay.store.base import Missing, Pieces, Store, holds

TELLING_SAMPLES = 4  # a chunk of at least this many samples that all fail stops a build; fewer may fail by chance
MOST_REVISIONS = 1000  # that are in the way of one chunk, before it is given up


def _kept_recipe(store: Store, layer: str) -> RecipeDocument:
    document = read_recipe_document(store, layer)
    if document is None:
        raise LayerNotFound(store.address, layer, [])
    return document


def _check_recipe(job: "ChunkJob", kept: RecipeDocument) -> None:
    """Before and after a chunk is made: a file that the recipe depends on may change meanwhile."""
    if not is_same_recipe(kept, job.recipe):
        raise RecipeMismatch(job.store.address, job.layer, differing_fields(kept, job.recipe), isinstance(job, BaseJob))


@dataclass(frozen=True)
class BaseJob:
    """Making chunks of the base layer from a source. It travels to worker processes."""

    store: Store
    layer: str
    recipe: Recipe
    source: Source
    now: Mapping[str, SourceFile] = field(default_factory=dict)  # files that look different but are the same
    planned: tuple[str, ...] = ()  # the digests of the plan that it works by
    skip_unreadable: bool = False
    listed: int | None = None  # the generation whose rows are used again where only their metadata changed
    known: Plan | None = field(default=None, repr=False, compare=False)  # in this process, which need not read it again

    def encode(self, chunk: int) -> EncodedChunk:
        """The bytes of one chunk; a pure function of the recipe and the slice.

        Where that is allowed, a part that cannot be read is one failure, and nothing of it is in the rows.
        """
        unreadable: dict[str, str] = {}
        while True:
            try:
                return self._encode(chunk, unreadable)
            except SourceUnreadable as error:
                path = named_in(error, [part.file.path for part in self._plan.parts(chunk)])
                allowed = self.skip_unreadable or self._plan.may_skip(chunk)
                if not allowed or path is None or path in unreadable or self._duplicates(chunk) is not None:
                    raise
                unreadable[path] = error.problem

    def _encode(self, chunk: int, unreadable: Mapping[str, str]) -> EncodedChunk:
        parts = self._plan.parts(chunk)
        readable = [part for part in parts if part.file.path not in unreadable]
        skipped = [
            Failure(f"{part.file.path}@{part.start}", "unreadable", unreadable[part.file.path])
            for part in parts
            if part.file.path in unreadable
        ]
        _check_recipe(self, self._kept)
        before, reading = {}, readable
        if self.source.reads_planned_files:
            reading = [replace(part, file=self._expected(part.file)) for part in readable]
        else:
            before = self._checked_files(parts)
        duplicates = self._duplicates(chunk)
        samples = ChunkSamples(self.source, reading, duplicates)
        try:
            rows = self._made(chunk, samples)
            samples.check_exhausted()
            if duplicates is not None and not duplicates.saw_what_was_planned():
                changed = dict.fromkeys((part.file.path for part in parts), "has other samples than were planned")
                raise SourceChanged(self.store.address, changed)
            read = dict(zip(readable, samples.digests, strict=True))
            sums = [part_sum(self.source, part, read.get(part)) for part in parts]
        except Exception:
            self._check_unchanged(before)  # a file that has changed explains whatever went wrong
            raise
        self._check_unchanged(before)
        if rows.present is not None:
            raise RecipeInvalid(f"the recipe '{self.recipe.kind}' makes base rows; leave out those it cannot make")
        _check_recipe(self, self._kept)
        return encode_chunk(
            rows.columns,
            self.recipe.columns(),
            layer=self.layer,
            chunk=chunk,
            fingerprint=self._kept.fingerprint,
            samples=samples.count + len(skipped),
            failures=(*skipped, *samples.failures, *rows.failures),
            statistics=rows.statistics
            if duplicates is None
            else {**rows.statistics, "duplicates": duplicates.left_out},
            sample_ids=hooks_of(self.recipe).sample_ids,
            source_sums=sums,
        )

    def _made(self, chunk: int, samples: Iterable[Sample]) -> Rows:
        if isinstance(self.recipe, AnnotatedRecipe) and self.listed is not None and self._plan.amended_base:
            listed = load_generation(self.store, self.listed)
            rows = reusable_rows(self.store, self.source, self._plan, self.layer, listed, chunk)
            return self.recipe.make_again(samples, rows)
        return self.recipe.make(samples)

    def may_adopt(self, record: ChunkRecord) -> bool:
        """Whether a chunk that is there was made from this source."""
        return is_made_from(self.store, self.source, self._plan, self.layer, record)

    def touched(self, chunk: int) -> list[str]:
        """The files of a chunk whose look differs from the plan; whether their content does may be unknown."""
        return sorted({part.file.path for part in self._plan.parts(chunk)} & self.now.keys())

    @cached_property
    def _plan(self) -> Plan:
        plan = load_plan(self.store, self.known)
        if plan.digests[: len(self.planned)] != self.planned:
            raise IndexCorrupt(self.store.address, layout.PLAN, "it was exchanged for another plan during the build")
        return plan.first(len(self.planned)) if self.planned else plan

    @property
    def fingerprint(self) -> str:
        return self._kept.fingerprint

    @cached_property
    def _kept(self) -> RecipeDocument:
        return _kept_recipe(self.store, self.layer)

    def _duplicates(self, chunk: int) -> DuplicateFilter | None:
        planned = self._plan.left_out(chunk)
        identity = identity_of(self.recipe)
        if planned is None:
            return None
        if identity is None:
            raise RecipeInvalid(f"chunk {chunk} is planned without duplicates, but its recipe has no `identity`")
        return DuplicateFilter(identity, planned)

    def _checked_files(self, parts: list[Part]) -> dict[str, SourceFile]:
        """Return the files to read as they are now; raise if one is not as planned.

        Looking at them after they were read is not enough: a folder or a link on the way may have led elsewhere.
        """
        found = {part.file.path: self.source.look(part.file.path) for part in parts}
        wait_until_settled(found.values())
        for part in parts:
            self.source.check_beside(part.file, found[part.file.path])
            if not found[part.file.path].same_identity(self._expected(part.file)):
                raise SourceChanged(self.store.address, {part.file.path: CHANGED_MEANWHILE})
        return found

    def _expected(self, planned: SourceFile) -> SourceFile:
        """What a file of a part looked like when it was last compared with the plan."""
        if len(self._plan.segments) > 1:  # a later segment may know a file better
            planned = self._plan.files[planned.path]
        return self.now.get(planned.path, planned)

    def has_changed(self, planned: SourceFile, look: Callable[[str], SourceFile]) -> bool:
        """Whether a file of a part looks different from when it was read; one that is gone cannot be compared."""
        try:
            return not look(planned.path).same_identity(self._expected(planned))
        except FileNotFoundError:
            return False
        except (OSError, SourceUnreadable):  # a folder in its place, or no permission
            return True

    def _check_unchanged(self, before: Mapping[str, SourceFile]) -> None:
        """After reading: a file that changed meanwhile must not leave a chunk."""
        for path, file in before.items():
            if not self.source.look(path).same_identity(file):
                raise SourceChanged(self.store.address, {path: CHANGED_MEANWHILE})


@dataclass(frozen=True)
class LayerJob:
    """Making chunks of a layer on top of the base layer's rows, and of layers there are. It travels to workers."""

    store: Store
    layer: str
    recipe: LayerRecipe
    generation: int
    source: None = None

    def encode(self, chunk: int) -> EncodedChunk:
        """The bytes of one chunk; a pure function of the recipe and of the chunks that it reads."""
        record = self._record(self._pinned.base, chunk)
        columns = {name: self._read(name, chunk, record) for name in self._wanted}
        _check_recipe(self, self._kept)
        rows = self.recipe.make(columns)
        _check_recipe(self, self._kept)
        return encode_chunk(
            _with_presence(rows, columns, record.rows, self.layer),
            (*self.recipe.columns(), PRESENT),
            layer=self.layer,
            chunk=chunk,
            fingerprint=self._kept.fingerprint,
            samples=record.rows,
            failures=rows.failures,
            statistics=rows.statistics,
            base=record.ids.hex(),
        )

    def may_adopt(self, record: ChunkRecord) -> bool:
        """Whether a chunk that is there belongs to its rows, which publishing compares."""
        return True

    def touched(self, chunk: int) -> list[str]:
        return []

    @property
    def inputs(self) -> tuple[str, ...]:
        """The further layers that are read."""
        return tuple(dict.fromkeys(self._homes[name].layer for name in self._wanted if self._is_above(name)))

    @cached_property
    def _wanted(self) -> tuple[str, ...]:
        """The columns that the recipe reads, and the presence bits of every further layer among them."""
        above = (self._homes[name].layer for name in self.recipe.reads if self._is_above(name))
        return tuple(dict.fromkeys([*self.recipe.reads, *map(presence_name, above)]))

    @cached_property
    def _homes(self) -> dict[str, Home]:
        """Where columns are; one that no published layer has is in a layer that was begun and has no chunk yet."""
        declared = {layer: self._pinned.recipe(layer).columns for layer in self._pinned.recipes}
        found = column_homes(declared, self._pinned.base)
        if all(name in found for name in self.recipe.reads):
            return found
        begun = {
            layer: kept.columns for layer in layers_of(self.store) if (kept := read_recipe_document(self.store, layer))
        }
        return column_homes({**begun, **declared}, self._pinned.base)

    def _is_above(self, name: str) -> bool:
        return self._homes[name].layer != self._pinned.base

    def _read(self, name: str, chunk: int, base: ChunkRecord) -> Array | Ragged:
        layer, column = self._homes[name]
        record = self._record(layer, chunk)
        if layer != self._pinned.base and (record.base, record.rows) != (base.ids, base.rows):
            raise ChunkCorrupt(self.store.address, layer, chunk, "it was made for other rows of the base layer")
        columns = layer_columns(self._pinned.recipe(layer).columns, layer == self._pinned.base)
        file = open_chunk(self.store, layer, record, columns=columns, keyed=self._pinned.tagged)
        return read_column(self.store, layer, file, column.name)

    def _record(self, layer: str, chunk: int) -> ChunkRecord:
        record = published_record(self._pinned, layer, chunk)
        if record is None:
            raise InputIncomplete(self.store.address, self.layer, layer, [chunk])
        return record

    @cached_property
    def _pinned(self) -> Generation:
        return load_generation(self.store, self.generation)

    @property
    def fingerprint(self) -> str:
        return self._kept.fingerprint

    @cached_property
    def _kept(self) -> RecipeDocument:
        return _kept_recipe(self.store, self.layer)


ChunkJob = BaseJob | LayerJob


@dataclass(frozen=True)
class BuildJob:
    """Writes missing chunks; a chunk whose samples all failed is not written, unless the caller allows that."""

    chunks: ChunkJob
    distrusted: frozenset[int] = frozenset()  # chunks whose file, if there is one, does not count as made
    all_may_fail: bool = True
    revisions: Mapping[int, int] = field(default_factory=dict)  # chunk -> the one to write, of those not first made now

    def revision(self, chunk: int) -> int:
        return self.revisions.get(chunk, 0)

    def begin(self, chunk: int) -> Callable[[], ChunkRecord | None]:
        """Make one chunk, then write it; None where somebody else has written it meanwhile."""
        encoded = self.chunks.encode(chunk)
        if not self.all_may_fail:
            _check_chunk(self.chunks.store, encoded)
        return partial(self._write, chunk, encoded)

    def _write(self, chunk: int, encoded: EncodedChunk) -> ChunkRecord | None:
        store, layer, revision = self.chunks.store, self.chunks.layer, self.revision(chunk)
        record = write_chunk(store, layer, encoded, revision)
        if record is None and (chunk in self.distrusted or not has_file(store, layout.chunk(layer, chunk, revision))):
            return write_over_unlisted(store, layer, encoded, revision)
        return record

    def is_listed_by_name(self, record: ChunkRecord) -> bool:
        """Whether the file alone tells every other builder that this chunk is made, and `clean` that it is needed."""
        return record.revision == 0 and record.chunk not in self.distrusted


@dataclass(frozen=True)
class RepairJob:
    """Writing published chunks again: in place where the bytes are the published ones, else as a new revision."""

    chunks: ChunkJob
    listed: Mapping[int, ChunkRecord]
    revisions: Mapping[int, int] = field(default_factory=dict)  # chunk -> the lowest one that the plan asks for

    def begin(self, chunk: int) -> Callable[[], ChunkRecord | None]:
        encoded, rows = self.chunks.encode(chunk), self.listed[chunk].rows
        if rows and encoded.meta.failures and not encoded.meta.rows:
            root, (reason, count, example) = self.chunks.store.address, _reasons(encoded).most_frequent()
            raise ForebayError(
                f"all samples of chunk {chunk} fail now ({count:,} × {reason}, e.g. {example}), and {rows:,} rows "
                f"of it were published; install the library versions that `forebay info {root}` names"
            )
        return partial(self._write, chunk, encoded)

    def is_listed_by_name(self, record: ChunkRecord) -> bool:
        """A revision counts once a generation lists it."""
        return record.revision == self.listed[record.chunk].revision

    def _write(self, chunk: int, encoded: EncodedChunk) -> ChunkRecord:
        store, layer, listed = self.chunks.store, self.chunks.layer, self.listed[chunk]
        if encoded.sha256() == listed.sha256:
            with suppress(NotForebay, IsADirectoryError):  # it stays, and a revision is written
                store.replace(layout.chunk(layer, chunk, listed.revision), encoded.buffers)
                return encoded.record(listed.sha256, listed.revision)
        touched = self.chunks.touched(chunk)
        if touched and encoded.meta.content != listed.content.hex():
            how = "looks different from when it was planned, and gives other rows"
            raise SourceChanged(store.address, dict.fromkeys(touched, how))
        return write_revision(store, layer, encoded, max(listed.revision + 1, self.revisions.get(chunk, 0)))


def write_over_unlisted(store: Store, layer: str, encoded: EncodedChunk, revision: int = 0) -> ChunkRecord:
    """Write a chunk whose name is taken by a file that no generation lists.

    The same bytes are taken as they are, a damaged file is replaced; anything else (another chunk that is whole, one of
    a newer forebay, a folder, a link) keeps its name, and this one is written as the next revision.
    """
    try:
        found = examine_chunk(store, layer, encoded.meta.chunk, revision)
        if found.sha256 == encoded.sha256():
            return encoded.record(found.sha256, revision)
    except (Missing, FormatTooNew):
        pass
    except NotForebay:
        with suppress(NotForebay, IsADirectoryError):
            store.replace(layout.chunk(layer, encoded.meta.chunk, revision), encoded.buffers)
            return encoded.record(encoded.sha256(), revision)
    return write_revision(store, layer, encoded, revision + 1)


def write_revision(store: Store, layer: str, encoded: EncodedChunk, revision: int) -> ChunkRecord:
    """Write a chunk under the next free revision, or find that a process which died has written it."""
    sha256 = encoded.sha256()
    for number in range(revision, revision + MOST_REVISIONS):
        record = write_chunk(store, layer, encoded, number)
        if record is not None:
            return record
        with suppress(Missing, NotForebay, OSError):  # what cannot be read keeps its name
            if Pieces(store, layout.chunk(layer, encoded.meta.chunk, number)).sha256 == sha256:
                return encoded.record(sha256, number)
    key = layout.chunk(layer, encoded.meta.chunk, revision)
    raise ForebayError(f"'{key}' of '{store.address}' and {MOST_REVISIONS:,} names after it are taken; move them away")


def has_file(store: Store, key: str) -> bool:
    """Whether there is a file under a key; a folder, a link or a device is none."""
    try:
        return holds(store, key)
    except NotForebay:  # a link or a device
        return False


Job = BuildJob | RepairJob


class ChunkSamples(BatchedSamples):
    """The samples of a slice, once through; what has bad content is set aside as a failure.

    A sample that the filter of duplicates leaves out counts, and is not passed on. `digests` are those that the source
    took while it read.
    """

    def __init__(self, source: Source, parts: list[Part], duplicates: DuplicateFilter | None = None) -> None:
        self.count = 0
        self.failures: list[Failure] = []
        self.digests = [PartDigest() for _ in parts]
        self._duplicates = duplicates
        self._batches = self._read(source, parts)
        self._samples = self._one_by_one()

    def __iter__(self) -> Iterator[Sample]:
        return self._samples

    def batches(self) -> Iterator[Sample | SampleBatch]:
        return self._batches

    def check_exhausted(self) -> None:
        if next(self._samples, None) is not None:
            raise RecipeInvalid("the recipe left samples unread; it must take all it is given")

    def _one_by_one(self) -> Iterator[Sample]:
        for found in self._batches:
            if isinstance(found, SampleBatch):
                yield from found.samples()
            else:
                yield found

    def _read(self, source: Source, parts: list[Part]) -> Iterator[Sample | SampleBatch]:
        for part, digest in zip(parts, self.digests, strict=True):
            for found in source.read_hashed(part, digest):
                given: list[Sample | SampleBatch] = []
                if self._duplicates is None and not isinstance(found, Failure):
                    self.count += found.count if isinstance(found, SampleBatch) else 1
                    given.append(found)
                elif isinstance(found, SampleBatch):
                    yield from filter(self._keeps, found.samples())
                elif self._keeps(found):
                    given.append(found)
                del found
                while given:
                    yield given.pop()  # no reference to it stays here: it may be large

    def _keeps(self, sample: Sample | Failure) -> TypeGuard[Sample]:
        """Count a sample; False where it failed, or is a duplicate."""
        self.count += 1
        kept = self._duplicates is None or self._duplicates.keeps(sample)
        if isinstance(sample, Failure):
            self.failures.append(sample)
            return False
        return kept


def _check_chunk(store: Store, encoded: EncodedChunk) -> None:
    """Raise if a chunk has no row and enough samples failed to suspect all others."""
    meta = encoded.meta
    if meta.rows or meta.failures < max(TELLING_SAMPLES, meta.samples):
        return
    reasons = _reasons(encoded)
    raise ChunkFailed(store.address, meta.chunk, meta.failures, *reasons.most_frequent(), reasons.advice())


def _reasons(encoded: EncodedChunk) -> Reasons:
    return Reasons(msgspec.json.decode(line, type=Failure) for line in bytes(encoded.buffers[-1]).splitlines())


def write_chunk(store: Store, layer: str, encoded: EncodedChunk, revision: int = 0) -> ChunkRecord | None:
    """Create a chunk's file, hashing it while it is written."""
    key = layout.chunk(layer, encoded.meta.chunk, revision)
    with ThreadPoolExecutor(1) as pool:
        sha256 = pool.submit(encoded.sha256)
        try:
            created = store.create(key, encoded.buffers)
        except NotForebay:  # a folder or a link has the name
            created = False
        return encoded.record(sha256.result(), revision) if created else None


def _with_presence(rows: Rows, read: Columns, count: int, layer: str) -> Columns:
    """The columns with presence bits; a row that a layer which was read lacks is absent here too."""
    present = np.ones(count, np.bool_) if rows.present is None else np.asarray(rows.present, np.bool_)
    for name, values in {**rows.columns, PRESENT.name: present}.items():
        if len(values) != count:
            raise RecipeInvalid(f"layer '{layer}' made {len(values):,} rows of '{name}' for {count:,} base rows")
    bits = [np.asarray(values) for name, values in read.items() if name.endswith(presence_name(""))]
    return {**rows.columns, PRESENT.name: np.logical_and.reduce([present, *bits])}
