"""Small pictures in a folder, each of its own size and colors, and what reading them afresh gives."""

from pathlib import Path

import numpy as np
from PIL import Image

import forebay as fb
from forebay.source import Part, samples_of

SIZES = [(40, 30), (30, 40), (64, 64), (10, 50), (33, 21), (64, 20), (5, 5), (48, 47)]
RECIPE = fb.ImageRecipe(size=32)


def write_picture(path: Path, seed: int, size: tuple[int, int] | None = None) -> Path:
    width, height = size or SIZES[seed % len(SIZES)]
    noise = np.random.default_rng(seed).integers(0, 256, (height, width, 3), np.uint8)
    path.parent.mkdir(parents=True, exist_ok=True)
    Image.fromarray(noise).save(path)
    return path


def write_pictures(folder: Path, count: int = 12) -> Path:
    """Pictures with a tag each, in files of which the names sort as they are numbered."""
    for number in range(count):
        write_picture(folder / f"{number:05d}.png", number)
        (folder / f"{number:05d}.json").write_text(f'{{"tags": ["tag-{number % 3}"]}}')
    return folder


def fresh_rows(source: fb.Source, recipe: fb.ImageRecipe) -> list[dict[str, np.ndarray]]:
    """What the recipe makes of every sample, without a row cache in between."""
    rows = []
    for file in source.files():
        for stop in source.cuts(file, 0, 1 << 60, 1 << 60):
            rows += [recipe.make_row(sample) for sample in samples_of(source, Part(file, 0, stop))]
    return rows


def assert_same_rows(found, expected) -> None:
    assert len(found) == len(expected)
    for one, other in zip(found, expected, strict=True):
        assert one.keys() == other.keys()
        for name, array in other.items():
            assert one[name].dtype == array.dtype, name
            np.testing.assert_array_equal(one[name], array, err_msg=name)
