"""One row as the value of a tier: a safetensors file in itself, which says whose row it is and ends with its checksum.

    8 bytes     length of the header, little endian
    header      {"__metadata__":{"forebay":"…"},".identity":{"dtype":…,"shape":…,"data_offsets":…},…}, spaces up to 8·n
    .identity   all that pixels depend on, a line of JSON whose hash is the key; what the sample was; spaces up to 8·n
    tensors     widest items first, then by name
    .checksum   XXH3-128 of every byte before it
    .hmac       HMAC-SHA256 of every byte before it, only where a key is in use

The header is not padded to a page: LMDB puts 16 bytes before a large value, so that one of exactly 4096·n bytes takes
n + 1 pages. Reading trusts nothing, and gives arrays that nobody can write to, as tiers share them.

What tiers tell: how reading went, and what is in a folder.
"""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from functools import lru_cache
from math import prod
from typing import Any

import msgspec
import numpy as np
import xxhash

from forebay.columns import DTYPES, Array, Column
from forebay.format.layout import FORMAT_VERSION
from forebay.format.tensors import MAX_DIMENSIONS, as_bytes, encode_header, same_tag, tag, tag_of
from forebay.recipe import canonical_json

Row = dict[str, Array]
KEY_BYTES = 16  # of the key of a value; the keys of a tier's two marks are shorter
ALIGNMENT = 8
MOST_BYTES = 1 << 40  # of a tensor
MAX_HEADER_BYTES = 16 << 10
KNOWN_LAYOUTS = 4096
_METADATA = {"format_version": FORMAT_VERSION, "type": "row"}
_METADATA_TEXT = canonical_json(_METADATA).decode()
_IDENTITY, _CHECKSUM, _HMAC = ".identity", ".checksum", ".hmac"
_CHECKSUM_BYTES, _HMAC_BYTES = 16, 32
_BY_TAG = {tag: dtype for tag, dtype in DTYPES.values()}


class BadValue(Exception):
    """Why a value is not served; `reason` is one of a few words, for counting."""

    def __init__(self, reason: str, detail: str) -> None:
        self.reason, self.detail = reason, detail
        super().__init__(detail)


def identity_bytes(names: Mapping[str, Any], seen: Mapping[str, Any]) -> bytes:
    """All that a row depends on, as a value carries it."""
    text = canonical_json(names) + b"\n" + canonical_json(seen)
    return text.ljust(-(-len(text) // ALIGNMENT) * ALIGNMENT)


def encode_value(identity: bytes, row: Mapping[str, Array], key: bytes | None = None) -> bytes:
    """A row and whose it is, as bytes; tagged where there is a key."""
    ordered = sorted(row.items(), key=lambda item: (-item[1].dtype.itemsize, item[0]))  # keeps all aligned
    entries = [(_IDENTITY, "U8", (len(identity),), len(identity))]
    entries += [(name, tag_of(array.dtype), array.shape, array.nbytes) for name, array in ordered]
    entries.append((_CHECKSUM, "U8", (_CHECKSUM_BYTES,), _CHECKSUM_BYTES))
    if key is not None:
        entries.append((_HMAC, "U8", (_HMAC_BYTES,), _HMAC_BYTES))
    header = encode_header(_METADATA, entries, ALIGNMENT)
    content = b"".join([header, identity, *(as_bytes(array) for _, array in ordered)])
    content += xxhash.xxh3_128_digest(content)
    return content if key is None else content + tag(key, [content])


def decode_value(content: bytes, key: bytes | None = None, shape: "RowShape | None" = None) -> tuple[bytes, Row]:
    """Whose row a value is, and the row; `BadValue` unless all of it is as it was written, with that key.

    Where a shape is given, the row must have it.
    """
    layout = _layout(_header(content))
    if layout.end != len(content):
        raise BadValue("format", f"it has {len(content):,} bytes, and describes {layout.end:,}")
    view = memoryview(content)
    covered = layout.covered
    if xxhash.xxh3_128_digest(view[:covered]) != view[covered : covered + _CHECKSUM_BYTES]:
        raise BadValue("checksum", "its bytes disagree with its checksum")
    _check_tag(view, layout.tagged, key)
    if shape is not None:
        shape.check(layout)
    row = {name: np.frombuffer(content, dtype, count, start) for name, dtype, count, start in layout.tensors}
    for name, sides in layout.folded:
        row[name] = row[name].reshape(sides)
    return content[layout.identity], row


def peek_value(head: bytes) -> tuple[bytes, bool]:
    """Whose row a value is, and whether it is tagged, as its first bytes say, which nobody checked."""
    layout = _layout(_header(head))
    return head[layout.identity], layout.tagged


@dataclass(frozen=True, slots=True, eq=False)
class Layout:
    """What a header says about the bytes behind it."""

    identity: slice
    tensors: tuple[tuple[str, np.dtype[Any], int, int], ...]  # name, type, items, where the first is
    folded: tuple[tuple[str, tuple[int, ...]], ...]  # names and shapes of those that have other than one dimension
    shapes: Mapping[str, tuple[int, ...]]
    covered: int  # by the checksum
    tagged: bool
    end: int


class RowShape:
    """The columns that a row of a recipe has, with the type and shape of each."""

    def __init__(self, columns: Sequence[Column]) -> None:
        self._columns = {column.name: (column.array_dtype, int(column.ragged), column.shape) for column in columns}
        self._seen: set[Layout] = set()  # that were right

    def check(self, layout: Layout) -> None:
        if layout in self._seen:
            return
        self._compare(layout)
        if len(self._seen) >= KNOWN_LAYOUTS:
            self._seen.clear()
        self._seen.add(layout)

    def _compare(self, layout: Layout) -> None:
        if layout.shapes.keys() != self._columns.keys():
            raise BadValue("shape", f"it has the columns {', '.join(layout.shapes)}")
        for name, found, _, _ in layout.tensors:
            dtype, free, shape = self._columns[name]
            sides = layout.shapes[name]
            if found != dtype or sides[free:] != shape or len(sides) != free + len(shape):
                raise BadValue("shape", f"its column '{name}' is {found} {sides}")


class _HeaderEntry(msgspec.Struct, frozen=True):
    """What stands behind a name in the header; `__metadata__` has only `forebay`, a tensor has all but that."""

    dtype: str = ""
    shape: tuple[int, ...] = ()
    data_offsets: tuple[int, int] = (0, 0)
    forebay: str = ""


_DECODER = msgspec.json.Decoder(dict[str, _HeaderEntry])


@dataclass(frozen=True, slots=True)
class _Place:
    """Where in a value a tensor is."""

    name: str
    dtype: np.dtype[Any]
    shape: tuple[int, ...]
    count: int
    start: int


def _header(content: bytes) -> bytes:
    length = int.from_bytes(content[:8], "little")
    if len(content) < 8 + length or length > MAX_HEADER_BYTES or length % ALIGNMENT:
        raise BadValue("format", f"it does not start as a value of forebay does ({len(content):,} bytes)")
    return content[8 : 8 + length]


@lru_cache(maxsize=KNOWN_LAYOUTS)
def _layout(header: bytes) -> Layout:
    """Images of one size have one header; what it says is found out once."""
    try:
        entries = _DECODER.decode(header)
        if entries.pop("__metadata__").forebay != _METADATA_TEXT:
            raise ValueError("another version of forebay wrote it")
        places = _places(entries, 8 + len(header))
    except (msgspec.DecodeError, ValueError, KeyError, OverflowError, RecursionError) as error:
        raise BadValue("format", f"its header cannot be read ({error})") from error
    tagged = places[-1:] != [] and places[-1].name == _HMAC
    ends = places[-2:] if tagged else places[-1:]
    names = [place.name for place in places[:1] + ends]
    if names != [_IDENTITY, _CHECKSUM, _HMAC][: 2 + tagged] or ends[0].count != _CHECKSUM_BYTES:
        raise BadValue("format", "it does not begin with its identity, or not end with its checksum")
    first, last, tensors = places[0], ends[-1], places[1 : -len(ends)]
    return Layout(
        identity=slice(first.start, first.start + first.count),
        tensors=tuple((place.name, place.dtype, place.count, place.start) for place in tensors),
        folded=tuple((place.name, place.shape) for place in tensors if len(place.shape) != 1),
        shapes={place.name: place.shape for place in tensors},
        covered=ends[0].start,
        tagged=tagged,
        end=last.start + last.count,
    )


def _places(entries: Mapping[str, _HeaderEntry], start: int) -> list[_Place]:
    """Tensors that lie one behind the other."""
    places: list[_Place] = []
    position = 0
    for name, entry in entries.items():
        dtype, (first, stop) = _BY_TAG[entry.dtype], entry.data_offsets
        count = prod(entry.shape)
        # A side of 0 must not hide others that numpy cannot have.
        most = prod([side or 1 for side in entry.shape]) * dtype.itemsize
        sound = len(entry.shape) <= MAX_DIMENSIONS and min(entry.shape, default=0) >= 0 and most < MOST_BYTES
        if not sound or first != position or stop - first != count * dtype.itemsize:
            raise ValueError(f"its tensor '{name}' is described wrongly")
        places.append(_Place(name, dtype, entry.shape, count, start + first))
        position = stop
    return places


def _check_tag(view: memoryview, tagged: bool, key: bytes | None) -> None:
    if key is None:
        if tagged:
            raise BadValue("key-needed", "it is tagged, and no key is in use here")
    elif not tagged:
        raise BadValue("untagged", "it carries no tag, and a key is in use here")
    elif not same_tag(bytes(view[-_HMAC_BYTES:]), tag(key, [view[:-_HMAC_BYTES]])):
        raise BadValue("tag", "its tag was not made with the key in use here")


class TierWarning(UserWarning):
    """Something about a tier that changes no row, but costs time."""


class TierStatistics(msgspec.Struct, frozen=True, kw_only=True):
    """How reading through the tiers went, in this process, since it began to read."""

    l1_hits: int
    l2_hits: int
    misses: int  # made from the source
    l1_values: int
    l1_bytes: int
    l1_evicted: int
    l2_read_bytes: int
    made_bytes: int
    compared: int  # values whose image or sidecar looked different: read again, and decoded only if its bytes changed
    bad: dict[str, int]  # values that were not served, by reason; each was a miss
    failures: dict[str, int]  # samples of which no row can be made, by reason
    written: int = 0  # this and all below: by the writer that all readers of one tier in a process share
    written_bytes: int = 0
    present: int = 0  # another process had written them meanwhile
    dropped: dict[str, int] = {}  # made, but never written, by reason
    lmdb_errors: dict[str, int] = {}  # what LMDB said instead of reading on
    queue_values: int = 0
    queue_bytes: int = 0
    writing_off: str = ""


class RecipeShare(msgspec.Struct, frozen=True, kw_only=True):
    """The values that one recipe made, as one set of libraries decodes."""

    fingerprint: str
    made_with: dict[str, str]
    values: int
    bytes: int


class TierSummary(msgspec.Struct, frozen=True, kw_only=True):
    """What is in a tier."""

    path: str
    values: int
    bytes: int
    tagged: int
    file_bytes: int
    free_bytes: int  # of the file, for values to come
    map_bytes: int
    dead_readers: int  # were found in the table, and let go
    recipes: tuple[RecipeShare, ...]
    unreadable: int  # values whose header says nothing; `forebay tier verify` says more


class BadKept(msgspec.Struct, frozen=True, kw_only=True):
    """A value that is not as it was written."""

    key: str
    reason: str
    detail: str
    sample: str = ""


class TierVerifyReport(msgspec.Struct, frozen=True, kw_only=True):
    """What a check of every value of a tier found."""

    path: str
    values: int
    checked_bytes: int
    seconds: float
    bad: tuple[BadKept, ...]

    @property
    def sound(self) -> bool:
        return not self.bad


class TierClearReport(msgspec.Struct, frozen=True, kw_only=True):
    path: str
    removed: int
    freed_bytes: int
    in_use: bool  # by another process: its file keeps its size, and the room in it is used again


class WarmReport(msgspec.Struct, frozen=True, kw_only=True):
    """What a warming did."""

    path: str
    samples: int
    made: int
    present: int
    failures: dict[str, int]
    examples: dict[str, str]  # the first failure of each reason
    bad: dict[str, int]
    dropped: dict[str, int]
    written_bytes: int
    seconds: float
    left: int = 0  # not tried, as the tier takes no more
    deaths: tuple[str, ...] = ()

    @property
    def complete(self) -> bool:
        """Whether every sample that is an image has its row in the tier."""
        return not (self.dropped or self.left)
