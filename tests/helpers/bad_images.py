"""A folder of images that readers stumble over, each with the picture it is, or the reason for which it is none.

    python -m tests.helpers.bad_images FOLDER

All of them are made here. What a good one shows was known before it was written, and no decoder is asked for it: a
canvas of `SIZE` holds nearly every picture unscaled.
"""

import io
import json
import os
import struct
import sys
import zlib
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path

import numpy as np
from numpy.typing import NDArray
from PIL import Image

SIZE = 64
MAX_PIXELS = 1_000_000
PAD = (114, 114, 114)
BESIDE = (".json", ".txt", ".md")  # files that are no images
JPEG_TOLERANCE = 12  # lossy formats give back nearly what they were given

Pixels = NDArray[np.uint8]  # (height, width, 3)


@dataclass(frozen=True)
class Shows:
    """The picture that a file shows, as it lies on the canvas, and the size it had."""

    content: Pixels
    size: tuple[int, int]  # width, height
    tolerance: int = 0


@dataclass(frozen=True)
class Fails:
    reason: str


Expected = Shows | Fails


@dataclass(frozen=True)
class Case:
    name: str
    content: bytes
    expected: Expected


def main(folder: str) -> None:
    for name, expected in sorted(write_folder(Path(folder)).items()):
        print(f"{os.fsencode(name)!r}: {expected.reason if isinstance(expected, Fails) else 'a picture'}")


def write_folder(root: Path) -> dict[str, Expected]:
    """All cases as files, with links that lead round and names of every kind; what is expected, by sample id."""
    cases = [*damaged(), *bombs(), *colours(), *formats(), *turned(), *extreme(), *sidecars(), *named()]
    for case in cases:
        path = os.path.join(os.fsencode(root), os.fsencode(case.name))
        os.makedirs(os.path.dirname(path), exist_ok=True)
        with open(path, "xb") as file:
            file.write(case.content)
    expected = {case.name: case.expected for case in cases if not case.name.endswith(BESIDE)}
    return expected | write_links(root)


def write_links(root: Path) -> dict[str, Expected]:
    """What cannot be read: links to themselves and to nothing, a pipe nobody writes to, a folder, a secret."""
    links = root / "links"
    links.mkdir()
    (links / "round").symlink_to(links, target_is_directory=True)
    (links / "up").symlink_to(root, target_is_directory=True)
    (links / "self.jpg").symlink_to("self.jpg")
    (links / "nothing.png").symlink_to("nowhere.png")
    os.mkfifo(links / "pipe.png")
    (links / "folder.jpg").mkdir()
    secret = links / "secret.png"
    secret.write_bytes(encoded(picture(), "PNG"))
    secret.chmod(0)
    return {
        "links/secret.png": shown(picture()) if os.access(secret, os.R_OK) else Fails("unreadable"),  # root reads all
        "links/self.jpg": Fails("symlink-loop"),
        "links/nothing.png": Fails("not-found"),
        "links/pipe.png": Fails("not-a-file"),
    }


def picture(height: int = 24, width: int = 40) -> Pixels:
    """Every corner differs, both ways run another colour, and nothing is grey."""
    y, x = np.mgrid[0:height, 0:width]
    red = 40 + 200 * x // max(1, width - 1)
    green = 30 + 180 * y // max(1, height - 1)
    blue = np.where((x < width // 4) & (y < height // 3), 250, 60)
    return np.stack([red, green, blue], axis=2).astype(np.uint8)


def shown(content: Pixels, tolerance: int = 0) -> Shows:
    return Shows(content, (content.shape[1], content.shape[0]), tolerance)


def damaged() -> Iterator[Case]:
    """Files that are not, or not wholly, what their names say."""
    jpeg, png = encoded(picture(), "JPEG", quality=95, subsampling=0), encoded(picture(), "PNG")
    webp, gif, tiff = encoded(picture(), "WEBP", lossless=True), encoded(picture(), "GIF"), encoded(picture(), "TIFF")
    yield Case("damaged/empty.jpg", b"", Fails("empty"))
    yield Case("damaged/empty.png", b"", Fails("empty"))
    yield Case("damaged/page.jpg", b"<!DOCTYPE html><html><body>404 Not Found</body></html>", Fails("not-an-image"))
    yield Case("damaged/noise.png", np.random.default_rng(0).bytes(4096), Fails("not-an-image"))
    yield Case("damaged/zeros.webp", bytes(4096), Fails("not-an-image"))
    yield Case("damaged/pickle.jpg", b"\x80\x04\x95", Fails("not-an-image"))
    for name, content in {"jpg": jpeg, "png": png, "gif": gif, "tiff": tiff}.items():
        yield Case(f"damaged/half.{name}", content[: len(content) // 2], Fails("truncated"))
    yield Case("damaged/half.webp", webp[: len(webp) // 2], Fails("corrupt"))
    yield Case("damaged/head.jpg", jpeg[:20], Fails("corrupt"))
    yield Case("damaged/head.png", png[:20], Fails("truncated"))
    yield Case("damaged/last-byte.jpg", jpeg[:-40], Fails("truncated"))
    yield Case("damaged/flipped.png", _with_flipped_bit(png), Fails("corrupt"))
    yield Case("damaged/more-behind.jpg", jpeg + b"<html>", shown(picture(), JPEG_TOLERANCE))
    yield Case("damaged/really-a-png.jpg", png, shown(picture()))


def bombs() -> Iterator[Case]:
    """Small files of many pixels: refused by their heads, before memory is taken for them."""
    yield Case("bombs/claimed.png", png_bytes(60_000, 60_000, 8, 2, b"\0"), Fails("too-large"))
    yield Case("bombs/real.png", png_bytes(8_000, 8_000, 1, 0, bytes(8_000 * 1_001)), Fails("too-large"))
    yield Case("bombs/claimed.gif", _gif_head(65_535, 65_535), Fails("too-large"))
    yield Case("bombs/claimed.bmp", _bmp_head(65_000, 65_000), Fails("too-large"))
    at_the_bound = png_bytes(1000, 1000, 8, 0, (b"\0" + bytes([77]) * 1000) * 1000)
    yield Case("bombs/just-allowed.png", at_the_bound, Shows(_filled(SIZE, SIZE, 77, 77, 77), (1000, 1000)))
    beyond = png_bytes(1001, 1000, 8, 0, (b"\0" + bytes([77]) * 1001) * 1000)
    yield Case("bombs/just-too-large.png", beyond, Fails("too-large"))
    yield Case("bombs/text.png", _with_compressed_text(encoded(picture(), "PNG")), Fails("corrupt"))


def colours() -> Iterator[Case]:
    """Every way to write a colour: ink, sixteen bits, palettes, and what can be seen through."""
    yield from _inks()
    yield from _deep()
    yield from _transparent()
    grey = np.full((9, 9, 3), PAD, np.uint8)
    yield Case("colours/grey-as-padding.png", encoded(grey, "PNG"), shown(grey))
    bits = (np.arange(64).reshape(8, 8) % 3 == 0)[:, :, None].repeat(3, axis=2) * np.uint8(255)
    yield Case("colours/one-bit.png", _saved(Image.fromarray(bits).convert("1", dither=0), "PNG"), shown(bits))
    palette = Image.fromarray(picture(8, 8)).quantize(64)
    yield Case("colours/palette.png", _saved(palette, "PNG"), shown(np.asarray(palette.convert("RGB"))))


def _inks() -> Iterator[Case]:
    ink = Image.fromarray(np.full((16, 20, 4), (30, 200, 60, 40), np.uint8), "CMYK")
    cyan, magenta, yellow, black = (np.float64(value) / 255 for value in (30, 200, 60, 40))
    rgb = [round(255 * (1 - colour) * (1 - black)) for colour in (cyan, magenta, yellow)]
    printed = np.full((16, 20, 3), rgb, np.uint8)
    yield Case("colours/ink.tiff", _saved(ink, "TIFF"), shown(printed, 1))
    yield Case(
        "colours/ink-adobe-inverted.jpg", _saved(ink, "JPEG", quality=95, subsampling=0), shown(printed, JPEG_TOLERANCE)
    )


def _deep() -> Iterator[Case]:
    """Sixteen bits a channel: the upper eight of them are the picture."""
    flat = picture(12, 10)
    wide = (flat.astype(np.uint16) * 256 + 77).astype(">u2")
    lines = b"".join(b"\0" + row.tobytes() for row in wide)
    yield Case("colours/deep.png", png_bytes(10, 12, 16, 2, lines), shown(flat, 1))
    grey = flat[:, :, :1].repeat(3, axis=2)
    lines = b"".join(b"\0" + row[:, 0].tobytes() for row in wide)
    yield Case("colours/deep-grey.png", png_bytes(10, 12, 16, 0, lines), shown(grey, 1))
    solid = np.concatenate([wide, np.full((12, 10, 1), 65_535)], axis=2).astype(">u2")
    lines = b"".join(b"\0" + row.tobytes() for row in solid)
    yield Case("colours/deep-solid.png", png_bytes(10, 12, 16, 6, lines), shown(flat, 1))
    yield Case("colours/deep-grey.tiff", _saved(Image.fromarray(wide[:, :, 0].astype("<u2")), "TIFF"), shown(grey, 1))


def _transparent() -> Iterator[Case]:
    """What can be seen through shows the colour of the padding, and is content all the same."""
    flat = picture(16, 16)
    holes = flat.copy()
    holes[4:8, 4:12] = PAD
    alpha = np.full((16, 16, 1), 255, np.uint8)
    alpha[4:8, 4:12] = 0
    see_through = Image.fromarray(np.concatenate([flat, alpha], axis=2))
    yield Case("colours/holes.png", _saved(see_through, "PNG"), shown(holes))
    yield Case("colours/holes.webp", _saved(see_through, "WEBP", lossless=True, exact=True), shown(holes))
    grey = np.where(alpha > 0, flat[:, :, :1], PAD[0]).repeat(3, axis=2)
    both = Image.fromarray(np.concatenate([flat[:, :, :1], alpha], axis=2))
    yield Case("colours/grey-holes.png", _saved(both, "PNG"), shown(grey.astype(np.uint8)))
    half = Image.fromarray(np.full((6, 6, 4), (200, 100, 0, 128), np.uint8))
    mixed = _filled(
        6, 6, *(round((colour * 128 + pad * 127) / 255) for colour, pad in zip((200, 100, 0), PAD, strict=True))
    )
    yield Case("colours/half-seen.png", _saved(half, "PNG"), shown(mixed, 1))
    yield Case("colours/unseen.png", _saved(Image.new("RGBA", (7, 5)), "PNG"), shown(_filled(5, 7, *PAD)))
    for suffix in ("png", "gif"):
        yield Case(f"colours/palette-holes.{suffix}", _palette_with_hole(suffix), shown(_stripes(PAD)))


def formats() -> Iterator[Case]:
    """Each format that is read; of those that move, the first frame."""
    flat = picture()
    for suffix, how in {"png": {}, "bmp": {}, "tiff": {}, "webp": {"lossless": True}}.items():
        yield Case(f"formats/plain.{suffix}", encoded(flat, suffix.upper(), **how), shown(flat))
    yield Case("formats/plain.jpeg", encoded(flat, "JPEG", quality=95, subsampling=0), shown(flat, JPEG_TOLERANCE))
    yield Case(
        "formats/progressive.jpg",
        encoded(flat, "JPEG", quality=95, subsampling=0, progressive=True),
        shown(flat, JPEG_TOLERANCE),
    )
    yield Case(
        "formats/plain.avif", encoded(flat, "AVIF", quality=100, subsampling="4:4:4"), shown(flat, 2 * JPEG_TOLERANCE)
    )
    for suffix in ("gif", "png", "webp"):
        frames = [Image.new("RGB", (9, 7), colour) for colour in ((250, 20, 20), (20, 250, 20), (20, 20, 250))]
        how = {"save_all": True, "append_images": frames[1:], "duration": 40}
        lossless = {"lossless": True} if suffix == "webp" else {}
        content = _saved(frames[0], suffix.upper(), **how, **lossless)
        yield Case(f"formats/moving.{suffix}", content, shown(_filled(7, 9, 250, 20, 20)))
    yield Case("formats/UPPER.PNG", encoded(flat, "PNG"), shown(flat))


# How a picture must be laid down for its orientation to turn it upright again.
LAID_DOWN = {
    1: lambda upright: upright,
    2: lambda upright: upright[:, ::-1],
    3: lambda upright: upright[::-1, ::-1],
    4: lambda upright: upright[::-1],
    5: lambda upright: upright.transpose(1, 0, 2),
    6: lambda upright: np.rot90(upright, 1),
    7: lambda upright: upright[::-1, ::-1].transpose(1, 0, 2),
    8: lambda upright: np.rot90(upright, -1),
}


def turned() -> Iterator[Case]:
    """All eight orientations; one that does not exist and EXIF that is none leave the picture as it is."""
    upright = picture()
    for orientation, lay_down in LAID_DOWN.items():
        laid = np.ascontiguousarray(lay_down(upright))
        exif = Image.Exif()
        exif[0x0112] = orientation
        yield Case(
            f"turned/{orientation}.jpg",
            encoded(laid, "JPEG", quality=95, subsampling=0, exif=exif),
            shown(upright, JPEG_TOLERANCE),
        )
        yield Case(f"turned/{orientation}.png", encoded(laid, "PNG", exif=exif), shown(upright))
        yield Case(f"turned/{orientation}.webp", encoded(laid, "WEBP", lossless=True, exif=exif), shown(upright))
    for orientation in (0, 9, 65_535):
        exif = Image.Exif()
        exif[0x0112] = orientation
        yield Case(f"turned/{orientation}.png", encoded(upright, "PNG", exif=exif), shown(upright))
    for name, exif in {
        "cut": b"Exif\0\0MM\0*\0\0",
        "noise": b"Exif\0\0" + bytes(range(256)),
        "none": b"Exif\0\0",
    }.items():
        yield Case(
            f"turned/{name}.jpg",
            encoded(upright, "JPEG", quality=95, subsampling=0, exif=exif),
            shown(upright, JPEG_TOLERANCE),
        )


def extreme() -> Iterator[Case]:
    """As small and as long as pictures get: a side that would vanish stays one pixel."""
    dot = _filled(1, 1, 10, 200, 30)
    yield Case("extreme/dot.png", encoded(dot, "PNG"), shown(dot))
    yield Case("extreme/dot.gif", encoded(dot, "GIF"), shown(dot))
    tall, wide = _filled(20_000, 1, 10, 200, 30), _filled(1, 20_000, 10, 200, 30)
    yield Case("extreme/tall.png", encoded(tall, "PNG"), Shows(_filled(SIZE, 1, 10, 200, 30), (1, 20_000)))
    yield Case("extreme/wide.png", encoded(wide, "PNG"), Shows(_filled(1, SIZE, 10, 200, 30), (20_000, 1)))
    exact = picture(SIZE, SIZE)
    yield Case("extreme/exact.png", encoded(exact, "PNG"), shown(exact))


def sidecars() -> Iterator[Case]:
    """What is said beside a picture, well and badly."""
    png = encoded(picture(6, 6), "PNG")
    for name, (said, expected) in SIDECARS.items():
        yield Case(f"said/{name}.png", png, Fails(expected) if expected else shown(picture(6, 6)))
        yield Case(f"said/{name}.json", said, shown(picture(6, 6)))
    yield Case("said/listed.png", png, shown(picture(6, 6)))
    yield Case("said/listed.txt", b"cat, looking_right , ,dog\n", shown(picture(6, 6)))
    yield Case("said/alone.json", b'{"tags": ["no picture"]}', Fails("never looked at"))
    yield Case("said/README.md", b"no picture either", Fails("never looked at"))


SIDECARS: dict[str, tuple[bytes, str | None]] = {
    "good": (b'{"tags": ["cat", "looking_left"], "rating": 0.5, "more": {"deep": [1, null]}}', None),
    "marked": ('\ufeff{"tags": ["Käse", "猫"]}'.encode(), None),
    "empty-object": (b"{}", None),
    "empty": (b"", "bad-sidecar"),
    "no-json": (b"{tags: cat}", "bad-sidecar"),
    "a-list": (b'["cat"]', "bad-sidecar"),
    "no-utf8": (b'{"tags": ["\xff"]}', "bad-sidecar"),
    "nan": (b'{"rating": NaN}', "bad-sidecar"),
    "lone-surrogate": (rb'{"tags": ["\ud800"]}', "bad-sidecar"),
    "deep": (b'{"a": ' + b"[" * 100_000 + b"]" * 100_000 + b"}", "bad-sidecar"),
    "tags-no-list": (b'{"tags": 7}', "bad-tags"),
    "tags-of-numbers": (b'{"tags": [1, 2]}', "bad-tags"),
}

NAMES = (
    *("plain", "with space", "quo'te\"s", "back\\slash", "ta\tb", "li\nne", "-dash", "~tilde", "$HOME", "%2e%2e%2fup"),
    *("a..b", "dots..", "star*glob?[x]", "a@b:c|d;e&f", "\x1b[31mred", "\x7fdel", "x" * 240),
    *("Käse", "Ka\u0308se", "猫", "ネコ\u200dﾈｺ", "\U0001f408\u200d\u2b1b", "\u202egnp.exe", "\udcff\udcfe not utf-8"),
)


def named() -> Iterator[Case]:
    """Names that a file may have; a dot in front hides one."""
    content = encoded(picture(5, 7), "PNG")
    for name in NAMES:
        yield Case(f"names/{name}.png", content, shown(picture(5, 7)))
    yield Case("names/\udcfe empty.png", b"", Fails("empty"))
    yield Case("names/fol der/\U0001f4c1/deep.png", content, shown(picture(5, 7)))


def manifest_lines(inside: str, outside: Path) -> dict[str, Expected]:
    """Lines of a manifest beside the folder, each with what becomes of it; `outside` must never be opened."""
    good = shown(picture())
    absolute, climbing = str(outside), f"../{outside.name}"
    return {
        json.dumps({"path": inside, "tags": ["a"]}): good,
        json.dumps({"path": f"./{inside}"}): Fails("duplicate"),
        json.dumps({"path": climbing}): Fails("outside-root"),
        json.dumps({"path": f"formats/../../{outside.name}"}): Fails("outside-root"),
        json.dumps({"path": absolute}): Fails("outside-root"),
        json.dumps({"path": "formats/nowhere.png"}): Fails("not-found"),
        json.dumps({"path": "formats"}): Fails("not-a-file"),
        json.dumps({"path": ""}): Fails("no-path"),
        json.dumps({"path": "a\0b.png"}): Fails("no-path"),
        json.dumps({"path": 7}): Fails("no-path"),
        json.dumps({"tags": ["a"]}): Fails("no-path"),
        "[1, 2]": Fails("bad-json"),
        '{"path": ': Fails("bad-json"),
    }


def encoded(pixels: Pixels, kind: str, **how: object) -> bytes:
    return _saved(Image.fromarray(pixels), kind, **how)


def _saved(image: Image.Image, kind: str, **how: object) -> bytes:
    buffer = io.BytesIO()
    image.save(buffer, kind, **how)
    return buffer.getvalue()


def png_bytes(width: int, height: int, bits: int, colour_type: int, lines: bytes) -> bytes:
    """A PNG of any claim: lines are what its data hold, each with its filter byte in front."""
    head = struct.pack(">IIBBBBB", width, height, bits, colour_type, 0, 0, 0)
    data = zlib.compress(lines, 9)
    return b"\x89PNG\r\n\x1a\n" + _png_part(b"IHDR", head) + _png_part(b"IDAT", data) + _png_part(b"IEND", b"")


def _png_part(name: bytes, content: bytes) -> bytes:
    return struct.pack(">I", len(content)) + name + content + struct.pack(">I", zlib.crc32(name + content))


def _with_flipped_bit(png: bytes) -> bytes:
    """One bit of the compressed pixels is another."""
    at = png.index(b"IDAT") + 4 + 40
    return png[:at] + bytes([png[at] ^ 0x10]) + png[at + 1 :]


def _with_compressed_text(png: bytes) -> bytes:
    """A comment that is 64 MB when it is unpacked."""
    text = _png_part(b"zTXt", b"Comment\0\0" + zlib.compress(bytes(64 << 20), 9))
    return png[:33] + text + png[33:]


def _bmp_head(width: int, height: int) -> bytes:
    return b"BM" + struct.pack("<IHHIIiiHHIIiiII", 54, 0, 0, 54, 40, width, height, 1, 24, 0, 0, 0, 0, 0, 0)


def _gif_head(width: int, height: int) -> bytes:
    """A screen and a frame on it that has no data."""
    screen = b"GIF89a" + struct.pack("<HHBBB", width, height, 0, 0, 0)
    return screen + b"," + struct.pack("<HHHHB", 0, 0, width, height, 0) + b"\x02\x00;"


def _filled(height: int, width: int, *colour: int) -> Pixels:
    return np.full((height, width, 3), colour, np.uint8)


def _stripes(middle: tuple[int, int, int]) -> Pixels:
    return np.concatenate([_filled(3, 6, 200, 30, 30), _filled(3, 6, *middle), _filled(3, 6, 30, 30, 200)])


def _palette_with_hole(suffix: str) -> bytes:
    image = Image.fromarray(np.repeat(np.array([0, 1, 2], np.uint8), 3)[:, None].repeat(6, axis=1), "P")
    image.putpalette([200, 30, 30, 1, 2, 3, 30, 30, 200])
    return _saved(image, suffix.upper(), transparency=1)


if __name__ == "__main__":
    main(sys.argv[1])
