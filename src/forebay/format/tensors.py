"""Read and write safetensors files deterministically, and index files sealed with their digest and tag.

    8 bytes   length of the header, little endian
    header    {"__metadata__":{"forebay":"…"},"name":{"dtype":…,"shape":…,"data_offsets":…},…} and spaces, up to
              a multiple of 4096
    data      the tensors, in the order of the header, without gaps

The safetensors package has no fixed key order and no bfloat16 for numpy, so it is not used. A file is untrusted input:
types, shapes and offsets in the header are checked here; the data is not.

header, padded to a multiple of 4096
tensors   widest items first, then by name
.digest   SHA-256 of every byte before it
.hmac     HMAC-SHA256 of every byte before it, only if a key is in use
"""

import hashlib
import hmac
import json
import os
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
from forebay.errors import Damaged, ForebayError, FormatTooNew, KeyRefused, RecipeInvalid
from forebay.format.layout import FORMAT_VERSION, old_version
from forebay.recipe import canonical_json
from forebay.source import MOST_LEVELS, TOO_DEEP, is_shallow
from forebay.store.base import MAX_INDEX_BYTES, Buffer, View, index_corrupt, not_forebay

ALIGNMENT = 4096
MAX_HEADER_BYTES = 32 << 20  # takes at most some hundred megabytes when parsed
MAX_TENSORS = 20_000
MAX_DIMENSIONS = 32  # the limit of numpy 1
_MOST_BYTES = 1 << 62
_BY_TAG = {tag: dtype for tag, dtype in DTYPES.values()}
_TAGS = {dtype: tag for tag, dtype in DTYPES.values()}


class Tensor(NamedTuple):
    """One tensor of a file: its type and shape, and its start and stop in the file.

    A tuple because opening a chunk makes dozens, and tuples are created faster than dataclasses.
    """

    tag: str
    shape: tuple[int, ...]
    start: int
    stop: int

    def array(self, view: View) -> Array:
        return np.frombuffer(view[self.start : self.stop], _BY_TAG[self.tag]).reshape(self.shape)


class Tensors(Mapping[str, Tensor]):
    """The tensors of a file in compact form: files with the same names and types share all but three numbers each."""

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
    """By name: the index of a tensor's numbers, its tag, and its shape without the first side."""
    return {name: (3 * at, tag, shape) for at, (name, tag, shape) in enumerate(kinds)}


@dataclass(frozen=True, slots=True)
class Header:
    """The metadata and the tensors of a file, in order."""

    metadata: dict[str, Any]
    tensors: dict[str, Tensor]


def as_bytes(array: Array) -> memoryview:
    """The bytes of a contiguous array, without a copy."""
    flat = np.ascontiguousarray(array).reshape(-1)
    return flat.view(np.uint8).data if flat.size else memoryview(b"")


def tag_of(dtype: np.dtype[Any]) -> str:
    if dtype not in _TAGS:
        raise RecipeInvalid(f"arrays of {dtype} cannot be stored", hint=f"use one of: {', '.join(DTYPES)}")
    return _TAGS[dtype]


def encode_header(
    metadata: Mapping[str, Any], tensors: Iterable[tuple[str, str, Sequence[int], int]], alignment: int = ALIGNMENT
) -> bytes:
    """Encode the header for tensors (name, tag, shape, bytes), padded so that the data is aligned."""
    entries: dict[str, Any] = {"__metadata__": {"forebay": canonical_json(metadata).decode()}}
    position = 0
    for name, tag, shape, size in tensors:
        entries[name] = {"dtype": tag, "shape": list(shape), "data_offsets": [position, position + size]}
        position += size
    text = json.dumps(entries, separators=(",", ":")).encode()
    padded = -(-(8 + len(text)) // alignment) * alignment - 8
    if padded > MAX_HEADER_BYTES or len(entries) > MAX_TENSORS:
        raise RecipeInvalid(
            f"a header of {padded:,} bytes and {len(entries):,} tensors is too large: at most "
            f"{MAX_HEADER_BYTES:,} and {MAX_TENSORS:,} are allowed",
            hint="name folders or globs instead of single files, or use fewer columns",
        )
    return padded.to_bytes(8, "little") + text.ljust(padded)


def parse_header(view: View, where: str, max_bytes: int = MAX_HEADER_BYTES) -> Header:
    """Parse the header of a file; reject anything that `encode_header` cannot write for a file of this size.

    `max_bytes` also bounds memory: parsed JSON takes up to thirty times its length.
    """
    text, data_start = _header_text(view, where, max_bytes)
    metadata, entries = _header_entries(text, where)
    tensors: dict[str, Tensor] = {}
    position = data_start
    for name, entry in entries.items():
        # Thousands of files with the same names are open at once.
        tensors[sys.intern(name)] = _tensor(name, entry, data_start, position, where)
        position = tensors[name].stop
    if position != len(view):
        raise not_forebay(where, f"it has {len(view):,} bytes but its header describes {position:,}")
    return Header(metadata, tensors)


def _header_text(view: View, where: str, max_bytes: int) -> tuple[bytes, int]:
    if len(view) == 0:
        raise not_forebay(where, "it is empty")
    if len(view) < 8:
        raise not_forebay(where, f"it has only {len(view)} bytes")
    length = int.from_bytes(view[:8], "little")
    if (8 + length) % ALIGNMENT or length < 2:
        raise not_forebay(where, "it is not a forebay safetensors file")
    if 8 + length > len(view):
        raise not_forebay(where, f"it ends inside its header ({len(view):,} of at least {8 + length:,} bytes)")
    if length > max_bytes:
        raise not_forebay(where, f"its header has {length:,} bytes, more than the limit of {max_bytes:,}")
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
        raise not_forebay(where, f"its header cannot be read ({type(error).__name__})") from error
    if type(version) is not int or version < 1 or not isinstance(metadata, dict):
        raise not_forebay(where, "its header has no format version")
    if version > FORMAT_VERSION:
        raise FormatTooNew(
            f"'{where}' has format version {version}; this forebay reads up to {FORMAT_VERSION}", hint="upgrade forebay"
        )
    # Text with few brackets is not deep, and counting them is faster than walking thousands of headers.
    if described.count("{") + described.count("[") > MOST_LEVELS and not is_shallow(metadata):
        raise not_forebay(where, f"in its header, {TOO_DEEP}")
    _check_count(len(entries), where)
    return metadata, entries


def _check_count(tensors: int, where: str) -> None:
    if tensors > MAX_TENSORS:
        raise not_forebay(where, f"its header describes over {MAX_TENSORS:,} tensors, more than are read")


def _decoded(text: str) -> Any:
    """Parse JSON; names that are not UTF-8 are lone surrogates, which only the slower parser accepts."""
    try:
        return msgspec.json.decode(text)
    except (msgspec.DecodeError, UnicodeEncodeError):
        return json.loads(text)


def _tensor(name: str, entry: Any, data_start: int, position: int, where: str) -> Tensor:
    try:
        tag, shape, (start, stop) = entry["dtype"], tuple(entry["shape"]), entry["data_offsets"]
        sound = len(shape) <= MAX_DIMENSIONS and all([type(side) is int and side >= 0 for side in shape])
        expected = prod(shape) * _BY_TAG[tag].itemsize if sound else 0
        # A side of 0 must not hide other sides whose product overflows.
        sound = sound and (expected or prod([side or 1 for side in shape]) * _BY_TAG[tag].itemsize) < _MOST_BYTES
        sound = sound and data_start + start == position and stop - start == expected
    except (ValueError, KeyError, TypeError, OverflowError) as error:
        raise not_forebay(where, f"the entry of tensor '{name}' is invalid ({type(error).__name__})") from error
    if not sound:
        raise not_forebay(where, f"the entry of tensor '{name}' is invalid")
    return Tensor(sys.intern(tag), shape, position, position + expected)


VARIABLE = "FOREBAY_HMAC_KEY"
MIN_BYTES = 16  # of a key to sign with


def hmac_key() -> bytes | None:
    """The key in the environment, None if not set. An empty key is an error: a script may have lost its secret."""
    value = os.environ.get(VARIABLE)
    if value == "":
        raise ForebayError(
            f"the environment variable {VARIABLE} is set but empty", hint="set it to the key, or unset it"
        )
    return None if value is None else os.fsencode(value)


def short_key_note(key: bytes | None) -> tuple[str, ...]:
    """A warning about a key that is too short."""
    if key is None or len(key) >= MIN_BYTES:
        return ()
    return (
        f"{VARIABLE} has only {len(key)} bytes and is easy to guess; use one of at least {MIN_BYTES} bytes, and sign "
        "the cache with it by `forebay copy`",
    )


def tag(key: bytes, buffers: Sequence[Buffer]) -> bytes:
    code = hmac.new(key, digestmod=hashlib.sha256)
    for buffer in buffers:
        code.update(buffer)
    return code.digest()


def same_tag(actual: bytes, expected: bytes) -> bool:
    return hmac.compare_digest(actual, expected)


def seal(metadata: dict[str, Any], tensors: Mapping[str, Array], key: bytes | None = None) -> Sequence[Buffer]:
    """Encode an index file, as buffers."""
    ordered = dict(sorted(tensors.items(), key=lambda item: (-item[1].dtype.itemsize, item[0])))  # keeps all aligned
    entries = [(name, tag_of(array.dtype), array.shape, array.nbytes) for name, array in ordered.items()]
    entries.append((".digest", "U8", (32,), 32))
    if key is not None:
        entries.append((".hmac", "U8", (32,), 32))
    buffers: list[Buffer] = [encode_header(metadata, entries), *map(as_bytes, ordered.values())]
    buffers.append(sha256_of_all(buffers))
    if key is not None:
        buffers.append(tag(key, buffers))
    return buffers


def unseal(
    view: memoryview, root: str, where: str, kind: str, key: bytes | None = None
) -> tuple[dict[str, Any], dict[str, Array]]:
    """Check the digest, and with a key the tag, of an index file; return its metadata and tensors."""
    header = _checked_header(view, root, where)
    tagged = header.tensors.get(".hmac")
    if tagged is None and key is not None:
        raise KeyRefused(
            f"'{where}' of the cache at '{root}' is rejected: it has no tag, but {VARIABLE} is set",
            hint="`forebay repair` returns to the newest generation with a valid tag, and `forebay copy --sign` signs "
            "a cache that never had a key, if you trust the folder",
            key=where,
        )
    if tagged is not None:
        if key is None:
            raise KeyRefused(
                f"'{where}' of the cache at '{root}' is rejected: it is tagged",
                hint=f"set {VARIABLE} to the key it was published with",
                key=where,
            )
        if not same_tag(bytes(view[tagged.start : tagged.stop]), tag(key, [view[: tagged.start]])):
            raise KeyRefused(
                f"'{where}' of the cache at '{root}' is rejected: its tag was not made with the key in {VARIABLE}",
                key=where,
            )
    if (version := header.metadata["format_version"]) < FORMAT_VERSION:
        raise index_corrupt(root, where, old_version(version))
    if header.metadata.get("type") != kind:
        raise index_corrupt(root, where, f"it is a {header.metadata.get('type')}, not a {kind}")
    arrays = {name: tensor.array(view) for name, tensor in header.tensors.items() if not name.startswith(".")}
    return header.metadata, arrays


def is_whole(view: memoryview) -> bool:
    """Whether a file ends with its own digest, in any version of the format."""
    ends = (len(view) - 32, len(view) - 64)  # without a tag, with one
    return any(end > 0 and bytes(view[end : end + 32]) == sha256_of_all([view[:end]]) for end in ends)


def _checked_header(view: memoryview, root: str, where: str) -> Header:
    if len(view) > MAX_INDEX_BYTES:
        raise index_corrupt(root, where, f"it has {len(view):,} bytes; an index file has at most {MAX_INDEX_BYTES:,}")
    try:
        header = parse_header(view, where)
    except FormatTooNew:
        raise
    except Damaged as error:
        raise index_corrupt(root, where, error.facts["problem"]) from error
    digest = header.tensors.get(".digest")
    trailer = [name for name in header.tensors if name.startswith(".")]
    if digest is None or digest.shape != (32,) or list(header.tensors)[-len(trailer) :] != trailer:
        raise index_corrupt(root, where, "it does not end with a digest")
    if bytes(view[digest.start : digest.stop]) != sha256_of_all([view[: digest.start]]):
        raise index_corrupt(root, where, "its bytes do not match its digest")
    if trailer not in ([".digest"], [".digest", ".hmac"]):
        raise index_corrupt(root, where, f"it ends with {trailer}")
    return header


def sha256_of_all(buffers: Sequence[Buffer]) -> bytes:
    digest = hashlib.sha256()
    for buffer in buffers:
        digest.update(buffer)
    return digest.digest()
