"""Columns of a batch that belong to one image keep the same geometry."""

from pathlib import Path
from typing import ClassVar

import numpy as np
import pytest
import torch
from PIL import Image

import forebay as fb
from forebay.errors import RecipeInvalid
from forebay.teachers import Batch, Loaded, Output, Teacher, TeacherRecipe
from forebay.torch import ImageBatch, Loader, aspect_buckets

SIDE = 64


class Thumbnail(Teacher, frozen=True, kw_only=True, tag="thumbnail"):
    """A spatial map of the image, as latents are: its mean over cells of 4 x 4 pixels."""

    reads: ClassVar[tuple[str, ...]] = ("pixels", "box")

    def outputs(self) -> tuple[Output, ...]:
        return (Output("thumbnail", (16, 16)),)

    def load(self, device: str, dtype: str) -> Loaded:
        def run(batch: Batch) -> dict[str, np.ndarray]:
            images = np.stack([pixels.reshape(3, SIDE, SIDE) for pixels in batch.rows("pixels")])
            return {"thumbnail": images.mean(axis=1).reshape(-1, 16, 4, 16, 4).mean(axis=(2, 4))}

        return run


def built(root: Path, images: list[Image.Image]) -> fb.Cache:
    (root / "images").mkdir()
    for number, image in enumerate(images):
        image.save(root / "images" / f"{number}.png")
    fb.build(root / "cache", fb.sources.images(root / "images"), fb.ImageRecipe(size=SIDE, tags=()), workers=0)
    return fb.open_cache(root / "cache")


def test_a_flipped_image_never_comes_with_the_map_of_the_unflipped_one(tmp_path: Path) -> None:
    ramp = np.tile(np.linspace(0, 255, SIDE).astype(np.uint8)[None, :, None], (SIDE, 1, 3))  # dark left, bright right
    root = built(tmp_path, [Image.fromarray(ramp)] * 4).root
    fb.build(root, None, TeacherRecipe(teacher=Thumbnail(), batch_size=2))
    cache = fb.open_cache(root)
    with pytest.raises(ValueError, match="column 'thumbnail' of layer 'thumbnail' was made from stored pixels"):
        Loader(cache, global_batch_size=4, collate=ImageBatch(cache, flip=1.0), columns=["thumbnail"])
    batch = next(iter(Loader(cache, global_batch_size=4, collate=ImageBatch(cache), columns=["thumbnail"])))
    own = batch["pixels"].float().mean(dim=1).reshape(4, 16, 4, 16, 4).mean(dim=(2, 4))
    torch.testing.assert_close(batch["thumbnail"].float(), own, atol=1.0, rtol=0)


def test_aspect_buckets_pad_smaller_images_and_never_enlarge_them(tmp_path: Path) -> None:
    cache = built(tmp_path, [Image.new("RGB", (40, 40), (9 * number, 0, 0)) for number in range(4)])
    with pytest.raises(RecipeInvalid, match="the bucket of 512 × 512 pixels exceeds the stored canvas of 64 × 64"):
        ImageBatch(cache, transforms=aspect_buckets([(512, 512)]))
    (bucket,) = aspect_buckets([(56, 56)])
    collate = ImageBatch(cache, transforms=[bucket])
    batch = next(iter(Loader(cache, global_batch_size=4, selection=bucket.selection(), collate=collate)))
    assert batch["box"].tolist() == [[8, 8, 40, 40]] * 4
