"""A chat cache packed into rows of another length while it is read: nothing is written, copied or tokenized.

    longer = forebay.chat.packed_view(fb.open_cache("caches/sft"), sequence_length=8192, chunks=4)
    Loader(longer, global_batch_size=8)

stored row   ┌ conversation 0 ──────────┬ conversation 4 ──┬ padding ┐
row of view  ┌ conversation 4 ──┬ conversation 7 ─────┬ conversation 9 ───┬ padding ┐

The packing is an effect of the lengths of documents, which the cache stores: best fit over the documents of a window,
as `ChatRecipe` packs those of a chunk. A window is some neighbouring chunks that were planned together, by default one;
it is a chunk of the view. Its rows depend on these chunks alone, and there are none before all of them are built, so
they stay the same however far the cache grows. A row is gathered from the stored rows that its documents lie in. What
is kept in memory is the number of rows per window, and the documents of the rows of some windows, by bytes.
"""

import hashlib
import operator
import threading
import warnings
from collections.abc import Callable, Iterator, Sequence
from dataclasses import asdict, dataclass
from functools import cached_property
from typing import Any, SupportsIndex

import msgspec
import numpy as np
from numpy.typing import NDArray

from forebay.cache.catalog import Home
from forebay.chat.conversation_packing import (
    ChunkNames,
    Conversations,
    Long,
    cut_long,
    kept_spans,
    last_turns,
    ranges,
    stored_documents,
)
from forebay.columns import Array, Column, Ragged
from forebay.errors import ChunkCorrupt, SourceInvalid
from forebay.format import layout
from forebay.format.chunk import ChunkRecord
from forebay.read.cache import Cache
from forebay.read.chunk_maps import ChunkFinder, RowLocations, by_position, slices
from forebay.read.column_readers import ColumnReader, slices_of
from forebay.read.gather import BlockCache, BlockStatistics, RowAddresses
from forebay.recipe import RecipeDocument, canonical_json
from forebay.tokens.packing import copy_runs, pack_best_fit, split_documents
from forebay.tokens.recipe import MOST_TOKENS

KIND = "chat"
COLUMNS = ("tokens", "seq_lens", "documents", "spans", "last_turn")
PIECE_BYTES = 32 << 20  # of stored rows that are gathered at once
TABLE_SHARE = 4  # a quarter of a cache's memory, for the documents of rows
MOST_CHUNKS = 1 << 31  # of a window
MOST_NUMBER = 1 << 32  # of a sample: `documents` is uint32


@dataclass(frozen=True, slots=True)
class Packing:
    """How the documents of a cache are laid into rows."""

    sequence_length: int
    long: Long
    chunks: int  # whose documents are packed together


@dataclass(frozen=True, slots=True, eq=False)
class Windows:
    """The chunks that are packed together: those of a window have neighbouring positions in the stored cache."""

    numbers: Array  # (windows,) of the first chunk of each
    firsts: Array  # (windows,) its position
    stops: Array  # (windows,) the position after the last one

    @classmethod
    def of(cls, cache: Cache, size: int) -> "Windows":
        """The windows of which a cache has all chunks that are planned."""
        numbers, firsts, counts = np.unique(cache.chunk_windows(size), return_index=True, return_counts=True)
        whole = counts == cache.planned_in_windows(numbers, size)
        return cls(numbers[whole], firsts[whole], (firsts + counts)[whole])

    def chunks(self, position: int) -> range:
        """The positions of the chunks of a window."""
        return range(int(self.firsts[position]), int(self.stops[position]))


@dataclass(frozen=True, slots=True)
class Counts:
    """What packing all windows of a cache showed."""

    rows: tuple[int, ...]  # of each window
    cut: int  # documents
    dropped: int


@dataclass(frozen=True, eq=False)
class PackedRows:
    """The documents of the rows of one window, in the order of rows."""

    edges: Array  # (rows + 1,) the first document of each row
    table: Array  # (documents, 8) int64, the columns below: one copy takes the documents of some rows
    cut: int = 0
    dropped: int = 0

    @property
    def nbytes(self) -> int:
        return self.edges.nbytes + self.table.nbytes

    @property
    def rows(self) -> Array:
        """The stored row that has each document."""
        return self.table[:, 0]

    @cached_property
    def stored(self) -> tuple[Array, Array]:
        """The stored rows, each once, and the position of every document's row among them: the same for all columns."""
        return np.unique(self.rows, return_inverse=True)

    @property
    def starts(self) -> Array:
        """Where each document begins in its stored row."""
        return self.table[:, 1]

    @property
    def places(self) -> Array:
        """The number of each document in its stored row."""
        return self.table[:, 2]

    @property
    def lengths(self) -> Array:
        """How many of its tokens are kept."""
        return self.table[:, 3]

    @property
    def begins(self) -> Array:
        """Where each document begins in its row of the view."""
        return self.table[:, 4]

    @property
    def identity(self) -> Array:
        """The number of its sample in the window, and its offset there: the column `documents`."""
        return self.table[:, 5:7]

    @property
    def last_turn(self) -> Array:
        """The last turn of its conversation, where documents were cut; -1: as it is stored."""
        return self.table[:, 7]


def packed_view(
    cache: Cache,
    *,
    sequence_length: SupportsIndex | None = None,
    long: Long | None = None,
    chunks: SupportsIndex = 1,
) -> "PackedView":
    """Return the conversations of a chat cache in rows of another length, packed when they are read.

    `long` says what happens to conversations longer than a row, by default as in the cache's recipe. The documents of
    `chunks` neighbouring chunks are packed together. `Split` takes a view by chunk only, with as many `chunks`:
    `Split("train", by="chunk", chunks=4)` has the same conversations on both sides for the cache and for all its views
    of 1, 2 or 4 chunks.
    """
    view = PackedView(cache, _checked_packing(cache, sequence_length, long, chunks))
    if view.chunks_left_out:
        warnings.warn(
            f"{view.chunks_left_out:,} of {len(cache.chunk_numbers):,} chunks of '{cache.root}' are left out until all "
            f"of the {view.packing.chunks} that are packed together are built; run the build, or pass chunks=1",
            stacklevel=2,
        )
    if view.largest_table > view.table_limit:
        warnings.warn(
            f"the documents of a window of '{cache.root}' take {view.largest_table:,} bytes, and {view.table_limit:,} "
            "are kept: it is packed again for every batch; open the cache with "
            f"memory={TABLE_SHARE * view.largest_table}, or pass fewer chunks",
            stacklevel=2,
        )
    return view


class PackedView(Cache):
    """A chat cache in rows of another length. It has the columns of the base layer, and no further layers.

    Its chunks are windows: `chunk_numbers` has the number of the first chunk of each.
    """

    largest_table = 0  # bytes of the documents of a window; known where all windows were packed to open the view

    def __init__(
        self, stored: Cache, packing: Packing, windows: Windows | None = None, counts: Counts | None = None
    ) -> None:
        self._check_columns(stored)
        self.packed_chunks = packing.chunks
        super().__init__(
            stored.store,
            stored.generation,
            (stored.generation.base,),
            stored._options,
            pinned_explicitly=stored.pinned_explicitly,
        )
        self.stored, self.packing, self.pad = stored, packing, _padding(stored)
        self.windows = windows or Windows.of(stored, packing.chunks)
        self._chunks = self.windows.numbers
        self.counts = self._counted() if counts is None else counts
        self._starts = _edges(np.array(self.counts.rows, np.int64))
        self._count = int(self._starts[-1])
        self._finder = ChunkFinder(self._starts)
        self._columns = {name: Home(self._base, self._declare(stored.column(name))) for name in COLUMNS}
        self._requested = {None: list(COLUMNS)}

    @property
    def chunks_left_out(self) -> int:
        """Chunks that are built, and wait for others of their window."""
        return len(self.stored.chunk_numbers) - int((self.windows.stops - self.windows.firsts).sum())

    @property
    def table_limit(self) -> int:
        """Bytes of documents of windows that are kept in memory."""
        return self._options.memory // TABLE_SHARE

    @property
    def documents_cut(self) -> int:
        """Documents that the view cut at a turn, because they are longer than a row."""
        return self.counts.cut

    @property
    def documents_dropped(self) -> int:
        """Documents that the view leaves out, because they are longer than a row."""
        return self.counts.dropped

    @cached_property
    def content_digest(self) -> str:
        """A digest of the stored chunks, the packing and the windows: a cache that was built again may have others."""
        windows = np.column_stack([self.windows.numbers, self.windows.stops - self.windows.firsts])
        return self._mark(self.stored.content_digest, *windows.tolist() if self.packing.chunks > 1 else ())

    def content_digests(self, layer: str, chunks: NDArray[np.int64]) -> Array:
        """The digests of some windows, by the numbers of their first chunks."""
        if self.packing.chunks == 1:
            return self.stored.content_digests(layer, chunks)
        stored = self.stored.content_digests(layer, self.stored.chunk_numbers)
        found = np.zeros((len(chunks), stored.shape[1]), np.uint8)
        for at, position in enumerate(np.searchsorted(self._chunks, chunks).tolist()):
            here = self.windows.chunks(position)
            content = stored[here.start : here.stop].tobytes()
            found[at] = np.frombuffer(hashlib.blake2b(content, digest_size=found.shape[1]).digest(), np.uint8)
        return found

    def chunk_windows(self, size: int) -> NDArray[np.int64]:
        """The first chunk of the window of `size` chunks that each window of this view is in."""
        if size % self.packing.chunks:
            together = self.packing.chunks
            raise ValueError(
                f"{self!r} has documents of {together} chunks in a row, which are on two sides of a split of the "
                f"cache by {size}; use Split(…, by='chunk', chunks={together}), or a multiple of it, on both"
            )
        return super().chunk_windows(size)

    def recipe(self, layer: str) -> RecipeDocument:
        """The recipe of the stored rows, with the fields and columns of this view."""
        kept = super().recipe(layer)
        if layer != self._base:
            return kept
        fields = {**kept.fields, "sequence_length": self.packing.sequence_length, "long": self.packing.long}
        columns = tuple(column for _, column in self._columns.values())
        return msgspec.structs.replace(kept, fields=fields, columns=columns, fingerprint=self._mark(kept.fingerprint))

    def __repr__(self) -> str:
        length, together = self.packing.sequence_length, self.packing.chunks
        packed = "" if together == 1 else f", {together} chunks packed together"
        return f"<PackedView of {self.stored!r} as {len(self):,} rows of {length:,} tokens{packed}>"

    def __reduce__(self) -> tuple[Any, ...]:
        # Another process need not pack every window to know how many rows it has.
        return PackedView, (self.stored, self.packing, self.windows, self.counts)

    def at_generation(self, number: int) -> Cache:
        return self if number == self.generation.number else PackedView(self.stored.at_generation(number), self.packing)

    def columns_by_layer(self, columns: Sequence[str]) -> dict[str, list[Column]]:
        """None: no block of a file has the rows of this view, so none can be fetched by itself."""
        return {}

    def record(self, layer: str, position: int) -> ChunkRecord:
        raise TypeError(f"{self!r} has no files; ask the cache that it was made from")

    def file_bytes(self, columns: Sequence[str]) -> list[NDArray[np.int64]]:
        """The sizes of the files of each window together, for every layer of these columns."""
        passed = [_edges(sizes) for sizes in self.stored.file_bytes(columns)]
        return [each[self.windows.stops] - each[self.windows.firsts] for each in passed]

    def file_digests(self, positions: NDArray[np.int64], columns: Sequence[str]) -> Iterator[str]:
        counts = self.windows.stops - self.windows.firsts
        return self.stored.file_digests(ranges(self.windows.firsts[positions], counts[positions]), columns)

    def keep_chunk(self, position: int, columns: Sequence[str]) -> bool:
        return all([self.stored.keep_chunk(each, columns) for each in self.windows.chunks(position)])

    def open_chunk(self, position: int, columns: Sequence[str]) -> None:
        for each in self.windows.chunks(position):
            self.stored.open_chunk(each, columns)

    def samples_of(self, row: SupportsIndex) -> list[tuple[int, int]]:
        found = self._documents_at(self._place(np.array([self._number(row)])))
        documents = self.stored.read(found.rows, ["documents"])["documents"]
        assert isinstance(documents, Ragged)
        numbers = [int(documents[at][place, 0]) for at, place in enumerate(found.places.tolist())]
        return list(zip(self._chunks_at(found), numbers, strict=True))

    def _chunks_of(self, row: int) -> list[int]:
        return list(dict.fromkeys(self._chunks_at(self._documents_at(self._place(np.array([row]))))))

    def _chunks_at(self, found: PackedRows) -> list[int]:
        numbers: list[int] = self.stored.chunk_numbers[self.stored.chunk_positions(found.rows)].tolist()
        return numbers

    def allow_passing(self, size: int, columns: Sequence[str]) -> None:
        self.stored.allow_passing(size, columns)

    def close_changed(self) -> None:
        self.stored.close_changed()

    def statistics(self) -> BlockStatistics:
        return self.stored.statistics()

    def packed(self, position: int) -> PackedRows:
        """The documents of the rows of a window, packed again if they are not in memory."""
        return self._tables.get((KIND, position), lambda: self._packed(position))

    def documents_at(self, place: RowLocations) -> PackedRows:
        """The documents of some rows. The columns of a batch are read one after the other: the last rows are kept."""
        kept: tuple[RowLocations, PackedRows] | None = getattr(self._recent, "found", None)
        if kept is None or not all(map(np.array_equal, kept[0], place)):
            kept = self._recent.found = place, self._documents_at(place)
        return kept[1]

    def _documents_at(self, place: RowLocations) -> PackedRows:
        counts, tables = np.zeros(len(place.rows), np.int64), [np.zeros((0, 8), np.int64)]
        firsts = np.zeros(len(place.rows), np.int64)
        passed = 0
        for position, here in by_position(place.positions):
            packed, rows = self.packed(position), place.rows[here]
            counts[here] = packed.edges[rows + 1] - packed.edges[rows]
            firsts[here] = packed.edges[rows]
            tables.append(packed.table.take(ranges(firsts[here], counts[here]), axis=0))
            firsts[here] = passed + np.cumsum(counts[here]) - counts[here]
            passed += len(tables[-1])
        return PackedRows(_edges(counts), np.concatenate(tables).take(ranges(firsts, counts), axis=0))

    def _forget(self) -> None:
        super()._forget()
        self._recent = threading.local()
        self._tables: BlockCache[PackedRows] = BlockCache(self.table_limit)

    def _drop_copy(self, error: ChunkCorrupt) -> None:
        raise error  # the stored cache fetched the chunk again before

    def _value_bytes(self, name: str) -> float:
        column = self.column(name)
        if not column.ragged or not len(self):
            return column.item_bytes
        edges = self.stored.chunk_starts
        rows = int((edges[self.windows.stops] - edges[self.windows.firsts]).sum())
        return self.stored._value_bytes(name) * rows / len(self)

    def _reader(self, name: str) -> ColumnReader:
        reader = self._readers.get(name)
        if reader is None:
            reader = self._readers.setdefault(name, ViewReader(self, self.column(name)))
        return reader

    def _whole(self, name: str, position: int) -> Array | Ragged:
        count = int(self._starts[position + 1] - self._starts[position])
        return self._reader(name).read(RowLocations(np.full(count, position), np.arange(count)))

    def _counted(self) -> "Counts":
        """Pack all windows; as many as fit in memory are kept."""
        rows, cut, dropped = [], 0, 0
        for position in range(len(self._chunks)):
            packed = self.packed(position)
            self.largest_table = max(self.largest_table, packed.nbytes)
            rows.append(len(packed.edges) - 1)
            cut += packed.cut
            dropped += packed.dropped
        return Counts(tuple(rows), cut, dropped)

    def _declare(self, column: Column) -> Column:
        """A column of the view. Rows of a window share their blocks: all are decoded to read some of them."""
        shape = (self.packing.sequence_length,) if column.name == "tokens" else column.shape
        block = int(np.diff(self._starts).max(initial=1))
        return msgspec.structs.replace(column, shape=shape, rows_per_block=max(1, block))

    def _mark(self, kept: str, *windows: list[int]) -> str:
        packing = canonical_json([kept, asdict(self.packing), *windows])
        return hashlib.sha256(packing).hexdigest()[: max(16, len(kept))]

    @staticmethod
    def _check_columns(cache: Cache) -> None:
        if isinstance(cache, PackedView):
            raise SourceInvalid(f"{cache!r} is packed when it is read; pass the cache that it was made from")
        if (kind := cache.recipe(cache.generation.base).kind) != KIND:
            raise SourceInvalid(f"'{cache.root}' is a cache of {kind}; only one of chat can be packed again")
        if cache.layers != (cache.generation.base,):
            raise SourceInvalid(f"'{cache.root}' was opened with further layers, whose rows are not packed again")
        for name, (dtypes, shape, ragged) in _KNOWN.items():
            column = cache.column(name) if name in cache.columns else None
            if (
                column is None
                or column.dtype not in dtypes
                or column.ragged != ragged
                or not _fits(column.shape, shape)
            ):
                raise SourceInvalid(f"'{cache.root}' has no column '{name}' as a chat cache has it")

    def _packed(self, position: int) -> PackedRows:
        width, capacity = int(self.stored.column("tokens").shape[0]), self.packing.sequence_length
        chunks = self.windows.chunks(position)
        parts = [self._stored(each, width) for each in chunks]
        own = [part[4][:, 0].copy() for part in parts]  # the numbers in each chunk, which names have
        names = ChunkNames([(self._path(each), numbers) for each, numbers in zip(chunks, own, strict=True)])
        self._number_samples(chunks, parts)
        lengths, rows, starts, places, identity = map(np.concatenate, zip(*parts, strict=True))
        numbers = np.cumsum(np.diff(identity[:, 0], prepend=identity[:1, 0]) != 0)  # without gaps
        made = Conversations((), starts, lengths, _NO_SPANS, np.zeros(len(lengths), np.int64), numbers, names)
        last = np.full(len(lengths), -1, np.int64)
        if (lengths > capacity).any():
            spans = [self._spans(each, width) for each in chunks]
            made.spans, made.span_counts = map(np.concatenate, zip(*spans, strict=True))
        cut = cut_long(made, capacity, self.packing.long)
        if cut.lengths is not made.lengths:
            last = last_turns(made, *kept_spans(made, cut))
        pieces = split_documents(cut.lengths, capacity)
        bins = pack_best_fit(pieces.length, capacity)
        placed = pieces.document[np.argsort(bins, kind="stable")]
        edges = _edges(np.bincount(bins)) if len(bins) else np.zeros(1, np.int64)
        taken = cut.lengths[placed]
        passed = np.cumsum(taken) - taken
        first = np.repeat(passed[edges[:-1]] if len(taken) else passed, np.diff(edges))
        of_documents = np.column_stack([rows, starts, places, cut.lengths, identity, last])
        table = np.insert(of_documents[placed], 4, passed - first, axis=1)
        return PackedRows(edges, table, cut.truncated, cut.dropped)

    def _number_samples(self, chunks: range, parts: Sequence[tuple[Array, ...]]) -> None:
        """Count the samples of a window: those of a chunk come after those of the chunks before it."""
        passed = 0
        for position, (*_, identity) in zip(chunks, parts, strict=True):
            own = 1 + int(identity[:, 0].max(initial=-1))
            if passed + own > MOST_NUMBER:
                raise self._corrupt(position, f"its window has a sample number above {MOST_NUMBER:,}")
            identity[:, 0] += passed
            passed += own

    def _stored(self, position: int, width: int) -> tuple[Array, Array, Array, Array, Array]:
        """The documents of a stored chunk in the order of conversations: lengths, rows, starts, places, identity."""
        read = self.stored.chunk(position, ["seq_lens", "documents"])
        lengths, documents = read["seq_lens"], read["documents"]
        assert isinstance(lengths, Ragged)
        assert isinstance(documents, Ragged)
        try:
            found = stored_documents(lengths, documents, width)
        except ValueError as error:
            raise self._corrupt(position, str(error)) from error
        order, row = found.order, found.row[found.order]
        place = (np.arange(len(order)) - lengths.offsets.astype(np.int64)[found.row])[order]
        first = int(self.stored.chunk_starts[position])
        return (
            found.lengths[order],
            first + row,
            found.starts[order],
            place,
            documents.values[order].astype(np.int64),
        )

    def _spans(self, position: int, width: int) -> tuple[Array, Array]:
        """The spans of a stored chunk in the order of `_stored`, counted from the beginning of their documents."""
        read = self.stored.chunk(position, ["seq_lens", "documents", "spans"])
        lengths, documents, spans = (read[name] for name in ("seq_lens", "documents", "spans"))
        assert isinstance(lengths, Ragged)
        assert isinstance(documents, Ragged)
        assert isinstance(spans, Ragged)
        try:
            return stored_documents(lengths, documents, width).spans(spans, width)
        except ValueError as error:
            raise self._corrupt(position, str(error)) from error

    def corrupt_row(self, row: int, problem: str) -> ChunkCorrupt:
        """The error for a stored row."""
        (position,) = self.stored.chunk_positions(np.array([row]))
        return self._corrupt(int(position), problem)

    def _corrupt(self, position: int, problem: str) -> ChunkCorrupt:
        return ChunkCorrupt(self.root, self._base, int(self.stored.chunk_numbers[position]), problem)

    def _path(self, position: int) -> str:
        return layout.chunk(self._base, int(self.stored.chunk_numbers[position]))


class ViewReader:
    """Reads a column of a view from the stored rows that documents lie in."""

    def __init__(self, view: PackedView, column: Column) -> None:
        self._view, self._column = view, column
        gather: dict[str, Callable[[PackedRows], Array | Ragged]] = {
            "tokens": self._tokens,
            "seq_lens": lambda found: Ragged(found.lengths.astype(np.uint32), found.edges),
            "documents": lambda found: Ragged(found.identity.astype(np.uint32), found.edges),
            "spans": self._spans,
            "last_turn": self._last_turns,
        }
        self._gather = gather[column.name]

    def read(self, place: RowLocations) -> Array | Ragged:
        return self._gather(self._view.documents_at(place))

    def read_numbers(self, numbers: NDArray[np.int64], starts: NDArray[np.int64]) -> None:
        return None

    def read_slices(self, place: RowLocations, starts: NDArray[np.int64], length: int) -> Array:
        return slices_of(self._column, self.read(place), starts, length)

    def read_batches(self, place: RowLocations, size: int) -> Iterator[Array | Ragged]:
        return (self.read(place.part(some)) for some in slices(len(place.rows), size))

    def locate_batches(self, place: RowLocations, size: int) -> Iterator[RowAddresses]:
        return (RowAddresses.of(self._column, rows) for rows in self.read_batches(place, size))

    def views(self, place: RowLocations) -> Iterator[Array]:
        for rows in self.read_batches(place, 1):
            yield rows[0]

    def _tokens(self, found: PackedRows) -> Array:
        length, stored = self._column.shape[0], self._view.stored
        count = len(found.edges) - 1
        tokens = np.full((count, length), self._view.pad, self._column.array_dtype)
        targets = np.repeat(np.arange(count) * length, np.diff(found.edges)) + found.begins
        width = stored.column("tokens").shape[0]
        step = max(1, PIECE_BYTES // (width * tokens.itemsize))
        for some in slices(len(found.rows), step):
            few = len(found.rows) <= step
            rows, which = found.stored if few else np.unique(found.rows[some], return_inverse=True)
            source = stored.read(rows, ["tokens"])["tokens"]
            assert not isinstance(source, Ragged)
            starts = which * width + found.starts[some]
            copy_runs(tokens.reshape(-1), source.reshape(-1), targets[some], starts, found.lengths[some])
        return tokens

    def _spans(self, found: PackedRows) -> Ragged:
        rows, which = found.stored
        spans = self._view.stored.read(rows, ["spans"])["spans"]
        assert isinstance(spans, Ragged)
        width = 1 + int(self._view.stored.column("tokens").shape[0])
        row = np.repeat(np.arange(len(rows)), spans.lengths.astype(np.int64))
        keys = row * width + spans.values[:, 0]
        wrong = row[1:][keys[1:] < keys[:-1]]
        if len(wrong):
            raise self._view.corrupt_row(int(rows[wrong[0]]), "its spans are not in the order of tokens")
        begins = which * width + found.starts
        first = np.searchsorted(keys, begins)
        counts = np.searchsorted(keys, begins + found.lengths) - first
        values = spans.values.take(ranges(first, counts), axis=0)
        document = np.repeat(np.arange(len(counts)), counts)
        stops = (found.starts + found.lengths)[document]
        wrong = document[(values[:, 1] > stops) | (values[:, 1] < values[:, 0])]
        if len(wrong):
            raise self._view.corrupt_row(int(found.rows[wrong[0]]), "it has a span that crosses documents")
        values[:, :2] += (found.begins - found.starts).astype(np.uint32)[document][:, None]
        return Ragged(values, _edges(counts)[found.edges])

    def _last_turns(self, found: PackedRows) -> Ragged:
        if not len(found.last_turn) or found.last_turn.min() >= 0:
            return Ragged(found.last_turn.astype(np.uint32), found.edges)
        rows, which = found.stored
        stored = self._view.stored.read(rows, ["last_turn"])["last_turn"]
        assert isinstance(stored, Ragged)
        outside = found.places >= stored.lengths.astype(np.int64)[which]
        if outside.any():
            raise self._view.corrupt_row(int(found.rows[outside][0]), "it has fewer last turns than documents")
        kept = stored.values[stored.offsets.astype(np.int64)[which] + found.places]
        return Ragged(np.where(found.last_turn < 0, kept, found.last_turn).astype(np.uint32), found.edges)


# dtypes, shape of a value (None: any length), ragged
_KNOWN: dict[str, tuple[tuple[str, ...], tuple[int | None, ...], bool]] = {
    "tokens": (("uint16", "uint32"), (None,), False),
    "seq_lens": (("uint32",), (), True),
    "documents": (("uint32",), (2,), True),
    "spans": (("uint32",), (5,), True),
    "last_turn": (("uint32",), (), True),
}
_NO_SPANS = np.zeros((0, 5), np.uint32)


def _edges(counts: Array) -> Array:
    return np.concatenate([[0], np.cumsum(counts, dtype=np.int64)])


def _fits(shape: tuple[int, ...], wanted: tuple[int | None, ...]) -> bool:
    return len(shape) == len(wanted) and all(want in (None, side) for side, want in zip(shape, wanted, strict=True))


def _padding(cache: Cache) -> int:
    """The token that the rows of a cache are padded with; a build writes its number into the recipe."""
    pad, most = cache.recipe(cache.generation.base).fields.get("pad"), np.iinfo(cache.column("tokens").array_dtype).max
    if not isinstance(pad, int) or not 0 <= pad <= most:
        raise SourceInvalid(f"the recipe of '{cache.root}' has the padding {str(pad)[:80]!r}, which is not a token")
    return pad


def _checked_packing(
    cache: Cache, sequence_length: SupportsIndex | None, long: Long | None, chunks: SupportsIndex
) -> Packing:
    fields = cache.recipe(cache.generation.base).fields
    wanted = fields.get("sequence_length") if sequence_length is None else sequence_length
    length = _checked_count("sequence_length", wanted, MOST_TOKENS)
    policy = fields.get("long", "error") if long is None else long
    if policy not in ("error", "drop", "truncate"):
        raise ValueError(f"long must be 'error', 'drop' or 'truncate' (got {policy!r})")
    return Packing(length, policy, _checked_count("chunks", chunks, MOST_CHUNKS))


def _checked_count(name: str, passed: Any, most: int) -> int:
    try:
        count = 0 if isinstance(passed, bool) else operator.index(passed)
    except TypeError:
        count = 0
    if not 1 <= count <= most:
        raise ValueError(f"{name} must be a whole number from 1 to {most:,} (got {passed!r})")
    return count
