"""What a row in a tier is called: a hash of all that it depends on."""

import hashlib
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any, Protocol, runtime_checkable

from forebay.format.layout import FORMAT_VERSION
from forebay.recipe import Recipe, canonical_json, fingerprint, versions_of
from forebay.source import Part, Sample
from forebay.tiers.samples import Samples
from forebay.tiers.value import Row

KEY_BYTES = 16


@runtime_checkable
class RowRecipe(Recipe, Protocol):
    """A recipe that makes one row of one sample, or raises `ImageUnreadable`."""

    def make_row(self, sample: Sample) -> Row: ...


@dataclass(frozen=True, slots=True)
class Named:
    """A sample as it is now: where it is, all that its row depends on, and the row's key in the tiers."""

    index: int
    part: Part
    identity: Mapping[str, Any]
    text: str  # the identity as a value carries it
    key: bytes


class Names:
    """Names the rows that a recipe makes of samples.

    The versions of the libraries that decode are part of a name: what another version of them kept is not taken for
    what decoding afresh would give.
    """

    def __init__(self, samples: Samples, recipe: RowRecipe) -> None:
        self._samples = samples
        self._made_by = {
            "format_version": FORMAT_VERSION,
            "type": "row",
            "fingerprint": fingerprint(recipe),
            "made_with": versions_of(recipe),
        }

    def named(self, index: int) -> Named:
        """`ImageUnreadable` where the sample's file cannot be looked at."""
        part = self._samples.part(index)
        identity = {**self._made_by, **self._samples.identity(part)}
        text = canonical_json(identity)
        return Named(index, part, identity, text.decode(), key_of(text))


def key_of(identity: bytes) -> bytes:
    return hashlib.blake2b(identity, digest_size=KEY_BYTES).digest()
