"""An image prepared for inference is, to the last bit, what training reads from a cache that holds it."""

from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from PIL import Image

import forebay as fb
from forebay.errors import RecipeInvalid
from forebay.images import ImageRecipe, prepare, prepared_row
from forebay.images.tags import ImageUnreadable
from forebay.torch import ImageBatch, Loader

SIZE, PATCH = 32, 4
DTYPES = {"uint8": torch.uint8, "float32": torch.float32, "float16": torch.float16, "bfloat16": torch.bfloat16}
RECIPES = {
    "raw": {},
    "jpeg": {"storage": "jpeg", "quality": 80},
    "fast": {"decode": "fast"},
    "as it lies": {"exif": "ignore", "alpha": "drop", "resample": "lanczos"},
}


def picture(mode: str, width: int, height: int) -> Image.Image:
    channels = len(Image.new(mode, (1, 1)).getbands())
    pixels = np.random.default_rng(width).integers(0, 256, (height, width, channels), dtype=np.uint8)
    return Image.fromarray(pixels if channels > 1 else pixels[:, :, 0], mode)


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Pictures of many kinds: large, wide, tall, small, gray, transparent, turned."""
    folder = tmp_path_factory.mktemp("pictures")
    turned = Image.Exif()
    turned[0x0112] = 6
    picture("RGB", 300, 200).save(folder / "large.jpg")
    picture("RGB", 300, 40).save(folder / "turned.jpg", exif=turned)
    picture("RGB", 20, 12).save(folder / "small.png")
    picture("L", 50, 120).save(folder / "tall gray.png")
    picture("RGBA", 60, 30).save(folder / "transparent.webp", lossless=True)
    picture("P", 40, 40).save(folder / "palette.gif")
    return folder


@pytest.fixture(scope="module", params=RECIPES)
def cache(request: pytest.FixtureRequest, folder: Path, tmp_path_factory: pytest.TempPathFactory) -> fb.Cache:
    recipe = ImageRecipe(size=SIZE, pad_color=(9, 114, 200), **RECIPES[request.param])
    root = tmp_path_factory.mktemp("cache") / "images"
    fb.build(root, fb.sources.images(folder), recipe, workers=0)
    return fb.open_cache(root)


def names(cache: fb.Cache) -> list[str]:
    return [cache[row]["id"].tobytes().decode() for row in range(len(cache))]


def as_trained_on(cache: fb.Cache, **options: Any) -> dict[str, torch.Tensor]:
    loader = Loader(
        cache, global_batch_size=len(cache), shuffle=None, collate=ImageBatch(cache, masks="host", **options)
    )
    return next(iter(loader))


def bits(values: Any) -> bytes:
    if isinstance(values, torch.Tensor):  # numpy and torch have no common bfloat16
        return values.contiguous().view(torch.uint8).numpy().tobytes()
    return values.tobytes()


@pytest.mark.parametrize(
    ("dtype", "normalize"),
    [("uint8", None), ("float32", None), ("float32", "imagenet"), ("float16", "imagenet"), ("bfloat16", "imagenet")],
)
def test_a_file_is_as_training_reads_it(cache: fb.Cache, folder: Path, dtype: str, normalize: str | None) -> None:
    batch = as_trained_on(cache, normalize=normalize, dtype=DTYPES[dtype], patch=PATCH)
    assert len(cache) == 6
    for row, name in enumerate(names(cache)):
        prepared = prepare(folder / name, cache, normalize=normalize, dtype=dtype, patch=PATCH)
        assert prepared.pixels.shape == (3, SIZE, SIZE)
        assert bits(prepared.pixels) == bits(batch["pixels"][row]), name
        assert bits(prepared.pixel_mask) == bits(batch["pixel_mask"][row])
        assert bits(prepared.token_mask) == bits(batch["token_mask"][row])
        assert prepared.letterbox.box == tuple(batch["box"][row].tolist())
        assert prepared.letterbox.image == tuple(batch["original_size"][row].tolist())


def test_bytes_an_opened_image_and_its_pixels_are_as_the_file(cache: fb.Cache, folder: Path) -> None:
    recipe_is_fast = cache.recipe(cache.layers[0]).fields["decode"] == "fast"
    for path in sorted(folder.iterdir()):
        pixels = prepare(path, cache).pixels
        np.testing.assert_array_equal(prepare(path.read_bytes(), cache).pixels, pixels)
        np.testing.assert_array_equal(prepare(str(path), cache).pixels, pixels)
        if recipe_is_fast and path.suffix == ".jpg":
            continue  # only of a file can less be decoded
        with Image.open(path) as image:
            np.testing.assert_array_equal(prepare(image, cache).pixels, pixels, err_msg=path.name)
            if image.mode in ("RGB", "RGBA", "L") and path.name != "turned.jpg":
                np.testing.assert_array_equal(prepare(np.asarray(image), cache).pixels, pixels)


def test_rows_of_files_make_batches(cache: fb.Cache, folder: Path) -> None:
    options: dict[str, Any] = {"normalize": "imagenet", "dtype": torch.float32, "patch": PATCH}
    batch = ImageBatch(cache, masks="host", **options)([prepared_row(folder / name, cache) for name in names(cache)])
    trained_on = as_trained_on(cache, **options)
    for name in ("pixels", "pixel_mask", "token_mask", "box", "original_size"):
        assert torch.equal(batch[name], trained_on[name]), name


def test_what_is_found_on_the_canvas_is_found_in_the_image() -> None:
    prepared = prepare(np.zeros((100, 200, 3), np.uint8), ImageRecipe(size=SIZE))
    left, top, width, height = prepared.letterbox.box
    assert prepared.letterbox.boxes_to_image([left, top, left + width / 2, top + height]).tolist() == [0, 0, 100, 100]


def test_what_is_no_picture_says_which_and_why(tmp_path: Path) -> None:
    with pytest.raises(ImageUnreadable, match="'<bytes>': it begins with b'<html>'") as refused:
        prepare(b"<html>", ImageRecipe())
    assert refused.value.reason == "not-an-image"
    (tmp_path / "page.jpg").write_bytes(b"<html>")
    with pytest.raises(ImageUnreadable, match=r"page\.jpg': it begins with b'<html>'"):
        prepare(tmp_path / "page.jpg", ImageRecipe())
    with pytest.raises(FileNotFoundError, match=r"nowhere\.jpg"):
        prepare("nowhere.jpg", ImageRecipe())


def test_an_opened_image_that_ends_early_is_refused_as_its_file_is(tmp_path: Path) -> None:
    path = tmp_path / "half.png"
    Image.fromarray(np.random.default_rng(0).integers(0, 256, (50, 50, 3), np.uint8)).save(path)
    path.write_bytes(path.read_bytes()[:4000])
    with Image.open(path) as opened:
        for image in (path, opened):
            with pytest.raises(ImageUnreadable) as refused:
                prepare(image, ImageRecipe())
            assert refused.value.reason == "truncated"


def test_an_image_without_a_token_is_named(tmp_path: Path) -> None:
    picture("RGB", 1, 2).save(tmp_path / "dot.png")
    with pytest.raises(RecipeInvalid, match=r"dot\.png' are ignored: with content of 1 × 2 pixels"):
        prepare(tmp_path / "dot.png", ImageRecipe(size=SIZE), patch=PATCH)
    with pytest.raises(RecipeInvalid, match="'<an array>' are ignored"):
        prepare(np.zeros((1, 1), np.uint8), ImageRecipe(size=SIZE), patch=PATCH)


@pytest.mark.parametrize(
    ("image", "said"),
    [
        (np.zeros((4, 4, 3)), r"must be uint8 \[height, width\], .* \(got float64 \(4, 4, 3\)\)"),
        (np.zeros((3, 9, 9), np.uint8), r"\(got uint8 \(3, 9, 9\)\); .* channels last"),
        (np.zeros((0, 4, 3), np.uint8), r"at least one pixel \(got shape \(0, 4, 3\)\)"),
    ],
)
def test_arrays_that_are_no_image_are_refused(image: np.ndarray, said: str) -> None:
    with pytest.raises(ValueError, match=said):
        prepare(image, ImageRecipe(size=SIZE))


@pytest.mark.parametrize(
    ("options", "said"),
    [
        ({"normalize": "imagenet"}, "normalize needs a float dtype"),
        ({"dtype": "int32"}, r"dtype must be one of uint8, float32, float16, bfloat16 \(got int32\)"),
        ({"patch": 5}, "does not divide into patches of 5"),
        ({"patch": 4, "threshold": 0.0}, r"threshold must be .* \(got 0\.0\)"),
    ],
)
def test_options_that_mean_nothing_are_refused(options: dict[str, Any], said: str) -> None:
    with pytest.raises(ValueError, match=said):
        prepare(np.zeros((4, 4, 3), np.uint8), ImageRecipe(size=SIZE), **options)


def test_a_cache_of_something_else_is_refused(tmp_path: Path) -> None:
    (tmp_path / "lines.txt").write_text("one\ntwo\n")
    fb.build(tmp_path / "cache", fb.sources.lines(tmp_path / "lines.txt"), fb.RawRecipe(), workers=0)
    with pytest.raises(ValueError, match="holds no images, only: raw; pass a cache built by an ImageRecipe"):
        prepare(np.zeros((4, 4, 3), np.uint8), fb.open_cache(tmp_path / "cache"))
    with pytest.raises(TypeError, match="pass an ImageRecipe or an open cache of images, not a str"):
        prepare(np.zeros((4, 4, 3), np.uint8), "caches/images")
