"""The identities of all samples that a segment of the plan kept, sorted: later samples are held against them.

Only growing reads them. They are mapped and searched in place: what is held in memory does not grow with them.
"""

from dataclasses import dataclass

import numpy as np

from forebay.cache.plan import Plan, Segment
from forebay.columns import Array
from forebay.errors import IndexCorrupt
from forebay.format import layout
from forebay.format.layout import FORMAT_VERSION
from forebay.format.sealed import seal, unseal
from forebay.store.base import Buffer, Missing, Store
from forebay.store.pieces import load_index


@dataclass(frozen=True, slots=True, eq=False)
class Identities:
    """16 bytes each, read as two numbers, most significant first; in rising order, none twice."""

    high: Array  # uint64
    low: Array  # uint64

    def __len__(self) -> int:
        return len(self.high)

    def holds(self, high: Array, low: Array) -> Array:
        """Which of some identities, given in rising order, are among these."""
        first, last = (np.searchsorted(self.high, high, side=side) for side in ("left", "right"))
        found = np.zeros(len(high), np.bool_)
        alone = last - first == 1
        found[alone] = self.low[first[alone]] == low[alone]
        for start in np.unique(first[last - first > 1]).tolist():  # the same upper half, by chance or by choice
            asked = slice(*np.searchsorted(first, [start, start + 1]).tolist())
            found[asked] = _among(self.low[start : int(last[asked.start])], low[asked])
        return found

    def encode(self, segment: int) -> list[Buffer]:
        """The bytes of the file; the last 32 are its digest."""
        metadata = {"format_version": FORMAT_VERSION, "type": "identities", "number": segment}
        return seal(metadata, {"high": self.high, "low": self.low})


def load_identities(store: Store, segment: Segment) -> Identities:
    """The identities that a segment added, checked against the digest that it keeps."""
    key = layout.identities(segment.number, segment.identities)
    try:
        view = load_index(store, key, in_memory=0)  # read through, then mapped
    except Missing as error:
        raise IndexCorrupt(store.address, key, "it is gone") from error
    _, tensors = unseal(view, store.address, key, "identities")
    if bytes(view[-32:]).hex() != segment.identities:
        raise IndexCorrupt(store.address, key, "it is not the file that the plan names")
    high, low = (tensors.get(name, np.empty((0, 0))) for name in ("high", "low"))
    if high.dtype != np.uint64 or low.dtype != np.uint64 or high.ndim != 1 or high.shape != low.shape:
        raise IndexCorrupt(store.address, key, "its two halves are not arrays of one length")
    return Identities(high, low)


def kept_identities(store: Store, plan: Plan) -> list[Identities]:
    return [load_identities(store, segment) for segment in plan.segments]


def _among(values: Array, asked: Array) -> Array:
    at = np.minimum(np.searchsorted(values, asked), len(values) - 1)
    among: Array = values[at] == asked
    return among
