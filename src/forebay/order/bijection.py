"""A shuffle that is computed, not stored: a keyed bijection over `range(size)`.

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
from functools import lru_cache
from typing import Final

import numpy as np
from numpy.typing import NDArray

from forebay import compiled

Numbers = NDArray[np.int64]
Words = NDArray[np.uint64]
SORTED: Final = 4096  # up to this size a shuffle is a sort
_ROUNDS: Final = 6
_KEPT_SHUFFLES: Final = 512  # sorted shuffles in memory: at most 4 MiB
_HALF: Final = np.uint64(32)
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


def permute(indices: Numbers, size: int | Numbers, key: int | Words) -> Numbers:
    """Return where a shuffle puts each index. `size` and `key` are one for all, or one for each index.

    >>> sorted(permute(np.arange(5), 5, key=1).tolist())
    [0, 1, 2, 3, 4]
    """
    if compiled.native is not None and isinstance(size, int) and isinstance(key, int) and size > SORTED:
        cells = indices.astype(np.uint64)
        compiled.native.permute(cells, size, *_one_table(size, key))
        return cells.view(np.int64)
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
    """Return all indices in the order of their hashes."""
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
    """Hash 64-bit words: every bit of the result depends on every bit of the input."""
    mixed = words + _GOLDEN
    mixed ^= mixed >> np.uint64(30)
    mixed *= _FIRST
    mixed ^= mixed >> np.uint64(27)
    mixed *= _SECOND
    mixed ^= mixed >> np.uint64(31)
    return mixed


@lru_cache(maxsize=16)
def _one_table(size: int, key: int) -> tuple[int, int, Words]:
    """Return the sides and the round keys of a table for all indices, which are those of an epoch."""
    table = _Table(np.array([size], np.uint64), _round_keys(np.array([key], np.uint64)))
    return int(table.highs[0]), int(table.lows[0]), np.concatenate(table.round_keys)


class _Table:
    """The table and its rotations; every array has one value for all indices, or one for each."""

    def __init__(self, sizes: Words, round_keys: list[Words]) -> None:
        self.sizes = sizes
        self.round_keys = round_keys
        self.highs = np.maximum(np.ceil(np.sqrt(sizes)).astype(np.uint64), np.uint64(1))
        self.lows = np.maximum((sizes + self.highs - np.uint64(1)) // self.highs, np.uint64(1))

    def at(self, chosen: NDArray[np.intp]) -> "_Table":
        """Return the table of some of the indices."""
        if len(self.sizes) == 1 and len(self.round_keys[0]) == 1:
            return self
        return _Table(_at(self.sizes, chosen), [_at(keys, chosen) for keys in self.round_keys])

    def turn(self, cells: Words) -> Words:
        high = cells // self.lows
        low = cells - high * self.lows
        for number, key in enumerate(self.round_keys):
            if number % 2:
                _add_modulo(low, _hash(high, key), self.lows)
            else:
                _add_modulo(high, _hash(low, key), self.highs)
        turned: Words = high * self.lows + low
        return turned


def _add_modulo(half: Words, hashed: Words, count: Words) -> None:
    """Rotate `half` by a hashed share of `count`: the upper 32 bits, scaled, so that no division is needed."""
    hashed >>= _HALF
    hashed *= count
    hashed >>= _HALF
    half += hashed
    np.minimum(half, half - count, out=half)  # below the count, the unsigned difference wraps to a larger number


def _hash(half: Words, round_key: Words) -> Words:
    """Return words whose upper bits depend on all bits of `half` and of the key."""
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
