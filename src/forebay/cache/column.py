"""Reading one column: three ways for three ways of being stored, each block checked on first touch.

fixed, uncompressed    addresses of rows, one gather for the whole batch
ragged, uncompressed   addresses of values where rows are short, else row by row
compressed             see `forebay.cache.compressed`
"""

from collections.abc import Iterator
from functools import partial
from typing import Protocol

import numpy as np
from numpy.typing import NDArray

from forebay.cache.addresses import Addresses, Edges, value_addresses
from forebay.cache.blocks import BlockCache
from forebay.cache.checks import Checks, Where
from forebay.cache.compressed import CompressedReader, Decoded
from forebay.cache.gather import SHORT_ROW
from forebay.cache.maps import Maps
from forebay.cache.place import Place, cut_batches, slices
from forebay.columns import Array, Column, Ragged


class ColumnReader(Protocol):
    def read(self, place: Place) -> Array | Ragged: ...

    def read_slices(self, place: Place, starts: NDArray[np.int64], length: int) -> Array:
        """Of every row of a fixed column, `length` items of its first axis from its own start on."""
        ...

    def read_batches(self, place: Place, size: int) -> Iterator[Array | Ragged]:
        """The same rows, so many at a time."""
        ...

    def views(self, place: Place) -> Iterator[Array]:
        """The same rows one by one, each checked as it is handed out; large ones are not copied."""
        ...


def column_reader(
    column: Column,
    rows: NDArray[np.int64],
    maps: Maps,
    blocks: BlockCache[Decoded],
    where: Where,
    max_block_bytes: int,
) -> ColumnReader:
    """The reader for a column over chunks of so many rows each."""
    checks = Checks(column, rows, maps, where)
    if column.codec != "none":
        return CompressedReader(column, rows, maps, checks, blocks, max_block_bytes)
    plain = PlainRaggedReader if column.ragged else PlainFixedReader
    return plain(column, rows, maps, checks)


class PlainFixedReader:
    """Rows by address."""

    def __init__(self, column: Column, rows: NDArray[np.int64], maps: Maps, checks: Checks) -> None:
        self._shape, self._dtype, self._row_bytes = column.shape, column.array_dtype, column.item_bytes
        self._maps = maps
        self._checks = checks
        self._addresses_of = partial(Addresses, maps, len(rows), lambda file: file.flat(column.name), checks.outside)
        self._addresses = self._addresses_of(column.item_bytes)
        self._slices: dict[int, Addresses] = {}  # by length
        self._is_block = column.block_rows == 1

    def read(self, place: Place) -> Array:
        (rows,) = self.read_batches(place, max(1, len(place.rows)))
        return rows

    def read_batches(self, place: Place, size: int) -> Iterator[Array]:
        ticket = self._maps.begin_reading()
        try:
            addresses = self._addresses.at(place.positions, place.rows * self._row_bytes)
            if not self._is_block:
                self._checks.ensure(place)
            batches = self._addresses.gather_batches(addresses, size, self._dtype, self._shape)
            yield from self._checked(place, size, batches) if self._is_block else batches
        finally:
            self._maps.end_reading(ticket)

    def read_slices(self, place: Place, starts: NDArray[np.int64], length: int) -> Array:
        """Blocks are checked whole when they are first touched; after that only the slices are."""
        item_bytes = self._row_bytes // self._shape[0]
        items = self._slices.get(length)
        if items is None:
            items = self._slices.setdefault(length, self._addresses_of(length * item_bytes))
        ticket = self._maps.begin_reading()
        try:
            addresses = items.at(place.positions, place.rows * self._row_bytes + starts * item_bytes)
            self._checks.ensure(place)
            return items.gather(addresses, self._dtype, (length, *self._shape[1:]))
        finally:
            self._maps.end_reading(ticket)

    def views(self, place: Place) -> Iterator[Array]:
        yield from self.read(place)

    def _checked(self, place: Place, size: int, batches: Iterator[Array]) -> Iterator[Array]:
        """Large rows are blocks of their own: their copies, still warm, are checked before they are handed out."""
        for some, rows in zip(slices(len(place.rows), size), batches, strict=True):
            self._checks.ensure_copies(place.part(some), rows)
            yield rows


class PlainRaggedReader:
    """Ranges of values."""

    def __init__(self, column: Column, rows: NDArray[np.int64], maps: Maps, checks: Checks) -> None:
        self._column = column
        self._maps = maps
        self._checks = checks
        self._edges = Edges(maps, len(rows), column.name, checks.outside)
        self._values = Addresses(
            maps, len(rows), lambda file: file.flat(column.name), checks.outside, column.item_bytes
        )

    def read(self, place: Place) -> Ragged:
        self._checks.ensure(place)
        ticket = self._maps.begin_reading()
        try:
            starts, stops = self._edges.of(place)
            bases = self._values.of_values(place.positions, starts, stops)
            ends = np.concatenate([[0], np.cumsum(stops - starts, dtype=np.int64)])
            if ends[-1] <= SHORT_ROW * len(starts):
                return Ragged(self._by_value(bases, starts, ends), ends)
            return Ragged(self._by_row(place, starts, ends), ends)
        finally:
            self._maps.end_reading(ticket)

    def read_batches(self, place: Place, size: int) -> Iterator[Array | Ragged]:
        yield from cut_batches(self.read(place), size)

    def read_slices(self, place: Place, starts: NDArray[np.int64], length: int) -> Array:
        raise TypeError(f"'{self._column.name}' is ragged; slices are of columns whose rows have one shape")

    def views(self, place: Place) -> Iterator[Array]:
        """Parts of the mapped files: a map stays for as long as anything holds a view of it."""
        ticket = self._maps.begin_reading()
        try:
            starts, stops = self._edges.of(place)
            self._values.of_values(place.positions, starts, stops)
        finally:
            self._maps.end_reading(ticket)
        where = zip(place.positions.tolist(), place.rows.tolist(), starts.tolist(), stops.tolist(), strict=True)
        for position, row, start, stop in where:
            self._checks.ensure_row(position, row)
            yield self._maps.get(position).flat(self._column.name)[start:stop]

    def _by_value(self, bases: NDArray[np.int64], starts: NDArray[np.int64], ends: NDArray[np.int64]) -> Array:
        """One gather for all values: of short rows, finding the row costs more than copying it."""
        addresses = value_addresses(bases, starts, ends, self._column.item_bytes)
        return self._values.gather(addresses, self._column.array_dtype, self._column.shape)

    def _by_row(self, place: Place, starts: NDArray[np.int64], ends: NDArray[np.int64]) -> Array:
        values = np.empty((int(ends[-1]), *self._column.shape), self._column.array_dtype)
        name = self._column.name
        flats = {position: self._maps.get(position).flat(name) for position in set(place.positions.tolist())}
        rows = zip(place.positions.tolist(), starts.tolist(), ends[:-1].tolist(), ends[1:].tolist(), strict=True)
        for position, start, low, high in rows:
            values[low:high] = flats[position][start : start + high - low]
        return values
