"""One row as an L2 value: a sealed safetensors file with its sample's identity, digest and optional HMAC."""

from collections.abc import Mapping
from typing import NamedTuple

import msgspec

from forebay.columns import Array, Column
from forebay.errors import Damaged, KeyRefused
from forebay.format.layout import FORMAT_VERSION
from forebay.format.tensors import seal, unseal
from forebay.row_cache.samples import Identity

Row = dict[str, Array]


class StoredRow(NamedTuple):
    identity: Identity
    row: Row
    size_bytes: int


class BadRow(Exception):
    """Why a stored row is not served; `reason` is one of a few words, for counting."""

    def __init__(self, reason: str, detail: str) -> None:
        self.reason, self.detail = reason, detail
        super().__init__(detail)


def encode_row(identity: Identity, row: Mapping[str, Array], key: bytes | None) -> bytes:
    """Encode a row as a sealed safetensors file: identity, arrays, SHA-256 and, with a key, HMAC-SHA256."""
    metadata = {"format_version": FORMAT_VERSION, "type": "row", "identity": msgspec.to_builtins(identity)}
    return b"".join(seal(metadata, row, key))


def decode_row(value: bytes, columns: Mapping[str, Column], key: bytes | None) -> StoredRow:
    """Return the row of an L2 value; raise `BadRow` unless it is intact, with this key and these columns."""
    try:
        metadata, row = unseal(memoryview(value), "the row cache", "row", "row", key)
        identity = msgspec.convert(metadata.get("identity"), Identity)
    except KeyRefused as error:
        raise BadRow("key", error.message) from error
    except (Damaged, msgspec.ValidationError) as error:
        raise BadRow("damaged", error.message if isinstance(error, Damaged) else str(error)) from error
    for name, column in columns.items():
        array = row.get(name)
        if array is None or array.dtype != column.array_dtype or array.shape[int(column.ragged) :] != column.shape:
            raise BadRow("shape", f"its column '{name}' does not fit the recipe")
    if row.keys() != columns.keys():
        raise BadRow("shape", f"it has the columns {', '.join(row)}")
    return StoredRow(identity, row, len(value))
