"""Batches of images: what is on a canvas by definition, the same bits by every way of reading, flips, masks, tags."""

from functools import partial
from pathlib import Path
from typing import Any

import msgspec
import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from tests.helpers.batch_transforms import jitter
from tests.helpers.cache_files import chunk_path, layer_path
from tests.helpers.hypothesis_profiles import scaled
from tests.helpers.image_caches import (
    PAD,
    SIZES,
    TAGS,
    drawn,
    image_cache,
    picture_tags,
    recipe,
    sample,
    sample_id,
    write_pictures,
)
from tests.helpers.layer_recipes import flip as flip_byte
from tests.store.far_stores import FarFolder
from torch import Tensor
from torch.utils.data import DataLoader

import forebay as fb
from forebay.errors import ChunkCorrupt, RecipeInvalid
from forebay.format.tensors import VARIABLE
from forebay.images.geometry import Scaling
from forebay.order.coins import Coins, sample_keys
from forebay.store import LocalStore
from forebay.store.tiered import TieredStore
from forebay.torch import (
    CacheDataset,
    Canvases,
    ImageBatch,
    Ingredient,
    Loader,
    Mixture,
    RandomResizedCrop,
    StoredBatch,
    aspect_buckets,
    masks_on_device,
    normalize_on_device,
)

COUNT = len(SIZES)
HALF = ((0.5, 0.25, 0.4), (0.5, 1.0, 0.125))
STORED: dict[str, dict[str, Any]] = {
    "raw": {},
    "zstd": {"codec": "zstd"},
    "jpeg": {"storage": "jpeg", "quality": 90},
}

Rows = dict[str, dict[str, Tensor]]


@pytest.fixture(scope="module")
def pictures(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return write_pictures(tmp_path_factory.mktemp("pictures"))


@pytest.fixture(scope="module")
def caches(pictures: Path, tmp_path_factory: pytest.TempPathFactory) -> dict[str, fb.Cache]:
    folder = tmp_path_factory.mktemp("caches")
    return {name: image_cache(folder / name, pictures, **fields) for name, fields in STORED.items()}


def ids_of(batch: dict[str, Tensor]) -> list[str]:
    """With the column `id` beside the batch."""
    return [bytes(each.tolist()).decode() for each in torch.split(batch["id"], batch["id.offsets"].diff().tolist())]


def by_sample(batches: Any) -> Rows:
    """Every sample of some batches, and all that is said of it."""
    rows: Rows = {}
    for batch in batches:
        told = {name: values for name, values in batch.items() if not name.startswith(("id", "row_weight"))}
        weights = batch.get("row_weight", torch.ones(len(batch["box"])))
        for at, name in enumerate(ids_of(batch)):
            if not weights[at]:
                continue
            assert name not in rows
            rows[name] = {key: values[at].clone() for key, values in told.items()}
    return rows


def assert_same(one: dict[str, Tensor], other: dict[str, Tensor]) -> None:
    assert one.keys() == other.keys()
    for name, values in one.items():
        assert values.dtype == other[name].dtype, name
        assert torch.equal(values, other[name]), name


def in_order(cache: fb.Cache, collate: ImageBatch, **options: Any) -> dict[str, Tensor]:
    """All images in one batch."""
    (batch,) = Loader(cache, global_batch_size=len(cache), shuffle=None, collate=collate, **options)
    return batch


@pytest.mark.parametrize("stored", STORED)
@pytest.mark.parametrize(
    ("dtype", "normalize", "channels"),
    [
        (torch.uint8, None, "first"),
        (torch.uint8, None, "last"),
        (torch.float32, None, "first"),
        (torch.float32, "imagenet", "first"),
        (torch.float32, HALF, "last"),
        (torch.float16, "imagenet", "first"),
        (torch.bfloat16, HALF, "first"),
        (torch.bfloat16, "imagenet", "last"),
    ],
)
def test_a_canvas_is_what_pillow_draws_scaled_and_rounded_to_the_type_asked_for(
    caches: dict[str, fb.Cache], stored: str, dtype: torch.dtype, normalize: Any, channels: Any
) -> None:
    for flip in (False, True):
        options = {"dtype": dtype, "normalize": normalize, "channels": channels, "flip": float(flip), "masks": "host"}
        batch = in_order(caches[stored], ImageBatch(caches[stored], **options))
        canvases = [drawn(each, flip=flip, quality=STORED[stored].get("quality")) for each in range(COUNT)]
        pixels = torch.from_numpy(np.stack([canvas for canvas, _ in canvases]))
        if dtype != torch.uint8:
            scaling = Scaling.of(normalize)
            scale, shift = torch.from_numpy(scaling.scale), torch.from_numpy(scaling.shift)
            pixels = (pixels.to(torch.float32) * scale + shift).to(dtype)
        assert batch["pixels"].dtype == dtype
        assert torch.equal(batch["pixels"], pixels)
        assert np.array_equal(batch["pixel_mask"].numpy(), np.stack([mask for _, mask in canvases]))
        assert batch["original_size"].tolist() == [list(size) for size in SIZES]
        assert batch["flipped"].tolist() == [flip] * COUNT
        memory = torch.contiguous_format if channels == "first" else torch.channels_last
        assert batch["pixels"].is_contiguous(memory_format=memory)


@pytest.mark.parametrize(
    ("normalize", "mean", "std"),
    [
        (None, (0, 0, 0), (1, 1, 1)),
        ("imagenet", (0.485, 0.456, 0.406), (0.229, 0.224, 0.225)),
        (HALF, *HALF),
    ],
)
def test_a_normalized_value_is_the_pixel_less_mean_over_std(normalize: Any, mean: Any, std: Any) -> None:
    pixels = np.broadcast_to(np.arange(256, dtype=np.uint8), (3, 1, 256))
    exact = (pixels / 255 - np.array(mean)[:, None, None]) / np.array(std)[:, None, None]
    assert np.abs(Scaling.of(normalize).apply(pixels) - exact).max() < 2**-20


@pytest.mark.parametrize("stored", STORED)
def test_every_way_of_reading_gives_what_decoding_afresh_gives(
    caches: dict[str, fb.Cache], pictures: Path, tmp_path: Path, stored: str
) -> None:
    """The same coins, bits, tags: any threads, workers, batch sizes, datasets, tiers, and no cache at all."""
    cache, epoch, seed = caches[stored], 3, 5
    options = {"normalize": "imagenet", "dtype": torch.float32, "flip": 0.5, "patch": 16, "threshold": 1.0}
    collate = ImageBatch(cache, transforms=[jitter], seed=seed, masks="host", **options)
    collate.set_epoch(epoch)
    kept = recipe(**STORED[stored])
    batch = collate([kept.make_row(sample(number)) for number in range(COUNT)])
    fresh = {sample_id(at): {name: values[at] for name, values in batch.items()} for at in range(COUNT)}
    assert len({bool(row["flipped"]) for row in fresh.values()}) == 2

    found = []
    for threads, size in ((0, 4), (1, 3), (2, 5)):
        loader = Loader(
            cache, global_batch_size=size, seed=seed, drop_last=False, threads=threads, collate=collate, columns=["id"]
        )
        loader.epoch = epoch
        found.append(by_sample(loader))
    for workers in ({"num_workers": 0}, {"num_workers": 2, "multiprocessing_context": "fork"}):
        batches = list(DataLoader(CacheDataset(cache), batch_size=4, collate_fn=collate, **workers))
        found.append(named(batches))
    dataset = CacheDataset(cache, collate=collate, seed=seed)
    dataset.set_epoch(epoch)
    found.append({sample_id(at): dataset[at] for at in range(COUNT)})
    with fb.CachedImages(fb.sources.images(pictures), kept, l2=tmp_path / "l2") as images:
        for _ in ("made", "from memory"):
            found.append(named([collate(images.read(range(COUNT)))]))
    with fb.CachedImages(fb.sources.images(pictures), kept, l1=0, l2=tmp_path / "l2") as images:
        found.append(named([collate(images.read(range(COUNT)))]))
    for rows in found:
        assert rows.keys() == fresh.keys()
        for name, row in rows.items():
            assert_same(row, fresh[name])


def named(batches: list[dict[str, Tensor]]) -> Rows:
    """Rows of batches that hold all samples in order."""
    joined = {name: torch.cat([batch[name] for batch in batches]) for name in batches[0]}
    return {sample_id(at): {name: values[at] for name, values in joined.items()} for at in range(COUNT)}


@pytest.mark.parametrize("context", ["fork", pytest.param("spawn", marks=pytest.mark.long)])
def test_workers_that_live_on_see_the_epoch(caches: dict[str, fb.Cache], context: str) -> None:
    collate = ImageBatch(caches["raw"], flip=0.5)
    loader = DataLoader(
        CacheDataset(caches["raw"]), batch_size=COUNT, collate_fn=collate, num_workers=1, persistent_workers=True,
        multiprocessing_context=context,
    )  # fmt: skip
    ids = [sample_id(at).encode() for at in range(COUNT)]
    for epoch in (0, 1, 7):
        collate.set_epoch(epoch)
        (batch,) = loader
        assert batch["flipped"].tolist() == Coins(0, epoch, sample_keys(ids)).flip("flip").tolist()


@st.composite
def stored_rows(draw: st.DrawFn) -> tuple[fb.ImageRecipe, list[dict[str, np.ndarray]]]:
    """Rows of any box, with content that is padding's color here and there."""
    kept = recipe(size=draw(st.sampled_from([16, 32, 40])))
    rows = []
    for number in range(draw(st.integers(1, 4))):
        width, height = draw(st.integers(1, kept.size)), draw(st.integers(1, kept.size))
        left, top = draw(st.integers(0, kept.size - width)), draw(st.integers(0, kept.size - height))
        colors = np.array([*PAD, 7], np.uint8)
        content = np.random.default_rng(draw(st.integers(0, 99))).choice(colors, (3, height, width))
        rows.append(
            {
                "pixels": content.reshape(-1),
                "box": np.array([left, top, width, height], np.int32),
                "original_size": np.array([width, height], np.int32),
                "id": np.frombuffer(str(number).encode(), np.uint8),
                "tags": np.flatnonzero(np.arange(len(TAGS)) % (number + 1) == 0).astype(np.uint32),
            }
        )
    return kept, rows


@settings(deadline=None, max_examples=scaled(60))
@given(
    case=stored_rows(),
    channels=st.sampled_from(["first", "last"]),
    dtype=st.sampled_from([torch.uint8, torch.float16]),
)
def test_the_mask_of_a_flipped_image_is_the_flipped_mask(case: Any, channels: Any, dtype: torch.dtype) -> None:
    kept, rows = case
    options = {"channels": channels, "dtype": dtype, "patch": 8, "threshold": 1.0, "masks": "host"}
    plain, flipped = (ImageBatch(kept, flip=flip, **options)(rows) for flip in (0.0, 1.0))
    for name in ("pixels", "pixel_mask", "token_mask"):
        assert torch.equal(flipped[name], plain[name].flip(-1)), name
    for batch in (plain, flipped):
        for mask, (left, top, width, height) in zip(batch["pixel_mask"], batch["box"].tolist(), strict=True):
            content = ~mask
            assert content.sum() == width * height == content[top : top + height, left : left + width].sum()
        cells = batch["pixel_mask"].unfold(1, 8, 8).unfold(2, 8, 8)
        assert torch.equal(batch["token_mask"], cells.all(dim=-1).all(dim=-1))


def window(canvases: Canvases, coins: Coins) -> Canvases:
    return canvases.seen_through(coins.integers("left", -4, 13), coins.integers("top", -4, 9), (40, 32))


def across(canvases: Canvases, coins: Coins) -> Canvases:
    """Content and padding, resized together."""
    return canvases.resized_from(np.tile([3, 1, 41, 45], (len(canvases.box), 1)), (32, 24))


@pytest.mark.parametrize("patch", [None, 8])
@pytest.mark.parametrize("flip", [0.0, 0.5, 1.0])
@pytest.mark.parametrize(
    ("transforms", "padded"),
    [
        ([], True),
        ([jitter], True),
        ([window], True),
        ([RandomResizedCrop((32, 24))], False),
        (aspect_buckets([(24, 40)]), True),  # smaller images keep their size
        ([jitter, across], True),
    ],
    ids=["none", "shifted", "window", "crop", "bucket", "resized"],
)
def test_without_pixel_masks_all_else_is_the_same_and_boxes_say_where_padding_is(
    caches: dict[str, fb.Cache], transforms: Any, padded: bool, flip: float, patch: int | None
) -> None:
    options = {"flip": flip, "patch": patch, "threshold": 1.0, "transforms": transforms}
    plain = in_order(caches["raw"], ImageBatch(caches["raw"], **options))
    host = in_order(caches["raw"], ImageBatch(caches["raw"], masks="host", **options))
    assert host.keys() - plain.keys() == {"pixel_mask"}
    assert ("token_mask" in plain) == (patch is not None)
    derived = masks_on_device(plain, patch, threshold=1.0)
    assert_same(plain, {name: host[name] for name in plain})
    assert_same(derived, {name: host[name] for name in derived})
    assert bool(host["pixel_mask"].any()) == padded


def test_orientation_tags_are_swapped_with_the_flip_and_no_others(caches: dict[str, fb.Cache]) -> None:
    swapped = {"looking_left": "looking_right", "looking_right": "looking_left"}
    for flip in (0.0, 1.0):
        names = [
            sorted(TAGS.index(swapped.get(tag, tag) if flip else tag) for tag in picture_tags(number))
            for number in range(COUNT)
        ]
        hot = in_order(caches["raw"], ImageBatch(caches["raw"], flip=flip))["tags"]
        assert hot.dtype == torch.float32
        assert [torch.nonzero(row).flatten().tolist() for row in hot] == names
        assert set(hot.unique().tolist()) == {0.0, 1.0}
        flat = in_order(caches["raw"], ImageBatch(caches["raw"], flip=flip, tags="indices"))
        assert flat["tags"].dtype == torch.int64
        assert [part.tolist() for part in torch.split(flat["tags"], flat["tags.offsets"].diff().tolist())] == names
    kept = in_order(caches["raw"], ImageBatch(caches["raw"], flip=1.0, orientation={}))["tags"]
    assert torch.equal(kept, in_order(caches["raw"], ImageBatch(caches["raw"]))["tags"])
    other = in_order(caches["raw"], ImageBatch(caches["raw"], flip=1.0, orientation={"cat": "outdoors"}))["tags"]
    assert torch.equal(other, kept[:, [0, 3, 2, 1]])
    assert "tags" not in in_order(caches["raw"], ImageBatch(caches["raw"], tags=None))


def test_a_flip_refuses_a_tag_whose_other_is_not_in_the_vocabulary() -> None:
    lonely = recipe(tags=("cat", "looking_right"))
    with pytest.raises(
        ValueError, match=r"has the tag 'looking_right' but not 'looking_left'.* or pass orientation={}"
    ):
        ImageBatch(lonely, flip=0.5)
    ImageBatch(lonely)
    ImageBatch(lonely, flip=0.5, orientation={})
    ImageBatch(recipe(tags=("cat",)), flip=0.5)


def row_of(box: list[int], name: str = "x") -> dict[str, np.ndarray]:
    return {
        "pixels": np.zeros(3 * box[2] * box[3], np.uint8),
        "box": np.array(box, np.int32),
        "original_size": np.array(box[2:], np.int32),
        "id": np.frombuffer(name.encode(), np.uint8),
        "tags": np.empty(0, np.uint32),
    }


def test_with_patch_16_a_token_with_230_padded_pixels_is_kept_and_one_with_231_ignored() -> None:
    collate = ImageBatch(recipe(size=32), patch=16)
    kept, ignored = collate([row_of([0, 0, 16 + 2, 13]), row_of([0, 0, 16 + 5, 5])])["token_mask"]
    assert kept.tolist() == [[False, False], [True, True]]  # the second token has 2 · 13 = 26 pixels of 256
    assert ignored.tolist() == [[False, True], [True, True]]  # 5 · 5 = 25


def test_an_image_without_a_token_left_is_named() -> None:
    rows = [row_of([0, 0, 32, 32]), row_of([15, 0, 1, 32], "cats/thin é.jpg")]
    said = r"'cats/thin é\.jpg' .* 1 × 32 pixels, 90% or more of every patch of 16 × 16"
    with pytest.raises(RecipeInvalid, match=said) as caught:
        ImageBatch(recipe(size=32), patch=16)(rows)
    assert (caught.value.facts["box"], caught.value.facts["patch"]) == ((15, 0, 1, 32), 16)
    assert ImageBatch(recipe(size=32), patch=16, threshold=0.95)(rows)["token_mask"].shape == (2, 2, 2)


def test_images_without_a_token_left_are_counted_when_a_loader_is_made(caches: dict[str, fb.Cache]) -> None:
    cache, collate = caches["raw"], ImageBatch(caches["raw"], patch=24)
    said = r"(?s)all tokens of the image '006\.png' are ignored: with content of 7 × 5 pixels.*large_enough"
    for make in (Loader, CacheDataset):
        options = {"global_batch_size": 4} if make is Loader else {}
        with pytest.raises(RecipeInvalid, match=said) as caught:
            make(cache, collate=collate, **options)
        assert caught.value.facts["images"] == 1
    kept = Loader(
        cache, global_batch_size=4, drop_last=False, collate=collate, selection=collate.large_enough(), columns=["id"]
    )
    assert len(by_sample(kept)) == COUNT - 1
    Loader(cache, global_batch_size=4, collate=ImageBatch(cache, patch=24, transforms=[jitter]))


def test_with_a_key_making_a_loader_does_not_hash_the_whole_cache(
    pictures: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv(VARIABLE, "a secret")
    cache = image_cache(tmp_path / "cache", pictures)
    collate = ImageBatch(cache, patch=24)
    for make in (Loader, CacheDataset):
        options = {"global_batch_size": 4} if make is Loader else {}
        make(cache, collate=collate, **options)
    with pytest.raises(RecipeInvalid, match=r"(?s)all tokens of the image '006\.png' are ignored"):
        list(Loader(cache, global_batch_size=1, collate=collate))
    kept = Loader(cache, global_batch_size=1, collate=collate, selection=collate.large_enough())
    assert len(list(kept)) == COUNT - 1
    others = (layer_path(tmp_path / "cache", "images")).glob("0*[1-9].safetensors")  # chunk 0 tells how large rows are
    for path in others:
        flip_byte(path, path.stat().st_size - 1)
    unread = Loader(fb.open_cache(tmp_path / "cache"), global_batch_size=4, collate=collate)
    with pytest.raises(ChunkCorrupt, match="SHA-256"):
        list(unread)


def test_making_a_loader_of_a_remote_cache_fetches_only_the_first_chunk(
    caches: dict[str, fb.Cache], tmp_path: Path
) -> None:
    far = FarFolder(caches["raw"].root)
    cache = fb.open_cache(TieredStore(LocalStore(tmp_path / "tier"), far))
    loader = Loader(cache, global_batch_size=1, collate=ImageBatch(cache, patch=24), drop_last=False)
    assert len(set(far.reads)) <= 1 < len(cache.chunk_numbers), "chunk 0 tells how large rows are"
    with pytest.raises(RecipeInvalid, match=r"(?s)all tokens of the image '006\.png' are ignored"):
        list(loader)


def test_a_loader_gives_images_their_batches_with_the_columns_asked_for(caches: dict[str, fb.Cache]) -> None:
    cache = caches["jpeg"]
    batch = next(iter(Loader(cache, global_batch_size=3, shuffle=None)))
    assert_same(batch, next(iter(Loader(cache, global_batch_size=3, shuffle=None, collate=ImageBatch(cache)))))
    columns = next(iter(Loader(cache, global_batch_size=3, shuffle=None, collate=StoredBatch(cache, ["box", "id"]))))
    assert list(columns) == ["box", "id", "id.offsets"]
    further = next(iter(Loader(cache, global_batch_size=3, shuffle=None, columns=["metadata", "row"])))
    assert_same({name: further[name] for name in batch}, batch)
    assert further.keys() - batch.keys() == {"metadata", "metadata.offsets", "row"}
    row = CacheDataset(cache, collate=ImageBatch(cache), columns=["metadata"])[1]
    assert row["metadata"].tolist() == cache[1]["metadata"].tolist()
    assert {"pixels", "box", "tags"} <= row.keys()
    for make in (partial(Loader, global_batch_size=3), CacheDataset):
        with pytest.raises(ValueError, match="'box' is already in the batch"):
            make(cache, collate=ImageBatch(cache), columns=["box"])


def test_flips_vary_by_epoch_and_a_resumed_loader_goes_on_with_them(caches: dict[str, fb.Cache]) -> None:
    def loader(threads: int) -> Loader:
        collate = ImageBatch(caches["raw"], flip=0.5)
        return Loader(caches["raw"], global_batch_size=2, collate=collate, columns=["id"], threads=threads)

    whole = loader(2)
    epochs = [list(whole) for _ in range(3)]
    flips = [{name: bool(row["flipped"]) for name, row in by_sample(epoch).items()} for epoch in epochs]
    shared = set.intersection(*map(set, flips))
    assert len({tuple(each[name] for name in sorted(shared)) for each in flips}) == 3
    stopped = loader(1)
    taken = [next(batches) for batches in [iter(stopped)] for _ in range(3)]
    resumed = loader(0)
    resumed.load_state_dict(stopped.state_dict())
    for one, other in zip([*taken, *resumed], epochs[0], strict=True):
        assert_same(one, other)


def test_a_mixture_of_images_paints_each_row_of_its_cache(caches: dict[str, fb.Cache]) -> None:
    mixture = Mixture.of([Ingredient(caches["raw"], repeat=1), Ingredient(caches["zstd"], repeat=2)], seed=1)
    loader = Loader(mixture, global_batch_size=4, collate=ImageBatch(caches["raw"], flip=0.5), columns=["id"])
    seen = set()
    for batch in loader:
        for at, name in enumerate(ids_of(batch)):
            number, flip = int(name[:3]), bool(batch["flipped"][at])
            assert int(batch["local_index"][at]) == number
            assert np.array_equal(batch["pixels"][at].numpy(), drawn(number, flip=flip)[0])
            seen.add((int(batch["dataset_id"][at]), flip))
    assert seen == {(0, False), (0, True), (1, False), (1, True)}


def test_caches_with_other_canvases_or_tags_are_refused(
    caches: dict[str, fb.Cache], pictures: Path, tmp_path: Path
) -> None:
    other = image_cache(tmp_path / "other", pictures, size=32, tags=("cat",))
    said = r"the cache at '.*other' has another size, tags than this ImageBatch"
    with pytest.raises(ValueError, match=said):
        Loader(other, global_batch_size=2, collate=ImageBatch(caches["raw"]))
    with pytest.raises(ValueError, match=said):
        CacheDataset(other, collate=ImageBatch(caches["raw"]))
    with pytest.raises(ValueError, match=r"the vocabulary of tags is .* but .*other'; mix only caches"):
        Mixture.of([Ingredient(caches["raw"], repeat=1), Ingredient(other, repeat=1)])
    with pytest.raises(ValueError, match="another size than"):
        Loader(other, global_batch_size=2, collate=ImageBatch(caches["raw"], tags=None))


def test_memory_of_a_batch_that_is_gone_is_used_again_and_no_other(caches: dict[str, fb.Cache]) -> None:
    collate = ImageBatch(caches["raw"], dtype=torch.float32, channels="last")
    loader = Loader(caches["raw"], global_batch_size=5, shuffle=None, threads=0, collate=collate)
    for batches in (loader, DataLoader(CacheDataset(caches["raw"]), 5, drop_last=True, collate_fn=collate)):
        used, others = [], []
        for batch in batches:
            used.append(batch["pixels"].data_ptr())
            size = batch["pixels"].nbytes
            del batch
            others.append(np.empty(size, np.uint8))  # takes what was given back to the allocator
        assert len(used) == 2
        assert len(set(used)) == 1
    held = list(loader)
    copies = [{name: values.clone() for name, values in batch.items()} for batch in held]
    list(loader)
    for one, other in zip(held, copies, strict=True):
        assert_same(one, other)


def test_a_changed_byte_of_an_image_is_found_when_it_is_painted(pictures: Path, tmp_path: Path) -> None:
    cache = image_cache(tmp_path / "cache", pictures)
    path = chunk_path(tmp_path / "cache", "images", 1)
    (first,) = cache.views([int(cache.chunk_starts[1])], "pixels")
    flip_byte(path, path.read_bytes().index(first.tobytes()))
    with pytest.raises(ChunkCorrupt, match="block 0 of column 'pixels' in chunk 1"):
        list(Loader(fb.open_cache(tmp_path / "cache"), global_batch_size=2, shuffle=None))


@pytest.mark.parametrize("channels", ["first", "last"])
@pytest.mark.parametrize("dtype", [torch.float32, torch.float16, torch.bfloat16])
def test_normalizing_on_a_device_gives_the_bits_of_the_loader(
    caches: dict[str, fb.Cache], dtype: torch.dtype, channels: Any
) -> None:
    check_on("cpu", caches["raw"], dtype, channels)


ODD = ((0.31, 0.32, 0.33), (0.51, 0.52, 0.53))  # that no other test has used


@pytest.mark.gpu
@pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a CUDA device")
@pytest.mark.parametrize("dtype", [torch.float32, torch.float16, torch.bfloat16])
def test_normalizing_on_a_gpu_gives_the_bits_of_the_loader(caches: dict[str, fb.Cache], dtype: torch.dtype) -> None:
    check_on("cuda", caches["raw"], dtype, "first")
    check_on("cuda", caches["raw"], dtype, "last")


def check_on(device: str, cache: fb.Cache, dtype: torch.dtype, channels: Any) -> None:
    for normalize in (None, "imagenet", [[0.1, 0.2, 0.3], [1, 2, 3]]):
        expected = in_order(cache, ImageBatch(cache, normalize=normalize, dtype=dtype, channels=channels))["pixels"]
        pixels = in_order(cache, ImageBatch(cache, channels=channels))["pixels"].to(device)
        found = normalize_on_device(pixels, normalize, dtype)
        assert found.dtype == dtype
        assert torch.equal(found.cpu(), expected)
        assert found.stride() == expected.stride()


@pytest.mark.gpu
@pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a CUDA device")
def test_with_a_gpu_all_tensors_of_a_batch_are_pinned(caches: dict[str, fb.Cache]) -> None:
    options: dict[str, Any] = {"dtype": torch.bfloat16, "channels": "last", "patch": 16, "masks": "host"}
    collate = ImageBatch(caches["raw"], transforms=[jitter], **options)
    for batch in Loader(caches["raw"], global_batch_size=4, collate=collate):
        assert all(values.is_pinned() for values in batch.values())


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ({"dtype": torch.float64}, "dtype must be one of .*torch.bfloat16"),
        ({"normalize": "imagenet"}, "normalize needs a float dtype"),
        ({"normalize": "resnet", "dtype": torch.float32}, "normalize must be one of imagenet"),
        ({"normalize": ((0, 0, 0), (1, 0, 1)), "dtype": torch.float32}, "std must be above 0"),
        ({"normalize": (0.5, 0.5), "dtype": torch.float32}, "three numbers each"),
        ({"normalize": ((1, 1), (1, 1, 1)), "dtype": torch.float32}, "three numbers each"),
        ({"channels": "middle"}, "'first' or 'last'"),
        ({"masks": "gpu"}, "masks must be 'host' or None"),
        ({"flip": 1.5}, "from 0 to 1"),
        ({"tags": "names"}, "'multi_hot', 'indices' or None"),
        ({"patch": 10}, "does not divide into patches of 10"),
        ({"patch": 16, "threshold": 0}, "above 0 and up to 1"),
        ({"patch": "16"}, "patch must be a whole number of at least 0"),
        ({"flip": True}, "flip must be a probability"),
        ({"seed": "1"}, "seed must be a whole number of at least 0"),
        ({"transforms": [5]}, "transforms has 5; pass functions"),
    ],
)
def test_what_cannot_be_asked_for_is_refused_at_once(options: Any, message: str) -> None:
    with pytest.raises((TypeError, ValueError), match=message):
        ImageBatch(recipe(), **options)


def test_only_images_and_their_rows_become_batches_of_images(caches: dict[str, fb.Cache]) -> None:
    with pytest.raises(TypeError, match="pass an ImageRecipe or an open cache of images"):
        ImageBatch("photos")  # type: ignore[arg-type]
    with pytest.raises(
        TypeError, match=r"orientation must be a dict .* \{'looking_left': 'looking_right'\} \(got a list\)"
    ):
        ImageBatch(caches["raw"], flip=0.5, orientation=[("looking_left", "looking_right")])  # type: ignore[arg-type]
    with pytest.raises(ValueError, match="rows have no column 'jpeg'"):
        ImageBatch(caches["jpeg"])([caches["raw"][0]])
    with pytest.raises(ValueError, match="pixels must be uint8"):
        normalize_on_device(torch.zeros(2, 3, 4, 4))


def test_rows_for_another_canvas_or_vocabulary_are_refused_and_not_painted_somewhere(
    caches: dict[str, fb.Cache],
) -> None:
    larger = msgspec.structs.replace(ImageBatch(caches["raw"]).recipe, size=96)
    with pytest.raises(ValueError, match=r"was not made for a canvas of 96: its box is .* the recipe that made"):
        ImageBatch(larger)([caches["raw"][0]])
    tagged = next(row for row in caches["raw"] if len(row["tags"]))
    with pytest.raises(ValueError, match="tags beyond the 0 of this ImageBatch"):
        ImageBatch(msgspec.structs.replace(larger, size=48, tags=None))([tagged])


def test_a_collate_tells_what_batches_it_makes() -> None:
    assert repr(ImageBatch(recipe(), flip=0.5)) == "<ImageBatch of 48 × 48 in uint8, flip 0.5, 4 tags as multi_hot>"
    assert repr(ImageBatch(recipe(), dtype=torch.float16, tags=None)).endswith("in float16, flip 0, no tags>")


def test_another_vocabulary_is_read_from_the_metadata_of_the_same_cache(caches: dict[str, fb.Cache]) -> None:
    cache, names = caches["raw"], ("outdoors", "unheard-of", "cat", "looking_right", "looking_left")
    collate = ImageBatch(cache, vocabulary=names, flip=1.0)
    expected = [
        [name in {_FLIPPED.get(tag, tag) for tag in picture_tags(number)} for name in names] for number in range(COUNT)
    ]
    loaded = next(iter(Loader(cache, global_batch_size=COUNT, shuffle=None, collate=collate)))
    assert loaded["tags"].tolist() == expected
    [mapped] = DataLoader(CacheDataset(cache), batch_size=COUNT, collate_fn=collate)
    assert torch.equal(mapped["tags"], loaded["tags"])
    indices = ImageBatch(cache, vocabulary=names, tags="indices")([cache[1], cache[3]])
    assert (indices["tags"].tolist(), indices["tags.offsets"].tolist()) == ([4, 2, 4], [0, 1, 3])
    assert "5 tags" in repr(collate)
    with pytest.raises(TypeError, match="vocabulary must be a sequence of tags"):
        ImageBatch(cache, vocabulary="cat")


_FLIPPED = {"looking_left": "looking_right", "looking_right": "looking_left"}


def test_caches_with_other_tags_mix_where_a_vocabulary_is_named(
    caches: dict[str, fb.Cache], pictures: Path, tmp_path: Path
) -> None:
    other = image_cache(tmp_path / "other", pictures, tags=("cat",))
    collate = ImageBatch(caches["raw"], vocabulary=("cat",))
    collate.check([other], [None])
    apart = image_cache(tmp_path / "apart", pictures, tag_separator=" ")
    with pytest.raises(ValueError, match="another tag_separator"):
        collate.check([apart], [None])


def test_a_batch_whose_images_are_all_unreadable_keeps_its_shape(pictures: Path, tmp_path: Path) -> None:
    (tmp_path / "bad.png").write_bytes(b"<html>")
    images = fb.CachedImages(fb.sources.images(tmp_path), recipe(), unreadable="skip")
    collate = ImageBatch(images.recipe, patch=16, dtype=torch.float32, masks="host")
    [batch] = DataLoader(images, batch_size=1, collate_fn=collate)
    shapes = {name: tuple(batch[name].shape) for name in ("pixels", "pixel_mask", "token_mask", "box", "tags")}
    assert shapes == {
        "pixels": (0, 3, 48, 48),
        "pixel_mask": (0, 48, 48),
        "token_mask": (0, 3, 3),
        "box": (0, 4),
        "tags": (0, len(TAGS)),
    }
