"""Images of any mode as RGB with 8 bits.

The upper 8 of 16 bits are kept, for gray as well as for color. CMYK is converted without color profiles; in a JPEG
it is taken as inverted, as Adobe writes it.
"""

from collections.abc import Iterator
from dataclasses import dataclass
from typing import Literal

import numpy as np
from PIL import Image

from forebay.images.tags import ImageUnreadable

Alpha = Literal["composite", "drop", "fail"]
Color = tuple[int, int, int]
SWAPPING = frozenset(
    Image.Transpose[name] for name in ("TRANSPOSE", "ROTATE_270", "TRANSVERSE", "ROTATE_90")
)  # width and height
_STRIP_PIXELS = 1 << 20
_SEEN_THROUGH = ("RGBA", "LA", "PA", "RGBa", "La")
_WITHOUT_RANGE = ("I", "F", "LAB", "HSV")


def as_rgb(image: Image.Image, alpha: Alpha, pad_color: Color) -> Image.Image:
    """Return an image of any mode as RGB; transparency is composited over the pad color, dropped, or refused.

    Transparent pixels are still content: only the box defines the padding.
    """
    if image.mode == "RGB" and "transparency" not in image.info:
        return image
    shallow = _upper_bits(image) if _is_deep(image) else image
    if shallow.mode in _WITHOUT_RANGE:
        raise ImageUnreadable("unsupported", f"pixels of mode {shallow.mode} have no agreed way to 8-bit color")
    return _opaque(shallow, alpha, pad_color) if _has_alpha(shallow) else shallow.convert("RGB")


@dataclass(frozen=True, slots=True)
class Bands:
    """A large image, converted, turned and resized one band at a time: as a whole it would take two or three copies."""

    image: Image.Image
    alpha: Alpha
    pad_color: Color
    turn: Image.Transpose | None

    @property
    def size(self) -> tuple[int, int]:
        return self.image.size[::-1] if self.turn in SWAPPING else self.image.size

    def resized(self, size: tuple[int, int], method: Image.Resampling) -> Image.Image:
        """Return the image after `as_rgb`, the turn and `resize`."""
        if self.image.mode == "RGBA":
            self._cover()
        return Image.merge("RGB", [self._turned(number).resize(size, method) for number in range(3)])

    def _cover(self) -> None:
        """Make every pixel opaque, in place."""
        for top, strip in self._strips():
            self.image.paste(as_rgb(strip, self.alpha, self.pad_color).convert("RGBA"), (0, top))

    def _turned(self, number: int) -> Image.Image:
        return self._band(number) if self.turn is None else self._band(number).transpose(self.turn)

    def _band(self, number: int) -> Image.Image:
        if self.image.mode in ("RGB", "RGBA") and "transparency" not in self.image.info:
            return self.image.getchannel(number)
        band = Image.new("L", self.image.size)
        for top, strip in self._strips():
            band.paste(as_rgb(strip, self.alpha, self.pad_color).getchannel(number), (0, top))
        return band

    def _strips(self) -> Iterator[tuple[int, Image.Image]]:
        width, height = self.image.size
        rows = max(1, _STRIP_PIXELS // width)
        for top in range(0, height, rows):
            strip = self.image.crop((0, top, width, min(height, top + rows)))
            strip.format = self.image.format  # `_is_deep` needs it
            yield top, strip


def _is_deep(image: Image.Image) -> bool:
    """Return whether gray has 16 bits; older versions of Pillow open such a PNG with 32."""
    return image.mode.startswith("I;16") or (image.mode == "I" and image.format == "PNG")


def _upper_bits(image: Image.Image) -> Image.Image:
    values = np.asarray(image)
    gray = Image.fromarray((values >> 8).astype(np.uint8))
    clear = image.info.get("transparency")
    if isinstance(clear, int):
        gray.putalpha(Image.fromarray(np.where(values == clear, 0, 255).astype(np.uint8)))
    return gray


def _has_alpha(image: Image.Image) -> bool:
    by_palette = image.mode == "P" and image.palette is not None and image.palette.mode.endswith("A")
    return image.mode in _SEEN_THROUGH or "transparency" in image.info or by_palette


def _opaque(image: Image.Image, alpha: Alpha, pad_color: Color) -> Image.Image:
    """Remove transparency strip by strip, which avoids copies of the whole image."""
    opaque = Image.new("RGB", image.size)
    rows = max(1, _STRIP_PIXELS // image.width)
    for top in range(0, image.height, rows):
        strip = image.crop((0, top, image.width, min(top + rows, image.height)))
        clear = (strip.convert("LA") if strip.mode == "La" else strip).convert("RGBA")
        if alpha == "fail" and clear.getchannel("A").getextrema()[0] != 255:
            raise ImageUnreadable("transparent", "some of its pixels are transparent, and the recipe says alpha='fail'")
        if alpha == "composite":
            clear = Image.alpha_composite(Image.new("RGBA", clear.size, (*pad_color, 255)), clear)
        opaque.paste(clear.convert("RGB"), (0, top))
    return opaque
