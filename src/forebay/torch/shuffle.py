"""Which shuffle suits a cache: global where rows can be copied from where they lie, window where blocks are decoded."""

from collections.abc import Sequence
from math import lcm
from typing import Literal

from forebay.cache.reader import Cache
from forebay.errors import WindowTooLarge
from forebay.order.ordering import Ordering
from forebay.order.window import LANES, Window
from forebay.torch.ranks import Ranks

Shuffle = Literal["auto", "global", "window"]

WINDOW_BYTES = 96 * 1024 * 1024  # decoded rows that all lanes together mix at a time, unless a window is given


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
    unit = lcm(*(cache.column(name).block_rows for name in decoded))
    rows = WINDOW_BYTES // (lanes * max(1, cache.row_bytes(decoded or columns)))
    return Window(rows=max(unit, rows), unit=unit, lanes=lanes)


def decoded_columns(cache: Cache, columns: Sequence[str]) -> list[str]:
    """Those that are stored compressed."""
    return [name for name in columns if cache.column(name).codec != "none"]


def refuse_large_window(cache: Cache, columns: Sequence[str], window: Window, ranks: Ranks) -> None:
    """A window that does not stay decoded while it is mixed would be decoded again and again."""
    lanes = -(-window.lanes // ranks.world_size)
    rows = min(2 * lanes * window.rows, len(cache))
    needed = rows * cache.row_bytes(decoded_columns(cache, columns))
    limit = cache.statistics().limit_bytes
    if needed > limit:
        raise WindowTooLarge(cache.root, window.rows, lanes, needed, limit)
