"""UTF-8 as sources meet it: a byte order mark to leave out, a bad byte to name."""

from forebay.source import Failure

BOM = b"\xef\xbb\xbf"


def not_utf8(sample: str, line: int, byte: int, offset: int, reason: str) -> Failure:
    """A document with a byte at `offset` of its file (after decompression) that is no UTF-8."""
    where = f"line {line}: byte 0x{byte:02x} at offset {offset:,} of the file"
    return Failure(sample, "not-utf8", f"{where} is not UTF-8 ({reason})")
