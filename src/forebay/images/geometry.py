"""The position of an image on a square canvas, and the normalization of its pixels.

    m = max(w, h, T)      nw = max(1, (2wT + m) // 2m)      left = (T − nw) // 2         that is w · min(1, T/w, T/h),
                          nh = max(1, (2hT + m) // 2m)      top  = (T − nh) // 2         rounded

    640 × 480 on 448      ┌──────────────┐
                          │              │ top 56         box = (0, 56, 448, 336)
                          ├──────────────┤
                          │   448 × 336  │
                          ├──────────────┤
                          │              │
                          └──────────────┘

It is computed in integers, since floats of different width round some sizes differently: numpy, a GPU and an exported
graph get the same box.

Points are continuous: pixel i covers [i, i + 1) and its center is i + ½. So the corners of an image, (0, 0) and
(w, h), map to the corners of its box.

    value = x · scale + shift        scale = 1 / (255 · std)        shift = −mean / std        (x/255 − mean) / std

Product and sum are each rounded to float32, so numpy, torch on any device and an exported graph agree to the last bit,
unless a compiler fuses the two; then they agree to an ulp of the larger one. 16-bit values are these, rounded to the
nearest.
"""

from collections.abc import Sequence
from dataclasses import dataclass, replace
from operator import index
from typing import Any, Literal

import numpy as np
from numpy.typing import ArrayLike, NDArray

from forebay.fields import checked_whole

Box = tuple[int, int, int, int]  # left, top, width, height, in pixels of the canvas
Points = NDArray[np.float64]


@dataclass(frozen=True, slots=True)
class Letterbox:
    """Maps an image (width, height, as displayed) to its canvas of `size` × `size`, and back."""

    image: tuple[int, int]
    size: int
    box: Box
    mirrored: bool = False

    @property
    def scale(self) -> tuple[float, float]:
        """Canvas pixels per image pixel, across and down; they differ by rounding only."""
        return self.box[2] / self.image[0], self.box[3] / self.image[1]

    def flipped(self) -> "Letterbox":
        """Return the letterbox after the whole canvas is flipped left–right."""
        left, top, width, height = self.box
        return replace(self, box=(self.size - left - width, top, width, height), mirrored=not self.mirrored)

    def to_canvas(self, points: ArrayLike) -> Points:
        """Map points `[..., 2]` (x, y) of the image to the canvas.

        >>> fit(640, 480, 448).to_canvas([[0, 0], [640, 480]]).tolist()
        [[0.0, 56.0], [448.0, 392.0]]
        """
        xy = _of_last(points, 2)
        x = self.image[0] - xy[..., 0] if self.mirrored else xy[..., 0]
        return np.stack(
            (
                x * self.box[2] / self.image[0] + self.box[0],
                xy[..., 1] * self.box[3] / self.image[1] + self.box[1],
            ),
            axis=-1,
        )

    def to_image(self, points: ArrayLike) -> Points:
        """Map points of the canvas to the image; points on the padding are outside of it."""
        xy = _of_last(points, 2)
        x = (xy[..., 0] - self.box[0]) * self.image[0] / self.box[2]
        y = (xy[..., 1] - self.box[1]) * self.image[1] / self.box[3]
        return np.stack((self.image[0] - x if self.mirrored else x, y), axis=-1)

    def boxes_to_canvas(self, boxes: ArrayLike) -> Points:
        """Map boxes `[..., 4]` (x0, y0, x1, y1) of the image to the canvas; after a flip, x0 is still the left side.

        >>> fit(640, 480, 448).flipped().boxes_to_canvas([0, 0, 320, 480]).tolist()
        [224.0, 56.0, 448.0, 392.0]
        """
        corners = _of_last(boxes, 4)
        return self._as_boxes(self.to_canvas(corners[..., :2]), self.to_canvas(corners[..., 2:]))

    def boxes_to_image(self, boxes: ArrayLike) -> Points:
        """Map boxes of the canvas to the image."""
        corners = _of_last(boxes, 4)
        return self._as_boxes(self.to_image(corners[..., :2]), self.to_image(corners[..., 2:]))

    def _as_boxes(self, first: Points, last: Points) -> Points:
        boxes = np.concatenate((first, last), axis=-1)
        return boxes[..., [2, 1, 0, 3]] if self.mirrored else boxes


def fit(width: int, height: int, size: int) -> Letterbox:
    """Return the letterbox of an image of this size, as displayed, on a canvas of `size` × `size`.

    >>> fit(640, 480, 448).box, fit(100, 50, 448).box, fit(1, 20000, 448).box
    ((0, 56, 448, 336), (174, 199, 100, 50), (223, 0, 1, 448))
    """
    width, height, size = index(width), index(height), index(size)  # numpy integers could overflow
    if min(width, height, size) < 1:
        _check(np.array([[width, height]]), size)
    m = max(width, height, size)
    fitted = [max(1, (2 * side * size + m) // (2 * m)) for side in (width, height)]
    return Letterbox((width, height), size, ((size - fitted[0]) // 2, (size - fitted[1]) // 2, fitted[0], fitted[1]))


def fit_many(sizes: ArrayLike, size: int) -> NDArray[np.int64]:
    """Return the boxes `[images, 4]` of many images `[images, 2]` (width, height).

    >>> fit_many([[640, 480], [100, 50]], 448).tolist()
    [[0, 56, 448, 336], [174, 199, 100, 50]]
    """
    pairs = np.asarray(sizes)
    _check(pairs, size)
    sides = pairs.astype(np.int64)
    m = np.maximum(sides.max(axis=1, initial=0, keepdims=True), size)
    fitted = np.maximum(1, (2 * sides * size + m) // (2 * m))
    return np.concatenate(((size - fitted) // 2, fitted), axis=1)


def _check(sizes: NDArray[Any], size: int) -> None:
    if sizes.ndim != 2 or sizes.shape[1] != 2:
        raise ValueError(f"sizes must have the shape [images, 2] (width, height) (got {sizes.shape})")
    if not np.issubdtype(sizes.dtype, np.integer) and sizes.size:
        raise TypeError(f"sizes must be integers (got {sizes.dtype}); round them first")
    checked_whole("size", size, 1)
    if (sizes < 1).any():
        bad = int((sizes < 1).any(axis=1).argmax())
        raise ValueError(f"image {bad} is {sizes[bad][0]} × {sizes[bad][1]} pixels; both sides must be at least 1")


def _of_last(values: ArrayLike, length: int) -> Points:
    array = np.asarray(values, np.float64)
    if not array.ndim or array.shape[-1] != length:
        names = "x, y" if length == 2 else "x0, y0, x1, y1"
        raise ValueError(f"pass an array of shape [..., {length}] ({names}) (got {array.shape})")
    return array


Normalize = Literal["imagenet"] | tuple[Sequence[float], Sequence[float]] | None
KNOWN = {"imagenet": ((0.485, 0.456, 0.406), (0.229, 0.224, 0.225))}


@dataclass(frozen=True, slots=True, eq=False)
class Scaling:
    """A scale and a shift for each of three channels, float32 `[3, 1, 1]`."""

    scale: NDArray[np.float32]
    shift: NDArray[np.float32]

    @classmethod
    def of(cls, normalize: Normalize) -> "Scaling":
        """Return the scaling of a name, of (mean, std) for values from 0 to 1, or of None: values from 0 to 1.

        >>> float(Scaling.of(((0.5, 0.5, 0.5), (0.5, 0.5, 0.5))).apply(np.full((3, 1, 1), 255, np.uint8))[0, 0, 0])
        1.0
        """
        mean, std = _mean_and_std(normalize)
        scale = np.array([1 / (255 * each) for each in std], np.float32)
        shift = np.array([-m / s for m, s in zip(mean, std, strict=True)], np.float32)
        return cls(scale[:, None, None], shift[:, None, None])

    def apply(self, pixels: NDArray[np.uint8], out: NDArray[np.float32] | None = None) -> NDArray[np.float32]:
        """Return the values of pixels `[..., 3, height, width]`."""
        values: NDArray[np.float32] = np.empty(pixels.shape, np.float32) if out is None else out
        np.copyto(values, pixels)
        np.multiply(values, self.scale, out=values)
        np.add(values, self.shift, out=values)
        return values


def _mean_and_std(normalize: Any) -> tuple[Sequence[float], Sequence[float]]:
    if normalize is None:
        return (0.0,) * 3, (1.0,) * 3
    if isinstance(normalize, str):
        if normalize not in KNOWN:
            raise ValueError(f"normalize must be one of {', '.join(KNOWN)}, or (mean, std) (got '{normalize}')")
        return KNOWN[normalize]
    if not (_has(normalize, 2) and all(_has(side, 3) for side in normalize)):
        raise ValueError(f"normalize must be (mean, std), three numbers each (got {normalize!r})")
    mean, std = (tuple(map(float, side)) for side in normalize)
    if not np.isfinite((mean, std)).all() or min(std) <= 0:
        raise ValueError(f"mean and std must be finite, and std must be above 0 (got {mean}, {std})")
    return mean, std


def _has(values: Any, count: int) -> bool:
    return isinstance(values, Sequence | np.ndarray) and len(values) == count
