"""Shuffles as functions of the position, computed and not stored, and the orders made of them.

sequential   0 1 2 3 4 5 6 7      position and row are the same
global       5 0 7 2 6 1 3 4      one shuffle over all rows, computed row by row
window                            mixed over a window of many chunks: `forebay.order.window`

An order does not depend on ranks, threads, batch size or where training was resumed. A shuffle is a keyed bijection
over `range(size)`.

An index is a cell of a table of `highs × lows` cells, as square as possible and not smaller than `size`. Rounds rotate
each column by an amount hashed from its number, then each row likewise; a result that is not an index goes round again.

    index ─▶ (high, low) ─▶ high += f₀(low) ─▶ low += f₁(high) ─▶ … ─▶ high · lows + low ── < size ─▶ result
                 ▲                                                          └─ otherwise ─┐
                 └────────────────────────────────────────────────────────────────────────┘

Every rotation is invertible, so the map is one to one. It takes no memory per index: the row at a position among 100 M
rows is computed directly. Small tables have few rotations, so their orders would not be equally likely. Up to `SORTED`
indices are therefore shuffled by sorting distinct 64-bit hashes of the indices, which makes all orders equally likely.
"""

import hashlib
import math
from dataclasses import dataclass
from functools import lru_cache
from typing import Final, Protocol

import numpy as np
from numpy.typing import NDArray

from forebay import kernels

Numbers = NDArray[np.int64]
Words = NDArray[np.uint64]
SORTED: Final = 4096  # up to this size a shuffle is a sort
_SHUFFLE_ROUNDS: Final = 6
_KEPT_SHUFFLES: Final = 512  # sorted shuffles in memory: at most 4 MiB
_GOLDEN: Final = np.uint64(0x9E3779B97F4A7C15)
_FIRST: Final = np.uint64(0xBF58476D1CE4E5B9)
_SECOND: Final = np.uint64(0x94D049BB133111EB)


def key_of(*parts: int | str) -> int:
    """Return a 64-bit key for a purpose: equal parts give equal keys, in every process and release.

    >>> hex(key_of("order", 0, 1))
    '0x21d084c657346c27'
    """
    text = "\x1f".join(map(str, parts)).encode()
    return int.from_bytes(hashlib.blake2b(text, digest_size=8).digest(), "little")


def permute(indices: Numbers, size: int, key: int) -> Numbers:
    """Return where a shuffle puts each index.

    >>> sorted(permute(np.arange(5), 5, key=1).tolist())
    [0, 1, 2, 3, 4]
    """
    if size <= SORTED:
        return _shuffle(size, key)[indices].astype(np.int64)
    cells = indices.astype(np.uint64)
    kernels.permute(cells, size, *_table(size, key))
    return cells.view(np.int64)


def permute_each(indices: Numbers, which: Numbers, sizes: Numbers, keys: Words) -> Numbers:
    """Return the position of index i in shuffle `which[i]` of `sizes[which[i]]` indices, for many indices at once."""
    used, at = distinct(which, len(sizes))
    sizes, shuffles = sizes[used], list(zip(sizes[used].tolist(), keys[used].tolist(), strict=True))
    if sizes.max(initial=0) > SORTED:
        result = np.empty_like(indices)
        for number, (size, key) in enumerate(shuffles):
            alike = at == number
            result[alike] = permute(indices[alike], size, key)
        return result
    sorted_shuffles = [_shuffle(size, key) for size, key in shuffles]
    starts = (np.cumsum(sizes) - sizes)[at]
    placed: Numbers = np.concatenate([*sorted_shuffles, np.empty(0, np.uint16)])[starts + indices].astype(np.int64)
    return placed


def distinct(numbers: Numbers, limit: int) -> tuple[Numbers, Numbers]:
    """Return `np.unique(numbers, return_inverse=True)` of numbers below a limit; without sorting, if that is small."""
    if limit > 4 * len(numbers) + SORTED:
        values, which = np.unique(numbers, return_inverse=True)
        return values, which
    is_used = np.zeros(limit, np.bool_)
    is_used[numbers] = True
    return np.flatnonzero(is_used), (np.cumsum(is_used) - 1)[numbers]


@lru_cache(maxsize=_KEPT_SHUFFLES)
def _shuffle(size: int, key: int) -> NDArray[np.uint16]:
    """Return all indices in the order of their hashes."""
    words = mix(mix(np.arange(size, dtype=np.uint64)) ^ mix(np.array([key], np.uint64)))
    return np.argsort(words, kind="stable").astype(np.uint16)


def mix(words: Words) -> Words:
    """Hash 64-bit words: every bit of the result depends on every bit of the input."""
    mixed = words + _GOLDEN
    mixed ^= mixed >> np.uint64(30)
    mixed *= _FIRST
    mixed ^= mixed >> np.uint64(27)
    mixed *= _SECOND
    mixed ^= mixed >> np.uint64(31)
    return mixed


@lru_cache(maxsize=_KEPT_SHUFFLES)
def _table(size: int, key: int) -> tuple[int, int, Words]:
    """Return the sides of a table, as square as possible, and a key for each of its rounds."""
    highs = max(math.ceil(math.sqrt(size)), 1)
    words, round_keys = np.array([key], np.uint64), []
    for _ in range(_SHUFFLE_ROUNDS):
        words = mix(words)
        round_keys.append(words)
    return highs, max(-(-size // highs), 1), np.concatenate(round_keys)


class Order(Protocol):
    """Rows, numbered from 0, in another order every epoch."""

    @property
    def size(self) -> int: ...

    def rows_at(self, epoch: int, positions: Numbers) -> Numbers:
        """Return the rows at some positions of an epoch, each from 0 to below `size`."""
        ...


@dataclass(frozen=True, slots=True)
class SequentialOrder:
    """Rows as they are stored, the same in every epoch."""

    size: int

    def rows_at(self, epoch: int, positions: Numbers) -> Numbers:
        return positions


@dataclass(frozen=True, slots=True)
class GlobalOrder:
    """All rows shuffled together, differently in every epoch."""

    size: int
    seed: int
    part: int = 0  # segment of an epoch that grew: each has its own shuffle

    def rows_at(self, epoch: int, positions: Numbers) -> Numbers:
        return permute(positions, self.size, key_of("order", self.seed, epoch, self.part))
