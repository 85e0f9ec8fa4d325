"""Read the rows of one column: fixed, ragged, compressed or dictionary.

fixed        one compiled call copies the rows of mapped chunks whose blocks were checked
ragged       the offsets of all rows, likewise; then all rows in one call
compressed   the blocks of the rows, cached or decoded now; then all rows in one call
dictionary   the index of the rows, then the rows of the same chunks that hold their values

Addresses are compared with their tensor before anything is read, although a chunk is checked when it is opened: a
mapped file may change later.
"""

from collections.abc import Callable, Iterator, Sequence
from typing import Any, NamedTuple, Protocol

import numpy as np
from numpy.typing import NDArray

from forebay import kernels
from forebay.columns import Array, Column, Ragged
from forebay.format.chunk_file import ChunkFile
from forebay.format.codecs import CodecError
from forebay.read.blocks import BlockCache, Checks, DecodedBlock
from forebay.read.maps import Maps, RowLocations, TensorTable

_EDGE_BYTES = 8  # of one offset
Numbers = NDArray[np.int64]


class Slices(NamedTuple):
    """Items of the first axis of every row of a fixed column: `length` of them, from a different one for each row."""

    starts: Numbers
    length: int


class ColumnReader(Protocol):
    def read(self, locations: RowLocations, part: Slices | None = None) -> Array | Ragged: ...

    def views(self, locations: RowLocations) -> Iterator[Array]:
        """The rows one by one, each checked when it is yielded; ragged rows are not copied."""
        ...


def column_reader(column: Column, maps: Maps, checks: Checks, blocks: BlockCache, max_block_bytes: int) -> ColumnReader:
    """Return the reader of a column, or of the values of a dictionary."""
    if column.codec != "none":
        return CompressedReader(column, maps, checks, blocks, max_block_bytes)
    if column.has_offsets:
        return RaggedReader(column, maps, checks)
    shape, dtype, item_bytes = column.shape, column.array_dtype, column.item_bytes
    return FixedReader(shape, dtype, item_bytes, lambda file: file.flat(column.name), maps, checks)


class FixedReader:
    """Copies items of one shape from the addresses of mapped chunks: rows, or the two offsets of each ragged row."""

    def __init__(
        self,
        shape: tuple[int, ...],
        dtype: np.dtype[Any],
        stride: int,
        tensor: Callable[[ChunkFile], Array],
        maps: Maps,
        checks: Checks,
    ) -> None:
        self._shape, self._dtype, self._stride, self._maps, self._checks = shape, dtype, stride, maps, checks
        self._table = TensorTable(maps, checks.chunks, tensor)
        tables = (self._table.bases, self._table.sizes, max(1, stride))
        self._tables = (*tables, checks.first, checks.bits, checks.block_rows)

    def read(self, locations: RowLocations, part: Slices | None = None) -> Array:
        shape, starts = self._shape, None
        if part is not None:
            shape = (part.length, *shape[1:])
            starts = part.starts * (self._stride // max(1, self._shape[0]))
        out = np.empty((len(locations.rows), *shape), self._dtype)
        if not out.nbytes:
            return out
        raw = out.reshape(-1).view(np.uint8)
        with self._maps.reading():
            if kernels.read_rows(raw, *locations, starts, self._tables):
                self._maps.touch(locations.positions)
            else:
                addresses = self._addresses(locations, starts, out.nbytes // len(out))
                kernels.gather(raw, addresses, np.full(len(out), out.nbytes // len(out)))
        return out

    def views(self, locations: RowLocations) -> Iterator[Array]:
        return iter(self.read(locations))

    def _addresses(self, locations: RowLocations, starts: Numbers | None, item: int) -> Numbers:
        """Where items are, after mapping their chunks and checking their blocks."""
        bases = self._table.mapped(locations.positions)
        offsets = locations.rows * self._stride + (0 if starts is None else starts)
        inside = (offsets >= 0) & (offsets + item <= self._table.sizes[locations.positions])
        if not inside.all():
            raise self._checks.outside(int(locations.positions[~inside][0]))
        self._checks.ensure(locations)
        addresses: Numbers = bases + offsets
        return addresses


def _edges_reader(column: Column, maps: Maps, checks: Checks) -> FixedReader:
    """Return the reader of where the values of each row start and stop."""
    return FixedReader((2,), np.dtype(np.int64), _EDGE_BYTES, lambda file: file.offsets(column.name), maps, checks)


class RaggedReader:
    """Copies ranges of values from mapped chunks."""

    def __init__(self, column: Column, maps: Maps, checks: Checks) -> None:
        self._column, self._maps, self._checks = column, maps, checks
        self._edges = _edges_reader(column, maps, checks)
        self._table = TensorTable(maps, checks.chunks, lambda file: file.flat(column.name))

    def read(self, locations: RowLocations, part: Slices | None = None) -> Ragged:
        _check_fixed(self._column, part)
        with self._maps.reading():
            bases, starts, stops = self._located(locations)
            return _gathered(self._column, bases, starts, stops)

    def views(self, locations: RowLocations) -> Iterator[Array]:
        """Rows as views of the mapped files; a view keeps its map open."""
        with self._maps.reading():
            _, starts, stops = self._located(locations)
            positions = locations.positions.tolist()
            flats = {position: self._maps.get(position).flat(self._column.name) for position in set(positions)}
        for position, start, stop in zip(positions, starts.tolist(), stops.tolist(), strict=True):
            yield flats[position][start:stop]

    def _located(self, locations: RowLocations) -> tuple[Numbers, Numbers, Numbers]:
        """The address of value 0 of each row's chunk, and the values of the row; checked, and in bounds."""
        starts, stops = self._edges.read(locations).T
        bases = self._table.mapped(locations.positions)
        inside = (starts >= 0) & (starts <= stops)
        if self._column.item_bytes:
            inside &= stops <= self._table.sizes[locations.positions] // self._column.item_bytes
        if not inside.all():
            raise self._checks.outside(int(locations.positions[~inside][0]))
        return bases, starts, stops


class CompressedReader:
    """Reads rows from decoded blocks."""

    def __init__(self, column: Column, maps: Maps, checks: Checks, blocks: BlockCache, max_block_bytes: int) -> None:
        self._column, self._maps, self._checks, self._blocks = column, maps, checks, blocks
        self._max_block_bytes = max_block_bytes
        self._number = blocks.new_column()
        self._edges = _edges_reader(column, maps, checks) if column.has_offsets else None

    def read(self, locations: RowLocations, part: Slices | None = None) -> Array | Ragged:
        """Copy the rows of some blocks at a time: of as many as the block cache returns at once."""
        _check_fixed(self._column, part)
        self._checks.ensure(locations)
        numbers, which = np.unique(self._checks.numbers(locations), return_inverse=True)
        pieces, done = list[tuple[Numbers, Array | Ragged]](), 0
        while done < len(numbers) or not pieces:
            held = self._blocks.get(self._number, numbers[done:].tolist(), self._decode)
            rows = np.flatnonzero((which >= done) & (which < done + len(held)))
            pieces.append((rows, self._copied(locations.at(rows), which[rows] - done, held)))
            done += len(held)
        values = pieces[0][1] if len(pieces) == 1 else merged_rows(pieces, len(which), pieces[0][1])
        return values if part is None else _sliced(values, part)

    def views(self, locations: RowLocations) -> Iterator[Array]:
        """Rows as views of decoded blocks."""
        self._checks.ensure(locations)
        starts, stops = self._values(locations)
        for at, number in enumerate(self._checks.numbers(locations).tolist()):
            block = self._blocks.get(self._number, [number], self._decode)[0]
            low, high = int(starts[at]) - block.span[0], int(stops[at]) - block.span[0]
            if not 0 <= low <= high <= len(block.values):
                raise self._checks.outside(int(locations.positions[at]))
            yield block.values[low] if self._edges is None else block.values[low:high]

    def _values(self, locations: RowLocations) -> tuple[Numbers, Numbers]:
        if self._edges is None:
            return locations.rows, locations.rows + 1
        starts, stops = self._edges.read(locations).T
        return starts, stops

    def _copied(self, locations: RowLocations, which: Numbers, held: list[DecodedBlock]) -> Array | Ragged:
        """Rows, each from the block `held[which[i]]`."""
        starts, stops = self._values(locations)
        # From a list of tuples, NumPy would take five times as long.
        addresses = np.array([block.address for block in held], np.int64)[which]
        firsts = np.array([block.span[0] for block in held], np.int64)[which]
        ends = np.array([block.span[1] for block in held], np.int64)[which]
        inside = (starts >= firsts) & (starts <= stops) & (stops <= ends)
        if not inside.all():
            raise self._checks.outside(int(locations.positions[~inside][0]))
        values = _gathered(self._column, addresses - firsts * self._column.item_bytes, starts, stops)
        return values if self._edges is not None else values.values

    def _decode(self, number: int) -> DecodedBlock:
        position, block = self._checks.find(number)
        file = self._maps.get(position)
        try:
            values = file.decode_block(self._column.name, block, self._max_block_bytes)
        except CodecError as error:
            raise self._checks.undecodable(file, block, error) from error
        return DecodedBlock(values, self._first_value(file, block))

    def _first_value(self, file: ChunkFile, block: int) -> int:
        row = block * self._checks.block_rows
        return row if self._edges is None else int(file.offsets(self._column.name)[row])


def _gathered(column: Column, bases: Numbers, starts: Numbers, stops: Numbers) -> Ragged:
    """Copy the values `starts` to `stops` of every row, counted from its base."""
    ends = np.concatenate([[0], np.cumsum(stops - starts, dtype=np.int64)])
    values = np.empty((int(ends[-1]), *column.shape), column.array_dtype)
    if values.nbytes:
        item = column.item_bytes
        kernels.gather(values.reshape(-1).view(np.uint8), bases + starts * item, (stops - starts) * item)
    return Ragged(values, ends)


def merged_rows(pieces: Sequence[tuple[Numbers, Array | Ragged]], count: int, like: Array | Ragged) -> Array | Ragged:
    """Put rows where they belong among `count`; others are NaN, 0 or empty.

    >>> pieces = [(np.array([0, 2]), Ragged.of_bytes([b"ab", b"c"])), (np.array([1]), Ragged.of_bytes([b"d"]))]
    >>> merged = merged_rows(pieces, 3, pieces[0][1])
    >>> merged.values.tobytes(), merged.offsets.tolist()
    (b'abdc', [0, 2, 3, 4])
    """
    if not isinstance(like, Ragged):
        merged = np.full((count, *like.shape[1:]), np.nan if like.dtype.kind in "fV" else 0, like.dtype)
        for at, values in pieces:
            merged[at] = values
        return merged
    ragged = [(at, rows) for at, rows in pieces if isinstance(rows, Ragged)]
    offsets = np.zeros(count + 1, np.int64)
    for at, rows in ragged:
        offsets[at + 1] = rows.lengths
    np.cumsum(offsets, out=offsets)
    values = np.empty((int(offsets[-1]), *like.values.shape[1:]), like.values.dtype)
    for at, rows in ragged:
        # A value moves by as much as its row does.
        moves = np.repeat(offsets[at] - rows.offsets[:-1].astype(np.int64), rows.lengths.astype(np.int64))
        first, last = int(rows.offsets[0]), int(rows.offsets[-1])
        values[np.arange(first, last) + moves] = rows.values[first:last]
    return Ragged(values, offsets)


def _check_fixed(column: Column, part: Slices | None) -> None:
    if part is not None and column.has_offsets:
        raise TypeError(f"'{column.name}' is ragged or a dictionary; slices need rows of one shape, each stored")


def _sliced(values: Array | Ragged, part: Slices) -> Array:
    assert not isinstance(values, Ragged)
    sliced: Array = values[np.arange(len(values))[:, None], part.starts[:, None] + np.arange(part.length)]
    return sliced


class DictionaryReader:
    """Reads values that are stored once for equal rows of a chunk."""

    def __init__(
        self, column: Column, values: ColumnReader, index: ColumnReader, checks: Checks, rows: Numbers
    ) -> None:
        self._column, self._values, self._index, self._checks, self._rows = column, values, index, checks, rows

    def read(self, locations: RowLocations, part: Slices | None = None) -> Array | Ragged:
        _check_fixed(self._column, part)
        values = self._values.read(self._holders(locations))
        assert isinstance(values, Ragged)
        if self._column.ragged:
            return values
        lengths = values.lengths
        if (lengths > 1).any():
            raise self._checks.outside(int(locations.positions[lengths > 1][0]))
        expanded = np.zeros((len(values), *self._column.shape), self._column.array_dtype)
        expanded[lengths == 1] = values.values
        return expanded

    def views(self, locations: RowLocations) -> Iterator[Array]:
        return iter(self.read(locations))

    def _holders(self, locations: RowLocations) -> RowLocations:
        rows = np.asarray(self._index.read(locations)).astype(np.int64)
        outside = rows >= self._rows[locations.positions]
        if outside.any():
            raise self._checks.outside(int(locations.positions[outside][0]))
        return RowLocations(locations.positions, rows)
