"""The order of an epoch as a function of the position, and how close it is to a global shuffle.

sequential   0 1 2 3 4 5 6 7      position and row are the same
global       5 0 7 2 6 1 3 4      one shuffle over all rows, computed row by row
window                            see `forebay.order.window`

An order does not depend on ranks, threads, batch size or where training was resumed.
"""

from collections.abc import Mapping
from dataclasses import asdict, dataclass
from typing import Any, Literal, Protocol

import numpy as np

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
