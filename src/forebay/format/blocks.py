"""How the rows of a column fall into blocks, and where each block's bytes are.

rows      0 1 2 3 │ 4 5 6 7 │ 8 9          rows_per_block = 4, three blocks
fixed     block k is rows 4k … 4k+3
ragged    block k is the values from offsets[4k] to offsets[4k+4]
"""

import numpy as np
from numpy.typing import NDArray

from forebay.columns import Array, Column, Ragged

Bounds = NDArray[np.int64]


def block_count(column: Column, rows: int) -> int:
    return -(-rows // column.block_rows)


def block_rows(column: Column, rows: int) -> Bounds:
    """The row at which each block begins, and the end of the last."""
    step = min(column.block_rows, max(1, rows))
    return np.minimum(np.arange(block_count(column, rows) + 1, dtype=np.int64) * step, rows)


def value_bounds(column: Column, rows: int, offsets: Array | None) -> Bounds:
    """Where each block begins, in rows, or in values of a ragged column, and the end of the last."""
    edges = block_rows(column, rows)
    return edges if offsets is None else offsets[edges].astype(np.int64)


def block_span(column: Column, rows: int, block: int, offsets: Array | None) -> tuple[int, int]:
    """Where one block begins and ends, as in `value_bounds`."""
    low, high = (min(number * column.block_rows, rows) for number in (block, block + 1))
    return (low, high) if offsets is None else (int(offsets[low]), int(offsets[high]))


def raw_bounds(column: Column, rows: int, offsets: Array | None) -> Bounds:
    """Where each block begins, in bytes before compression, and the end of the last."""
    return value_bounds(column, rows, offsets) * column.item_bytes


def values_of(rows: Array | Ragged) -> Array:
    return rows.values if isinstance(rows, Ragged) else rows
