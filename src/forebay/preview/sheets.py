"""Draw stored images: one as a PNG, several as a contact sheet.

┌────────────┐     the padding, red where a token is ignored
│▒▒▒▒▒▒▒▒▒▒▒▒│
┢━━━━━━━━━━━━┪     the box, outlined
┃  content   ┃
┡━━━━━━━━━━━━┩
│▒▒▒▒▒▒▒▒▒▒▒▒│
└────────────┘
cats/a.jpg         the caption: lines of any text
cat, outdoors
"""

from collections.abc import Iterable
from dataclasses import dataclass
from io import BytesIO

import numpy as np
from numpy.typing import NDArray
from PIL import Image, ImageDraw, ImageFont

from forebay.images.geometry import Box
from forebay.images.resize import Planes
from forebay.masks.rectangle import IGNORE_THRESHOLD, token_padding

CELL = 224
MARGIN = 10
LINE = 15
TEXT = 11  # height of letters
PAPER = (250, 250, 248)
INK = (40, 40, 40)
OUTLINE = (30, 120, 220)
IGNORED = (200, 60, 50)
TINT = 0.45  # of the red over an ignored token
SEEN_APART = 4  # the least pixels of a token for a line between it and the next


@dataclass(frozen=True, slots=True)
class Framed:
    """One image of a sheet: its whole canvas `[3, size, size]`, the box in it, and its caption."""

    canvas: Planes
    box: Box
    caption: tuple[str, ...] = ()  # without line ends


def contact_sheet(
    images: Iterable[Framed], *, patch: int | None, threshold: float = IGNORE_THRESHOLD, columns: int = 6
) -> Image.Image:
    """Draw images side by side, `columns` in a row; without a `patch`, no tokens are drawn."""
    cells = [(_drawn(image, patch, threshold), image.caption) for image in images]
    columns = min(columns, max(1, len(cells)))
    rows, lines = -(-len(cells) // columns), max((len(caption) for _, caption in cells), default=0)
    wide, high = CELL + MARGIN, CELL + MARGIN + LINE * lines
    sheet = Image.new("RGB", (columns * wide + MARGIN, rows * high + MARGIN), PAPER)
    pen, font = ImageDraw.Draw(sheet), ImageFont.load_default(TEXT)
    for number, (drawn, caption) in enumerate(cells):
        left, top = MARGIN + number % columns * wide, MARGIN + number // columns * high
        sheet.paste(drawn, (left, top))
        for line, text in enumerate(caption):
            pen.text((left, top + CELL + 1 + line * LINE), _fitting(text, font), fill=INK, font=font)
    return sheet


def _drawn(image: Framed, patch: int | None, threshold: float) -> Image.Image:
    """Draw one canvas at the size of a cell; small ones are enlarged without smoothing."""
    size = image.canvas.shape[1]
    way = Image.Resampling.NEAREST if size < CELL else Image.Resampling.BILINEAR
    drawn = _picture(image.canvas).resize((CELL, CELL), way)
    if patch is not None:
        drawn = _tinted(drawn, token_padding([image.box], (size, size), patch)[0] >= threshold)
    left, top, width, height = (side * CELL / size for side in image.box)
    right, bottom = max(left, left + width - 1), max(top, top + height - 1)  # content may be thinner than a pixel here
    ImageDraw.Draw(drawn).rectangle((left, top, right, bottom), outline=OUTLINE, width=2)
    return drawn


def _picture(canvas: Planes) -> Image.Image:
    return Image.fromarray(np.ascontiguousarray(canvas.transpose(1, 2, 0)))


def png_of(canvas: Planes, widest: int = 0) -> bytes:
    """Return a canvas `[3, height, width]` as a PNG, reduced to at most `widest` pixels if that is not 0."""
    picture, stream = _picture(canvas), BytesIO()
    if widest:
        picture = picture.reduce(-(-picture.width // widest))
    picture.save(stream, "PNG", compress_level=3)
    return stream.getvalue()


def _tinted(drawn: Image.Image, ignored: NDArray[np.bool_]) -> Image.Image:
    """Tint ignored tokens red, with lines between them unless they are too small."""
    tokens = Image.fromarray(np.where(ignored, round(255 * TINT), 0).astype(np.uint8))
    tint = np.array(tokens.resize(drawn.size, Image.Resampling.NEAREST))
    if len(ignored) <= CELL // SEEN_APART:
        edges = np.arange(len(ignored)) * CELL // len(ignored)
        tint[edges], tint[:, edges] = 0, 0
    return Image.composite(Image.new("RGB", drawn.size, IGNORED), drawn, Image.fromarray(tint))


def _fitting(text: str, font: ImageFont.FreeTypeFont | ImageFont.ImageFont) -> str:
    """Return a line, or as much of its beginning and end as fits below an image."""
    if len(text) <= CELL and font.getlength(text) <= CELL:
        return text
    count = min(len(text) - 1, CELL)
    while count > 2 and font.getlength(_shortened(text, count)) > CELL:
        count -= 1
    return _shortened(text, count)


def _shortened(text: str, count: int) -> str:
    """Return `count` characters of a text, half from each end.

    >>> _shortened("photographs/cat.jpg", 9)
    'photo….jpg'
    """
    return f"{text[: count - count // 2]}…{text[-(count // 2) :]}"
