"""Which rows of a pinned generation are in, and the way from a place among them to a row number.

    row number    0 1 2 3 4 5 6 7
    selected      . x x . . x . x
    place           0 1     2   3        rows([2]) is 5, before([5]) is 2

Whole chunks are kept as ranges; single rows as one bit each, which may lie in a mapped file.
"""

import hashlib
from typing import Protocol, runtime_checkable

import numpy as np
from numpy.typing import NDArray

Rows = NDArray[np.int64]
Bits = NDArray[np.uint8]

BLOCK_ROWS = 1024  # rows that share one running count
_BLOCK_BYTES = BLOCK_ROWS // 8
_STEP = 1024  # places looked up at once, so that blocks copied for it stay in the processor's cache
_BITS = np.unpackbits(np.arange(256, dtype=np.uint8)[:, None], axis=1, bitorder="little")  # (byte, bit)
_ONES = _BITS.sum(axis=1, dtype=np.uint8)
_NTH_ONE = np.argsort(_BITS == 0, axis=1, kind="stable").astype(np.uint8)  # (byte, n): where its n-th 1 is


@runtime_checkable
class Selection(Protocol):
    """Some of the rows of a cache, in order of row numbers."""

    total: int  # rows of the cache, selected or not

    def __len__(self) -> int: ...

    def rows(self, places: Rows) -> Rows:
        """The row numbers at some places among the selected rows."""
        ...

    def before(self, rows: Rows) -> Rows:
        """How many selected rows come before each row number; `total` is one too."""
        ...

    @property
    def digest(self) -> str:
        """A digest of the selected rows."""
        ...


class ChunkSelection:
    """All rows of some chunks. `starts` are the first rows of all chunks and the end."""

    def __init__(self, starts: Rows, chosen: NDArray[np.bool_]) -> None:
        self.total = int(starts[-1])
        edges = np.diff(chosen.astype(np.int8), prepend=0, append=0)
        self._first = starts[np.flatnonzero(edges == 1)]
        self._stop = starts[np.flatnonzero(edges == -1)]
        self._place = np.concatenate([[0], np.cumsum(self._stop - self._first, dtype=np.int64)])

    def __len__(self) -> int:
        return int(self._place[-1])

    def rows(self, places: Rows) -> Rows:
        chosen = np.searchsorted(self._place, places, side="right") - 1
        found: Rows = places - self._place[chosen] + self._first[chosen]
        return found

    def before(self, rows: Rows) -> Rows:
        passed = np.searchsorted(self._first, rows, side="left")
        overshoot = np.maximum(0, np.append(0, self._stop)[passed] - rows)
        found: Rows = self._place[passed] - overshoot
        return found

    @property
    def digest(self) -> str:
        return _digest(self.total, np.stack([self._first, self._stop]))


class BitSelection:
    """Single rows: bit `row % 8` of byte `row // 8`, padded with zeros to whole blocks."""

    def __init__(self, bits: Bits, total: int) -> None:
        if len(bits) != packed_bytes(total):
            raise ValueError(f"{len(bits):,} bytes of bits for {total:,} rows; {packed_bytes(total):,} are expected")
        self.total = total
        self.bits = bits
        self._place = np.zeros(len(bits) // _BLOCK_BYTES + 1, np.int64)
        for first in range(0, len(self._place) - 1, _STEP):
            ones = _ONES[self._blocks(np.arange(first, min(first + _STEP, len(self._place) - 1)))]
            self._place[first + 1 : first + 1 + len(ones)] = ones.sum(axis=1)
        np.cumsum(self._place, out=self._place)

    def __len__(self) -> int:
        return int(self._place[-1])

    def rows(self, places: Rows) -> Rows:
        if len(places) > _STEP:
            return np.concatenate([self.rows(places[at : at + _STEP]) for at in range(0, len(places), _STEP)])
        block = np.searchsorted(self._place, places, side="right") - 1
        left = places - self._place[block]
        found = self._blocks(block)
        ones = np.cumsum(_ONES[found], axis=1, dtype=np.int16)
        byte = np.sum(ones <= left[:, None], axis=1)
        each = np.arange(len(places))
        left -= np.where(byte > 0, ones[each, byte - 1], 0)
        rows: Rows = block * BLOCK_ROWS + byte * 8 + _NTH_ONE[found[each, byte], left]
        return rows

    def before(self, rows: Rows) -> Rows:
        if len(rows) > _STEP:
            return np.concatenate([self.before(rows[at : at + _STEP]) for at in range(0, len(rows), _STEP)])
        if not self.total:
            return np.zeros_like(rows)
        block = np.minimum(rows, self.total - 1) // BLOCK_ROWS
        byte, bit = np.divmod(rows - block * BLOCK_ROWS, 8)
        found = self._blocks(block)
        ones = np.cumsum(_ONES[found], axis=1, dtype=np.int16)
        each = np.arange(len(rows))
        whole = np.where(byte > 0, ones[each, byte - 1], 0)
        part = _ONES[found[each, np.minimum(byte, _BLOCK_BYTES - 1)] & ((1 << bit) - 1)]
        counted: Rows = self._place[block] + whole + part
        return counted

    @property
    def digest(self) -> str:
        return _digest(self.total, self.bits)

    def _blocks(self, blocks: Rows) -> Bits:
        return self.bits.reshape(-1, _BLOCK_BYTES)[blocks]


def packed_bytes(total: int) -> int:
    """Bytes that the bits of so many rows take."""
    return -(-total // BLOCK_ROWS) * _BLOCK_BYTES


def pack_bits(chosen: NDArray[np.bool_]) -> Bits:
    """Rows chosen or not, as bits; for whole blocks, or the last rows there are."""
    bits = np.zeros(packed_bytes(len(chosen)), np.uint8)
    packed = np.packbits(chosen, bitorder="little")
    bits[: len(packed)] = packed
    return bits


def _digest(total: int, content: NDArray[np.int64] | Bits) -> str:
    digest = hashlib.blake2b(str(total).encode(), digest_size=8)
    digest.update(np.ascontiguousarray(content).data)
    return digest.hexdigest()
