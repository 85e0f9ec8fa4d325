"""The loss mask of latents: how much of each cell is content. Derived from the stored rectangle, never stored."""

import numpy as np
from numpy.typing import ArrayLike, NDArray

from forebay.cache.reader import Cache
from forebay.errors import RecipeInvalid
from forebay.masks import rectangle


def weights_of_latents(cache: Cache, rows: ArrayLike, layer: str = "latents") -> NDArray[np.float32]:
    """The share of content in every cell of the latents of some rows, `(rows, height, width)`."""
    kept = cache.recipe(layer)
    teacher = kept.fields.get("teacher")
    if not isinstance(teacher, dict) or teacher.get("kind") != "latents":
        raise RecipeInvalid(f"layer '{layer}' of '{cache.root}' holds no latents of images; name the layer that does")
    size = int(teacher["size"])
    _, height, width = cache.column(kept.columns[0].name).shape
    boxes = np.asarray(cache.read(rows, ["box"])["box"])
    return rectangle.latent_weights(boxes, (size, size), (height, width))
