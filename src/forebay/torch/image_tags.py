"""Tags of a batch of images, those of orientation swapped where an image is flipped."""

from collections.abc import Iterable, Mapping
from typing import Literal

import numpy as np
from numpy.typing import NDArray

from forebay.columns import Array, Ragged
from forebay.images.tags import Tags

TagStyle = Literal["multi_hot", "indices"]

ORIENTATION = {"looking_left": "looking_right"}


class TagReader:
    """Indices of tags as they are stored become tags as the flipped images have them."""

    def __init__(self, vocabulary: Tags, orientation: Mapping[str, str] | None) -> None:
        self._vocabulary = vocabulary
        self._swapped = vocabulary.swapped(_known(ORIENTATION, vocabulary) if orientation is None else orientation)

    def indices(self, stored: Iterable[Array], flipped: NDArray[np.bool_]) -> Ragged:
        """Of every image, rising."""
        rows = [self._swapped[row] if flip else row for row, flip in zip(stored, flipped.tolist(), strict=True)]
        return Ragged.of([np.sort(row) for row in rows], np.dtype(np.int64))

    def multi_hot(self, stored: Iterable[Array], flipped: NDArray[np.bool_]) -> NDArray[np.float32]:
        """`[images, tags]`: 1 where an image has a tag, as a loss wants it."""
        return self._vocabulary.multi_hot(self.indices(stored, flipped)).astype(np.float32)


def _known(pairs: Mapping[str, str], vocabulary: Tags) -> dict[str, str]:
    """Those that the vocabulary has. A tag whose other it lacks would be wrong on every flipped image."""
    for one, other in (*pairs.items(), *((other, one) for one, other in pairs.items())):
        if one in vocabulary and other not in vocabulary:
            raise ValueError(
                f"the vocabulary has the tag '{one}' but not '{other}', which a flip makes of it; add it to the "
                "recipe's tags, or give orientation={} to leave tags as they are"
            )
    return {one: other for one, other in pairs.items() if one in vocabulary}
