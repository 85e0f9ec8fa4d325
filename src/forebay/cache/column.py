"""Reading one column: three ways for three ways of being stored, each block checked on first touch.

fixed, uncompressed    addresses of rows, one gather for the whole batch
ragged, uncompressed   addresses of values where rows are short, else row by row
compressed             blocks, decoded once and kept while there is room
"""

from collections.abc import Callable, Iterator
from functools import partial
from itertools import pairwise
from typing import NamedTuple, Protocol

import numpy as np
from numpy.typing import NDArray

from forebay.cache.blocks import BlockCache
from forebay.cache.gather import Window
from forebay.cache.maps import Maps
from forebay.cache.published import corrupt_block
from forebay.columns import Array, Column, Ragged
from forebay.errors import ChunkCorrupt
from forebay.format.chunk_file import ChunkFile
from forebay.format.codec import CodecError

Where = tuple[str, str]  # root, layer

_EDGE_BYTES = 8  # of one offset
_SHORT_ROW = 64  # values, on average, up to which a ragged row is copied value by value


class Place(NamedTuple):
    """Where some rows are: the position of their chunk among the cache's chunks, and their row in it."""

    positions: NDArray[np.int64]
    rows: NDArray[np.int64]


class ColumnReader(Protocol):
    def read(self, place: Place) -> Array | Ragged: ...

    def read_slices(self, place: Place, starts: NDArray[np.int64], length: int) -> Array:
        """Of every row of a fixed column, `length` items of its first axis from its own start on."""
        ...

    def read_batches(self, place: Place, size: int) -> Iterator[Array | Ragged]:
        """The same rows, so many at a time."""
        ...


def column_reader(
    column: Column,
    rows: NDArray[np.int64],
    maps: Maps,
    blocks: BlockCache,
    where: Where,
) -> ColumnReader:
    """The reader for a column over chunks of so many rows each."""
    checks = Checks(column, rows, maps, where)
    if column.codec != "none":
        return CompressedReader(column, maps, checks, blocks)
    plain = PlainRaggedReader if column.ragged else PlainFixedReader
    return plain(column, rows, maps, checks)


class Checks:
    """Which blocks of a column this process has checked: one byte per block, touched only where blocks are."""

    def __init__(self, column: Column, rows: NDArray[np.int64], maps: Maps, where: Where) -> None:
        self._column = column
        self._maps = maps
        self._where = where
        self._block_rows = column.block_rows
        self._first = np.concatenate([[0], np.cumsum(-(-rows // column.block_rows), dtype=np.int64)])
        self._checked = np.zeros(int(self._first[-1]), np.bool_)
        self._all_checked = False

    def ensure(self, place: Place) -> None:
        """Check every block that these rows touch, unless it was."""
        if self._all_checked:
            return
        blocks = place.rows // self._block_rows
        blocks += self._first[place.positions]
        checked = self._checked[blocks]
        if not checked.all():
            self._check(np.unique(blocks[~checked]))

    def ensure_copies(self, place: Place, copies: Array) -> None:
        """Check copies of rows that are blocks of their own, unless their blocks were."""
        if self._all_checked:
            return
        blocks = place.rows + self._first[place.positions]
        fresh = np.flatnonzero(~self._checked[blocks])
        where = zip(fresh.tolist(), place.positions[fresh].tolist(), place.rows[fresh].tolist(), strict=True)
        for index, position, row in where:
            file = self._maps.get(position)
            if not file.check(self._column.name).agrees(row, copies[index].reshape(-1).view(np.uint8).data):
                raise self._corrupt_block(file, row)
        self._note_checked(blocks[fresh])

    def _check(self, blocks: NDArray[np.int64]) -> None:
        name = self._column.name
        positions = np.searchsorted(self._first, blocks, side="right") - 1
        within = blocks - self._first[positions]
        for position, chosen in runs(positions):
            file = self._maps.get(position)
            bad = file.check(name).first_bad(within[chosen].tolist())
            if bad is not None:
                raise self._corrupt_block(file, bad)
        self._note_checked(blocks)

    def _note_checked(self, blocks: NDArray[np.int64]) -> None:
        self._checked[blocks] = True
        self._all_checked = bool(len(self._checked) and self._checked[-1] and self._checked.all())

    def _corrupt_block(self, file: ChunkFile, block: int) -> ChunkCorrupt:
        (root, layer), name = self._where, self._column.name
        return corrupt_block(root, layer, file.meta.chunk, name, block, file.check(name).span(block))

    def corrupt(self, file: ChunkFile, block: int, problem: str) -> ChunkCorrupt:
        root, layer = self._where
        return ChunkCorrupt(root, layer, file.meta.chunk, problem, column=self._column.name, block=block)


class Addresses:
    """Where one tensor begins in every chunk, as far as chunks are mapped."""

    def __init__(self, maps: Maps, count: int, tensor: Callable[[ChunkFile], Array], item_bytes: int) -> None:
        self._maps = maps
        self._tensor = tensor
        self._window = Window(item_bytes)
        self._known = np.zeros(count, np.int64)  # 0 where a chunk is not mapped
        self.gather, self.gather_batches = self._window.gather, self._window.gather_batches
        maps.on_close(self._closed)

    def of(self, positions: NDArray[np.int64]) -> NDArray[np.int64]:
        """The addresses in some chunks, mapped now if they are not. The caller has begun reading."""
        found = self._known[positions]
        if not found.all():
            unmapped = np.flatnonzero(found == 0)
            for position, chosen in by_position(positions[unmapped]):
                found[unmapped[chosen]] = self._map(position)
        self._maps.touch(positions)
        return found

    def _map(self, position: int) -> int:
        file = self._maps.get(position)
        items = self._tensor(file)
        address = int(items.ctypes.data)
        self._window.include(address, items.nbytes)
        self._maps.while_open(position, file, partial(self._opened, position, address))
        return address

    def _opened(self, position: int, address: int) -> None:
        self._known[position] = address

    def _closed(self, position: int) -> None:
        self._known[position] = 0


class PlainFixedReader:
    """Rows by address."""

    def __init__(self, column: Column, rows: NDArray[np.int64], maps: Maps, checks: Checks) -> None:
        self._shape, self._dtype, self._row_bytes = column.shape, column.array_dtype, column.item_bytes
        self._maps = maps
        self._checks = checks
        self._addresses_of = partial(Addresses, maps, len(rows), lambda file: file.flat(column.name))
        self._addresses = self._addresses_of(column.item_bytes)
        self._slices: dict[int, Addresses] = {}  # by length
        self._is_block = column.block_rows == 1

    def read(self, place: Place) -> Array:
        (rows,) = self.read_batches(place, max(1, len(place.rows)))
        return rows

    def read_batches(self, place: Place, size: int) -> Iterator[Array]:
        ticket = self._maps.begin_reading()
        try:
            addresses = self._addresses.of(place.positions)
            addresses += place.rows * self._row_bytes
            if not self._is_block:
                self._checks.ensure(place)
            batches = self._addresses.gather_batches(addresses, size, self._dtype, self._shape)
            yield from self._checked(place, size, batches) if self._is_block else batches
        finally:
            self._maps.end_reading(ticket)

    def read_slices(self, place: Place, starts: NDArray[np.int64], length: int) -> Array:
        """Blocks are checked whole when they are first touched; after that only the slices are."""
        item_bytes = self._row_bytes // self._shape[0]
        slices = self._slices.get(length)
        if slices is None:
            slices = self._slices.setdefault(length, self._addresses_of(length * item_bytes))
        ticket = self._maps.begin_reading()
        try:
            addresses = slices.of(place.positions)
            addresses += place.rows * self._row_bytes
            addresses += starts * item_bytes
            self._checks.ensure(place)
            return slices.gather(addresses, self._dtype, (length, *self._shape[1:]))
        finally:
            self._maps.end_reading(ticket)

    def _checked(self, place: Place, size: int, batches: Iterator[Array]) -> Iterator[Array]:
        """Large rows are blocks of their own: their copies, still warm, are checked before they are handed out."""
        for some, rows in zip(_slices(len(place.rows), size), batches, strict=True):
            self._checks.ensure_copies(Place(place.positions[some], place.rows[some]), rows)
            yield rows


class PlainRaggedReader:
    """Ranges of values."""

    def __init__(self, column: Column, rows: NDArray[np.int64], maps: Maps, checks: Checks) -> None:
        self._column = column
        self._maps = maps
        self._checks = checks
        self._edges = Addresses(maps, len(rows), lambda file: file.offsets(column.name), 2 * _EDGE_BYTES)
        self._values = Addresses(maps, len(rows), lambda file: file.flat(column.name), column.item_bytes)

    def read(self, place: Place) -> Ragged:
        self._checks.ensure(place)
        ticket = self._maps.begin_reading()
        try:
            pairs = self._edges.of(place.positions) + place.rows * _EDGE_BYTES
            starts, stops = self._edges.gather(pairs, np.dtype(np.int64), (2,)).T
            ends = np.concatenate([[0], np.cumsum(stops - starts, dtype=np.int64)])
            copied = self._by_value if ends[-1] <= _SHORT_ROW * len(starts) else self._by_row
            return Ragged(copied(place, starts, ends), ends)
        finally:
            self._maps.end_reading(ticket)

    def read_batches(self, place: Place, size: int) -> Iterator[Array | Ragged]:
        yield from cut_batches(self.read(place), size)

    def read_slices(self, place: Place, starts: NDArray[np.int64], length: int) -> Array:
        raise TypeError(f"'{self._column.name}' is ragged; slices are of columns whose rows have one shape")

    def _by_value(self, place: Place, starts: NDArray[np.int64], ends: NDArray[np.int64]) -> Array:
        """One gather for all values: of short rows, finding the row costs more than copying it."""
        numbers = np.arange(ends[-1]) + np.repeat(starts - ends[:-1], np.diff(ends))
        addresses = np.repeat(self._values.of(place.positions), np.diff(ends)) + numbers * self._column.item_bytes
        return self._values.gather(addresses, self._column.array_dtype, self._column.shape)

    def _by_row(self, place: Place, starts: NDArray[np.int64], ends: NDArray[np.int64]) -> Array:
        values = np.empty((int(ends[-1]), *self._column.shape), self._column.array_dtype)
        name = self._column.name
        flats = {position: self._maps.get(position).flat(name) for position in set(place.positions.tolist())}
        rows = zip(place.positions.tolist(), starts.tolist(), ends[:-1].tolist(), ends[1:].tolist(), strict=True)
        for position, start, low, high in rows:
            values[low:high] = flats[position][start : start + high - low]
        return values


class CompressedReader:
    """Blocks, decoded once and kept while there is room."""

    def __init__(self, column: Column, maps: Maps, checks: Checks, blocks: BlockCache) -> None:
        self._column = column
        self._maps = maps
        self._checks = checks
        self._blocks = blocks

    def read(self, place: Place) -> Array | Ragged:
        self._checks.ensure(place)
        return self._read_ragged(place) if self._column.ragged else self._read_fixed(place)

    def read_batches(self, place: Place, size: int) -> Iterator[Array | Ragged]:
        for some in _slices(len(place.rows), size):
            yield self.read(Place(place.positions[some], place.rows[some]))

    def read_slices(self, place: Place, starts: NDArray[np.int64], length: int) -> Array:
        rows = self.read(place)
        if isinstance(rows, Ragged):
            raise TypeError(f"'{self._column.name}' is ragged; slices are of columns whose rows have one shape")
        sliced: Array = rows[np.arange(len(rows))[:, None], starts[:, None] + np.arange(length)]
        return sliced

    def _read_fixed(self, place: Place) -> Array:
        column = self._column
        values = np.empty((len(place.rows), *column.shape), column.array_dtype)
        for position, block, chosen in self._by_block(place):
            decoded = self._block(position, block)
            values[chosen] = decoded[place.rows[chosen] - block * column.block_rows]
        return values

    def _read_ragged(self, place: Place) -> Ragged:
        rows: list[Array] = [np.empty(0)] * len(place.rows)
        for position, block, chosen in self._by_block(place):
            decoded = self._block(position, block)
            offsets = self._maps.get(position).offsets(self._column.name)
            first = int(offsets[block * self._column.block_rows])
            for index in chosen.tolist():
                row = int(place.rows[index])
                rows[index] = decoded[int(offsets[row]) - first : int(offsets[row + 1]) - first]
        return Ragged.of(rows, self._column.array_dtype, self._column.shape)

    def _by_block(self, place: Place) -> Iterator[tuple[int, int, NDArray[np.int64]]]:
        for position, chosen in by_position(place.positions):
            blocks = place.rows[chosen] // self._column.block_rows
            for block, within in by_position(blocks):
                yield position, block, chosen[within]

    def _block(self, position: int, block: int) -> Array:
        return self._blocks.get((self._column.name, position, block), lambda: self._decode(position, block))

    def _decode(self, position: int, block: int) -> Array:
        file = self._maps.get(position)
        try:
            return file.decode_block(self._column.name, block)
        except CodecError as error:
            raise self._checks.corrupt(file, block, str(error)) from error


def cut_batches(rows: Array | Ragged, size: int) -> Iterator[Array | Ragged]:
    """So many rows at a time, as views."""
    for some in _slices(len(rows), size):
        if isinstance(rows, Ragged):
            offsets = rows.offsets[some.start : some.stop + 1]
            yield Ragged(rows.values[int(offsets[0]) : int(offsets[-1])], offsets - offsets[0])
        else:
            yield rows[some]


def _slices(count: int, size: int) -> Iterator[slice]:
    """At least one, so that no rows are an empty batch."""
    return (slice(start, min(start + size, count)) for start in range(0, max(1, count), size))


def runs(values: NDArray[np.int64]) -> Iterator[tuple[int, slice]]:
    """(value, where it stands) for every run of equal values in a sorted array."""
    edges = [0, *(np.flatnonzero(values[1:] != values[:-1]) + 1).tolist(), len(values)]
    for start, stop in pairwise(edges):
        yield int(values[start]), slice(start, stop)


def by_position(positions: NDArray[np.int64]) -> Iterator[tuple[int, NDArray[np.int64]]]:
    """(value, the indices that have it) for every distinct value."""
    if not len(positions):
        return
    order = np.argsort(positions, kind="stable")
    values, starts = np.unique(positions[order], return_index=True)
    yield from zip(values.tolist(), np.split(order, starts[1:]), strict=True)
