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
from functools import cached_property, partial
from types import MappingProxyType
from typing import Any, SupportsIndex, TypeVar, overload

import numpy as np
from numpy.typing import ArrayLike, NDArray

from forebay import kernels
from forebay.cache.catalog import column_homes, layers_share_column, presence_name, read_column, shared_column
from forebay.columns import Array, Column, Ragged, join
from forebay.errors import ChunkCorrupt, not_found
from forebay.format import layout
from forebay.format.chunk import MAX_COUNT
from forebay.format.generation import Generation
from forebay.format.tensors import unseal
from forebay.read.blocks import BlockStatistics
from forebay.read.columns import ColumnReader, Slices
from forebay.read.maps import RowLocations
from forebay.read.origins import Origin, RowId, kept_tokenizer, row_origin, row_text
from forebay.read.pinned import LayerFiles, common_chunks, load_pinned
from forebay.read.readers import ColumnReaders, Options
from forebay.recipe import RecipeDocument
from forebay.records import html_table
from forebay.store.base import BadCopy, Fetching, Missing, Store, index_corrupt, is_url

Result = TypeVar("Result")
Numbers = NDArray[np.int64]
_PIECE_ROWS = 1024  # located at once: files that are closed meanwhile stay mapped until the copy ends
_USUAL_RATIO = 3  # of compression, for an estimate
_open_caches: "weakref.WeakSet[Cache]" = weakref.WeakSet()


class Cache:
    """The rows of a pinned generation."""

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
        self.pinned_explicitly = pinned_explicitly  # by number; another process may see another newest generation
        self.layers = layers
        self._options = options
        self._chunks = common_chunks(generation, layers)
        self._base = generation.base  # parsed once: every read uses it
        base = generation.table(self._base)
        rows = base.rows[np.searchsorted(base.chunks, self._chunks)]
        if len(rows) and not 0 <= rows.min() <= rows.max() <= MAX_COUNT:
            raise index_corrupt(
                self.root, layout.generation(generation.number), "a chunk has an impossible number of rows"
            )
        self._starts = np.concatenate([[0], np.cumsum(rows, dtype=np.int64)])
        self._count = int(self._starts[-1])
        self._files = {name: LayerFiles.of(store, generation, name, self._chunks) for name in generation.recipes}
        recipes = {name: generation.recipe(name).columns for name in generation.recipes}
        if shared := shared_column(recipes, self._base):
            raise layers_share_column(self.root, *shared)
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
        """The columns that are read by default: those of the opened layers, without indices of dictionaries."""
        indices = {column.index for _, column in self._columns.values()}
        return tuple(name for name, (layer, _) in self._columns.items() if layer in self.layers and name not in indices)

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

    def column(self, name: str) -> Column:
        """The declaration of a column."""
        return self._find(name)[1]

    def layer_of(self, name: str) -> str:
        """The layer that a column is in."""
        return self._find(name)[0]

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
        key = layout.constants(self.generation.folder(layer))
        try:
            view = self.store.view(key)
        except Missing as error:
            raise index_corrupt(self.root, key, "it is gone") from error
        if hashlib.sha256(view).hexdigest() != self.generation.constants[layer]:
            raise index_corrupt(self.root, key, "it is not the one this generation was published with")
        return unseal(view, self.root, key, "constants")[1]

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

        Control tokens and padding are left out. The tokenizer is stored in the cache.
        """
        return row_text(self, self._number(row))

    def kept_tokenizer(self) -> tuple[str, bytes]:
        """Return the name and the content of the tokenizer that a token cache stores."""
        return kept_tokenizer(self)

    def origin(self, row: SupportsIndex) -> Origin:
        """Return the origin of a row: the id of its sample, if the cache stores ids, and the parts of source files.

        Without ids, as in a row of packed tokens, the parts are those of its whole chunk;
        `fb.peek(root, [row], source=source)` names the documents.
        """
        return row_origin(self, self._number(row))

    def __iter__(self) -> Iterator[dict[str, Array]]:
        """Every row, chunk by chunk."""
        for columns in self.chunks():
            count = len(next(iter(columns.values())))
            for row in range(count):
                yield {name: values[row] for name, values in columns.items()}

    def read(
        self,
        rows: ArrayLike,
        columns: Sequence[str] | None = None,
        slices: Mapping[str, Slices] = MappingProxyType({}),
    ) -> dict[str, Array | Ragged]:
        """Some rows, in the order passed, repeats allowed: one array, or one `Ragged`, per column.

        A negative number is an `IndexError`, because it is usually a mistake in computed numbers. `slices` reads only a
        part of each row of a column, such as the two timesteps around t.
        """
        numbers, wanted = _whole_numbers(rows), self._wanted(columns)
        self._check_slices(slices, len(numbers))
        pieces: list[dict[str, Array | Ragged]] = []
        for at in range(0, max(1, len(numbers)), _PIECE_ROWS):
            some = slice(at, at + _PIECE_ROWS)
            locations = self._locate(numbers[some])
            parts = {name: Slices(part.starts[some], part.length) for name, part in slices.items()}
            piece: dict[str, Array | Ragged] = {}
            while len(piece) < len(wanted):
                try:
                    for name in wanted:
                        piece[name] = self._readers.reader(name).read(locations, parts.get(name))
                except ChunkCorrupt as error:  # of a remote copy, which is fetched anew
                    self._drop_copy(error)
                    piece.clear()
            pieces.append(piece)
        read = pieces[0] if len(pieces) == 1 else {name: join([piece[name] for piece in pieces]) for name in wanted}
        return self._absent_as_nan(read)

    def views(self, rows: ArrayLike, column: str) -> Iterator[Array]:
        """Rows of a column one by one, read-only, each checked when it is yielded.

        Rows of a ragged column are not copied: they are views of mapped files or of decoded blocks.
        """
        numbers, reader = _whole_numbers(rows), self._readers.reader(column)
        self._locate(numbers)  # rows are checked before the first is read
        return self._views(numbers, reader)

    def _views(self, numbers: NDArray[np.int64], reader: ColumnReader) -> Iterator[Array]:
        done = 0
        while done < len(numbers):
            try:
                for view in reader.views(self._locate(numbers[done : done + _PIECE_ROWS])):
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
        return self._absent_as_nan({name: self._repeated(partial(self._whole, name, position)) for name in wanted})

    def at_generation(self, number: int) -> "Cache":
        """The same cache pinned to another generation."""
        return self if number == self.generation.number else _reopen(self.store, number, self.layers, self._options)

    @cached_property
    def is_remote(self) -> bool:
        """Whether chunks are fetched when they are needed."""
        return is_url(self.root) or isinstance(self.store, Fetching)

    def chunk_positions(self, rows: NDArray[np.int64]) -> NDArray[np.int64]:
        """Which chunk each row is in, as an index into `chunk_numbers`."""
        return self._locate(rows).positions

    def chunk_bytes(self, columns: Sequence[str]) -> NDArray[np.int64]:
        """The size of each chunk of the rows, in the layers of these columns together."""
        return sum(self.file_bytes(columns), np.zeros(len(self._chunks), np.int64))

    def file_bytes(self, columns: Sequence[str]) -> list[NDArray[np.int64]]:
        """The sizes of the files of each chunk, for every layer of these columns."""
        return [self._files[layer].sizes() for layer in self._layers_of(columns)]

    def open_chunk(self, position: int, columns: Sequence[str]) -> None:
        """Open the files of a chunk that these columns are in, and so fetch those that are not local."""
        for layer in self._layers_of(columns):
            self._repeated(partial(self._readers.maps_of(layer).get, position))

    def keep_chunk(self, position: int, columns: Sequence[str]) -> bool:
        """Fetch the files of a chunk into the tier; return False if one is not admitted, or there is no tier."""
        return all([self._files[layer].keep(position) for layer in self._layers_of(columns)])

    def allow_passing(self, size: int, columns: Sequence[str]) -> None:
        """Keep up to `size` bytes of fetched chunks in memory, if that is more than the default."""
        for layer in self._layers_of(columns):
            maps = self._readers.maps_of(layer)
            maps.passing_bytes = max(maps.passing_bytes, size)

    def row_ids(self, rows: ArrayLike) -> list[RowId]:
        """The permanent names of some rows."""
        locations = self._locate(_whole_numbers(rows))
        chunks = self._chunks[locations.positions].tolist()
        return [RowId(chunk, row) for chunk, row in zip(chunks, locations.rows.tolist(), strict=True)]

    def statistics(self) -> BlockStatistics:
        """Hits, misses and size of the cache of decoded blocks."""
        return self._readers.blocks.statistics()

    def __reduce__(self) -> tuple[Any, ...]:
        # Another process gets the address, not the maps and decoded blocks.
        return (_reopen, (self.store, self.generation.number, self.layers, self._options, self.generation.digest))

    def _forget(self) -> None:
        """Start with nothing mapped, decoded or checked: in a new cache or a forked process."""
        self._readers = ColumnReaders(self._columns, self._files, np.diff(self._starts), self._options)
        self._dropped: set[tuple[str, int, int]] = set()

    def _repeated(self, call: Callable[[], Result]) -> Result:
        """Return the result of `call`, repeated after fetching a bad copy of a remote chunk again."""
        while True:
            try:
                return call()
            except ChunkCorrupt as error:
                self._drop_copy(error)

    def _drop_copy(self, error: ChunkCorrupt) -> None:
        """Make the store drop its copy of a bad chunk; raise without one, or if this thread dropped it before."""
        layer, chunk = error.facts["layer"], error.facts["chunk"]
        name = (layer, chunk, threading.get_ident())  # another thread may have read the same copy
        is_copy = self.is_remote and "problem" in error.facts and not isinstance(error.__cause__, BadCopy)
        if not is_copy or name in self._dropped:
            raise error
        self._dropped.add(name)
        position = int(np.searchsorted(self._chunks, chunk))
        self._files[layer].reject(position, error.facts["problem"])
        self._readers.maps_of(layer).close(position)

    def _layers_of(self, columns: Sequence[str]) -> list[str]:
        return list(dict.fromkeys(self._find(name)[0] for name in columns))

    def _number(self, row: SupportsIndex) -> int:
        """A row's number; negative ones count from the end."""
        count, number = len(self), operator.index(row)
        if not -count <= number < count:
            raise IndexError(f"there is no row {number}; '{self.root}' has {count:,} rows")
        return number % count

    def _locate(self, numbers: Numbers) -> RowLocations:
        numbers = np.ascontiguousarray(numbers)
        locations = RowLocations(np.empty_like(numbers), np.empty_like(numbers))
        if not kernels.locate_rows(*locations, numbers, self._starts):
            raise self._no_row(numbers)
        return locations

    def _no_row(self, numbers: NDArray[np.int64]) -> IndexError:
        wrong = numbers[(numbers < 0) | (numbers >= len(self))][0]
        return IndexError(f"there is no row {wrong}; '{self.root}' has {len(self):,} rows")

    def _check_slices(self, slices: Mapping[str, Slices], rows: int) -> None:
        for name, (starts, length) in slices.items():
            shape = self.column(name).shape
            if starts.shape != (rows,):
                raise ValueError(f"{rows} rows need {rows} starts, not an array of shape {starts.shape}")
            low, high = int(starts.min(initial=0)), int(starts.max(initial=0))
            if not shape or length < 1 or low < 0 or high + length > shape[0]:
                raise IndexError(f"slices of {length} items reach outside rows of '{name}', whose shape is {shape}")

    def _wanted(self, columns: Sequence[str] | None) -> list[str]:
        """The columns to read: those requested, and the presence bits of their layers above the base."""
        if isinstance(columns, str):  # a string would be iterated letter by letter
            raise TypeError(f"columns must be a list of names (got {columns!r}); pass [{columns!r}]")
        names = None if columns is None else tuple(columns)
        wanted = self._requested.get(names)
        if wanted is None:
            assert names is not None
            wanted = self._requested[names] = list(dict.fromkeys([*names, *self._bits_of(names)]))
        return wanted

    def _absent_as_nan(self, read: dict[str, Array | Ragged]) -> dict[str, Array | Ragged]:
        """Replace the floats of rows that a layer does not have; ragged rows of them are empty, integers are 0."""
        for name, values in read.items():
            layer = self._columns[name].layer
            if layer == self._base or isinstance(values, Ragged) or values.dtype.kind not in "fV":
                continue
            present = np.asarray(read[presence_name(layer)])
            if not present.all():
                values = read[name] = values.copy()
                values[~present] = np.nan
        return read

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
        offsets = self._readers.maps_of(layer).get(position).offsets(column.name)
        return column.item_bytes * int(offsets[-1]) / (len(offsets) - 1)

    def _find(self, name: str) -> tuple[str, Column]:
        home = self._columns.get(name)
        if home is None:
            raise not_found("column", name, self.root, self.columns)
        return home

    def _layer(self, layer: str) -> str:
        if layer not in self.generation.recipes:
            raise not_found("layer", layer, self.root, sorted(self.generation.recipes))
        return layer

    def close_changed(self) -> None:
        """Close the maps of truncated or removed files: touching such a map would end the process."""
        if not self.is_remote:
            self._readers.close_changed()

    def _whole(self, name: str, position: int) -> Array | Ragged:
        layer, column = self._find(name)
        if column.index:
            rows = np.arange(self._starts[position + 1] - self._starts[position])
            return self._readers.reader(name).read(RowLocations(np.full(len(rows), position), rows))
        file = self._readers.maps_of(layer).get(position)
        return read_column(self.store, file, column.name, self._options.max_block_bytes)


def _whole_numbers(rows: ArrayLike) -> NDArray[np.int64]:
    numbers = np.asarray(rows)
    if numbers.ndim != 1 or (numbers.size and numbers.dtype.kind not in "iu"):
        raise TypeError(f"rows must be a list of integers (got {numbers.dtype} of shape {numbers.shape})")
    return numbers.astype(np.int64, copy=False)


def _reopen(store: Store, generation: int, layers: tuple[str, ...], options: Options, digest: str = "") -> Cache:
    pinned = load_pinned(store, generation, digest=digest or None)
    return Cache(store, pinned, layers, options, pinned_explicitly=True)


def _described(column: Column) -> str:
    shape = ("rows of any length", *column.shape) if column.ragged else column.shape
    return f"{column.dtype} {' × '.join(map(str, shape))}".rstrip()


def _after_fork() -> None:
    for cache in list(_open_caches):
        cache._forget()


os.register_at_fork(after_in_child=_after_fork)
