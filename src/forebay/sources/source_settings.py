"""Sources as options name them: `[source]` of a settings file, or the flags of `forebay build KIND`.

A recipe names its struct in `source_settings`. Each is a frozen struct with `paths`, a docstring that says what a path
may be, an example, and `open`, which finds the format and makes the source.
"""

import os
from collections import Counter
from collections.abc import Iterator, Mapping, Sequence
from importlib import import_module
from typing import Annotated, Any, ClassVar, Literal, Protocol, TypeVar

import msgspec
from msgspec import Meta

from forebay.errors import SourceInvalid
from forebay.fields import Size
from forebay.source import Source, not_read
from forebay.sources.image_files import Labels, images
from forebay.sources.jsonl import jsonl, lines
from forebay.sources.manifests import image_manifest
from forebay.sources.opening import full_path
from forebay.sources.paths import MAX_SAMPLE_BYTES, list_files, named_below
from forebay.sources.text import files, text
from forebay.sources.walking import STREAM_SUFFIXES, suffix_of, walk_files, without_stream_suffix
from forebay.store.base import is_url

HUB = "hub:"
Format = TypeVar("Format")
TextFormat = Literal["jsonl", "parquet", "text"]
ImageFormat = Literal["files", "manifest", "parquet"]
TEXT_SUFFIXES: dict[str, TextFormat] = {
    ".jsonl": "jsonl",
    ".ndjson": "jsonl",
    ".json": "jsonl",
    ".parquet": "parquet",
    ".txt": "text",
    ".md": "text",
}
IMAGE_SUFFIXES: dict[str, ImageFormat] = {".jsonl": "manifest", ".ndjson": "manifest", ".parquet": "parquet"}
LINE_SUFFIXES = (".jsonl", ".ndjson", ".txt", *STREAM_SUFFIXES)
Suffixes = Annotated[tuple[str, ...], Meta(description="In folders, only read files with this suffix (repeatable).")]
Spool = Annotated[
    str | None,
    Meta(
        description="Directory for downloaded shards while they are read (DIR/forebay-shards).",
        extra={"format": "folder", "metavar": "DIR"},
    ),
]
Retries = Annotated[int, Meta(ge=0, description="Retries per download of data.")]
Timeout = Annotated[
    float, Meta(gt=0, description="Seconds without a byte before a download is retried.", extra={"metavar": "SECONDS"})
]
Revision = Annotated[str | None, Meta(description="Commit, tag or branch on the hub.", extra={"default": "the newest"})]


class SourceSettings(Protocol):
    """The options of a source, as a frozen struct."""

    example: ClassVar[str]
    paths: tuple[str, ...]

    def open(self) -> Source: ...


class PathSettings(msgspec.Struct, frozen=True, kw_only=True, forbid_unknown_fields=True):
    """Options that all sources share."""

    example: ClassVar[str] = "data"

    paths: tuple[str, ...]

    def _refuse(self, why: str, *names: str) -> None:
        """Raise for an option that does not fit the format."""
        for name in names:
            if getattr(self, name):
                raise SourceInvalid(f"--{name.replace('_', '-')} {why}")

    def _passed(self, *names: str) -> dict[str, Any]:
        return {name: value for name in names if (value := getattr(self, name)) is not None}


class RawSettings(PathSettings, frozen=True, kw_only=True):
    """Files or lines, as bytes.

    SOURCE is a file, a folder or a quoted glob. If every SOURCE ends in .jsonl, .ndjson, .txt or the suffix of a
    compressed file (.gz, .zst, .bz2, .xz), each line is a sample; otherwise each file is. --unit sets it explicitly.
    """

    example: ClassVar[str] = "'data/*.jsonl'"

    unit: Annotated[Literal["files", "lines"] | None, Meta(description="Unit of a sample.")] = None
    suffix: Suffixes = ()
    max_sample_bytes: Annotated[Size | None, Meta(description="Fail longer samples.")] = None  # of RawRecipe, too

    def open(self) -> Source:
        limit = max(self.max_sample_bytes or 0, MAX_SAMPLE_BYTES)  # the source must not read less than the recipe
        if self._chosen_unit() == "files":
            return files(*self.paths, suffixes=self.suffix, max_sample_bytes=limit)
        if self.suffix:
            raise SourceInvalid(
                "--suffix selects whole files in folders",
                hint=f"for lines, pass a glob like 'folder/**/*{self.suffix[0]}'",
            )
        return lines(*self.paths, max_sample_bytes=limit)

    def _chosen_unit(self) -> Literal["files", "lines"]:
        if self.unit is not None:
            return self.unit
        return "lines" if all(path.lower().endswith(LINE_SUFFIXES) for path in self.paths) else "files"


class TextSettings(PathSettings, frozen=True, kw_only=True):
    """Documents of text.

    SOURCE is a file, a folder, a quoted glob, or hub:org/name on the Hugging Face hub. The suffix sets the format:
    .jsonl, .ndjson and .json are JSON lines, .parquet is Parquet, .txt, .md and any other single file are plain text;
    .gz, .zst, .bz2 and .xz files are decompressed. --format sets it explicitly.
    """

    example: ClassVar[str] = "'data/*.jsonl'"

    format: Annotated[TextFormat | None, Meta(description="Format of the files.", extra={"default": "by suffix"})] = (
        None
    )
    text: Annotated[
        str | None,
        Meta(description="Field or column with the text.", extra={"metavar": "FIELD", "default": "text"}),
    ] = None
    separator: Annotated[
        str | None,
        Meta(
            description=r"Separator of documents in a text file, e.g. '\n---\n'.",
            extra={"format": "escaped", "default": "one document per file"},
        ),
    ] = None
    suffix: Suffixes = ()
    max_sample_bytes: Annotated[Size | None, Meta(description="Fail longer documents.", extra={"default": "64MiB"})] = (
        None
    )
    subset: Annotated[str | None, Meta(description="Configuration of the data set on the hub.")] = None
    split: Annotated[str | None, Meta(description="Split of the data set on the hub.", extra={"default": "train"})] = (
        None
    )
    revision: Revision = None
    spool: Spool = None
    download_retries: Retries = 5
    download_timeout: Timeout = 300.0

    def open(self) -> Source:
        if any(map(is_on_hub, self.paths)):
            return self._hub()
        self._refuse(f"is for data sets on the hub; name one as {HUB}org/name", "subset", "split", "revision")
        return self._local(self.format or ("text" if self.suffix else text_format(self.paths)))

    def _local(self, chosen: TextFormat) -> Source:
        limit = self._passed("max_sample_bytes")
        if chosen == "text":
            self._refuse("is a field of JSON lines or a column of Parquet; plain text has none", "text")
            return text(*self.paths, separator=self.separator, suffixes=self._suffixes(), **limit)
        self._refuse(f"is for plain text; the format here is {chosen}", "separator", "suffix")
        make = _lazily("parquet") if chosen == "parquet" else jsonl
        source: Source = make(*self.paths, **limit, **self._passed("text"))
        return source

    def _suffixes(self) -> tuple[str, ...]:
        """The suffixes of text files in folders; with --format text, globs match every file."""
        if self.format is not None and not self.suffix and not any(map(os.path.isdir, self.paths)):
            return ()
        return self.suffix or tuple(suffix for suffix, known in TEXT_SUFFIXES.items() if known == "text")

    def _hub(self) -> Source:
        if len(self.paths) > 1:
            raise SourceInvalid(f"a build reads one data set of the hub, or files, but {len(self.paths)} were passed")
        own = ("format", "separator", "suffix", "max_sample_bytes")
        self._refuse("is for files; data sets on the hub are Parquet", *own)
        source: Source = _lazily("hub")(
            self.paths[0].removeprefix(HUB),
            self.subset,
            **self._passed("split", "text", "revision", "spool", "download_retries", "download_timeout"),
        )
        return source


class ImageSettings(PathSettings, frozen=True, kw_only=True):
    """Images and their tags.

    SOURCE is a folder, an image or a quoted glob (the tags of a.jpg are in a.json or a.txt next to it), or one manifest
    of JSON lines ({"path": …, "tags": […]}; .jsonl, .jsonl.gz), or Parquet files that contain the bytes. The format
    follows from the names; --format sets it explicitly.
    """

    example: ClassVar[str] = "photos"

    format: Annotated[ImageFormat | None, Meta(description="Format of SOURCE.", extra={"default": "by suffix"})] = None
    image: Annotated[
        str | None,
        Meta(
            description="Field with the path, or column with the bytes.",
            extra={"metavar": "FIELD", "default": "path or image"},
        ),
    ] = None
    root: Annotated[
        str | None,
        Meta(
            description="Folder that the paths in a manifest are relative to.",
            extra={"format": "folder", "metavar": "FOLDER", "default": "that of the manifest"},
        ),
    ] = None
    max_sample_bytes: Annotated[Size | None, Meta(description="Fail larger files.", extra={"default": "256MiB"})] = None
    labels: Annotated[
        Labels | None,
        Meta(
            description="Tags of image files: from a sidecar, or the name of the folder.", extra={"default": "sidecar"}
        ),
    ] = None

    def open(self) -> Source:
        chosen = self.format or image_format(self.paths)
        if chosen == "files":
            self._refuse("is a field of a manifest or a column of Parquet; image files have none", "image")
            return images(*self.paths, root=self.root, **self._passed("labels", "max_sample_bytes"))
        self._refuse("is for image files; a manifest and Parquet files contain the tags", "labels")
        fields = self._passed("image", "max_sample_bytes")
        if chosen == "parquet":
            self._refuse("is for manifests; Parquet files contain the images", "root")
            source: Source = _lazily("parquet_images")(*self.paths, **fields)
            return source
        if len(self.paths) > 1:
            raise SourceInvalid(
                f"a build reads one manifest, but {len(self.paths)} were passed", hint="join them into one file"
            )
        return image_manifest(self.paths[0], root=self.root, **fields)


def is_on_hub(path: str) -> bool:
    """
    >>> is_on_hub("hub:HuggingFaceFW/fineweb-edu"), is_on_hub("data/hub.jsonl")
    (True, False)
    """
    return path.startswith(HUB)


def text_format(paths: Sequence[str]) -> TextFormat:
    """The common format of all files; files of folders and globs with unknown suffixes are ignored.

    A path or glob that ends in a known suffix says it. Only the names in other folders are walked through: the build
    lists the files and their times.
    """
    root, patterns = named_below(paths, None)
    formats: dict[TextFormat, str] = {}
    others: Counter[str] = Counter()
    for pattern in patterns:
        for name in _names_below(root, pattern):
            known = _by_suffix(name, TEXT_SUFFIXES) or ("text" if name == pattern else None)
            if known is not None:
                formats.setdefault(known, name)
            else:
                others[suffix_of(name)] += 1
    choice = f"--format {'|'.join(dict.fromkeys(TEXT_SUFFIXES.values()))}"
    if not formats:
        raise SourceInvalid(
            f"no file below '{root}' has a known suffix ({not_read(others)})", hint=f"pass {choice}, or --suffix"
        )
    return _only(formats, f"choose one with {choice}")


def _names_below(root: str, pattern: str) -> Iterator[str]:
    """The file names that decide the format of a pattern."""
    path = full_path(root, pattern)
    if _by_suffix(pattern, TEXT_SUFFIXES) is not None and not os.path.isdir(path):
        yield pattern
    elif is_url(root):
        yield from (file.path for file in list_files(root, (pattern,)).files)
    else:
        yield from (os.path.relpath(file.path, root) for file in walk_files([path]))


def image_format(paths: Sequence[str]) -> ImageFormat:
    """The common format of all paths.

    >>> image_format(["photos", "more/*.png"]), image_format(["all.jsonl.gz"]), image_format(["data/*.parquet"])
    ('files', 'manifest', 'parquet')
    """
    formats: dict[ImageFormat, str] = {}
    for path in paths:
        formats.setdefault(_by_suffix(path, IMAGE_SUFFIXES) or "files", path)
    return _only(formats, "build one cache for each")


def _by_suffix(path: str, known: Mapping[str, Format]) -> Format | None:
    return known.get(os.path.splitext(without_stream_suffix(path))[1].lower())


def _only(formats: Mapping[Format, str], advice: str) -> Format:
    if len(formats) > 1:
        examples = ", ".join(f"{path} is {known}" for known, path in formats.items())
        raise SourceInvalid(f"the sources have several formats ({examples})", hint=advice)
    return next(iter(formats))


def _lazily(name: str) -> Any:
    """A source with an optional library, imported where it is used."""
    return getattr(import_module("forebay.sources"), name)
