"""Packed batches for the tests of the torch room, small ones by the thousand and a few as long as 4096."""

from typing import NamedTuple

import numpy as np
import torch
from hypothesis import strategies as st
from torch import Tensor


class PackedBatch(NamedTuple):
    seq_lens: Tensor  # (rows, max_documents) int32, zero-padded, as the loader yields them
    sequence_length: int


def batch(rows: list[list[int]], sequence_length: int) -> PackedBatch:
    seq_lens = torch.zeros(len(rows), max(1, *map(len, rows)), dtype=torch.int32)
    for row, lengths in enumerate(rows):
        seq_lens[row, : len(lengths)] = torch.tensor(lengths, dtype=torch.int32)
    return PackedBatch(seq_lens, sequence_length)


def random_batch(rows: int, sequence_length: int, seed: int, mean_length: int = 300) -> PackedBatch:
    """Rows of documents of random length with a short padding tail, like packed text."""
    generator = np.random.default_rng(seed)
    lengths = []
    for _ in range(rows):
        cuts = generator.integers(1, sequence_length, max(1, sequence_length // mean_length))
        lengths.append(np.diff(sorted({0, *cuts.tolist()})).tolist())
    return batch(lengths, sequence_length)


def row_lengths(sequence_length: int) -> st.SearchStrategy[list[int]]:
    cuts = st.lists(st.integers(1, sequence_length), unique=True, max_size=10).map(sorted)
    return st.one_of(
        st.just([]),  # nothing but padding
        st.just([1] * min(sequence_length, 30)),  # one-token documents
        st.just([sequence_length]),  # a full row
        cuts.map(lambda places: np.diff([0, *places]).tolist()),
        cuts.map(lambda places: np.diff(sorted({0, *places, sequence_length})).tolist()),
    )


@st.composite
def packed_batches(draw: st.DrawFn, longest: int = 4096) -> PackedBatch:
    sequence_length = draw(st.integers(1, 300) | st.integers(1, longest))
    rows = draw(st.lists(row_lengths(sequence_length), min_size=1, max_size=3))
    return batch(rows, sequence_length)
