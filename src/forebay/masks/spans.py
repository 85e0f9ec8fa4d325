"""The keys that each query sees, as one span per query, and FlexAttention's block lists made from spans.

    seq_lens [[3, 2]], S 6            first stop
                        a a a b b .
                     a  1 . . . . .     0    1
    causal           a  1 1 . . . .     0    2
                     a  1 1 1 . . .     0    3
                     b  . . . 1 . .     3    4
                     b  . . . 1 1 .     3    5
                     .  . . . . . 1     5    6

Two facts hold for all spans made here, and the block lists rely on both: a span contains its own query, and neither
`first` nor `stop` ever decreases from one query to the next.

Rows of `block_size[0]` queries meet columns of `block_size[1]` keys. Because spans are monotone, four integers describe
a row of blocks:

    key blocks     0 1 2 3 4 5 6 7 8
    query block    . . p p F F F p .        . nothing seen   p partly seen   F seen by all its queries
                       │   │     │ └ stop
                       start     full_stop
                           full_start

They are monotone too, so the transposed lists (which query blocks see a key block) are also ranges, found by counting.
The work is O(rows · blocks), plus the lists themselves.
"""

from dataclasses import dataclass
from operator import index
from typing import Literal, get_args

import numpy as np
from numpy.typing import ArrayLike, NDArray

from forebay.fields import checked_whole
from forebay.masks.documents import Bools, Ints, doc_start, doc_stop, spread, whole_lengths

DocumentKind = Literal["causal", "bidirectional"]


@dataclass(frozen=True, slots=True)
class Spans:
    """Query q of row b sees the keys `first[b, q] <= key < stop[b, q]`."""

    first: Ints  # (rows, sequence_length)
    stop: Ints  # (rows, sequence_length)

    @property
    def sequence_length(self) -> int:
        return int(self.first.shape[1])


def document_spans(seq_lens: ArrayLike, sequence_length: int | None = None, kind: DocumentKind = "causal") -> Spans:
    """Return the spans of tokens that see their own document: up to themselves (`causal`), or all (`bidirectional`).

    causal    1 . . . .       bidirectional    1 1 1 . .
              1 1 . . .                        1 1 1 . .
              1 1 1 . .                        1 1 1 . .
              . . . 1 .                        . . . 1 1
              . . . 1 1                        . . . 1 1
    """
    if kind not in get_args(DocumentKind):
        raise ValueError(f"kind must be 'causal' or 'bidirectional' (got {kind!r})")
    first = doc_start(seq_lens, sequence_length)
    if kind == "causal":
        return Spans(first, _causal_stop(first))
    return Spans(first, doc_stop(seq_lens, sequence_length))


def prefix_spans(seq_lens: ArrayLike, prefix_lens: ArrayLike, sequence_length: int | None = None) -> Spans:
    """Return the spans of prefix-LM: all of a document sees its first `prefix_lens` tokens, the rest is causal.

    seq_lens [[4, 1]], prefix_lens [[2, 0]]       1 1 . . .
                                                  1 1 . . .
                                                  1 1 1 . .
                                                  1 1 1 1 .
                                                  . . . . 1
    """
    whole = whole_lengths(seq_lens, sequence_length)
    prefix = np.zeros_like(whole)
    prefix[:, :-1] = _checked_prefixes(prefix_lens, whole[:, :-1])
    start = np.cumsum(whole, axis=1, dtype=np.int32) - whole
    first = spread(start, whole)
    return Spans(first, np.maximum(_causal_stop(first), spread(start + prefix, whole)))


def causal_spans(sequence_length: int) -> Spans:
    """Return the spans of one row without documents: a token sees all tokens up to itself."""
    first = np.broadcast_to(np.int32(0), (1, sequence_length))
    return Spans(first, _causal_stop(first))


def windowed(spans: Spans, window: int) -> Spans:
    """Keep the keys fewer than `window` tokens away from their query.

    causal, window 2      1 . . .
                          1 1 . .
                          . 1 1 .
                          . . 1 1
    """
    checked_whole("window", window, 1)
    query = np.arange(spans.sequence_length, dtype=np.int32)
    reach = min(window, spans.sequence_length)
    return Spans(np.maximum(spans.first, query - (reach - 1)), np.minimum(spans.stop, query + reach))


def dense_mask(spans: Spans) -> Bools:
    """Return the mask `[rows, S, S]`, True = sees. It takes S² memory: for small rows and tests."""
    key = np.arange(spans.sequence_length)
    return (key >= spans.first[:, :, None]) & (key < spans.stop[:, :, None])


def _causal_stop(first: Ints) -> Ints:
    return np.broadcast_to(np.arange(1, first.shape[1] + 1, dtype=np.int32), first.shape)


def _checked_prefixes(prefix_lens: ArrayLike, lengths: Ints) -> Ints:
    prefix = np.asarray(prefix_lens)
    if prefix.shape != lengths.shape:
        raise ValueError(
            f"prefix_lens has shape {prefix.shape} but seq_lens has {lengths.shape}; pass one per document"
        )
    if prefix.size and not np.issubdtype(prefix.dtype, np.integer):
        raise TypeError(f"prefix_lens must be integers (got {prefix.dtype}); cast them first")
    bad = (prefix < 0) | (prefix > lengths)
    if bad.any():
        row, document = np.argwhere(bad)[0]
        raise ValueError(
            f"document {document} of row {row} has {lengths[row, document]:,} tokens but a prefix of "
            f"{prefix[row, document]:,}; a prefix must be from 0 to the length of its document"
        )
    return prefix.astype(np.int32)


BlockSize = tuple[int, int]


@dataclass(frozen=True, slots=True)
class BlockRanges:
    """Four integers per row of blocks, `[rows, row_blocks]` each; drawn in the module docstring."""

    start: Ints
    full_start: Ints
    full_stop: Ints
    stop: Ints
    columns: int

    def transposed(self) -> "BlockRanges":
        """Return the same blocks, listed by column."""
        return BlockRanges(
            start=_rows_at_or_below(self.stop, self.columns),
            full_start=_rows_at_or_below(self.full_stop, self.columns),
            full_stop=_rows_at_or_below(self.full_start, self.columns),
            stop=_rows_at_or_below(self.start, self.columns),
            columns=self.start.shape[1],
        )


@dataclass(frozen=True, slots=True)
class BlockList:
    """The columns that each row of blocks uses: the first `count` of `indices`; the rest is meaningless."""

    count: Ints  # (rows, row_blocks)
    indices: Ints  # (rows, row_blocks, columns)


@dataclass(frozen=True, slots=True)
class BlockLists:
    """The four lists of a `BlockMask`, under its names."""

    kv: BlockList
    full_kv: BlockList
    q: BlockList
    full_q: BlockList


def block_pair(block_size: object) -> BlockSize:
    """Return `block_size`, one integer or two, as (queries, keys): 128 becomes (128, 128)."""
    sides = tuple(block_size) if isinstance(block_size, tuple | list | np.ndarray) else (block_size, block_size)
    try:
        queries, keys = (index(side) for side in sides)
    except (TypeError, ValueError):
        raise TypeError(
            f"block_size must be one integer or two (queries, keys), such as 128 (got {block_size!r})"
        ) from None
    return _checked_block_size((queries, keys))


def span_block_lists(spans: Spans, block_size: BlockSize) -> BlockLists:
    """Return the four lists for queries that see one span of keys each."""
    by_query = block_ranges(spans, block_size)
    by_key = by_query.transposed()
    return BlockLists(
        kv=partial_blocks(by_query), full_kv=full_blocks(by_query),
        q=partial_blocks(by_key), full_q=full_blocks(by_key),
    )  # fmt: skip


def key_block_lists(keep: Bools, block_size: BlockSize) -> BlockLists:
    """Return the four lists for queries that all see the same keys, `keep[rows, S]`: padding masks of images.

    keep 1 1 . . 1 1     blocks of 2     F . F
                                         F . F
    """
    partial, full = _key_blocks(keep, block_size)
    return BlockLists(
        kv=_listed(partial), full_kv=_listed(full),
        q=_listed(partial.swapaxes(1, 2)), full_q=_listed(full.swapaxes(1, 2)),
    )  # fmt: skip


def block_ranges(spans: Spans, block_size: BlockSize) -> BlockRanges:
    """Return the ranges of each row of query blocks, from its first and its last query."""
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
    """Return the blocks start … full_start, then full_stop … stop."""
    column = np.arange(ranges.columns, dtype=np.int32)
    before = ranges.full_start - ranges.start
    jump = ranges.full_stop - ranges.full_start
    indices = ranges.start[:, :, None] + column
    indices += (column >= before[:, :, None]) * jump[:, :, None]
    return BlockList(before + (ranges.stop - ranges.full_stop), _within(indices, ranges.columns))


def full_blocks(ranges: BlockRanges) -> BlockList:
    """Return the blocks full_start … full_stop."""
    column = np.arange(ranges.columns, dtype=np.int32)
    indices = ranges.full_start[:, :, None] + column
    return BlockList(ranges.full_stop - ranges.full_start, _within(indices, ranges.columns))


def _within(indices: Ints, columns: int) -> Ints:
    # Entries after `count` are never used, but a kernel may prefetch one: keep them in range.
    return np.minimum(indices, np.int32(columns - 1), out=indices)


def _rows_at_or_below(edges: Ints, columns: int) -> Ints:
    """Count, for each column, the rows with `edge <= column`."""
    rows = np.arange(len(edges))[:, None] * (columns + 1)
    counts = np.bincount((edges + rows).ravel(), minlength=len(edges) * (columns + 1))
    return np.cumsum(counts.reshape(len(edges), -1)[:, :columns], axis=1, dtype=np.int32)


def _key_blocks(keep: Bools, block_size: BlockSize) -> tuple[Bools, Bools]:
    queries, keys = _checked_block_size(block_size)
    length = keep.shape[1]
    counts = np.add.reduceat(keep, np.arange(0, length, keys), axis=1, dtype=np.int32)
    complete = np.arange(0, length, queries) + queries <= length
    full = (counts == keys)[:, None, :] & complete[:, None]
    return (counts > 0)[:, None, :] & ~full, full


def _listed(member: Bools) -> BlockList:
    indices = np.argsort(~member, axis=-1, kind="stable").astype(np.int32)
    return BlockList(member.sum(axis=-1, dtype=np.int32), indices)


def _ceil_divide(values: Ints, divisor: int) -> Ints:
    quotient: NDArray[np.int32] = -(-values // divisor)
    return quotient


def _checked_block_size(block_size: BlockSize) -> BlockSize:
    if min(block_size) < 1:
        raise ValueError(f"block_size must be at least 1, usually 128 (got {block_size})")
    return block_size
