"""Training and validation by a stable hash: a name's side depends on name, seed and fraction only.

    xxh3-64 of the name, with the seed   0 ────────────────── fraction · 2⁶⁴ ────── 2⁶⁴
                                           train                       validation

A name is a sample id, or the number of a chunk (8 bytes, little endian). Names that come later move none that were
there. A larger fraction keeps all of the training side and adds to it.
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
