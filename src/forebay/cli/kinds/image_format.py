"""What a source of images is, by its name: image files, a manifest of them, or Parquet."""

import os
from collections.abc import Sequence
from typing import Literal, get_args

import click

from forebay.sources.walker import without_stream_suffix

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
