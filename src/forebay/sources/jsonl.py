"""Lines as samples: JSON lines, one object per line with the text in one field, or lines as they are.

A block of valid JSON lines is decoded by one call. A block with an error is decoded line by line, so that each failure
has its line number and reason.
"""

import os
from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass
from functools import lru_cache
from operator import attrgetter
from typing import Any, ClassVar

import msgspec
import numpy as np
from numpy.typing import NDArray

from forebay import kernels
from forebay.errors import SourceInvalid
from forebay.source import Failure, Part, PartDigest, Sample, Samples, SourceFile, TextBatch
from forebay.sources.paths import BOM, MAX_SAMPLE_BYTES, LocalFiles, checked_limit, empty, named_below, not_utf8
from forebay.sources.pieces import Block, Reading, cut_between_pieces, line_numbers, piece_bounds, piece_ends
from forebay.sources.walking import with_stream_suffixes

_JSON_TYPES = {b"{": "an object", b"[": "an array", b"t": "true", b"f": "false"}
_SHOWN_FIELDS = 6
_SHOWN_CHARS = 30
_BLANK = 100  # characters to check before checking the whole line
_text_of = attrgetter("text")
_DECODE_ERRORS = (msgspec.DecodeError, UnicodeDecodeError, RecursionError)


def _documents(
    reading: Reading, block: Block, path: str, field: str
) -> Sequence[TextBatch] | Iterator[Sample | Failure]:
    """The documents of a block, as one batch if all its lines are valid. Blank lines are skipped."""
    at = len(BOM) if reading.position == 0 and block.startswith(BOM) else 0
    texts, starts = _all_at_once(block, at, field)
    if not texts:
        return _one_by_one(reading, block, at, path, field)
    return [TextBatch([f"{path}@{reading.position + start}" for start in starts], texts)]


def check_field(field: str) -> None:
    """Reject an invalid field name."""
    try:
        _decoder(field)
    except (ValueError, TypeError) as error:
        raise SourceInvalid(f"no field can be found by the name {field!r}: {error}") from error


def _all_at_once(block: Block, at: int, field: str) -> tuple[list[str], list[int]]:
    """The text and the start of each line of a block; no texts if anything is wrong, or one is empty."""
    try:
        texts = list(map(_text_of, _decoder(field).decode_lines(memoryview(block)[at:])))
    except _DECODE_ERRORS:
        return [], []
    starts = _line_starts(block, at)
    return (texts, starts) if len(starts) == len(texts) and all(texts) else ([], [])


def _line_starts(block: Block, at: int) -> list[int]:
    """The starts of the lines of a block, if all end with `}` and the next begins with `{`; otherwise empty.

    No value spans such lines, because inside a value no `{` follows a `}` directly. So if a block has as many values
    as lines, every line has one.
    """
    return kernels.line_starts(block, at) or []


def _one_by_one(reading: Reading, block: Block, at: int, path: str, field: str) -> Iterator[Sample | Failure]:
    first_line = 0  # known when it is needed
    for index, (begin, end) in enumerate(piece_bounds(block, b"\n")):
        sample = f"{path}@{reading.position + begin}"
        line = memoryview(block)[max(begin, at) : end]
        document = _document(line, field)
        if not isinstance(document, Exception):
            yield Sample(sample, document) if document else empty(sample, f"line {reading.first_line() + index}")
        elif not _is_blank(line):
            first_line = first_line or reading.first_line()
            offset = reading.position + max(begin, at)
            yield _failure(sample, first_line + index, offset, line, field, document)


def _document(line: memoryview, field: str) -> str | Exception:
    try:
        text: str = _decoder(field).decode(line).text
        return text
    except _DECODE_ERRORS as error:
        return error.with_traceback(None)  # which would keep the line in memory


def _is_blank(line: memoryview) -> bool:
    return not bytes(line[:_BLANK]).strip() and not bytes(line).strip()


def _failure(sample: str, number: int, offset: int, line: memoryview, field: str, error: Exception) -> Failure:
    if isinstance(error, UnicodeDecodeError):
        bad = _first_bad_byte(line)
        return not_utf8(sample, number, line[bad.start], offset + bad.start, bad.reason)
    reason, detail = _problem(line, field, error)
    return Failure(sample, reason, f"line {number}: {detail}")


def _problem(line: memoryview, field: str, error: Exception) -> tuple[str, str]:
    """Why a line has no document: a reason code and a sentence."""
    if isinstance(error, RecursionError):
        return "bad-json", "it is nested too deeply"
    try:
        value = bytes(_raw_decoder(field).decode(line).text)[:1]
    except msgspec.DecodeError as malformed:
        return "bad-json", str(malformed)
    if not value:
        return "no-text", f"the object has no field '{field}' ({_fields_of(line)})"
    if value == b"n":
        return "null", f"the field '{field}' is null"
    return "not-text", f"the field '{field}' is {_JSON_TYPES.get(value, 'a number')}, not a string"


def _fields_of(line: memoryview) -> str:
    """The names of the fields of an object, shortened and in ASCII."""
    try:
        names = list(msgspec.json.decode(line, type=dict[str, msgspec.Raw]))
    except _DECODE_ERRORS:
        return "its fields have no readable names"
    shown = [ascii(name)[1:-1][:_SHOWN_CHARS] for name in names[:_SHOWN_FIELDS]]
    more = [] if len(names) <= _SHOWN_FIELDS else ["…"]
    return f"it has: {', '.join([*shown, *more])}" if names else "it is empty"


def _first_bad_byte(line: memoryview) -> UnicodeDecodeError:
    """The first byte of a line that is not UTF-8: the parser reports an offset within a string."""
    try:
        str(line, "utf-8")
    except UnicodeDecodeError as error:
        return error
    raise AssertionError("a string in the line is not UTF-8, but the line is")


@lru_cache(maxsize=16)
def _decoder(field: str) -> msgspec.json.Decoder[Any]:
    document = msgspec.defstruct("Document", [("text", str)], rename={"text": field}, gc=False)
    return msgspec.json.Decoder(document)


@lru_cache(maxsize=16)
def _raw_decoder(field: str) -> msgspec.json.Decoder[Any]:
    """Decodes the field as raw JSON; empty if it is missing."""
    document = msgspec.defstruct("Raw", [("text", msgspec.Raw, msgspec.Raw())], rename={"text": field})
    return msgspec.json.Decoder(document)


SUFFIXES = with_stream_suffixes([".jsonl", ".ndjson", ".json"])


@dataclass(frozen=True, slots=True)
class JsonlSource(LocalFiles):
    """The field `text` of every line of some files.

    A sample's id is `file@offset`, the offset of its line in bytes (after decompression). Blank lines are skipped. A
    line without such a field, or with more than `max_sample_bytes`, is a failure that names the line. Other fields are
    skipped without checking.
    """

    kind: ClassVar[str] = "jsonl"
    read_by: ClassVar[tuple[str, ...]] = ("text", "max_sample_bytes")

    text: str = "text"
    max_sample_bytes: int = MAX_SAMPLE_BYTES

    def _suffixes(self) -> tuple[str, ...]:
        return SUFFIXES

    def cuts(self, file: SourceFile, start: int, first: int, every: int) -> Iterator[int]:
        return cut_between_pieces(self.root, b"\n", file, start, first, every, self.max_sample_bytes)

    def sample_ends(self, file: SourceFile) -> NDArray[np.uint64] | None:
        return piece_ends(self.root, b"\n", file, self.max_sample_bytes)

    def read(self, part: Part, *, digest: PartDigest | None = None, preview: bool = False) -> Samples:
        reading = Reading(self.root, part, b"\n", self.max_sample_bytes, digest)
        return reading.samples(lambda block: _documents(reading, block, part.file.path, self.text))


def jsonl(
    *paths: str | os.PathLike[str],
    text: str = "text",
    root: str | None = None,
    max_sample_bytes: int = MAX_SAMPLE_BYTES,
) -> JsonlSource:
    """The documents of `.jsonl`, `.ndjson` and line-wise `.json` files, folders or globs, compressed or not.

    Files that end in `.gz`, `.zst`, `.bz2` or `.xz` as well are decompressed while they are read.

    >>> jsonl("/data/*.jsonl.gz", text="content").patterns
    ('*.jsonl.gz',)
    """
    check_field(text)
    return JsonlSource(*named_below(paths, root), text, checked_limit(max_sample_bytes))


@dataclass(frozen=True, slots=True)
class LineSource(LocalFiles):
    """The lines of every file below some paths. A sample's id is `file@offset`, the offset of its line in bytes.

    A line of more than `max_sample_bytes` is a failure.
    """

    kind: ClassVar[str] = "lines"
    read_by: ClassVar[tuple[str, ...]] = ("max_sample_bytes",)

    max_sample_bytes: int = MAX_SAMPLE_BYTES

    def cuts(self, file: SourceFile, start: int, first: int, every: int) -> Iterator[int]:
        return cut_between_pieces(self.root, b"\n", file, start, first, every, self.max_sample_bytes)

    def sample_ends(self, file: SourceFile) -> NDArray[np.uint64] | None:
        return piece_ends(self.root, b"\n", file, self.max_sample_bytes)

    def read(self, part: Part, *, digest: PartDigest | None = None, preview: bool = False) -> Samples:
        reading = Reading(self.root, part, b"\n", self.max_sample_bytes, digest)
        return reading.samples(lambda block: _samples(block, part.file.path, reading.position))

    def with_lines(self, failures: Sequence[Failure], parts: Iterable[Part]) -> tuple[Failure, ...]:
        """Reads a file again up to its last failure, a compressed one from its beginning."""
        files = {part.file.path: part.file for part in parts}
        offsets: dict[str, set[int]] = {}
        for failure in failures:
            path, _, offset = failure.sample.rpartition("@")
            offsets.setdefault(path, set()).add(int(offset))
        numbers = {
            f"{path}@{offset}": number
            for path, starts in offsets.items()
            for offset, number in line_numbers(self.root, files[path], sorted(starts), self.max_sample_bytes)
        }
        return tuple(
            msgspec.structs.replace(failure, detail=f"line {numbers[failure.sample]}: {failure.detail}")
            for failure in failures
        )


def lines(
    *paths: str | os.PathLike[str],
    root: str | None = None,
    max_sample_bytes: int = MAX_SAMPLE_BYTES,
) -> LineSource:
    """Every line of some files, folders or globs."""
    return LineSource(*named_below(paths, root), checked_limit(max_sample_bytes))


def _samples(block: Block, path: str, position: int) -> Iterator[Sample]:
    for begin, end in piece_bounds(block, b"\n"):
        yield Sample(f"{path}@{position + begin}", bytes(memoryview(block)[begin:end]))
