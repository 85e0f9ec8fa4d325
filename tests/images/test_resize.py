"""The compiled resize against Pillow's, bit for bit."""

import io
from typing import get_args

import numpy as np
import pytest
from PIL import Image

from forebay.images import ImageRecipe, resize
from forebay.images.resize import Resample, compiled_planes, pillow_planes, resized_planes

compiled = pytest.importorskip("forebay.images._resize", reason="forebay was installed without a compiler")
SMOOTH: list[Resample] = ["bilinear", "bicubic", "lanczos"]


def _noise(rng: np.random.Generator, width: int, height: int) -> Image.Image:
    """Noise, or only the two ends of the range, where a filter with negative weights leaves it."""
    pixels = rng.integers(0, 256, (height, width, 3), np.uint8)
    return Image.fromarray(np.where(pixels < 128, 0, 255).astype(np.uint8) if rng.integers(2) else pixels)


def _sizes(rng: np.random.Generator) -> tuple[tuple[int, int], tuple[int, int]]:
    most = int(rng.choice([8, 40, 300]))
    width, height = (int(side) for side in rng.integers(1, most, 2, endpoint=True))
    smaller = [int(rng.integers(1, side, endpoint=True)) for side in (width, height)]
    kept = int(rng.integers(0, 6))  # of some, one side or both keep their length
    return (width, height), (width if kept in (0, 2) else smaller[0], height if kept in (1, 2) else smaller[1])


@pytest.mark.parametrize("resample", SMOOTH)
def test_pixels_of_any_size_are_those_of_pillow(resample: Resample) -> None:
    rng = np.random.default_rng(SMOOTH.index(resample))
    for _ in range(150):
        size, new_size = _sizes(rng)
        image = _noise(rng, *size)
        expected = pillow_planes(image, new_size, resample)
        for fast in (True, False):
            found = compiled_planes(image, new_size, resample, fast)
            assert found is not None
            np.testing.assert_array_equal(found, expected, err_msg=f"{size} to {new_size}, fast={fast}")


@pytest.mark.parametrize("resample", get_args(Resample))
@pytest.mark.parametrize("new_size", [(20, 9), (90, 50), (31, 80)])
def test_what_is_not_compiled_is_resized_by_pillow(resample: Resample, new_size: tuple[int, int]) -> None:
    image = _noise(np.random.default_rng(5), 31, 50)
    np.testing.assert_array_equal(
        resized_planes(image, new_size, resample), pillow_planes(image, new_size, resample), strict=True
    )


def test_an_image_in_several_blocks_of_memory_is_resized_by_pillow() -> None:
    image = Image.new("RGB", (2200, 2200), (9, 8, 7))
    assert compiled_planes(image, (4, 4), "bilinear") is None
    assert np.unique(resized_planes(image, (4, 4), "bilinear")).tolist() == [7, 8, 9]


def test_a_cache_has_the_same_bytes_with_pillow_alone(monkeypatch: pytest.MonkeyPatch) -> None:
    file, recipe = io.BytesIO(), ImageRecipe(size=64, tags=())
    _noise(np.random.default_rng(3), 320, 150).save(file, "JPEG")
    content = file.getvalue()
    ours, _ = recipe.letterboxed(content)
    monkeypatch.setattr(resize, "compiled", None)
    alone, _ = recipe.letterboxed(content)
    np.testing.assert_array_equal(ours, alone, strict=True)


def test_another_way_of_computing_turns_it_off(monkeypatch: pytest.MonkeyPatch) -> None:
    """A Pillow that resizes in another order, as every version before 13 does for tall images."""
    assert resize._is_equal.__wrapped__("bilinear")
    monkeypatch.setattr(resize, "_FROM_THE_TALL_SIDE", not resize._FROM_THE_TALL_SIDE)
    assert not resize._is_equal.__wrapped__("bilinear")


def test_sizes_that_do_not_fit_are_refused() -> None:
    image = Image.new("RGB", (8, 6))
    _, lent = image.__arrow_c_array__()
    out = np.empty((3, 3, 4), np.uint8)
    for size, new_size, kernel in (((8, 5), (4, 3), 0), ((8, 6), (4, 4), 0), ((8, 6), (9, 3), 0), ((8, 6), (4, 3), 3)):
        with pytest.raises(ValueError, match=r"must|only"):
            compiled.resize_planes(out, lent, size, new_size, kernel, False, True)
    with pytest.raises(ValueError, match="incorrect name"):
        compiled.resize_planes(out, Image.new("RGB", (8, 6)).__arrow_c_array__()[0], (8, 6), (4, 3), 0, False, True)
