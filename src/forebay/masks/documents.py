"""What the document lengths of packed rows say: ids, positions, starts, labels, `cu_seqlens`.

Every function takes `seq_lens` as the loader yields them: integers `[rows, max_documents]`, zero-padded.
What is left of a row up to `sequence_length` is padding, and counts as one more document:

    seq_lens [[3, 2, 0]]   sequence_length 7

    tokens          a a a b b . .
    document_ids    0 0 0 1 1 2 2
    positions       0 1 2 0 1 0 1
    doc_start       0 0 0 3 3 5 5
    doc_stop        3 3 3 5 5 7 7
    padding_mask    0 0 0 0 0 1 1     1 = PAD
    label_mask      1 1 0 1 0 0 0     1 = the loss counts this next-token label
    cu_seqlens      0     3   5   7   flat over the batch

Without `sequence_length` the fullest row decides.

Every function takes `whole`, the lengths that fill each row (`whole_lengths`), worked out once for a batch.
"""

from typing import Literal, get_args

import numpy as np
from numpy.typing import ArrayLike, NDArray

Ints = NDArray[np.int32]
Bools = NDArray[np.bool_]
LabelStyle = Literal["next", "aligned"]
IGNORED_LABEL = -100


def whole_lengths(seq_lens: ArrayLike, sequence_length: int | None = None) -> Ints:
    """Lengths `[rows, max_documents + 1]` that fill each row: the last column is the padding tail.

    >>> whole_lengths([[3, 2, 0]], 7)
    array([[3, 2, 0, 2]], dtype=int32)
    """
    lengths = np.asarray(seq_lens)
    _check_lengths(lengths)
    totals = lengths.sum(axis=1, dtype=np.int64)
    width = int(totals.max()) if sequence_length is None else _checked_sequence_length(sequence_length)
    _check_totals(totals, width)
    whole = np.empty((lengths.shape[0], lengths.shape[1] + 1), np.int32)
    whole[:, :-1] = lengths
    whole[:, -1] = width - totals
    return whole


def document_ids(seq_lens: ArrayLike, sequence_length: int | None = None) -> Ints:
    """Which document each token belongs to, counted from 0 in its row; padding has the next number.

    a a a b b . .     →     0 0 0 1 1 2 2
    """
    whole = whole_lengths(seq_lens, sequence_length)
    return spread(np.cumsum(whole > 0, axis=1, dtype=np.int32) - 1, whole)


def doc_start(seq_lens: ArrayLike, sequence_length: int | None = None) -> Ints:
    """Where the document of each token starts in its row.

    a a a b b . .     →     0 0 0 3 3 5 5
    """
    whole = whole_lengths(seq_lens, sequence_length)
    return spread(np.cumsum(whole, axis=1, dtype=np.int32) - whole, whole)


def doc_stop(seq_lens: ArrayLike, sequence_length: int | None = None) -> Ints:
    """Where the document of each token stops in its row: one past its last token.

    a a a b b . .     →     3 3 3 5 5 7 7
    """
    whole = whole_lengths(seq_lens, sequence_length)
    return spread(np.cumsum(whole, axis=1, dtype=np.int32), whole)


def positions(seq_lens: ArrayLike, sequence_length: int | None = None) -> Ints:
    """Place of each token in its own document, from 0.

    a a a b b . .     →     0 1 2 0 1 0 1
    """
    start = doc_start(seq_lens, sequence_length)
    return np.arange(start.shape[1], dtype=np.int32) - start


def padding_mask(seq_lens: ArrayLike, sequence_length: int | None = None) -> Bools:
    """True = PAD: the tokens after the last document of each row.

    a a a b b . .     →     . . . . . 1 1
    """
    whole = whole_lengths(seq_lens, sequence_length)
    column = np.arange(whole[0].sum())
    padded: Bools = column >= len(column) - whole[:, -1:]
    return padded


def label_mask(seq_lens: ArrayLike, sequence_length: int | None = None, style: LabelStyle = "next") -> Bools:
    """True where the loss counts. Never on padding, and never across a document boundary.

    tokens     a a a b b . .
    next       1 1 0 1 0 0 0     the label is the next token; a document's last token has none
    aligned    0 1 1 0 1 0 0     the label is the token itself; nothing predicts a document's first
    """
    if style not in get_args(LabelStyle):
        raise ValueError(f"style is {style!r} but 'next' or 'aligned' is expected")
    without_label = _last_tokens if style == "next" else _first_tokens
    return ~(without_label(seq_lens, sequence_length) | padding_mask(seq_lens, sequence_length))


def labels(tokens: ArrayLike, seq_lens: ArrayLike, style: LabelStyle = "next") -> NDArray[np.int64]:
    """Labels `[rows, sequence_length]`, -100 where the loss must not look.

    tokens     5 6 7 8 9 0 0     seq_lens [[3, 2]]
    next       6 7 . 9 . . .     . = -100
    aligned    . 6 7 . 9 . .
    """
    wanted = np.array(tokens, np.int64)
    counted = label_mask(seq_lens, wanted.shape[1], style)
    if style == "next":
        wanted = np.roll(wanted, -1, axis=1)
    return np.where(counted, wanted, IGNORED_LABEL)


def cu_seqlens(seq_lens: ArrayLike, sequence_length: int | None = None) -> Ints:
    """Boundaries of all documents of the batch laid end to end, padding tails included, for varlen kernels.

    >>> cu_seqlens([[3, 2], [7, 0]], 7)
    array([ 0,  3,  5,  7, 14], dtype=int32)
    """
    whole = whole_lengths(seq_lens, sequence_length).ravel()
    boundaries = np.cumsum(whole[whole > 0], dtype=np.int32)
    return np.concatenate((np.zeros(1, np.int32), boundaries))


def spread(per_document: Ints, whole: Ints) -> Ints:
    """Give each token the value of its document: `[rows, documents]` becomes `[rows, sequence_length]`."""
    return np.repeat(per_document.ravel(), whole.ravel()).reshape(len(whole), -1)


def _last_tokens(seq_lens: ArrayLike, sequence_length: int | None) -> Bools:
    stop = doc_stop(seq_lens, sequence_length)
    last: Bools = np.arange(1, stop.shape[1] + 1) == stop
    return last


def _first_tokens(seq_lens: ArrayLike, sequence_length: int | None) -> Bools:
    first: Bools = positions(seq_lens, sequence_length) == 0
    return first


def _check_lengths(lengths: NDArray[np.integer]) -> None:
    if lengths.shape[:1] == (0,):
        raise ValueError("seq_lens has no rows; an empty batch has no masks, skip it")
    if lengths.ndim != 2:
        raise ValueError(
            f"seq_lens has shape {lengths.shape} but [rows, max_documents] is expected; "
            "wrap the lengths of a single row in one more list"
        )
    if lengths.size and not np.issubdtype(lengths.dtype, np.integer):
        raise TypeError(f"seq_lens is {lengths.dtype} but lengths are integers; cast them first")
    if lengths.size and int(lengths.min()) < 0:
        row = int(np.argmax((lengths < 0).any(axis=1)))
        raise ValueError(f"seq_lens of row {row} has a negative length; lengths are 0 (no document) or more")


def _checked_sequence_length(sequence_length: object) -> int:
    if isinstance(sequence_length, int | np.integer) and not isinstance(sequence_length, bool):
        return int(sequence_length)
    raise TypeError(f"sequence_length is {sequence_length!r} but a number of tokens is expected; pass an int")


def _check_totals(totals: NDArray[np.int64], width: int) -> None:
    if width < 1:
        raise ValueError(f"sequence_length is {width} but a row has at least one token; pass sequence_length")
    row = int(totals.argmax())
    if totals[row] > width:
        raise ValueError(
            f"the documents of row {row} have {totals[row]:,} tokens but a row holds {width:,}; "
            "raise sequence_length or pass the seq_lens of these rows"
        )


Longs = NDArray[np.int64]


def fill_positions(out: NDArray[np.integer], whole: Ints) -> None:
    """Place of each token in its own document: `[rows, sequence_length]`."""
    starts = np.cumsum(whole, axis=1, dtype=out.dtype) - whole
    per_token = np.repeat(starts.ravel(), whole.ravel()).reshape(out.shape)
    np.subtract(np.arange(out.shape[1], dtype=out.dtype), per_token, out=out)


def fill_document_ids(out: NDArray[np.integer], whole: Ints) -> None:
    """Which document of its row each token belongs to; padding has the next number."""
    ids = np.cumsum(whole > 0, axis=1, dtype=out.dtype) - 1
    out[:] = np.repeat(ids.ravel(), whole.ravel()).reshape(out.shape)


def fill_labels(out: Longs, tokens: NDArray[np.integer], whole: Ints, style: LabelStyle) -> None:
    """Labels, -100 where the loss must not look. `out` is contiguous."""
    if style == "next":
        out[:, :-1] = tokens[:, 1:]
    else:
        out[:] = tokens
    flat = out.reshape(-1)
    flat[_unlabelled(whole, style)] = IGNORED_LABEL
    if whole[:, -1].any():
        flat[_padding(whole, out.shape[1])] = IGNORED_LABEL


def _unlabelled(whole: Ints, style: LabelStyle) -> Longs:
    """The tokens, counted through the batch, that a document boundary leaves without a label."""
    lengths = whole.ravel()
    ends = np.cumsum(lengths, dtype=np.int64)
    edges: Longs = ends - 1 if style == "next" else ends - lengths
    return edges[lengths > 0]


def _padding(whole: Ints, width: int) -> Longs:
    """The tokens, counted through the batch, that belong to no document."""
    tails = whole[:, -1].astype(np.int64)
    before = np.cumsum(tails) - tails
    starts = np.arange(1, len(whole) + 1) * width - tails
    padded: Longs = np.arange(tails.sum()) + np.repeat(starts - before, tails)
    return padded
