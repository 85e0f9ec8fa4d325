"""Packed rows for property tests: empty rows, one-token documents, full rows, and anything between."""

from collections.abc import Sequence
from typing import NamedTuple

import numpy as np
from hypothesis import strategies as st
from numpy.typing import NDArray


class RowCase(NamedTuple):
    seq_lens: NDArray[np.int32]  # (rows, max_documents), zero-padded
    sequence_length: int


def zero_padded(rows: Sequence[Sequence[int]]) -> NDArray[np.int32]:
    padded = np.zeros((len(rows), max(1, *map(len, rows))), np.int32)
    for row, lengths in enumerate(rows):
        padded[row, : len(lengths)] = lengths
    return padded


def row_lengths(sequence_length: int) -> st.SearchStrategy[list[int]]:
    cuts = st.lists(st.integers(1, sequence_length), unique=True, max_size=12).map(sorted)
    between = cuts.map(lambda places: np.diff([0, *places]).tolist())
    return st.one_of(
        st.just([]),
        st.just([1] * min(sequence_length, 40)),
        st.just([sequence_length]),
        between,
        cuts.map(lambda places: np.diff(sorted({0, *places, sequence_length})).tolist()),
    )


@st.composite
def row_cases(draw: st.DrawFn, longest: int = 64, most_rows: int = 3) -> RowCase:
    sequence_length = draw(st.integers(1, longest))
    rows = draw(st.lists(row_lengths(sequence_length), min_size=1, max_size=most_rows))
    return RowCase(zero_padded(rows), sequence_length)
