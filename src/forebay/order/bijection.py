"""A shuffle that is computed, not stored: a keyed bijection over `range(size)`.

An index is a cell of a table of `highs × lows` cells, as square as can be and no smaller than `size`. Rounds turn each
column by an amount hashed from its number, then each row likewise; a cell that is no index goes round again.

    index ─▶ (high, low) ─▶ high += f₀(low) ─▶ low += f₁(high) ─▶ … ─▶ high · lows + low ── < size ─▶ result
                 ▲                                                          └─ otherwise ─┐
                 └────────────────────────────────────────────────────────────────────────┘

Every turn can be undone, so the map is one to one. No index costs memory: the row at a position among 100 M rows is
known at once. Tables of few cells turn in few ways, so it takes more rounds until all orders are alike frequent.
"""

import hashlib
from typing import Final

import numpy as np
from numpy.typing import NDArray

Numbers = NDArray[np.int64]
Words = NDArray[np.uint64]

_ROUNDS: Final = 6
_FEW: Final = np.uint64(64)  # indices, below which there are more rounds
_ROUNDS_OF_FEW: Final = 24
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
    sizes = np.atleast_1d(np.asarray(size, np.int64)).astype(np.uint64)
    keys = np.atleast_1d(np.asarray(key, np.uint64))
    few = sizes < _FEW
    if few.all() or not few.any():
        return _permuted(indices, sizes, keys, _ROUNDS_OF_FEW if few.all() else _ROUNDS)
    placed = np.empty_like(indices)
    for some, rounds in ((np.flatnonzero(few), _ROUNDS_OF_FEW), (np.flatnonzero(~few), _ROUNDS)):
        placed[some] = _permuted(indices[some], sizes[some], _at(keys, some), rounds)
    return placed


def _permuted(indices: Numbers, sizes: Words, keys: Words, rounds: int) -> Numbers:
    table = _Table(sizes, _round_keys(keys, rounds))
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


def _round_keys(keys: Words, rounds: int) -> list[Words]:
    found = []
    for _ in range(rounds):
        keys = mix(keys)
        found.append(keys)
    return found


def _at(one_or_each: Words, chosen: NDArray[np.intp]) -> Words:
    return one_or_each if len(one_or_each) == 1 else one_or_each[chosen]
