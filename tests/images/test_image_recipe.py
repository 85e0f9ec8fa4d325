"""Images as rows of a cache."""

import io
import json
import tracemalloc
from typing import Any

import msgspec
import numpy as np
import pytest
from PIL import Image
from tests.helpers import bad_images

import forebay as fb
from forebay.errors import RecipeInvalid, RecipeMismatch
from forebay.images import fit, paste
from forebay.images.tags import ImageUnreadable
from forebay.masks.rectangle import pixel_mask
from forebay.recipe import fields_of
from forebay.source import Annotated, Sample

NO_TAGS = (
    "so rows have no tags; pass another key (tag_key=…, --tag-key …), or labels='folder' (--labels folder) for one "
    "folder per class"
)


def jpeg(width: int, height: int, quality: int = 90) -> bytes:
    buffer = io.BytesIO()
    Image.fromarray(bad_images.picture(height, width)).save(buffer, "JPEG", quality=quality)
    return buffer.getvalue()


def text(row: np.ndarray) -> str:
    return bytes(row).decode("utf-8", "surrogateescape")


def nested(depth: int) -> dict[str, Any]:
    inner: list[Any] = []
    for _ in range(depth):
        inner = [inner]
    return {"x": inner}


@pytest.fixture(scope="module")
def pictures(tmp_path_factory):
    """Some images of mixed sizes with sidecars, one of which is none."""
    folder = tmp_path_factory.mktemp("pictures")
    for number, (width, height) in enumerate([(640, 480), (30, 20), (100, 400), (64, 64), (500, 10)]):
        (folder / f"{number}.jpg").write_bytes(jpeg(width, height))
        said = {"tags": ["cat", f"n{number}"], "number": number}
        (folder / f"{number}.json").write_text(json.dumps(said))
    (folder / "page.jpg").write_bytes(b"<html>")
    return folder


@pytest.fixture(scope="module")
def cache(pictures, tmp_path_factory):
    root = tmp_path_factory.mktemp("caches") / "raw"
    fb.build(root, fb.sources.images(pictures), fb.ImageRecipe(size=64), workers=0)
    return fb.open_cache(root)


def test_a_row_is_the_content_at_the_size_of_its_box_and_all_that_is_known(cache, pictures):
    recipe = fb.ImageRecipe(size=64)
    for number, row in enumerate(cache[index] for index in range(5)):
        image = Image.open(pictures / f"{number}.jpg")
        fitted = fit(*image.size, 64)
        expected = np.asarray(image.resize(fitted.box[2:], Image.Resampling.BILINEAR))
        assert np.array_equal(recipe.unpacked(row).transpose(1, 2, 0), expected)
        assert row["pixels"].size == 3 * fitted.box[2] * fitted.box[3]
        assert tuple(row["box"]) == fitted.box
        assert tuple(row["original_size"]) == image.size
        assert text(row["id"]) == f"{number}.jpg"
        assert json.loads(text(row["metadata"])) == {"tags": ["cat", f"n{number}"], "number": number}


def test_one_row_made_by_itself_is_the_row_of_the_cache(cache, pictures):
    recipe = msgspec.convert(cache.recipe("images").fields, fb.ImageRecipe)
    for index in range(5):
        kept = cache[index]
        name = text(kept["id"])
        said = json.loads((pictures / name).with_suffix(".json").read_text())
        row = recipe.make_row(Sample(name, Annotated((pictures / name).read_bytes(), said)))
        assert row.keys() == kept.keys()
        for column, values in kept.items():
            assert row[column].dtype == values.dtype
            assert np.array_equal(row[column], values), column


def test_rows_made_together_are_the_rows_one_by_one_however_much_room_was_expected():
    recipe = fb.ImageRecipe(size=64, chunk_bytes=1)
    samples = [Sample(str(number), jpeg(10 * number + 1, 30)) for number in range(8)]
    made = recipe.make(samples).columns
    for index, sample in enumerate(samples):
        for name, values in recipe.make_row(sample).items():
            assert np.array_equal(made[name][index], values), name


def test_the_vocabulary_is_made_from_the_source_and_kept_with_the_cache(cache):
    recipe = msgspec.convert(cache.recipe("images").fields, fb.ImageRecipe)
    vocabulary = recipe.vocabulary()
    assert vocabulary.names == ("cat", "n0", "n1", "n2", "n3", "n4")
    assert vocabulary.named(cache[3]["tags"]) == ("cat", "n3")
    hot = vocabulary.multi_hot([cache[row]["tags"] for row in range(5)])
    assert hot.sum() == 10
    assert hot[:, 0].all()


def test_what_is_no_image_is_recorded_and_counted(cache):
    summary = fb.info(cache.root)
    (layer,) = summary.layers
    assert (layer.rows, layer.failures) == (5, 1)
    assert layer.statistics["images"] == 5
    assert layer.statistics["tags"] == 10
    assert layer.statistics["scaled_down"] == 3
    assert layer.statistics["content_pixels"] == sum(int(np.prod(cache[row]["box"][2:])) for row in range(5))
    padded = pixel_mask([cache[row]["box"] for row in range(5)], (64, 64)).mean()
    assert layer.figures["padding_share"] == pytest.approx(padded)
    assert layer.figures["share_of_float32"] == pytest.approx(layer.bytes / (5 * 64 * 64 * 12))


@pytest.mark.parametrize(
    ("tags", "min_count", "expected"),
    [(None, 2, ["cat"]), (("n3", "cat", "never"), 1, ["n3", "cat", "never"]), ((), 1, [])],
)
def test_a_vocabulary_may_be_given_or_bounded(pictures, tmp_path, tags, min_count, expected):
    recipe = fb.ImageRecipe(size=16, tags=tags, min_tag_count=min_count)
    fb.build(tmp_path, fb.sources.images(pictures), recipe, workers=0)
    cache = fb.open_cache(tmp_path)
    assert cache.recipe("images").fields["tags"] == expected
    (layer,) = fb.info(tmp_path).layers
    assert layer.statistics["tags"] + layer.statistics["unknown_tags"] == 10
    fb.build(tmp_path, fb.sources.images(pictures), recipe, workers=0)
    with pytest.raises(RecipeMismatch, match="tags"):
        fb.build(tmp_path, fb.sources.images(pictures), fb.ImageRecipe(size=16, tags=("other",)), workers=0)


def test_jpeg_storage_gives_back_nearly_the_same_in_fewer_bytes(cache, pictures, tmp_path):
    recipe = fb.ImageRecipe(size=64, storage="jpeg", quality=95)
    fb.build(tmp_path, fb.sources.images(pictures), recipe, workers=0)
    packed = fb.open_cache(tmp_path)
    assert "pixels" not in packed[0]
    for index in range(5):
        raw, small = cache[index], packed[index]
        difference = recipe.unpacked(small).astype(int) - fb.ImageRecipe(size=64).unpacked(raw)
        assert difference.shape[0] == 3
        assert np.abs(difference).mean() < 3
        assert np.array_equal(raw["box"], small["box"])
    assert packed[0]["jpeg"].size < cache[0]["pixels"].size / 3


def test_a_canvas_larger_than_programs_allow_themselves_is_read_back(monkeypatch):
    recipe = fb.ImageRecipe(size=64, storage="jpeg")
    row = recipe.make_row(Sample("a", jpeg(64, 64)))
    monkeypatch.setattr(Image, "MAX_IMAGE_PIXELS", 100)
    assert recipe.unpacked(row).shape == (3, 64, 64)


def flat_jpeg(side: int) -> bytes:
    buffer = io.BytesIO()
    Image.new("RGB", (side, side)).save(buffer, "JPEG")
    return buffer.getvalue()


LARGE = flat_jpeg(4000)


@pytest.mark.parametrize(
    ("stored", "box", "said"),
    [
        (jpeg(64, 64), (64, 48), "a stored JPEG of 64 × 48 pixels is RGB of 64 × 64 pixels"),
        (LARGE, (64, 64), "is RGB of 4,000 × 4,000 pixels"),
        (LARGE, (4000, 4000), "a box of 4000 × 4000 pixels is not in a canvas of 64"),
        (jpeg(64, 64), (64, -1), "a box of 64 × -1 pixels is not in a canvas"),
        (jpeg(64, 64)[:200], (64, 64), r"is not readable \("),
        (b"", (64, 64), r"is not readable \("),
    ],
)
def test_a_forged_row_is_refused_before_its_jpeg_is_decoded(stored, box, said):
    recipe = fb.ImageRecipe(size=64, storage="jpeg")
    row = {"jpeg": np.frombuffer(stored, np.uint8), "box": np.array([0, 0, *box], np.int32)}
    tracemalloc.start()
    try:
        with pytest.raises(ValueError, match=said):
            recipe.unpacked(row)
        assert tracemalloc.get_traced_memory()[1] < 4_000_000  # 48 MB, decoded
    finally:
        tracemalloc.stop()


@pytest.mark.parametrize("box", [(8, 9), (9, 8), (0, 0), (-8, -8), (100, 100), (2**31 - 1, 1)])
def test_a_forged_row_of_raw_pixels_is_refused(box):
    row = {"pixels": np.zeros(3 * 8 * 8, np.uint8), "box": np.array([0, 0, *box], np.int32)}
    with pytest.raises(ValueError, match="its recipe did not make this row"):
        fb.ImageRecipe(size=64).unpacked(row)


@pytest.mark.parametrize("storage", ["raw", "jpeg"])
def test_what_a_row_stores_is_the_packed_letterbox_and_nothing_of_the_file_beside_it(storage):
    buffer = io.BytesIO()
    image = Image.fromarray(bad_images.picture(40, 60))
    image.save(buffer, "JPEG", quality=90, comment=b"by nobody", dpi=(72, 72))
    recipe = fb.ImageRecipe(size=64, storage=storage)
    row = recipe.make_row(Sample("a", buffer.getvalue()))
    planes, fitted = recipe.letterboxed(buffer.getvalue())
    again, refitted = fb.images.letterbox(Image.open(buffer), 64)
    assert np.array_equal(row[recipe.stored_column], recipe.packed(planes))
    assert np.array_equal(planes, again)
    assert fitted == refitted == fit(60, 40, 64)
    for array in (planes, row[recipe.stored_column], recipe.packed(planes)):
        assert array.flags.writeable


def test_fast_decoding_has_the_same_boxes_and_nearly_the_same_pixels():
    exact, fast = (fb.ImageRecipe(size=64, decode=how) for how in ("exact", "fast"))
    content = jpeg(901, 603, quality=95)
    rows = [recipe.make_row(Sample("a", content)) for recipe in (exact, fast)]
    for column in ("box", "original_size"):
        assert np.array_equal(rows[0][column], rows[1][column])
    difference = np.abs(exact.unpacked(rows[0]).astype(int) - fast.unpacked(rows[1]))
    assert difference.max() > 0
    assert difference.mean() < 3


def test_content_of_the_pad_color_and_transparent_content_are_never_padding():
    buffer = io.BytesIO()
    Image.new("RGBA", (50, 25)).save(buffer, "PNG")
    recipe = fb.ImageRecipe(size=32, pad_color=(114, 114, 114))
    row = recipe.make_row(Sample("clear", buffer.getvalue()))
    canvas = paste(recipe.unpacked(row), fit(50, 25, 32), recipe.pad_color)
    assert (canvas == 114).all()
    assert np.count_nonzero(~pixel_mask([row["box"]], (32, 32))) == 32 * 16


def test_every_field_that_changes_a_pixel_is_in_the_fingerprint():
    plain = fb.ImageRecipe()
    others = [
        {"size": 224}, {"pad_color": (0, 0, 0)}, {"resample": "bicubic"}, {"alpha": "drop"}, {"exif": "ignore"},
        {"decode": "fast"}, {"storage": "jpeg"}, {"quality": 90}, {"codec": "zstd"}, {"tags": ("a",)},
        {"tag_separator": " "}, {"tag_key": ("a", "b")},
    ]  # fmt: skip
    prints = {fb.fingerprint(plain), *(fb.fingerprint(msgspec.structs.replace(plain, **one)) for one in others)}
    assert len(prints) == 1 + len(others)
    restored = msgspec.convert(fields_of(plain), fb.ImageRecipe)
    assert fb.fingerprint(restored) == fb.fingerprint(plain)


def test_what_decodes_is_recorded(cache):
    (versions,) = fb.info(cache.root).versions
    assert {"pillow", "libjpeg_turbo", "zlib"} <= versions.keys()


@pytest.mark.parametrize(
    ("sample", "reason"),
    [
        (Sample("a", "text"), "not-an-image"),
        (Sample("a", Annotated(b"", {})), "empty"),
        (Sample("a", Annotated(jpeg(4, 4), {"tags": 7})), "bad-tags"),
        (Sample("a", Annotated(jpeg(4, 4), {"when": object()})), "bad-metadata"),
        (Sample("a", Annotated(jpeg(4, 4), {"x": float("nan")})), "bad-metadata"),
        (Sample("a", Annotated(jpeg(4, 4), {"x": "y" * (1 << 20)})), "bad-metadata"),
        (Sample("a", Annotated(jpeg(4, 4), nested(100_000))), "bad-metadata"),
    ],
)
def test_a_sample_that_makes_no_row_has_a_reason(sample, reason):
    with pytest.raises(ImageUnreadable) as caught:
        fb.ImageRecipe().make_row(sample)
    assert caught.value.reason == reason
    made = fb.ImageRecipe().make([sample, Sample("b", jpeg(4, 4))])
    assert [failure.reason for failure in made.failures] == [reason]
    assert len(made.columns["pixels"]) == 1


@pytest.mark.parametrize(
    ("wrong", "problem"),
    [
        ({"size": 0}, "size is 0; it must be a whole number from 1 to 16,384"),
        ({"size": "448"}, "size is '448'; it must be a whole number from 1 to 16,384"),
        ({"size": 448.5}, "size is 448.5"),
        ({"pad_color": 114}, "pad_color is 114; it must be three whole numbers"),
        ({"pad_color": (1.5, 2, 3)}, "pad_color"),
        ({"quality": 101}, "quality is 101"),
        ({"max_pixels": 0}, "at least 1"),
        ({"pad_color": (1, 2, 256)}, "pad_color"),
        ({"tags": ("a", "a")}, "'a' is in the vocabulary twice"),
        ({"resample": "cubic"}, "resample"),
        ({"tag_key": ""}, "is empty"),
        ({"tag_key": ()}, "is empty"),
        ({"tag_separator": ""}, "is empty"),
    ],
)
def test_a_recipe_that_cannot_be_is_refused(wrong, problem):
    with pytest.raises(RecipeInvalid, match=problem):
        fb.ImageRecipe(**wrong)


def test_chunks_come_out_near_their_size_whatever_the_files_weigh(tmp_path):
    """Small files first, large ones behind: rows are of one size all the same, and so are chunks."""
    data = tmp_path / "data"
    data.mkdir()
    flat, noisy = io.BytesIO(), io.BytesIO()
    Image.new("RGB", (64, 64)).save(flat, "PNG")
    Image.fromarray(np.random.default_rng(0).integers(0, 256, (64, 64, 3), np.uint8)).save(noisy, "PNG")
    for number in range(120):
        (data / f"{number:03}.png").write_bytes(flat.getvalue() if number < 60 else noisy.getvalue())
    source, recipe = fb.sources.images(data), fb.ImageRecipe(size=64, chunk_bytes=20 * 3 * 64 * 64)
    estimate = fb.estimate(source, recipe)
    fb.build(tmp_path / "cache", source, recipe, workers=0)
    sizes = [path.stat().st_size for path in sorted((tmp_path / "cache" / "layers").glob("images.*/0*"))]
    assert 6 <= len(sizes) <= 7
    assert max(sizes) < 1.3 * recipe.chunk_bytes
    assert estimate.rows == 120
    assert estimate.stored_bytes == pytest.approx(sum(sizes), rel=0.05)


def test_progress_counts_the_bytes_of_files_of_a_source_that_counts_samples(pictures, tmp_path):
    moments = []
    source, recipe = fb.sources.images(pictures), fb.ImageRecipe(size=64)
    fb.build(tmp_path / "new", source, recipe, workers=0, on_progress=moments.append)
    fb.verify(tmp_path / "new", on_progress=moments.append)
    read = {moment.phase: moment.read_bytes for moment in moments}
    size = sum(file.size for file in source.files())
    assert read["verifying"] > 10_000
    assert read["planning"] == read["building"] == size
    assert {moment.source_bytes for moment in moments if moment.phase == "building"} == {size}


@pytest.mark.parametrize(
    ("fields", "notes"),
    [
        ({}, ()),
        ({"tags": ()}, ()),
        ({"tag_key": "labels"}, (f"no tag occurs under 'labels', {NO_TAGS}",)),
        (
            {"min_tag_count": 9},
            (f"no tag occurs 9 times under 'tags', {NO_TAGS}",),
        ),
    ],
)
def test_a_vocabulary_that_comes_out_empty_is_told_once(pictures, tmp_path, fields, notes):
    source, recipe = fb.sources.images(pictures), fb.ImageRecipe(size=8, **fields)
    assert fb.build(tmp_path / "new", source, recipe, workers=0).notes == notes
    assert fb.build(tmp_path / "new", source, recipe, workers=0).notes == ()


@pytest.mark.parametrize(
    ("fields", "found"),
    [
        (
            {"tags": ("kat", "dogg")},
            "none of the 2 tag(s) of the vocabulary occurs under 'tags' in the first 2 image(s)",
        ),
        ({"tags": ("cat",), "tag_key": "labels"}, "none of the 1 tag(s) of the vocabulary occurs under 'labels'"),
        ({"tags": ("cat", "zebra")}, None),
        ({"tags": ()}, None),
    ],
)
def test_a_vocabulary_of_which_no_image_has_a_tag_is_noted_by_build_and_estimate(tmp_path, fields, found):
    for number in range(2):
        (tmp_path / f"{number}.jpg").write_bytes(jpeg(8, 8))
        (tmp_path / f"{number}.json").write_text('{"tags": ["cat", "dog"]}')
    source, recipe = fb.sources.images(tmp_path), fb.ImageRecipe(size=8, **fields)
    noted = [fb.estimate(source, recipe, workers=1).notes, fb.build(tmp_path / "new", source, recipe, workers=0).notes]
    assert [bool(found) and notes[0].startswith(found) for notes in noted] == [bool(found)] * 2
    if fields.get("tag_key") is None and found:
        assert "they name 'cat', for example" in noted[0][0]
    assert fb.build(tmp_path / "new", source, recipe, workers=0).notes == ()
