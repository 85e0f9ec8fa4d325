"""Sample identities: 16-byte hashes of the samples a deduplicating segment has, one file per segment."""

from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np

from forebay.cache.plan import Plan
from forebay.cache.segment import Segment
from forebay.columns import Array
from forebay.format import layout
from forebay.format.layout import FORMAT_VERSION
from forebay.format.tensors import seal, unseal
from forebay.store.base import Buffer, Missing, Store, index_corrupt, load_index


@dataclass(frozen=True, slots=True, eq=False)
class Identities:
    """Distinct 16-byte identities in ascending order, as two big-endian numbers each."""

    high: Array  # uint64
    low: Array  # uint64

    def holds(self, high: Array, low: Array) -> Array:
        """Per identity, in rising order, True if it is among these."""
        first, last = (np.searchsorted(self.high, high, side=side) for side in ("left", "right"))
        known = np.zeros(len(high), np.bool_)
        alone = last - first == 1
        known[alone] = self.low[first[alone]] == low[alone]
        for start in np.unique(first[last - first > 1]).tolist():  # the same upper half, by chance or by choice
            wanted = slice(*np.searchsorted(first, [start, start + 1]).tolist())
            known[wanted] = _among(self.low[start : int(last[wanted.start])], low[wanted])
        return known

    def encode(self, segment: int) -> Sequence[Buffer]:
        """The bytes of the file; the last 32 are its digest."""
        metadata = {"format_version": FORMAT_VERSION, "type": "identities", "number": segment}
        return seal(metadata, {"high": self.high, "low": self.low})


def load_identities(store: Store, segment: Segment) -> Identities:
    """The identities that a segment added, checked against the digest that it keeps."""
    key = layout.identities(segment.number, segment.identities)
    try:
        view = load_index(store, key, in_memory=0)  # read through, then mapped
    except Missing as error:
        raise index_corrupt(store.address, key, "it is gone") from error
    _, tensors = unseal(view, store.address, key, "identities")
    if bytes(view[-32:]).hex() != segment.identities:
        raise index_corrupt(store.address, key, "it is not the file that the plan names")
    high, low = (tensors.get(name, np.empty((0, 0))) for name in ("high", "low"))
    if high.dtype != np.uint64 or low.dtype != np.uint64 or high.ndim != 1 or high.shape != low.shape:
        raise index_corrupt(store.address, key, "its two halves are not arrays of one length")
    return Identities(high, low)


def all_identities(store: Store, plan: Plan) -> list[Identities]:
    return [load_identities(store, segment) for segment in plan.segments if segment.identities]


def _among(values: Array, wanted: Array) -> Array:
    at = np.minimum(np.searchsorted(values, wanted), len(values) - 1)
    among: Array = values[at] == wanted
    return among
