"""Crops of images: inside the content, aligned with mask and box, the same after a resume; classes; device masks."""

import json
from itertools import islice
from pathlib import Path
from typing import ClassVar

import msgspec
import numpy as np
import pytest
import torch
from PIL import Image
from tests.helpers.image_caches import PAD, SIZE, SIZES, TAGS, image_cache, picture_tags, write_pictures
from torch import Tensor

import forebay as fb
from forebay.columns import Columns
from forebay.errors import RecipeInvalid, StateMismatch
from forebay.order.coins import Coins, sample_keys
from forebay.torch import (
    AspectBucket,
    BucketLoader,
    CacheDataset,
    Canvases,
    ImageBatch,
    JointV2,
    Loader,
    RandomResizedCrop,
    Ranks,
    aspect_buckets,
)

COUNT = 4 * len(SIZES)
SHAPES = [(32, 32), (24, 40), (40, 24)]


@pytest.fixture(scope="module")
def cache(tmp_path_factory: pytest.TempPathFactory) -> fb.Cache:
    folder = tmp_path_factory.mktemp("crops")
    (folder / "pictures").mkdir()
    return image_cache(folder / "cache", write_pictures(folder / "pictures", COUNT))


def coins(count: int, epoch: int = 0) -> Coins:
    return Coins(3, epoch, sample_keys(f"{number}".encode() for number in range(count)))


def numbered(count: int, box: tuple[int, int, int, int]) -> Canvases:
    """Canvases whose red is the column and whose green is the row of a pixel, inside a box."""
    left, top, width, height = box
    pixels = np.broadcast_to(np.array(PAD, np.uint8)[:, None, None], (count, 3, SIZE, SIZE)).copy()
    mask = np.ones((count, SIZE, SIZE), bool)
    inside = (slice(top, top + height), slice(left, left + width))
    y, x = np.mgrid[inside]
    pixels[:, 0][:, *inside], pixels[:, 1][:, *inside], pixels[:, 2][:, *inside] = x, y, 7
    mask[:, *inside] = False
    return Canvases(
        torch.from_numpy(pixels), torch.from_numpy(mask), torch.tensor([box] * count, dtype=torch.int32), PAD
    )


def test_a_crop_is_inside_the_content_and_its_pixels_say_from_where():
    box, crop = (4, 10, 40, 24), RandomResizedCrop(20, scale=(0.1, 0.6))
    before = numbered(200, box)
    places, after = crop.rectangles(before.box.numpy(), coins(200)), crop(before, coins(200))
    left, top, width, height = places.T
    assert (left >= 4).all()
    assert (top >= 10).all()
    assert (left + width <= 44).all()
    assert (top + height <= 34).all()
    assert len({tuple(place) for place in places.tolist()}) > 150
    assert (after.mask == 0).all(), "no padding is left"
    assert (after.box == torch.tensor([0, 0, 20, 20])).all()
    assert (after.pixels[:, 2] == 7).all(), "no padding was mixed in"
    middles = after.pixels[:, :2].double().mean(dim=(2, 3)).numpy()
    np.testing.assert_allclose(middles[:, 0], left + (width - 1) / 2, atol=1)
    np.testing.assert_allclose(middles[:, 1], top + (height - 1) / 2, atol=1)
    share = width * height / (40 * 24)
    assert share.min() < 0.15
    assert 0.5 < share.max() < 0.65


def test_a_crop_of_all_the_content_is_the_resize_of_pillow():
    box = (4, 10, 40, 24)
    before = numbered(1, box)
    after = before.resized_from([list(box)], (12, 20))
    content = before.pixels[0, :, 10:34, 4:44].permute(1, 2, 0).numpy()
    expected = np.asarray(Image.fromarray(content).resize((20, 12), Image.Resampling.BILINEAR))
    difference = np.abs(after.pixels[0].permute(1, 2, 0).numpy().astype(int) - expected)
    assert difference.max() <= 1


def test_mask_and_box_of_a_crop_across_the_padding():
    before = numbered(1, (8, 0, 16, 48))
    after = before.resized_from([[0, 0, 48, 48]], (24, 24))
    assert after.box.tolist() == [[4, 0, 8, 24]]
    assert (~after.mask[0]).nonzero().amin(0).tolist() == [0, 4]
    empty = before.resized_from([[0, 0, 0, 0]], (4, 4))
    assert empty.mask.all()
    assert empty.box.tolist() == [[0, 0, 0, 0]]
    with pytest.raises(ValueError, match="not on its canvas of 48 × 48"):
        before.resized_from([[40, 0, 16, 4]], (4, 4))


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        ({"size": 0}, "size must be a whole number of at least 1"),
        ({"size": (8, 8, 8)}, r"size must be a side or \(height, width\), at least 1"),
        ({"size": "24"}, r"size must be a whole number of at least 1 \(got '24'\)"),
        ({"size": 2.5}, r"size must be a whole number of at least 1 \(got 2.5\)"),
        ({"size": 8, "scale": (0.5, 2.0)}, "scale must be"),
        ({"size": 8, "ratio": (2.0, 1.0)}, "ratio must be"),
    ],
)
def test_a_crop_that_cannot_be_is_refused(arguments, message):
    with pytest.raises((TypeError, ValueError), match=message):
        RandomResizedCrop(**arguments)


def batches(loader) -> list[tuple[Tensor, Tensor]]:
    return [(batch["pixels"].clone(), batch["flipped"].clone()) for batch in loader]


def assert_equal(found, expected) -> None:
    assert len(found) == len(expected)
    for one, other in zip(found, expected, strict=True):
        assert all(torch.equal(a, b) for a, b in zip(one, other, strict=True))


def test_every_image_is_in_the_bucket_of_its_shape(cache: fb.Cache):
    buckets = aspect_buckets(SHAPES)
    chosen = []
    for bucket in buckets:
        collate = ImageBatch(cache, transforms=[bucket], masks="host")
        for batch in Loader(
            cache, global_batch_size=1, selection=bucket.selection(), collate=collate, shuffle=None, columns=["row"]
        ):
            assert batch["pixels"].shape == (1, 3, *bucket.size)
            width, height = batch["original_size"][0].tolist()
            stored = cache.read([int(batch["row"][0])], ["box"])["box"][0]
            assert (batch["box"][0, 2:].numpy() <= stored[2:]).all(), "content is never enlarged"
            distances = [abs(np.log(width / height) - np.log(w / h)) for h, w in SHAPES]
            assert distances[SHAPES.index(bucket.size)] == min(distances)
            chosen.append((width, height))
    assert sorted(chosen) == sorted(SIZES[number % len(SIZES)] for number in range(COUNT))


def test_a_bucket_crops_in_the_middle():
    bucket, before = AspectBucket((24, 24), ((24, 24),)), numbered(1, (4, 10, 40, 24))
    after = bucket(before, coins(1))
    assert after.pixels[0, 0].double().mean() == pytest.approx(4 + 19.5, abs=0.6)
    assert after.pixels[0, 1, 0, 0] == 10
    assert after.pixels[0, 1, -1, 0] == 33


def bucket_loader(cache: fb.Cache, **options) -> BucketLoader:
    return BucketLoader(
        [
            Loader(
                cache,
                global_batch_size=4,
                selection=bucket.selection(),
                collate=ImageBatch(cache, flip=0.5, transforms=[bucket]),
                **options,
            )
            for bucket in aspect_buckets(SHAPES)
        ],
        seed=1,
    )


def test_buckets_take_turns_and_resume_at_the_same_batch(cache: fb.Cache):
    whole = bucket_loader(cache)
    epochs = [batches(whole) for _ in range(2)]
    assert [len(epoch) for epoch in epochs] == [len(whole)] * 2
    shapes = [[tuple(pixels.shape[-2:]) for pixels, _ in epoch] for epoch in epochs]
    assert shapes[0] != sorted(shapes[0])
    assert shapes[0] != shapes[1]
    assert sorted(shapes[0]) == sorted(shapes[1])
    for stop in range(len(whole) + 1):
        stopped, resumed = bucket_loader(cache, threads=0), bucket_loader(cache, threads=0)
        stream = iter(stopped)
        first = batches(next(stream) for _ in range(stop))
        resumed.load_state_dict(json.loads(json.dumps(stopped.state_dict())))
        rest = batches(resumed)
        assert_equal(first + rest, epochs[0] if stop < len(whole) else epochs[0] + epochs[1])
    with pytest.raises(StateMismatch, match="loaders: 3 then, 1 now"):
        BucketLoader(whole.loaders[:1]).load_state_dict(whole.state_dict())


def test_a_state_of_other_buckets_is_refused_with_a_sentence(cache: fb.Cache):
    whole = bucket_loader(cache, threads=0)
    list(islice(whole, 3))
    state = whole.state_dict()
    assert repr(whole) == f"<BucketLoader of 3 loaders, seed 1, at batch 3 of {len(whole)} of epoch 0>"
    resumed = bucket_loader(cache, threads=0)
    resumed.load_state_dict(state)
    assert len(list(resumed)) == len(whole) - 3
    with pytest.raises(StateMismatch, match="seed: 1 then, 7 now"):
        BucketLoader(bucket_loader(cache).loaders, seed=7).load_state_dict(state)
    larger = [Loader(cache, global_batch_size=8, selection=bucket.selection()) for bucket in aspect_buckets(SHAPES)]
    with pytest.raises(StateMismatch, match="batch sizes: "):
        BucketLoader(larger, seed=1).load_state_dict(state)
    for nonsense in ({}, whole.loaders[0].state_dict()):
        with pytest.raises(ValueError, match="not the state of a BucketLoader"):
            whole.load_state_dict(nonsense)


def test_a_bucket_loader_repeats_and_begins_again_as_a_loader_does(cache: fb.Cache):
    loader = bucket_loader(cache, threads=0)
    count = len(loader)
    assert len(list(loader.forever(count + 3))) == count + 3
    assert (loader.epoch, loader.position) == (1, 3)
    one = torch.ones(())
    assert loader.sum_over_ranks(one) is one
    again = bucket_loader(cache, threads=0, restart=True)
    first = [batch["pixels"] for batch in islice(again, 4)]
    second = [batch["pixels"] for batch in again]
    assert len(second) == count
    assert all(torch.equal(one, other) for one, other in zip(first, second, strict=False))
    assert (again.state_dict()["epoch"], again.state_dict()["position"]) == (0, 0)


def test_loaders_that_cannot_be_buckets_are_refused(cache: fb.Cache):
    with pytest.raises(ValueError, match="loaders is empty"):
        BucketLoader([])
    with pytest.raises(TypeError, match="loaders has a Cache"):
        BucketLoader([cache])  # type: ignore[list-item]
    with pytest.raises(ValueError, match="the same ranks"):
        BucketLoader([Loader(cache, global_batch_size=2, ranks=Ranks(rank, 2)) for rank in range(2)])


def test_buckets_that_cannot_be_are_refused():
    for sizes in ([], [(8, 8), (8, 8)], [(8, 0)]):
        with pytest.raises(ValueError, match="sizes must be different pairs"):
            aspect_buckets(sizes)
    with pytest.raises(ValueError, match="sizes must be a whole number of at least 0"):
        aspect_buckets([(8.5, 8)])  # type: ignore[list-item]


def test_the_class_of_an_image_is_beside_its_tags(cache: fb.Cache):
    collate = ImageBatch(cache, flip=0.5, classes=["cat"])
    for batch in Loader(cache, global_batch_size=4, collate=collate):
        assert batch["label"].dtype == torch.int64
        assert batch["label"].tolist() == [0 if cat else -100 for cat in batch["tags"][:, TAGS.index("cat")].tolist()]


def test_a_flip_changes_the_class_that_names_a_side(cache: fb.Cache, tmp_path: Path):
    classes = ["looking_right", "looking_left"]
    one_sided = [number for number in range(COUNT) if len(set(picture_tags(number)) & set(classes)) == 1]
    for flip in (0.0, 1.0):
        rows = [cache[number] for number in one_sided]
        found = ImageBatch(cache, flip=flip, classes=classes, tags=None)(rows)["label"].tolist()
        named = [classes[(label + int(flip)) % 2] for label in found]
        assert all(name in picture_tags(number) for name, number in zip(named, one_sided, strict=True))


def test_two_classes_of_an_image_are_an_error_that_names_it(cache: fb.Cache):
    both = next(number for number in range(COUNT) if {"looking_left", "looking_right"} <= set(picture_tags(number)))
    collate = ImageBatch(cache, classes=["looking_left", "looking_right"])
    with pytest.raises(ValueError, match=rf"'{both:03d}.png' has 2 classes, looking_left, looking_right"):
        collate([cache[both]])
    with pytest.raises(ValueError, match=r"classes must be different tags of the vocabulary \(unknown: dog\)"):
        ImageBatch(cache, classes=["dog"])
    with pytest.raises(TypeError, match=r"classes must be a sequence of tags.*got 'cat'"):
        ImageBatch(cache, classes="cat")


def test_folders_are_classes(tmp_path: Path):
    for name in ("cat", "dog"):
        (tmp_path / "images" / name).mkdir(parents=True)
        for number in range(3):
            Image.new("RGB", (30, 20), (number, 0, 0)).save(tmp_path / "images" / name / f"{number}.png")
    source = fb.sources.images(tmp_path / "images", labels="folder")
    fb.build(tmp_path / "cache", source, fb.ImageRecipe(size=16), workers=0)
    cache = fb.open_cache(tmp_path / "cache")
    batch = next(iter(Loader(cache, global_batch_size=6, shuffle=None, collate=ImageBatch(cache, classes="tags"))))
    assert batch["label"].tolist() == [0, 0, 0, 1, 1, 1]


def test_a_bucket_larger_than_the_stored_canvas_is_rejected(cache: fb.Cache):
    for size in ((SIZE, SIZE + 1), (512, 512)):
        with pytest.raises(RecipeInvalid, match="exceeds the stored canvas") as error:
            ImageBatch(cache, transforms=aspect_buckets([size]))
        assert f"choose sides up to {SIZE}" in error.value.hint
    (bucket,) = aspect_buckets([(SIZE, SIZE)])
    whole = next(iter(Loader(cache, global_batch_size=len(cache), collate=ImageBatch(cache, transforms=[bucket]))))
    stored = next(iter(Loader(cache, global_batch_size=len(cache))))
    assert torch.equal(whole["box"][:, 2:], stored["box"][:, 2:]), "smaller content is padded, not enlarged"


class Thumbnails(fb.RecipeHooks, msgspec.Struct, frozen=True, kw_only=True):
    """A layer that is made from pixels, or from ids alone."""

    kind: ClassVar[str] = "thumbnails"
    revision: ClassVar[int] = 1

    of: str
    name: str

    @property
    def reads(self) -> tuple[str, ...]:
        return (self.of,)

    def columns(self) -> tuple[fb.Column, ...]:
        return (fb.Column(name=self.name, dtype="float32", shape=(2,)),)

    def make(self, rows: Columns) -> fb.Rows:
        return fb.Rows({self.name: np.zeros((len(rows[self.of]), 2), np.float32)})


def test_columns_made_from_pixels_are_refused_beside_a_collate_that_moves_pixels(tmp_path: Path) -> None:
    (tmp_path / "pictures").mkdir()
    base = image_cache(tmp_path / "cache", write_pictures(tmp_path / "pictures"))
    for of, name in (("pixels", "latents"), ("latents", "features"), ("id", "prompts")):
        fb.build(base.root, None, Thumbnails(of=of, name=name), layer=name, workers=0)
    cache = fb.open_cache(base.root)
    (bucket,) = aspect_buckets([(32, 32)])
    for options in ({"flip": 0.5}, {"transforms": [RandomResizedCrop(16)]}, {"transforms": [bucket]}):
        collate = ImageBatch(cache, **options)  # type: ignore[arg-type]
        for column in ("latents", "features"):
            with pytest.raises(ValueError, match=f"column '{column}' of layer '{column}' was made from stored pixels"):
                Loader(cache, global_batch_size=2, collate=collate, columns=[column])
            with pytest.raises(ValueError, match="leave out flip and transforms, or the column"):
                CacheDataset(cache, collate=collate, columns=[column])
        assert "prompts" in next(iter(Loader(cache, global_batch_size=2, collate=collate, columns=["prompts"])))
    assert "latents" in next(iter(Loader(cache, global_batch_size=2, columns=["latents", "features"])))
    brighter = ImageBatch(cache, transforms=[JointV2(lambda sample: sample, moves_pixels=False)])
    assert "latents" in next(iter(Loader(cache, global_batch_size=2, threads=0, collate=brighter, columns=["latents"])))
