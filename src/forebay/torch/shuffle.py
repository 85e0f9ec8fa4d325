"""Which shuffle suits a cache: global where rows can be copied from where they lie, window where blocks are decoded."""

from collections.abc import Sequence
from math import lcm
from typing import Literal

from forebay.cache.reader import Cache
from forebay.columns import Column
from forebay.errors import WindowTooLarge
from forebay.order.ordering import Ordering
from forebay.order.window import LANES, Window
from forebay.torch.ranks import Ranks

Shuffle = Literal["auto", "global", "window"]

WINDOW_BYTES = 96 * 1024 * 1024  # decoded rows that all lanes together mix at a time, unless a window is given
_PACKED = 4  # bytes that a stored byte of a ragged column is taken to decode to


def choose_ordering(
    cache: Cache, columns: Sequence[str], shuffle: Shuffle | None, seed: int, window: Window | None
) -> Ordering:
    """What `shuffle` says; "auto" is decided by how the columns that are read are stored."""
    if shuffle not in (None, "auto", "global", "window"):
        raise ValueError(f"shuffle is {shuffle!r}; 'auto', 'global', 'window' or None is expected")
    if window is not None and shuffle in (None, "global"):
        raise ValueError(f"a window goes with shuffle='window', not with {shuffle!r}")
    if shuffle is None:
        return Ordering("sequential", seed)
    if shuffle == "window" or window is not None or (shuffle == "auto" and decoded_columns(cache, columns)):
        return Ordering("window", seed, window or suitable_window(cache, columns))
    return Ordering("global", seed)


def suitable_window(cache: Cache, columns: Sequence[str], lanes: int = LANES) -> Window:
    """Units that cut no block; as many rows as `WINDOW_BYTES` hold."""
    decoded = decoded_columns(cache, columns)
    unit = lcm(*(column.block_rows for column in decoded))
    rows = WINDOW_BYTES // (lanes * max(1, row_bytes(cache, decoded or [cache.column(name) for name in columns])))
    return Window(rows=max(unit, rows), unit=unit, lanes=lanes)


def decoded_columns(cache: Cache, columns: Sequence[str]) -> list[Column]:
    """Those that are stored compressed."""
    return [column for column in map(cache.column, columns) if column.codec != "none"]


def row_bytes(cache: Cache, columns: Sequence[Column]) -> int:
    """What a row takes in memory: known for fixed columns, for ragged ones judged by what the cache stores."""
    ragged = any(column.ragged for column in columns)
    return sum(column.item_bytes for column in columns if not column.ragged) + ragged * _ragged_bytes(cache)


def refuse_large_window(cache: Cache, columns: Sequence[str], window: Window, ranks: Ranks) -> None:
    """A window that does not stay decoded while it is mixed would be decoded again and again."""
    fixed = sum(column.item_bytes for column in decoded_columns(cache, columns) if not column.ragged)
    lanes = -(-window.lanes // ranks.world_size)
    needed, limit = 2 * lanes * window.rows * fixed, cache.statistics().limit_bytes
    if needed > limit:
        raise WindowTooLarge(cache.root, window.rows, lanes, needed, limit)


def _ragged_bytes(cache: Cache) -> int:
    """What the ragged columns of a row decode to: a few times what is stored beside the fixed, plain ones."""
    tables = [cache.generation.table(layer) for layer in cache.layers]
    stored = sum(int(table.numbers["size"].sum()) // max(1, int(table.rows.sum())) for table in tables)
    plain = [column for column in map(cache.column, cache.columns) if not column.ragged and column.codec == "none"]
    return _PACKED * max(0, stored - sum(column.item_bytes for column in plain))
