"""Block lists, against counting the tokens of every block of the dense mask."""

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st
from row_cases import RowCase, row_cases

from forebay import masks
from forebay.masks.spans import BlockList, BlockLists

block_sizes = st.tuples(st.integers(1, 20), st.integers(1, 20))


def blocks_by_counting(dense: np.ndarray, block_size: tuple[int, int]) -> tuple[np.ndarray, np.ndarray]:
    """Partial and full blocks, `[rows, query_blocks, key_blocks]`; beyond the end nothing is seen."""
    rows, length, _ = dense.shape
    queries, keys = block_size
    q_blocks, kv_blocks = -(-length // queries), -(-length // keys)
    padded = np.zeros((rows, q_blocks * queries, kv_blocks * keys), bool)
    padded[:, :length, :length] = dense
    seen = padded.reshape(rows, q_blocks, queries, kv_blocks, keys).sum(axis=(2, 4))
    full = seen == queries * keys
    return (seen > 0) & ~full, full


def listed_blocks(blocks: BlockList) -> np.ndarray:
    """The list as booleans; fails when an index comes twice, out of order or from outside."""
    rows, row_blocks, columns = blocks.indices.shape
    assert ((blocks.indices >= 0) & (blocks.indices < columns)).all()
    member = np.zeros((rows, row_blocks, columns), bool)
    for row, block in np.ndindex(rows, row_blocks):
        used = blocks.indices[row, block, : blocks.count[row, block]]
        assert (np.diff(used) > 0).all()
        member[row, block, used] = True
    return member


def assert_equal_by_counting(lists: BlockLists, dense: np.ndarray, block_size: tuple[int, int]) -> None:
    partial, full = blocks_by_counting(dense, block_size)
    assert (listed_blocks(lists.kv) == partial).all()
    assert (listed_blocks(lists.full_kv) == full).all()
    assert (listed_blocks(lists.q) == partial.swapaxes(1, 2)).all()
    assert (listed_blocks(lists.full_q) == full.swapaxes(1, 2)).all()


@given(row_cases(), block_sizes, st.sampled_from(["causal", "bidirectional"]), st.none() | st.integers(1, 70))
def test_the_lists_of_spans_are_those_of_the_dense_mask(case: RowCase, block_size, kind, window):
    spans = masks.document_spans(*case, kind)
    if window is not None:
        spans = masks.windowed(spans, window)
    assert_equal_by_counting(masks.span_block_lists(spans, block_size), masks.dense_mask(spans), block_size)


@given(st.integers(1, 60), st.integers(1, 3), block_sizes, st.randoms(use_true_random=False))
def test_the_lists_of_kept_keys_are_those_of_the_dense_mask(length, rows, block_size, random):
    keep = np.array([[random.random() < 0.7 for _ in range(length)] for _ in range(rows)])
    dense = np.broadcast_to(keep[:, None, :], (rows, length, length))
    assert_equal_by_counting(masks.key_block_lists(keep, block_size), dense, block_size)


def test_a_block_holds_at_least_one_token():
    with pytest.raises(ValueError, match=r"block_size must be at least 1, .* \(got \(0, 128\)\)"):
        masks.span_block_lists(masks.causal_spans(3), (0, 128))
