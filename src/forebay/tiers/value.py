"""One row as the value of a tier: a safetensors file in itself, which says whose row it is and ends with its checksum.

    8 bytes     length of the header, little endian
    header      {"__metadata__":{"forebay":"…"},"pixels":{"dtype":…,"shape":…,"data_offsets":…},…}, spaces up to 8·n
    tensors     widest items first, then by name
    .checksum   XXH3-128 of every byte before it
    .hmac       HMAC-SHA256 of every byte before it, only where a key is in use

The header is not padded to a page: LMDB puts 16 bytes before a large value, so that one of exactly 4096·n bytes takes
n + 1 pages. Reading trusts nothing, and gives arrays that nobody can write to, as tiers share them.
"""

from collections.abc import Mapping, Sequence
from typing import Any

import msgspec
import numpy as np
import xxhash

from forebay.columns import DTYPES, Array, Column
from forebay.format.key import same_tag, tag
from forebay.format.tensors import MAX_HEADER_BYTES, as_bytes, encode_header, tag_of

Row = dict[str, Array]

ALIGNMENT = 8
_CHECKSUM, _HMAC = ".checksum", ".hmac"
_CHECKSUM_BYTES, _HMAC_BYTES = 16, 32
_BY_TAG = {tag: dtype for tag, dtype in DTYPES.values()}


class BadValue(Exception):
    """Why a value is not served; `reason` is one of a few words, for counting."""

    def __init__(self, reason: str, detail: str) -> None:
        self.reason, self.detail = reason, detail
        super().__init__(detail)


class _Entry(msgspec.Struct, frozen=True):
    """What stands behind a name in the header; `__metadata__` has only `forebay`, a tensor has all but that."""

    dtype: str = ""
    shape: tuple[int, ...] = ()
    data_offsets: tuple[int, int] = (0, 0)
    forebay: str = ""


_NOTHING = _Entry()
_DECODER = msgspec.json.Decoder(dict[str, _Entry])


def encode_value(identity: Mapping[str, Any], row: Mapping[str, Array], key: bytes | None = None) -> bytes:
    """A row and whose it is, as bytes; tagged where there is a key."""
    ordered = sorted(row.items(), key=lambda item: (-item[1].dtype.itemsize, item[0]))  # keeps all aligned
    entries = [(name, tag_of(array), array.shape, array.nbytes) for name, array in ordered]
    entries.append((_CHECKSUM, "U8", (_CHECKSUM_BYTES,), _CHECKSUM_BYTES))
    if key is not None:
        entries.append((_HMAC, "U8", (_HMAC_BYTES,), _HMAC_BYTES))
    content = b"".join([encode_header(identity, entries, ALIGNMENT), *(as_bytes(array) for _, array in ordered)])
    content += xxhash.xxh3_128_digest(content)
    return content if key is None else content + tag(key, [content])


def decode_value(content: bytes, key: bytes | None = None) -> tuple[str, Row]:
    """Whose row a value is, as JSON, and the row; `BadValue` unless all of it is as it was written, with that key."""
    entries, start = _header(content)
    identity = entries.pop("__metadata__", _NOTHING).forebay
    row = _tensors(content, entries, start)
    tagged = row.pop(_HMAC, None) is not None
    if row.pop(_CHECKSUM, None) is None:
        raise BadValue("format", "it carries no checksum")
    covered = len(content) - _CHECKSUM_BYTES - _HMAC_BYTES * tagged
    view = memoryview(content)
    if xxhash.xxh3_128_digest(view[:covered]) != view[covered : covered + _CHECKSUM_BYTES]:
        raise BadValue("checksum", "its bytes disagree with its checksum")
    _check_tag(view, tagged, key)
    return identity, row


def peek_value(head: bytes) -> tuple[str, bool]:
    """Whose row a value is, and whether it is tagged, as its first bytes say, which nobody checked."""
    entries, _ = _header(head)
    return entries.get("__metadata__", _NOTHING).forebay, _HMAC in entries


def check_columns(row: Row, columns: Sequence[Column]) -> None:
    """A row has the columns of its recipe, each of its type and shape."""
    if len(row) != len(columns):
        raise BadValue("shape", f"it has the columns {', '.join(row)}")
    for column in columns:
        found = row.get(column.name)
        if found is None or found.dtype != column.array_dtype or found.shape[column.ragged :] != column.shape:
            shown = "missing" if found is None else f"{found.dtype} {found.shape}"
            raise BadValue("shape", f"its column '{column.name}' is {shown}")


def _header(content: bytes) -> tuple[dict[str, _Entry], int]:
    length = int.from_bytes(content[:8], "little")
    if len(content) < 8 + length or length > MAX_HEADER_BYTES or length % ALIGNMENT:
        raise BadValue("format", f"it does not start as a value of ours does ({len(content):,} bytes)")
    try:
        return _DECODER.decode(memoryview(content)[8 : 8 + length]), 8 + length
    except (msgspec.DecodeError, UnicodeDecodeError, RecursionError) as error:
        raise BadValue("format", f"its header cannot be read ({type(error).__name__})") from error


def _tensors(content: bytes, entries: Mapping[str, _Entry], start: int) -> Row:
    """The tensors of a value, which lie one behind the other to its very end."""
    found: Row = {}
    position = start
    try:
        for name, entry in entries.items():
            dtype = _BY_TAG[entry.dtype]
            first, stop = entry.data_offsets
            count = (stop - first) // dtype.itemsize
            if start + first != position or count < 0:
                raise ValueError(f"it is at {first:,} to {stop:,}")
            array = np.frombuffer(content, dtype, count, position)
            found[name] = array if entry.shape == (count,) else array.reshape(entry.shape)
            position += found[name].nbytes
    except (ValueError, KeyError, OverflowError) as error:
        raise BadValue("format", f"its tensor '{name}' is described wrongly ({error})") from error
    if position != len(content):
        raise BadValue("format", f"it has {len(content):,} bytes, and describes {position:,}")
    return found


def _check_tag(view: memoryview, tagged: bool, key: bytes | None) -> None:
    if key is None:
        if tagged:
            raise BadValue("key-needed", "it is tagged, and no key is in use here")
    elif not tagged:
        raise BadValue("untagged", "it carries no tag, and a key is in use here")
    elif not same_tag(bytes(view[-_HMAC_BYTES:]), tag(key, [view[:-_HMAC_BYTES]])):
        raise BadValue("tag", "its tag was not made with the key in use here")
