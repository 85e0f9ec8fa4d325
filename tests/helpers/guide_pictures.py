"""The pictures of docs/guide-images.md: `python -m tests.helpers.guide_pictures docs/pictures`."""

import sys
import tempfile
from pathlib import Path

import numpy as np
import torch
from PIL import Image
from tests.helpers.photographs import write_photographs

import forebay as fb
from forebay.masks import pixel_mask
from forebay.preview.pictures import draw_sheet
from forebay.preview.sheets import IGNORED, Framed, contact_sheet
from forebay.torch import ImageBatch, Loader

RECIPE = fb.ImageRecipe(size=224)
PATCH = 16

Planes = np.ndarray  # uint8 (3, size, size)


def main(folder: str) -> None:
    with tempfile.TemporaryDirectory() as place:
        photographs, root = Path(place) / "photos", Path(place) / "cache"
        write_photographs(photographs)
        fb.build(root, fb.sources.images(photographs), RECIPE, workers=0)
        cache = fb.open_cache(root)
        draw_sheet(cache, list(range(len(cache))), f"{folder}/image-sheet.png", PATCH)
        flipped(cache).save(f"{folder}/image-flip.png")
        guessed(cache).save(f"{folder}/image-guess.png")


def flipped(cache: fb.Cache) -> Image.Image:
    """Two images as they are, and the same flipped: pixels, box and tags together."""
    names = fb.images.Tags(tuple(cache.recipe("images").fields["tags"]))
    framed = []
    for flip in (0.0, 1.0):
        batch = read(cache, flip=flip)
        for row in (rows_of(cache)["lake.jpg"], rows_of(cache)["tower.jpg"]):
            tags = ", ".join(names.named(np.flatnonzero(batch["tags"][row].numpy()).tolist()))
            canvas, box = batch["pixels"][row].numpy(), tuple(batch["box"][row].tolist())
            framed.append(Framed(canvas, box, ("flipped" if flip else "as it is", tags)))
    return contact_sheet([framed[at] for at in (0, 2, 1, 3)], patch=PATCH)


def guessed(cache: fb.Cache) -> Image.Image:
    """What a mask made by looking for the color of the padding hides, and what the box says."""
    batch, framed = read(cache), []
    for name in ("fog.png", "sticker.png"):
        row = rows_of(cache)[name]
        canvas, box = batch["pixels"][row].numpy(), tuple(batch["box"][row].tolist())
        by_color = (canvas == np.array(RECIPE.pad_color)[:, None, None]).all(axis=0)
        framed.append(Framed(tinted(canvas, by_color), box, (name, "masked by its color: wrong")))
        framed.append(Framed(tinted(canvas, pixel_mask([box], (224, 224))[0]), box, (name, "masked by its box")))
    return contact_sheet(framed, patch=None)


def tinted(canvas: Planes, mask: np.ndarray) -> Planes:
    """The canvas, red where the mask says padding."""
    red = np.array(IGNORED)[:, None, None]
    return np.where(mask, (canvas * 0.55 + red * 0.45).astype(np.uint8), canvas)


def read(cache: fb.Cache, flip: float = 0.0) -> dict[str, torch.Tensor]:
    """All images in one batch, in the order of their rows."""
    loader = Loader(cache, global_batch_size=len(cache), shuffle=None, collate=ImageBatch(cache, flip=flip))
    return next(iter(loader))


def rows_of(cache: fb.Cache) -> dict[str, int]:
    return {row["id"].tobytes().decode(): number for number, row in enumerate(cache)}


if __name__ == "__main__":
    main(sys.argv[1])
