"""Check the blocks of mapped chunks once, and keep decoded blocks while memory allows.

`Checks` has a bit per block, set after the block matched its checksum. Bits are set under a lock and read without one:
a thread that does not see a bit yet checks the block again.
"""

import threading
from collections import OrderedDict
from collections.abc import Callable, Sequence
from dataclasses import dataclass

import numpy as np
from numpy.typing import NDArray

from forebay.cache.catalog import corrupt_block
from forebay.columns import Array, Column
from forebay.errors import ChunkCorrupt, ForebayError
from forebay.format.chunk import chunk_corrupt
from forebay.format.chunk_file import ChunkFile
from forebay.format.codecs import BlockOverLimit, CodecError
from forebay.read.maps import Maps, RowLocations, by_position

Where = tuple[str, str]  # root, layer
Blocks = NDArray[np.int64]  # numbers of blocks, counted over all chunks
_BIT = (1 << np.arange(8)).astype(np.uint8)


class Checks:
    """The checked bits of one column; `rows` has the number of rows of each chunk."""

    def __init__(self, column: Column, rows: NDArray[np.int64], maps: Maps, where: Where) -> None:
        self._column, self._maps, self._where = column, maps, where
        self.chunks, self.block_rows = len(rows), column.block_rows
        self.first = np.concatenate([[0], np.cumsum(-(-rows // column.block_rows), dtype=np.int64)])
        self.bits = np.zeros((int(self.first[-1]) + 7) // 8, np.uint8)
        self._unchecked = int(self.first[-1])
        self._lock = threading.Lock()

    def numbers(self, locations: RowLocations) -> Blocks:
        """The block number of every row."""
        blocks = locations.rows // self.block_rows
        blocks += self.first[locations.positions]
        return blocks

    def find(self, number: int) -> tuple[int, int]:
        """The position of the chunk that contains a block, and the block's number in that chunk."""
        position = int(self.first.searchsorted(number, side="right")) - 1
        return position, number - int(self.first[position])

    def ensure(self, locations: RowLocations) -> None:
        """Check the blocks of these rows that are not checked yet."""
        if not self._unchecked:
            return
        blocks = self.numbers(locations)
        fresh = np.unique(blocks[self._are_fresh(blocks)])
        positions = self.first.searchsorted(fresh, side="right") - 1
        for position, chosen in by_position(positions):
            file = self._maps.get(position)
            bad = file.check(self._column.name).first_bad((fresh[chosen] - self.first[position]).tolist())
            if bad is not None:
                raise corrupt_block(*self._where, file, self._column.name, bad)
        if len(fresh):
            self._set(fresh)

    def undecodable(self, file: ChunkFile, block: int, error: CodecError) -> ForebayError:
        """The error for a block that does not decode."""
        (root, layer), name = self._where, self._column.name
        if isinstance(error, BlockOverLimit):
            return ChunkCorrupt(
                f"column '{name}' in chunk {file.chunk} of layer '{layer}' in '{root}' decodes to "
                f"{error.size:,} bytes at once; max_block_bytes is {error.limit:,}",
                hint=f"if you trust this cache, pass max_block_bytes={error.size} to open_cache",
                layer=layer,
                chunk=file.chunk,
                column=name,
            )
        return chunk_corrupt(root, layer, file.chunk, str(error), column=name, block=block)

    def outside(self, position: int) -> ChunkCorrupt:
        """The error for a row whose offsets lie outside its chunk or block."""
        root, layer = self._where
        problem = f"a row of column '{self._column.name}' reaches outside it"
        return chunk_corrupt(root, layer, self._maps.get(position).chunk, problem)

    def _are_fresh(self, blocks: Blocks) -> NDArray[np.bool_]:
        fresh: NDArray[np.bool_] = (self.bits[blocks >> 3] & _BIT[blocks & 7]) == 0
        return fresh

    def _set(self, blocks: Blocks) -> None:
        with self._lock:
            fresh = blocks[self._are_fresh(blocks)]  # another thread may have checked some in the meantime
            np.bitwise_or.at(self.bits, fresh >> 3, _BIT[fresh & 7])
            self._unchecked -= len(fresh)


@dataclass(frozen=True, slots=True)
class BlockStatistics:
    hits: int
    misses: int
    blocks: int
    bytes: int
    limit_bytes: int


class DecodedBlock:
    """The values of one block; `span` has the indices of the first value and of the one after the last in a chunk."""

    __slots__ = ("address", "nbytes", "span", "values")

    def __init__(self, values: Array, first: int) -> None:
        self.values, self.span, self.nbytes = values, (first, first + len(values)), values.nbytes
        self.address = int(values.__array_interface__["data"][0])  # `ctypes.data` takes three times as long


Key = tuple[int, int]  # of a column, of a block
Decode = Callable[[int], DecodedBlock]


class BlockCache:
    """An LRU cache of decoded blocks, at most `limit` bytes in size. Thread-safe."""

    def __init__(self, limit: int) -> None:
        self.limit = limit
        self._lock = threading.Lock()
        self._decoding: dict[Key, threading.Lock] = {}
        self._columns = self._hits = self._misses = 0
        self._empty()

    def _empty(self) -> None:
        self._blocks: OrderedDict[Key, DecodedBlock] = OrderedDict()
        self._bytes = 0

    def new_column(self) -> int:
        """A number for the keys of one column."""
        with self._lock:
            self._columns += 1
            return self._columns

    def get(self, column: int, numbers: Sequence[int], decode: Decode) -> list[DecodedBlock]:
        """The first of some blocks: as many as take half of the limit, at least one. Missing ones are decoded.

        A thread waits for a block that another thread is decoding.
        """
        held, size = list[DecodedBlock](), 0
        while len(held) < len(numbers) and size <= self.limit // 2:
            with self._lock:  # once for all blocks up to a missing one
                while len(held) < len(numbers) and size <= self.limit // 2:
                    block = self._used((column, numbers[len(held)]))
                    if block is None:
                        break
                    held.append(block)
                    size += block.nbytes
                else:
                    return held
            held.append(self._decoded((column, numbers[len(held)]), decode))
            size += held[-1].nbytes
        return held

    def _decoded(self, key: Key, decode: Decode) -> DecodedBlock:
        with self._lock:
            decoding = self._decoding.setdefault(key, threading.Lock())
        try:
            with decoding:
                with self._lock:
                    if (block := self._used(key)) is not None:
                        return block
                    self._misses += 1
                block = decode(key[1])
                self._keep(key, block)
                return block
        finally:
            self._decoding.pop(key, None)

    def statistics(self) -> BlockStatistics:
        with self._lock:
            return BlockStatistics(self._hits, self._misses, len(self._blocks), self._bytes, self.limit)

    def _used(self, key: Key) -> DecodedBlock | None:
        block = self._blocks.get(key)
        if block is not None:
            self._blocks.move_to_end(key)
            self._hits += 1
        return block

    def _keep(self, key: Key, block: DecodedBlock) -> None:
        with self._lock:
            if key in self._blocks or block.nbytes > self.limit:
                return
            try:
                while self._bytes + block.nbytes > self.limit:
                    self._bytes -= self._blocks.popitem(last=False)[1].nbytes
                self._blocks[key] = block
                self._bytes += block.nbytes
            except BaseException:  # Ctrl-C comes at any line: no blocks rather than a wrong count of bytes
                self._empty()
                raise
