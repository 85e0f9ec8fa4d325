"""A pinned generation: the one that the caller expects, and the files of its layers."""

from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np
from numpy.typing import NDArray

from forebay.cache.catalog import expected, layer_columns, load_generation, open_chunk, published_record
from forebay.columns import Column
from forebay.errors import ChunkMissing, NotFound, StateMismatch
from forebay.fields import checked_whole
from forebay.format import layout
from forebay.format.chunk import MAX_HEAD_BYTES, SUM_BYTES, ChunkRecord, chunk_corrupt, chunk_missing
from forebay.format.chunk_file import ChunkFile
from forebay.format.generation import Generation
from forebay.store.base import BadCopy, Missing, Store, holds
from forebay.store.tiered import TieredStore

Numbers = NDArray[np.int64]


def load_pinned(
    store: Store,
    number: int | None,
    cache_id: str | None = None,
    min_generation: int | None = None,
    digest: str | None = None,
) -> Generation:
    """Return a generation, by default the newest; raise `StateMismatch` unless it is the one the caller expects."""
    for name, text in (("cache_id", cache_id), ("digest", digest)):
        if text is not None and not isinstance(text, str):
            raise TypeError(f"{name} must be text (got {text!r})")
    if min_generation is not None:
        checked_whole("min_generation", min_generation)
    generation = load_generation(store, number)
    own_id, problem = generation.document.cache_id, ""
    if cache_id is not None and own_id != cache_id:
        problem = f"its cache_id is {own_id}, expected {cache_id}"
    elif min_generation is not None and generation.number < min_generation:
        problem = f"its generation is {generation.number}, expected at least {min_generation}"
    elif digest is not None and generation.digest != digest.lower():
        problem = f"its digest is {generation.digest}, expected {digest}"
    if problem:
        raise StateMismatch(
            f"the cache at '{store.address}' is not the pinned one: {problem}",
            hint=f"restore the expected cache, or change the pin (see `forebay info {store.address}`)",
        )
    return generation


def common_chunks(generation: Generation, layers: Sequence[str]) -> Numbers:
    """Return the chunks that all of some layers have."""
    base = generation.base
    chunks: Numbers = generation.table(base).chunks
    for layer in (name for name in layers if name != base):
        chunks = np.intersect1d(chunks, generation.table(layer).chunks, assume_unique=True)
    return chunks


@dataclass(frozen=True, slots=True, eq=False)
class LayerFiles:
    """The files of a layer, one per chunk; a position is an index into `chunks`."""

    store: Store
    generation: Generation
    layer: str
    chunks: Numbers
    columns: tuple[Column, ...]

    @classmethod
    def of(cls, store: Store, generation: Generation, layer: str, chunks: Numbers) -> "LayerFiles":
        columns = layer_columns(generation.recipe(layer).columns, layer == generation.base)
        return cls(store, generation, layer, chunks, columns)

    def open(self, position: int) -> ChunkFile:
        """Open a chunk and check it against the generation and the recipe."""
        generation, record = self.generation, self._record(position)
        folder = generation.folder(self.layer)
        try:
            return open_chunk(self.store, folder, record, columns=self.columns, keyed=generation.tagged)
        except ChunkMissing as error:
            if holds(self.store, layout.generation(generation.number)):
                raise
            raise NotFound(
                f"chunk {record.chunk} of layer '{self.layer}' was removed together with generation "
                f"{generation.number} of '{self.store.address}'",
                hint="open the cache again, and keep generations in use (`forebay clean --keep-generations`)",
            ) from error

    def sizes(self) -> Numbers:
        """The bytes of each file."""
        table = self.generation.table(self.layer)
        return table.numbers["size"][np.searchsorted(table.chunks, self.chunks)]

    def check_block_counts(self, column: Column, rows: Numbers) -> None:
        """Reject more rows than the index has checksums for, before allocating a bit for every block."""
        table = self.generation.table(self.layer)
        if not len(table):
            return
        at = np.minimum(np.searchsorted(table.chunks, self.chunks), len(table) - 1)
        listed = np.where(table.chunks[at] == self.chunks, table.numbers["head_size"][at], MAX_HEAD_BYTES)
        impossible = -(-rows // column.block_rows) > np.clip(listed, 0, MAX_HEAD_BYTES) // SUM_BYTES
        if impossible.any():
            first = int(np.flatnonzero(impossible)[0])
            problem = f"its index is too small for the {int(rows[first]):,} rows that were published"
            raise chunk_corrupt(self.store.address, self.layer, int(self.chunks[first]), problem)

    def keep(self, position: int) -> bool:
        """Fetch a file into the tier; return False if it is not admitted, or there is no tier."""
        if not isinstance(self.store, TieredStore):
            return False
        record = self._record(position)
        try:
            return self.store.keep(self._key(record), expected(record))
        except Missing as error:
            raise chunk_missing(self.store.address, self.layer, record.chunk) from error
        except BadCopy as error:
            raise chunk_corrupt(self.store.address, self.layer, record.chunk, error.problem) from error

    def reject(self, position: int, problem: str) -> None:
        """Make the store drop its copy of a bad file."""
        self.store.reject(self._key(self._record(position)), problem)

    def has_no_file(self, position: int) -> bool:
        """Whether the open chunk is in memory only, or passes through a full tier."""
        record = self._published(position)
        return record is not None and self.store.local_path(self._key(record)) is None

    def has_size(self, position: int, size: int) -> bool:
        """Whether the file is still there, with as many bytes as when it was opened."""
        record = self._published(position)
        entry = None if record is None else self.store.head(self._key(record))
        return entry is not None and entry.size == size

    def _record(self, position: int) -> ChunkRecord:
        record, chunk, root = self._published(position), int(self.chunks[position]), self.store.address
        if record is None:
            raise NotFound(
                f"layer '{self.layer}' of '{root}' has no chunk {chunk} in this generation",
                hint=f"finish its build, or open the cache with layers=['{self.layer}'] to see only the rows it has",
                layer=self.layer,
                chunk=chunk,
            )
        if self.layer != self.generation.base:
            below = published_record(self.generation, self.generation.base, chunk)
            if below is None or (below.ids, below.rows) != (record.base, record.rows):
                raise chunk_corrupt(root, self.layer, chunk, "it was built for other rows of the base layer")
        return record

    def _published(self, position: int) -> ChunkRecord | None:
        return published_record(self.generation, self.layer, int(self.chunks[position]))

    def _key(self, record: ChunkRecord) -> str:
        return record.key(self.generation.folder(self.layer))
