"""The recipe of images: letterbox them, and store their content, box, tags and metadata."""

import io
import struct
import typing
from collections.abc import Callable, Iterable, Mapping, Sequence
from contextlib import suppress
from dataclasses import dataclass
from functools import cached_property
from itertools import islice
from typing import Any, ClassVar, Literal, NamedTuple, Protocol

import msgspec
import numpy as np
from msgspec import Meta
from PIL import Image, features
from PIL import __version__ as pillow_version
from PIL.JpegImagePlugin import JpegImageFile

from forebay.columns import Array, CodecField, Column, LevelField, Ragged
from forebay.errors import RecipeInvalid
from forebay.fields import Size
from forebay.images.color import Alpha, Color
from forebay.images.decode import MAX_PIXELS, Exif, Policy, decode, set_up_worker
from forebay.images.geometry import Letterbox
from forebay.images.resize import Planes, Resample, letterbox
from forebay.images.tags import ImageUnreadable, TagKey, Tags, shown_key, tags_in
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


def as_columns(rows: Sequence[Mapping[str, Array]], declared: Sequence[Column]) -> dict[str, Array | Ragged]:
    """Return rows as columns. Joining takes the memory of a chunk once more."""
    columns: dict[str, Array | Ragged] = {}
    for column in declared:
        values, dtype = [row[column.name] for row in rows], column.array_dtype
        is_ragged, shape = column.ragged, (len(rows), *column.shape)
        columns[column.name] = Ragged.of(values, dtype) if is_ragged else np.array(values, dtype).reshape(shape)
    return columns


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
        "share_of_float32": _ratio(holds["bytes"], images * canvas * 12),
    }


def _ratio(part: float, whole: float) -> float:
    return part / whole if whole else 0.0


_NOT_MADE_HERE = "its recipe did not make this row, so do not trust the cache"
LARGEST_SIZE = 1 << 14
_LIBRARIES = ("libjpeg_turbo", "jpg", "zlib", "webp", "avif", "libtiff")
LOOKED_AT = 10_000  # images in which a tag of the vocabulary is searched
MOST_METADATA = 1 << 20  # bytes, so that rows fit in chunks of the planned size


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
                "tag_key or tag_separator is empty", hint="name a key of the metadata, and what is between tags"
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
        versions = {name: features.version(name) for name in _LIBRARIES if features.check(name)}
        return {"pillow": pillow_version, **{name: version for name, version in versions.items() if version}}

    def settled(self, stored: Mapping[str, Any] | None, survey: Annotations) -> tuple["ImageRecipe", tuple[str, ...]]:
        """Return the recipe with its vocabulary: that of the cache, or of the source as it is now."""
        if self.tags is not None:
            return self, self._no_hits(survey) if self.tags and stored is None else ()
        if stored is not None:
            return msgspec.structs.replace(self, tags=tuple(stored.get("tags") or ())), ()
        counted = Tags.counted(survey.annotations(), self.tag_key, self.min_tag_count, self._separator)
        notes = (counted.note if counted.names else self._no_tags(),)
        return msgspec.structs.replace(self, tags=counted.names), tuple(filter(None, notes))

    def _no_tags(self) -> str:
        often = f" {self.min_tag_count:,} times" if self.min_tag_count > 1 else ""
        key = shown_key(self.tag_key)
        return (
            f"no tag occurs{often} under {key}, so rows have no tags; pass another key (tag_key=…, --tag-key …), or "
            "labels='folder' (--labels folder) for one folder per class"
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

    def grown(self, statistics: Mapping[str, float]) -> tuple[str, ...]:
        """Return notes on appended rows: tags that are not in the vocabulary."""
        unknown = int(statistics.get("unknown_tags", 0))
        if not unknown:
            return ()
        return (
            f"{unknown:,} tag(s) of the appended images are not in the vocabulary and have no index; "
            "`ImageBatch(cache, vocabulary=…)` reads them from the metadata, a new cache counts them",
        )

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

    def placed(self, worker: int) -> "ImageRecipe":
        """Configure Pillow in a worker process."""
        set_up_worker(self.max_pixels)
        return self

    def make(self, samples: Iterable[Sample]) -> Rows:
        rows, counts, failures = list[Row](), ImageCounts(), list[Failure]()
        for sample in samples:
            try:
                prepared = self._prepared(sample)
            except ImageUnreadable as error:
                failures.append(Failure(sample.id, error.reason, error.detail))
                continue
            rows.append(prepared.row)
            counts.add(prepared.row, prepared.named_tags, prepared.source_bytes)
        return Rows(as_columns(rows, self.columns()), tuple(failures), counts.statistics())

    def make_row(self, sample: Sample) -> Row:
        """Return one row as stored; raise ImageUnreadable if the sample cannot be decoded."""
        return self._prepared(sample).row

    def row_fields(self) -> Mapping[str, Any]:
        """Return the fields that decide a row without its tags."""
        names = ["size", "resample", "alpha", "exif", "decode", "storage", "max_pixels"]
        names += ["quality"] if self.storage == "jpeg" else []
        names += ["pad_color"] if self.alpha == "composite" else []
        return {"kind": self.kind, "revision": self.revision, **{name: getattr(self, name) for name in names}}

    def with_tags(self, row: Row) -> Row:
        """Return a row with the tags of its metadata that are in the vocabulary."""
        return {**row, "tags": self._vocabulary.indices(self.tags_of(row["metadata"]))}

    def tags_of(self, metadata: Array) -> list[str]:
        """Return the tags in the metadata of a row, in the vocabulary or not."""
        return tags_in(msgspec.json.decode(metadata.tobytes(), type=dict[str, Any]), self.tag_key, self._separator)

    def letterboxed(self, content: bytes) -> tuple[Planes, Letterbox]:
        """Return the content `[3, height, width]` of an image file and its letterbox."""
        decoded = decode(content, self.policy)
        return letterbox(decoded.image, self.size, self.resample, decoded.size)

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

    figures: ClassVar[Callable[..., dict[str, Any]]] = staticmethod(image_figures)

    def _prepared(self, sample: Sample) -> "_PreparedRow":
        content, metadata = _parts(sample)
        names = tags_in(metadata, self.tag_key, self._separator)
        written = _as_json(metadata)
        planes, fitted = self.letterboxed(content)
        row = {
            self.stored_column: self.packed(planes),
            "box": np.array(fitted.box, np.int32),
            "original_size": np.array(fitted.image, np.int32),
            "id": np.frombuffer(sample.id.encode("utf-8", "surrogateescape"), np.uint8),
            "tags": self._vocabulary.indices(names),
            "metadata": np.frombuffer(written, np.uint8),
        }
        return _PreparedRow(row, len(names), len(content))

    def _as_jpeg(self, image: Image.Image) -> bytes:
        """Encode an image, with color at full resolution, and without the comment of its file."""
        buffer = io.BytesIO()
        image.save(buffer, "JPEG", quality=self.quality, subsampling="4:4:4", comment=b"")
        return buffer.getvalue()


class _PreparedRow(NamedTuple):
    """A row and the counts of its sample."""

    row: Row
    named_tags: int
    source_bytes: int


def _planes_of_jpeg(stored: bytes, size: tuple[int, int]) -> Planes:
    """The content of a stored JPEG of this size. Its header is looked at first: a few bytes can state gigabytes."""
    try:
        with JpegImageFile(io.BytesIO(stored)) as image:  # `Image.open` limits the number of pixels
            if (image.size, image.mode) == (size, "RGB"):
                return np.asarray(image).transpose(2, 0, 1)
            actual = f"{image.mode} of {image.size[0]:,} × {image.size[1]:,} pixels"
    except (OSError, SyntaxError, IndexError, TypeError, KeyError, struct.error) as error:  # as Pillow raises them
        actual = f"not readable ({error})"
    raise ValueError(f"a stored JPEG of {size[0]} × {size[1]} pixels is {actual}; {_NOT_MADE_HERE}")


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
    documents = [source.recipe(layer) for layer in source.layers]
    stored = next((document for document in documents if document.kind == ImageRecipe.kind), None)
    if stored is None:
        kinds = ", ".join(document.kind for document in documents)
        raise ValueError(
            f"{source!r} holds no images, only: {kinds}; pass a cache built by an ImageRecipe, or the recipe"
        )
    recipe = msgspec.convert(stored.fields, ImageRecipe)
    if fingerprint(recipe) != stored.fingerprint:
        changed = ", ".join(differing_fields(stored, recipe))
        raise RecipeInvalid(f"the recipe of layer '{stored.layer}' has changed (differs in: {changed})")
    return recipe
