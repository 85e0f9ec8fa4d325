"""Which keys a query sees, as one span of keys per query: S pairs of integers instead of S × S booleans.

    seq_lens [[3, 2]], S 6            first stop
                        a a a b b .
                     a  1 . . . . .     0    1
    causal           a  1 1 . . . .     0    2
                     a  1 1 1 . . .     0    3
                     b  . . . 1 . .     3    4
                     b  . . . 1 1 .     3    5
                     .  . . . . . 1     5    6

Two facts hold for all spans made here, and `blocks` builds on both: a span contains its own query, and
neither `first` nor `stop` ever goes down from one query to the next.
"""

from dataclasses import dataclass
from typing import Literal, get_args

import numpy as np
from numpy.typing import ArrayLike

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
    """A token sees its own document: up to itself (`causal`), or all of it (`bidirectional`).

    causal    1 . . . .       bidirectional    1 1 1 . .
              1 1 . . .                        1 1 1 . .
              1 1 1 . .                        1 1 1 . .
              . . . 1 .                        . . . 1 1
              . . . 1 1                        . . . 1 1
    """
    if kind not in get_args(DocumentKind):
        raise ValueError(f"kind is {kind!r} but 'causal' or 'bidirectional' is expected")
    first = doc_start(seq_lens, sequence_length)
    if kind == "causal":
        return Spans(first, _causal_stop(first))
    return Spans(first, doc_stop(seq_lens, sequence_length))


def prefix_spans(seq_lens: ArrayLike, prefix_lens: ArrayLike, sequence_length: int | None = None) -> Spans:
    """Prefix-LM: the first `prefix_lens` tokens of a document are seen by all of it, the rest is causal.

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
    """One row without documents: a token sees all tokens up to itself."""
    first = np.broadcast_to(np.int32(0), (1, sequence_length))
    return Spans(first, _causal_stop(first))


def windowed(spans: Spans, window: int) -> Spans:
    """Keep the keys fewer than `window` tokens away from their query.

    causal, window 2      1 . . .
                          1 1 . .
                          . 1 1 .
                          . . 1 1
    """
    if window < 1:
        raise ValueError(f"window is {window} but a token sees at least itself; pass 1 or more")
    query = np.arange(spans.sequence_length, dtype=np.int32)
    reach = min(window, spans.sequence_length)
    return Spans(np.maximum(spans.first, query - (reach - 1)), np.minimum(spans.stop, query + reach))


def dense_mask(spans: Spans) -> Bools:
    """The mask by its definition, `[rows, S, S]`, True = sees. S² memory: for small rows and for tests."""
    key = np.arange(spans.sequence_length)
    return (key >= spans.first[:, :, None]) & (key < spans.stop[:, :, None])


def _causal_stop(first: Ints) -> Ints:
    return np.broadcast_to(np.arange(1, first.shape[1] + 1, dtype=np.int32), first.shape)


def _checked_prefixes(prefix_lens: ArrayLike, lengths: Ints) -> Ints:
    prefix = np.asarray(prefix_lens)
    if prefix.shape != lengths.shape:
        raise ValueError(
            f"prefix_lens has shape {prefix.shape} but seq_lens has {lengths.shape}; give one per document"
        )
    if prefix.size and not np.issubdtype(prefix.dtype, np.integer):
        raise TypeError(f"prefix_lens is {prefix.dtype} but lengths are integers; cast them first")
    bad = (prefix < 0) | (prefix > lengths)
    if bad.any():
        row, document = np.argwhere(bad)[0]
        raise ValueError(
            f"document {document} of row {row} has {lengths[row, document]:,} tokens but a prefix of "
            f"{prefix[row, document]:,}; a prefix is 0 to its document's length"
        )
    return prefix.astype(np.int32)
