"""What the command line must know about a kind of data; and samples kept as they are, the simplest kind."""

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any, Literal, Protocol

import click
import msgspec

from forebay.cli.options import Decorator, SizeType
from forebay.kinds import recipe_class
from forebay.source import Source
from forebay.sources import files, lines
from forebay.sources.failures import MAX_SAMPLE_BYTES
from forebay.sources.paths import STREAM_SUFFIXES


class SourceSettings(Protocol):
    """What `[source]` of a settings file holds: a frozen struct that opens as a source."""

    paths: tuple[str, ...]

    def open(self) -> Source: ...


RecipeFields = Callable[[dict[str, Any]], dict[str, Any]]


@dataclass(frozen=True, slots=True)
class Kind:
    """A kind of data as a subcommand of `build` and `estimate`.

    Every option is named as the field of the source settings or of the recipe that it sets, so that flags and settings
    files have the same words. `recipe_fields` makes what a user wrote into the fields of the recipe.
    """

    name: str
    summary: str
    details: str
    example: str  # what follows `forebay build`, without --into
    source: type[Any]
    options: tuple[Decorator, ...]
    recipe_fields: RecipeFields = dict

    @property
    def recipe(self) -> type[Any]:
        return recipe_class(self.name)


LINE_SUFFIXES = (".jsonl", ".ndjson", ".txt", *STREAM_SUFFIXES)


class RawSource(msgspec.Struct, frozen=True, kw_only=True, forbid_unknown_fields=True):
    """Files, folders or globs, and what one sample of them is."""

    paths: tuple[str, ...]
    unit: Literal["files", "lines"] | None = None
    suffix: tuple[str, ...] = ()
    max_sample_bytes: int | None = None  # the recipe's too, which a source must not read less than

    def open(self) -> Source:
        limit = max(self.max_sample_bytes or 0, MAX_SAMPLE_BYTES)
        if self._chosen_unit() == "files":
            return files(*self.paths, suffixes=self.suffix, max_sample_bytes=limit)
        if self.suffix:
            raise click.UsageError(
                f"--suffix chooses whole files of folders; for lines, name a glob like 'folder/**/*{self.suffix[0]}'"
            )
        return lines(*self.paths, max_sample_bytes=limit)

    def _chosen_unit(self) -> Literal["files", "lines"]:
        if self.unit is not None:
            return self.unit
        return "lines" if all(path.lower().endswith(LINE_SUFFIXES) for path in self.paths) else "files"


RAW = Kind(
    name="raw",
    summary="Samples as they are: one row per file or per line.",
    details=(
        "SOURCE is a file, a folder or a quoted glob. When every SOURCE ends in .jsonl, .ndjson, .txt or the suffix of "
        "a compressed file (.gz, .zst, .bz2, .xz), each line is a sample, decompressed; otherwise each file is. --unit "
        "states it explicitly."
    ),
    example="raw 'data/*.jsonl'",
    source=RawSource,
    options=(
        click.option("--unit", type=click.Choice(["files", "lines"]), help="What one sample is."),
        click.option("--suffix", multiple=True, help="Only files of folders that end so, like .py; can be repeated."),
        click.option("--codec", type=click.Choice(["none", "lz4", "zstd"]), help="Compression.  [recipe; zstd]"),
        click.option("--level", type=click.Choice(["fast", "default", "max"]), help="How hard.  [recipe; default]"),
        click.option("--rows-per-block", type=click.IntRange(min=1), help="Rows read at once.  [recipe; 64]"),
        click.option("--chunk-bytes", type=SizeType(), help="Size of a chunk, decoded.  [recipe; 16MiB]"),
        click.option("--max-sample-bytes", type=SizeType(), help="Longer samples fail.  [recipe; 64MiB]"),
    ),
)
