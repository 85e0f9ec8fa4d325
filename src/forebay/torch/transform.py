"""What a user may do to a batch: a function of its tensors and of the coins of its rows.

    def mirror(batch: Batch, coins: Coins) -> Batch:
        flipped = torch.from_numpy(coins.flip("mirror"))
        return batch | {"pixels": torch.where(flipped[:, None, None], batch["pixels"].flip(-1), batch["pixels"])}

A coin belongs to a row, an epoch and a purpose. So the choice is the same in a `Loader`, in a `CacheDataset`, with any
number of ranks, threads or workers, and after any resume.
"""

from collections.abc import Callable, Sequence
from typing import Protocol

import numpy as np

from forebay.cache.reader import Cache
from forebay.order.bijection import Numbers, key_of
from forebay.order.coins import Coins, Words, row_keys, sample_keys
from forebay.torch.batch import Batch

Naming = Callable[[Cache, Numbers], Words]


class Transform(Protocol):
    """A batch made of a batch, with the coins of its rows."""

    def __call__(self, batch: Batch, coins: Coins, /) -> Batch: ...


def by_row(cache: Cache, rows: Numbers) -> Words:
    """The permanent names of rows."""
    chunks = np.searchsorted(cache.chunk_starts, rows, side="right") - 1
    return row_keys(cache.chunk_numbers[chunks], rows - cache.chunk_starts[chunks])


def by_sample(cache: Cache, rows: Numbers) -> Words:
    """The samples that rows were made of, where the recipe names a column of their ids; else the rows themselves."""
    column = cache.recipe(cache.generation.base).sample_ids
    return sample_keys(each.tobytes() for each in cache.views(rows, column)) if column else by_row(cache, rows)


def row_coins(
    caches: Sequence[Cache],
    seed: int,
    epoch: int | Numbers,
    rows: Numbers,
    sources: Numbers | None = None,
    naming: Naming = by_row,
) -> Coins:
    """The coins of some rows, each of the cache that `sources` says, of the first without; in one epoch or one each.

    Coins of further caches of a mixture are others than those of the first, whatever their rows are called.
    """
    if sources is None:
        return Coins(seed, epoch, naming(caches[0], rows))
    names = np.empty(len(rows), np.uint64)
    for source in np.unique(sources).tolist():
        here = sources == source
        names[here] = naming(caches[source], rows[here]) ^ np.uint64(key_of("source", source) if source else 0)
    return Coins(seed, epoch, names)
