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

The keys of rows, and the samples of a source one by one:

    {"fingerprint":…,"made_with":…,"sample":"cats/a.jpg","size":…,"mtime_ns":…,"etag":…,…}    hashed, it is the key
    {"content":…,"etag":…,"read_as":…,"stamp":…}                                              what the sample was

The key holds what makes pixels, and nothing else. Paths are relative to the root of the source, so that a data set
that is moved finds its rows. All else is in the second line: where it differs from what the sample is now (another
ctime, an edited sidecar), the sample is read again, and its pixels are kept if its bytes hash to the same content.
"""

import hashlib
import time
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from functools import lru_cache
from math import prod
from typing import Any, Literal, NamedTuple

import msgspec
import numpy as np
import xxhash

from forebay.columns import DTYPES, Array, Column
from forebay.errors import ImageUnreadable, SourceChanged, SourceInvalid, SourceUnreadable
from forebay.format.layout import FORMAT_VERSION
from forebay.format.tensors import MAX_DIMENSIONS, as_bytes, encode_header, same_tag, tag, tag_of
from forebay.recipe import RowRecipe, canonical_json, versions_of
from forebay.source import Annotated, Failure, Part, Sample, Source, SourceFile, settling_seconds

Row = dict[str, Array]
KEY_BYTES = 16  # of the key of a value; the keys of a tier's two flags are shorter
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
    """Return everything that a row depends on, as stored in its value."""
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
    dead_readers: int  # were found in the table, and released
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


CheckSource = Literal["read", "open"]
# Errors of a sample itself; an error of the disk, or of this process, says nothing about samples.
_OF_ONE_SAMPLE = (FileNotFoundError, NotADirectoryError, PermissionError, SourceUnreadable)
_PLACES = ("root", "patterns", "manifest")  # where a source is; samples are named relative to it
_CHOICES = ("labels", "max_sample_bytes")  # what is read of a file beside its pixels, and whether it is read


class Seen(msgspec.Struct, frozen=True):
    """The sample that a row was made from: its files, how they were read, and a hash of its bytes."""

    stamp: str = ""  # ctime and inode of every file, empty where nobody asked
    etag: str = ""
    read_as: dict[str, Any] = {}
    content: int | None = None

    def is_still(self, now: "Seen") -> bool:
        """Whether nothing shows that the sample, or what is said about it, is another now."""
        return (self.etag, self.read_as) == (now.etag, now.read_as) and now.stamp in ("", self.stamp)


class TierSamples:
    """As many as there were when the source was listed, in its order.

    The list travels with whoever is sent to another process, so that all agree on which sample has which number.
    """

    def __init__(self, source: Source, check: CheckSource = "read", files: Sequence[SourceFile] | None = None) -> None:
        self.source = source
        self.check = check
        self.files = source.files() if files is None else files
        self.root = str(source.describe().get("root", ""))
        self._is_whole = source.unit == "bytes"
        if self._is_whole and source.files_grow:
            raise SourceInvalid(
                f"the samples of a source of kind '{source.describe()['kind']}' cannot be read one by one; use images, "
                f"a manifest of images or Parquet, or build a cache"
            )
        described = {name: value for name, value in source.describe().items() if name not in _PLACES}
        self._read_as = {name: described.pop(name) for name in _CHOICES if name in described}
        self._described = described
        weights = [1 if self._is_whole else source.weight(file) for file in self.files]
        self._ends = None if set(weights) <= {1} else np.cumsum(weights, dtype=np.int64)
        self._count = sum(weights)

    def __len__(self) -> int:
        return self._count

    def file(self, index: int) -> tuple[SourceFile, SourceFile]:
        """The file of a sample as it was listed and as it is now; `ImageUnreadable` where it cannot be looked at."""
        listed = self.files[self._number(index)]
        return listed, listed if self.check == "open" else self._now(listed)

    def stamp(self, file: SourceFile) -> str:
        """What the file system has beside size and mtime (ctime, inode); empty where it is not to be asked."""
        return "" if self.check == "open" else self.source.stamp(file)

    def seen(self, file: SourceFile) -> Seen:
        """A sample as it is now; its bytes are not read."""
        return Seen(self.stamp(file), file.etag, self._read_as)

    def read(self, index: int, file: SourceFile) -> Sample:
        """One sample of the very file that was looked at; `ImageUnreadable` where it cannot be read."""
        times = [self.source.touched_ns(file)]
        times += [int(one.partition(":")[0]) for one in self.stamp(file).split(",") if one]
        _wait_until_settled(max(times))
        found = self._read_once(self._part(index, file))
        if isinstance(found, Failure):
            raise ImageUnreadable(found.reason, f"'{found.sample}': {found.detail}")
        if not self._now(file).same_identity(file):  # what it is now must not be kept under the name of what it was
            why = "changes while it is read" if self.check == "read" else "changed since the source was listed"
            raise SourceChanged(self.root, {file.path: why})
        return found

    def identity(self, index: int, file: SourceFile) -> Mapping[str, Any]:
        """What tells the pixels of a sample from all others, and from what they were before its file changed.

        The etag is left out where it says what describes the file: another sidecar, or line, makes no other pixels.
        """
        try:
            is_beside = self.source.edited_beside(msgspec.structs.replace(file, etag=""), file)
        except _OF_ONE_SAMPLE as error:
            raise _unreadable(file.path, error) from error
        which = {
            "source": self._described,
            "sample": file.path,
            "size": file.size,
            "mtime_ns": file.mtime_ns,
            "etag": "" if is_beside else file.etag,
        }
        return which if self._is_whole else {**which, "row": self._part(index, file).start}

    def _number(self, index: int) -> int:
        """Of a sample's file."""
        return index if self._ends is None else int(np.searchsorted(self._ends, index, side="right"))

    def _part(self, index: int, file: SourceFile) -> Part:
        if self._is_whole:
            return Part(file, 0, file.size)
        number = self._number(index)
        row = 0 if self._ends is None else index - (int(self._ends[number - 1]) if number else 0)
        return Part(file, row, row + 1)

    def _read_once(self, part: Part) -> Sample | Failure:
        try:
            found = list(self.source.read(part))
        except _OF_ONE_SAMPLE as error:
            raise _unreadable(part.file.path, error) from error
        if len(found) != 1:
            raise SourceChanged(self.root, {part.file.path: f"has {len(found)} samples where one was listed"})
        return found[0]

    def _now(self, listed: SourceFile) -> SourceFile:
        try:
            return self.source.look(listed.path)
        except _OF_ONE_SAMPLE as error:
            raise _unreadable(listed.path, error) from error


def _unreadable(path: str, error: Exception) -> ImageUnreadable:
    reason = "not-found" if isinstance(error, FileNotFoundError) else "unreadable"
    return ImageUnreadable(reason, f"'{path}': {error}")


def _wait_until_settled(touched_ns: int) -> None:
    """A file that is written to twice within a step of the clock has the same time twice: let that step pass."""
    now = time.time_ns()
    if touched_ns <= now:  # a time that is still to come says nothing
        time.sleep(settling_seconds(touched_ns, now))


_UNKNOWN = bytes(KEY_BYTES)


class Named(NamedTuple):
    """A sample as it is now: its number, its file, its row's key in the tiers."""

    number: int
    file: SourceFile
    key: bytes
    seen: Seen


class RowNames:
    """Names the rows that a recipe makes of samples.

    The versions of the libraries that decode are part of a name: what another version of them kept is not taken for
    what decoding afresh would give.
    """

    def __init__(self, samples: TierSamples, recipe: RowRecipe) -> None:
        self._samples = samples
        self._made_by = {"fingerprint": made_by(recipe), "made_with": versions_of(recipe)}
        self._keys = bytearray(KEY_BYTES * len(samples))  # of files as they were listed; zeros where not known yet

    def named(self, index: int) -> Named:
        """`ImageUnreadable` where the sample's file cannot be looked at."""
        listed, file = self._samples.file(index)
        seen = self._samples.seen(file)
        if file is not listed and not file.same_identity(listed):
            return Named(index, file, key_of(self.identity(index, file)), seen)
        place = slice(KEY_BYTES * index, KEY_BYTES * (index + 1))
        key = bytes(self._keys[place])
        if key == _UNKNOWN:
            key = key_of(self.identity(index, listed))
            self._keys[place] = key
        return Named(index, file, key, seen)

    def identity(self, index: int, file: SourceFile, seen: Seen | None = None) -> bytes:
        """All that the pixels of a row depend on, and what its sample was."""
        names = {**self._made_by, **self._samples.identity(index, file)}
        return identity_bytes(names, msgspec.to_builtins(seen or Seen()))


def made_by(recipe: RowRecipe) -> str:
    """The fingerprint of what a tier keeps: two recipes that differ in other fields only share rows."""
    return hashlib.sha256(canonical_json(recipe.stored_fields())).hexdigest()


def key_of(identity: bytes) -> bytes:
    return hashlib.blake2b(identity.partition(b"\n")[0], digest_size=KEY_BYTES).digest()


def content_of(sample: Sample) -> int | None:
    """Return a hash of an image's bytes, without its metadata."""
    content = sample.data.content if isinstance(sample.data, Annotated) else sample.data
    return xxhash.xxh3_64_intdigest(content) if isinstance(content, bytes) else None


def seen_in(identity: bytes) -> Seen:
    """The sample that a row was made from; nothing where that cannot be read."""
    try:
        return msgspec.json.decode(identity.partition(b"\n")[2], type=Seen)
    except msgspec.DecodeError:
        return Seen()
