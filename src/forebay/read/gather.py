"""Copy many rows from mapped chunks in one numpy call.

The rows of a fixed column are in many maps, but numpy gathers from one array only. So the address range from the lowest
to the highest map is treated as one array of overlapping items, one per byte, of which only those that start at a row
are ever read.

    map of chunk 7          map of chunk 2
    ├─row─┼─row─┤ ········· ├─row─┼─row─┤          item k of the span is the row_bytes at low + k
    ▲ low                         ▲ low + k

A gather does not check bounds. So every address is compared with its tensor first, although a chunk is checked when it
is opened: a mapped file may change later.

Check blocks of mapped chunks once, and keep decoded blocks while memory allows.

`Checks` has a bit per block, set after the block matched its checksum. Bits are set under a lock and read without one:
a thread that does not see a bit yet checks the block again.
"""

import threading
from collections import deque
from collections.abc import Callable, Generator, Hashable, Iterable, Iterator, Sequence
from dataclasses import dataclass
from functools import partial
from typing import Any, Generic, NamedTuple, Protocol, TypeVar

import numpy as np
from numpy.typing import NDArray

from forebay import compiled
from forebay.cache.catalog import corrupt_block
from forebay.columns import Array, Column, Ragged
from forebay.errors import BlockTooLarge, ChunkCorrupt, ForebayError
from forebay.format.chunk import BlockOverLimit, ChunkFile, CodecError
from forebay.read.chunk_maps import Maps, RowLocations, by_position, runs, slices

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

    @property
    def count(self) -> int:
        """How many blocks the column has."""
        return int(self._first[-1])

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
Key = Hashable
_NEVER = np.iinfo(np.int64).max


class BlockCache(Generic[Kept]):
    """An LRU cache of decoded blocks, at most `limit_bytes` in size. Thread-safe."""

    def __init__(self, limit_bytes: int) -> None:
        self.limit = limit_bytes
        self._slots: dict[Key, int] = {}
        self._keys: list[Key] = []  # of each slot, as the arrays below
        self._held = np.empty(0, object)
        self._used = np.empty(0, np.int64)  # when each block was last used; _NEVER for a free slot
        self._free: list[int] = []
        self._oldest: list[tuple[int, int]] = []  # slots and when they were used, the oldest of all last
        self._bytes = self._hits = self._misses = self._clock = 0
        self._lock = threading.Lock()
        self._under_way: dict[Key, threading.Lock] = {}  # of blocks that a thread is decoding, which holds the lock

    def get_all(self, keys: Sequence[Key], decode: Callable[[list[Key]], Iterable[Kept]], together: int) -> list[Kept]:
        """The blocks of some keys, those that are missing decoded `together` at a time.

        Those that another thread is decoding come last: threads that need the same blocks share the work.
        """
        found: dict[Key, Kept] = {}
        for some in slices(len(keys), together):
            self._get(keys[some], decode, found)
        for key in keys:
            if key not in found:
                found[key] = self.get(key, partial(_only, decode, key))
        return [found[key] for key in keys]

    def get(self, key: Key, decode: Callable[[], Kept]) -> Kept:
        """The block of a key, decoded if missing. A thread waits for a block that another thread is decoding."""
        found: dict[Key, Kept] = {}
        while not found:
            decoded = self._get([key], lambda _: [decode()], found)
            if decoded is not None:
                with decoded:
                    pass
        return found[key]

    def statistics(self) -> BlockStatistics:
        with self._lock:
            return BlockStatistics(self._hits, self._misses, len(self._slots), self._bytes, self.limit)

    def _get(
        self, keys: Sequence[Key], decode: Callable[[list[Key]], Iterable[Kept]], found: dict[Key, Kept]
    ) -> "threading.Lock | None":
        """Add blocks to those found, except those that another thread is decoding; the lock of such a one, if any."""
        other, mine, decoding = None, list[Key](), threading.Lock()
        decoding.acquire()
        with self._lock:
            for key in keys:
                slot = self._slots.get(key)
                if slot is not None:
                    self._use(slot)
                    self._hits += 1
                    found[key] = self._held[slot]
                elif key in self._under_way:
                    other = self._under_way[key]
                else:
                    self._under_way[key] = decoding
                    mine.append(key)
            self._misses += len(mine)
        try:
            for key, block in zip(mine, decode(mine) if mine else (), strict=True):
                found[key] = block
                self._keep(key, block)
        finally:
            for key in mine:
                del self._under_way[key]
            decoding.release()
        return other

    def _use(self, slot: int) -> None:
        self._used[slot] = self._clock
        self._clock += 1

    def _keep(self, key: Key, block: Kept) -> None:
        with self._lock:
            if key in self._slots or block.nbytes > self.limit:
                return
            while self._bytes + block.nbytes > self.limit:
                self._drop(self._least_recent())
            if not self._free:
                self._grow(max(64, 2 * len(self._keys)))
            slot = self._slots[key] = self._free.pop()
            self._keys[slot], self._held[slot] = key, block
            self._bytes += block.nbytes
            self._use(slot)

    def _least_recent(self) -> int:
        """The slot of the block that was not used for the longest time; many are found at once."""
        while True:
            while self._oldest:
                slot, used = self._oldest.pop()
                if self._used[slot] == used:
                    return slot
            count = len(self._slots) // 16 + 1
            slots = np.argpartition(self._used, count - 1)[:count]
            slots = slots[np.argsort(-self._used[slots])]
            self._oldest = list(zip(slots.tolist(), self._used[slots].tolist(), strict=True))

    def _drop(self, slot: int) -> None:
        del self._slots[self._keys[slot]]
        self._bytes -= self._held[slot].nbytes
        self._held[slot], self._used[slot] = None, _NEVER
        self._free.append(slot)

    def _grow(self, count: int) -> None:
        further = count - len(self._keys)
        self._free.extend(range(count - 1, len(self._keys) - 1, -1))
        self._keys += [None] * further
        self._held = np.concatenate([self._held, np.empty(further, object)])
        self._used = np.concatenate([self._used, np.full(further, _NEVER)])


def _only(decode: Callable[[list[Key]], Iterable[Kept]], key: Key) -> Kept:
    (block,) = decode([key])
    return block


def address_of(values: Array) -> int:
    """Where an array is; `ctypes.data` takes three times as long."""
    return int(values.__array_interface__["data"][0])


class DecodedBlock:
    """The values of one block; `first` is the index of the first value in the chunk's column."""

    __slots__ = ("address", "facts", "first", "nbytes", "values")

    def __init__(self, values: Array, first: int) -> None:
        self.values, self.first, self.nbytes = values, first, values.nbytes
        self.address = address_of(values)
        self.facts = (self.address, first, len(values))


_TABLE = 1 << 14  # numbers of blocks that are found without asking for each
Facts = NDArray[np.int64]  # (rows, 3): as those of a DecodedBlock


class DecodedBlocks(BlockCache[DecodedBlock]):
    """Blocks of the columns of a cache by number: those of many rows are looked up in a few calls of numpy.

    number ─ its lowest bits ─▶ table: number, slot ─▶ facts

    A block may take the place of another one in the table, which is then looked up by its number alone.
    """

    def __init__(self, limit_bytes: int) -> None:
        super().__init__(limit_bytes)
        self._numbers, self._places = np.zeros(_TABLE, np.int64), np.zeros(_TABLE, np.int64)
        self._facts = np.empty((0, 3), np.int64)
        self._reserved = 1  # the table has 0 where it has no block

    def reserve(self, count: int) -> int:
        """The first of `count` numbers, for the blocks of a column."""
        with self._lock:
            self._reserved += count
            return self._reserved - count

    def find(
        self, numbers: Blocks, decode: Callable[[list[int]], Iterable[DecodedBlock]], together: int
    ) -> tuple[Facts, list[DecodedBlock]]:
        """The facts of the block of every row, and the blocks, which stay in memory while they are held."""
        with self._lock:
            at = numbers & _TABLE - 1
            is_known = self._numbers[at] == numbers
            are_known = bool(is_known.all())
            slots = self._places[at if are_known else at[is_known]]
            self._used[slots] = np.arange(self._clock, self._clock + len(slots))  # the last use of a block counts
            self._clock += len(slots)
            known, is_used = self._facts[slots], np.zeros(len(self._used), np.bool_)
            is_used[slots] = True
            blocks: list[DecodedBlock] = self._held[is_used].tolist()
            self._hits += len(blocks)
        if are_known:
            return known, blocks
        distinct, after, which = np.unique(numbers[~is_known][::-1], return_index=True, return_inverse=True)
        order = np.argsort(-after)  # blocks needed last come last, so that the LRU cache drops the others first
        further = self.get_all(distinct[order].tolist(), decode, together)  # type: ignore[arg-type]  # its keys are numbers
        facts = np.empty((len(numbers), 3), np.int64)
        facts[is_known] = known
        facts[~is_known] = np.array([block.facts for block in further])[np.argsort(order)[which[::-1]]]
        return facts, blocks + further

    def locate(
        self,
        addresses: NDArray[np.int64],
        place: RowLocations,
        column: tuple[NDArray[np.int64], int, int],
        item_bytes: int,
        ragged: tuple[NDArray[np.int64], NDArray[np.int64], NDArray[np.uint64]] | None,
    ) -> tuple[int | None, list[DecodedBlock]]:
        """As `find`, by compiled code, which writes addresses; returns how many rows have none, and the blocks."""
        with self._lock:
            seen = np.zeros(len(self._used), np.bool_)
            table = (self._numbers, self._places, self._facts, self._used, seen.view(np.uint8))
            missing = compiled.native.decoded_addresses(
                addresses, *place, column, table, self._clock, item_bytes, ragged
            )
            self._clock += len(addresses)
            blocks: list[DecodedBlock] = self._held[seen].tolist()
            self._hits += len(blocks)
        return missing, blocks

    def _use(self, slot: int) -> None:
        super()._use(slot)
        number = self._keys[slot]
        assert isinstance(number, int)
        at = number & _TABLE - 1
        self._numbers[at], self._places[at], self._facts[slot] = number, slot, self._held[slot].facts

    def _drop(self, slot: int) -> None:
        number = self._keys[slot]
        assert isinstance(number, int)
        if self._numbers[number & _TABLE - 1] == number:
            self._numbers[number & _TABLE - 1] = 0
        super()._drop(slot)

    def _grow(self, count: int) -> None:
        self._facts = np.concatenate([self._facts, np.empty((count - len(self._keys), 3), np.int64)])
        super()._grow(count)


SHORT_ROW = 64  # mean number of values up to which ragged rows are copied value by value
_TOGETHER = 1024 * 1024  # bytes: smaller batches are copied together
_LARGEST = 2**62  # bytes, the limit of numpy for one array


def set_helpers(count: int) -> None:
    """Let further threads of compiled code take part in the copying of this thread."""
    if compiled.native is not None:
        compiled.native.set_helpers(count)


class AddressWindow:
    """An address range, and how to copy items out of it.

    The caller keeps the maps open and has checked the addresses.
    """

    def __init__(self, item_bytes: int) -> None:
        self._item_bytes = item_bytes
        self._lock = threading.Lock()
        self._high = 0
        # One attribute, so that a gathering thread sees a start and the items that belong to it.
        self._view: tuple[int, Array | None] = (0, None)

    def include(self, low: int, size: int) -> None:
        """Widen the window by a range of addresses, before any of them is used."""
        with self._lock:
            first = min(self._view[0], low) if self._high else low
            self._high = max(self._high, low + size)
            count = max(1, self._high - first)
            fits = count * max(1, self._item_bytes) < _LARGEST
            self._view = (first, _overlapping(first, count, self._item_bytes) if fits else None)

    def gather(self, addresses: NDArray[np.int64], dtype: np.dtype[Any], shape: tuple[int, ...]) -> Array:
        """The items at some addresses, each an array of this type and shape."""
        (copied,) = self.gather_batches(addresses, max(1, len(addresses)), dtype, shape)
        return copied

    def gather_batches(
        self, addresses: NDArray[np.int64], size: int, dtype: np.dtype[Any], shape: tuple[int, ...]
    ) -> Generator[Array]:
        """As `gather`, in batches of `size`; no addresses give one empty batch. Small batches are copied together."""
        if compiled.native is not None:
            yield from self._compiled(addresses, size, dtype, shape)
            return
        first, items = self._view
        if items is None or not len(addresses) or not self._item_bytes:
            for at in range(0, max(1, len(addresses)), size):
                yield self._singly(addresses[at : at + size], dtype, shape)
            return
        offsets = addresses - first
        step = size * max(1, _TOGETHER // (size * self._item_bytes))
        for start in range(0, len(offsets), step):
            copied = items[offsets[start : start + step]].view(dtype).reshape(-1, *shape)
            for at in range(0, len(copied), size):
                yield copied[at : at + size]

    def _compiled(
        self, addresses: NDArray[np.int64], size: int, dtype: np.dtype[Any], shape: tuple[int, ...]
    ) -> Iterator[Array]:
        """As `gather_batches`, without the GIL; helpers of this thread copy the next batch meanwhile."""
        ahead = 1 if compiled.native.count_helpers() else 0
        begun: deque[tuple[Array, int, object]] = deque()
        try:
            for at in range(0, max(1, len(addresses)), size):
                some = np.ascontiguousarray(addresses[at : at + size])
                copied = np.empty(len(some) * self._item_bytes, np.uint8)
                begun.append((copied, len(some), compiled.native.start_gathering(copied, some, self._item_bytes)))
                if len(begun) > ahead:
                    yield _finished(*begun.popleft(), dtype, shape)
            while begun:
                yield _finished(*begun.popleft(), dtype, shape)
        finally:
            for _, _, work in begun:  # items stay where they are until then
                compiled.native.finish(work)

    def _singly(self, addresses: NDArray[np.int64], dtype: np.dtype[Any], shape: tuple[int, ...]) -> Array:
        """Copy item by item: there is nothing to copy, or the window exceeds the limit of numpy."""
        copied = np.empty((len(addresses), *shape), dtype)
        if self._item_bytes:
            for row, address in zip(copied, addresses.tolist(), strict=True):
                row[...] = _overlapping(address, 1, self._item_bytes).view(dtype).reshape(shape)
        return copied


def _finished(copied: Array, count: int, work: object, dtype: np.dtype[Any], shape: tuple[int, ...]) -> Array:
    compiled.native.finish(work)
    return copied.view(dtype).reshape(count, *shape)


class _Span:
    """An address range that numpy can wrap as an array."""

    def __init__(self, low: int, count: int, item_bytes: int) -> None:
        self.__array_interface__ = {
            "version": 3,
            "data": (low, True),
            "shape": (count,),
            "strides": (1,),
            "typestr": f"|V{item_bytes}",
        }


def _overlapping(low: int, count: int, item_bytes: int) -> Array:
    return np.asarray(_Span(low, count, item_bytes))


Tables = tuple[NDArray[np.int64], NDArray[np.uint64], int, NDArray[np.int64], NDArray[np.uint8], int]
Outside = Callable[[int], ChunkCorrupt]  # the error for a chunk position whose row is out of bounds
_EDGE_BYTES = 8  # of one offset


class Addresses:
    """The address of one tensor in every mapped chunk."""

    def __init__(
        self, maps: Maps, count: int, tensor: Callable[[ChunkFile], Array], outside: Outside, item_bytes: int
    ) -> None:
        self._maps = maps
        self._tensor = tensor
        self._outside = outside
        self._item_bytes = item_bytes
        self._window = AddressWindow(item_bytes)
        self._known = np.zeros(count, np.int64)  # 0 where a chunk is not mapped
        self._starts = np.zeros(count, np.uint64)  # byte offsets at which an item can start, once a chunk was mapped
        self._counts = np.zeros(count, np.uint64)  # values of the tensor, likewise
        self.gather, self.gather_batches = self._window.gather, self._window.gather_batches
        maps.on_close(partial(_forget, self._known))  # keeps the array alive, not this object

    def of(self, positions: NDArray[np.int64]) -> NDArray[np.int64]:
        """The addresses in some chunks, mapped if necessary. Call between `begin_reading` and `end_reading`."""
        found = self._known[positions]
        if not found.all():
            unmapped = np.flatnonzero(found == 0)
            for position, chosen in by_position(positions[unmapped]):
                found[unmapped[chosen]] = self._map(position)
        self._maps.touch(positions)
        return found

    def at(self, positions: NDArray[np.int64], offsets: NDArray[np.int64]) -> NDArray[np.int64]:
        """The addresses of items at `offsets` bytes, bounds-checked. Call between `begin_reading` and `end_reading`."""
        addresses = self.of(positions)
        # As unsigned, a negative number is larger than any bound.
        inside = offsets.view(np.uint64) < self._starts[positions]
        if not inside.all():
            raise self._outside(int(positions[~inside][0]))
        addresses += offsets
        return addresses

    def tables(self, checked: CheckedBlocks, *, of_values: bool = False) -> Tables:
        """What compiled code needs to know of each chunk; it reads them while other threads write them."""
        return (self._known, self._counts if of_values else self._starts, self._item_bytes, *checked)

    def edge_tables(self) -> tuple[NDArray[np.int64], NDArray[np.uint64]]:
        """Where the items of each chunk are, and up to where they may start."""
        return self._known, self._starts

    def of_values(
        self, positions: NDArray[np.int64], starts: NDArray[np.int64], stops: NDArray[np.int64]
    ) -> NDArray[np.int64]:
        """As `of`, after checking that the values of every row, `starts` to `stops`, are in bounds."""
        addresses = self.of(positions)
        lows, highs = starts.view(np.uint64), stops.view(np.uint64)
        inside = (lows <= highs) & (highs <= self._counts[positions])
        if not inside.all():
            raise self._outside(int(positions[~inside][0]))
        return addresses

    def _map(self, position: int) -> int:
        file = self._maps.get(position)
        items = self._tensor(file)
        address = int(items.ctypes.data)
        self._starts[position] = max(0, items.nbytes - self._item_bytes + 1)
        self._counts[position] = len(items)
        self._window.include(address, items.nbytes)
        self._maps.while_open(position, file, partial(self._opened, position, address))
        return address

    def _opened(self, position: int, address: int) -> None:
        self._known[position] = address


def _forget(known: NDArray[np.int64], position: int) -> None:
    known[position] = 0


class Edges:
    """The start and stop of rows of a ragged column, gathered from its offsets."""

    def __init__(self, maps: Maps, count: int, column: str, outside: Outside) -> None:
        self._maps = maps
        self._pairs = Addresses(maps, count, lambda file: file.offsets(column), outside, 2 * _EDGE_BYTES)

    def tables(self) -> tuple[NDArray[np.int64], NDArray[np.uint64]]:
        return self._pairs.edge_tables()

    def of(self, place: RowLocations) -> tuple[NDArray[np.int64], NDArray[np.int64]]:
        ticket = self._maps.begin_reading()
        try:
            pairs = self._pairs.at(place.positions, place.rows * _EDGE_BYTES)
            starts, stops = self._pairs.gather(pairs, np.dtype(np.int64), (2,)).T
            return starts, stops
        finally:
            self._maps.end_reading(ticket)


def value_addresses(
    bases: NDArray[np.int64], starts: NDArray[np.int64], ends: NDArray[np.int64], item_bytes: int
) -> NDArray[np.int64]:
    """The address of every value of some rows; the first value of a row is number `starts`, counted from its base."""
    lengths = np.diff(ends)
    numbers = np.arange(ends[-1]) + np.repeat(starts - ends[:-1], lengths)
    addresses: NDArray[np.int64] = np.repeat(bases, lengths) + numbers * item_bytes
    return addresses


class RowAddresses(NamedTuple):  # one is made for each column of each batch: a dataclass takes longer
    """Where the rows of a column are: in mapped files or decoded blocks, checked and in bounds.

    They stay there until the iterator that yielded this object continues or ends.
    """

    column: Column
    addresses: NDArray[np.int64]  # of the first value of each row
    counts: NDArray[np.int64]  # values of each row; 1 where rows have a fixed shape
    most: int  # values of the longest row
    owner: Array | None = None  # the rows, if they had to be copied

    @classmethod
    def of(cls, column: Column, rows: Array | Ragged) -> "RowAddresses":
        """Addresses of rows that were copied."""
        values = np.ascontiguousarray(rows.values if isinstance(rows, Ragged) else rows)
        starts = rows.offsets[:-1] if isinstance(rows, Ragged) else np.arange(len(rows))
        counts = rows.lengths.astype(np.int64) if isinstance(rows, Ragged) else np.ones(len(rows), np.int64)
        addresses = values.ctypes.data + starts.astype(np.int64) * column.item_bytes
        return cls(column, addresses, counts, int(counts.max(initial=0)), values)

    def part(self, some: slice) -> "RowAddresses":
        counts = self.counts[some]
        return RowAddresses(self.column, self.addresses[some], counts, int(counts.max(initial=0)), self.owner)

    def copied(self) -> Array | Ragged:
        """Copies of the rows."""
        column, dtype = self.column, self.column.array_dtype
        if not column.ragged:
            return _copied(self.addresses, column.item_bytes).view(dtype).reshape(-1, *column.shape)
        ends = np.concatenate([[0], np.cumsum(self.counts, dtype=np.int64)])
        values = value_addresses(self.addresses, np.zeros_like(self.counts), ends, column.item_bytes)
        return Ragged(_copied(values, column.item_bytes).view(dtype).reshape(-1, *column.shape), ends)


def _copied(addresses: NDArray[np.int64], item_bytes: int) -> Array:
    copied = np.empty(len(addresses) * item_bytes, np.uint8)
    compiled.native.gather(copied, np.ascontiguousarray(addresses), item_bytes)
    return copied


def batches_of_addresses(
    column: Column, addresses: NDArray[np.int64], counts: NDArray[np.int64] | None, size: int
) -> Iterator[RowAddresses]:
    """Addresses of rows in batches of `size`; without `counts`, of rows of a fixed shape."""
    counts = np.ones(len(addresses), np.int64) if counts is None else counts
    for most, some in zip(longest_rows(counts, size), slices(len(addresses), size), strict=True):
        yield RowAddresses(column, addresses[some], counts[some], most)


def longest_rows(counts: NDArray[np.int64], size: int) -> list[int]:
    """The largest number of values of a row, for every `size` rows; no rows are one empty batch."""
    if not len(counts):
        return [0]
    most: list[int] = np.maximum.reduceat(counts, np.arange(0, len(counts), size)).tolist()
    return most
