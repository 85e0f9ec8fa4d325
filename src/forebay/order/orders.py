"""The order of an epoch as a function of the position, and how close it is to a global shuffle.

sequential   0 1 2 3 4 5 6 7      position and row are the same
global       5 0 7 2 6 1 3 4      one shuffle over all rows, computed row by row
window                            see `forebay.order.window`

An order does not depend on ranks, threads, batch size or where training was resumed.

Coins: random choices as a function of row, epoch and purpose, the same in any order and on any machine.

The generator is Philox 4×32-10: ten rounds turn a counter of 128 bits and a key of 64 into 128 random bits.

    key       hash of seed and purpose
    counter   row ─ 64 bits │ epoch ─ 32 │ draw ─ 32        each block gives two draws of 64 bits

Rows are identified by chunk and row (`row_keys`), so filling a gap or growing the cache changes no coin. Samples are
identified by their id (`sample_keys`), so their coins are the same in every cache, and without one.
"""

import hashlib
from collections.abc import Iterable, Mapping
from dataclasses import asdict, dataclass
from math import prod
from typing import Any, Literal, Protocol

import numpy as np
from numpy.typing import ArrayLike, NDArray

from forebay.order.bijection import Numbers, key_of, permute
from forebay.order.window import Window, WindowOrder


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


Kind = Literal["global", "window", "sequential"]


@dataclass(frozen=True, slots=True)
class Ordering:
    """An order before its rows are known. Only a window shuffle has a `window`."""

    kind: Kind
    seed: int
    window: Window | None = None
    automatic: bool = False  # chosen by how the rows are stored: a grown cache may get another kind

    def __post_init__(self) -> None:
        if (self.kind == "window") != (self.window is not None):
            raise ValueError(
                f"shuffle 'window' needs a window, and no other shuffle has one (got {self.kind!r}, {self.window})"
            )

    def of(self, counts: Numbers, part: int = 0) -> Order:
        """Return the order of chunks with `counts` rows each; each segment (`part`) of an epoch has its own order."""
        if self.window is not None:
            return WindowOrder(counts, self.seed, self.window, part)
        size = int(counts.sum())
        return SequentialOrder(size) if self.kind == "sequential" else GlobalOrder(size, self.seed, part)

    def state(self) -> dict[str, Any]:
        window = None if self.window is None else asdict(self.window)
        return {"shuffle": self.kind, "seed": self.seed, "window": window, "automatic": self.automatic}

    @classmethod
    def of_state(cls, state: Mapping[str, Any]) -> "Ordering":
        window = None if state["window"] is None else Window(**state["window"])
        return cls(state["shuffle"], state["seed"], window, state["automatic"])


_BATCHES = 64


@dataclass(frozen=True, slots=True)
class ShuffleQuality:
    """How close an order is to a global shuffle, measured on batches spread over an epoch; 1 is equal."""

    chunks: float  # distinct chunks in a batch, relative to the mean of a global shuffle
    units: float  # the same for units: rows that are stored, and decoded, together
    travel: float  # distance between the rows at successive positions, likewise

    def __str__(self) -> str:
        return (
            f"of a global shuffle: {self.chunks:.1%} of the chunks in a batch, {self.units:.1%} of the units, "
            f"{self.travel:.1%} of the distance between successive rows"
        )


def shuffle_quality(order: Order, counts: Numbers, unit: int, batch_size: int, epoch: int = 0) -> ShuffleQuality:
    """Measure an order over chunks of `counts` rows each."""
    size = min(batch_size, order.size)
    starts = np.linspace(0, order.size - size, _BATCHES).astype(np.int64)
    batches = [order.rows_at(epoch, np.arange(start, start + size)) for start in starts.tolist()]
    edges = np.concatenate([[0], np.cumsum(counts)])
    units = -(-counts // unit)
    first_unit = np.cumsum(units) - units

    def chunk_of(rows: Numbers) -> Numbers:
        return np.searchsorted(edges, rows, side="right") - 1

    def unit_of(rows: Numbers) -> Numbers:
        chunk = chunk_of(rows)
        found: Numbers = first_unit[chunk] + (rows - edges[chunk]) // unit
        return found

    return ShuffleQuality(
        chunks=_mean([len(np.unique(chunk_of(rows))) for rows in batches]) / _expected_distinct(counts, size),
        units=_mean([len(np.unique(unit_of(rows))) for rows in batches]) / _expected_distinct_units(counts, unit, size),
        travel=_mean([np.abs(np.diff(rows)).mean() for rows in batches if size > 1]) / (order.size / 3),
    )


def _expected_distinct(counts: Numbers, size: int) -> float:
    """Return the expected number of groups, of `counts` rows each, that a random batch touches."""
    return float((1 - (1 - counts / counts.sum()) ** size).sum())


def _expected_distinct_units(counts: Numbers, unit: int, size: int) -> float:
    total, rest = counts.sum(), counts % unit
    whole = (counts // unit).sum() * (1 - (1 - unit / total) ** size)
    return float(whole + (1 - (1 - rest / total) ** size).sum())


def _mean(values: list[float]) -> float:
    return float(np.mean(values)) if values else float("nan")


Words = NDArray[np.uint64]
_LOW = np.uint64(0xFFFFFFFF)
_HALF = np.uint64(32)
_MULTIPLIERS = (np.uint64(0xD2511F53), np.uint64(0xCD9E8D57))
_WEYL = (0x9E3779B9, 0xBB67AE85)
_ROUNDS = 10


@dataclass(frozen=True, slots=True, eq=False)
class Coins:
    """The coins of some rows, from which a transform draws its random choices.

    >>> coins = Coins(seed=0, epoch=3, rows=row_keys([0, 0], [4, 5]))
    >>> coins.flip("mirror").tolist()
    [True, False]
    """

    seed: int
    epoch: int | NDArray[np.int64]  # one for all, or one for each row
    rows: Words  # (rows,), from `row_keys` or `sample_keys`

    def uniform(self, purpose: str, shape: tuple[int, ...] = ()) -> NDArray[np.float64]:
        """Return numbers from 0 to below 1, `(rows, *shape)`."""
        return (self.words(purpose, shape) >> np.uint64(11)) * np.float64(2.0**-53)

    def flip(self, purpose: str, probability: float = 0.5) -> NDArray[np.bool_]:
        """Return one bool per row, True with this probability."""
        if not 0 <= probability <= 1:
            raise ValueError(f"probability must be from 0 to 1 (got {probability})")
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


def sample_keys(ids: Iterable[bytes]) -> Words:
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
    for turn in range(_ROUNDS):
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
