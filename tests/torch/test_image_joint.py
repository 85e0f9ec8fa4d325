"""Transforms of images: pixels, mask and box move as one, and what does not is refused."""

from dataclasses import replace
from threading import Thread
from typing import Any

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from tests.helpers.hypothesis_profiles import scaled
from tests.helpers.image_caches import PAD, SIZE, drawn, recipe, sample

from forebay.errors import ForebayError, RecipeInvalid
from forebay.order.coins import Coins, sample_keys
from forebay.torch import Canvases, ImageBatch, JointV2

NUMBERS = range(6)


@pytest.fixture(scope="module")
def rows() -> list[dict[str, np.ndarray]]:
    return [recipe().make_row(sample(number)) for number in NUMBERS]


def canvases() -> Canvases:
    images, masks = zip(*(drawn(number) for number in NUMBERS), strict=True)
    boxes = torch.tensor([bounds(mask) for mask in masks], dtype=torch.int32)
    return Canvases(torch.from_numpy(np.stack(images)), torch.from_numpy(np.stack(masks)), boxes, PAD)


def bounds(mask: np.ndarray) -> list[int]:
    """The rectangle that holds all content; of none, an empty one."""
    y, x = np.nonzero(~mask)
    return [x.min(), y.min(), x.max() - x.min() + 1, y.max() - y.min() + 1] if len(x) else [0, 0, 0, 0]


def seen(plane: np.ndarray, left: int, top: int, size: tuple[int, int], pad: int) -> np.ndarray:
    """A window of a plane, by definition: pixel by pixel."""
    return np.array(
        [
            [
                plane[y, x] if 0 <= y < plane.shape[0] and 0 <= x < plane.shape[1] else pad
                for x in range(left, left + size[1])
            ]
            for y in range(top, top + size[0])
        ]
    )


@settings(deadline=None, max_examples=scaled(25))
@given(
    corners=st.lists(st.tuples(st.integers(-70, 70), st.integers(-70, 70)), min_size=6, max_size=6),
    size=st.tuples(st.integers(1, 60), st.integers(1, 60)),
)
def test_a_window_shows_pixels_mask_and_box_alike_and_padding_beyond_the_edges(corners: Any, size: Any) -> None:
    before = canvases()
    lefts, tops = zip(*corners, strict=True)
    after = before.seen_through(lefts, tops, size)
    assert after.size == size
    for number, (left, top) in enumerate(corners):
        mask = seen(before.mask[number].numpy(), left, top, size, pad=1).astype(bool)
        assert np.array_equal(after.mask[number].numpy(), mask)
        assert after.box[number].tolist() == bounds(mask)
        for channel in range(3):
            plane = seen(before.pixels[number, channel].numpy(), left, top, size, PAD[channel])
            assert np.array_equal(after.pixels[number, channel].numpy(), plane)


def test_transforms_come_after_the_flip_one_after_the_other_with_the_coins_of_their_samples(
    rows: list[dict[str, np.ndarray]],
) -> None:
    def crop(images: Canvases, coins: Coins) -> Canvases:
        return images.seen_through(coins.integers("left", 0, 17), coins.integers("top", 0, 17), (32, 32))

    def invert(images: Canvases, coins: Coins) -> Canvases:
        return replace(images, pixels=torch.where(images.mask[:, None], images.pixels, 255 - images.pixels))

    options: dict[str, Any] = {"flip": 0.5, "seed": 3, "patch": 8, "threshold": 1.0, "masks": "host"}
    batch = ImageBatch(recipe(), transforms=[crop, invert], **options)(rows)
    coins = Coins(3, 0, sample_keys(row["id"].tobytes() for row in rows))
    for number, flip in zip(NUMBERS, coins.flip("flip").tolist(), strict=True):
        left, top = (int(coins.integers(name, 0, 17)[number]) for name in ("left", "top"))
        image, mask = (each[..., top : top + 32, left : left + 32] for each in drawn(number, flip=flip))
        assert np.array_equal(batch["pixels"][number].numpy(), np.where(mask, image, 255 - image))
        assert np.array_equal(batch["pixel_mask"][number].numpy(), mask)
        assert batch["box"][number].tolist() == bounds(mask)
        cells = mask.reshape(4, 8, 4, 8).all(axis=(1, 3))
        assert np.array_equal(batch["token_mask"][number].numpy(), cells)


def test_masks_that_are_no_rectangles_count_pixel_by_pixel() -> None:
    """The figures of patch 16: 230 padded pixels keep a token, 231 ignore it."""
    content = {"box": np.array([0, 0, 32, 32], np.int32), "original_size": np.array([32, 32], np.int32)}
    row = content | {"pixels": np.zeros(3 * 32 * 32, np.uint8), "id": np.zeros(1, np.uint8), "tags": np.zeros(0, int)}

    def hide(images: Canvases, coins: Coins) -> Canvases:
        mask = images.mask.clone()
        mask[:, :16, :16] = (torch.arange(256) < 230).reshape(16, 16)
        mask[:, 16:, 16:] = (torch.arange(256) < 231).reshape(16, 16)
        return replace(images, mask=mask)

    batch = ImageBatch(recipe(size=32), patch=16, transforms=[hide], masks="host")([row])
    assert batch["token_mask"].tolist() == [[[False, False], [False, True]]]
    assert batch["pixel_mask"].sum() == 230 + 231
    for patch in (None, 16):  # the box would say that all of it is content
        with pytest.raises(ValueError, match=r"padding inside the box \[0, 0, 32, 32\] of '\x00'.*pass masks='host'"):
            ImageBatch(recipe(size=32), patch=patch, transforms=[hide])([row])


def gone(images: Canvases, coins: Coins) -> Canvases:
    return images.shifted(SIZE, 0)


def left_behind(images: Canvases, coins: Coins) -> Canvases:
    return replace(images.shifted(4, 0), box=images.box)


def fewer(images: Canvases, coins: Coins) -> Canvases:
    return Canvases(images.pixels[1:], images.mask[1:], images.box[1:], images.pad_color)


def floats(images: Canvases, coins: Coins) -> Canvases:
    return replace(images, pixels=images.pixels.float())


def uneven(images: Canvases, coins: Coins) -> Canvases:
    return images.seen_through(0, 0, (30, 48))


def beyond(images: Canvases, coins: Coins) -> Canvases:
    return replace(images, box=images.box + torch.tensor([0, 0, SIZE, 0], dtype=torch.int32))


def by_halves(images: Canvases, coins: Coins) -> Canvases:
    return images.shifted(0.5, 0)


@pytest.mark.parametrize(
    ("transform", "error", "message"),
    [
        (gone, RecipeInvalid, r"all tokens of the image '000\.png' are ignored: with content of 0 × 0 pixels"),
        (
            left_behind,
            ValueError,
            r"left_behind left content of image \d outside its box \[.*move pixels, mask and box",
        ),
        (fewer, ValueError, "fewer made 5 images of 6"),
        (floats, ValueError, r"pixels must be torch.uint8 \[6, 3, 48, 48\] \(got torch.float32"),
        (uneven, ValueError, "canvases of 30 × 48 pixels, which do not divide into patches of 16"),
        (beyond, ValueError, r"beyond gave image 0 the box \[.*\], which is not on a canvas of 48 × 48 pixels"),
        (by_halves, ValueError, "pass whole pixels, one number or 6"),
    ],
)
def test_a_transform_that_tears_image_mask_and_box_apart_is_refused(
    rows: list[dict[str, np.ndarray]], transform: Any, error: type[Exception], message: str
) -> None:
    with pytest.raises(error, match=message):
        ImageBatch(recipe(), patch=16, threshold=1.0, transforms=[transform])(rows)


def test_a_batch_without_rows_has_the_shapes_of_one_with_some() -> None:
    for transforms in ([], [gone]):
        empty = ImageBatch(recipe(), patch=16, dtype=torch.bfloat16, transforms=transforms)([])
        assert empty["pixels"].shape == (0, 3, SIZE, SIZE)
        assert empty["pixels"].dtype == torch.bfloat16
        assert (empty["token_mask"].shape, empty["box"].shape, empty["tags"].shape) == ((0, 3, 3), (0, 4), (0, 4))


def cut(sample: dict[str, torch.Tensor]) -> dict[str, torch.Tensor]:
    """A random window in the style of torchvision v2: all parts move together, by torch's generator."""
    x, y = torch.randint(0, 9, (2,)).tolist()
    window = slice(y, y + SIZE - 8), slice(x, x + SIZE - 8)
    shift = torch.tensor([x, y, x, y])
    return {
        "image": sample["image"][:, *window],
        "mask": sample["mask"][:, *window],
        "boxes": sample["boxes"] - shift,
    }


def test_a_v2_transform_moves_image_mask_and_box_together() -> None:
    before, coins = canvases(), Coins(0, 3, sample_keys([bytes([number]) for number in NUMBERS]))
    torch.manual_seed(5)
    state = torch.get_rng_state()
    after = JointV2(cut)(before, coins)
    assert torch.equal(torch.get_rng_state(), state), "training draws what it would have drawn"
    assert after.size == (SIZE - 8, SIZE - 8)
    assert after.box.tolist() == [bounds(mask) for mask in after.mask.numpy()]
    pad = torch.tensor(PAD, dtype=torch.uint8)
    assert (after.pixels.movedim(1, -1)[after.mask] == pad).all()
    windows = [before.seen_through(x, y, after.size) for x in range(9) for y in range(9)]
    for image in NUMBERS:
        same = [torch.equal(one.pixels[image], after.pixels[image]) for one in windows]
        assert any(same)
        assert torch.equal(windows[same.index(True)].mask[image], after.mask[image])


def test_pixels_that_a_v2_transform_fills_in_become_padding() -> None:
    def blank(sample: dict[str, torch.Tensor]) -> dict[str, torch.Tensor]:
        filled = {name: sample[name].clone() for name in ("image", "mask")}
        for part in filled.values():
            part[..., :20] = 0
        return sample | filled

    after = JointV2(blank)(canvases(), Coins(0, 0, sample_keys([b"a"] * len(NUMBERS))))
    assert after.mask[:, :, :20].all()
    assert (after.pixels[..., :20] == torch.tensor(PAD, dtype=torch.uint8)[:, None, None]).all()
    assert after.box.tolist() == [bounds(mask) for mask in after.mask.numpy()]


def test_a_v2_transform_depends_on_epoch_and_sample_only(rows: list[dict[str, np.ndarray]]) -> None:
    collate = ImageBatch(recipe(), transforms=[JointV2(cut)], masks="host")
    first = collate(rows)
    torch.manual_seed(1)
    assert torch.equal(collate(rows)["pixels"], first["pixels"])
    assert torch.equal(collate(rows[::-1])["pixels"].flip(0), first["pixels"])
    collate.set_epoch(1)
    assert not torch.equal(collate(rows)["pixels"], first["pixels"])


def test_a_v2_transform_is_rejected_in_a_thread_that_shares_the_generator() -> None:
    errors: list[ForebayError] = []

    def attempt() -> None:
        with pytest.raises(ForebayError) as raised:
            JointV2(cut)(canvases(), Coins(0, 0, sample_keys([b"a"] * len(NUMBERS))))
        errors.append(raised.value)

    thread = Thread(target=attempt)
    thread.start()
    thread.join()
    assert "threads=0" in errors[0].hint


def test_padding_that_torchvision_fills_in_is_masked() -> None:
    v2 = pytest.importorskip("torchvision.transforms.v2")
    before = canvases()
    turned = JointV2(v2.RandomRotation((45, 45)))(before, Coins(0, 0, sample_keys([b"a"] * len(NUMBERS))))
    assert turned.mask[:, 0, 0].all()
    assert (turned.pixels[:, :, 0, 0] == torch.tensor(PAD, dtype=torch.uint8)).all()
    assert turned.box.tolist() == [bounds(mask) for mask in turned.mask.numpy()]
