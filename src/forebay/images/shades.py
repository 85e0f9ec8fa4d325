"""An image in a few lines of text: what is bright and dark of it, and where it is padding.

································
▒▒▒▒▒▒▓▓▓▓████████▓▓▓▓▒▒▒▒▒▒░░░░
▒▒▒▒▓▓▓▓██████████▓▓▓▓▒▒▒▒░░░░░░
································
"""

import numpy as np
from PIL import Image

from forebay.images.geometry import Box
from forebay.images.letterbox import Planes
from forebay.masks.rectangle import latent_weights

LINES, MARKS = 16, 32  # a character is about twice as high as it is wide
SHADES = " ░▒▓█"  # from dark to bright
PADDING = "·"
MOSTLY = 0.1  # a mark with less content than this is padding


def shaded(canvas: Planes, box: Box) -> tuple[str, ...]:
    """A canvas `[3, size, size]` as `LINES` of `MARKS` characters."""
    size = canvas.shape[1]
    grey = Image.fromarray(np.ascontiguousarray(canvas.transpose(1, 2, 0))).convert("L")
    levels = np.asarray(grey.resize((MARKS, LINES), Image.Resampling.BOX)).astype(np.int64) * len(SHADES) // 256
    content = latent_weights([box], (size, size), (LINES, MARKS))[0]
    marks = np.where(content < MOSTLY, PADDING, np.array(list(SHADES))[levels])
    return tuple("".join(line) for line in marks)
