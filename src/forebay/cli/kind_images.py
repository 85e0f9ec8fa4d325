"""The kind `images`: folders with sidecars, a manifest of JSON lines, or Parquet files with the bytes."""

import os
from collections.abc import Sequence
from typing import Any, Literal, get_args

import click
import msgspec

from forebay import sources
from forebay.cli.kind_options import Kind
from forebay.cli.options import NO_TAGS, ColorType, SeparatorType, SizeType, TagsType, complete_folder
from forebay.source import Source
from forebay.sources.image_files import Labels
from forebay.sources.paths import without_stream_suffix

ImageFormat = Literal["files", "manifest", "parquet"]
SUFFIXES: dict[str, ImageFormat] = {".jsonl": "manifest", ".ndjson": "manifest", ".parquet": "parquet"}


def formats() -> tuple[str, ...]:
    return get_args(ImageFormat)


def format_of(paths: Sequence[str]) -> ImageFormat:
    """The common format of all paths.

    >>> format_of(["photos", "more/*.png"]), format_of(["all.jsonl.gz"]), format_of(["data/*.parquet"])
    ('files', 'manifest', 'parquet')
    """
    found: dict[ImageFormat, str] = {}
    for path in paths:
        found.setdefault(_suffix_format(path), path)
    if len(found) > 1:
        examples = ", ".join(f"{path} is {known}" for known, path in found.items())
        raise click.UsageError(f"The sources have several formats ({examples}); build one cache for each.")
    return next(iter(found))


def _suffix_format(path: str) -> ImageFormat:
    return SUFFIXES.get(os.path.splitext(without_stream_suffix(path))[1].lower(), "files")


class ImageSourceSettings(msgspec.Struct, frozen=True, kw_only=True, forbid_unknown_fields=True):
    """`[source]` of images: paths, and where in a manifest or Parquet file the images are."""

    paths: tuple[str, ...]
    format: ImageFormat | None = None
    image: str | None = None
    root: str | None = None
    max_sample_bytes: int | None = None
    labels: Labels | None = None

    def open(self) -> Source:
        chosen = self.format or format_of(self.paths)
        limit: dict[str, Any] = {} if self.max_sample_bytes is None else {"max_sample_bytes": self.max_sample_bytes}
        if chosen == "files":
            self._refuse("image", "is a field of a manifest or a column of Parquet; image files have none")
            return sources.images(*self.paths, root=self.root, labels=self.labels or "sidecar", **limit)
        self._refuse("labels", "is for image files; a manifest and Parquet files contain the tags")
        field = {**limit} if self.image is None else {**limit, "image": self.image}
        if chosen == "parquet":
            self._refuse("root", "is for manifests; Parquet files contain the images")
            return sources.parquet_images(*self.paths, **field)
        if len(self.paths) > 1:
            raise click.UsageError(
                f"a build reads one manifest, but {len(self.paths)} were passed; join them into one file."
            )
        return sources.image_manifest(self.paths[0], root=self.root, **field)

    def _refuse(self, name: str, why: str) -> None:
        if getattr(self, name):
            raise click.UsageError(f"--{name} {why}.")


def recipe_fields(fields: dict[str, Any]) -> dict[str, Any]:
    """Command-line values as recipe fields: `none` is an empty vocabulary, a single key is not a list."""
    found = {**fields, "tags": ()} if fields.get("tags") == NO_TAGS else dict(fields)
    keys = found.get("tag_key")
    if isinstance(keys, tuple | list) and len(keys) == 1:
        found["tag_key"] = keys[0]
    return found


IMAGES = Kind(
    name="images",
    summary="Build letterboxed images: content pixels, their box on the canvas, tags.",
    details=(
        "SOURCE is a folder, an image or a quoted glob (the tags of a.jpg are in a.json or a.txt next to it), or one "
        'manifest of JSON lines ({"path": …, "tags": […]}; .jsonl, .jsonl.gz), or Parquet files that contain the '
        "bytes. The format follows from the names; --format sets it explicitly."
    ),
    example="images photos",
    source=ImageSourceSettings,
    recipe_fields=recipe_fields,
    options=(
        click.option("--format", type=click.Choice(formats()), help="Format of SOURCE."),
        click.option("--image", metavar="FIELD", help="Field with the path, or column with the bytes.  [path; image]"),
        click.option(
            "--root",
            metavar="FOLDER",
            shell_complete=complete_folder,
            help="Folder that the paths in a manifest are relative to.  [its own]",
        ),
        click.option("--max-sample-bytes", type=SizeType(), help="Fail larger files.  [default: 256MiB]"),
        click.option("--size", type=click.IntRange(min=1), help="Side of the canvas, in pixels.  [recipe; 448]"),
        click.option(
            "--pad-color", type=ColorType(), help="Padding color, e.g. 114,114,114 or #727272.  [recipe; 114,114,114]"
        ),
        click.option(
            "--resample",
            type=click.Choice(["bilinear", "bicubic", "lanczos", "box", "nearest"]),
            help="Filter for scaling down.  [recipe; bilinear]",
        ),
        click.option(
            "--alpha",
            type=click.Choice(["composite", "drop", "fail"]),
            help="Transparency: composite onto the pad color, drop it, or fail the image.  [recipe; composite]",
        ),
        click.option("--exif", type=click.Choice(["apply", "ignore"]), help="EXIF orientation.  [recipe; apply]"),
        click.option(
            "--decode",
            type=click.Choice(["exact", "fast"]),
            help="fast: decode large JPEGs at reduced resolution; pixels differ.  [recipe; exact]",
        ),
        click.option("--storage", type=click.Choice(["raw", "jpeg"]), help="Storage format of pixels.  [recipe; raw]"),
        click.option("--quality", type=click.IntRange(1, 100), help="JPEG quality, with --storage jpeg.  [recipe; 95]"),
        click.option("--codec", type=click.Choice(["none", "lz4", "zstd"]), help="Compression.  [recipe; none]"),
        click.option(
            "--level", type=click.Choice(["fast", "default", "max"]), help="Compression level.  [recipe; default]"
        ),
        click.option(
            "--tags",
            type=TagsType(),
            help="Tag vocabulary: cat,dog or @file or none.  [recipe; all tags of the source]",
        ),
        click.option(
            "--labels",
            type=click.Choice(["sidecar", "folder"]),
            help="Tags of image files: from a sidecar, or the name of the folder.  [sidecar]",
        ),
        click.option(
            "--tag-key",
            metavar="KEY",
            multiple=True,
            help="Metadata key that holds the tags (repeatable).  [recipe; tags]",
        ),
        click.option(
            "--tag-separator",
            type=SeparatorType(),
            help="Separator of tags in a string: ',' or ' ' or '\\n'.  [recipe; ,]",
        ),
        click.option(
            "--min-tag-count", type=click.IntRange(min=1), help="Drop tags that are rarer than this.  [recipe; 1]"
        ),
        click.option("--max-pixels", type=click.IntRange(min=1), help="Fail larger images.  [recipe; 134217728]"),
        click.option("--chunk-bytes", type=SizeType(), help="Decoded size of a chunk.  [recipe; 64MiB]"),
    ),
)
