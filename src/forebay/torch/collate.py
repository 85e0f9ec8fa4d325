"""What makes batches of a kind of its own: images, and whatever is not a stack of columns.

    loader = Loader(cache, global_batch_size=64, collate=ImageBatch(cache, flip=0.5))

A collate names the columns it reads. Fixed ones come as arrays; ragged ones row by row, each a view of the cache that
is checked as it is taken, so that what becomes of it is written straight to where it belongs.
"""

from collections.abc import Iterable, Mapping, Sequence
from typing import Protocol

from forebay.cache.reader import Cache
from forebay.columns import Array
from forebay.order.coins import Coins
from forebay.order.selection import Selection
from forebay.torch.batch import Batch
from forebay.torch.buffers import Buffers

Rows = Mapping[str, Array | Iterable[Array]]


class Collate(Protocol):
    """A batch made of rows, with the coins of their samples, in memory that `buffers` lend. Called by many threads.

    Optional: `check_cache(cache)`, which raises where batches of that cache's rows would be wrong, and
    `check_rows(cache, selection)`, which raises where no batch can hold some of the rows selected (None: all).
    """

    @property
    def columns(self) -> Sequence[str]:
        """What it reads."""
        ...

    @property
    def row_bytes(self) -> int:
        """What a row of its batches takes: how far ahead they are made depends on it."""
        ...

    def collate(self, rows: Rows, coins: Coins, buffers: Buffers) -> Batch: ...


def check_rows(collate: Collate, cache: Cache, selection: Selection | None) -> None:
    """Let a collate refuse rows that it can make nothing of, before it meets them in the middle of an epoch."""
    check = getattr(collate, "check_rows", None)
    if check is not None:
        check(cache, selection)


def check_caches(collate: Collate, caches: Sequence[Cache]) -> None:
    """Let a collate refuse caches that it was not made for."""
    check = getattr(collate, "check_cache", None)
    if check is not None:
        for cache in caches:
            check(cache)
