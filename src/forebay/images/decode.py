"""Decode an image file to RGB as displayed, and convert it to its stored content.

    file ── header ── pixels counted ── decoded ── turned by EXIF ── alpha onto the pad color ── RGB, 8 bit

Only the first frame of an animation is decoded. Of 16 bits the upper 8 are kept, for gray as Pillow does for color.
CMYK is converted without color profiles; in a JPEG it is taken as inverted, as Adobe writes it.

Padding is never stored; `paste` adds it where a whole canvas is needed.

Resize RGB images to planes, equal to Pillow's `resize` to the last bit.

`_resize.c` does it where a compiler built it and this version of Pillow gives the same; elsewhere Pillow does it. Bytes
of a cache do not depend on which of the two was used.
"""

import ctypes
import io
import os
import re
import struct
import threading
import warnings
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from dataclasses import dataclass
from functools import cache
from importlib import import_module
from typing import Any, Literal, NamedTuple

import numpy as np
from numpy.typing import NDArray
from PIL import Image
from PIL import __version__ as pillow_version

from forebay.errors import ImageUnreadable, LibraryMissing
from forebay.images.geometry import Letterbox, fit

try:
    from forebay.images import _resize as compiled
except ImportError:  # installed without a compiler
    compiled = None  # type: ignore[assignment]

Resample = Literal["bilinear", "bicubic", "lanczos", "box", "nearest"]
Planes = NDArray[np.uint8]  # (3, height, width)
_KERNELS = {"bilinear": 0, "bicubic": 1, "lanczos": 2}
_FROM_THE_TALL_SIDE = int(pillow_version.split(".")[0]) >= 13  # earlier versions always begin across
_CHECKED = ((64, 20), (20, 64), (37, 41))


def resized_planes(image: Image.Image, size: tuple[int, int], resample: Resample) -> Planes:
    """Return the pixels `[3, height, width]` of an RGB image after `image.resize(size)`."""
    is_smaller = size[0] <= image.width and size[1] <= image.height
    if compiled is not None and is_smaller and resample in _KERNELS and _is_equal(resample):
        planes = compiled_planes(image, size, resample)
        if planes is not None:
            return planes
    return pillow_planes(image, size, resample)


def compiled_planes(image: Image.Image, size: tuple[int, int], resample: Resample, fast: bool = True) -> Planes | None:
    """Return what `resized_planes` returns, without Pillow; None where Pillow does not lend its pixels."""
    try:
        _, lent = image.__arrow_c_array__()
    except (AttributeError, ValueError):  # before 11.2; or an image that lies in several blocks of memory
        return None
    planes = np.empty((3, size[1], size[0]), np.uint8)
    down_first = _FROM_THE_TALL_SIDE and image.height - size[1] > 2 * (image.width - size[0])
    compiled.resize_planes(planes, lent, image.size, size, _KERNELS[resample], down_first, fast)
    return planes


def pillow_planes(image: Image.Image, size: tuple[int, int], resample: Resample) -> Planes:
    return as_planes(image if image.size == size else image.resize(size, Image.Resampling[resample.upper()]))


def as_planes(image: Image.Image) -> Planes:
    """Return the pixels of an RGB image, `[3, height, width]`. Pillow packs single bands faster than numpy does."""
    bands = (image.tobytes("raw", band) for band in "RGB")
    return np.frombuffer(bytearray().join(bands), np.uint8).reshape(3, image.height, image.width)


@cache
def _is_equal(resample: Resample) -> bool:
    """Return whether this version of Pillow computes as `_resize.c` does, tried once in each process."""
    return all(_agree(*_noise(size), resample) for size in _CHECKED)


def _noise(size: tuple[int, int]) -> tuple[Image.Image, tuple[int, int]]:
    """Return an image and the size that it is tried with; noise shows a difference of one weight."""
    pixels = np.random.default_rng(0).integers(0, 256, (size[1], size[0], 3), np.uint8)
    return Image.fromarray(pixels), (size[0] * 2 // 3, size[1] * 2 // 3)


def _agree(image: Image.Image, size: tuple[int, int], resample: Resample) -> bool:
    ours: Any = compiled_planes(image, size, resample)
    return ours is None or np.array_equal(ours, pillow_planes(image, size, resample))


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
        return Image.merge("RGB", [self._turned(place).resize(size, method) for place in range(3)])

    def _cover(self) -> None:
        """Make every pixel opaque, in place."""
        for top, strip in self._strips():
            self.image.paste(as_rgb(strip, self.alpha, self.pad_color).convert("RGBA"), (0, top))

    def _turned(self, place: int) -> Image.Image:
        return self._band(place) if self.turn is None else self._band(place).transpose(self.turn)

    def _band(self, place: int) -> Image.Image:
        if self.image.mode in ("RGB", "RGBA") and "transparency" not in self.image.info:
            return self.image.getchannel(place)
        band = Image.new("L", self.image.size)
        for top, strip in self._strips():
            band.paste(as_rgb(strip, self.alpha, self.pad_color).getchannel(place), (0, top))
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
    grey = Image.fromarray((values >> 8).astype(np.uint8))
    clear = image.info.get("transparency")
    if isinstance(clear, int):
        grey.putalpha(Image.fromarray(np.where(values == clear, 0, 255).astype(np.uint8)))
    return grey


def _has_alpha(image: Image.Image) -> bool:
    by_palette = image.mode == "P" and image.palette is not None and image.palette.mode.endswith("A")
    return image.mode in _SEEN_THROUGH or "transparency" in image.info or by_palette


def _opaque(image: Image.Image, alpha: Alpha, pad_color: Color) -> Image.Image:
    """Remove transparency strip by strip; on the whole image, each step would take another copy."""
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


def letterbox(
    image: Image.Image | Bands, size: int, resample: Resample = "bilinear", full: tuple[int, int] | None = None
) -> tuple[Image.Image, Letterbox]:
    """Return an RGB image at the size of its box, equal to Pillow's `resize`, and its letterbox.

    `full` is the size of the original, if the image was decoded smaller (a draft). The bands of a large image give the
    same pixels.
    """
    fitted = fit(*(full or image.size), size)
    wanted, method = fitted.box[2:], Image.Resampling[resample.upper()]
    if isinstance(image, Bands):
        return image.resized(wanted, method), fitted
    return (image if image.size == wanted else image.resize(wanted, method)), fitted


def letterbox_planes(
    image: Image.Image | Bands, size: int, resample: Resample = "bilinear", full: tuple[int, int] | None = None
) -> tuple[Planes, Letterbox]:
    """Return what `letterbox` returns, with the pixels as planes."""
    if isinstance(image, Bands):
        small, fitted = letterbox(image, size, resample, full)
        return as_planes(small), fitted
    fitted = fit(*(full or image.size), size)
    return resized_planes(image, fitted.box[2:], resample), fitted


def paste(content: NDArray[Any], fitted: Letterbox, pad_color: Color) -> Planes:
    """Return the whole canvas `[3, size, size]`: content in its box, padding around it."""
    left, top, width, height = fitted.box
    canvas = np.empty((3, fitted.size, fitted.size), np.uint8)
    canvas[:] = np.array(pad_color, np.uint8)[:, None, None]
    canvas[:, top : top + height, left : left + width] = content
    return canvas


def model_planes(
    content: Planes, size: int, how: Literal["letterbox", "crop"], resample: Resample, pad_color: Color
) -> Planes:
    """Return an image `[3, height, width]` as a model's square `[3, size, size]`.

    "letterbox" is the canvas of an image recipe of that size; "crop" is the centre, with the shorter side resized to
    `size`.
    """
    image = Image.fromarray(np.ascontiguousarray(content.transpose(1, 2, 0)))
    if how == "letterbox":
        return paste(*letterbox_planes(image, size, resample), pad_color)
    shorter = min(image.size)
    width, height = (max(size, side * size // shorter) for side in image.size)
    resized = (
        image if image.size == (width, height) else image.resize((width, height), Image.Resampling[resample.upper()])
    )
    left, top = (width - size) // 2, (height - size) // 2
    return as_planes(resized.crop((left, top, left + size, top + size)))


try:
    from PIL import Image, ImageFile
    from PIL.TiffImagePlugin import TiffImageFile
except ModuleNotFoundError as missing:
    raise LibraryMissing("pillow", "decoding images", "images") from missing
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


def _decoded(opened: ImageFile.ImageFile, policy: Policy) -> DecodedImage:
    full = opened.size
    _check_format_size("TIFF strips" if _has_large_strips(opened) else opened.format or "", full, policy.max_pixels)
    drafted = policy.draft_size is not None and opened.draft(None, fit(*full, policy.draft_size).box[2:]) is not None
    stated = 1
    if opened.format == "TIFF":
        _quiet_libtiff()
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


@cache
def _quiet_libtiff() -> None:
    """Keep messages of libtiff off standard error: what stops it is an error of Pillow, a failure of the sample."""
    with suppress(OSError, AttributeError):  # another system, or a libtiff inside another library
        with open("/proc/self/maps") as maps:
            loaded = {line.split(maxsplit=5)[5].strip() for line in maps if "libtiff" in line}
        for path in loaded:
            library = ctypes.CDLL(path)
            for handler in (library.TIFFSetErrorHandler, library.TIFFSetWarningHandler):
                handler.argtypes, handler.restype = [ctypes.c_void_p], ctypes.c_void_p
                handler(None)


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
