"""What `forebay.masks.documents` derives from document lengths, written into arrays that are there already.

Every function takes `whole`, the lengths that fill each row (`whole_lengths`), worked out once for a batch.
"""

import numpy as np
from numpy.typing import NDArray

from forebay.masks.documents import IGNORED_LABEL, Ints, LabelStyle

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
