"""Safetensors files with one possible sequence of bytes.

    8 bytes   length of the header, little endian
    header    {"__metadata__":{"forebay":"…"},"name":{"dtype":…,"shape":…,"data_offsets":…},…} and spaces, up to
              a multiple of 4096
    data      the tensors, in the order of the header, without gaps

The package's own writer has no fixed order of keys and knows no bfloat16 in numpy, so writing is ours. Reading trusts
nothing: every number is checked before it is used.
"""

import json
import sys
from array import array
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from functools import lru_cache
from math import prod
from typing import Any, NamedTuple

import msgspec
import numpy as np

from forebay.columns import DTYPES, Array
from forebay.errors import FormatTooNew, NotForebay, RecipeInvalid
from forebay.format.layout import FORMAT_VERSION
from forebay.recipe import canonical_json
from forebay.source import MOST_LEVELS, TOO_DEEP, is_shallow
from forebay.store.base import View

ALIGNMENT = 4096
MAX_HEADER_BYTES = 32 << 20  # JSON of this size is at most some hundred megabytes of objects
MAX_TENSORS = 20_000
MAX_DIMENSIONS = 32  # what every numpy takes
_MOST_BYTES = 1 << 62
_BY_TAG = {tag: dtype for tag, dtype in DTYPES.values()}
_TAGS = {dtype: tag for tag, dtype in DTYPES.values()}


class Tensor(NamedTuple):
    """One tensor of a file: its type, and where its bytes are, counted from the start of the file.

    A tuple and not a frozen dataclass: opening a chunk makes dozens, and a tuple is made faster.
    """

    tag: str
    shape: tuple[int, ...]
    start: int
    stop: int

    def array(self, view: View) -> Array:
        return np.frombuffer(view[self.start : self.stop], _BY_TAG[self.tag]).reshape(self.shape)


class Tensors(Mapping[str, Tensor]):
    """The tensors of a file, kept in little memory: files of one kind share all but a few numbers of each."""

    __slots__ = ("_kinds", "_numbers")

    def __init__(self, tensors: Mapping[str, Tensor]) -> None:
        self._kinds = _kinds(tuple((name, tensor.tag, tensor.shape[1:]) for name, tensor in tensors.items()))
        self._numbers = array(
            "q", [number for tensor in tensors.values() for number in (tensor.start, tensor.stop, tensor.shape[0])]
        )

    def __getitem__(self, name: str) -> Tensor:
        at, tag, shape = self._kinds[name]
        start, stop, length = self._numbers[at : at + 3]
        return Tensor(tag, (length, *shape), start, stop)

    def __iter__(self) -> Iterator[str]:
        return iter(self._kinds)

    def __len__(self) -> int:
        return len(self._kinds)


@lru_cache(maxsize=64)
def _kinds(kinds: tuple[tuple[str, str, tuple[int, ...]], ...]) -> dict[str, tuple[int, str, tuple[int, ...]]]:
    """Where the numbers of each tensor are, its tag, and its shape but for the first side."""
    return {name: (3 * place, tag, shape) for place, (name, tag, shape) in enumerate(kinds)}


@dataclass(frozen=True, slots=True)
class Header:
    """The metadata and the tensors of a file, in order."""

    metadata: dict[str, Any]
    tensors: dict[str, Tensor]
    data_start: int


def as_bytes(array: Array) -> memoryview:
    """The bytes of a contiguous array, without a copy."""
    flat = np.ascontiguousarray(array).reshape(-1)
    return flat.view(np.uint8).data if flat.size else memoryview(b"")


def tag_of(array: Array) -> str:
    if array.dtype not in _TAGS:
        raise RecipeInvalid(f"arrays of {array.dtype} cannot be kept; use one of: {', '.join(DTYPES)}")
    return _TAGS[array.dtype]


def encode_header(
    metadata: Mapping[str, Any], tensors: Iterable[tuple[str, str, Sequence[int], int]], alignment: int = ALIGNMENT
) -> bytes:
    """The head of a file whose tensors are (name, tag, shape, bytes), padded so that data starts aligned."""
    entries: dict[str, Any] = {"__metadata__": {"forebay": canonical_json(metadata).decode()}}
    position = 0
    for name, tag, shape, size in tensors:
        entries[name] = {"dtype": tag, "shape": list(shape), "data_offsets": [position, position + size]}
        position += size
    text = json.dumps(entries, separators=(",", ":")).encode()
    padded = -(-(8 + len(text)) // alignment) * alignment - 8
    if padded > MAX_HEADER_BYTES or len(entries) > MAX_TENSORS:
        raise RecipeInvalid(
            f"a header of {padded:,} bytes and {len(entries):,} tensors is too large: at most {MAX_HEADER_BYTES:,} and "
            f"{MAX_TENSORS:,} are read back; name folders or globs instead of single files, or make fewer columns"
        )
    return padded.to_bytes(8, "little") + text.ljust(padded)


def parse_header(view: View, where: str, max_bytes: int = MAX_HEADER_BYTES) -> Header:
    """Read the head of a file, refusing whatever `encode_header` could not have written for a file of this size.

    JSON takes up to thirty times its length in memory, so `max_bytes` bounds that too.
    """
    text, data_start = _header_text(view, where, max_bytes)
    metadata, entries = _header_entries(text, where)
    tensors: dict[str, Tensor] = {}
    position = data_start
    for name, entry in entries.items():
        # Thousands of files are open at once, and all say the same names.
        tensors[sys.intern(name)] = _tensor(name, entry, data_start, position, where)
        position = tensors[name].stop
    if position != len(view):
        raise NotForebay(where, f"it has {len(view):,} bytes but its header describes {position:,}")
    return Header(metadata, tensors, data_start)


def _header_text(view: View, where: str, max_bytes: int) -> tuple[bytes, int]:
    if len(view) == 0:
        raise NotForebay(where, "it is empty")
    if len(view) < 8:
        raise NotForebay(where, f"it has only {len(view)} bytes")
    length = int.from_bytes(view[:8], "little")
    if (8 + length) % ALIGNMENT or length < 2:
        raise NotForebay(where, "it does not start as a safetensors file of ours does")
    if 8 + length > len(view):
        raise NotForebay(where, f"it ends inside its header ({len(view):,} of at least {8 + length:,} bytes)")
    if length > max_bytes:
        raise NotForebay(where, f"its header has {length:,} bytes, more than the {max_bytes:,} that are allowed")
    return bytes(view[8 : 8 + length]), 8 + length


def _header_entries(text: bytes, where: str) -> tuple[dict[str, Any], dict[str, Any]]:
    # Counted before they are parsed, which takes a hundred times as long; a tensor may itself have this name.
    _check_count(text.count(b'"data_offsets"') - 1, where)
    try:
        entries = msgspec.json.decode(text, type=dict[str, Any])
        described = entries.pop("__metadata__")["forebay"]
        metadata = _decoded(described)
        version = metadata["format_version"]
    except (msgspec.DecodeError, ValueError, KeyError, TypeError, AttributeError, RecursionError) as error:
        raise NotForebay(where, f"its header cannot be read ({type(error).__name__})") from error
    if type(version) is not int or version < 1 or not isinstance(metadata, dict):
        raise NotForebay(where, "its header names no format version")
    if version > FORMAT_VERSION:
        raise FormatTooNew(where, version, FORMAT_VERSION)
    # Text with few brackets cannot be deep, and counting them is faster than walking thousands of headers.
    if described.count("{") + described.count("[") > MOST_LEVELS and not is_shallow(metadata):
        raise NotForebay(where, f"in its header, {TOO_DEEP}")
    _check_count(len(entries), where)
    return metadata, entries


def _check_count(tensors: int, where: str) -> None:
    if tensors > MAX_TENSORS:
        raise NotForebay(where, f"its header describes over {MAX_TENSORS:,} tensors, more than are read")


def _decoded(text: str) -> Any:
    """Names that are not UTF-8 stand in our JSON as lone surrogates, which only the slower parser reads."""
    try:
        return msgspec.json.decode(text)
    except (msgspec.DecodeError, UnicodeEncodeError):
        return json.loads(text)


def _tensor(name: str, entry: Any, data_start: int, position: int, where: str) -> Tensor:
    try:
        tag, shape, (start, stop) = entry["dtype"], tuple(entry["shape"]), entry["data_offsets"]
        sound = len(shape) <= MAX_DIMENSIONS and all([type(side) is int and side >= 0 for side in shape])
        expected = prod(shape) * _BY_TAG[tag].itemsize if sound else 0
        # A side of 0 must not hide sides that wrap around.
        sound = sound and (expected or prod([side or 1 for side in shape]) * _BY_TAG[tag].itemsize) < _MOST_BYTES
        sound = sound and data_start + start == position and stop - start == expected
    except (ValueError, KeyError, TypeError, OverflowError) as error:
        raise NotForebay(where, f"tensor '{name}' is described wrongly ({type(error).__name__})") from error
    if not sound:
        raise NotForebay(where, f"tensor '{name}' is described wrongly")
    return Tensor(sys.intern(tag), shape, position, position + expected)
