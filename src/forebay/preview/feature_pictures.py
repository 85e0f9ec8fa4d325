"""Draw the teacher outputs of a sample over timesteps as one picture. Needs pillow.

Sol spatial   one small heat map per bucket, dark at 0 and bright at the maximum of all buckets
Sol stats     one line per number, from 0 at the bottom to 1 at the top, named by its color
Lune          one strip per bucket, one column per dimension, blue below 0 and red above
"""

from collections.abc import Sequence
from typing import NamedTuple

import numpy as np
from numpy.typing import NDArray

from forebay.columns import Array
from forebay.errors import LibraryMissing

try:
    from PIL import Image, ImageDraw, ImageFont
except ModuleNotFoundError as missing:
    raise LibraryMissing(
        "drawing teacher outputs needs 'pillow', which is not installed",
        hint="pip install 'forebay[teachers]'",
        extra="teachers",
    ) from missing

from forebay.preview.draw import Picture

Pixels = NDArray[np.uint8]  # (height, width, 3)
WIDTH = 900
MARGIN = 44  # left, for the timesteps
STRIP = 14  # height of a bucket's strip
LINES_HEIGHT = 120
FEW_VALUES = 8  # up to which they are drawn as lines
TITLE = 18
PAPER = (252, 252, 250)
INK = (60, 60, 60)
LINE_COLORS = ((86, 140, 201), (233, 150, 71), (106, 176, 106), (190, 112, 168), (150, 130, 40), (94, 178, 184))
COLD, ZERO, WARM = (40, 90, 170), (247, 247, 247), (180, 40, 45)
DARK, MIDDLE, BRIGHT = (20, 20, 60), (190, 60, 90), (252, 240, 170)


class FeaturePlot(NamedTuple):
    """A column of one sample over timesteps; its values are None if the sample has no teacher output."""

    title: str
    values: Array | None  # (buckets, …)
    buckets: Array
    names: tuple[str, ...] = ()  # of lines, where each has one


def teacher_picture(parts: Sequence[FeaturePlot]) -> Picture:
    """Draw columns of samples, one below the other."""
    drawings = [_titled(part) for part in parts]
    sheet = Image.new("RGB", (WIDTH, sum(drawing.height for drawing in drawings)), PAPER)
    top = 0
    for drawing in drawings:
        sheet.paste(drawing, (0, top))
        top += drawing.height
    return Picture(np.asarray(sheet))


def _drawn(values: NDArray[np.float32], buckets: Array) -> Image.Image:
    if values.ndim == 3:
        return _maps(values, buckets)
    flat = values.reshape(len(buckets), -1)
    return _lines(flat, buckets) if flat.shape[1] <= FEW_VALUES else _strips(flat, buckets)


def _titled(part: FeaturePlot) -> Image.Image:
    absent = part.values is None
    drawing = Image.new("RGB", (WIDTH, 0)) if absent else _drawn(np.asarray(part.values, np.float32), part.buckets)
    sheet = Image.new("RGB", (WIDTH, drawing.height + TITLE + 6), PAPER)
    _write(sheet, (4, 3), f"{part.title}: absent" if absent else part.title)
    for number, name in enumerate(() if absent else part.names):
        left = WIDTH // 3 + 100 * number
        color = LINE_COLORS[number % len(LINE_COLORS)]
        ImageDraw.Draw(sheet).line([(left - 16, TITLE // 2), (left - 6, TITLE // 2)], fill=color, width=2)
        _write(sheet, (left, 3), name)
    sheet.paste(drawing, (0, TITLE))
    return sheet


def _maps(values: NDArray[np.float32], buckets: Array) -> Image.Image:
    gap = 6
    room = (WIDTH - gap) // len(buckets) - gap
    scale = max(1, room // values.shape[2])
    sheet = Image.new("RGB", (WIDTH, values.shape[1] * scale + TITLE), PAPER)
    for number, (heat, t) in enumerate(zip(values, buckets, strict=True)):
        left = gap + number * (room + gap)
        sheet.paste(Image.fromarray(_enlarged(heat_colors(heat, float(values.max())), scale)), (left, 0))
        _write(sheet, (left, values.shape[1] * scale + 3), f"t={t:.2f}")
    return sheet


def _strips(values: NDArray[np.float32], buckets: Array) -> Image.Image:
    sheet = Image.new("RGB", (WIDTH, STRIP * len(buckets)), PAPER)
    strips = Image.fromarray(signed_colors(values)).resize((WIDTH - MARGIN, sheet.height), Image.Resampling.NEAREST)
    sheet.paste(strips, (MARGIN, 0))
    for number, t in enumerate(buckets):
        _write(sheet, (6, number * STRIP + 1), f"{t:.2f}")
    return sheet


def _lines(values: NDArray[np.float32], buckets: Array) -> Image.Image:
    """Draw lines on a scale from 0 to 1, or as far as the values go."""
    low, high = min(0.0, float(values.min())), max(1.0, float(values.max()))
    sheet = Image.new("RGB", (WIDTH, LINES_HEIGHT + TITLE), PAPER)
    pen = ImageDraw.Draw(sheet)
    across = MARGIN + (WIDTH - 2 * MARGIN) * _share(np.asarray(buckets, np.float32), *np.asarray(buckets)[[0, -1]])
    for edge in (low, high):
        height = round(_height(np.asarray(edge), low, high).item())
        pen.line([(MARGIN, height), (WIDTH - MARGIN, height)], fill=(220, 220, 216))
        _write(sheet, (6, height - 6), f"{edge:.2g}")
    for number, line in enumerate(values.T):
        points = list(zip(across.tolist(), _height(line, low, high).tolist(), strict=True))
        pen.line(points, fill=LINE_COLORS[number % len(LINE_COLORS)], width=2)
    for at, t in zip(across.tolist(), buckets, strict=True):
        _write(sheet, (round(at) - 10, LINES_HEIGHT + 3), f"{t:.2f}")
    return sheet


def heat_colors(heat: NDArray[np.float32], most: float) -> Pixels:
    """Return colors, dark at 0 and bright at `most`."""
    return _between(_share(heat, 0.0, most), (DARK, MIDDLE, BRIGHT))


def signed_colors(values: NDArray[np.float32]) -> Pixels:
    """Return colors: white at 0, blue below and red above, scaled by the largest absolute value."""
    most = float(np.abs(values).max()) or 1.0
    return _between(values / (2 * most) + 0.5, (COLD, ZERO, WARM))


def _between(share: NDArray[np.float32], colors: tuple[tuple[int, int, int], ...]) -> Pixels:
    steps = np.linspace(0, 1, len(colors))
    channels = [np.interp(share, steps, [color[channel] for color in colors]) for channel in range(3)]
    return np.stack(channels, axis=-1).round().astype(np.uint8)


def _share(values: NDArray[np.float32], low: float, high: float) -> NDArray[np.float32]:
    return (values - low) / ((high - low) or 1)


def _height(values: Array, low: float, high: float) -> Array:
    pad = 8
    return np.asarray(pad + (LINES_HEIGHT - 2 * pad) * (1 - _share(values, low, high)))


def _enlarged(pixels: Pixels, scale: int) -> Pixels:
    return pixels.repeat(scale, axis=0).repeat(scale, axis=1)


def _write(sheet: Image.Image, place: tuple[int, int], text: str) -> None:
    ImageDraw.Draw(sheet).text(place, text, fill=INK, font=ImageFont.load_default())
