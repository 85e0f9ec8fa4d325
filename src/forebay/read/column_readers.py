"""Read the rows of one column: plain, compressed, or presence bits.

fixed, uncompressed    addresses of rows, one gather for the whole batch
ragged, uncompressed   addresses of values where rows are short, else row by row
compressed             see `forebay.read.column_readers`

    rows ──▶ their blocks, each once ──▶ kept from before, or decoded ──▶ address of every row ──▶ one gather per batch

The blocks of many rows are looked for together, so that what costs time is the decoding. While rows are copied out of
them they are held, whether or not they are kept: at most half as many bytes as are kept, or the blocks of one batch.

A chunk never changes, so what was seen of it holds until the cache is closed.
"""

from collections.abc import Iterator
from functools import partial
from typing import Protocol

import numpy as np
from numpy.typing import NDArray

from forebay.columns import Array, Column, Ragged, join
from forebay.format.codec import CodecError
from forebay.read.blocks import BlockCache, Blocks, Checks, Where
from forebay.read.chunk_maps import Maps
from forebay.read.gather import SHORT_ROW, Addresses, Edges, Window, value_addresses
from forebay.read.locate import RowLocations, cut_batches, slices, taken


class Decoded:
    """The values of one block, the first of which is item `first` of its chunk's column."""

    __slots__ = ("address", "first", "nbytes", "values")

    def __init__(self, values: Array, first: int) -> None:
        self.values, self.first, self.nbytes = values, first, values.nbytes
        self.address = int(values.ctypes.data)


class _Found:
    """The blocks of some rows, held for as long as rows are copied out of them."""

    def __init__(self, blocks: list[Decoded], which: NDArray[np.int64], item_bytes: int) -> None:
        self.blocks, self.which = blocks, which
        # Where item 0 of the chunk would lie if the block went back so far: the item n of a row is at base + n · bytes.
        bases = np.array([block.address - block.first * item_bytes for block in blocks], np.int64)
        self.bases: NDArray[np.int64] = bases[which]
        self._firsts = np.array([block.first for block in blocks], np.int64)
        self._counts = np.array([len(block.values) for block in blocks], np.uint64)
        self.window = Window(item_bytes)
        if blocks:
            low = min(block.address for block in blocks)
            self.window.include(low, max(block.address + block.nbytes for block in blocks) - low)

    def are_outside(self, starts: NDArray[np.int64], stops: NDArray[np.int64]) -> NDArray[np.bool_]:
        """Which rows, given by the items of their chunk from start to stop, are not in the block they were found in."""
        firsts = self._firsts[self.which]
        # Seen as unsigned, a negative number is larger than any.
        lows, highs = (starts - firsts).view(np.uint64), (stops - firsts).view(np.uint64)
        outside: NDArray[np.bool_] = (lows > highs) | (highs > self._counts[self.which])
        return outside


class CompressedReader:
    """Rows out of decoded blocks."""

    def __init__(
        self,
        column: Column,
        rows: NDArray[np.int64],
        maps: Maps,
        checks: Checks,
        blocks: BlockCache[Decoded],
        max_block_bytes: int,
    ) -> None:
        self._column = column
        self._rows = rows
        self._max_block_bytes = max_block_bytes
        self._maps = maps
        self._checks = checks
        self._blocks = blocks
        self._edges = Edges(maps, len(rows), column.name, checks.outside) if column.ragged else None
        block_bytes = min(column.block_rows * column.item_bytes, 1 << 62)
        self._largest = np.full(len(rows), -1 if column.ragged else block_bytes, np.int64)  # -1: not looked up yet

    def read(self, place: RowLocations) -> Array | Ragged:
        if self._can_hold(place):
            (rows,) = self._gathered(place, max(1, len(place.rows)))
            return rows
        # So many blocks that they go before they are needed again, unless the rows of each come one after the other.
        by_block = np.argsort(self._checks.numbers(place), kind="stable")
        ordered = RowLocations(place.positions[by_block], place.rows[by_block])
        return taken(join(list(self.read_batches(ordered, 1))), np.argsort(by_block))

    def read_slices(self, place: RowLocations, starts: NDArray[np.int64], length: int) -> Array:
        rows = self.read(place)
        if isinstance(rows, Ragged):
            raise TypeError(f"'{self._column.name}' is ragged; slices are of columns whose rows have one shape")
        sliced: Array = rows[np.arange(len(rows))[:, None], starts[:, None] + np.arange(length)]
        return sliced

    def read_batches(self, place: RowLocations, size: int) -> Iterator[Array | Ragged]:
        step = count = len(place.rows)
        while step > size and not all(self._can_hold(place.part(some)) for some in slices(count, step)):
            step = max(size, step // 2 // size * size)
        for some in slices(count, max(step, size)):
            part = place.part(some)
            yield from self._gathered(part, size) if size == 1 or step > size else [self.read(part)]

    def _can_hold(self, place: RowLocations) -> bool:
        """Whether the blocks of some rows, decoded, fit into half of the memory for blocks."""
        room = self._blocks.limit // 2
        if len(place.rows) * self._largest_block(place.positions) <= room:
            return True
        return self._decoded_bytes(np.unique(self._checks.numbers(place))) <= room

    def _largest_block(self, positions: NDArray[np.int64]) -> float:
        """The most bytes that a block of some chunks decodes to, by their indexes."""
        if not len(positions):
            return 0
        largest = self._largest[positions]
        if largest.min() < 0:
            for position in np.unique(positions[largest < 0]).tolist():
                sizes = np.diff(self._maps.get(position).raw_bounds(self._column.name))
                self._largest[position] = sizes.max(initial=0)
            largest = self._largest[positions]
        return float(largest.max())

    def _decoded_bytes(self, blocks: Blocks) -> float:
        """What some blocks take once they are decoded, by the index."""
        column = self._column
        if self._edges is None:
            return len(blocks) * column.block_rows * column.item_bytes
        positions, within = self._checks.find_all(blocks)
        first = within * column.block_rows
        last = np.minimum(first + column.block_rows, self._rows[positions]) - 1
        starts, _ = self._edges.of(RowLocations(positions, first))
        _, stops = self._edges.of(RowLocations(positions, last))
        return float((stops - starts).sum(dtype=np.float64)) * column.item_bytes

    def _gathered(self, place: RowLocations, size: int) -> Iterator[Array | Ragged]:
        """The blocks of all these rows are held until the last batch was taken."""
        self._checks.ensure(place)
        found = self._find(place)
        starts, stops = (place.rows, place.rows + 1) if self._edges is None else self._edges.of(place)
        outside = found.are_outside(starts, stops)
        if outside.any():
            raise self._checks.outside(int(place.positions[outside][0]))
        if self._edges is not None:
            yield from cut_batches(self._ragged(found, starts, stops), size)
        else:
            addresses = found.bases + place.rows * self._column.item_bytes
            yield from found.window.gather_batches(addresses, size, self._column.array_dtype, self._column.shape)

    def views(self, place: RowLocations) -> Iterator[Array]:
        """Parts of decoded blocks."""
        for position, row in zip(place.positions.tolist(), place.rows.tolist(), strict=True):
            self._checks.ensure_row(position, row)
            yield self._view(position, row)

    def _view(self, position: int, row: int) -> Array:
        place = RowLocations(np.array([position]), np.array([row]))
        found = self._find(place)
        (block,) = found.blocks
        if self._edges is None:
            view: Array = block.values[row - block.first]
            return view
        starts, stops = self._edges.of(place)
        if found.are_outside(starts, stops).any():
            raise self._checks.outside(position)
        return block.values[int(starts[0]) - block.first : int(stops[0]) - block.first]

    def _find(self, place: RowLocations) -> _Found:
        numbers, after, which = np.unique(self._checks.numbers(place)[::-1], return_index=True, return_inverse=True)
        order = np.argsort(-after)  # those that are not needed for longest come first, and go first when room is short
        name = self._column.name
        blocks = self._blocks.get_all([(name, number) for number in numbers[order].tolist()], self._decode)
        return _Found(blocks, np.argsort(order)[which[::-1]], self._column.item_bytes)

    def _ragged(self, found: _Found, starts: NDArray[np.int64], stops: NDArray[np.int64]) -> Ragged:
        column = self._column
        ends = np.concatenate([[0], np.cumsum(stops - starts, dtype=np.int64)])
        if ends[-1] <= SHORT_ROW * len(starts):
            addresses = value_addresses(found.bases, starts, ends, column.item_bytes)
            return Ragged(found.window.gather(addresses, column.array_dtype, column.shape), ends)
        values = np.empty((int(ends[-1]), *column.shape), column.array_dtype)
        rows = zip(found.which.tolist(), starts.tolist(), ends[:-1].tolist(), ends[1:].tolist(), strict=True)
        for which, start, low, high in rows:
            block = found.blocks[which]
            values[low:high] = block.values[start - block.first : start - block.first + high - low]
        return Ragged(values, ends)

    def _decode(self, key: tuple[str, int]) -> Decoded:
        position, block = self._checks.find(key[1])
        file = self._maps.get(position)
        try:
            values = file.decode_block(self._column.name, block, self._max_block_bytes)
        except CodecError as error:
            raise self._checks.corrupt(file, block, error) from error
        first_row = block * self._column.block_rows
        return Decoded(values, int(file.offsets(self._column.name)[first_row]) if self._edges else first_row)


class ColumnReader(Protocol):
    def read(self, place: RowLocations) -> Array | Ragged: ...

    def read_slices(self, place: RowLocations, starts: NDArray[np.int64], length: int) -> Array:
        """Of every row of a fixed column, `length` items of its first axis from its own start on."""
        ...

    def read_batches(self, place: RowLocations, size: int) -> Iterator[Array | Ragged]:
        """The same rows, so many at a time."""
        ...

    def views(self, place: RowLocations) -> Iterator[Array]:
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

    def read(self, place: RowLocations) -> Array:
        (rows,) = self.read_batches(place, max(1, len(place.rows)))
        return rows

    def read_batches(self, place: RowLocations, size: int) -> Iterator[Array]:
        ticket = self._maps.begin_reading()
        try:
            addresses = self._addresses.at(place.positions, place.rows * self._row_bytes)
            if not self._is_block:
                self._checks.ensure(place)
            batches = self._addresses.gather_batches(addresses, size, self._dtype, self._shape)
            yield from self._checked(place, size, batches) if self._is_block else batches
        finally:
            self._maps.end_reading(ticket)

    def read_slices(self, place: RowLocations, starts: NDArray[np.int64], length: int) -> Array:
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

    def views(self, place: RowLocations) -> Iterator[Array]:
        yield from self.read(place)

    def _checked(self, place: RowLocations, size: int, batches: Iterator[Array]) -> Iterator[Array]:
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

    def read(self, place: RowLocations) -> Ragged:
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

    def read_batches(self, place: RowLocations, size: int) -> Iterator[Array | Ragged]:
        yield from cut_batches(self.read(place), size)

    def read_slices(self, place: RowLocations, starts: NDArray[np.int64], length: int) -> Array:
        raise TypeError(f"'{self._column.name}' is ragged; slices are of columns whose rows have one shape")

    def views(self, place: RowLocations) -> Iterator[Array]:
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

    def _by_row(self, place: RowLocations, starts: NDArray[np.int64], ends: NDArray[np.int64]) -> Array:
        values = np.empty((int(ends[-1]), *self._column.shape), self._column.array_dtype)
        name = self._column.name
        flats = {position: self._maps.get(position).flat(name) for position in set(place.positions.tolist())}
        rows = zip(place.positions.tolist(), starts.tolist(), ends[:-1].tolist(), ends[1:].tolist(), strict=True)
        for position, start, low, high in rows:
            values[low:high] = flats[position][start : start + high - low]
        return values


_PIECE_ROWS = 65_536
_WHOLE, _PARTIAL, _UNSEEN = range(3)  # the most of some chunks says what is to be done


class PresenceReader:
    """A reader of presence bits over the reader of their column."""

    def __init__(self, bits: ColumnReader, rows: NDArray[np.int64]) -> None:
        self._bits = bits
        self._rows = rows
        self._seen = np.full(len(rows), _UNSEEN, np.uint8)

    def read(self, place: RowLocations) -> Array | Ragged:
        most = self._seen[place.positions].max(initial=_WHOLE)
        if most == _UNSEEN:
            self._look_through(place.positions)
            most = self._seen[place.positions].max()
        return self._bits.read(place) if most == _PARTIAL else np.ones(len(place.rows), np.bool_)

    def read_slices(self, place: RowLocations, starts: NDArray[np.int64], length: int) -> Array:
        return self._bits.read_slices(place, starts, length)

    def read_batches(self, place: RowLocations, size: int) -> Iterator[Array | Ragged]:
        return (self.read(place.part(some)) for some in slices(len(place.rows), size))

    def views(self, place: RowLocations) -> Iterator[Array]:
        return self._bits.views(place)

    def _look_through(self, positions: NDArray[np.int64]) -> None:
        for position in np.unique(positions[self._seen[positions] == _UNSEEN]).tolist():
            self._seen[position] = _WHOLE if self._is_whole(position) else _PARTIAL

    def _is_whole(self, position: int) -> bool:
        """Some rows at a time: how many there are is only believed once the first of them open the chunk."""
        count = int(self._rows[position])
        pieces = (np.arange(at, min(at + _PIECE_ROWS, count)) for at in range(0, count, _PIECE_ROWS))
        return all(
            np.asarray(self._bits.read(RowLocations(np.full(len(rows), position), rows))).all() for rows in pieces
        )
