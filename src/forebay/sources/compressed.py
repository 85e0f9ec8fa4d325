"""The formats of compressed files, by their names, and readers for those whose library has none that is bounded."""

import bz2
import lzma
from typing import BinaryIO, Literal

Packing = Literal["gzip", "zstd", "bzip2", "xz"]
FORMATS: dict[str, Packing] = {
    ".gz": "gzip",
    ".gzip": "gzip",
    ".zst": "zstd",
    ".zstd": "zstd",
    ".bz2": "bzip2",
    ".xz": "xz",
}
# `zstd --long=31`. The window is reserved when a file is opened, but memory is used only as far as it is filled.
MOST_WINDOW = 1 << 31
_MOST_XZ_MEMORY = 512 << 20  # `xz -9` needs 65 MiB
_BLOCK = 1 << 16


def format_of(path: str) -> Packing:
    """
    >>> format_of("a.jsonl.GZ"), format_of("c4.json.zstd")
    ('gzip', 'zstd')
    """
    return FORMATS["." + path.lower().rpartition(".")[2]]


class Members:
    """The decompressed bytes of a bzip2 or xz file, of all its streams one after the other."""

    def __init__(self, stored: BinaryIO, packing: Packing) -> None:
        self._stored, self._packing = stored, packing
        self._member: bz2.BZ2Decompressor | lzma.LZMADecompressor | None = None
        self._ahead = b""

    def read(self, count: int) -> bytes:
        """At most `count` bytes, none at the end."""
        while self._member is not None or self._begins_another():
            assert self._member is not None
            if self._member.needs_input and not self._ahead:
                self._ahead = self._stored.read(_BLOCK)
                if not self._ahead:
                    raise EOFError("the file ends in the middle of a stream")
            data = self._member.decompress(self._ahead if self._member.needs_input else b"", count)
            self._ahead = b""
            if self._member.eof:
                self._ahead, self._member = self._member.unused_data, None
            if data:
                return data
        return b""

    def close(self) -> None:
        self._member = None

    def _begins_another(self) -> bool:
        """Whether there is anything but padding behind the last stream."""
        while not self._ahead.lstrip(b"\0"):
            self._ahead = self._stored.read(_BLOCK)
            if not self._ahead:
                return False
        self._ahead = self._ahead.lstrip(b"\0")
        self._member = _new_member(self._packing)
        return True


def _new_member(packing: Packing) -> bz2.BZ2Decompressor | lzma.LZMADecompressor:
    if packing == "bzip2":
        return bz2.BZ2Decompressor()
    return lzma.LZMADecompressor(lzma.FORMAT_XZ, memlimit=_MOST_XZ_MEMORY)
