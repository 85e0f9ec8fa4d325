"""Training and validation by a stable hash: a name's side depends on name, seed and fraction only.

    xxh3-64 of the name, with the seed   0 ────────────────── fraction · 2⁶⁴ ────── 2⁶⁴
                                           train                       validation

A name is a sample id, or the number of a chunk (8 bytes, little endian). Names that come later move none that were
there. A larger fraction keeps all of the training side and adds to it.

Within a chunk, the rows that share a document are a group, and groups come in the order of their hashes: the first
ones, up to the fraction of the chunk's rows, are the training side. That reaches the fraction with a single chunk.
"""

from collections.abc import Iterable, Iterator
from fractions import Fraction
from itertools import pairwise

import numpy as np
import xxhash
from numpy.typing import NDArray

from forebay.columns import Array, Ragged


def on_training_side(names: Iterable[bytes | memoryview], fraction: float, seed: int) -> NDArray[np.bool_]:
    """Which names are on the training side.

    >>> on_training_side([b"0.png", b"1.png", b"2.png", b"3.png"], fraction=0.5, seed=0).tolist()
    [False, True, True, False]
    """
    if not 0 < fraction <= 1:
        raise ValueError(f"fraction is {fraction}; the training side is a share above 0 and up to 1")
    if not 0 <= seed < 2**64:
        raise ValueError(f"seed is {seed}; a seed is from 0 to below 2**64")
    last = int(Fraction(fraction) * 2**64) - 1
    hashes = np.fromiter((xxhash.xxh3_64_intdigest(name, seed) for name in names), np.uint64)
    sides: NDArray[np.bool_] = hashes <= np.uint64(last)
    return sides


def chunk_names(chunks: NDArray[np.int64]) -> Iterator[bytes]:
    """The names of chunks, by their numbers."""
    return (int(chunk).to_bytes(8, "little") for chunk in chunks)


def sample_names(ids: Array | Ragged) -> Iterator[memoryview]:
    """The names of samples: the bytes that their rows have in the column of sample ids."""
    values = ids.values if isinstance(ids, Ragged) else ids
    offsets = ids.offsets if isinstance(ids, Ragged) else np.arange(len(ids) + 1)
    item_bytes = values.nbytes // max(1, len(values))
    raw = np.ascontiguousarray(values).reshape(-1).view(np.uint8).data
    edges = (offsets.astype(np.int64) * item_bytes).tolist()
    return (raw[start:stop] for start, stop in pairwise(edges))


def document_groups(documents: Ragged) -> NDArray[np.int64]:
    """The group of every row of a chunk: rows that share a document are in one, called by its lowest document.

    `documents` has pairs (document, first token). Pieces of a long document lie in several rows, and each row may end
    with pieces of others, so groups are the connected components of documents that share a row. Rows without documents
    are alone.

    >>> pairs = [np.array([[0, 0], [2, 0]]), np.array([[1, 0]]), np.array([[2, 9], [3, 0]])]
    >>> document_groups(Ragged.of(pairs, np.dtype("u4"), (2,))).tolist()
    [0, 1, 0]
    """
    names, which = np.unique(documents.values[:, 0].astype(np.int64), return_inverse=True)
    filled = documents.lengths > 0
    firsts = which[documents.offsets[:-1][filled]]
    lowest = _lowest_connected(len(names), np.repeat(firsts, documents.lengths[filled]), which)
    groups = -1 - np.arange(len(documents))
    groups[filled] = names[lowest[firsts]]
    return groups


def _lowest_connected(count: int, left: NDArray[np.int64], right: NDArray[np.int64]) -> NDArray[np.int64]:
    """The lowest of the numbers below `count` that each is connected with, by pairs of `left` and `right`.

    Every round hangs the root of a tree below the lowest root it is paired with, then flattens all trees; two rounds at
    least halve the roots that are left, however long a chain of pairs is.
    """
    roots = np.arange(count)
    while not np.array_equal(one := roots[left], other := roots[right]):
        np.minimum.at(roots, np.maximum(one, other), np.minimum(one, other))
        while not np.array_equal(above := roots[roots], roots):
            roots = above
    return roots


def groups_on_training_side(groups: NDArray[np.int64], chunk: int, fraction: float, seed: int) -> NDArray[np.bool_]:
    """Which rows of a chunk are on the training side, by the groups they are in.

    The group that the fraction falls into is on either side as often as the fraction says, by a hash of the chunk; so
    is a chunk that is one group. Chunk 0 has rows on both sides wherever it has two groups.
    """
    names, member = np.unique(groups, return_inverse=True)
    sizes = np.bincount(member, minlength=len(names))
    own = int(chunk).to_bytes(8, "little")
    hashes = [xxhash.xxh3_64_intdigest(own + int(name).to_bytes(8, "little", signed=True), seed) for name in names]
    order = np.argsort(np.array(hashes, np.uint64), kind="stable")
    ends, target = np.cumsum(sizes[order]), fraction * len(groups)
    trained = int(np.searchsorted(ends, target, side="right"))
    if trained < len(names):
        size = int(sizes[order[trained]])
        trained += xxhash.xxh3_64_intdigest(own + b"border", seed) / 2**64 < (target - int(ends[trained]) + size) / size
    if chunk == 0 and len(names) > 1 and fraction < 1:
        trained = min(max(trained, 1), len(names) - 1)
    chosen = np.zeros(len(names), np.bool_)
    chosen[order[:trained]] = True
    sides: NDArray[np.bool_] = chosen[member]
    return sides
