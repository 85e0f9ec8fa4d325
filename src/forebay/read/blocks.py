"""Check blocks of mapped chunks once, and keep decoded blocks while memory allows.

`Checks` has a bit per block, set after the block matched its checksum. Bits are set under a lock and read without one:
a thread that does not see a bit yet checks the block again.
"""

import threading
from collections import OrderedDict
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from functools import partial
from typing import Generic, Protocol, TypeVar

import numpy as np
from numpy.typing import NDArray

from forebay.cache.catalog import corrupt_block
from forebay.columns import Array, Column
from forebay.errors import BlockTooLarge, ChunkCorrupt, ForebayError
from forebay.format.chunk_decode import ChunkFile
from forebay.format.codec import BlockOverLimit, CodecError
from forebay.read.chunk_maps import Maps, RowLocations, runs

Where = tuple[str, str]  # root, layer
Blocks = NDArray[np.int64]  # numbers of blocks, counted over all chunks
CheckedBlocks = tuple[Blocks, NDArray[np.uint8], int]  # the first block of each chunk, a bit per block, rows of a block
_BIT = (1 << np.arange(8)).astype(np.uint8)


class Checks:
    """The checked bits of one column; `rows` has the number of rows of each chunk."""

    def __init__(self, column: Column, rows: NDArray[np.int64], maps: Maps, where: Where) -> None:
        self._column = column
        self._maps = maps
        self._where = where
        self._block_rows = column.block_rows
        self._first = np.concatenate([[0], np.cumsum(-(-rows // column.block_rows), dtype=np.int64)])
        self._bits = np.zeros((int(self._first[-1]) + 7) // 8, np.uint8)
        self._unchecked = int(self._first[-1])
        self._lock = threading.Lock()

    def numbers(self, place: RowLocations) -> Blocks:
        """The block number of every row."""
        blocks = place.rows // self._block_rows
        blocks += self._first[place.positions]
        return blocks

    def find(self, number: int) -> tuple[int, int]:
        """The position of the chunk that contains a block, and the block's number in that chunk."""
        position = int(self._first.searchsorted(number, side="right")) - 1
        return position, number - int(self._first[position])

    def find_all(self, numbers: Blocks) -> tuple[NDArray[np.int64], Blocks]:
        """`find` for many blocks."""
        positions = self._first.searchsorted(numbers, side="right") - 1
        return positions, numbers - self._first[positions]

    @property
    def checked(self) -> CheckedBlocks:
        """What says which blocks are checked, for compiled code."""
        return self._first, self._bits, self._block_rows

    def ensure(self, place: RowLocations) -> None:
        """Check the blocks of these rows that are not checked yet."""
        if not self._unchecked:
            return
        blocks = self.numbers(place)
        fresh = blocks[self._are_fresh(blocks)]
        if len(fresh):
            self._check(np.unique(fresh))

    def ensure_row(self, position: int, row: int) -> None:
        """Check the block of one row if it is not checked yet."""
        block = row // self._block_rows
        number = int(self._first[position]) + block
        if self._bits[number >> 3] & _BIT[number & 7]:
            return
        file = self._maps.get(position)
        if file.check(self._column.name).first_bad([block]) is not None:
            raise self._corrupt_block(file, block)
        self._note_checked(np.array([number]))

    def ensure_copies(self, place: RowLocations, copies: Array) -> None:
        """Check copies of rows, each a whole block, whose blocks are not checked yet."""
        if not self._unchecked:
            return
        blocks = self.numbers(place)
        fresh = np.flatnonzero(self._are_fresh(blocks))
        where = zip(fresh.tolist(), place.positions[fresh].tolist(), place.rows[fresh].tolist(), strict=True)
        for index, position, row in where:
            file = self._maps.get(position)
            if not file.check(self._column.name).agrees(row, copies[index].reshape(-1).view(np.uint8).data):
                raise self._corrupt_block(file, row)
        self._note_checked(blocks[fresh])

    def corrupt(self, file: ChunkFile, block: int, error: CodecError) -> ForebayError:
        """The error for a block that does not decode."""
        (root, layer), name = self._where, self._column.name
        if isinstance(error, BlockOverLimit):
            return BlockTooLarge(root, layer, file.chunk, name, error.size, error.limit)
        return ChunkCorrupt(root, layer, file.chunk, str(error), column=name, block=block)

    def outside(self, position: int) -> ChunkCorrupt:
        """The error for a row whose offsets lie outside its chunk or block."""
        root, layer = self._where
        problem = f"a row of column '{self._column.name}' reaches outside it"
        return ChunkCorrupt(root, layer, self._maps.get(position).chunk, problem)

    def _are_fresh(self, blocks: Blocks) -> NDArray[np.bool_]:
        fresh: NDArray[np.bool_] = (self._bits[blocks >> 3] & _BIT[blocks & 7]) == 0
        return fresh

    def _check(self, blocks: Blocks) -> None:
        name = self._column.name
        positions, within = self.find_all(blocks)
        for position, chosen in runs(positions):
            file = self._maps.get(position)
            bad = file.check(name).first_bad(within[chosen].tolist())
            if bad is not None:
                raise self._corrupt_block(file, bad)
        self._note_checked(blocks)

    def _note_checked(self, blocks: Blocks) -> None:
        with self._lock:
            fresh = np.unique(blocks[self._are_fresh(blocks)])  # another thread may have checked some in the meantime
            np.bitwise_or.at(self._bits, fresh >> 3, _BIT[fresh & 7])
            self._unchecked -= len(fresh)

    def _corrupt_block(self, file: ChunkFile, block: int) -> ChunkCorrupt:
        root, layer = self._where
        return corrupt_block(root, layer, file, self._column.name, block)


@dataclass(frozen=True, slots=True)
class BlockStatistics:
    hits: int
    misses: int
    blocks: int
    bytes: int
    limit_bytes: int


class Block(Protocol):
    @property
    def nbytes(self) -> int: ...


Kept = TypeVar("Kept", bound=Block)
Key = tuple[str, int]  # column, number of the block


class BlockCache(Generic[Kept]):
    """An LRU cache of decoded blocks, at most `limit_bytes` in size. Thread-safe."""

    def __init__(self, limit_bytes: int) -> None:
        self.limit = limit_bytes
        self._blocks: OrderedDict[Key, Kept] = OrderedDict()
        self._bytes = self._hits = self._misses = 0
        self._lock = threading.Lock()
        self._under_way: dict[Key, threading.Event] = {}  # being decoded by some thread

    def get_all(self, keys: Sequence[Key], decode: Callable[[Key], Kept]) -> list[Kept]:
        """The blocks of some keys, decoded if missing; takes the lock once for all that are present."""
        found: list[Kept | None] = []
        with self._lock:
            find, use = self._blocks.get, self._blocks.move_to_end
            for key in keys:
                block = find(key)
                if block is not None:
                    use(key)
                found.append(block)
            self._hits += len(found) - found.count(None)
        pairs = zip(keys, found, strict=True)
        return [self.get(key, partial(decode, key)) if block is None else block for key, block in pairs]

    def get(self, key: Key, decode: Callable[[], Kept]) -> Kept:
        """The block of a key, decoded if missing. A thread waits for a block that another thread is decoding."""
        while True:
            with self._lock:
                block = self._blocks.get(key)
                if block is not None:
                    self._blocks.move_to_end(key)
                    self._hits += 1
                    return block
                decoded = self._under_way.get(key)
                if decoded is None:
                    decoded = self._under_way[key] = threading.Event()
                    self._misses += 1
                    break
            decoded.wait()
        try:
            block = decode()
            self._keep(key, block)
        finally:
            del self._under_way[key]
            decoded.set()
        return block

    def statistics(self) -> BlockStatistics:
        with self._lock:
            return BlockStatistics(self._hits, self._misses, len(self._blocks), self._bytes, self.limit)

    def _keep(self, key: Key, block: Kept) -> None:
        with self._lock:
            if key in self._blocks or block.nbytes > self.limit:
                return
            self._blocks[key] = block
            self._bytes += block.nbytes
            while self._bytes > self.limit:
                _, dropped = self._blocks.popitem(last=False)
                self._bytes -= dropped.nbytes
