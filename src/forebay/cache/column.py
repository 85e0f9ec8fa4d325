"""Reading one column: three ways for three ways of being stored, each block checked on first touch.

fixed, uncompressed    addresses of rows, one gather for the whole batch
ragged, uncompressed   ranges of values, copied one after the other
compressed             blocks, decoded once and kept while there is room
"""

from collections.abc import Iterator
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


class Place(NamedTuple):
    """Where some rows are: the position of their chunk among the cache's chunks, and their row in it."""

    positions: NDArray[np.int64]
    rows: NDArray[np.int64]


class ColumnReader(Protocol):
    def read(self, place: Place) -> Array | Ragged: ...


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
    return PlainRaggedReader(column, maps, checks) if column.ragged else PlainFixedReader(column, rows, maps, checks)


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
            if not file.check(self._column.name).agrees(row, copies[index].data):
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


class PlainFixedReader:
    """Rows by address."""

    def __init__(self, column: Column, rows: NDArray[np.int64], maps: Maps, checks: Checks) -> None:
        self._name = column.name
        self._shape, self._dtype, self._row_bytes = column.shape, column.array_dtype, column.item_bytes
        self._maps = maps
        self._checks = checks
        self._window = Window(column.item_bytes)
        self._addresses = np.zeros(len(rows), np.int64)  # of the first row in each mapped chunk, 0 where not mapped
        self._copied = self._copy_then_check if column.block_rows == 1 else self._check_then_copy
        maps.on_close(self._closed)

    def read(self, place: Place) -> Array:
        ticket = self._maps.begin_reading()
        try:
            addresses = self._bases(place.positions)
            addresses += place.rows * self._row_bytes
            rows = self._copied(place, addresses)
        finally:
            self._maps.end_reading(ticket)
        return rows.view(self._dtype).reshape(len(rows), *self._shape)

    def _check_then_copy(self, place: Place, addresses: NDArray[np.int64]) -> Array:
        self._checks.ensure(place)
        return self._window.gather(addresses)

    def _copy_then_check(self, place: Place, addresses: NDArray[np.int64]) -> Array:
        """Large rows are blocks of their own: their copies, still warm, are checked before they are handed out."""
        rows = self._window.gather(addresses)
        self._checks.ensure_copies(place, rows)
        return rows

    def _bases(self, positions: NDArray[np.int64]) -> NDArray[np.int64]:
        bases = self._addresses[positions]
        if not bases.all():
            unmapped = np.flatnonzero(bases == 0)
            for position, chosen in by_position(positions[unmapped]):
                file = self._maps.get(position)
                rows = file.flat(self._name)
                self._window.include(rows.ctypes.data, rows.nbytes)
                bases[unmapped[chosen]] = rows.ctypes.data
                self._maps.while_open(position, file, partial(self._opened, position, rows.ctypes.data))
        self._maps.touch(positions)
        return bases

    def _opened(self, position: int, address: int) -> None:
        self._addresses[position] = address

    def _closed(self, position: int) -> None:
        self._addresses[position] = 0


class PlainRaggedReader:
    """Ranges of values, chunk by chunk."""

    def __init__(self, column: Column, maps: Maps, checks: Checks) -> None:
        self._column = column
        self._maps = maps
        self._checks = checks

    def read(self, place: Place) -> Ragged:
        self._checks.ensure(place)
        starts, lengths = np.empty_like(place.rows), np.empty_like(place.rows)
        flats: dict[int, Array] = {}
        for position, chosen in by_position(place.positions):
            file = self._maps.get(position)
            offsets = file.offsets(self._column.name)
            starts[chosen] = offsets[place.rows[chosen]]
            lengths[chosen] = offsets[place.rows[chosen] + 1] - offsets[place.rows[chosen]]
            flats[position] = file.flat(self._column.name)
        ends = np.concatenate([[0], np.cumsum(lengths, dtype=np.int64)])
        values = np.empty((int(ends[-1]), *self._column.shape), self._column.array_dtype)
        rows = zip(place.positions.tolist(), starts.tolist(), ends[:-1].tolist(), ends[1:].tolist(), strict=True)
        for position, start, low, high in rows:
            values[low:high] = flats[position][start : start + high - low]
        return Ragged(values, ends)


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
