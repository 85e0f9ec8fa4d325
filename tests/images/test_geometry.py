"""Where images lie on a canvas: by definition, for all sizes, in integers."""

from fractions import Fraction

import numpy as np
import pytest
from hypothesis import example, given, settings
from hypothesis import strategies as st
from tests.helpers.hypothesis_profiles import scaled

from forebay.images import Letterbox, fit, fit_many
from forebay.masks.rectangle import flip_rectangles, pixel_mask

SIDE = st.integers(1, 2**31 - 1)
SIZE = st.integers(1, 1 << 14)
LETTERBOXES = st.builds(fit, st.integers(1, 30_000), st.integers(1, 30_000), st.integers(1, 2048))
SMALL_CANVASES = st.builds(fit, st.integers(1, 30_000), st.integers(1, 30_000), st.integers(1, 40))


def by_definition(width: int, height: int, size: int) -> tuple[int, int, int, int]:
    """Scaled by min(1, T/w, T/h), halves rounded up, at least one pixel, the smaller half of the rest in front."""
    scale = min(Fraction(1), Fraction(size, width), Fraction(size, height))
    fitted = [max(1, (side * scale + Fraction(1, 2)).__floor__()) for side in (width, height)]
    return (size - fitted[0]) // 2, (size - fitted[1]) // 2, fitted[0], fitted[1]


@given(SIDE, SIDE, SIZE)
@example(1, 20_000, 448)
@example(2**31 - 1, 1, 1)
@example(3, 2, 1)
@settings(max_examples=scaled(500))
def test_the_box_is_the_definition_in_exact_arithmetic(width, height, size):
    assert fit(width, height, size).box == by_definition(width, height, size)


@pytest.mark.parametrize("size", [1, 2, 5, 16])
def test_every_small_size_is_the_definition_one_by_one_and_all_at_once(size):
    sizes = [(width, height) for width in range(1, 41) for height in range(1, 41)]
    expected = [by_definition(width, height, size) for width, height in sizes]
    assert [fit(width, height, size).box for width, height in sizes] == expected
    assert fit_many(sizes, size).tolist() == [list(box) for box in expected]


@given(st.lists(st.tuples(SIDE, SIDE), max_size=20), SIZE, st.sampled_from([np.int32, np.int64, np.uint32]))
def test_many_at_once_are_each_by_itself(sizes, size, dtype):
    found = fit_many(np.array(sizes, dtype).reshape(-1, 2), size)
    assert found.dtype == np.int64
    assert [tuple(box) for box in found.tolist()] == [fit(*sides, size).box for sides in sizes]


@given(SIDE, SIDE, SIZE)
def test_the_box_lies_on_the_canvas_touches_it_when_scaled_and_never_enlarges(width, height, size):
    left, top, box_width, box_height = fit(width, height, size).box
    assert min(left, top) >= 0
    assert max(left + box_width, top + box_height) <= size
    assert box_width <= width
    assert box_height <= height
    assert abs(size - box_width - 2 * left) <= 1
    if max(width, height) >= size:
        assert max(box_width, box_height) == size
    else:
        assert (box_width, box_height) == (width, height)


@given(LETTERBOXES, st.booleans(), st.lists(st.tuples(st.floats(-1e5, 1e5), st.floats(-1e5, 1e5)), max_size=5))
def test_points_go_to_the_canvas_and_back(letterbox, flip, points):
    way = letterbox.flipped() if flip else letterbox
    given_points = np.array(points).reshape(-1, 2)
    np.testing.assert_allclose(way.to_image(way.to_canvas(given_points)), given_points, rtol=1e-9, atol=1e-6)


@given(LETTERBOXES)
def test_the_corners_of_the_image_are_the_corners_of_its_box(letterbox):
    left, top, width, height = letterbox.box
    corners = letterbox.to_canvas([[0, 0], letterbox.image])
    np.testing.assert_allclose(corners, [[left, top], [left + width, top + height]], rtol=1e-12)
    np.testing.assert_allclose(letterbox.scale, [width / letterbox.image[0], height / letterbox.image[1]])


@given(SMALL_CANVASES)
def test_a_pixel_is_content_where_its_center_lies_in_the_image(letterbox):
    size = letterbox.size
    centers = np.stack(np.meshgrid(np.arange(size) + 0.5, np.arange(size) + 0.5), axis=-1)
    for way in (letterbox, letterbox.flipped()):
        inside = way.to_image(centers)
        is_content = ((inside > 0) & (inside < np.array(way.image))).all(axis=-1)
        assert (is_content == ~pixel_mask([way.box], (size, size))[0]).all()


@given(LETTERBOXES, st.lists(st.tuples(*[st.floats(0, 3e4)] * 4), min_size=1, max_size=4))
def test_boxes_are_flipped_with_the_canvas_and_come_back(letterbox, boxes):
    ordered = np.array([(min(a, c), min(b, d), max(a, c), max(b, d)) for a, b, c, d in boxes])
    flipped = letterbox.flipped()
    x0, y0, x1, y1 = np.moveaxis(letterbox.boxes_to_canvas(ordered), -1, 0)
    mirrored = np.stack((letterbox.size - x1, y0, letterbox.size - x0, y1), axis=-1)
    np.testing.assert_allclose(flipped.boxes_to_canvas(ordered), mirrored, rtol=1e-9, atol=1e-6)
    for way in (letterbox, flipped):
        np.testing.assert_allclose(way.boxes_to_image(way.boxes_to_canvas(ordered)), ordered, rtol=1e-9, atol=1e-6)


@given(SMALL_CANVASES)
def test_the_mask_of_the_flip_is_the_flip_of_the_mask(letterbox):
    size = (letterbox.size, letterbox.size)
    mask = pixel_mask([letterbox.box], size)
    assert (pixel_mask([letterbox.flipped().box], size) == mask[:, :, ::-1]).all()
    assert tuple(flip_rectangles([letterbox.box], size)[0]) == letterbox.flipped().box
    assert letterbox.flipped().flipped() == letterbox


def test_points_keep_their_shape():
    letterbox = fit(640, 480, 448)
    assert letterbox.to_canvas([320, 240]).tolist() == [224.0, 224.0]
    assert letterbox.to_canvas(np.zeros((2, 3, 2))).shape == (2, 3, 2)
    assert letterbox.boxes_to_image(np.zeros((5, 1, 4))).shape == (5, 1, 4)
    assert letterbox.to_canvas(np.empty((0, 2))).shape == (0, 2)
    assert isinstance(letterbox, Letterbox)


@pytest.mark.parametrize(
    ("call", "problem"),
    [
        (lambda: fit(0, 5, 448), "0 × 5"),
        (lambda: fit(5, 5, 0), r"size must be a whole number of at least 1 \(got 0\)"),
        (lambda: fit_many([[5, 5], [5, -1]], 448), "image 1 is 5 × -1"),
        (lambda: fit_many([5, 5], 448), r"\[images, 2\]"),
        (lambda: fit(5, 5, 8).to_canvas([1, 2, 3]), r"\[\.\.\., 2\]"),
        (lambda: fit(5, 5, 8).boxes_to_image([1, 2]), "x0, y0, x1, y1"),
    ],
)
def test_what_is_no_size_or_point_is_refused(call, problem):
    with pytest.raises(ValueError, match=problem):
        call()


def test_numbers_of_numpy_do_not_overflow():
    assert fit(np.int32(200_000), np.int32(100_000), np.int32(16_384)) == fit(200_000, 100_000, 16_384)


def test_sizes_that_are_not_whole_are_refused():
    with pytest.raises(TypeError, match="float"):
        fit(640.5, 480, 448)
    with pytest.raises(TypeError, match="sizes must be integers"):
        fit_many([[5.5, 5.0]], 448)
