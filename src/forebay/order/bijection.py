"""A shuffle that is computed, not stored: a keyed bijection over `range(size)`.

An index is a cell of a table of `highs × lows` cells, as square as can be and no smaller than `size`. Rounds turn each
column by an amount hashed from its number, then each row likewise; a cell that is no index goes round again.

    index ─▶ (high, low) ─▶ high += f₀(low) ─▶ low += f₁(high) ─▶ … ─▶ high · lows + low ── < size ─▶ result
                 ▲                                                          └─ otherwise ─┐
                 └────────────────────────────────────────────────────────────────────────┘

Every turn can be undone, so the map is one to one. No index costs memory: the row at a position among 100 M rows is
known at once. Tables of few cells turn in few ways, and not all orders are alike frequent. So up to `SORTED` indices
are shuffled by sorting: index i gets a hashed word of 64 bits, and the order of these words, which all differ, is the
shuffle. All orders are alike frequent then, as in a Fisher–Yates shuffle, which would go index by index.
"""

import hashlib
from functools import lru_cache
from typing import Final

import numpy as np
from numpy.typing import NDArray

Numbers = NDArray[np.int64]
Words = NDArray[np.uint64]
SORTED: Final = 4096  # indices, up to which a shuffle is sorted
_ROUNDS: Final = 6
_KEPT_SHUFFLES: Final = 512  # sorted ones: at most 4 MiB
_HALF: Final = np.uint64(32)
_GOLDEN: Final = np.uint64(0x9E3779B97F4A7C15)
_FIRST: Final = np.uint64(0xBF58476D1CE4E5B9)
_SECOND: Final = np.uint64(0x94D049BB133111EB)


def key_of(*parts: int | str) -> int:
    """A 64-bit key for a purpose: equal parts give equal keys, in every process and release.

    >>> hex(key_of("order", 0, 1))
    '0x21d084c657346c27'
    """
    text = "\x1f".join(map(str, parts)).encode()
    return int.from_bytes(hashlib.blake2b(text, digest_size=8).digest(), "little")


def permute(indices: Numbers, size: int | Numbers, key: int | Words) -> Numbers:
    """Where a shuffle puts each index. `size` and `key` are one for all, or one for each index.

    >>> sorted(permute(np.arange(5), 5, key=1).tolist())
    [0, 1, 2, 3, 4]
    """
    sizes = np.atleast_1d(np.asarray(size, np.int64))
    keys = np.atleast_1d(np.asarray(key, np.uint64))
    few = sizes <= SORTED
    if few.all():
        return _sorted(indices, sizes, keys)
    if not few.any():
        return _permuted(indices, sizes.astype(np.uint64), keys)
    placed = np.empty_like(indices)
    some, many = np.flatnonzero(few), np.flatnonzero(~few)
    placed[some] = _sorted(indices[some], sizes[some], _at(keys, some))
    placed[many] = _permuted(indices[many], sizes[many].astype(np.uint64), _at(keys, many))
    return placed


def _sorted(indices: Numbers, sizes: Numbers, keys: Words) -> Numbers:
    if len(sizes) == len(keys) == 1:
        return _shuffle(int(sizes[0]), int(keys[0]))[indices].astype(np.int64)
    sizes, keys = np.broadcast_to(sizes, indices.shape), np.broadcast_to(keys, indices.shape)
    placed = np.empty_like(indices)
    order = np.lexsort((sizes, keys))
    changes = (np.diff(keys[order]) != 0) | (np.diff(sizes[order]) != 0)
    for alike in np.split(order, np.flatnonzero(changes) + 1) if len(order) else ():
        placed[alike] = _shuffle(int(sizes[alike[0]]), int(keys[alike[0]]))[indices[alike]]
    return placed


@lru_cache(maxsize=_KEPT_SHUFFLES)
def _shuffle(size: int, key: int) -> NDArray[np.uint16]:
    """All indices in the order of their words."""
    words = mix(mix(np.arange(size, dtype=np.uint64)) ^ mix(np.array([key], np.uint64)))
    return np.argsort(words, kind="stable").astype(np.uint16)


def _permuted(indices: Numbers, sizes: Words, keys: Words) -> Numbers:
    table = _Table(sizes, _round_keys(keys))
    placed = table.turn(indices.astype(np.uint64))
    outside = np.flatnonzero(placed >= sizes)
    while len(outside):
        part = table.at(outside)
        again = part.turn(placed[outside])
        placed[outside] = again
        outside = outside[again >= part.sizes]
    return placed.astype(np.int64)


def mix(words: Words) -> Words:
    """Words whose every bit depends on every bit of the given ones."""
    mixed = words + _GOLDEN
    mixed ^= mixed >> np.uint64(30)
    mixed *= _FIRST
    mixed ^= mixed >> np.uint64(27)
    mixed *= _SECOND
    mixed ^= mixed >> np.uint64(31)
    return mixed


class _Table:
    """Cells and how they are turned; every array is one value for all indices, or one for each."""

    def __init__(self, sizes: Words, round_keys: list[Words]) -> None:
        self.sizes = sizes
        self._round_keys = round_keys
        self._highs = np.maximum(np.ceil(np.sqrt(sizes)).astype(np.uint64), np.uint64(1))
        self._lows = np.maximum((sizes + self._highs - np.uint64(1)) // self._highs, np.uint64(1))

    def at(self, chosen: NDArray[np.intp]) -> "_Table":
        """The same for some of the indices."""
        if len(self.sizes) == 1 and len(self._round_keys[0]) == 1:
            return self
        return _Table(_at(self.sizes, chosen), [_at(keys, chosen) for keys in self._round_keys])

    def turn(self, cells: Words) -> Words:
        high = cells // self._lows
        low = cells - high * self._lows
        for number, key in enumerate(self._round_keys):
            if number % 2:
                _add_modulo(low, _hash(high, key), self._lows)
            else:
                _add_modulo(high, _hash(low, key), self._highs)
        turned: Words = high * self._lows + low
        return turned


def _add_modulo(half: Words, hashed: Words, count: Words) -> None:
    """Turn by a hashed share of the count: its upper 32 bits, scaled, so that nothing is divided."""
    hashed >>= _HALF
    hashed *= count
    hashed >>= _HALF
    half += hashed
    np.minimum(half, half - count, out=half)  # below the count, the difference wraps to a larger number


def _hash(half: Words, round_key: Words) -> Words:
    """A word whose upper bits depend on all of the half and of the key."""
    word = half ^ round_key
    word *= _FIRST
    word ^= word >> _HALF
    word *= _SECOND
    return word


def _round_keys(keys: Words) -> list[Words]:
    found = []
    for _ in range(_ROUNDS):
        keys = mix(keys)
        found.append(keys)
    return found


def _at(one_or_each: Words, chosen: NDArray[np.intp]) -> Words:
    return one_or_each if len(one_or_each) == 1 else one_or_each[chosen]
