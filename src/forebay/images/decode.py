"""Decode an image file to RGB as displayed, or raise `ImageUnreadable` with a reason.

    file ── header ── pixels counted ── decoded ── turned by EXIF ── alpha onto the pad colour ── RGB, 8 bit

Only the first frame of an animation is decoded. Of 16 bits the upper 8 are kept, for grey as Pillow does for colour.
CMYK is converted without colour profiles; in a JPEG it is taken as inverted, as Adobe writes it.
"""

import io
import os
import re
import struct
import threading
import warnings
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from dataclasses import dataclass
from importlib import import_module
from typing import Literal, NamedTuple

from forebay.errors import ImageUnreadable, LibraryMissing
from forebay.images.geometry import fit

try:
    from PIL import Image, ImageFile
    from PIL.TiffImagePlugin import TiffImageFile
except ModuleNotFoundError as missing:
    raise LibraryMissing("pillow", "decoding images", "images") from missing

from forebay.images.content import SWAPPING, Alpha, Bands, Color, as_rgb

_FILTER = ("ignore", None, Warning, re.compile(r"PIL\."), 0)
_lock = threading.Lock()
_inside = 0
_takes_halves, _most_pixels = False, Image.MAX_IMAGE_PIXELS  # the program's own settings
_ours: int | None = None  # the value that replaces the second


@contextmanager
def pillow_guard(max_pixels: int) -> Iterator[None]:
    """Decode independently of the program's warning filters and Pillow settings, in any thread.

    Pillow's warnings (odd EXIF, an APNG read as PNG, many pixels) are ignored, even where warnings are errors.
    `warnings.catch_warnings` would swap the filters of all threads, so one filter is installed while a thread decodes.
    `ImageFile.LOAD_TRUNCATED_IMAGES` is off meanwhile, since it accepts truncated files, and `Image.MAX_IMAGE_PIXELS`
    is at least `max_pixels`. The program's own settings, also those it makes meanwhile, are restored afterwards.
    """
    _enter(max_pixels)
    try:
        yield
    finally:
        _leave()


def _enter(max_pixels: int) -> None:
    global _inside, _ours
    with _lock:
        if _FILTER not in warnings.filters:  # other code may have restored older filters meanwhile
            warnings.filters.insert(0, _FILTER)  # type: ignore[attr-defined]  # it is a list, as `filterwarnings` knows
        _notice()
        ImageFile.LOAD_TRUNCATED_IMAGES = False
        if Image.MAX_IMAGE_PIXELS is not None:
            Image.MAX_IMAGE_PIXELS = max(Image.MAX_IMAGE_PIXELS, max_pixels)
        _ours = Image.MAX_IMAGE_PIXELS
        _inside += 1


def _notice() -> None:
    """Remember the program's settings: all at first, later those that differ from ours."""
    global _takes_halves, _most_pixels
    if not _inside or ImageFile.LOAD_TRUNCATED_IMAGES:
        _takes_halves = ImageFile.LOAD_TRUNCATED_IMAGES
    if not _inside or _ours != Image.MAX_IMAGE_PIXELS:
        _most_pixels = Image.MAX_IMAGE_PIXELS


def _leave() -> None:
    global _inside
    with _lock:
        if _inside == 1:
            _put_back()
        _inside -= 1


def _put_back() -> None:
    _notice()
    while _FILTER in warnings.filters:
        warnings.filters.remove(_FILTER)  # type: ignore[attr-defined]  # as above
    ImageFile.LOAD_TRUNCATED_IMAGES, Image.MAX_IMAGE_PIXELS = _takes_halves, _most_pixels


def _start_anew() -> None:
    """Reset in a forked process, where decoding threads neither leave the block nor release the lock."""
    global _inside, _lock
    if _inside:
        _put_back()
    _inside, _lock = 0, threading.Lock()


os.register_at_fork(after_in_child=_start_anew)
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


class Decoded(NamedTuple):
    """An RGB image, or the bands of a large one, and its full size as displayed; a draft is smaller."""

    image: Image.Image | Bands
    size: tuple[int, int]


def decode(content: bytes, policy: Policy) -> Decoded:
    """Decode the bytes of a file; every error is an ImageUnreadable, as no file is opened here."""
    if not content:
        raise ImageUnreadable("empty", "the file has no bytes")
    with understood(policy.max_pixels):
        return _decoded(_opened(content, policy.max_pixels), policy)


def rgb(image: Image.Image, policy: Policy) -> Image.Image:
    """Return a decoded image of any mode as RGB, as `decode` would."""
    with understood(policy.max_pixels):
        return as_rgb(image, policy.alpha, policy.pad_color)


@contextmanager
def understood(max_pixels: int) -> Iterator[None]:
    """Raise every error of Pillow in this block as an `ImageUnreadable`."""
    with pillow_guard(max_pixels):
        try:
            yield
        except (ImageUnreadable, MemoryError):
            raise
        except Exception as error:  # decoders raise errors of any type on unexpected bytes
            raise _unreadable(error) from error


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
        "not-an-image", f"it begins with {content[:_SHOWN_BYTES]!r}, as no {', '.join(FORMATS)} file does"
    )


def _decoded(opened: ImageFile.ImageFile, policy: Policy) -> Decoded:
    full = opened.size
    _check_format_size("TIFF strips" if _has_large_strips(opened) else opened.format or "", full, policy.max_pixels)
    drafted = policy.draft_size is not None and opened.draft(None, fit(*full, policy.draft_size).box[2:]) is not None
    stated = _orientation(opened) if opened.format == "TIFF" else 1
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
        return Decoded(image, image.size)
    return Decoded(image, full[::-1] if turn in SWAPPING else full)


def webp_size(content: bytes) -> tuple[int, int]:
    """Return the canvas size in the first chunk of a WebP file; (1, 1) if it has none, which Pillow refuses."""
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
        found = image.getexif().get(_ORIENTATION, 1)
    except Exception:  # damaged EXIF raises errors of any type, and does not make the image unreadable
        return 1
    return found if isinstance(found, int) else 1


def _unreadable(error: Exception) -> ImageUnreadable:
    detail = str(error) or type(error).__name__
    if isinstance(error, Image.DecompressionBombError):
        return ImageUnreadable("too-large", detail)
    return ImageUnreadable("truncated" if "truncated" in detail.lower() else "corrupt", detail)
