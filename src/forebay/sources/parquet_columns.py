"""Types of Parquet columns, and their values as documents. The only source module that imports pyarrow.

Text is stored as strings, as bytes, or as indices into a dictionary.
"""

from collections import deque
from collections.abc import Iterator

from forebay.errors import LibraryMissing
from forebay.source import Failure, Sample
from forebay.sources.paths import empty, too_large

try:
    import pyarrow as pa
    import pyarrow.compute as pc
    from pyarrow.parquet import ParquetFile
except ModuleNotFoundError as missing:
    raise LibraryMissing(
        "reading Parquet files needs 'pyarrow', which is not installed",
        hint="pip install 'forebay[tokens]'",
        extra="tokens",
    ) from missing

__all__ = ["ParquetFile", "documents", "holds_bytes", "holds_json", "holds_text", "pa", "pc"]


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
            samples = [Sample(sample, value)]
            del value
            yield samples.pop()  # no reference to the text stays here
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
    """Strings, or bytes if at least one value is not a string."""
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
