"""Pixel masks, token masks, flipped boxes and latent weights from letterbox rectangles.

A letterboxed image stores one rectangle, the four integers `(left, top, width, height)` of its content. All masks are
derived from it, for a batch `[images, 4]` at once. In every mask True = PAD:

    rectangle (1, 2, 4, 2) in 6 × 6        pixel_mask        token_ignore_mask, patch 2
                                           1 1 1 1 1 1       1 1 1
       top 2 ┐                             1 1 1 1 1 1       . . .
             ┌─────┐                       1 . . . . 1       1 1 1
    left 1 ──┤     │ height 2              1 . . . . 1
             └─────┘                       1 1 1 1 1 1
             width 4                       1 1 1 1 1 1

The two axes of a rectangle are independent, so every mask is an outer product of two short vectors.
"""

import numpy as np
from numpy.typing import ArrayLike, NDArray

from forebay.masks.documents import Bools

Rectangles = NDArray[np.int64]  # (images, 4): left, top, width, height
Size = tuple[int, int]  # height, width
IGNORE_THRESHOLD = 0.9


def pixel_mask(rectangles: ArrayLike, size: Size) -> Bools:
    """Return masks `[images, height, width]`, True = PAD: every pixel outside the rectangle.

    rectangle (1, 0, 2, 1) in 2 × 4       1 . . 1
                                          1 1 1 1
    """
    left, top, width, height = _checked(rectangles, size).T[:, :, None]
    y, x = np.arange(size[0]), np.arange(size[1])
    rows = (y >= top) & (y < top + height)
    columns = (x >= left) & (x < left + width)
    content: Bools = rows[:, :, None] & columns[:, None, :]
    return ~content


def token_ignore_mask(rectangles: ArrayLike, size: Size, patch: int, threshold: float = IGNORE_THRESHOLD) -> Bools:
    """Return masks `[images, height/patch, width/patch]`, True = ignored: the padded share reaches `threshold`.

    pixels   1 1 1 . . .      patch 2      1 . .      half of the second patch is padding: kept
             1 1 1 . . .

    With patch 16, 230 padded pixels of 256 keep the token and 231 ignore it.
    """
    if not 0 < threshold <= 1:
        raise ValueError(f"threshold must be a share of padding above 0 and up to 1, such as 0.9 (got {threshold})")
    ignored: Bools = token_padding(rectangles, size, patch) >= threshold
    nothing_left = ignored.all(axis=(1, 2))
    if nothing_left.any():
        raise ValueError(
            f"all tokens of image {int(nothing_left.argmax())} are ignored, as its content is smaller than a patch; "
            "drop the image, or raise the threshold"
        )
    return ignored


def token_padding(rectangles: ArrayLike, size: Size, patch: int) -> NDArray[np.float64]:
    """Return the share of padding in each token, `[images, height/patch, width/patch]`.

    pixels   1 1 1 . . .      patch 2      1 .5 .
             1 1 1 . . .
    """
    if patch < 1 or size[0] % patch or size[1] % patch:
        raise ValueError(
            f"an image of {size[0]} × {size[1]} pixels does not divide into patches of {patch}; "
            "letterbox to a multiple of the patch"
        )
    content = _cell_content(_checked(rectangles, size), size, (size[0] // patch, size[1] // patch))
    padded: NDArray[np.float64] = (patch * patch - content) / (patch * patch)
    return padded


def latent_weights(rectangles: ArrayLike, size: Size, grid: Size) -> NDArray[np.float32]:
    """Return the share of content in each cell of a `grid`, `[images, *grid]`: loss weights for VAE latents.

    rectangle (0, 1, 4, 2) in 4 × 4, grid 2 × 2       .5 .5
                                                      .5 .5
    """
    cell = (size[0] / grid[0]) * (size[1] / grid[1])
    return (_cell_content(_checked(rectangles, size), size, grid) / cell).astype(np.float32)


def flip_rectangles(rectangles: ArrayLike, size: Size) -> Rectangles:
    """Return the content boxes after a left–right flip.

    . a b c . .     becomes     . . c b a .
    """
    flipped = _checked(rectangles, size).copy()
    flipped[:, 0] = size[1] - flipped[:, 0] - flipped[:, 2]
    return flipped


def _cell_content(rectangles: Rectangles, size: Size, grid: Size) -> NDArray[np.float64]:
    """Count the content pixels in each cell of the grid: overlap of heights × overlap of widths."""
    left, top, width, height = rectangles.T[:, :, None]
    rows = _overlap(top, top + height, size[0], grid[0])
    columns = _overlap(left, left + width, size[1], grid[1])
    return rows[:, :, None] * columns[:, None, :]


def _overlap(start: NDArray[np.int64], stop: NDArray[np.int64], length: int, cells: int) -> NDArray[np.float64]:
    edges = np.arange(cells + 1) * length / cells
    shared: NDArray[np.float64] = np.minimum(stop, edges[1:]) - np.maximum(start, edges[:-1])
    return np.maximum(shared, 0.0)


def _checked(rectangles: ArrayLike, size: Size) -> Rectangles:
    boxes = np.asarray(rectangles)
    if boxes.ndim != 2 or boxes.shape[1] != 4:
        raise ValueError(
            f"rectangles must have the shape [images, 4] (left, top, width, height) (got {boxes.shape}); "
            "wrap a single rectangle in one more list"
        )
    if not np.issubdtype(boxes.dtype, np.integer):
        raise TypeError(f"rectangles must be integers (got {boxes.dtype}); round them first")
    boxes = boxes.astype(np.int64)  # before the sum: uint8 would wrap around
    outside = (boxes < 0).any(axis=1) | (boxes[:, :2] + boxes[:, 2:] > (size[1], size[0])).any(axis=1)
    if outside.any():
        image = int(outside.argmax())
        raise ValueError(
            f"rectangle {image} is {tuple(boxes[image].tolist())} but the image is {size[1]} × {size[0]}; "
            "pass (left, top, width, height) in pixels of this size"
        )
    return boxes
