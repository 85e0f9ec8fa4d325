"""From spans of keys to the block lists of FlexAttention, without ever looking at a token inside a block.

Rows of `block_size[0]` queries meet columns of `block_size[1]` keys. Because spans are monotone, four
integers say all about a row of blocks:

    key blocks     0 1 2 3 4 5 6 7 8
    query block    . . p p F F F p .        . nothing seen   p partly seen   F seen by all its queries
                       │   │     │ └ stop
                       start     full_stop
                           full_start

They are monotone as well, so that the transposed lists (which query blocks see a key block) are ranges too,
found by counting. Work is O(rows · blocks), plus the lists themselves.
"""

from dataclasses import dataclass
from operator import index

import numpy as np
from numpy.typing import NDArray

from forebay.masks.documents import Bools, Ints
from forebay.masks.spans import Spans

BlockSize = tuple[int, int]


@dataclass(frozen=True, slots=True)
class BlockRanges:
    """Four integers per row of blocks, `[rows, row_blocks]` each; see the drawing above."""

    start: Ints
    full_start: Ints
    full_stop: Ints
    stop: Ints
    columns: int

    def transposed(self) -> "BlockRanges":
        """The same blocks, listed by column."""
        return BlockRanges(
            start=_rows_at_or_below(self.stop, self.columns),
            full_start=_rows_at_or_below(self.full_stop, self.columns),
            full_stop=_rows_at_or_below(self.full_start, self.columns),
            stop=_rows_at_or_below(self.start, self.columns),
            columns=self.start.shape[1],
        )


@dataclass(frozen=True, slots=True)
class BlockList:
    """Which columns each row of blocks uses: the first `count` of `indices`; what follows means nothing."""

    count: Ints  # (rows, row_blocks)
    indices: Ints  # (rows, row_blocks, columns)


@dataclass(frozen=True, slots=True)
class BlockLists:
    """The four lists of a `BlockMask`, under its own names."""

    kv: BlockList
    full_kv: BlockList
    q: BlockList
    full_q: BlockList


def block_pair(block_size: object) -> BlockSize:
    """`block_size` as (queries, keys), from one integer or two of any kind: 128 becomes (128, 128)."""
    sides = tuple(block_size) if isinstance(block_size, tuple | list | np.ndarray) else (block_size, block_size)
    try:
        queries, keys = (index(side) for side in sides)
    except (TypeError, ValueError):
        raise TypeError(
            f"block_size is {block_size!r} but one integer or two (queries, keys) are expected; 128 is usual"
        ) from None
    return _checked_block_size((queries, keys))


def span_block_lists(spans: Spans, block_size: BlockSize) -> BlockLists:
    """The four lists for queries that see one span of keys each."""
    by_query = block_ranges(spans, block_size)
    by_key = by_query.transposed()
    return BlockLists(
        kv=partial_blocks(by_query), full_kv=full_blocks(by_query),
        q=partial_blocks(by_key), full_q=full_blocks(by_key),
    )  # fmt: skip


def key_block_lists(keep: Bools, block_size: BlockSize) -> BlockLists:
    """The four lists for queries that all see the same keys, `keep[rows, S]`: padding masks of images.

    keep 1 1 . . 1 1     blocks of 2     F . F
                                         F . F
    """
    partial, full = _key_blocks(keep, block_size)
    return BlockLists(
        kv=_listed(partial), full_kv=_listed(full),
        q=_listed(partial.swapaxes(1, 2)), full_q=_listed(full.swapaxes(1, 2)),
    )  # fmt: skip


def block_ranges(spans: Spans, block_size: BlockSize) -> BlockRanges:
    """The ranges of each row of query blocks, read off its first and its last query."""
    queries, keys = _checked_block_size(block_size)
    length = spans.sequence_length
    first_query = np.arange(0, length, queries)
    last_query = np.minimum(first_query + queries, length) - 1
    # `take`, not an index: an index would leave the rows transposed in memory.
    start = spans.first.take(first_query, axis=1) // keys
    stop = _ceil_divide(spans.stop.take(last_query, axis=1), keys)
    full_start = _ceil_divide(spans.first.take(last_query, axis=1), keys)
    full_stop = np.maximum(spans.stop.take(first_query, axis=1) // keys, full_start)
    if length % queries:
        # FlexAttention counts the queries beyond the end as seeing nothing: that row has no full block.
        full_start[:, -1] = full_stop[:, -1] = stop[:, -1]
    return BlockRanges(start, full_start, full_stop, stop, columns=-(-length // keys))


def partial_blocks(ranges: BlockRanges) -> BlockList:
    """start … full_start, then full_stop … stop."""
    column = np.arange(ranges.columns, dtype=np.int32)
    before = ranges.full_start - ranges.start
    jump = ranges.full_stop - ranges.full_start
    indices = ranges.start[:, :, None] + column
    indices += (column >= before[:, :, None]) * jump[:, :, None]
    return BlockList(before + (ranges.stop - ranges.full_stop), _within(indices, ranges.columns))


def full_blocks(ranges: BlockRanges) -> BlockList:
    """full_start … full_stop."""
    column = np.arange(ranges.columns, dtype=np.int32)
    indices = ranges.full_start[:, :, None] + column
    return BlockList(ranges.full_stop - ranges.full_start, _within(indices, ranges.columns))


def _within(indices: Ints, columns: int) -> Ints:
    # Entries after `count` are never used, but a kernel may fetch one ahead: keep them inside.
    return np.minimum(indices, np.int32(columns - 1), out=indices)


def _rows_at_or_below(edges: Ints, columns: int) -> Ints:
    """For each column, how many rows have `edge <= column`, by counting and summing up."""
    rows = np.arange(len(edges))[:, None] * (columns + 1)
    counts = np.bincount((edges + rows).ravel(), minlength=len(edges) * (columns + 1))
    return np.cumsum(counts.reshape(len(edges), -1)[:, :columns], axis=1, dtype=np.int32)


def _key_blocks(keep: Bools, block_size: BlockSize) -> tuple[Bools, Bools]:
    queries, keys = _checked_block_size(block_size)
    length = keep.shape[1]
    kept = np.add.reduceat(keep, np.arange(0, length, keys), axis=1, dtype=np.int32)
    complete = np.arange(0, length, queries) + queries <= length
    full = (kept == keys)[:, None, :] & complete[:, None]
    return (kept > 0)[:, None, :] & ~full, full


def _listed(member: Bools) -> BlockList:
    indices = np.argsort(~member, axis=-1, kind="stable").astype(np.int32)
    return BlockList(member.sum(axis=-1, dtype=np.int32), indices)


def _ceil_divide(values: Ints, divisor: int) -> Ints:
    quotient: NDArray[np.int32] = -(-values // divisor)
    return quotient


def _checked_block_size(block_size: BlockSize) -> BlockSize:
    if min(block_size) < 1:
        raise ValueError(f"block_size is {block_size} but a block holds at least one token; 128 is usual")
    return block_size
