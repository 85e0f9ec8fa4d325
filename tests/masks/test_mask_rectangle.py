"""Masks of letterboxed images, against their definition pixel by pixel."""

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from forebay import masks

ANY_SIDE = st.integers(1, 40)
THRESHOLDS = st.sampled_from([0.25, 0.5, 0.75, 1.0]) | st.floats(0.1, 1.0)  # the first are met exactly


@st.composite
def letterboxes(draw: st.DrawFn, sides: st.SearchStrategy[int] = ANY_SIDE):
    """(rectangles, size): one to three rectangles within one image size."""
    height, width = draw(sides), draw(sides)
    boxes = []
    for _ in range(draw(st.integers(1, 3))):
        box_width, box_height = draw(st.integers(1, width)), draw(st.integers(1, height))
        left, top = draw(st.integers(0, width - box_width)), draw(st.integers(0, height - box_height))
        boxes.append((left, top, box_width, box_height))
    return boxes, (height, width)


def pixels_by_hand(boxes, size) -> np.ndarray:
    mask = np.ones((len(boxes), *size), bool)
    for image, (left, top, width, height) in enumerate(boxes):
        mask[image, top : top + height, left : left + width] = False
    return mask


@given(letterboxes())
def test_a_pixel_outside_the_rectangle_is_padding(case):
    assert (masks.pixel_mask(*case) == pixels_by_hand(*case)).all()


@given(letterboxes(sides=st.sampled_from([4, 8, 12, 24])), st.sampled_from([1, 2, 4]), THRESHOLDS)
def test_a_token_is_ignored_when_its_padded_share_reaches_the_threshold(case, patch, threshold):
    boxes, (height, width) = case
    shares = pixels_by_hand(*case).reshape(-1, height // patch, patch, width // patch, patch).mean(axis=(2, 4))
    expected = shares >= threshold
    if expected.all(axis=(1, 2)).any():
        with pytest.raises(ValueError, match="all tokens of image"):
            masks.token_ignore_mask(boxes, (height, width), patch, threshold)
    else:
        assert (masks.token_ignore_mask(boxes, (height, width), patch, threshold) == expected).all()


def test_with_patch_16_two_hundred_thirty_padded_pixels_keep_and_one_more_ignores():
    # The content of the second patch is 13 × 2 = 26 or 5 × 5 = 25 pixels: 230 or 231 of 256 are padded.
    size = (16, 32)
    assert 256 - 13 * 2 == 230
    assert 256 - 5 * 5 == 231
    kept = masks.token_ignore_mask([[0, 0, 16 + 2, 13]], size, 16)
    ignored = masks.token_ignore_mask([[0, 0, 16 + 5, 5]], size, 16)
    assert kept.tolist() == [[[False, False]]]
    assert ignored.tolist() == [[[False, True]]]


@given(letterboxes())
def test_a_flipped_box_is_the_box_of_the_flipped_mask(case):
    boxes, size = case
    assert (masks.pixel_mask(masks.flip_rectangles(boxes, size), size) == pixels_by_hand(*case)[:, :, ::-1]).all()
    assert (masks.flip_rectangles(masks.flip_rectangles(boxes, size), size) == boxes).all()


@given(letterboxes(), st.integers(1, 9), st.integers(1, 9))
def test_latent_weights_are_the_share_of_content(case, rows, columns):
    boxes, (height, width) = case
    # Each pixel cut into rows × columns pieces makes every cell a whole number of pieces.
    fine = np.kron(~pixels_by_hand(*case), np.ones((1, rows, columns)))
    expected = fine.reshape(-1, rows, height, columns, width).mean(axis=(2, 4))
    weights = masks.latent_weights(boxes, (height, width), (rows, columns))
    np.testing.assert_allclose(weights, expected, atol=1e-6)
    assert weights.dtype == np.float32


@pytest.mark.parametrize(
    ("boxes", "sentence"),
    [
        ([0, 0, 4, 4], r"must have the shape \[images, 4\] .*\(got \(4,\)\)"),
        ([[0, 0, 4, 4], [6, 0, 4, 4]], r"rectangle 1 is \(6, 0, 4, 4\) but the image is 8 × 8"),
        ([[-1, 0, 4, 4]], r"rectangle 0 is \(-1, 0, 4, 4\)"),
        (np.array([[200, 0, 100, 8]], np.uint8), r"rectangle 0 is \(200, 0, 100, 8\)"),  # which wraps around in uint8
        ([[0.0, 0.0, 1.5, 1.0]], r"rectangles must be integers \(got float64\)"),
    ],
)
def test_a_rectangle_outside_its_image_is_refused(boxes, sentence):
    with pytest.raises((TypeError, ValueError), match=sentence):
        masks.pixel_mask(boxes, (8, 8))


def test_an_image_that_does_not_divide_into_patches_is_refused():
    with pytest.raises(ValueError, match="20 × 16 pixels does not divide into patches of 16"):
        masks.token_ignore_mask([[0, 0, 16, 16]], (20, 16), 16)


@pytest.mark.parametrize("threshold", [0, -0.1, 1.1, 90, float("nan")])
def test_a_threshold_is_a_share(threshold):
    with pytest.raises(ValueError, match="threshold must be a share of padding above 0 and up to 1"):
        masks.token_ignore_mask([[0, 0, 16, 16]], (32, 32), 16, threshold)
