"""Read the rows of one column: plain, compressed, or presence bits.

fixed, uncompressed    addresses of rows, one gather for the whole batch
ragged, uncompressed   addresses of values if rows are short, else row by row
compressed             blocks of the rows, cached or decoded now; addresses of rows, one gather per batch

The blocks of many rows are looked up together. They stay in memory while rows are copied out of them, even if the block
cache drops them: at most half the size of the block cache, or the blocks of one batch.
"""

from collections import deque
from collections.abc import Iterator
from contextlib import closing
from functools import cached_property, partial
from typing import Protocol

import numpy as np
from numpy.typing import NDArray

from forebay import compiled
from forebay.columns import Array, Column, Ragged, join
from forebay.format.chunk import ChunkFile, CodecError, most_bytes
from forebay.read.chunk_maps import Maps, RowLocations, cut_batches, reorder, slices
from forebay.read.gather import (
    SHORT_ROW,
    Addresses,
    AddressWindow,
    Blocks,
    Checks,
    DecodedBlock,
    DecodedBlocks,
    Edges,
    Facts,
    RowAddresses,
    Where,
    batches_of_addresses,
    value_addresses,
)
from forebay.store.base import Buffer


def slices_of(column: Column, rows: Array | Ragged, starts: NDArray[np.int64], length: int) -> Array:
    """`length` items of the first axis of every row, from the row's start."""
    if isinstance(rows, Ragged):
        raise TypeError(f"'{column.name}' is ragged; slices need a column with fixed shape")
    sliced: Array = rows[np.arange(len(rows))[:, None], starts[:, None] + np.arange(length)]
    return sliced


class _Found:
    """The blocks of some rows, kept alive while rows are copied out of them."""

    def __init__(self, facts: Facts, blocks: list[DecodedBlock], item_bytes: int) -> None:
        self.blocks, self._item_bytes = blocks, item_bytes
        self.addresses, self._firsts, self._counts = facts.T
        # The address of item 0 of the chunk if the block reached back to it: item n is at base + n · bytes.
        self.bases: NDArray[np.int64] = self.addresses - self._firsts * item_bytes

    @cached_property
    def window(self) -> AddressWindow:
        """The addresses from the lowest block to the highest."""
        window = AddressWindow(self._item_bytes)
        if self.blocks:
            low = min(block.address for block in self.blocks)
            window.include(low, max(block.address + block.nbytes for block in self.blocks) - low)
        return window

    def are_outside(self, starts: NDArray[np.int64], stops: NDArray[np.int64]) -> NDArray[np.bool_]:
        """Which rows (items `starts` to `stops` of their chunk) are outside their block."""
        # As unsigned, a negative number is larger than any count.
        lows, highs = (starts - self._firsts).view(np.uint64), (stops - self._firsts).view(np.uint64)
        outside: NDArray[np.bool_] = (lows > highs) | (highs > self._counts.astype(np.uint64))
        return outside


_DECODED_TOGETHER = 64  # blocks that a thread says it decodes
_STARTED_TOGETHER = 4  # of them, in one call


def decodes_without_lock(column: Column) -> bool:
    """Whether compiled code decodes a column."""
    return (
        column.codec == "zstd"
        and column.dtype != "bool"
        and compiled.native is not None
        and compiled.native.can_decode()
    )


_Located = tuple[NDArray[np.int64], NDArray[np.int64] | None, list[DecodedBlock]]  # addresses, counts, the blocks


class CompressedReader:
    """Reads rows from decoded blocks."""

    def __init__(
        self,
        column: Column,
        rows: NDArray[np.int64],
        maps: Maps,
        checks: Checks,
        blocks: DecodedBlocks,
        max_block_bytes: int,
    ) -> None:
        self._column = column
        self._rows = rows
        self._block_rows, self._item_bytes = column.block_rows, column.item_bytes
        self._max_block_bytes = max_block_bytes
        self._maps = maps
        self._checks = checks
        self._blocks = blocks
        self._reserved = blocks.reserve(checks.count)  # the number of its first block among those of all columns
        self._edges = Edges(maps, len(rows), column.name, checks.outside) if column.ragged else None
        block_bytes = min(column.block_rows * column.item_bytes, 1 << 62)
        self._largest = np.full(len(rows), -1 if column.ragged else block_bytes, np.int64)  # -1: unknown

    def read(self, place: RowLocations) -> Array | Ragged:
        if self._can_hold(place):
            (rows,) = self._gathered(place, max(1, len(place.rows)))
            return rows
        # The blocks do not fit into memory together, so read the rows block by block.
        by_block = np.argsort(self._checks.numbers(place), kind="stable")
        ordered = RowLocations(place.positions[by_block], place.rows[by_block])
        return reorder(join(list(self.read_batches(ordered, 1))), np.argsort(by_block))

    def read_slices(self, place: RowLocations, starts: NDArray[np.int64], length: int) -> Array:
        return slices_of(self._column, self.read(place), starts, length)

    def read_batches(self, place: RowLocations, size: int) -> Iterator[Array | Ragged]:
        step = self._step(place, size)
        for some in slices(len(place.rows), step):
            part = place.part(some)
            yield from self._gathered(part, size) if size == 1 or step > size else [self.read(part)]

    def _step(self, place: RowLocations, size: int) -> int:
        """How many rows, a multiple of `size`, have blocks that can be held together; at least `size`."""
        step = count = len(place.rows)
        while step > size and not all(self._can_hold(place.part(some)) for some in slices(count, step)):
            step = max(size, step // 2 // size * size)
        return max(step, size)

    def _can_hold(self, place: RowLocations) -> bool:
        """Whether the decoded blocks of some rows fit into half of the block cache."""
        room = self._blocks.limit // 2
        if len(place.rows) * self._largest_block(place.positions) <= room:
            return True
        return self._decoded_bytes(np.unique(self._checks.numbers(place))) <= room

    def _largest_block(self, positions: NDArray[np.int64]) -> float:
        """The largest decoded size of a block of some chunks, from their indexes."""
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
        """The decoded size of some blocks, from the index."""
        column = self._column
        if self._edges is None:
            return len(blocks) * column.block_rows * column.item_bytes
        positions, within = self._checks.find_all(blocks)
        first = within * column.block_rows
        last = np.minimum(first + column.block_rows, self._rows[positions]) - 1
        starts, _ = self._edges.of(RowLocations(positions, first))
        _, stops = self._edges.of(RowLocations(positions, last))
        return float((stops - starts).sum(dtype=np.float64)) * column.item_bytes

    def read_numbers(self, numbers: NDArray[np.int64], starts: NDArray[np.int64]) -> None:
        return None

    def locate_batches(self, place: RowLocations, size: int) -> Iterator[RowAddresses]:
        step = self._step(place, size)
        for some in slices(len(place.rows), step):
            part = place.part(some)
            if step == size and not self._can_hold(part):
                yield RowAddresses.of(self._column, self.read(part))
                continue
            addresses, counts, held = self._compiled_addresses(part) or self._addresses(part)
            yield from batches_of_addresses(self._column, addresses, counts, size)
            del held  # rows stay where they are until then

    def _addresses(self, place: RowLocations) -> _Located:
        found, starts, stops = self._found(place)
        counts = None if self._edges is None else stops - starts
        return found.bases + starts * self._column.item_bytes, counts, found.blocks

    def _compiled_addresses(self, place: RowLocations) -> _Located | None:
        """As `_addresses`; None where a row is not mapped or outside of its block, or without compiled code."""
        if compiled.native is None:
            return None
        self._checks.ensure(place)
        addresses, edges = np.empty(len(place.rows), np.int64), self._edges
        counts = None if edges is None else np.empty(len(place.rows), np.int64)
        ragged = None if counts is None or edges is None else (counts, *edges.tables())
        first_blocks, _, block_rows = self._checks.checked
        ticket = self._maps.begin_reading()
        try:
            column = (first_blocks, block_rows, self._reserved)
            missing, blocks = self._blocks.locate(addresses, place, column, self._column.item_bytes, ragged)
        finally:
            self._maps.end_reading(ticket)
        if missing is None:
            return None
        self._maps.touch(place.positions)
        if missing:
            at = np.flatnonzero(addresses == 0)
            addresses[at], further, decoded = self._addresses(RowLocations(place.positions[at], place.rows[at]))
            if counts is not None and further is not None:
                counts[at] = further
            blocks += decoded
        return addresses, counts, blocks

    def _gathered(self, place: RowLocations, size: int) -> Iterator[Array | Ragged]:
        """Rows in batches; the blocks of all rows stay in memory until the last batch is taken."""
        found, starts, stops = self._found(place)
        if self._edges is not None:
            yield from cut_batches(self._ragged(found, starts, stops), size)
        else:
            addresses = found.bases + place.rows * self._column.item_bytes
            yield from found.window.gather_batches(addresses, size, self._column.array_dtype, self._column.shape)

    def _found(self, place: RowLocations) -> tuple[_Found, NDArray[np.int64], NDArray[np.int64]]:
        """The checked blocks of some rows, and where each row starts and stops in its chunk."""
        self._checks.ensure(place)
        found = self._find(place)
        starts, stops = (place.rows, place.rows + 1) if self._edges is None else self._edges.of(place)
        outside = found.are_outside(starts, stops)
        if outside.any():
            raise self._checks.outside(int(place.positions[outside][0]))
        return found, starts, stops

    def views(self, place: RowLocations) -> Iterator[Array]:
        """Rows as views of decoded blocks."""
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
        numbers = self._checks.numbers(place)
        numbers += self._reserved
        return _Found(*self._blocks.find(numbers, self._decode_all, self._together), self._column.item_bytes)

    def _ragged(self, found: _Found, starts: NDArray[np.int64], stops: NDArray[np.int64]) -> Ragged:
        column = self._column
        ends = np.concatenate([[0], np.cumsum(stops - starts, dtype=np.int64)])
        if ends[-1] <= SHORT_ROW * len(starts):
            addresses = value_addresses(found.bases, starts, ends, column.item_bytes)
            return Ragged(found.window.gather(addresses, column.array_dtype, column.shape), ends)
        values = np.empty((int(ends[-1]), *column.shape), column.array_dtype)
        rows = zip(found.addresses.tolist(), starts.tolist(), ends[:-1].tolist(), ends[1:].tolist(), strict=True)
        blocks = {block.address: block for block in found.blocks}
        for address, start, low, high in rows:
            block = blocks[address]
            values[low:high] = block.values[start - block.first : start - block.first + high - low]
        return Ragged(values, ends)

    @property
    def _together(self) -> int:
        """How many blocks are decoded in one call."""
        return _DECODED_TOGETHER if decodes_without_lock(self._column) else 1

    def _decode_all(self, numbers: list[int]) -> Iterator[DecodedBlock]:
        """Decode blocks: compiled code up to the first that it refuses, then Python, which says what is wrong.

        Helpers decode the first blocks while the memory of the next ones is prepared, and while those are kept.
        """
        begun: deque[tuple[list[DecodedBlock], object]] = deque()
        done = 0
        for some in slices(len(numbers), _STARTED_TOGETHER) if decodes_without_lock(self._column) else ():
            blocks, work = self._begun(numbers[some])
            begun.append((blocks, work))
            if len(blocks) < some.stop - some.start:
                break
        while begun:
            blocks, work = begun.popleft()
            sound = compiled.native.finish(work)
            yield from blocks[:sound]
            done += sound
            if sound < len(blocks):
                break
        yield from map(self._decode, numbers[done:])

    def _begun(self, numbers: list[int]) -> tuple[list[DecodedBlock], object]:
        """Blocks that helpers decode from now on, up to the first of an impossible size, and their work."""
        positions, within = self._checks.find_all(np.array(numbers) - self._reserved)
        name, dtype, shape = self._column.name, self._column.array_dtype, self._column.shape
        frames, outs, blocks = list[Buffer](), list[Array](), list[DecodedBlock]()
        for position, block in zip(positions.tolist(), within.tolist(), strict=True):
            file = self._maps.get(position)
            start, stop = file.check(name).span(block)
            first, count = self._extent(file, block)
            size = count * self._item_bytes
            if not 0 < size <= min(self._max_block_bytes, most_bytes("zstd", stop - start)):
                break
            frames.append(file.view[start:stop])
            outs.append(np.empty(size, np.uint8))
            blocks.append(DecodedBlock(np.ndarray((count, *shape), dtype, outs[-1]), first))
        return blocks, compiled.native.start_decoding(frames, outs)

    def _extent(self, file: ChunkFile, block: int) -> tuple[int, int]:
        """The first value of a block in its chunk, and how many it has."""
        low = block * self._block_rows
        high = min(low + self._block_rows, file.rows)
        if self._edges is not None:
            offsets = file.offsets(self._column.name)
            low, high = int(offsets[low]), int(offsets[high])
        return low, high - low

    def _decode(self, number: int) -> DecodedBlock:
        position, block = self._checks.find(number - self._reserved)
        file = self._maps.get(position)
        try:
            values = file.decode_block(self._column.name, block, self._max_block_bytes)
        except CodecError as error:
            raise self._checks.corrupt(file, block, error) from error
        return DecodedBlock(values, self._extent(file, block)[0])


class ColumnReader(Protocol):
    def read(self, place: RowLocations) -> Array | Ragged: ...

    def read_numbers(self, numbers: NDArray[np.int64], starts: NDArray[np.int64]) -> Array | None:
        """Rows by number, in one compiled call; `starts` has the first row of each chunk.

        None where a row is not mapped, not checked or not there, or where no code is compiled for the column.
        """
        ...

    def read_slices(self, place: RowLocations, starts: NDArray[np.int64], length: int) -> Array:
        """`length` items of the first axis of every row of a fixed column, from the row's start."""
        ...

    def read_batches(self, place: RowLocations, size: int) -> Iterator[Array | Ragged]:
        """The rows in batches of `size`."""
        ...

    def locate_batches(self, place: RowLocations, size: int) -> Iterator[RowAddresses]:
        """As `read_batches`, without copying: the addresses of checked rows, for compiled code."""
        ...

    def views(self, place: RowLocations) -> Iterator[Array]:
        """The rows one by one, each checked when it is yielded; ragged rows are not copied."""
        ...


def column_reader(
    column: Column,
    rows: NDArray[np.int64],
    maps: Maps,
    blocks: DecodedBlocks,
    where: Where,
    max_block_bytes: int,
) -> ColumnReader:
    """The reader of a column; `rows` has the number of rows of each chunk."""
    checks = Checks(column, rows, maps, where)
    if column.codec != "none":
        return CompressedReader(column, rows, maps, checks, blocks, max_block_bytes)
    plain = PlainRaggedReader if column.ragged else PlainFixedReader
    return plain(column, rows, maps, checks)


class PlainFixedReader:
    """Copies rows from the addresses of mapped chunks."""

    def __init__(self, column: Column, rows: NDArray[np.int64], maps: Maps, checks: Checks) -> None:
        self._column = column
        self._shape, self._dtype, self._row_bytes = column.shape, column.array_dtype, column.item_bytes
        self._maps = maps
        self._checks = checks
        self._addresses_of = partial(Addresses, maps, len(rows), lambda file: file.flat(column.name), checks.outside)
        self._addresses = self._addresses_of(column.item_bytes)
        self._tables = self._addresses.tables(checks.checked)
        self._slices: dict[int, Addresses] = {}  # by length
        self._is_block = column.block_rows == 1

    def read(self, place: RowLocations) -> Array:
        (rows,) = self.read_batches(place, max(1, len(place.rows)))
        return rows

    def read_numbers(self, numbers: NDArray[np.int64], starts: NDArray[np.int64]) -> Array | None:
        if compiled.native is None or not self._row_bytes or self._maps.may_close:
            return None
        copied = np.empty(len(numbers) * self._row_bytes, np.uint8)  # some types of values have no buffers
        ticket = self._maps.begin_reading()
        try:
            if not compiled.native.read_rows(copied, numbers, starts, self._tables):
                return None
        finally:
            self._maps.end_reading(ticket)
        return np.ndarray((len(numbers), *self._shape), self._dtype, copied)

    def read_batches(self, place: RowLocations, size: int) -> Iterator[Array]:
        ticket = self._maps.begin_reading()
        try:
            addresses = self._addresses.at(place.positions, place.rows * self._row_bytes)
            if not self._is_block:
                self._checks.ensure(place)
            with closing(self._addresses.gather_batches(addresses, size, self._dtype, self._shape)) as batches:
                yield from self._checked(place, size, batches) if self._is_block else batches
        finally:
            self._maps.end_reading(ticket)

    def locate_batches(self, place: RowLocations, size: int) -> Iterator[RowAddresses]:
        ticket = self._maps.begin_reading()
        try:
            addresses = self._compiled_addresses(place)
            if addresses is None:
                addresses = self._addresses.at(place.positions, place.rows * self._row_bytes)
                self._checks.ensure(place)
            yield from batches_of_addresses(self._column, addresses, None, size)
        finally:
            self._maps.end_reading(ticket)

    def _compiled_addresses(self, place: RowLocations) -> NDArray[np.int64] | None:
        """Where rows are; None if one is not mapped or not checked yet, or without compiled code."""
        if compiled.native is None or not self._row_bytes:
            return None
        addresses = np.empty(len(place.rows), np.int64)
        if not compiled.native.fixed_addresses(addresses, place.positions, place.rows, self._tables):
            return None
        self._maps.touch(place.positions)
        return addresses

    def read_slices(self, place: RowLocations, starts: NDArray[np.int64], length: int) -> Array:
        """Slices of rows; a block is checked whole when it is first read, later only the slices are read."""
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
        """Check rows that are whole blocks after copying, while they are in the CPU cache."""
        for some, rows in zip(slices(len(place.rows), size), batches, strict=True):
            self._checks.ensure_copies(place.part(some), rows)
            yield rows


class PlainRaggedReader:
    """Copies ranges of values from mapped chunks."""

    def __init__(self, column: Column, rows: NDArray[np.int64], maps: Maps, checks: Checks) -> None:
        self._column = column
        self._maps = maps
        self._checks = checks
        self._edges = Edges(maps, len(rows), column.name, checks.outside)
        self._values = Addresses(
            maps, len(rows), lambda file: file.flat(column.name), checks.outside, column.item_bytes
        )
        self._tables = self._values.tables(checks.checked, of_values=True)

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

    def read_numbers(self, numbers: NDArray[np.int64], starts: NDArray[np.int64]) -> None:
        return None

    def read_batches(self, place: RowLocations, size: int) -> Iterator[Array | Ragged]:
        yield from cut_batches(self.read(place), size)

    def locate_batches(self, place: RowLocations, size: int) -> Iterator[RowAddresses]:
        ticket = self._maps.begin_reading()
        try:
            addresses, counts = self._compiled_addresses(place) or self._addresses(place)
            yield from batches_of_addresses(self._column, addresses, counts, size)
        finally:
            self._maps.end_reading(ticket)

    def _addresses(self, place: RowLocations) -> tuple[NDArray[np.int64], NDArray[np.int64]]:
        """Where rows are, mapped and checked now if they were not, and how many values they have."""
        self._checks.ensure(place)
        starts, stops = self._edges.of(place)
        bases = self._values.of_values(place.positions, starts, stops)
        return bases + starts * self._column.item_bytes, stops - starts

    def _compiled_addresses(self, place: RowLocations) -> tuple[NDArray[np.int64], NDArray[np.int64]] | None:
        """As `_addresses`; None if a row is not mapped or not checked yet, or without compiled code."""
        if compiled.native is None or not self._column.item_bytes:
            return None
        addresses, counts = np.empty(len(place.rows), np.int64), np.empty(len(place.rows), np.int64)
        where = (addresses, place.positions, place.rows)
        if not compiled.native.ragged_addresses(*where, self._tables, counts, *self._edges.tables()):
            return None
        self._maps.touch(place.positions)
        return addresses, counts

    def read_slices(self, place: RowLocations, starts: NDArray[np.int64], length: int) -> Array:
        raise TypeError(f"'{self._column.name}' is ragged; slices need a column with fixed shape")

    def views(self, place: RowLocations) -> Iterator[Array]:
        """Rows as views of the mapped files; a view keeps its map open."""
        ticket = self._maps.begin_reading()
        try:
            starts, stops = self._edges.of(place)
            self._values.of_values(place.positions, starts, stops)
        finally:
            self._maps.end_reading(ticket)
        flats: dict[int, Array] = {}
        where = zip(place.positions.tolist(), place.rows.tolist(), starts.tolist(), stops.tolist(), strict=True)
        for position, row, start, stop in where:
            self._checks.ensure_row(position, row)
            if position not in flats:
                flats[position] = self._maps.get(position).flat(self._column.name)
            yield flats[position][start:stop]

    def _by_value(self, bases: NDArray[np.int64], starts: NDArray[np.int64], ends: NDArray[np.int64]) -> Array:
        """One gather for all values: for short rows, a loop over rows costs more than copying."""
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
_WHOLE, _PARTIAL, _UNSEEN = range(3)  # ordered: the maximum over some chunks decides


class PresenceReader:
    """Reads presence bits, without reading the column in chunks where all rows are present.

    A chunk never changes, so the result of looking through it once holds until the cache is closed.
    """

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

    def read_numbers(self, numbers: NDArray[np.int64], starts: NDArray[np.int64]) -> None:
        return None

    def read_slices(self, place: RowLocations, starts: NDArray[np.int64], length: int) -> Array:
        return self._bits.read_slices(place, starts, length)

    def read_batches(self, place: RowLocations, size: int) -> Iterator[Array | Ragged]:
        return (self.read(place.part(some)) for some in slices(len(place.rows), size))

    def locate_batches(self, place: RowLocations, size: int) -> Iterator[RowAddresses]:
        return self._bits.locate_batches(place, size)

    def views(self, place: RowLocations) -> Iterator[Array]:
        return self._bits.views(place)

    def _look_through(self, positions: NDArray[np.int64]) -> None:
        for position in np.unique(positions[self._seen[positions] == _UNSEEN]).tolist():
            self._seen[position] = _WHOLE if self._is_whole(position) else _PARTIAL

    def _is_whole(self, position: int) -> bool:
        """Whether all rows of a chunk are present. Reads in pieces: opening the chunk verifies its row count."""
        count = int(self._rows[position])
        pieces = (np.arange(at, min(at + _PIECE_ROWS, count)) for at in range(0, count, _PIECE_ROWS))
        return all(
            np.asarray(self._bits.read(RowLocations(np.full(len(rows), position), rows))).all() for rows in pieces
        )
