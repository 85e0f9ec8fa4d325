"""Choose the shuffle that suits a cache, and reject one that decodes blocks repeatedly.

global   rows are copied from the mapped file, or all of them fit decoded in memory
window   blocks must be decoded, and more of them than stay decoded at a time; or chunks must be fetched
"""

from collections.abc import Sequence
from math import lcm
from typing import Literal, get_args

from forebay.errors import EngineUnusable, choice_error
from forebay.feeding.stream import Ranks
from forebay.order.window import LANES, Ordering, Window, lanes_of
from forebay.read.cache import Cache
from forebay.read.readers import DEFAULT_MEMORY
from forebay.store.base import is_url

Shuffle = Literal["auto", "global", "window"]
REMOTE_CHUNKS = 2  # chunks of a lane that are mixed: all that a batch needs must be fetched first
WINDOW_BYTES = 96 * 1024 * 1024  # decoded rows that all lanes together mix at a time, unless a window is passed


def choose_ordering(
    cache: Cache, columns: Sequence[str], shuffle: Shuffle | None, seed: int, window: Window | None
) -> Ordering:
    """Return the ordering for `shuffle`; "auto" depends on the cache's store and codecs.

    All default columns of the cache count as well as `columns`, so that runs that read different columns of a cache see
    its rows in the same order.
    """
    if shuffle not in (None, *get_args(Shuffle)):
        raise choice_error("shuffle", shuffle, (*get_args(Shuffle), None))
    if window is not None and not isinstance(window, Window):
        raise TypeError(f"window is {window!r}; pass forebay.torch.Window(rows=…)")
    if window is not None and shuffle in (None, "global"):
        raise ValueError(f"window needs shuffle='window' (got {shuffle!r})")
    if shuffle is None:
        return Ordering("sequential", seed)
    decoded = decoded_columns(cache, list(dict.fromkeys([*cache.default_columns, *columns])))
    if shuffle == "window" or window is not None:
        return Ordering("window", seed, window or suitable_window(cache, decoded or cache.default_columns))
    if shuffle == "auto" and is_url(cache.root):
        return Ordering("window", seed, suitable_window(cache, decoded or cache.default_columns), automatic=True)
    if shuffle == "global" or not decoded or len(cache) * cache.row_bytes(decoded) <= WINDOW_BYTES:
        return Ordering("global", seed, automatic=shuffle == "auto")
    return Ordering("window", seed, suitable_window(cache, decoded), automatic=True)


def suitable_window(cache: Cache, columns: Sequence[str], lanes: int = LANES) -> Window:
    """Return a window whose units cut no block of these columns, with as many rows as fit in `WINDOW_BYTES`.

    Its lanes are a power of two, as ranks most often are: ranks share lanes unless their number divides them.
    """
    unit = lcm(*(cache.column(name).block_rows for name in decoded_columns(cache, columns)))
    row_bytes = max(1, cache.row_bytes(columns))
    if 2 * lanes * unit * row_bytes > DEFAULT_MEMORY:  # the blocks of these units would not stay decoded
        lanes = 1 << max(1, WINDOW_BYTES // (unit * row_bytes)).bit_length() - 1
    rows = WINDOW_BYTES // (lanes * row_bytes)
    if is_url(cache.root):
        return Window(rows=max(unit, rows), unit=unit, chunks=REMOTE_CHUNKS, lanes=lanes)
    return Window(rows=max(unit, rows), unit=unit, lanes=lanes)


def decoded_columns(cache: Cache, columns: Sequence[str]) -> list[str]:
    """Return the columns that are stored compressed."""
    return [name for name in columns if cache.column(name).codec != "none"]


def refuse_decoding_again(cache: Cache, columns: Sequence[str], ordering: Ordering, ranks: Ranks) -> None:
    """Raise EngineUnusable if the mixed blocks do not fit in memory and would be decoded repeatedly."""
    if ordering.window is None and not ordering.automatic:
        return
    lanes = 1 if ordering.window is None else len(lanes_of(ranks.rank, ranks.world_size, ordering.window.lanes))
    window_rows = len(cache) if ordering.window is None else ordering.window.rows
    rows = min(2 * lanes * window_rows, len(cache))
    needed = rows * cache.row_bytes(decoded_columns(cache, columns))
    limit = cache.statistics().limit_bytes
    if needed > limit:
        raise EngineUnusable(
            f"a shuffle window of {window_rows:,} rows in {lanes} lanes of '{cache.root}' needs "
            f"{needed:,} bytes of decoded blocks; the cache may keep {limit:,}",
            hint=f"open the cache with memory={needed}, or choose a smaller window",
        )
