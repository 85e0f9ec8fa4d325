"""Bytes of image files become the picture that is meant, or a reason. The folder of bad images has many more."""

import io
import os
import subprocess
import sys
import warnings

import numpy as np
import pytest
from hypothesis import example, given, settings
from hypothesis import strategies as st
from PIL import Image, ImageFile, JpegImagePlugin
from tests.helpers import bad_images
from tests.helpers.hypothesis_profiles import scaled

import forebay as fb
from forebay.errors import ForebayError
from forebay.images.decode import FORMATS, Policy, decode, webp_size
from forebay.images.tags import ImageUnreadable

PICTURE = bad_images.picture(24, 40)


def saved(image: Image.Image, kind: str, **how: object) -> bytes:
    buffer = io.BytesIO()
    image.save(buffer, kind, **how)
    return buffer.getvalue()


def pixels(content: bytes, policy: Policy | None = None) -> np.ndarray:
    return np.asarray(decode(content, policy or Policy()).image)


def reason(content: bytes, policy: Policy | None = None) -> str:
    with pytest.raises(ImageUnreadable) as caught:
        decode(content, policy or Policy())
    assert caught.value.detail
    return caught.value.reason


def oriented(orientation: int, kind: str) -> bytes:
    exif = Image.Exif()
    exif[0x0112] = orientation
    return saved(Image.fromarray(PICTURE), kind, exif=exif, **({"lossless": True} if kind == "WEBP" else {}))


@pytest.mark.parametrize("kind", ["PNG", "WEBP", "TIFF"])
@pytest.mark.parametrize("orientation", range(1, 9))
def test_exif_turns_a_picture_or_is_ignored(orientation, kind):
    content = oriented(orientation, kind)
    laid = bad_images.LAID_DOWN[{6: 8, 8: 6}.get(orientation, orientation)](PICTURE)
    turned = decode(content, Policy())
    assert np.array_equal(np.asarray(turned.image), laid)
    assert turned.size == laid.shape[1::-1]
    assert np.array_equal(pixels(content, Policy(exif="ignore")), PICTURE)


@pytest.mark.parametrize("orientation", range(1, 9))
def test_a_draft_is_smaller_says_the_full_size_and_never_falls_below_the_box(orientation):
    exif = Image.Exif()
    exif[0x0112] = orientation
    wide = Image.fromarray(bad_images.picture(802, 1201))
    content = saved(wide, "JPEG", quality=90, exif=exif)
    exact = decode(content, Policy())
    drafted = decode(content, Policy(draft_size=300))
    assert drafted.size == exact.size
    assert drafted.image.size == tuple(-(-side // 4) for side in exact.size)
    assert decode(content, Policy(draft_size=301)).image.size == tuple(-(-side // 2) for side in exact.size)
    assert decode(content, Policy(draft_size=2000)).image.size == exact.size
    small = [
        np.asarray(image.resize((60, 60), Image.Resampling.BOX), np.int16) for image in (drafted.image, exact.image)
    ]
    assert np.abs(small[0] - small[1]).max() < 12


def test_drafts_are_for_jpeg_alone():
    content = saved(Image.fromarray(PICTURE), "PNG")
    assert np.array_equal(pixels(content, Policy(draft_size=4)), PICTURE)


def test_alpha_is_composited_dropped_or_refused():
    clear = Image.fromarray(np.dstack([PICTURE, np.full(PICTURE.shape[:2], 255, np.uint8)]))
    solid = saved(clear, "PNG")
    clear.putpixel((3, 2), (10, 20, 30, 0))
    hole = saved(clear, "PNG")
    composited = pixels(hole, Policy(pad_color=(1, 2, 3)))
    assert composited[2, 3].tolist() == [1, 2, 3]
    assert pixels(hole, Policy(alpha="drop"))[2, 3].tolist() == [10, 20, 30]
    assert reason(hole, Policy(alpha="fail")) == "transparent"
    for alpha in ("composite", "drop", "fail"):
        assert np.array_equal(pixels(solid, Policy(alpha=alpha)), PICTURE)


def test_deep_gray_with_a_transparent_shade_shows_the_pad_color_there():
    lines = b"".join(b"\0" + row.astype(">u2").tobytes() for row in np.array([[0x1234, 0x12FF], [0xFF00, 0x1234]]))
    plain = bad_images.png_bytes(2, 2, 16, 0, lines)
    at = plain.index(b"IDAT") - 4
    clear = plain[:at] + bad_images._png_part(b"tRNS", b"\x12\x34") + plain[at:]
    assert pixels(plain)[..., 0].tolist() == [[0x12, 0x12], [0xFF, 0x12]]
    assert pixels(clear, Policy(pad_color=(7, 8, 9)))[..., 1].tolist() == [[8, 0x12], [0xFF, 8]]


@pytest.mark.parametrize("mode", ["F", "I", "LAB"])
def test_pixels_without_an_agreed_range_are_a_failure(mode):
    image = Image.new(mode, (4, 4))
    assert reason(saved(image, "TIFF")) == "unsupported"


@pytest.mark.parametrize("kind", FORMATS)
def test_the_bound_on_pixels_is_the_policys(kind):
    content = saved(Image.fromarray(PICTURE), kind)
    alone = pixels(content)
    assert reason(content, Policy(max_pixels=PICTURE.size // 3 - 1)) == "too-large"
    assert np.array_equal(pixels(content, Policy(max_pixels=PICTURE.size // 3)), alone)


@pytest.mark.filterwarnings("ignore")
@pytest.mark.parametrize("kind", FORMATS)
def test_a_file_cut_anywhere_or_with_bytes_gone_wrong_is_a_picture_or_a_reason(kind):
    content = saved(Image.fromarray(PICTURE), kind)

    @given(st.integers(0, len(content)), st.binary(max_size=12), st.integers(0, 20))
    @example(0, b"", 0)
    @example(len(content) // 2, b"", 0)
    @settings(max_examples=scaled(60))
    def damaged(at: int, noise: bytes, rest: int) -> None:
        spoiled = content[:at] + noise + (content[at + len(noise) :] if rest else b"")
        check_outcome(spoiled)

    damaged()


@pytest.mark.filterwarnings("ignore")
@given(st.binary(max_size=200))
def test_no_bytes_at_all_are_too_strange(content):
    for start in (b"", b"\xff\xd8\xff", b"\x89PNG\r\n\x1a\n", b"GIF89a", b"BM", b"II*\0", b"RIFF\0\0\0\0WEBP"):
        check_outcome(start + content)


def check_outcome(content: bytes) -> None:
    """Bytes are a picture of the size they say, or have a reason."""
    error = None
    try:
        decoded = decode(content, Policy(max_pixels=10_000))
    except ImageUnreadable as unreadable:
        error = unreadable
    if error is None:
        assert decoded.image.mode == "RGB"
        assert decoded.image.size == decoded.size
    else:
        assert error.reason in ("empty", "not-an-image", "truncated", "corrupt", "too-large", "unsupported")
        assert error.detail


def odd_exif() -> bytes:
    """EXIF whose entries point behind its end: Pillow warns of each."""
    entry = (0x0131).to_bytes(2, "little") + (2).to_bytes(2, "little") + (999).to_bytes(4, "little") + b"\xff\0\0\0"
    exif = b"Exif\0\0II*\0\x08\0\0\0" + (1).to_bytes(2, "little") + entry + bytes(4)
    return saved(Image.fromarray(PICTURE), "JPEG", quality=95, exif=exif)


def test_decoding_changes_no_setting_of_the_process(monkeypatch):
    settings = []

    def opened(*arguments):
        settings.append((list(warnings.filters), Image.MAX_IMAGE_PIXELS, ImageFile.LOAD_TRUNCATED_IMAGES))
        return JpegImagePlugin.jpeg_factory(*arguments)

    before = list(warnings.filters), Image.MAX_IMAGE_PIXELS, ImageFile.LOAD_TRUNCATED_IMAGES
    monkeypatch.setitem(Image.OPEN, "JPEG", (opened, Image.OPEN["JPEG"][1]))
    decode(saved(Image.fromarray(PICTURE), "JPEG", quality=95), Policy())
    assert settings == [before]


def test_pillow_warnings_reach_the_program_and_leave_the_image_readable():
    with pytest.warns(UserWarning, match="Skipping tag 305"):
        assert decode(odd_exif(), Policy()).size == (40, 24)


def test_a_filter_that_makes_pillow_warnings_errors_is_reported_with_the_exemption():
    with pytest.raises(ForebayError, match="warning filter") as raised:  # pytest turns warnings into errors
        decode(odd_exif(), Policy())
    assert not isinstance(raised.value, ImageUnreadable)
    assert "PIL" in raised.value.hint


def test_a_program_that_accepts_truncated_images_is_an_error(monkeypatch):
    monkeypatch.setattr(ImageFile, "LOAD_TRUNCATED_IMAGES", True)
    with pytest.raises(ForebayError, match="LOAD_TRUNCATED_IMAGES is True") as raised:
        decode(saved(Image.fromarray(PICTURE), "PNG"), Policy())
    assert not isinstance(raised.value, ImageUnreadable)


def test_a_pillow_pixel_limit_below_the_recipe_is_an_error(monkeypatch):
    monkeypatch.setattr(Image, "MAX_IMAGE_PIXELS", 1000)
    with pytest.raises(ForebayError, match="MAX_IMAGE_PIXELS is 1,000 in this process; max_pixels is 2,001"):
        decode(saved(Image.fromarray(PICTURE), "PNG"), Policy(max_pixels=2001))
    assert decode(saved(Image.fromarray(PICTURE), "PNG"), Policy(max_pixels=2000)).size == (40, 24)


@pytest.mark.filterwarnings("ignore")  # of this process; workers have the filter of the environment
def test_workers_decode_quietly_under_any_warning_filter(tmp_path, monkeypatch, capfd):
    (tmp_path / "images").mkdir()
    (tmp_path / "images" / "odd.jpg").write_bytes(odd_exif())
    monkeypatch.setenv("PYTHONWARNINGS", "error")
    report = fb.build(tmp_path / "cache", fb.sources.images(tmp_path / "images"), fb.ImageRecipe(size=64), workers=1)
    assert report.rows == 1
    assert capfd.readouterr().err == ""


MODES = ["RGBA", "LA", "P", "L", "1", "CMYK", "RGB", "I;16"]


@pytest.mark.parametrize("mode", MODES)
@pytest.mark.parametrize("turn", range(1, 9))
def test_a_large_picture_has_the_pixels_of_a_small_one(mode, turn, monkeypatch):
    """Band by band, strip by strip, then resized: the same to the last bit."""
    noise = np.random.default_rng(turn).integers(0, 256, (61, 43, 4), np.uint8)
    picture = Image.fromarray(noise, "RGBA")
    picture = (
        picture
        if mode == "RGBA"
        else picture.convert("RGB" if mode in ("CMYK", "P") else "L" if mode == "I;16" else mode)
    )
    exif = Image.Exif()
    exif[0x0112] = turn
    stream = io.BytesIO()
    options = {"transparency": 7} if mode == "P" else {}
    kind = "TIFF" if mode in ("CMYK", "I;16") else "PNG"
    picture.convert(mode).save(stream, kind, exif=exif, **options)
    for resample in ("bilinear", "lanczos", "nearest", "box"):
        recipe = fb.ImageRecipe(size=32, resample=resample, pad_color=(1, 200, 90))
        with monkeypatch.context() as patched:
            small = recipe.letterboxed(stream.getvalue())
            patched.setattr("forebay.images.decode.LARGE", 0)
            patched.setattr("forebay.images.color._STRIP_PIXELS", 43 * 7)
            large = recipe.letterboxed(stream.getvalue())
        assert large[1] == small[1]
        np.testing.assert_array_equal(large[0], small[0])


def test_alpha_of_a_large_picture_can_be_a_failure(monkeypatch):
    monkeypatch.setattr("forebay.images.decode.LARGE", 0)
    stream = io.BytesIO()
    Image.new("RGBA", (20, 20), (1, 2, 3, 4)).save(stream, "PNG")
    with pytest.raises(ImageUnreadable, match="transparent"):
        fb.ImageRecipe(size=8, alpha="fail").letterboxed(stream.getvalue())


@pytest.mark.slow
@pytest.mark.skipif(not os.path.exists("/proc/self/status"), reason="asks Linux how much memory was in use")
def test_a_transparent_picture_takes_seven_bytes_a_pixel_while_it_is_decoded():
    stream = io.BytesIO()
    Image.new("RGBA", (5000, 5000), (1, 2, 3, 4)).save(stream, "PNG", compress_level=1)
    code = (
        "import sys; import forebay as fb; fb.ImageRecipe(size=8).letterboxed(sys.stdin.buffer.read()); "
        "print(*(line.split()[1] for line in open('/proc/self/status') if line.startswith('VmHWM')))"
    )
    ran = subprocess.run([sys.executable, "-c", code], input=stream.getvalue(), capture_output=True, check=True)
    assert int(ran.stdout) * 1024 < 7 * 5000 * 5000 + 80_000_000


@pytest.mark.parametrize(("kind", "copies"), [("WEBP", 3), ("AVIF", 2)])
def test_formats_whose_decoders_keep_several_pictures_count_several_times(kind, copies, monkeypatch):
    monkeypatch.setattr("forebay.images.decode.LARGE", 1000)
    stream = io.BytesIO()
    Image.new("RGB", (40, 30)).save(stream, kind)
    fb.ImageRecipe(max_pixels=copies * 1200).letterboxed(stream.getvalue())
    with pytest.raises(
        ImageUnreadable, match=rf"{kind} count {copies} times.*more than max_pixels {copies * 1200 - 1:,}"
    ):
        fb.ImageRecipe(max_pixels=copies * 1200 - 1).letterboxed(stream.getvalue())


@pytest.mark.parametrize("options", [{"lossless": True}, {"quality": 50}, {"save_all": True}])
def test_the_size_of_webp_is_read_before_its_decoder_takes_memory(options, monkeypatch):
    stream = io.BytesIO()
    more = [Image.new("RGBA", (40, 30), (9, 9, 9, 9))] if "save_all" in options else []
    Image.new("RGBA" if more else "RGB", (40, 30)).save(stream, "WEBP", append_images=more, **options)
    assert webp_size(stream.getvalue()) == (40, 30)
    assert webp_size(b"RIFF") == (1, 1)
    monkeypatch.setitem(Image.OPEN, "WEBP", (lambda *_: pytest.fail("opened"), lambda _: True))
    with pytest.raises(ImageUnreadable, match="too-large"):
        fb.ImageRecipe(max_pixels=1199).letterboxed(stream.getvalue())


def test_compressed_tiff_in_one_large_strip_counts_twice(monkeypatch):
    monkeypatch.setattr("forebay.images.decode.LARGE", 1000)
    picture, recipe = Image.new("RGB", (40, 30)), fb.ImageRecipe(max_pixels=2 * 1200 - 1)
    for options in ({"compression": "tiff_adobe_deflate", "tiffinfo": {278: 10}}, {"compression": "raw"}):
        recipe.letterboxed(saved(picture, "TIFF", **options))
    with pytest.raises(ImageUnreadable, match="TIFF strips count 2 times"):
        recipe.letterboxed(saved(picture, "TIFF", compression="tiff_adobe_deflate", tiffinfo={278: 30}))
