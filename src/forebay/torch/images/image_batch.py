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

Crops of letterboxed images that leave no padding: random ones, and those of aspect buckets.

    RandomResizedCrop(224)      a random part of the content, resized to a square
    AspectBucket                the content, cropped in the middle and resized to the nearest of several shapes
    BucketLoader                batches of one bucket each, in random order

Like every transform, they draw from the coins of a sample and move image, mask and box together.
"""

from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from functools import partial
from math import log
from typing import Annotated, Any, Literal, get_args

import msgspec
import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from forebay.columns import Array, Columns, Ragged
from forebay.errors import AllTokensIgnored, StateMismatch, choice_error
from forebay.feeding.selection import Where
from forebay.feeding.stream import SelectionRule, checked_whole
from forebay.images import ImageRecipe, image_recipe
from forebay.images.geometry import Normalize, Scaling, fit_many
from forebay.images.tags import Tags
from forebay.masks.documents import IGNORED_LABEL
from forebay.masks.rectangle import IGNORE_THRESHOLD, Size, flip_rectangles
from forebay.order.orders import Coins, key_of, permute, sample_keys
from forebay.order.selected_rows import Selection
from forebay.read.cache import Cache
from forebay.torch.assemble import Rows
from forebay.torch.batches import Batch, Buffers, LoadedBatch, plain_batch
from forebay.torch.images.canvas import (
    Boxes,
    Canvases,
    CanvasMaker,
    Channels,
    JointTransform,
    MaskPlace,
    Planes,
    TokenMasks,
    mirrored,
)
from forebay.torch.loader import Loader, compare_together, repeated

TagStyle = Literal["multi_hot", "indices"]
ORIENTATION = {"looking_left": "looking_right"}


class TagReader:
    """Turns stored tag indices into the tags of the images after their flip."""

    def __init__(self, vocabulary: Tags, orientation: Mapping[str, str] | None) -> None:
        self._vocabulary = vocabulary
        self._swapped = vocabulary.swapped(_known(ORIENTATION, vocabulary) if orientation is None else orientation)

    def indices(self, stored: Iterable[Array], flipped: NDArray[np.bool_]) -> Ragged:
        """Return the tag indices of every image, in ascending order."""
        rows = [self._swapped[row] if flip else row for row, flip in zip(stored, flipped.tolist(), strict=True)]
        return Ragged.of([np.sort(row) for row in rows], np.dtype(np.int64))

    def multi_hot(self, stored: Iterable[Array], flipped: NDArray[np.bool_]) -> NDArray[np.float32]:
        """Return float32 `[images, tags]`: 1 where an image has a tag."""
        return self._vocabulary.multi_hot(self.indices(stored, flipped)).astype(np.float32)


def _known(pairs: Mapping[str, str], vocabulary: Tags) -> dict[str, str]:
    """Return the pairs that the vocabulary has; raise if it has one tag of a pair but not the other."""
    for one, other in (*pairs.items(), *((other, one) for one, other in pairs.items())):
        if one in vocabulary and other not in vocabulary:
            raise ValueError(
                f"the vocabulary has the tag '{one}' but not '{other}', which it becomes in a flip; add it to the "
                "recipe's tags, or pass orientation={} to leave tags unchanged"
            )
    return {one: other for one, other in pairs.items() if one in vocabulary}


_DTYPES = (torch.uint8, torch.float32, torch.float16, torch.bfloat16)
_SHARED = ("size", "pad_color", "storage")  # fields that a cache's recipe must share, beside tags
_KEPT_BYTES = 256 * 1024 * 1024  # memory of earlier batches that is reused, as a `collate_fn`


class ImageBatch:
    """A collate for images: of a `Loader`, of a `CacheDataset`, or the `collate_fn` of torch's `DataLoader`.

    `flip` is the probability that an image is flipped left–right, with its masks, its box and the tags that
    `orientation` pairs. It depends on seed, epoch and sample id: those of the `Loader` or `CacheDataset`, or, as a
    `collate_fn`, `seed` and the epoch last set by `set_epoch`.

    `normalize` is "imagenet" or (mean, std), for float dtypes; without it, floats are from 0 to 1. `channels="last"`
    returns the same shape in the memory format `torch.channels_last`. `transforms` change image, mask and box together
    (`forebay.torch.Canvases`), after the flip.

    `vocabulary` names other tags than the recipe's, in the order of their indices. Tags are then read from the stored
    metadata, so that another vocabulary does not need another cache.

    `classes` are tags of which an image has at most one, or "tags" for the whole vocabulary: `label` is the index of
    its class among them, for a cross entropy, beside the tags.

    Every batch has `box`, from which both masks follow. `masks` says which of them it has, too:

        None        token_mask, with a `patch`
        "host"      pixel_mask, a quarter of the bytes of a uint8 batch, and token_mask, with a `patch`
        "device"    neither: `masks_on_device` derives both from `box`, where the model is; not with `transforms`

    Transforms get a pixel mask in any case, and `token_mask` is derived from what they make of it. One that leaves
    padding inside a box, which a box cannot express, needs masks="host".
    """

    def __init__(
        self,
        source: ImageRecipe | Cache,
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
        masks: MaskPlace | None = None,
        seed: int = 0,
    ) -> None:
        _check_choices(normalize, dtype, channels, tags)
        _check_masks(masks, transforms)
        _check_pairs(orientation)
        self.recipe = image_recipe(source)
        self.seed = seed
        self._flip, self._tag_style, self._dtype = _probability(flip), tags, dtype
        self._named = None if vocabulary is None else Tags(_checked_tags("vocabulary", vocabulary))
        self.vocabulary = self.recipe.vocabulary() if self._named is None else self._named
        self._tags = TagReader(self.vocabulary, orientation if flip else {})
        self.classes = None if classes is None else _checked_classes(classes, self.vocabulary)
        tokens = None if patch is None else TokenMasks(self.recipe.size, patch, threshold)
        self._token_masks = None if transforms else tokens  # transforms change the share of padding
        self._canvases = CanvasMaker(self.recipe, Scaling.of(normalize), dtype, channels, tokens, transforms, masks)
        self._buffers = Buffers(_KEPT_BYTES, pinned=False)
        # In shared memory, so that persistent workers see the next epoch too. torch declares no types here.
        self._epoch: Tensor = torch.zeros((), dtype=torch.int64).share_memory_()  # type: ignore[no-untyped-call]

    def __repr__(self) -> str:
        tags = "no tags" if self._tag_style is None else f"{len(self.vocabulary):,} tags as {self._tag_style}"
        values = str(self._dtype).removeprefix("torch.")
        return f"<ImageBatch of {self.recipe.size} × {self.recipe.size} in {values}, flip {self._flip:g}, {tags}>"

    @property
    def columns(self) -> tuple[str, ...]:
        """The columns it reads."""
        unread = self._tag_style is None and self.classes is None
        tags = () if unread else ("tags",) if self._named is None else ("metadata",)
        return (self.recipe.stored_column, "box", "original_size", "id", *tags)

    @property
    def row_bytes(self) -> int:
        return self._canvases.row_bytes

    @property
    def is_compiled(self) -> bool:
        """Whether compiled code does nearly all of the work."""
        return self.recipe.storage == "raw" and self.recipe.codec == "none" and self._canvases.is_compiled

    @property
    def epoch(self) -> int:
        """The epoch that coins are drawn for, as a `collate_fn`."""
        return int(self._epoch)

    def set_epoch(self, epoch: int) -> None:
        """Draw the coins of this epoch from now on, also in worker processes that are running."""
        self._epoch.fill_(epoch)

    def check_cache(self, cache: Cache) -> None:
        """Raise for a cache with other canvases or tags, whose boxes and indices would have another meaning."""
        theirs = image_recipe(cache)
        unread = self._tag_style is None and self.classes is None
        names = _SHARED if unread else (*_SHARED, *self._shared_tags)
        differs = [name for name in names if getattr(theirs, name) != getattr(self.recipe, name)]
        if differs:
            raise ValueError(
                f"the cache at '{cache.root}' has another {', '.join(differs)} than this ImageBatch; "
                "make the ImageBatch from that cache, and mix only caches that agree in these"
            )

    @property
    def _shared_tags(self) -> tuple[str, ...]:
        """The recipe fields that the tags of a row depend on."""
        return ("tags",) if self._named is None else ("tag_key", "tag_separator")

    def check_rows(self, cache: Cache, selection: Selection | None) -> None:
        """Raise for rows with so little content that all their tokens are ignored, before a batch of them would.

        A cache with a key is not checked here, since opening a chunk of it hashes all of the chunk.
        """
        tokens, found, first = self._token_masks, 0, -1
        if tokens is None or cache.generation.tagged:
            return
        for start, boxes in zip(cache.chunk_starts.tolist(), cache.chunks(["box"]), strict=False):
            ignored = self._all_ignored(boxes)
            if selection is not None:
                ignored &= np.diff(selection.before(np.arange(start, start + len(ignored) + 1))) > 0
            found += int(ignored.sum())
            first = start + int(ignored.argmax()) if first < 0 and ignored.any() else first
        if found:
            row = cache[first]
            name = bytes(row["id"]).decode("utf-8", "backslashreplace")
            raise AllTokensIgnored(name, row["box"].tolist(), tokens.patch, tokens.threshold, found)

    def large_enough(self, within: SelectionRule | None = None) -> Where:
        """Return a `selection` of the rows that keep at least one token, optionally within another rule."""
        return Where("a token is kept", lambda columns: ~self._all_ignored(columns), columns=["box"], within=within)

    def _all_ignored(self, columns: Columns) -> NDArray[np.bool_]:
        boxes = np.asarray(columns["box"])
        if self._token_masks is None:
            return np.zeros(len(boxes), np.bool_)
        return self._token_masks.all_ignored(boxes, (self.recipe.size, self.recipe.size))

    def __call__(self, rows: Sequence[Mapping[str, Array | Tensor]]) -> Batch:
        """Make a batch of stored rows, from a `CacheDataset` or `forebay.tiers.CachedImages`."""
        _check_rows(rows, self.columns)
        read: dict[str, Any] = {name: [np.asarray(row[name]) for row in rows] for name in self.columns}
        for name, width in (("box", 4), ("original_size", 2)):
            read[name] = np.array(read[name], np.int32).reshape(len(rows), width)
        self._check_meaning(read)
        coins = Coins(self.seed, self.epoch, sample_keys(each.tobytes() for each in read["id"]))
        return LoadedBatch(self.collate(read, coins, self._buffers))

    def collate(self, rows: Rows, coins: Coins, buffers: Buffers) -> Batch:
        """Make a batch of rows of a cache."""
        flipped = coins.flip("flip", self._flip)
        stored = np.asarray(rows["box"])
        contents = self._contents(rows[self.recipe.stored_column], stored, flipped)
        batch = self._canvases.make(contents, self._boxes(stored, flipped), coins, buffers, partial(_sample, rows))
        read = {"original_size": np.asarray(rows["original_size"]), "flipped": flipped}
        return batch | plain_batch(read | self._tags_of(rows, flipped), buffers)

    def __getstate__(self) -> dict[str, Any]:
        # Another process has its own memory.
        return {**self.__dict__, "_buffers": None}

    def __setstate__(self, state: dict[str, Any]) -> None:
        self.__dict__.update(state, _buffers=Buffers(_KEPT_BYTES, pinned=False))

    def _check_meaning(self, read: Mapping[str, Any]) -> None:
        """Raise for rows that another recipe made, as far as their boxes and tags show it."""
        fitted = fit_many(read["original_size"], self.recipe.size)
        others = np.flatnonzero((fitted[:, 2:] != read["box"][:, 2:]).any(axis=1))
        if len(others):
            raise ValueError(
                f"'{_sample(read, int(others[0]))}' was not made for a canvas of {self.recipe.size}: its box is "
                f"{read['box'][others[0]].tolist()}; make the ImageBatch from the recipe that made the rows"
            )
        known = len(self.vocabulary)
        if any(len(tags) and int(tags.max()) >= known for tags in read.get("tags", ())):
            raise ValueError(
                f"rows have tags beyond the {known} of this ImageBatch; make it from the cache, or from the `recipe` "
                "of CachedImages, which has their vocabulary"
            )

    def _contents(self, stored: Iterable[Array], boxes: Boxes, flipped: NDArray[np.bool_]) -> Iterator[Planes]:
        unpack = self.recipe.planes_of
        for row, (_, _, width, height), flip in zip(stored, boxes.tolist(), flipped.tolist(), strict=True):
            content = unpack(row, width, height)
            yield mirrored(content) if flip else content

    def _boxes(self, stored: Boxes, flipped: NDArray[np.bool_]) -> Boxes:
        boxes = stored.copy()
        boxes[flipped] = flip_rectangles(stored[flipped], (self.recipe.size, self.recipe.size))
        return boxes

    def _tags_of(self, rows: Rows, flipped: NDArray[np.bool_]) -> dict[str, Array | Ragged]:
        read: dict[str, Array | Ragged] = {}
        if self._tag_style is not None:
            tags = self._tags.multi_hot if self._tag_style == "multi_hot" else self._tags.indices
            read["tags"] = tags(self._indices(rows), flipped)
        if self.classes is not None:
            read["label"] = self._labels(rows, flipped, self.classes)
        return read

    def _labels(self, rows: Rows, flipped: NDArray[np.bool_], classes: tuple[str, ...]) -> NDArray[np.int64]:
        number = np.full(len(self.vocabulary), IGNORED_LABEL, np.int64)
        number[[int(self.vocabulary.indices([name])[0]) for name in classes]] = np.arange(len(classes))
        tags = self._tags.indices(self._indices(rows), flipped)
        image = np.repeat(np.arange(len(tags)), tags.lengths)
        found = number[tags.values] != IGNORED_LABEL
        image, numbers = image[found], number[tags.values][found]
        for several in np.flatnonzero(np.bincount(image, minlength=len(tags)) > 1).tolist():
            names = [classes[each] for each in numbers[image == several].tolist()]
            raise ValueError(
                f"'{_sample(rows, several)}' has {len(names)} classes, {', '.join(names)}, but an image can have only "
                "one; name other classes, or train on its tags"
            )
        labels = np.full(len(tags), IGNORED_LABEL, np.int64)
        labels[image] = numbers
        return labels

    def _indices(self, rows: Rows) -> Iterable[Array]:
        """Return the tags of every image as indices of the vocabulary."""
        if self._named is None:
            return rows["tags"]
        return [self._named.indices(self.recipe.tags_of(np.asarray(each))) for each in rows["metadata"]]


def _sample(rows: Rows, image: int) -> str:
    """Return the sample id of an image of a batch."""
    return bytes(list(rows["id"])[image]).decode("utf-8", "backslashreplace")


def _check_rows(rows: Sequence[Mapping[str, Any]], columns: Sequence[str]) -> None:
    for missing in (name for row in rows for name in columns if name not in row):
        raise ValueError(
            f"rows have no column '{missing}'; they need {', '.join(columns)}, as a cache of this recipe stores them"
        )


def _checked_tags(argument: str, tags: Sequence[str]) -> tuple[str, ...]:
    if isinstance(tags, str) or not all(isinstance(name, str) for name in tags):
        raise TypeError(f"{argument} must be a sequence of tags, such as ('cat', 'dog') (got {tags!r:.60})")
    return tuple(tags)


def _checked_classes(classes: Sequence[str], vocabulary: Tags) -> tuple[str, ...]:
    names = tuple(vocabulary.named(range(len(vocabulary)))) if classes == "tags" else _checked_tags("classes", classes)
    unknown = [name for name in names if name not in vocabulary]
    if unknown or len(set(names)) != len(names) or not names:
        what = f"unknown: {', '.join(unknown)}" if unknown else "none, or one twice"
        raise ValueError(f"classes must be different tags of the vocabulary ({what}); pass some of its tags, or 'tags'")
    return names


def _check_masks(masks: MaskPlace | None, transforms: Sequence[JointTransform]) -> None:
    if masks not in (None, *get_args(MaskPlace)):
        raise choice_error("masks", masks, (*get_args(MaskPlace), None))
    if masks == "device" and transforms:
        raise ValueError(
            "masks='device' derives masks from boxes, which transforms may cut; leave masks out, or pass masks='host'"
        )


def _probability(flip: float) -> float:
    if not 0 <= flip <= 1:
        raise ValueError(f"flip must be a probability from 0 to 1 (got {flip})")
    return flip


def _check_pairs(orientation: Mapping[str, str] | None) -> None:
    if orientation is not None and not isinstance(orientation, Mapping):
        raise TypeError(
            f"orientation must be a dict of tags that a flip swaps, such as {{'looking_left': 'looking_right'}} "
            f"(got a {type(orientation).__name__})"
        )


def _check_choices(normalize: Normalize, dtype: torch.dtype, channels: Channels, tags: TagStyle | None) -> None:
    if dtype not in _DTYPES:
        raise ValueError(f"dtype must be one of {', '.join(map(str, _DTYPES))} (got {dtype})")
    if dtype == torch.uint8 and normalize is not None:
        raise ValueError(
            f"normalize needs a float dtype (got {normalize!r} with uint8); choose one, or normalise on the model's "
            "device with normalize_on_device"
        )
    if channels not in get_args(Channels):
        raise choice_error("channels", channels, get_args(Channels))
    if tags not in (None, *get_args(TagStyle)):
        raise choice_error("tags", tags, (*get_args(TagStyle), None))


Range = tuple[float, float]
Ints = NDArray[np.int64]


@dataclass(frozen=True, slots=True)
class RandomResizedCrop:
    """A random rectangle of the content of every image, resized to `size`: a side, or (height, width).

    `scale` is the range of its share of the content's area, `ratio` that of width / height, drawn evenly in logarithms.
    A rectangle that does not fit is cut to the content. Pass another `purpose` to a second crop of the same images.

        ImageBatch(cache, flip=0.5, transforms=[RandomResizedCrop(224)])
    """

    size: int | Size
    scale: Range = (0.08, 1.0)
    ratio: Range = (3 / 4, 4 / 3)
    purpose: str = "crop"

    def __post_init__(self) -> None:
        for side in _size(self.size):
            if checked_whole("size", side, "a side or (height, width) in pixels") < 1:
                raise ValueError(f"size must be at least 1 (got {self.size})")
        for name, (low, high) in (("scale", self.scale), ("ratio", self.ratio)):
            if not 0 < low <= high or (name == "scale" and high > 1):
                allowed = "0 < low <= high <= 1" if name == "scale" else "0 < low <= high"
                raise ValueError(f"{name} must be (low, high) with {allowed} (got {(low, high)})")

    def __call__(self, canvases: Canvases, coins: Coins, /) -> Canvases:
        return canvases.resized_from(self.rectangles(canvases.box.numpy(), coins), _size(self.size))

    def rectangles(self, boxes: NDArray[np.int32], coins: Coins) -> Ints:
        """Return left, top, width, height of every crop, `[images, 4]`, inside its box."""
        left, top, width, height = boxes.astype(np.int64).T
        area, shape, right, down = coins.uniform(self.purpose, (4,)).T
        pixels = width * height * (self.scale[0] + area * (self.scale[1] - self.scale[0]))
        ratio = np.exp(log(self.ratio[0]) + shape * (log(self.ratio[1]) - log(self.ratio[0])))
        wide = np.clip(np.round(np.sqrt(pixels * ratio)).astype(np.int64), np.minimum(1, width), width)
        high = np.clip(np.round(np.sqrt(pixels / ratio)).astype(np.int64), np.minimum(1, height), height)
        x = left + (right * (width - wide + 1)).astype(np.int64)
        y = top + (down * (height - high + 1)).astype(np.int64)
        return np.stack((x, y, wide, high), axis=1)


@dataclass(frozen=True, slots=True)
class AspectBucket:
    """The images whose shape is nearest to (height, width) among all buckets, and the transform that fills it."""

    size: Size
    among: tuple[Size, ...]

    def selection(self, within: SelectionRule | None = None) -> Where:
        """Return a `selection` of the images of this bucket, optionally within another rule."""
        shapes = ", ".join(f"{height} × {width}" for height, width in self.among)
        name = f"nearest to {self.size[0]} × {self.size[1]} of {shapes}"
        return Where(name, self._holds, columns=["original_size"], within=within)

    def _holds(self, columns: Columns) -> NDArray[np.bool_]:
        width, height = np.asarray(columns["original_size"]).astype(np.float64).T
        shapes = np.log([width / height for height, width in self.among])
        nearest = np.abs(np.log(width / height)[:, None] - shapes).argmin(axis=1)
        here: NDArray[np.bool_] = nearest == self.among.index(self.size)
        return here

    def __call__(self, canvases: Canvases, coins: Coins, /) -> Canvases:
        left, top, width, height = canvases.box.numpy().astype(np.int64).T
        wide = np.minimum(width, np.maximum(1, np.round(height * self.size[1] / self.size[0]))).astype(np.int64)
        high = np.minimum(height, np.maximum(1, np.round(width * self.size[0] / self.size[1]))).astype(np.int64)
        crops = (left + (width - wide) // 2, top + (height - high) // 2, wide, high)
        return canvases.resized_from(np.stack(crops, axis=1), self.size)


def aspect_buckets(sizes: Sequence[Size]) -> list[AspectBucket]:
    """Return a bucket for each (height, width); every image belongs to exactly one, the first of equally near ones."""
    among = tuple((int(height), int(width)) for height, width in sizes)
    if len(set(among)) != len(among) or not among or min(map(min, among)) < 1:
        raise ValueError(f"sizes must be different pairs (height, width) of at least 1 (got {list(sizes)})")
    return [AspectBucket(size, among) for size in among]


class BucketLoader:
    """Batches of several loaders, in random order: an epoch has every batch of each once.

        buckets = aspect_buckets([(448, 448), (512, 384), (384, 512)])
        loader = BucketLoader([
            Loader(cache, global_batch_size=32, selection=bucket.selection(),
                   collate=ImageBatch(cache, transforms=[bucket]))
            for bucket in buckets
        ])

    All ranks take the same loader in each step, and compare seed, position and all loaders before the first batch. It
    stops and resumes as a `Loader` does, at the same batch; in the middle of an epoch, with the same batch sizes.
    """

    def __init__(self, loaders: Sequence[Loader], seed: int = 0) -> None:
        self.loaders, self.seed = _checked_loaders(loaders), checked_whole("seed", seed)
        self.epoch = self.position = 0
        self._agreed = False
        self._begin_epoch()

    def __len__(self) -> int:
        """Return the number of batches of a whole epoch."""
        return sum(self._counts)

    def __repr__(self) -> str:
        return (
            f"<BucketLoader of {len(self.loaders)} loaders, seed {self.seed}, at batch {self.position:,} of "
            f"{len(self):,} of epoch {self.epoch}>"
        )

    def __iter__(self) -> Iterator[Batch]:
        """Yield the rest of the epoch."""
        if self.loaders[0].restarts:
            self.epoch = self.position = 0
        self._compare_ranks()
        streams: list[Iterator[Any]] = [iter(loader) for loader in self.loaders]
        for chosen in self._turns(self.epoch, self._counts)[self.position :].tolist():
            batch = next(streams[chosen], None)
            if batch is None:
                raise RuntimeError(
                    f"loader {chosen} of this BucketLoader has fewer batches left than its turns; iterate it and load "
                    "its state through the BucketLoader only"
                )
            self._advance()
            yield batch

    def forever(self, max_steps: int | None = None) -> Iterator[Any]:
        """Yield the batches of this epoch and of all that follow, at most `max_steps`, as `Loader.forever` does."""
        return repeated(self, max_steps)

    def sum_over_ranks(self, value: Tensor) -> Tensor:
        """Return the sum of a tensor over the ranks that share batches: a collective, which every rank calls."""
        return self.loaders[0].sum_over_ranks(value)

    def state_dict(self) -> dict[str, Any]:
        states = [loader.state_dict() for loader in self.loaders]
        return {
            "epoch": 0 if self.loaders[0].restarts else self.epoch,
            "position": 0 if self.loaders[0].restarts else self.position,
            "batches": self._counts,
            "loaders": states,
            "seed": self.seed,
            "batch_sizes": self._sizes,
            "starts": self._starts,
        }

    def load_state_dict(self, state: Mapping[str, Any]) -> None:
        """Continue from a state; one of an older release has no seed and batch sizes, and is checked by its turns."""
        saved = _bucket_state(state)
        self._check(saved)
        for loader, each in zip(self.loaders, saved.loaders, strict=True):
            loader.load_state_dict(each)
        self._agreed = False
        if self.loaders[0].restarts:
            return
        self.epoch, self.position = saved.epoch, saved.position
        self._begin_epoch()
        if self.position:
            self._counts, self._starts = saved.batches, saved.starts or [0] * len(self.loaders)

    def _check(self, saved: "_BucketState") -> None:
        """Raise where a state has other loaders, another seed, or turns that its loaders did not take."""
        then_and_now: dict[str, tuple[object, object]] = {"loaders": (len(saved.loaders), len(self.loaders))}
        if saved.seed is not None:
            then_and_now["seed"] = (saved.seed, self.seed)
        if saved.batch_sizes is not None and saved.position:
            then_and_now["batch sizes"] = (saved.batch_sizes, self._sizes)
        differs = {name: pair for name, pair in then_and_now.items() if pair[0] != pair[1]}
        if not differs and saved.position and not self.loaders[0].restarts:
            differs = self._other_turns(saved)
        if differs:
            raise StateMismatch("the loaders of a BucketLoader", differs)

    def _other_turns(self, saved: "_BucketState") -> dict[str, tuple[object, object]]:
        """Return the loaders that are not where the batches before the position of a state leave them."""
        taken = np.bincount(self._turns(saved.epoch, saved.batches)[: saved.position], minlength=len(self.loaders))
        starts = saved.starts or [0] * len(self.loaders)
        differs: dict[str, tuple[object, object]] = {}
        for number, (start, size, count) in enumerate(zip(starts, self._sizes, saved.batches, strict=True)):
            expected = start + size * int(taken[number])
            ended = [0] if taken[number] == count else []  # at the start of its next epoch
            if saved.loaders[number].get("position") not in (expected, *ended):
                differs[f"the position of loader {number}"] = (saved.loaders[number].get("position"), expected)
        return differs

    @property
    def _sizes(self) -> list[int]:
        return [loader.global_batch_size for loader in self.loaders]

    def _compare_ranks(self) -> None:
        if not self._agreed:
            own = {"seed": self.seed, "epoch": self.epoch, "position": self.position, "batches": self._counts}
            compare_together(self.loaders, {"BucketLoader": own})
            self._agreed = True

    def _turns(self, epoch: int, counts: Sequence[int]) -> Ints:
        """Return the number of the loader of every batch of an epoch."""
        total = sum(counts)
        place = permute(np.arange(total), total, key_of("buckets", self.seed, epoch))
        return np.repeat(np.arange(len(counts)), counts)[place]

    def _advance(self) -> None:
        self.position += 1
        if self.position == len(self):
            self.epoch, self.position = self.epoch + 1, 0
            self._begin_epoch()

    def _begin_epoch(self) -> None:
        """Note the batches that every loader has left of its epoch, usually all of them."""
        self._starts = [loader.position for loader in self.loaders]
        self._counts = [_batches_left(loader) for loader in self.loaders]


class _BucketState(msgspec.Struct, frozen=True):
    epoch: Annotated[int, msgspec.Meta(ge=0)]
    position: Annotated[int, msgspec.Meta(ge=0)]
    batches: list[int]
    loaders: list[dict[str, Any]]
    seed: int | None = None
    batch_sizes: list[int] | None = None
    starts: list[int] | None = None


def _bucket_state(state: Mapping[str, Any]) -> _BucketState:
    if not isinstance(state, Mapping):
        raise TypeError(f"the state is a {type(state).__name__}; pass the dict that state_dict() returned")
    try:
        saved = msgspec.convert(dict(state), _BucketState)
    except msgspec.ValidationError as error:
        raise ValueError(f"not the state of a BucketLoader: {error}; pass what its state_dict() returned") from error
    counts = {len(each) for each in (saved.batches, saved.loaders, saved.batch_sizes, saved.starts) if each is not None}
    if len(counts) > 1 or saved.position > max(0, sum(saved.batches) - 1):
        raise ValueError("not the state of a BucketLoader: its numbers do not fit together; pass what it returned")
    return saved


def _checked_loaders(loaders: Sequence[Loader]) -> list[Loader]:
    found = list(loaders)
    if not found:
        raise ValueError("loaders is empty; pass one Loader for each bucket")
    for other in (each for each in found if not isinstance(each, Loader)):
        raise TypeError(f"loaders has a {type(other).__name__}; pass one Loader for each bucket")
    if len({(loader.ranks, loader.restarts) for loader in found}) > 1:
        raise ValueError("loaders must have the same ranks, and all or none of them restart=True")
    return found


def _batches_left(loader: Loader) -> int:
    rows = loader.stream.size(loader.epoch) - loader.position
    return rows // loader.global_batch_size if loader.drop_last else -(-rows // loader.global_batch_size)


def _size(size: int | Size) -> Size:
    return size if isinstance(size, tuple | list) else (size, size)
