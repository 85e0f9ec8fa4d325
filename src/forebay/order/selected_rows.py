"""Selections of rows, and splits by a stable hash.

    row number    0 1 2 3 4 5 6 7
    selected      . x x . . x . x
    position        0 1     2   3        rows([2]) is 5, before([5]) is 2

A row costs one bit.

    xxh3-64 of the name, with the seed   0 ────────────────── fraction · 2⁶⁴ ────── 2⁶⁴
                                           train                       validation

A name is a sample id, or the number of a chunk (8 bytes, little endian). Names that are added later do not change the
sides of others. A larger fraction keeps all of the training side and adds to it.
"""

import hashlib
from collections.abc import Iterable, Iterator
from fractions import Fraction
from itertools import pairwise

import numpy as np
import xxhash
from numpy.typing import NDArray

from forebay.columns import Array, Ragged

Rows = NDArray[np.int64]
Bits = NDArray[np.uint8]
BLOCK_ROWS = 1024  # rows that share one running count
_BLOCK_BYTES = BLOCK_ROWS // 8
_STEP = 1024  # positions looked up at once, so that the copied blocks stay in the processor's cache
_BITS = np.unpackbits(np.arange(256, dtype=np.uint8)[:, None], axis=1, bitorder="little")  # (byte, bit)
_ONES = _BITS.sum(axis=1, dtype=np.uint8)
_NTH_ONE = np.argsort(_BITS == 0, axis=1, kind="stable").astype(np.uint8)  # (byte, n): where its n-th 1 is


class Selection:
    """Some of `total` rows, in order of row number: bit `row % 8` of byte `row // 8`, padded with zeros to blocks."""

    def __init__(self, bits: Bits, total: int) -> None:
        if len(bits) != packed_bytes(total):
            raise ValueError(f"bits must have {packed_bytes(total):,} bytes for {total:,} rows (got {len(bits):,})")
        self.total = total
        self.bits = bits
        ones = _ONES[bits].reshape(-1, _BLOCK_BYTES).sum(axis=1, dtype=np.int64)
        self._before_block = np.concatenate([[0], np.cumsum(ones)])

    @classmethod
    def of(cls, chosen: Iterable[NDArray[np.bool_]], total: int) -> "Selection":
        """Return the rows of consecutive parts of `total` rows that are True; a part may begin within a byte."""
        bits, start = np.zeros(packed_bytes(total), np.uint8), 0
        for part in chosen:
            packed = np.packbits(np.concatenate([np.zeros(start % 8, np.bool_), part]), bitorder="little")
            bits[start // 8 : start // 8 + len(packed)] |= packed
            start += len(part)
        return cls(bits, total)

    def __len__(self) -> int:
        return int(self._before_block[-1])

    def rows(self, positions: Rows) -> Rows:
        """Return the row numbers at some positions among the selected rows."""
        if len(positions) > _STEP:
            return np.concatenate([self.rows(positions[at : at + _STEP]) for at in range(0, len(positions), _STEP)])
        block = np.searchsorted(self._before_block, positions, side="right") - 1
        left = positions - self._before_block[block]
        content = self._blocks(block)
        ones = np.cumsum(_ONES[content], axis=1, dtype=np.int16)
        byte = np.sum(ones <= left[:, None], axis=1)
        each = np.arange(len(positions))
        left -= np.where(byte > 0, ones[each, byte - 1], 0)
        rows: Rows = block * BLOCK_ROWS + byte * 8 + _NTH_ONE[content[each, byte], left]
        return rows

    def mask(self, start: int, stop: int) -> NDArray[np.bool_]:
        """Return a bool for each row from `start` to below `stop`: whether it is selected."""
        bits = np.unpackbits(self.bits[start // 8 : -(-stop // 8)], bitorder="little").view(np.bool_)
        return bits[start % 8 :][: stop - start]

    def before(self, rows: Rows) -> Rows:
        """Return the number of selected rows before each row number; row numbers go up to and including `total`."""
        block, rest = np.divmod(rows, BLOCK_ROWS)
        firsts = [self.mask(row - left, row).sum() for row, left in zip(rows.tolist(), rest.tolist(), strict=True)]
        counted: Rows = self._before_block[block] + np.array(firsts, np.int64)
        return counted

    @property
    def digest(self) -> str:
        """A digest of the selected rows."""
        digest = hashlib.blake2b(str(self.total).encode(), digest_size=8)
        digest.update(np.ascontiguousarray(self.bits).data)
        return digest.hexdigest()

    def _blocks(self, blocks: Rows) -> Bits:
        return self.bits.reshape(-1, _BLOCK_BYTES)[blocks]


def packed_bytes(total: int) -> int:
    """Return the number of bytes for the bits of `total` rows."""
    return -(-total // BLOCK_ROWS) * _BLOCK_BYTES


def on_training_side(names: Iterable[bytes | memoryview], fraction: float, seed: int) -> NDArray[np.bool_]:
    """Return a bool for each name: whether it is on the training side.

    >>> on_training_side([b"0.png", b"1.png", b"2.png", b"3.png"], fraction=0.5, seed=0).tolist()
    [False, True, True, False]
    """
    if not 0 < fraction <= 1:
        raise ValueError(f"fraction must be above 0 and up to 1 (got {fraction})")
    if not 0 <= seed < 2**64:
        raise ValueError(f"seed must be from 0 to below 2**64 (got {seed})")
    last = int(Fraction(fraction) * 2**64) - 1
    hashes = np.fromiter((xxhash.xxh3_64_intdigest(name, seed) for name in names), np.uint64)
    sides: NDArray[np.bool_] = hashes <= np.uint64(last)
    return sides


def chunk_names(chunks: NDArray[np.int64]) -> Iterator[bytes]:
    """Yield the names of chunks from their numbers."""
    return (int(chunk).to_bytes(8, "little") for chunk in chunks)


def sample_names(ids: Array | Ragged) -> Iterator[memoryview]:
    """Yield the names of samples: the bytes of the column of sample ids."""
    values = ids.values if isinstance(ids, Ragged) else ids
    offsets = ids.offsets if isinstance(ids, Ragged) else np.arange(len(ids) + 1)
    item_bytes = values.nbytes // max(1, len(values))
    raw = np.ascontiguousarray(values).reshape(-1).view(np.uint8).data
    edges = (offsets.astype(np.int64) * item_bytes).tolist()
    return (raw[start:stop] for start, stop in pairwise(edges))


def document_groups(documents: Ragged) -> NDArray[np.int64]:
    """Return the group of every row of a chunk; rows that share a document are in one group.

    `documents` has pairs (document, first token). Pieces of a long document are in several rows, and each row may end
    with pieces of others, so groups are the connected components of documents that share a row. A row without documents
    is a group by itself.

    >>> pairs = [np.array([[0, 0], [2, 0]]), np.array([[1, 0]]), np.array([[2, 9], [3, 0]])]
    >>> document_groups(Ragged.of(pairs, np.dtype("u4"), (2,))).tolist()
    [0, 1, 0]
    """
    names, which = np.unique(documents.values[:, 0].astype(np.int64), return_inverse=True)
    filled = documents.lengths > 0
    firsts = which[documents.offsets[:-1][filled]]
    lowest = _lowest_connected(len(names), np.repeat(firsts, documents.lengths[filled]), which)
    groups = -1 - np.arange(len(documents))
    groups[filled] = names[lowest[firsts]]
    return groups


def _lowest_connected(count: int, left: NDArray[np.int64], right: NDArray[np.int64]) -> NDArray[np.int64]:
    """Return, for each number below `count`, the lowest number connected to it by pairs of `left` and `right`.

    Every round attaches the root of a tree to the lowest root it is paired with, then flattens all trees; two rounds at
    least halve the remaining roots, however long a chain of pairs is.
    """
    roots = np.arange(count)
    while not np.array_equal(one := roots[left], other := roots[right]):
        np.minimum.at(roots, np.maximum(one, other), np.minimum(one, other))
        while not np.array_equal(above := roots[roots], roots):
            roots = above
    return roots


def groups_on_training_side(groups: NDArray[np.int64], chunk: int, fraction: float, seed: int) -> NDArray[np.bool_]:
    """Return which rows of a chunk are on the training side: whole groups, in the order of their hashes.

    The first groups, up to the fraction of the chunk's rows, are trained on, so that even one chunk reaches the
    fraction. The group at the border, or the only one, goes to a side by a hash of the chunk, as often as the fraction
    says. Chunk 0 has rows on both sides if it has two groups.
    """
    names, member = np.unique(groups, return_inverse=True)
    sizes = np.bincount(member, minlength=len(names))
    own = int(chunk).to_bytes(8, "little")
    hashes = [xxhash.xxh3_64_intdigest(own + int(name).to_bytes(8, "little", signed=True), seed) for name in names]
    order = np.argsort(np.array(hashes, np.uint64), kind="stable")
    ends, target = np.cumsum(sizes[order]), fraction * len(groups)
    trained = int(np.searchsorted(ends, target, side="right"))
    if trained < len(names):
        size = int(sizes[order[trained]])
        trained += xxhash.xxh3_64_intdigest(own + b"border", seed) / 2**64 < (target - int(ends[trained]) + size) / size
    if chunk == 0 and len(names) > 1 and fraction < 1:
        trained = min(max(trained, 1), len(names) - 1)
    chosen = np.zeros(len(names), np.bool_)
    chosen[order[:trained]] = True
    sides: NDArray[np.bool_] = chosen[member]
    return sides
