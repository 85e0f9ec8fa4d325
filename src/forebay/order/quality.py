"""How near an order comes to a global shuffle, in three figures that are 1 for a global one.

chunks   distinct chunks in a batch, as a share of those that a global shuffle has on average
units    the same for units: runs of rows that are stored, and decoded, together
travel   distance between the rows at successive positions, as a share of the same
"""

from dataclasses import dataclass

import numpy as np

from forebay.order.bijection import Numbers
from forebay.order.orders import Order

_BATCHES = 64


@dataclass(frozen=True, slots=True)
class ShuffleQuality:
    """Measured on batches spread over an epoch."""

    chunks: float
    units: float
    travel: float

    def __str__(self) -> str:
        return (
            f"of a global shuffle: {self.chunks:.1%} of the chunks in a batch, {self.units:.1%} of the units, "
            f"{self.travel:.1%} of the distance between successive rows"
        )


def shuffle_quality(order: Order, counts: Numbers, unit: int, batch_size: int, epoch: int = 0) -> ShuffleQuality:
    """The figures of an order of chunks of so many rows each."""
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
    """How many groups of so many rows each a random batch touches."""
    return float((1 - (1 - counts / counts.sum()) ** size).sum())


def _expected_distinct_units(counts: Numbers, unit: int, size: int) -> float:
    total, rest = counts.sum(), counts % unit
    whole = (counts // unit).sum() * (1 - (1 - unit / total) ** size)
    return float(whole + (1 - (1 - rest / total) ** size).sum())


def _mean(values: list[float]) -> float:
    return float(np.mean(values)) if values else float("nan")
