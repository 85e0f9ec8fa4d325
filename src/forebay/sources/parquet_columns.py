"""Parquet columns: page headers checked before anything is decompressed, types, and values as documents.

    column in a row group   [dictionary page] │ data page │ data page │ …
    page                    header (Thrift, compact): kind, size unpacked, size stored, … │ its content

pyarrow decompresses a page as a whole and trusts its header, so the sizes of pages are checked here first.

Text is stored as strings, as bytes, or as indices into a dictionary.
"""

import os
from collections import deque
from collections.abc import Collection, Iterator
from typing import NamedTuple

from forebay.errors import LibraryMissing, SourceUnreadable
from forebay.source import Failure, Sample
from forebay.sources.paths import empty, too_large

try:
    import pyarrow as pa
    import pyarrow.compute as pc
except ModuleNotFoundError as missing:
    raise LibraryMissing("pyarrow", "reading Parquet files", "tokens") from missing

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
    """The header is longer than the bytes that were read."""


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


class FooterColumn(NamedTuple):
    """What a footer says of a column in a row group."""

    path: str
    encodings: frozenset[int]
    unpacked: int
    stored: int
    data_page: int  # where the first one begins
    dictionary_page: int | None

    @property
    def start(self) -> int:
        return min(self.dictionary_page or self.data_page, self.data_page)


class RowGroup(NamedTuple):
    rows: int
    columns: tuple[FooterColumn, ...]


def row_groups(footer: bytes) -> list[RowGroup]:
    """The row groups in a footer. pyarrow crashes where the metadata of a column is invalid."""
    reader, found = _Compact(footer), []
    try:
        for field, kind in reader.fields((_LIST,)):
            if field == 4:
                found += [_row_group(reader) for _ in reader.items()]
            else:
                reader.skip(kind)
    except (_TooShort, ValueError, KeyError) as error:
        raise pa.ArrowInvalid("its footer does not describe its row groups") from error
    return found


def _row_group(reader: "_Compact") -> RowGroup:
    rows, columns = 0, list[FooterColumn]()
    for field, kind in reader.fields((_LIST, _I64)):
        if field == 1 and kind == _LIST:
            columns = [_stored_column(reader) for _ in reader.items()]
        elif field == 3 and kind == _I64:
            rows = _checked(reader.number())
        else:
            reader.skip(kind)
    return RowGroup(rows, tuple(columns))


def _stored_column(reader: "_Compact") -> FooterColumn:
    found = None
    for field, kind in reader.fields((_STRUCT,)):
        if field == 3:
            found = _column_facts(reader)
        else:
            reader.skip(kind)
    if found is None:
        raise ValueError("a column without a description")
    return found


def _column_facts(reader: "_Compact") -> FooterColumn:
    numbers: dict[int, int] = {}
    encodings, path = frozenset[int](), ""
    for field, kind in reader.fields((_LIST, _I32, _I64)):
        if field == 2 and kind == _LIST:
            encodings = frozenset(reader.number() for _ in reader.items())
        elif field == 3 and kind == _LIST:
            path = ".".join(reader.text() for _ in reader.items())
        elif kind == _LIST:
            reader.skip(kind)
        else:
            numbers[field] = _checked(reader.number())
    return FooterColumn(path, encodings, numbers[6], numbers[7], numbers[9], numbers.get(11))


def _checked(number: int) -> int:
    if not 0 <= number < 1 << 62:
        raise ValueError("a count, a size or an offset is out of range")
    return number


class _Compact:
    """A struct of Thrift's compact protocol: its integers are kept, other fields skipped."""

    def __init__(self, content: bytes) -> None:
        self._content = content
        self.position = 0

    def numbers(self) -> dict[int, int]:
        """The fields of the struct that are whole numbers, by id."""
        return {field: self.number() for field, _ in self.fields((_I16, _I32, _I64))}

    def fields(self, kinds: Collection[int]) -> Iterator[tuple[int, int]]:
        """The id and kind of every field of these kinds, whose value has to be read; others are skipped."""
        field = 0
        while head := self._byte():
            kind, step = head & 15, head >> 4
            field = field + step if step else self.number()
            if kind in kinds:
                yield field, kind
            else:
                self.skip(kind)

    def items(self) -> range:
        """The numbers of the elements of a list, which have to be read."""
        head = self._byte()
        return range(head >> 4 if head >> 4 < 15 else self._varint())

    def number(self) -> int:
        value = self._varint()
        return value >> 1 ^ -(value & 1)

    def text(self) -> str:
        length = self._varint()
        self._pass(length)
        return self._content[self.position - length : self.position].decode()

    def skip(self, kind: int) -> None:
        self._skip(kind, _MOST_NESTED)

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


def holds_text(kind: pa.DataType) -> bool:
    """Whether values of a type can be text: strings, bytes or nulls."""
    if pa.types.is_dictionary(kind):
        return holds_text(kind.value_type)
    return _is_string(kind) or holds_bytes(kind) or pa.types.is_null(kind)


def holds_bytes(kind: pa.DataType) -> bool:
    types = pa.types
    kinds = (types.is_binary, types.is_large_binary, types.is_binary_view, types.is_fixed_size_binary)
    return any(is_kind(kind) for is_kind in kinds)


def holds_json(kind: pa.DataType) -> bool:
    """Whether JSON can represent every value of a type."""
    if pa.types.is_dictionary(kind):
        return holds_json(kind.value_type)
    if pa.types.is_map(kind):
        return False
    inner = [kind.field(index).type for index in range(kind.num_fields)]
    plain = (pa.types.is_integer, pa.types.is_floating, pa.types.is_boolean, pa.types.is_null, _is_string)
    return all(map(holds_json, inner)) if inner else any(is_kind(kind) for is_kind in plain)


def _is_string(kind: pa.DataType) -> bool:
    return bool(pa.types.is_string(kind) or pa.types.is_large_string(kind) or pa.types.is_string_view(kind))


def documents(values: pa.Array, path: str, first_row: int, limit: int) -> Iterator[Sample | Failure]:
    """A document for every value; one that is empty, null, not UTF-8 or longer than the limit is a failure."""
    stored = _stored(values)
    sizes = pc.binary_length(stored)
    if (pc.max(sizes).as_py() or 0) <= limit:
        plain = deque(_plain(stored))
        del values, stored  # both may be large, and are not needed while documents are handed out
        yield from _documents(plain, path, first_row)
        return
    for index, size in enumerate(sizes.to_pylist()):
        if size is not None and size > limit:
            yield too_large(f"{path}#{first_row + index}", size, limit, f"row {first_row + index}: ")
        else:
            yield from _documents(deque(_plain(stored.slice(index, 1))), path, first_row + index)


def _documents(values: deque[str | bytes | None], path: str, first_row: int) -> Iterator[Sample | Failure]:
    for row in range(first_row, first_row + len(values)):
        value = values.popleft()
        sample = f"{path}#{row}"
        if isinstance(value, str) and value:
            found = [Sample(sample, value)]
            del value
            yield found.pop()  # no reference to the text stays here
        elif value == "" or value == b"":
            yield empty(sample, f"row {row}")
        elif value is None:
            yield Failure(sample, "null", f"row {row}: the text is null")
        else:
            yield _decoded(sample, row, value)


def _stored(values: pa.Array) -> pa.Array:
    """Values as bytes, each by itself."""
    if pa.types.is_dictionary(values.type):
        values = values.dictionary_decode()
    return values.cast(pa.large_binary())


def _plain(stored: pa.Array) -> list[str | bytes | None]:
    """Strings, or bytes where one of them at least is not a string."""
    try:
        plain: list[str | bytes | None] = stored.cast(pa.large_string()).to_pylist()
    except pa.ArrowInvalid:
        plain = stored.to_pylist()
    return plain


def _decoded(sample: str, row: int, value: bytes) -> Sample | Failure:
    try:
        return Sample(sample, value.decode())
    except UnicodeDecodeError as error:
        bad = f"byte 0x{value[error.start]:02x} at offset {error.start:,} of the text"
        return Failure(sample, "not-utf8", f"row {row}: {bad} is not UTF-8 ({error.reason})")
