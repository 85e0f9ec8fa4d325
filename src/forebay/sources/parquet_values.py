"""Values of a text column as documents: text is stored as strings, as bytes, or as numbers of dictionary entries."""

from collections.abc import Iterator

import pyarrow as pa

from forebay.source import Failure, Sample
from forebay.sources.empty import empty


def holds_text(kind: pa.DataType) -> bool:
    """Whether values of a type can be text; bytes can, and so can nothing but nulls."""
    if pa.types.is_dictionary(kind):
        return holds_text(kind.value_type)
    return any(
        is_kind(kind)
        for is_kind in (
            pa.types.is_string,
            pa.types.is_large_string,
            pa.types.is_string_view,
            pa.types.is_binary,
            pa.types.is_large_binary,
            pa.types.is_binary_view,
            pa.types.is_fixed_size_binary,
            pa.types.is_null,
        )
    )


def documents(values: pa.Array, path: str, first_row: int) -> Iterator[Sample | Failure]:
    """A document for every value; one that is empty, null or no UTF-8 is a failure."""
    for row, value in enumerate(_plain(values), first_row):
        sample = f"{path}#{row}"
        if isinstance(value, str) and value:
            yield Sample(sample, value)
        elif value == "" or value == b"":
            yield empty(sample, f"row {row}")
        elif value is None:
            yield Failure(sample, "null", f"row {row}: the text is null")
        else:
            yield _decoded(sample, row, value)


def _plain(values: pa.Array) -> list[str | bytes | None]:
    """Strings, or bytes where one of them at least is no string."""
    if pa.types.is_dictionary(values.type):
        values = values.dictionary_decode()
    stored = values.cast(pa.large_binary())
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
