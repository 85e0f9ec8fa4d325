"""How a kind of data becomes a subcommand; and the kind `raw`, which stores samples unchanged."""

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
    """`[source]` of a settings file: a frozen struct that opens a source."""

    paths: tuple[str, ...]

    def open(self) -> Source: ...


RecipeFields = Callable[[dict[str, Any]], dict[str, Any]]


@dataclass(frozen=True, slots=True)
class Kind:
    """A kind of data as a subcommand of `build` and `estimate`.

    Every option has the name of the source or recipe field that it sets, so that flags and settings files use the same
    names. `recipe_fields` converts command-line values to recipe fields.
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
    """`[source]` of raw samples: paths, and whether a sample is a file or a line."""

    paths: tuple[str, ...]
    unit: Literal["files", "lines"] | None = None
    suffix: tuple[str, ...] = ()
    max_sample_bytes: int | None = None  # also a recipe field; the source must not read less

    def open(self) -> Source:
        limit = max(self.max_sample_bytes or 0, MAX_SAMPLE_BYTES)
        if self._chosen_unit() == "files":
            return files(*self.paths, suffixes=self.suffix, max_sample_bytes=limit)
        if self.suffix:
            raise click.UsageError(
                f"--suffix selects whole files in folders; for lines, pass a glob like 'folder/**/*{self.suffix[0]}'"
            )
        return lines(*self.paths, max_sample_bytes=limit)

    def _chosen_unit(self) -> Literal["files", "lines"]:
        if self.unit is not None:
            return self.unit
        return "lines" if all(path.lower().endswith(LINE_SUFFIXES) for path in self.paths) else "files"


RAW = Kind(
    name="raw",
    summary="Store samples unchanged: one row per file or line.",
    details=(
        "SOURCE is a file, a folder or a quoted glob. If every SOURCE ends in .jsonl, .ndjson, .txt or the suffix of a "
        "compressed file (.gz, .zst, .bz2, .xz), each line is a sample; otherwise each file is. --unit sets it "
        "explicitly."
    ),
    example="raw 'data/*.jsonl'",
    source=RawSource,
    options=(
        click.option("--unit", type=click.Choice(["files", "lines"]), help="Unit of a sample."),
        click.option("--suffix", multiple=True, help="In folders, only read files with this suffix (repeatable)."),
        click.option("--codec", type=click.Choice(["none", "lz4", "zstd"]), help="Compression.  [recipe; zstd]"),
        click.option(
            "--level", type=click.Choice(["fast", "default", "max"]), help="Compression level.  [recipe; default]"
        ),
        click.option("--rows-per-block", type=click.IntRange(min=1), help="Rows per compressed block.  [recipe; 64]"),
        click.option("--chunk-bytes", type=SizeType(), help="Decoded size of a chunk.  [recipe; 16MiB]"),
        click.option("--max-sample-bytes", type=SizeType(), help="Fail longer samples.  [recipe; 64MiB]"),
    ),
)
