"""Reading one column: three ways for three ways of being stored, each block checked on first touch.

fixed, uncompressed    addresses of rows, one gather for the whole batch
ragged, uncompressed   ranges of values, copied one after the other
compressed             blocks, decoded once and kept while there is room
"""

from collections.abc import Iterator
from dataclasses import dataclass
from typing import Protocol

import numpy as np
import xxhash
from numpy.typing import NDArray

from forebay.cache.blocks import BlockCache
from forebay.cache.gather import gather
from forebay.cache.maps import Maps
from forebay.cache.published import corrupt_block
from forebay.columns import Array, Column, Ragged
from forebay.errors import ChunkCorrupt
from forebay.format.chunk import ChunkFile
from forebay.format.codec import CodecError

Where = tuple[str, str]  # root, layer


@dataclass(frozen=True, slots=True)
class Place:
    """Where some rows are: the position of their chunk among the cache's chunks, and their row in it."""

    positions: NDArray[np.int64]
    rows: NDArray[np.int64]


class ColumnReader(Protocol):
    def read(self, place: Place) -> Array | Ragged: ...


def column_reader(
    column: Column, rows: NDArray[np.int64], maps: Maps, blocks: BlockCache, where: Where
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
        self._first = np.concatenate([[0], np.cumsum(-(-rows // column.block_rows), dtype=np.int64)])
        self._checked = np.zeros(int(self._first[-1]), np.bool_)

    def ensure(self, place: Place) -> None:
        """Check every block that these rows touch, unless it was."""
        blocks = place.rows // self._column.block_rows
        blocks += self._first[place.positions]
        if self._checked[blocks].all():
            return
        for block in np.unique(blocks[~self._checked[blocks]]).tolist():
            position = int(np.searchsorted(self._first, block, side="right")) - 1
            self._check(self._maps.get(position), block - int(self._first[position]))
            self._checked[block] = True

    def _check(self, file: ChunkFile, block: int) -> None:
        name = self._column.name
        start, stop = file.block_span(name, block)
        if xxhash.xxh3_64_intdigest(file.view[start:stop]) != file.block_sum(name, block):
            root, layer = self._where
            raise corrupt_block(root, layer, file.meta.chunk, name, block, (start, stop))

    def corrupt(self, file: ChunkFile, block: int, problem: str) -> ChunkCorrupt:
        root, layer = self._where
        return ChunkCorrupt(root, layer, file.meta.chunk, problem, column=self._column.name, block=block)


class PlainFixedReader:
    """Rows by address."""

    def __init__(self, column: Column, rows: NDArray[np.int64], maps: Maps, checks: Checks) -> None:
        self._column = column
        self._maps = maps
        self._checks = checks
        self._addresses = np.zeros(len(rows), np.int64)  # of the first row in each mapped chunk, 0 where not mapped
        maps.on_close(self._closed)

    def read(self, place: Place) -> Array:
        column = self._column
        with self._maps.reading():
            bases = self._bases(place.positions)
            self._checks.ensure(place)
            rows = gather(bases + place.rows * column.item_bytes, column.item_bytes)
        return rows.view(column.array_dtype).reshape(-1, *column.shape)

    def _bases(self, positions: NDArray[np.int64]) -> NDArray[np.int64]:
        bases = self._addresses[positions]
        unmapped = np.flatnonzero(bases == 0)
        for position, chosen in by_position(positions[unmapped]) if len(unmapped) else ():
            address = self._maps.get(position).flat(self._column.name).ctypes.data
            self._addresses[position] = bases[unmapped[chosen]] = address
        self._maps.touch(positions)
        return bases

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
            offsets = self._maps.get(position).offsets(self._column.name).astype(np.int64)
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


def by_position(positions: NDArray[np.int64]) -> Iterator[tuple[int, NDArray[np.int64]]]:
    """(value, the indices that have it) for every distinct value."""
    order = np.argsort(positions, kind="stable")
    values, starts = np.unique(positions[order], return_index=True)
    yield from zip(values.tolist(), np.split(order, starts[1:]), strict=True)
