"""Masks of the tokens that a model ignores; an image of which all are ignored is an error with its sample id."""

from collections.abc import Callable, Sequence

import numpy as np
from numpy.typing import ArrayLike, NDArray

from forebay.errors import RecipeInvalid
from forebay.fields import checked_whole
from forebay.masks.rectangle import IGNORE_THRESHOLD, Size, token_ignore_mask, token_padding

Bools = NDArray[np.bool_]
Name = Callable[[int], str]  # image of the batch -> sample id


class TokenMasks:
    """Masks of tokens: patches of `patch` × `patch` pixels, ignored where the padded share reaches `threshold`."""

    def __init__(self, size: int, patch: int, threshold: float = IGNORE_THRESHOLD) -> None:
        self.patch, self.threshold = checked_whole("patch", patch), threshold
        token_ignore_mask(np.empty((0, 4), np.int64), (size, size), patch, threshold)  # checks both

    def of_boxes(self, boxes: ArrayLike, size: Size, name: Name) -> Bools:
        """Return masks `[images, height/patch, width/patch]`, True = ignored; `name` names an image in an error."""
        return self._ignored(token_padding(boxes, size, self.patch), np.asarray(boxes), name)

    def all_ignored(self, boxes: NDArray[np.integer], size: Size) -> Bools:
        """Return for each image whether all its tokens are ignored, `[images]`; equal boxes are computed once."""
        some, member = np.unique(boxes, axis=0, return_inverse=True)
        ignored = (token_padding(some, size, self.patch) >= self.threshold).all(axis=(1, 2))
        by_image: Bools = np.asarray(ignored)[member.reshape(-1)]
        return by_image

    def of_masks(self, masks: Bools, boxes: NDArray[np.integer], name: Name) -> Bools:
        """Return token masks as `of_boxes`, from pixel masks that need not be rectangles."""
        patch, (count, height, width) = self.patch, masks.shape
        if height % patch or width % patch:
            raise ValueError(
                f"transforms made canvases of {height} × {width} pixels, which do not divide into patches of {patch}; "
                "crop to a multiple of the patch"
            )
        cells = masks.reshape(count, height // patch, patch, width // patch, patch)
        return self._ignored(cells.sum(axis=(2, 4), dtype=np.int64) / (patch * patch), boxes, name)

    def error(self, sample: str, box: Sequence[int], images: int = 1) -> RecipeInvalid:
        """Return the error for an image of which all tokens are ignored, and for `images` - 1 others."""
        more = f" (and of {images - 1:,} more)" if images > 1 else ""
        return RecipeInvalid(
            f"all tokens of the image '{sample}'{more} are ignored: with content of {box[2]} × {box[3]} pixels, "
            f"{self.threshold:.0%} or more of every patch of {self.patch} × {self.patch} is padding",
            hint="exclude such images (selection=collate.large_enough()), choose a smaller patch, or raise the "
            "threshold",
            sample=sample,
            box=tuple(box),
            patch=self.patch,
            images=images,
        )

    def _ignored(self, padding: NDArray[np.float64], boxes: NDArray[np.integer], name: Name) -> Bools:
        ignored: Bools = padding >= self.threshold
        for image in np.flatnonzero(ignored.all(axis=(1, 2))).tolist():
            raise self.error(name(image), boxes[image].tolist())
        return ignored
