"""From documents to rows: cut what is too long, pack, and lay the pieces out.

row     tokens     ┌ document 0 ─────┬ document 4 ┬ padding ┐
        seq_lens   │ 7               │ 3          │         │
        documents  │ (0, 512)        │ (4, 0)     │         │     which sample of the slice, from which token on
"""

from dataclasses import dataclass
from typing import Literal

import numpy as np

from forebay.columns import Array, Ragged
from forebay.errors import DocumentTooLong
from forebay.source import Failure
from forebay.tokens.documents import Documents
from forebay.tokens.packing import Pieces, pack_best_fit, split_documents

LongDocuments = Literal["split", "truncate", "drop", "error"]


@dataclass(frozen=True, slots=True, eq=False)
class Packed:
    """The columns of a chunk."""

    tokens: Array  # (rows, capacity)
    seq_lens: Ragged  # of uint32
    documents: Ragged  # of uint32 pairs: sample of the slice, offset in its tokens


@dataclass(frozen=True, slots=True, eq=False)
class Cut:
    """How much of every document is kept, and what is not."""

    lengths: Array  # (documents,) int64, 0 where a document is left out
    failures: tuple[Failure, ...] = ()


def cut_long(documents: Documents, capacity: int, policy: LongDocuments) -> Cut:
    """What of each document goes into rows."""
    lengths = documents.lengths
    long = np.flatnonzero(lengths > capacity)
    if policy == "split" or not len(long):
        return Cut(lengths)
    if policy == "truncate":
        return Cut(np.minimum(lengths, capacity))
    named = [(documents.names[at], int(lengths[at])) for at in long.tolist()]
    if policy == "error":
        raise DocumentTooLong(*named[0], capacity)
    kept = lengths.copy()
    kept[long] = 0
    return Cut(kept, tuple(Failure(name, "too-long", f"{n:,} tokens, a row holds {capacity:,}") for name, n in named))


def pack_rows(documents: Documents, kept: Array, capacity: int, pad: int) -> Packed:
    """Lay out the kept part of every document, best fit."""
    pieces = split_documents(kept, capacity)
    row = pack_best_fit(pieces.length, capacity)
    order = np.argsort(row, kind="stable")  # by row, within it in the order of documents
    placed = Pieces(pieces.document[order], pieces.offset[order], pieces.length[order])
    edges = np.concatenate([[0], np.cumsum(np.bincount(row))]) if len(row) else np.zeros(1, np.int64)
    which = documents.numbers[placed.document]
    return Packed(
        _laid_out(documents, placed, row[order], edges, capacity, pad),
        Ragged(placed.length.astype(np.uint32), edges),
        Ragged(np.stack([which, placed.offset], axis=1).astype(np.uint32), edges),
    )


def _laid_out(documents: Documents, placed: Pieces, row: Array, edges: Array, capacity: int, pad: int) -> Array:
    tokens = np.full((len(edges) - 1, capacity), pad, documents.ids.dtype)
    ends = np.cumsum(placed.length)
    begins = ends - placed.length
    first = begins[edges[:-1]] if len(row) else begins
    targets = row * capacity + begins - first[row]
    starts = np.cumsum(documents.lengths) - documents.lengths
    sources = starts[placed.document] + placed.offset
    flat, ids = tokens.reshape(-1), documents.ids
    # Runs are long: copying each is several times faster than an index per token.
    for to, start, length in zip(*_runs(targets, sources, placed.length), strict=True):
        flat[to : to + length] = ids[start : start + length]
    return tokens


def _runs(targets: Array, sources: Array, lengths: Array) -> tuple[list[int], list[int], list[int]]:
    """Pieces that follow one another both in their document and in the rows, as most of a long one do, as one copy."""
    if not len(lengths):
        return [], [], []
    goes_on = (targets[1:] == targets[:-1] + lengths[:-1]) & (sources[1:] == sources[:-1] + lengths[:-1])
    first = np.flatnonzero(np.concatenate([[True], ~goes_on]))
    return targets[first].tolist(), sources[first].tolist(), np.add.reduceat(lengths, first).tolist()
