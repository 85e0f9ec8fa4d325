"""The recipe of images: letterbox them, and store their content, box, tags and metadata.

`prepare` makes an image ready for inference as in training: with the same recipe, masks and numbers.

    prepared = prepare("cat.jpg", cache, normalize="imagenet", dtype=np.float32, patch=16)
    prepared.pixels, prepared.pixel_mask, prepared.token_mask       # bit-equal to those of an ImageBatch
    prepared.letterbox.boxes_to_image(found)                        # boxes on the canvas, back in the image

The image goes through the recipe's own code, up to the bytes that a cache would store. Decoded pixels, an array or a
Pillow image, are used as they are, except that a Pillow image's EXIF orientation and alpha are applied.
"""

import io
import struct
import sys
import threading
import typing
from collections.abc import Iterable, Mapping, Sequence
from contextlib import suppress
from dataclasses import dataclass
from functools import cached_property
from itertools import islice
from os import PathLike, fspath
from pathlib import Path
from typing import Any, ClassVar, Literal, NamedTuple, Protocol

import ml_dtypes
import msgspec
import numpy as np
from msgspec import Meta
from numpy.typing import DTypeLike, NDArray
from PIL import ExifTags, Image, ImageOps, features
from PIL import __version__ as pillow_version
from PIL.JpegImagePlugin import JpegImageFile

from forebay.columns import Array, CodecField, Column, LevelField, Ragged
from forebay.errors import AllTokensIgnored, ImageUnreadable, RecipeInvalid
from forebay.fields import Size
from forebay.images.decode import (
    MAX_PIXELS,
    Alpha,
    Color,
    Exif,
    Planes,
    Policy,
    Resample,
    check_size,
    decode,
    letterbox,
    letterbox_planes,
    paste,
    rgb,
    understood,
)
from forebay.images.geometry import Letterbox, Normalize, Scaling
from forebay.images.tags import TagKey, Tags, shown_key, tags_in
from forebay.masks.rectangle import IGNORE_THRESHOLD, pixel_mask, token_ignore_mask, token_padding
from forebay.recipe import (
    ChunkTarget,
    RecipeDocument,
    RecipeHooks,
    RecipeMeta,
    Rows,
    canonical_json,
    check_fields,
    differing_fields,
    fingerprint,
)
from forebay.source import TOO_DEEP, Annotated, Failure, Sample, is_shallow

Row = dict[str, Array]
_FIRST_ROOM = 1 << 22
_KEPT_ROOMS = 2  # of the chunk that is made, and of the one that is written meanwhile
_rooms = threading.local()


def _room_of(size: int) -> Array:
    """Return an array of at least `size` bytes: one that an earlier chunk of this thread left, or a new one.

    Memory that was never touched is as costly to fill as resizing an image. An array is free once nobody refers to it.
    """
    kept: list[Array] = _rooms.__dict__.setdefault("kept", [])
    for at in range(len(kept)):
        if sys.getrefcount(kept[at]) <= 2 and size <= len(kept[at]) <= 2 * size:
            return kept[at]
    kept[:] = [*kept[1 - _KEPT_ROOMS :], np.empty(size, np.uint8)]
    return kept[-1]


class Pile:
    """The values of a growing ragged uint8 column, laid end to end in one array.

    A list of all rows, joined at the end, would take twice the memory. Capacity that is never written takes none.
    """

    def __init__(self, room: int = _FIRST_ROOM) -> None:
        self._values = _room_of(max(room, 1))
        self._ends = [0]

    def add(self, row: Array) -> None:
        start, stop = self._ends[-1], self._ends[-1] + len(row)
        self._make_room(stop)
        self._values[start:stop] = row
        self._ends.append(stop)

    def _make_room(self, stop: int) -> None:
        if stop > len(self._values):
            larger = np.empty(max(stop, 2 * len(self._values)), np.uint8)
            larger[: self._ends[-1]] = self._values[: self._ends[-1]]
            self._values = larger

    def column(self) -> Ragged:
        return Ragged(self._values[: self._ends[-1]], np.array(self._ends, np.int64))


def as_columns(rows: Sequence[Mapping[str, Array]], declared: Sequence[Column]) -> dict[str, Array | Ragged]:
    """Return rows of few values each as columns."""
    made: dict[str, Array | Ragged] = {}
    for column in declared:
        values = [row[column.name] for row in rows]
        if column.ragged:
            made[column.name] = Ragged.of(values, column.array_dtype)
        else:
            made[column.name] = np.array(values, column.array_dtype).reshape(len(rows), *column.shape)
    return made


_FLOAT32_BYTES = 4
_PLANES = 3


@dataclass(slots=True)
class ImageCounts:
    """Sums over the rows of one chunk, which are added up over chunks."""

    images: int = 0
    source_bytes: int = 0
    content_pixels: int = 0
    original_pixels: int = 0
    scaled_down: int = 0
    aspects: float = 0.0  # width / height, summed
    tags: int = 0
    unknown_tags: int = 0

    def add(self, row: Mapping[str, Array], named: int, source_bytes: int) -> None:
        """Count one row; `named` is the number of tags of its sample, in the vocabulary or not."""
        (width, height), (box_width, box_height) = row["original_size"].tolist(), row["box"][2:].tolist()
        known = len(row["tags"])
        self.images += 1
        self.source_bytes += source_bytes
        self.content_pixels += box_width * box_height
        self.original_pixels += width * height
        self.scaled_down += (box_width, box_height) != (width, height)
        self.aspects += width / height
        self.tags += known
        self.unknown_tags += named - known

    def statistics(self) -> dict[str, int | float | list[int]]:
        return {name: getattr(self, name) for name in self.__slots__}


def image_figures(fields: Mapping[str, Any], statistics: Mapping[str, Any], holds: Mapping[str, int]) -> dict[str, Any]:
    """Return shares, means and bytes per image from the sums over all chunks."""
    images, canvas = statistics.get("images", 0), fields["size"] ** 2
    return {
        "mean_aspect": _ratio(statistics.get("aspects", 0.0), images),
        "padding_share": 1 - _ratio(statistics.get("content_pixels", 0), images * canvas) if images else 0.0,
        "scaled_down_share": _ratio(statistics.get("scaled_down", 0), images),
        "tags_per_image": _ratio(statistics.get("tags", 0), images),
        "bytes_per_image": _ratio(holds["bytes"], images),
        "share_of_source_bytes": _ratio(holds["bytes"], statistics.get("source_bytes", 0)),
        "share_of_float32": _ratio(holds["bytes"], images * canvas * _PLANES * _FLOAT32_BYTES),
    }


def _ratio(part: float, whole: float) -> float:
    return part / whole if whole else 0.0


_NOT_MADE_HERE = "its recipe did not make this row, so do not trust the cache"
LARGEST_SIZE = 1 << 14
_LIBRARIES = ("libjpeg_turbo", "jpg", "zlib", "webp", "avif", "libtiff")
LOOKED_AT = 10_000  # images in which a tag of the vocabulary is searched
_NO_INDEX = "and have no index; `ImageBatch(cache, vocabulary=…)` reads them from the metadata, a new cache counts them"
MOST_METADATA = 1 << 20  # bytes, so that rows fit in chunks of the planned size
_MOST_ROOM = 128 * 1024 * 1024  # no chunk is planned larger
_ROOM = 1.3  # of the planned size: chunks come out somewhat larger or smaller


class Annotations(Protocol):
    """The metadata of a source, before a cache is planned."""

    def annotations(self) -> Iterable[Mapping[str, Any]]: ...


class ImageRecipe(
    RecipeHooks, msgspec.Struct, metaclass=RecipeMeta, frozen=True, kw_only=True, forbid_unknown_fields=True, dict=True
):
    """Letterbox images: content pixels, their box on the canvas, tags.

    The canvas has `size` × `size` pixels; padding is not stored. With `tags=None`, the vocabulary is counted when a
    cache is planned: all tags that the source has under `tag_key` at least `min_tag_count` times. `()` stores no tags.
    `tag_key` names one key of the metadata or several; `tag_separator`, by default a comma, separates the tags of a
    string.
    """

    kind: ClassVar[str] = "images"
    revision: ClassVar[int] = 1
    sample_ids: ClassVar[str] = "id"
    annotations: ClassVar[tuple[str, ...]] = ("id", "metadata")
    judged_by: ClassVar[int] = 48  # rows differ in size by the aspect of images only

    source_settings: ClassVar[str] = "forebay.sources.source_settings:ImageSettings"

    size: typing.Annotated[int, Meta(ge=1, le=LARGEST_SIZE, description="Side of the canvas, in pixels.")] = 448
    pad_color: typing.Annotated[
        Color,
        Meta(description="Padding color, e.g. 114,114,114 or #727272.", extra={"format": "color", "metavar": "R,G,B"}),
    ] = (114, 114, 114)
    resample: typing.Annotated[Resample, Meta(description="Filter for scaling down.")] = "bilinear"
    alpha: typing.Annotated[
        Alpha, Meta(description="Transparency: composite onto the pad color, drop it, or fail the image.")
    ] = "composite"
    exif: typing.Annotated[Exif, Meta(description="EXIF orientation.")] = "apply"
    decode: typing.Annotated[
        Literal["exact", "fast"], Meta(description="fast: decode large JPEGs at reduced resolution; pixels differ.")
    ] = "exact"
    storage: typing.Annotated[Literal["raw", "jpeg"], Meta(description="Storage format of pixels.")] = "raw"
    quality: typing.Annotated[int, Meta(ge=1, le=100, description="JPEG quality, with --storage jpeg.")] = 95
    codec: CodecField = "none"
    level: LevelField = "default"
    tags: typing.Annotated[
        tuple[str, ...] | None,
        Meta(
            description="Tag vocabulary: cat,dog or @file or none.",
            extra={"format": "names", "metavar": "TAGS", "default": "all tags of the source"},
        ),
    ] = None
    tag_key: typing.Annotated[
        TagKey, Meta(description="Metadata key that holds the tags (repeatable).", extra={"metavar": "KEY"})
    ] = "tags"
    min_tag_count: typing.Annotated[int, Meta(ge=1, description="Drop tags that are rarer than this.")] = 1
    max_pixels: typing.Annotated[int, Meta(ge=1, description="Fail larger images.")] = MAX_PIXELS
    chunk_bytes: typing.Annotated[Size, Meta(description="Decoded size of a chunk.")] = 64 * 1024 * 1024
    tag_separator: typing.Annotated[  # unset, it is not part of the fingerprint
        str | msgspec.UnsetType,
        Meta(
            description=r"Separator of tags in a string: ',' or ' ' or '\n'.",
            extra={"format": "escaped", "default": ","},
        ),
    ] = msgspec.UNSET

    def __post_init__(self) -> None:
        if not _is_color(self.pad_color):
            raise RecipeInvalid(f"pad_color is {self.pad_color!r}; it must be three whole numbers from 0 to 255")
        if not self.tag_key or self.tag_separator == "":
            raise RecipeInvalid(
                "tag_key or tag_separator is empty; name a key of the metadata, and what is between tags"
            )
        check_fields(self)
        Tags(self.tags or ())

    def columns(self) -> tuple[Column, ...]:
        stored = self.stored_column
        return (
            Column(name=stored, dtype="uint8", ragged=True, codec=self.codec, level=self.level, rows_per_block=1),
            Column(name="box", dtype="int32", shape=(4,)),
            Column(name="original_size", dtype="int32", shape=(2,)),
            Column(name="id", dtype="uint8", ragged=True),
            Column(name="tags", dtype="uint32", ragged=True),
            Column(name="metadata", dtype="uint8", ragged=True),
        )

    def chunk_target(self) -> ChunkTarget:
        return ChunkTarget(bytes=self.chunk_bytes)

    def versions(self) -> Mapping[str, str]:
        """Return the versions of the libraries that decode and resize; another may give other pixels."""
        found = {name: features.version(name) for name in _LIBRARIES if features.check(name)}
        return {"pillow": pillow_version, **{name: version for name, version in found.items() if version}}

    def settled(self, kept: Mapping[str, Any] | None, survey: Annotations) -> tuple["ImageRecipe", tuple[str, ...]]:
        """Return the recipe with its vocabulary: that of the cache, or of the source as it is now."""
        if self.tags is not None:
            return self, self._no_hits(survey) if self.tags and kept is None else ()
        if kept is not None:
            return msgspec.structs.replace(self, tags=tuple(kept.get("tags") or ())), ()
        counted = Tags.counted(survey.annotations(), self.tag_key, self.min_tag_count, self._separator)
        notes = (counted.note if counted.names else self._no_tags(),)
        return msgspec.structs.replace(self, tags=counted.names), tuple(filter(None, notes))

    def _no_tags(self) -> str:
        often = f" {self.min_tag_count:,} times" if self.min_tag_count > 1 else ""
        key = shown_key(self.tag_key)
        return (
            f"the source names no tag{often} under {key}: rows have none; name their key (tag_key=…, --tag-key …), or "
            "with labels='folder' the folder above those of the classes"
        )

    def _no_hits(self, survey: Annotations) -> tuple[str, ...]:
        """Return a note if none of the first images has a tag of the vocabulary."""
        images, other = 0, ""
        for images, metadata in enumerate(islice(survey.annotations(), LOOKED_AT), 1):  # noqa: B007
            with suppress(ImageUnreadable):  # its row will fail, and be recorded
                for name in tags_in(metadata, self.tag_key, self._separator):
                    if name in self._vocabulary:
                        return ()
                    other = other or f"; they name '{name:.60}', for example"
        if not images:
            return ()
        return (
            f"none of the {len(self._vocabulary):,} tag(s) of the vocabulary occurs under {shown_key(self.tag_key)} in "
            f"the first {images:,} image(s){other}: rows will have none; check tags=, tag_key= and "
            "tag_separator= (--tags, --tag-key, --tag-separator)",
        )

    def refreshed(self, before: Iterable[Mapping[str, Array]], after: Iterable[Mapping[str, Array]]) -> tuple[str, ...]:
        """Return notes on rows that were made again: new tags that are not in the vocabulary."""
        known = {name for row in before for name in self._unknown(row)}
        new: dict[str, str] = {}  # tag -> the first sample that has it
        for row in after:
            sample = row["id"].tobytes().decode("utf-8", "replace")
            new |= {name: sample for name in self._unknown(row) if name not in known and name not in new}
        if not new:
            return ()
        name, sample = next(iter(new.items()))
        return (f"{len(new):,} new tag(s) are not in the vocabulary, as '{name:.60}' of '{sample}', {_NO_INDEX}",)

    def _unknown(self, row: Mapping[str, Array]) -> list[str]:
        return [name for name in self.tags_of(row["metadata"]) if name not in self._vocabulary]

    def grown(self, statistics: Mapping[str, float]) -> tuple[str, ...]:
        """Return notes on appended rows: tags that are not in the vocabulary."""
        unknown = int(statistics.get("unknown_tags", 0))
        if not unknown:
            return ()
        return (f"{unknown:,} tag(s) of the appended images are not in the vocabulary {_NO_INDEX}",)

    @property
    def _separator(self) -> str | None:
        return self.tag_separator if isinstance(self.tag_separator, str) else None

    @property
    def stored_column(self) -> str:
        """The column that holds the content."""
        return "pixels" if self.storage == "raw" else "jpeg"

    @property
    def policy(self) -> Policy:
        draft_size = self.size if self.decode == "fast" else None
        return Policy(self.pad_color, self.alpha, self.exif, self.max_pixels, draft_size)

    def vocabulary(self) -> Tags:
        """Return the vocabulary; it is empty until it is counted."""
        return self._vocabulary

    @cached_property
    def _vocabulary(self) -> Tags:
        return Tags(self.tags or ())

    def make(self, samples: Iterable[Sample]) -> Rows:
        return self.make_again(samples, {})

    def make_again(self, samples: Iterable[Sample], rows: Mapping[str, Mapping[str, Array]]) -> Rows:
        """Make rows as `make` does, but take the pixels of samples in `rows` from there instead of decoding them."""
        content, made_rows = Pile(min(int(_ROOM * self.chunk_bytes), _MOST_ROOM)), list[Row]()
        counts, failures = ImageCounts(), list[Failure]()
        for sample in samples:
            try:
                made = self._made(sample, rows.get(sample.id))
            except ImageUnreadable as error:
                failures.append(Failure(sample.id, error.reason, error.detail))
                continue
            content.add(made.content)
            made_rows.append(made.row)
            counts.add(made.row, made.named_tags, made.source_bytes)
        stored, *others = self.columns()
        columns = {stored.name: content.column(), **as_columns(made_rows, others)}
        return Rows(columns, tuple(failures), counts.statistics())

    def release(self) -> tuple[str, ...]:
        """Free the memory that is kept for further chunks."""
        _rooms.__dict__.clear()
        return ()

    def make_row(self, sample: Sample) -> Row:
        """Return one row as stored; raise ImageUnreadable if the sample cannot be decoded."""
        made = self._made(sample)
        return {self.stored_column: made.content, **made.row}

    def stored_fields(self) -> Mapping[str, Any]:
        """Return the fields that `make_stored` depends on: those of the pixels."""
        names = ["size", "resample", "alpha", "exif", "decode", "storage"]
        names += ["quality"] if self.storage == "jpeg" else []
        names += ["pad_color"] if self.alpha == "composite" else []
        return {"kind": self.kind, "revision": self.revision, **{name: getattr(self, name) for name in names}}

    def stored_columns(self) -> tuple[Column, ...]:
        return tuple(column for column in self.columns() if column.name != "tags")

    def make_stored(self, sample: Sample) -> Row:
        """Return a row without tags, which `read_stored` adds from its metadata for any vocabulary."""
        content, metadata = _parts(sample)
        written = _as_json(metadata)
        packed, row = self._pixels(sample.id, content)
        return {self.stored_column: packed, **row, "metadata": np.frombuffer(written, np.uint8)}

    def make_stored_again(self, sample: Sample, stored: Row) -> Row:
        """Return what `make_stored` returns for a sample whose bytes made `stored`, without decoding."""
        _, metadata = _parts(sample)
        return {**stored, "metadata": np.frombuffer(_as_json(metadata), np.uint8)}

    def read_stored(self, stored: Row) -> Row:
        """Return the row of a `make_stored` row, with its tags."""
        width, height = stored["original_size"].tolist()
        check_size((width, height), self.max_pixels)
        return {**stored, "tags": self._vocabulary.indices(self.tags_of(stored["metadata"]))}

    def tags_of(self, metadata: Array) -> list[str]:
        """Return the tags in the metadata of a row, in the vocabulary or not."""
        return tags_in(msgspec.json.decode(metadata.tobytes(), type=dict[str, Any]), self.tag_key, self._separator)

    def letterboxed(self, content: bytes) -> tuple[Planes, Letterbox]:
        """Return the content `[3, height, width]` of an image file and its letterbox."""
        decoded = decode(content, self.policy)
        return letterbox_planes(decoded.image, self.size, self.resample, decoded.size)

    def letterboxed_image(self, image: Image.Image) -> tuple[Planes, Letterbox]:
        """Return the content and the letterbox of a decoded image, as displayed."""
        return letterbox_planes(rgb(image, self.policy), self.size, self.resample)

    def packed(self, content: Planes) -> Array:
        """Return content as it is stored: raw pixels, or JPEG."""
        if self.storage == "raw":
            return content.reshape(-1)
        image = Image.fromarray(np.ascontiguousarray(content.transpose(1, 2, 0)))
        return np.frombuffer(bytearray(self._as_jpeg(image)), np.uint8)

    def unpacked(self, row: Mapping[str, Array]) -> Planes:
        """Return the content `[3, height, width]` of a stored row; with raw storage, a view of its bytes."""
        width, height = row["box"][2:].tolist()
        return self.planes_of(row[self.stored_column], width, height)

    def planes_of(self, stored: Array, width: int, height: int) -> Planes:
        """As `unpacked`, for the stored bytes and the size of their box."""
        if not 1 <= min(width, height) <= max(width, height) <= self.size:
            raise ValueError(f"a box of {width} × {height} pixels is not in a canvas of {self.size}; {_NOT_MADE_HERE}")
        if self.storage == "jpeg":
            return _planes_of_jpeg(stored.tobytes(), (width, height))
        if stored.size != 3 * height * width:
            raise ValueError(f"{stored.size:,} bytes are not those of {width} × {height} pixels; {_NOT_MADE_HERE}")
        return stored.reshape(3, height, width)

    @staticmethod
    def figures(fields: Mapping[str, Any], statistics: Mapping[str, Any], holds: Mapping[str, int]) -> dict[str, Any]:
        """Return shares, means and bytes per image from the sums over all chunks."""
        return image_figures(fields, statistics, holds)

    def _made(self, sample: Sample, known: Mapping[str, Array] | None = None) -> "_Made":
        content, metadata = _parts(sample)
        names = tags_in(metadata, self.tag_key, self._separator)
        written = _as_json(metadata)
        packed, row = self._pixels(sample.id, content) if known is None else self._known_pixels(known)
        row |= {"tags": self._vocabulary.indices(names), "metadata": np.frombuffer(written, np.uint8)}
        return _Made(packed, row, len(names), len(content))

    def _pixels(self, name: str, content: bytes) -> tuple[Array, Row]:
        """Return the content as it is stored, and the other columns of the pixels."""
        packed, fitted = self._packed_content(content)
        row: Row = {
            "box": np.array(fitted.box, np.int32),
            "original_size": np.array(fitted.image, np.int32),
            "id": np.frombuffer(name.encode("utf-8", "surrogateescape"), np.uint8),
        }
        return packed, row

    def _known_pixels(self, row: Mapping[str, Array]) -> tuple[Array, Row]:
        """Return from a row what `_pixels` returned when it was made."""
        return row[self.stored_column], {name: row[name] for name in ("box", "original_size", "id")}

    def _packed_content(self, content: bytes) -> tuple[Array, Letterbox]:
        """Return an image file as it is stored, and its letterbox."""
        if self.storage == "raw":
            planes, fitted = self.letterboxed(content)
            return planes.reshape(-1), fitted
        decoded = decode(content, self.policy)
        small, fitted = letterbox(decoded.image, self.size, self.resample, decoded.size)
        return np.frombuffer(bytearray(self._as_jpeg(small)), np.uint8), fitted

    def _as_jpeg(self, image: Image.Image) -> bytes:
        """Encode an image, with color at full resolution, and without the comment of its file."""
        buffer = io.BytesIO()
        image.save(buffer, "JPEG", quality=self.quality, subsampling="4:4:4", comment=b"")
        return buffer.getvalue()


class _Made(NamedTuple):
    """A row, with its content apart, and the counts of its sample."""

    content: Array
    row: Row
    named_tags: int
    source_bytes: int


def _planes_of_jpeg(stored: bytes, size: tuple[int, int]) -> Planes:
    """The content of a stored JPEG of this size. Its header is looked at first: a few bytes can state gigabytes."""
    try:
        with JpegImageFile(io.BytesIO(stored)) as image:  # `Image.open` limits the number of pixels
            if (image.size, image.mode) == (size, "RGB"):
                return np.asarray(image).transpose(2, 0, 1)
            found = f"{image.mode} of {image.size[0]:,} × {image.size[1]:,} pixels"
    except (OSError, SyntaxError, IndexError, TypeError, KeyError, struct.error) as error:  # as Pillow raises them
        found = f"not readable ({error})"
    raise ValueError(f"a stored JPEG of {size[0]} × {size[1]} pixels is {found}; {_NOT_MADE_HERE}")


def _is_color(value: Any) -> bool:
    channels = value if isinstance(value, tuple | list) else ()
    return len(channels) == 3 and all(type(channel) is int and 0 <= channel <= 255 for channel in channels)


def _parts(sample: Sample) -> tuple[bytes, dict[str, Any]]:
    if isinstance(sample.data, Annotated):
        return sample.data.content, sample.data.metadata
    if isinstance(sample.data, bytes):
        return sample.data, {}
    raise ImageUnreadable("not-an-image", f"the sample is {type(sample.data).__name__}, not the bytes of an image file")


def _as_json(metadata: Mapping[str, Any]) -> bytes:
    if not is_shallow(metadata):
        raise ImageUnreadable("bad-metadata", TOO_DEEP)
    try:
        written = canonical_json(metadata)
    except (TypeError, ValueError) as error:
        raise ImageUnreadable("bad-metadata", f"its metadata cannot be written as JSON: {error}") from error
    if len(written) > MOST_METADATA:
        raise ImageUnreadable("bad-metadata", f"its metadata is {len(written):,} bytes, more than {MOST_METADATA:,}")
    return written


class KeepsRecipes(Protocol):
    """The methods used of an open cache."""

    @property
    def layers(self) -> tuple[str, ...]: ...

    def recipe(self, layer: str) -> RecipeDocument: ...


def image_recipe(source: ImageRecipe | KeepsRecipes) -> ImageRecipe:
    """Return the recipe itself, or that of the image layer of a cache."""
    if isinstance(source, ImageRecipe):
        return source
    if not hasattr(source, "layers"):
        raise TypeError(f"pass an ImageRecipe or an open cache of images, not a {type(source).__name__}")
    kept = _kept(source)
    recipe = msgspec.convert(kept.fields, ImageRecipe)
    if fingerprint(recipe) != kept.fingerprint:
        changed = ", ".join(differing_fields(kept, recipe))
        raise RecipeInvalid(f"the recipe of layer '{kept.layer}' has changed (differs in: {changed})")
    return recipe


def _kept(cache: KeepsRecipes) -> RecipeDocument:
    documents = [cache.recipe(layer) for layer in cache.layers]
    found = next((document for document in documents if document.kind == ImageRecipe.kind), None)
    if found is None:
        kinds = ", ".join(document.kind for document in documents)
        raise ValueError(
            f"{cache!r} holds no images, only: {kinds}; pass a cache built by an ImageRecipe, or the recipe"
        )
    return found


ImageInput = str | PathLike[str] | bytes | NDArray[np.uint8] | Image.Image
_FLOATS = tuple(np.dtype(each) for each in (np.float32, np.float16, ml_dtypes.bfloat16))


@dataclass(frozen=True, slots=True, eq=False)
class Prepared:
    """One image on its canvas."""

    pixels: Array  # (3, size, size)
    pixel_mask: NDArray[np.bool_]  # (size, size), True = PAD
    token_mask: NDArray[np.bool_] | None  # (size / patch, size / patch), True = ignored
    letterbox: Letterbox


def prepare(
    image: ImageInput,
    recipe: ImageRecipe | KeepsRecipes,
    *,
    normalize: Normalize = None,
    dtype: DTypeLike = np.uint8,
    patch: int | None = None,
    threshold: float = IGNORE_THRESHOLD,
) -> Prepared:
    """Return an image as an `ImageBatch` with the same options and masks="host" would.

    The image is a path, the bytes of a file, a Pillow image, or uint8 `[height, width]`, `[height, width, 3]` or, with
    alpha, `[height, width, 4]`. One that cannot be decoded raises `ImageUnreadable`, with the reason that a build would
    record.
    """
    kept, wanted = image_recipe(recipe), _checked_dtype(dtype, normalize)
    row = prepared_row(image, kept)
    width, height = row["original_size"].tolist()
    letterbox = Letterbox((width, height), kept.size, tuple(row["box"].tolist()))
    ignored = None if patch is None else _ignored(letterbox, patch, threshold, _name(image))
    pixels = _values(paste(kept.unpacked(row), letterbox, kept.pad_color), normalize, wanted)
    return Prepared(pixels, pixel_mask([letterbox.box], (kept.size, kept.size))[0], ignored, letterbox)


def prepared_row(image: ImageInput, recipe: ImageRecipe | KeepsRecipes) -> Row:
    """Return the row that a cache would store of an image, without tags; an `ImageBatch` makes batches of such rows.

    collate = ImageBatch(cache, normalize="imagenet", dtype=torch.float32, patch=16)
    batch = collate([prepared_row(path, cache) for path in paths])
    """
    kept = image_recipe(recipe)
    if isinstance(image, np.ndarray | Image.Image):
        return _row_of_pixels(image, kept)
    content = bytes(image) if isinstance(image, bytes | bytearray | memoryview) else Path(image).read_bytes()
    try:
        return kept.make_row(Sample(_name(image), content))
    except ImageUnreadable as error:
        raise ImageUnreadable(error.reason, f"'{_name(image)}': {error.detail}") from error


def _row_of_pixels(image: NDArray[Any] | Image.Image, recipe: ImageRecipe) -> Row:
    content, letterbox = recipe.letterboxed_image(_as_displayed(image, recipe))
    return {
        recipe.stored_column: np.ascontiguousarray(recipe.packed(content)).reshape(-1),
        "box": np.array(letterbox.box, np.int32),
        "original_size": np.array(letterbox.image, np.int32),
        "id": np.frombuffer(_name(image).encode(), np.uint8),
        "tags": np.empty(0, np.uint32),
        "metadata": np.frombuffer(b"{}", np.uint8),
    }


def _as_displayed(image: NDArray[Any] | Image.Image, recipe: ImageRecipe) -> Image.Image:
    if isinstance(image, np.ndarray):
        return Image.fromarray(_checked_array(image))
    with understood(recipe.max_pixels):
        image.load()
        is_turned = recipe.exif == "apply" and image.getexif().get(ExifTags.Base.Orientation, 1) != 1
        return ImageOps.exif_transpose(image) if is_turned else image


def _ignored(letterbox: Letterbox, patch: int, threshold: float, name: str) -> NDArray[np.bool_]:
    size = (letterbox.size, letterbox.size)
    token_ignore_mask(np.empty((0, 4), np.int64), size, patch, threshold)  # checks both
    ignored: NDArray[np.bool_] = token_padding([letterbox.box], size, patch)[0] >= threshold
    if ignored.all():
        raise AllTokensIgnored(name, letterbox.box, patch, threshold)
    return ignored


def _values(canvas: Planes, normalize: Normalize, dtype: np.dtype[Any]) -> Array:
    return canvas if dtype == np.uint8 else Scaling.of(normalize).apply(canvas).astype(dtype, copy=False)


def _name(image: ImageInput) -> str:
    """Return the name of the image in an error."""
    if isinstance(image, str | PathLike):
        return fspath(image)
    return "<an array>" if isinstance(image, np.ndarray) else f"<{type(image).__name__}>"


def _checked_array(image: NDArray[Any]) -> NDArray[np.uint8]:
    if image.dtype != np.uint8 or image.ndim not in (2, 3) or (image.ndim == 3 and image.shape[2] not in (3, 4)):
        raise ValueError(
            "the image must be uint8 [height, width], [height, width, 3] or, with alpha, [height, width, 4] "
            f"(got {image.dtype} {image.shape}); pass pixels as decoded, channels last"
        )
    if not image.size:
        raise ValueError(f"the image must have at least one pixel (got shape {image.shape})")
    return image


def _checked_dtype(dtype: DTypeLike, normalize: Normalize) -> np.dtype[Any]:
    wanted = np.dtype(dtype)
    if wanted not in (np.dtype(np.uint8), *_FLOATS):
        names = ", ".join(each.name for each in _FLOATS)
        raise ValueError(f"dtype must be one of uint8, {names} (got {wanted})")
    if wanted == np.uint8 and normalize is not None:
        raise ValueError(f"normalize needs a float dtype (got {normalize!r} with uint8)")
    return wanted
