"""Images to letterboxed pixels: folders with sidecars, a manifest of JSON lines, or Parquet that holds the bytes."""

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
    """The one format of all that was named.

    >>> format_of(["photos", "more/*.png"]), format_of(["all.jsonl.gz"]), format_of(["data/*.parquet"])
    ('files', 'manifest', 'parquet')
    """
    found: dict[ImageFormat, str] = {}
    for path in paths:
        found.setdefault(_suffix_format(path), path)
    if len(found) > 1:
        examples = ", ".join(f"{path} is {known}" for known, path in found.items())
        raise click.UsageError(f"The sources are of several formats ({examples}); build a cache of each.")
    return next(iter(found))


def _suffix_format(path: str) -> ImageFormat:
    return SUFFIXES.get(os.path.splitext(without_stream_suffix(path))[1].lower(), "files")


class ImageSourceSettings(msgspec.Struct, frozen=True, kw_only=True, forbid_unknown_fields=True):
    """Folders, globs and files, or a list of images, and where in it they are."""

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
            self._refuse("image", "names a field of a manifest or a column of Parquet; image files have none")
            return sources.images(*self.paths, root=self.root, labels=self.labels or "sidecar", **limit)
        self._refuse("labels", "names where the tags of image files are; a manifest and Parquet hold them")
        field = {**limit} if self.image is None else {**limit, "image": self.image}
        if chosen == "parquet":
            self._refuse("root", "is the folder that the paths of a manifest are below; Parquet holds the images")
            return sources.parquet_images(*self.paths, **field)
        if len(self.paths) > 1:
            raise click.UsageError(
                f"a build reads one manifest; {len(self.paths)} were named. Join them into one file."
            )
        return sources.image_manifest(self.paths[0], root=self.root, **field)

    def _refuse(self, name: str, why: str) -> None:
        if getattr(self, name):
            raise click.UsageError(f"--{name} {why}.")


def recipe_fields(fields: dict[str, Any]) -> dict[str, Any]:
    """What a user wrote, as the fields of a recipe: a vocabulary of none is an empty one, one key is no list."""
    found = {**fields, "tags": ()} if fields.get("tags") == NO_TAGS else dict(fields)
    keys = found.get("tag_key")
    if isinstance(keys, tuple | list) and len(keys) == 1:
        found["tag_key"] = keys[0]
    return found


IMAGES = Kind(
    name="images",
    summary="Images, letterboxed: content pixels, their box on the canvas, tags.",
    details=(
        "SOURCE is a folder, an image or a quoted glob (a.jpg with a.json or a.txt beside it, where tags are), or one "
        'manifest of JSON lines ({"path": …, "tags": […]}; .jsonl, .jsonl.gz), or Parquet files that hold the '
        "bytes. Names decide which; --format decides it explicitly."
    ),
    example="images photos",
    source=ImageSourceSettings,
    recipe_fields=recipe_fields,
    options=(
        click.option("--format", type=click.Choice(formats()), help="What SOURCE is."),
        click.option(
            "--image", metavar="FIELD", help="The field of the path, or the column of the bytes.  [path; image]"
        ),
        click.option(
            "--root",
            metavar="FOLDER",
            shell_complete=complete_folder,
            help="The folder that the paths of a manifest are below.  [its own]",
        ),
        click.option("--max-sample-bytes", type=SizeType(), help="Larger files fail.  [default: 256MiB]"),
        click.option("--size", type=click.IntRange(min=1), help="Side of the canvas, in pixels.  [recipe; 448]"),
        click.option(
            "--pad-color", type=ColorType(), help="Of padding, as 114,114,114 or #727272.  [recipe; 114,114,114]"
        ),
        click.option(
            "--resample",
            type=click.Choice(["bilinear", "bicubic", "lanczos", "box", "nearest"]),
            help="How images are made smaller.  [recipe; bilinear]",
        ),
        click.option(
            "--alpha",
            type=click.Choice(["composite", "drop", "fail"]),
            help="What is transparent: on the pad colour, ignored, a failure.  [recipe; composite]",
        ),
        click.option("--exif", type=click.Choice(["apply", "ignore"]), help="Orientation by EXIF.  [recipe; apply]"),
        click.option(
            "--decode",
            type=click.Choice(["exact", "fast"]),
            help="fast: JPEGs at a fraction of their size, other pixels.  [recipe; exact]",
        ),
        click.option("--storage", type=click.Choice(["raw", "jpeg"]), help="How content is kept.  [recipe; raw]"),
        click.option("--quality", type=click.IntRange(1, 100), help="Of storage as JPEG.  [recipe; 95]"),
        click.option("--codec", type=click.Choice(["none", "lz4", "zstd"]), help="Compression.  [recipe; none]"),
        click.option("--level", type=click.Choice(["fast", "default", "max"]), help="How hard.  [recipe; default]"),
        click.option(
            "--tags", type=TagsType(), help="The vocabulary: cat,dog or @file or none.  [recipe; the source's]"
        ),
        click.option(
            "--labels",
            type=click.Choice(["sidecar", "folder"]),
            help="Where tags of image files are: in a sidecar, or the folder's name is the tag.  [sidecar]",
        ),
        click.option(
            "--tag-key",
            metavar="KEY",
            multiple=True,
            help="Key of the metadata that holds tags; repeat it for several.  [recipe; tags]",
        ),
        click.option(
            "--tag-separator",
            type=SeparatorType(),
            help="Text between the tags of a string: ',' or ' ' or '\\n'.  [recipe; ,]",
        ),
        click.option("--min-tag-count", type=click.IntRange(min=1), help="Rarer tags are left out.  [recipe; 1]"),
        click.option("--max-pixels", type=click.IntRange(min=1), help="Larger images fail.  [recipe; 134217728]"),
        click.option("--chunk-bytes", type=SizeType(), help="Size of a chunk, decoded.  [recipe; 64MiB]"),
    ),
)
