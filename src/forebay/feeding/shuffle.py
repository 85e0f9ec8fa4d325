"""Which shuffle suits a cache, and which part of every global batch a rank takes.

global   where rows can be copied from where they lie, or all of them stay decoded
window   where blocks are decoded, and more of them than are kept
"""

from collections.abc import Sequence
from dataclasses import dataclass
from math import lcm
from typing import Literal

from forebay.errors import WindowTooLarge
from forebay.order.orders import Ordering
from forebay.order.window import LANES, Window
from forebay.read.cache import Cache


@dataclass(frozen=True, slots=True)
class Ranks:
    """Rank `rank` of `world_size` takes the positions that leave this remainder, whatever the batch size."""

    rank: int
    world_size: int
    known_by: Literal["arguments", "environment", "group"] = "arguments"

    def __post_init__(self) -> None:
        if not 0 <= self.rank < self.world_size:
            raise ValueError(f"rank {self.rank} of world size {self.world_size}; ranks count from 0")

    @property
    def can_agree(self) -> bool:
        return self.known_by == "group" or self.world_size == 1


Shuffle = Literal["auto", "global", "window"]
WINDOW_BYTES = 96 * 1024 * 1024  # decoded rows that all lanes together mix at a time, unless a window is given


def choose_ordering(
    cache: Cache, columns: Sequence[str], shuffle: Shuffle | None, seed: int, window: Window | None
) -> Ordering:
    """What `shuffle` says; "auto" is decided by how the columns of the cache are stored.

    Two runs that read other columns of a cache see its rows in one order. Only columns of layers that were not opened
    count beside the cache's own.
    """
    if shuffle not in (None, "auto", "global", "window"):
        raise ValueError(f"shuffle is {shuffle!r}; 'auto', 'global', 'window' or None is expected")
    if window is not None and not isinstance(window, Window):
        raise TypeError(f"window is {window!r}; pass forebay.torch.Window(rows=…)")
    if window is not None and shuffle in (None, "global"):
        raise ValueError(f"a window goes with shuffle='window', not with {shuffle!r}")
    if shuffle is None:
        return Ordering("sequential", seed)
    decoded = decoded_columns(cache, list(dict.fromkeys([*cache.default_columns, *columns])))
    if shuffle == "window" or window is not None:
        return Ordering("window", seed, window or suitable_window(cache, decoded or cache.default_columns))
    if shuffle == "global" or not decoded or len(cache) * cache.row_bytes(decoded) <= WINDOW_BYTES:
        return Ordering("global", seed, automatic=shuffle == "auto")
    return Ordering("window", seed, suitable_window(cache, decoded), automatic=True)


def suitable_window(cache: Cache, columns: Sequence[str], lanes: int = LANES) -> Window:
    """Units that cut no block of these columns; as many rows as `WINDOW_BYTES` hold."""
    unit = lcm(*(cache.column(name).block_rows for name in decoded_columns(cache, columns)))
    rows = WINDOW_BYTES // (lanes * max(1, cache.row_bytes(columns)))
    return Window(rows=max(unit, rows), unit=unit, lanes=lanes)


def decoded_columns(cache: Cache, columns: Sequence[str]) -> list[str]:
    """Those that are stored compressed."""
    return [name for name in columns if cache.column(name).codec != "none"]


def refuse_decoding_again(cache: Cache, columns: Sequence[str], ordering: Ordering, ranks: Ranks) -> None:
    """Blocks that do not stay decoded while their rows are mixed would be decoded again and again."""
    if ordering.window is None and not ordering.automatic:
        return
    lanes = 1 if ordering.window is None else -(-ordering.window.lanes // ranks.world_size)
    window_rows = len(cache) if ordering.window is None else ordering.window.rows
    rows = min(2 * lanes * window_rows, len(cache))
    needed = rows * cache.row_bytes(decoded_columns(cache, columns))
    limit = cache.statistics().limit_bytes
    if needed > limit:
        raise WindowTooLarge(cache.root, window_rows, lanes, needed, limit)
