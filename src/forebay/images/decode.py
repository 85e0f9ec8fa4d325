"""The bytes of an image file become an RGB picture as it is meant to be seen, or an `ImageUnreadable` with a reason.

    file ── header ── pixels counted ── decoded ── turned by EXIF ── alpha onto the pad colour ── RGB, 8 bit

Of an animation the first frame is taken. Of 16 bits the upper 8 are kept, for grey as Pillow does it for colour. CMYK
is converted without colour profiles, and JPEG's is taken as inverted, as Adobe writes it.
"""

import io
import struct
from dataclasses import dataclass
from typing import Literal, NamedTuple

import numpy as np

from forebay.errors import ImageUnreadable, LibraryMissing
from forebay.images.geometry import fit
from forebay.images.quiet import quiet

try:
    from PIL import Image, ImageFile
except ModuleNotFoundError as missing:
    raise LibraryMissing("pillow", "decoding images", "images") from missing

Alpha = Literal["composite", "drop", "fail"]
Exif = Literal["apply", "ignore"]
Color = tuple[int, int, int]

FORMATS = ("JPEG", "PNG", "WEBP", "GIF", "BMP", "TIFF", "AVIF")  # no others: some of Pillow's run programs
MAX_PIXELS = 1 << 27  # 134 million: half a gigabyte while it is decoded

_ORIENTATION = 0x0112
_MAGIC_BYTES = 16
_SHOWN_BYTES = 24
_TURNS = {
    2: Image.Transpose.FLIP_LEFT_RIGHT,
    3: Image.Transpose.ROTATE_180,
    4: Image.Transpose.FLIP_TOP_BOTTOM,
    5: Image.Transpose.TRANSPOSE,
    6: Image.Transpose.ROTATE_270,
    7: Image.Transpose.TRANSVERSE,
    8: Image.Transpose.ROTATE_90,
}
_SWAPPING = {_TURNS[5], _TURNS[6], _TURNS[7], _TURNS[8]}


@dataclass(frozen=True, slots=True)
class Policy:
    """What is done about what an image may bring along.

    With a `draft_size`, a JPEG is decoded at ½, ¼ or ⅛ of its size where that is still no smaller than its box on a
    canvas of that size: other pixels, in less time.
    """

    pad_color: Color = (114, 114, 114)
    alpha: Alpha = "composite"
    exif: Exif = "apply"
    max_pixels: int = MAX_PIXELS
    draft_size: int | None = None


class Decoded(NamedTuple):
    """An RGB picture, and its size in full as displayed, which a draft is smaller than."""

    image: Image.Image
    size: tuple[int, int]


def decode(content: bytes, policy: Policy) -> Decoded:
    """The picture in the bytes of a file."""
    if not content:
        raise ImageUnreadable("empty", "the file has no bytes")
    with quiet():
        try:
            return _decoded(_opened(content), policy)
        except (ImageUnreadable, MemoryError):
            raise
        except Exception as error:  # decoders raise anything on bytes they do not expect
            raise _unreadable(error) from error


def rgb(image: Image.Image, policy: Policy) -> Image.Image:
    """A picture of any mode as 8-bit RGB, its alpha treated as the policy says."""
    if image.mode == "RGB" and "transparency" not in image.info:
        return image
    deep = image.mode.startswith("I;16") or (image.mode == "I" and image.format == "PNG")
    if deep:
        return Image.fromarray((np.asarray(image).astype(np.uint16) >> 8).astype(np.uint8)).convert("RGB")
    if image.mode in ("I", "F", "LAB", "HSV"):
        raise ImageUnreadable("unsupported", f"pixels of mode {image.mode} have no agreed way to 8-bit colour")
    return _without_alpha(image, policy) if _has_alpha(image) else image.convert("RGB")


def _decoded(opened: ImageFile.ImageFile, policy: Policy) -> Decoded:
    _check_size(opened.size, policy.max_pixels)
    full = opened.size
    drafted = None
    if policy.draft_size is not None:
        drafted = opened.draft(None, fit(*full, policy.draft_size).box[2:])
    opened.load()
    turn = _turn(opened) if policy.exif == "apply" else None
    upright = opened if turn is None else opened.transpose(turn)
    image = rgb(upright, policy)
    if drafted is None:
        return Decoded(image, image.size)
    return Decoded(image, full[::-1] if turn in _SWAPPING else full)


def _opened(content: bytes) -> ImageFile.ImageFile:
    """The header of a file understood. Not by `Image.open`, whose bound on pixels is one for the whole process."""
    Image.init()
    stream, start = io.BytesIO(content), content[:_MAGIC_BYTES]
    for name in FORMATS:
        factory, accepts = Image.OPEN.get(name, (None, None))
        if factory is None or accepts is None or accepts(start) is not True:
            continue
        stream.seek(0)
        try:
            return factory(stream, "")
        except (SyntaxError, IndexError, TypeError, KeyError, struct.error) as error:
            raise ImageUnreadable("corrupt", f"its header is no sound {name}: {error}") from error
    shown = content[:_SHOWN_BYTES].decode("ascii", "replace")
    raise ImageUnreadable("not-an-image", f"it begins with {shown!r}, as no {', '.join(FORMATS)} file does")


def _check_size(size: tuple[int, int], max_pixels: int) -> None:
    width, height = size
    if width < 1 or height < 1:
        raise ImageUnreadable("corrupt", f"it says that it is {width} × {height} pixels")
    if width * height > max_pixels:
        raise ImageUnreadable(
            "too-large", f"{width} × {height} pixels are {width * height:,}, more than max_pixels {max_pixels:,}"
        )


def _turn(image: Image.Image) -> Image.Transpose | None:
    """What EXIF asks for; EXIF that cannot be read asks for nothing."""
    try:
        return _TURNS.get(image.getexif().get(_ORIENTATION, 1))
    except Exception:  # as of decoders: anything may come of such bytes, and the picture is there all the same
        return None


def _has_alpha(image: Image.Image) -> bool:
    by_palette = image.mode == "P" and image.palette is not None and image.palette.mode.endswith("A")
    return image.mode in ("RGBA", "LA", "PA", "RGBa", "La") or "transparency" in image.info or by_palette


def _without_alpha(image: Image.Image, policy: Policy) -> Image.Image:
    clear = image.convert("RGBA")
    if policy.alpha == "fail" and clear.getchannel("A").getextrema()[0] != 255:
        raise ImageUnreadable("transparent", "some of its pixels are transparent, and the recipe says alpha='fail'")
    if policy.alpha == "composite":
        clear = Image.alpha_composite(Image.new("RGBA", clear.size, (*policy.pad_color, 255)), clear)
    return clear.convert("RGB")


def _unreadable(error: Exception) -> ImageUnreadable:
    said = str(error) or type(error).__name__
    if isinstance(error, Image.DecompressionBombError):
        return ImageUnreadable("too-large", said)
    return ImageUnreadable("truncated" if "truncated" in said else "corrupt", said)
