"""Failures that sources report, and the size limit of one sample."""

from collections.abc import Mapping
from typing import Any

from forebay.errors import SourceInvalid
from forebay.source import Failure

BOM = b"\xef\xbb\xbf"
MAX_SAMPLE_BYTES = 64 * 1024 * 1024
MAX_IMAGE_BYTES = 256 * 1024 * 1024
_LIMIT = "max_sample_bytes"


def empty(sample: str, where: str) -> Failure:
    """A document with no text in it, at `line 17` or `row 17` of its file."""
    return Failure(sample, "empty", f"{where}: the document has no text")


def not_utf8(sample: str, line: int, byte: int, offset: int, reason: str) -> Failure:
    """A document with a byte at `offset` of its file (after decompression) that is not UTF-8."""
    where = f"line {line}: byte 0x{byte:02x} at offset {offset:,} of the file"
    return Failure(sample, "not-utf8", f"{where} is not UTF-8 ({reason})")


def too_large(sample: str, size: int, limit: int, where: str = "") -> Failure:
    """A sample that was skipped because it exceeds the limit."""
    return Failure(sample, "too-large", f"{where}it has {size:,} bytes, more than {_LIMIT} {limit:,}")


def checked_limit(limit: int) -> int:
    """The limit, if it is valid."""
    if limit < 1:
        raise SourceInvalid(f"{_LIMIT} must be at least 1 (got {limit})")
    return limit


def stated_limit(limit: int, default: int = MAX_SAMPLE_BYTES) -> dict[str, int]:
    """The limit for the description of a source; empty if it is the default."""
    return {} if limit == default else {_LIMIT: limit}


def limit_in(description: Mapping[str, Any], default: int = MAX_SAMPLE_BYTES) -> int:
    """The limit in the description of a source."""
    return int(description.get(_LIMIT, default))
