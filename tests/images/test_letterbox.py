"""What is kept of an image, against Pillow itself."""

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from PIL import Image
from tests.helpers.hypothesis_profiles import scaled

from forebay.images import fit, letterbox, paste
from forebay.masks.rectangle import pixel_mask

RESAMPLES = ("bilinear", "bicubic", "lanczos", "box", "nearest")


def noise(width: int, height: int, seed: int = 0) -> Image.Image:
    return Image.fromarray(np.random.default_rng(seed).integers(0, 256, (height, width, 3), np.uint8))


@given(st.integers(1, 90), st.integers(1, 90), st.integers(1, 48), st.sampled_from(RESAMPLES), st.integers(0, 99))
@settings(max_examples=scaled(150))
def test_content_is_pillows_resize_in_every_pixel(width, height, size, resample, seed):
    image = noise(width, height, seed)
    content, fitted = letterbox(image, size, resample)
    assert fitted == fit(width, height, size)
    expected = image.resize(fitted.box[2:], Image.Resampling[resample.upper()])
    assert content.dtype == np.uint8
    assert content.flags.c_contiguous
    assert np.array_equal(content.transpose(1, 2, 0), np.asarray(expected))


@pytest.mark.parametrize("size", [(1, 1), (1, 20_000), (20_000, 1), (3000, 2000)])
def test_extreme_sizes_keep_at_least_a_pixel(size):
    image = Image.new("RGB", size, (10, 200, 30))
    content, fitted = letterbox(image, 448)
    assert content.shape == (3, fitted.box[3], fitted.box[2])
    assert (content == np.array([10, 200, 30])[:, None, None]).all()


@given(st.integers(1, 60), st.integers(1, 60), st.integers(1, 40))
def test_the_canvas_is_content_in_the_box_and_the_pad_color_around_it(width, height, size):
    content, fitted = letterbox(noise(width, height), size)
    canvas = paste(content, fitted, (1, 2, 3))
    padding = pixel_mask([fitted.box], (size, size))[0]
    assert (canvas[:, padding] == np.array([[1], [2], [3]])).all()
    assert np.array_equal(canvas[:, ~padding], content.reshape(3, -1))


def test_content_of_the_color_of_padding_is_not_padding():
    gray = Image.new("RGB", (30, 20), (114, 114, 114))
    content, fitted = letterbox(gray, 16)
    canvas = paste(content, fitted, (114, 114, 114))
    assert (canvas == 114).all()
    assert np.count_nonzero(~pixel_mask([fitted.box], (16, 16))) == content[0].size == 16 * 11
