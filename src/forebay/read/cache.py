"""Read the rows of a pinned generation.

    row number ──starts──▶ (position of chunk, row in chunk) ──per column──▶ address or block ──▶ gathered array

Row numbers count the rows of the base layer in the pinned generation; other layers are joined chunk by chunk. A pickled
`Cache` reopens in the other process; a forked one forgets what the parent had mapped and checked.
"""

import hashlib
import operator
import os
import threading
import weakref
from collections.abc import Callable, Iterator, Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from contextlib import suppress
from dataclasses import dataclass
from functools import cached_property, partial
from importlib import import_module
from itertools import pairwise
from typing import Any, SupportsIndex, TypeVar, overload

import numpy as np
from numpy.typing import ArrayLike, NDArray

from forebay.cache.catalog import (
    column_homes,
    expected,
    layer_columns,
    load_generation,
    open_chunk,
    presence_name,
    published_record,
    read_column,
    shared_column,
)
from forebay.cache.plan import load_plan
from forebay.cache.records import html_table
from forebay.columns import Array, Column, Ragged, join
from forebay.errors import (
    ChunkCorrupt,
    ChunkMissing,
    ColumnNotFound,
    ForebayError,
    IndexCorrupt,
    LayerIncomplete,
    LayerNotFound,
    LayersShareColumn,
    PinMismatch,
    TokenizerUnusable,
)
from forebay.fields import as_bytes
from forebay.format import layout
from forebay.format.chunk import MAX_BLOCK_BYTES, MAX_COUNT, MAX_HEAD_BYTES, SUM_BYTES, ChunkFile, ChunkRecord
from forebay.format.generation import Generation
from forebay.format.tensors import unseal
from forebay.read.chunk_maps import MAX_MAPS, ChunkFinder, Maps, RowLocations
from forebay.read.column_readers import ColumnReader, PresenceReader, column_reader
from forebay.read.gather import BlockStatistics, DecodedBlocks, RowAddresses
from forebay.recipe import RecipeDocument
from forebay.source import Part
from forebay.store import LocalStore, Root, open_store
from forebay.store.base import BadCopy, Fetching, Missing, Store, is_url
from forebay.store.tiered import TieredStore

Result = TypeVar("Result")
DEFAULT_MEMORY = 256 * 1024 * 1024
_PIECE_ROWS = 4096
IN_MEMORY_BYTES = 1 << 30  # of chunks of a layer, where their store has no files
_USUAL_RATIO = 3  # of compression, for an estimate
_open_caches: "weakref.WeakSet[Cache]" = weakref.WeakSet()


@dataclass(frozen=True, slots=True)
class Options:
    """How a cache is read; does not change what is read."""

    memory: int = DEFAULT_MEMORY
    threads: int = 0
    max_maps: int = MAX_MAPS
    max_block_bytes: int = MAX_BLOCK_BYTES


@dataclass(frozen=True, slots=True)
class RowId:
    """The permanent name of a row."""

    chunk: int
    row: int


@dataclass(frozen=True, slots=True, repr=False)
class Origin:
    """Where a row came from: its place in the cache, its sample's id, and the parts of source files."""

    chunk: int
    row: int
    sample: str  # empty where the cache keeps no ids
    parts: tuple[Part, ...]

    @property
    def files(self) -> tuple[str, ...]:
        return tuple(dict.fromkeys(part.file.path for part in self.parts))

    def __repr__(self) -> str:
        """The ranges of files, without what tells whether a file changed: times, inodes, digests."""
        ranges = ", ".join(f"{part.file.path}[{part.start}:{part.stop}]" for part in self.parts)
        return f"Origin(chunk={self.chunk}, row={self.row}, sample={self.sample!r}, parts=({ranges}))"


class Cache:
    """The rows of a pinned generation."""

    packed_chunks: int = 0  # how many have their documents packed together when rows are read; 0: rows are as stored

    def __init__(
        self,
        store: Store,
        generation: Generation,
        layers: tuple[str, ...],
        options: Options,
        *,
        pinned_explicitly: bool = False,
    ) -> None:
        self.store = store
        self.generation = generation
        self.pinned_explicitly = (
            pinned_explicitly  # by its number: not "the newest", which another process may see newer
        )
        self.layers = layers
        self._options = options
        self._chunks = _common_chunks(generation, layers)
        self._base = generation.base  # parsed once: every read asks for it
        base = generation.table(self._base)
        rows = base.rows[np.searchsorted(base.chunks, self._chunks)]
        if len(rows) and not 0 <= rows.min() <= rows.max() <= MAX_COUNT:
            raise IndexCorrupt(
                self.root, layout.generation(generation.number), "a chunk has an impossible number of rows"
            )
        self._starts = np.concatenate([[0], np.cumsum(rows, dtype=np.int64)])
        self._count = int(self._starts[-1])
        self._finder = ChunkFinder(self._starts)
        self._declared = {name: _declared(generation, name) for name in generation.recipes}
        recipes = {name: generation.recipe(name).columns for name in generation.recipes}
        if shared := shared_column(recipes, self._base):
            raise LayersShareColumn(self.root, *shared)
        self._columns = column_homes(recipes, self._base)
        self._requested: dict[tuple[str, ...] | None, list[str]] = {None: list(self.default_columns)}
        self._forget()
        _open_caches.add(self)

    @property
    def root(self) -> str:
        return self.store.address

    @property
    def columns(self) -> tuple[str, ...]:
        """Every column that can be read; the presence bits of a layer above the base are `<layer>.present`."""
        return tuple(self._columns)

    @property
    def default_columns(self) -> tuple[str, ...]:
        """The columns that are read by default: those of the opened layers."""
        return tuple(name for name, (layer, _) in self._columns.items() if layer in self.layers)

    @property
    def chunk_numbers(self) -> NDArray[np.int64]:
        """The chunks of the rows, in the order of rows."""
        return self._chunks

    @property
    def chunk_starts(self) -> NDArray[np.int64]:
        """The first row number of each chunk, and at the end the number of rows."""
        return self._starts

    @cached_property
    def content_digest(self) -> str:
        """A digest of the chunks of the rows; differs for copies of a cache that grew differently."""
        table = self.generation.table(self.generation.base)
        contents = table.digests["content"][np.searchsorted(table.chunks, self._chunks)]
        digest = hashlib.blake2b(self._chunks.astype("<i8").tobytes(), digest_size=8)
        digest.update(contents.tobytes())
        return digest.hexdigest()

    def content_digests(self, layer: str, chunks: NDArray[np.int64]) -> Array:
        """The digests of some chunks of a layer, by their numbers."""
        table = self.generation.table(layer)
        return table.digests["content"][np.searchsorted(table.chunks, chunks)]

    def column(self, name: str) -> Column:
        """The declaration of a column."""
        return self._find(name)[1]

    def chunk_windows(self, size: int) -> NDArray[np.int64]:
        """The first chunk of the window that each chunk of the rows is in.

        A window is `size` neighbouring chunks that were planned together, fewer where such a plan ends, so that none
        gets more chunks when the cache grows.
        """
        if size == 1:
            return self._chunks
        firsts = self._planned[:-1]
        first = firsts[np.searchsorted(firsts, self._chunks, side="right") - 1]
        windows: NDArray[np.int64] = first + (self._chunks - first) // size * size
        return windows

    def planned_in_windows(self, windows: NDArray[np.int64], size: int) -> NDArray[np.int64]:
        """How many chunks are planned in each window of `size`, by the numbers of their first chunks."""
        if size == 1:
            return np.ones_like(windows)
        ends = self._planned[np.searchsorted(self._planned, windows, side="right")]
        planned: NDArray[np.int64] = np.minimum(size, ends - windows)
        return planned

    @cached_property
    def _planned(self) -> NDArray[np.int64]:
        """The first chunk of every segment of the plan that has chunks, and at the end the number of chunks."""
        plan, listed = load_plan(self.store), self.generation.plan
        for number, digest in enumerate(listed):
            if plan.digests[number : number + 1] != (digest,):
                key = layout.plan_segment(number)
                raise IndexCorrupt(self.root, key, "it is not the one this generation was published with")
        segments = plan.first(len(listed)).segments
        edges = [segment.first_chunk for segment in segments if segment.added]
        planned = np.array([*edges, len(plan.first(len(listed)))], np.int64)
        if len(self._chunks) and not planned[0] <= self._chunks[0] <= self._chunks[-1] < planned[-1]:
            raise IndexCorrupt(self.root, layout.generation(self.generation.number), "it lists a chunk without a plan")
        return planned

    def row_bytes(self, columns: Sequence[str]) -> int:
        """Bytes of a row of these columns in memory; ragged columns use the mean of the first chunk that has rows.

        For a remote cache, the size of that chunk's file stands for a ragged column: no chunk is fetched for it.
        """
        return round(sum(self._value_bytes(name) for name in columns))

    def recipe(self, layer: str) -> RecipeDocument:
        return self.generation.recipe(self._layer(layer))

    def constants(self, layer: str) -> dict[str, Array]:
        """The columns of a layer that are the same for all rows."""
        if self._layer(layer) not in self.generation.constants:
            return {}
        digest = self.generation.constants[layer]
        problem = "it is gone"
        for key in (layout.constants(layer), layout.dropped_constants(layer, digest)):
            with suppress(Missing):
                view = self.store.view(key)
                if hashlib.sha256(view).hexdigest() == digest:
                    return unseal(view, self.root, key, "constants")[1]
                problem = "it is not the one this generation was published with"
        raise IndexCorrupt(self.root, layout.constants(layer), problem)

    def __len__(self) -> int:
        return self._count

    def __repr__(self) -> str:
        return (
            f"<Cache '{self.root}', generation {self.generation.number}, {len(self):,} rows, {', '.join(self.layers)}>"
        )

    def _repr_html_(self) -> str:
        columns = {name: _described(self.column(name)) for name in self.columns}
        facts = {"root": self.root, "generation": self.generation.number, "rows": len(self), "layers": self.layers}
        return html_table("Cache", facts | {"columns": columns})

    @overload
    def __getitem__(self, row: SupportsIndex) -> dict[str, Array]: ...

    @overload
    def __getitem__(self, row: slice | Sequence[int] | NDArray[Any]) -> dict[str, Array | Ragged]: ...

    def __getitem__(
        self, row: SupportsIndex | slice | Sequence[int] | NDArray[Any]
    ) -> dict[str, Array] | dict[str, Array | Ragged]:
        """One row, or the rows of a slice or list as `read` returns them: every column of the opened layers.

        Negative numbers count from the end.
        """
        if isinstance(row, slice):
            return self.read(np.arange(*row.indices(len(self))))
        if isinstance(row, str):
            raise TypeError(f"a cache is indexed by rows: cache[17][{row!r}], or cache.read([17, 18], [{row!r}])")
        if isinstance(row, SupportsIndex) and not (isinstance(row, np.ndarray) and row.ndim):
            return {name: values[0] for name, values in self.read([self._number(row)]).items()}
        numbers, count = np.asarray(row), len(self)
        if numbers.dtype.kind == "i":
            numbers = np.where((numbers < 0) & (numbers >= -count), numbers + count, numbers)
        return self.read(numbers)

    def text(self, row: SupportsIndex) -> list[str]:
        """The text of a row of packed tokens: one string for each document, or part of one, in the row.

        Control tokens and padding are left out. The tokenizer is the one that the cache keeps.
        """
        kept = self.recipe(self.generation.base)
        if kept.kind not in ("tokens", "chat"):
            raise TypeError(f"'{self.root}' holds {kept.kind}, not tokens; read the row itself: cache[{row}]")
        read = self.read([self._number(row)], ["tokens", "seq_lens"])
        tokens, stops = read["tokens"][0], np.cumsum(read["seq_lens"][0], dtype=np.int64).tolist()
        room = import_module("forebay.tokens")  # which takes long to import, and no other method needs
        vocabulary = room.Vocabulary(*self.kept_tokenizer())
        return [room.decode(vocabulary, tokens[start:stop]) for start, stop in pairwise([0, *stops])]

    def kept_tokenizer(self) -> tuple[str, bytes]:
        """The name and the content of the tokenizer that a cache of tokens keeps."""
        layer = self.generation.base
        name, kept = self.recipe(layer).fields.get("tokenizer"), self.constants(layer).get("tokenizer")
        if name is None or kept is None:
            raise TokenizerUnusable(self.root, "the cache keeps no tokenizer; read its rows as numbers")
        return str(name), kept.tobytes()

    def origin(self, row: SupportsIndex) -> Origin:
        """Where a row came from: its sample's id, where the cache keeps ids, and the parts of source files.

        Without ids, as in a row of packed tokens, the parts are those of its whole chunk;
        `fb.peek(root, [row], source=source)` names the documents.
        """
        number = self._number(row)
        (name,), column = self.row_ids([number]), self.recipe(self.generation.base).sample_ids
        sample = self.read([number], [column])[column][0].tobytes().decode(errors="surrogateescape") if column else ""
        plan = load_plan(self.store).first(len(self.generation.plan))
        parts = [part for chunk in self._chunks_of(number) for part in plan.parts(chunk)]
        own = [part for part in parts if part.file.path in (sample, sample.rpartition("@")[0])]
        return Origin(name.chunk, name.row, sample, tuple(own or parts))

    def samples_of(self, row: SupportsIndex) -> list[tuple[int, int]]:
        """Return the chunk of every document in a row of packed tokens, and the number of its sample in that chunk."""
        number = self._number(row)
        (chunk,) = self._chunks_of(number)
        return [(chunk, sample) for sample in self.read([number], ["documents"])["documents"][0][:, 0].tolist()]

    def _chunks_of(self, row: int) -> list[int]:
        """The chunks that a row is made from."""
        return [name.chunk for name in self.row_ids([row])]

    def __iter__(self) -> Iterator[dict[str, Array]]:
        """Every row, chunk by chunk."""
        for columns in self.chunks():
            count = len(next(iter(columns.values())))
            for row in range(count):
                yield {name: values[row] for name, values in columns.items()}

    def read(self, rows: ArrayLike, columns: Sequence[str] | None = None) -> dict[str, Array | Ragged]:
        """Some rows, in the order passed, repeats allowed: one array, or one `Ragged`, per column.

        A negative number is an `IndexError`: in computed numbers it is a mistake, and the last row would hide it.
        """
        numbers = _whole_numbers(rows)
        while True:
            try:
                return self._read(numbers, columns)
            except ChunkCorrupt as error:
                self._drop_copy(error)

    def _read(self, numbers: NDArray[np.int64], columns: Sequence[str] | None) -> dict[str, Array | Ragged]:
        wanted, step = self._wanted(columns), self._step
        if len(numbers) <= step:
            return self._read_together(np.ascontiguousarray(numbers), wanted)
        readers = [(name, self._reader(name)) for name in wanted]
        places = [self._place(numbers[at : at + step]) for at in range(0, len(numbers), step)]
        return {name: join(self._map(reader.read, places)) for name, reader in readers}

    def _read_together(self, numbers: NDArray[np.int64], wanted: list[str]) -> dict[str, Array | Ragged]:
        place = None if wanted else self._place(numbers)  # rows are checked also where nothing of them is read
        read: dict[str, Array | Ragged] = {}
        for name in wanted:
            reader = self._reader(name)
            rows: Array | Ragged | None = reader.read_numbers(numbers, self._starts)
            if rows is None:
                place = place or self._place(numbers)
                rows = reader.read(place)
            read[name] = rows
        return read

    def read_batches(
        self, rows: ArrayLike, size: int, columns: Sequence[str] | None = None
    ) -> Iterator[dict[str, Array | Ragged]]:
        """As `read`, in batches of `size` rows: located and checked together, copied one batch after the other.

        Located rows keep their maps open until they are copied. If the cache has more chunks than maps, every batch is
        located separately.
        """
        numbers = self._row_numbers(rows)
        names = self._wanted(columns)
        if not self._keeps_maps:
            yield from (self.read(numbers[at : at + size], columns) for at in range(0, max(1, len(numbers)), size))
            return
        readers = [self._reader(name).read_batches for name in names]
        yield from (dict(zip(names, batch, strict=True)) for batch in self._by_steps(numbers, size, readers))

    def locate_batches(self, rows: ArrayLike, size: int, columns: Sequence[str]) -> Iterator[tuple[RowAddresses, ...]]:
        """As `read_batches`, without copying: where the rows of each column are, for compiled code.

        The addresses are valid until the iterator continues.
        """
        numbers = self._row_numbers(rows)
        if self._keeps_maps:
            yield from self._by_steps(numbers, size, [self._reader(name).locate_batches for name in columns])
            return
        for at in range(0, max(1, len(numbers)), size):
            read = self.read(numbers[at : at + size], columns)
            yield tuple(RowAddresses.of(self.column(name), read[name]) for name in columns)

    @property
    def _keeps_maps(self) -> bool:
        """Whether the maps of all chunks can stay open, so that any number of rows can be located together."""
        return len(self._chunks) <= self._map_limit

    def _by_steps(
        self, numbers: NDArray[np.int64], size: int, readers: Sequence[Callable[[RowLocations, int], Iterator[Result]]]
    ) -> Iterator[tuple[Result, ...]]:
        """Batches of `size` rows of every reader, located many at a time."""
        step = max(1, _PIECE_ROWS // size) * size
        done = -1  # no rows are one empty batch
        while done < len(numbers):
            done = max(0, done)
            place = self._place(numbers[done : done + step])
            batches = zip(*(read(place, size) for read in readers), strict=True)
            while (batch := self._next_or_dropped(batches)) is not None:
                yield batch
                done += size

    def _next_or_dropped(self, batches: Iterator[Result]) -> Result | None:
        """The next batch; None at the end, and where a bad copy of a remote chunk was dropped."""
        try:
            return next(batches, None)
        except ChunkCorrupt as error:
            self._drop_copy(error)
            return None

    def read_slices(
        self, rows: ArrayLike, columns: Sequence[str], starts: ArrayLike, length: int
    ) -> dict[str, Array | Ragged]:
        """`length` items of the first axis of fixed columns, from a different start for each row.

        For a column `[timesteps, …]` these are the two timesteps around t; once the blocks are checked, other timesteps
        are not read. Presence bits are included as with `read`.
        """
        numbers, firsts, step = self._row_numbers(rows), np.asarray(starts, np.int64), self._step
        self._check_slices(columns, numbers, firsts, length)
        spans = [slice(at, at + step) for at in range(0, max(1, len(numbers)), step)]
        parts = [self._repeated(partial(self._slices, columns, numbers[some], firsts[some], length)) for some in spans]
        if len(parts) == 1:
            return parts[0]
        return {name: join([part[name] for part in parts]) for name in parts[0]}

    def views(self, rows: ArrayLike, column: str) -> Iterator[Array]:
        """Rows of a column one by one, read-only, each checked when it is yielded.

        Rows of a ragged column are not copied: they are views of mapped files or of decoded blocks.
        """
        numbers, reader, step = self._row_numbers(rows), self._reader(column), self._step
        return self._views(numbers, reader, step)

    def _views(self, numbers: NDArray[np.int64], reader: ColumnReader, step: int) -> Iterator[Array]:
        done = 0
        while done < len(numbers):
            try:
                for view in reader.views(self._place(numbers[done : done + step])):
                    yield view
                    done += 1
            except ChunkCorrupt as error:
                self._drop_copy(error)

    def chunks(self, columns: Sequence[str] | None = None) -> Iterator[dict[str, Array | Ragged]]:
        """All rows, chunk by chunk; uncompressed columns are views of the file, not copies."""
        for position in range(len(self._chunks)):
            yield self.chunk(position, columns)

    def chunk(self, position: int, columns: Sequence[str] | None = None) -> dict[str, Array | Ragged]:
        """All rows of the chunk at an index into `chunk_numbers`, as `chunks` yields them."""
        wanted = self._wanted(columns)
        return {name: self._repeated(partial(self._whole, name, position)) for name in wanted}

    def at_generation(self, number: int) -> "Cache":
        """The same cache pinned to another generation."""
        return self if number == self.generation.number else _reopen(self.store, number, self.layers, self._options)

    @cached_property
    def is_remote(self) -> bool:
        """Whether chunks are fetched when they are needed."""
        return is_url(self.root) or isinstance(self.store, Fetching)

    def chunk_positions(self, rows: NDArray[np.int64]) -> NDArray[np.int64]:
        """Which chunk each row is in, as an index into `chunk_numbers`."""
        return self._finder.find(rows)

    def chunk_bytes(self, columns: Sequence[str]) -> NDArray[np.int64]:
        """The size of each chunk of the rows, in the layers of these columns together."""
        return sum(self.file_bytes(columns), np.zeros(len(self._chunks), np.int64))

    def file_bytes(self, columns: Sequence[str]) -> list[NDArray[np.int64]]:
        """The sizes of the files of each chunk, for every layer of these columns."""
        tables = [self.generation.table(layer) for layer in self._layers_of(columns)]
        return [table.numbers["size"][np.searchsorted(table.chunks, self._chunks)] for table in tables]

    def columns_by_layer(self, columns: Sequence[str]) -> dict[str, list[Column]]:
        """The columns that are read for these, presence bits included, by the layer whose files they are in."""
        found: dict[str, list[Column]] = {}
        for name in self._wanted(columns):
            layer, column = self._find(name)
            found.setdefault(layer, []).append(column)
        return found

    def declared(self, layer: str) -> tuple[Column, ...]:
        """The columns of a layer's files."""
        return self._declared[layer]

    def record(self, layer: str, position: int) -> ChunkRecord:
        """What the generation says of a layer's file of a chunk."""
        return _record_at(self.root, self.generation, layer, int(self._chunks[position]))

    def with_files(self, files: Mapping[tuple[str, int], ChunkFile]) -> "Cache":
        """Another reader of the same rows, which has these files of (layer, position of the chunk) open."""
        again = Cache(self.store, self.generation, self.layers, self._options)
        for (layer, position), file in files.items():
            again._layer_maps(layer).put(position, file)
        return again

    def open_chunk(self, position: int, columns: Sequence[str]) -> None:
        """Open the files of a chunk that these columns are in, and so fetch those that are not local."""
        for layer in self._layers_of(columns):
            self._repeated(partial(self._layer_maps(layer).get, position))

    def keep_chunk(self, position: int, columns: Sequence[str]) -> bool:
        """Fetch the files of a chunk into the tier; return False if one is not admitted, or there is no tier."""
        if not isinstance(self.store, TieredStore):
            return False
        return all([self._keep(self.store, layer, position) for layer in self._layers_of(columns)])

    def kept_digests(self) -> frozenset[str]:
        """The SHA-256 of the files that a tier keeps of this cache; none where there is no tier."""
        return self.store.kept_digests() if isinstance(self.store, TieredStore) else frozenset()

    def file_digests(self, positions: NDArray[np.int64], columns: Sequence[str]) -> Iterator[str]:
        """The SHA-256 of the files of some chunks that these columns are in."""
        for layer in self._layers_of(columns):
            table = self.generation.table(layer)
            for digest in table.digests["sha256"][np.searchsorted(table.chunks, self._chunks[positions])]:
                yield digest.tobytes().hex()

    def _keep(self, store: TieredStore, layer: str, position: int) -> bool:
        record = self.record(layer, position)
        try:
            return store.keep(layout.chunk(layer, record.chunk, record.revision), expected(record))
        except Missing as error:
            raise ChunkMissing(self.root, layer, record.chunk) from error
        except BadCopy as error:
            raise ChunkCorrupt(self.root, layer, record.chunk, error.problem) from error

    def allow_passing(self, size: int, columns: Sequence[str]) -> None:
        """Keep up to `size` bytes of chunks open that are in no file, if that is more than by default."""
        for layer in self._layers_of(columns):
            maps = self._layer_maps(layer)
            maps.passing_bytes = max(maps.passing_bytes, size)

    def row_ids(self, rows: ArrayLike) -> list[RowId]:
        """The permanent names of some rows."""
        place = self._place(self._row_numbers(rows))
        chunks = self._chunks[place.positions].tolist()
        return [RowId(chunk, row) for chunk, row in zip(chunks, place.rows.tolist(), strict=True)]

    def statistics(self) -> BlockStatistics:
        """Hits, misses and size of the cache of decoded blocks."""
        return self._blocks.statistics()

    def __reduce__(self) -> tuple[Any, ...]:
        # Another process gets the address, not the maps and decoded blocks.
        return (_reopen, (self.store, self.generation.number, self.layers, self._options, self.generation.digest))

    def _forget(self) -> None:
        """Start with nothing mapped, decoded or checked: in a new cache or a forked process."""
        self._blocks = DecodedBlocks(self._options.memory)
        self._dropped: set[tuple[str, int, int]] = set()
        self._maps: dict[str, Maps] = {}
        self._readers: dict[str, ColumnReader] = {}

    def _repeated(self, call: Callable[[], Result]) -> Result:
        """Return what `call` returns, called again if it found a bad copy of a remote chunk, which is fetched anew."""
        while True:
            try:
                return call()
            except ChunkCorrupt as error:
                self._drop_copy(error)

    def _drop_copy(self, error: ChunkCorrupt) -> None:
        """Make the store drop its copy of a bad chunk; raise where there is none, or this thread dropped it before."""
        name = (error.layer, error.chunk, threading.get_ident())  # another thread may have met the same copy
        if not self.is_remote or isinstance(error.__cause__, BadCopy) or name in self._dropped:
            raise error
        record = published_record(self.generation, error.layer, error.chunk)
        if record is None:
            raise error
        self._dropped.add(name)
        self.store.reject(layout.chunk(error.layer, error.chunk, record.revision), error.problem)
        self._layer_maps(error.layer).close(int(np.searchsorted(self._chunks, error.chunk)))

    def _layers_of(self, columns: Sequence[str]) -> list[str]:
        return list(dict.fromkeys(self._find(name)[0] for name in columns))

    def _has_no_file(self, layer: str, position: int) -> bool:
        record = published_record(self.generation, layer, int(self._chunks[position]))
        return record is not None and self.store.local_path(layout.chunk(layer, record.chunk, record.revision)) is None

    @property
    def _step(self) -> int:
        """Rows that are located at once: at most an eighth of the maps, so that none is closed while in use."""
        return min(_PIECE_ROWS, max(1, self._map_limit // 8))

    @property
    def _map_limit(self) -> int:
        """The smallest map limit of a layer; other open caches may leave less than `max_maps`."""
        count, least = len(self._chunks), None
        for maps in self._maps.values():  # every read comes here: `min` of a generator takes longer
            if maps.limit < count and (least is None or maps.limit < least):
                least = maps.limit
        return self._options.max_maps if least is None else least

    def _map(self, call: Any, places: list[RowLocations]) -> list[Array | Ragged]:
        if self._options.threads < 2:
            return [call(place) for place in places]
        with ThreadPoolExecutor(self._options.threads) as pool:
            return list(pool.map(call, places))

    def _number(self, row: SupportsIndex) -> int:
        """A row's number; negative ones count from the end."""
        count, number = len(self), operator.index(row)
        if not -count <= number < count:
            raise IndexError(f"there is no row {number}; '{self.root}' has {count:,} rows")
        return number % count

    def _row_numbers(self, rows: ArrayLike) -> NDArray[np.int64]:
        numbers = _whole_numbers(rows)
        # As unsigned, a negative number is larger than any row.
        if len(numbers) and numbers.view(np.uint64).max() >= self._count:
            raise self._no_row(numbers)
        return numbers

    def _place(self, numbers: NDArray[np.int64]) -> RowLocations:
        place = self._finder.locate(numbers)
        if place is None:
            raise self._no_row(numbers)
        return place

    def _no_row(self, numbers: NDArray[np.int64]) -> IndexError:
        wrong = numbers[(numbers < 0) | (numbers >= len(self))][0]
        return IndexError(f"there is no row {wrong}; '{self.root}' has {len(self):,} rows")

    def _check_slices(
        self, columns: Sequence[str], numbers: NDArray[np.int64], firsts: NDArray[np.int64], length: int
    ) -> None:
        if firsts.shape != numbers.shape:
            raise ValueError(f"{len(numbers)} rows need {len(numbers)} starts, not an array of shape {firsts.shape}")
        # As unsigned, a negative start is larger than any side.
        furthest = int(firsts.view(np.uint64).max(initial=0))
        for name in columns:
            shape = self.column(name).shape
            if not shape or length < 1 or furthest + length > shape[0]:
                raise IndexError(f"slices of {length} items reach outside rows of '{name}', whose shape is {shape}")

    def _slices(
        self, columns: Sequence[str], numbers: NDArray[np.int64], firsts: NDArray[np.int64], length: int
    ) -> dict[str, Array | Ragged]:
        place = self._place(numbers)
        read: dict[str, Array | Ragged] = {
            name: self._reader(name).read_slices(place, firsts, length) for name in columns
        }
        return read | {name: self._reader(name).read(place) for name in self._bits_of(columns)}

    def _wanted(self, columns: Sequence[str] | None) -> list[str]:
        """The columns to read: those requested, and the presence bits of their layers above the base."""
        if isinstance(columns, str):  # a string would be iterated letter by letter
            raise TypeError(f"columns must be a list of names (got {columns!r}); pass [{columns!r}]")
        names = None if columns is None else tuple(columns)
        found = self._requested.get(names)
        if found is None:
            assert names is not None
            found = self._requested[names] = list(dict.fromkeys([*names, *self._bits_of(names)]))
        return found

    def _bits_of(self, columns: Sequence[str]) -> list[str]:
        return [presence_name(layer) for layer in self._layers_of(columns) if layer != self._base]

    def _value_bytes(self, name: str) -> float:
        layer, column = self._find(name)
        if not column.ragged or not self._count:
            return column.item_bytes
        position = int(np.flatnonzero(np.diff(self._starts))[0])
        if self.is_remote:  # its offsets are far away
            stored = self.file_bytes([name])[0][position] / int(np.diff(self._starts)[position])
            return float(stored) * (1 if column.codec == "none" else _USUAL_RATIO)
        offsets = self._layer_maps(layer).get(position).offsets(column.name)
        return column.item_bytes * int(offsets[-1]) / (len(offsets) - 1)

    def _find(self, name: str) -> tuple[str, Column]:
        found = self._columns.get(name)
        if found is None:
            raise ColumnNotFound(self.root, name, self.columns)
        return found

    def _layer(self, layer: str) -> str:
        if layer not in self.generation.recipes:
            raise LayerNotFound(self.root, layer, sorted(self.generation.recipes))
        return layer

    def _reader(self, name: str) -> ColumnReader:
        reader = self._readers.get(name)
        if reader is None:
            layer, column = self._find(name)
            rows = np.diff(self._starts)
            self._check_block_counts(layer, column, rows)
            where, limit = (self.root, layer), self._options.max_block_bytes
            reader = column_reader(column, rows, self._layer_maps(layer), self._blocks, where, limit)
            if name == presence_name(layer):
                reader = PresenceReader(reader, rows)
            reader = self._readers.setdefault(name, reader)
        return reader

    def _check_block_counts(self, layer: str, column: Column, rows: NDArray[np.int64]) -> None:
        """Reject more rows than the index has checksums for, before allocating a bit for every block."""
        table = self.generation.table(layer)
        if not len(table):
            return
        at = np.minimum(np.searchsorted(table.chunks, self._chunks), len(table) - 1)
        listed = np.where(table.chunks[at] == self._chunks, table.numbers["head_size"][at], MAX_HEAD_BYTES)
        impossible = -(-rows // column.block_rows) > np.clip(listed, 0, MAX_HEAD_BYTES) // SUM_BYTES
        if impossible.any():
            first = int(np.flatnonzero(impossible)[0])
            problem = f"its index is too small for the {int(rows[first]):,} rows that were published"
            raise ChunkCorrupt(self.root, layer, int(self._chunks[first]), problem)

    def close_changed(self) -> None:
        """Close the maps of files that were cut short or removed: touching such a map would end the process."""
        for layer, maps in () if self.is_remote else list(self._maps.items()):
            for position, file in maps.opened():
                record = published_record(self.generation, layer, int(self._chunks[position]))
                entry = None
                with suppress(ForebayError):  # something else is in its place
                    entry = None if record is None else self.store.head(record.key(layer))
                if entry is None or entry.size != len(file.view):
                    maps.close(position)

    def _layer_maps(self, layer: str) -> Maps:
        if layer not in self._maps:
            # Not a bound method: a reference cycle would delay freeing the maps until garbage collection.
            opened = partial(_open_chunk, self.store, self.generation, self._chunks, layer, self._declared[layer])
            weak = weakref.ref(self)
            passing = partial(_is_passing, weak, layer) if self.is_remote else None
            maps = Maps(len(self._chunks), opened, self._options.max_maps, is_passing=passing)
            if not isinstance(self.store, Fetching):  # without a tier, they are in memory
                maps.passing_bytes = IN_MEMORY_BYTES
            self._maps.setdefault(layer, maps)
        return self._maps[layer]

    def _whole(self, name: str, position: int) -> Array | Ragged:
        layer, column = self._find(name)
        file = self._layer_maps(layer).get(position)
        return read_column(self.store, layer, file, column.name, self._options.max_block_bytes)


def open_cache(
    root: Root,
    *,
    generation: int | None = None,
    layers: Sequence[str] | None = None,
    memory: int | str = DEFAULT_MEMORY,
    threads: int = 0,
    max_maps: int = MAX_MAPS,
    max_block_bytes: int = MAX_BLOCK_BYTES,
    cache_id: str | None = None,
    min_generation: int | None = None,
    digest: str | None = None,
    tier: str | os.PathLike[str] | None = None,
    tier_bytes: int | str | None = None,
) -> Cache:
    """Open a cache at a generation, by default the newest.

    With `layers`, the cache has the rows that all of them have and reads their columns by default; without, it has the
    rows of the base layer. `memory` limits the decoded blocks that are kept (bytes, or "1GB"). `max_block_bytes` limits
    the decoded size of one compressed block, because a forged cache could expand 30,000 times; raise it for a trusted
    cache with larger rows.

    `tier` is a folder on a local disk where the chunks of a remote cache are kept, at most `tier_bytes` of them
    ("500GB"); all caches and processes of a machine can share it.

    `cache_id`, `min_generation` and `digest` reject another cache, a generation below that number, and any generation
    but the one with this SHA-256. `forebay info` and `forebay verify` show all three.
    """
    memory = as_bytes(memory) if isinstance(memory, str) else memory
    _check_whole(memory=memory, threads=threads, generation=generation or 0, min_generation=min_generation or 0)
    _check_whole(1, max_maps=max_maps, max_block_bytes=max_block_bytes)
    if isinstance(layers, str):
        raise TypeError(f"layers is {layers!r}; pass a list of names: [{layers!r}]")
    store = with_tier(open_store(root), tier, tier_bytes)
    pinned = load_generation(store, generation)
    _identify(store, pinned)
    check_pins(store, pinned, cache_id, min_generation, digest)
    names = tuple(dict.fromkeys([pinned.base, *(layers or ())]))
    for name in names:
        if name not in pinned.recipes:
            raise LayerNotFound(store.address, name, sorted(pinned.recipes))
    options = Options(memory, threads, max_maps, max_block_bytes)
    return Cache(store, pinned, names, options, pinned_explicitly=generation is not None)


_ROW_NUMBER = np.dtype(np.int64)


def _whole_numbers(rows: ArrayLike) -> NDArray[np.int64]:
    numbers = np.asarray(rows)
    if numbers.ndim != 1 or (numbers.size and numbers.dtype.kind not in "iu"):
        raise TypeError(f"rows must be a list of integers (got {numbers.dtype} of shape {numbers.shape})")
    return numbers if numbers.dtype == _ROW_NUMBER else numbers.astype(np.int64)


def _check_whole(least: int = 0, **options: object) -> None:
    for name, value in options.items():
        if not isinstance(value, int | np.integer) or value < least:
            raise ValueError(f"{name} must be at least {least} (got {value!r}); pass a whole number")


def with_tier(store: Store, tier: str | os.PathLike[str] | None, tier_bytes: int | str | None) -> Store:
    """A store whose chunks are kept in the folder `tier`; the store itself if there is none."""
    if tier is None:
        if tier_bytes is not None:
            raise ValueError(f"tier_bytes={tier_bytes!r} needs the folder of a tier: pass tier='/nvme/forebay'")
        return store
    limit = None if tier_bytes is None else as_bytes(tier_bytes)
    return TieredStore(LocalStore(tier), store, limit_bytes=limit)


def check_pins(
    store: Store,
    generation: Generation,
    cache_id: str | None = None,
    min_generation: int | None = None,
    digest: str | None = None,
) -> None:
    """Raise `PinMismatch` unless a generation is the one that the caller expects."""
    found = generation.document.cache_id
    if cache_id is not None and found != cache_id:
        raise PinMismatch(store.address, "cache_id", found, cache_id)
    if min_generation is not None and generation.number < min_generation:
        raise PinMismatch(store.address, "generation", generation.number, f"at least {min_generation}")
    if digest is not None and generation.digest != digest.lower():
        raise PinMismatch(store.address, "digest", generation.digest, digest)


def _reopen(store: Store, generation: int, layers: tuple[str, ...], options: Options, digest: str = "") -> Cache:
    pinned = load_generation(store, generation)
    _identify(store, pinned)
    check_pins(store, pinned, digest=digest or None)
    return Cache(store, pinned, layers, options, pinned_explicitly=True)


def _identify(store: Store, generation: Generation) -> None:
    """Pass the cache id to the tier, so that it need not read `cache.json`."""
    if isinstance(store, TieredStore):
        store.identify(generation.document.cache_id)


def _is_passing(weak: "weakref.ref[Cache]", layer: str, position: int) -> bool:
    cache = weak()
    return cache is not None and cache._has_no_file(layer, position)


def _open_chunk(
    store: Store, generation: Generation, chunks: NDArray[np.int64], layer: str, declared: tuple[Column, ...], at: int
) -> ChunkFile:
    """Open the chunk of a layer at a position and check it against the generation and the recipe."""
    record = _record_at(store.address, generation, layer, int(chunks[at]))
    return open_chunk(store, layer, record, columns=declared, keyed=generation.tagged)


def _record_at(root: str, generation: Generation, layer: str, chunk: int) -> ChunkRecord:
    record = published_record(generation, layer, chunk)
    if record is None:
        raise LayerIncomplete(root, layer, chunk)
    if layer != generation.base:
        below = published_record(generation, generation.base, chunk)
        if below is None or (below.ids, below.rows) != (record.base, record.rows):
            raise ChunkCorrupt(root, layer, chunk, "it was built for other rows of the base layer")
    return record


def _common_chunks(generation: Generation, layers: Sequence[str]) -> NDArray[np.int64]:
    base = generation.base
    chunks: NDArray[np.int64] = generation.table(base).chunks
    for layer in (name for name in layers if name != base):
        chunks = np.intersect1d(chunks, generation.table(layer).chunks, assume_unique=True)
    return chunks


def _declared(generation: Generation, layer: str) -> tuple[Column, ...]:
    return layer_columns(generation.recipe(layer).columns, layer == generation.base)


def _described(column: Column) -> str:
    shape = ("rows of any length", *column.shape) if column.ragged else column.shape
    return f"{column.dtype} {' × '.join(map(str, shape))}".rstrip()


def _after_fork() -> None:
    for cache in list(_open_caches):
        cache._forget()


if hasattr(os, "register_at_fork"):
    os.register_at_fork(after_in_child=_after_fork)
