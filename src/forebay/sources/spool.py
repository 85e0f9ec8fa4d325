"""A Python iterable as a source: its documents are written to a file first, because a source is read more than once."""

import filecmp
import json
import os
import secrets
from collections.abc import Iterable, Iterator, Mapping
from contextlib import contextmanager, suppress
from typing import IO, Any

import msgspec
import zstandard

from forebay.errors import SourceInvalid, is_url
from forebay.sources.jsonl import JsonlSource, jsonl

_SUFFIXES = (".jsonl", ".jsonl.zst")
_JSON_VALUES = (str, int, float, list, dict, type(None))  # bytes, dates and the like would be written as some text


def documents(
    documents: Iterable[str | Mapping[str, Any]], spool: str | os.PathLike[str], text: str = "text"
) -> JsonlSource:
    """The documents of any iterable: strings, or mappings of which the field `text` is kept.

    They are written to `spool`, a `.jsonl` or `.jsonl.zst` file, which is there when all of them are and not before.
    The same documents again leave the file as it is, and the caches made from it valid; more documents behind the same
    ones can be grown into a cache if the file is a `.jsonl`.
    """
    if is_url(os.fspath(spool)):
        raise SourceInvalid(f"documents are spooled to a file, not to the URL '{os.fspath(spool)}'; pass a path")
    path = os.path.abspath(spool)
    if not path.endswith(_SUFFIXES):
        raise SourceInvalid(f"documents are spooled to a {' or '.join(_SUFFIXES)} file, not to '{spool}'")
    if isinstance(documents, str | bytes | Mapping):
        raise SourceInvalid(f"one {type(documents).__name__} is no iterable of documents; put it into a list")
    source = jsonl(path, text=text)
    with _written_aside(path) as file:
        for number, document in enumerate(documents):
            file.write(_line(document, text, number))
    return source


def _line(document: str | Mapping[str, Any], field: str, number: int) -> bytes:
    """A line that reads as the document, or fails for the reason that the document does."""
    if isinstance(document, str):
        kept: dict[str, Any] = {field: document}
    elif isinstance(document, Mapping):
        kept = {field: document[field]} if field in document else {}
    else:
        raise SourceInvalid(
            f"document {number} is {type(document).__name__}; expected a str, or a mapping with '{field}'"
        )
    if not isinstance(kept.get(field), _JSON_VALUES):
        kind = type(kept[field]).__name__
        raise SourceInvalid(f"the field '{field}' of document {number} is {kind}; expected a str")
    try:
        return msgspec.json.encode(kept) + b"\n"
    except UnicodeEncodeError:
        return json.dumps(kept).encode() + b"\n"  # half of a surrogate pair can be written, and is refused when read


@contextmanager
def _written_aside(path: str) -> Iterator[IO[bytes]]:
    """A file that takes its place when all is written, unless it is what stands there already."""
    folder, name = os.path.split(path)
    os.makedirs(folder, exist_ok=True)
    aside = os.path.join(folder, f".{name}.{secrets.token_hex(4)}.part")
    try:
        with open(aside, "xb") as file:
            with _compressed(file, path) as writer:
                yield writer
            file.flush()
            os.fsync(file.fileno())
        if not os.path.exists(path) or not filecmp.cmp(aside, path, shallow=False):
            os.replace(aside, path)
    finally:
        with suppress(FileNotFoundError):
            os.unlink(aside)


@contextmanager
def _compressed(file: IO[bytes], path: str) -> Iterator[IO[bytes]]:
    if not path.endswith(".zst"):
        yield file
        return
    with zstandard.ZstdCompressor(write_checksum=True).stream_writer(file, closefd=False) as writer:
        yield writer
