"""Document ids, positions, starts, labels and `cu_seqlens` from the document lengths of packed rows.

Functions take `seq_lens` as the loader yields them: integers `[rows, max_documents]`, zero-padded. The rest of a row up
to `sequence_length` (by default the length of the fullest row) is padding, and counts as one more document:

    seq_lens [[3, 2, 0]]   sequence_length 7

    tokens          a a a b b . .
    document_ids    0 0 0 1 1 2 2
    positions       0 1 2 0 1 0 1
    doc_start       0 0 0 3 3 5 5
    doc_stop        3 3 3 5 5 7 7
    padding_mask    0 0 0 0 0 1 1     1 = PAD
    label_mask      1 1 0 1 0 0 0     1 = the loss counts this next-token label
    cu_seqlens      0     3   5   7   flat over the batch

The `fill_…` functions write into an array and take `whole_lengths`, computed once for a batch.
"""

from typing import Literal

import numpy as np
from numpy.typing import ArrayLike, NDArray

from forebay import kernels
from forebay.errors import choice_error

Ints = NDArray[np.int32]
Bools = NDArray[np.bool_]
LabelStyle = Literal["shifted", "unshifted"]
IGNORED_LABEL = -100


def checked_label_style(argument: str, style: LabelStyle | None) -> LabelStyle | None:
    """Return "shifted", "unshifted" or None."""
    if style not in (None, "shifted", "unshifted"):
        raise choice_error(argument, style, ("shifted", "unshifted", None))
    return style


def whole_lengths(seq_lens: ArrayLike, sequence_length: int | None = None) -> Ints:
    """Return lengths `[rows, max_documents + 1]` that fill each row: the last column is the padding tail.

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
    """Return the document of each token, counted from 0 in its row; padding has the next number.

    a a a b b . .     →     0 0 0 1 1 2 2
    """
    whole = whole_lengths(seq_lens, sequence_length)
    return spread(np.cumsum(whole > 0, axis=1, dtype=np.int32) - 1, whole)


def doc_start(seq_lens: ArrayLike, sequence_length: int | None = None) -> Ints:
    """Return where the document of each token starts in its row.

    a a a b b . .     →     0 0 0 3 3 5 5
    """
    whole = whole_lengths(seq_lens, sequence_length)
    return spread(np.cumsum(whole, axis=1, dtype=np.int32) - whole, whole)


def doc_stop(seq_lens: ArrayLike, sequence_length: int | None = None) -> Ints:
    """Return where the document of each token stops in its row: one past its last token.

    a a a b b . .     →     3 3 3 5 5 7 7
    """
    whole = whole_lengths(seq_lens, sequence_length)
    return spread(np.cumsum(whole, axis=1, dtype=np.int32), whole)


def positions(seq_lens: ArrayLike, sequence_length: int | None = None) -> Ints:
    """Return the position of each token in its own document, from 0.

    a a a b b . .     →     0 1 2 0 1 0 1
    """
    start = doc_start(seq_lens, sequence_length)
    return np.arange(start.shape[1], dtype=np.int32) - start


def padding_mask(seq_lens: ArrayLike, sequence_length: int | None = None) -> Bools:
    """Return a mask, True = PAD: the tokens after the last document of each row.

    a a a b b . .     →     . . . . . 1 1
    """
    whole = whole_lengths(seq_lens, sequence_length)
    column = np.arange(whole[0].sum())
    padded: Bools = column >= len(column) - whole[:, -1:]
    return padded


def label_mask(seq_lens: ArrayLike, sequence_length: int | None = None, style: LabelStyle = "shifted") -> Bools:
    """Return True where the loss counts: never on padding, and never across a document boundary.

    tokens       a a a b b . .
    shifted      1 1 0 1 0 0 0     the label is the next token; a document's last token has none
    unshifted    0 1 1 0 1 0 0     the label is the token itself; nothing predicts a document's first token
    """
    return _label_mask(seq_lens, sequence_length, _is_shifted(style))


def labels(tokens: ArrayLike, seq_lens: ArrayLike, style: LabelStyle = "shifted") -> NDArray[np.int64]:
    """Return labels `[rows, sequence_length]`, -100 where the loss ignores a token.

    tokens       5 6 7 8 9 0 0     seq_lens [[3, 2]]
    shifted      6 7 . 9 . . .     . = -100
    unshifted    . 6 7 . 9 . .
    """
    wanted = np.array(tokens, np.int64)
    shifted = _is_shifted(style)
    counted = _label_mask(seq_lens, wanted.shape[1], shifted)
    return np.where(counted, np.roll(wanted, -1, axis=1) if shifted else wanted, IGNORED_LABEL)


def cu_seqlens(seq_lens: ArrayLike, sequence_length: int | None = None) -> Ints:
    """Return the boundaries of all documents of the batch laid end to end, with padding tails, for varlen kernels.

    >>> cu_seqlens([[3, 2], [7, 0]], 7)
    array([ 0,  3,  5,  7, 14], dtype=int32)
    """
    whole = whole_lengths(seq_lens, sequence_length).ravel()
    boundaries = np.cumsum(whole[whole > 0], dtype=np.int32)
    return np.concatenate((np.zeros(1, np.int32), boundaries))


def spread(per_document: Ints, whole: Ints) -> Ints:
    """Return each token's value of its document: `[rows, documents]` becomes `[rows, sequence_length]`."""
    return np.repeat(per_document.ravel(), whole.ravel()).reshape(len(whole), -1)


def _is_shifted(style: LabelStyle) -> bool:
    if style is None:
        raise ValueError("style must be 'shifted' or 'unshifted' (got None)")
    return checked_label_style("style", style) == "shifted"


def _label_mask(seq_lens: ArrayLike, sequence_length: int | None, shifted: bool) -> Bools:
    without_label = _last_tokens if shifted else _first_tokens
    return ~(without_label(seq_lens, sequence_length) | padding_mask(seq_lens, sequence_length))


def _last_tokens(seq_lens: ArrayLike, sequence_length: int | None) -> Bools:
    stop = doc_stop(seq_lens, sequence_length)
    last: Bools = np.arange(1, stop.shape[1] + 1) == stop
    return last


def _first_tokens(seq_lens: ArrayLike, sequence_length: int | None) -> Bools:
    first: Bools = positions(seq_lens, sequence_length) == 0
    return first


def _check_lengths(lengths: NDArray[np.integer]) -> None:
    if lengths.shape[:1] == (0,):
        raise ValueError("seq_lens has no rows; skip an empty batch, it has no masks")
    if lengths.ndim != 2:
        raise ValueError(
            f"seq_lens must have the shape [rows, max_documents] (got {lengths.shape}); "
            "wrap the lengths of a single row in one more list"
        )
    if lengths.size and not np.issubdtype(lengths.dtype, np.integer):
        raise TypeError(f"seq_lens must be integers (got {lengths.dtype}); cast them first")
    if lengths.size and int(lengths.min()) < 0:
        row = int(np.argmax((lengths < 0).any(axis=1)))
        raise ValueError(f"seq_lens of row {row} has a negative length; lengths are 0 (no document) or more")


def _checked_sequence_length(sequence_length: object) -> int:
    if isinstance(sequence_length, int | np.integer) and not isinstance(sequence_length, bool):
        return int(sequence_length)
    raise TypeError(f"sequence_length must be an int (got {sequence_length!r})")


def _check_totals(totals: NDArray[np.int64], width: int) -> None:
    if width < 1:
        raise ValueError(f"sequence_length must be at least 1 (got {width})")
    row = int(totals.argmax())
    if totals[row] > width:
        raise ValueError(
            f"the documents of row {row} have {totals[row]:,} tokens but a row holds {width:,}; "
            "raise sequence_length or pass the seq_lens of these rows"
        )


Longs = NDArray[np.int64]
_PACKED_TYPES = (np.dtype(np.uint16), np.dtype(np.uint32))  # others are widened before


def fill_packed(
    rows: NDArray[np.integer],
    seq_lens: Ints,
    style: LabelStyle,
    *,
    tokens: Longs | None = None,
    labels: Longs | None = None,
    positions: Longs | None = None,
) -> None:
    """Write the tokens of rows as int64, their labels and their positions, each to its contiguous array, if any."""
    if not rows.size:
        return
    width, lengths = rows.shape[1], np.ascontiguousarray(seq_lens, np.int32)
    rows = np.ascontiguousarray(rows, None if rows.dtype in _PACKED_TYPES else np.int64)
    if not kernels.pack_tokens(rows, rows.itemsize, width, lengths, style == "shifted", tokens, labels, positions):
        whole_lengths(seq_lens, width)  # raises, and says which row is wrong


def fill_document_ids(out: NDArray[np.integer], whole: Ints) -> None:
    """Write the number of each token's document in its row; padding has the next number."""
    ids = np.cumsum(whole > 0, axis=1, dtype=out.dtype) - 1
    out[:] = np.repeat(ids.ravel(), whole.ravel()).reshape(out.shape)
