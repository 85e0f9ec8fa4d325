"""Reading a compressed column: blocks are decoded once and kept while there is room, rows are gathered out of them.

    rows ──▶ their blocks, each once ──▶ kept from before, or decoded ──▶ address of every row ──▶ one gather per batch

The blocks of many rows are looked for together, so that what costs time is the decoding. While rows are copied out of
them they are held, whether or not they are kept: at most half as many bytes as are kept, or the blocks of one batch.
"""

from collections.abc import Iterator

import numpy as np
from numpy.typing import NDArray

from forebay.cache.addresses import Edges, value_addresses
from forebay.cache.blocks import BlockCache
from forebay.cache.checks import Blocks, Checks
from forebay.cache.gather import SHORT_ROW, Window
from forebay.cache.maps import Maps
from forebay.cache.place import Place, cut_batches, slices, taken
from forebay.columns import Array, Column, Ragged, join
from forebay.format.codec import CodecError


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

    def read(self, place: Place) -> Array | Ragged:
        if self._can_hold(place):
            (rows,) = self._gathered(place, max(1, len(place.rows)))
            return rows
        # So many blocks that they go before they are needed again, unless the rows of each come one after the other.
        by_block = np.argsort(self._checks.numbers(place), kind="stable")
        ordered = Place(place.positions[by_block], place.rows[by_block])
        return taken(join(list(self.read_batches(ordered, 1))), np.argsort(by_block))

    def read_slices(self, place: Place, starts: NDArray[np.int64], length: int) -> Array:
        rows = self.read(place)
        if isinstance(rows, Ragged):
            raise TypeError(f"'{self._column.name}' is ragged; slices are of columns whose rows have one shape")
        sliced: Array = rows[np.arange(len(rows))[:, None], starts[:, None] + np.arange(length)]
        return sliced

    def read_batches(self, place: Place, size: int) -> Iterator[Array | Ragged]:
        step = count = len(place.rows)
        while step > size and not all(self._can_hold(place.part(some)) for some in slices(count, step)):
            step = max(size, step // 2 // size * size)
        for some in slices(count, max(step, size)):
            part = place.part(some)
            yield from self._gathered(part, size) if size == 1 or step > size else [self.read(part)]

    def _can_hold(self, place: Place) -> bool:
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
        starts, _ = self._edges.of(Place(positions, first))
        _, stops = self._edges.of(Place(positions, last))
        return float((stops - starts).sum(dtype=np.float64)) * column.item_bytes

    def _gathered(self, place: Place, size: int) -> Iterator[Array | Ragged]:
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

    def views(self, place: Place) -> Iterator[Array]:
        """Parts of decoded blocks."""
        for position, row in zip(place.positions.tolist(), place.rows.tolist(), strict=True):
            self._checks.ensure_row(position, row)
            yield self._view(position, row)

    def _view(self, position: int, row: int) -> Array:
        place = Place(np.array([position]), np.array([row]))
        found = self._find(place)
        (block,) = found.blocks
        if self._edges is None:
            view: Array = block.values[row - block.first]
            return view
        starts, stops = self._edges.of(place)
        if found.are_outside(starts, stops).any():
            raise self._checks.outside(position)
        return block.values[int(starts[0]) - block.first : int(stops[0]) - block.first]

    def _find(self, place: Place) -> _Found:
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
