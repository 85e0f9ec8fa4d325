"""Draw the mask of a packed row as a picture: one color per document.

`packed_row` returns a picture of Pillow: `picture.save("mask.png")`, or leave it as the last line of a notebook cell.
`fb.contact_sheet` draws images with their boxes and ignored tokens.
"""

from collections.abc import Mapping

import numpy as np
from numpy.typing import ArrayLike, NDArray
from PIL import Image

from forebay.masks.documents import document_ids, padding_mask
from forebay.masks.spans import Spans, document_spans

Pixels = NDArray[np.uint8]  # (height, width, 3)
UNSEEN = (250, 250, 248)
PADDING = (190, 190, 186)
DOCUMENTS = ((86, 140, 201), (233, 150, 71), (106, 176, 106), (190, 112, 168), (214, 190, 80), (94, 178, 184))
GRID = (120, 120, 120)
FULL_BLOCK_SHADE = 0.72


def packed_row(
    seq_lens: ArrayLike | Mapping[str, ArrayLike],
    sequence_length: int | None = None,
    *,
    row: int = 0,
    spans: Spans | None = None,
    block_size: int | None = None,
    pixels: int = 480,
) -> Image.Image:
    """Draw the mask of one packed row, queries down and keys across: causal documents, or `spans` if passed.

    A row of a cache, as in `packed_row(cache[5])`, is drawn as it is, as are the lengths of one row.
    A row longer than the picture is sampled, so that no row needs S² memory. With `block_size`, lines separate
    FlexAttention's blocks, and blocks that it computes without a mask are dark.
    """
    if isinstance(seq_lens, Mapping):
        sequence_length, seq_lens = _lengths_of(seq_lens)
    elif isinstance(seq_lens, np.ndarray):
        seq_lens = np.atleast_2d(seq_lens)
    seen = spans if spans is not None else document_spans(seq_lens, sequence_length)
    colors = _document_colors(seq_lens, sequence_length, row)
    token = np.arange(pixels) * seen.sequence_length // pixels
    first, stop = seen.first[row, token][:, None], seen.stop[row, token][:, None]
    canvas = np.where(((token >= first) & (token < stop))[:, :, None], colors[token][:, None], UNSEEN)
    if block_size is None:
        return Image.fromarray(canvas.astype(np.uint8))
    shaded = np.where(_in_full_block(seen, row, token, block_size)[:, :, None], canvas * FULL_BLOCK_SHADE, canvas)
    drawing = shaded.astype(np.uint8)
    _rule(drawing, seen.sequence_length, block_size)
    return Image.fromarray(drawing)


def _lengths_of(packed: Mapping[str, ArrayLike]) -> tuple[int, NDArray[np.int64]]:
    """The length of a row, and the lengths of its documents: a row of a cache, or a batch of a loader."""
    if missing := {"tokens", "seq_lens"} - packed.keys():
        raise ValueError(f"a packed row has tokens and seq_lens (got {', '.join(packed)}, without {min(missing)})")
    try:
        lengths = np.atleast_2d(packed["seq_lens"])
    except ValueError as error:
        raise ValueError("packed_row draws one row: pass cache[5], not a slice of rows") from error
    return np.shape(packed["tokens"])[-1], lengths


def _document_colors(seq_lens: ArrayLike, sequence_length: int | None, row: int) -> NDArray[np.int64]:
    """Return colors `(sequence_length, 3)`: neighboring documents differ, padding is gray."""
    numbers = document_ids(seq_lens, sequence_length)[row] % len(DOCUMENTS)
    padded = padding_mask(seq_lens, sequence_length)[row]
    return np.where(padded[:, None], PADDING, np.array(DOCUMENTS)[numbers])


def _in_full_block(spans: Spans, row: int, token: NDArray[np.int64], block_size: int) -> NDArray[np.bool_]:
    start = token // block_size * block_size
    last = start + block_size - 1
    whole = last < spans.sequence_length
    last = np.minimum(last, spans.sequence_length - 1)
    sees_all = (spans.first[row, last][:, None] <= start) & (spans.stop[row, start][:, None] > last)
    full: NDArray[np.bool_] = sees_all & whole[:, None] & whole
    return full


def _rule(drawing: Pixels, length: int, step: int) -> None:
    """Draw thin lines at every `step` of `length` tokens, in both directions."""
    for edge in range(step, length, step):
        line = round(edge * len(drawing) / length)
        drawing[line : line + 1] = drawing[:, line : line + 1] = GRID
