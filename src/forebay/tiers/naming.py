"""What a row in a tier is called: a hash of all that its pixels and metadata depend on.

    {"fingerprint":…,"made_with":…,"sample":"cats/a.jpg","size":…,"mtime_ns":…,"etag":…,…}    hashed, it is the key
    {"digest":…,"stamp":…}                                                                    what the file was

Paths are relative to the root of the source, so that a data set that is moved finds its rows. The stamp (ctime and
inode) is not part of the key: where it differs from that of the file as it is now, the digest of its bytes decides.
"""

import hashlib
from collections.abc import Mapping, Sequence
from typing import Any, NamedTuple, Protocol, runtime_checkable

import msgspec

from forebay.columns import Column
from forebay.recipe import Recipe, canonical_json, versions_of
from forebay.source import Sample, SourceFile
from forebay.tiers.samples import Samples
from forebay.tiers.value import KEY_BYTES, Row, identity_bytes

_UNKNOWN = bytes(KEY_BYTES)


@runtime_checkable
class RowRecipe(Recipe, Protocol):
    """A recipe that makes one row of one sample, or raises `ImageUnreadable`.

    A tier keeps what `make_stored` makes, under a key of `stored_fields`, and `read_stored` makes the row of it: what
    the other fields of the recipe decide (tags) may change without a miss.
    """

    def make_row(self, sample: Sample) -> Row: ...

    def stored_fields(self) -> Mapping[str, Any]: ...

    def stored_columns(self) -> Sequence[Column]: ...

    def make_stored(self, sample: Sample) -> Row: ...

    def read_stored(self, stored: Row) -> Row: ...


class Named(NamedTuple):
    """A sample as it is now: its number, its file, its row's key in the tiers, the stamp of the file."""

    number: int
    file: SourceFile
    key: bytes
    stamp: str = ""


class Seen(msgspec.Struct, frozen=True):
    """The file that a row was made from: its stamp, and a hash of its bytes where the source can tell."""

    stamp: str = ""
    digest: int | None = None


class Names:
    """Names the rows that a recipe makes of samples.

    The versions of the libraries that decode are part of a name: what another version of them kept is not taken for
    what decoding afresh would give.
    """

    def __init__(self, samples: Samples, recipe: RowRecipe) -> None:
        self._samples = samples
        self._made_by = {"fingerprint": made_by(recipe), "made_with": versions_of(recipe)}
        self._keys = bytearray(KEY_BYTES * len(samples))  # of files as they were listed; zeros where not known yet

    def named(self, index: int) -> Named:
        """`ImageUnreadable` where the sample's file cannot be looked at."""
        listed, file = self._samples.file(index)
        stamp = self._samples.stamp(file)
        if file is not listed and not file.same_identity(listed):
            return Named(index, file, key_of(self.identity(index, file)), stamp)
        place = slice(KEY_BYTES * index, KEY_BYTES * (index + 1))
        key = bytes(self._keys[place])
        if key == _UNKNOWN:
            key = key_of(self.identity(index, listed))
            self._keys[place] = key
        return Named(index, file, key, stamp)

    def identity(self, index: int, file: SourceFile, seen: Seen | None = None) -> bytes:
        """All that a row depends on, and what its file was."""
        names = {**self._made_by, **self._samples.identity(index, file)}
        return identity_bytes(names, msgspec.to_builtins(seen or Seen()))


def made_by(recipe: RowRecipe) -> str:
    """The fingerprint of what a tier keeps: two recipes that differ in other fields only share rows."""
    return hashlib.sha256(canonical_json(recipe.stored_fields())).hexdigest()


def key_of(identity: bytes) -> bytes:
    return hashlib.blake2b(identity.partition(b"\n")[0], digest_size=KEY_BYTES).digest()


def seen_in(identity: bytes) -> Seen:
    """What the file was that a row was made from; nothing where that cannot be read."""
    try:
        return msgspec.json.decode(identity.partition(b"\n")[2], type=Seen)
    except msgspec.DecodeError:
        return Seen()
