"""Batches of images: canvases, masks, boxes and tags.

    loader = Loader(cache, global_batch_size=64, collate=ImageBatch(cache, normalize="imagenet", dtype=torch.bfloat16))
    rows = DataLoader(CacheDataset(cache), batch_size=64, collate_fn=ImageBatch(cache), num_workers=2)

    pixels         [images, 3, size, size], of type `dtype`
    pixel_mask     bool  [images, size, size], True = PAD; with masks="host" or by `masks_on_device`
    token_mask     bool  [images, size/patch, size/patch], True = ignored; with a `patch`
    box            int32 [images, 4], left, top, width, height of the content, after the flip
    original_size  int32 [images, 2], width and height of the image as displayed
    flipped        bool  [images]
    tags           float32 [images, vocabulary]; or "indices": int64, flat, with tags.offsets
    label          int64 [images], with `classes`: the class of an image, −100 for one without

SDPA wants True = keep, the opposite of both masks; a CLS token is never ignored:

    ignored = F.pad(batch["token_mask"].flatten(1), (1, 0), value=False)        # CLS first
    F.scaled_dot_product_attention(q, k, v, attn_mask=~ignored[:, None, None, :])
"""

from collections.abc import Iterable, Iterator, Mapping, Sequence
from functools import partial
from numbers import Real
from typing import Any, Literal, get_args

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from forebay.columns import Array, Columns
from forebay.errors import RecipeInvalid, choice_error
from forebay.feeding.selection import Where
from forebay.feeding.stream import SelectionRule, Stream
from forebay.fields import checked_whole
from forebay.images import ImageRecipe
from forebay.images.geometry import Normalize, Scaling, fit_many
from forebay.images.recipe import image_recipe
from forebay.images.token_masks import Name, TokenMasks
from forebay.masks.rectangle import IGNORE_THRESHOLD, flip_rectangles, pixel_mask
from forebay.order.coins import Coins, sample_keys
from forebay.order.selected_rows import Selection
from forebay.read.cache import Cache
from forebay.torch.batches import Batch, Buffers, plain_batch, to_tensor
from forebay.torch.collate import Collate, caches_of
from forebay.torch.images.canvases import Canvases, JointTransform, check_filled, transformed
from forebay.torch.images.crops import AspectBucket
from forebay.torch.images.image_tags import TagReader, TagStyle, sample_id
from forebay.torch.images.painter import Boxes, Channels, Painter, Planes, mirrored

_DTYPES = (torch.uint8, torch.float32, torch.float16, torch.bfloat16)
_SHARED = ("size", "pad_color", "storage")  # fields that a cache's recipe must share, besides tags
_REUSED_BYTES = 256 * 1024 * 1024  # memory of earlier batches that is reused, as a `collate_fn`


class ImageBatch(Collate):
    """A collate for images: of a `Loader`, of a `CacheDataset`, or the `collate_fn` of torch's `DataLoader`.

    `flip` is the probability that an image is flipped left–right, with its masks, its box and the tags that
    `orientation` pairs. It depends on seed, epoch and sample id: those of the `Loader` or `CacheDataset`, or, as a
    `collate_fn`, `seed` and the epoch last set by `set_epoch`.

    `normalize` is "imagenet" or (mean, std), for float dtypes; without it, floats are from 0 to 1. `channels="last"`
    returns the same shape in the memory format `torch.channels_last`. `transforms` change image, mask and box together
    (`forebay.torch.Canvases`), after the flip. One with `moves_pixels = False` changes colors only; with any other,
    and with `flip`, columns made from pixels (latents, teacher maps) cannot be in the batch.

    `vocabulary` lists tags to use instead of the recipe's, in the order of their indices. Tags are then read from
    stored metadata, so another vocabulary does not need another cache.

    `classes` are tags of which an image has at most one, or "tags" for the whole vocabulary: `label` is the index of
    its class among them, for a cross entropy.

    Every batch has `box`, from which both masks follow; `masks_on_device` derives them where the model is.
    `masks="host"` adds `pixel_mask`, a quarter of the bytes of a uint8 batch. A transform that leaves padding inside a
    box, which a box cannot express, needs it.
    """

    makes = ("pixels", "box", "original_size", "flipped")

    def __init__(
        self,
        source: ImageRecipe | Cache | Stream,
        *,
        normalize: Normalize = None,
        dtype: torch.dtype = torch.uint8,
        channels: Channels = "first",
        flip: float = 0.0,
        orientation: Mapping[str, str] | None = None,
        tags: TagStyle | None = "multi_hot",
        vocabulary: Sequence[str] | None = None,
        patch: int | None = None,
        threshold: float = IGNORE_THRESHOLD,
        transforms: Sequence[JointTransform] = (),
        classes: Sequence[str] | None = None,
        masks: Literal["host"] | None = None,
        seed: int = 0,
    ) -> None:
        _check_choices(normalize, dtype, channels, tags, masks)
        _check_pairs(orientation)
        self.recipe = image_recipe(caches_of(source)[0] if isinstance(source, Cache | Stream) else source)
        _check_transforms(transforms, self.recipe.size)
        self.seed = checked_whole("seed", seed)
        self._flip, self._tag_style, self._dtype = _probability(flip), tags, dtype
        self.moves_pixels = flip > 0 or any(getattr(each, "moves_pixels", True) for each in transforms)
        self._tags = TagReader(self.recipe, tags, vocabulary, classes, orientation if flip else {})
        self.vocabulary, self.classes = self._tags.vocabulary, self._tags.classes
        self._transforms, self._masks_on_host = tuple(transforms), masks == "host"
        self._token_masks = None if patch is None else TokenMasks(self.recipe.size, patch, threshold)
        self._size, scaling = (self.recipe.size, self.recipe.size), Scaling.of(normalize)
        self._painter = Painter(self.recipe.pad_color, scaling, dtype, channels)
        self._byte_painter = Painter(self.recipe.pad_color, scaling, torch.uint8, "first")  # for transforms
        self._buffers = Buffers(_REUSED_BYTES, pinned=False)
        # In shared memory, so that persistent workers see the next epoch. torch declares no types here.
        self._epoch: Tensor = torch.zeros((), dtype=torch.int64).share_memory_()  # type: ignore[no-untyped-call]
        self.columns = (self.recipe.stored_column, "box", "original_size", "id", *self._tags.columns)
        self.viewed = (self.recipe.stored_column,)

    def __repr__(self) -> str:
        tags = "no tags" if self._tag_style is None else f"{len(self.vocabulary):,} tags as {self._tag_style}"
        values = str(self._dtype).removeprefix("torch.")
        return f"<ImageBatch of {self.recipe.size} × {self.recipe.size} in {values}, flip {self._flip:g}, {tags}>"

    @property
    def epoch(self) -> int:
        """The epoch that coins are drawn for, as a `collate_fn`."""
        return int(self._epoch)

    def set_epoch(self, epoch: int) -> None:
        """Draw the coins of this epoch from now on, also in worker processes that are running."""
        self._epoch.fill_(epoch)

    def check(self, caches: Sequence[Cache], selections: Sequence[Selection | None]) -> None:
        """Raise for caches with other canvases or tags, and for rows of which no token is kept."""
        for cache in caches:
            self._check_cache(cache)
        for cache, selection in zip(caches, selections, strict=True):
            self._check_rows(cache, selection)

    def _check_cache(self, cache: Cache) -> None:
        """Raise for a cache with other canvases or tags, whose boxes and indices would have another meaning."""
        theirs = image_recipe(cache)
        names = (*_SHARED, *self._tags.shared_fields)
        differs = [name for name in names if getattr(theirs, name) != getattr(self.recipe, name)]
        if differs:
            raise ValueError(
                f"the cache at '{cache.root}' has another {', '.join(differs)} than this ImageBatch; "
                "make the ImageBatch from that cache, and mix only caches that agree in these"
            )

    def _check_rows(self, cache: Cache, selection: Selection | None) -> None:
        """Raise for rows with so little content that all their tokens are ignored, before a batch of them would.

        Remote caches and those with a key are not checked here: opening a chunk fetches, or hashes, all of it.
        """
        tokens, count, first = self._token_masks, 0, -1
        if tokens is None or self._transforms or cache.is_remote or cache.generation.tagged:
            return
        for start, boxes in zip(cache.chunk_starts.tolist(), cache.chunks(["box"]), strict=False):
            ignored = self._all_ignored(boxes)
            if selection is not None:
                ignored &= selection.mask(start, start + len(ignored))
            count += int(ignored.sum())
            first = start + int(ignored.argmax()) if first < 0 and ignored.any() else first
        if count:
            row = cache[first]
            name = bytes(row["id"]).decode("utf-8", "backslashreplace")
            raise tokens.error(name, row["box"].tolist(), count)

    def large_enough(self, within: SelectionRule | None = None) -> Where:
        """Return a `selection` of the rows that keep at least one token, optionally within another rule."""
        return Where("a token is kept", lambda columns: ~self._all_ignored(columns), columns=["box"], within=within)

    def _all_ignored(self, columns: Columns) -> NDArray[np.bool_]:
        boxes = np.asarray(columns["box"])
        if self._token_masks is None or self._transforms:  # which change the share of padding
            return np.zeros(len(boxes), np.bool_)
        return self._token_masks.all_ignored(boxes, self._size)

    def __call__(self, rows: Sequence[Mapping[str, Array | Tensor]]) -> Batch:
        """Make a batch of stored rows, from a `CacheDataset` or `forebay.CachedImages`."""
        for missing in (name for row in rows for name in self.columns if name not in row):
            raise ValueError(
                f"rows have no column '{missing}'; they need {', '.join(self.columns)}, as a cache of this recipe "
                "stores them"
            )
        table: dict[str, Any] = {name: [np.asarray(row[name]) for row in rows] for name in self.columns}
        for name, width in (("box", 4), ("original_size", 2)):
            table[name] = np.array(table[name], np.int32).reshape(len(rows), width)
        self._check_meaning(table)
        coins = Coins(self.seed, self.epoch, sample_keys(each.tobytes() for each in table["id"]))
        return self.collate(table, coins, self._buffers)

    def collate(self, table: Mapping[str, Any], coins: Coins, buffers: Buffers) -> Batch:
        """Make a batch of rows of a cache."""
        flipped = coins.flip("flip", self._flip)
        stored = np.asarray(table["box"])
        contents = self._contents(table[self.recipe.stored_column], stored, flipped)
        boxes = stored.copy()
        boxes[flipped] = flip_rectangles(stored[flipped], self._size)
        name = partial(sample_id, table)
        if self._transforms:
            batch = self._transformed(contents, boxes, coins, buffers, name)
        else:
            batch = self._letterboxed(contents, boxes, buffers, name)
        facts = {"original_size": np.asarray(table["original_size"]), "flipped": flipped}
        return batch | plain_batch(facts | self._tags.read(table, flipped), buffers)

    def _letterboxed(self, contents: Iterable[Planes], boxes: Boxes, buffers: Buffers, name: Name) -> Batch:
        """Paint contents, which are consumed one by one; their masks follow from the boxes."""
        batch: Batch = {"pixels": self._painter.paint(contents, boxes, self._size, buffers)}
        if self._masks_on_host:
            batch["pixel_mask"] = to_tensor(pixel_mask(boxes, self._size), buffers)
        if self._token_masks is not None:
            batch["token_mask"] = to_tensor(self._token_masks.of_boxes(boxes, self._size, name), buffers)
        return batch | {"box": to_tensor(boxes, buffers)}

    def _transformed(
        self, contents: Iterable[Planes], boxes: Boxes, coins: Coins, buffers: Buffers, name: Name
    ) -> Batch:
        """Paint canvases of bytes, apply the transforms to them, and paint the result."""
        pixels = self._byte_painter.paint(contents, boxes, self._size, Buffers(0, pinned=False))
        mask = torch.from_numpy(pixel_mask(boxes, self._size))
        canvases = Canvases(pixels, mask, torch.from_numpy(boxes), self.recipe.pad_color)
        canvases = transformed(canvases, self._transforms, coins)
        height, width = canvases.size
        padded, box = canvases.mask.contiguous().numpy(), canvases.box.contiguous().numpy()
        whole = np.broadcast_to(np.array([0, 0, width, height], np.int32), (len(boxes), 4))
        batch: Batch = {"pixels": self._painter.paint(canvases.pixels.numpy(), whole, canvases.size, buffers)}
        if self._masks_on_host:
            batch["pixel_mask"] = to_tensor(padded, buffers)
        else:
            check_filled(canvases, name)
        if self._token_masks is not None:
            batch["token_mask"] = to_tensor(self._token_masks.of_masks(padded, box, name), buffers)
        return batch | {"box": to_tensor(box, buffers)}

    def _contents(self, stored: Iterable[Array], boxes: Boxes, flipped: NDArray[np.bool_]) -> Iterator[Planes]:
        for row, (_, _, width, height), flip in zip(stored, boxes.tolist(), flipped.tolist(), strict=True):
            content = self.recipe.planes_of(row, width, height)
            yield mirrored(content) if flip else content

    def _check_meaning(self, table: Mapping[str, Any]) -> None:
        """Raise for rows that another recipe made, as far as their boxes and tags show it."""
        fitted = fit_many(table["original_size"], self.recipe.size)
        others = np.flatnonzero((fitted[:, 2:] != table["box"][:, 2:]).any(axis=1))
        if len(others):
            raise ValueError(
                f"'{sample_id(table, int(others[0]))}' was not made for a canvas of {self.recipe.size}: its box is "
                f"{table['box'][others[0]].tolist()}; make the ImageBatch from the recipe that made the rows"
            )
        known = len(self.vocabulary)
        if any(len(tags) and int(tags.max()) >= known for tags in table.get("tags", ())):
            raise ValueError(
                f"rows have tags beyond the {known} of this ImageBatch; make it from the cache, or from the `recipe` "
                "of CachedImages, which has their vocabulary"
            )


def _check_transforms(transforms: Sequence[JointTransform], size: int) -> None:
    for transform in (each for each in transforms if not callable(each)):
        raise TypeError(f"transforms has {transform!r}; pass functions (canvases, coins) -> canvases")
    for bucket in (each for each in transforms if isinstance(each, AspectBucket)):
        height, width = bucket.size
        if max(bucket.size) > size:
            raise RecipeInvalid(
                f"the bucket of {height} × {width} pixels exceeds the stored canvas of {size} × {size}; stored images "
                "are never enlarged",
                hint=f"choose sides up to {size}, or build the cache with a larger size",
            )


def _probability(flip: float) -> float:
    if isinstance(flip, bool) or not isinstance(flip, Real) or not 0 <= flip <= 1:
        raise ValueError(f"flip must be a probability from 0 to 1 (got {flip!r})")
    return flip


def _check_pairs(orientation: Mapping[str, str] | None) -> None:
    if orientation is not None and not isinstance(orientation, Mapping):
        raise TypeError(
            f"orientation must be a dict of tags that a flip swaps, such as {{'looking_left': 'looking_right'}} "
            f"(got a {type(orientation).__name__})"
        )


def _check_choices(
    normalize: Normalize, dtype: torch.dtype, channels: Channels, tags: TagStyle | None, masks: str | None
) -> None:
    if dtype not in _DTYPES:
        raise ValueError(f"dtype must be one of {', '.join(map(str, _DTYPES))} (got {dtype})")
    if dtype == torch.uint8 and normalize is not None:
        raise ValueError(
            f"normalize needs a float dtype (got {normalize!r} with uint8); choose one, or normalize on the model's "
            "device with normalize_on_device"
        )
    if channels not in get_args(Channels):
        raise choice_error("channels", channels, get_args(Channels))
    if tags not in (None, *get_args(TagStyle)):
        raise choice_error("tags", tags, (*get_args(TagStyle), None))
    if masks not in (None, "host"):
        raise choice_error("masks", masks, ("host", None))
