"""Pixel and token masks of a batch of images: of boxes, or of canvases that transforms have changed."""

from collections.abc import Callable

import numpy as np
from numpy.typing import NDArray

from forebay.errors import AllTokensIgnored
from forebay.masks.documents import Bools
from forebay.masks.rectangle import IGNORE_THRESHOLD, Size, token_ignore_mask, token_padding
from forebay.torch.image_paint import Box

_BOXES = 256  # whose tokens are counted at a time

Shares = NDArray[np.float64]


def fill_pixel_masks(out: Bools, boxes: list[Box]) -> None:
    """True = PAD, `[images, height, width]`."""
    for mask, (left, top, width, height) in zip(out, boxes, strict=True):
        mask[:top] = mask[top + height :] = True
        lines = mask[top : top + height]
        lines[:] = False
        lines[:, :left] = lines[:, left + width :] = True


class TokenMasks:
    """Tokens are patches of `patch` × `patch` pixels, ignored where the padded share reaches `threshold`."""

    def __init__(self, size: int, patch: int, threshold: float = IGNORE_THRESHOLD) -> None:
        self.patch, self.threshold = patch, threshold
        token_ignore_mask(np.empty((0, 4), np.int64), (size, size), patch, threshold)  # refuses what is no patch

    def of_boxes(self, boxes: NDArray[np.int32], size: Size, name: Callable[[int], str]) -> Bools:
        """True = ignored, `[images, height/patch, width/patch]`; `name` says what an image is called in an error."""
        return self._ignored(token_padding(boxes, size, self.patch), boxes, name)

    def all_ignored(self, boxes: NDArray[np.int32], size: Size) -> Bools:
        """Of which images no token would be kept, `[images]`; equal boxes are looked at once."""
        some, member = np.unique(boxes, axis=0, return_inverse=True)
        ignored = [
            (token_padding(some[at : at + _BOXES], size, self.patch) >= self.threshold).all(axis=(1, 2))
            for at in range(0, len(some), _BOXES)
        ]
        found: Bools = np.concatenate([np.zeros(0, np.bool_), *ignored])[member.reshape(-1)]
        return found

    def of_masks(self, masks: Bools, boxes: NDArray[np.int32], name: Callable[[int], str]) -> Bools:
        """The same of masks that are no rectangles any more."""
        patch, (count, height, width) = self.patch, masks.shape
        if height % patch or width % patch:
            raise ValueError(
                f"transforms made canvases of {height} × {width} pixels, which do not divide into patches of {patch}; "
                "crop to a multiple of the patch"
            )
        cells = masks.reshape(count, height // patch, patch, width // patch, patch)
        return self._ignored(cells.sum(axis=(2, 4), dtype=np.int64) / (patch * patch), boxes, name)

    def _ignored(self, padding: Shares, boxes: NDArray[np.int32], name: Callable[[int], str]) -> Bools:
        ignored: Bools = padding >= self.threshold
        for image in np.flatnonzero(ignored.all(axis=(1, 2))).tolist():
            raise AllTokensIgnored(name(image), boxes[image].tolist(), self.patch, self.threshold)
        return ignored
