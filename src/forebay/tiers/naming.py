"""What a row in a tier is called: a hash of all that it depends on."""

import hashlib
from typing import NamedTuple, Protocol, runtime_checkable

from forebay.recipe import Recipe, fingerprint, versions_of
from forebay.source import Sample, SourceFile
from forebay.tiers.files import KEY_BYTES
from forebay.tiers.samples import Samples
from forebay.tiers.value import Row, identity_bytes

_UNKNOWN = bytes(KEY_BYTES)


@runtime_checkable
class RowRecipe(Recipe, Protocol):
    """A recipe that makes one row of one sample, or raises `ImageUnreadable`."""

    def make_row(self, sample: Sample) -> Row: ...


class Named(NamedTuple):
    """A sample as it is now: its number, its file, and its row's key in the tiers."""

    number: int
    file: SourceFile
    key: bytes


class Names:
    """Names the rows that a recipe makes of samples.

    The versions of the libraries that decode are part of a name: what another version of them kept is not taken for
    what decoding afresh would give.
    """

    def __init__(self, samples: Samples, recipe: RowRecipe) -> None:
        self._samples = samples
        self._made_by = {"fingerprint": fingerprint(recipe), "made_with": versions_of(recipe)}
        self._keys = bytearray(KEY_BYTES * len(samples))  # of files as they were listed; zeros where not known yet

    def named(self, index: int) -> Named:
        """`ImageUnreadable` where the sample's file cannot be looked at."""
        listed, file = self._samples.file(index)
        if file is not listed and not file.same_identity(listed):
            return Named(index, file, key_of(self.identity(index, file)))
        place = slice(KEY_BYTES * index, KEY_BYTES * (index + 1))
        key = bytes(self._keys[place])
        if key == _UNKNOWN:
            key = key_of(self.identity(index, listed))
            self._keys[place] = key
        return Named(index, file, key)

    def identity(self, index: int, file: SourceFile) -> bytes:
        """All that a row depends on."""
        return identity_bytes({**self._made_by, **self._samples.identity(index, file)})


def key_of(identity: bytes) -> bytes:
    return hashlib.blake2b(identity, digest_size=KEY_BYTES).digest()
