"""Pictures of mixed sizes with tags, caches of them, and what is on a canvas by definition: drawn with Pillow alone."""

import io
import json
from pathlib import Path

import numpy as np
from PIL import Image, ImageOps

import forebay as fb
from forebay.source import Annotated, Sample

SIZE = 48
PAD = (10, 120, 230)
SIZES = [(80, 60), (60, 80), (48, 48), (31, 47), (200, 33), (33, 200), (7, 5), (129, 128), (47, 13), (64, 64), (21, 48)]
TAGS = ("looking_left", "cat", "looking_right", "outdoors")


def picture(number: int) -> Image.Image:
    """Noise, coarse enough for JPEG, with parts in the very colour of the padding."""
    width, height = SIZES[number % len(SIZES)]
    coarse = np.random.default_rng(number).integers(0, 256, (height // 4 + 1, width // 4 + 1, 3), np.uint8)
    pixels = np.array(Image.fromarray(coarse).resize((width, height), Image.Resampling.NEAREST))
    pixels[: height // 3, : width // 3] = PAD
    return Image.fromarray(pixels)


def picture_tags(number: int) -> list[str]:
    return [name for place, name in enumerate(TAGS) if number >> place & 1]


def sample(number: int) -> Sample:
    stream = io.BytesIO()
    picture(number).save(stream, "PNG")
    return Sample(sample_id(number), Annotated(stream.getvalue(), {"tags": picture_tags(number)}))


def sample_id(number: int) -> str:
    return f"{number:03d}.png"


def write_pictures(folder: Path, count: int = len(SIZES)) -> Path:
    for number in range(count):
        (folder / sample_id(number)).write_bytes(sample(number).data.content)
        (folder / f"{number:03d}.json").write_text(json.dumps({"tags": picture_tags(number)}))
    return folder


def recipe(**fields: object) -> fb.ImageRecipe:
    return fb.ImageRecipe(**{"size": SIZE, "pad_color": PAD, "tags": TAGS, "chunk_bytes": 4 * 1024, **fields})  # type: ignore[arg-type]


def image_cache(root: Path, pictures: Path, **fields: object) -> fb.Cache:
    """Of several chunks, so that rows come from several files."""
    fb.build(root, fb.sources.images(pictures), recipe(**fields), workers=0)
    cache = fb.open_cache(root)
    assert len(cache.chunk_numbers) > 2
    return cache


def drawn(number: int, *, flip: bool = False, quality: int | None = None) -> tuple[np.ndarray, np.ndarray]:
    """The canvas uint8 [3, size, size] and its pixel mask, where True is padding, as Pillow draws both."""
    image = picture(number)
    scale = min(1.0, SIZE / max(image.size))
    small = image.resize([max(1, round(side * scale)) for side in image.size], Image.Resampling.BILINEAR)
    if quality is not None:
        stream = io.BytesIO()
        small.save(stream, "JPEG", quality=quality, subsampling="4:4:4")
        small = Image.open(stream)
    where = tuple((SIZE - side) // 2 for side in small.size)
    canvas, mask = Image.new("RGB", (SIZE, SIZE), PAD), Image.new("L", (SIZE, SIZE), 1)
    canvas.paste(small, where)
    mask.paste(0, (*where, where[0] + small.width, where[1] + small.height))
    if flip:
        canvas, mask = ImageOps.mirror(canvas), ImageOps.mirror(mask)
    return np.asarray(canvas).transpose(2, 0, 1), np.asarray(mask).astype(bool)
