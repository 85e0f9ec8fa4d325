"""Coins: random choices as a function of row, epoch and purpose, the same in any order and on any machine.

The generator is Philox 4×32-10: ten rounds turn a counter of 128 bits and a key of 64 into 128 random bits.

    key       hash of seed and purpose
    counter   row ─ 64 bits │ epoch ─ 32 │ draw ─ 32        each block gives two draws of 64 bits

Rows are identified by chunk and row (`row_keys`), so filling a gap or growing the cache changes no coin. Samples are
identified by their id (`sample_keys`), so their coins are the same in every cache, and without one.
"""

import hashlib
from collections.abc import Callable, Iterable
from math import prod

import numpy as np
from numpy.typing import ArrayLike, NDArray

from forebay.order.shuffle import Numbers, Words, key_of

_HALF = np.uint64(32)
_LOW = np.uint64(0xFFFFFFFF)
_MULTIPLIERS = (np.uint64(0xD2511F53), np.uint64(0xCD9E8D57))
_WEYL = (0x9E3779B9, 0xBB67AE85)
_PHILOX_ROUNDS = 10


class Coins:
    """The coins of some rows, from which a transform draws its random choices.

    `rows` come from `row_keys` or `sample_keys`; a function that returns the keys of `count` rows is called when they
    are first drawn from, as most batches draw none. `epoch` is one for all rows, or one for each.

    >>> coins = Coins(seed=0, epoch=3, rows=row_keys([0, 0], [4, 5]))
    >>> coins.flip("mirror").tolist()
    [True, False]
    """

    def __init__(self, seed: int, epoch: int | Numbers, rows: Words | Callable[[], Words], count: int = 0) -> None:
        self.seed, self.epoch, self._rows = seed, epoch, rows
        self._count = count if callable(rows) else len(rows)

    def __len__(self) -> int:
        return self._count

    def __repr__(self) -> str:
        return f"<Coins of {self._count:,} rows, seed {self.seed}>"

    @property
    def rows(self) -> Words:
        if callable(self._rows):
            self._rows = self._rows()
        return self._rows

    def part(self, some: slice | Numbers) -> "Coins":
        """Return the coins of some of the rows."""
        epoch = self.epoch if isinstance(self.epoch, int) else self.epoch[some]
        count = len(range(self._count)[some]) if isinstance(some, slice) else len(some)
        return Coins(self.seed, epoch, lambda: self.rows[some], count)

    def uniform(self, purpose: str, shape: tuple[int, ...] = ()) -> NDArray[np.float64]:
        """Return numbers from 0 to below 1, `(rows, *shape)`."""
        return (self.words(purpose, shape) >> np.uint64(11)) * np.float64(2.0**-53)

    def flip(self, purpose: str, probability: float = 0.5) -> NDArray[np.bool_]:
        """Return one bool per row, True with this probability."""
        if not 0 <= probability <= 1:
            raise ValueError(f"probability must be from 0 to 1 (got {probability})")
        if probability in (0, 1):  # whatever is drawn
            return np.full(len(self.rows), probability == 1)
        return self.uniform(purpose) < probability

    def integers(self, purpose: str, low: int, high: int, shape: tuple[int, ...] = ()) -> NDArray[np.int64]:
        """Return integers from `low` to below `high`, `(rows, *shape)`."""
        if not 0 < high - low <= 2**32:
            raise ValueError(f"high - low must be from 1 to 2**32 (got low={low}, high={high})")
        scaled = (self.words(purpose, shape) >> _HALF) * np.uint64(high - low)
        return (scaled >> _HALF).astype(np.int64) + low

    def words(self, purpose: str, shape: tuple[int, ...] = ()) -> Words:
        """Return 64 random bits each, `(rows, *shape)`."""
        count = prod(shape)
        draws = np.arange(-(-count // 2), dtype=np.uint64)
        counter = (self.rows[:, None] & _LOW, self.rows[:, None] >> _HALF, _epochs(self.epoch), draws)
        block = philox(counter, _key(self.seed, purpose))
        words = np.stack([block[0] | block[1] << _HALF, block[2] | block[3] << _HALF], axis=-1)
        return words.reshape(len(self.rows), 2 * len(draws))[:, :count].reshape(len(self.rows), *shape)


def row_keys(chunks: ArrayLike, rows: ArrayLike) -> Words:
    """Return row ids (chunk, row in chunk) as one number each."""
    return np.asarray(chunks).astype(np.uint64) << _HALF | np.asarray(rows).astype(np.uint64)


def sample_keys(ids: Iterable[bytes | memoryview]) -> Words:
    """Return the hashes of sample ids.

    >>> Coins(seed=0, epoch=3, rows=sample_keys([b"1.jpg", b"2.jpg"])).flip("flip").tolist()
    [False, True]
    """
    digests = b"".join(hashlib.blake2b(each, digest_size=8, person=b"sample").digest() for each in ids)
    return np.frombuffer(digests, "<u8").astype(np.uint64)


def philox(
    counter: tuple[Words | np.uint64, Words | np.uint64, Words | np.uint64, Words | np.uint64], key: tuple[int, int]
) -> tuple[Words, Words, Words, Words]:
    """Return four random 32-bit words for every counter; the parts of counters are 32 bits wide and broadcast."""
    a, b, c, d = np.broadcast_arrays(*counter)
    for turn in range(_PHILOX_ROUNDS):
        first, second = a * _MULTIPLIERS[0], c * _MULTIPLIERS[1]
        key_a, key_b = (np.uint64((part + turn * weyl) % 2**32) for part, weyl in zip(key, _WEYL, strict=True))
        a, b, c, d = second >> _HALF ^ b ^ key_a, second & _LOW, first >> _HALF ^ d ^ key_b, first & _LOW
    return a, b, c, d


def _key(seed: int, purpose: str) -> tuple[int, int]:
    key = key_of("coin", seed, purpose)
    return key % 2**32, key >> 32


def _epochs(epoch: int | NDArray[np.int64]) -> Words:
    epochs = np.asarray(epoch, np.int64).reshape(-1, 1)
    if epochs.size and not 0 <= epochs.min() <= epochs.max() < 2**32:
        raise ValueError(f"epoch must be from 0 to below 2**32 (got {epoch})")
    return epochs.astype(np.uint64)
