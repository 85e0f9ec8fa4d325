"""Draw masks as PNG or in a notebook. Needs pillow.

    packed_row     which tokens of a packed row see which: one color per document, dark where whole blocks are seen
    letterbox      the padding of an image, and its ignored tokens

Both return a `Picture`: `picture.save("mask.png")`, or leave it as the last line of a notebook cell.
"""

import io
from collections.abc import Mapping
from dataclasses import dataclass

import numpy as np
from numpy.typing import ArrayLike, NDArray

try:
    from PIL import Image, ImageDraw
except ModuleNotFoundError as missing:
    raise ModuleNotFoundError(
        "forebay.masks.draw needs pillow: pip install 'forebay[pictures]'", name="PIL"
    ) from missing

from forebay.masks.documents import document_ids, padding_mask
from forebay.masks.mask_html import DOCUMENTS, PADDING, UNSEEN
from forebay.masks.rectangle import IGNORE_THRESHOLD, Size, pixel_mask, token_ignore_mask
from forebay.masks.spans import Spans, document_spans

Pixels = NDArray[np.uint8]  # (height, width, 3)
GRID = (120, 120, 120)
IGNORED = (200, 60, 50)
FULL_BLOCK_SHADE = 0.72


@dataclass(frozen=True)
class Picture:
    """A finished drawing, which a notebook displays."""

    image: Image.Image

    def png(self) -> bytes:
        buffer = io.BytesIO()
        self.image.save(buffer, format="PNG")
        return buffer.getvalue()

    def save(self, path: str) -> None:
        with open(path, "wb") as file:
            file.write(self.png())

    def _repr_png_(self) -> bytes:
        return self.png()


def packed_row(
    seq_lens: ArrayLike | Mapping[str, ArrayLike],
    sequence_length: int | None = None,
    *,
    row: int = 0,
    spans: Spans | None = None,
    block_size: int | None = None,
    pixels: int = 480,
) -> Picture:
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
    colours = _document_colours(seq_lens, sequence_length, row)
    token = np.arange(pixels) * seen.sequence_length // pixels
    first, stop = seen.first[row, token][:, None], seen.stop[row, token][:, None]
    canvas = np.where(((token >= first) & (token < stop))[:, :, None], colours[token][:, None], UNSEEN)
    if block_size is None:
        return Picture(Image.fromarray(canvas.astype(np.uint8)))
    shaded = np.where(_in_full_block(seen, row, token, block_size)[:, :, None], canvas * FULL_BLOCK_SHADE, canvas)
    image = Image.fromarray(shaded.astype(np.uint8))
    _rule(image, seen.sequence_length, block_size)
    return Picture(image)


def _lengths_of(packed: Mapping[str, ArrayLike]) -> tuple[int, NDArray[np.int64]]:
    """The length of a row, and the lengths of its documents: a row of a cache, or a batch of a loader."""
    if missing := {"tokens", "seq_lens"} - packed.keys():
        raise ValueError(f"a packed row has tokens and seq_lens (got {', '.join(packed)}, without {min(missing)})")
    try:
        lengths = np.atleast_2d(packed["seq_lens"])
    except ValueError as error:
        raise ValueError("packed_row draws one row: pass cache[5], not a slice of rows") from error
    return np.shape(packed["tokens"])[-1], lengths


def letterbox(
    rectangle: ArrayLike,
    size: Size,
    patch: int,
    *,
    threshold: float = IGNORE_THRESHOLD,
    image: Pixels | None = None,
    scale: int = 1,
) -> Picture:
    """Draw one letterboxed image: padding gray, lines between patches, ignored tokens crossed out."""
    if isinstance(size, int):
        raise TypeError(f"size is (height, width), such as ({size}, {size}) (got {size})")
    box = np.asarray(rectangle)[None]
    content = DOCUMENTS[0] if image is None else image
    canvas = np.where(pixel_mask(box, size)[0][:, :, None], PADDING, content)
    drawing = Image.fromarray(canvas.repeat(scale, axis=0).repeat(scale, axis=1).astype(np.uint8))
    _rule(drawing, size[1], patch)
    _cross_out(drawing, token_ignore_mask(box, size, patch, threshold)[0], patch * scale)
    return Picture(drawing)


def _document_colours(seq_lens: ArrayLike, sequence_length: int | None, row: int) -> NDArray[np.int64]:
    """Return colors `(sequence_length, 3)`: neighbouring documents differ, padding is gray."""
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


def _rule(image: Image.Image, length: int, step: int) -> None:
    """Draw thin lines at every `step` of `length`, in both directions."""
    pen = ImageDraw.Draw(image)
    per_unit = image.width / length
    for place in range(step, max(length, int(image.height / per_unit)), step):
        at = round(place * per_unit)
        pen.line([(at, 0), (at, image.height)], fill=GRID)
        pen.line([(0, at), (image.width, at)], fill=GRID)


def _cross_out(image: Image.Image, ignored: NDArray[np.bool_], side: int) -> None:
    pen = ImageDraw.Draw(image)
    for y, x in np.argwhere(ignored) * side:
        left, top = int(x) + 3, int(y) + 3
        right, bottom = int(x) + side - 3, int(y) + side - 3
        pen.line([(left, top), (right, bottom)], fill=IGNORED)
        pen.line([(left, bottom), (right, top)], fill=IGNORED)
