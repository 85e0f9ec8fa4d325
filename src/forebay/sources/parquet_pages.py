"""The headers of the pages in a Parquet column, read before anything is decompressed.

    column in a row group   [dictionary page] │ data page │ data page │ …
    page                    header (Thrift, compact): kind, size unpacked, size stored, … │ its content

pyarrow unpacks a page as a whole and trusts its header. What a page would take is therefore checked here first.
"""

import os
from collections.abc import Iterator
from typing import NamedTuple

from forebay.errors import SourceUnreadable

DICTIONARY_PAGE = 2
_HEADER_BYTES = 1 << 12  # statistics in a header are short, or are read on
_MOST_HEADER = 1 << 24
_MOST_NESTED = 8

# The types of Thrift's compact protocol.
_STOP, _TRUE, _FALSE, _BYTE, _I16, _I32, _I64, _DOUBLE, _BINARY, _LIST, _SET, _MAP, _STRUCT = range(13)


class Page(NamedTuple):
    kind: int
    unpacked: int
    stored: int


class _TooShort(Exception):
    """The header goes on behind the bytes that were read."""


def page_headers(descriptor: int, path: str, start: int, stop: int) -> Iterator[Page]:
    """Every page between two places of an open file."""
    while start < stop:
        page, length = _page_at(descriptor, path, start, stop)
        start += length + page.stored
        yield page


def _page_at(descriptor: int, path: str, start: int, stop: int) -> tuple[Page, int]:
    """The page at a place, and how long its header is."""
    count = _HEADER_BYTES
    while True:
        content = os.pread(descriptor, min(count, stop - start), start)
        try:
            reader = _Compact(content)
            numbers = reader.numbers()
            page = Page(*(numbers.get(field, -1) for field in (1, 2, 3)))
        except (_TooShort, ValueError) as error:
            if isinstance(error, _TooShort) and len(content) == count < _MOST_HEADER:
                count *= 4
                continue
            page = Page(-1, -1, -1)
        if min(page) < 0:
            raise SourceUnreadable(path, f"it is not a sound Parquet file: there is no page at byte {start:,}")
        return page, reader.position


class _Compact:
    """A struct of Thrift's compact protocol: its numbers are kept, all else is passed over."""

    def __init__(self, content: bytes) -> None:
        self._content = content
        self.position = 0

    def numbers(self) -> dict[int, int]:
        """The fields of the struct that are whole numbers, by id."""
        found: dict[int, int] = {}
        field = 0
        while head := self._byte():
            kind, step = head & 15, head >> 4
            field = field + step if step else self._signed()
            if kind in (_I16, _I32, _I64):
                found[field] = self._signed()
            else:
                self._skip(kind, _MOST_NESTED)
        return found

    def _skip(self, kind: int, levels: int) -> None:
        if not levels or kind > _STRUCT:
            raise ValueError("not a header")
        if kind == _BYTE:
            self._pass(1)
        elif kind in (_I16, _I32, _I64):
            self._varint()
        elif kind == _DOUBLE:
            self._pass(8)
        elif kind == _BINARY:
            self._pass(self._varint())
        elif kind in (_LIST, _SET):
            head = self._byte()
            count = head >> 4 if head >> 4 < 15 else self._varint()
            for _ in range(count):
                self._element(head & 15, levels - 1)
        elif kind == _MAP:
            count = self._varint()
            kinds = self._byte() if count else 0
            for _ in range(count):
                self._element(kinds >> 4, levels - 1)
                self._element(kinds & 15, levels - 1)
        elif kind == _STRUCT:
            while head := self._byte():
                if not head >> 4:
                    self._varint()
                self._skip(head & 15, levels - 1)

    def _element(self, kind: int, levels: int) -> None:
        """A value in a list; there, a boolean is a byte."""
        if kind == _STOP:
            raise ValueError("not a header")
        if kind in (_TRUE, _FALSE):
            self._pass(1)
        else:
            self._skip(kind, levels)

    def _signed(self) -> int:
        value = self._varint()
        return value >> 1 ^ -(value & 1)

    def _varint(self) -> int:
        value = shift = 0
        while True:
            byte = self._byte()
            value |= (byte & 127) << shift
            if byte < 128:
                return value
            shift += 7
            if shift > 63:
                raise ValueError("not a header")

    def _byte(self) -> int:
        self._pass(1)
        return self._content[self.position - 1]

    def _pass(self, count: int) -> None:
        self.position += count
        if self.position > len(self._content):
            raise _TooShort
