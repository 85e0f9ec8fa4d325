"""Text to packed tokens: local files in one of three formats, or a data set of the Hugging Face hub."""

import os
from collections import Counter
from collections.abc import Sequence
from typing import Any, Literal, get_args

import click
import msgspec

from forebay import sources
from forebay.cli.kind_options import Kind
from forebay.cli.options import (
    DOWNLOAD_OPTIONS,
    HUB,
    NO_TOKEN,
    REVISION_OPTION,
    SizeType,
    TokenNameType,
    complete_file,
    is_on_hub,
    named_token,
)
from forebay.source import Source, not_read
from forebay.sources.paths import find_files, named_below, suffix_of, without_stream_suffix

TextFormat = Literal["jsonl", "parquet", "text"]
SUFFIXES: dict[str, TextFormat] = {
    ".jsonl": "jsonl",
    ".ndjson": "jsonl",
    ".json": "jsonl",
    ".parquet": "parquet",
    ".txt": "text",
    ".md": "text",
}


def formats() -> tuple[str, ...]:
    return get_args(TextFormat)


def suffixes_of(wanted: TextFormat) -> tuple[str, ...]:
    return tuple(suffix for suffix, known in SUFFIXES.items() if known == wanted)


def format_of(paths: Sequence[str]) -> TextFormat:
    """The one format of all files; among those of folders and globs, names that say nothing do not count."""
    root, patterns = named_below(paths, None)
    found: dict[TextFormat, str] = {}
    others: Counter[str] = Counter()
    for pattern in patterns:
        for file in find_files(root, (pattern,)):
            known = suffix_format(file.path)
            if known is None and file.path == pattern:
                known = "text"
            if known is not None:
                found.setdefault(known, file.path)
            else:
                others[suffix_of(file.path)] += 1
    if len(found) > 1:
        examples = ", ".join(f"{path} is {known}" for known, path in found.items())
        raise click.UsageError(f"The sources are of several formats ({examples}); choose one with {_choice()}.")
    if not found:
        problem = f"No name below '{root}' says what the files are ({not_read(others)})"
        raise click.UsageError(f"{problem}; say it with {_choice()}, or --suffix.")
    return next(iter(found))


def suffix_format(path: str) -> TextFormat | None:
    """
    >>> suffix_format("a/b.jsonl.gz"), suffix_format("README")
    ('jsonl', None)
    """
    return SUFFIXES.get(os.path.splitext(without_stream_suffix(path))[1].lower())


def _choice() -> str:
    return f"--format {'|'.join(formats())}"


DEFAULT_TOKENIZER = "gpt2"


class TokenSource(msgspec.Struct, frozen=True, kw_only=True, forbid_unknown_fields=True):
    """Files, folders or globs, or `hub:org/name`, and how documents are found in them."""

    paths: tuple[str, ...]
    format: TextFormat | None = None
    text: str | None = None
    separator: str | None = None
    suffix: tuple[str, ...] = ()
    max_sample_bytes: int | None = None
    subset: str | None = None
    split: str | None = None
    revision: str | None = None
    spool: str | None = None
    download_retries: int = 5
    download_timeout: float = 300.0

    def open(self) -> Source:
        if any(map(is_on_hub, self.paths)):
            return self._hub()
        for name in ("subset", "split", "revision"):
            if getattr(self, name) is not None:
                raise click.UsageError(f"--{name} chooses among what the hub has; name the data set as {HUB}org/name")
        return self._local(self.format or ("text" if self.suffix else format_of(self.paths)))

    def _local(self, chosen: TextFormat) -> Source:
        limit: dict[str, Any] = {} if self.max_sample_bytes is None else {"max_sample_bytes": self.max_sample_bytes}
        if chosen == "text":
            self._refuse("text", "names a field of JSON lines or a column of Parquet; plain text has none")
            separator = _separator(self.separator)
            return sources.text(*self.paths, separator=separator, suffixes=self._suffixes(), **limit)
        self._refuse("separator", f"separates documents of plain text; the format here is {chosen}")
        self._refuse("suffix", f"chooses among files of plain text; the format here is {chosen}")
        named = {**limit} if self.text is None else {**limit, "text": self.text}
        return sources.parquet(*self.paths, **named) if chosen == "parquet" else sources.jsonl(*self.paths, **named)

    def _suffixes(self) -> tuple[str, ...]:
        """How text files of folders end; where a user says what globs name, every file of them is meant."""
        if self.format is not None and not self.suffix and not any(map(os.path.isdir, self.paths)):
            return ()
        return self.suffix or suffixes_of("text")

    def _hub(self) -> Source:
        if len(self.paths) > 1:
            raise click.UsageError(f"a build reads one data set of the hub, or files; {len(self.paths)} were named")
        for name in ("format", "separator", "suffix", "max_sample_bytes"):
            self._refuse(name, "is for files; the hub is read as Parquet")
        given = {name: getattr(self, name) for name in ("split", "text", "revision", "spool")}
        return sources.hub(
            self.paths[0].removeprefix(HUB),
            self.subset,
            **{name: value for name, value in given.items() if value is not None},
            download_retries=self.download_retries,
            download_timeout=self.download_timeout,
        )

    def _refuse(self, name: str, why: str) -> None:
        if getattr(self, name):
            raise click.UsageError(f"--{name.replace('_', '-')} {why}.")


def recipe_fields(fields: dict[str, Any]) -> dict[str, Any]:
    """What a user wrote, as the fields of a recipe: `none` is no token, a tokenizer nobody named is GPT-2's."""
    if fields.get("pad") == NO_TOKEN:
        raise click.UsageError("'pad' cannot be none: the rest of a row is filled with something.")
    named = {name: named_token(value) for name, value in fields.items() if name in ("eos", "bos")}
    return {"tokenizer": DEFAULT_TOKENIZER, **fields, **named}


def _separator(written: str | None) -> str | None:
    r"""A separator as it is typed in a shell, where \n is two marks.

    >>> _separator(r"\n---\n")
    '\n---\n'
    """
    if written is None:
        return None
    for typed, meant in ((r"\n", "\n"), (r"\r", "\r"), (r"\t", "\t")):
        written = written.replace(typed, meant)
    return written


TOKENS = Kind(
    name="tokens",
    summary="Text as packed tokens: rows of fixed length with document boundaries.",
    details=(
        f"SOURCE is a file, a folder, a quoted glob, or {HUB}org/name on the Hugging Face hub. Names decide the "
        "format: .jsonl, .ndjson and .json are JSON lines, .parquet is Parquet, .txt, .md and any other single file "
        "are plain text; .gz, .zst, .bz2 and .xz files are decompressed. --format states it explicitly."
    ),
    example="tokens 'data/*.jsonl'",
    source=TokenSource,
    recipe_fields=recipe_fields,
    options=(
        click.option("--format", type=click.Choice(formats()), help="What the files are."),
        click.option("--text", metavar="FIELD", help="The field or column that holds the text.  [default: text]"),
        click.option("--separator", help=r"What separates documents of a text file, like '\n---\n'.  [one per file]"),
        click.option("--suffix", multiple=True, help="Only text files of folders that end so; can be repeated."),
        click.option("--max-sample-bytes", type=SizeType(), help="Longer documents fail.  [default: 64MiB]"),
        click.option("--subset", help="Which configuration of the data set on the hub."),
        click.option("--split", help="Which split of the data set on the hub.  [default: train]"),
        REVISION_OPTION,
        *DOWNLOAD_OPTIONS,
        click.option(
            "--tokenizer",
            shell_complete=complete_file,
            help=f"gpt2, a path to a tokenizer.json, or org/name on the hub.  [recipe; {DEFAULT_TOKENIZER}]",
        ),
        click.option("--sequence-length", type=click.IntRange(min=1), help="Tokens in a row.  [recipe; 512]"),
        click.option("--chunk-size", type=click.IntRange(min=1), help="Rows in a chunk.  [recipe; 8000]"),
        click.option(
            "--long-documents",
            type=click.Choice(["split", "truncate", "drop", "error"]),
            help="What becomes of a document longer than a row.  [recipe; split]",
        ),
        click.option("--eos", type=TokenNameType(), help="What ends a document, or none.  [recipe; by vocabulary]"),
        click.option("--bos", type=TokenNameType(), help="What begins a document, or none.  [recipe; none]"),
        click.option("--pad", type=TokenNameType(), help="What fills a row.  [recipe; by vocabulary, else 0]"),
        click.option("--deduplicate/--keep-duplicates", default=None, help="Of equal documents, keep one.  [recipe]"),
        click.option("--codec", type=click.Choice(["none", "lz4", "zstd"]), help="Compression.  [recipe; zstd]"),
        click.option("--level", type=click.Choice(["fast", "default", "max"]), help="How hard.  [recipe; fast]"),
        click.option("--rows-per-block", type=click.IntRange(min=0), help="Rows read at once; 0: by length. [recipe]"),
        click.option(
            "--encoder",
            type=click.Choice(["auto", "fastokens", "tokenizers"]),
            help="Who turns text into ids; auto: the fast one where it agrees.  [recipe; auto]",
        ),
    ),
)
