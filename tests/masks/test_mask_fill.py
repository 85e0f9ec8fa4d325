"""Filling arrays that are there gives what deriving new ones gives."""

from typing import Any

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from forebay import masks
from forebay.masks.documents import fill_document_ids, fill_packed


@st.composite
def batches(draw: st.DrawFn) -> tuple[np.ndarray, np.ndarray]:
    """Tokens and seq_lens of some packed rows; documents of no tokens, full rows and empty ones among them."""
    width = draw(st.integers(1, 12))
    rows = draw(
        st.lists(st.lists(st.integers(0, width), max_size=5).filter(lambda r: sum(r) <= width), min_size=1, max_size=5)
    )
    seq_lens = np.zeros((len(rows), max([1, *map(len, rows)])), np.int32)
    for number, lengths in enumerate(rows):
        seq_lens[number, : len(lengths)] = lengths
    tokens = np.arange(len(rows) * width, dtype=np.uint16).reshape(len(rows), width)
    return tokens, seq_lens


@given(case=batches())
@pytest.mark.parametrize("style", ["shifted", "unshifted"])
def test_labels(case: tuple[np.ndarray, np.ndarray], style: Any) -> None:
    tokens, seq_lens = case
    out = np.full(tokens.shape, 77, np.int64)
    fill_packed(tokens, seq_lens, style, labels=out)
    assert np.array_equal(out, masks.labels(tokens, seq_lens, style))


@given(case=batches())
def test_positions_and_document_ids(case: tuple[np.ndarray, np.ndarray]) -> None:
    tokens, seq_lens = case
    width = tokens.shape[1]
    whole = masks.whole_lengths(seq_lens, width)
    positions, ids = np.empty(tokens.shape, np.int64), np.empty(tokens.shape, np.int32)
    fill_packed(tokens, seq_lens, "shifted", positions=positions)
    fill_document_ids(ids, whole)
    assert np.array_equal(positions, masks.positions(seq_lens, width))
    assert np.array_equal(ids, masks.document_ids(seq_lens, width))
