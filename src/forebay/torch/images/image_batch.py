"""Batches of images: canvases, masks, boxes and tags.

    loader = Loader(cache, global_batch_size=64, collate=ImageBatch(cache, normalize="imagenet", dtype=torch.bfloat16))
    rows = DataLoader(CacheDataset(cache), batch_size=64, collate_fn=ImageBatch(cache), num_workers=2)

    pixels         [images, 3, size, size], of the type asked for
    pixel_mask     bool  [images, size, size], True = PAD
    token_mask     bool  [images, size/patch, size/patch], True = ignored; with a `patch`
    box            int32 [images, 4], left, top, width, height of the content, after the flip
    original_size  int32 [images, 2], width and height of the image as displayed
    flipped        bool  [images]
    tags           float32 [images, vocabulary]; or "indices": int64, flat, with tags.offsets

SDPA wants True = keep, the opposite of both masks; a CLS token is never ignored:

    ignored = F.pad(batch["token_mask"].flatten(1), (1, 0), value=False)        # CLS first
    F.scaled_dot_product_attention(q, k, v, attn_mask=~ignored[:, None, None, :])
"""

from collections.abc import Iterable, Iterator, Mapping, Sequence
from functools import partial
from typing import Any, Literal, get_args

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from forebay.columns import Array, Columns, Ragged
from forebay.errors import AllTokensIgnored
from forebay.feeding.selection import Where
from forebay.feeding.stream import SelectionRule
from forebay.images.geometry import Normalize, Scaling, fit_many
from forebay.images.inference import image_recipe
from forebay.images.recipe import ImageRecipe
from forebay.images.tags import Tags
from forebay.masks.rectangle import IGNORE_THRESHOLD, flip_rectangles
from forebay.order.coins import Coins, sample_keys
from forebay.order.selected_rows import Selection
from forebay.read.cache import Cache
from forebay.torch.assemble import Rows
from forebay.torch.batches import Batch, Buffers, plain_batch
from forebay.torch.images.canvas import Boxes, CanvasMaker, Channels, Planes, TokenMasks, mirrored
from forebay.torch.images.joint import JointTransform

TagStyle = Literal["multi_hot", "indices"]
ORIENTATION = {"looking_left": "looking_right"}


class TagReader:
    """Indices of tags as they are stored become tags as the flipped images have them."""

    def __init__(self, vocabulary: Tags, orientation: Mapping[str, str] | None) -> None:
        self._vocabulary = vocabulary
        self._swapped = vocabulary.swapped(_known(ORIENTATION, vocabulary) if orientation is None else orientation)

    def indices(self, stored: Iterable[Array], flipped: NDArray[np.bool_]) -> Ragged:
        """Of every image, rising."""
        rows = [self._swapped[row] if flip else row for row, flip in zip(stored, flipped.tolist(), strict=True)]
        return Ragged.of([np.sort(row) for row in rows], np.dtype(np.int64))

    def multi_hot(self, stored: Iterable[Array], flipped: NDArray[np.bool_]) -> NDArray[np.float32]:
        """`[images, tags]`: 1 where an image has a tag, as a loss wants it."""
        return self._vocabulary.multi_hot(self.indices(stored, flipped)).astype(np.float32)


def _known(pairs: Mapping[str, str], vocabulary: Tags) -> dict[str, str]:
    """Those that the vocabulary has. A tag whose other it lacks would be wrong on every flipped image."""
    for one, other in (*pairs.items(), *((other, one) for one, other in pairs.items())):
        if one in vocabulary and other not in vocabulary:
            raise ValueError(
                f"the vocabulary has the tag '{one}' but not '{other}', which a flip makes of it; add it to the "
                "recipe's tags, or give orientation={} to leave tags as they are"
            )
    return {one: other for one, other in pairs.items() if one in vocabulary}


_DTYPES = (torch.uint8, torch.float32, torch.float16, torch.bfloat16)
_SHARED = ("size", "pad_color", "storage")  # what a recipe and the rows given must agree on, beside tags
_KEPT_BATCHES = 2  # whose memory is used again, as a `collate_fn`


class ImageBatch:
    """A collate for images: of a `Loader`, of a `CacheDataset`, or the `collate_fn` of torch's `DataLoader`.

    `flip` is the probability that an image is flipped left–right, with its masks, its box and the tags that
    `orientation` pairs. The coin belongs to seed, epoch and sample id: a `Loader` and a `CacheDataset` bring theirs; as
    a `collate_fn` it draws those of `seed` and of the epoch that `set_epoch` named last.

    `normalize` is "imagenet" or (mean, std), of floats; without, floats go from 0 to 1. `channels="last"` gives the
    same shape in the memory format `torch.channels_last`. `transforms` change image, mask and box together
    (`forebay.torch.Canvases`), after the flip.

    `vocabulary` names other tags than the recipe's, in the order of their indices: the tags of an image are then found
    in its stored metadata, so that another vocabulary needs no other cache.
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
        seed: int = 0,
    ) -> None:
        _check_choices(normalize, dtype, channels, tags)
        _check_pairs(orientation)
        self.recipe = image_recipe(source)
        self.seed = seed
        self._flip, self._tag_style, self._dtype = _probability(flip), tags, dtype
        self._named = None if vocabulary is None else Tags(_checked_vocabulary(vocabulary))
        self.vocabulary = self.recipe.vocabulary() if self._named is None else self._named
        self._tags = TagReader(self.vocabulary, orientation if flip else {})
        tokens = None if patch is None else TokenMasks(self.recipe.size, patch, threshold)
        self._token_masks = None if transforms else tokens  # transforms may leave more or less of an image
        self._canvases = CanvasMaker(self.recipe, Scaling.of(normalize), dtype, channels, tokens, transforms)
        self._buffers = Buffers(_KEPT_BATCHES, pinned=False)
        # In shared memory, so that workers that live on see the next epoch too. torch declares no types here.
        self._epoch: Tensor = torch.zeros((), dtype=torch.int64).share_memory_()  # type: ignore[no-untyped-call]

    def __repr__(self) -> str:
        tags = "no tags" if self._tag_style is None else f"{len(self.vocabulary):,} tags as {self._tag_style}"
        values = str(self._dtype).removeprefix("torch.")
        return f"<ImageBatch of {self.recipe.size} × {self.recipe.size} in {values}, flip {self._flip:g}, {tags}>"

    @property
    def columns(self) -> tuple[str, ...]:
        """What it reads of a cache."""
        tags = () if self._tag_style is None else ("tags",) if self._named is None else ("metadata",)
        return (self.recipe.stored_column, "box", "original_size", "id", *tags)

    @property
    def row_bytes(self) -> int:
        return self._canvases.row_bytes

    @property
    def epoch(self) -> int:
        """The epoch that coins are drawn for, as a `collate_fn`."""
        return int(self._epoch)

    def set_epoch(self, epoch: int) -> None:
        """Draw the coins of this epoch from now on, also in worker processes that are running."""
        self._epoch.fill_(epoch)

    def check_cache(self, cache: Cache) -> None:
        """Refuse a cache whose canvases or tags are others: its boxes and indices would mean something else here."""
        theirs = image_recipe(cache)
        names = _SHARED if self._tag_style is None else (*_SHARED, *self._shared_tags)
        differs = [name for name in names if getattr(theirs, name) != getattr(self.recipe, name)]
        if differs:
            raise ValueError(
                f"the cache at '{cache.root}' was built with another {', '.join(differs)} than this ImageBatch is for; "
                "make it of that cache, and mix only caches that share these"
            )

    @property
    def _shared_tags(self) -> tuple[str, ...]:
        """What decides the tags of a row: its indices, or where in its metadata they are."""
        return ("tags",) if self._named is None else ("tag_key", "tag_separator")

    def check_rows(self, cache: Cache, selection: Selection | None) -> None:
        """Refuse rows with so little content that no token of them is kept: a batch of theirs would raise.

        Of a cache with a key nothing is looked at before it is read, as opening a chunk hashes all of it: there, the
        batch raises.
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
        """The rows of which a token is kept, of all or of those within another rule: a `selection` for a loader."""
        return Where("a token is kept", lambda columns: ~self._all_ignored(columns), columns=["box"], within=within)

    def _all_ignored(self, columns: Columns) -> NDArray[np.bool_]:
        boxes = np.asarray(columns["box"])
        if self._token_masks is None:
            return np.zeros(len(boxes), np.bool_)
        return self._token_masks.all_ignored(boxes, (self.recipe.size, self.recipe.size))

    def __call__(self, rows: Sequence[Mapping[str, Array | Tensor]]) -> Batch:
        """A batch of rows as they are stored: of a `CacheDataset`, or of `forebay.tiers.CachedImages`."""
        _check_rows(rows, self.columns)
        read: dict[str, Any] = {name: [np.asarray(row[name]) for row in rows] for name in self.columns}
        for name, width in (("box", 4), ("original_size", 2)):
            read[name] = np.array(read[name], np.int32).reshape(len(rows), width)
        self._check_meaning(read)
        coins = Coins(self.seed, self.epoch, sample_keys(each.tobytes() for each in read["id"]))
        return self.collate(read, coins, self._buffers)

    def collate(self, rows: Rows, coins: Coins, buffers: Buffers) -> Batch:
        """A batch of rows of a cache."""
        flipped = coins.flip("flip", self._flip)
        stored = np.asarray(rows["box"])
        contents = self._contents(rows[self.recipe.stored_column], stored, flipped)
        batch = self._canvases.make(contents, self._boxes(stored, flipped), coins, buffers, partial(_sample, rows))
        read = {"original_size": np.asarray(rows["original_size"]), "flipped": flipped}
        return batch | plain_batch(read | self._tags_of(rows, flipped), buffers)

    def __getstate__(self) -> dict[str, Any]:
        # Another process has memory of its own.
        return {**self.__dict__, "_buffers": None}

    def __setstate__(self, state: dict[str, Any]) -> None:
        self.__dict__.update(state, _buffers=Buffers(_KEPT_BATCHES, pinned=False))

    def _check_meaning(self, read: Mapping[str, Any]) -> None:
        """Rows do not say what made them, but the boxes and the tags of another recipe seldom look like these."""
        fitted = fit_many(read["original_size"], self.recipe.size)
        others = np.flatnonzero((fitted[:, 2:] != read["box"][:, 2:]).any(axis=1))
        if len(others):
            raise ValueError(
                f"'{_sample(read, int(others[0]))}' was not made for a canvas of {self.recipe.size}: its box is "
                f"{read['box'][others[0]].tolist()}; make the ImageBatch of the recipe that made the rows"
            )
        known = len(self.vocabulary)
        if any(len(tags) and int(tags.max()) >= known for tags in read.get("tags", ())):
            raise ValueError(
                f"rows have tags beyond the {known} of this ImageBatch; make it of the cache, or of the `recipe` of "
                "CachedImages, which has their vocabulary"
            )

    def _contents(self, stored: Iterable[Array], boxes: Boxes, flipped: NDArray[np.bool_]) -> Iterator[Planes]:
        for row, box, flip in zip(stored, boxes, flipped.tolist(), strict=True):
            content = self.recipe.unpacked({self.recipe.stored_column: row, "box": box})
            yield mirrored(content) if flip else content

    def _boxes(self, stored: Boxes, flipped: NDArray[np.bool_]) -> Boxes:
        boxes = stored.copy()
        boxes[flipped] = flip_rectangles(stored[flipped], (self.recipe.size, self.recipe.size))
        return boxes

    def _tags_of(self, rows: Rows, flipped: NDArray[np.bool_]) -> dict[str, Array | Ragged]:
        if self._tag_style is None:
            return {}
        read = self._tags.multi_hot if self._tag_style == "multi_hot" else self._tags.indices
        return {"tags": read(self._indices(rows), flipped)}

    def _indices(self, rows: Rows) -> Iterable[Array]:
        """The tags of every image as places in the vocabulary."""
        if self._named is None:
            return rows["tags"]
        return [self._named.indices(self.recipe.tags_of(np.asarray(each))) for each in rows["metadata"]]


def _sample(rows: Rows, image: int) -> str:
    """What an image of a batch is called."""
    return bytes(list(rows["id"])[image]).decode("utf-8", "backslashreplace")


def _check_rows(rows: Sequence[Mapping[str, Any]], columns: Sequence[str]) -> None:
    for missing in (name for row in rows for name in columns if name not in row):
        raise ValueError(
            f"rows have no column '{missing}'; {', '.join(columns)} are expected, as a cache of this recipe stores them"
        )


def _checked_vocabulary(vocabulary: Sequence[str]) -> tuple[str, ...]:
    if isinstance(vocabulary, str) or not all(isinstance(name, str) for name in vocabulary):
        raise TypeError(f"vocabulary is {vocabulary!r:.60}; a sequence of tags is expected, as ('cat', 'dog')")
    return tuple(vocabulary)


def _probability(flip: float) -> float:
    if not 0 <= flip <= 1:
        raise ValueError(f"flip is {flip}; it is the probability of a flip, from 0 to 1")
    return flip


def _check_pairs(orientation: Mapping[str, str] | None) -> None:
    if orientation is not None and not isinstance(orientation, Mapping):
        raise TypeError(
            f"orientation is a {type(orientation).__name__}; tags and what a flip makes of them are expected, "
            "as {'looking_left': 'looking_right'}"
        )


def _check_choices(normalize: Normalize, dtype: torch.dtype, channels: Channels, tags: TagStyle | None) -> None:
    if dtype not in _DTYPES:
        raise ValueError(f"dtype is {dtype}; {', '.join(map(str, _DTYPES))} are expected")
    if dtype == torch.uint8 and normalize is not None:
        raise ValueError(
            f"normalize is {normalize!r} but uint8 holds pixels as they are stored; choose a float dtype, or normalise "
            "where the model is, with normalize_on_device"
        )
    if channels not in get_args(Channels):
        raise ValueError(f"channels is {channels!r}; 'first' or 'last' is expected")
    if tags not in (None, *get_args(TagStyle)):
        raise ValueError(f"tags is {tags!r}; 'multi_hot', 'indices' or None is expected")
