"""Which format the files of a source have, by their names."""

import os
from collections import Counter
from collections.abc import Sequence
from typing import Literal, get_args

import click

from forebay.source import not_read
from forebay.sources.paths import find_files, named_below
from forebay.sources.walker import suffix_of, without_stream_suffix

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
