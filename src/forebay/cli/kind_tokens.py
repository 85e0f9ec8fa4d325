"""The kind `tokens`: local files in one of three formats, or a data set on the Hugging Face hub."""

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
    """The common format of all files; files of folders and globs with unknown suffixes are ignored."""
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
        raise click.UsageError(f"The sources have several formats ({examples}); choose one with {_choice()}.")
    if not found:
        problem = f"No file below '{root}' has a known suffix ({not_read(others)})"
        raise click.UsageError(f"{problem}; pass {_choice()}, or --suffix.")
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
    """`[source]` of tokens: paths or `hub:org/name`, and how documents are found in them."""

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
                raise click.UsageError(f"--{name} is for data sets on the hub; name one as {HUB}org/name")
        return self._local(self.format or ("text" if self.suffix else format_of(self.paths)))

    def _local(self, chosen: TextFormat) -> Source:
        limit: dict[str, Any] = {} if self.max_sample_bytes is None else {"max_sample_bytes": self.max_sample_bytes}
        if chosen == "text":
            self._refuse("text", "is a field of JSON lines or a column of Parquet; plain text has none")
            separator = _separator(self.separator)
            return sources.text(*self.paths, separator=separator, suffixes=self._suffixes(), **limit)
        self._refuse("separator", f"is for plain text; the format here is {chosen}")
        self._refuse("suffix", f"is for plain text; the format here is {chosen}")
        named = {**limit} if self.text is None else {**limit, "text": self.text}
        return sources.parquet(*self.paths, **named) if chosen == "parquet" else sources.jsonl(*self.paths, **named)

    def _suffixes(self) -> tuple[str, ...]:
        """The suffixes of text files in folders; with --format text, globs match every file."""
        if self.format is not None and not self.suffix and not any(map(os.path.isdir, self.paths)):
            return ()
        return self.suffix or suffixes_of("text")

    def _hub(self) -> Source:
        if len(self.paths) > 1:
            raise click.UsageError(
                f"a build reads one data set of the hub, or files, but {len(self.paths)} were passed"
            )
        for name in ("format", "separator", "suffix", "max_sample_bytes"):
            self._refuse(name, "is for files; data sets on the hub are Parquet")
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
    """Command-line values as recipe fields: `none` means no token, the default tokenizer is GPT-2's."""
    if fields.get("pad") == NO_TOKEN:
        raise click.UsageError("'pad' cannot be none: rows must be filled with a token.")
    named = {name: named_token(value) for name, value in fields.items() if name in ("eos", "bos")}
    return {"tokenizer": DEFAULT_TOKENIZER, **fields, **named}


def _separator(written: str | None) -> str | None:
    r"""A separator typed in a shell, where \n is two characters.

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
    summary="Build packed tokens from text: rows of fixed length with document boundaries.",
    details=(
        f"SOURCE is a file, a folder, a quoted glob, or {HUB}org/name on the Hugging Face hub. The suffix sets "
        "the format: .jsonl, .ndjson and .json are JSON lines, .parquet is Parquet, .txt, .md and any other single "
        "file are plain text; .gz, .zst, .bz2 and .xz files are decompressed. --format sets it explicitly."
    ),
    example="tokens 'data/*.jsonl'",
    source=TokenSource,
    recipe_fields=recipe_fields,
    options=(
        click.option("--format", type=click.Choice(formats()), help="Format of the files."),
        click.option("--text", metavar="FIELD", help="Field or column with the text.  [default: text]"),
        click.option("--separator", help=r"Separator of documents in a text file, e.g. '\n---\n'.  [one per file]"),
        click.option("--suffix", multiple=True, help="In folders, only read text files with this suffix (repeatable)."),
        click.option("--max-sample-bytes", type=SizeType(), help="Fail longer documents.  [default: 64MiB]"),
        click.option("--subset", help="Configuration of the data set on the hub."),
        click.option("--split", help="Split of the data set on the hub.  [default: train]"),
        REVISION_OPTION,
        *DOWNLOAD_OPTIONS,
        click.option(
            "--tokenizer",
            shell_complete=complete_file,
            help=f"gpt2, a path to a tokenizer.json, or org/name on the hub.  [recipe; {DEFAULT_TOKENIZER}]",
        ),
        click.option("--sequence-length", type=click.IntRange(min=1), help="Tokens per row.  [recipe; 512]"),
        click.option("--chunk-size", type=click.IntRange(min=1), help="Rows per chunk.  [recipe; 8000]"),
        click.option(
            "--long-documents",
            type=click.Choice(["split", "truncate", "drop", "error"]),
            help="How to treat documents longer than a row.  [recipe; split]",
        ),
        click.option(
            "--eos", type=TokenNameType(), help="Token that ends a document, or none.  [recipe; by vocabulary]"
        ),
        click.option("--bos", type=TokenNameType(), help="Token that begins a document, or none.  [recipe; none]"),
        click.option("--pad", type=TokenNameType(), help="Padding token.  [recipe; by vocabulary, else 0]"),
        click.option(
            "--deduplicate/--keep-duplicates",
            default=None,
            help="Drop duplicate documents, or keep them.  [recipe; keep]",
        ),
        click.option("--codec", type=click.Choice(["none", "lz4", "zstd"]), help="Compression.  [recipe; zstd]"),
        click.option(
            "--level", type=click.Choice(["fast", "default", "max"]), help="Compression level.  [recipe; fast]"
        ),
        click.option(
            "--rows-per-block",
            type=click.IntRange(min=0),
            help="Rows per compressed block; 0: by row length.  [recipe; 0]",
        ),
        click.option(
            "--encoder",
            type=click.Choice(["auto", "fastokens", "tokenizers"]),
            help="Tokenizer backend; auto uses fastokens if it matches the reference.  [recipe; auto]",
        ),
    ),
)
