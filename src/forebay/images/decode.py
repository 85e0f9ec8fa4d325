"""Decode an image file to RGB as displayed. Only the first frame of an animation is decoded.

file ── header ── pixels counted ── decoded ── turned by EXIF ── alpha onto the pad color ── RGB, 8 bit
"""

import io
import struct
import warnings
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from dataclasses import dataclass
from importlib import import_module
from typing import Literal, NamedTuple

from PIL import Image, ImageFile
from PIL.TiffImagePlugin import TiffImageFile

from forebay.errors import ForebayError
from forebay.images.color import SWAPPING, Alpha, Bands, Color, as_rgb
from forebay.images.geometry import fit
from forebay.images.tags import ImageUnreadable

Exif = Literal["apply", "ignore"]
MAX_PIXELS = 1 << 27  # 134 million: less than a gigabyte while decoding
LARGE = 1 << 24  # larger images are converted and turned band by band, to save memory
# No others: some of Pillow's plugins run external programs on their input.
_PLUGINS = {
    "JPEG": "JpegImagePlugin",
    "PNG": "PngImagePlugin",
    "WEBP": "WebPImagePlugin",
    "GIF": "GifImagePlugin",
    "BMP": "BmpImagePlugin",
    "TIFF": "TiffImagePlugin",
    "AVIF": "AvifImagePlugin",
}
FORMATS = tuple(_PLUGINS)
_COPIES = {"WEBP": 3, "AVIF": 2, "TIFF strips": 2}
_ORIENTATION, _ROWS_PER_STRIP = 0x0112, 0x0116
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
_BACK = {**_TURNS, 6: _TURNS[8], 8: _TURNS[6]}
for _plugin in _PLUGINS.values():
    with suppress(ImportError):  # AVIF came late to Pillow
        import_module(f"PIL.{_plugin}")


@dataclass(frozen=True, slots=True)
class Policy:
    """How to treat transparency, EXIF orientation and size.

    With a `draft_size`, a JPEG is decoded at ½, ¼ or ⅛ of its size if that is not smaller than its box on a canvas of
    that size: faster, with slightly different pixels.
    """

    pad_color: Color = (114, 114, 114)
    alpha: Alpha = "composite"
    exif: Exif = "apply"
    max_pixels: int = MAX_PIXELS
    draft_size: int | None = None


class DecodedImage(NamedTuple):
    """An RGB image, or the bands of a large one, and its full size as displayed; a draft is smaller."""

    image: Image.Image | Bands
    size: tuple[int, int]


def decode(content: bytes, policy: Policy) -> DecodedImage:
    """Decode the bytes of a file; every error is an ImageUnreadable, as no file is opened here."""
    if not content:
        raise ImageUnreadable("empty", "the file has no bytes")
    with understood(policy.max_pixels):
        return _decoded(_opened(content, policy.max_pixels), policy)


def rgb(image: Image.Image, policy: Policy) -> Image.Image:
    """Return a decoded image of any mode as RGB, as `decode` would."""
    with understood(policy.max_pixels):
        return as_rgb(image, policy.alpha, policy.pad_color)


def set_up_worker(max_pixels: int) -> None:
    """Configure Pillow for a whole process. Call it in worker processes only, never in a user's program."""
    warnings.filterwarnings("ignore", module=r"PIL\.")  # odd EXIF, an APNG read as PNG, many pixels
    ImageFile.LOAD_TRUNCATED_IMAGES = False
    Image.MAX_IMAGE_PIXELS = max(Image.MAX_IMAGE_PIXELS or 0, max_pixels)


@contextmanager
def understood(max_pixels: int) -> Iterator[None]:
    """Raise every Pillow error in this block as an `ImageUnreadable`, unless a setting of the process caused it."""
    _check_settings(max_pixels)
    try:
        yield
    except (ForebayError, MemoryError):
        raise
    except Warning as warning:
        raise ForebayError(
            f"a warning filter of this process turned a Pillow warning into an error: {warning}",
            hint=r"exempt Pillow: warnings.filterwarnings('ignore', module=r'PIL\.')",
        ) from warning
    except Exception as error:  # decoders raise errors of any type on unexpected bytes
        raise _unreadable(error) from error


def _check_settings(max_pixels: int) -> None:
    """Raise if Pillow settings of this process would change which images are stored."""
    if ImageFile.LOAD_TRUNCATED_IMAGES:
        raise ForebayError(
            "PIL.ImageFile.LOAD_TRUNCATED_IMAGES is True in this process; truncated images would be stored as complete",
            hint="set it to False while forebay decodes",
        )
    if Image.MAX_IMAGE_PIXELS is not None and max_pixels > 2 * Image.MAX_IMAGE_PIXELS:
        raise ForebayError(
            f"PIL.Image.MAX_IMAGE_PIXELS is {Image.MAX_IMAGE_PIXELS:,} in this process; max_pixels is {max_pixels:,}",
            hint=f"set PIL.Image.MAX_IMAGE_PIXELS to at least {-(-max_pixels // 2):,}",
        )


def _opened(content: bytes, max_pixels: int) -> ImageFile.ImageFile:
    """Open a file by its header. Not with `Image.open`, whose pixel limit is global to the process."""
    start = content[:_MAGIC_BYTES]
    for name in FORMATS:
        factory, accepts = Image.OPEN.get(name, (None, None))
        accepted = accepts is not None and accepts(start)
        if isinstance(accepted, str):
            raise ImageUnreadable("unsupported", accepted)
        if factory is not None and accepted:
            if name == "WEBP":  # its decoder allocates memory on opening
                _check_format_size(name, webp_size(content), max_pixels)
            try:
                return factory(io.BytesIO(content), "")
            except (SyntaxError, IndexError, TypeError, KeyError, struct.error) as error:
                raise ImageUnreadable("corrupt", f"its header is that of no sound {name}: {error}") from error
    raise ImageUnreadable(
        "not-an-image", f"it begins with {content[:_SHOWN_BYTES]!r} (readable formats: {', '.join(FORMATS)})"
    )


def _decoded(opened: ImageFile.ImageFile, policy: Policy) -> DecodedImage:
    full = opened.size
    _check_format_size("TIFF strips" if _has_large_strips(opened) else opened.format or "", full, policy.max_pixels)
    drafted = policy.draft_size is not None and opened.draft(None, fit(*full, policy.draft_size).box[2:]) is not None
    stated = 1
    if opened.format == "TIFF":
        stated = _orientation(opened)
    opened.load()
    left = _orientation(opened)
    # Pillow turns a TIFF by itself, and then removes its orientation.
    turn = _TURNS.get(left) if policy.exif == "apply" else _BACK.get(stated if left != stated else 1)
    image: Image.Image | Bands
    is_rgb = opened.mode == "RGB" and "transparency" not in opened.info
    if opened.width * opened.height > LARGE and not (is_rgb and turn is None):
        image = Bands(opened, policy.alpha, policy.pad_color, turn)
    else:
        image = as_rgb(opened if turn is None else opened.transpose(turn), policy.alpha, policy.pad_color)
    if not drafted:
        return DecodedImage(image, image.size)
    return DecodedImage(image, full[::-1] if turn in SWAPPING else full)


def webp_size(content: bytes) -> tuple[int, int]:
    """Return the canvas size in the first chunk of a WebP file; (1, 1) if it has none and Pillow rejects it."""
    kind, head = content[12:16], content[20:30].ljust(10, b"\0")
    if kind == b"VP8X":
        return 1 + int.from_bytes(head[4:7], "little"), 1 + int.from_bytes(head[7:10], "little")
    if kind == b"VP8L":
        bits = int.from_bytes(head[1:5], "little")
        return 1 + (bits & 0x3FFF), 1 + (bits >> 14 & 0x3FFF)
    if kind == b"VP8 ":
        return int.from_bytes(head[6:8], "little") & 0x3FFF, int.from_bytes(head[8:10], "little") & 0x3FFF
    return 1, 1


def _has_large_strips(opened: ImageFile.ImageFile) -> bool:
    """Return whether libtiff unpacks large strips at once: compressed pixels in one strip, or in few."""
    if not isinstance(opened, TiffImageFile) or opened.info.get("compression") == "raw":
        return False
    rows = opened.tag_v2.get(_ROWS_PER_STRIP, opened.height)
    return not isinstance(rows, int) or rows * opened.width > LARGE


def _check_format_size(name: str, size: tuple[int, int], max_pixels: int) -> None:
    """Raise for images that are too large; some formats count several times, as their decoders keep several copies."""
    (width, height), copies = size, _COPIES.get(name, 1)
    check_size(size, max_pixels)
    if width * height > LARGE and copies * width * height > max_pixels:
        raise ImageUnreadable(
            "too-large",
            f"{width} × {height} pixels of {name} count {copies} times, as its decoder keeps several pictures: that is "
            f"{copies * width * height:,}, more than max_pixels {max_pixels:,}",
        )


def check_size(size: tuple[int, int], max_pixels: int) -> None:
    width, height = size
    if width < 1 or height < 1:
        raise ImageUnreadable("corrupt", f"it says that it is {width} × {height} pixels")
    if width * height > max_pixels:
        raise ImageUnreadable(
            "too-large", f"{width} × {height} pixels are {width * height:,}, more than max_pixels {max_pixels:,}"
        )


def _orientation(image: Image.Image) -> int:
    """Return the EXIF orientation; 1 if there is none, or it cannot be read."""
    try:
        orientation = image.getexif().get(_ORIENTATION, 1)
    except Warning:  # a filter made it an error; see `understood`
        raise
    except (OSError, RuntimeError, SyntaxError, ValueError, LookupError, TypeError, struct.error):  # of damaged EXIF
        return 1
    return orientation if isinstance(orientation, int) else 1


def _unreadable(error: Exception) -> ImageUnreadable:
    detail = str(error) or type(error).__name__
    if isinstance(error, Image.DecompressionBombError):
        return ImageUnreadable("too-large", detail)
    return ImageUnreadable("truncated" if "truncated" in detail.lower() else "corrupt", detail)
